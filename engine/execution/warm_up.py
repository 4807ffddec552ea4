"""The first steps of an executor: they make it warm, and their times are what the latency model is fitted to."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from engine.plan import NewSequence, ScheduledSequence, StepLoad, StepPlan
from streamkv.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step of equal decodes and at most one chunk of a prompt."""

    num_decodes: int
    decode_context: int
    num_prefill: int
    prefill_context: int


@dataclass(frozen=True, slots=True)
class Workload:
    """What is run on a kind of device."""

    num_prompt: int
    """Tokens of the first step, of which the first run counts for nothing."""
    shapes: tuple[StepShape, ...]
    """The most telling and cheapest first: on a slow machine the others are left out."""
    most_runs: int
    longest_s: float
    """Of the start, what all beyond two runs of the prompt, and beyond slow starts, may take; the step that passes this
    is the last."""
    has_slow_starts: bool = False
    """A shape may bring code that is made when it first runs, and a table takes its time on the way to the device. So
    each shape runs twice with the same sequences, and only the second run tells something."""


CPU_WORKLOAD: Final = Workload(
    256,
    (
        StepShape(1, 256, 0, 0),
        StepShape(0, 0, 16, 0),
        StepShape(8, 32, 0, 0),
        StepShape(0, 0, 16, 1024),
        StepShape(8, 1024, 0, 0),
        StepShape(8, 64, 64, 256),
        StepShape(32, 64, 0, 0),
        StepShape(0, 0, 128, 1024),
    ),
    most_runs=5,
    longest_s=1.0,
)
GPU_WORKLOAD: Final = Workload(
    512,
    (
        StepShape(1, 256, 0, 0),
        StepShape(64, 256, 0, 0),
        StepShape(0, 0, 1024, 0),
        StepShape(64, 2048, 0, 0),
        StepShape(0, 0, 64, 0),
        StepShape(256, 256, 0, 0),
        StepShape(64, 512, 512, 0),
        StepShape(0, 0, 1024, 4096),
        StepShape(16, 1024, 0, 0),
        StepShape(16, 1024, 256, 1024),
        StepShape(0, 0, 256, 0),
        StepShape(256, 1024, 0, 0),
        StepShape(0, 0, 256, 7936),
        StepShape(1, 8192, 0, 0),
        StepShape(0, 0, 2048, 0),
        StepShape(128, 512, 1024, 2048),
        StepShape(0, 0, 4096, 0),
        StepShape(0, 0, 8192, 0),
    ),
    most_runs=4,
    longest_s=0.7,
    has_slow_starts=True,
)
"""With a model of 8 billion parameters all shapes together take 0.6 s on an H200, so 1.5 s with slow starts and what
is measured again; with a small one a fifth of that."""


