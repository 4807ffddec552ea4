"""Sequences that wait to run, in the order in which they are admitted; and those that run, in theirs."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from math import inf
from typing import Final

from engine.scheduling.fair_share import FairShare
from engine.sequence import Sequence, SequenceState
from streamkv.errors import StreamKVError

OrderKey = tuple[int, float, float, int]
"""(level, deadline, arrival, sequence id)."""

_MAX_OLD_HEADS: Final = 256
"""Entries of the heap of lines that do not count any more, beside four for each line."""
_SHORTEST_AGEING_S: Final = 0.001
"""A clock's steps must not be lost in the rounding of its readings."""
_MAX_SKIPPED_OF_A_TENANT: Final = 64
"""Waiting sequences of one tenant that a walk hands out in vain before it leaves out the tenant's others."""


class QueueFull(StreamKVError):
    """As many requests wait as may; nothing was changed. The caller should come back later."""

    def __init__(self, num_waiting: int) -> None:
        super().__init__(f"{num_waiting} requests wait already and no more may; try again later")
        self.num_waiting = num_waiting


class _Line:
    """Waiting sequences in order: a sorted list, of which adding and removing moves O(n) pointers, which for a
    thousand costs less than a heap's comparisons."""

    __slots__ = ("keys", "sequences", "tenant", "version")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.version = 0
        """Of its newest entry in the heap of lines: older ones do not count. No two entries have the same."""
        self.keys: list[OrderKey] = []
        self.sequences: list[Sequence] = []

    def add(self, key: OrderKey, sequence: Sequence) -> bool:
        """Whether it is the first now."""
        index = bisect_left(self.keys, key)
        self.keys.insert(index, key)
        self.sequences.insert(index, sequence)
        return not index

    def remove(self, key: OrderKey, sequence: Sequence) -> bool:
        """Whether it was the first."""
        index = bisect_left(self.keys, key)
        assert self.sequences[index] is sequence
        del self.keys[index], self.sequences[index]
        return not index


class _Place:
    """Where a waiting sequence stands."""

    __slots__ = ("key", "line", "rises_at_s")

    def __init__(self, line: _Line, key: OrderKey, rises_at_s: float) -> None:
        self.line = line
        self.key = key
        self.rises_at_s = rises_at_s


