"""The block manager against a model of memory in which each slot remembers who wrote what."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.kv.audit import AuditError, audit
from engine.kv.block_manager import BlockManager
from engine.kv.prefix_tree import TOKEN_BYTES
from engine.sequence import Request, Sequence
from streamkv.protocol import pack_ids
from streamkv.sampling import SamplingParams
from tests.support.examples import examples


def make_sequence(sequence_id: int, num_tokens: int, salt: str = "") -> Sequence:
    request = Request(sequence_id, b"", b"", [], SamplingParams(seed=0, max_tokens=1), 0.0, cache_salt=salt)
    return Sequence(sequence_id, request, 0, list(range(num_tokens)), num_tokens, max_len=1000)


def allocate(manager: BlockManager, sequence: Sequence, end: int) -> tuple[int, int] | None:
    """As a step does: allocate, then everything up to `end` counts as computed."""
    assert manager.num_needed(sequence, end) <= manager.num_available_blocks
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
    expected = manager.num_needed_after(shared, end)
    manager.fork(parent, child, shared)
    assert manager.num_needed(child, end) == expected
    before = manager.num_available_blocks
    allocate(manager, child, end)
    assert before - manager.num_available_blocks == expected


def test_a_shared_block_counts_once_in_the_computed_tokens():
    manager = BlockManager(20, 4)
    parent, child = make_sequence(0, 10), make_sequence(1, 10)
    allocate(manager, parent, 10)
    manager.fork(parent, child, 6)
    assert manager.num_computed_tokens() == 10
    allocate(manager, child, 7)
    assert manager.num_computed_tokens() == 4 + 6 + 3


def compute_together(manager: BlockManager, *prompts: list[int]) -> list[Sequence]:
    """Sequences that each compute all their tokens, in one plan."""
    sequences = []
    for i, tokens in enumerate(prompts):
        sequence = make_sequence(i, 0)
        sequence.token_ids = tokens
        manager.share(sequence, manager.find(sequence))
        manager.allocate(sequence, len(tokens))
        sequence.num_computed = len(tokens)
        sequences.append(sequence)
    manager.end_plan(sequences)
    audit(manager)
    return sequences


def num_found(manager: BlockManager, tokens: list[int]) -> int:
    """Tokens that a sequence with one more would share."""
    sequence = make_sequence(99, 0)
    sequence.token_ids = [*tokens, 77]
    num_tokens = manager.find(sequence).num_tokens
    manager.forget(sequence)
    return num_tokens


def test_what_was_computed_twice_is_kept_once():
    manager = BlockManager(20, 4)
    first, second = compute_together(manager, [0, 1, 2, 3, 4], [0, 1, 2, 3, 5, 6, 7, 8, 9])
    assert num_found(manager, [0, 1, 2, 3, 5, 6, 7, 8]) == 4, "the second adds nothing behind its duplicate"
    manager.forget(second)
    audit(manager)
    assert num_found(manager, [0, 1, 2, 3, 5, 6, 7, 8, 9]) == 9
    manager.forget(first)
    audit(manager)
    assert manager.num_cached_blocks == 4


def test_a_block_behind_a_duplicate_is_not_kept_while_another_owns_it():
    """Its owner does not own the block above it in the tree, which could not be evicted then."""
    manager = BlockManager(20, 4)
    first, second = compute_together(manager, [0, 1, 2, 3, 4], [0, 1, 2, 3, 5, 6, 7, 8, 9])
    third = make_sequence(3, 0)
    third.token_ids = [*second.token_ids[:8], 10]
    manager.fork(second, third, 8)
    manager.forget(first)
    manager.forget(second)
    audit(manager)
    assert num_found(manager, [0, 1, 2, 3, 5, 6, 7, 8]) == 4
    manager.forget(third)
    audit(manager)
    assert num_found(manager, [0, 1, 2, 3, 5, 6, 7, 8]) == 8


def test_a_block_computed_again_takes_the_place_of_a_cached_one():
    """As after a full hit, whose last token is computed in a copy: what follows can be shared while it still runs."""
    manager = BlockManager(20, 4)
    (first,) = compute_together(manager, [0, 1, 2, 3, 4, 5, 6, 7])
    manager.forget(first)
    (second,) = compute_together(manager, [0, 1, 2, 3, 4, 5, 6, 7])
    assert (manager.num_owned_blocks, manager.num_cached_blocks, manager.num_block_copies) == (2, 0, 1)
    second.token_ids += [8, 9, 10, 11]
    manager.allocate(second, 12)
    second.num_computed = 12
    manager.end_plan([second])
    audit(manager)
    assert num_found(manager, second.token_ids) == 12


def test_a_block_that_ends_up_in_the_tree_before_who_announced_it_has_computed_it_is_shared():
    """As when a decode has filled it with tokens that the prompt of another repeats."""
    manager = BlockManager(20, 4)
    decode, prefill, third = make_sequence(0, 3), make_sequence(1, 9), make_sequence(2, 9)
    allocate(manager, decode, 3)
    decode.token_ids.append(3)
    allocate(manager, prefill, 2)
    prefill.is_prefilling = True
    manager.end_plan([prefill])
    manager.find(third)
    assert manager.producer(third) is prefill
    allocate(manager, decode, 4)
    manager.free(decode)
    audit(manager)
    assert manager.find(third).num_tokens == 4
    assert manager.producer(third) is None


def test_a_copied_block_that_another_has_outgrown_goes_when_the_plan_is_complete():
    manager = BlockManager(20, 4)
    (first,) = compute_together(manager, [0, 1])
    manager.forget(first)
    (grown,) = compute_together(manager, [0, 1, 2])
    assert manager.num_cached_blocks == 1
    last = make_sequence(2, 0)
    last.token_ids = [0, 1, 9]
    source, _ = manager.share(last, manager.find(last))
    manager.forget(grown)
    assert not manager.pool.is_free(source), "it is still to be copied"
    manager.end_plan([])
    audit(manager)
    assert manager.pool.is_free(source)
    assert num_found(manager, [0, 1, 2]) == 3


def test_a_fork_of_what_is_copied_in_the_same_plan_copies_from_the_same_source():
    """All copies of a plan are made at once, in any order."""
    manager = BlockManager(20, 4)
    (first,) = compute_together(manager, [0, 1, 2, 3, 4, 5])
    manager.forget(first)
    parent, child = make_sequence(1, 7), make_sequence(2, 7)
    source, destination = manager.share(parent, manager.find(parent))
    assert allocate(manager, parent, 7) is None
    manager.fork(parent, child, 6)
    copy = allocate(manager, child, 7)
    assert copy is not None and copy == (source, child.block_table[1])
    assert destination == parent.block_table[1] != child.block_table[1]
    manager.end_plan([parent, child])
    audit(manager)


def test_a_copy_is_made_of_the_longer_block_that_has_taken_the_place_of_what_was_found():
    """Room for the one that found it was made by freeing one that had gone on from there."""
    manager = BlockManager(20, 4)
    (first,) = compute_together(manager, [0, 1])
    manager.forget(first)
    longer = make_sequence(1, 0)
    longer.token_ids = [0, 1, 2]
    manager.allocate(longer, 3)
    longer.num_computed = 3
    manager.end_plan([longer])
    finder = make_sequence(2, 0)
    finder.token_ids = [0, 1, 9]
    match = manager.find(finder)
    assert match.num_tokens == 2
    manager.free(longer)
    assert not match.source.is_attached
    source, _ = manager.share(finder, match)
    assert manager.tree.nodes[source].key == pack_ids([0, 1, 2])
    manager.end_plan([])
    audit(manager)


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class BlockManagerMachine(RuleBasedStateMachine):
    """Plans of arrivals that share what they find, of appends, forks and ends in any order.

    `memory` is what a device would hold, (token, position) in each slot: a table must always read back its sequence's
    tokens, and the tree's blocks the tokens of their path. So few different tokens make prefixes meet everywhere.
    """

    @initialize(num_blocks=st.integers(2, 20), block_size=st.integers(1, 5), is_caching=st.booleans())
    def start(self, num_blocks: int, block_size: int, is_caching: bool) -> None:
        self.manager = BlockManager(num_blocks, block_size, is_caching)
        self.memory: dict[int, tuple[int, int]] = {}
        self.live: list[Sequence] = []
        self.num_sequences = 0

    @rule(arrivals=st.lists(st.tuples(TOKENS, st.sampled_from("aab"), st.integers(1, 14)), min_size=1, max_size=3))
    def arrive(self, arrivals: list[tuple[list[int], str, int]]) -> None:
        """One plan, in which each new sequence takes what the tree has of its tokens, and computes some of the rest."""
        parts = []
        for tokens, salt, chunk in arrivals:
            sequence = make_sequence(self.num_sequences, 0, salt)
            sequence.token_ids = tokens
            self.num_sequences += 1
            self.live.append(sequence)
            parts.append((sequence, chunk))
        self._plan(parts)

    @precondition(lambda self: self.live)
    @rule(tokens=TOKENS, data=st.data())
    def append(self, tokens: list[int], data: st.DataObject) -> None:
        """As a decode does, a token at a time; or as the last chunk of a prefill that another plan began."""
        sequence = data.draw(st.sampled_from(self.live))
        sequence.token_ids = sequence.token_ids + tokens
        for _ in tokens:
            self._plan([(sequence, 1)])

    @precondition(lambda self: self.live)
    @rule(chunks=st.lists(st.integers(1, 14), min_size=1, max_size=3), data=st.data())
    def go_on(self, chunks: list[int], data: st.DataObject) -> None:
        sequences = data.draw(st.lists(st.sampled_from(self.live), min_size=1, max_size=3, unique=True))
        self._plan(list(zip(sequences, chunks, strict=False)))

    @precondition(lambda self: self.live)
    @rule(tokens=TOKENS, data=st.data())
    def fork(self, tokens: list[int], data: st.DataObject) -> None:
        """A choice that shares what its sibling has computed, and goes on in its own way."""
        parent = data.draw(st.sampled_from(self.live))
        if not parent.num_computed:
            return
        shared = data.draw(st.integers(1, parent.num_computed))
        child = make_sequence(self.num_sequences, 0, parent.request.cache_salt)
        child.token_ids = parent.token_ids[:shared] + tokens
        self.num_sequences += 1
        needed = self.manager.num_needed_after(shared, len(child.token_ids))
        if needed > self.manager.num_available_blocks:
            return
        before = self.manager.num_available_blocks
        self.manager.fork(parent, child, shared)
        assert self.manager.num_available_blocks == before
        self.live.append(child)
        self._plan([(child, len(tokens))])
        assert before - self.manager.num_available_blocks == needed

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.manager.free(sequence)
        assert (sequence.block_table, sequence.num_computed) == ([], 0)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.manager.forget(sequence)
        self.live.remove(sequence)

    @invariant()
    def memory_holds_what_tables_and_tree_say(self) -> None:
        if not hasattr(self, "manager"):
            return
        audit(self.manager)
        size = self.manager.block_size
        for sequence in self.live:
            read = [
                self.memory[sequence.block_table[position // size] * size + position % size]
                for position in range(sequence.num_computed)
            ]
            assert read == list(zip(sequence.token_ids, range(sequence.num_computed), strict=False))
        for node in self.manager.tree.nodes:
            if node is not None:
                start = (node.depth - 1) * size
                num_tokens = len(node.key) // TOKEN_BYTES
                held = [self.memory[node.block_id * size + offset] for offset in range(num_tokens)]
                assert pack_ids(token for token, _ in held) == node.key
                assert [position for _, position in held] == list(range(start, start + num_tokens))

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for sequence in self.live:
                self.manager.forget(sequence)
            audit(self.manager)
            assert self.manager.num_available_blocks == self.manager.pool.num_blocks - 1
            assert not self.manager.places

    def _plan(self, parts: list[tuple[Sequence, int]]) -> None:
        """Compute up to so many tokens of each sequence for which there is room, as one plan."""
        manager = self.manager
        copies: list[tuple[int, int]] = []
        writes = []
        for sequence, chunk in parts:
            if not sequence.block_table:
                match = manager.find(sequence)
                assert match.num_tokens < len(sequence.token_ids)
                end = min(match.num_tokens + chunk, len(sequence.token_ids))
                needed = manager.num_needed_after(match.num_tokens, end)
                available = manager.num_available_blocks - manager.num_claimed(match)
                if needed > available:
                    continue
                if (copy := manager.share(sequence, match)) is not None:
                    copies.append(copy)
                    needed -= 1
                    available -= 1
                assert manager.num_available_blocks == available
            else:
                end = min(sequence.num_computed + chunk, len(sequence.token_ids))
                needed, available = manager.num_needed(sequence, end), manager.num_available_blocks
                if needed > available:
                    continue
                manager.publish(sequence)
            if end == sequence.num_computed:
                continue
            if (copy := manager.allocate(sequence, end)) is not None:
                copies.append(copy)
            assert available - manager.num_available_blocks == needed
            writes.append((sequence, sequence.num_computed, end))
            sequence.num_computed = end
        self._run(copies, writes)
        manager.end_plan([sequence for sequence, _, _ in writes])

    def _run(self, copies: list[tuple[int, int]], writes: list[tuple[Sequence, int, int]]) -> None:
        """As a device does: all copies, in any order, before all writes."""
        manager, size = self.manager, self.manager.block_size
        destinations = [destination for _, destination in copies]
        assert not {source for source, _ in copies} & set(destinations)
        assert len(set(destinations)) == len(destinations)
        for source, destination in copies:
            for offset in range(size):
                self.memory.pop(destination * size + offset, None)
                if source * size + offset in self.memory:
                    self.memory[destination * size + offset] = self.memory[source * size + offset]
        for sequence, start, end in writes:
            for position in range(start, end):
                block_id = sequence.block_table[position // size]
                assert manager.pool.ref_counts[block_id] == 1, "a shared block is written"
                assert manager.tree.nodes[block_id] is None, "a block in the tree is written"
                self.memory[block_id * size + position % size] = (sequence.token_ids[position], position)


BlockManagerMachine.TestCase.settings = settings(max_examples=examples(60, 240), stateful_step_count=40, deadline=None)
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
    manager.pool.put_back(block_id)
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
