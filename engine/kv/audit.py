"""The invariants of KV memory, checked one by one. For tests and the simulation; O(pool)."""

from collections import Counter

from engine.kv.block_manager import BlockManager
from engine.kv.prefix_tree import TOKEN_BYTES, Node
from engine.sequence import Sequence
from streamkv.protocol import pack_ids


class AuditError(AssertionError):
    """KV memory is not what it must be. The text says which block or sequence, and how."""


def audit(manager: BlockManager) -> None:
    """Raise AuditError unless every block is in exactly one state, the counts add up, and tables and tree agree.

    Between plans only: while one is made, the sources of its copies have an owner more.
    """
    owners: Counter[int] = Counter()
    for sequence in manager.holders:
        _check_table(manager, sequence)
        owners.update(sequence.block_table)
    _check_states(manager, owners)
    _check_tree(manager)
    for sequence in manager.holders:
        _check_place(manager, sequence)
    for (node, key), sequence in manager.producers.items():
        if (
            not sequence.is_prefilling
            or manager.places[sequence].announced != (node, key)
            or manager.places[sequence].node is not node
        ):
            raise AuditError(f"sequence {sequence.sequence_id} is waited for and does not compute that")
        if key in node.children:
            raise AuditError(f"sequence {sequence.sequence_id} is waited for, and its block is there")


def _check_table(manager: BlockManager, sequence: Sequence) -> None:
    table, name = sequence.block_table, f"sequence {sequence.sequence_id}"
    if not table:
        raise AuditError(f"{name} counts as a holder and has no block")
    if len(set(table)) != len(table):
        raise AuditError(f"{name} has a block twice: {table}")
    if not sequence.num_computed <= len(table) * manager.block_size:
        raise AuditError(f"{name} has {sequence.num_computed} tokens computed in {len(table)} blocks")
    if len(table) > -(-sequence.num_tokens // manager.block_size):
        raise AuditError(f"{name} has {len(table)} blocks for {sequence.num_tokens} tokens")


def _check_states(manager: BlockManager, owners: Counter[int]) -> None:
    pool, tree = manager.pool, manager.tree
    if owners[0] or pool.ref_counts[0] or pool.is_free(0) or tree.nodes[0]:
        raise AuditError("block 0 was handed out or is free to be")
    counts: Counter[str] = Counter()
    for block_id in range(1, pool.num_blocks):
        node = tree.nodes[block_id]
        if pool.ref_counts[block_id] != owners[block_id]:
            raise AuditError(
                f"block {block_id} counts {pool.ref_counts[block_id]} owners, {owners[block_id]} tables have it"
            )
        is_free, is_cached = pool.is_free(block_id), node is not None and node in tree.cached
        if is_free + is_cached + bool(owners[block_id]) != 1 or (is_free and node is not None):
            raise AuditError(
                f"block {block_id} has {owners[block_id]} owners, free: {is_free}, cached: {is_cached}, "
                f"in the tree: {node is not None}"
            )
        counts["free"] += is_free
        counts["cached"] += is_cached
        counts["owned"] += bool(owners[block_id])
    counted = {
        "free": manager.num_free_blocks,
        "cached": manager.num_cached_blocks,
        "owned": manager.num_owned_blocks,
    }
    if counted != counts or sum(counted.values()) != pool.num_blocks - 1:
        raise AuditError(f"counted are {counted}, found {dict(counts)} of {pool.num_blocks - 1} blocks")


def _check_tree(manager: BlockManager) -> None:
    pool, tree = manager.pool, manager.tree
    seen: set[Node] = set()
    for namespace, root in tree.roots.items():
        if root.namespace != namespace or not (root.children or root.num_users):
            raise AuditError(f"namespace {namespace} has a root that is not its own, or needs none")
        below: list[Node] = [root]
        while below:
            node = below.pop()
            _check_children(manager, node)
            below += node.children.values()
            seen.update(node.children.values())
    if seen != {node for node in tree.nodes if node is not None}:
        raise AuditError("the tree's nodes are not those that the blocks name")
    users = Counter(place.root for place in manager.places.values())
    if any(root.num_users != users[root] for root in tree.roots.values()) or set(users) - set(tree.roots.values()):
        raise AuditError("the roots count other users than there are")
    evicted_before: set[Node] = set()
    for node in tree.cached:
        if pool.ref_counts[node.block_id] or set(node.children.values()) - evicted_before:
            raise AuditError(f"block {node.block_id} is to be evicted and has an owner, or before those below it")
        evicted_before.add(node)


def _check_children(manager: BlockManager, node: Node) -> None:
    pool, tree = manager.pool, manager.tree
    if not node.is_attached or node.keys != sorted(node.children):
        raise AuditError(f"block {node.block_id} is not attached, or its children are not in order")
    if any(after.startswith(before) for before, after in zip(node.keys, node.keys[1:], strict=False)):
        raise AuditError(f"block {node.block_id} has a child that only begins another")
    whole = manager.block_size * TOKEN_BYTES
    for key, child in node.children.items():
        if child.parent is not node or child.key != key or child.depth != node.depth + 1:
            raise AuditError(f"block {child.block_id} does not know its parent")
        if tree.nodes[child.block_id] is not child:
            raise AuditError(f"block {child.block_id} is in the tree and does not name its node")
        if not 0 < len(key) <= whole or (len(key) < whole and child.children):
            raise AuditError(
                f"block {child.block_id} holds {len(key)} bytes of tokens and has {len(child.children)} more"
            )
        if pool.ref_counts[child.block_id] and node.depth and not pool.ref_counts[node.block_id]:
            raise AuditError(f"block {child.block_id} has an owner and the one above it, {node.block_id}, has none")


def _check_place(manager: BlockManager, sequence: Sequence) -> None:
    """The blocks of its path are those of its table; behind them none is in the tree as its own; none is written."""
    size, place = manager.block_size, manager.places[sequence]
    node, name = place.node, f"sequence {sequence.sequence_id}"
    if node.depth * size > min(sequence.num_computed, len(sequence.token_ids)):
        raise AuditError(f"{name} has {node.depth} blocks in the tree and {sequence.num_computed} tokens computed")
    while node.depth:
        index = node.depth - 1
        if node.block_id != sequence.block_table[index]:
            raise AuditError(f"{name} has block {sequence.block_table[index]} where the tree has {node.block_id}")
        if node.key != pack_ids(sequence.token_ids[index * size : (index + 1) * size]):
            raise AuditError(f"{name} has other tokens than block {node.block_id}, which it shares")
        assert node.parent is not None
        node = node.parent
    if node is not place.root:
        raise AuditError(f"{name} shares blocks of another namespace")
    for index in range(sequence.num_computed // size, len(sequence.block_table)):
        if manager.tree.nodes[sequence.block_table[index]] is not None:
            raise AuditError(f"{name} may write into block {sequence.block_table[index]}, which is in the tree")
