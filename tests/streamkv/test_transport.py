"""Endpoints are private or keyed; frames are neither lost, doubled nor given to another engine; nobody spins."""

import asyncio
import inspect
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop
import zmq

from streamkv.errors import ConfigError
from streamkv.transport import (
    MAX_FRAME_BYTES,
    CurveKeys,
    EngineSocket,
    GatewaySocket,
    check_endpoint,
    default_endpoint,
    load_curve_keys,
    new_gateway_id,
    write_curve_keys,
)
from tests.support.scripted_engine import free_endpoint


@pytest.fixture
def endpoint() -> Iterator[str]:
    with free_endpoint() as free:
        yield free


# Endpoints


@pytest.mark.parametrize(
    "good",
    ["ipc:///run/x.sock", "tcp://127.0.0.1:5555", "tcp://127.9.9.9:1", "tcp://localhost:5555", "tcp://127.0.0.1:*"],
)
def test_what_other_machines_cannot_reach_needs_no_keys(good: str) -> None:
    check_endpoint(good, has_keys=False)


@pytest.mark.parametrize("far", ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://10.0.0.1:5555", "tcp://engine:5555"])
def test_what_other_machines_can_reach_needs_keys(far: str) -> None:
    with pytest.raises(ConfigError, match="CURVE") as error:
        check_endpoint(far, has_keys=False)
    assert error.value.field == "endpoint" and far in str(error.value)
    check_endpoint(far, has_keys=True)
    with pytest.raises(ConfigError, match="CURVE"):
        EngineSocket(far)


@pytest.mark.parametrize(
    "bad",
    [
        *("", "engine", "ipc://", "ipc://@abstract", "ipc:///" + "x" * 107, "ipc:///tmp/a\0b", "inproc://x"),
        *("tcp://127.0.0.1", "tcp://:5", "tcp://1.2.3.4:99999", "tcp://127.0.0.1:x", "udp://127.0.0.1:5"),
    ],
)
def test_what_is_no_endpoint_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_endpoint(bad, has_keys=True)
    assert error.value.field == "endpoint"


def test_the_default_endpoint_lies_in_a_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = Path("/tmp") / f"skv-test-{os.getpid()}"
    short.mkdir(mode=0o700)
    try:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
        path = Path(default_endpoint("name").removeprefix("ipc://"))
        assert path == short / "streamkv" / "name.sock"
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert default_endpoint("name") == f"ipc://{path}", "asking twice is harmless"

        path.parent.chmod(0o755)
        with pytest.raises(ConfigError, match="0700"):
            default_endpoint("name")
        path.parent.rmdir()
        path.parent.symlink_to(tmp_path)
        with pytest.raises(ConfigError, match="no link"):
            default_endpoint("name")
        path.parent.unlink()
    finally:
        short.rmdir()


@pytest.mark.parametrize("runtime", ["", "/nonexistent", "open", "x" * 90])
def test_without_a_usable_runtime_folder_the_default_lies_under_tmp(
    runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / runtime
    if runtime in ("open", "x" * 90):
        folder.mkdir(mode=0o755 if runtime == "open" else 0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder) if runtime else "")
    assert default_endpoint("test") == f"ipc:///tmp/streamkv-{os.geteuid()}/test.sock"


def test_a_second_engine_does_not_steal_a_live_engines_socket(endpoint: str) -> None:
    first = EngineSocket(endpoint)
    with pytest.raises(ConfigError, match="another engine runs"):
        EngineSocket(endpoint)
    first.close()
    EngineSocket(endpoint).close()


def test_a_dead_engines_socket_is_taken_over(endpoint: str) -> None:
    code = f"from streamkv.transport import EngineSocket; EngineSocket({endpoint!r}); print('up', flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert os.path.exists(endpoint.removeprefix("ipc://"))
    EngineSocket(endpoint).close()


def test_another_programs_file_or_socket_is_left_alone(endpoint: str) -> None:
    path = Path(endpoint.removeprefix("ipc://"))
    path.write_text("precious")
    with pytest.raises(ConfigError, match="no socket"):
        EngineSocket(endpoint)
    assert path.read_text() == "precious"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(ConfigError, match="another program listens"):
            EngineSocket(endpoint)


def test_a_socket_in_a_folder_that_is_not_there_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match="/nonexistent/x"):
        EngineSocket("ipc:///nonexistent/x")


