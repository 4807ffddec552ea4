"""Host memory and disk below the device: their sizes, what they hold and in which order it goes, and their names."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.kv.prefix_tree import Arrival, Namespace, Node
from engine.transfer import DIGEST_BYTES, StoredBlock, Transfer, block_digest


@dataclass(frozen=True, slots=True)
class TierSizes:
    """How much lies below the device. Raises ValueError for sizes that cannot be used."""

    num_host_blocks: int
    """Their ids are 1 .. num_host_blocks."""
    num_disk_blocks: int = 0
    """What the disk may hold; 0: there is no disk. All blocks on their way to or from it go through host memory."""
    stored: list[StoredBlock] = field(default_factory=list)
    """On the disk at the start, each behind its parent, oldest use first."""

    def __post_init__(self) -> None:
        if self.num_host_blocks < 1 or self.num_disk_blocks < 0:
            raise ValueError(
                f"tiers need at least 1 block of host memory and no negative number of blocks on disk, "
                f"got {self.num_host_blocks} and {self.num_disk_blocks}"
            )


@dataclass(slots=True)
class TierCounts:
    """Blocks moved between the tiers since the start, and what came of it."""

    num_stored_to_host: int = 0
    num_loaded_from_host: int = 0
    """Those from disk as well: they come by way of host memory."""
    num_stored_to_disk: int = 0
    num_loaded_from_disk: int = 0
    num_damaged_disk_blocks: int = 0
    """Asked for, and the disk could not give them."""
    num_host_hit_tokens: int = 0
    """Tokens that came up for a sequence, from host memory."""
    num_disk_hit_tokens: int = 0
    """And from disk."""


@dataclass(slots=True)
class RunningTransfer:
    """What a transfer that was begun, and perhaps not yet taken, is about. Its lists go with those of `transfer`."""

    transfer: Transfer
    nodes: list[Node] = field(default_factory=list)
    """For all kinds but HOST_TO_DEVICE and DROP_FROM_DISK."""
    arrivals: list[Arrival] = field(default_factory=list)
    """For HOST_TO_DEVICE."""


class HostMemory:
    """Host blocks 1 .. num_blocks: each is free, or holds one node's block, or is pinned by transfers, or both.

    The nodes that it holds stand in the order in which they go, least recently used first and each before its parents:
    all of `saved`, then all of `cached`.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.nodes: list[Node | None] = [None] * (num_blocks + 1)
        """By host id."""
        self.pins = [0] * (num_blocks + 1)
        """Transfers that read or write each, or will, once what they need is there."""
        self.free = list(range(num_blocks, 0, -1))
        self.num_pinned = 0
        self.cached: OrderedDict[Node, None] = OrderedDict()
        self.saved: OrderedDict[Node, None] = OrderedDict()
        """Nodes that are on disk, too, or soon will be; or that the disk would not take."""

    @property
    def num_obtainable(self) -> int:
        """Blocks that are free, or can be made so."""
        return self.num_blocks - self.num_pinned

    def pin(self, host_id: int) -> None:
        if not self.pins[host_id]:
            self.num_pinned += 1
        self.pins[host_id] += 1

    def unpin(self, host_id: int) -> None:
        self.pins[host_id] -= 1
        assert self.pins[host_id] >= 0, f"host block {host_id} was unpinned more often than it was pinned"
        if not self.pins[host_id]:
            self.num_pinned -= 1
            if self.nodes[host_id] is None:
                self.free.append(host_id)

    def hold(self, node: Node, host_id: int) -> None:
        """Let a block that was taken out of `free`, and pinned, hold this node."""
        node.host_id = host_id
        self.nodes[host_id] = node
        self.cached[node] = None

    def use(self, node: Node) -> None:
        """The node goes last. The caller does the same for those above it, afterwards."""
        if node in self.saved:
            del self.saved[node]
        self.cached[node] = None
        self.cached.move_to_end(node)

    def save(self, node: Node) -> None:
        """The first of `cached` becomes the last of `saved`."""
        self.cached.pop(node, None)
        self.saved[node] = None

    def release(self, node: Node) -> None:
        """The node leaves. Its block is free as soon as no transfer needs it."""
        host_id, node.host_id = node.host_id, 0
        self.nodes[host_id] = None
        if node in self.saved:
            del self.saved[node]
        else:
            del self.cached[node]
        if not self.pins[host_id]:
            self.free.append(host_id)


def namespace_digest(namespace: Namespace) -> bytes:
    """The parent digest of a namespace's first blocks. Lengths go first, so that no two namespaces are the same bytes;
    what is hashed never goes to disk."""
    name = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in namespace:
        packed = part.encode("utf-8", "surrogatepass")
        name.update(len(packed).to_bytes(8, "little") + packed)
    return name.digest()


def digest_of(node: Node) -> bytes:
    """A node's name on disk. O(1), but for nodes above it whose names were never needed."""
    path = []
    above: Node | None = node
    while above is not None and not above.digest:
        path.append(above)
        above = above.parent
    for unnamed in reversed(path):
        assert unnamed.parent is not None, "a root is given its digest when it is made"
        unnamed.digest = block_digest(unnamed.parent.digest, unnamed.key)
    return node.digest


def stored_block(node: Node) -> StoredBlock:
    digest = digest_of(node)
    assert node.parent is not None
    return StoredBlock(digest, node.parent.digest, node.depth, node.key)


def deepest_first(nodes: Iterable[Node]) -> list[Node]:
    return sorted(nodes, key=lambda node: -node.depth)
