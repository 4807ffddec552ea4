"""Which blocks a sequence holds: find, allocate, fork, copy-on-write, free."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from engine.kv.block_pool import BlockPool
from engine.kv.prefix_tree import TOKEN_BYTES, Node, PrefixTree, Root
from engine.sequence import Sequence
from streamkv.protocol import pack_ids

_EVICTED_SHARE: Final = 1 / 64
"""Of the pool, evicted at once when nothing is free: what lay in one piece comes free in one piece."""


@dataclass(slots=True)
class Match:
    """What the prefix tree has of a sequence's tokens, all but its last: that one is computed, for its logits."""

    node: Node
    """The last block to share in place."""
    num_tokens: int
    source: Node | None
    """A block of which only the first tokens are wanted: it is copied."""


@dataclass(slots=True)
class Place:
    """Where a sequence stands in the prefix tree."""

    root: Root
    node: Node
    """Of a sequence with blocks: the last one that is in the tree, and all before it are. Of one without: the last
    known match, where the next search begins."""
    packed: bytes = b""
    """Its tokens, or their beginning, so that they are packed once."""
    is_duplicate: bool = False
    """Its block behind `node` holds what another's block in the tree holds: it adds nothing until it is freed."""
    announced: tuple[Node, bytes] | None = field(default=None)
    """The block that others wait for."""


