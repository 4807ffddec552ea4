"""Engines without a model, on a real socket: for tests of the gateway and of the wire, and for the wire benchmark.

`serving` runs the real EngineLoop over a ScriptedExecutor on a thread. `firehose` is a process that speaks just
enough of the wire to publish one token per stream and step as fast as it is acknowledged.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from engine.executor import Executor
from engine.loop import EngineLoop
from streamkv.config import EngineConfig
from streamkv.protocol import (
    WIRE_VERSION,
    Abort,
    Finished,
    Heartbeat,
    Hello,
    ModelFacts,
    Ready,
    StepOutput,
    Submit,
    decode_from_gateway,
    encode,
    pack_ids,
)
from streamkv.transport import EngineSocket
from tests.support.scripted_executor import ScriptedExecutor

_ROOT = Path(__file__).resolve().parents[2]
TEST_CONFIG = {"heartbeat_s": 0.1, "gateway_timeout_s": 30.0, "log_level": "warning"}


@contextlib.contextmanager
def free_endpoint() -> Iterator[str]:
    """An ipc endpoint that nobody uses, in a folder that goes away."""
    folder = Path(tempfile.mkdtemp(prefix="skv-", dir="/tmp"))
    try:
        yield f"ipc://{folder}/engine.sock"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class RunningEngine:
    """An EngineLoop on a thread of its own."""

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self.executor = executor
        self._has_loaded = threading.Event()
        self.loop = EngineLoop(config, executor, on_loaded=self._has_loaded.set)
        self.endpoint = self.loop.endpoint
        self.exit_code: int | None = None
        """What `run` returned, once it has."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.exit_code = self.loop.run()

    @property
    def thread_id(self) -> int:
        """The kernel's id of the loop's thread."""
        assert self._thread.native_id is not None
        return self._thread.native_id

    def wait_loaded(self, timeout_s: float = 10.0) -> None:
        """Until it takes work or has ended, but no longer: what is sent before is refused."""
        until_s = time.monotonic() + timeout_s
        while self._thread.is_alive() and time.monotonic() < until_s and not self._has_loaded.wait(0.01):
            pass

    def join(self, timeout_s: float = 10.0) -> int:
        """Wait for its end; returns the exit code."""
        self._thread.join(timeout_s)
        assert self.exit_code is not None, f"the engine still runs after {timeout_s} s"
        return self.exit_code

    def stop(self) -> None:
        """End it at once."""
        if self._thread.is_alive():
            self.loop.stop()
        self.join()


@contextlib.contextmanager
def serving(
    executor: Executor | None = None, endpoint: str = "", **settings: str | int | float | bool
) -> Iterator[RunningEngine]:
    """A running engine over a scripted executor, or the one given. `settings` are those of EngineConfig.

    It has loaded, unless its executor is made to take its time for that.
    """
    with contextlib.ExitStack() as stack:
        values = {"endpoint": endpoint or stack.enter_context(free_endpoint()), **TEST_CONFIG, **settings}
        config = msgspec.convert(values, EngineConfig)
        executor = executor or ScriptedExecutor()
        engine = RunningEngine(config, executor)
        stack.callback(engine.stop)
        if not (isinstance(executor, ScriptedExecutor) and executor.loads_slowly):
            engine.wait_loaded()
        yield engine


# The firehose

FIREHOSE_MODEL = ModelFacts("firehose", vocab_size=49152, max_model_len=1 << 20, eos_token_ids=[2])


