"""An SSE answer that outlives its connection: cut anywhere, at any gateway, nothing is lost and nothing comes twice."""

import asyncio
import itertools
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import openai
import pytest
from aiohttp import ClientPayloadError

from gateway import keys
from gateway.auth import ApiKeys, Caller
from streamkv.protocol import WIRE_VERSION, HandedOver, Hello, Ready
from tests.support.running_gateway import (
    VOCAB_SIZE,
    RunningGateway,
    eventually,
    eventually_async,
    running_gateway,
    small_tokenizer,
)
from tests.support.scripted_engine import RunningEngine, serving
from tests.support.scripted_executor import ScriptedExecutor
from tests.support.speaking_executor import SpeakingExecutor
from tests.support.tool_models import tool_model
from tests.support.wire_gateway import WireGateway

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = list(range(30, 50))
MESSAGES = [{"role": "user", "content": "one two"}]
WHOLE = {"stream": True, "attach_grace_s": 30, "stream_options": {"include_usage": True}}
CALL = '{"name": "get_weather", "arguments": {"city": "Zürich 😀", "days": 2}}'
SPOKEN = f"<think>Hmm, 日本 stop s</think>Let me look: é😀.\n<tool_call>\n{CALL}\n</tool_call>"
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]


def executor(**options: Any) -> ScriptedExecutor:
    return ScriptedExecutor(vocab_size=VOCAB_SIZE, **options)


@contextmanager
def held(endpoint: str) -> Iterator[tuple[RunningEngine, Callable[[], None]]]:
    """An engine whose first step does not end before it is released, and what releases it."""
    released = threading.Event()
    with serving(executor(block_at_step={0: 60.0}, sleep=released.wait), endpoint=endpoint) as engine:
        try:
            yield engine, released.set
        finally:
            released.set()


def text_of(num_tokens: int) -> str:
    return small_tokenizer().decode(executor().expected_tokens(PROMPT, num_tokens))


def completion(max_tokens: int = 20, **more: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, **WHOLE, **more}


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    with serving(executor()) as engine:
        async with running_gateway(engine.endpoint) as running:
            yield running


@pytest.fixture
async def slow() -> AsyncIterator[RunningGateway]:
    with serving(executor(step_s=0.005)) as engine:
        async with running_gateway(engine.endpoint) as running:
            yield running


@dataclass
class Choice:
    num_roles: int = 0
    content: str = ""
    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    calls: list[tuple[int, str, str]] = field(default_factory=list)
    arguments: str = ""
    ends: list[str] = field(default_factory=list)


def received(raw: bytes) -> tuple[str, list[str]]:
    """What a client makes of the bytes that came: the last event's id, and the data of each whole event."""
    last_id = event_id = ""
    data: list[str] = []
    lines: list[str] = []
    for line in raw.decode("utf-8", "ignore").split("\n")[:-1]:
        if line.startswith("data: "):
            lines.append(line[6:])
        elif line.startswith("id: "):
            event_id = line[4:]
        elif not line and lines:
            data.append("\n".join(lines))
            lines, last_id = [], event_id
        else:
            assert not line or line.startswith(":"), line
    return last_id, data


def joined(data: list[str]) -> dict[str, Any]:
    """All that an answer says, whatever pieces it came in, but for what it found in the cache."""
    told: dict[str, Any] = {"done": data.count("[DONE]"), "usage": [], "heads": set(), "choices": {}}
    for event in (json.loads(piece) for piece in data if piece != "[DONE]"):
        told["heads"].add((event["id"], event["created"], event["model"], event["object"]))
        if not event["choices"]:
            told["usage"].append({**event["usage"], "prompt_tokens_details": None})
        for choice in event["choices"]:
            found = told["choices"].setdefault(choice["index"], Choice())
            delta = choice.get("delta", {"content": choice.get("text")})
            logprobs = choice["logprobs"] or {}
            found.num_roles += "role" in delta
            found.content += delta.get("content") or ""
            found.reasoning += delta.get("reasoning") or ""
            found.token_ids += choice.get("token_ids", [])
            found.logprobs += logprobs.get("content") or logprobs.get("tokens") or []
            found.prompt_ids += choice.get("prompt_token_ids") or event.get("prompt_token_ids") or []
            found.ends += [choice["finish_reason"]] * (choice["finish_reason"] is not None)
            for call in delta.get("tool_calls", []):
                found.calls += [(call["index"], call["id"], call["function"]["name"])] if "id" in call else []
                found.arguments += call["function"]["arguments"]
    return told