class BlockManager:
    """Keeps every sequence's block_table. A table covers at least num_computed tokens and at most num_tokens.

    A block with more than one owner is read-only, and so is one in the prefix tree, which holds computed blocks only:
    whole ones as soon as a plan computes them, since steps run in the order of their launch, and what is left of a
    sequence when it is freed. Each sequence that `find` or `allocate` has seen needs `forget` at its end.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        """num_blocks counts block 0, which is never handed out. Raises ValueError for sizes that hold nothing."""
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.tree = PrefixTree(self.pool, block_size)
        self.holders: set[Sequence] = set()
        """The sequences with a block table."""
        self.places: dict[Sequence, Place] = {}
        self.producers: dict[tuple[Node, bytes], Sequence] = {}
        """Who computes the whole block with these tokens behind this node."""
        self.num_block_copies = 0
        self._is_caching = enable_prefix_caching
        self._pinned: list[Node] = []
        """Sources of the copies of the plan being made: an owner more keeps them."""
        self._num_evicted_at_once = max(1, int(num_blocks * _EVICTED_SHARE))

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one sequence alone can hold."""
        return (self.pool.num_blocks - 1) * self.block_size

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Blocks in the prefix tree that nobody owns."""
        return self.tree.num_cached

    @property
    def num_available_blocks(self) -> int:
        """Blocks to be had without taking one from an owner: free or cached."""
        return self.pool.num_free + self.tree.num_cached

    @property
    def num_owned_blocks(self) -> int:
        return self.pool.num_blocks - 1 - self.pool.num_free - self.tree.num_cached

    @property
    def num_evictions(self) -> int:
        return self.tree.num_evictions

    def num_needed(self, sequence: Sequence, end: int) -> int:
        """Blocks that `allocate(sequence, end)` takes, the destination of a copy included."""
        table = sequence.block_table
        needed = max(0, -(-end // self.block_size) - len(table))
        return needed + 1 if self._writes_shared(sequence, end) else needed

    def num_needed_after(self, shared: int, end: int) -> int:
        """Blocks that a sequence takes which shares `shared` tokens and then writes tokens [shared, end)."""
        return -(-end // self.block_size) - shared // self.block_size

    def has_room(self, match: Match, num_needed: int) -> bool:
        """Whether so many blocks are available beside those that `share` claims."""
        num_available = self.num_available_blocks
        # The walk that counts them is seldom needed.
        return num_available - match.node.depth - 1 >= num_needed or (
            num_available - self.num_claimed(match) >= num_needed
        )

    def num_claimed(self, match: Match) -> int:
        """Available blocks that `share` takes beside those that are needed for new tokens: cached ones that match."""
        ref_counts, node = self.pool.ref_counts, match.node
        count = int(match.source is not None and not ref_counts[match.source.block_id])
        while node.depth and not ref_counts[node.block_id]:
            count += 1
            assert node.parent is not None
            node = node.parent
        return count

    # prefixes

    def find(self, sequence: Sequence) -> Match:
        """What can be shared by a sequence that holds nothing. O(blocks newly matched since it was last asked)."""
        size, tree = self.block_size, self.tree
        place = self._place(sequence)
        num_tokens = len(sequence.token_ids)
        if len(place.packed) != num_tokens * TOKEN_BYTES:
            packed = sequence.request.packed_prompt
            has_all = len(packed) == num_tokens * TOKEN_BYTES
            place.packed = packed if has_all else pack_ids(sequence.token_ids)
        node = place.node = tree.descend(place.node, place.packed)
        shared = node.depth * size
        if shared == num_tokens:
            source: Node | None = node
            assert node.parent is not None
            node, common = node.parent, size - 1
            shared -= size
        else:
            wanted = place.packed[shared * TOKEN_BYTES : (shared + size) * TOKEN_BYTES]
            source, common = tree.nearest(node, wanted)
            common = min(common, num_tokens - 1 - shared)
        if not common:
            return Match(node, shared, None)
        match = Match(node, shared + common, source)
        # The source is held beside its copy. Where memory does not allow that, the block is computed.
        if not self.has_room(match, self.num_needed_after(shared, num_tokens)):
            return Match(node, shared, None)
        return match

    def producer(self, sequence: Sequence) -> Sequence | None:
        """Who is computing the block that comes behind what `find` has just matched for this sequence."""
        place = self.places[sequence]
        start = place.node.depth * self.block_size * TOKEN_BYTES
        key = place.packed[start : start + self.block_size * TOKEN_BYTES]
        return self.producers.get((place.node, key))

    def share(self, sequence: Sequence, match: Match) -> tuple[int, int] | None:
        """Give a sequence that holds nothing the blocks of its match, just found; num_computed becomes its length.

        Returns the (source, destination) of the copy to be made before anything of this step is written. The caller
        has checked that available blocks suffice for num_claimed and num_needed_after.
        """
        assert not sequence.block_table, "whoever shares a prefix holds nothing yet"
        self.places[sequence].node = match.node
        table = sequence.block_table = self.tree.claim(match.node)
        sequence.num_computed = match.num_tokens
        copy = None
        source = match.source
        if source is not None:
            if source in self.tree.cached:
                del self.tree.cached[source]
            self.pool.claim([source.block_id])
            self._pinned.append(source)
            destination = self._take(table[-1] if table else 0)
            table.append(destination)
            copy = (source.block_id, destination)
            self.num_block_copies += 1
        if table:
            self.holders.add(sequence)
        return copy

    def announce(self, sequence: Sequence) -> None:
        """The sequence computes the block behind its place in the tree: whoever needs the same may wait for it."""
        place = self._place(sequence)
        end = (place.node.depth + 1) * self.block_size
        if not self._is_caching or place.is_duplicate or place.announced or end > len(sequence.token_ids):
            return
        block = place.node, self._key(place, sequence, end - self.block_size, end)
        if block[1] not in place.node.children and self.producers.setdefault(block, sequence) is sequence:
            place.announced = block

    def withdraw(self, sequence: Sequence) -> None:
        """The sequence does not go on computing what it announced."""
        place = self.places.get(sequence)
        if place is not None and place.announced is not None:
            del self.producers[place.announced]
            place.announced = None

    def publish(self, sequence: Sequence) -> None:
        """Let others share the sequence's whole blocks whose tokens are known and are computed by now, or by the
        plan that is complete. O(blocks not yet in the tree)."""
        if not self._is_caching:
            return
        place = self.places[sequence]
        if place.is_duplicate:
            return
        size, tree, node, table = self.block_size, self.tree, place.node, sequence.block_table
        for end in range((node.depth + 1) * size, min(sequence.num_computed, len(sequence.token_ids)) + 1, size):
            key = self._key(place, sequence, end - size, end)
            block_id = table[node.depth]
            child = node.children.get(key)
            if child is None:
                child = tree.insert(node, key, block_id)
            elif child in tree.cached:
                tree.replace(child, block_id)
            elif child.block_id != block_id:
                place.is_duplicate = True
                break
            node = child
        place.node = node

    def end_plan(self, prefills: Iterable[Sequence]) -> None:
        """The plan is complete: the blocks that its prefills compute can be shared by the next one, and the sources
        of its copies can be evicted."""
        pool, tree = self.pool, self.tree
        for node in self._pinned:
            if not pool.release(node.block_id):
                tree.cache(node)
                assert node.parent is not None
                if not node.children and tree.is_covered(node.parent, node.key):
                    tree.drop(node)
        self._pinned.clear()
        for sequence in prefills:
            self.withdraw(sequence)
            self.publish(sequence)
            if sequence.is_prefilling:
                self.announce(sequence)
            else:
                self.places[sequence].packed = b""

    # a sequence's own blocks

    def allocate(self, sequence: Sequence, end: int) -> tuple[int, int] | None:
        """Let the sequence write tokens [num_computed, end): extend its table, and copy its last block if shared.

        Returns (source, destination) of the copy that must be done before the write, if there is one; the table
        has the destination already. The caller has checked num_needed against num_available_blocks.
        """
        pool, table = self.pool, sequence.block_table
        copy = None
        if self._writes_shared(sequence, end):
            index = sequence.num_computed // self.block_size
            source = table[index]
            destination = self._take(table[index - 1] if index else 0)
            table[index] = destination
            pool.release(source)
            copy = (source, destination)
            self.num_block_copies += 1
        if not table:
            self._place(sequence)
            self.holders.add(sequence)
        for _ in range(-(-end // self.block_size) - len(table)):
            table.append(self._take(table[-1] if table else 0))
        return copy

    def extend(self, sequence: Sequence) -> int:
        """The next block of a decode that has filled its blocks. The last one of them can be shared now."""
        self.publish(sequence)
        table = sequence.block_table
        block_id = self._take(table[-1])
        table.append(block_id)
        return block_id

    def fork(self, parent: Sequence, child: Sequence, shared: int) -> None:
        """Let `child`, which holds nothing, share the blocks of the first `shared` tokens, computed by `parent`.

        The child's num_computed becomes `shared`. Costs O(blocks of the parent), moves no memory.
        """
        assert not child.block_table and shared <= parent.num_computed, "a fork shares computed tokens only"
        child.block_table = parent.block_table[: -(-shared // self.block_size)]
        child.num_computed = shared
        self.pool.claim(child.block_table)
        if child.block_table:
            self.holders.add(child)
        node = self._place(parent).node
        while node.depth > shared // self.block_size:
            assert node.parent is not None
            node = node.parent
        self._place(child).node = node

    def free(self, sequence: Sequence) -> None:
        """Give up all blocks; the sequence then has nothing computed. Those with known tokens stay cached."""
        self.withdraw(sequence)
        if not sequence.block_table:
            return
        pool, tree = self.pool, self.tree
        last = self._insert_rest(sequence, self._place(sequence))
        for block_id in reversed(sequence.block_table):
            if not pool.release(block_id) and tree.nodes[block_id] is None:
                pool.put_back(block_id)
        tree.cache(last)
        sequence.block_table = []
        sequence.num_computed = 0
        self.holders.discard(sequence)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended: give up all blocks, and what else is known of it."""
        if sequence in self.places:
            self.free(sequence)
            self.tree.leave(self.places.pop(sequence).root)

    def drop_cached(self) -> None:
        """Keep nothing that nobody owns: what is cached is not to be trusted. O(blocks cached)."""
        while self.tree.num_cached:
            self.tree.evict()

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

    def _place(self, sequence: Sequence) -> Place:
        place = self.places.get(sequence)
        if place is None:
            request = sequence.request
            root = self.tree.join((request.tenant, request.cache_salt))
            place = self.places[sequence] = Place(root, root)
        return place

    def _key(self, place: Place, sequence: Sequence, start: int, end: int) -> bytes:
        """Tokens [start, end), packed."""
        if end * TOKEN_BYTES <= len(place.packed):
            return place.packed[start * TOKEN_BYTES : end * TOKEN_BYTES]
        return pack_ids(sequence.token_ids[start:end])

    def _take(self, previous: int) -> int:
        """A block for the one after `previous`; for its sake cached ones are evicted."""
        pool = self.pool
        if not pool.num_free:
            for _ in range(min(self._num_evicted_at_once, self.tree.num_cached)):
                self.tree.evict()
        return pool.allocate(previous)

    def _insert_rest(self, sequence: Sequence, place: Place) -> Node:
        """Put the blocks of a sequence that is being freed into the tree, the last one with what it has.

        Returns the last node of its path: where another block holds the same, that one's.
        """
        size, tree, node, table = self.block_size, self.tree, place.node, sequence.block_table
        place.is_duplicate = False
        if not self._is_caching:
            return node
        num_tokens = min(sequence.num_computed, len(sequence.token_ids))
        for start in range(node.depth * size, num_tokens, size):
            end = min(start + size, num_tokens)
            key = self._key(place, sequence, start, end)
            child = node.children.get(key)
            if child is None:
                block_id = table[start // size]
                # Another owner does not own the blocks before it if they are duplicates.
                if self.pool.ref_counts[block_id] > 1 or (end - start < size and tree.is_covered(node, key)):
                    break
                child = tree.insert(node, key, block_id)
            if end - start < size:
                return child
            node = place.node = child
        return node

    def _writes_shared(self, sequence: Sequence, end: int) -> bool:
        start = sequence.num_computed
        index = start // self.block_size
        table = sequence.block_table
        return end > start and index < len(table) and self.pool.ref_counts[table[index]] > 1
