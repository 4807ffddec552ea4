import random

from engine.scheduling.fair_share import FairShare
from engine.scheduling.queue import RunningList, WaitingQueue
from engine.sequence import Request, Sequence
from streamkv.sampling import SamplingParams


def make_sequence(sequence_id: int, priority: int, arrival_s: float, deadline_at_s: float = float("inf")) -> Sequence:
    sampling = SamplingParams(seed=0, max_tokens=1)
    request = Request(0, b"", b"", [1], sampling, arrival_s, priority=priority, deadline_at_s=deadline_at_s)
    rank = (priority, arrival_s, sequence_id)
    return Sequence(sequence_id, request, 0, [1], 1, max_len=10, rank=rank)


def make_queue() -> tuple[WaitingQueue, FairShare]:
    shares = FairShare()
    return WaitingQueue(shares, lambda: 0.0), shares


def test_waiting_is_ordered_by_priority_then_deadline_then_arrival():
    late_deadline = make_sequence(0, 0, 1.0, 90.0)
    soon_deadline = make_sequence(1, 0, 2.0, 10.0)
    no_deadline_first = make_sequence(2, 0, 0.0)
    no_deadline_second = make_sequence(3, 0, 0.5)
    urgent = make_sequence(4, -1, 9.0)
    choice_after = make_sequence(5, 0, 0.5)
    right = [urgent, soon_deadline, late_deadline, no_deadline_first, no_deadline_second, choice_after]
    queue, shares = make_queue()
    for sequence in random.Random(7).sample(right, len(right)):
        shares.join(sequence)
        queue.add(sequence)
    assert list(queue.walk()) == right


def test_whoever_is_removed_is_gone_and_comes_back_to_its_place():
    sequences = [make_sequence(i, i % 3, i / 10) for i in range(30)]
    (queue, shares), running = make_queue(), RunningList()
    for sequence in sequences:
        shares.join(sequence)
        queue.add(sequence)
        running.add(sequence)
    before = list(queue.walk())
    for sequence in sequences[5:20]:
        queue.remove(sequence)
        running.remove(sequence)
    assert list(queue.walk()) == running.sequences == [s for s in before if s not in sequences[5:20]]
    for sequence in reversed(sequences[5:20]):
        queue.add(sequence)
        running.add(sequence)
    assert list(queue.walk()) == running.sequences == before
    assert len(queue) == len(running) == 30
