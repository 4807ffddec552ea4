"""Blocks that go down to host memory and disk and come back: when, for whom, and with what in them."""

import pytest

from engine.plan import StepLoad
from engine.scheduling.latency import LatencyModel
from engine.scheduling.transfers import Transfers
from engine.scheduling.usage import Counts
from engine.sequence import Request, Sequence, SequenceState
from engine.simulation.device import SimulatedDisk
from engine.transfer import TransferKind, TransferResult
from tests.engine.kv.memory_model import SmallEngine
from tests.engine.scheduling.driver import Driver


def prompt_of(num_tokens: int, start: int = 3) -> list[int]:
    return list(range(start, start + num_tokens))


def only(request: Request) -> Sequence:
    (sequence,) = request.sequences
    return sequence


def latency(copy_cost: float) -> LatencyModel:
    """Copying a block takes `copy_cost` times as long as computing a token."""
    steps = [(StepLoad(num, num * num, 0, 0, 1), num * 0.001) for num in (1, 8, 64)]
    return LatencyModel(steps, block_bytes=1000, host_bytes_per_s=1e6 / copy_cost)


def evict_all(driver: Driver) -> None:
    """Others take all of the device's memory, a block each, so that what was there could go down before."""
    driver.run()
    for i in range(driver.blocks.pool.num_blocks):
        driver.submit(prompt_of(driver.blocks.block_size, 500 + i), max_tokens=1)
        driver.run()


# Preemption


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("transfer_turns", [1, 4])
@pytest.mark.parametrize("num_tokens", [3, 4, 5, 7, 8, 9])
def test_swapped_sequences_come_back_with_identical_tokens(num_tokens: int, transfer_turns: int, max_in_flight: int):
    driver = Driver(
        num_blocks=8,
        block_size=4,
        max_in_flight=max_in_flight,
        num_host_blocks=30,
        preemption_mode="swap",
        transfer_turns=transfer_turns,
    )
    for _ in range(4):
        driver.submit(prompt_of(num_tokens), max_tokens=13, temperature=1.0)
    driver.run().check_all()
    counts = driver.scheduler.counts
    assert counts.preemptions["swap"] > 0 and counts.preemptions["recompute"] == 0
    assert counts.num_recomputed_tokens == 0
    assert driver.blocks.tier_counts.num_host_hit_tokens > 0


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_what_host_memory_has_no_room_for_is_computed_again(num_blocks: int):
    driver = Driver(num_blocks=12, block_size=4, num_host_blocks=num_blocks, preemption_mode="swap")
    for i in range(8):
        driver.submit(prompt_of(9, 10 * i + 3), max_tokens=30)
    driver.run().check_all()
    assert driver.scheduler.counts.num_recomputed_tokens > 0


@pytest.mark.parametrize(
    ("mode", "copy_cost", "kind"),
    [
        ("auto", 0.1, "swap"),
        ("auto", 10.0, "recompute"),
        ("auto", None, "recompute"),
        ("swap", 10.0, "swap"),
        ("recompute", 0.1, "recompute"),
    ],
)
def test_the_cheaper_of_copying_twice_and_computing_again_is_chosen(mode: str, copy_cost: float | None, kind: str):
    driver = Driver(
        num_blocks=8,
        block_size=4,
        num_host_blocks=30,
        preemption_mode=mode,  # type: ignore[arg-type]
        latency=latency(copy_cost) if copy_cost else None,
    )
    for i in range(4):
        driver.submit(prompt_of(7, 10 * i + 3), max_tokens=13)
    driver.run().check_all()
    assert set(driver.scheduler.counts.preemptions) == {kind}
    sequences = [only(request) for request in driver.requests]
    assert sum(sequence.num_preemptions for sequence in sequences) == driver.scheduler.counts.num_preemptions > 0
    assert all(sequence.num_swaps == (sequence.num_preemptions if kind == "swap" else 0) for sequence in sequences)


def test_without_a_host_tier_a_swap_is_a_recomputation():
    driver = Driver(num_blocks=8, block_size=4, preemption_mode="swap")
    for i in range(4):
        driver.submit(prompt_of(7, 10 * i + 3), max_tokens=13)
    driver.run().check_all()
    assert set(driver.scheduler.counts.preemptions) == {"recompute"}


