"""The invariants of KV memory, checked one by one. For tests and the simulation; O(pool)."""

from collections import Counter

from engine.kv.block_manager import BlockManager


class AuditError(AssertionError):
    """KV memory is not what it must be. The text says which block or sequence, and how."""


def audit(manager: BlockManager) -> None:
    """Raise AuditError unless every block is in exactly one state, the counts add up and the tables agree with them."""
    pool, block_size = manager.pool, manager.block_size
    owners: Counter[int] = Counter()
    for sequence in manager.holders:
        table = sequence.block_table
        if not table:
            raise AuditError(f"sequence {sequence.sequence_id} counts as a holder and has no block")
        if len(set(table)) != len(table):
            raise AuditError(f"sequence {sequence.sequence_id} has a block twice: {table}")
        if not sequence.num_computed <= len(table) * block_size:
            raise AuditError(
                f"sequence {sequence.sequence_id} has {sequence.num_computed} tokens computed in {len(table)} blocks"
            )
        if len(table) > -(-sequence.num_tokens // block_size):
            raise AuditError(
                f"sequence {sequence.sequence_id} has {len(table)} blocks for {sequence.num_tokens} tokens"
            )
        owners.update(table)
    if owners[0] or pool.ref_counts[0] or pool.is_free(0):
        raise AuditError("block 0 was handed out or is free to be")
    num_free = 0
    for block_id in range(1, pool.num_blocks):
        if pool.ref_counts[block_id] != owners[block_id]:
            raise AuditError(
                f"block {block_id} counts {pool.ref_counts[block_id]} owners, {owners[block_id]} tables have it"
            )
        if pool.is_free(block_id) == bool(owners[block_id]):
            raise AuditError(f"block {block_id} has {owners[block_id]} owners, free: {pool.is_free(block_id)}")
        num_free += pool.is_free(block_id)
    if num_free != pool.num_free or pool.num_free + pool.num_owned != pool.num_blocks - 1:
        raise AuditError(f"{num_free} blocks are free, {pool.num_free} are counted, {pool.num_owned} owned")
