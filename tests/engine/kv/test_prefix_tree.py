import pytest

from engine.kv.block_pool import BlockPool
from engine.kv.prefix_tree import Node, PrefixTree
from streamkv.protocol import pack_ids

SIZE = 4


class Tree:
    """A tree whose blocks are owned for a moment, as by a sequence that computes and ends."""

    def __init__(self, num_blocks: int = 64) -> None:
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(self.pool, SIZE)
        self.root = self.tree.join(("", ""))

    def add(self, *tokens: int) -> Node:
        """Cache the blocks of these tokens, the last one with what it has. Returns its node."""
        packed = pack_ids(tokens)
        node = self.tree.descend(self.root, packed)
        owned = []
        for start in range(node.depth * SIZE, len(tokens), SIZE):
            owned.append(self.pool.allocate(0))
            node = self.tree.insert(node, pack_ids(tokens[start : start + SIZE]), owned[-1])
        for block_id in owned:
            self.pool.release(block_id)
        self.tree.cache(node)
        return node

    def use(self, node: Node) -> None:
        for block_id in self.tree.claim(node):
            self.pool.release(block_id)
        self.tree.cache(node)

    def holds(self, *tokens: int) -> bool:
        node = self.tree.descend(self.root, pack_ids(tokens))
        rest = tokens[node.depth * SIZE :]
        return not rest or self.tree.nearest(node, pack_ids(rest))[1] == len(rest)


def test_whole_blocks_are_found_down_to_where_the_tokens_part():
    tree = Tree()
    node = tree.add(1, 2, 3, 4, 5, 6, 7, 8)
    assert tree.tree.descend(tree.root, pack_ids([1, 2, 3, 4, 5, 6, 7, 8, 9])) is node
    assert tree.tree.descend(tree.root, pack_ids([1, 2, 3, 4, 5, 6, 7])) is node.parent
    assert tree.tree.descend(tree.root, pack_ids([1, 2, 3, 5, 5, 6, 7, 8])) is tree.root
    assert tree.tree.descend(tree.root, pack_ids([5, 6, 7, 8])) is tree.root, "a block counts in its place only"


@pytest.mark.parametrize("num_common", range(5))
def test_of_many_blocks_the_one_with_most_in_common_is_found(num_common: int):
    tree = Tree()
    wanted = [300, 5, 70_000, 9]
    for block in ([1, 2, 3, 4], [300, 1, 1, 1], [300, 5, 2, 2], [300, 5, 70_000, 3], [301, 5, 70_000, 9]):
        tree.add(*block)
    tree.add(*wanted)
    assert tree.tree.nearest(tree.root, pack_ids(wanted))[1] == 4
    probe = wanted[:num_common] + [999] * (4 - num_common)
    node, common = tree.tree.nearest(tree.root, pack_ids(probe))
    assert common == num_common
    assert (node is None) == (num_common == 0)
    assert node is None or node.key.startswith(pack_ids(wanted[:num_common]))


def test_the_least_recently_used_goes_first_and_leaves_before_what_is_above_them():
    tree = Tree()
    trunk = tree.add(1, 1, 1, 1)
    old = tree.add(1, 1, 1, 1, 2, 2, 2, 2)
    new = tree.add(1, 1, 1, 1, 3, 3, 3, 3, 4, 4, 4, 4)
    other = tree.add(9, 9, 9, 9)
    tree.use(old)
    order = []
    while tree.tree.num_cached:
        before = list(tree.tree.cached)
        tree.tree.evict()
        order.append((set(before) - set(tree.tree.cached)).pop())
    assert order == [new, new.parent, other, old, trunk]
    assert tree.pool.num_free == 63
    assert tree.tree.num_evictions == 5


def test_a_prefix_that_is_owned_is_not_evicted():
    tree = Tree()
    node = tree.add(1, 1, 1, 1, 2, 2, 2, 2)
    leaf = tree.add(1, 1, 1, 1, 2, 2, 2, 2, 3)
    block_ids = tree.tree.claim(node)
    assert block_ids == [node.parent.block_id, node.block_id]
    assert list(tree.tree.cached) == [leaf]
    tree.tree.evict()
    assert tree.holds(1, 1, 1, 1, 2, 2, 2, 2)


def test_a_block_that_grew_takes_the_place_of_its_beginning():
    tree = Tree()
    tree.add(1, 2)
    tree.add(1, 2, 3)
    assert tree.tree.num_cached == 1
    tree.add(1, 2, 3, 4, 5)
    assert tree.tree.num_cached == 2
    assert tree.root.keys == [pack_ids([1, 2, 3, 4])]
    assert tree.tree.is_covered(tree.root, pack_ids([1, 2]))
    assert not tree.tree.is_covered(tree.root, pack_ids([1, 2, 3, 4]))
    assert not tree.tree.is_covered(tree.root, pack_ids([2]))


def test_a_search_that_remembers_an_evicted_block_begins_at_what_is_left():
    tree = Tree()
    node = tree.add(1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)
    packed = pack_ids([1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3])
    tree.tree.evict()
    tree.tree.evict()
    assert tree.tree.descend(node, packed).depth == 1
    again = tree.add(1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)
    assert again is not node
    assert tree.tree.descend(node, packed) is again


def test_a_namespace_goes_with_its_last_block_and_user():
    tree = Tree()
    tree.add(1, 2, 3)
    assert tree.tree.join(("", "")) is tree.root
    other = tree.tree.join(("", "salt"))
    tree.tree.leave(other)
    assert list(tree.tree.roots) == [("", "")]
    tree.tree.leave(tree.root)
    tree.tree.leave(tree.root)
    assert list(tree.tree.roots) == [("", "")], "it has a block"
    tree.tree.evict()
    assert not tree.tree.roots
