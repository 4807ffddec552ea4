"""The first steps of an executor: they make it warm, and their times are what the latency model is fitted to."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from engine.plan import NewSequence, ScheduledSequence, StepLoad, StepPlan
from streamkv.sampling import SamplingParams

_PROMPT_TOKENS: Final = 256
_MOST_RUNS: Final = 5
_LONGEST_S: Final = 1.0
"""Of the start, what all beyond two runs of the prompt may take; the step that passes this is the last."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """A step of equal decodes and at most one chunk of a prompt."""

    num_decodes: int
    decode_context: int
    num_prefill: int
    prefill_context: int


_SHAPES: Final = (
    _Shape(1, 256, 0, 0),
    _Shape(0, 0, 16, 0),
    _Shape(8, 32, 0, 0),
    _Shape(0, 0, 16, 1024),
    _Shape(8, 1024, 0, 0),
    _Shape(8, 64, 64, 256),
    _Shape(32, 64, 0, 0),
    _Shape(0, 0, 128, 1024),
)
"""The most telling and cheapest first: on a slow machine the others are left out."""


class WarmUp:
    """Runs steps on blocks that nobody owns yet, and remembers how long each kind took.

    The fastest run of a kind counts, since others may keep the machine busy. All sequences use the prompt's blocks
    again and again, so that no more memory is touched than for one prompt.
    """

    def __init__(
        self,
        step: Callable[[StepPlan], object],
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """step: computes a plan and returns when it is done. max_num_batched_tokens: 0 if it is not yet known."""
        self._step = step
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._max_tokens = max_num_batched_tokens or _PROMPT_TOKENS
        self._clock = clock
        self._prompt = _Shape(0, 0, min(_PROMPT_TOKENS, max_model_len - 1, self._max_tokens), 0)
        self._num_blocks = self._prompt.num_prefill // block_size + 1
        self._next_id = -1
        self._times_s: dict[_Shape, list[float]] = {}

    def run(self, report: Callable[[float], None]) -> None:
        """A prompt twice, since the first run is slow, then each shape, then all again while time is left."""
        report(0.0)
        for _ in range(2):
            self._measure(self._prompt)
        report(50.0)
        stop_at_s = self._clock() + _LONGEST_S
        shapes = [fitting for shape in _SHAPES if (fitting := self._fit(shape)) is not None]
        for num_rounds in range(_MOST_RUNS - 1):
            for number, shape in enumerate([*dict.fromkeys(shapes), self._prompt]):
                is_needed = not num_rounds and not number
                if not is_needed and self._clock() + min(self._times_s.get(shape, [0.0])) > stop_at_s:
                    continue
                self._measure(shape)
            report(75.0)
        self._step(StepPlan(0, [], finished_sequence_ids=list(range(-1, self._next_id, -1))))
        report(100.0)

    @property
    def tokens_per_s(self) -> float:
        """Of a prompt."""
        return self._prompt.num_prefill / min(self._times_s[self._prompt])

    @property
    def samples(self) -> list[tuple[StepLoad, float]]:
        """What was run, and how long it took at best."""
        return [(_load(shape), min(times_s)) for shape, times_s in self._times_s.items()]

    def _fit(self, shape: _Shape) -> _Shape | None:
        """The shape within the limits, or None if nothing is left of it."""
        num_decodes = min(shape.num_decodes, self._max_num_seqs, self._max_tokens)
        num_prefill = min(shape.num_prefill, self._max_tokens - num_decodes, self._max_model_len - 1)
        if num_decodes + num_prefill < 1:
            return None
        return _Shape(
            num_decodes,
            min(shape.decode_context, self._max_model_len - 1) if num_decodes else 0,
            num_prefill,
            min(shape.prefill_context, self._max_model_len - num_prefill) if num_prefill else 0,
        )

    def _measure(self, shape: _Shape) -> None:
        new: list[NewSequence] = []
        scheduled = [self._entry(shape.decode_context, 1, False, new) for _ in range(shape.num_decodes)]
        if shape.num_prefill:
            scheduled.append(self._entry(shape.prefill_context, shape.num_prefill, True, new))
        plan = StepPlan(0, scheduled, new_sequences=new)
        start_s = self._clock()
        self._step(plan)
        self._times_s.setdefault(shape, []).append(self._clock() - start_s)

    def _entry(self, start: int, num_tokens: int, is_prefill: bool, new: list[NewSequence]) -> ScheduledSequence:
        """A part of a sequence that is in this step only."""
        sampling = SamplingParams(seed=0, max_tokens=1)
        new.append(NewSequence(self._next_id, 0, sampling, start + num_tokens, ()))
        table = [1 + i % self._num_blocks for i in range((start + num_tokens) // self._block_size + 1)]
        entry = ScheduledSequence(self._next_id, start, num_tokens, is_prefill, True, [0] * num_tokens, table)
        self._next_id -= 1
        return entry


def _load(shape: _Shape) -> StepLoad:
    load = StepLoad(num_decodes=shape.num_decodes, num_decode_kv_tokens=shape.num_decodes * (shape.decode_context + 1))
    return load.with_chunk(shape.num_prefill, shape.prefill_context) if shape.num_prefill else load
