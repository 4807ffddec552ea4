"""The prefix tree over device, host memory and disk: what goes down, what comes up, what goes for lack of room.

A node is in the tree while it is anywhere. Those on the device have their parents there. Copies go down ahead of need,
so that evicting a block costs nothing and never waits.
"""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final, TypeVar

from engine.kv.block_pool import BlockPool
from engine.kv.prefix_tree import TOKEN_BYTES, Arrival, Fetch, Namespace, Node, PrefixTree, Root, common_tokens
from engine.kv.tiers import (
    HostMemory,
    RunningTransfer,
    TierCounts,
    TierSizes,
    deepest_first,
    namespace_digest,
    stored_block,
)
from engine.transfer import DIGEST_BYTES, StoredBlock, Transfer, TransferKind, TransferResult, block_digest

_T = TypeVar("_T")

_MAX_BATCH: Final = 64
"""Blocks of one transfer: long enough for the speed of the bus, short enough that what is urgent does not wait."""
_MAX_LOOK_AHEAD: Final = 256
"""Cached blocks that one look ahead takes down, about 4 µs each; or as many as a plan took of late."""
_READY_SHARE: Final = 1 / 8
"""Of the device and of host memory, that should be free or have a copy below."""
_READY_STEPS: Final = 2
"""Or as many blocks as so many of the last steps took, if that is more."""
_SLACK: Final = 1 / 4
"""Of these blocks, that may be missing: what goes down goes in few transfers."""
_MAX_SPARED: Final = 128
"""Blocks passed over in search of one whose loss takes no copies with it."""
_MAX_STORING: Final = 2 * _MAX_BATCH
"""Blocks on their way to disk: enough to keep it busy, and no more, for whoever is fetched from there waits for them.
What it cannot keep up with is lost, rather than in the way."""


