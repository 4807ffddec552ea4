"""One test for each rule of the scheduler, named for it."""

import pytest

from engine.plan import StepTokens
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.queue import QueueFull
from engine.scheduling.usage import KVUsage
from engine.sequence import SequenceState
from engine.simulation.simulated_model import end_after
from streamkv.errors import InvalidField
from streamkv.sampling import SamplingParams
from tests.engine.scheduling.driver import Driver


def prompt_of(num_tokens: int, start: int = 3) -> list[int]:
    return list(range(start, start + num_tokens))


def scheduled(plan) -> dict[int, int]:
    """sequence_id → tokens in this step."""
    return {entry.sequence_id: entry.num_tokens for entry in plan.scheduled}


def only(request):
    (sequence,) = request.sequences
    return sequence


# Composition of a step


def test_every_step_composes_a_new_batch():
    driver = Driver()
    first = driver.submit(prompt_of(5), max_tokens=6)
    driver.turn()
    second = driver.submit(prompt_of(3), max_tokens=2)
    plan = driver.turn()
    assert scheduled(plan) == {only(first).sequence_id: 1, only(second).sequence_id: 3}
    driver.turn()
    assert only(second).is_finished
    assert scheduled(driver.turn()) == {only(first).sequence_id: 1}
    driver.run().check_all()


def test_decodes_come_first_and_a_long_prompt_never_stalls_them():
    driver = Driver(max_num_batched_tokens=10)
    decoding = [only(driver.submit(prompt_of(2, i), max_tokens=20)).sequence_id for i in (3, 5, 7)]
    driver.turn()
    long = only(driver.submit(prompt_of(60), max_tokens=2)).sequence_id
    for _ in range(8):
        plan = driver.turn()
        assert [entry.sequence_id for entry in plan.scheduled] == [*decoding, long]
        assert [entry.is_prefill for entry in plan.scheduled] == [False, False, False, True]
        assert scheduled(plan)[long] == 7
    driver.run().check_all()


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("max_prefill_tokens", [0, 1, 7, 16])
def test_tokens_do_not_depend_on_chunks_or_blocks(max_prefill_tokens: int, block_size: int, max_in_flight: int):
    driver = Driver(
        num_blocks=400, block_size=block_size, max_prefill_tokens=max_prefill_tokens, max_in_flight=max_in_flight
    )
    for num_tokens in (1, 2, 15, 16, 17, 40, 90):
        driver.submit(prompt_of(num_tokens), max_tokens=9)
    driver.run().check_all()
    assert driver.scheduler.counts.num_preemptions == 0


def test_a_chunk_is_at_most_max_prefill_tokens():
    driver = Driver(max_prefill_tokens=7)
    driver.submit(prompt_of(30), max_tokens=1)
    driver.run().check_all()
    assert [plan.scheduled[0].num_tokens for plan in driver.plans] == [7, 7, 7, 7, 2]


def test_the_budget_is_shared_out_in_order_and_used_up():
    driver = Driver(max_num_batched_tokens=16)
    first, second = (only(driver.submit(prompt_of(30), max_tokens=1)).sequence_id for _ in range(2))
    assert scheduled(driver.turn()) == {first: 16}
    assert scheduled(driver.turn()) == {first: 14, second: 2}
    driver.run().check_all()


def test_a_short_prompt_does_not_wait_for_a_long_one():
    driver = Driver(max_num_batched_tokens=16, max_model_len=400, num_blocks=128)
    long = only(driver.submit(prompt_of(300), max_tokens=1)).sequence_id
    driver.turn()
    short = only(driver.submit(prompt_of(4), max_tokens=1)).sequence_id
    assert scheduled(driver.turn()) == {long: 12, short: 4}
    driver.run().check_all()


def test_short_prompts_leave_a_share_to_the_long_one():
    driver = Driver(max_num_batched_tokens=16, max_model_len=400, num_blocks=128)
    long = only(driver.submit(prompt_of(300), max_tokens=1)).sequence_id
    driver.turn()
    for _ in range(30):
        for _ in range(8):
            driver.submit(prompt_of(4), max_tokens=1)
        assert scheduled(driver.turn())[long] >= 4
    driver.run().check_all()


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_at_most_max_num_partial_prefills_prompts_are_computed_in_part(limit: int):
    driver = Driver(max_num_batched_tokens=40, max_prefill_tokens=5, max_num_partial_prefills=limit)
    for _ in range(6):
        driver.submit(prompt_of(20), max_tokens=1)
    assert len(driver.turn().scheduled) == limit
    driver.run().check_all()