# Keys


def test_keys_are_written_for_their_owner_alone_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "engine.key"
    public = write_curve_keys(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    keys = load_curve_keys(str(path))
    assert keys is not None and keys.public == public and keys.secret not in repr(keys).encode()
    with pytest.raises(ConfigError, match="cannot write"):
        write_curve_keys(path)


def test_bad_keys_are_refused_by_the_settings_name(tmp_path: Path) -> None:
    assert load_curve_keys("") is None
    path = tmp_path / "engine.key"
    with pytest.raises(ConfigError, match="cannot read"):
        load_curve_keys(str(path))
    public = write_curve_keys(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600") as error:
        load_curve_keys(str(path))
    assert error.value.field == "curve_secret_key_file"
    path.chmod(0o600)
    path.write_text("too short")
    with pytest.raises(ConfigError, match="one key of 40"):
        load_curve_keys(str(path))
    with pytest.raises(ConfigError) as error:
        load_curve_keys("", "é" * 40)
    assert error.value.field == "curve_server_key"
    fresh = load_curve_keys("", public.decode())
    assert fresh is not None and fresh.server_public == public


# Frames


class Heard:
    """A GatewaySocket's callbacks, kept in order."""

    def __init__(self, endpoint: str, keys: CurveKeys | None = None) -> None:
        self.frames: list[bytes] = []
        self.events: list[tuple[str, int]] = []
        """(what, frames so far)."""
        self.gateway_id = new_gateway_id()
        self.socket = GatewaySocket(
            endpoint,
            self.gateway_id,
            on_frame=self.frames.append,
            on_connected=self._connected,
            on_disconnected=lambda: self.events.append(("lost", len(self.frames))),
            keys=keys,
        )

    def _connected(self) -> None:
        self.events.append(("connected", len(self.frames)))
        assert self.socket.send(b"hello")

    async def wait_until(self, what: str, timeout_s: float = 8.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not self.events or self.events[-1][0] != what:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def wait_frames(self, count: int, timeout_s: float = 8.0) -> None:
        async with asyncio.timeout(timeout_s):
            while len(self.frames) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


@asynccontextmanager
async def connected(endpoint: str, keys: CurveKeys | None = None) -> AsyncIterator[Heard]:
    heard = Heard(endpoint, keys)
    heard.socket.connect()
    try:
        yield heard
    finally:
        heard.socket.close()


async def receive(engine: EngineSocket, timeout_s: float = 5.0) -> tuple[bytes, bytes]:
    until_s = time.monotonic() + timeout_s
    while (received := engine.receive()) is None:
        assert time.monotonic() < until_s, "nothing came"
        await asyncio.sleep(0.005)
    return received


def on_each_loop(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    """Run an async test on asyncio's loop and on uvloop's, which the gateway uses."""

    def run(new_loop: Callable[[], asyncio.AbstractEventLoop], **fixtures: object) -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(test(**fixtures))

    asked = inspect.signature(test).parameters
    both = [inspect.Parameter("new_loop", inspect.Parameter.KEYWORD_ONLY), *asked.values()]
    run.__signature__ = inspect.Signature([p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in both])  # type: ignore[attr-defined]
    loops = [pytest.param(asyncio.new_event_loop, id="asyncio"), pytest.param(uvloop.new_event_loop, id="uvloop")]
    return pytest.mark.parametrize("new_loop", loops)(run)


@on_each_loop
async def test_frames_go_both_ways_in_order(endpoint: str) -> None:
    engine = EngineSocket(endpoint)
    async with connected(endpoint) as heard:
        assert await receive(engine) == (heard.gateway_id, b"hello")
        sent = [b"%d" % number for number in range(2000)]
        for number, frame in enumerate(sent):
            assert engine.send(heard.gateway_id, frame)
            if number % 100 == 0:  # both directions at once: sending must not swallow the other way's signal
                await asyncio.sleep(0)
                assert heard.socket.send(frame)
        await heard.wait_frames(len(sent))
        assert heard.frames == sent
        assert [(await receive(engine))[1] for _ in range(20)] == sent[::100]
    engine.close()


@on_each_loop
async def test_no_frame_is_left_lying_after_a_send(endpoint: str) -> None:
    engine = EngineSocket(endpoint)
    stop = threading.Event()

    def echo() -> None:
        while not stop.is_set():
            engine.wait(0.2)
            while (received := engine.receive()) is not None:
                engine.send(*received)

    thread = threading.Thread(target=echo)
    thread.start()
    try:
        async with connected(endpoint) as heard:
            await heard.wait_frames(1)
            for number in range(1, 400):
                heard.socket.send(b"ping")
                await heard.wait_frames(number + 1, timeout_s=2.0)
    finally:
        stop.set()
        thread.join()
        engine.close()


@on_each_loop
async def test_a_flood_of_frames_leaves_the_loop_to_others(endpoint: str) -> None:
    engine = EngineSocket(endpoint)
    async with connected(endpoint) as heard:
        await receive(engine)
        slow: list[bytes] = []

        def take_slowly(frame: bytes) -> None:
            slow.append(frame)
            until_s = time.perf_counter() + 0.0005
            while time.perf_counter() < until_s:
                pass

        heard.socket._on_frame = take_slowly
        for _ in range(1000):
            engine.send(heard.gateway_id, b"x")
        longest_s, last_s = 0.0, time.perf_counter()
        while len(slow) < 1000:
            await asyncio.sleep(0)
            now_s = time.perf_counter()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
        assert longest_s < 0.2, "the whole flood takes over 0.5 s"
    engine.close()


@on_each_loop
async def test_a_gateway_hears_of_a_lost_engine_after_its_last_frame_and_greets_the_next_one(endpoint: str) -> None:
    async with connected(endpoint) as heard:
        assert not heard.socket.send(b"nobody there")
        engine = EngineSocket(endpoint)
        await receive(engine)
        for _ in range(500):
            engine.send(heard.gateway_id, b"last words")
        engine.close()
        time.sleep(0.1)  # noqa: ASYNC251 - the loop is busy while the connection breaks
        await heard.wait_until("lost")
        assert heard.events == [("connected", 0), ("lost", 500)]
        assert not heard.socket.send(b"for the engine that is gone")
        engine = EngineSocket(endpoint)
        assert await receive(engine) == (heard.gateway_id, b"hello")
        await asyncio.sleep(0.05)
        assert engine.receive() is None, "nothing of the old connection reaches the new engine"
        assert engine.send(heard.gateway_id, b"welcome")
        await heard.wait_frames(501)
        engine.close()


@on_each_loop
async def test_a_busy_engine_misses_nothing_and_a_gone_gateway_cannot_be_addressed(endpoint: str) -> None:
    engine = EngineSocket(endpoint)
    async with connected(endpoint) as heard:
        await receive(engine)
        for number in range(3000):
            assert heard.socket.send(b"%d" % number)
    await asyncio.sleep(0.2)
    assert [(await receive(engine))[1] for _ in range(3000)] == [b"%d" % number for number in range(3000)]
    assert not engine.send(heard.gateway_id, b"too late")
    assert not engine.send(b"never seen", b"x")
    engine.close()


@on_each_loop
async def test_frames_over_the_bound_are_not_sent(endpoint: str) -> None:
    async with connected(endpoint) as heard:
        with pytest.raises(ValueError, match=str(MAX_FRAME_BYTES)):
            heard.socket.send(bytes(MAX_FRAME_BYTES + 1))


@on_each_loop
async def test_a_peer_that_sends_too_large_a_frame_is_cut_off_and_others_go_on(endpoint: str) -> None:
    engine = EngineSocket(endpoint)
    context = zmq.Context()
    rogue = context.socket(zmq.DEALER)
    rogue.setsockopt(zmq.LINGER, 0)
    rogue.connect(endpoint)
    rogue.send(bytes(MAX_FRAME_BYTES + 1))
    async with connected(endpoint):
        assert (await receive(engine))[1] == b"hello"
    assert engine.receive() is None
    rogue.close()
    context.term()
    engine.close()


@on_each_loop
async def test_only_who_knows_the_engines_key_gets_through(tmp_path: Path) -> None:
    public = write_curve_keys(tmp_path / "engine.key")
    engine = EngineSocket("tcp://127.0.0.1:*", load_curve_keys(str(tmp_path / "engine.key")))
    other = write_curve_keys(tmp_path / "other.key")
    async with connected(engine.endpoint, load_curve_keys("", other.decode())) as stranger:
        async with connected(engine.endpoint) as plain:
            await asyncio.sleep(0.3)
            assert engine.receive() is None and not stranger.events and not plain.events
        async with connected(engine.endpoint, load_curve_keys("", public.decode())) as friend:
            assert await receive(engine) == (friend.gateway_id, b"hello")
            assert engine.send(friend.gateway_id, b"welcome")
            await friend.wait_frames(1)
    engine.close()


@on_each_loop
async def test_keys_without_the_engines_public_key_are_refused_on_the_gateway(tmp_path: Path) -> None:
    write_curve_keys(tmp_path / "gateway.key")
    with pytest.raises(ConfigError) as error:
        Heard("tcp://10.0.0.1:5", load_curve_keys(str(tmp_path / "gateway.key")))
    assert error.value.field == "curve_server_key"


def test_wait_ends_for_a_wake_from_another_thread_and_not_before(endpoint: str) -> None:
    engine = EngineSocket(endpoint)
    start = time.monotonic()
    engine.wait(0.15)
    assert time.monotonic() - start >= 0.14
    threading.Timer(0.1, engine.wake).start()
    start = time.monotonic()
    engine.wait(5.0)
    assert 0.05 < time.monotonic() - start < 2.0
    engine.wake()
    engine.wake()
    engine.wait(5.0)
    start = time.monotonic()
    engine.wait(0.1)
    assert time.monotonic() - start >= 0.09, "wakes do not pile up"
    engine.close()
    engine.wake()
    engine.close()


@on_each_loop
async def test_wait_says_whether_a_frame_is_there_and_not_only_a_wake(endpoint: str) -> None:
    engine = EngineSocket(endpoint)
    assert not engine.wait(0.01)
    engine.wake()
    assert not engine.wait(30.0)
    async with connected(endpoint) as heard:
        engine.wake()
        async with asyncio.timeout(30):
            while not engine.wait(0.0):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert engine.receive() == (heard.gateway_id, b"hello")
        assert not engine.wait(0.01)
    engine.close()


@on_each_loop
async def test_an_idle_pair_uses_no_cpu(endpoint: str) -> None:
    engine = EngineSocket(endpoint)
    async with connected(endpoint) as heard:
        await receive(engine)
        engine.send(heard.gateway_id, b"x")
        await heard.wait_frames(1)
        before = time.process_time()
        await asyncio.sleep(1.0)
        assert time.process_time() - before < 0.02
    engine.close()


def test_gateway_ids_are_random_and_never_one_that_zeromq_keeps_for_itself() -> None:
    ids = {new_gateway_id() for _ in range(2000)}
    assert len(ids) == 2000
    assert all(len(gateway_id) == 16 and gateway_id[0] for gateway_id in ids)
