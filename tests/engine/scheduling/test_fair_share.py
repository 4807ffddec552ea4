"""Tenants share by tokens served, and nobody starves."""

import random
from math import inf

import pytest

from engine.scheduling.fair_share import FairShare
from engine.sequence import Request, Sequence
from streamkv.sampling import SamplingParams
from tests.engine.scheduling.driver import Driver


def sequence_of(tenant: str, num_computed: int = 0) -> Sequence:
    request = Request(0, b"", b"", [1], SamplingParams(seed=0, max_tokens=1), 0.0, tenant=tenant)
    return Sequence(0, request, 0, [1], 1, max_len=10, num_computed=num_computed)


def prompt_of(num_tokens: int, start: int = 3) -> list[int]:
    return list(range(start, start + num_tokens))


def served(driver: Driver, tenant: str) -> int:
    """Tokens computed for a tenant that were not computed before."""
    return sum(
        max(sequence.num_computed, sequence.num_charged)
        for request in driver.requests
        if request.tenant == tenant
        for sequence in request.sequences
    )


# The counters


def test_a_tenant_that_was_idle_is_lifted_to_the_least_of_the_active():
    shares = FairShare()
    busy, other = sequence_of("busy"), sequence_of("other")
    shares.join(busy)
    shares.join(other)
    busy.num_computed, other.num_computed = 700, 300
    shares.charge(busy)
    shares.charge(other)
    shares.join(sequence_of("new"))
    assert [shares.served(name) for name in ("busy", "other", "new")] == [700, 300, 300]


def test_a_tenant_that_has_had_more_than_its_share_is_remembered_while_idle():
    shares = FairShare()
    greedy, slow = sequence_of("greedy"), sequence_of("slow")
    shares.join(greedy)
    shares.join(slow)
    greedy.num_computed = 500
    shares.charge(greedy)
    shares.leave(greedy)
    shares.join(sequence_of("greedy"))
    assert (shares.served("greedy"), shares.served("slow")) == (500, 0)


def test_tokens_count_once_however_often_they_are_computed():
    shares = FairShare()
    sequence = sequence_of("a")
    shares.join(sequence)
    for num_computed in (40, 40, 0, 25, 41):
        sequence.num_computed = num_computed
        shares.charge(sequence)
    assert shares.served("a") == 41


@pytest.mark.parametrize("has_stuck_tenant", [False, True])
def test_tenants_that_are_gone_do_not_pile_up(has_stuck_tenant: bool):
    """Not even beside one that never gets anything, whose counter lifts nobody."""
    shares = FairShare()
    if has_stuck_tenant:
        shares.join(sequence_of("stuck"))
    else:
        shares.join(running := sequence_of("running"))
    for i in range(10_000):
        sequence = sequence_of(f"tenant {i}")
        shares.join(sequence)
        sequence.num_computed = 1 + i % 7
        shares.charge(sequence)
        shares.leave(sequence)
        if not has_stuck_tenant:
            running.num_computed += 1
            shares.charge(running)
    assert len(shares) <= (4097 if has_stuck_tenant else 10)
    assert len(shares._by_served) + len(shares._idle_by_served) < (10_000 if has_stuck_tenant else 200)


def test_nothing_is_remembered_when_nobody_is_active():
    shares = FairShare()
    sequences = [sequence_of(str(i)) for i in range(5)]
    for i, sequence in enumerate(sequences):
        shares.join(sequence)
        sequence.num_computed = 10 * i
        shares.charge(sequence)
    for sequence in sequences:
        shares.leave(sequence)
    assert len(shares) == 0


def test_the_least_counter_is_the_least_whatever_happens():
    shares, random_ = FairShare(), random.Random(3)
    live: list[Sequence] = []
    for step in range(3000):
        action = random_.random()
        if action < 0.3 or not live:
            live.append(sequence_of(str(random_.randrange(12))))
            before = {name: shares.served(name) for name in "0123456789" if shares.is_active(name)}
            name = live[-1].request.tenant
            is_new = not shares.is_active(name)
            shares.join(live[-1])
            if is_new and before:
                assert shares.served(name) >= min(shares.served(other.request.tenant) for other in live)
        elif action < 0.8:
            sequence = random_.choice(live)
            sequence.num_computed += random_.randrange(1 + step % 50)
            shares.charge(sequence)
        else:
            shares.leave(live.pop(random_.randrange(len(live))))
        if live:
            assert shares._least() == min(shares.served(sequence.request.tenant) for sequence in live)


