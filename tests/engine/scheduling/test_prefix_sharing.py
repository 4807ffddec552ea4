"""One test for each promise of the prefix tree, over the real scheduler and simulated memory."""

import pytest

from engine.sequence import SequenceState
from tests.engine.scheduling.driver import Driver


def prompt_of(num_tokens: int, start: int = 3) -> list[int]:
    return list(range(start, start + num_tokens))


def only(request):
    (sequence,) = request.sequences
    return sequence


def run_one(driver: Driver, prompt: list[int], **changes):
    request = driver.submit(prompt, **{"cache_salt": "", "max_tokens": 3, **changes})
    driver.run()
    return only(request)


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("num_common", range(1, 21))
def test_sharing_is_token_granular_at_every_offset(num_common: int, block_size: int, max_in_flight: int):
    driver = Driver(block_size=block_size, max_in_flight=max_in_flight)
    run_one(driver, prompt_of(24))
    before = driver.scheduler.counts.num_prefill_tokens
    sequence = run_one(driver, prompt_of(num_common) + [500] * 5)
    assert sequence.num_cached_tokens == num_common
    assert driver.scheduler.counts.num_prefill_tokens - before == 5
    assert driver.scheduler.counts.num_prefix_hit_tokens == num_common
    assert driver.scheduler.counts.num_prompt_tokens == 24 + num_common + 5
    # Whole blocks are shared in place, the rest of one is copied.
    assert driver.scheduler.num_block_copies == (1 if num_common % block_size else 0)
    driver.check_all()


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 8, 9, 15, 16, 17])
def test_of_a_prompt_that_is_cached_only_the_last_token_is_computed(num_tokens: int):
    driver = Driver()
    run_one(driver, prompt_of(num_tokens))
    sequence = run_one(driver, prompt_of(num_tokens))
    assert sequence.num_cached_tokens == num_tokens - 1
    assert driver.scheduler.counts.num_prefill_tokens == num_tokens + 1
    driver.check_all()


@pytest.mark.parametrize("num_output", range(1, 10))
def test_the_next_turn_of_a_chat_finds_the_answer_too(num_output: int):
    driver = Driver()
    first = run_one(driver, prompt_of(10), max_tokens=num_output)
    second = run_one(driver, [*first.token_ids, 500, 501])
    # The last token of an answer was sampled and never computed.
    assert second.num_cached_tokens == 10 + num_output - 1
    driver.check_all()


def test_blocks_can_be_shared_while_their_owner_still_runs():
    driver = Driver()
    first = driver.submit(prompt_of(17), cache_salt="", max_tokens=30)
    driver.turn()
    second = driver.submit(prompt_of(17), cache_salt="", max_tokens=30)
    driver.turn()
    assert only(second).num_cached_tokens == 16
    assert only(second).block_table[:4] == only(first).block_table[:4]
    for _ in range(6):
        driver.turn()
    third = driver.submit(only(first).token_ids[:22], cache_salt="", max_tokens=30)
    driver.turn()
    assert only(third).num_cached_tokens == 21, "generated tokens, too"
    driver.run().check_all()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"tenant": "a"}, {"tenant": "b"}),
        ({"tenant": "a"}, {"tenant": ""}),
        ({"tenant": "a", "cache_salt": "bc"}, {"tenant": "ab", "cache_salt": "c"}),
        ({"tenant": "a", "cache_salt": ""}, {"tenant": "", "cache_salt": "a"}),
    ],
)
def test_another_tenant_or_salt_shares_nothing(first: dict[str, str], second: dict[str, str]):
    driver = Driver()
    run_one(driver, prompt_of(20), **first)
    assert run_one(driver, prompt_of(20), **second).num_cached_tokens == 0
    assert run_one(driver, prompt_of(20), **first).num_cached_tokens == 19
    driver.check_all()


def test_without_the_tree_nothing_is_shared_and_nothing_kept():
    driver = Driver(enable_prefix_caching=False)
    run_one(driver, prompt_of(20))
    assert driver.blocks.num_free_blocks == 63
    assert run_one(driver, prompt_of(20)).num_cached_tokens == 0
    driver.check_all()