async def raw_answer(gateway: RunningGateway, path: str, body: Mapping[str, Any], **headers: str) -> bytes:
    async with gateway.session.post(gateway.url + path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        return await response.read()


def stream_url(gateway: RunningGateway, event_id: str) -> str:
    return f"{gateway.url}/v1/streams/{event_id.partition('.')[0]}"


async def rest(gateway: RunningGateway, event_id: str, **headers: str) -> bytes:
    """What GET brings behind an event."""
    async with gateway.session.get(
        stream_url(gateway, event_id), headers={"Last-Event-ID": event_id, **headers}
    ) as response:
        assert response.status in (200, 204), await response.text()
        return await response.read()


async def check_every_cut(gateway: RunningGateway, path: str, body: Mapping[str, Any], other: RunningGateway) -> bytes:
    """Cut at each byte of an answer that was read whole; go on at `other` from the last event that was there.

    A cut inside an event leaves its client with what the cut before the event leaves it with, so there is one
    reconnection for all of these.
    """
    async with gateway.session.post(gateway.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        stream_id = response.headers["X-Stream-Id"]
        raw = await response.read()
    assert raw.count(b"\nid: ") + 1 == raw.count(b"\ndata: ") == raw.count(b"\n\n")
    last_id, data = received(raw)
    unbroken = joined(data)
    assert unbroken["done"] == 1 and last_id.endswith(",d")
    nothing = ",".join("-" * body.get("n", 1))
    start = 0
    for end in [*(found.end() for found in re.finditer(rb"\n\n", raw)), len(raw) + 1]:
        event_id, had = received(raw[:start])
        assert all(received(raw[:cut]) == (event_id, had) for cut in {start, start + 1, (start + end) // 2, end - 1})
        again = received(await rest(other, event_id or f"{stream_id}.{nothing}"))[1]
        assert joined(had + again) == unbroken, (start, event_id)
        start = end
    return raw


BODIES: list[tuple[str, dict[str, Any]]] = [
    (TEXT, completion()),
    (TEXT, completion(n=3, temperature=0.9, seed=5)),
    (TEXT, completion(return_token_ids=True, logprobs=2)),
    (TEXT, completion(echo=True, n=2, seed=1, stream_options={"include_usage": True, "continuous_usage_stats": True})),
    (TEXT, completion(stop=[text_of(20)[-3:] + "never", text_of(25)[-6:]], max_tokens=40)),
    (TEXT, completion(stop=text_of(20)[-2:] + "never there")),
    (CHAT, {"messages": MESSAGES, "max_tokens": 12, "temperature": 0.8, "seed": 3, "n": 2, **WHOLE}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 9, "logprobs": True, "top_logprobs": 1, "temperature": 0, **WHOLE}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 9, "return_token_ids": True, "n": 2, "seed": 8, **WHOLE}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 9, "prompt_logprobs": 2, "n": 2, "seed": 8, **WHOLE}),
    (TEXT, completion(9, prompt_logprobs=2, n=2, seed=8)),
]


@pytest.mark.parametrize(
    "number",
    [number if number in (1, 4, 9) else pytest.param(number, marks=pytest.mark.long) for number in range(len(BODIES))],
)
async def test_cut_at_every_byte_nothing_is_lost_or_doubled(number: int) -> None:
    path, body = BODIES[number]
    with serving(executor()) as engine:
        async with running_gateway(engine.endpoint) as one, running_gateway(engine.endpoint) as two:
            await check_every_cut(one, path, body, two)


@pytest.mark.parametrize("max_tokens", [pytest.param(400, marks=pytest.mark.long), 37])
async def test_thoughts_and_calls_are_cut_at_every_byte_too(max_tokens: int) -> None:
    tokenizer = tool_model("hermes")
    body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": max_tokens, **WHOLE}
    with serving(SpeakingExecutor(tokenizer, SPOKEN)) as engine:
        async with (
            running_gateway(engine.endpoint, lambda: tokenizer) as one,
            running_gateway(engine.endpoint, lambda: tokenizer) as two,
        ):
            raw = await check_every_cut(one, CHAT, body, two)
            assert max_tokens < 400 or b'"tool_calls":[' in raw


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3, 4, 5))])
async def test_a_live_answer_is_cut_again_and_again(slow: RunningGateway, seed: int) -> None:
    body = [completion(120), completion(60, n=2, temperature=0.9, seed=7)][seed % 2]
    unbroken = joined(received(await raw_answer(slow, TEXT, {**body, "attach_grace_s": 0}))[1])
    had: list[str] = []
    event_id = ""
    sizes = itertools.cycle([700 + 91 * seed, 3000, 41, 1200 + seed])
    num_cuts = 0
    while "[DONE]" not in had:
        size = next(sizes)
        opening = (
            slow.session.post(slow.url + TEXT, json=body, headers={"Last-Event-ID": event_id} if event_id else {})
            if num_cuts % 2 == 0
            else slow.session.get(stream_url(slow, event_id), headers={"Last-Event-ID": event_id})
        )
        raw = b""
        async with opening as response:
            assert response.status == 200, await response.text()
            event_id = event_id or response.headers["X-Stream-Id"] + "." + ",".join("-" * body.get("n", 1))
            while len(raw) < size and (piece := await response.content.read(size - len(raw))):
                raw += piece
            response.close()
        last_id, data = received(raw)
        event_id = last_id or event_id
        had += data
        num_cuts += 1
    again = joined(had)
    for told in (again, unbroken):
        assert len(told.pop("heads")) == 1
    assert num_cuts > 5 and again == unbroken
    await eventually(lambda: slow.app[keys.GENERATION].num_live == 0)


async def test_the_answer_keeps_its_form_wherever_it_goes_on() -> None:
    with serving(executor(step_s=0.005)) as engine:
        async with running_gateway(engine.endpoint) as one, running_gateway(engine.endpoint) as two:
            body = {"messages": MESSAGES, "max_tokens": 60, "request_id": "mine", **WHOLE}
            async with one.session.post(one.url + CHAT, json=body) as response:
                raw = await response.content.readuntil(b"\n\n") + await response.content.readuntil(b"\n\n")
                event_id, first = received(raw)
                taken = received(await rest(two, event_id))[1]
                gone = received(await response.read())[1]
    told = joined(first + taken)
    assert len(told["heads"]) == 1 and told["done"] == 1 and len(told["usage"]) == 1
    assert next(iter(told["heads"]))[0] == "chatcmpl-mine"
    assert told["usage"][0]["completion_tokens"] == 60 and told["choices"][0].ends == ["length"]
    # Who had it is told, and could take it back with what it has
    ended = joined(first + gone)
    assert ended["choices"][0].ends == ["abort"] and ended["done"] == 1


