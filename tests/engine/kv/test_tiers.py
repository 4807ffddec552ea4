"""Host memory and disk below the device, one promise at a time; every copy moves real contents (memory_model)."""

from dataclasses import replace

import pytest

from engine.kv.audit import AuditError, audit
from engine.kv.block_manager import BlockManager
from engine.kv.tiers import HostMemory, TierSizes, namespace_digest
from engine.transfer import TransferKind, TransferResult, block_digest
from streamkv.protocol import pack_ids
from tests.engine.kv.memory_model import SmallEngine, make_sequence

DOWN, UP = TransferKind.DEVICE_TO_HOST, TransferKind.HOST_TO_DEVICE
STORE, LOAD, DROP = TransferKind.HOST_TO_DISK, TransferKind.DISK_TO_HOST, TransferKind.DROP_FROM_DISK


def kinds(engine: SmallEngine) -> list[TransferKind]:
    return [transfer.kind for transfer in engine.start()]


# down


def test_what_will_soon_be_evicted_is_copied_down_before():
    engine = SmallEngine(num_blocks=17)
    engine.keep(range(60))
    assert (engine.manager.num_free_blocks, engine.manager.num_cached_blocks) == (1, 15)
    (transfer,) = engine.start()
    assert transfer.kind is DOWN and len(transfer.block_ids) > 2
    assert engine.manager.num_leaving_blocks == engine.manager.num_in_transfer_blocks == len(transfer.block_ids)
    assert engine.manager.num_available_blocks == 16 - len(transfer.block_ids)
    engine.settle()
    assert engine.manager.num_available_blocks == 16, "they are cached again, and can be had"
    held = engine.run(range(100, 108))
    _, match = engine.add(range(60))
    assert match.num_tokens + match.num_offloaded_tokens == 59, "evicted, and not lost"
    assert match.num_offloaded_tokens >= 3
    engine.manager.forget(held)


def test_the_coldest_go_down_first_and_leaves_before_what_is_above_them():
    engine = SmallEngine(num_blocks=41, num_host_blocks=4)
    engine.keep(range(12))
    engine.keep(range(100, 248))
    node = engine.add([*range(12), 0])[1].node
    (transfer,) = engine.start()
    assert transfer.block_ids == [node.block_id, node.parent.block_id]


def test_with_room_on_the_device_nothing_is_copied():
    engine = SmallEngine(num_blocks=40)
    engine.keep(range(60))
    assert engine.start() == []


def test_an_evicted_block_without_a_copy_is_dropped_at_once():
    engine = SmallEngine(num_blocks=17)
    engine.keep(range(64))
    engine.compute(*engine.add(range(100, 164)))  # before any transfer was taken
    assert not engine.manager.num_cached_blocks
    _, match = engine.add(range(64))
    assert (match.num_tokens, match.num_offloaded_tokens) == (0, 0)
    assert engine.start() == []


def test_a_block_on_its_way_down_can_be_shared_and_is_owned_then():
    engine = SmallEngine(num_blocks=17)
    engine.keep(range(60))
    num_leaving = len(engine.start()[0].block_ids)
    sequence, match = engine.add([*range(60), 0])
    assert match.num_tokens == 60
    assert engine.manager.num_claimed(match) == 15 - num_leaving, "only these could be had by others"
    engine.manager.share(sequence, match)
    engine.check(sequence)
    assert (engine.manager.num_owned_blocks, engine.manager.num_in_transfer_blocks) == (15, 0)
    engine.settle()
    engine.manager.forget(sequence)
    engine.check()
    assert engine.manager.num_cached_blocks == 15


def test_what_is_above_a_leaf_on_its_way_down_can_be_evicted_before_it_is_done():
    engine = SmallEngine(num_blocks=9, num_host_blocks=1)
    engine.keep(range(32))
    assert len(engine.start()[0].block_ids) == 1
    assert engine.manager.num_available_blocks == 7
    engine.run(range(100, 128))
    assert (engine.manager.num_leaving_blocks, engine.manager.num_owned_blocks) == (1, 7)
    engine.settle()
    assert engine.manager.num_free_blocks == 1, "the block is free when the copy is done"