def test_nobody_else_loses_blocks_while_those_of_the_first_victim_are_on_their_way_down():
    driver = Driver(num_blocks=10, block_size=2, num_host_blocks=30, preemption_mode="swap", transfer_turns=10**6)
    oldest, second, victim = (only(driver.submit(prompt_of(5, start), max_tokens=9)) for start in (3, 13, 23))
    while not victim.num_preemptions:
        driver.turn()
    assert driver.blocks.num_leaving_blocks == 3
    assert driver.turn() is None, "both that run need a block, and there is none"
    assert driver.turn() is None
    assert driver.scheduler.num_running == 2
    driver.finish_transfer(is_on_disk=False)
    assert {entry.sequence_id for entry in driver.turn().scheduled} == {oldest.sequence_id, second.sequence_id}
    assert [sequence.num_preemptions for sequence in (oldest, second)] == [0, 0]
    driver.transfer_turns = 1
    driver.run().check_all()


def test_more_are_preempted_when_those_that_leave_do_not_suffice():
    driver = Driver(num_blocks=11, block_size=1, num_host_blocks=30, preemption_mode="swap", transfer_turns=10**6)
    first = [only(driver.submit([start], max_tokens=9)) for start in range(3, 8)]
    while not sum(sequence.num_preemptions for sequence in first):
        driver.turn()
    # Each of five has two blocks; the last one's two leave, and three others want one.
    assert [sequence.num_preemptions for sequence in first] == [0, 0, 0, 1, 1]
    driver.transfer_turns = 1
    driver.run().check_all()


@pytest.mark.parametrize("has_disk", [False, True])
@pytest.mark.parametrize("num_host_blocks", [0, 1, 30])
@pytest.mark.parametrize("num_prompt", [3, 4, 5, 7, 8, 9, 15, 16, 17, 19])
def test_a_lone_sequence_that_outgrows_the_pool_ends_with_length(num_prompt: int, num_host_blocks: int, has_disk: bool):
    driver = Driver(
        num_blocks=6,
        block_size=4,
        max_model_len=1000,
        num_host_blocks=num_host_blocks,
        num_disk_blocks=5 if has_disk and num_host_blocks else 0,
        preemption_mode="swap",
        max_in_flight=2,
    )
    for _ in range(3):
        driver.submit(prompt_of(num_prompt), max_tokens=500, cache_salt="")
    driver.run().check_all()
    for request in driver.requests:
        assert driver.ends[only(request)].finish_reason == "length"
        assert len(only(request).token_ids) == 20


# Prefix hits below the device


@pytest.mark.parametrize("num_tokens", [4, 5, 7, 8, 9, 17])
@pytest.mark.parametrize("num_host_blocks", [8, 30])
def test_what_was_evicted_is_fetched_and_not_computed(num_tokens: int, num_host_blocks: int):
    """With little host memory it comes from disk."""
    driver = Driver(
        num_blocks=9, block_size=4, num_host_blocks=num_host_blocks, num_disk_blocks=40, latency=latency(0.1)
    )
    driver.submit(prompt_of(num_tokens), max_tokens=1, cache_salt="")
    evict_all(driver)
    before = driver.scheduler.counts.num_prefill_tokens
    again = driver.submit(prompt_of(num_tokens), max_tokens=1, cache_salt="")
    driver.run().check_all()
    assert driver.scheduler.counts.num_prefill_tokens - before == 1
    assert only(again).num_cached_tokens == num_tokens - 1
    assert driver.scheduler.counts.num_prefix_hit_tokens == num_tokens - 1
    counts = driver.blocks.tier_counts
    assert counts.num_host_hit_tokens + counts.num_disk_hit_tokens == num_tokens - 1


@pytest.mark.parametrize("model", [None, 30.0])
def test_what_is_dearer_to_fetch_is_computed(model: float | None):
    driver = Driver(num_blocks=9, block_size=4, num_host_blocks=30, latency=latency(model) if model else None)
    driver.submit(prompt_of(9), max_tokens=1, cache_salt="")
    evict_all(driver)
    again = driver.submit(prompt_of(9), max_tokens=1, cache_salt="")
    driver.run().check_all()
    assert only(again).num_cached_tokens == 0
    assert TransferKind.HOST_TO_DEVICE not in driver.scheduler.counts.num_transfers


def test_a_slow_disk_is_not_read_again():
    driver = Driver(num_blocks=9, block_size=4, num_host_blocks=8, num_disk_blocks=40, latency=latency(0.1))
    driver.executor.disk_s = 0.1  # a block of four tokens is computed in 0.004 s
    prompts = [prompt_of(9, 20 * i + 3) for i in range(2)]
    for prompt in prompts:
        driver.submit(prompt, max_tokens=1, cache_salt="")
    evict_all(driver)
    evict_all(driver)
    again = []
    for prompt in prompts:
        again.append(driver.submit(prompt, max_tokens=1, cache_salt=""))
        driver.run()
    driver.check_all()
    assert [only(request).num_cached_tokens for request in again] == [8, 0]


