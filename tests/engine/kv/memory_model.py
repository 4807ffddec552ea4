"""What device, host memory and disk hold, block by block, while a block manager shuffles them.

Each slot remembers the namespace and all tokens up to its own. So a block shows that is read before it was written, or
changed while it is copied, or taken for another.
"""

from collections import deque
from collections.abc import Callable, Iterable

from engine.kv.audit import audit
from engine.kv.block_manager import BlockManager, Match
from engine.kv.prefix_tree import TOKEN_BYTES, Node
from engine.kv.tiers import TierSizes, namespace_digest
from engine.sequence import Request, Sequence
from engine.transfer import StoredBlock, Transfer, TransferKind, TransferResult
from streamkv.protocol import unpack_ids
from streamkv.sampling import SamplingParams

Slot = tuple[bytes, tuple[int, ...]] | None
Block = tuple[Slot, ...]
"""(digest of the namespace, tokens from the first to this slot's); None for what was never written."""

ON_DISK = (TransferKind.HOST_TO_DISK, TransferKind.DISK_TO_HOST, TransferKind.DROP_FROM_DISK)


def make_sequence(sequence_id: int, tokens: Iterable[int], salt: str = "") -> Sequence:
    request = Request(sequence_id, b"", b"", [], SamplingParams(seed=0, max_tokens=1), 0.0, cache_salt=salt)
    token_ids = list(tokens)
    return Sequence(sequence_id, request, 0, token_ids, len(token_ids), max_len=1000)