class WaitingQueue:
    """Who goes first: by level; then those that hold blocks; then by tokens served to the tenant; within a tenant by
    deadline, then arrival, choices of a request in their order.

    The level is the priority, less one for every ageing_s that the sequence has been in the queue. Between tenants
    no level counts for more than the highest priority that waits, else old requests of one with many would leave
    nothing to the others; within a tenant it does. Hence nothing starves: of its own tenant nothing that comes
    (priority - highest priority + 1) * ageing_s after a request goes before it, and with others its tenant shares by
    tokens served.

    Those that hold blocks are resumed ones and those that are fetched from a lower tier. They come first because
    nobody else has any use of these blocks before they have run.
    """

    def __init__(self, shares: FairShare, clock: Callable[[], float], ageing_s: float = inf) -> None:
        self._shares = shares
        self._clock = clock
        self._ageing_s = max(ageing_s, _SHORTEST_AGEING_S)
        self._places: dict[Sequence, _Place] = {}
        self._lines: dict[str, _Line] = {}
        self._holders = _Line("")
        self._heads: list[tuple[int, int, OrderKey, int, _Line]] = []
        """A heap of (level, tokens served, key) of each line's first, version and line. What has been served since
        makes an entry too low, never too high."""
        self._priorities: list[int] = []
        """Of all that wait, in order."""
        self._versions = count()
        self._top = 0
        """The first of them when the heap was made."""
        self._rises: list[tuple[float, int, Sequence]] = []
        """A heap of (when its level rises, sequence id, sequence), with entries of some that have left."""
        self._moved: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_tenants(self) -> int:
        """Of sequences that hold no blocks."""
        return len(self._lines)

    def add(self, sequence: Sequence) -> None:
        request = sequence.request
        key = (request.priority, request.deadline_at_s, request.arrival_s, sequence.sequence_id)
        rises_at_s = self._clock() + self._ageing_s
        self._places[sequence] = _Place(self._enter(sequence, key), key, rises_at_s)
        insort(self._priorities, request.priority)
        if rises_at_s < inf:
            if len(self._rises) > 2 * len(self._places) + 64:
                self._rises = [(place.rises_at_s, s.sequence_id, s) for s, place in self._places.items()]
                heapify(self._rises)
            else:
                heappush(self._rises, (rises_at_s, sequence.sequence_id, sequence))

    def remove(self, sequence: Sequence) -> None:
        """The sequence is in the queue."""
        self._leave(sequence, self._places.pop(sequence))
        del self._priorities[bisect_left(self._priorities, sequence.request.priority)]

    def update(self, sequence: Sequence) -> None:
        """A sequence in the queue has got its first blocks or lost all. May be called during a walk; the next one
        minds it."""
        self._moved.append(sequence)

    def walk(self) -> Iterator[Sequence]:
        """From the first on. The queue must not change meanwhile, but who walks no further may remove what was handed
        out last.

        The sequence handed out last may have begun to run: what was computed of it counts for its tenant at once.
        O(log tenants) a sequence, and O(tenants) when the highest priority that waits is another one than before.
        """
        self._settle()
        if not self._places:
            return
        top, shares = self._top, self._shares
        holders = list(zip(self._holders.keys, self._holders.sequences, strict=True))
        holders.reverse()
        begun: list[tuple[int, int, OrderKey, int, int, _Line]] = []
        """A heap of the lines of which the walk has handed out some: as in _heads, with the place in the line and how
        many were handed out in vain."""
        taken: list[_Line] = []
        try:
            while (head := self._first_head()) is not None or begun:
                if head is not None and (not begun or head[:3] < begun[0][:3]):
                    heappop(self._heads)
                    level, index, num_skipped, line = head[0], 0, 0, head[4]
                    taken.append(line)
                else:
                    level, _, _, index, num_skipped, line = heappop(begun)
                while holders and max(holders[-1][0][0], top) <= level:
                    yield holders.pop()[1]
                sequence = line.sequences[index]
                yield sequence
                if sequence.state is SequenceState.RUNNING:
                    shares.charge(sequence)
                else:
                    num_skipped += 1
                index += 1
                if index < len(line.keys) and num_skipped <= _MAX_SKIPPED_OF_A_TENANT:
                    key = line.keys[index]
                    entry = (max(key[0], top), shares.served(line.tenant), key, index, num_skipped, line)
                    heappush(begun, entry)
            while holders:
                yield holders.pop()[1]
        finally:
            for line in taken:
                if line.keys:  # none are left if the last one was removed just now
                    self._put_in_order(line)

    def is_behind(self, other: Sequence, sequence: Sequence) -> bool:
        """Whether `other`, which waits and holds blocks, comes later than `sequence`, which waits, by the order in
        which blocks are taken away. It changes with levels only, not with what is served."""
        place, other_place = self._places[sequence], self._places[other]
        top = self._priorities[0]
        level, other_level = max(place.key[0], top), max(other_place.key[0], top)
        if level != other_level:
            return other_level > level
        return place.line is self._holders and other_place.key > place.key

    def _enter(self, sequence: Sequence, key: OrderKey) -> _Line:
        if sequence.block_table:
            line = self._holders
        else:
            tenant = sequence.request.tenant
            found = self._lines.get(tenant)
            line = self._lines[tenant] = _Line(tenant) if found is None else found
        if line.add(key, sequence) and line is not self._holders:
            self._put_in_order(line)
        return line

    def _leave(self, sequence: Sequence, place: _Place) -> None:
        line = place.line
        was_first = line.remove(place.key, sequence)
        if line is self._holders:
            return
        if not line.keys:
            del self._lines[line.tenant]
            line.version = -1
        elif was_first:
            self._put_in_order(line)

    def _put_in_order(self, line: _Line) -> None:
        """The line's first is another one than before."""
        line.version = next(self._versions)
        key = line.keys[0]
        heappush(self._heads, (max(key[0], self._top), self._shares.served(line.tenant), key, line.version, line))

    def _first_head(self) -> tuple[int, int, OrderKey, int, _Line] | None:
        """Which line comes first of those in the heap, with what was served by now."""
        heads = self._heads
        while heads:
            level, num_served, key, version, line = heads[0]
            if version != line.version:
                heappop(heads)
            elif num_served == (now_served := self._shares.served(line.tenant)):
                return heads[0]
            else:
                heapreplace(heads, (level, now_served, key, version, line))
        return None

    def _settle(self) -> None:
        """Put everybody where they belong by now."""
        for sequence in self._moved:
            place = self._places.get(sequence)
            if place is not None and (place.line is self._holders) != bool(sequence.block_table):
                self._leave(sequence, place)
                place.line = self._enter(sequence, place.key)
        self._moved.clear()
        rises = self._rises
        now_s = self._clock() if rises else 0.0
        while rises and rises[0][0] <= now_s:
            due_s, sequence_id, sequence = heappop(rises)
            place = self._places.get(sequence)
            if place is None or place.rises_at_s != due_s:
                continue
            num_levels = 1 + int((now_s - due_s) / self._ageing_s)
            self._leave(sequence, place)
            place.key = (place.key[0] - num_levels, *place.key[1:])
            place.line = self._enter(sequence, place.key)
            place.rises_at_s = due_s + num_levels * self._ageing_s
            heappush(rises, (place.rises_at_s, sequence_id, sequence))
        if self._priorities and (
            self._top != self._priorities[0] or len(self._heads) > 4 * len(self._lines) + _MAX_OLD_HEADS
        ):
            self._top = self._priorities[0]
            self._heads.clear()
            for line in self._lines.values():
                self._put_in_order(line)


class RunningList:
    """Running sequences by rank: highest priority, earliest arrival first. The last is the first to be preempted."""

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        """Read freely, changed here only."""
        self.num_prefilling = 0
        """Of them, those with is_prefilling."""

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, sequence: Sequence) -> None:
        insort(self.sequences, sequence, key=_rank)
        self.num_prefilling += sequence.is_prefilling

    def end_prefill(self, sequence: Sequence) -> None:
        """The sequence, which is in the list, comes to its next token: it decodes from now on."""
        self.num_prefilling -= sequence.is_prefilling
        sequence.is_prefilling = False

    def remove(self, sequence: Sequence) -> None:
        """The sequence is in the list."""
        index = bisect_left(self.sequences, sequence.rank, key=_rank)
        assert self.sequences[index] is sequence
        del self.sequences[index]
        self.num_prefilling -= sequence.is_prefilling


def _rank(sequence: Sequence) -> tuple[int, float, int]:
    return sequence.rank
