"""The state of every block, as bytes: for people who want to see KV memory."""

from enum import IntEnum
from itertools import repeat
from typing import Final

from engine.kv.block_manager import BlockManager


class BlockState(IntEnum):
    """As Snapshot.block_states has it."""

    RESERVED = 0
    """Block 0, which is never handed out."""
    FREE = 1
    CACHED = 2
    OWNED = 3
    SHARED = 4
    """Owned by more than one sequence."""
    IN_TRANSFER = 5


_OWNED_OR_FREE: Final = bytes([BlockState.FREE, BlockState.OWNED, *[BlockState.SHARED] * 254])
"""State by number of owners, of blocks that are neither cached nor in transfer."""
_OWNED_OR_CACHED: Final = bytes([BlockState.CACHED, *_OWNED_OR_FREE[1:]])


def block_states(blocks: BlockManager) -> bytearray:
    """One BlockState per block, block 0 included. Between plans only. O(pool), of which only the fewer of the free and
    the cached ones are gone through one by one."""
    ref_counts, free_blocks, tiers = blocks.pool.ref_counts, blocks.pool.free_blocks, blocks.tiers
    try:
        owners = bytes(ref_counts)
    except ValueError:  # a prompt that over 255 sequences share
        owners = bytes(map(min, ref_counts, repeat(255)))
    cached = (blocks.tree.cached,) if tiers is None else (tiers.cached, tiers.saved)
    if len(free_blocks) < sum(map(len, cached)):
        states = bytearray(owners.translate(_OWNED_OR_CACHED))
        for block_id in free_blocks:
            states[block_id] = BlockState.FREE
    else:
        states = bytearray(owners.translate(_OWNED_OR_FREE))
        for nodes in cached:
            for node in nodes:
                states[node.block_id] = BlockState.CACHED
    states[0] = BlockState.RESERVED
    if blocks.num_in_transfer_blocks:
        _mark_transfers(blocks, states)
    return states


def _mark_transfers(blocks: BlockManager, states: bytearray) -> None:
    """Blocks on their way up in a sequence's table, those that nobody wants any more, and those that nobody owns and
    that are being copied down."""
    tiers = blocks.tiers
    assert tiers is not None, "without tiers nothing is in transfer"
    for sequence, fetch in blocks.fetches.items():
        for block_id in sequence.block_table[fetch.num_shared_blocks + fetch.num_settled :]:
            states[block_id] = BlockState.IN_TRANSFER
    for block_id in tiers.adrift:
        states[block_id] = BlockState.IN_TRANSFER
    if tiers.num_busy:
        for nodes in (tiers.cached, tiers.saved):
            for node in nodes:
                if node.is_copying:
                    states[node.block_id] = BlockState.IN_TRANSFER
