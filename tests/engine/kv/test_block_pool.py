import pytest

from engine.kv.block_pool import BlockPool


def test_block_0_is_never_handed_out():
    pool = BlockPool(9)
    assert sorted(pool.allocate(0) for _ in range(8)) == list(range(1, 9))
    assert pool.num_free == 0


def test_a_pool_without_a_block_to_hand_out_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        BlockPool(1)


def test_the_next_block_is_taken_if_it_is_free():
    pool = BlockPool(32)
    first = pool.allocate(0)
    run = [first]
    while run[-1] + 1 < 32:
        run.append(pool.allocate(run[-1]))
    assert run == list(range(first, 32))


def test_runs_start_far_apart():
    """Four sequences that grow in turns stay in one piece each, while the pool is under half full."""
    pool = BlockPool(257)
    tables = [[pool.allocate(0)] for _ in range(4)]
    for _ in range(24):
        for table in tables:
            table.append(pool.allocate(table[-1]))
    assert all(table == list(range(table[0], table[0] + 25)) for table in tables)


def test_a_block_with_several_owners_is_let_go_by_each():
    pool = BlockPool(4)
    block_id = pool.allocate(0)
    pool.claim([block_id])
    assert [pool.release(block_id), pool.release(block_id)] == [1, 0]
    assert not pool.is_free(block_id)
    pool.put_back(block_id)
    assert pool.is_free(block_id)
    assert pool.num_free == 3


def test_releasing_what_nobody_owns_and_freeing_what_somebody_owns_are_faults():
    pool = BlockPool(4)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(2)
    with pytest.raises(AssertionError, match="has owners"):
        pool.put_back(pool.allocate(0))
