"""Waiting sequences begin to run: in their order, while there are places, tokens and blocks."""

from collections.abc import Callable
from itertools import islice
from typing import Final

from engine.kv.block_manager import BlockManager, Match
from engine.scheduling.beams import Beams
from engine.scheduling.draft import Outcome, StepDraft
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.pressure import Pressure
from engine.scheduling.roster import Roster
from engine.scheduling.transfers import Transfers
from engine.scheduling.usage import Counts
from engine.sequence import Request, Sequence, SequenceState

_MAX_SKIPPED: Final = 256
"""Waiting sequences that a plan passes over, each of which costs about a microsecond; and see queue.py."""
_MAX_AHEAD: Final = 4
"""Waiting sequences that a plan looks at for which it has no place, to fetch what they lack."""


class Admission:
    """Gives waiting sequences their first chunk, on top of what they can share.

    What they could share but lies on a lower tier is fetched first if that is cheaper than computing it. A sequence
    that is fetched waits on, with its blocks, and has room for all tokens that it has.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        blocks: BlockManager,
        roster: Roster,
        pressure: Pressure,
        transfers: Transfers,
        beams: Beams,
        counts: Counts,
        clock: Callable[[], float],
    ) -> None:
        self._limits = limits
        self._blocks = blocks
        self._roster = roster
        self._pressure = pressure
        self._transfers = transfers
        self._beams = beams
        self._counts = counts
        self._clock = clock

    def reserve_for_short(self, draft: StepDraft) -> None:
        """Set aside tokens for a few short prompts, so that they do not queue behind a long one's many chunks.

        Short is what fits into an equal share of the budget among max_num_partial_prefills; one share stays for
        the long ones, which take it, and all that is left, in their order. Where streams that decode leave less than
        the budget, the shares are of that, and what is short remains.
        """
        limits, running = self._limits, self._roster.running
        num_shares = limits.max_num_partial_prefills
        short_len = min(draft.budget_tokens // num_shares, limits.max_chunk)
        if num_shares < 2 or short_len < 1 or not limits.enable_chunked_prefill:
            return
        share = short_len
        if draft.bound is not None:
            contexts = [sequence.num_computed for sequence in running.sequences if sequence.is_prefilling]
            share = min(share, draft.bound.tokens_behind(max(contexts, default=0)) // num_shares)
        if running.num_prefilling:
            for sequence in running.sequences:
                remaining = sequence.num_tokens - sequence.num_computed
                if sequence.is_prefilling and remaining <= short_len and len(draft.short) < num_shares - 1:
                    draft.short[sequence] = min(remaining, share)
        num_places = min(limits.max_running - self._roster.num_places_taken, num_shares - 1 - len(draft.short))
        num_available = self._blocks.num_available_blocks
        if num_places <= 0:
            return
        for sequence in islice(self._roster.walk(), num_places):
            if sequence.is_fetching:
                continue
            if self._blocks.num_needed(sequence, sequence.num_tokens) > num_available:
                break
            remaining = self._num_remaining(sequence)
            if remaining <= short_len:
                draft.short[sequence] = min(remaining, share)

    def admit_alone(self, draft: StepDraft) -> bool:
        """Without chunked prefill: give the first waiting sequence a step of its own if it is too long to go beside
        the running ones. That step may exceed the budget. Returns whether it was planned."""
        if self._limits.enable_chunked_prefill or len(self._roster.running) >= self._limits.max_running:
            return False
        for sequence in self._roster.walk():
            if self._num_remaining(sequence) <= draft.budget_tokens:
                return False
            if not sequence.block_table:
                if self._find_parent(draft, sequence) != (None, False):
                    continue  # little is left to compute, or will be soon
                group = self._roster.beam_groups.get(sequence.request)
                is_beam = group is not None and group.has_branched  # which is computed again and never fetched
                if not is_beam and self._transfers.fetches(sequence, self._blocks.find(sequence)):
                    return False  # to be fetched, if those that run leave the blocks for it
            budget_tokens = draft.budget_tokens
            draft.budget_tokens = sequence.num_tokens
            outcome = self._admit(draft, sequence)
            if outcome is Outcome.ADMITTED:
                self._roster.waiting.remove(sequence)
                return True
            draft.budget_tokens = budget_tokens
            if outcome is Outcome.BLOCKED:
                return False
        return False

    def admit(self, draft: StepDraft) -> None:
        """Admit waiting sequences in their order while there are places, tokens and blocks. When only blocks are left
        the next ones that lie on a lower tier are fetched, so that they are there when it is their turn."""
        roster = self._roster
        admitted = []
        num_skipped = num_ahead = 0
        if roster.parked:
            draft.num_promised_blocks += self._num_promised_to_fetched()
        for sequence in roster.walk():
            if num_skipped > _MAX_SKIPPED:
                break
            is_full = draft.is_spent or roster.num_places_taken >= self._limits.max_running
            if is_full:
                if not self._blocks.has_tiers or num_ahead == _MAX_AHEAD:
                    break
                num_ahead += 1
            if sequence.request in draft.sharing:
                continue
            outcome = self._admit(draft, sequence, may_run=not is_full)
            if outcome is Outcome.ADMITTED:
                admitted.append(sequence)
            elif outcome is Outcome.BLOCKED:
                break
            else:
                num_skipped += 1
        for sequence in admitted:
            roster.waiting.remove(sequence)

    def _admit(self, draft: StepDraft, sequence: Sequence, may_run: bool = True) -> Outcome:
        """Schedule a waiting sequence's first chunk if there is room. The caller takes it out of the queue.

        Or begin to fetch what lower tiers have of it, if that is the next thing to do; unless it may_run, at most that.
        """
        blocks, num_tokens = self._blocks, sequence.num_tokens
        holds_blocks = bool(sequence.block_table)
        if sequence.is_fetching:
            return Outcome.SKIPPED
        group = self._roster.beam_groups.get(sequence.request)
        if group is not None and group.has_branched:
            return self._beams.admit(draft, sequence, group) if may_run else Outcome.SKIPPED
        if may_run and self._roster.num_places_taken + (1 if group is None else group.width) > self._limits.max_running:
            return Outcome.BLOCKED
        if num_tokens >= sequence.max_len or (sequence.num_pending and (not holds_blocks or sequence.follows_grammar)):
            return Outcome.SKIPPED  # its newest token is on its way, and it is needed on the host
        parent, match, start = None, None, sequence.num_computed
        if not holds_blocks:
            match = blocks.find(sequence)
            start = match.num_tokens
            if start < _shared_len(sequence) and len(sequence.request.sequences) > 1:
                parent, must_wait = self._find_parent(draft, sequence)
                if must_wait:
                    draft.sharing.add(sequence.request)
                    return Outcome.SKIPPED
                if parent is not None:
                    start = _shared_len(sequence)
            if parent is None and (match.is_arriving or self._must_wait_for_prefix(sequence)):
                draft.short.pop(sequence, None)
                return Outcome.SKIPPED
            if parent is None and self._transfers.fetches(sequence, match):
                outcome = self._fetch(draft, sequence, match)
                if outcome is not None:
                    return outcome
                match, start, holds_blocks = None, sequence.num_computed, bool(sequence.block_table)
        # Whoever cannot have all blocks for the tokens that it has would only be preempted, or preempt, half-way.
        if holds_blocks:
            num_needed = blocks.num_needed(sequence, num_tokens)
        else:
            num_needed = blocks.num_needed_after(start, num_tokens)
        chunk = draft.chunk(sequence, num_tokens - start) if may_run else 0
        is_partial = start + chunk < num_tokens
        if chunk <= 0 or (is_partial and draft.num_partial >= self._limits.max_num_partial_prefills):
            draft.num_claimed_blocks += num_needed
            return Outcome.BLOCKED if may_run and not self._limits.enable_chunked_prefill else Outcome.SKIPPED
        if num_needed and not self._pressure.make_room_for_waiting(
            draft, sequence, num_needed, None if parent else match
        ):
            return Outcome.BLOCKED

        if parent is not None:
            blocks.fork(parent, sequence, start)
        elif match is not None:
            copy = blocks.share(sequence, match)
            if copy is not None:
                draft.block_copies.append(copy)
        self._roster.start(sequence, is_prefilling=num_tokens - start > 1 or start < sequence.num_prompt)
        if group is not None:
            self._roster.hold(group)
        if sequence.request in self._roster.unstarted:
            self._begin(sequence.request, start if match is None else match.num_tokens)
        if sequence.is_prefilling:
            blocks.announce(sequence)
        draft.schedule(sequence, start + chunk)
        if is_partial:
            draft.num_partial += 1
            draft.num_promised_blocks += blocks.num_needed(sequence, num_tokens)
        return Outcome.ADMITTED

    def _begin(self, request: Request, num_cached_tokens: int) -> None:
        """The first sequence of a request is scheduled for the first time."""
        self._roster.unstarted.remove(request)
        request.first_scheduled_s = self._clock()
        num_prompt = len(request.prompt_token_ids)
        num_cached_tokens = min(num_cached_tokens, num_prompt)
        for sequence in request.sequences:
            sequence.num_cached_tokens = num_cached_tokens
        self._counts.num_prompt_tokens += num_prompt
        self._counts.num_prefix_hit_tokens += num_cached_tokens

    def _must_wait_for_prefix(self, sequence: Sequence) -> bool:
        """Whether another sequence is computing the next block of this one's prompt. Nobody waits for a lower
        priority, or for what it has to compute itself."""
        if sequence.request.tells_prompt:
            return False
        producer = self._blocks.producer(sequence)
        return producer is not None and producer.request.priority <= sequence.request.priority

    def _fetch(self, draft: StepDraft, sequence: Sequence, match: Match) -> Outcome | None:
        """Begin to copy up what lower tiers have of a waiting sequence, if there is room for its tokens. None: to make
        that room, what was to be copied was given up; the sequence has what the device has of it, and can run."""
        blocks = self._blocks
        num_needed = blocks.num_needed_after(match.num_tokens, sequence.num_tokens)
        if not self._pressure.make_room_for_waiting(draft, sequence, num_needed + draft.num_claimed_blocks, match):
            return Outcome.BLOCKED
        blocks.fetch(sequence, match)
        if sequence.block_table:
            self._roster.park(sequence)
        if not sequence.is_fetching:
            return None
        draft.short.pop(sequence, None)
        draft.num_promised_blocks += blocks.num_needed(sequence, sequence.num_tokens)
        return Outcome.SKIPPED

    def _num_promised_to_fetched(self) -> int:
        """Blocks that sequences which are being fetched will need for the rest of their tokens."""
        return sum(
            [
                self._blocks.num_needed(sequence, sequence.num_tokens)
                for sequence in self._roster.parked
                if sequence.is_fetching and sequence.state is SequenceState.WAITING
            ]
        )

    def _num_remaining(self, sequence: Sequence) -> int:
        """Tokens that a sequence which runs or waits has still to compute."""
        if sequence.block_table or sequence.num_pending:
            return sequence.num_tokens - sequence.num_computed
        group = self._roster.beam_groups.get(sequence.request)
        if group is not None and group.has_branched:
            return self._beams.num_remaining(sequence)
        return sequence.num_tokens - self._blocks.find(sequence).num_tokens

    def _find_parent(self, draft: StepDraft, sequence: Sequence) -> tuple[Sequence | None, bool]:
        """(another choice whose prompt blocks can be shared now, or whether one is computing them)."""
        shared, must_wait = _shared_len(sequence), False
        for sibling in sequence.request.sequences:
            if sibling.state is not SequenceState.RUNNING or not shared:
                continue
            if sibling.is_prefilling or sibling in draft.prefilling:
                must_wait = True  # a copy of this step would be made before the block is written
            elif sibling.num_computed >= shared:
                return sibling, False
        return None, must_wait


def _shared_len(sequence: Sequence) -> int:
    """Tokens that a choice can share with another: the prompt, but not its own last token, whose logits it needs."""
    return min(sequence.num_prompt, len(sequence.token_ids) - 1)
