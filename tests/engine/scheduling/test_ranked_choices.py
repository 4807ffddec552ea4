"""best_of and beam search through the scheduler: the right choices, all at once, whatever happens on the way."""

from collections.abc import Callable

import pytest

from engine.plan import StepPlan
from engine.sequence import Request, SequenceState
from engine.simulation.simulated_model import end_after, end_one_in
from streamkv.errors import InvalidField
from tests.engine.scheduling.driver import Driver
from tests.engine.scheduling.ranked import check_ranked

PROMPT = list(range(3, 13))


def finish(driver: Driver, may_outgrow: bool = False) -> None:
    driver.run()
    driver.check_all()
    for request in driver.requests:
        if request.sampling.ranks_choices:
            check_ranked(driver, request, may_outgrow)


def num_scheduled(plan: StepPlan | None, request: Request) -> int:
    ids = {sequence.sequence_id for sequence in request.sequences}
    return 0 if plan is None else sum(entry.sequence_id in ids for entry in plan.scheduled)


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("caches", [True, False])
def test_beams_find_what_a_search_without_blocks_finds(max_in_flight: int, block_size: int, caches: bool) -> None:
    driver = Driver(
        num_blocks=400 // block_size,
        block_size=block_size,
        max_in_flight=max_in_flight,
        eos_rule=end_one_in(6),
        enable_prefix_caching=caches,
    )
    for width, n, penalty, min_tokens in [(1, 1, 1.0, 0), (4, 1, 1.0, 0), (4, 3, 0.0, 5), (3, 2, -1.0, 0)]:
        driver.submit(PROMPT, beam_width=width, n=n, length_penalty=penalty, max_tokens=20, min_tokens=min_tokens)
    finish(driver)


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_the_choices_with_the_highest_mean_log_probability_are_returned(max_in_flight: int) -> None:
    driver = Driver(num_blocks=200, max_in_flight=max_in_flight, eos_rule=end_one_in(6))
    for n, best_of in [(1, 2), (2, 5), (3, 8)]:
        driver.submit(PROMPT, n=n, best_of=best_of, max_tokens=20, temperature=1.0)
    finish(driver)
    returned = sum(len(sequence.token_ids) - 10 for request in driver.requests for sequence in request.sequences)
    sampled = sum(
        len(driver.executor.expected_output(PROMPT, request.sampling, choice)[0])
        for request in driver.requests
        for choice in range(request.sampling.best_of)
    )
    assert driver.scheduler.counts.num_unreturned_tokens == sampled - returned > 0


def test_best_of_no_more_than_n_is_handed_out_as_it_comes() -> None:
    driver = Driver()
    request = driver.submit(PROMPT, n=2, best_of=2, max_tokens=8, temperature=1.0)
    for _ in range(4):
        driver.turn()
    assert all(driver.output_of(sequence) for sequence in request.sequences)
    finish(driver)


