"""Where a step's time goes on the GPU: kernels, gaps between them, and what the host does meanwhile.

    python tests/bench/gpu_profile.py --model FOLDER [--batch 1,256] [--context 640] [--prefill 8192] [--steps 30]
        [-- flags of the engine]

Drives the executor as the loop does, two steps under way, with dummy weights and no scheduler: steady decode of so many
sequences, then prompts of so many tokens. Prints for each the time of a step on the host's clock, how long the device
had nothing to do, and the kernels by their time. The profiler slows the host, so times come from a run without it.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from engine.execution.cuda_graph import StepGraphs
from engine.execution.gpu_runner import GpuRunner
from engine.plan import NewSequence, ScheduledSequence, StepPlan
from streamkv.config import EngineConfig, load
from streamkv.sampling import SamplingParams

GREEDY = SamplingParams(seed=0, max_tokens=1 << 20, temperature=0.0, ignore_eos=True)


class Driver:
    """Plans without a scheduler, on blocks that are handed out in turn."""

    def __init__(self, runner: GpuRunner, block_size: int, num_blocks: int) -> None:
        self._runner = runner
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._next_block = 0
        self._next_id = 1
        self._step = 0
        self._ended: list[int] = []

    def _blocks(self, count: int) -> list[int]:
        self._next_block += count
        return [1 + i % (self._num_blocks - 1) for i in range(self._next_block - count, self._next_block)]

    def decodes(self, batch: int, context: int, num_steps: int) -> Callable[[], float]:
        """→ runs num_steps steps of steady decode and returns the seconds of one."""
        sequences = list(range(self._next_id, self._next_id + batch))
        self._next_id += batch
        per_sequence = (context + 4 * num_steps) // self._block_size + 2
        new = [NewSequence(i, 0, GREEDY, context, ()) for i in sequences]
        scheduled = [ScheduledSequence(i, context, 1, False, True, [5], self._blocks(per_sequence)) for i in sequences]
        first = self._runner.launch(self._plan(scheduled, new), lambda: None)
        place = context + 1

        def run() -> float:
            nonlocal place, first
            start_s = time.perf_counter()
            for _ in range(num_steps):
                scheduled = [ScheduledSequence(i, place, 1, False, True, [], []) for i in sequences]
                launch = self._runner.launch(self._plan(scheduled, []), lambda: None)
                self._runner.collect(first)
                first, place = launch, place + 1
            return (time.perf_counter() - start_s) / num_steps

        self._ended += sequences
        return run

    def prefill(self, num_tokens: int, length: int, context: int) -> float:
        """Seconds of a step of prompts of `length`, num_tokens in all, behind `context` each."""
        sequences = list(range(self._next_id, self._next_id + num_tokens // length))
        self._next_id += len(sequences)
        scheduled = [
            ScheduledSequence(
                i, context, length, True, True, [5] * length, self._blocks((context + length) // self._block_size + 1)
            )
            for i in sequences
        ]
        plan = self._plan(scheduled, [NewSequence(i, 0, GREEDY, context + length, ()) for i in sequences])
        start_s = time.perf_counter()
        self._runner.collect(self._runner.launch(plan, lambda: None))
        self._ended += sequences
        return time.perf_counter() - start_s

    def _plan(self, scheduled: list[ScheduledSequence], new: list[NewSequence]) -> StepPlan:
        self._step += 1
        live = {entry.sequence_id for entry in scheduled}
        ended = [i for i in self._ended if i not in live]
        self._ended = [i for i in self._ended if i in live]
        return StepPlan(self._step, scheduled, new_sequences=new, finished_sequence_ids=ended)


def show(run: Callable[[], object], num_steps: int, most: int = 16) -> None:
    """Kernels of a profiled run: µs a step, launches a step, and the share of time without any."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiled.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    if not spans:
        print("  the profiler has seen no kernel")
        return
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    busy_us, reached = 0.0, spans[0][0]
    for start, end, name in spans:
        times[name] += end - start
        counts[name] += 1
        busy_us += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    span_us = reached - spans[0][0]
    print(f"  under the profiler: {span_us / num_steps:.1f} us a step, idle {100 * (1 - busy_us / span_us):.2f} %")
    for name, time_us in times.most_common(most):
        print(f"  {time_us / num_steps:9.1f} us  {counts[name] / num_steps:6.1f} x  {name[:100]}")


def show_curve(runner: GpuRunner, largest: int) -> None:
    """The time of a step's body by its number of tokens, without attention: what padding costs."""
    sizes = [*range(16, min(largest, 1024) + 1, 16), *range(1088, largest + 1, 64)]
    stream = runner._stream
    assert stream is not None
    line = []
    for size in sizes:
        graphs = StepGraphs()
        with runner._on_device():
            runner._parts.books.clear_record()
            runner._parts.launch_body(size)
            graphs.capture([(("body", size), partial(runner._parts.launch_body, size))], stream)
            times_ms = []
            for _ in range(7):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record(stream)
                graphs.run(("body", size), lambda: None)
                end.record(stream)
                end.synchronize()
                times_ms.append(begin.elapsed_time(end))
        line.append(f"{size}: {sorted(times_ms)[2]:.2f}")
    print("body, ms by tokens:", ", ".join(line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", default="1,256")
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--prefill", default="8192")
    parser.add_argument("--curve", type=int, default=0, help="time the body of steps of up to so many tokens")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    config = load(
        EngineConfig,
        ["--model", args.model, "--load-format", "dummy", "--max-model-len", "20000", *args.flags],
        {},
    )
    started_s = time.perf_counter()
    runner = GpuRunner(config, torch.device("cuda", 0))
    stages: list[str] = []

    def report(stage: str, percent: float) -> None:
        if not stages or not stages[-1].startswith(stage):
            stages.append(f"{stage} from {time.perf_counter() - started_s:.1f} s")

    _, limits = runner.load(report)
    print(f"loaded in {time.perf_counter() - started_s:.1f} s: {'; '.join(stages)}")
    for load_of, seconds in limits.step_samples:
        print(f"  warm-up {seconds * 1e3:8.2f} ms {load_of}")
    driver = Driver(runner, limits.block_size, limits.num_blocks)
    for batch in (int(word) for word in args.batch.split(",")):
        run = driver.decodes(batch, args.context, args.steps)
        times_s = sorted(run() for _ in range(3))
        print(f"decode, {batch} sequences, context {args.context}: {times_s[0] * 1e3:.3f} ms a step")
        show(run, args.steps)
    for num_tokens in (int(word) for word in args.prefill.split(",") if word):
        for length in {min(512, num_tokens), num_tokens}:
            times_s = sorted(driver.prefill(num_tokens, length, 0) for _ in range(4))
            print(f"prefill, {num_tokens} tokens, {length} each: {times_s[0] * 1e3:.2f} ms")
        show(lambda num_tokens=num_tokens: driver.prefill(num_tokens, num_tokens, 0), 1)
    if args.curve:
        show_curve(runner, args.curve)
    runner.close()


if __name__ == "__main__":
    sys.exit(main())
