"""What is done to the servers: the engine dies, stands still and is replaced, gateways die, and nonsense comes at every
door."""

import asyncio
import contextlib
import json
import os
import random
import signal
import struct

import aiohttp
import zmq
import zmq.asyncio

from streamkv.errors import WireDecodeError
from streamkv.protocol import (
    WIRE_VERSION,
    Abort,
    Attach,
    Drain,
    GetSnapshot,
    GetStats,
    Heartbeat,
    Hello,
    Pause,
    Resume,
    Submit,
    decode_from_gateway,
    encode,
)
from streamkv.transport import new_gateway_id
from tests.chaos.report import Report
from tests.chaos.servers import Servers
from tests.support.wire_gateway import submission

TOKENS_BETWEEN = 120
"""The servers are left alone until so many tokens have come since the last time: who may end an engine three times
without a token between is failed (DESIGN §6), and a fault that comes at random is not one of a request's making."""
PATIENCE_S = 240.0
BLOWS = ("kill", "stop", "restart", "kill", "pause", "gateway", "gateway")
GATEWAY_START_S = 120.0
LONGEST_DOWN_S = 5.0

HTTP_PIECES = [
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n",
    b"GET /v1/stream HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n",
    b"GET /v1/streams/00 HTTP/1.1\r\nHost: x\r\nLast-Event-ID: 17.-\r\n",
    b"Content-Length: 99999999999999999999\r\n",
    b"Content-Length: 50\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n",
    b"\r\n",
    b"fffffffffff\r\n",
    b"0\r\n\r\n",
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1e999}',
    b'{"prompt": [[[[[[[[[[[[[[[[',
    b"\x16\x03\x01\x02\x00\x01\x00",
]
SOCKET_TEXTS = [
    "",
    "null",
    "[]",
    '{"type": "generate"}',
    '{"type": "generate", "id": "a", "prompt": "x", "max_tokens": -1}',
    '{"type": "attach", "id": "a", "stream_id": "00", "cursor": "-1"}',
    '{"type": "attach", "id": "a", "stream_id": "' + "0" * 32 + '"}',
    '{"type": "credit", "id": "a", "tokens": 99999999999999999999}',
    '{"type": "cancel", "id": "nobody"}',
    '{"type": "' + "x" * 5000 + '"}',
    "{" * 5000,
    '{"id": "\\ud800"}',
]
WIRE_FRAMES = [
    encode(message)
    for message in (
        submission(3, [1, 2, 3], 4),
        Abort(3),
        Abort(4, "stop_string", 2),
        Pause(3),
        Resume(3),
        Attach(5, bytes(16), 1, "someone"),
        Heartbeat(7, 9, True, 0.5, 0.25),
        Hello(WIRE_VERSION, b"\x01" * 16),
        GetStats(1),
        GetSnapshot(1),
    )
]


class ServerFaults:
    """Kills, stops and replaces the engine, and kills gateways, again and again.

    One at a time. A stream is in the engine and at its gateway, and outlives one of them: so nothing dies before those
    whose gateway was killed are back, nor before there is a new engine that the gateways have given their streams.
    """

    def __init__(self, servers: Servers, session: aiohttp.ClientSession, report: Report) -> None:
        self._servers = servers
        self._session = session
        self._report = report
        self._rng = random.Random(f"{report.seed} engine")
        self._struck_pid = 0
        """The engine that was killed, stopped or replaced; 0: there is another by now."""

    async def run(self, is_over: asyncio.Event) -> None:
        blows: list[str] = []
        while not is_over.is_set():
            if await self._has_worked(is_over):
                await asyncio.sleep(self._rng.uniform(0, 4))
                blows = blows or self._rng.sample(BLOWS, len(BLOWS))
                await self._strike(blows.pop())

    async def _has_worked(self, is_over: asyncio.Event) -> bool:
        report, loop = self._report, asyncio.get_running_loop()
        until_s = loop.time() + PATIENCE_S
        while not await self._has_engine():  # tokens from buffers go on coming meanwhile
            if is_over.is_set():
                return False
            if loop.time() > until_s:
                report.violate(f"no new engine in {PATIENCE_S:.0f} s")
                return False
            await asyncio.sleep(0.25)
        enough = report.num_received + TOKENS_BETWEEN
        while report.num_received < enough or self._servers.away:
            if is_over.is_set():
                return False
            if loop.time() > until_s:
                num_away = len(self._servers.away)
                report.violate(f"no {TOKENS_BETWEEN} tokens came in {PATIENCE_S:.0f} s; {num_away} are not back")
                self._servers.away.clear()
                return False
            await asyncio.sleep(0.25)
        return True

    async def _has_engine(self) -> bool:
        """Whether one has taken the place of that which was struck, and every gateway that runs is ready with it."""
        if not self._struck_pid:
            return True
        try:
            if self._servers.engine.engine_pid == self._struck_pid:
                return False
            for gateway in self._servers.gateways:
                if not gateway.is_down:
                    async with self._session.get(f"{gateway.url}/ready") as response:
                        if response.status != 200:
                            return False
        except (ValueError, OSError, aiohttp.ClientError):
            return False  # it is being started just now
        self._struck_pid = 0
        return True

    async def _strike(self, kind: str) -> None:
        servers, faults = self._servers, self._report.faults
        if kind == "gateway":
            faults["gateway killed (SIGKILL)"] += 1
            gateway, pause_s = self._rng.choice(servers.gateways), self._rng.uniform(0, LONGEST_DOWN_S)
            await servers.kill(gateway, self._session, pause_s, GATEWAY_START_S)
            return
        try:
            pid = servers.engine.engine_pid
        except ValueError:
            return  # it is being started just now
        if kind != "pause":
            self._struck_pid = pid
        if kind == "restart":
            faults["engine replaced (SIGUSR1)"] += 1
            servers.engine.process.send_signal(signal.SIGUSR1)
            return
        with contextlib.suppress(ProcessLookupError):
            if kind == "kill":
                faults["engine killed (SIGKILL)"] += 1
                os.kill(pid, signal.SIGKILL)
            elif kind == "stop":
                faults["engine hung (SIGSTOP)"] += 1
                os.kill(pid, signal.SIGSTOP)
            else:
                faults["engine slow (SIGSTOP, SIGCONT)"] += 1
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(self._rng.uniform(0.2, 3))
                os.kill(pid, signal.SIGCONT)