class MemoryModel:
    """Applies steps at once and transfers when told to: as an executor may, in order on each of the two queues."""

    def __init__(self, manager: BlockManager, disk: dict[bytes, tuple[StoredBlock, Block]] | None = None) -> None:
        self.manager = manager
        self.size = manager.block_size
        self.blank: Block = (None,) * self.size
        self.device: dict[int, Block] = {}
        self.host: dict[int, Block] = {}
        self.disk = disk if disk is not None else {}
        """Oldest use first."""
        self.damaged: set[bytes] = set()
        self.device_queue: deque[Transfer] = deque()
        self.disk_queue: deque[Transfer] = deque()
        self._sources: dict[int, list[Block | None]] = {}
        self.num_finished: dict[TransferKind, int] = dict.fromkeys(TransferKind, 0)

    # steps

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """As a step does: all copies, in any order, before anything is written."""
        destinations = [destination for _, destination in copies]
        assert not {source for source, _ in copies} & set(destinations)
        assert len(set(destinations)) == len(destinations)
        for source, destination in copies:
            self.device[destination] = self.device.get(source, self.blank)

    def write(self, sequence: Sequence, start: int, end: int) -> None:
        """The step computes tokens [start, end): it reads all before and writes these."""
        manager = self.manager
        root = namespace_digest(sequence.request.prefix_namespace)
        self.read(sequence, start)
        for position in range(start, end):
            block_id = sequence.block_table[position // self.size]
            assert manager.pool.ref_counts[block_id] == 1, "a shared block is written"
            assert manager.tree.nodes[block_id] is None, "a block in the tree is written"
            slots = list(self.device.get(block_id, self.blank))
            slots[position % self.size] = (root, tuple(sequence.token_ids[: position + 1]))
            self.device[block_id] = tuple(slots)

    def read(self, sequence: Sequence, end: int) -> None:
        root = namespace_digest(sequence.request.prefix_namespace)
        for position in range(end):
            block_id = sequence.block_table[position // self.size]
            slot = self.device.get(block_id, self.blank)[position % self.size]
            assert slot == (root, tuple(sequence.token_ids[: position + 1])), f"position {position} of {sequence}"

    # transfers

    def start(self, transfers: list[Transfer]) -> None:
        """Destinations hold nothing from now on, until the transfer is finished."""
        for transfer in transfers:
            kind = transfer.kind
            num_blocks = {len(part) for part in (transfer.block_ids, transfer.host_ids, transfer.stored) if part}
            assert len(num_blocks) == 1 and bool(transfer.stored) == (kind in ON_DISK)
            assert bool(transfer.host_ids) == (kind is not TransferKind.DROP_FROM_DISK)
            if kind is TransferKind.HOST_TO_DEVICE:
                landing = {
                    host_id
                    for queued in self.device_queue
                    if queued.kind is TransferKind.DEVICE_TO_HOST
                    for host_id in queued.host_ids
                }
                self._sources[transfer.transfer_id] = [
                    None if host_id in landing else self.host[host_id] for host_id in transfer.host_ids
                ]
                for block_id in transfer.block_ids:
                    self.device[block_id] = self.blank
            elif kind is TransferKind.DEVICE_TO_HOST:
                self._sources[transfer.transfer_id] = [self.device[block_id] for block_id in transfer.block_ids]
            elif kind is TransferKind.HOST_TO_DISK:
                self._sources[transfer.transfer_id] = [self.host[host_id] for host_id in transfer.host_ids]
            if kind in (TransferKind.DEVICE_TO_HOST, TransferKind.DISK_TO_HOST):
                for host_id in transfer.host_ids:
                    self.host[host_id] = self.blank
            (self.disk_queue if kind in ON_DISK else self.device_queue).append(transfer)

    def finish(self, is_disk: bool, has_room: Callable[[int], bool] = lambda _: True) -> list[Sequence]:
        """Do the oldest transfer of a queue. has_room: whether a write of the block with that index succeeds."""
        transfer = (self.disk_queue if is_disk else self.device_queue).popleft()
        self.num_finished[transfer.kind] += 1
        failed: list[int] = []
        sources = self._sources.pop(transfer.transfer_id, [])
        match transfer.kind:
            case TransferKind.DEVICE_TO_HOST:
                for block_id, host_id, before in zip(transfer.block_ids, transfer.host_ids, sources, strict=True):
                    assert self.device[block_id] == before, f"block {block_id} was written while it was copied"
                    self.host[host_id] = self.device[block_id]
            case TransferKind.HOST_TO_DEVICE:
                for block_id, host_id, before in zip(transfer.block_ids, transfer.host_ids, sources, strict=True):
                    assert before is None or self.host[host_id] == before, f"host block {host_id} was written"
                    assert self.device[block_id] == self.blank, f"block {block_id} was written before it arrived"
                    self.device[block_id] = self.host[host_id]
            case TransferKind.HOST_TO_DISK:
                for i, (host_id, stored) in enumerate(zip(transfer.host_ids, transfer.stored, strict=True)):
                    assert self.host[host_id] == sources[i], f"host block {host_id} was written while it was copied"
                    assert stored.digest not in self.disk, "it is on disk already"
                    if has_room(i):
                        self.disk[stored.digest] = (stored, self.host[host_id])
                        self.damaged.discard(stored.digest)
                    else:
                        failed.append(i)
                assert len(self.disk) <= self.manager.tiers.num_disk_blocks
            case TransferKind.DISK_TO_HOST:
                for i, (host_id, stored) in enumerate(zip(transfer.host_ids, transfer.stored, strict=True)):
                    assert self.disk[stored.digest][0] == stored
                    if stored.digest in self.damaged:
                        failed.append(i)
                        self.damaged.remove(stored.digest)
                        del self.disk[stored.digest]
                    else:
                        self.disk[stored.digest] = self.disk.pop(stored.digest)
                        self.host[host_id] = self.disk[stored.digest][1]
            case TransferKind.DROP_FROM_DISK:
                for stored in transfer.stored:
                    # What the disk could not take in, it need not drop.
                    self.disk.pop(stored.digest, None)
                    self.damaged.discard(stored.digest)
        over = self.manager.finish_transfer(TransferResult(transfer.transfer_id, failed))
        for sequence in over:
            self.read(sequence, sequence.num_computed)
        return over

    def finish_all(self) -> list[Sequence]:
        """Do all that runs and what follows from it."""
        over: list[Sequence] = []
        while True:
            self.start(self.manager.take_transfers())
            if not self.device_queue and not self.disk_queue:
                return over
            over += self.finish(is_disk=not self.device_queue)

    # checks

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Tables read back their sequences' tokens, and each copy of the tree's blocks, once complete, its path."""
        for sequence in sequences:
            self.read(sequence, sequence.num_computed)
        tiers = self.manager.tiers
        assert tiers is not None
        below: list[tuple[Node, bytes, tuple[int, ...]]] = [
            (root, root.digest, ()) for root in [*tiers.roots.values(), *tiers.restored.values()]
        ]
        being_stored = {stored.digest for transfer in self.disk_queue for stored in transfer.stored}
        being_stored |= {stored.digest for transfer in tiers._queued for stored in transfer.stored}
        while below:
            node, root, path = below.pop()
            for child in node.children.values():
                tokens = path + tuple(unpack_ids(child.key))
                below.append((child, root, tokens))
                start, num_tokens = node.depth * self.size, len(child.key) // TOKEN_BYTES
                expected = [(root, tokens[: start + i + 1]) for i in range(num_tokens)]
                if child.is_on_device:
                    assert list(self.device[child.block_id][:num_tokens]) == expected
                if child.host_id and child.is_complete_on_host:
                    assert list(self.host[child.host_id][:num_tokens]) == expected
                if child.disk_id and child.digest not in being_stored:
                    assert list(self.disk[child.digest][1][:num_tokens]) == expected
        assert len(tiers.disk) <= tiers.num_disk_blocks

    def stored(self) -> list[StoredBlock]:
        """What a start would find: oldest use first, but each behind its parent. Damaged ones too."""
        found = {digest: stored for digest, (stored, _) in self.disk.items()}
        listed: dict[bytes, StoredBlock] = {}
        for stored in found.values():
            above = [stored]
            while (parent := found.get(above[-1].parent_digest)) is not None:
                above.append(parent)
            for block in reversed(above):
                listed.setdefault(block.digest, block)
        return list(listed.values())


class SmallEngine:
    """A block manager with tiers, driven by hand: sequences compute all their tokens in one plan."""

    def __init__(
        self, num_blocks: int = 20, block_size: int = 4, num_host_blocks: int = 40, num_disk_blocks: int = 0
    ) -> None:
        self.manager = BlockManager(num_blocks, block_size, tiers=TierSizes(num_host_blocks, num_disk_blocks))
        self.memory = MemoryModel(self.manager)
        self._num_sequences = 0

    def add(self, tokens: Iterable[int], salt: str = "") -> tuple[Sequence, Match]:
        """A sequence that holds nothing yet, and what is found for it."""
        self._num_sequences += 1
        sequence = make_sequence(self._num_sequences, tokens, salt)
        return sequence, self.manager.find(sequence)

    def compute(self, sequence: Sequence, match: Match | None = None) -> Sequence:
        """Share what the device has, unless it has blocks already, and compute the rest."""
        manager, end = self.manager, len(sequence.token_ids)
        if match is not None and (copy := manager.share(sequence, match)) is not None:
            self.memory.copy([copy])
        start = sequence.num_computed
        assert manager.num_needed(sequence, end) <= manager.num_available_blocks
        if (copy := manager.allocate(sequence, end)) is not None:
            self.memory.copy([copy])
        sequence.num_computed = end
        self.memory.write(sequence, start, end)
        manager.end_plan([sequence])
        self.check(sequence)
        return sequence

    def run(self, tokens: Iterable[int], salt: str = "") -> Sequence:
        return self.compute(*self.add(tokens, salt))

    def keep(self, tokens: Iterable[int], salt: str = "") -> None:
        """Compute it and end it: it stays cached. Nothing is copied yet."""
        self.manager.forget(self.run(tokens, salt))

    def fetch(self, tokens: Iterable[int], salt: str = "") -> Sequence:
        """Begin to bring up what is offloaded."""
        sequence, match = self.add(tokens, salt)
        assert match.num_offloaded_tokens
        self.manager.fetch(sequence, match)
        self.check(sequence)
        return sequence

    def bring_up(self, tokens: Iterable[int]) -> None:
        """Let the device cache again what is offloaded of whole blocks."""
        sequence = self.fetch([*tokens, -1])
        self.settle()
        self.manager.forget(sequence)

    def push_down(self, to_disk: bool = False) -> None:
        """Let go of all that the device has cached, after it was copied to host memory; or of that, too, to disk."""
        tiers = self.manager.tiers
        assert tiers is not None
        tiers.copy_down([node for node in tiers.cached if not node.host_id])
        self.settle()
        while self.manager.num_cached_blocks:
            tiers.evict()
        if to_disk:
            while nodes := [node for node in tiers.host.cached if not node.disk_id]:
                tiers._store(nodes)
                self.settle()
            for node in [*tiers.host.saved, *tiers.host.cached]:
                tiers.host.release(node)
        self.check()

    def start(self) -> list[Transfer]:
        transfers = self.manager.take_transfers()
        self.memory.start(transfers)
        return transfers

    def settle(self) -> list[Sequence]:
        over = self.memory.finish_all()
        self.check()
        return over

    def check(self, *sequences: Sequence) -> None:
        audit(self.manager)
        self.memory.check(sequences)

    def start_anew(self) -> "SmallEngine":
        """Another engine with the same sizes takes up what is on disk."""
        tiers = self.manager.tiers
        assert tiers is not None
        anew = SmallEngine(
            self.manager.pool.num_blocks, self.manager.block_size, tiers.host.num_blocks, tiers.num_disk_blocks
        )
        sizes = TierSizes(tiers.host.num_blocks, tiers.num_disk_blocks, self.memory.stored())
        anew.manager = BlockManager(self.manager.pool.num_blocks, self.manager.block_size, tiers=sizes)
        anew.memory = MemoryModel(anew.manager, self.memory.disk)
        anew.check()
        return anew
