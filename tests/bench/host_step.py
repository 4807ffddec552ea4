"""What a step costs the host: python -m tests.bench.host_step [--seqs 1,16,64,256,1024] [--step-ms 0,0.9,7]

The engine's real loop, scheduler, block manager and publisher, over a device that computes nothing: a step is done a
set time after the one before it, two may be in flight, and a thread tells of the end as a GPU's would. Another process
is the gateway: it submits over ZeroMQ, takes in the tokens and acknowledges them. `decode` keeps the same sequences
running; `mixed` lets each end after 64 tokens and sends the next one, with a prompt of 200 to 2,048 tokens.

Times are microseconds of the loop's thread per step (CPU time, so that others on the machine do not count), medians
over the steps, and the mean of all together. `wake` is from the end of a step on the device to the loop's taking it in,
`sent` until its tokens are on the wire: real time. `idle` is the share of time in which the device had no step. The
yardstick is a fixed loop in Python, timed in the same run.

With --serve it waits for requests behind a real gateway instead, on which any load generator can be let loose
(--step-ms and --prefill-us say how fast the device is). SIGINT ends it, and tells the figures.
"""

import argparse
import gc
import multiprocessing
import queue
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any, Final

import zmq

from engine.executor import DeviceLimits, Launch, ReportProgress
from engine.loop import EngineLoop
from engine.plan import StepPlan, StepTokens
from engine.transfer import Transfer, TransferResult
from streamkv.config import EngineConfig
from streamkv.errors import InvalidField
from streamkv.protocol import (
    WIRE_VERSION,
    Finished,
    Heartbeat,
    Hello,
    ModelFacts,
    Ready,
    StepOutput,
    Submit,
    decode_from_engine,
    encode,
    pack_ids,
    unpack_ids,
)
from streamkv.sampling import Grammar, SamplingParams
from streamkv.transport import new_gateway_id
from tests.bench.gateway_throughput import cpu_s, run_gateway, word_ids

SECTIONS: Final = ("wait", "receive", "collect", "update", "clock", "plan", "launch", "publish", "rest")
ACK_BYTES: Final = 256 * 1024
VOCAB_SIZE: Final = 49152


class TimedLaunch:
    """A step on its way."""

    def __init__(self, plan: StepPlan, on_done: Callable[[], None]) -> None:
        self.plan = plan
        self.on_done = on_done
        self.is_done = False
        self.launched_at = time.perf_counter()
        self.done_at = 0.0


