"""The invariants of KV memory, checked one by one. For tests and the simulation; O(pool)."""

from collections import Counter

from engine.kv.block_manager import BlockManager
from engine.kv.prefix_tree import TOKEN_BYTES, Node
from engine.kv.tiered_tree import TieredTree
from engine.kv.tiers import namespace_digest
from engine.sequence import Sequence
from engine.transfer import TransferKind, block_digest
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
    in_transfer = _check_transfers(manager, manager.tiers) if manager.tiers is not None else set()
    _check_states(manager, owners, in_transfer)
    nodes = _check_tree(manager)
    if manager.tiers is not None:
        _check_tiers(manager.tiers, nodes)
    for sequence in manager.holders:
        _check_place(manager, sequence)
    for (node, key), sequence in manager.producers.items():
        if (
            not sequence.is_prefilling
            or manager.places[sequence].announced != (node, key)
            or manager.places[sequence].node is not node
        ):
            raise AuditError(f"sequence {sequence.sequence_id} is waited for and does not compute that")


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


def _check_states(manager: BlockManager, owners: Counter[int], in_transfer: set[int]) -> None:
    """in_transfer: the blocks of running copies that nobody owns or that have not arrived."""
    pool, tree = manager.pool, manager.tree
    if owners[0] or pool.ref_counts[0] or pool.is_free(0) or tree.nodes[0]:
        raise AuditError("block 0 was handed out or is free to be")
    to_evict = set(tree.cached)
    if manager.tiers is not None:
        if to_evict & set(manager.tiers.saved):
            raise AuditError("a block is to be evicted twice")
        to_evict |= set(manager.tiers.saved)
    counts: Counter[str] = Counter()
    for block_id in range(1, pool.num_blocks):
        node = tree.nodes[block_id]
        if pool.ref_counts[block_id] != owners[block_id]:
            raise AuditError(
                f"block {block_id} counts {pool.ref_counts[block_id]} owners, {owners[block_id]} tables have it"
            )
        is_copied = block_id in in_transfer
        is_free, is_cached = pool.is_free(block_id), node in to_evict and not is_copied
        is_owned = owners[block_id] > 0 and not is_copied
        if is_free + is_cached + is_owned + is_copied != 1 or (is_free and node is not None):
            raise AuditError(
                f"block {block_id} has {owners[block_id]} owners, free: {is_free}, cached: {is_cached}, "
                f"in transfer: {is_copied}, in the tree: {node is not None}"
            )
        if node is not None and (node in to_evict) != (not owners[block_id]):
            raise AuditError(f"block {block_id} has {owners[block_id]} owners, to be evicted: {node in to_evict}")
        counts["free"] += is_free
        counts["cached"] += is_cached
        counts["owned"] += is_owned
        counts["in transfer"] += is_copied
    counted = {
        "free": manager.num_free_blocks,
        "cached": manager.num_cached_blocks,
        "owned": manager.num_owned_blocks,
        "in transfer": manager.num_in_transfer_blocks,
    }
    if counted != counts or sum(counted.values()) != pool.num_blocks - 1:
        raise AuditError(f"counted are {counted}, found {dict(counts)} of {pool.num_blocks - 1} blocks")


def _check_transfers(manager: BlockManager, tiers: TieredTree) -> set[int]:
    """What runs touches no block twice in ways that collide. Returns the blocks in transfer."""
    in_transfer: set[int] = set()
    copied: Counter[int] = Counter()
    pins: Counter[int] = Counter()
    for running in tiers.running.values():
        transfer = running.transfer
        copied.update(transfer.block_ids)
        if transfer.kind is not TransferKind.HOST_TO_DEVICE:
            pins.update(transfer.host_ids)
        for block_id in transfer.block_ids:
            node = tiers.nodes[block_id]
            if manager.pool.is_free(block_id):
                raise AuditError(f"block {block_id} is free, and transfer {transfer.transfer_id} needs it")
            if node is None and block_id not in tiers.adrift and transfer.kind is TransferKind.DEVICE_TO_HOST:
                raise AuditError(f"block {block_id} is copied down and may be written")
            if node is None or not manager.pool.ref_counts[block_id]:
                in_transfer.add(block_id)
        pins.update([arrival.host_id for arrival in running.arrivals])
    if any(count > 1 for count in copied.values()):
        raise AuditError("two transfers need the same block of the device")
    if not tiers.adrift <= set(copied):
        raise AuditError(f"blocks {tiers.adrift - set(copied)} wait for no transfer")
    for sequence, fetch in manager.fetches.items():
        if fetch.sequence is not sequence or not sequence.is_fetching or fetch.num_settled >= len(fetch.arrivals):
            raise AuditError(f"sequence {sequence.sequence_id} fetches nothing")
        if len(sequence.block_table) != fetch.num_shared_blocks + len(fetch.arrivals):
            raise AuditError(f"sequence {sequence.sequence_id} fetches other blocks than those of its table")
        table = sequence.block_table[fetch.num_shared_blocks :]
        for index, (block_id, arrival) in enumerate(zip(table, fetch.arrivals, strict=True)):
            if arrival.block_id != block_id:
                raise AuditError(f"sequence {sequence.sequence_id} has block {block_id} for {arrival.block_id}")
            if index >= fetch.num_settled:
                in_transfer.add(block_id)
                pins[arrival.host_id] += not arrival.has_begun
    if any(sequence.is_fetching and sequence not in manager.fetches for sequence in manager.places):
        raise AuditError("a sequence waits for a fetch that is over")
    if any(tiers.host.pins[host_id] != pins[host_id] for host_id in range(1, tiers.host.num_blocks + 1)):
        raise AuditError(f"pins of host blocks are {tiers.host.pins}, needed by transfers are {dict(pins)}")
    # What has arrived before those above it stays in transfer until they come.
    for node in [*tiers.cached, *tiers.saved]:
        if node.is_copying:
            in_transfer.add(node.block_id)
    return in_transfer


