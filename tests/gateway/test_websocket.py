"""The WebSocket /v1/stream, as docs/websocket.md says it."""

import asyncio
import itertools
import json
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest

from gateway import keys
from gateway.auth import Caller
from gateway.bounded_writer import BoundedWriter
from gateway.cursor import FROM_START
from gateway.errors import error_fields
from gateway.routes import websocket
from gateway.schema.chat import ChatRequest
from gateway.schema.completion import CompletionRequest
from gateway.schema.generate import generate_from_fields
from gateway.schema.options import RequestLimits
from gateway.socket_events import JsonCodec, SocketOutlet
from streamkv.sampling import SamplingParams
from tests.support.running_gateway import (
    MODEL,
    VOCAB_SIZE,
    RunningGateway,
    eventually,
    eventually_async,
    running_gateway,
    small_tokenizer,
)
from tests.support.scripted_engine import serving
from tests.support.scripted_executor import ScriptedExecutor

PROMPT = list(range(30, 50))


def executor(**options: Any) -> ScriptedExecutor:
    return ScriptedExecutor(vocab_size=VOCAB_SIZE, **options)


def expected(num_tokens: int, prompt: list[int] = PROMPT) -> list[int]:
    return executor().expected_tokens(prompt, num_tokens)


def text_of(num_tokens: int, prompt: list[int] = PROMPT) -> str:
    return small_tokenizer().decode(expected(num_tokens, prompt))


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


class Socket:
    """A client: sends messages, reads events."""

    def __init__(self, raw: aiohttp.ClientWebSocketResponse, is_msgpack: bool) -> None:
        self.raw = raw
        self.is_msgpack = is_msgpack

    async def send(self, **fields: Any) -> None:
        if self.is_msgpack:
            await self.raw.send_bytes(msgspec.msgpack.encode(fields))
        else:
            await self.raw.send_str(json.dumps(fields))

    async def read(self) -> dict[str, Any]:
        message = await self.raw.receive(timeout=10)
        if self.is_msgpack:
            assert message.type is aiohttp.WSMsgType.BINARY, message
            event: dict[str, Any] = msgspec.msgpack.decode(message.data)
        else:
            assert message.type is aiohttp.WSMsgType.TEXT, message
            event = json.loads(message.data)
        return event

    async def until(self, kind: str, client_id: str | None = None) -> list[dict[str, Any]]:
        """The events up to and with the first of this kind and id."""
        events = []
        while True:
            events.append(await self.read())
            if events[-1]["type"] == kind and (client_id is None or events[-1].get("id") == client_id):
                return events


@asynccontextmanager
async def connected(gateway: RunningGateway, *protocols: str) -> AsyncIterator[Socket]:
    async with gateway.session.ws_connect(gateway.url + "/v1/stream", protocols=protocols) as raw:
        yield Socket(raw, raw.protocol == "streamkv.msgpack")


def generate(client_id: str = "a", **more: Any) -> dict[str, Any]:
    return {"type": "generate", "id": client_id, "prompt": PROMPT, "max_tokens": 30, "temperature": 0, **more}


def texts(events: list[dict[str, Any]], client_id: str = "a", index: int = 0) -> str:
    return "".join(
        event["text"]
        for event in events
        if event["type"] == "delta" and event["id"] == client_id and event["index"] == index
    )


@pytest.mark.parametrize("protocol", ["", "streamkv.json", "streamkv.msgpack"])
async def test_a_generation_from_started_to_done(gateway: RunningGateway, protocol: str) -> None:
    async with connected(gateway, *filter(None, [protocol])) as socket:
        await socket.send(**generate(return_token_ids=True))
        events = await socket.until("done")
    assert events[0]["type"] == "started"
    assert (events[0]["model"], events[0]["n"], events[0]["num_prompt_tokens"]) == (MODEL, 1, 20)
    assert events[0]["prompt_token_ids"] == PROMPT and len(events[0]["stream_id"]) == 32
    deltas = [event for event in events if event["type"] == "delta"]
    assert texts(events) == text_of(30)
    assert list(itertools.chain.from_iterable(event["token_ids"] for event in deltas)) == expected(30)
    assert deltas[-1]["num_tokens"] == 30
    ends = [event for event in events if event["type"] == "finished"]
    assert [(end["index"], end["finish_reason"], end["num_tokens"]) for end in ends] == [(0, "length", 30)]
    assert events[-1]["usage"]["completion_tokens"] == 30 and events[-1]["usage"]["prompt_tokens"] == 20