# The scheduler


def test_one_with_many_requests_leaves_room_for_one_with_few():
    driver = Driver(max_num_seqs=2)
    many = [driver.submit(prompt_of(8), max_tokens=8, tenant="many") for _ in range(12)]
    driver.turn()
    few = [driver.submit(prompt_of(8), max_tokens=8, tenant="few") for _ in range(2)]
    driver.run().check_all()
    order = list(driver.ends)
    last_of_few = max(order.index(request.sequences[0]) for request in few)
    assert last_of_few <= 2 + 3
    assert [order.index(request.sequences[0]) for request in many] == sorted(
        order.index(request.sequences[0]) for request in many
    )


def test_long_requests_count_for_more_than_short_ones():
    """Two tenants with as many requests as they like: tokens are shared, not requests."""
    driver = Driver(max_num_seqs=1, max_num_batched_tokens=64)
    for _ in range(6):
        driver.submit(prompt_of(40), max_tokens=21, tenant="long")
    for _ in range(40):
        driver.submit(prompt_of(3), max_tokens=4, tenant="short")
    both_have_more = True
    while both_have_more:
        driver.turn()
        # One request is running, of at most 60 tokens: no tenant is further ahead.
        assert abs(served(driver, "long") - served(driver, "short")) <= 60
        waiting = {request.tenant for request in driver.scheduler._roster.unstarted}
        both_have_more = waiting == {"long", "short"}
    assert served(driver, "long") >= 180
    driver.run().check_all()


def test_what_was_found_in_the_cache_is_not_charged():
    driver = Driver(max_num_seqs=8)
    first = driver.submit(prompt_of(20), max_tokens=2, tenant="a", cache_salt="")
    again = driver.submit(prompt_of(20), max_tokens=2, tenant="a", cache_salt="")
    other = driver.submit(prompt_of(20), max_tokens=150, tenant="other")
    shares = driver.scheduler._roster.shares
    while not again.is_finished:
        served = shares.served("a")
        driver.turn()
    assert first.is_finished and not other.is_finished and again.sequences[0].num_cached_tokens == 19
    # The last token of each is not computed, and was not yet charged.
    assert served in (20 + 1 + 1, 20 + 1)
    driver.run().check_all()


def test_what_is_computed_again_after_a_preemption_is_not_charged():
    driver = Driver(num_blocks=9, block_size=4)
    requests = [driver.submit(prompt_of(5, start), max_tokens=9, tenant="a") for start in (50, 60, 70)]
    shares = driver.scheduler._roster.shares
    num_served = 0
    while driver.scheduler.has_work:
        driver.scheduler._roster._charge()
        num_served = shares.served("a")
        driver.turn()
    driver.check_all()
    assert sum(request.sequences[0].num_preemptions for request in requests) > 0
    assert num_served == 3 * 13 - 1, "all but the last token of each, and what the last turn computed"


def test_one_that_comes_back_after_a_rest_has_nothing_saved_up():
    driver = Driver(max_num_seqs=1)
    rested = driver.submit(prompt_of(5), max_tokens=3, tenant="rested")
    while not rested.is_finished:
        driver.turn()
    for _ in range(10):
        driver.submit(prompt_of(5), max_tokens=10, tenant="busy")
    for _ in range(50):
        driver.turn()
    for _ in range(10):
        driver.submit(prompt_of(5), max_tokens=10, tenant="rested")
    before = served(driver, "busy"), served(driver, "rested")
    for _ in range(60):
        driver.turn()
    gained = served(driver, "busy") - before[0], served(driver, "rested") - before[1]
    assert abs(gained[0] - gained[1]) <= 2 * 14
    driver.run().check_all()