class Nonsense:
    """Malformed input on HTTP, WebSocket and ZeroMQ."""

    def __init__(self, servers: Servers, session: aiohttp.ClientSession, report: Report) -> None:
        self._servers = servers
        self._session = session
        self._report = report
        self._rng = random.Random(f"{report.seed} nonsense")

    async def run(self, is_over: asyncio.Event) -> None:
        while not is_over.is_set():
            send = self._rng.choice([self._over_http, self._over_socket, self._over_wire])
            try:
                async with asyncio.timeout(10):
                    await send()
            except (OSError, aiohttp.ClientError, TimeoutError):
                pass  # the server may break off what it cannot read, and need not answer half a request
            await asyncio.sleep(self._rng.uniform(0.05, 0.6))

    def _mutated(self, data: bytes) -> bytes:
        """Bytes changed, cut out, put in."""
        changed = bytearray(data)
        for _ in range(self._rng.randrange(1, 6)):
            place = self._rng.randrange(len(changed) + 1)
            what = self._rng.random()
            if what < 0.5 and place < len(changed):
                changed[place] = self._rng.randrange(256)
            elif what < 0.75:
                del changed[place : place + self._rng.randrange(1, 8)]
            else:
                changed[place:place] = self._rng.randbytes(self._rng.randrange(1, 8))
        return bytes(changed)

    async def _over_http(self) -> None:
        pieces = self._rng.sample(HTTP_PIECES, self._rng.randrange(1, 6))
        data = b"".join(pieces)
        if self._rng.random() < 0.5:
            data = self._mutated(data)
        host, port = self._rng.choice(self._servers.gateways).url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(data)
            self._report.faults["nonsense over HTTP"] += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(4096), self._rng.uniform(0.05, 2))
        finally:
            writer.transport.abort()

    async def _over_socket(self) -> None:
        gateway = self._rng.choice(self._servers.gateways)
        num_kills = gateway.num_kills
        async with self._session.ws_connect(f"{gateway.url}/v1/stream") as connection:
            for _ in range(self._rng.randrange(1, 6)):
                text = self._rng.choice(SOCKET_TEXTS)
                if self._rng.random() < 0.4:
                    text = self._mutated(text.encode()).decode("utf-8", "replace")
                await connection.send_str(text)
                message = await connection.receive(timeout=9)
                if message.type is not aiohttp.WSMsgType.TEXT:
                    if gateway.num_kills == num_kills:
                        self._report.violate(f"a text that is no message closed the socket: {text[:80]!r}")
                    return
                json.loads(message.data)
            self._report.faults["nonsense over WebSocket"] += 1
            underlying = connection._conn  # aiohttp has no public way to send what is no frame
            if self._rng.random() < 0.5 and underlying is not None and underlying.transport is not None:
                frame = bytes([self._rng.randrange(256), self._rng.randrange(256)]) + self._rng.randbytes(20)
                underlying.transport.write(self._rng.choice([frame, struct.pack("!BBQ", 0x82, 0xFF, 2**63)]))
                await asyncio.sleep(0.2)

    async def _over_wire(self) -> None:
        """From a gateway that is none. What would still be a Drain or a Submit is left out: those are orders."""
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        try:
            dealer.setsockopt(zmq.LINGER, 0)
            odd = self._rng.randbytes(self._rng.randrange(1, 40)).replace(b"\0", b"\1")
            dealer.setsockopt(zmq.ROUTING_ID, new_gateway_id() if self._rng.random() < 0.7 else odd)
            dealer.connect(self._servers.endpoint)
            if self._rng.random() < 0.7:
                await dealer.send(encode(Hello(WIRE_VERSION, b"\x02" * 16)))
            for _ in range(self._rng.randrange(1, 30)):
                frame = self._mutated(self._rng.choice(WIRE_FRAMES))
                if self._rng.random() < 0.2:
                    frame = self._rng.randbytes(self._rng.randrange(200))
                if not _is_order(frame):
                    await dealer.send_multipart([frame] * self._rng.choice([1, 1, 1, 2]))
            self._report.faults["nonsense over ZeroMQ"] += 1
            await asyncio.sleep(0.3)
        finally:
            dealer.close()
            context.term()


def _is_order(frame: bytes) -> bool:
    try:
        return isinstance(decode_from_gateway(frame), Drain | Submit)
    except WireDecodeError:
        return False
