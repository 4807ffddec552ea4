"""Every live sequence by what it is doing, and what the executor has not yet been told of those that left."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from math import inf

from engine.scheduling.beam_group import BeamGroup
from engine.scheduling.fair_share import FairShare
from engine.scheduling.queue import RunningList, WaitingQueue
from engine.sequence import Request, Sequence, SequenceState


class Roster:
    """Who runs, waits and stands aside. Knows no block: whoever moves a sequence sees to its blocks."""

    def __init__(self, clock: Callable[[], float], ageing_s: float = inf) -> None:
        self.shares = FairShare()
        self.running = RunningList()
        self.waiting = WaitingQueue(self.shares, clock, ageing_s)
        self.paused: set[Sequence] = set()
        self.parked: set[Sequence] = set()
        """Sequences that hold blocks and do not run: paused ones, resumed ones that wait, and those that are fetched
        or have been and have not begun to run."""
        self.unstarted: set[Request] = set()
        """Requests of which no step has computed anything."""
        self.finished_ids: list[int] = []
        """Ended since the last plan."""
        self.preempted_ids: dict[int, None] = {}
        """Lost their blocks since the last plan; in that order."""
        self.beam_groups: dict[Request, BeamGroup] = {}
        self.num_held_places = 0
        """For beams: places beside those that run."""
        self._deadlines: list[tuple[float, int, Request]] = []

    @property
    def num_places_taken(self) -> int:
        """Of max_running."""
        return len(self.running) + self.num_held_places

    @property
    def next_deadline_s(self) -> float:
        """On the scheduler's clock; inf: none."""
        return self._deadlines[0][0] if self._deadlines else inf

    def add(self, request: Request) -> None:
        """A request that has something to run. Its sequences that wait are in the queue."""
        self.unstarted.add(request)
        if request.deadline_at_s < inf:
            insort(self._deadlines, _deadline(request))

    def overdue(self, now_s: float) -> Request | None:
        """A request that has passed its deadline. The caller ends it."""
        return self._deadlines[0][2] if self._deadlines and self._deadlines[0][0] <= now_s else None

    def walk(self) -> Iterator[Sequence]:
        """Those that wait, from the first on. The queue must not change meanwhile."""
        if self.waiting.num_tenants > 1:
            self._charge()
        return self.waiting.walk()

    def wait(self, sequence: Sequence) -> None:
        """A new sequence, or one that was paused, waits."""
        if self.shares.num_active and not self.shares.is_active(sequence.request.tenant):
            self._charge()
        self.shares.join(sequence)
        sequence.state = SequenceState.WAITING
        self.waiting.add(sequence)

    def park(self, sequence: Sequence) -> None:
        """A sequence that waits has got blocks. It may have been handed out by a walk just now."""
        self.parked.add(sequence)
        self.waiting.update(sequence)

    def unpark(self, sequence: Sequence) -> None:
        """A sequence that waits or is paused has no block left of those that it was to be given."""
        self.parked.discard(sequence)
        if sequence.state is SequenceState.WAITING:
            self.waiting.update(sequence)

    def start(self, sequence: Sequence, is_prefilling: bool) -> None:
        """A waiting sequence runs; nothing has been scheduled of it yet. The caller takes it out of the queue, which
        may not change while it is walked."""
        sequence.num_charged = max(sequence.num_charged, sequence.num_computed)
        sequence.state = SequenceState.RUNNING
        sequence.is_prefilling = is_prefilling
        self.running.add(sequence)
        self.parked.discard(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """A sequence that runs, waits or is paused loses its blocks, which the caller takes away behind this call."""
        if sequence.state is SequenceState.RUNNING:
            self.shares.charge(sequence)
            self.running.remove(sequence)
            sequence.state = SequenceState.WAITING
            self.waiting.add(sequence)
        if sequence.state is SequenceState.WAITING:
            self.waiting.update(sequence)
        self.parked.discard(sequence)
        sequence.is_prefilling = False
        if sequence.is_resident:
            sequence.is_resident = False
            self.preempted_ids[sequence.sequence_id] = None

    def branch(self, parent: Sequence, beam: Sequence) -> None:
        """A beam has two continuations: the second one, which is new, runs, waits or stands aside as the first does."""
        beam.num_charged = len(parent.token_ids)
        beam.state = parent.state
        if beam.state is SequenceState.PAUSED:
            self.paused.add(beam)
            return
        self.shares.join(beam)
        if beam.state is SequenceState.RUNNING:
            self.running.add(beam)
        else:
            self.waiting.add(beam)

    def hold(self, group: BeamGroup) -> None:
        """Keep places for all beams of a group that runs, even if there are fewer. Call it when their number that runs
        has changed."""
        num_running = group.num_running
        num_held = group.width - num_running if num_running or group.is_rebuilding else 0
        self.num_held_places += num_held - group.num_held_places
        group.num_held_places = num_held

    def pause(self, sequence: Sequence) -> None:
        """A sequence that runs or waits stands aside, with the blocks that it has."""
        if sequence.state is SequenceState.RUNNING:
            self.shares.charge(sequence)
            self.running.remove(sequence)
            self.parked.add(sequence)
        else:
            self.waiting.remove(sequence)
        self.shares.leave(sequence)
        sequence.state = SequenceState.PAUSED
        self.paused.add(sequence)

    def resume(self, sequence: Sequence) -> None:
        """A paused sequence waits."""
        self.paused.remove(sequence)
        self.wait(sequence)

    def finish(self, sequence: Sequence) -> None:
        """A live sequence has ended; perhaps its request has, too."""
        if sequence.state is SequenceState.RUNNING:
            self.shares.charge(sequence)
            self.running.remove(sequence)
            self.shares.leave(sequence)
        elif sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
            self.shares.leave(sequence)
        self.paused.discard(sequence)
        self.parked.discard(sequence)
        sequence.state = SequenceState.FINISHED
        request = sequence.request
        if request.is_finished:
            self.unstarted.discard(request)
            if request.deadline_at_s < inf:
                del self._deadlines[bisect_left(self._deadlines, _deadline(request))]

    def forget(self, sequence: Sequence) -> None:
        """An ended sequence's last step has been collected: the executor may forget it."""
        if sequence.is_known:
            self.preempted_ids.pop(sequence.sequence_id, None)
            self.finished_ids.append(sequence.sequence_id)

    def _charge(self) -> None:
        """Count what the running sequences have computed. O(running)."""
        for sequence in self.running.sequences:
            self.shares.charge(sequence)


def _deadline(request: Request) -> tuple[float, int, Request]:
    return request.deadline_at_s, request.first_sequence_id, request