@pytest.mark.parametrize("tenants", [("", ""), ("a", "a")])
def test_one_tenant_alone_has_the_order_of_priority_deadline_and_arrival(tenants: tuple[str, str]):
    driver = Driver(max_num_seqs=1)
    random_ = random.Random(5)
    for i in range(20):
        deadline_at_s = random_.choice([inf, inf, 100.0 + random_.random()])
        driver.submit(
            prompt_of(4),
            max_tokens=2,
            priority=random_.randrange(3),
            deadline_at_s=deadline_at_s,
            tenant=tenants[i % 2],
        )
    driver.run().check_all()
    wanted = sorted(driver.requests, key=lambda request: (request.priority, request.deadline_at_s, request.arrival_s))
    assert [sequence.request for sequence in driver.ends] == wanted


def test_priority_goes_before_a_tenants_share():
    driver = Driver(max_num_seqs=1)
    driver.submit(prompt_of(40), max_tokens=2, tenant="greedy")
    driver.turn()
    second = driver.submit(prompt_of(4), max_tokens=2, tenant="modest", priority=1)
    first = driver.submit(prompt_of(4), max_tokens=2, tenant="greedy", priority=0)
    driver.run().check_all()
    assert [sequence.request for sequence in driver.ends][1:] == [first, second]


# Ageing


@pytest.mark.parametrize("num_levels", [1, 2, 5])
def test_nothing_that_comes_later_than_the_bound_goes_before_a_request_of_its_tenant(num_levels: int):
    """Whatever arrives, and however urgent: (levels above it + 1) times ageing_s is all that it can be put back."""
    ageing_s = 0.5
    driver = Driver(max_num_seqs=1, ageing_s=ageing_s)
    driver.submit(prompt_of(4), max_tokens=4)
    driver.turn()
    modest = driver.submit(prompt_of(4), max_tokens=2, priority=num_levels)
    for i in range(2000):
        if driver.scheduler.num_waiting < 4:
            driver.submit(prompt_of(4), max_tokens=4, priority=0, deadline_at_s=1000.0 - i % 7)
        driver.turn()
        if modest.is_finished:
            break
    assert modest.is_finished
    before = [sequence.request for sequence in driver.ends if sequence.request is not modest]
    latest_s = max(request.arrival_s for request in before) - modest.arrival_s
    assert num_levels * ageing_s * 0.8 < latest_s <= (num_levels + 1) * ageing_s
    driver.run().check_all()


def test_old_requests_of_one_tenant_do_not_go_before_the_share_of_another():
    """Ageing lifts nobody above the highest priority that waits."""
    driver = Driver(max_num_seqs=1, ageing_s=0.05)
    for _ in range(30):
        driver.submit(prompt_of(6), max_tokens=6, tenant="flood")
    for _ in range(60):
        driver.turn()
    late = driver.submit(prompt_of(6), max_tokens=6, tenant="other")
    num_before = len(driver.ends)
    driver.run().check_all()
    assert list(driver.ends).index(late.sequences[0]) <= num_before + 1


def test_a_low_priority_of_one_tenant_gets_its_turn_beside_a_stream_of_high_ones_of_another():
    driver = Driver(max_num_seqs=1, ageing_s=0.3)
    modest = driver.submit(prompt_of(4), max_tokens=2, priority=3, tenant="modest")
    for _ in range(1000):
        if driver.scheduler.num_waiting < 3:
            driver.submit(prompt_of(4), max_tokens=4, priority=0, tenant="urgent")
        driver.turn()
        if modest.is_finished:
            break
    # Three levels, and then what runs.
    assert modest.is_finished and driver.now_s <= 3 * 0.3 + 0.3
    driver.run().check_all()


def test_waiting_begins_anew_with_a_preemption():
    """Else one of low priority that has waited long would take the place of the next one of high priority, again and
    again, only to lose its blocks to it."""
    driver = Driver(num_blocks=7, block_size=4, ageing_s=0.2)
    low = driver.submit(prompt_of(9), max_tokens=12, priority=1)
    for _ in range(2):
        driver.turn()
    high = driver.submit(prompt_of(7), max_tokens=12, priority=0)
    while not low.sequences[0].num_preemptions:
        driver.turn()
    later = driver.submit(prompt_of(14), max_tokens=3, priority=0)
    driver.run().check_all()
    assert list(driver.ends)[:2] == [high.sequences[0], later.sequences[0]]