async def test_a_takeover_leaves_the_first_client_a_cursor_to_take_it_back_with(slow: RunningGateway) -> None:
    body = completion(150)
    async with slow.session.post(slow.url + TEXT, json=body) as response:
        first = await response.content.readuntil(b"\n\n")
        event_id, _ = received(first)
        async with slow.session.get(f"{slow.url}/v1/streams/{event_id.partition('.')[0]}") as second:
            await second.content.readuntil(b"\n\n")
            first += await response.read()
            last_id, had = received(first)
            assert had[-1] == "[DONE]" and not last_id.endswith(("d", "e"))
            again = received(await rest(slow, last_id))[1]
    texts = [
        event["choices"][0]["text"]
        for event in map(json.loads, [d for d in had + again if d != "[DONE]"])
        if event["choices"]
    ]
    assert "".join(texts) == text_of(150)


async def test_another_gateway_takes_it_up_after_the_first_has_died() -> None:
    with serving(executor(step_s=0.005), gateway_timeout_s=0.6) as engine:
        async with running_gateway(engine.endpoint) as two:
            async with (
                running_gateway(engine.endpoint) as one,
                one.session.post(one.url + TEXT, json=completion(400)) as response,
            ):
                raw = await response.content.readuntil(b"\n\n")
                event_id, first = received(raw)
                # It dies without a word: neither engine nor client is told anything
                one.app[keys.ENGINE]._socket.close()
                assert response.connection is not None and response.connection.transport is not None
                response.connection.transport.abort()
            await asyncio.sleep(0.8)
            again = received(await rest(two, event_id))[1]
    told = joined(first + again)
    assert told["choices"][0].content == text_of(400) and told["usage"][0]["completion_tokens"] == 400


async def test_a_drain_breaks_an_attachable_stream_off_and_it_goes_on_elsewhere() -> None:
    with serving(executor(step_s=0.005)) as engine:
        async with running_gateway(engine.endpoint) as two:
            async with (
                running_gateway(engine.endpoint, shutdown_grace_s=0) as one,
                one.session.post(one.url + TEXT, json=completion(300)) as response,
            ):
                raw = await response.content.readuntil(b"\n\n")
                closing = asyncio.create_task(one.server.close())
                with pytest.raises(ClientPayloadError):  # by its framing, too, the answer is not whole
                    async for piece in response.content.iter_any():
                        raw += piece
                await closing
            event_id, first = received(raw)
            assert "[DONE]" not in first and joined(first)["choices"][0].ends == []
            again = received(await rest(two, event_id))[1]
    assert joined(first + again)["choices"][0].content == text_of(300)


async def test_it_survives_its_engine_while_nobody_reads(slow: RunningGateway) -> None:
    with serving(executor(step_s=0.005)) as engine:
        async with running_gateway(engine.endpoint) as gateway:
            async with gateway.session.post(gateway.url + TEXT, json=completion(200)) as response:
                event_id, first = received(await response.content.readuntil(b"\n\n"))
                response.close()
            await asyncio.sleep(0.05)
            engine.stop()
            with serving(executor(), endpoint=engine.endpoint):
                await gateway.wait_ready()
                await eventually_async(lambda: _has(gateway, event_id))
                again = received(await rest(gateway, event_id))[1]
    told = joined(first + again)
    assert told["choices"][0].content == text_of(200) and told["choices"][0].ends == ["length"]


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"stop": text_of(60)[-4:]}, {"logprobs": 1, "echo": True}], ids=str)
async def test_what_had_ended_before_its_client_came_back_outlives_its_engine(more: dict[str, Any]) -> None:
    with serving(executor(step_s=0.005)) as engine:
        async with running_gateway(engine.endpoint) as gateway, running_gateway(engine.endpoint) as other:
            unbroken = joined(received(await raw_answer(gateway, TEXT, completion(80, attach_grace_s=0, **more)))[1])
            async with gateway.session.post(gateway.url + TEXT, json=completion(80, **more)) as response:
                event_id, first = received(await response.content.readuntil(b"\n\n"))
                response.close()
            await eventually(lambda: gateway.app[keys.GENERATION].num_live == 0)
            engine.stop()
            with serving(executor(), endpoint=engine.endpoint):
                await gateway.wait_ready()
                again = received(await rest(gateway, event_id))[1]
                told = joined(first + again)
                assert joined(first + received(await rest(gateway, event_id))[1]) == told, "and once more"
                await other.wait_ready()
                await eventually_async(lambda: _has(other, event_id))
                assert joined(first + received(await rest(other, event_id))[1]) == told, "and elsewhere"
                assert len(told.pop("heads")) == len(unbroken.pop("heads")) == 1
                assert told == unbroken


async def test_a_new_engine_says_to_come_again_until_every_gateway_has_brought_its_streams() -> None:
    with serving(executor()) as engine:
        async with running_gateway(engine.endpoint) as gateway:
            name = "0" * 32
            assert await answer_of_status(gateway, name) == 404, "no engine was here before"
            engine.stop()
            with serving(executor(), endpoint=engine.endpoint) as second:
                await gateway.wait_ready()
                async with gateway.session.get(f"{gateway.url}/v1/streams/{name}") as response:
                    assert response.status == 503 and int(response.headers["Retry-After"]) >= 1
                    assert (await response.json())["error"]["code"] == "not_ready"

                async def is_unknown() -> bool:
                    return await answer_of_status(gateway, name) == 404

                # It has listened so long that every gateway that lives has come; one of them is not through
                with WireGateway(second.endpoint, say_hello=False) as slow:
                    slow.send(Hello(WIRE_VERSION, slow.gateway_id, epoch=7))
                    slow.wait_for(Ready)
                    second.loop._succession._until_s = 0.0
                    assert not await is_unknown()
                    slow.send(HandedOver())
                    await eventually_async(is_unknown)


