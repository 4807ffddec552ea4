"""The map of all blocks says what the books of KV memory say."""

from collections import Counter

import pytest

from engine.kv import audit as audit_module
from engine.kv.block_manager import BlockManager
from engine.kv.block_states import BlockState, block_states
from engine.sequence import Request, Sequence
from engine.simulation import life
from engine.simulation.seeds import run_seed
from streamkv.sampling import SamplingParams


def make_sequence(sequence_id: int, num_tokens: int) -> Sequence:
    request = Request(sequence_id, b"", b"", [], SamplingParams(seed=0, max_tokens=1), 0.0)
    return Sequence(sequence_id, request, 0, list(range(num_tokens)), num_tokens, max_len=1000)


def check(blocks: BlockManager, seen: Counter[BlockState]) -> None:
    states = [BlockState(state) for state in block_states(blocks)]
    counts = Counter(states)
    assert len(states) == blocks.pool.num_blocks and states[0] is BlockState.RESERVED
    assert counts[BlockState.RESERVED] == 1
    assert counts[BlockState.FREE] == blocks.num_free_blocks
    assert counts[BlockState.CACHED] == blocks.num_cached_blocks
    assert counts[BlockState.OWNED] + counts[BlockState.SHARED] == blocks.num_owned_blocks
    assert counts[BlockState.IN_TRANSFER] == blocks.num_in_transfer_blocks
    owners = Counter(block_id for sequence in blocks.holders for block_id in sequence.block_table)
    for block_id, state in enumerate(states):
        if state in (BlockState.OWNED, BlockState.SHARED):
            assert (owners[block_id] > 1) == (state is BlockState.SHARED) and owners[block_id]
    seen.update(counts)


def test_it_agrees_with_the_books_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[BlockState] = Counter()

    def audit_and_check(blocks: BlockManager) -> None:
        audit_module.audit(blocks)
        check(blocks, seen)

    monkeypatch.setattr(life, "audit", audit_and_check)
    for seed in (0, 3):
        assert run_seed(seed).failure == ""
    assert all(seen[state] > 50 for state in BlockState), seen


def test_a_prompt_with_hundreds_of_owners_is_shared() -> None:
    blocks = BlockManager(10, 4)
    parent = make_sequence(0, 8)
    blocks.allocate(parent, 8)
    parent.num_computed = 8
    for sequence_id in range(1, 400):
        blocks.fork(parent, make_sequence(sequence_id, 8), 8)
    states = block_states(blocks)
    assert [states[block_id] for block_id in parent.block_table] == [BlockState.SHARED] * 2
    assert Counter(states) == {BlockState.RESERVED: 1, BlockState.SHARED: 2, BlockState.FREE: 7}
