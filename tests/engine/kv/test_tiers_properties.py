"""The tiers against a model of all memory: sequences come, go on, fork, lose their blocks and end in any order, while
transfers finish in any order that the executor may choose, the disk fails, and the engine starts anew."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.kv.audit import audit
from engine.kv.block_manager import BlockManager
from engine.kv.tiers import TierSizes
from engine.sequence import Sequence
from streamkv.protocol import pack_ids
from tests.engine.kv.memory_model import MemoryModel, make_sequence
from tests.support.examples import examples

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class TiersMachine(RuleBasedStateMachine):
    """So few different tokens, and so little memory, make everything meet everywhere."""

    @initialize(
        num_blocks=st.integers(2, 16),
        block_size=st.integers(1, 4),
        num_host_blocks=st.integers(1, 12),
        num_disk_blocks=st.integers(0, 16),
    )
    def start(self, num_blocks: int, block_size: int, num_host_blocks: int, num_disk_blocks: int) -> None:
        self.sizes = num_blocks, block_size, num_host_blocks, num_disk_blocks
        self.manager = BlockManager(num_blocks, block_size, tiers=TierSizes(num_host_blocks, num_disk_blocks))
        self.memory = MemoryModel(self.manager)
        self.live: list[Sequence] = []
        self.num_sequences = 0

    @rule(
        arrivals=st.lists(
            st.tuples(TOKENS, st.sampled_from("aab"), st.integers(1, 14), st.booleans()), min_size=1, max_size=3
        ),
        data=st.data(),
    )
    def arrive(self, arrivals: list[tuple[list[int], str, int, bool]], data: st.DataObject) -> None:
        parts = []
        for tokens, salt, chunk, fetches in arrivals:
            sequence = make_sequence(self.num_sequences, tokens, salt)
            self.num_sequences += 1
            self.live.append(sequence)
            parts.append((sequence, chunk, fetches))
        self._plan(parts, data)

    @precondition(lambda self: self.live)
    @rule(tokens=TOKENS, fetches=st.booleans(), data=st.data())
    def append(self, tokens: list[int], fetches: bool, data: st.DataObject) -> None:
        """As a decode does, a token at a time; or as the last chunk of a prefill that another plan began."""
        sequence = self._pick(data)
        sequence.token_ids = sequence.token_ids + tokens
        for _ in tokens:
            self._plan([(sequence, 1, fetches)], data)

    @precondition(lambda self: self.live)
    @rule(
        parts=st.lists(st.tuples(st.integers(1, 14), st.booleans()), min_size=1, max_size=3),
        data=st.data(),
    )
    def go_on(self, parts: list[tuple[int, bool]], data: st.DataObject) -> None:
        first = data.draw(st.integers(0, len(self.live) - 1))
        sequences = self.live[first:] + self.live[:first]
        self._plan([(sequence, *part) for sequence, part in zip(sequences, parts, strict=False)], data)

    @precondition(lambda self: self.live)
    @rule(tokens=TOKENS, data=st.data())
    def fork(self, tokens: list[int], data: st.DataObject) -> None:
        """A choice that shares what its sibling has computed, and goes on in its own way."""
        parent = self._pick(data)
        if not parent.num_computed or parent.is_fetching:
            return
        shared = data.draw(st.integers(1, parent.num_computed))
        child = make_sequence(self.num_sequences, parent.token_ids[:shared] + tokens, parent.request.cache_salt)
        self.num_sequences += 1
        if self.manager.num_needed_after(shared, len(child.token_ids)) > self.manager.num_available_blocks:
            return
        self.manager.fork(parent, child, shared)
        self.live.append(child)
        self._plan([(child, len(tokens), False)], data)

    @precondition(lambda self: self.live)
    @rule(swaps=st.booleans(), data=st.data())
    def preempt(self, swaps: bool, data: st.DataObject) -> None:
        self._preempt(self._pick(data), swaps)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        sequence = self._pick(data)
        self.manager.forget(sequence)
        self.live.remove(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), drops_all=st.booleans())
    def fail(self, data: st.DataObject, drops_all: bool) -> None:
        """Something in a sequence's KV was no number."""
        sequence = self._pick(data)
        self.manager.forget(sequence)
        self.live.remove(sequence)
        self.manager.drop_cached(None if drops_all else sequence)
        again = make_sequence(-1, [*sequence.token_ids, 7], sequence.request.cache_salt)
        match = self.manager.find(again)
        assert not match.node.depth or self.manager.pool.ref_counts[match.node.block_id]
        for node in [match.source, *match.offloaded]:
            if node is not None:
                wanted = pack_ids(sequence.token_ids[(node.depth - 1) * self.manager.block_size :])
                is_on_path = node.key.startswith(wanted) or wanted.startswith(node.key)
                assert not is_on_path or self.manager.pool.ref_counts[node.block_id]
        self.manager.forget(again)

    @precondition(lambda self: self.memory.device_queue)
    @rule(count=st.integers(1, 4))
    def copy(self, count: int) -> None:
        for _ in range(min(count, len(self.memory.device_queue))):
            self.memory.finish(is_disk=False)

    @precondition(lambda self: self.memory.disk_queue)
    @rule(has_room=st.integers(0, 9), count=st.integers(1, 4))
    def access_disk(self, has_room: int, count: int) -> None:
        for _ in range(min(count, len(self.memory.disk_queue))):
            self.memory.finish(is_disk=True, has_room=lambda index: index != has_room)

    @rule()
    def look(self) -> None:
        self.memory.start(self.manager.take_transfers())

    @precondition(lambda self: self.memory.disk)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        self.memory.damaged.add(data.draw(st.sampled_from(sorted(self.memory.disk))))

    @rule(flushes=st.booleans(), num_finished=st.integers(0, 30), orphan=st.integers(0, 20))
    def start_anew(self, flushes: bool, num_finished: int, orphan: int) -> None:
        """All sequences end, what can be is written to disk for a while, and another engine takes up the disk."""
        for sequence in self.live:
            self.manager.forget(sequence)
        self.live = []
        if flushes:
            self.manager.flush()
        self.memory.start(self.manager.take_transfers())
        for _ in range(num_finished):
            if not self.memory.device_queue and not self.memory.disk_queue:
                break
            self.memory.finish(not self.memory.device_queue, lambda index: index != orphan)
            self.memory.start(self.manager.take_transfers())
            audit(self.manager)
            self.memory.check([])
        num_blocks, block_size, num_host_blocks, num_disk_blocks = self.sizes
        for digest in sorted(self.memory.disk)[orphan : orphan + 1]:
            del self.memory.disk[digest]  # what lay below it has no parent
        disk, damaged = self.memory.disk, self.memory.damaged & set(self.memory.disk)
        tiers = TierSizes(num_host_blocks, num_disk_blocks, self.memory.stored())
        self.manager = BlockManager(num_blocks, block_size, tiers=tiers)
        self.memory = MemoryModel(self.manager, disk)
        self.memory.damaged = damaged

    @invariant()
    def all_memory_holds_what_tables_and_tree_say(self) -> None:
        if hasattr(self, "manager"):
            audit(self.manager)
            self.memory.check(self.live)

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for sequence in self.live:
            self.manager.forget(sequence)
        audit(self.manager)
        self.memory.finish_all()
        audit(self.manager)
        manager = self.manager
        assert manager.num_available_blocks == manager.pool.num_blocks - 1
        assert not manager.num_in_transfer_blocks and not manager.num_unfinished_transfers
        assert not manager.places and not manager.fetches
        assert not any(manager.tiers.host.pins)
        manager.drop_cached()
        self.memory.finish_all()
        audit(manager)
        assert manager.num_free_blocks == manager.pool.num_blocks - 1
        assert (manager.num_host_blocks, manager.num_disk_blocks) == (0, 0)
        assert not self.memory.disk

    def _pick(self, data: st.DataObject) -> Sequence:
        return self.live[data.draw(st.integers(0, len(self.live) - 1))]

    def _preempt(self, sequence: Sequence, swaps: bool) -> None:
        if swaps:
            self.manager.swap_out(sequence)
        else:
            self.manager.free(sequence)
        assert (sequence.block_table, sequence.num_computed, sequence.is_fetching) == ([], 0, False)

    def _plan(self, parts: list[tuple[Sequence, int, bool]], data: st.DataObject) -> None:
        """Compute up to so many tokens of each sequence for which there is room, as one plan, or begin to fetch."""
        manager = self.manager
        copies: list[tuple[int, int]] = []
        writes: list[tuple[Sequence, int, int]] = []
        for sequence, chunk, fetches in parts:
            if sequence.is_fetching:
                continue
            if not sequence.block_table:
                match = manager.find(sequence)
                end = match.num_tokens + match.num_offloaded_tokens
                assert end < len(sequence.token_ids)
                assert not (match.num_offloaded_tokens and match.source)
                if match.is_arriving:
                    assert manager.num_unfinished_transfers
                    continue
                fetches = fetches and match.num_offloaded_tokens > 0
                if not fetches:
                    end = min(match.num_tokens + chunk, len(sequence.token_ids))
                needed = manager.num_needed_after(match.num_tokens, end)
                if manager.num_available_blocks - manager.num_claimed(match) < needed:
                    # As a scheduler does, it takes blocks from another in between.
                    busy = {part[0] for part in parts}
                    others = [other for other in self.live if other.block_table and other not in busy]
                    if others:
                        self._preempt(others[data.draw(st.integers(0, len(others) - 1))], data.draw(st.booleans()))
                available = manager.num_available_blocks - manager.num_claimed(match)
                if needed > available:
                    continue
                if fetches:
                    manager.fetch(sequence, match)
                    continue
                if (copy := manager.share(sequence, match)) is not None:
                    copies.append(copy)
                    needed -= 1
                    available -= 1
                assert sequence.num_computed == match.num_tokens
                assert manager.num_available_blocks == available
            else:
                end = min(sequence.num_computed + chunk, len(sequence.token_ids))
                needed, available = manager.num_needed(sequence, end), manager.num_available_blocks
                if needed > available:
                    continue
                manager.publish(sequence)
                available = manager.num_available_blocks
            if end <= sequence.num_computed:
                continue
            if (copy := manager.allocate(sequence, end)) is not None:
                copies.append(copy)
            assert available - manager.num_available_blocks == needed
            writes.append((sequence, sequence.num_computed, end))
            sequence.num_computed = end
        self.memory.copy(copies)
        for sequence, start, end in writes:
            self.memory.write(sequence, start, end)
        manager.end_plan([sequence for sequence, _, _ in writes])
        if data.draw(st.booleans()):
            self.memory.start(manager.take_transfers())


TiersMachine.TestCase.settings = settings(max_examples=examples(60, 240), stateful_step_count=40, deadline=None)
TestTiers = TiersMachine.TestCase
