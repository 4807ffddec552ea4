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


def test_a_level_is_gained_for_every_ageing_s_and_more_at_once_after_a_long_rest():
    now_s = 0.0
    shares = FairShare()
    queue = WaitingQueue(shares, lambda: now_s, ageing_s=10.0)
    old = make_sequence(0, 3, 0.0)
    shares.join(old)
    queue.add(old)
    for now_s, priority, is_old_first in ((9.9, 2, False), (10.0, 2, True), (29.0, 1, True), (29.9, 0, False)):
        new = make_sequence(1, priority, now_s)
        shares.join(new)
        queue.add(new)
        assert (next(queue.walk()) is old) == is_old_first
        queue.remove(new)
        shares.leave(new)
    now_s = 1000.0
    new = make_sequence(1, -50, now_s)
    shares.join(new)
    queue.add(new)
    assert next(queue.walk()) is old, "it has risen by a hundred levels"


def test_those_that_hold_blocks_come_first_within_their_level():
    queue, shares = make_queue()
    urgent, early, holder, low_holder = (
        make_sequence(i, priority, float(i)) for i, priority in enumerate((-1, 0, 0, 1))
    )
    low_holder.block_table = [7]
    for sequence in (low_holder, holder, early, urgent):
        shares.join(sequence)
        queue.add(sequence)
    assert list(queue.walk()) == [urgent, early, holder, low_holder]
    holder.block_table = [5]
    queue.update(holder)
    assert list(queue.walk()) == [urgent, holder, early, low_holder]
    assert not queue.is_behind(holder, early) and queue.is_behind(low_holder, early)
    holder.block_table = []
    queue.update(holder)
    assert list(queue.walk()) == [urgent, early, holder, low_holder]
    for sequence in (holder, low_holder, early, urgent):
        queue.remove(sequence)
    assert not list(queue.walk()) and not len(queue) and not queue.num_tenants


def test_what_has_left_is_not_kept_for_its_next_level():
    queue = WaitingQueue(FairShare(), lambda: 0.0, ageing_s=10.0)
    for i in range(1000):
        sequence = make_sequence(i, 0, float(i))
        queue._shares.join(sequence)
        queue.add(sequence)
        queue.remove(sequence)
        queue._shares.leave(sequence)
    assert len(queue._rises) < 100