class WarmUp:
    """Runs steps on blocks that nobody owns yet, and remembers how long each kind took.

    The fastest run of a kind counts, since others may keep the machine busy. Decodes go on with the sequences of the
    run before, as in a steady batch, so that only the first has their block tables in it.
    """

    def __init__(
        self,
        step: Callable[[StepPlan], object],
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
        workload: Workload = CPU_WORKLOAD,
        num_blocks: int = 0,
    ) -> None:
        """step: computes a plan and returns when it is done. max_num_batched_tokens: 0 if it is not yet known.

        num_blocks: of the pool, if all of it may be touched: tables then go round all of it, so that keys and values
        are read from memory as later on, and not from a cache. 0: all sequences use the prompt's blocks.
        """
        self._step = step
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._max_tokens = max_num_batched_tokens or workload.num_prompt
        self._clock = clock
        self._workload = workload
        self._prompt = StepShape(0, 0, min(workload.num_prompt, max_model_len - 1, self._max_tokens), 0)
        self._num_blocks = num_blocks - 1 if num_blocks else self._prompt.num_prefill // block_size + 1
        self._next_block = 0
        self._next_id = 0
        self._live: list[int] = []
        """Sequences of the last steps."""
        self._times_s: dict[StepShape, list[float]] = {}

    def run(self, report: Callable[[float], None]) -> None:
        """A prompt twice, since the first run is slow, then each shape, then all again while time is left."""
        report(0.0)
        for _ in range(2):
            self._measure(self._prompt, 0)
        left_s = self._workload.longest_s
        report(50.0)
        shapes = [fitting for shape in self._workload.shapes if (fitting := self._fit(shape)) is not None]
        num_starts = int(self._workload.has_slow_starts)
        for num_rounds in range(self._workload.most_runs - 1):
            for number, shape in enumerate([*dict.fromkeys(shapes), self._prompt]):
                is_needed = not num_rounds and not number
                if not is_needed and min(self._times_s.get(shape, [0.0])) > left_s:
                    continue
                left_s -= self._measure(shape, num_starts)
            report(75.0)
        self._step(StepPlan(0, [], finished_sequence_ids=self._live))
        report(100.0)

    @property
    def tokens_per_s(self) -> float:
        """Of a prompt."""
        return self._prompt.num_prefill / min(self._times_s[self._prompt])

    @property
    def samples(self) -> list[tuple[StepLoad, float]]:
        """What was run, and how long it took at best."""
        return [(_load(shape), min(times_s)) for shape, times_s in self._times_s.items()]

    def _fit(self, shape: StepShape) -> StepShape | None:
        """The shape within the limits, or None if nothing is left of it."""
        num_seqs = self._max_num_seqs - (1 if shape.num_prefill else 0)
        num_decodes = min(shape.num_decodes, num_seqs, self._max_tokens)
        num_prefill = min(shape.num_prefill, self._max_tokens - num_decodes, self._max_model_len - 1)
        if num_decodes + num_prefill < 1:
            return None
        # With room for one more token, of a run that goes on.
        most_context = max(0, self._max_model_len - 2)
        return StepShape(
            num_decodes,
            min(shape.decode_context, most_context) if num_decodes else 0,
            num_prefill,
            min(shape.prefill_context, self._max_model_len - num_prefill) if num_prefill else 0,
        )

    def _measure(self, shape: StepShape, num_starts: int) -> float:
        """Run it, and so many times before → seconds of the last run. Decodes go on where the run before left them."""
        decodes = [self._new_id() for _ in range(shape.num_decodes)]
        seconds = 0.0
        for run in range(num_starts + 1):
            finished, self._live = self._live, list(decodes)
            new: list[NewSequence] = []
            start = shape.decode_context + run
            scheduled = []
            for sequence_id in decodes:
                table = [] if run else self._table(start + num_starts + 1)
                scheduled.append(self._entry(sequence_id, start, 1, False, table, new))
            if shape.num_prefill:
                table = self._table(shape.prefill_context + shape.num_prefill)
                prompt_id = self._new_id()
                scheduled.append(self._entry(prompt_id, shape.prefill_context, shape.num_prefill, True, table, new))
                self._live.append(prompt_id)
            gone = sorted(set(finished).difference(decodes))
            plan = StepPlan(0, scheduled, new_sequences=new, finished_sequence_ids=gone)
            start_s = self._clock()
            self._step(plan)
            seconds = self._clock() - start_s
        self._times_s.setdefault(shape, []).append(seconds)
        return seconds

    def _new_id(self) -> int:
        self._next_id -= 1
        return self._next_id

    def _table(self, num_tokens: int) -> list[int]:
        """Blocks for so many, from where the last table ended."""
        count = -(-num_tokens // self._block_size)
        table = [1 + (self._next_block + i) % self._num_blocks for i in range(count)]
        self._next_block = (self._next_block + count) % self._num_blocks
        return table

    def _entry(
        self, sequence_id: int, start: int, num_tokens: int, is_prefill: bool, table: list[int], new: list[NewSequence]
    ) -> ScheduledSequence:
        """Of a sequence that is new if it has a table."""
        if table:
            sampling = SamplingParams(seed=0, max_tokens=1)
            new.append(NewSequence(sequence_id, 0, sampling, start + num_tokens, ()))
        return ScheduledSequence(sequence_id, start, num_tokens, is_prefill, True, [0] * num_tokens, table)


def _load(shape: StepShape) -> StepLoad:
    load = StepLoad(num_decodes=shape.num_decodes, num_decode_kv_tokens=shape.num_decodes * (shape.decode_context + 1))
    return load.with_chunk(shape.num_prefill, shape.prefill_context) if shape.num_prefill else load
