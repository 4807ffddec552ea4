"""A WebSocket's generation that is attached to again behind any of its events: nothing is lost, nothing comes twice."""

import itertools
from typing import Any

import aiohttp
import pytest

from tests.support.running_gateway import (
    VOCAB_SIZE,
    RunningGateway,
    running_gateway,
    small_tokenizer,
)
from tests.support.scripted_engine import serving
from tests.support.scripted_executor import ScriptedExecutor
from tests.support.speaking_executor import SpeakingExecutor
from tests.support.tool_models import tool_model

PROMPT = list(range(30, 50))
MESSAGES = [{"role": "user", "content": "one two"}]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
SPOKEN = (
    '<think>Hmm, 日本</think>Look: é😀.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n'
    "</tool_call>"
)
Event = dict[str, Any]


def text_of(num_tokens: int) -> str:
    return small_tokenizer().decode(ScriptedExecutor(vocab_size=VOCAB_SIZE).expected_tokens(PROMPT, num_tokens))


async def events_of(gateway: RunningGateway, message: Event) -> list[Event]:
    """All of one generation, from `started` to `done` or `error`."""
    async with gateway.session.ws_connect(gateway.url + "/v1/stream") as socket:
        await socket.send_json(message)
        events: list[Event] = [await socket.receive_json(timeout=30)]
        while events[-1]["type"] not in ("done", "error"):
            events.append(await socket.receive_json(timeout=30))
    return events


def joined(events: list[Event]) -> dict[int, list[Any]]:
    """Of each choice: text, thoughts, calls, token ids, log probabilities, ends."""
    told: dict[int, list[Any]] = {}
    for event in events:
        if event["type"] not in ("delta", "finished"):
            continue
        found = told.setdefault(event["index"], ["", "", [], "", [], [], []])
        found[0] += event.get("text", "")
        found[1] += event.get("reasoning", "")
        for call in event.get("tool_calls", []):
            found[2] += [(call["index"], call["id"], call["name"])] if "id" in call else []
            found[3] += call["arguments"]
        found[4] += event.get("token_ids", [])
        found[5] += event.get("logprobs", [])
        found[6] += [event["finish_reason"]] if event["type"] == "finished" else []
    return told


def cursor_behind(events: list[Event], n: int) -> str:
    """As docs/websocket.md says."""
    entries = ["-"] * n
    for event in events:
        if event["type"] == "delta":
            entries[event["index"]] = event.get("cursor", str(event["num_tokens"]))
        elif event["type"] == "finished":
            entries[event["index"]] = event.get("cursor", f"{event['num_tokens']}e")
    return ",".join(entries)


async def check_every_event(one: RunningGateway, two: RunningGateway, message: Event) -> list[Event]:
    events = await events_of(one, {"type": "generate", "id": "a", "attach_grace_s": 30, **message})
    assert events[-1]["type"] == "done"
    stream_id, n = events[0]["stream_id"], message.get("n", 1)
    for number in range(1, len(events)):
        had = events[:number]
        asked = {"type": "attach", "id": "b", "stream_id": stream_id, "cursor": cursor_behind(had, n)}
        rest = await events_of(two, asked)
        assert joined(had + rest[1:]) == joined(events), (number, asked["cursor"])
        assert rest[-1]["usage"]["completion_tokens"] == events[-1]["usage"]["completion_tokens"]
    return events


@pytest.mark.parametrize(
    "message",
    [
        {"max_tokens": 14, "n": 2, "temperature": 0.9, "seed": 5},
        {"max_tokens": 40, "stop": [text_of(20)[-3:] + "never", text_of(25)[-6:]]},
        pytest.param({"max_tokens": 12, "logprobs": 2, "return_token_ids": True}, marks=pytest.mark.long),
        pytest.param({"max_tokens": 10, "echo": True, "n": 2, "seed": 3}, marks=pytest.mark.long),
        pytest.param({"max_tokens": 10, "stop": text_of(10)[-2:] + "never there"}, marks=pytest.mark.long),
    ],
)
async def test_a_completion_goes_on_behind_each_of_its_events(message: Event) -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        async with running_gateway(engine.endpoint) as one, running_gateway(engine.endpoint) as two:
            await check_every_event(one, two, {"prompt": PROMPT, "temperature": 0, **message})


@pytest.mark.parametrize("max_tokens", [21, pytest.param(300, marks=pytest.mark.long)])
async def test_thoughts_and_calls_go_on_behind_each_event(max_tokens: int) -> None:
    tokenizer = tool_model("hermes")
    with serving(SpeakingExecutor(tokenizer, SPOKEN)) as engine:
        async with (
            running_gateway(engine.endpoint, lambda: tokenizer) as one,
            running_gateway(engine.endpoint, lambda: tokenizer) as two,
        ):
            events = await check_every_event(
                one, two, {"messages": MESSAGES, "tools": TOOLS, "max_tokens": max_tokens, "temperature": 0}
            )
    if max_tokens == 300:
        assert joined(events)[0][3] == '{"city": "Zürich"}' and joined(events)[0][6] == ["tool_calls"]