async def test_the_engines_longest_grace_period_holds_at_every_gateway() -> None:
    with serving(executor(), max_attach_grace_s=0.2) as engine:
        async with running_gateway(engine.endpoint) as gateway:
            last_id, _ = received(await raw_answer(gateway, TEXT, completion()))
            name = last_id.partition(".")[0]
            assert await answer_of_status(gateway, name) == 200
            kept = gateway.app[keys.ENGINE].ended
            keep = kept.for_next_engine(bytes.fromhex(name))
            assert keep is not None and keep.grace_s <= 0.2
            await eventually(lambda: not kept.stream_ids)

            async def is_unknown() -> bool:
                return await answer_of_status(gateway, name) == 404

            await eventually_async(is_unknown)


async def test_who_waits_for_an_engine_keeps_the_stream_alive_meanwhile() -> None:
    """Longer than its grace period, since its client is there."""
    with serving(executor(step_s=0.005)) as engine:
        async with running_gateway(engine.endpoint) as gateway:
            async with gateway.session.post(gateway.url + TEXT, json=completion(200, attach_grace_s=0.4)) as response:
                event_id, first = received(await response.content.readuntil(b"\n\n"))
                response.close()
            engine.stop()
            await eventually(lambda: not gateway.app[keys.ENGINE].is_ready)
            waiting = asyncio.create_task(rest(gateway, event_id))
            await asyncio.sleep(1.2)
            with serving(executor(), endpoint=engine.endpoint):
                again = received(await waiting)[1]
    assert joined(first + again)["choices"][0].content == text_of(200)


async def test_of_two_who_come_at_once_each_is_served_in_turn(slow: RunningGateway) -> None:
    async with slow.session.post(slow.url + TEXT, json=completion(150)) as response:
        event_id, first = received(await response.content.readuntil(b"\n\n"))
        answers = await asyncio.gather(*(rest(slow, event_id) for _ in range(4)))
    told = [joined(first + received(raw)[1]) for raw in answers]
    assert sorted(found["choices"][0].ends for found in told) == [["abort"]] * 3 + [["length"]]
    (whole,) = [found["choices"][0] for found in told if found["choices"][0].ends == ["length"]]
    assert whole.content == text_of(150)
    assert all(found["done"] == 1 and text_of(150).startswith(found["choices"][0].content) for found in told)


async def test_events_are_framed_right_where_their_numbers_grow_a_digit() -> None:
    with serving(executor(max_model_len=4096)) as engine:
        async with running_gateway(engine.endpoint, served_model_name="50 %d %b") as gateway:
            raw = await raw_answer(gateway, TEXT, completion(1100))
            name = received(raw)[0].partition(".")[0]
            ids = [int(number) for number in re.findall(rf"id: {name}\.(\d+)\n".encode(), raw)]
            assert ids == sorted(set(ids)) and ids[-1] >= 1099
            assert joined(received(raw)[1])["choices"][0].content == text_of(1100)
            assert {event["model"] for event in map(json.loads, received(raw)[1][:-1])} == {"50 %d %b"}
            for cursor in (0, 8, 9, 10, 98, 99, 999, 1000):
                again = joined(received(await rest(gateway, f"{name}.{cursor}"))[1])
                assert text_of(1100).endswith(again["choices"][0].content)


async def _has(gateway: RunningGateway, event_id: str) -> bool:
    url = f"{gateway.url}/v1/streams/{event_id.partition('.')[0]}?cursor=999999"
    async with gateway.session.get(url) as response:
        return response.status == 400


async def _can_tell(gateway: RunningGateway, event_id: str) -> bool:
    return await answer_of_status(gateway, event_id.partition(".")[0]) == 200


async def answer_of(gateway: RunningGateway, url: str, **headers: str) -> tuple[int, dict[str, Any]]:
    async with gateway.session.get(gateway.url + url, headers=headers) as response:
        return response.status, json.loads(await response.read() or b"{}").get("error", {})


async def test_wrong_cursors_are_400s_that_say_what_is_wrong(slow: RunningGateway) -> None:
    async with slow.session.post(slow.url + TEXT, json=completion(400)) as response:
        raw = await response.content.readuntil(b"\n\n")
        name = response.headers["X-Stream-Id"]
        assert received(raw)[0] == f"{name}.1"
        url = f"/v1/streams/{name}"
        for asked, headers, field, reason in (
            (f"{url}?cursor=2000", {}, "cursor", "token 2000 of choice 0"),
            (f"{url}?cursor=1,1", {}, "cursor", "entries for 2 choices, but this stream has 1"),
            (f"{url}?cursor=0e", {}, "cursor", "which has not ended"),
            (f"{url}?cursor=", {}, "cursor", "is no cursor"),
            (f"{url}?cursor=abc", {}, "cursor", "is no cursor"),
            (f"{url}?cursor={name}.1", {}, "cursor", "may go into the header Last-Event-ID"),
            (url, {"Last-Event-ID": f"{name}.5000"}, "Last-Event-ID", "token 5000"),
            (url, {"Last-Event-ID": f"{'0' * 32}.1"}, "Last-Event-ID", "another stream"),
            (url, {"Last-Event-ID": "17"}, "Last-Event-ID", "32 hex digits"),
            ("/v1/streams/abc", {}, "stream_id", "32 hex digits"),
        ):
            status, error = await answer_of(slow, asked, **headers)
            assert (status, error["param"], error["code"]) == (400, field, "invalid_value"), asked
            assert reason in error["message"]
        # The stream does not notice, save that a cursor the engine had to be asked about took it from its reader
        again = await rest(slow, f"{name}.1")
    assert joined(received(raw)[1] + received(again)[1])["choices"][0].content == text_of(400)