def test_copies_are_not_thrown_away_for_the_block_above_them_while_another_can_go():
    engine = SmallEngine(num_blocks=17)
    engine.keep(range(12))
    engine.keep(range(100, 152))
    tiers = engine.manager.tiers
    tiers._save_coldest(2)
    engine.memory.start(tiers.take())
    engine.memory.finish(is_disk=False)
    for _ in range(5):
        tiers.evict()
    engine.check()
    _, match = engine.add([*range(12), 0])
    assert (match.num_tokens, match.num_offloaded_tokens) == (4, 8)
    assert engine.add([*range(100, 152), 0])[1].num_tokens == 40, "these had no copies, and went instead"


def test_host_memory_hands_its_coldest_to_the_disk_before_it_needs_the_room():
    engine = SmallEngine(num_blocks=40, num_host_blocks=16, num_disk_blocks=40)
    for first in range(0, 600, 100):
        engine.keep(range(first, first + 16))
        engine.push_down()
    assert engine.manager.num_host_blocks == 16
    assert engine.manager.num_disk_blocks >= 8
    for first in range(0, 600, 100):
        assert engine.add([*range(first, first + 16), 0])[1].num_offloaded_tokens == 16, "nothing was lost"


def test_without_a_disk_what_is_only_in_host_memory_goes_coldest_first():
    engine = SmallEngine(num_blocks=40, num_host_blocks=8)
    for first in (0, 100, 200):
        engine.keep(range(first, first + 16))
        engine.push_down()
    found = [engine.add([*range(first, first + 16), 0])[1].num_offloaded_tokens for first in (0, 100, 200)]
    assert found == [0, 16, 16]
    assert engine.manager.num_host_blocks == 8


def test_host_memory_lets_go_of_what_is_on_the_device_anyway():
    engine = SmallEngine(num_blocks=40, num_host_blocks=4)
    engine.keep(range(16))
    engine.push_down()
    kept = engine.fetch([*range(16), 0])
    engine.settle()
    engine.keep(range(100, 116))
    engine.manager.tiers.copy_down(list(engine.manager.tiers.cached))
    engine.settle()
    engine.check(kept)
    assert engine.add([*range(16), 0])[1].num_tokens == 16
    assert {node.host_id for node in engine.manager.tiers.cached} == {1, 2, 3, 4}


def test_the_disk_drops_its_coldest_leaf_first_and_before_it_is_given_more():
    engine = SmallEngine(num_blocks=60, num_host_blocks=20, num_disk_blocks=6)
    engine.keep(range(16))
    engine.push_down(to_disk=True)
    engine.keep(range(100, 112))
    engine.push_down()
    tiers = engine.manager.tiers
    tiers._store(list(tiers.host.cached))
    first, second = engine.start()
    assert (first.kind, second.kind) == (DROP, STORE)
    assert [stored.depth for stored in first.stored] == [4]
    engine.settle()
    assert engine.add([*range(16), 0])[1].num_offloaded_tokens == 12
    assert len(engine.memory.disk) == 6


def test_what_the_disk_could_not_take_is_not_looked_for_there():
    engine = SmallEngine(num_blocks=40, num_host_blocks=8, num_disk_blocks=8)
    engine.keep(range(8))
    engine.push_down()
    tiers = engine.manager.tiers
    tiers._store(list(tiers.host.cached))
    engine.start()
    engine.memory.finish(is_disk=True, has_room=lambda index: index != 1)
    engine.check()
    assert engine.manager.num_disk_blocks == 1
    assert engine.manager.tier_counts.num_stored_to_disk == 1


def test_an_old_failure_to_store_says_nothing_of_what_was_stored_since():
    engine = SmallEngine(num_blocks=40, num_host_blocks=8, num_disk_blocks=4)
    engine.keep(range(4))
    engine.push_down()
    tiers = engine.manager.tiers
    (node,) = tiers.host.cached
    tiers._store([node])
    tiers._leave_disk(node)
    tiers._store([node])
    transfers = tiers.take()
    assert [transfer.kind for transfer in transfers] == [STORE, DROP, STORE]
    for transfer, failed in zip(transfers, ([0], [], []), strict=True):
        tiers.finish(TransferResult(transfer.transfer_id, failed))
    audit(engine.manager)
    assert engine.manager.num_disk_blocks == 1


def test_a_small_disk_keeps_what_is_above_rather_than_what_hangs_in_the_air():
    engine = SmallEngine(num_host_blocks=8, num_disk_blocks=2)
    engine.keep(range(16))
    engine.push_down()
    tiers = engine.manager.tiers
    for node in reversed(list(tiers.host.cached)):
        tiers._store([node])
        engine.settle()
    assert sorted(stored.depth for stored, _ in engine.memory.disk.values()) == [1, 2]
    assert engine.add([*range(16), 0])[1].num_offloaded_tokens == 16, "host memory has the rest"


