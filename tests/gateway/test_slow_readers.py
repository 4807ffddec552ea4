"""Fifty clients that do not read, and one that does: each of the fifty is paused, the one goes on, nothing is lost."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from gateway import app as gateway_app
from gateway import keys
from tests.support.raw_clients import RawClient, events_of, resident_bytes
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

NUM_STALLED = 50
MIB = 1024 * 1024


def executor() -> ScriptedExecutor:
    return ScriptedExecutor(vocab_size=VOCAB_SIZE, num_blocks=8192, step_s=0.001)


def prompt(number: int) -> list[int]:
    return [30 + number, *range(40, 50)]


def body(number: int, num_tokens: int, **more: object) -> dict[str, Any]:
    return {"prompt": prompt(number), "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, **more}


def text_of(number: int, num_tokens: int) -> str:
    return small_tokenizer().decode(executor().expected_tokens(prompt(number), num_tokens))


Stalled = tuple[Callable[[], Awaitable[str]], Callable[[], None]]
"""Reads a stalled client's whole answer; closes it."""


async def stalled_by_sse(gateway: RunningGateway, number: int, num_tokens: int) -> Stalled:
    client = await RawClient.connect(gateway.url, 4096)
    await client.post("/v1/completions", body(number, num_tokens, stream=True))

    async def read() -> str:
        events = events_of(await client.read_all())
        assert events.data[-1] == "[DONE]" and events.reasons() == {0: ["length"]}
        return events.text()

    return read, client.close


async def stalled_by_websocket(gateway: RunningGateway, number: int, num_tokens: int) -> Stalled:
    def small_buffer(address: Any) -> socket.socket:
        connection = socket.socket(*address[:3])
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        return connection

    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(socket_factory=small_buffer))
    connection = await session.ws_connect(gateway.url + "/v1/stream", max_msg_size=0)
    underlying = connection._conn  # aiohttp has no public way to stop reading
    assert underlying is not None and underlying.transport is not None
    transport = underlying.transport
    await connection.send_str(json.dumps({"type": "generate", "id": "a", **body(number, num_tokens)}))
    transport.pause_reading()  # type: ignore[attr-defined]  # it is one that reads

    async def read() -> str:
        transport.resume_reading()  # type: ignore[attr-defined]
        text, reasons = "", []
        while (event := await connection.receive_json(timeout=60))["type"] != "done":
            text += event["text"] if event["type"] == "delta" else ""
            reasons += [event["finish_reason"]] if event["type"] == "finished" else []
        assert reasons == ["length"]
        await session.close()
        return text

    return read, lambda: transport.abort()


def num_unread(gateway: RunningGateway) -> list[int]:
    """Bytes that the gateway itself keeps for each connection."""
    return [transport.get_write_buffer_size() for transport in gateway.server._transports()]  # type: ignore[attr-defined]


async def check(
    stall: Callable[[RunningGateway, int, int], Awaitable[Stalled]], num_tokens: int, buffer_bytes: int
) -> None:
    with serving(executor(), max_num_seqs=128) as engine:
        async with running_gateway(engine.endpoint, max_stream_buffer_bytes=buffer_bytes) as gateway:
            stalled = [await stall(gateway, number, num_tokens) for number in range(NUM_STALLED)]
            normal = asyncio.create_task(gateway.events("/v1/completions", body(NUM_STALLED, num_tokens)))

            async def all_stand_aside() -> bool:
                figures = await gateway.metrics()
                return figures["num_paused_requests"] == NUM_STALLED

            await eventually_async(all_stand_aside, 60)
            assert (await normal).text() == text_of(NUM_STALLED, num_tokens), (
                "a reader waited for those who do not read"
            )

            async def nobody_runs() -> bool:
                # What has become small enough in the kernel's buffers may let one go on for a moment.
                return await all_stand_aside() and (await gateway.metrics())["num_running_requests"] == 0

            await eventually_async(nobody_runs, 60)
            figures = await gateway.metrics()
            assert figures["gateway_slow_reader_pauses_total"] >= NUM_STALLED
            assert figures["pauses_total"] >= NUM_STALLED
            # Nothing more comes, and what waits here is what the setting says and the steps that were on their way
            num_before, memory_before = gateway.app[keys.ENGINE].num_tokens, resident_bytes()
            for _ in range(5):
                _, answer = await gateway.post("/v1/completions", body(NUM_STALLED + 1, 20))
                assert answer["choices"][0]["text"] == text_of(NUM_STALLED + 1, 20)
            assert gateway.app[keys.ENGINE].num_tokens == num_before + 5 * 20 < NUM_STALLED * num_tokens
            assert max(num_unread(gateway)) < buffer_bytes + 64 * 1024
            assert resident_bytes() - memory_before < 8 * MIB
            texts = await asyncio.gather(*(read() for read, _ in stalled))
            assert texts == [text_of(number, num_tokens) for number in range(NUM_STALLED)]
            await eventually(lambda: gateway.app[keys.GENERATION].num_live == 0)
            figures = await gateway.metrics()
            assert figures["num_paused_requests"] == figures["num_allocated_blocks"] == 0
            for _, close in stalled:
                close()


async def test_fifty_who_do_not_read_are_paused_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_app, "SEND_BUFFER_BYTES", 4096)
    await check(stalled_by_sse, 150, 2048)


@pytest.mark.long
@pytest.mark.timeout(200)
async def test_fifty_sockets_that_are_not_read_are_paused_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_app, "SEND_BUFFER_BYTES", 4096)
    await check(stalled_by_websocket, 600, 2048)


async def test_a_socket_that_is_not_read_does_not_keep_the_server_from_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway_app, "SEND_BUFFER_BYTES", 4096)
    monkeypatch.setattr(gateway_app, "SHUTDOWN_TIMEOUT_S", 0.2)
    with serving(executor()) as engine:
        async with running_gateway(engine.endpoint, max_stream_buffer_bytes=256 * 1024) as gateway:
            _, close = await stalled_by_websocket(gateway, 0, 1900)
            await eventually(lambda: max(num_unread(gateway)) > 80 * 1024)  # more than aiohttp waits for to be read
            await asyncio.wait_for(gateway.server.close(), 30)
            close()


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_and_so_with_the_send_buffer_that_a_server_has() -> None:
    await check(stalled_by_sse, 1900, 64 * 1024)