async def test_a_refused_attach_is_logged_by_its_own_requests_id_and_not_by_the_streams(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    """Who knows a stream's id may have the stream."""
    unknown = "5ec2e7" + "0" * 26
    with caplog.at_level("INFO"):
        headers = {"X-Request-Id": "mine-1"}
        async with gateway.session.get(f"{gateway.url}/v1/streams/{unknown}?cursor=-", headers=headers) as response:
            assert response.status == 404
    (ended,) = [record for record in caplog.records if record.message == "request ended"]
    assert ended.fields["request_id"] == "mine-1"  # type: ignore[attr-defined]
    assert not [record for record in caplog.records if "5ec2e7" in f"{record.message} {vars(record)}"]


async def test_unknown_and_late_streams_are_404(gateway: RunningGateway) -> None:
    unknown = await answer_of(gateway, f"/v1/streams/{'0' * 32}")
    assert (unknown[0], unknown[1]["code"]) == (404, "unknown_stream")
    posted = await gateway.post(TEXT, completion(), headers={"Last-Event-ID": f"{'0' * 32}.3"})
    assert (posted[0], posted[1]["error"]["code"]) == (404, "unknown_stream")
    for grace_s, status in ((0, 404), (0.05, 404), (30, 200)):
        last_id, _ = received(await raw_answer(gateway, TEXT, completion(attach_grace_s=grace_s)))
        name = last_id.partition(".")[0]
        await asyncio.sleep(0.3)
        assert (await answer_of_status(gateway, name)) == status


async def answer_of_status(gateway: RunningGateway, name: str) -> int:
    async with gateway.session.get(f"{gateway.url}/v1/streams/{name}") as response:
        return response.status


async def test_a_stream_is_its_keys_alone() -> None:
    api_keys = ApiKeys({sha256(f"{name}-key".encode()).digest(): Caller(name) for name in ("alice", "bob")})
    alice, bob = ({"Authorization": f"Bearer {key}"} for key in ("alice-key", "bob-key"))
    with serving(executor(step_s=0.005)) as engine:
        async with (
            running_gateway(engine.endpoint, api_keys=api_keys, is_ready=False) as one,
            running_gateway(engine.endpoint, api_keys=api_keys, is_ready=False) as two,
        ):
            await one.wait_ready()
            await two.wait_ready()
            async with one.session.post(one.url + TEXT, json=completion(200), headers=alice) as response:
                raw = await response.content.readuntil(b"\n\n")
                event_id, _ = received(raw)
                url = f"/v1/streams/{event_id.partition('.')[0]}"
                for gateway in (one, two):
                    status, error = await answer_of(gateway, url, **bob)
                    assert (status, error["code"]) == (404, "unknown_stream")
                    async with gateway.session.delete(gateway.url + url, headers=bob) as refused:
                        assert refused.status == 404
                    assert (await answer_of(gateway, url))[0] == 401
                raw += await response.read()
            assert received(raw)[1][-1] == "[DONE]"
            assert joined(received(raw)[1])["choices"][0].ends == ["length"]
            assert (await rest(two, event_id, **alice)).endswith(b"data: [DONE]\n\n")


async def test_whoever_has_all_of_it_is_told_so(gateway: RunningGateway) -> None:
    last_id, _ = received(await raw_answer(gateway, TEXT, completion()))
    assert await rest(gateway, last_id) == b""
    async with gateway.session.post(
        gateway.url + TEXT, json=completion(), headers={"Last-Event-ID": last_id}
    ) as response:
        assert response.status == 204


@pytest.mark.parametrize("is_elsewhere", [False, True])
async def test_delete_ends_a_stream(is_elsewhere: bool) -> None:
    with serving(executor(step_s=0.005)) as engine:
        async with running_gateway(engine.endpoint) as one, running_gateway(engine.endpoint) as two:
            async with one.session.post(one.url + TEXT, json=completion(1500)) as response:
                raw = await response.content.readuntil(b"\n\n")
                gateway = two if is_elsewhere else one
                url = f"{gateway.url}/v1/streams/{response.headers['X-Stream-Id']}"
                async with gateway.session.delete(url) as deleted:
                    assert deleted.status == 204
                raw += await response.read()
            assert joined(received(raw)[1])["choices"][0].ends == ["abort"]

            async def is_idle() -> bool:
                return (await gateway.metrics())["num_allocated_blocks"] == 0

            await eventually_async(is_idle)
            await eventually_async(lambda: _is_gone(one, two, url))
            async with gateway.session.delete(f"{gateway.url}/v1/streams/{'0' * 32}") as deleted:
                assert deleted.status == 404


async def _is_gone(one: RunningGateway, two: RunningGateway, url: str) -> bool:
    """Unknown at both, to whoever reads and to whoever deletes."""
    path = "/v1/streams/" + url.rpartition("/")[2]
    for gateway in (one, two):
        for method in ("GET", "DELETE"):
            async with gateway.session.request(method, gateway.url + path) as response:
                if response.status != 404 or (await response.json())["error"]["code"] != "unknown_stream":
                    return False
    return True


@pytest.mark.parametrize("more", [{}, {"stop": text_of(25)[-6:]}], ids=str)
@pytest.mark.parametrize("is_elsewhere", [False, True])
async def test_delete_forgets_what_has_ended_everywhere_and_for_the_next_engine(
    is_elsewhere: bool, more: dict[str, Any]
) -> None:
    with serving(executor()) as engine:
        async with running_gateway(engine.endpoint) as one, running_gateway(engine.endpoint) as two:
            last_id, _ = received(await raw_answer(one, TEXT, completion(40, **more)))
            other_id, _ = received(await raw_answer(one, TEXT, completion(40, **more)))
            first_id = last_id.partition(".")[0] + ".-"
            assert await rest(two, first_id), "so that it is kept there, too"
            async with (two if is_elsewhere else one).session.delete(stream_url(one, last_id).replace(
                one.url, two.url if is_elsewhere else one.url
            )) as deleted:  # fmt: skip
                assert deleted.status == 204
            await eventually_async(lambda: _is_gone(one, two, stream_url(one, last_id)))
            engine.stop()
            with serving(executor(), endpoint=engine.endpoint) as second:
                second.loop._succession._until_s = 0.0
                await one.wait_ready()
                await two.wait_ready()
                await eventually_async(lambda: _is_gone(one, two, stream_url(one, last_id)))
                kept = other_id.partition(".")[0] + ".-"
                assert joined(received(await rest(two, kept))[1])["done"] == 1, "the one beside it stays"


async def test_a_deleted_stream_does_not_come_back_with_a_gateway_that_was_cut_off() -> None:
    """It had it live, and does not hear of the deletion."""
    with serving(executor(step_s=0.005)) as engine:
        async with running_gateway(engine.endpoint) as one, running_gateway(engine.endpoint) as two:
            client = one.app[keys.ENGINE]
            async with one.session.post(one.url + TEXT, json=completion(1500)) as response:
                raw = await response.content.readuntil(b"\n\n")
                url = f"{two.url}/v1/streams/{response.headers['X-Stream-Id']}"
                take = client._socket._on_frame
                client._socket._on_frame = lambda frame: None  # what it is sent is lost
                async with two.session.delete(url) as deleted:
                    assert deleted.status == 204
                await eventually_async(lambda: _is_idle(two))
                client._socket._on_frame = take
                client._on_disconnected()
                client._on_connected()
                raw += await response.read()
            assert joined(received(raw)[1])["choices"][0].ends == ["abort"]
            assert await _is_idle(two)
            assert engine.loop._stats.counters["requests_received_total"] == 1, "it was not even submitted again"
            await eventually_async(lambda: _is_gone(one, two, url))


async def _is_idle(gateway: RunningGateway) -> bool:
    return (await gateway.metrics())["num_allocated_blocks"] == 0


async def test_a_gateway_that_still_has_a_deleted_stream_does_not_serve_it() -> None:
    """It missed the deletion, or took the stream from what it had just before that came."""
    with serving(executor()) as engine:
        async with running_gateway(engine.endpoint) as one, running_gateway(engine.endpoint) as two:
            last_id, _ = received(await raw_answer(one, TEXT, completion()))
            name = last_id.partition(".")[0]
            assert await rest(two, f"{name}.-"), "so that it is kept there, too"
            client = two.app[keys.ENGINE]
            remains = client.ended.find(bytes.fromhex(name), "")
            assert remains is not None
            async with one.session.delete(f"{one.url}/v1/streams/{name}") as deleted:
                assert deleted.status == 204
            await eventually(lambda: not client.ended.stream_ids)
            client.ended.keep(remains, "", 30.0)
            assert await answer_of_status(two, name) == 404
            assert client.ended.stream_ids == []


async def test_a_grace_period_begins_with_the_end_however_often_it_is_read() -> None:
    with serving(executor()) as engine:
        async with running_gateway(engine.endpoint) as one, running_gateway(engine.endpoint) as two:
            last_id, _ = received(await raw_answer(one, TEXT, completion()))
            name = bytes.fromhex(last_id.partition(".")[0])
            ended_s = asyncio.get_running_loop().time()
            await asyncio.sleep(0.3)
            for gateway in (one, two, one, two):
                assert await rest(gateway, f"{name.hex()}.3")
                keep = gateway.app[keys.ENGINE].ended.for_next_engine(name)
                assert keep is not None
                left_s = ended_s + 30 - asyncio.get_running_loop().time()
                assert left_s - 1 < keep.grace_s <= left_s + 0.1
            engine.stop()
            with serving(executor(), endpoint=engine.endpoint):
                await one.wait_ready()
                await two.wait_ready()
                await rest(one, f"{name.hex()}.3")
                stale = one.app[keys.ENGINE].ended.for_next_engine(name)
                assert stale is not None
                assert stale.grace_s <= ended_s + 30 - asyncio.get_running_loop().time() + 0.1


@pytest.mark.parametrize("is_elsewhere", [False, True])
async def test_a_cursor_that_no_client_can_have_of_an_ended_stream_is_a_400(is_elsewhere: bool) -> None:
    with serving(executor()) as engine:
        async with running_gateway(engine.endpoint) as one, running_gateway(engine.endpoint) as two:
            gateway = two if is_elsewhere else one
            plain = received(await raw_answer(one, TEXT, completion()))[0]
            stopped = received(await raw_answer(one, TEXT, completion(40, stop=text_of(25)[-6:], n=2)))[0]
            assert plain.endswith(".20e,d") and stopped.endswith(".25e,25e,d")
            for event_id, cursor, reason in (
                (plain, "21", "is at token 21 of choice 0, which has 20 so far"),
                (plain, "5e", "has the end of choice 0 at token 5, but it came at 20"),
                (plain, "5e,u", "has the end of choice 0 at token 5, but it came at 20"),
                (plain, "12~1e.1", "has the end of choice 0 at token 13, but it came at 20"),
                (plain, "-1", "is no cursor"),
                (plain, "20,1", "has entries for 2 choices, but this stream has 1"),
                # The engine had come further than the stop string
                (stopped, "25,26", "is at token 26 of choice 1, which has 25 so far"),
                (stopped, "26e,25", "is at token 26 of choice 0, which has 25 so far"),
                (stopped, "25e,20e", "has the end of choice 1 at token 20, but it came at 25"),
            ):
                name = event_id.partition(".")[0]
                status, error = await answer_of(gateway, f"/v1/streams/{name}", **{"Last-Event-ID": f"{name}.{cursor}"})
                assert (status, error.get("param")) == (400, "Last-Event-ID"), cursor
                assert reason in error["message"]
                status, error = await answer_of(gateway, f"/v1/streams/{name}?cursor={cursor}")
                assert (status, error["param"]) == (400, "cursor") and reason in error["message"]
            for event_id, cursor in ((plain, "20"), (plain, "20e"), (plain, "12~8e.1"), (stopped, "25,25e")):
                raw = await rest(gateway, f"{event_id.partition('.')[0]}.{cursor}")
                assert raw.endswith(b"data: [DONE]\n\n")


async def test_the_grace_period_may_come_by_a_header(gateway: RunningGateway) -> None:
    body = {**completion(), "attach_grace_s": None}
    for text, status in (("20", 200), ("0.01", 404), ("0", 404)):
        last_id, _ = received(await raw_answer(gateway, TEXT, body, **{"X-Attach-Grace": text}))
        await asyncio.sleep(0.2)
        assert await answer_of_status(gateway, last_id.partition(".")[0]) == status
    for text in ("soon", "-1", "1e3", "nan", "3601", "99999999999"):
        refused, answer = await gateway.post(TEXT, body, headers={"X-Attach-Grace": text})
        assert (refused, answer["error"]["param"]) == (400, "X-Attach-Grace")
        assert ("between 0 and 3600" in answer["error"]["message"]) == (text in ("-1", "3601"))
    # The body goes before; an answer that is not streamed has nothing to attach to
    last_id, _ = received(await raw_answer(gateway, TEXT, completion(), **{"X-Attach-Grace": "0"}))
    assert await answer_of_status(gateway, last_id.partition(".")[0]) == 200
    whole = {"prompt": PROMPT, "max_tokens": 3}
    assert (await gateway.post(TEXT, whole, headers={"X-Attach-Grace": "5"}))[0] == 200


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"attach_grace_s": -1}, "between 0 and 3600"),
        ({"attach_grace_s": 3601}, "between 0 and 3600"),
        ({"attach_grace_s": "long"}, "must be a number"),
        ({"attach_grace_s": True}, "must be a number"),
        ({"stream": False, "stream_options": None}, "needs stream to be true"),
        ({"prompt": ["a", "b"]}, "takes one prompt"),
    ],
)
async def test_a_grace_period_that_cannot_be_kept_is_refused(
    gateway: RunningGateway, more: dict[str, Any], reason: str
) -> None:
    status, answer = await gateway.post(TEXT, completion(**more))
    assert (status, answer["error"]["param"]) == (400, "attach_grace_s")
    assert reason in answer["error"]["message"]


