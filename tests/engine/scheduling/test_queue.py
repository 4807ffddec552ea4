import random
from collections import Counter
from itertools import islice

import pytest

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


@pytest.mark.parametrize("seed", range(3))
def test_the_order_is_that_of_sorting_all_anew_whatever_has_happened(seed: int):
    random_ = random.Random(seed)
    now_s = 0.0
    ageing_s = 5.0
    shares = FairShare()
    queue = WaitingQueue(shares, lambda: now_s, ageing_s)
    joined_s: dict[Sequence, float] = {}
    for step in range(1500):
        now_s += random_.random() / 10
        action = random_.random()
        if action < 0.5 or not joined_s:
            sequence = make_sequence(step, random_.randrange(3), now_s, random_.choice([float("inf"), now_s + 9.0]))
            sequence.request.tenant = str(random_.randrange(5))
            sequence.block_table = [1] if random_.random() < 0.1 else []
            shares.join(sequence)
            queue.add(sequence)
            joined_s[sequence] = now_s
        elif action < 0.8:
            sequence = random_.choice(list(joined_s))
            queue.remove(sequence)
            shares.leave(sequence)
            del joined_s[sequence]
        elif action < 0.95:
            sequence = random_.choice(list(joined_s))
            sequence.num_computed += random_.randrange(20)
            shares.charge(sequence)
        else:
            sequence = random_.choice(list(joined_s))
            sequence.block_table = [] if sequence.block_table else [1]
            queue.update(sequence)
        top = min([sequence.request.priority for sequence in joined_s], default=0)

        def place(sequence: Sequence, top: int = top, now_s: float = now_s) -> tuple[float, ...]:
            request = sequence.request
            level = request.priority - int((now_s - joined_s[sequence] + 1e-9) / ageing_s)
            share = -1 if sequence.block_table else shares.served(request.tenant)
            key = (level, request.deadline_at_s, request.arrival_s, sequence.sequence_id)
            return max(level, top), share, *key

        whole = sorted(joined_s, key=place)
        if step % 3:
            length = random_.randrange(4)
            assert list(islice(queue.walk(), length)) == whole[:length]
        elif all(count < 60 for count in Counter(s.request.tenant for s in whole).values()):
            assert list(queue.walk()) == whole
    assert len(queue._heads) < 1000