# Together


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("num_tokens", [16, 17, 30])
def test_requests_that_arrive_together_compute_their_common_prompt_once(num_tokens: int, max_in_flight: int):
    driver = Driver(max_in_flight=max_in_flight, max_prefill_tokens=7, num_blocks=200)
    requests = [driver.submit(prompt_of(num_tokens), cache_salt="", max_tokens=3) for _ in range(6)]
    driver.run().check_all()
    num_whole = num_tokens // 4 * 4
    cached = num_whole if num_whole < num_tokens else num_tokens - 1
    assert [only(request).num_cached_tokens for request in requests] == [0] + [cached] * 5
    assert driver.scheduler.counts.num_prefill_tokens == num_tokens + 5 * (num_tokens - cached)


def test_whoever_shares_only_a_beginning_waits_no_longer_than_for_that():
    driver = Driver(max_num_batched_tokens=16, max_prefill_tokens=4, num_blocks=200)
    driver.submit(prompt_of(60), cache_salt="", max_tokens=1)
    other = only(driver.submit(prompt_of(8) + [500] * 4, cache_salt="", max_tokens=1))
    driver.turn()
    assert other.state is SequenceState.WAITING
    driver.turn()
    assert other.state is SequenceState.WAITING
    driver.turn()
    assert other.num_cached_tokens == 8
    driver.run().check_all()


def test_others_go_past_those_who_wait_for_a_prefix():
    driver = Driver(max_num_batched_tokens=16, max_prefill_tokens=4)
    for _ in range(3):
        driver.submit(prompt_of(40), cache_salt="", max_tokens=1)
    other = only(driver.submit(prompt_of(4, 600), cache_salt="", max_tokens=1))
    assert other.sequence_id in [entry.sequence_id for entry in driver.turn().scheduled]
    driver.run().check_all()


def test_nobody_waits_for_a_lower_priority():
    driver = Driver(max_num_batched_tokens=16, max_prefill_tokens=4)
    driver.submit(prompt_of(40), cache_salt="", max_tokens=1, priority=1)
    driver.turn()
    urgent = only(driver.submit(prompt_of(40), cache_salt="", max_tokens=1))
    driver.turn()
    assert urgent.state is SequenceState.RUNNING
    driver.run().check_all()


@pytest.mark.parametrize("end", ["abort", "pause"])
@pytest.mark.parametrize("num_turns", [1, 2, 3])
def test_one_takes_over_when_the_one_that_computes_the_prompt_goes(num_turns: int, end: str):
    driver = Driver(max_prefill_tokens=8)
    first, second, third = (driver.submit(prompt_of(40), cache_salt="", max_tokens=3) for _ in range(3))
    for _ in range(num_turns):
        driver.turn()
    getattr(driver, end)(first)
    driver.turn()
    assert (only(second).state, only(third).state) == (SequenceState.RUNNING, SequenceState.WAITING)
    assert only(second).num_cached_tokens == 8 * num_turns
    driver.run()
    driver.scheduler.resume(first)
    driver.run().check_all()
    assert driver.scheduler.counts.num_prefill_tokens <= 40 + 1 + (40 if end == "pause" else 0)


def test_one_takes_over_when_the_one_that_computes_the_prompt_is_preempted():
    driver = Driver(num_blocks=17, block_size=4, max_prefill_tokens=4)
    important = driver.submit(prompt_of(5, 600), max_tokens=45, priority=-1)
    for _ in range(20):
        driver.turn()
    first, _ = (driver.submit(prompt_of(36), cache_salt="", max_tokens=2) for _ in range(2))
    driver.run().check_all()
    assert only(important).num_preemptions == 0
    assert only(first).num_preemptions > 0
    assert driver.scheduler.counts.num_prefill_tokens < 5 + 2 * 36


# Pressure


def test_cached_blocks_are_evicted_before_anybody_loses_a_block():
    driver = Driver(num_blocks=17, block_size=4)
    for start in range(0, 500, 100):
        run_one(driver, prompt_of(20, start + 3), max_tokens=8)
    assert driver.scheduler.counts.num_preemptions == 0
    assert driver.blocks.num_evictions > 0
    assert driver.blocks.num_free_blocks + driver.blocks.num_cached_blocks == 16
    driver.check_all()