class TieredTree(PrefixTree):
    """A prefix tree some of whose nodes are not on the device.

    A block on the device that a transfer reads or writes cannot be given to another until that is done. Without an
    owner it is evicted like any other, when its turn comes, but only leaves the tree; it is free when the transfer is
    finished. So `num_cached` counts blocks to be had at once. A copy down counts as done for what copies up from there,
    because they are done in order; the disk's order is its own, so it waits for the result.
    """

    def __init__(self, pool: BlockPool, block_size: int, sizes: TierSizes) -> None:
        super().__init__(pool, block_size)
        self.host = HostMemory(sizes.num_host_blocks)
        self.num_disk_blocks = sizes.num_disk_blocks
        self.saved: OrderedDict[Node, None] = OrderedDict()
        """Nodes without an owner that are below, too, or soon will be. They are evicted before those of `cached`,
        least recently used first, each before its parents."""
        self.disk: OrderedDict[Node, None] = OrderedDict()
        """Nodes on disk, or on their way there, least recently used first, each before its parents."""
        self.adrift: set[int] = set()
        """Blocks whose node left the device, or which a sequence gave up, while a transfer needs them."""
        self.num_busy = 0
        """Nodes in `cached` and `saved` whose block a transfer needs."""
        self.num_arriving = 0
        """Blocks on their way up that stand in a sequence's table."""
        self.counts = TierCounts()
        self.running: dict[int, RunningTransfer] = {}
        self.restored: dict[bytes, Root] = {}
        """Roots of which only the digest is known."""
        self._queued: list[Transfer] = []
        self._drops: list[StoredBlock] = []
        """To go from the disk before anything else is asked of it."""
        self._next_transfer_id = 1
        self._num_looks = 1
        self._num_walks = 0
        self._num_host_taken = 0
        """Host blocks since the last look ahead."""
        self._num_host_taken_of_late = 0
        self._num_storing = 0
        """Blocks on their way to disk."""
        self._flushed_at = 0
        """The walk at which the flush began; 0: there is none."""
        self._to_flush: deque[Node] = deque()
        self._to_flush_landing: list[Node] = []
        if self.num_disk_blocks:
            self._restore(sizes.stored)

    @property
    def num_cached(self) -> int:
        return len(self.cached) + len(self.saved) - self.num_busy

    @property
    def num_leaving(self) -> int:
        """Blocks that are to be had once the running transfers are done."""
        return self.num_busy + len(self.adrift)

    # namespaces

    def join(self, namespace: Namespace) -> Root:
        root = self.roots.get(namespace)
        if root is None:
            digest = namespace_digest(namespace)
            root = self.restored.pop(digest, None)
            if root is None:
                root = Root(namespace)
                root.digest = digest
            root.namespace = namespace
            self.roots[namespace] = root
        root.num_users += 1
        return root

    def _drop_if_unused(self, root: Root) -> None:
        if root.num_users or root.children:
            return
        if root.namespace is None:
            del self.restored[root.digest]
        else:
            del self.roots[root.namespace]

    def _restore(self, stored: list[StoredBlock]) -> None:
        """Put what was found on disk into the tree. What does not fit in is removed from the disk."""
        nodes: dict[bytes, Node] = {}
        last_use: dict[Node, int] = {}
        whole = self._key_bytes
        for i, block in enumerate(stored):
            if block.digest in nodes:
                continue
            parent: Node | None
            if block.depth == 1:
                parent = self.restored.get(block.parent_digest)
                if parent is None and len(block.parent_digest) == DIGEST_BYTES:
                    parent = self.restored[block.parent_digest] = Root(None)
                    parent.digest = block.parent_digest
            else:
                parent = nodes.get(block.parent_digest)
            if (
                parent is None
                or parent.depth != block.depth - 1
                or (parent.depth and len(parent.key) != whole)
                or not 0 < len(block.tokens) <= whole
                or len(block.tokens) % TOKEN_BYTES
                or block.digest != block_digest(block.parent_digest, block.tokens)
            ):
                self._drops.append(block)
                continue
            node = nodes[block.digest] = Node(parent, block.tokens, 0)
            node.digest, node.disk_id = block.digest, -1
            parent.put(node)
            last_use[node] = i
        # Nodes were made behind their parents, so this hands each its latest use below before it is handed on.
        for node in reversed(nodes.values()):
            if node.parent in last_use:
                last_use[node.parent] = max(last_use[node.parent], last_use[node])
        for node in sorted(nodes.values(), key=lambda node: (last_use[node], -node.depth)):
            self.disk[node] = None
        for node in nodes.values():
            assert node.parent is not None
            if len(node.key) < whole and self.is_covered(node.parent, node.key):
                self.drop(node)
        while len(self.disk) > self.num_disk_blocks:
            self.drop(next(iter(self.disk)))
        for root in list(self.restored.values()):
            self._drop_if_unused(root)

    # look-up

    def nearest(self, node: Node, wanted: bytes) -> tuple[Node | None, int]:
        """As without tiers; of two that have as much in common, the one on the device."""
        place = bisect_left(node.keys, wanted)
        best, most = None, 0
        for key in node.keys[max(place - 1, 0) : place + 1]:
            common = common_tokens(key, wanted)
            child = node.children[key]
            if common > most or (best is not None and common == most and child.is_on_device and not best.is_on_device):
                best, most = child, common
        return best, most

    def offloaded_above(self, node: Node) -> list[Node]:
        """`node` and those above it that are not on the device, top down."""
        path = []
        while not node.is_on_device:
            path.append(node)
            assert node.parent is not None
            node = node.parent
        path.reverse()
        return path

    def within_reach(self, path: list[Node]) -> int:
        """How many of the first of these nodes, not on the device, could be brought up now: each that only the disk
        has needs a block of host memory, which the others on the path cannot give. They are spared until the next
        look-up."""
        self._num_looks += 1
        host, num_spare = self.host, self.host.num_obtainable
        for i, node in enumerate(path):
            if node.host_id:
                num_spare -= not host.pins[node.host_id]
            elif node.disk_id:
                num_spare -= 1
            else:
                num_spare = -1
            if num_spare < 0 or not node.is_attached:
                return i
            node.found_at = self._num_looks
        return len(path)

    # change on the device

    def cache(self, node: Node) -> None:
        """`node` and its parents have just been used, in every tier."""
        ref_counts, cached, saved, host, disk = self._pool.ref_counts, self.cached, self.saved, self.host, self.disk
        while node.depth:
            if not ref_counts[node.block_id]:
                if node in saved:
                    del saved[node]
                elif node not in cached:
                    self.num_busy += node.is_copying
                cached[node] = None
                cached.move_to_end(node)
            if node.host_id:
                host.use(node)
            if node.disk_id:
                disk.move_to_end(node)
            assert node.parent is not None
            node = node.parent

    def evict(self) -> None:
        while True:
            node = next(iter(self.saved), None) or self._least_lost()
            is_freed = self._leave_device(node)
            if not node.host_id and not node.disk_id:
                self.drop(node)
            if is_freed:
                self.num_evictions += 1
                return

    def _least_lost(self) -> Node:
        """Which block without a copy below goes first. Those below it would go with it, although they were copied down
        with care; so first it is another's turn, if one is near that has none. Its own copy will soon be begun."""
        first = next(iter(self.cached))
        if first.children and not first.host_id and not first.disk_id:
            for node in islice(self.cached, _MAX_SPARED):
                if not node.children:
                    return node
        return first

    def replace(self, node: Node, block_id: int) -> None:
        self._leave_device(node)
        self.adopt(node, block_id)

    def drop(self, node: Node) -> None:
        """A node without an owner, and all below it, leave the tree and every tier."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        del parent.keys[bisect_left(parent.keys, node.key)]
        below = [node]
        while below:
            node = below.pop()
            below += node.children.values()
            # So that they are freed at once, and not when the garbage collector finds the circle.
            node.children.clear()
            node.keys.clear()
            node.is_attached = False
            if node.block_id:
                self._leave_device(node)
            if node.host_id:
                self.host.release(node)
            if node.disk_id:
                self._leave_disk(node)
        if isinstance(parent, Root):
            self._drop_if_unused(parent)

    def drop_unowned(self) -> None:
        """Nothing is to be trusted that nobody owns. O(nodes)."""
        ref_counts = self._pool.ref_counts
        below: list[Node] = [*self.roots.values(), *self.restored.values()]
        while below:
            for child in list(below.pop().children.values()):
                if ref_counts[child.block_id]:
                    below.append(child)
                else:
                    self.drop(child)

    def drop_path(self, namespace: Namespace, packed: bytes) -> None:
        """Nothing is to be trusted that holds blocks of this path, its last tokens or their beginning included, or
        follows them, but for what somebody owns. O(blocks of the path, and of what is dropped)."""
        node: Node | None = self.roots.get(namespace)
        start, ref_counts = 0, self._pool.ref_counts
        while node is not None and start < len(packed):
            rest = packed[start : start + self._key_bytes]
            keys = [rest[:end] for end in range(TOKEN_BYTES, len(rest), TOKEN_BYTES)]
            for key in node.keys[bisect_left(node.keys, rest) :]:
                if not key.startswith(rest):
                    break
                keys.append(key)
            for child in [node.children[key] for key in keys if key in node.children]:
                if not ref_counts[child.block_id]:
                    self.drop(child)
            node = node.children.get(rest)
            start += self._key_bytes

    def _leave_order(self, node: Node) -> None:
        if node in self.saved:
            del self.saved[node]
        else:
            del self.cached[node]
        self.num_busy -= node.is_copying

    def _leave_device(self, node: Node) -> bool:
        """A node without an owner leaves the device, not the tree. Returns whether its block is free at once."""
        self._leave_order(node)
        block_id, node.block_id = node.block_id, 0
        self.nodes[block_id] = None
        is_busy = node.is_copying and (node.arrival is None or not node.arrival.is_done)
        node.is_copying, node.arrival = False, None
        self._free(block_id, is_busy)
        return not is_busy

    def _free(self, block_id: int, is_busy: bool) -> None:
        if is_busy:
            self.adrift.add(block_id)
        else:
            self._pool.put_back(block_id)

    def _leave_disk(self, node: Node) -> None:
        self._drops.append(stored_block(node))
        del self.disk[node]
        node.disk_id = 0

    # up

    def bring_up(self, fetch: Fetch, path: list[Node], block_ids: list[int], num_tokens: list[int]) -> None:
        """Begin to copy the blocks of these nodes, not on the device and within reach, to owned blocks, of which there
        may be fewer; the last may be the sequence's own, which shows by its number of tokens."""
        for node, block_id, wanted in zip(path, block_ids, num_tokens, strict=True):
            is_own = wanted * TOKEN_BYTES < self._key_bytes
            arrival = Arrival(fetch, node, block_id, node.host_id, wanted, is_own, node.readers is not None)
            self.host.pin(node.host_id)
            fetch.arrivals.append(arrival)
            if not is_own:
                self.adopt(node, block_id)
                node.is_copying, node.arrival = True, arrival
            if node.readers is not None:
                node.readers.append(arrival)
        self.num_arriving += len(path)
        self._copy_up([arrival for arrival in fetch.arrivals if arrival.node.readers is None])

    def read_in(self, nodes: list[Node]) -> int:
        """Begin to read nodes from disk that are there only. Returns how many of the first of them host memory has
        room for."""
        host_ids = self._take_host(len(nodes))
        nodes = nodes[: len(host_ids)]
        for batch, ids in zip(_batches(nodes), _batches(host_ids), strict=True):
            for node, host_id in zip(batch, ids, strict=True):
                self.host.hold(node, host_id)
                node.readers = []
            transfer = self._new(TransferKind.DISK_TO_HOST, host_ids=ids, stored=[stored_block(n) for n in batch])
            self.running[transfer.transfer_id] = RunningTransfer(transfer, batch)
        self._use_host(nodes)
        return len(nodes)

    def _copy_up(self, arrivals: list[Arrival]) -> None:
        for batch in _batches(arrivals):
            for arrival in batch:
                arrival.has_begun = True
            transfer = self._new(
                TransferKind.HOST_TO_DEVICE,
                block_ids=[arrival.block_id for arrival in batch],
                host_ids=[arrival.host_id for arrival in batch],
            )
            self.running[transfer.transfer_id] = RunningTransfer(transfer, arrivals=batch)

    def settle(self, arrival: Arrival, is_wanted: bool) -> None:
        """What has arrived, and all before it, is usable from now on. is_wanted: its sequence has not been freed."""
        node = arrival.node
        self.num_arriving -= is_wanted
        if node.arrival is arrival:
            node.is_copying, node.arrival = False, None
            self.num_busy -= not is_wanted
        if is_wanted and arrival.is_from_disk:
            self.counts.num_disk_hit_tokens += arrival.num_tokens
        elif is_wanted:
            self.counts.num_host_hit_tokens += arrival.num_tokens

    def disown(self, arrival: Arrival) -> None:
        """The sequence for which a node's block arrives is freed. The caller releases the block and caches the node."""
        self.num_arriving -= 1

    def give_up(self, arrival: Arrival) -> None:
        """An owned block is not wanted any more that has not settled: it leaves the tree."""
        self._pool.release(arrival.block_id)
        self.num_arriving -= 1
        arrival.is_given_up = True
        node = arrival.node
        if node.arrival is arrival:
            self.nodes[arrival.block_id] = None
            node.block_id, node.is_copying, node.arrival = 0, False, None
        if not arrival.has_begun:
            self.host.unpin(arrival.host_id)
        self._free(arrival.block_id, arrival.has_begun and not arrival.is_done)

    # down

    def look_ahead(self, num_taken: int) -> None:
        """Begin to copy down what will soon have to go. num_taken: blocks that a plan took, of late."""
        if self._flushed_at:
            self._go_on_flushing()
            return
        pool, host = self._pool, self.host
        # What is copied down must not push out what was copied just before, and still waits to be evicted.
        num_ready = _num_ready(pool.num_blocks, num_taken, min(pool.num_blocks, host.num_blocks))
        num_wanted = num_ready - pool.num_free - len(self.saved) - len(self.adrift)
        if num_wanted > num_ready * _SLACK and self.cached:
            self._save_coldest(min(num_wanted, max(_MAX_LOOK_AHEAD, num_taken)))
        if self.num_disk_blocks:
            if self._num_host_taken:
                self._num_host_taken_of_late = max(self._num_host_taken, self._num_host_taken_of_late * 7 // 8)
                self._num_host_taken = 0
            num_ready = _num_ready(host.num_blocks, self._num_host_taken_of_late, host.num_blocks)
            num_wanted = num_ready - len(host.free) - len(host.saved)
            if num_wanted > num_ready * _SLACK and host.cached and self._num_storing < _MAX_STORING:
                most = max(1, min(self.num_disk_blocks // 4, _MAX_STORING - self._num_storing))
                self._store_coldest(min(num_wanted, most))

    def _save_coldest(self, num_wanted: int) -> None:
        """Of the blocks that nobody owns, let so many that go first have a copy below."""
        coldest = list(islice(self.cached, num_wanted))
        # What arrives for nobody may be there before what is above it: it is in transfer still, and copied later.
        self.copy_down([node for node in coldest if not node.host_id and not node.disk_id and node.arrival is None])
        # Host memory may have had no room, or have made some by dropping copies of others of them.
        for node in coldest:
            if not node.host_id and not node.disk_id:
                break
            del self.cached[node]
            self.saved[node] = None

    def copy_down(self, nodes: list[Node]) -> int:
        """Begin to copy these nodes, on the device only, to host memory. Returns how many of the first of them it has
        room for."""
        host_ids = self._take_host(len(nodes))
        nodes = nodes[: len(host_ids)]
        for batch, ids in zip(_batches(nodes), _batches(host_ids), strict=True):
            for node, host_id in zip(batch, ids, strict=True):
                self.host.hold(node, host_id)
                node.is_copying = node.is_landing = True
                self.num_busy += not self._pool.ref_counts[node.block_id]
            transfer = self._new(TransferKind.DEVICE_TO_HOST, block_ids=[node.block_id for node in batch], host_ids=ids)
            self.running[transfer.transfer_id] = RunningTransfer(transfer, batch)
        self._use_host(nodes)
        return len(nodes)

    def _store_coldest(self, num_wanted: int) -> None:
        """Of the blocks in host memory, let so many that go first be on disk, too."""
        host = self.host
        coldest: list[Node] = []
        for node in host.cached:
            if len(coldest) >= num_wanted or not node.is_complete_on_host:
                break
            coldest.append(node)
        self._store([node for node in coldest if not node.disk_id])
        for node in coldest:
            if not node.disk_id:
                break
            host.save(node)

    def _store(self, nodes: list[Node]) -> None:
        """Begin to write these nodes, whose host blocks are complete, to disk; the lowest of them only if it has room
        beside those above."""
        if not nodes:
            return
        disk = self.disk
        for node in nodes:
            disk[node] = None
        for node in self._walk_up(nodes):
            if node in disk:
                disk.move_to_end(node)
        spared_from = self._flushed_at or self._num_walks
        while len(disk) > self.num_disk_blocks:
            node = next(iter(disk))
            if node.seen_at >= spared_from:
                break
            self._leave_disk(node)
            if not node.host_id and not node.block_id:
                self.drop(node)
        nodes = deepest_first(nodes)
        num_too_many = len(disk) - self.num_disk_blocks
        for node in nodes[: max(0, num_too_many)]:
            del disk[node]
        nodes = nodes[max(0, num_too_many) :]
        nodes.reverse()
        for batch in _batches(nodes):
            for node in batch:
                self.host.pin(node.host_id)
            transfer = self._new(
                TransferKind.HOST_TO_DISK,
                host_ids=[node.host_id for node in batch],
                stored=[stored_block(node) for node in batch],
            )
            self._num_storing += len(batch)
            for node in batch:
                node.disk_id = transfer.transfer_id
            self.running[transfer.transfer_id] = RunningTransfer(transfer, batch)

    def _take_host(self, count: int) -> list[int]:
        """Up to so many host blocks, pinned once each. Their nodes are dropped from there, the coldest first; at the
        end, only those that are on disk."""
        host = self.host
        self._num_host_taken += count
        num_missing = min(count, host.num_obtainable) - len(host.free)
        if num_missing > 0:
            coldest: dict[Node, None] = {}
            spared: list[Node] = []
            for node in self.host.saved if self._flushed_at else self._host_order():
                if len(coldest) >= num_missing or len(spared) >= num_missing + _MAX_SPARED:
                    break
                # One that has arrived and waits for what is above it may yet be given up, and then has only this.
                if host.pins[node.host_id] or node.found_at == self._num_looks or node.arrival is not None:
                    continue
                if node.disk_id or node.block_id or all(child in coldest for child in node.children.values()):
                    coldest[node] = None
                else:
                    spared.append(node)
            if not self._flushed_at:
                coldest.update(dict.fromkeys(spared[: num_missing - len(coldest)]))
            for node in coldest:
                if node.host_id:  # or it went with one above it
                    host.release(node)
                    if not node.block_id and not node.disk_id:
                        self.drop(node)
        host_ids = [host.free.pop() for _ in range(min(count, len(host.free)))]
        for host_id in host_ids:
            host.pin(host_id)
        return host_ids

    def _host_order(self) -> Iterator[Node]:
        yield from self.host.saved
        yield from self.host.cached

    def _use_host(self, nodes: Iterable[Node]) -> None:
        for node in self._walk_up(nodes):
            if node.host_id:
                self.host.use(node)

    def _walk_up(self, nodes: Iterable[Node]) -> list[Node]:
        """These nodes and all above them, each once, after all below it. They are marked as seen."""
        self._num_walks += 1
        seen = []
        for node in nodes:
            while node.depth and node.seen_at != self._num_walks:
                node.seen_at = self._num_walks
                seen.append(node)
                assert node.parent is not None
                node = node.parent
        return deepest_first(seen)

    # the end

    def flush(self) -> None:
        """Begin to write all that the tree has and the disk has not to disk, hottest first, as far as it has room."""
        if not self.num_disk_blocks or self._flushed_at:
            return
        self._flushed_at = self._num_walks + 1
        on_device = [node for node in self.nodes if node is not None and node.is_on_device]
        owned = [node for node in on_device if self._pool.ref_counts[node.block_id]]
        order: list[Node] = deepest_first(owned)
        order.reverse()
        order += reversed(self.cached)
        order += reversed(self.saved)
        known = set(order)
        order += [node for node in reversed([*self._host_order()]) if node not in known]
        self._to_flush.extend([node for node in order if not node.disk_id][: self.num_disk_blocks])
        self._go_on_flushing()

    def _go_on_flushing(self) -> None:
        """Begin as much as may be on its way at once."""
        if not self._to_flush and not self._to_flush_landing:
            return
        landed = [node for node in self._to_flush_landing if node.is_complete_on_host]
        self._to_flush_landing = [node for node in self._to_flush_landing if not node.is_complete_on_host]
        ready = [node for node in landed if node.host_id and not node.disk_id]
        new: list[Node] = []
        num_begun = self._num_storing + len(self._to_flush_landing)
        while self._to_flush and num_begun + len(ready) + len(new) < _MAX_STORING:
            node = self._to_flush.popleft()
            if not node.is_attached or node.disk_id:
                continue
            if not node.is_complete_on_host:
                self._to_flush_landing.append(node)
            elif node.host_id:
                ready.append(node)
            elif node.is_on_device:
                new.append(node)
        self._store(ready)
        for node in ready:
            if node.host_id and node.disk_id:
                self.host.save(node)
        num_begun = self.copy_down(new)
        self._to_flush_landing += new[:num_begun]
        self._to_flush.extendleft(reversed(new[num_begun:]))
        if not self.running:
            self._to_flush.clear()  # host memory has no room, and nothing that runs will make any

    # transfers

    def _new(
        self,
        kind: TransferKind,
        *,
        block_ids: list[int] | None = None,
        host_ids: list[int] | None = None,
        stored: list[StoredBlock] | None = None,
    ) -> Transfer:
        if stored and self._drops:
            self._drop_from_disk()
        transfer = Transfer(self._next_transfer_id, kind, block_ids or [], host_ids or [], stored or [])
        self._next_transfer_id += 1
        self._queued.append(transfer)
        return transfer

    def _drop_from_disk(self) -> None:
        drops, self._drops = self._drops, []
        for batch in _batches(drops):
            transfer = self._new(TransferKind.DROP_FROM_DISK, stored=batch)
            self.running[transfer.transfer_id] = RunningTransfer(transfer)

    def take(self) -> list[Transfer]:
        """What was begun since the last call."""
        if self._drops:
            self._drop_from_disk()
        self._num_looks += 1
        queued, self._queued = self._queued, []
        return queued

    def finish(self, result: TransferResult) -> tuple[list[Fetch], list[Node]]:
        """A transfer is done. Returns (the fetches that it concerns, nodes whose block on disk is damaged: the caller
        gives up the arrivals that wait for them, then drops them)."""
        running = self.running.pop(result.transfer_id)
        transfer, failed = running.transfer, frozenset(result.failed)
        match transfer.kind:
            case TransferKind.DEVICE_TO_HOST:
                self._finish_copy_down(running)
            case TransferKind.HOST_TO_DEVICE:
                return self._finish_copy_up(running), []
            case TransferKind.HOST_TO_DISK:
                self._finish_store(running, failed)
            case TransferKind.DISK_TO_HOST:
                return self._finish_read(running, failed)
        return [], []

    def _finish_copy_down(self, running: RunningTransfer) -> None:
        transfer = running.transfer
        for node, block_id, host_id in zip(running.nodes, transfer.block_ids, transfer.host_ids, strict=True):
            self.host.unpin(host_id)
            node.is_landing = False
            if block_id in self.adrift:
                self.adrift.remove(block_id)
                self._pool.put_back(block_id)
            else:
                node.is_copying = False
                self.num_busy -= not self._pool.ref_counts[block_id]
        self.counts.num_stored_to_host += len(running.nodes)

    def _finish_copy_up(self, running: RunningTransfer) -> list[Fetch]:
        fetches: dict[Fetch, None] = {}
        for arrival in running.arrivals:
            self.host.unpin(arrival.host_id)
            arrival.is_done = True
            if arrival.block_id in self.adrift:
                self.adrift.remove(arrival.block_id)
                self._pool.put_back(arrival.block_id)
            fetches[arrival.fetch] = None
        self.counts.num_loaded_from_host += len(running.arrivals)
        return list(fetches)

    def _finish_store(self, running: RunningTransfer, failed: frozenset[int]) -> None:
        transfer = running.transfer
        for i, (node, host_id) in enumerate(zip(running.nodes, transfer.host_ids, strict=True)):
            self.host.unpin(host_id)
            if i in failed and node.disk_id == transfer.transfer_id:
                del self.disk[node]
                node.disk_id = 0
                if self._flushed_at:  # it was to go before those below it, as only what is on disk may
                    self._use_host([node])
        self._num_storing -= len(running.nodes)
        self.counts.num_stored_to_disk += len(running.nodes) - len(failed)

    def _finish_read(self, running: RunningTransfer, failed: frozenset[int]) -> tuple[list[Fetch], list[Node]]:
        fetches: dict[Fetch, None] = {}
        damaged, arrived = [], []
        for i, (node, host_id) in enumerate(zip(running.nodes, running.transfer.host_ids, strict=True)):
            assert node.readers is not None
            waiting = [arrival for arrival in node.readers if not arrival.is_given_up]
            node.readers = None
            if i in failed:
                for arrival in waiting:
                    arrival.has_failed = True
                fetches.update(dict.fromkeys(arrival.fetch for arrival in waiting))
                damaged.append(node)
            else:
                arrived += waiting
            self.host.unpin(host_id)
        self.counts.num_loaded_from_disk += len(running.nodes) - len(failed)
        self.counts.num_damaged_disk_blocks += len(failed)
        self._copy_up(arrived)
        return list(fetches), damaged

    def drop_damaged(self, node: Node) -> None:
        """What was to be read of a node is not there: neither its host block nor what the disk has is good."""
        if not node.is_attached:
            return
        if node.host_id:
            self.host.release(node)
        if node.disk_id:
            del self.disk[node]
            node.disk_id = 0
        if not node.block_id:
            self.drop(node)


def _num_ready(num_blocks: int, num_taken: int, num_limiting: int) -> int:
    """Of so many blocks, those that should be free or have a copy below: at most half of the limiting number."""
    return max(1, min(max(int(num_blocks * _READY_SHARE), _READY_STEPS * num_taken), num_limiting // 2))


def _batches(items: list[_T]) -> Iterator[list[_T]]:
    for start in range(0, len(items), _MAX_BATCH):
        yield items[start : start + _MAX_BATCH]
