"""The step being planned: what is in it, and what is left of its budget."""

from dataclasses import dataclass, field
from enum import Enum, auto

from engine.kv.block_manager import BlockManager
from engine.plan import NewSequence, ScheduledSequence, StepLoad, StepPlan
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.queue import RunningList
from engine.scheduling.stall import PrefillBound
from engine.scheduling.usage import Counts
from engine.sequence import Request, Sequence


class Outcome(Enum):
    """What came of a waiting sequence's turn."""

    ADMITTED = auto()
    SKIPPED = auto()
    """Not now, for a reason of its own: others may go first."""
    BLOCKED = auto()
    """No memory or no tokens left: nobody behind it may take them first."""


@dataclass(slots=True)
class StepDraft:
    """Filled by the scheduler: decodes first, then running prefills, then those that it admits."""

    limits: SchedulerLimits
    blocks: BlockManager
    running: RunningList
    counts: Counts
    budget_tokens: int
    """Left for prefill chunks: the running decodes have theirs."""
    bound: PrefillBound | None = None
    """What the streams that decode in this step leave to prefills, where there is a target for their gaps."""
    decodes: list[ScheduledSequence] = field(default_factory=list)
    decoding: list[Sequence] = field(default_factory=list)
    num_decode_kv_tokens: int = 0
    """That the decodes read, their own included."""
    prefills: list[ScheduledSequence] = field(default_factory=list)
    prefilling: list[Sequence] = field(default_factory=list)
    short: dict[Sequence, int] = field(default_factory=dict)
    """Short prompts not yet scheduled, and the tokens that long ones leave to them."""
    new_sequences: list[NewSequence] = field(default_factory=list)
    readmitted_ids: list[int] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    sharing: set[Request] = field(default_factory=set)
    """Requests of which one choice computes the prompt and the others wait for it."""
    num_partial: int = 0
    """Prefills that this step leaves unfinished, with those that did not get a chunk."""
    num_promised_blocks: int = 0
    """Blocks that admitted sequences still need to finish their prefill."""
    num_claimed_blocks: int = 0
    """Blocks that waiting sequences need which lack only tokens or a place: none behind them is fetched into these."""
    num_awaited_blocks: int = 0
    """Blocks in transfer that running sequences wait for."""
    has_preempted: bool = False

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.prefills

    @property
    def is_spent(self) -> bool:
        """Nothing is left for another prefill."""
        return self.budget_tokens <= 0 or (self.bound is not None and self.bound.is_spent)

    def chunk(self, sequence: Sequence, remaining: int) -> int:
        """How many of its `remaining` tokens a prefill may compute in this step; none if it is not positive."""
        if not self.limits.enable_chunked_prefill:
            return remaining if remaining <= self.budget_tokens else 0
        left_to_others = sum(self.short.values()) - self.short.get(sequence, 0)
        available = self.budget_tokens
        if self.bound is not None:
            available = min(available, self.bound.tokens_behind(sequence.num_tokens - remaining))
        return min(remaining, self.limits.max_chunk, available - left_to_others)

    def schedule(self, sequence: Sequence, end: int) -> None:
        """Put tokens [num_computed, end) of a sequence into the step. Blocks and budget have been checked."""
        start, num_tokens = sequence.num_computed, sequence.num_tokens
        is_prefill, samples = sequence.is_prefilling, end == num_tokens
        num_known_blocks = 0
        if sequence.is_resident:
            num_known_blocks = len(sequence.block_table)
        elif sequence.is_known:
            self.readmitted_ids.append(sequence.sequence_id)
        else:
            self._introduce(sequence)
        sequence.is_resident = True
        copy = self.blocks.allocate(sequence, num_tokens if sequence.must_progress else end)
        if copy is not None:
            assert not num_known_blocks, "a block that the executor knows was replaced by a copy"
            self.block_copies.append(copy)
        entry = ScheduledSequence(
            sequence.sequence_id,
            start,
            end - start,
            is_prefill,
            samples,
            [] if sequence.num_pending else sequence.token_ids[start:end],
            sequence.block_table[num_known_blocks:],
        )
        if is_prefill:
            self.prefills.append(entry)
            self.prefilling.append(sequence)
            self.short.pop(sequence, None)
            self.budget_tokens -= end - start
            if self.bound is not None:
                self.bound.take(end - start, start)
        else:
            self.decodes.append(entry)
            self.decoding.append(sequence)
            self.budget_tokens -= 1
            self.num_decode_kv_tokens += end
        if sequence.num_preemptions and start < sequence.num_recompute:
            self.counts.num_recomputed_tokens += min(end, sequence.num_recompute) - start
        sequence.num_computed = end
        sequence.num_in_flight += 1
        if end >= sequence.num_prompt:
            sequence.request.tells_prompt = False
        if samples:
            sequence.num_pending += 1
            sequence.must_progress = False
            self.running.end_prefill(sequence)

    def _introduce(self, sequence: Sequence) -> None:
        """The sequence's first step: tell the executor what it must know."""
        sampling = sequence.request.sampling
        sequence.is_known = True
        tells_prompt = sequence.request.tells_prompt
        self.new_sequences.append(
            NewSequence(
                sequence.sequence_id,
                sequence.choice,
                sampling,
                sequence.num_prompt,
                () if sampling.ignore_eos else self.limits.eos_token_ids,
                sequence.token_ids.copy() if sampling.has_penalties or sampling.grammar or tells_prompt else [],
                tells_prompt,
            )
        )

    def finish(self, step: int, finished_ids: list[int], preempted_ids: list[int]) -> StepPlan:
        """The plan, complete. Counts its tokens."""
        self.blocks.end_plan(self.prefilling)
        num_prefill_tokens = sum([entry.num_tokens for entry in self.prefills])
        self.counts.num_prefill_tokens += num_prefill_tokens
        self.counts.num_decode_tokens += len(self.decodes)
        return StepPlan(
            step=step,
            scheduled=self.decodes + self.prefills,
            new_sequences=self.new_sequences,
            finished_sequence_ids=finished_ids,
            preempted_sequence_ids=preempted_ids,
            readmitted_sequence_ids=self.readmitted_ids,
            block_copies=self.block_copies,
            total_num_scheduled_tokens=len(self.decodes) + num_prefill_tokens,
            num_prefill_requests=len(self.prefills),
            num_decode_requests=len(self.decodes),
            load=StepLoad(
                num_prefill_tokens,
                sum([n * entry.start + n * (n + 1) // 2 for entry in self.prefills if (n := entry.num_tokens)]),
                len(self.decodes),
                self.num_decode_kv_tokens,
                len(self.prefills),
                sum([entry.start for entry in self.prefills]),
            ),
        )
