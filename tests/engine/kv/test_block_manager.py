"""The block manager against a model of memory in which each slot remembers who wrote what."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.kv.audit import AuditError, audit
from engine.kv.block_manager import BlockManager
from engine.sequence import Request, Sequence
from streamkv.sampling import SamplingParams


def make_sequence(sequence_id: int, num_tokens: int) -> Sequence:
    request = Request(sequence_id, b"", b"", [], SamplingParams(seed=0, max_tokens=1), 0.0)
    return Sequence(sequence_id, request, 0, list(range(num_tokens)), num_tokens, max_len=1000)


def allocate(manager: BlockManager, sequence: Sequence, end: int) -> tuple[int, int] | None:
    """As a step does: allocate, then everything up to `end` counts as computed."""
    assert manager.num_needed(sequence, end) <= manager.num_free_blocks
    copy = manager.allocate(sequence, end)
    sequence.num_computed = end
    return copy


def test_blocks_are_taken_as_they_are_needed():
    manager = BlockManager(10, 4)
    sequence = make_sequence(0, 20)
    for end, num_blocks in ((1, 1), (4, 1), (5, 2), (13, 4), (16, 4), (17, 5)):
        assert manager.num_needed(sequence, end) == num_blocks - manager.num_owned_blocks
        assert allocate(manager, sequence, end) is None
        assert manager.num_owned_blocks == len(sequence.block_table) == num_blocks
    manager.free(sequence)
    assert (manager.num_owned_blocks, sequence.num_computed, sequence.block_table) == (0, 0, [])


def test_a_fork_takes_no_block_and_the_first_write_copies_the_shared_last_one():
    manager = BlockManager(10, 4)
    parent, child = make_sequence(0, 8), make_sequence(1, 8)
    allocate(manager, parent, 6)
    manager.fork(parent, child, 6)
    assert child.block_table == parent.block_table
    assert manager.num_owned_blocks == 2
    last = parent.block_table[1]
    copy = allocate(manager, child, 7)
    assert copy == (last, child.block_table[1])
    assert child.block_table[0] == parent.block_table[0]
    assert child.block_table[1] != last
    assert allocate(manager, parent, 7) is None, "the parent is the block's only owner again"
    assert manager.num_block_copies == 1


def test_a_fork_at_a_block_border_copies_nothing():
    manager = BlockManager(10, 4)
    parent, child = make_sequence(0, 9), make_sequence(1, 9)
    allocate(manager, parent, 8)
    manager.fork(parent, child, 8)
    assert allocate(manager, child, 9) is None
    assert allocate(manager, parent, 9) is None
    assert manager.num_owned_blocks == 4


@pytest.mark.parametrize("shared", range(1, 9))
@pytest.mark.parametrize("end", [9, 12, 13])
def test_what_a_fork_will_need_is_known_before(shared: int, end: int):
    manager = BlockManager(20, 4)
    parent, child = make_sequence(0, 8), make_sequence(1, 16)
    allocate(manager, parent, 8)
    expected = manager.num_needed_after_fork(shared, end)
    manager.fork(parent, child, shared)
    assert manager.num_needed(child, end) == expected
    before = manager.num_free_blocks
    allocate(manager, child, end)
    assert before - manager.num_free_blocks == expected


def test_a_shared_block_counts_once_in_the_computed_tokens():
    manager = BlockManager(20, 4)
    parent, child = make_sequence(0, 10), make_sequence(1, 10)
    allocate(manager, parent, 10)
    manager.fork(parent, child, 6)
    assert manager.num_computed_tokens() == 10
    allocate(manager, child, 7)
    assert manager.num_computed_tokens() == 4 + 6 + 3


class BlockManagerMachine(RuleBasedStateMachine):
    """Append, fork, free in any order. `memory` is what a device would hold; a table must always read back its own."""

    @initialize(num_blocks=st.integers(2, 20), block_size=st.integers(1, 5))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.manager = BlockManager(num_blocks, block_size)
        self.memory: dict[int, tuple[int, int]] = {}
        self.written: dict[Sequence, list[tuple[int, int]]] = {}
        self.num_sequences = 0

    @rule(num_tokens=st.integers(1, 12), data=st.data())
    def arrive(self, num_tokens: int, data: st.DataObject) -> None:
        sequence = make_sequence(self.num_sequences, 0)
        self.num_sequences += 1
        self.written[sequence] = []
        self._write(sequence, num_tokens)

    @precondition(lambda self: self.written)
    @rule(num_tokens=st.integers(1, 7), data=st.data())
    def append(self, num_tokens: int, data: st.DataObject) -> None:
        self._write(data.draw(st.sampled_from(list(self.written))), num_tokens)

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(list(self.written)))
        shared = data.draw(st.integers(0, parent.num_computed))
        child = make_sequence(self.num_sequences, shared)
        self.num_sequences += 1
        before = self.manager.num_free_blocks
        self.manager.fork(parent, child, shared)
        assert self.manager.num_free_blocks == before
        self.written[child] = self.written[parent][:shared]

    @precondition(lambda self: self.written)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(list(self.written)))
        self.manager.free(sequence)
        del self.written[sequence]

    @invariant()
    def every_table_reads_back_what_was_written(self) -> None:
        if not hasattr(self, "manager"):
            return
        audit(self.manager)
        size = self.manager.block_size
        for sequence, written in self.written.items():
            read = [
                self.memory[sequence.block_table[position // size] * size + position % size]
                for position in range(sequence.num_computed)
            ]
            assert read == written

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for sequence in self.written:
                self.manager.free(sequence)
            audit(self.manager)
            assert self.manager.num_owned_blocks == 0

    def _write(self, sequence: Sequence, num_tokens: int) -> None:
        manager, size, start = self.manager, self.manager.block_size, sequence.num_computed
        end = start + num_tokens
        num_needed, num_free = manager.num_needed(sequence, end), manager.num_free_blocks
        if num_needed > num_free:
            return
        sequence.token_ids = list(range(end))
        copy = manager.allocate(sequence, end)
        assert num_free - manager.num_free_blocks == num_needed
        if copy is not None:
            source, destination = copy
            for offset in range(size):
                if source * size + offset in self.memory:
                    self.memory[destination * size + offset] = self.memory[source * size + offset]
        for position in range(start, end):
            block_id = sequence.block_table[position // size]
            assert manager.pool.ref_counts[block_id] == 1, "a shared block is written"
            self.memory[block_id * size + position % size] = (sequence.sequence_id, position)
            self.written[sequence].append((sequence.sequence_id, position))
        sequence.num_computed = end


BlockManagerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestBlockManager = BlockManagerMachine.TestCase


def _sound() -> tuple[BlockManager, Sequence, Sequence]:
    manager = BlockManager(10, 4)
    parent, child = make_sequence(0, 10), make_sequence(1, 10)
    allocate(manager, parent, 10)
    manager.fork(parent, child, 6)
    audit(manager)
    return manager, parent, child


def test_the_audit_sees_a_lost_block():
    manager, parent, _ = _sound()
    parent.block_table.pop()
    parent.num_computed = 8
    with pytest.raises(AuditError, match="owners"):
        audit(manager)


def test_the_audit_sees_a_block_with_an_owner_too_many():
    manager, parent, child = _sound()
    child.block_table[1] = parent.block_table[2]
    with pytest.raises(AuditError, match="owners"):
        audit(manager)


def test_the_audit_sees_a_block_that_is_owned_and_free():
    manager, parent, _ = _sound()
    block_id = parent.block_table[2]
    manager.pool.release(block_id)
    manager.pool.ref_counts[block_id] = 1
    with pytest.raises(AuditError, match="free: True"):
        audit(manager)


def test_the_audit_sees_a_block_twice_in_a_table():
    manager, parent, _ = _sound()
    parent.block_table[1] = parent.block_table[0]
    with pytest.raises(AuditError, match="twice"):
        audit(manager)


def test_the_audit_sees_tokens_without_a_block_and_blocks_without_a_token():
    manager, parent, _ = _sound()
    parent.num_computed = 13
    with pytest.raises(AuditError, match="13 tokens computed in 3 blocks"):
        audit(manager)
    parent.num_computed = 4
    parent.token_ids = parent.token_ids[:4]
    with pytest.raises(AuditError, match="3 blocks for 4 tokens"):
        audit(manager)