class TimedExecutor:
    """Implements engine.executor.Executor: a step takes `step_s`, and `prefill_s` for each token of a prompt."""

    max_in_flight = 2

    def __init__(self, step_s: float, prefill_s: float, token_ids: list[int], num_blocks: int = 60_000) -> None:
        self._step_s = step_s
        self._prefill_s = prefill_s
        self._token_ids = token_ids * (4096 // len(token_ids) + 1)
        self._num_blocks = num_blocks
        self._queue: queue.SimpleQueue[TimedLaunch | None] = queue.SimpleQueue()
        self._device = threading.Thread(target=self._run, daemon=True)
        self._device.start()
        self.wakes: list[float] = []
        """Seconds from the end of each step to its collection."""
        self.newest_done_at = 0.0
        self.idle_s = self.busy_s = 0.0
        """Of the device, since it has had a step."""

    def load(self, report: ReportProgress) -> tuple[ModelFacts, DeviceLimits]:
        facts = ModelFacts("timed", VOCAB_SIZE, 16_384, [2], "none", "clock")
        return facts, DeviceLimits(self._num_blocks, 16, 16_384, 8192, block_bytes=1 << 20)

    def launch(self, plan: StepPlan, on_done: Callable[[], None]) -> TimedLaunch:
        launch = TimedLaunch(plan, on_done)
        self._queue.put(launch)
        return launch

    def collect(self, launch: Launch) -> StepTokens:
        assert isinstance(launch, TimedLaunch)
        self.wakes.append(time.perf_counter() - launch.done_at)
        self.newest_done_at = launch.done_at
        num_tokens = sum([entry.samples for entry in launch.plan.scheduled])
        start = launch.plan.step % 32
        return StepTokens(self._token_ids[start : start + num_tokens])

    def start_transfer(self, transfer: Transfer, on_done: Callable[[], None]) -> None:
        raise AssertionError("there is no tier below")

    def finished_transfers(self) -> list[TransferResult]:
        return []

    def compile_grammar(self, grammar: Grammar, on_done: Callable[[], None]) -> Future[object]:
        raise InvalidField(grammar.field, "cannot be followed by a clock")

    def close(self) -> None:
        self._queue.put(None)
        self._device.join()

    def _run(self) -> None:
        free_at = 0.0
        while (launch := self._queue.get()) is not None:
            step_s = self._step_s + self._prefill_s * launch.plan.load.num_prefill_tokens
            self.idle_s += max(0.0, launch.launched_at - (free_at or launch.launched_at))
            self.busy_s += step_s
            free_at = max(free_at, launch.launched_at) + step_s
            if (left_s := free_at - time.perf_counter()) > 0:
                time.sleep(left_s)
            launch.done_at = time.perf_counter()
            launch.is_done = True
            launch.on_done()


class Meter:
    """CPU time of the loop's thread by section, step by step."""

    def __init__(self) -> None:
        self.is_on = False
        self.steps: list[dict[str, float]] = []
        self.sent: list[float] = []
        self.num_rows = 0
        self._section = "rest"
        self._since_s = 0.0
        self._step: defaultdict[str, float] = defaultdict(float)

    def switch(self, section: str) -> str:
        """Charge what has passed to the section that was on; returns it."""
        now_s = time.thread_time()
        self._step[self._section] += now_s - self._since_s
        before, self._section, self._since_s = self._section, section, now_s
        return before

    def wrap(self, owner: object, name: str, section: str) -> None:
        """Charge calls of owner.name to a section."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any) -> Any:
            before = self.switch(section)
            result = function(*args)
            self.switch(before)
            return result

        setattr(owner, name, timed)

    def end_step(self, num_rows: int) -> None:
        if self.is_on:
            self.steps.append(dict(self._step))
            self.num_rows += num_rows
        self._step.clear()


class MeasuredLoop(EngineLoop):
    """The real loop, with a meter at its joints. A step ends with the collection of the next one."""

    meter: Meter

    def _serve(self) -> None:
        meter, executor = self.meter, self._executor
        assert isinstance(executor, TimedExecutor)
        for owner, name, section in (
            (self._socket, "wait", "wait"),
            (self._socket, "receive", "receive"),
            (self, "_handle", "receive"),
            (self, "_collect", "collect"),
            (self._scheduler, "update", "update"),
            (self, "_look_at_clock", "clock"),
            (self._scheduler, "plan", "plan"),
            (self, "_launch", "launch"),
            (self, "_publish", "publish"),
        ):
            meter.wrap(owner, name, section)
        collect, publish = executor.collect, self._publisher.publish

        def collect_and_count(launch: Launch) -> StepTokens:
            meter.end_step(len(launch.plan.scheduled))
            return collect(launch)

        def publish_and_time(*args: Any) -> None:
            publish(*args)
            if meter.is_on:
                meter.sent.append(time.perf_counter() - executor.newest_done_at)

        replaced: tuple[tuple[object, str, object], ...] = (
            (executor, "collect", collect_and_count),
            (self._publisher, "publish", publish_and_time),
        )
        for holder, name, function in replaced:
            setattr(holder, name, function)
        super()._serve()


def run_client(endpoint: str, num_seqs: int, is_mixed: bool, seconds: float, to_parent: Connection) -> None:
    """A gateway's wire: keeps so many requests running. Says `begin` when all do, and `end` after that time."""
    dice = random.Random(1)
    socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.DEALER)
    gateway_id = new_gateway_id()
    socket.setsockopt(zmq.ROUTING_ID, gateway_id)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(endpoint)
    socket.send(encode(Hello(WIRE_VERSION, gateway_id)))
    num_sent, epoch, unacked, last_step = 0, 0, 0, 0
    begun: set[int] = set()
    end_at = next_beat_at = float("inf")

    def submit() -> None:
        nonlocal num_sent
        num_sent += 1
        prompt = dice.choices(range(3, VOCAB_SIZE), k=dice.randint(200, 2048) if is_mixed else 64)
        sampling = SamplingParams(seed=num_sent, max_tokens=64 if is_mixed else 16_000, temperature=0.0)
        stream_id = num_sent.to_bytes(16, "big")
        socket.send(encode(Submit(num_sent, stream_id, pack_ids(prompt), sampling, gateway_state=b"x" * 300)))

    while time.perf_counter() < end_at:
        if time.perf_counter() >= next_beat_at or unacked > ACK_BYTES:
            socket.send(encode(Heartbeat(last_step, epoch)))
            unacked, next_beat_at = 0, time.perf_counter() + 1.0
        if not socket.poll(100):
            continue
        frame = socket.recv()
        message = decode_from_engine(frame)
        if isinstance(message, Ready):
            epoch, next_beat_at = message.epoch, 0.0
            for _ in range(num_seqs):
                submit()
        elif isinstance(message, StepOutput):
            unacked += len(frame)
            last_step = message.step
            if end_at == float("inf"):
                begun.update(unpack_ids(message.request_ids))
                if len(begun) >= num_seqs:
                    to_parent.send("begin")
                    end_at = time.perf_counter() + seconds
            for end in message.finished:
                assert isinstance(end, Finished) and end.finish_reason == "length", end
                submit()
    to_parent.send("end")


def yardstick_us() -> float:
    """CPU time of 1,000 rounds of a fixed loop, the best of 20: what this core gives now."""

    def once() -> float:
        start, found = time.thread_time(), []
        for i in range(1000):
            found.append((i, str(i)))  # noqa: PERF401  a loop is what is timed
        return time.thread_time() - start

    return 1e6 * min(once() for _ in range(20))