async def test_ids_are_not_sent_unless_asked_for(gateway: RunningGateway) -> None:
    async with connected(gateway) as socket:
        await socket.send(**generate())
        events = await socket.until("done")
    assert not any("token_ids" in event or "prompt_token_ids" in event for event in events)


async def test_a_chat_is_the_same_as_over_http(gateway: RunningGateway) -> None:
    messages = [{"role": "user", "content": "one two"}]
    _, answer = await gateway.post(
        "/v1/chat/completions", {"messages": messages, "max_tokens": 12, "temperature": 0.7, "seed": 4, "n": 2}
    )
    async with connected(gateway) as socket:
        await socket.send(type="generate", id="c", messages=messages, max_tokens=12, temperature=0.7, seed=4, n=2)
        events = await socket.until("done")
    for index in range(2):
        assert texts(events, "c", index) == answer["choices"][index]["message"]["content"]
    assert sorted(event["index"] for event in events if event["type"] == "finished") == [0, 1]


async def test_many_generations_share_a_socket(slow: RunningGateway) -> None:
    prompts = {f"g{index}": [20 + index, 7] for index in range(12)}
    async with connected(slow) as socket:
        for client_id, prompt in prompts.items():
            await socket.send(**generate(client_id, prompt=prompt, max_tokens=100))
        events: list[dict[str, Any]] = []
        while sum(event["type"] == "done" for event in events) < len(prompts):
            events.append(await socket.read())
    for client_id, prompt in prompts.items():
        assert texts(events, client_id) == text_of(100, prompt)
    first_end = next(index for index, event in enumerate(events) if event["type"] == "done")
    assert len({event["id"] for event in events[:first_end]}) == len(prompts), "they did not run side by side"


async def test_cancel_ends_one_and_leaves_the_others(slow: RunningGateway) -> None:
    async with connected(slow) as socket:
        await socket.send(**generate("long", max_tokens=1500))
        await socket.send(**generate("short", max_tokens=40))
        await socket.until("delta", "long")
        await socket.send(type="cancel", id="long")
        events = await socket.until("done", "long")
        ends = [event for event in events if event["type"] == "finished" and event["id"] == "long"]
        assert [(end["finish_reason"], end["cause"]) for end in ends] == [("abort", "cancelled")]
        events += await socket.until("done", "short")
        assert next(e for e in events if e["type"] == "finished" and e["id"] == "short")["finish_reason"] == "length"
        await socket.send(**generate("long", max_tokens=2))
        assert (await socket.until("done", "long"))[0]["type"] == "started", "the id is not free again"


@pytest.mark.parametrize("at", ["end", "close"])
@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_a_generation_whose_end_cannot_be_told_ends_with_an_error_and_leaves_the_others(
    slow: RunningGateway, monkeypatch: pytest.MonkeyPatch, at: str, is_cancelled: bool
) -> None:
    def faulty(self: SocketOutlet, *told: Any) -> None:
        if self._client_id == "bad":
            raise RuntimeError("a fault of ours")
        right(self, *told)

    right = getattr(SocketOutlet, at)
    monkeypatch.setattr(SocketOutlet, at, faulty)
    async with connected(slow) as socket:
        await socket.send(**generate("good", max_tokens=60))
        await socket.send(**generate("bad", max_tokens=1500 if is_cancelled else 10))
        events = await socket.until("delta", "bad")
        if is_cancelled:
            await socket.send(type="cancel", id="bad")
        events += await socket.until("error", "bad")
        assert events[-1]["error"]["code"] == "engine_error"
        if not any(event["type"] == "done" for event in events):
            events += await socket.until("done", "good")
        assert texts(events, "good") == text_of(60)
        assert [event["type"] for event in events if event["id"] == "bad"][-1] == "error"
        await socket.send(type="cancel", id="bad")
        assert (await socket.until("error"))[-1]["error"]["code"] == "unknown_stream", "it is live for ever"
    await eventually(lambda: slow.app[keys.ENGINE].num_live == 0)


