"""Sequences that wait to run, in the order in which they are admitted."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from engine.sequence import Sequence
from streamkv.errors import StreamKVError

OrderKey = tuple[int, float, float, int]


class QueueFull(StreamKVError):
    """As many requests wait as may; nothing was changed. The caller should come back later."""

    def __init__(self, num_waiting: int) -> None:
        super().__init__(f"{num_waiting} requests wait already and no more may; try again later")
        self.num_waiting = num_waiting


class WaitingQueue:
    """Waiting sequences by priority, then deadline, then arrival; choices of a request in their order.

    A sorted list: walking it costs nothing extra, and whoever is preempted or resumed comes back to its old place.
    Adding and removing moves O(n) pointers, which for a thousand costs less than a heap's comparisons.
    """

    def __init__(self) -> None:
        self._keys: list[OrderKey] = []
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Sequence]:
        """From the first on. The queue must not change while it is walked."""
        return iter(self._sequences)

    def add(self, sequence: Sequence) -> None:
        key = order_key(sequence)
        index = bisect_left(self._keys, key)
        self._keys.insert(index, key)
        self._sequences.insert(index, sequence)

    def remove(self, sequence: Sequence) -> None:
        """The sequence is in the queue."""
        index = bisect_left(self._keys, order_key(sequence))
        assert self._sequences[index] is sequence
        del self._keys[index], self._sequences[index]


class RunningList:
    """Running sequences by rank: highest priority, earliest arrival first. The last is the first to be preempted."""

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        """Read freely, changed here only."""

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, sequence: Sequence) -> None:
        insort(self.sequences, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """The sequence is in the list."""
        index = bisect_left(self.sequences, sequence.rank, key=_rank)
        assert self.sequences[index] is sequence
        del self.sequences[index]


def _rank(sequence: Sequence) -> tuple[int, float, int]:
    return sequence.rank


def order_key(sequence: Sequence) -> OrderKey:
    """A waiting sequence's place: priority, deadline, arrival."""
    request = sequence.request
    return request.priority, request.deadline_at_s, request.arrival_s, sequence.sequence_id
