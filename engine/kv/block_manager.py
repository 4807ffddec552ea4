"""Which blocks a sequence holds: allocate, fork, copy-on-write, free."""

from engine.kv.block_pool import BlockPool
from engine.sequence import Sequence


class BlockManager:
    """Keeps every sequence's block_table. A table covers at least num_computed tokens and at most num_tokens.

    A block with more than one owner is read-only: `allocate` replaces it by a copy before it may be written.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """num_blocks counts block 0, which is never handed out. Raises ValueError for sizes that hold nothing."""
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.holders: set[Sequence] = set()
        """The sequences with a block table."""
        self.num_block_copies = 0

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one sequence alone can hold."""
        return (self.pool.num_blocks - 1) * self.block_size

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    @property
    def num_owned_blocks(self) -> int:
        return self.pool.num_owned

    def num_needed(self, sequence: Sequence, end: int) -> int:
        """Free blocks that `allocate(sequence, end)` takes, the destination of a copy included."""
        table = sequence.block_table
        needed = max(0, -(-end // self.block_size) - len(table))
        return needed + 1 if self._writes_shared(sequence, end) else needed

    def num_needed_after_fork(self, shared: int, end: int) -> int:
        """Free blocks that a sequence takes which forks `shared` tokens and then writes tokens [shared, end)."""
        return -(-end // self.block_size) - shared // self.block_size

    def allocate(self, sequence: Sequence, end: int) -> tuple[int, int] | None:
        """Let the sequence write tokens [num_computed, end): extend its table, and copy its last block if shared.

        Returns (source, destination) of the copy that must be done before the write, if there is one; the table
        has the destination already. The caller has checked num_needed against num_free_blocks.
        """
        pool, table = self.pool, sequence.block_table
        copy = None
        if self._writes_shared(sequence, end):
            index = sequence.num_computed // self.block_size
            source = table[index]
            destination = pool.allocate(table[index - 1] if index else 0)
            table[index] = destination
            pool.release(source)
            copy = (source, destination)
            self.num_block_copies += 1
        if not table:
            self.holders.add(sequence)
        for _ in range(-(-end // self.block_size) - len(table)):
            table.append(pool.allocate(table[-1] if table else 0))
        return copy

    def fork(self, parent: Sequence, child: Sequence, shared: int) -> None:
        """Let `child`, which holds nothing, share the blocks of the first `shared` tokens, computed by `parent`.

        The child's num_computed becomes `shared`. Costs O(blocks shared), moves no memory.
        """
        assert not child.block_table and shared <= parent.num_computed, "a fork shares computed tokens only"
        child.block_table = parent.block_table[: -(-shared // self.block_size)]
        child.num_computed = shared
        for block_id in child.block_table:
            self.pool.share(block_id)
        if child.block_table:
            self.holders.add(child)

    def free(self, sequence: Sequence) -> None:
        """Give up all blocks; the sequence then has nothing computed."""
        for block_id in reversed(sequence.block_table):
            self.pool.release(block_id)
        sequence.block_table = []
        sequence.num_computed = 0
        self.holders.discard(sequence)

    def num_computed_tokens(self) -> int:
        """Tokens whose KV lies in owned blocks, those of a shared block once. O(blocks owned); for the metrics."""
        filled: dict[int, int] = {}
        for sequence in self.holders:
            left = sequence.num_computed
            for block_id in sequence.block_table:
                if left <= 0:
                    break
                filled[block_id] = max(filled.get(block_id, 0), min(left, self.block_size))
                left -= self.block_size
        return sum(filled.values())

    def _writes_shared(self, sequence: Sequence, end: int) -> bool:
        start = sequence.num_computed
        index = start // self.block_size
        table = sequence.block_table
        return end > start and index < len(table) and self.pool.ref_counts[table[index]] > 1
