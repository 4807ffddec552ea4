"""A client that went without a word is told from one that merely does not read."""

import asyncio
import socket
import struct
import time
from pathlib import Path

import pytest

from gateway import keys, silence
from gateway.silence import ask_silent_ones, is_gone
from tests.support.raw_clients import RawClient
from tests.support.running_gateway import VOCAB_SIZE, eventually, eventually_async, running_gateway
from tests.support.scripted_engine import serving
from tests.support.scripted_executor import ScriptedExecutor

BODY = {"prompt": list(range(30, 50)), "max_tokens": 1900, "temperature": 0, "ignore_eos": True}


def info(num_resent: int, num_probes: int, silent_ms: int) -> bytes:
    return struct.pack("=xxBB4x48xI", num_resent, num_probes, silent_ms)


@pytest.mark.parametrize(
    ("num_resent", "num_probes", "silent_ms", "expected"),
    [
        (0, 0, 10**9, False),  # idle, and not asked
        (0, 1, 10**9, False),  # it does not read, and the next probe of its window is on its way
        (9, 0, 9_999, False),
        (3, 0, 10_000, True),
        (0, 2, 10_000, True),
    ],
)
def test_gone_is_who_was_asked_and_answers_nothing(
    num_resent: int, num_probes: int, silent_ms: int, expected: bool
) -> None:
    assert is_gone(info(num_resent, num_probes, silent_ms), 10.0) is expected


def test_accepted_sockets_are_probed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ask_silent_ones(listener, 60.0)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            found = [
                accepted.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            ]
            assert found == [30, 10, 3], "idle for so long, then so many probes, are not the 60 s"


@pytest.mark.long
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_client_that_falls_silent_is_gone_and_its_blocks_are_free(is_streamed: bool) -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE, step_s=0.05)) as engine:
        async with running_gateway(engine.endpoint, keepalive_timeout_s=2.0, keepalive_s=1.0) as gateway:
            client = await RawClient.connect(gateway.url)
            await client.post("/v1/completions", {**BODY, "stream": is_streamed})
            await eventually(lambda: gateway.app[keys.ENGINE].num_tokens > 3)
            client.fall_silent()
            await eventually(lambda: gateway.app[keys.METRICS].aborts["disconnected"] == 1, 15)

            async def is_idle() -> bool:
                figures = await gateway.metrics()
                return figures["num_allocated_blocks"] == figures["num_live_streams"] == 0

            await eventually_async(is_idle)
            client.close()


@pytest.mark.long
async def test_a_client_that_does_not_read_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.app.SEND_BUFFER_BYTES", 4096)
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        async with running_gateway(
            engine.endpoint, keepalive_timeout_s=1.0, keepalive_s=0.5, max_stream_buffer_bytes=2048
        ) as gateway:
            client = await RawClient.connect(gateway.url, 4096)
            await client.post("/v1/completions", {**BODY, "stream": True})
            await eventually(lambda: gateway.app[keys.METRICS].num_slow_reader_pauses > 0)
            until_s = time.monotonic() + 6
            while time.monotonic() < until_s:
                assert gateway.app[keys.GENERATION].num_live == 1
                await asyncio.sleep(0.1)
            raw = await client.read_all()
            assert raw.count(b'"finish_reason":"length"') == 1 and b"data: [DONE]" in raw
            client.close()


async def test_a_connection_that_closes_meanwhile_is_passed_over() -> None:
    class Closed:
        def getsockopt(self, level: int, option: int, size: int) -> bytes:
            raise OSError(9, "Bad file descriptor")

    class ClosedTransport(asyncio.Transport):
        num_looks = 0

        def get_extra_info(self, name: str, default: object = None) -> object:
            self.num_looks += 1
            return Closed()

        def is_closing(self) -> bool:
            return False

    transport = ClosedTransport()
    watching = asyncio.create_task(silence.break_off_silent_ones(lambda: [transport], 0.04))
    await eventually(lambda: transport.num_looks >= 2)
    assert not watching.done()
    watching.cancel()


def test_the_figures_of_the_kernel_stand_where_they_are_read() -> None:
    """On a connection whose other end drops everything, something is sent again, and nothing answers."""
    if not Path("/proc/net/tcp").exists():
        pytest.skip("needs Linux")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = RawClient(socket.create_connection(listener.getsockname()))
        accepted, _ = listener.accept()
        with accepted:
            accepted.sendall(b"heard")
            client.connection.recv(5)
            client.fall_silent()
            begun = time.monotonic()
            accepted.sendall(b"not heard")
            until_s = begun + 20

            def is_silent() -> bool:
                return is_gone(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60), 0.5)

            assert not is_silent()
            while not is_silent():
                assert time.monotonic() < until_s
                time.sleep(0.02)
            assert time.monotonic() - begun >= 0.5
        client.close()