def test_a_prompt_that_fits_whole_passes_partial_ones():
    driver = Driver(max_num_batched_tokens=40, max_prefill_tokens=5, max_num_partial_prefills=1)
    long = only(driver.submit(prompt_of(20), max_tokens=1)).sequence_id
    driver.submit(prompt_of(20), max_tokens=1)
    short = only(driver.submit(prompt_of(3), max_tokens=1)).sequence_id
    assert scheduled(driver.turn()) == {long: 5, short: 3}
    driver.run().check_all()


def test_without_chunked_prefill_a_prompt_runs_whole():
    driver = Driver(enable_chunked_prefill=False, max_num_batched_tokens=32, max_prefill_tokens=4)
    first, second, third = (only(driver.submit(prompt_of(n), max_tokens=3)).sequence_id for n in (20, 10, 9))
    assert scheduled(driver.turn()) == {first: 20, second: 10}
    assert scheduled(driver.turn()) == {first: 1, second: 1, third: 9}
    driver.run().check_all()


def test_without_chunked_prefill_a_prompt_over_the_budget_has_a_step_of_its_own():
    driver = Driver(enable_chunked_prefill=False, max_num_batched_tokens=16)
    decoding = only(driver.submit(prompt_of(5), max_tokens=9)).sequence_id
    driver.turn()
    long = only(driver.submit(prompt_of(50), max_tokens=3)).sequence_id
    assert scheduled(driver.turn()) == {long: 50}
    assert scheduled(driver.turn()) == {decoding: 1, long: 1}
    driver.run().check_all()


def test_without_chunked_prefill_choices_join_the_step_after_their_prompt():
    driver = Driver(enable_chunked_prefill=False, max_num_batched_tokens=16)
    request = driver.submit(prompt_of(50), n=3, max_tokens=3, temperature=1.0)
    first, second, third = (sequence.sequence_id for sequence in request.sequences)
    assert scheduled(driver.turn()) == {first: 50}
    assert scheduled(driver.turn()) == {first: 1, second: 1, third: 1}
    driver.run().check_all()


def test_no_more_than_max_num_seqs_run():
    driver = Driver(max_num_seqs=3)
    for _ in range(7):
        driver.submit(prompt_of(2), max_tokens=4)
    assert len(driver.turn().scheduled) == 3
    assert (driver.scheduler.num_running, driver.scheduler.num_waiting) == (3, 4)
    driver.run().check_all()
    assert all(len(plan.scheduled) <= 3 for plan in driver.plans)


def test_order_is_priority_then_deadline_then_arrival():
    driver = Driver(max_num_seqs=1)
    plain = driver.submit(prompt_of(2), max_tokens=1)
    later = driver.submit(prompt_of(2), max_tokens=1)
    due = driver.submit(prompt_of(2), max_tokens=1, deadline_at_s=100.0)
    urgent = driver.submit(prompt_of(2), max_tokens=1, priority=-1)
    unimportant = driver.submit(prompt_of(2), max_tokens=1, priority=5)
    driver.run().check_all()
    order = [plan.scheduled[0].sequence_id for plan in driver.plans]
    assert order == [only(request).sequence_id for request in (urgent, due, plain, later, unimportant)]


# Memory pressure


def test_the_victim_has_the_lowest_priority_and_came_last():
    driver = Driver(num_blocks=9, block_size=2)
    oldest, middle, last = (driver.submit(prompt_of(4), max_tokens=8) for _ in range(3))
    important = driver.submit(prompt_of(1), max_tokens=8, priority=-1)
    driver.run().check_all()
    assert only(last).num_preemptions >= 1
    assert only(important).num_preemptions == 0
    assert only(oldest).num_preemptions <= only(middle).num_preemptions <= only(last).num_preemptions
    assert driver.scheduler.counts.num_preemptions == sum(only(request).num_preemptions for request in driver.requests)


