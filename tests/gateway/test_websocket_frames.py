"""The WebSocket's frames: what is fragmented, compressed, too large, slow or wrong, down to the bytes."""

import asyncio
import base64
import json
import os
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from gateway import keys
from gateway.routes import websocket
from tests.support.running_gateway import (
    VOCAB_SIZE,
    RunningGateway,
    eventually,
    running_gateway,
    small_tokenizer,
)
from tests.support.scripted_engine import serving
from tests.support.scripted_executor import ScriptedExecutor

PROMPT = list(range(30, 50))
MAX_BYTES = 64 * 1024
TEXT, BINARY, CLOSE, PING, PONG, MORE = 1, 2, 8, 9, 10, 0


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        async with running_gateway(engine.endpoint, max_body_bytes=MAX_BYTES) as running:
            yield running


def frame(
    payload: bytes, opcode: int = TEXT, *, is_last: bool = True, flags: int = 0, size: int | None = None
) -> bytes:
    """A client's frame, masked. size: what its header says, if not the truth."""
    size = len(payload) if size is None else size
    head = bytes([0x80 * is_last | flags | opcode])
    if size < 126:
        head += bytes([0x80 | size])
    elif size < 65536:
        head += b"\xfe" + size.to_bytes(2, "big")
    else:
        head += b"\xff" + size.to_bytes(8, "big")
    mask = os.urandom(4)
    return head + mask + bytes(byte ^ mask[index % 4] for index, byte in enumerate(payload))


class Raw:
    """A connection on which every byte is the test's own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: str) -> None:
        self.reader = reader
        self.writer = writer
        self.head = head

    def send(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    async def read(self) -> tuple[int, bytes]:
        """(opcode, payload) of the next frame; (8, b"") when the connection has ended without one."""
        try:
            first, second = await asyncio.wait_for(self.reader.readexactly(2), 20)
            size = second & 0x7F
            if size >= 126:
                size = int.from_bytes(await self.reader.readexactly(2 if size == 126 else 8), "big")
            assert first & 0x70 == 0 and second & 0x80 == 0, "reserved bits, or a mask"
            return first & 0x0F, await self.reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return CLOSE, b""

    async def pong(self) -> bytes:
        """The next one; the server's own pings are not for it."""
        while (found := await self.read())[0] == PING:
            pass
        assert found[0] == PONG, found
        return found[1]

    async def event(self) -> dict[str, Any]:
        """The next one; pings are answered."""
        while True:
            opcode, payload = await self.read()
            if opcode == PING:
                self.send(frame(payload, PONG))
                continue
            assert opcode == TEXT, (opcode, payload)
            found: dict[str, Any] = json.loads(payload)
            return found

    async def close_code(self) -> int:
        while True:
            opcode, payload = await self.read()
            if opcode == CLOSE:
                return int.from_bytes(payload[:2], "big")


