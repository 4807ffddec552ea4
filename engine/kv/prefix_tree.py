"""Blocks found again by the tokens in them: match, insert, evict.

A tree per namespace, one node per block. A node's key is its block's tokens, packed as on the wire: bytes are compared,
so two different prefixes never pass for one. Nobody writes into a block that is in the tree.
"""

from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from engine.kv.block_pool import BlockPool
from engine.sequence import Sequence

Namespace = tuple[str, str]
"""(tenant, cache_salt): whoever differs in one of them shares nothing."""

TOKEN_BYTES: Final = 4
"""Of a packed token."""

_NO_CHILDREN: Final[dict[bytes, "Node"]] = {}
_NO_KEYS: Final[list[bytes]] = []
"""Of all that have none, as most nodes do for most of their life: never changed."""


class Node:
    """A block in the tree: its tokens follow those of its parents. A root has depth 0 and no block.

    It is on the device, in host memory and on disk, or in some of them; without tiers, on the device.
    """

    __slots__ = (
        "arrival",
        "block_id",
        "children",
        "depth",
        "digest",
        "disk_id",
        "found_at",
        "host_id",
        "is_attached",
        "is_copying",
        "is_landing",
        "key",
        "keys",
        "parent",
        "readers",
        "seen_at",
    )

    def __init__(self, parent: "Node | None", key: bytes, block_id: int) -> None:
        self.parent = parent
        self.key = key
        """Packed tokens: block_size of them, or fewer in a leaf."""
        self.block_id = block_id
        """On the device; 0: not there."""
        self.depth: int = parent.depth + 1 if parent is not None else 0
        """Blocks from the root to here, this one included."""
        self.children = _NO_CHILDREN
        """By key. Changed by `put` and whoever drops one."""
        self.keys = _NO_KEYS
        """The children's keys in order: those that have most in common with some tokens stand beside their place."""
        self.is_attached = True
        """False once it was dropped. Its parent stays known, so that whoever remembers it finds the way back."""
        self.host_id = 0
        """In host memory; 0: not there."""
        self.disk_id = 0
        """The transfer that stored it on disk, -1 if it was found there; 0: not there."""
        self.digest = b""
        """Its name on disk; empty until it is needed."""
        self.is_copying = False
        """A transfer reads or writes its block on the device."""
        self.is_landing = False
        """Its host block is being copied down from the device."""
        self.arrival: Arrival | None = None
        """It is on its way up: block_id is where to."""
        self.readers: list[Arrival] | None = None
        """Its host block is being read from disk, and these wait for it."""
        self.found_at = 0
        """The last look-up that told of it as offloaded."""
        self.seen_at = 0
        """The last walk that came past."""

    def put(self, child: "Node") -> int:
        """Add a child, whose key none has. Returns its place among the keys."""
        if not self.keys:
            self.children, self.keys = {child.key: child}, [child.key]
            return 0
        place = bisect_left(self.keys, child.key)
        self.keys.insert(place, child.key)
        self.children[child.key] = child
        return place

    @property
    def is_on_device(self) -> bool:
        """It, and all above it, can be shared now. A root can."""
        return (self.block_id != 0 and self.arrival is None) or not self.depth

    @property
    def is_complete_on_host(self) -> bool:
        """False while its host block is being written."""
        return not self.is_landing and self.readers is None


class Root(Node):
    """Where a namespace begins. Lives while it has children or users."""

    __slots__ = ("namespace", "num_users")

    def __init__(self, namespace: Namespace | None) -> None:
        super().__init__(None, b"", 0)
        self.namespace = namespace
        """None while only its digest is known: what lies below was found on disk, and nobody has asked for it yet."""
        self.num_users = 0


@dataclass(slots=True, eq=False)
class Arrival:
    """A block on its way up: perhaps from disk to host memory, then to the device."""

    fetch: "Fetch"
    node: Node
    block_id: int
    """Where to."""
    host_id: int
    """Pinned until the copy from it is done."""
    num_tokens: int
    """What the sequence wants of it."""
    is_own: bool
    """Into a block of the sequence's own, since only its first tokens are wanted; the node does not come up."""
    is_from_disk: bool
    has_begun: bool = False
    """The copy to the device was started."""
    is_done: bool = False
    has_failed: bool = False
    """The disk could not give it."""
    is_given_up: bool = False


@dataclass(slots=True, eq=False)
class Fetch:
    """What is brought up for a sequence, or was: nobody's once the sequence was freed."""

    sequence: Sequence | None
    num_shared_blocks: int
    """Of its table, before those that arrive."""
    arrivals: list[Arrival] = field(default_factory=list)
    """Top down. They are settled, which makes them usable, in this order, whatever comes first."""
    num_settled: int = 0