async def test_pause_computes_nothing_and_resume_goes_on(slow: RunningGateway) -> None:
    async with connected(slow) as socket:
        await socket.send(**generate(max_tokens=100))
        events = await socket.until("delta")
        await socket.send(type="pause", id="a")
        events += await socket.until("paused")
        await asyncio.sleep(0.2)
        num_before = slow.app[keys.ENGINE].num_tokens
        await asyncio.sleep(0.2)
        assert slow.app[keys.ENGINE].num_tokens == num_before < 100
        await socket.send(type="resume", id="a")
        events += await socket.until("done")
    assert texts(events) == text_of(100)


BAD_FRAMES: list[tuple[str, str | None, str | None]] = [
    ("no json", None, None),
    ("[1, 2]", None, None),
    ('{"type": "generate"', None, None),
    ('{"type": "fly", "id": "x"}', None, "type"),
    ('{"id": "x"}', None, "type"),
    ('{"type": ["generate"], "id": "x"}', None, "type"),
    ('{"type": "generate", "prompt": [1]}', None, "id"),
    ('{"type": "generate", "id": 5, "prompt": [1]}', None, "id"),
    ('{"type": "generate", "id": "", "prompt": [1]}', None, "id"),
    ('{"type": "generate", "id": "x"}', "x", "prompt"),
    ('{"type": "generate", "id": "x", "prompt": [1], "temperature": 9}', "x", "temperature"),
    ('{"type": "generate", "id": "x", "prompt": [1], "bogus": 9}', "x", "bogus"),
    ('{"type": "generate", "id": "x", "prompt": [1], "attach_grace_s": -1}', "x", "attach_grace_s"),
    ('{"type": "generate", "id": "x", "prompt": [1], "attach_grace_s": "long"}', "x", "attach_grace_s"),
    ('{"type": "generate", "id": "x", "prompt": [1], "model": "another"}', "x", "model"),
    ('{"type": "generate", "id": "x", "prompt": [1], "best_of": 3}', "x", "best_of"),
    ('{"type": "generate", "id": "x", "prompt": [1], "use_beam_search": true}', "x", "use_beam_search"),
    ('{"type": "attach", "id": "x"}', "x", "stream_id"),
    ('{"type": "attach", "id": "x", "stream_id": "zz"}', "x", "stream_id"),
    ('{"type": "attach", "id": "x", "stream_id": "' + "0" * 32 + '"}', "x", None),
    ('{"type": "attach", "id": "x", "stream_id": "' + "0" * 32 + '", "from_token": true}', "x", "from_token"),
    ('{"type": "cancel", "id": "nobody"}', "nobody", None),
    ('{"type": "pause", "id": "nobody"}', "nobody", None),
    ('{"type": "cancel", "id": "nobody", "now": true}', "nobody", "now"),
]


@pytest.mark.parametrize(("frame", "client_id", "param"), BAD_FRAMES)
async def test_a_bad_frame_is_answered_and_the_socket_stays_open(
    gateway: RunningGateway, frame: str, client_id: str | None, param: str | None
) -> None:
    async with connected(gateway) as socket:
        await socket.send(**generate("good", max_tokens=40))
        await socket.raw.send_str(frame)
        events = await socket.until("done", "good")
        if not any(event["type"] == "error" for event in events):
            events += await socket.until("error")
        (error,) = [event for event in events if event["type"] == "error"]
        assert error["id"] == client_id
        assert error["error"].keys() == {"message", "type", "param", "code"}
        if param is not None:
            assert error["error"]["param"] == param
        assert texts(events, "good") == text_of(40)
        await socket.send(**generate("x", max_tokens=2))
        assert (await socket.until("done", "x"))[-1]["usage"]["completion_tokens"] == 2