async def test_a_client_that_hangs_up_leaves_a_stream_that_ends_with_its_grace_period(slow: RunningGateway) -> None:
    async with slow.session.post(slow.url + TEXT, json=completion(2000, attach_grace_s=0.5)) as response:
        await response.content.readuntil(b"\n\n")
        response.close()
    await asyncio.sleep(0.2)
    assert slow.app[keys.GENERATION].num_live == 1
    await eventually(lambda: slow.app[keys.GENERATION].num_live == 0)

    async def is_idle() -> bool:
        return (await slow.metrics())["num_allocated_blocks"] == 0

    await eventually_async(is_idle)


async def test_who_attaches_and_does_not_read_has_the_stream_paused() -> None:
    with serving(executor(step_s=0.002)) as engine:
        async with running_gateway(engine.endpoint, max_stream_buffer_bytes=2048) as gateway:
            async with gateway.session.post(gateway.url + TEXT, json=completion(1900)) as response:
                name = response.headers["X-Stream-Id"]
                await response.content.readuntil(b"\n\n")
                response.close()
            engine_client, figures = gateway.app[keys.ENGINE], gateway.app[keys.METRICS]
            await eventually(lambda: engine_client.num_tokens > 1300, 30.0)  # more than the kernel takes
            num_pauses = figures.num_slow_reader_pauses
            async with raw_connection(gateway, receive_bytes=4096) as (reader, writer):
                transport = writer.transport
                assert isinstance(transport, asyncio.ReadTransport)
                transport.pause_reading()
                writer.write(f"GET /v1/streams/{name} HTTP/1.0\r\n\r\n".encode())
                await eventually(lambda: figures.num_slow_reader_pauses > num_pauses)
                num_before = -1
                while engine_client.num_tokens != num_before:
                    num_before = engine_client.num_tokens
                    await asyncio.sleep(0.3)
                assert num_before < 1890
                transport.resume_reading()
                raw = await asyncio.wait_for(reader.read(), 60)
    assert joined(received(raw.partition(b"\r\n\r\n")[2])[1])["choices"][0].content == text_of(1900)