def test_a_disk_that_was_slow_once_is_given_another_chance():
    engine = SmallEngine(num_disk_blocks=40)
    engine.keep(range(16))
    engine.push_down(to_disk=True)
    transfers = Transfers("auto", engine.manager, Counts(), latency(0.1))
    sequence, match = engine.add([*range(16), 50])
    assert match.num_disk_blocks == 4 and transfers.fetches(sequence, match)
    engine.manager.fetch(sequence, match)
    (read,) = transfers.take()
    transfers.finish([TransferResult(read.transfer_id, elapsed_s=10 * 0.016)])  # computing it takes 0.016 s
    assert not transfers.fetches(sequence, match)
    num_refused = 1
    while not transfers.fetches(sequence, match):
        num_refused += 1
        assert num_refused < 1000
    assert num_refused > 100, "it is not tried all the time"


def test_others_wait_for_a_prefix_that_one_of_them_fetches():
    driver = Driver(num_blocks=20, block_size=4, num_host_blocks=40, latency=latency(0.1), transfer_turns=3)
    driver.submit(prompt_of(13), max_tokens=1, cache_salt="")
    evict_all(driver)
    before = driver.scheduler.counts.num_prefill_tokens
    together = [driver.submit([*prompt_of(12), 90 + i], max_tokens=4, cache_salt="") for i in range(4)]
    driver.run().check_all()
    assert driver.scheduler.counts.num_prefill_tokens - before == 4
    assert [only(request).num_cached_tokens for request in together] == [12] * 4
    assert driver.blocks.tier_counts.num_host_hit_tokens == 12


def test_others_go_past_one_that_is_fetched():
    driver = Driver(num_blocks=20, block_size=4, num_host_blocks=40, latency=latency(0.1), transfer_turns=10**6)
    driver.submit(prompt_of(9), max_tokens=1, cache_salt="")
    driver.transfer_turns = 1
    evict_all(driver)
    driver.transfer_turns = 10**6
    fetched = only(driver.submit(prompt_of(9), max_tokens=1, cache_salt=""))
    other = only(driver.submit(prompt_of(9, 70), max_tokens=1))
    driver.turn()
    assert fetched.is_fetching and fetched.state is SequenceState.WAITING
    assert other.is_finished
    driver.transfer_turns = 1
    driver.run().check_all()


def test_choices_of_a_fetched_prompt_share_it():
    driver = Driver(num_blocks=20, block_size=4, num_host_blocks=40, latency=latency(0.1))
    driver.submit(prompt_of(11), max_tokens=1, cache_salt="")
    evict_all(driver)
    before = driver.scheduler.counts.num_prefill_tokens
    driver.submit(prompt_of(11), n=3, max_tokens=5, temperature=1.0, cache_salt="")
    driver.run().check_all()
    assert driver.scheduler.counts.num_prefill_tokens - before == 3


def fetching_driver(**options: int) -> tuple[Driver, Sequence]:
    """A sequence whose prompt, of three blocks, is on its way up, and transfers that finish only by hand."""
    driver = Driver(block_size=4, num_host_blocks=40, latency=latency(0.1), **{"num_blocks": 9, **options})
    driver.submit(prompt_of(12), max_tokens=1, cache_salt="")
    evict_all(driver)
    driver.transfer_turns = 10**6
    request = driver.submit(prompt_of(12), max_tokens=5, cache_salt="")
    driver.turn()
    assert only(request).is_fetching
    return driver, only(request)


@pytest.mark.parametrize("num_finished", [0, 1])
@pytest.mark.parametrize("end", ["abort", "pause", "both"])
def test_abort_and_pause_while_a_sequence_is_fetched_lose_no_block(end: str, num_finished: int):
    driver, sequence = fetching_driver()
    if end != "abort":
        driver.pause(sequence.request)
    for _ in range(num_finished):
        driver.finish_transfer(is_on_disk=False)
    if end != "pause":
        driver.abort(sequence.request)
    driver.transfer_turns = 1
    other = driver.submit(prompt_of(20, 100), max_tokens=3)
    driver.run()
    assert only(other).is_finished
    driver.scheduler.resume(sequence.request)
    driver.run().check_all()


def test_one_that_is_fetched_loses_its_blocks_to_one_that_runs_and_that_is_no_preemption():
    driver = Driver(num_blocks=9, block_size=4, num_host_blocks=40, latency=latency(0.1))
    driver.submit(prompt_of(12), max_tokens=1, cache_salt="")
    evict_all(driver)
    driver.transfer_turns = 10**6
    running = only(driver.submit(prompt_of(15, 200), max_tokens=17))
    driver.turn()
    while driver.finish_transfer(is_on_disk=False):
        pass
    fetched = only(driver.submit(prompt_of(12), max_tokens=5, cache_salt=""))
    driver.turn()
    assert fetched.is_fetching
    for _ in range(13):
        driver.turn()
    assert fetched.block_table == [] and fetched.state is SequenceState.WAITING
    driver.transfer_turns = 1
    driver.run().check_all()
    assert (fetched.num_preemptions, running.num_preemptions) == (0, 0)


