"""Blocks found again by the tokens in them: match, insert, evict.

A tree per namespace, one node per block. A node's key is its block's tokens, packed as on the wire: bytes are compared,
so two different prefixes never pass for one. Nobody writes into a block that is in the tree.
"""

from bisect import bisect_left
from collections import OrderedDict
from typing import Final

from engine.kv.block_pool import BlockPool

Namespace = tuple[str, str]
"""(tenant, cache_salt): whoever differs in one of them shares nothing."""

TOKEN_BYTES: Final = 4
"""Of a packed token."""


class Node:
    """A block in the tree: its tokens follow those of its parents. A root has depth 0 and no block."""

    __slots__ = ("block_id", "children", "depth", "is_attached", "key", "keys", "parent")

    def __init__(self, parent: "Node | None", key: bytes, block_id: int) -> None:
        self.parent = parent
        self.key = key
        """Packed tokens: block_size of them, or fewer in a leaf."""
        self.block_id = block_id
        self.depth: int = parent.depth + 1 if parent is not None else 0
        """Blocks from the root to here, this one included."""
        self.children: dict[bytes, Node] = {}
        self.keys: list[bytes] = []
        """The children's keys in order: those that have most in common with some tokens stand beside their place."""
        self.is_attached = True
        """False once it was evicted. Its parent stays known, so that whoever remembers it finds the way back."""


class Root(Node):
    """Where a namespace begins. Lives while it has children or users."""

    __slots__ = ("namespace", "num_users")

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(None, b"", 0)
        self.namespace = namespace
        self.num_users = 0


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
            common = _common_bytes(key, wanted) // TOKEN_BYTES
            if common > most:
                best, most = node.children[key], common
        return best, most

    # change

    def insert(self, parent: Node, key: bytes, block_id: int) -> Node:
        """Add an owned block below `parent`, which has no child with this key. A cached sibling that holds only the
        beginning of it is dropped: it tells nothing more."""
        node = Node(parent, key, block_id)
        place = bisect_left(parent.keys, key)
        parent.keys.insert(place, key)
        parent.children[key] = node
        self.nodes[block_id] = node
        if place and key.startswith(parent.keys[place - 1]):
            sibling = parent.children[parent.keys[place - 1]]
            if sibling in self.cached:
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
        node.block_id = block_id
        self.nodes[block_id] = node

    def claim(self, node: Node) -> list[int]:
        """The block ids from the root to `node`, each with one more owner. O(blocks)."""
        ref_counts, cached = self._pool.ref_counts, self.cached
        block_ids: list[int] = []
        while node.depth:
            if not ref_counts[node.block_id]:
                del cached[node]
            block_ids.append(node.block_id)
            assert node.parent is not None
            node = node.parent
        block_ids.reverse()
        self._pool.claim(block_ids)
        return block_ids

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


def _common_bytes(left: bytes, right: bytes) -> int:
    for place, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return place
    return min(len(left), len(right))
