"""The client comes back by itself: cut anywhere, over SSE and WebSocket, the answer is the unbroken one."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gateway import keys
from streamkv import client as client_module
from streamkv.client import (
    Client,
    Delta,
    RequestRefused,
    ServerBusy,
    ServerError,
    StreamBroken,
    StreamLost,
)
from tests.support.cutting_proxy import cutting_proxy
from tests.support.openai_server import completion_events
from tests.support.openai_server import serving as serving_openai
from tests.support.running_gateway import (
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
REQUEST: dict[str, object] = {"prompt": PROMPT, "max_tokens": 150, "temperature": 0}
CHAT: dict[str, object] = {
    "messages": [{"role": "user", "content": "one"}], "max_tokens": 80, "temperature": 0.9, "seed": 4, "n": 2,
}  # fmt: skip


def executor(**options: Any) -> ScriptedExecutor:
    return ScriptedExecutor(vocab_size=VOCAB_SIZE, num_blocks=1024, **options)


def text_of(num_tokens: int) -> str:
    return small_tokenizer().decode(executor().expected_tokens(PROMPT, num_tokens))


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    with serving(executor(step_s=0.004)) as engine:
        async with running_gateway(engine.endpoint) as running:
            yield running


def cuts(seed: int, least: int = 300, most: int = 6000) -> Iterator[int]:
    """Bytes of connection after connection."""
    draw = random.Random(seed)
    while True:
        yield draw.randint(least, most)


Told = tuple[dict[int, str], dict[int, list[str]], int]


async def told(deltas: AsyncIterable[Delta]) -> Told:
    """Text and finish reasons by choice, and the tokens of the usage."""
    texts: dict[int, str] = {}
    reasons: dict[int, list[str]] = {}
    num_tokens = 0
    async for delta in deltas:
        texts[delta.choice] = texts.get(delta.choice, "") + delta.text
        if delta.finish_reason:
            reasons.setdefault(delta.choice, []).append(delta.finish_reason)
        if delta.usage is not None:
            num_tokens += delta.usage.completion_tokens
    return texts, reasons, num_tokens


def reading(*answers: AsyncIterable[Delta]) -> list["asyncio.Task[Told]"]:
    return [asyncio.create_task(told(answer)) for answer in answers]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("request_", [REQUEST, CHAT], ids=["completion", "chat"])
async def test_sse_cut_at_random_places_is_the_unbroken_answer(
    gateway: RunningGateway, request_: dict[str, object], seed: int
) -> None:
    async with (
        cutting_proxy(gateway.url, cuts(seed)) as proxy,
        Client(gateway.url) as straight,
        Client(proxy.url) as client,
    ):
        expected = await told(straight.stream(request_))
        assert await told(client.stream(request_)) == expected
    assert proxy.num_cuts >= 2
    if request_ is REQUEST:
        assert expected == ({0: text_of(150)}, {0: ["length"]}, 150)
    await eventually(lambda: gateway.app[keys.GENERATION].num_live == 0)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
async def test_a_socket_cut_at_random_places_gives_the_unbroken_answers(gateway: RunningGateway, seed: int) -> None:
    requests = [{**REQUEST, "prompt": [60 + number, 7]} for number in range(4)] + [CHAT]
    async with (
        cutting_proxy(gateway.url, cuts(seed, most=20_000)) as proxy,
        Client(gateway.url) as straight,
        Client(proxy.url) as client,
    ):
        async with straight.socket() as socket:
            expected = [await told(socket.generate(request)) for request in requests]
        async with client.socket() as socket:
            answers = await asyncio.gather(*(told(socket.generate(request)) for request in requests))
    assert answers == expected
    assert proxy.num_cuts >= 2
    await eventually(lambda: gateway.app[keys.GENERATION].num_live == 0)


async def test_it_goes_on_at_another_gateway() -> None:
    with serving(executor(step_s=0.005), gateway_timeout_s=1.0) as engine:
        async with running_gateway(engine.endpoint) as two:
            async with (
                running_gateway(engine.endpoint) as one,
                cutting_proxy(one.url) as proxy,
                Client(proxy.url) as client,
                client.socket() as socket,
            ):
                both = reading(client.stream(REQUEST), socket.generate(REQUEST))
                await eventually(lambda: one.app[keys.ENGINE].num_tokens > 40)
                proxy.target_url = two.url
                proxy.cut_all()
                for answer in both:
                    assert await answer == ({0: text_of(150)}, {0: ["length"]}, 150)
            assert two.app[keys.METRICS].num_attached >= 2


async def test_an_engines_restart_is_only_a_pause() -> None:
    with serving(executor(step_s=0.01)) as engine:
        async with (
            running_gateway(engine.endpoint) as gateway,
            cutting_proxy(gateway.url) as proxy,
            Client(proxy.url) as client,
            client.socket() as socket,
        ):
            both = reading(client.stream(REQUEST), socket.generate(REQUEST))
            await eventually(lambda: gateway.app[keys.ENGINE].num_tokens > 40)
            engine.stop()
            proxy.cut_all()  # and the connections break, too, while there is no engine
            await asyncio.sleep(0.3)
            with serving(executor(), endpoint=engine.endpoint):
                for answer in both:
                    assert await answer == ({0: text_of(150)}, {0: ["length"]}, 150)


async def test_it_gives_up_after_its_patience(gateway: RunningGateway) -> None:
    long = {**REQUEST, "max_tokens": 1500}
    async with (
        cutting_proxy(gateway.url) as proxy,
        Client(proxy.url, attach_grace_s=0.6) as client,
        client.socket() as socket,
    ):
        answers = [aiter(client.stream(long)), socket.generate(long)]
        for answer in answers:
            await anext(answer)
        proxy.is_open = False
        proxy.cut_all()
        for answer in answers:
            with pytest.raises(StreamBroken):
                await told(answer)
        with pytest.raises(StreamBroken, match="closed"):
            await told(socket.generate(REQUEST))
    await eventually(lambda: gateway.app[keys.GENERATION].num_live == 0)


async def test_a_stream_that_the_server_lost_is_said_to_be_lost(gateway: RunningGateway) -> None:
    """Its grace period is shorter than the break, or it was deleted meanwhile."""
    request = {**REQUEST, "max_tokens": 1500, "attach_grace_s": 0.05}
    async with cutting_proxy(gateway.url) as proxy, Client(proxy.url) as client, client.socket() as socket:
        sse = client.stream({**REQUEST, "max_tokens": 1500, "attach_grace_s": 20})
        over_sse, over_socket = aiter(sse), socket.generate(request)
        await anext(over_sse)
        await anext(over_socket)
        proxy.is_open = False
        proxy.cut_all()
        await eventually(lambda: gateway.app[keys.GENERATION].num_live <= 1)
        async with Client(gateway.url) as straight:
            await straight.cancel(sse.stream_id)
        await asyncio.sleep(0.5)  # the end of the other is kept for its grace period, too
        proxy.is_open = True
        with pytest.raises(StreamLost):
            await told(over_sse)
        with pytest.raises(StreamLost):
            await told(over_socket)


async def test_leaving_a_stream_ends_it_at_the_server(gateway: RunningGateway) -> None:
    async with Client(gateway.url) as client:
        deltas = aiter(client.stream({**REQUEST, "max_tokens": 1500}))
        await anext(deltas)
        await deltas.aclose()
        await eventually(lambda: gateway.app[keys.GENERATION].num_live == 0)
        reading = asyncio.create_task(told(aiter(client.stream({**REQUEST, "max_tokens": 1500}))))
        await eventually(lambda: gateway.app[keys.GENERATION].num_live == 1)
        await asyncio.sleep(0.2)
        reading.cancel()
        await eventually(lambda: gateway.app[keys.GENERATION].num_live == 0)

    async def is_idle() -> bool:
        return (await gateway.metrics())["num_allocated_blocks"] == 0

    await eventually_async(is_idle)


async def test_leaving_a_generation_while_the_socket_is_down_ends_it_when_it_is_back(gateway: RunningGateway) -> None:
    async with cutting_proxy(gateway.url) as proxy, Client(proxy.url) as client, client.socket() as socket:
        generation = socket.generate({**REQUEST, "max_tokens": 2000})
        await anext(generation)
        proxy.is_open = False
        proxy.cut_all()
        await asyncio.sleep(0.2)
        await generation.aclose()
        assert gateway.app[keys.GENERATION].num_live == 1
        proxy.is_open = True
        await eventually(lambda: gateway.app[keys.GENERATION].num_live == 0)
        assert (await told(socket.generate(REQUEST)))[1] == {0: ["length"]}


async def test_a_generation_is_attached_to_once_when_the_socket_breaks_while_its_attach_waits() -> None:
    said: list[list[str]] = []

    async def serve(request: web.Request) -> web.WebSocketResponse:
        here: list[str] = []
        said.append(here)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        name = (first := json.loads(await socket.receive_str()))["id"]
        here.append(first["type"])
        if first["type"] == "generate":
            await socket.send_json({"type": "started", "id": name, "stream_id": "0" * 32, "n": 1})
        elif len(said) == 2:  # there is no engine, and then no connection either
            error = {"message": "try again", "type": "server_error", "code": "not_ready", "retry_after_s": 1}
            await socket.send_json({"type": "error", "id": name, "error": error})
        else:
            await socket.send_json({"type": "started", "id": name, "stream_id": "0" * 32, "n": 1})
            with contextlib.suppress(TimeoutError):
                here.append(json.loads(await socket.receive_str(timeout=2))["type"])
            await socket.send_json({"type": "done", "id": name, "usage": {"completion_tokens": 7}})
            await socket.receive()
        await socket.close()
        return socket

    app = web.Application()
    app.router.add_get("/v1/stream", serve)
    async with TestServer(app) as server, Client(str(server.make_url(""))) as client, client.socket() as socket:
        assert await told(socket.generate(REQUEST)) == ({0: ""}, {}, 7)
    assert said == [["generate"], ["attach"], ["attach"]]


async def test_cancel_ends_a_stream_from_outside(gateway: RunningGateway) -> None:
    async with Client(gateway.url) as client:
        answer = client.stream({**REQUEST, "max_tokens": 1500})
        assert answer.stream_id == ""
        reading = asyncio.create_task(told(answer))
        await eventually(lambda: bool(answer.stream_id))
        await answer.cancel()
        assert (await reading)[1] == {0: ["abort"]}
        await answer.cancel()  # it has ended


async def test_a_reader_who_stands_still_holds_up_nobody_else_on_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "CREDIT_TOKENS", 64)
    long = {**REQUEST, "max_tokens": 400}
    # Steps take time, so that few tokens are on their way until the pause has reached the engine.
    with serving(executor(step_s=0.005)) as engine:
        async with (
            running_gateway(engine.endpoint) as gateway,
            Client(gateway.url) as client,
            client.socket() as socket,
        ):
            still = socket.generate(long)
            first = await anext(still)
            assert (await told(socket.generate(REQUEST)))[2] == 150
            await asyncio.sleep(0.5)
            assert gateway.app[keys.ENGINE].num_tokens - 150 <= 64 + 30
            texts, reasons, num_tokens = await told(still)
    assert (first.text + texts[0], reasons, num_tokens) == (text_of(400), {0: ["length"]}, 400)


async def test_errors_have_types(gateway: RunningGateway) -> None:
    async with Client(gateway.url) as client, client.socket() as socket:
        for stream in (
            aiter(client.stream({**REQUEST, "temperature": 9})),
            socket.generate({**REQUEST, "temperature": 9}),
        ):
            with pytest.raises(RequestRefused, match="temperature") as refused:
                await told(stream)
            assert refused.value.code == "invalid_value"
    with serving(executor(step_s=0.01), max_num_seqs=1, max_queue=1) as engine:
        async with running_gateway(engine.endpoint) as full, Client(full.url) as client, client.socket() as socket:
            held = [aiter(client.stream({**REQUEST, "max_tokens": 1500})) for _ in range(2)]
            waiting = [asyncio.create_task(anext(stream)) for stream in held]
            await eventually(lambda: full.app[keys.GENERATION].num_live == 2)
            await waiting[0]
            for stream in (aiter(client.stream(REQUEST)), socket.generate(REQUEST)):
                with pytest.raises(ServerBusy) as busy:
                    await told(stream)
                assert busy.value.retry_after_s is not None and busy.value.retry_after_s >= 1
            waiting[1].cancel()
            for stream in held:
                await stream.aclose()
    async with Client("http://127.0.0.1:9") as client:
        with pytest.raises(StreamBroken, match=r"127\.0\.0\.1:9"):
            await told(client.stream(REQUEST))
        with pytest.raises(StreamBroken, match=r"127\.0\.0\.1:9"):
            async with client.socket():
                pass


async def test_servers_without_ids_are_read_as_before() -> None:
    async with serving_openai() as server, Client(server.url) as client:
        assert (await told(client.stream({"prompt": "x", "max_tokens": 3})))[0] == {0: "word word word "}
        server.script = completion_events(["a", "b"])[:2]
        with pytest.raises(StreamBroken, match="broke off"):
            await told(client.stream({"prompt": "x"}))
        assert len(server.bodies) == 2
        server.status, server.failure = 500, ({"error": {"message": "oh"}}, {})
        with pytest.raises(ServerError, match="HTTP 500: oh") as caught:
            await told(client.stream({"prompt": "x"}))
        assert type(caught.value) is ServerError