def test_what_was_used_last_stays_longest():
    driver = Driver(num_blocks=17, block_size=4)
    for start in (100, 200):
        run_one(driver, prompt_of(24, start), max_tokens=1)
    run_one(driver, prompt_of(24, 100), max_tokens=1)
    run_one(driver, prompt_of(20, 300), max_tokens=1)
    assert run_one(driver, prompt_of(24, 100), max_tokens=1).num_cached_tokens == 23
    assert run_one(driver, prompt_of(24, 200), max_tokens=1).num_cached_tokens < 23
    driver.check_all()


@pytest.mark.parametrize("num_tokens", [27, 28, 29, 30, 31])
def test_a_cached_prompt_that_fills_the_pool_runs_again(num_tokens: int):
    """There is no block left for a copy beside its source: the block is computed."""
    driver = Driver(num_blocks=9, block_size=4, max_model_len=1000)
    first = run_one(driver, prompt_of(num_tokens), max_tokens=500)
    second = run_one(driver, prompt_of(num_tokens), max_tokens=500)
    assert len(first.token_ids) == len(second.token_ids) == 32
    assert second.num_cached_tokens >= 24
    driver.check_all()


def test_a_preempted_sequence_finds_its_own_blocks_again():
    driver = Driver(num_blocks=33, block_size=4)
    victim = only(driver.submit(prompt_of(40), max_tokens=30))
    for _ in range(10):
        driver.turn()
    driver.pause(victim.request)
    large = driver.submit(prompt_of(88, 600), max_tokens=1)
    driver.run()
    assert victim.num_preemptions == 1
    driver.scheduler.resume(victim.request)
    driver.run().check_all()
    assert only(large).num_preemptions == 0
    assert 0 < driver.scheduler.counts.num_recomputed_tokens < 30
    assert victim.num_cached_tokens == 0, "what it computed itself is no hit of its prompt"


def test_kv_usage_counts_owned_blocks_only():
    driver = Driver()
    run_one(driver, prompt_of(22), max_tokens=1)
    usage = driver.scheduler.kv_usage()
    assert (usage.num_owned_blocks, usage.num_cached_blocks, usage.num_free_blocks) == (0, 6, 57)
    driver.submit(prompt_of(22), cache_salt="", max_tokens=9)
    driver.turn()
    usage = driver.scheduler.kv_usage()
    assert (usage.num_owned_blocks, usage.num_cached_blocks, usage.num_free_blocks) == (6, 1, 56)
    assert usage.utilization == 22 / 24
    driver.run().check_all()


# Choices


@pytest.mark.parametrize("num_tokens", [5, 8, 9])
def test_choices_of_a_cached_prompt_begin_together(num_tokens: int):
    driver = Driver()
    run_one(driver, prompt_of(num_tokens))
    before = driver.scheduler.counts.num_prefill_tokens
    request = driver.submit(prompt_of(num_tokens), cache_salt="", n=3, max_tokens=4, temperature=1.0)
    assert len(driver.turn().scheduled) == 3
    assert driver.scheduler.counts.num_prefill_tokens - before == 3
    assert [sequence.num_cached_tokens for sequence in request.sequences] == [num_tokens - 1] * 3
    driver.run().check_all()


def test_what_choices_share_among_themselves_is_no_hit():
    driver = Driver(max_num_seqs=1)
    request = driver.submit(prompt_of(9), n=3, max_tokens=1, temperature=1.0)
    driver.run().check_all()
    assert driver.scheduler.counts.num_prefill_tokens == 9 + 1 + 1
    assert [sequence.num_cached_tokens for sequence in request.sequences] == [0, 0, 0]


def test_identical_streams_cache_their_answer_once():
    driver = Driver()
    for _ in range(3):
        driver.submit(prompt_of(9), cache_salt="", max_tokens=15)
    driver.run().check_all()
    assert driver.blocks.num_cached_blocks == 6, "9 + 14 tokens"