async def test_several_prompts_have_no_ids(gateway: RunningGateway) -> None:
    raw = await raw_answer(gateway, TEXT, completion(prompt=[[30, 31], [40, 41]], attach_grace_s=None))
    assert b"id: " not in raw.replace(b'"id": ', b"") and raw.endswith(b"data: [DONE]\n\n")


async def test_a_stream_of_a_websocket_goes_on_over_sse_and_back(slow: RunningGateway) -> None:
    async with slow.session.ws_connect(slow.url + "/v1/stream") as client:
        await client.send_json({"type": "generate", "id": "a", "messages": MESSAGES, "max_tokens": 150,
                                "temperature": 0, "attach_grace_s": 20})  # fmt: skip
        text, num_tokens = "", 0
        stream_id = (await client.receive_json(timeout=10))["stream_id"]
        while num_tokens < 10:
            event = await client.receive_json(timeout=10)
            text, num_tokens = text + event.get("text", ""), event.get("num_tokens", 0)
    async with slow.session.get(f"{slow.url}/v1/streams/{stream_id}?cursor={num_tokens}") as response:
        raw = b""
        while raw.count(b"\n\n") < 20:
            raw += await response.content.readuntil(b"\n\n")
        response.close()
    last_id, data = received(raw)
    text += "".join(json.loads(piece)["choices"][0]["delta"].get("content", "") for piece in data)
    async with slow.session.ws_connect(slow.url + "/v1/stream") as client:
        await client.send_json(
            {"type": "attach", "id": "b", "stream_id": stream_id, "cursor": last_id.partition(".")[2]}
        )
        while (event := await client.receive_json(timeout=10))["type"] != "done":
            text += event.get("text", "") if event["type"] == "delta" else ""
    _, whole = await slow.post(CHAT, {"messages": MESSAGES, "max_tokens": 150, "temperature": 0})
    assert text == whole["choices"][0]["message"]["content"]