def test_a_host_block_that_a_transfer_reads_is_not_taken_for_another():
    engine = SmallEngine(num_host_blocks=4)
    for first in (0, 100):
        engine.keep(range(first, first + 8))
        engine.push_down()
    sequence = engine.fetch([*range(8), 50])
    engine.keep(range(200, 216))
    assert engine.manager.tiers.copy_down(list(engine.manager.tiers.cached)) == 2
    engine.settle()
    assert sequence.num_computed == 8
    assert engine.add([*range(100, 108), 0])[1].num_offloaded_tokens == 0


def test_a_block_that_only_the_disk_has_besides_is_not_lost_when_it_is_evicted():
    engine = SmallEngine(num_disk_blocks=40)
    engine.keep(range(16))
    engine.push_down(to_disk=True)
    engine.bring_up(range(16))
    tiers = engine.manager.tiers
    for node in list(tiers.host.cached):
        tiers.host.release(node)
    while engine.manager.num_cached_blocks:
        tiers.evict()
    engine.check()
    _, match = engine.add([*range(16), 0])
    assert (match.num_offloaded_tokens, match.num_disk_blocks) == (16, 4)


# up


def test_a_fetch_brings_up_what_host_memory_has():
    engine = SmallEngine()
    engine.keep(range(24))
    engine.push_down()
    sequence, match = engine.add([*range(24), 50, 51])
    assert (match.num_tokens, match.num_offloaded_tokens, match.num_disk_blocks) == (0, 24, 0)
    assert match.source is None and match.num_offloaded_blocks == 6
    engine.manager.fetch(sequence, match)
    engine.check(sequence)
    assert sequence.is_fetching and sequence.num_computed == 0
    assert engine.manager.num_in_transfer_blocks == 6
    assert (engine.manager.num_leaving_blocks, engine.manager.num_owned_blocks) == (0, 0)
    assert kinds(engine) == [UP]
    assert engine.settle() == [sequence]
    assert (sequence.is_fetching, sequence.num_computed) == (False, 24)
    assert (engine.manager.num_in_transfer_blocks, engine.manager.num_owned_blocks) == (0, 6)
    engine.compute(sequence)
    counts = engine.manager.tier_counts
    assert (counts.num_stored_to_host, counts.num_loaded_from_host, counts.num_host_hit_tokens) == (6, 6, 24)


