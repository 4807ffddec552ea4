"""Blocks for one are taken from another: who loses them, in which order, and what becomes of what was in them."""

from engine.kv.block_manager import BlockManager, Match
from engine.scheduling.beam_group import BeamGroup
from engine.scheduling.draft import StepDraft
from engine.scheduling.roster import Roster
from engine.scheduling.transfers import Transfers
from engine.scheduling.usage import Counts
from engine.sequence import Sequence, SequenceState


class Pressure:
    """Preempts: first those that do not run, then the running one of the lowest rank that may lose its blocks.

    Blocks that are being copied out of the device come free by themselves: while these suffice, whoever needs blocks
    waits for them, and nobody else loses any.
    """

    def __init__(self, blocks: BlockManager, roster: Roster, transfers: Transfers, counts: Counts) -> None:
        self._blocks = blocks
        self._roster = roster
        self._transfers = transfers
        self._counts = counts

    def make_room(self, draft: StepDraft, sequence: Sequence, num_needed: int, index: int) -> bool:
        """Preempt until so many blocks are free for running[index]; False if it must wait or was itself the victim.

        Blocks that are not copied are free at once: steps run in the order of their launch, so one in flight that
        still reads them is done before their next owner writes.
        """
        draft.has_preempted = True
        blocks = self._blocks
        while blocks.num_available_blocks < num_needed:
            num_coming = blocks.num_available_blocks + blocks.num_leaving_blocks - draft.num_awaited_blocks
            if num_coming >= num_needed:
                draft.num_awaited_blocks += num_needed
                return False
            victim = max(self._roster.parked, key=_parked_rank, default=None) or self._running_victim(index)
            if victim is None:
                return False
            self._preempt(victim)
            if sequence.state is not SequenceState.RUNNING:
                return False
        return True

    def _running_victim(self, index: int) -> Sequence | None:
        """The lowest in rank from running[index] on: those before it are in the step already."""
        running = self._roster.running.sequences
        for place in range(len(running) - 1, max(index, 1) - 1, -1):
            if not running[place].must_progress and self._may_lose(running[place]):
                return running[place]
        return None

    def _may_lose(self, sequence: Sequence) -> bool:
        """A beam loses its blocks with all of its group, which stands together: so not if the first of all is in it."""
        group = self._roster.beam_groups.get(sequence.request)
        first = self._roster.running.sequences[0]
        return group is None or (sequence.request is not first.request and not group.is_rebuilding)

    def make_room_for_waiting(self, draft: StepDraft, sequence: Sequence, num_needed: int, match: Match | None) -> bool:
        """Whether so many blocks are free for a waiting sequence, beside those of its match and what those who run
        will need soon.

        Takes blocks from paused sequences and from those behind it in the queue, never from running ones.
        """
        blocks = self._blocks
        wanted = num_needed + draft.num_promised_blocks + len(self._roster.running) // 4
        if match is not None and blocks.has_room(match, wanted):
            return True
        while (num_available := blocks.num_available_blocks - (blocks.num_claimed(match) if match else 0)) < wanted:
            num_coming = num_available + blocks.num_leaving_blocks
            if num_coming >= wanted:
                return False
            is_behind = self._roster.waiting.is_behind
            behind = [
                other
                for other in self._roster.parked
                if other is not sequence and (other.state is SequenceState.PAUSED or is_behind(other, sequence))
            ]
            if sum([len(other.block_table) for other in behind]) + num_coming < wanted:
                return False
            self._preempt(max(behind, key=_parked_rank))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks away, and those of all other beams of its group."""
        group = self._roster.beam_groups.get(sequence.request)
        if group is None:
            self._take_blocks(sequence, self._transfers.swaps(sequence))
        else:
            self.set_down(group)

    def set_down(self, group: BeamGroup) -> None:
        """Take the blocks of all beams of a group away."""
        group.num_preemptions += any(beam.is_resident for beam in group.live)
        for beam in group.live:
            if beam.block_table or beam.state is SequenceState.RUNNING:
                self._take_blocks(beam, is_swapped=False)
        self._blocks.num_held_blocks -= group.num_held_blocks
        group.num_held_blocks = 0
        group.is_rebuilding = False
        group.arrived.clear()
        self._roster.hold(group)

    def _take_blocks(self, sequence: Sequence, is_swapped: bool) -> None:
        """When it is readmitted it is computed again, or fetched."""
        has_run = sequence.is_resident or sequence.state is SequenceState.RUNNING
        self._roster.preempt(sequence)
        if not has_run:
            self._blocks.free(sequence)  # what it was to be given it does not get; it loses nothing of its own
            return
        sequence.num_recompute = sequence.num_computed
        sequence.must_progress = True
        sequence.num_preemptions += 1
        if is_swapped:
            sequence.num_swaps += 1
            self._counts.preemptions["swap"] += 1
            self._blocks.swap_out(sequence)
        else:
            self._counts.preemptions["recompute"] += 1
            self._blocks.free(sequence)


def _parked_rank(sequence: Sequence) -> tuple[bool, tuple[int, float, int]]:
    """Highest for whom blocks are taken from first: paused before waiting, then by rank."""
    return sequence.state is SequenceState.PAUSED, sequence.rank