def _check_tiers(tiers: TieredTree, nodes: set[Node]) -> None:
    host = tiers.host
    free = set(host.free)
    if len(free) != len(host.free) or host.num_pinned != sum(pin > 0 for pin in host.pins) or host.nodes[0] is not None:
        raise AuditError("host blocks are free twice, or another number is pinned than counted")
    for host_id in range(1, host.num_blocks + 1):
        node = host.nodes[host_id]
        if (host_id in free) == (node is not None or host.pins[host_id] > 0):
            raise AuditError(f"host block {host_id} is free: {host_id in free}, pinned: {host.pins[host_id]}")
        if node is not None and (node.host_id != host_id or node not in nodes):
            raise AuditError(f"host block {host_id} holds a node that does not know it, or is not in the tree")
    on_host = {node for node in nodes if node.host_id}
    if on_host != {node for node in host.nodes if node is not None}:
        raise AuditError("nodes say that they are in host memory, and it does not")
    if set(host.cached) | set(host.saved) != on_host or set(host.cached) & set(host.saved):
        raise AuditError("the nodes in host memory are not those that are to go from there")
    if set(tiers.disk) != {node for node in nodes if node.disk_id} or len(tiers.disk) > tiers.num_disk_blocks:
        raise AuditError("the nodes on disk are not those that are to go from there, or too many")
    _check_order([node for node in (*host.saved, *host.cached) if not node.disk_id])
    _check_order(list(tiers.disk))
    for node in nodes:
        if not node.block_id and not node.host_id and not node.disk_id:
            raise AuditError(f"a node with tokens {node.key!r} is in the tree and nowhere else")
        if node.digest and (node.parent is None or node.digest != block_digest(node.parent.digest, node.key)):
            raise AuditError(f"a node with tokens {node.key!r} has another's name")
        if node.disk_id and len(node.digest) == 0:
            raise AuditError(f"a node with tokens {node.key!r} is on disk and has no name")
        if node.readers is not None and not node.host_id:
            raise AuditError(f"a node with tokens {node.key!r} is read from disk to nowhere")
    for namespace, root in tiers.roots.items():
        if root.digest != namespace_digest(namespace) or root.digest in tiers.restored:
            raise AuditError(f"namespace {namespace} has another's digest, or is restored besides")
    if any(root.namespace is not None or root.num_users or not root.children for root in tiers.restored.values()):
        raise AuditError("a restored root has a namespace or users, or needs no place")


def _check_order(order: list[Node]) -> None:
    """Each node goes before those above it."""
    gone: set[Node] = set()
    for node in order:
        above = node.parent
        while above is not None:
            if above in gone:
                raise AuditError(f"a block at depth {above.depth} is to go before one below it")
            above = above.parent
        gone.add(node)


def _check_tree(manager: BlockManager) -> set[Node]:
    """Returns all nodes."""
    pool, tree = manager.pool, manager.tree
    seen: set[Node] = set()
    roots = list(tree.roots.values())
    if manager.tiers is not None:
        roots += manager.tiers.restored.values()
    for namespace, root in tree.roots.items():
        if root.namespace != namespace or not (root.children or root.num_users):
            raise AuditError(f"namespace {namespace} has a root that is not its own, or needs none")
    for root in roots:
        below: list[Node] = [root]
        while below:
            node = below.pop()
            _check_children(manager, node)
            below += node.children.values()
            seen.update(node.children.values())
    if {node for node in seen if node.block_id} != {node for node in tree.nodes if node is not None}:
        raise AuditError("the tree's nodes are not those that the blocks name")
    users = Counter(place.root for place in manager.places.values())
    if any(root.num_users != users[root] for root in tree.roots.values()) or set(users) - set(tree.roots.values()):
        raise AuditError("the roots count other users than there are")
    to_evict = [*manager.tiers.saved, *tree.cached] if manager.tiers is not None else list(tree.cached)
    evicted_before: set[Node] = set()
    for node in to_evict:
        on_device = {child for child in node.children.values() if child.block_id}
        if pool.ref_counts[node.block_id] or on_device - evicted_before:
            raise AuditError(f"block {node.block_id} is to be evicted and has an owner, or before those below it")
        evicted_before.add(node)
    return seen


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
        if child.block_id and tree.nodes[child.block_id] is not child:
            raise AuditError(f"block {child.block_id} is in the tree and does not name its node")
        if not 0 < len(key) <= whole or (len(key) < whole and child.children):
            raise AuditError(
                f"block {child.block_id} holds {len(key)} bytes of tokens and has {len(child.children)} more"
            )
        if child.block_id and not node.is_on_device and child.arrival is None:
            raise AuditError(f"block {child.block_id} is on the device and the one above it is not")
        if child.arrival is not None and (child.arrival.block_id != child.block_id or not child.is_copying):
            raise AuditError(f"block {child.block_id} arrives elsewhere")
        if child.arrival is not None and not node.is_on_device and node.arrival is None:
            raise AuditError(f"block {child.block_id} arrives, and the one above it does not")
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
        held = manager.tree.nodes[sequence.block_table[index]]
        if held is not None and not (sequence.is_fetching and held.arrival is not None):
            raise AuditError(f"{name} may write into block {sequence.block_table[index]}, which is in the tree")