@asynccontextmanager
async def connected(gateway: RunningGateway, **headers: str) -> AsyncIterator[Raw]:
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    key = base64.b64encode(os.urandom(16)).decode()
    lines = {"Host": "x", "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
             "Sec-WebSocket-Key": key, **headers}  # fmt: skip
    writer.write(("GET /v1/stream HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items()) + "\r\n").encode())
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    assert head.startswith("HTTP/1.1 101 ")
    try:
        yield Raw(reader, writer, head)
    finally:
        writer.close()


def generate(client_id: str = "a", max_tokens: int = 5, **more: Any) -> bytes:
    fields = {"type": "generate", "id": client_id, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, **more}
    return json.dumps(fields).encode()


async def text_until_done(raw: Raw, client_id: str = "a") -> str:
    text = ""
    while (event := await raw.event())["type"] != "done" or event["id"] != client_id:
        assert event["type"] != "error", event
        text += event["text"] if event["type"] == "delta" and event["id"] == client_id else ""
    return text


def text_of(num_tokens: int) -> str:
    executor = ScriptedExecutor(vocab_size=VOCAB_SIZE)
    return small_tokenizer().decode(executor.expected_tokens(PROMPT, num_tokens))


async def test_a_message_may_come_in_fragments_with_pings_between_them(gateway: RunningGateway) -> None:
    message = generate(user="日本" * 50)
    async with connected(gateway) as raw:
        for start in range(0, len(message), 7):  # also amid a character
            part, is_last = message[start : start + 7], start + 7 >= len(message)
            raw.send(frame(part, TEXT if start == 0 else MORE, is_last=is_last))
            if start % 70 == 0:
                raw.send(frame(b"%d" % start, PING))
                assert await raw.pong() == b"%d" % start
        assert await text_until_done(raw) == text_of(5)


async def test_compression_is_not_agreed_to(gateway: RunningGateway) -> None:
    offer = {"Sec-WebSocket-Extensions": "permessage-deflate; client_max_window_bits"}
    async with connected(gateway, **offer) as raw:
        assert "sec-websocket-extensions" not in raw.head.lower()
        raw.send(frame(generate()))
        assert await text_until_done(raw) == text_of(5)
    async with gateway.session.ws_connect(gateway.url + "/v1/stream", compress=15) as socket:
        assert socket.compress == 0


async def test_a_compressed_bomb_is_refused_before_it_is_unpacked(gateway: RunningGateway) -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = packer.compress(b" " * 2**23) + packer.flush(zlib.Z_SYNC_FLUSH)
    async with connected(gateway, **{"Sec-WebSocket-Extensions": "permessage-deflate"}) as raw:
        raw.send(frame(bomb, flags=0x40))
        assert await raw.close_code() == 1002


@pytest.mark.parametrize("is_fragmented", [False, True])
async def test_a_message_over_the_limit_ends_the_socket_without_being_gathered(
    gateway: RunningGateway, is_fragmented: bool
) -> None:
    async with connected(gateway) as raw:
        if is_fragmented:
            part = b"x" * 4000
            raw.send(frame(part, is_last=False))
            for _ in range(MAX_BYTES // len(part) + 1):
                raw.send(frame(part, MORE, is_last=False))
        else:
            raw.send(frame(b"", size=2**40))  # its header alone is enough
        assert await raw.close_code() == aiohttp.WSCloseCode.MESSAGE_TOO_BIG


async def test_a_message_just_below_the_limit_is_taken(gateway: RunningGateway) -> None:
    message = generate()
    message += b" " * (MAX_BYTES - 1 - len(message))
    async with connected(gateway) as raw:
        raw.send(frame(message))
        assert await text_until_done(raw) == text_of(5)
        raw.send(frame(message[:100], is_last=False), frame(message[100:], MORE))
        assert await text_until_done(raw) == text_of(5)


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([frame(b"{}", 3)], 1002),  # an opcode that does not exist
        ([frame(b"{}", flags=0x20)], 1002),
        ([frame(b"{}", MORE)], 1002),  # goes on with nothing
        ([frame(b"{", is_last=False), frame(b"}", TEXT)], 1002),  # another message amid one
        ([frame(b"x", PING, is_last=False)], 1002),
        ([frame(b"\xff\xfe")], 1007),
        ([frame((1005).to_bytes(2, "big"), CLOSE)], 1002),
    ],
)
async def test_frames_that_break_the_protocol_end_the_socket_and_what_it_had(
    gateway: RunningGateway, frames: list[bytes], code: int
) -> None:
    async with connected(gateway) as raw:
        raw.send(frame(generate("long", 2000)))
        await raw.event()
        raw.send(*frames)
        assert await raw.close_code() == code
    await eventually(lambda: gateway.app[keys.GENERATION].num_live == 0)


async def test_what_is_wrong_inside_a_frame_is_answered_and_the_socket_goes_on(gateway: RunningGateway) -> None:
    wrong = [
        frame(b""),
        frame(b" "),
        frame(b"null"),
        frame(b"\xef\xbb\xbf{}"),
        frame(b'{"type": "ping", "type": "ping"}'),
        frame(b'{"type": "\\ud800"}'),
        frame(b'{"type": "generate", "id": "\\u0000", "prompt": [1], "temperature": 9}'),
        frame(b"[" * 2000),
        frame(b'{"a":' * 500 + b"1" + b"}" * 500),
        frame(generate(), BINARY),
        frame(b"\x81\xa4type\xa4ping", BINARY),
    ]
    async with connected(gateway) as raw:
        raw.send(*wrong)
        for _ in wrong:
            assert (await raw.event())["type"] == "error"
        raw.send(frame(generate()))
        assert await text_until_done(raw) == text_of(5)


async def test_a_slow_upload_is_alive_though_it_answers_no_ping(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pong cannot come amid a frame, so what counts is that something comes."""
    monkeypatch.setattr(websocket, "_PING_S", 0.2)
    message = frame(generate() + b" " * 3000)
    async with connected(gateway) as raw:
        for start in range(0, len(message), 200):
            raw.send(message[start : start + 200])
            await asyncio.sleep(0.1)  # 1.6 s in all: eight pings, and none can be answered
        assert await text_until_done(raw) == text_of(5)


async def test_an_upload_that_stops_half_way_is_gone_after_a_few_pings(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "_PING_S", 0.1)
    async with connected(gateway) as raw:
        raw.send(frame(generate())[:40])
        assert await raw.close_code() == 0  # broken off
    await eventually(lambda: not gateway.app[keys.SOCKETS].live)


async def test_a_long_stream_outlives_many_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "_PING_S", 0.1)
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE, step_s=0.02)) as engine:
        async with running_gateway(engine.endpoint) as gateway, connected(gateway) as raw:
            raw.send(frame(generate(max_tokens=60)))
            num_pings, text = 0, ""
            while True:
                opcode, payload = await raw.read()
                if opcode == PING:
                    num_pings += 1
                    raw.send(frame(payload, PONG))
                    continue
                event = json.loads(payload)
                text += event["text"] if event["type"] == "delta" else ""
                if event["type"] == "done":
                    break
    assert num_pings > 3 and text == text_of(60)


async def test_a_ping_of_the_client_is_answered_with_its_own_bytes_amid_a_stream(gateway: RunningGateway) -> None:
    async with connected(gateway) as raw:
        raw.send(frame(generate(max_tokens=300)), frame(b"here?", PING), frame(b"", PING))
        pongs = []
        while len(pongs) < 2:
            opcode, payload = await raw.read()
            assert opcode in (TEXT, PING, PONG)
            pongs += [payload] if opcode == PONG else []
    assert pongs == [b"here?", b""]
