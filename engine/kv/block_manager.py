"""Which blocks a sequence holds: find, allocate, fork, copy-on-write, free."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from engine.kv.block_pool import BlockPool
from engine.kv.prefix_tree import TOKEN_BYTES, Fetch, Node, PrefixTree, Root
from engine.kv.tiered_tree import TieredTree
from engine.kv.tiers import TierCounts, TierSizes
from engine.sequence import Sequence
from engine.transfer import Transfer, TransferResult
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
    num_offloaded_tokens: int = 0
    """How many more tokens, behind num_tokens, host memory and disk hold and `fetch` can bring; `source` is None then.
    num_tokens + num_offloaded_tokens is less than all tokens: the last one is computed, for its logits."""
    num_disk_blocks: int = 0
    """Blocks of these that only the disk has."""
    is_arriving: bool = False
    """The next whole block is on its way up for another: wait, and find again when a transfer has finished."""
    offloaded: list[Node] = field(default_factory=list)
    """The nodes to fetch, top down. Only the first tokens may be wanted of the last."""

    @property
    def num_offloaded_blocks(self) -> int:
        """Blocks that `fetch` copies up."""
        return len(self.offloaded)


@dataclass(slots=True)
class Place:
    """Where a sequence stands in the prefix tree."""

    root: Root
    node: Node
    """Of a sequence with blocks: the last one that is in the tree, and all before it are. Of one without: the last
    known match, where the next search begins."""
    deepest: Node | None = None
    """Of a sequence without blocks: the last known match in any tier, if it has been looked for."""
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

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        tiers: TierSizes | None = None,
    ) -> None:
        """num_blocks counts block 0, which is never handed out. Without prefix caching there are no tiers either.

        Raises ValueError for sizes that hold nothing.
        """
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.tiers = TieredTree(self.pool, block_size, tiers) if tiers and enable_prefix_caching else None
        """The tree, where there is something below the device."""
        self.tree: PrefixTree = self.tiers or PrefixTree(self.pool, block_size)
        self.holders: set[Sequence] = set()
        """The sequences with a block table."""
        self.places: dict[Sequence, Place] = {}
        self.producers: dict[tuple[Node, bytes], Sequence] = {}
        """Who computes the whole block with these tokens behind this node."""
        self.fetches: dict[Sequence, Fetch] = {}
        self.num_block_copies = 0
        self.num_held_blocks = 0
        """Of the free and cached ones, those that the scheduler keeps for somebody."""
        self._is_caching = enable_prefix_caching
        self._pinned: list[Node] = []
        """Sources of the copies of the plan being made: an owner more keeps them."""
        self._copied: dict[int, int] = {}
        """Destination → source of these copies, and of those for a fork."""
        self._num_taken = 0
        """Blocks since transfers were last asked for."""
        self._num_taken_of_late = 0
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
        """Blocks to be had without taking one from an owner: free or cached, and not held."""
        return max(0, self.pool.num_free + self.tree.num_cached - self.num_held_blocks)

    @property
    def num_owned_blocks(self) -> int:
        return self.pool.num_blocks - 1 - self.pool.num_free - self.tree.num_cached - self.num_in_transfer_blocks

    @property
    def num_in_transfer_blocks(self) -> int:
        """Blocks neither free nor cached nor owned because a copy from or to them runs: those that leave without an
        owner, and those that arrive, be it for a sequence (they stand in its table) or for nobody any more."""
        return self.tiers.num_leaving + self.tiers.num_arriving if self.tiers else 0

    @property
    def num_leaving_blocks(self) -> int:
        """Blocks in transfer that become available when the running transfers are done, if nobody claims them before:
        whoever needs blocks waits for these instead of preempting more."""
        return self.tiers.num_leaving if self.tiers else 0

    @property
    def has_tiers(self) -> bool:
        return self.tiers is not None

    @property
    def num_unfinished_transfers(self) -> int:
        """Transfers that were begun, those not yet taken included, and whose result has not come."""
        return len(self.tiers.running) if self.tiers else 0

    @property
    def num_host_blocks(self) -> int:
        """Blocks of host memory that hold something, or are about to."""
        return self.tiers.host.num_blocks - len(self.tiers.host.free) if self.tiers else 0

    @property
    def num_disk_blocks(self) -> int:
        """Blocks on disk, those on their way there included."""
        return len(self.tiers.disk) if self.tiers else 0

    @property
    def tier_counts(self) -> TierCounts:
        return self.tiers.counts if self.tiers else TierCounts()

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
        source = match.source
        count = int(source is not None and not ref_counts[source.block_id] and not source.is_copying)
        while node.depth and not ref_counts[node.block_id]:
            count += not node.is_copying
            assert node.parent is not None
            node = node.parent
        return count

    # prefixes

    def find(self, sequence: Sequence) -> Match:
        """What can be shared by a sequence that holds nothing: nothing while its request tells of its prompt. O(blocks
        newly matched since it was last asked, and those that are not on the device)."""
        size, tree = self.block_size, self.tree
        place = self._place(sequence)
        num_tokens = len(sequence.token_ids)
        if len(place.packed) != num_tokens * TOKEN_BYTES:
            packed = sequence.request.packed_prompt
            has_all = len(packed) == num_tokens * TOKEN_BYTES
            place.packed = packed if has_all else pack_ids(sequence.token_ids)
        if sequence.request.tells_prompt:
            place.node, place.deepest = place.root, None
            return Match(place.root, 0, None)
        offloaded: list[Node] = []
        if self.tiers is None:
            node = place.node = tree.descend(place.node, place.packed)
        else:
            node = place.deepest = tree.descend(place.deepest or place.node, place.packed)
            offloaded = self.tiers.offloaded_above(node)
            if offloaded:
                return self._find_offloaded(place, offloaded, num_tokens)
            place.node = node
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
        assert source is not None
        if not source.is_on_device:
            return self._offloaded_match(node, [source], common)
        match = Match(node, shared + common, source)
        # The source is held beside its copy. Where memory does not allow that, the block is computed.
        if not self.has_room(match, self.num_needed_after(shared, num_tokens)):
            return Match(node, shared, None)
        return match

    def _find_offloaded(self, place: Place, path: list[Node], num_tokens: int) -> Match:
        """The match of a sequence for which the tree has these whole blocks, top down, that are not on the device."""
        size, first = self.block_size, path[0]
        assert first.parent is not None
        node = place.node = first.parent
        if first.arrival is not None:
            return Match(node, node.depth * size, None, is_arriving=True)
        num_whole, common = len(path), 0
        end = path[-1].depth * size
        if end == num_tokens:
            num_whole, common = num_whole - 1, size - 1
            if not common:
                path.pop()
        else:
            source, common = self.tree.nearest(path[-1], place.packed[end * TOKEN_BYTES : (end + size) * TOKEN_BYTES])
            common = min(common, num_tokens - 1 - end)
            if common:
                assert source is not None
                path.append(source)
        return self._offloaded_match(node, path, num_whole * size + common)

    def _offloaded_match(self, node: Node, path: list[Node], num_tokens: int) -> Match:
        """Of a path behind a node on the device, with so many wanted tokens, what can be brought up now."""
        assert self.tiers is not None
        num_reached = self.tiers.within_reach(path)
        path = path[:num_reached]
        return Match(
            node,
            node.depth * self.block_size,
            None,
            num_offloaded_tokens=min(num_tokens, num_reached * self.block_size),
            num_disk_blocks=sum([not node.host_id for node in path]),
            offloaded=path,
        )

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
            if not source.is_attached:
                # Another that was freed since has put a block in its place that goes on where it ended.
                place, start = self.places[sequence], match.node.depth * self.block_size
                wanted = place.packed[start * TOKEN_BYTES : (start + self.block_size) * TOKEN_BYTES]
                source, common = self.tree.nearest(match.node, wanted)
                assert source is not None and start + common >= match.num_tokens, "what was found is there no more"
            self.tree.hold(source)
            self._pinned.append(source)
            destination = self._take(table[-1] if table else 0)
            table.append(destination)
            copy = (source.block_id, destination)
            self._copied[destination] = source.block_id
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
        child = place.node.children.get(block[1])
        if (child is None or not child.block_id) and self.producers.setdefault(block, sequence) is sequence:
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
            elif child.block_id != block_id:
                if not child.block_id:
                    tree.adopt(child, block_id)
                elif not self.pool.ref_counts[child.block_id]:
                    tree.replace(child, block_id)
                else:
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
        self._copied.clear()
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
            # All copies of a plan are made at once, so what is itself a copy of this plan is none to copy from.
            copy = (self._copied.get(source, source), destination)
            self._copied[destination] = copy[0]
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
        """Give up all blocks; the sequence then has nothing computed. Those with known tokens stay cached. What is on
        its way up for it stays in transfer until it has arrived."""
        self._free(sequence)

    def _free(self, sequence: Sequence) -> Node | None:
        """Returns the last node of its path in the tree, if it had blocks."""
        self.withdraw(sequence)
        fetch = self.fetches.pop(sequence, None)
        last = self._abandon(fetch) if fetch is not None else None
        if not sequence.block_table:
            return None
        pool, tree, place = self.pool, self.tree, self._place(sequence)
        last = last or self._insert_rest(sequence, place)
        place.deepest = None
        for block_id in reversed(sequence.block_table):
            if not pool.release(block_id) and tree.nodes[block_id] is None:
                pool.put_back(block_id)
        tree.cache(last)
        sequence.block_table = []
        sequence.num_computed = 0
        self.holders.discard(sequence)
        return last

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended: give up all blocks, and what else is known of it."""
        if sequence in self.places:
            self.free(sequence)
            self.tree.leave(self.places.pop(sequence).root)

    def drop_cached(self, sequence: Sequence | None = None) -> None:
        """Something in this sequence's KV was no number: keep nothing that nobody owns and that may come from it.

        Without tiers, or a sequence, that is all that is cached, in every tier. With both it is what holds its tokens
        and what follows them, wherever it was copied or is being copied; the rest of what the tiers hold may be the
        work of days. O(blocks dropped).
        """
        if self.tiers is None:
            while self.tree.num_cached:
                self.tree.evict()
        elif sequence is None:
            self.tiers.drop_unowned()
        else:
            self.tiers.drop_path(sequence.request.prefix_namespace, pack_ids(sequence.token_ids))

    # tiers

    def fetch(self, sequence: Sequence, match: Match) -> None:
        """Like `share`, and begin to bring up the offloaded part of the match, just found, for a sequence that holds
        nothing. The caller has checked has_room for num_needed_after(match.num_tokens, end), which counts its blocks.

        sequence.is_fetching is True until `finish_transfer` returns the sequence. Until then its table covers the
        offloaded tokens, too, and num_computed is what has arrived; it must not be scheduled, and may be freed at any
        time. Where a preemption since `find` took away what was to be fetched, there is less of it, perhaps nothing:
        is_fetching is False then, and this was a `share`. Look at is_fetching after the call.
        """
        assert self.tiers is not None and not sequence.block_table, "whoever fetches holds nothing yet"
        size, tiers, place = self.block_size, self.tiers, self.places[sequence]
        node, path = match.node, match.offloaded
        num_tokens = [size] * len(path)
        if match.num_offloaded_tokens % size:
            num_tokens[-1] = match.num_offloaded_tokens % size
        # Whoever was preempted since may have put its own block in the place of one of them.
        while path and path[0].is_on_device and num_tokens[0] == size and path[0].is_attached:
            node, path, num_tokens = path[0], path[1:], num_tokens[1:]
        if path and path[-1].is_on_device:
            path = path[:-1]
        path = path[: tiers.within_reach(path)]
        on_disk = [below for below in path if not below.host_id]
        num_read = tiers.read_in(on_disk)
        if num_read < len(on_disk):
            path = path[: path.index(on_disk[num_read])]
        place.node = node
        table = sequence.block_table = tiers.claim(node)
        sequence.num_computed = node.depth * size
        if path:
            fetch = self.fetches[sequence] = Fetch(sequence, len(table))
            for _ in path:
                table.append(self._take(table[-1] if table else 0))
            tiers.bring_up(fetch, path, table[node.depth :], num_tokens[: len(path)])
            sequence.is_fetching = True
        if table:
            self.holders.add(sequence)

    def finish_transfer(self, result: TransferResult) -> list[Sequence]:
        """Take in the result of a transfer. Returns the sequences whose fetch is over: is_fetching is False, and
        num_computed is what has arrived: all, or what lies before a block that the disk could not give, where its
        table ends, perhaps before its first block. May begin further transfers: call take_transfers after it."""
        if self.tiers is None:
            return []
        fetches, damaged = self.tiers.finish(result)
        over = []
        for fetch in fetches:
            sequence = fetch.sequence
            if self._settle(fetch) and sequence is not None:
                over.append(sequence)
        for node in damaged:
            self.tiers.drop_damaged(node)
        return over

    def take_transfers(self) -> list[Transfer]:
        """What the executor is to start now, in this order. To be called after a plan was launched, after results were
        taken in and after `flush`; it looks ahead itself, and begins to copy down what will soon be evicted. O(1) when
        there is nothing to do."""
        if self.tiers is None:
            return []
        if self._num_taken:  # a while in which nobody takes any does not make the next prompt smaller
            self._num_taken_of_late = max(self._num_taken, self._num_taken_of_late * 7 // 8)
            self._num_taken = 0
        self.tiers.look_ahead(self._num_taken_of_late)
        return self.tiers.take()

    def swap_out(self, sequence: Sequence) -> None:
        """Free a sequence that will come back, and begin at once to copy down what nobody owns now and host memory does
        not have. Its blocks are in transfer until then (num_leaving_blocks), and cached afterwards."""
        node = self._free(sequence)
        if self.tiers is None or node is None:
            return
        path = []
        while node.depth and not self.pool.ref_counts[node.block_id]:
            if not node.host_id:
                path.append(node)
            assert node.parent is not None
            node = node.parent
        path.reverse()
        self.tiers.copy_down(path)

    def flush(self) -> None:
        """The engine ends: begin to write to disk all that the tree has, hottest first, and go on whenever a transfer
        finishes. The caller pumps transfers (take_transfers, finish_transfer) while num_unfinished_transfers is over 0,
        or until it has no more time. Does nothing without a disk."""
        if self.tiers is not None:
            self.tiers.flush()

    def _settle(self, fetch: Fetch) -> bool:
        """Make usable what has arrived, in order. Returns whether that was the last of it."""
        assert self.tiers is not None
        arrivals, sequence = fetch.arrivals, fetch.sequence
        for index, arrival in enumerate(arrivals):
            if arrival.has_failed:
                self._cut(fetch, index)
                break
        while fetch.num_settled < len(arrivals) and arrivals[fetch.num_settled].is_done:
            arrival = arrivals[fetch.num_settled]
            fetch.num_settled += 1
            self.tiers.settle(arrival, is_wanted=sequence is not None)
            if sequence is not None:
                sequence.num_computed += arrival.num_tokens
                if not arrival.is_own:
                    self.places[sequence].node = arrival.node
        if fetch.num_settled < len(arrivals):
            return False
        arrivals.clear()
        fetch.num_settled = 0
        if sequence is None:
            return False
        self._end_fetch(fetch)
        return True

    def _end_fetch(self, fetch: Fetch) -> None:
        sequence = fetch.sequence
        assert sequence is not None
        self.fetches.pop(sequence, None)
        fetch.sequence = None
        sequence.is_fetching = False
        if not sequence.block_table:
            self.holders.discard(sequence)

    def _cut(self, fetch: Fetch, index: int) -> None:
        """Give up arrivals[index:], none of which is settled: the sequence's table ends there."""
        assert self.tiers is not None and fetch.sequence is not None
        for arrival in reversed(fetch.arrivals[index:]):
            self.tiers.give_up(arrival)
        del fetch.arrivals[index:]
        del fetch.sequence.block_table[fetch.num_shared_blocks + index :]

    def _abandon(self, fetch: Fetch) -> Node | None:
        """The sequence is freed: what is being copied to the device arrives for nobody, the rest is given up. Returns
        the last node that arrives, if there is one."""
        assert self.tiers is not None
        end = fetch.num_settled
        while end < len(fetch.arrivals) and fetch.arrivals[end].has_begun and not fetch.arrivals[end].is_own:
            self.tiers.disown(fetch.arrivals[end])
            end += 1
        self._cut(fetch, end)
        last = fetch.arrivals[-1].node if end > fetch.num_settled else None
        self._end_fetch(fetch)
        return last

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
            root = self.tree.join(sequence.request.prefix_namespace)
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
        self._num_taken += 1
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
            if child is None or not child.block_id:
                block_id = table[start // size]
                # Another owner does not own the blocks before it if they are duplicates.
                if self.pool.ref_counts[block_id] > 1 or (end - start < size and tree.is_covered(node, key)):
                    break
                if child is None:
                    child = tree.insert(node, key, block_id)
                else:
                    tree.adopt(child, block_id)
            elif child.arrival is not None:
                break
            if end - start < size:
                return child
            node = place.node = child
        return node

    def _writes_shared(self, sequence: Sequence, end: int) -> bool:
        start = sequence.num_computed
        index = start // self.block_size
        table = sequence.block_table
        return end > start and index < len(table) and self.pool.ref_counts[table[index]] > 1