def test_nothing_is_fetched_for_one_that_has_no_room_for_all_its_tokens():
    driver = Driver(num_blocks=9, block_size=4, num_host_blocks=40, latency=latency(0.1))
    driver.submit(prompt_of(8), max_tokens=1, cache_salt="")
    evict_all(driver)
    running = only(driver.submit(prompt_of(19, 200), max_tokens=2))
    driver.turn()
    waiting = only(driver.submit([*prompt_of(8), *prompt_of(7, 300)], max_tokens=2, cache_salt=""))
    driver.turn()
    assert not waiting.is_fetching and waiting.block_table == []
    assert not running.is_finished or waiting.num_computed == 0
    driver.run().check_all()
    assert waiting.num_cached_tokens == 8


# The disk


@pytest.mark.parametrize("num_damaged", [1, 2, 3])
def test_a_damaged_block_is_computed(num_damaged: int):
    driver = Driver(num_blocks=9, block_size=4, num_host_blocks=8, num_disk_blocks=40, latency=latency(0.1))
    driver.submit(prompt_of(13), max_tokens=1, cache_salt="")
    evict_all(driver)
    evict_all(driver)
    disk = driver.executor.disk
    ours = [block.digest for block in disk.stored() if block.tokens[:2] in (b"\x03\0", b"\x07\0", b"\x0b\0")]
    assert len(ours) == 3
    disk.damaged.update(ours[-num_damaged:])
    again = driver.submit(prompt_of(13), max_tokens=4, cache_salt="")
    driver.run().check_all()
    assert driver.blocks.tier_counts.num_damaged_disk_blocks > 0
    assert only(again).num_cached_tokens < 12


def test_a_full_disk_loses_nothing_but_the_cache():
    driver = Driver(num_blocks=9, block_size=4, num_host_blocks=8, num_disk_blocks=40, preemption_mode="swap")
    driver.executor.disk.is_full = True
    for i in range(6):
        driver.submit(prompt_of(9, 10 * i + 3), max_tokens=13, cache_salt="")
    driver.run().check_all()


@pytest.mark.parametrize("num_tokens", [4, 5, 8, 9])
def test_a_restart_with_a_warm_disk_computes_only_the_rest(num_tokens: int):
    disk = SimulatedDisk()
    first = Driver(num_blocks=20, block_size=4, num_host_blocks=20, num_disk_blocks=40, disk=disk)
    first.submit(prompt_of(num_tokens), max_tokens=1, cache_salt="")
    first.run().check_all()
    first.flush()
    second = Driver(
        num_blocks=20, block_size=4, num_host_blocks=20, num_disk_blocks=40, disk=disk, latency=latency(0.1)
    )
    again = second.submit(prompt_of(num_tokens), max_tokens=3, cache_salt="")
    second.run().check_all()
    assert only(again).num_cached_tokens == num_tokens - 1


def test_the_next_in_the_queue_is_fetched_while_there_is_no_place_for_it():
    driver = Driver(num_blocks=30, block_size=4, num_host_blocks=60, latency=latency(0.1), max_num_seqs=1)
    driver.submit(prompt_of(13), max_tokens=1, cache_salt="")
    evict_all(driver)
    running = driver.submit(prompt_of(5, 300), max_tokens=9)
    driver.turn()
    waiting = only(driver.submit(prompt_of(13), max_tokens=1, cache_salt=""))
    for _ in range(3):
        driver.turn()
    assert not running.is_finished
    assert not waiting.is_fetching and waiting.state is SequenceState.WAITING and waiting.num_computed == 12
    while not running.is_finished:
        driver.turn()
    driver.turn()
    assert waiting.is_finished, "in the very next step"
    driver.check_all()


def test_whoever_is_to_have_a_step_alone_is_not_fetched_again_and_again_from_under_one_that_runs():
    driver = Driver(
        num_blocks=6,
        block_size=4,
        num_host_blocks=40,
        preemption_mode="swap",
        max_num_batched_tokens=4,
        enable_chunked_prefill=False,
    )
    driver.submit(prompt_of(4), max_tokens=1, cache_salt="")
    evict_all(driver)
    running = only(driver.submit(prompt_of(16, 300), max_tokens=4))
    driver.turn()
    waiting = only(driver.submit(prompt_of(4), max_tokens=1, cache_salt=""))
    for _ in range(20):
        driver.turn()
    assert running.is_finished and waiting.is_finished
    driver.run().check_all()