async def test_a_full_engine_says_when_to_come_back() -> None:
    with serving(executor(step_s=0.01), max_num_seqs=1, max_queue=1) as engine:
        async with running_gateway(engine.endpoint) as gateway, connected(gateway) as socket:
            for index in range(2):
                await socket.send(**generate(f"held{index}", max_tokens=1000))

            async def is_full() -> bool:
                figures = await gateway.metrics()
                return (figures["num_running_requests"], figures["num_waiting_requests"]) == (1, 1)

            await eventually_async(is_full)
            await socket.send(**generate("late"))
            error = (await socket.until("error", "late"))[-1]["error"]
    assert error["code"] == "overloaded"
    assert type(error["retry_after_s"]) is int and error["retry_after_s"] >= 1


async def test_the_wrong_kind_of_frame_is_answered(gateway: RunningGateway) -> None:
    async with connected(gateway, "streamkv.msgpack") as socket:
        await socket.raw.send_str(json.dumps(generate()))
        assert (await socket.read())["type"] == "error"
        await socket.raw.send_bytes(b"\xc1")
        assert (await socket.read())["type"] == "error"
        await socket.send(**generate())
        assert texts(await socket.until("done")) == text_of(30)


async def test_an_id_in_use_is_refused_and_its_generation_goes_on(slow: RunningGateway) -> None:
    async with connected(slow) as socket:
        await socket.send(**generate(max_tokens=40))
        await socket.send(**generate(max_tokens=40))
        events = await socket.until("done")
    assert [event["error"]["param"] for event in events if event["type"] == "error"] == ["id"]
    assert texts(events) == text_of(40)