def run_firehose(
    endpoint: str, num_streams: int, max_unacked_bytes: int, steps_per_s: float, token_ids: list[int]
) -> None:
    """Wait for `num_streams` Submits, then publish one token to each live one per step, until the process is killed.

    steps_per_s: 0 publishes as fast as it is acknowledged.

    A stream ends with `length` after its max_tokens; when all have ended the next batch of `num_streams` Submits is
    awaited. The frames of a batch are built before its first is sent, so that the sender
    costs next to nothing. `token_ids` are gone through in a circle.
    """
    socket = EngineSocket(endpoint)
    epoch = secrets.randbits(62) + 1
    ready = Ready(WIRE_VERSION, epoch, FIREHOSE_MODEL, 16, 1 << 16, num_streams, 8192)
    live: dict[tuple[bytes, int], int] = {}
    """Address → tokens that are wanted."""
    step = acknowledged = 0
    frames: list[bytes] = []
    """Of this batch, in reverse."""
    gateway_id = b""
    unacked: list[tuple[int, int]] = []
    num_unacked_bytes = 0
    heartbeat_at_s = next_step_s = 0.0
    period_s, burst = (1.0 / steps_per_s, 1) if steps_per_s else (0.0, 16)
    while True:
        can_send = bool(frames) and num_unacked_bytes < max_unacked_bytes
        socket.wait(max(0.0, next_step_s - time.monotonic()) if can_send else 0.5)
        while (received := socket.receive()) is not None:
            sender, frame = received
            match decode_from_gateway(frame):
                case Hello():
                    socket.send(sender, encode(ready))
                case Submit() as submit:
                    live[sender, submit.request_id] = submit.sampling.max_tokens
                    gateway_id = sender
                case Abort() as abort:
                    # Its rows in the frames that are built stay; a gateway drops those of a request that has ended.
                    live.pop((sender, abort.request_id), None)
                    end = Finished(abort.request_id, 0, "abort", abort.cause)
                    socket.send(sender, encode(StepOutput(step, b"", b"", finished=[end])))
                case Heartbeat() as heartbeat if heartbeat.epoch == epoch:
                    acknowledged = max(acknowledged, heartbeat.last_step)
                case _:
                    pass
        while unacked and unacked[0][0] <= acknowledged:
            num_unacked_bytes -= unacked.pop(0)[1]
        if not frames and len(live) == num_streams:
            frames = _build_frames(live, step, token_ids, max(live.values()))
        for _ in range(burst):
            if not frames or num_unacked_bytes >= max_unacked_bytes or time.monotonic() < next_step_s:
                break
            next_step_s = max(next_step_s, time.monotonic() - period_s) + period_s
            frame = frames.pop()
            step += 1
            socket.send(gateway_id, frame)
            unacked.append((step, len(frame)))
            num_unacked_bytes += len(frame)
            if not frames:
                live.clear()
        now_s = time.monotonic()
        if gateway_id and now_s >= heartbeat_at_s:
            heartbeat_at_s = now_s + 1.0
            socket.send(gateway_id, encode(Heartbeat(step, epoch, has_work=bool(frames))))


def _build_frames(live: dict[tuple[bytes, int], int], step: int, token_ids: list[int], num_steps: int) -> list[bytes]:
    """The steps that bring every live stream its tokens, last one first."""
    frames = []
    for index in range(num_steps):
        going = [request_id for (_, request_id), wanted in live.items() if wanted > index]
        finished = [
            Finished(request_id, 0, "length") for (_, request_id), wanted in live.items() if wanted == index + 1
        ]
        token_id = token_ids[index % len(token_ids)]
        frames.append(
            encode(StepOutput(step + 1 + index, pack_ids(going), pack_ids([token_id] * len(going)), finished=finished))
        )
    frames.reverse()
    return frames


@contextlib.contextmanager
def firehose(
    num_streams: int,
    *,
    max_unacked_bytes: int = 8 * 1024 * 1024,
    steps_per_s: float = 0.0,
    token_ids: list[int] | None = None,
) -> Iterator[str]:
    """A firehose in a process of its own, see run_firehose. Yields its endpoint."""
    with free_endpoint() as endpoint:
        arguments = [endpoint, num_streams, max_unacked_bytes, steps_per_s, *(token_ids or [260])]
        process = subprocess.Popen([sys.executable, "-m", __name__, *map(str, arguments)], cwd=_ROOT)
        try:
            until_s = time.monotonic() + 20.0
            while not os.path.exists(endpoint.removeprefix("ipc://")):
                assert process.poll() is None and time.monotonic() < until_s, "the firehose did not start"
                time.sleep(0.01)
            yield endpoint
        finally:
            process.kill()
            process.wait()


if __name__ == "__main__":
    _endpoint, _num_streams, _max_unacked, _steps_per_s, *_token_ids = sys.argv[1:]
    run_firehose(
        _endpoint, int(_num_streams), int(_max_unacked), float(_steps_per_s), [int(token_id) for token_id in _token_ids]
    )