def test_beams_share_blocks_and_copy_only_the_one_that_they_write() -> None:
    block_size, width = 4, 4
    driver = Driver(num_blocks=200, block_size=block_size)
    request = driver.submit(PROMPT, beam_width=width, n=1, max_tokens=30)
    while len(request.sequences) < width or not driver.plans[-1].num_decode_requests:
        driver.turn()
    for _ in range(20):
        before = {beam: list(beam.block_table) for beam in request.sequences if beam.is_known}
        num_copies = driver.scheduler.num_block_copies
        plan = driver.turn()
        assert plan is not None
        for beam, table in before.items():
            if not beam.is_finished:
                assert beam.block_table[: len(table)] == table, "a beam that goes on keeps its blocks"
        assert driver.scheduler.num_block_copies - num_copies == len(plan.block_copies) <= width - 1
        tables = [beam.block_table for beam in request.sequences]
        shared = sum(map(len, tables)) - len({block_id for table in tables for block_id in table})
        assert shared >= (width - 1) * (len(PROMPT) // block_size)
    finish(driver)


def test_others_go_on_while_a_group_waits_for_its_tokens() -> None:
    driver = Driver(num_blocks=200, max_in_flight=2)
    other = driver.submit([20, 21], max_tokens=60)
    group = driver.submit(PROMPT, beam_width=3, max_tokens=20)
    for _ in range(8):
        driver.turn()
    of_group = []
    for _ in range(10):
        plan = driver.turn()
        assert num_scheduled(plan, other) == 1
        of_group.append(num_scheduled(plan, group) > 0)
    assert of_group in ([True, False] * 5, [False, True] * 5)
    finish(driver)


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("caches", [True, False])
def test_a_group_that_lost_its_blocks_finds_the_same(max_in_flight: int, chunked: bool, caches: bool) -> None:
    driver = Driver(
        num_blocks=36,
        block_size=2,
        max_in_flight=max_in_flight,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=caches,
        max_num_batched_tokens=16,
        eos_rule=end_one_in(30),
    )
    driver.submit([20, 21], max_tokens=40)
    groups = [driver.submit(PROMPT[:6], beam_width=4, n=2, max_tokens=12) for _ in range(3)]
    finish(driver)
    assert sum(group.sequences[0].num_preemptions for group in groups) > 0


def test_nobody_is_given_the_blocks_and_places_that_a_group_needs_to_begin_again() -> None:
    """Its prompt is computed anew, a token a step, while newcomers would take all that there is."""
    driver = Driver(num_blocks=22, block_size=2, max_prefill_tokens=1, max_num_seqs=6, enable_prefix_caching=False)
    driver.submit([20, 21], max_tokens=34)
    group = driver.submit(PROMPT[:5], beam_width=4, n=2, max_tokens=14)
    for _ in range(20):
        driver.turn()
    assert driver.scheduler.counts.num_preemptions == 4
    most_held = 0
    while not group.is_finished:
        driver.submit([22, 23], max_tokens=20)
        driver.turn()
        blocks, roster = driver.blocks, driver.scheduler._roster
        held = [state.num_held_blocks for state in roster.beam_groups.values()]
        assert blocks.num_held_blocks == sum(held) <= blocks.num_free_blocks + blocks.num_cached_blocks
        assert roster.num_places_taken <= 6
        most_held = max(most_held, blocks.num_held_blocks)
    assert most_held == 5
    finish(driver)
    assert group.sequences[0].num_preemptions == 1


def test_a_group_that_alone_outgrows_the_pool_ends_with_its_best_so_far() -> None:
    driver = Driver(num_blocks=12, block_size=2)
    group = driver.submit(PROMPT, beam_width=4, n=2, max_tokens=50)
    finish(driver, may_outgrow=True)
    ends = [driver.ends[sequence] for sequence in group.sequences]
    assert {end.finish_reason for end in ends} == {"length"}
    assert 1 <= len(ends[0].token_ids) < 12
    assert group.sequences[0].num_preemptions == 0


def test_groups_that_outgrow_the_pool_together_each_come_to_their_end() -> None:
    driver = Driver(num_blocks=24, block_size=2, max_num_seqs=9)
    groups = [driver.submit([3 + i, 4, 5], beam_width=4, n=1, max_tokens=20) for i in range(5)]
    finish(driver)
    assert sum(group.sequences[0].num_preemptions for group in groups) > 0


def test_a_tenant_is_charged_once_for_each_token_that_its_beams_compute() -> None:
    driver = Driver(num_blocks=200)
    driver.submit(PROMPT, beam_width=4, n=1, max_tokens=20, tenant="a")
    for _ in range(12):
        driver.turn()
    roster = driver.scheduler._roster
    roster._charge()
    assert roster.shares.served("a") == sum(plan.total_num_scheduled_tokens for plan in driver.plans) > 40
    finish(driver)


def test_groups_wait_for_places_for_all_of_their_beams() -> None:
    driver = Driver(num_blocks=200, max_num_seqs=5, eos_rule=end_after(12))
    for _ in range(3):
        driver.submit(PROMPT, beam_width=4, n=2, max_tokens=20)
        driver.submit(PROMPT, n=3, max_tokens=20)
        driver.submit(PROMPT, best_of=5, max_tokens=20)
    finish(driver)


@pytest.mark.parametrize(("settings", "field"), [({"beam_width": 5}, "beam_width"), ({"best_of": 5}, "best_of")])
def test_more_at_once_than_may_run_is_refused_by_name(settings: dict[str, int], field: str) -> None:
    for limits in ({"max_num_seqs": 4}, {"max_num_batched_tokens": 4}):
        driver = Driver(**limits)
        with pytest.raises(InvalidField, match="lower it to 4") as refusal:
            driver.submit(PROMPT, n=2, **settings)
        assert refusal.value.field == field
        assert not driver.scheduler.has_work


def end_now(driver: Driver, request: Request) -> None:
    driver.abort(request)


def end_by_deadline(driver: Driver, request: Request) -> None:
    driver.now_s = request.deadline_at_s
    driver.take(driver.scheduler.expire())


@pytest.mark.parametrize("end", [end_now, end_by_deadline])
@pytest.mark.parametrize("settings", [{"beam_width": 3}, {"best_of": 4}])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_an_end_at_every_moment_frees_all_and_returns_no_token(
    end: Callable[[Driver, Request], None], settings: dict[str, int], max_in_flight: int
) -> None:
    for num_calls in range(32):
        driver = Driver(num_blocks=40, block_size=2, max_in_flight=max_in_flight, max_num_batched_tokens=8)
        driver.submit([20, 21], max_tokens=6)
        request = driver.submit(PROMPT, n=2, max_tokens=12, deadline_at_s=1000.0, **settings)
        for call in range(num_calls):
            if call % 3 == 2:
                driver.collect()
            else:
                driver.plan()
        if request.is_finished:
            break
        end(driver, request)
        assert [driver.ends[sequence].finish_reason for sequence in request.sequences] == ["abort"] * 2
        assert driver.abort(request) == []
        finish(driver)


@pytest.mark.parametrize("num_turns", range(6))
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_what_is_ranked_stands_aside_and_goes_on_with_the_same_choices(num_turns: int, max_in_flight: int) -> None:
    driver = Driver(num_blocks=200, max_in_flight=max_in_flight)
    group = driver.submit(PROMPT, beam_width=3, max_tokens=10)
    best_of = driver.submit(PROMPT, best_of=3, max_tokens=10, temperature=1.0)
    for _ in range(num_turns):
        driver.turn()
    driver.plan()
    for request in (group, best_of):
        driver.pause(request)
    driver.run()  # what is on its way comes, and nothing more
    assert driver.scheduler.num_running == driver.scheduler.num_waiting == 0
    assert not group.is_finished and not best_of.is_finished
    other = driver.submit([20, 21], max_tokens=10)
    driver.run()
    assert other.is_finished and driver.scheduler.num_paused == len(group.sequences) + 3
    for request in (group, best_of):
        driver.scheduler.resume(request)
    finish(driver)


def test_a_beam_without_usable_logits_ends_its_request_only() -> None:
    driver = Driver(num_blocks=200)
    group = driver.submit(PROMPT, beam_width=4, n=2, max_tokens=30)
    other = driver.submit(PROMPT, beam_width=2, n=1, max_tokens=1)
    plain = driver.submit([20, 21], max_tokens=10)
    while len(group.sequences) < 4:
        driver.turn()
    driver.executor.poison_token = group.sequences[2].token_ids[-1]
    driver.run()
    ends = [driver.ends[sequence] for sequence in group.sequences]
    assert [(end.token_ids, end.finish_reason, end.cause) for end in ends] == [([], "error", "poisoned")] * 2
    for request in (other, plain):
        assert all(sequence.state is SequenceState.FINISHED for sequence in request.sequences)
    check_ranked(driver, other)
    driver.check_one(plain.sequences[0])
    driver.check_all()


@pytest.mark.parametrize("num_failed", [1, 2, 3])
def test_a_choice_without_usable_logits_is_returned_only_if_too_few_others_are_left(num_failed: int) -> None:
    driver = Driver(num_blocks=200)
    request = driver.submit(PROMPT, n=2, best_of=3, max_tokens=10, temperature=1.0)
    while not all(sequence.num_output for sequence in request.sequences):
        driver.turn()
    for sequence in request.sequences[:num_failed]:
        driver.executor.poison_token = sequence.token_ids[-1]
        while not sequence.is_finished:
            driver.turn()
    driver.executor.poison_token = None
    driver.run()
    ends = [driver.ends[sequence] for sequence in request.sequences]
    assert [end.finish_reason for end in ends] == {
        1: ["length", "length"],
        2: ["length", "error"],
        3: ["error", "error"],
    }[num_failed]
    assert [len(end.token_ids) for end in ends if end.finish_reason == "length"] == [10] * min(2, 3 - num_failed)
    driver.check_all()


def test_beams_that_lost_their_blocks_to_a_lower_tier_get_a_step_of_their_own():
    """Without chunks, and longer than the budget. They are computed again and not fetched, and must not wait for it."""
    driver = Driver(
        num_blocks=24,
        block_size=2,
        max_num_batched_tokens=16,
        enable_chunked_prefill=False,
        num_host_blocks=60,
        preemption_mode="swap",
    )
    driver.submit(list(range(3, 13)), max_tokens=30)
    beams = driver.submit(list(range(50, 62)), max_tokens=14, beam_width=2)
    driver.run().check_all()
    check_ranked(driver, beams)
    assert beams.sequences[0].num_preemptions