async def test_a_large_message_is_checked_beside_the_event_loop(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def check(fields: dict[str, object], limits: RequestLimits) -> ChatRequest | CompletionRequest:
        threads.append(threading.get_ident())
        return generate_from_fields(fields, limits)

    monkeypatch.setattr(websocket, "generate_from_fields", check)
    async with connected(gateway) as socket:
        await socket.send(**generate())
        await socket.until("done")
        await socket.send(**generate(metadata={"note": "x" * 200_000}))
        assert texts(await socket.until("done")) == text_of(30)
        await socket.send(**generate(metadata={"note": "x" * 200_000}, n=0))
        assert (await socket.until("error"))[-1]["error"]["param"] == "n"
    here = threading.get_ident()
    assert [thread == here for thread in threads] == [True, False, False]


async def test_ping_is_answered(gateway: RunningGateway) -> None:
    async with connected(gateway) as socket:
        await socket.send(type="ping")
        assert await socket.read() == {"type": "pong"}


async def test_a_message_over_the_limit_closes_the_socket_with_1009() -> None:
    with serving(executor()) as engine:
        async with running_gateway(engine.endpoint, max_body_bytes=2048) as gateway, connected(gateway) as socket:
            await socket.raw.send_str(json.dumps(generate(prompt="x" * 4000)))
            message = await socket.raw.receive(timeout=5)
            assert message.type is aiohttp.WSMsgType.CLOSE and message.data == aiohttp.WSCloseCode.MESSAGE_TOO_BIG


async def test_a_closed_socket_aborts_what_it_had(slow: RunningGateway) -> None:
    async with connected(slow) as socket:
        for index in range(4):
            await socket.send(**generate(f"g{index}", max_tokens=1500))
        await socket.until("delta", "g3")
        assert slow.app[keys.GENERATION].num_live == 4

    async def is_idle() -> bool:
        return (await slow.metrics())["num_allocated_blocks"] == 0

    await eventually(lambda: slow.app[keys.GENERATION].num_live == 0, 2.0)
    await eventually_async(is_idle, 2.0)


@pytest.mark.parametrize("from_token", [0, 1, 5])
async def test_a_live_stream_can_be_attached_from_any_token(slow: RunningGateway, from_token: int) -> None:
    async with connected(slow) as first, connected(slow) as second:
        await first.send(**generate(max_tokens=120, return_token_ids=True))
        events = await first.until("delta")
        while events[-1].get("num_tokens", 0) < 10:
            events.append(await first.read())
        stream_id = events[0]["stream_id"]
        await second.send(type="attach", id="b", stream_id=stream_id, from_token=from_token)
        events += await first.until("finished")
        assert (events[-1]["finish_reason"], events[-1]["cause"]) == ("abort", "attached_elsewhere")
        rest = await second.until("done")
        assert (rest[0]["type"], rest[0]["stream_id"], rest[0]["from_token"]) == ("started", stream_id, from_token)
        ids = list(itertools.chain.from_iterable(event["token_ids"] for event in rest if event["type"] == "delta"))
        assert ids == expected(120)[from_token:]
        assert next(event for event in rest if event["type"] == "finished")["finish_reason"] == "length"
        assert rest[-1]["usage"]["completion_tokens"] == 120
        if from_token == 0:
            assert texts(rest, "b") == text_of(120)


async def test_a_stream_with_a_grace_period_outlives_its_socket(slow: RunningGateway) -> None:
    async with connected(slow) as first:
        await first.send(**generate(max_tokens=60, attach_grace_s=20))
        stream_id = (await first.until("delta"))[0]["stream_id"]
    await eventually(lambda: slow.app[keys.GENERATION].num_live == 0, 10.0)
    async with connected(slow) as second:
        await second.send(type="attach", id="b", stream_id=stream_id)
        events = await second.until("done")
    assert texts(events, "b") == text_of(60)


async def test_another_gateway_can_attach() -> None:
    with serving(executor(step_s=0.005)) as engine:
        async with (
            running_gateway(engine.endpoint) as one,
            running_gateway(engine.endpoint) as two,
            connected(one) as first,
            connected(two) as second,
        ):
            await first.send(**generate(max_tokens=100, stop="never there", attach_grace_s=5))
            events = await first.until("delta")
            await second.send(type="attach", id="b", stream_id=events[0]["stream_id"])
            gone = await first.until("done")
            rest = await second.until("done")
    assert [event["finish_reason"] for event in gone if event["type"] == "finished"] == ["abort"]
    assert texts(rest, "b") == text_of(100)


async def test_an_attached_stream_survives_its_engine() -> None:
    with serving(executor(step_s=0.005)) as engine:
        async with running_gateway(engine.endpoint) as gateway, connected(gateway) as one, connected(gateway) as two:
            await one.send(**generate(max_tokens=150))
            stream_id = (await one.until("delta"))[0]["stream_id"]
            await two.send(type="attach", id="b", stream_id=stream_id)
            events = await two.until("delta")
            engine.stop()
            with serving(executor(), endpoint=engine.endpoint):
                events += await two.until("done")
    assert texts(events, "b") == text_of(150)
    sampling = SamplingParams(seed=0, max_tokens=150, temperature=0.0)
    assert executor().expected_tokens(PROMPT, 150, sampling) == expected(150)


def _with_small_buffer(address: Any) -> socket.socket:
    connection = socket.socket(*address[:3])
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return connection


async def test_a_socket_that_is_not_read_pauses_its_streams() -> None:
    with serving(executor(num_blocks=1024)) as engine:
        async with (
            running_gateway(engine.endpoint, max_stream_buffer_bytes=2048) as gateway,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(socket_factory=_with_small_buffer)) as session,
            session.ws_connect(gateway.url + "/v1/stream", max_msg_size=0) as raw,
        ):
            client = Socket(raw, is_msgpack=False)
            connection = raw._conn  # aiohttp has no public way to stop reading
            assert connection is not None and connection.transport is not None
            for index in range(8):
                await client.send(**generate(f"g{index}", max_tokens=400))
            connection.transport.pause_reading()
            figures, engine_client = gateway.app[keys.METRICS], gateway.app[keys.ENGINE]
            await eventually(lambda: figures.num_slow_reader_pauses > 0)
            await asyncio.sleep(0.3)
            num_before = engine_client.num_tokens
            await asyncio.sleep(0.2)
            assert engine_client.num_tokens == num_before < 8 * 400
            connection.transport.resume_reading()
            events: list[dict[str, Any]] = []
            while sum(event["type"] == "done" for event in events) < 8:
                events.append(await client.read())
    for index in range(8):
        assert texts(events, f"g{index}") == text_of(400)