async def test_the_openai_client_reads_ids_and_comments() -> None:
    with serving(executor(block_at_step={3: 0.5, 6: 0.5})) as engine:
        async with running_gateway(engine.endpoint, keepalive_s=0.1) as quiet:
            client = openai.AsyncOpenAI(base_url=quiet.url + "/v1", api_key="none")
            stream = await client.completions.create(
                model="scripted", prompt=PROMPT, max_tokens=12, temperature=0, stream=True,
                extra_body={"attach_grace_s": 5},
            )  # fmt: skip
            texts = [event.choices[0].text async for event in stream]
            await client.close()
    assert "".join(texts) == text_of(12)


@asynccontextmanager
async def raw_connection(
    gateway: RunningGateway, receive_bytes: int = 65536
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = gateway.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        yield reader, writer
    finally:
        writer.close()


async def test_the_head_of_a_stream_names_it_and_keeps_proxies_from_holding_it_back(slow: RunningGateway) -> None:
    data = json.dumps(completion(5)).encode()
    async with raw_connection(slow) as (reader, writer):
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(data), data)
        )
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    for line in ("x-accel-buffering: no", "cache-control: no-cache", "transfer-encoding: chunked", "x-stream-id: "):
        assert line in head


async def test_a_stream_with_the_prompts_log_probabilities_is_taken_up_right_after_its_engines_end() -> None:
    """The next engine computes those of the prompt again, before the next token; until then one gateway has them."""
    body = completion(60, logprobs=2, prompt_logprobs=2)
    with serving(executor(step_s=0.01)) as engine:
        async with running_gateway(engine.endpoint) as gateway, running_gateway(engine.endpoint) as other:
            whole = joined(received(await raw_answer(gateway, TEXT, body))[1])
            async with gateway.session.post(gateway.url + TEXT, json=body) as response:
                raw = b"".join([await response.content.readuntil(b"\n\n") for _ in range(4)])
                event_id, first = received(raw)
                response.close()
            engine.stop()
            with held(endpoint=engine.endpoint) as (second, release):
                await gateway.wait_ready()
                await other.wait_ready()
                await eventually(lambda: second.loop._publisher.num_live == 1)
                name = event_id.partition(".")[0]
                resting = asyncio.create_task(rest(gateway, event_id))
                await eventually(lambda: gateway.app[keys.METRICS].num_attached == 1)
                release()
                again = received(await resting)[1]
                assert joined(first + again)["choices"] == whole["choices"]
                assert (await answer_of_status(other, name)) == 200


@pytest.mark.parametrize("more", [{"prompt_logprobs": 2}, {"echo": True, "logprobs": 1}], ids=str)
async def test_a_gateway_that_cannot_tell_of_the_prompt_yet_holds_the_stream_all_the_same(more: dict[str, Any]) -> None:
    """Or it would be in the engine alone, and end with that."""
    body = completion(60, **more)
    with serving(executor()) as engine, serving(executor(step_s=0.01)) as first_engine:
        async with running_gateway(engine.endpoint) as gateway:
            unbroken = joined(received(await raw_answer(gateway, TEXT, body))[1])["choices"][0]
        async with (
            running_gateway(first_engine.endpoint) as gateway,
            running_gateway(first_engine.endpoint) as other,
            gateway.session.post(gateway.url + TEXT, json=body) as response,
        ):
            raw = b"".join([await response.content.readuntil(b"\n\n") for _ in range(4)])
            event_id, first = received(raw)
            first_engine.stop()
            url = f"/v1/streams/{event_id.partition('.')[0]}"
            with held(endpoint=first_engine.endpoint) as (second, release):
                await gateway.wait_ready()
                await other.wait_ready()
                await eventually(lambda: second.loop._publisher.num_live == 1)
                status, error = await answer_of(other, url)
                assert (status, error["code"]) == (503, "not_ready")
                release()
                second.stop()
            with serving(executor(), endpoint=first_engine.endpoint):
                await other.wait_ready()
                await eventually_async(lambda: _can_tell(other, event_id))
                again = received(await rest(other, event_id))[1]
    told = joined(first + again)["choices"][0]
    assert (told.content, told.logprobs, told.ends) == (unbroken.content, unbroken.logprobs, unbroken.ends)


async def test_another_gateway_that_cannot_tell_of_the_prompt_yet_says_so() -> None:
    body = completion(60, prompt_logprobs=2)
    with serving(executor(step_s=0.01)) as engine:
        async with (
            running_gateway(engine.endpoint) as gateway,
            running_gateway(engine.endpoint) as other,
            gateway.session.post(gateway.url + TEXT, json=body) as response,
        ):
            raw = b"".join([await response.content.readuntil(b"\n\n") for _ in range(4)])
            event_id, first = received(raw)
            engine.stop()
            with held(endpoint=engine.endpoint) as (second, release):
                await gateway.wait_ready()
                await other.wait_ready()
                await eventually(lambda: second.loop._publisher.num_live == 1)
                url = f"/v1/streams/{event_id.partition('.')[0]}"
                status, error = await answer_of(other, url)
                assert (status, error["code"]) == (503, "not_ready") and "try again" in error["message"]
                release()
                await eventually_async(lambda: _can_tell(other, event_id))
                again = received(await rest(other, event_id))[1]
    told = joined(first + again)["choices"][0]
    assert told.content == text_of(60) and told.ends == ["length"]
