"""The blocks of KV memory: which are free, and how many owners each of the others has."""

from collections.abc import Iterable, Sequence
from typing import Final

_STRIDE: Final = 0.6180339887498949
"""Golden ratio: runs that start at multiples of it, modulo the pool, stay as far apart as their number allows."""


class BlockPool:
    """Blocks 1 .. num_blocks - 1, each free, owned, or kept by the prefix tree. Every operation is O(1) a block.

    Block 0 is never handed out: padding is written there. A block without an owner that was not put back is in no
    state of the pool's: whoever keeps it, keeps account of it.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs at least 2 blocks (block 0 is reserved), got {num_blocks}")
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        """Owners of each block. Read freely, changed here only."""
        self._free = list(range(num_blocks - 1, 0, -1))
        self._place = [0] * num_blocks
        for place, block_id in enumerate(self._free):
            self._place[block_id] = place
        self._num_runs = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_blocks(self) -> Sequence[int]:
        """The free ones, in no order. The pool's own list: not to be kept or changed."""
        return self._free

    def is_free(self, block_id: int) -> bool:
        place = self._place[block_id]
        return place < len(self._free) and self._free[place] == block_id

    def allocate(self, previous: int) -> int:
        """Hand out a block, with one owner. The caller has checked that num_free > 0.

        `previous`: the block before it in the same sequence, 0 if it is the first. The block after that one is taken
        if it is free, so that a sequence mostly lies in one piece, which a CPU reads without a copy; otherwise a new
        run starts, far from the others.
        """
        free, places, block_id = self._free, self._place, previous + 1
        place = places[block_id] if previous and block_id < self.num_blocks else len(free)
        if place >= len(free) or free[place] != block_id:
            self._num_runs += 1
            block_id = 1 + int(self._num_runs * _STRIDE % 1.0 * (self.num_blocks - 1))
            if not self.is_free(block_id):
                block_id = free[-1]
            place = places[block_id]
        last = free.pop()
        if last != block_id:
            free[place] = last
            places[last] = place
        self.ref_counts[block_id] = 1
        return block_id

    def claim(self, block_ids: Iterable[int]) -> None:
        """Add an owner to each, which is owned or kept by the prefix tree."""
        ref_counts = self.ref_counts
        for block_id in block_ids:
            ref_counts[block_id] += 1

    def release(self, block_id: int) -> int:
        """Take one owner away. Returns how many are left; without any, the caller puts it back or keeps it."""
        count = self.ref_counts[block_id] - 1
        assert count >= 0, f"block {block_id} was released more often than it was owned"
        self.ref_counts[block_id] = count
        return count

    def put_back(self, block_id: int) -> None:
        """Free a block that has no owner."""
        assert not self.ref_counts[block_id], f"block {block_id} is freed and has owners"
        self._place[block_id] = len(self._free)
        self._free.append(block_id)