async def test_a_socket_that_sends_and_never_reads_is_not_listened_to_without_end() -> None:
    with serving(executor()) as engine:
        async with (
            running_gateway(engine.endpoint, max_stream_buffer_bytes=2048) as gateway,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(socket_factory=_with_small_buffer)) as session,
            session.ws_connect(gateway.url + "/v1/stream", max_msg_size=0) as raw,
        ):
            connection = raw._conn  # aiohttp has no public way to stop reading
            assert connection is not None and connection.transport is not None
            connection.transport.pause_reading()
            num_sent = 0

            async def flood() -> None:
                nonlocal num_sent
                while True:
                    await raw.send_str('{"type":"nonsense %s"}' % ("x" * 100))
                    num_sent += 1

            flooding = asyncio.create_task(flood())
            num_before = -1
            while num_sent != num_before:  # it stops when nobody reads it
                num_before = num_sent
                await asyncio.sleep(0.3)
            assert not flooding.done()
            (session_of_it,) = gateway.app[keys.SOCKETS].live
            transport = session_of_it._req.transport if session_of_it._req is not None else None
            assert transport is not None and transport.get_write_buffer_size() < 64 * 1024
            connection.transport.resume_reading()
            for _ in range(20):
                assert json.loads((await raw.receive(timeout=10)).data)["type"] == "error"
            flooding.cancel()


async def test_who_goes_before_the_answer_to_an_attach_leaves_the_stream_to_others(slow: RunningGateway) -> None:
    async with connected(slow) as first:
        await first.send(**generate(max_tokens=200, attach_grace_s=20))
        started = await first.read()
    stream_id = started["stream_id"]
    outlet = SocketOutlet(
        BoundedWriter(slow.app[keys.OUTBOX], 1000), JsonCodec(), "x", error_fields=error_fields, on_close=lambda: None
    )
    service = slow.app[keys.GENERATION]
    attaching = asyncio.create_task(service.attach(bytes.fromhex(stream_id), FROM_START, outlet, Caller()))
    await eventually(lambda: service.num_live == 1)
    assert attaching.cancel()
    await asyncio.sleep(0.1)
    async with connected(slow) as second:
        await second.send(type="attach", id="b", stream_id=stream_id, from_token=0)
        events = await second.until("done")
    assert texts(events, "b") == text_of(200)


async def test_a_reader_that_takes_its_time_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "_PING_S", 0.1)
    with serving(executor(num_blocks=1024)) as engine:
        async with (
            running_gateway(engine.endpoint, max_stream_buffer_bytes=2048) as gateway,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(socket_factory=_with_small_buffer)) as session,
            session.ws_connect(gateway.url + "/v1/stream", max_msg_size=0) as raw,
        ):
            client = Socket(raw, is_msgpack=False)
            connection = raw._conn  # aiohttp has no public way to stop reading
            assert connection is not None and connection.transport is not None
            for index in range(8):
                # Large events, so that what it has not read shows before it is missed
                await client.send(**generate(f"g{index}", max_tokens=150, logprobs=5))
            connection.transport.pause_reading()
            figures = gateway.app[keys.METRICS]
            await eventually(lambda: figures.num_slow_reader_pauses > 0)
            await asyncio.sleep(0.7)
            monkeypatch.setattr(websocket, "_PING_S", 20.0)  # a busy test may be late to read the last of it
            connection.transport.resume_reading()
            events: list[dict[str, Any]] = []
            while sum(event["type"] == "done" for event in events) < 8:
                events.append(await client.read())
    for index in range(8):
        assert texts(events, f"g{index}") == text_of(150)


async def test_a_client_that_answers_no_ping_is_gone_and_one_that_does_is_not(
    slow: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "_PING_S", 0.1)
    async with (
        slow.session.ws_connect(slow.url + "/v1/stream") as living,
        slow.session.ws_connect(slow.url + "/v1/stream", autoping=False) as silent,
    ):
        reading = asyncio.create_task(living.receive())
        kinds = []
        while not silent.closed:
            kinds.append((await silent.receive(timeout=5)).type)
        assert kinds.count(aiohttp.WSMsgType.PING) == 3
        await asyncio.sleep(0.5)
        assert not reading.done() and len(slow.app[keys.SOCKETS].live) == 1
        reading.cancel()
