"""Who starves is seen, and who only waits for its turn is not called starving."""

import pytest

from engine.sequence import Request, Sequence, SequenceState
from engine.simulation.patience import Patience, Starvation
from streamkv.sampling import SamplingParams


def waiting(number: int, arrival_s: float, priority: int = 0, tenant: str = "", deadline_s: float = 1e9) -> Sequence:
    sampling = SamplingParams(seed=0, max_tokens=5)
    request = Request(number, b"", b"", [5], sampling, arrival_s, priority, deadline_s, tenant)
    return Sequence(number, request, 0, [5], 1, 6)


class Watch:
    """Sequences that come one after another while the first waits; each begins a step after it came."""

    def __init__(self, first: Sequence, ageing_s: float = 1.0, max_steps: int = 10) -> None:
        self.patience = Patience(ageing_s, max_steps)
        self.live = [first]
        self.step = 0
        self.patience.look(self.live, self.step, first.request.arrival_s)

    def pass_over(self, other: Sequence, now_s: float) -> None:
        self.live.append(other)
        self.step += 1
        self.patience.look(self.live, self.step, now_s)
        other.state = SequenceState.RUNNING
        self.step += 1
        self.patience.look(self.live, self.step, now_s)


def passes(watch: Watch, others: list[Sequence], gap_s: float = 0.1) -> bool:
    """Whether it is called starvation."""
    try:
        for place, other in enumerate(others):
            watch.pass_over(other, 1.0 + place * gap_s)
    except Starvation:
        return True
    return False


def test_whoever_is_passed_over_by_later_ones_starves():
    assert passes(Watch(waiting(0, 0.0)), [waiting(n, 1.0 + n * 0.1) for n in range(1, 20)])


def test_a_few_that_pass_are_no_starvation():
    watch = Watch(waiting(0, 0.0))
    assert not passes(watch, [waiting(n, 1.0) for n in range(1, 5)])
    assert watch.patience.longest_steps == 6


def test_a_higher_priority_goes_first_until_the_waiting_one_has_risen_to_it():
    def higher(count: int) -> list[Sequence]:
        return [waiting(n, 1.0 + n * 0.1, priority=-3) for n in range(1, count)]

    assert not passes(Watch(waiting(0, 0.0)), higher(15))
    assert passes(Watch(waiting(0, 0.0)), higher(40))


def test_an_earlier_deadline_goes_first():
    def urgent() -> list[Sequence]:
        return [waiting(n, 0.5, deadline_s=2.0) for n in range(1, 5)]

    assert not passes(Watch(waiting(0, 0.0), ageing_s=100.0, max_steps=3), urgent())
    assert passes(Watch(waiting(0, 0.0, deadline_s=1.0), ageing_s=100.0, max_steps=3), urgent())


def test_other_tenants_are_not_in_the_same_line():
    assert not passes(Watch(waiting(0, 0.0)), [waiting(n, 1.0, tenant="other") for n in range(1, 20)])


def test_one_that_is_rightly_served_ends_the_count():
    watch = Watch(waiting(5, 0.5), max_steps=10)
    others = [waiting(n, 0.1 if n % 4 == 0 else 1.0) for n in range(6, 40)]
    for other in others:
        if other.request.arrival_s == 0.1:
            watch.live.append(other)
    watch.patience.look(watch.live, 0, 0.5)
    for place, other in enumerate(others):
        if other in watch.live:
            watch.live.remove(other)
        watch.pass_over(other, 1.0 + place * 0.01)
    assert 0 < watch.patience.longest_steps <= 6


@pytest.mark.parametrize("change", ["preempted", "paused"])
def test_whoever_leaves_the_queue_joins_it_anew(change: str):
    watch = Watch(first := waiting(0, 0.0), max_steps=10)
    later = [waiting(n, 0.5 + n * 0.001, priority=-1) for n in range(1, 20)]
    watch.patience.look(watch.live, 1, 4.0)
    if change == "preempted":
        first.num_preemptions += 1
    else:
        watch.patience.forget([first])
    watch.live += later
    watch.patience.look(watch.live, 2, 4.0)
    for place, other in enumerate(later):
        other.state = SequenceState.RUNNING
        watch.patience.look(watch.live, 3 + 2 * place, 4.1)
    assert not watch.patience.longest_steps