def test_the_oldest_of_the_highest_priority_is_never_preempted():
    driver = Driver(num_blocks=11, block_size=2, max_in_flight=2)
    oldest = driver.submit(prompt_of(3), max_tokens=12)
    for _ in range(6):
        driver.submit(prompt_of(3), max_tokens=12)
    driver.run().check_all()
    assert driver.scheduler.counts.num_preemptions > 0
    assert only(oldest).num_preemptions == 0


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("num_tokens", [3, 4, 5, 7, 8, 9])
def test_preempted_sequences_come_back_with_identical_tokens(num_tokens: int, max_in_flight: int):
    driver = Driver(num_blocks=8, block_size=4, max_in_flight=max_in_flight)
    for _ in range(4):
        driver.submit(prompt_of(num_tokens), max_tokens=13, temperature=1.0)
    driver.run().check_all()
    assert driver.scheduler.counts.num_preemptions > 0
    assert driver.scheduler.counts.num_recomputed_tokens > 0
    assert any(plan.readmitted_sequence_ids for plan in driver.plans)


def test_a_readmitted_sequence_gets_the_blocks_of_all_its_tokens_at_once():
    """Otherwise two that are computed again could each wait for the other's blocks."""
    driver = Driver(num_blocks=8, block_size=4, max_prefill_tokens=3)
    for _ in range(3):
        driver.submit(prompt_of(9), max_tokens=12)
    driver.run().check_all()
    readmissions = [
        entry for plan in driver.plans for entry in plan.scheduled if entry.sequence_id in plan.readmitted_sequence_ids
    ]
    assert readmissions
    assert all(len(entry.new_block_ids) >= 3 > entry.num_tokens // 4 for entry in readmissions)


def test_a_step_that_preempts_admits_nobody():
    driver = Driver(num_blocks=11, block_size=2)
    driver.submit(prompt_of(4), max_tokens=9)
    victim = only(driver.submit(prompt_of(12), max_tokens=4))
    due = only(driver.submit(prompt_of(6), max_tokens=2, deadline_at_s=100.0))
    driver.pause(due.request)
    driver.turn()
    driver.scheduler.resume(due.request)
    while not victim.num_preemptions:
        plan = driver.turn()
    assert plan.preempted_sequence_ids == [victim.sequence_id]
    assert not plan.new_sequences
    assert driver.blocks.num_available_blocks >= 3
    assert [facts.sequence_id for facts in driver.turn().new_sequences] == [due.sequence_id]
    driver.run().check_all()


def test_the_oldest_waits_rather_than_preempt_one_that_was_readmitted_and_has_no_token_yet():
    driver = Driver(num_blocks=10, block_size=2, max_prefill_tokens=1)
    for num_prompt, max_tokens in ((4, 5), (6, 6), (4, 9)):
        driver.submit(prompt_of(num_prompt), max_tokens=max_tokens)
    waited = False
    while driver.scheduler.has_work:
        running = driver.scheduler._roster.running.sequences
        oldest = running[0] if running else None
        has_protected = any(sequence.must_progress for sequence in running)
        plan = driver.turn()
        if plan and oldest and oldest.sequence_id not in scheduled(plan):
            waited = True
            assert has_protected
    assert waited
    driver.check_all()


def test_a_sequence_may_end_by_a_token_that_was_in_flight_when_it_was_preempted():
    driver = Driver(num_blocks=9, block_size=1, max_in_flight=2, eos_rule=end_after(0))
    for num_prompt, max_tokens in ((4, 1), (4, 2), (5, 1)):
        driver.submit(prompt_of(num_prompt), max_tokens=max_tokens)
    driver.run().check_all()
    preempted = [only(request) for request in driver.requests if only(request).num_preemptions]
    assert preempted
    assert not any(plan.readmitted_sequence_ids for plan in driver.plans)


def test_a_lone_sequence_that_outgrows_the_pool_ends_with_length():
    driver = Driver(num_blocks=6, block_size=4, max_model_len=1000)
    request = driver.submit(prompt_of(7), max_tokens=500)
    driver.run().check_all()
    assert driver.ends[only(request)].finish_reason == "length"
    assert len(only(request).token_ids) == 20


def test_max_model_len_ends_with_length():
    driver = Driver(max_model_len=21)
    request = driver.submit(prompt_of(7), max_tokens=500)
    driver.run().check_all()
    assert driver.ends[only(request)].finish_reason == "length"
    assert len(only(request).token_ids) == 21


def test_a_waiting_prompt_leaves_the_blocks_that_unfinished_prefills_will_need():
    driver = Driver(num_blocks=9, block_size=4, max_prefill_tokens=8)
    driver.submit(prompt_of(14), max_tokens=10)
    driver.submit(prompt_of(22), max_tokens=2)
    driver.run().check_all()
    assert driver.scheduler.counts.num_preemptions == 0


def test_a_waiting_prompt_leaves_a_block_for_every_four_that_run():
    """Else the next decode that comes to a block's border would throw it out again."""
    driver = Driver(num_blocks=16, block_size=4)
    for _ in range(4):
        driver.submit(prompt_of(5), max_tokens=3)
    driver.turn()
    driver.submit(prompt_of(28), max_tokens=2)
    assert driver.blocks.num_free_blocks == 7
    assert not driver.turn().new_sequences
    driver.run().check_all()
    assert driver.scheduler.counts.num_preemptions == 0


# Ends


def test_end_of_sequence_stops():
    driver = Driver(eos_rule=end_after(3))
    request = driver.submit(prompt_of(5), max_tokens=9)
    driver.run().check_all()
    end = driver.ends[only(request)]
    assert (end.finish_reason, end.cause, end.stop_token_id) == ("stop", "eos", 2)
    assert len(driver.output_of(only(request))) == 4


def test_a_stop_token_id_stops():
    driver = Driver()
    third = driver.executor.expected_tokens(prompt_of(5), 3)[2]
    request = driver.submit(prompt_of(5), max_tokens=9, stop_token_ids=[third])
    driver.run().check_all()
    end = driver.ends[only(request)]
    assert (end.finish_reason, end.cause, end.stop_token_id) == ("stop", "stop_id", third)
    assert end.token_ids == [third]


def test_stop_wins_when_max_tokens_comes_at_once():
    driver = Driver(eos_rule=end_after(3))
    request = driver.submit(prompt_of(5), max_tokens=4)
    driver.run().check_all()
    assert driver.ends[only(request)].finish_reason == "stop"


def test_max_tokens_ends_with_length_and_nothing_more_is_computed():
    for max_in_flight in (1, 2):
        driver = Driver(max_in_flight=max_in_flight)
        request = driver.submit(prompt_of(5), max_tokens=4)
        driver.run().check_all()
        assert driver.ends[only(request)].finish_reason == "length"
        assert len(driver.plans) == 4
        assert driver.scheduler.counts.num_wasted_tokens == 0


def test_ignore_eos_goes_on_and_feeds_the_id_back():
    driver = Driver(eos_rule=end_after(3))
    request = driver.submit(prompt_of(5), max_tokens=9, ignore_eos=True)
    driver.run().check_all()
    assert driver.output_of(only(request))[3] == 2
    assert driver.ends[only(request)].finish_reason == "length"
    assert not driver.plans[0].new_sequences[0].eos_token_ids


def test_an_eos_id_that_is_also_a_stop_id_stops_under_ignore_eos():
    driver = Driver(eos_rule=end_after(3))
    request = driver.submit(prompt_of(5), max_tokens=9, ignore_eos=True, stop_token_ids=[2])
    driver.run()
    end = driver.ends[only(request)]
    assert (end.finish_reason, end.cause) == ("stop", "stop_id")


def test_nothing_stops_before_min_tokens():
    driver = Driver()
    request = driver.submit(prompt_of(5), max_tokens=9, min_tokens=3)
    sequence = only(request)
    for token_id in (2, 2, 2, 2):  # a sampler without the ban
        plan = driver.scheduler.plan()
        (output,) = driver.scheduler.update(plan, StepTokens([token_id]))
        if sequence.num_output <= 3:
            assert not output.finish_reason
    assert (output.finish_reason, output.cause) == ("stop", "eos")


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_sequence_without_a_token_ends_with_error_and_its_neighbours_do_not_notice(max_in_flight):
    driver = Driver(max_in_flight=max_in_flight)
    first = driver.submit(prompt_of(9), max_tokens=12)
    driver.turn()
    second = driver.submit(prompt_of(6), max_tokens=12, n=2, temperature=1.0)
    failing = driver.submit([500, 501, 502, 777, 504], max_tokens=12)
    driver.executor.poison_token = 777
    driver.run()
    end = driver.ends[only(failing)]
    assert (end.finish_reason, end.cause, end.token_ids, end.stop_token_id) == ("error", "poisoned", [], -1)
    assert driver.output_of(only(failing)) == []
    driver.requests.remove(failing)
    driver.check_all()
    assert {driver.ends[sequence].finish_reason for sequence in (*first.sequences, *second.sequences)} == {"length"}


def test_a_sequence_that_fails_later_keeps_the_tokens_before():
    driver = Driver()
    request = driver.submit(prompt_of(5), max_tokens=12)
    driver.executor.poison_token = driver.executor.expected_tokens(prompt_of(5), 4)[-1]
    driver.run()
    assert driver.output_of(only(request)) == driver.executor.expected_tokens(prompt_of(5), 4)
    assert driver.ends[only(request)].finish_reason == "error"
    assert driver.blocks.num_owned_blocks == 0


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_nothing_stays_cached_of_a_sequence_that_failed(max_in_flight):
    driver = Driver(max_in_flight=max_in_flight)
    driver.submit(prompt_of(40), max_tokens=3)
    driver.run()
    assert driver.blocks.num_cached_blocks
    driver.executor.poison_token = driver.executor.expected_tokens(prompt_of(30), 4)[-1]
    driver.submit(prompt_of(30), max_tokens=12)
    driver.run()
    assert (driver.blocks.num_cached_blocks, driver.blocks.num_owned_blocks) == (0, 0)


# Steps that overlap


def test_the_next_step_runs_on_the_token_that_is_still_on_the_device():
    driver = Driver(max_in_flight=2)
    request = driver.submit(prompt_of(5), max_tokens=5)
    assert driver.plan() is not None
    plan = driver.plan()
    assert plan.scheduled[0].token_ids == []
    assert plan.scheduled[0].start == 5
    assert only(request).num_pending == 2
    assert only(request).num_output == 0
    driver.run().check_all()


def test_a_token_sampled_after_the_end_is_dropped():
    driver = Driver(max_in_flight=2, eos_rule=end_after(2))
    request = driver.submit(prompt_of(5), max_tokens=9)
    driver.run().check_all()
    assert len(driver.output_of(only(request))) == 3
    assert driver.scheduler.counts.num_wasted_tokens == 1


def test_blocks_stay_until_the_last_launched_step_is_collected():
    driver = Driver(max_in_flight=2, eos_rule=end_after(0))
    sequence = only(driver.submit(prompt_of(5), max_tokens=9))
    driver.plan()
    driver.plan()
    assert driver.collect()[0].finish_reason == "stop"
    assert sequence.is_finished
    assert driver.blocks.num_owned_blocks == 2
    assert driver.collect() == []
    assert driver.blocks.num_owned_blocks == 0
    driver.check_all()


def test_updates_out_of_order_are_a_fault():
    driver = Driver(max_in_flight=2)
    driver.submit(prompt_of(5))
    driver.plan()
    second = driver.plan()
    with pytest.raises(AssertionError, match="was collected before"):
        driver.scheduler.update(second, StepTokens([5]))


# Abort, pause, deadline


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("num_plans", [0, 1, 2, 5])
def test_abort_frees_every_block_once_the_launched_steps_are_collected(num_plans: int, max_in_flight: int):
    """While waiting, while prefilling, while decoding."""
    driver = Driver(max_in_flight=max_in_flight, max_num_batched_tokens=16)
    other = driver.submit(prompt_of(2), max_tokens=12)
    request = driver.submit(prompt_of(30), max_tokens=9)
    for _ in range(num_plans):
        driver.turn()
    driver.plan()
    (output,) = driver.abort(request, "disconnected")
    assert (output.finish_reason, output.cause, output.token_ids) == ("abort", "disconnected", [])
    assert driver.abort(request) == []
    for _ in range(max_in_flight):
        driver.collect()
    assert only(request).block_table == []
    assert driver.blocks.num_owned_blocks == len(only(other).block_table)
    driver.run().check_all()
    assert driver.ends[only(other)].finish_reason == "length"


def test_a_paused_request_is_not_scheduled_and_keeps_the_token_in_flight():
    driver = Driver(max_in_flight=2)
    request = driver.submit(prompt_of(5), max_tokens=9)
    driver.plan()
    driver.pause(request)
    assert driver.plan() is None
    driver.collect()
    assert len(driver.output_of(only(request))) == 1
    assert not driver.scheduler.has_work
    assert driver.scheduler.num_paused == 1
    driver.scheduler.resume(request)
    assert driver.scheduler.has_runnable
    driver.run().check_all()
    assert driver.scheduler.counts.num_recomputed_tokens == 0, "its blocks were still there"
    assert sum(plan.total_num_scheduled_tokens for plan in driver.plans) == 5 + 8


def test_paused_sequences_lose_their_blocks_first():
    driver = Driver(num_blocks=9, block_size=2)
    paused = driver.submit(prompt_of(5), max_tokens=9)
    driver.turn()
    driver.pause(paused)
    running = [driver.submit(prompt_of(3), max_tokens=4) for _ in range(2)]
    while not all(request.is_finished for request in running):
        driver.turn()
    assert only(paused).num_preemptions == 1
    assert [only(request).num_preemptions for request in running] == [0, 0]
    driver.scheduler.resume(paused)
    driver.run().check_all()


def test_a_prompt_that_waits_takes_the_blocks_of_paused_ones_and_not_of_running_ones():
    driver = Driver(num_blocks=9, block_size=2)
    paused = driver.submit(prompt_of(9), max_tokens=3)
    driver.turn()
    driver.pause(paused)
    large = driver.submit(prompt_of(11), max_tokens=3)
    second = driver.submit(prompt_of(11), max_tokens=3)
    driver.turn()
    assert only(large).state is SequenceState.RUNNING
    assert only(paused).block_table == []
    assert only(second).state is SequenceState.WAITING
    driver.scheduler.resume(paused)
    driver.run().check_all()
    assert driver.scheduler.counts.num_preemptions == 1


def test_a_resumed_sequence_comes_back_to_its_place_in_the_order():
    driver = Driver(max_num_seqs=1)
    early, late = driver.submit(prompt_of(5), max_tokens=3), driver.submit(prompt_of(5), max_tokens=3)
    driver.pause(early)
    driver.scheduler.resume(early)
    assert list(scheduled(driver.turn())) == [only(early).sequence_id]
    driver.run().check_all()
    assert list(driver.ends) == [only(early), only(late)]


def test_a_resumed_sequence_that_still_has_its_blocks_goes_before_those_that_have_none():
    """Nobody else has any use of them before it has run."""
    driver = Driver(max_num_seqs=1)
    early = driver.submit(prompt_of(5), max_tokens=3)
    late = driver.submit(prompt_of(5), max_tokens=6)
    driver.pause(early)
    driver.turn()
    driver.pause(late)
    driver.scheduler.resume(early)
    driver.scheduler.resume(late)
    assert only(late).block_table and not only(early).block_table
    assert list(scheduled(driver.turn())) == [only(late).sequence_id]
    driver.run().check_all()


def test_a_more_urgent_prompt_takes_the_blocks_of_a_resumed_one():
    driver = Driver(num_blocks=9, block_size=2, max_num_seqs=1)
    resumed = driver.submit(prompt_of(9), max_tokens=3, priority=1)
    driver.turn()
    driver.pause(resumed)
    urgent = driver.submit(prompt_of(11), max_tokens=3)
    driver.scheduler.resume(resumed)
    assert list(scheduled(driver.turn())) == [only(urgent).sequence_id]
    assert only(resumed).block_table == [] and only(resumed).num_preemptions == 1
    driver.run().check_all()


@pytest.mark.parametrize("num_turns", [0, 2])
@pytest.mark.parametrize("is_paused", [False, True])
def test_a_deadline_that_has_passed_aborts(is_paused: bool, num_turns: int):
    driver = Driver()
    request = driver.submit(prompt_of(5), max_tokens=50, deadline_at_s=7.5)
    for _ in range(num_turns):
        driver.turn()
    if is_paused:
        driver.pause(request)
    assert driver.scheduler.next_deadline_s == 7.5
    assert driver.scheduler.expire() == []
    driver.now_s = 7.5
    (output,) = driver.take(driver.scheduler.expire())
    assert (output.finish_reason, output.cause) == ("abort", "deadline")
    driver.run().check_all()


def test_a_request_that_ends_in_time_has_no_deadline_left():
    driver = Driver()
    driver.submit(prompt_of(5), max_tokens=2, deadline_at_s=7.5)
    driver.run().check_all()
    assert driver.scheduler.next_deadline_s == float("inf")


# Choices


@pytest.mark.parametrize("num_tokens", [1, 4, 8, 9, 11, 30])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_choices_share_the_prompt_and_compute_it_once(num_tokens: int, max_in_flight: int):
    driver = Driver(max_in_flight=max_in_flight, max_prefill_tokens=7)
    request = driver.submit(prompt_of(num_tokens), n=4, max_tokens=6, temperature=1.0)
    while not all(len(sequence.token_ids) > num_tokens for sequence in request.sequences):
        driver.turn()
    num_shared = (num_tokens - 1) // 4
    tables = [sequence.block_table for sequence in request.sequences]
    assert all(table[:num_shared] == tables[0][:num_shared] for table in tables)
    # Each choice computes the last prompt token itself, for its logits.
    assert driver.scheduler.counts.num_prefill_tokens == num_tokens + 3
    # The block in which that token lies is copied, unless it is the first in its block.
    assert driver.scheduler.num_block_copies == (3 if (num_tokens - 1) % 4 else 0)
    driver.run().check_all()
    assert len({tuple(driver.output_of(sequence)) for sequence in request.sequences}) == 4


def test_shared_blocks_count_once_in_the_usage():
    driver = Driver()
    driver.submit(prompt_of(13), n=3, max_tokens=4, temperature=1.0)
    driver.turn()
    assert driver.scheduler.kv_usage() == KVUsage(4, 59, 0, 0, 13, 13 / 16)
    driver.turn()
    assert driver.scheduler.kv_usage() == KVUsage(3 + 3, 57, 0, 0, 12 + 2 + 1 + 1, 16 / 24)
    driver.run().check_all()


def test_another_choice_computes_the_prompt_when_the_first_ended_before_it_was_shared():
    driver = Driver(max_num_seqs=1, enable_prefix_caching=False)
    request = driver.submit(prompt_of(9), n=3, max_tokens=1, temperature=1.0)
    driver.run().check_all()
    assert driver.scheduler.counts.num_prefill_tokens == 27
    assert len(driver.ends) == len(request.sequences) == 3


def test_choices_survive_the_preemption_of_the_one_that_computes_their_prompt():
    driver = Driver(num_blocks=9, block_size=2, max_prefill_tokens=2)
    driver.submit(prompt_of(5), max_tokens=10)
    driver.submit(prompt_of(5), n=3, max_tokens=8, temperature=1.0)
    driver.run().check_all()
    assert driver.scheduler.counts.num_preemptions > 0


def test_others_go_past_choices_that_wait_for_their_prompt():
    driver = Driver(max_num_batched_tokens=16, max_prefill_tokens=4)
    driver.submit(prompt_of(40), n=4, max_tokens=3, temperature=1.0)
    other = only(driver.submit(prompt_of(4), max_tokens=3))
    assert other.sequence_id in scheduled(driver.turn())
    driver.run().check_all()


# Continuations


@pytest.mark.parametrize("num_prior", [1, 3, 7])
def test_a_continuation_goes_on_where_it_was(num_prior: int):
    driver = Driver()
    whole = driver.executor.expected_tokens(prompt_of(9), 8)
    request = driver.submit(prompt_of(9), max_tokens=8, prior=[whole[:num_prior]])
    driver.run().check_all()
    assert driver.output_of(only(request)) == whole[num_prior:]
    assert driver.plans[0].new_sequences[0].num_prompt == 9


def test_finished_choices_of_a_continuation_are_not_run():
    driver = Driver()
    request = driver.submit(
        prompt_of(9), n=3, temperature=1.0, prior=[[], [7, 8], []], finished_choices=[1], max_tokens=4
    )
    driver.run().check_all()
    assert [sequence.choice for sequence in driver.ends] == [0, 2]
    assert request.sequences[1].token_ids[9:] == [7, 8]


@pytest.mark.parametrize(
    ("prior", "reason", "cause"),
    [([5, 6, 2], "stop", "eos"), ([5, 6, 7, 8], "length", ""), ([5, 9], "stop", "stop_id")],
)
def test_a_continuation_that_had_ended_ends_without_a_step(prior: list[int], reason: str, cause: str):
    driver = Driver()
    request = driver.submit(prompt_of(9), max_tokens=4, stop_token_ids=[9], prior=[prior])
    assert driver.scheduler.has_runnable
    assert driver.scheduler.next_deadline_s == driver.now_s
    (output,) = driver.take(driver.scheduler.expire())
    assert (output.sequence, output.token_ids) == (only(request), [])
    assert (output.finish_reason, output.cause) == (reason, cause)
    assert not driver.scheduler.has_runnable
    assert driver.scheduler.plan() is None


# The door


def test_a_prompt_that_cannot_fit_with_one_more_token_is_refused():
    driver = Driver(max_model_len=20)
    with pytest.raises(InvalidField, match="shorten it to 19") as refusal:
        driver.submit(prompt_of(20))
    assert refusal.value.field == "prompt"
    driver.submit(prompt_of(19))
    driver.run().check_all()

    driver = Driver(num_blocks=4, block_size=4, max_model_len=1000)
    with pytest.raises(InvalidField, match="limit of 12 tokens"):
        driver.submit(prompt_of(12))
    driver.submit(prompt_of(11))
    driver.run().check_all()


def test_an_empty_prompt_and_min_tokens_out_of_reach_are_refused():
    driver = Driver(max_model_len=20)
    with pytest.raises(InvalidField, match="at least one token"):
        driver.submit([])
    with pytest.raises(InvalidField, match="lower min_tokens to 10") as refusal:
        driver.submit(prompt_of(10), max_tokens=30, min_tokens=11)
    assert refusal.value.field == "min_tokens"


def test_a_full_queue_refuses_and_has_room_again_later():
    driver = Driver(max_num_seqs=2, max_queue=3)
    for _ in range(5):
        driver.submit(prompt_of(3), max_tokens=2)
    with pytest.raises(QueueFull):
        driver.submit(prompt_of(3))
    driver.turn()
    with pytest.raises(QueueFull):
        driver.submit(prompt_of(3))
    driver.abort(driver.requests[-1])
    driver.submit(prompt_of(3))
    driver.run()
    driver.submit(prompt_of(3))
    driver.run().check_all()


def test_an_idle_scheduler_has_nothing_to_plan():
    driver = Driver()
    scheduler = driver.scheduler
    assert scheduler.plan() is None
    assert not scheduler.has_runnable
    assert not scheduler.has_work
    assert scheduler.expire() == []


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_num_partial_prefills", "max_queue"])
def test_limits_under_which_nothing_could_run_are_refused(name: str):
    limits = {
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1,
        "max_prefill_tokens": 0,
        "max_num_partial_prefills": 1,
        "enable_chunked_prefill": True,
        "max_model_len": 10,
        "max_queue": 1,
    }
    SchedulerLimits(**limits)
    with pytest.raises(ValueError, match=name):
        SchedulerLimits(**{**limits, name: 0})


def test_sampling_params_reach_the_executor_once():
    driver = Driver()
    driver.submit(prompt_of(3), max_tokens=5)
    driver.run().check_all()
    facts = [facts for plan in driver.plans for facts in plan.new_sequences]
    assert [(f.choice, f.num_prompt, f.eos_token_ids) for f in facts] == [(0, 3, (2,))]
    assert isinstance(facts[0].sampling, SamplingParams)


def test_a_choice_is_not_copied_from_one_that_is_being_copied_in_the_same_step():
    """Both come back at once. The first copies what is left of its last block; the second finds no room for that, and
    must not copy from the first, whose block is written by a copy of this very step."""
    driver = Driver(num_blocks=9, block_size=4)
    holder = driver.submit(prompt_of(16, 100), max_tokens=8)
    driver.turn()
    driver.turn()
    driver.pause(holder)
    request = driver.submit(prompt_of(5), max_tokens=8, n=2, temperature=1.0)
    while any(len(sequence.token_ids) < 7 for sequence in request.sequences):
        driver.turn()
    assert driver.blocks.num_available_blocks == 0
    for sequence in reversed(request.sequences):
        driver.scheduler._pressure._preempt(sequence)
    driver.turn()
    driver.scheduler.resume(holder)
    driver.run().check_all()