async def test_several_choices_may_stand_at_different_tokens_and_be_attached_to_by_one_number() -> None:
    message = {"prompt": PROMPT, "max_tokens": 20, "n": 3, "temperature": 0.9, "seed": 5, "return_token_ids": True}
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        async with running_gateway(engine.endpoint) as gateway:
            events = await events_of(gateway, {"type": "generate", "id": "a", "attach_grace_s": 30, **message})
            whole = joined(events)
            asked: Event = {"type": "attach", "id": "b", "stream_id": events[0]["stream_id"]}
            for entries in itertools.product((0, 7), (3, 20), (11,)):
                rest = joined(await events_of(gateway, {**asked, "cursor": ",".join(map(str, entries))}))
                for choice, entry in enumerate(entries):
                    assert rest[choice][4] == whole[choice][4][entry:]
            rest = joined(await events_of(gateway, {**asked, "from_token": 9}))
            assert [rest[choice][4] for choice in range(3)] == [whole[choice][4][9:] for choice in range(3)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"cursor": "21"}, "cursor"),
        ({"cursor": "1,1"}, "cursor"),
        ({"cursor": "x"}, "cursor"),
        ({"cursor": 5}, "cursor"),
        ({"cursor": "1", "from_token": 1}, "from_token"),
        ({"from_token": 21}, "from_token"),
        ({"from_token": -1}, "from_token"),
        ({"from_token": "1"}, "from_token"),
        ({"stream_id": "0" * 31}, "stream_id"),
        ({"stream_id": None}, "stream_id"),
        ({"stream_id": "A" * 32}, "stream_id"),
        ({"stream_id": "0" * 32}, None),
    ],
)
async def test_what_cannot_be_attached_to_is_said_and_stays(fields: Event, param: str | None) -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        async with running_gateway(engine.endpoint) as gateway:
            message = {"type": "generate", "id": "a", "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
            events = await events_of(gateway, {**message, "attach_grace_s": 30})
            asked = {"type": "attach", "id": "b", "stream_id": events[0]["stream_id"]}
            (error,) = await events_of(gateway, {**asked, **fields})
            assert error["type"] == "error" and error["id"] == "b" and error["error"]["param"] == param
            assert error["error"]["code"] == ("unknown_stream" if param is None else "invalid_value")
            assert joined(await events_of(gateway, asked)) == joined(events)


@pytest.mark.parametrize(
    ("cursor", "reason"),
    [
        ("5e", "has the end of choice 0 at token 5, but it came at 25"),
        ("12~1e.1", "has the end of choice 0 at token 13, but it came at 25"),
        ("26", "is at token 26 of choice 0, which has 25 so far"),  # the engine had come further than the stop string
    ],
)
async def test_a_cursor_that_no_client_can_have_gets_nothing_but_an_error(cursor: str, reason: str) -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        async with running_gateway(engine.endpoint) as one, running_gateway(engine.endpoint) as two:
            message = {"type": "generate", "id": "a", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
            events = await events_of(one, {**message, "stop": text_of(25)[-6:], "attach_grace_s": 30})
            assert events[-2]["num_tokens"] == 25
            asked = {"type": "attach", "id": "b", "stream_id": events[0]["stream_id"], "cursor": cursor}
            for gateway in (one, two):
                told = await events_of(gateway, asked)
                assert {event["type"] for event in told[:-1]} <= {"started"}
                assert (told[-1]["type"], told[-1]["error"]["param"]) == ("error", "cursor")
                assert reason in told[-1]["error"]["message"]


async def test_a_cancel_of_an_attach_ends_the_stream_that_it_finds() -> None:
    """Also when it comes before the answer: what its client wants is no further token."""
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE, step_s=0.005)) as engine:
        async with running_gateway(engine.endpoint) as one, running_gateway(engine.endpoint) as two:
            async with one.session.ws_connect(one.url + "/v1/stream") as socket:
                await socket.send_json({"type": "generate", "id": "a", "prompt": PROMPT, "max_tokens": 1500,
                                        "attach_grace_s": 30})  # fmt: skip
                stream_id = (await socket.receive_json(timeout=30))["stream_id"]
            async with two.session.ws_connect(two.url + "/v1/stream") as socket:
                await socket.send_json({"type": "attach", "id": "b", "stream_id": stream_id})
                await socket.send_json({"type": "cancel", "id": "b"})
                events: list[Event] = [await socket.receive_json(timeout=30)]
                while events[-1]["type"] != "done":
                    events.append(await socket.receive_json(timeout=30))
    assert [e["finish_reason"] for e in events if e["type"] == "finished"] == ["abort"]
    assert sum(e["type"] == "delta" for e in events) < 1000


async def test_a_socket_over_sse_s_cursor_and_back_are_one_grammar() -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        async with running_gateway(engine.endpoint) as gateway:
            body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "stream": True, "attach_grace_s": 30}
            async with gateway.session.post(gateway.url + "/v1/completions", json=body) as response:
                stream_id = response.headers["X-Stream-Id"]
                raw = await response.read()
            assert f"id: {stream_id}.7\n".encode() in raw
            rest = await events_of(gateway, {"type": "attach", "id": "b", "stream_id": stream_id, "cursor": "7"})
            text = joined(rest)[0][0]
            url = f"{gateway.url}/v1/streams/{stream_id}?cursor={cursor_behind(rest[:3], 1)}"
            async with gateway.session.get(url, timeout=aiohttp.ClientTimeout(total=30)) as response:
                assert (await response.read()).endswith(b"data: [DONE]\n\n")
    assert text_of(20).endswith(text) and text
