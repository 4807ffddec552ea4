"""Beam search as a matter of blocks and steps: beams share what they have in common, and go on together.

A beam that continues its parent keeps the parent's blocks. The other continuations of that parent fork from it and,
in the plan of their first step, copy the block that both would write; a beam without continuation frees its own
(Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023, 4.4).

A group never comes to a standstill. While it runs it needs places and blocks as one: it takes them from whoever is
behind it, as any running sequence does, or loses all of its blocks. If no other has any left to take, it ends with
`length` and the best so far. To begin again it waits until there is room for all of its tokens at once, and holds that.
"""

from collections.abc import Callable
from typing import Final

from engine.kv.block_manager import BlockManager, Match
from engine.plan import StepTokens
from engine.scheduling.beam_group import BeamGroup, num_common, num_own_blocks
from engine.scheduling.beam_search import BeamSearch, Hypothesis
from engine.scheduling.draft import Outcome, StepDraft
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.pressure import Pressure
from engine.scheduling.ranking import Choice, aborted, conclude
from engine.scheduling.roster import Roster
from engine.scheduling.usage import Counts
from engine.sequence import Request, Sequence, SequenceOutput, SequenceState

_TOO_FEW: Final = "the search ended with fewer hypotheses than choices were asked for"


class Beams:
    """The requests with beam search: the walk of the running list comes to `plan`, that of the queue to `admit`."""

    def __init__(
        self,
        limits: SchedulerLimits,
        blocks: BlockManager,
        roster: Roster,
        pressure: Pressure,
        counts: Counts,
        finish: Callable[[Sequence], None],
        next_id: Callable[[], int],
    ) -> None:
        """finish: takes a sequence out of wherever it is. next_id: for a further sequence."""
        self._limits = limits
        self._blocks = blocks
        self._roster = roster
        self._pressure = pressure
        self._counts = counts
        self._finish = finish
        self._next_id = next_id
        self._groups = roster.beam_groups
        self._touched: dict[BeamGroup, None] = {}
        """Groups with a beam in the step that is being taken in."""
        self._outgrown: dict[BeamGroup, None] = {}
        """Groups that found in this plan that the pool is too small for them."""

    # they come and go

    def add(self, request: Request, max_len: int) -> None:
        """A request whose one sequence, which is about to wait, will compute the prompt."""
        (first,) = request.sequences
        sampling = request.sampling
        first.max_len = first.num_prompt + 1
        self._groups[request] = BeamGroup(
            request=request,
            search=BeamSearch(sampling.beam_width, sampling.length_penalty, first.stop_ids, max_len - first.num_prompt),
            width=sampling.beam_width,
            free_ranks=list(range(first.rank[2] + sampling.beam_width - 1, first.rank[2], -1)),
            live=[first],
        )

    def abort(self, request: Request, cause: str) -> list[SequenceOutput]:
        """End a request, with nothing of what it has; it may have ended before."""
        group = self._groups.get(request)
        return [] if group is None else self._conclude(group, aborted(request, cause))

    # a step's tokens

    def take(self, beam: Sequence, tokens: StepTokens) -> None:
        """A beam's step was collected."""
        group = self._groups[beam.request]
        self._touched[group] = None
        candidates = tokens.candidates.get(beam.sequence_id)
        if candidates is not None:
            group.arrived[beam] = candidates
        else:
            group.failure = tokens.failed[beam.sequence_id]
            beam.finish_reason = "error"

    def advance(self) -> list[SequenceOutput]:
        """All of a step has been taken in: choose the beams of the next one where those of a group are all there.
        Returns the choices of what has ended."""
        outputs: list[SequenceOutput] = []
        for group in self._touched:
            if group.failure:
                failed = Choice([], "error", group.failure, num_preemptions=group.num_preemptions)
                outputs += self._conclude(group, [failed] * group.request.sampling.n)
            elif group.is_complete:
                outputs += self._branch(group)
        self._touched.clear()
        return outputs

    def _branch(self, group: BeamGroup) -> list[SequenceOutput]:
        beams = group.live
        candidates = [group.arrived[beam] for beam in beams]
        continuations = group.search.step(beams[0].num_output + 1, group.output_of, candidates)
        if not continuations:
            return self._conclude(group, self._choices(group))
        group.arrived.clear()
        group.is_rebuilding = False
        group.has_branched = True
        heirs = {continuation.beam: continuation for continuation in reversed(continuations)}
        for place, beam in enumerate(beams):
            if place not in heirs:
                group.free_ranks.append(beam.rank[2])
                self._finish(beam)
        group.live = [
            beams[continuation.beam]
            if heirs[continuation.beam] is continuation
            else self._fork(group, beams[continuation.beam], continuation.token_id)
            for continuation in continuations
        ]
        for continuation in heirs.values():
            parent = beams[continuation.beam]
            parent.token_ids.append(continuation.token_id)
            parent.max_len = len(parent.token_ids)
        group.request.sequences = group.live.copy()
        self._roster.hold(group)
        return []

    def _fork(self, group: BeamGroup, parent: Sequence, token_id: int) -> Sequence:
        """Another continuation of a beam, which has not got its own yet. Shares its blocks, if it has any."""
        token_ids = [*parent.token_ids, token_id]
        request = group.request
        beam = Sequence(
            sequence_id=self._next_id(),
            request=request,
            choice=0,
            token_ids=token_ids,
            num_prompt=parent.num_prompt,
            max_len=len(token_ids),
            stop_ids=parent.stop_ids,
            rank=(*parent.rank[:2], group.free_ranks.pop()),
            num_cached_tokens=parent.num_cached_tokens,
        )
        if parent.block_table:
            self._blocks.fork(parent, beam, parent.num_computed)
        self._roster.branch(parent, beam)
        return beam

    # a running group

    def plan(self, draft: StepDraft, sequence: Sequence, index: int) -> int:
        """How many places of the running list, from running[index] on, are dealt with. That one can't decode alone: it
        is a beam, or its last token is on its way."""
        group = self._groups.get(sequence.request)
        if group is None or group.is_rebuilding:
            return 1
        beams, blocks = group.live, self._blocks
        if not group.is_ready:
            return len(beams)
        num_needed = group.num_needed(blocks.block_size, blocks.pool.ref_counts)
        if blocks.num_available_blocks < num_needed and not self._pressure.make_room(
            draft, sequence, num_needed, index
        ):
            if sequence.state is not SequenceState.RUNNING:
                return 0
            if blocks.num_owned_blocks > group.num_owned_blocks or blocks.num_in_transfer_blocks:
                return len(beams)  # others have some, and will be through with them
            self._outgrown[group] = None
            return len(beams)
        if beams[0].num_computed % blocks.block_size == 0:
            for beam in beams:
                blocks.publish(beam)
        # Whoever is new copies the block that it shares, before its parent, which the executor knows, writes into it.
        for beam in sorted(beams, key=_is_known):
            draft.schedule(beam, beam.num_tokens)
        draft.budget_tokens += len(beams)  # running decodes have theirs
        return len(beams)

    def end_outgrown(self) -> list[SequenceOutput]:
        """End the groups that have no more room, with the best that they have. After the plan's walks."""
        outputs: list[SequenceOutput] = []
        for group in self._outgrown:
            group.search.cut(group.output_of)
            outputs += self._conclude(group, self._choices(group))
        self._outgrown.clear()
        return outputs

    # a group begins again

    def admit(self, draft: StepDraft, beam: Sequence, group: BeamGroup) -> Outcome:
        """A waiting beam's turn, the first of its group: hold room for all of them, and start it. The caller takes it
        out of the queue if it was admitted."""
        draft.sharing.add(group.request)
        if group.is_rebuilding:
            return Outcome.SKIPPED  # `rebuild` starts the others
        outcome = self._hold_room(draft, beam, group)
        if outcome is not Outcome.ADMITTED:
            return outcome
        if self._start(draft, beam, group):
            draft.num_partial += group.holds_partial
            return Outcome.ADMITTED
        # What holds room and has nothing that runs might wait for those who wait for its room.
        self._hold_blocks(group, 0)
        group.is_rebuilding = False
        self._roster.hold(group)
        return Outcome.SKIPPED

    def rebuild(self, draft: StepDraft) -> None:
        """Start what can start of the groups that have room. Before others are admitted: these hold what they need."""
        rebuilding = [group for group in self._groups.values() if group.is_rebuilding]
        draft.num_partial += sum([group.holds_partial for group in rebuilding])
        for group in rebuilding:
            draft.sharing.add(group.request)
            draft.num_partial -= group.holds_partial
            for beam in group.live:
                if beam.state is SequenceState.WAITING and self._start(draft, beam, group):
                    self._roster.waiting.remove(beam)
            draft.num_partial += group.holds_partial

    def rebuild_alone(self, draft: StepDraft) -> bool:
        """Without chunked prefill: give a beam a step of its own, over the budget, if it is too long for another."""
        if self._limits.enable_chunked_prefill:
            return False
        for group in self._groups.values():
            if not group.is_rebuilding:
                continue
            for beam in group.live:
                if beam.state is not SequenceState.WAITING:
                    continue
                budget_tokens = draft.budget_tokens
                draft.budget_tokens = beam.num_tokens
                if self._start(draft, beam, group, longer_than=budget_tokens):
                    self._roster.waiting.remove(beam)
                    return True
                draft.budget_tokens = budget_tokens
        return False

    def _hold_room(self, draft: StepDraft, beam: Sequence, group: BeamGroup) -> Outcome:
        """Hold places and blocks for all beams of a group that has lost them."""
        if any(beam.num_pending for beam in group.live):
            return Outcome.SKIPPED  # their newest tokens are on their way
        num_needed = group.num_needed_anew(self._blocks.block_size)
        if num_needed > self._blocks.pool.num_blocks - 1:
            self._outgrown[group] = None
            return Outcome.SKIPPED
        if self._roster.num_places_taken + group.width > self._limits.max_running:
            return Outcome.BLOCKED
        if draft.num_partial >= self._limits.max_num_partial_prefills:
            return Outcome.SKIPPED
        if not self._pressure.make_room_for_waiting(draft, beam, num_needed, None):
            return Outcome.BLOCKED
        group.arrived.clear()
        group.is_rebuilding = True
        self._hold_blocks(group, num_needed)
        self._roster.hold(group)
        return Outcome.ADMITTED

    def _start(self, draft: StepDraft, beam: Sequence, group: BeamGroup, longer_than: int = 0) -> bool:
        """Let a waiting beam share with those that run, and compute the rest, if more than `longer_than` tokens."""
        blocks, num_tokens = self._blocks, beam.num_tokens
        running = [other for other in group.live if other.state is SequenceState.RUNNING]
        parent, shared = None, 0
        for other in running:
            common = num_common(beam, other)
            if common > shared:
                parent, shared = other, common
        if parent is not None and (parent.is_prefilling or parent in draft.prefilling or parent in draft.decoding):
            return False  # what it shares is computed in this step or later
        match = self._find(beam)
        if parent is not None:
            # A fork takes what is held for this beam. The cache may have more of it, but must not cost more.
            num_taken = blocks.num_claimed(match) + blocks.num_needed_after(match.num_tokens, num_tokens)
            if match.num_tokens > shared and num_taken <= blocks.num_needed_after(shared, num_tokens):
                parent = None
        start = shared if parent is not None else match.num_tokens
        num_taken = blocks.num_needed_after(start, num_tokens) + (blocks.num_claimed(match) if parent is None else 0)
        chunk = draft.chunk(beam, num_tokens - start)
        is_partial = start + chunk < num_tokens
        if chunk <= 0 or num_tokens - start <= longer_than:
            return False
        if is_partial and draft.num_partial >= self._limits.max_num_partial_prefills:
            return False
        num_held = group.num_held_blocks
        self._hold_blocks(group, num_held - num_own_blocks(beam, running, blocks.block_size))
        if blocks.num_available_blocks < num_taken:
            self._hold_blocks(group, num_held)  # some are just being copied to host memory
            return False
        if parent is not None:
            blocks.fork(parent, beam, start)
        else:
            blocks.share(beam, match)
        beam.must_progress = True
        self._roster.start(beam, is_prefilling=num_tokens - start > 1 or start < beam.num_prompt)
        self._roster.hold(group)
        draft.schedule(beam, start + chunk)
        draft.num_partial += is_partial
        return True

    def num_remaining(self, beam: Sequence) -> int:
        """Tokens that a waiting beam has to compute at most, if it starts now."""
        return beam.num_tokens - self._find(beam).num_tokens

    def _find(self, beam: Sequence) -> Match:
        """What the cache has of it in whole blocks: to copy a part of one takes a block that is not held."""
        node = self._blocks.find(beam).node
        return Match(node, node.depth * self._blocks.block_size, None)

    def _hold_blocks(self, group: BeamGroup, num_blocks: int) -> None:
        self._blocks.num_held_blocks += num_blocks - group.num_held_blocks
        group.num_held_blocks = num_blocks

    # ends

    def _choices(self, group: BeamGroup) -> list[Choice]:
        kept = group.search.kept[: group.request.sampling.n]
        choices = [self._choice(group, hypothesis) for hypothesis in kept]
        missing = Choice([], "error", _TOO_FEW, num_preemptions=group.num_preemptions)
        return choices + [missing] * (group.request.sampling.n - len(choices))

    def _choice(self, group: BeamGroup, hypothesis: Hypothesis) -> Choice:
        token_ids, num_preemptions = hypothesis.token_ids, group.num_preemptions
        if not hypothesis.is_stopped:
            return Choice(token_ids, "length", num_preemptions=num_preemptions)
        is_eos = token_ids[-1] in self._limits.eos_token_ids and not group.request.sampling.ignore_eos
        return Choice(token_ids, "stop", "eos" if is_eos else "stop_id", token_ids[-1], num_preemptions)

    def _conclude(self, group: BeamGroup, choices: list[Choice]) -> list[SequenceOutput]:
        for beam in group.live:
            self._finish(beam)
        group.is_rebuilding = False
        self._hold_blocks(group, 0)
        self._roster.hold(group)
        del self._groups[group.request]
        return conclude(group.request, choices, group.search.num_chosen, self._counts)


def _is_known(beam: Sequence) -> bool:
    return beam.is_known