@pytest.mark.parametrize("num_tokens", range(1, 14))
@pytest.mark.parametrize("to_disk", [False, True])
def test_a_swapped_sequence_comes_back_with_every_computed_token_but_its_last(num_tokens: int, to_disk: bool):
    """Also one that ends within a block, or with tokens that it generated itself."""
    engine = SmallEngine(num_disk_blocks=40)
    sequence = engine.run(range(max(1, num_tokens // 2)))
    sequence.token_ids += range(len(sequence.token_ids), num_tokens)
    engine.compute(sequence)
    engine.manager.swap_out(sequence)
    engine.push_down(to_disk)
    match = engine.manager.find(sequence)
    assert match.num_tokens + match.num_offloaded_tokens == num_tokens - 1
    assert match.num_disk_blocks == (match.num_offloaded_blocks if to_disk else 0)
    if match.num_offloaded_tokens:
        engine.manager.fetch(sequence, match)
        assert engine.settle() == [sequence]
    assert sequence.num_computed == num_tokens - 1
    engine.check(sequence)
    engine.compute(sequence)


def test_a_fetch_lies_on_top_of_what_the_device_still_has():
    engine = SmallEngine()
    top = engine.run(range(8))
    engine.keep(range(20))
    engine.push_down()
    sequence, match = engine.add([*range(20), 50])
    assert (match.num_tokens, match.num_offloaded_tokens) == (8, 12)
    assert engine.manager.num_needed_after(match.num_tokens, 21) == 4
    engine.manager.fetch(sequence, match)
    assert sequence.num_computed == 8
    assert sequence.block_table[:2] == top.block_table
    engine.settle()
    assert sequence.num_computed == 20


@pytest.mark.parametrize("wanted", range(1, 5))
def test_of_a_block_that_is_only_below_the_first_tokens_come_up_alone(wanted: int):
    engine = SmallEngine()
    engine.keep(range(12))
    engine.push_down()
    sequence = engine.fetch([*range(8), *range(8, 8 + wanted), 50, 51])
    assert engine.settle() == [sequence]
    assert sequence.num_computed == 8 + wanted
    engine.compute(sequence)
    assert engine.add([*range(12), 60])[1].num_offloaded_tokens == (4 if wanted < 4 else 0), "the whole stays below"


def test_what_only_the_disk_has_goes_by_way_of_host_memory():
    engine = SmallEngine(num_disk_blocks=40)
    engine.keep(range(16))
    engine.push_down(to_disk=True)
    sequence = engine.fetch([*range(16), 50])
    (load,) = engine.start()
    assert load.kind is LOAD and [stored.depth for stored in load.stored] == [1, 2, 3, 4]
    engine.memory.finish(is_disk=True)
    assert sequence.is_fetching
    assert kinds(engine) == [UP]
    assert engine.settle() == [sequence]
    assert sequence.num_computed == 16
    counts = engine.manager.tier_counts
    assert (counts.num_stored_to_disk, counts.num_loaded_from_disk, counts.num_disk_hit_tokens) == (4, 4, 16)
    assert counts.num_host_hit_tokens == 0


def test_no_more_is_promised_of_the_disk_than_host_memory_has_room_for():
    engine = SmallEngine(num_host_blocks=3, num_disk_blocks=40)
    engine.keep(range(24))
    tiers = engine.manager.tiers
    while nodes := [node for node in tiers.cached if not node.disk_id]:
        tiers.copy_down(nodes[:3])
        engine.settle()
        tiers._store([node for node in tiers.host.cached if not node.disk_id])
        engine.settle()
    while engine.manager.num_cached_blocks:
        tiers.evict()
    sequence, match = engine.add([*range(24), 50])
    assert match.num_offloaded_tokens == 12 and match.num_disk_blocks < match.num_offloaded_blocks == 3
    engine.manager.fetch(sequence, match)
    assert engine.add([*range(24), 60])[1].is_arriving
    other, match = engine.add(range(2))
    assert match.num_offloaded_tokens == 1, "a block that is being loaded can be read from, all the same"
    engine.manager.forget(other)
    assert engine.settle() == [sequence]
    assert sequence.num_computed == 12


def test_others_wait_for_blocks_on_their_way_up_and_share_them():
    engine = SmallEngine()
    engine.keep(range(16))
    engine.push_down()
    first = engine.fetch([*range(16), 50])
    second, match = engine.add([*range(16), 60])
    assert match.is_arriving and match.num_tokens == match.num_offloaded_tokens == 0
    engine.settle()
    match = engine.manager.find(second)
    assert (match.is_arriving, match.num_tokens) == (False, 16)
    engine.compute(second, match)
    assert second.block_table[:4] == first.block_table


def test_what_comes_out_of_order_is_used_in_order():
    """A block from host memory is there before the one above it, from disk: nobody may share it yet."""
    engine = SmallEngine(num_disk_blocks=40)
    engine.keep(range(8))
    engine.push_down(to_disk=True)
    engine.bring_up(range(8))
    engine.keep(range(16))
    tiers = engine.manager.tiers
    engine.push_down()
    for node in [node for node in tiers.host.cached if node.disk_id]:
        tiers.host.release(node)
    sequence, match = engine.add([*range(16), 60])
    assert match.num_offloaded_tokens == 16 and match.num_disk_blocks == 2
    engine.manager.fetch(sequence, match)
    engine.start()
    engine.memory.finish(is_disk=False)
    engine.check(sequence)
    assert sequence.num_computed == 0
    assert engine.add([*range(16), 70])[1].is_arriving
    assert engine.settle() == [sequence]
    assert sequence.num_computed == 16


def test_what_arrives_for_nobody_before_what_is_above_it_is_not_copied_down_meanwhile():
    engine = SmallEngine(num_disk_blocks=40)
    engine.keep(range(8))
    engine.push_down(to_disk=True)
    engine.bring_up(range(8))
    engine.keep(range(16))
    tiers = engine.manager.tiers
    engine.push_down()
    for node in [node for node in tiers.host.cached if node.disk_id]:
        tiers.host.release(node)
    sequence = engine.fetch([*range(16), 60])
    engine.start()
    engine.memory.finish(is_disk=False)
    engine.memory.finish(is_disk=True)
    engine.start()
    engine.manager.forget(sequence)
    for node in [node for node in tiers.host.cached if not node.disk_id]:
        tiers.host.release(node)  # as when others need the room
    tiers._save_coldest(4)
    engine.start()
    engine.memory.finish(is_disk=False)
    engine.check()
    while engine.manager.num_cached_blocks:
        tiers.evict()
    engine.run(range(100, 132))
    engine.settle()


def test_what_arrived_before_what_is_above_it_keeps_its_copy_below_until_it_is_settled():
    """Others need room in host memory, and then the sequence is freed while the disk is still read."""
    engine = SmallEngine(num_host_blocks=8, num_disk_blocks=40)
    engine.keep(range(8))
    engine.push_down(to_disk=True)
    engine.bring_up(range(8))
    engine.keep(range(16))
    tiers = engine.manager.tiers
    engine.push_down()
    for node in [node for node in tiers.host.cached if node.disk_id]:
        tiers.host.release(node)
    sequence = engine.fetch([*range(16), 60])
    engine.start()
    engine.memory.finish(is_disk=False)
    for host_id in tiers._take_host(8):
        tiers.host.unpin(host_id)
    engine.manager.free(sequence)
    engine.check()
    engine.settle()
    assert engine.add([*range(16), 70])[1].num_offloaded_tokens == 16


def test_a_fetch_is_over_when_its_last_block_is_there():
    engine = SmallEngine(num_disk_blocks=40)
    engine.keep(range(16))
    engine.push_down(to_disk=True)
    engine.bring_up(range(8))
    engine.push_down()
    sequence, match = engine.add([*range(16), 60])
    assert (match.num_offloaded_blocks, match.num_disk_blocks) == (4, 2)
    engine.manager.fetch(sequence, match)
    engine.start()
    engine.memory.finish(is_disk=False)
    engine.check(sequence)
    assert (sequence.is_fetching, sequence.num_computed) == (True, 8)
    assert (engine.manager.num_owned_blocks, engine.manager.num_in_transfer_blocks) == (2, 2)
    assert engine.add([*range(8), 70])[1].num_tokens == 8, "what is there can be shared"
    assert engine.settle() == [sequence]
    assert sequence.num_computed == 16


@pytest.mark.parametrize("is_freed", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_whoever_computes_what_arrives_for_another_adds_nothing_to_the_tree(is_freed: bool, ends: bool):
    engine = SmallEngine()
    engine.keep(range(8))
    engine.push_down()
    computing, match = engine.add(range(2))
    engine.compute(computing, replace(match, offloaded=[], num_offloaded_tokens=0))
    fetching = engine.fetch([*range(8), 50])
    engine.start()
    if is_freed:
        engine.manager.free(fetching)
    computing.token_ids += range(2, 10)
    engine.compute(computing)
    if ends:
        engine.manager.forget(computing)
    engine.check()
    engine.settle()
    assert engine.add([*range(8), 60])[1].num_tokens == 8
    engine.manager.forget(computing)
    engine.check()


def test_a_damaged_block_ends_the_fetch_before_it_and_goes_with_all_below():
    engine = SmallEngine(num_disk_blocks=40)
    engine.keep(range(24))
    engine.push_down(to_disk=True)
    engine.memory.damaged.add(sorted(engine.memory.disk.values(), key=lambda entry: entry[0].depth)[3][0].digest)
    sequence = engine.fetch([*range(24), 50])
    assert engine.settle() == [sequence]
    assert (sequence.is_fetching, sequence.num_computed, len(sequence.block_table)) == (False, 12, 3)
    engine.check(sequence)
    assert engine.manager.tier_counts.num_damaged_disk_blocks == 1
    assert len(engine.memory.disk) == 3, "what lay below the damaged one is of no use"
    engine.compute(sequence)
    assert engine.add([*range(24), 60])[1].num_tokens == 24


def test_a_fetch_of_which_nothing_arrives_leaves_a_sequence_without_blocks():
    engine = SmallEngine(num_disk_blocks=40)
    engine.keep(range(8))
    engine.push_down(to_disk=True)
    engine.memory.damaged.update(engine.memory.disk)
    sequence = engine.fetch([*range(8), 50])
    assert engine.settle() == [sequence]
    assert (sequence.num_computed, sequence.block_table) == (0, [])
    assert engine.manager.num_free_blocks == 19 and not engine.memory.disk
    engine.compute(sequence, engine.manager.find(sequence))


def test_a_sequence_freed_while_it_fetches_leaves_its_blocks_cached_when_they_arrive():
    engine = SmallEngine()
    engine.keep(range(16))
    engine.push_down()
    sequence = engine.fetch([*range(16), 50])
    engine.manager.forget(sequence)
    engine.check()
    assert not sequence.is_fetching
    assert engine.manager.num_leaving_blocks == engine.manager.num_in_transfer_blocks == 4
    assert engine.manager.num_available_blocks == 15
    assert engine.settle() == []
    assert (engine.manager.num_cached_blocks, engine.manager.num_in_transfer_blocks) == (4, 0)
    assert engine.add([*range(16), 60])[1].num_tokens == 16


def test_a_sequence_freed_while_the_disk_is_read_gives_its_blocks_back_at_once():
    engine = SmallEngine(num_disk_blocks=40)
    engine.keep(range(16))
    engine.push_down(to_disk=True)
    sequence = engine.fetch([*range(16), 50])
    engine.start()
    engine.manager.free(sequence)
    engine.check()
    assert engine.manager.num_free_blocks == 19
    assert engine.settle() == []
    assert engine.add([*range(16), 60])[1].num_disk_blocks == 0, "what was read is in host memory"


def test_a_block_computed_again_while_it_lies_below_is_on_the_device_again():
    engine = SmallEngine()
    engine.keep(range(8))
    engine.push_down()
    sequence, match = engine.add([*range(8), 50])
    engine.compute(sequence, match)
    assert engine.add([*range(8), 60])[1].num_tokens == 8
    assert engine.manager.tiers.host.num_obtainable == 40 and engine.manager.num_host_blocks == 2


def test_what_was_found_is_spared_when_room_is_made_in_between():
    engine = SmallEngine(num_host_blocks=4)
    engine.keep(range(12))
    engine.push_down()
    parked = engine.run(range(100, 112))
    sequence, match = engine.add([*range(12), 50])
    engine.manager.swap_out(parked)
    engine.manager.fetch(sequence, match)
    assert sequence.is_fetching
    engine.settle()
    assert sequence.num_computed == 12


def test_a_fetch_of_what_is_gone_is_a_share():
    engine = SmallEngine()
    engine.keep(range(2))
    engine.push_down()
    sequence, match = engine.add([0, 1, 2, 3])
    assert match.num_offloaded_tokens == 2
    engine.keep(range(3))  # takes the place of the shorter block
    engine.manager.fetch(sequence, match)
    assert (sequence.is_fetching, sequence.block_table) == (False, [])


# swap


def test_a_swap_begins_at_once_and_its_blocks_are_to_be_had_when_it_is_done():
    engine = SmallEngine()
    sequence = engine.run(range(18))
    engine.manager.swap_out(sequence)
    engine.check()
    assert (engine.manager.num_leaving_blocks, engine.manager.num_free_blocks) == (5, 14)
    assert kinds(engine) == [DOWN]
    engine.settle()
    assert (engine.manager.num_leaving_blocks, engine.manager.num_available_blocks) == (0, 19)


def test_a_swap_copies_neither_what_another_owns_nor_what_is_there_already():
    engine = SmallEngine()
    top = engine.run(range(8))
    sequence = engine.run(range(16))
    engine.manager.swap_out(sequence)
    assert [len(transfer.block_ids) for transfer in engine.start()] == [2]
    engine.settle()
    sequence = engine.run(range(20))
    engine.manager.swap_out(sequence)
    assert [len(transfer.block_ids) for transfer in engine.start()] == [1]
    engine.check(top)


def test_without_room_for_all_of_a_swap_its_beginning_is_kept():
    engine = SmallEngine(num_host_blocks=2)
    engine.manager.swap_out(engine.run(range(16)))
    engine.push_down()
    assert engine.add([*range(16), 50])[1].num_offloaded_tokens == 8


# what is not to be trusted


@pytest.mark.parametrize("drops_all", [False, True])
@pytest.mark.parametrize("is_done", [False, True])
def test_copies_of_a_failed_sequence_go_with_it_even_while_they_are_made(drops_all: bool, is_done: bool):
    engine = SmallEngine(num_blocks=40, num_disk_blocks=40)
    engine.keep(range(100, 112))
    engine.keep(range(18))
    engine.push_down(to_disk=True)
    engine.keep([*range(18), 50, 51, 52, 53])
    failed = engine.run(range(20))
    engine.manager.swap_out(failed)
    engine.start()
    if is_done:
        engine.settle()
    engine.manager.forget(failed)
    engine.manager.drop_cached(None if drops_all else failed)
    engine.check()
    for tokens in ([*range(18), 60], [*range(18), 50, 51]):
        _, match = engine.add(tokens)
        assert match.num_tokens + match.num_offloaded_tokens == 0
    assert engine.add([*range(100, 112), 0])[1].num_offloaded_tokens == (0 if drops_all else 12)
    engine.settle()
    assert engine.manager.num_disk_blocks == len(engine.memory.disk) == (0 if drops_all else 3)
    assert engine.manager.num_available_blocks == 39


# the end, and the next start


@pytest.mark.parametrize("num_host_blocks", [1, 3, 40])
def test_a_flush_keeps_all_for_the_next_start(num_host_blocks: int):
    engine = SmallEngine(num_host_blocks=num_host_blocks, num_disk_blocks=60)
    engine.keep(range(22), "salt")
    engine.keep([*range(8), 60, 61])
    owned = engine.run(range(300, 306))
    engine.manager.flush()
    engine.settle()
    assert not engine.manager.num_unfinished_transfers
    engine.manager.forget(owned)
    anew = engine.start_anew()
    sequence, match = anew.add([*range(22), 70], "salt")
    num_expected = 22 if num_host_blocks == 40 else 4 * num_host_blocks
    assert (match.num_offloaded_tokens, match.num_disk_blocks) == (num_expected, -(-num_expected // 4))
    anew.manager.fetch(sequence, match)
    anew.settle()
    anew.compute(sequence)
    assert anew.add([*range(8), 60, 61, 62])[1].num_offloaded_tokens >= 4
    assert anew.add(range(300, 308))[1].num_offloaded_tokens == 4


def test_a_flush_keeps_the_hottest_and_what_is_above_them_where_the_disk_is_small():
    engine = SmallEngine(num_blocks=40, num_disk_blocks=5)
    engine.keep(range(100, 116))
    engine.push_down(to_disk=True)
    engine.keep(range(200, 212))
    engine.keep(range(16))
    engine.manager.flush()
    engine.settle()
    anew = engine.start_anew()
    assert len(anew.memory.disk) == 5
    assert anew.add([*range(16), 50])[1].num_offloaded_tokens == 16
    assert anew.add([*range(200, 212), 50])[1].num_offloaded_tokens == 4


def test_another_namespace_finds_nothing_after_a_start():
    engine = SmallEngine(num_disk_blocks=40)
    engine.keep(range(8), "one")
    engine.manager.flush()
    engine.settle()
    anew = engine.start_anew()
    for salt, num_tokens in (("two", 0), ("", 0), ("one", 8)):
        assert anew.add([*range(8), 50], salt)[1].num_offloaded_tokens == num_tokens
    assert not anew.manager.tiers.restored
    anew.check()


def test_namespaces_that_only_read_alike_have_other_names():
    names = [("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", ""), ("ab", "c\0"), ("ab\0", "c"), ("\ud800", "")]
    assert len({namespace_digest(name) for name in names}) == len(names)
    assert {len(namespace_digest(name)) for name in names} == {32}


def test_what_does_not_fit_together_on_disk_is_removed_at_the_start():
    engine = SmallEngine(num_disk_blocks=40)
    engine.keep(range(10))
    engine.manager.flush()
    engine.settle()
    first, second, third = engine.memory.stored()
    assert [stored.depth for stored in (first, second, third)] == [1, 2, 3]
    orphan = replace_block(second, parent_digest=bytes(32))
    renamed = replace_block(third, digest=bytes(32))
    too_deep = replace_block(third, depth=4)
    too_long = replace_block(second, tokens=pack_ids(range(5)))
    odd = replace_block(second, tokens=second.tokens[:-1])
    empty = replace_block(second, tokens=b"")
    shorter = replace_block(second, tokens=second.tokens[:8])
    below_shorter = replace_block(third, parent_digest=shorter.digest)
    bad = [orphan, renamed, too_deep, too_long, odd, empty]
    manager = BlockManager(20, 4, tiers=TierSizes(8, 40, [first, shorter, second, *bad, below_shorter, third, third]))
    audit(manager)
    dropped = [stored.digest for transfer in manager.take_transfers() for stored in transfer.stored]
    assert sorted(dropped) == sorted(stored.digest for stored in [*bad, shorter, below_shorter])
    assert manager.num_disk_blocks == 3


def replace_block(stored, **changes):
    """A block that is consistent with what is changed, except in that."""
    fields = {"parent_digest": stored.parent_digest, "depth": stored.depth, "tokens": stored.tokens} | changes
    fields.setdefault("digest", block_digest(fields["parent_digest"], fields["tokens"]))
    return type(stored)(**fields)


def test_more_than_the_disk_may_hold_goes_coldest_first_at_the_start():
    engine = SmallEngine(num_blocks=40, num_disk_blocks=40)
    engine.keep(range(100, 112))
    engine.push_down(to_disk=True)
    engine.keep(range(16))
    engine.push_down(to_disk=True)
    manager = BlockManager(20, 4, tiers=TierSizes(8, 5, engine.memory.stored()))
    audit(manager)
    assert manager.num_disk_blocks == 5
    for tokens, num_tokens in ((range(16), 16), (range(100, 112), 4)):
        assert manager.find(make_sequence(0, [*tokens, 0])).num_offloaded_tokens == num_tokens


# without


def test_without_tiers_nothing_moves():
    manager = BlockManager(10, 4)
    assert not manager.has_tiers and manager.take_transfers() == []
    assert manager.finish_transfer(TransferResult(1)) == []
    assert (manager.num_in_transfer_blocks, manager.num_leaving_blocks, manager.num_unfinished_transfers) == (0, 0, 0)
    sequence = make_sequence(0, range(8))
    manager.allocate(sequence, 8)
    sequence.num_computed = 8
    manager.swap_out(sequence)
    manager.flush()
    assert (manager.num_cached_blocks, manager.take_transfers()) == (2, [])
    assert not BlockManager(10, 4, enable_prefix_caching=False, tiers=TierSizes(4)).has_tiers


def test_tiers_need_host_memory():
    with pytest.raises(ValueError, match="at least 1 block of host memory"):
        TierSizes(0, 10)


# the audit


def _sound() -> SmallEngine:
    engine = SmallEngine(num_disk_blocks=40)
    engine.keep(range(8))
    engine.push_down(to_disk=True)
    engine.keep(range(100, 112))
    engine.push_down()
    engine.fetch([*range(100, 112), 0])
    engine.start()
    return engine


def _pin(engine: SmallEngine) -> None:
    host: HostMemory = engine.manager.tiers.host
    host.pins[host.nodes.index(next(iter(host.cached)))] += 1


def _free_host_block(engine: SmallEngine) -> None:
    engine.manager.tiers.host.free.append(next(iter(engine.manager.tiers.host.cached)).host_id)


def _forget_copy(engine: SmallEngine) -> None:
    next(iter(engine.manager.tiers.host.cached)).host_id = 0


def _forget_disk(engine: SmallEngine) -> None:
    next(iter(engine.manager.tiers.disk)).disk_id = 0


def _free_arriving(engine: SmallEngine) -> None:
    (fetch,) = engine.manager.fetches.values()
    engine.manager.pool.release(fetch.arrivals[-1].block_id)
    engine.manager.pool.put_back(fetch.arrivals[-1].block_id)


def _lose_transfer(engine: SmallEngine) -> None:
    engine.manager.tiers.running.clear()


def _rename(engine: SmallEngine) -> None:
    next(iter(engine.manager.tiers.disk)).digest = bytes(32)


def _reverse_disk(engine: SmallEngine) -> None:
    disk = engine.manager.tiers.disk
    disk.move_to_end(next(iter(disk)))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_pin, "pins of host blocks"),
        (_free_host_block, "host blocks|is free: True"),
        (_forget_copy, "holds a node that does not know it"),
        (_forget_disk, "nodes on disk"),
        (_free_arriving, "is free"),
        (_lose_transfer, "pins of host blocks"),
        (_rename, "another's name"),
        (_reverse_disk, "before one below it"),
    ],
)
def test_the_audit_sees_what_is_wrong_below_the_device(spoil, words: str):
    engine = _sound()
    audit(engine.manager)
    spoil(engine)
    with pytest.raises(AuditError, match=words):
        audit(engine.manager)