def make_loop(executor: TimedExecutor, num_seqs: int, endpoint: str = "") -> MeasuredLoop:
    def collect() -> None:  # as engine/__main__.py
        gc.disable()
        gc.collect()
        gc.freeze()

    config = EngineConfig(model="timed", endpoint=endpoint, max_num_seqs=num_seqs)
    loop = MeasuredLoop(config, executor, on_loaded=collect, on_lull=collect)
    loop.meter = Meter()
    return loop


def measure(num_seqs: int, is_mixed: bool, step_ms: float, prefill_us: float, seconds: float) -> str:
    """A row of the table."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        executor = TimedExecutor(step_ms / 1000, prefill_us / 1e6, list(range(3, VOCAB_SIZE, 97)))
        loop = make_loop(executor, num_seqs, f"ipc://{folder}/engine")
        client = context.Process(target=run_client, args=(loop.endpoint, num_seqs, is_mixed, seconds, there))
        client.daemon = True

        def follow() -> None:
            here.recv()
            executor.wakes.clear()
            executor.idle_s = executor.busy_s = 0.0
            loop.meter.is_on = True
            here.recv()
            loop.meter.is_on = False
            loop.stop()

        thread = threading.Thread(target=follow, daemon=True)
        client.start()
        thread.start()
        yardstick = yardstick_us()
        if loop.run():
            raise SystemExit("the engine failed")
        thread.join()
        client.join()
    meter = loop.meter
    kind = "mixed" if is_mixed else "decode"
    return f"| {kind} | {num_seqs} | {step_ms:g} | {figures(meter, executor)} | {min(yardstick, yardstick_us()):.0f} |"


HEAD: Final = (
    f"| load | sequences | step, ms | rows a step | {' | '.join(SECTIONS)} | all, mean | p99 | wake, p50 / p99 | "
    "sent, p50 / p99 | idle, % | yardstick |"
)


def figures(meter: Meter, executor: TimedExecutor) -> str:
    steps = meter.steps[1:]
    totals = sorted(sum(step.values()) for step in steps)
    cells = [f"{meter.num_rows / len(meter.steps):.0f}"]
    cells += [f"{1e6 * statistics.median([step.get(name, 0.0) for step in steps]):.0f}" for name in SECTIONS]
    cells += [f"{1e6 * statistics.mean(totals):.0f}", f"{1e6 * totals[int(len(totals) * 0.99)]:.0f}"]
    for values in (executor.wakes, meter.sent):
        ordered = sorted(values)
        cells.append(f"{1e6 * ordered[len(ordered) // 2]:.0f} / {1e6 * ordered[int(len(ordered) * 0.99)]:.0f}")
    cells.append(f"{100 * executor.idle_s / (executor.idle_s + executor.busy_s or 1.0):.1f}")
    return " | ".join(cells)


def serve(num_seqs: int, step_ms: float, prefill_us: float, profile: str) -> None:
    """A whole server over the timed device, until SIGINT."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        executor = TimedExecutor(step_ms / 1000, prefill_us / 1e6, word_ids())
        loop = make_loop(executor, num_seqs, f"ipc://{folder}/engine")
        gateway = context.Process(target=run_gateway, args=(loop.endpoint, there, profile))
        gateway.start()
        signal.signal(signal.SIGINT, lambda number, frame: loop.stop())
        threading.Thread(target=lambda: print("ready at", here.recv(), flush=True), daemon=True).start()
        loop.meter.is_on = True
        loop.run()
        assert gateway.pid is not None
        user_s, system_s = cpu_s(gateway.pid)
        print(HEAD.removeprefix("| load | sequences | step, ms "))
        print("|", figures(loop.meter, executor), "|")
        print(f"gateway: {user_s:.2f} s user and {system_s:.2f} s system for {loop.meter.num_rows} tokens and chunks")
        gateway.terminate()
        gateway.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqs", default="1,16,64,256,1024")
    parser.add_argument("--step-ms", default="0,0.9,7")
    parser.add_argument("--prefill-us", type=float, default=1.7, help="of a prompt's token")
    parser.add_argument("--loads", default="decode,mixed")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each row")
    parser.add_argument("--serve", action="store_true", help="be a whole server, for any load generator")
    parser.add_argument("--profile", default="", help="with --serve: the gateway's cProfile statistics go to this file")
    args = parser.parse_args()
    if args.serve:
        serve(int(args.seqs.split(",")[-1]), float(args.step_ms), args.prefill_us, args.profile)
        return
    print(HEAD)
    print("|---" * HEAD.count(" | ") + "|---|")
    for load in args.loads.split(","):
        for step_ms in map(float, args.step_ms.split(",")):
            for num_seqs in map(int, args.seqs.split(",")):
                print(measure(num_seqs, load == "mixed", step_ms, args.prefill_us, args.seconds), flush=True)


if __name__ == "__main__":
    main()