class PrefixTree:
    """All nodes, and the order in which those without an owner are evicted.

    Invariant: an owned node's parents are owned. Hence nodes without an owner have only such below them, each can be
    evicted after those below it, and `num_cached` blocks are to be had. No key begins with a sibling's whole key.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._key_bytes = block_size * TOKEN_BYTES
        self.roots: dict[Namespace, Root] = {}
        self.nodes: list[Node | None] = [None] * pool.num_blocks
        """By block id."""
        self.cached: OrderedDict[Node, None] = OrderedDict()
        """Nodes without an owner, least recently used first, each before its parents: the first is a leaf."""
        self.num_evictions = 0

    @property
    def num_cached(self) -> int:
        return len(self.cached)

    # namespaces

    def join(self, namespace: Namespace) -> Root:
        """The namespace's root, with one more user. Each `join` needs a `leave`."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Root(namespace)
        root.num_users += 1
        return root

    def leave(self, root: Root) -> None:
        root.num_users -= 1
        self._drop_if_unused(root)

    def _drop_if_unused(self, root: Root) -> None:
        if not root.num_users and not root.children:
            assert root.namespace is not None
            del self.roots[root.namespace]

    # look-up

    def descend(self, node: Node, packed: bytes) -> Node:
        """The deepest node below `node`, or itself, whose path is a prefix of `packed`. O(blocks matched).

        packed: all tokens from the root on, those of `node` and its parents included. Where `node` has been evicted,
        the search begins at what is left of its path.
        """
        while not node.is_attached:
            assert node.parent is not None, "a root that has users is never dropped"
            node = node.parent
        size = self._key_bytes
        start = node.depth * size
        child = node.children.get(packed[start : start + size])
        # A leaf with fewer tokens can equal what is left; it is no whole block.
        while child is not None and len(child.key) == size:
            node = child
            start += size
            child = node.children.get(packed[start : start + size])
        return node

    def nearest(self, node: Node, wanted: bytes) -> tuple[Node | None, int]:
        """(the child of `node` that has most in common with `wanted`, how many tokens). (None, 0) for nothing.

        In an ordered list that child stands right before or right behind where `wanted` would be. O(log children).
        """
        place = bisect_left(node.keys, wanted)
        best, most = None, 0
        for key in node.keys[max(place - 1, 0) : place + 1]:
            common = common_tokens(key, wanted)
            if common > most:
                best, most = node.children[key], common
        return best, most

    # change

    def insert(self, parent: Node, key: bytes, block_id: int) -> Node:
        """Add an owned block below `parent`, which has no child with this key. A cached sibling that holds only the
        beginning of it is dropped: it tells nothing more."""
        node = Node(parent, key, block_id)
        self.nodes[block_id] = node
        place = parent.put(node)
        if place and key.startswith(parent.keys[place - 1]):
            sibling = parent.children[parent.keys[place - 1]]
            if not self._pool.ref_counts[sibling.block_id]:
                self.drop(sibling)
        return node

    def is_covered(self, parent: Node, key: bytes) -> bool:
        """Whether a child of `parent` begins with this key, without being it."""
        place = bisect_left(parent.keys, key)
        place += place < len(parent.keys) and parent.keys[place] == key
        return place < len(parent.keys) and parent.keys[place].startswith(key)

    def replace(self, node: Node, block_id: int) -> None:
        """Let an owned block that holds the same stand in for a cached one, which becomes free. Whoever owns it owns
        those above it."""
        del self.cached[node]
        self.nodes[node.block_id] = None
        self._pool.put_back(node.block_id)
        self.adopt(node, block_id)

    def adopt(self, node: Node, block_id: int) -> None:
        """An owned block holds what a node holds that is not on the device. Whoever owns it owns those above it."""
        node.block_id = block_id
        self.nodes[block_id] = node

    def claim(self, node: Node) -> list[int]:
        """The block ids from the root to `node`, each with one more owner. O(blocks)."""
        ref_counts = self._pool.ref_counts
        block_ids: list[int] = []
        while node.depth:
            if not ref_counts[node.block_id]:
                self._leave_order(node)
            block_ids.append(node.block_id)
            assert node.parent is not None
            node = node.parent
        block_ids.reverse()
        self._pool.claim(block_ids)
        return block_ids

    def hold(self, node: Node) -> None:
        """Give a node alone an owner more, for as long as its parents have one."""
        if not self._pool.ref_counts[node.block_id]:
            self._leave_order(node)
        self._pool.claim([node.block_id])

    def _leave_order(self, node: Node) -> None:
        """The node is no longer one without an owner."""
        del self.cached[node]

    def cache(self, node: Node) -> None:
        """`node` and its parents have just been used: those without an owner are evicted last, `node` first of them."""
        ref_counts, cached = self._pool.ref_counts, self.cached
        while node.depth and not ref_counts[node.block_id]:
            cached[node] = None
            cached.move_to_end(node)
            assert node.parent is not None
            node = node.parent

    def evict(self) -> None:
        """Free the least recently used block that nobody owns. O(1) but for its place among its siblings."""
        self.drop(next(iter(self.cached)))
        self.num_evictions += 1

    def drop(self, node: Node) -> None:
        """Free a cached leaf's block."""
        assert not node.children, f"block {node.block_id} has others below it"
        parent = node.parent
        assert parent is not None
        del self.cached[node]
        node.is_attached = False
        self.nodes[node.block_id] = None
        del parent.children[node.key]
        del parent.keys[bisect_left(parent.keys, node.key)]
        self._pool.put_back(node.block_id)
        if isinstance(parent, Root):
            self._drop_if_unused(parent)


def common_tokens(left: bytes, right: bytes) -> int:
    """How many packed tokens two begin with in common."""
    for place, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return place // TOKEN_BYTES
    return min(len(left), len(right)) // TOKEN_BYTES
