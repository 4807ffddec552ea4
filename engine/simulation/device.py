"""A simulated device: KV memory with content, and the checks of what a plan and a transfer promise.

Has no clock: a step's effects are there when it was computed, and who uses the device says when its tokens are. That is
enough, since steps run in the order of their launch and a transfer in between may not touch what they touch.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from engine.plan import NewSequence, ScheduledSequence, StepLoad, StepPlan, StepTokens
from engine.simulation.simulated_model import NOTHING, SimulatedModel, num_tokens_before, start_of, value_after
from engine.transfer import StoredBlock, Transfer, TransferKind

_DEVICE_KINDS: Final = (TransferKind.DEVICE_TO_HOST, TransferKind.HOST_TO_DEVICE)


class PlanViolation(AssertionError):
    """A plan or a transfer breaks a promise that it makes to the executor."""


@dataclass(slots=True)
class Known:
    """What the device keeps of one sequence."""

    facts: NewSequence
    table: list[int] = field(default_factory=list)
    num_computed: int = 0
    tokens: list[int] = field(default_factory=list)
    """By position, all tokens ever put in or sampled, -1 where it was told none: a recomputation must bring the
    same."""
    sampled_in_step: int = -1
    is_preempted: bool = False
    num_prompt_told: int = 1
    """Index of the prompt's first token whose log probabilities are still to be told."""


FailureRule = Callable[[Known], str]
"""Why no token can be sampled behind the num_computed ones of a sequence; empty: it can."""


class SimulatedDisk:
    """Blocks on a disk, which outlives the device. Damaged ones are found by their checksum when they are read."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, tuple[StoredBlock, array[int]]] = {}
        """By digest, oldest use first."""
        self.damaged: set[bytes] = set()
        self.rejected: set[bytes] = set()
        """Digests of which the next write finds no room."""
        self.is_full = False
        """No write finds room."""

    def read(self, block: StoredBlock) -> "array[int] | None":
        """None, and the block is gone, if it is damaged or not there."""
        record = self.blocks.pop(block.digest, None)
        if record is None or block.digest in self.damaged:
            self.damaged.discard(block.digest)
            return None
        if record[0] != block:
            raise PlanViolation(f"the disk has {record[0]} under this digest and is asked for {block}")
        self.blocks[block.digest] = record
        return record[1]

    def write(self, block: StoredBlock, values: "array[int]") -> bool:
        """Whether there was room."""
        if self.is_full or block.digest in self.rejected:
            self.rejected.discard(block.digest)
            return False
        self.blocks.pop(block.digest, None)
        self.damaged.discard(block.digest)
        self.blocks[block.digest] = block, values
        return True

    def drop(self, block: StoredBlock) -> None:
        self.blocks.pop(block.digest, None)
        self.damaged.discard(block.digest)

    def stored(self) -> list[StoredBlock]:
        """What a start finds, each behind its parent, oldest use first. What lost its parent is removed."""
        listed: dict[bytes, StoredBlock] = {}
        waiting = [block for block, _ in self.blocks.values()]
        while waiting:
            left = []
            for block in waiting:
                if block.depth == 1 or block.parent_digest in listed:
                    listed[block.digest] = block
                else:
                    left.append(block)
            if len(left) == len(waiting):
                for block in left:
                    self.drop(block)
                break
            waiting = left
        return list(listed.values())


class SimulatedDevice:
    """Computes plans and copies blocks. Raises PlanViolation for what breaks a promise.

    With max_num_batched_tokens 0 no limit is checked. `failure_rule` says for which sequences no token can be sampled,
    `namespace_of` which may share blocks.
    """

    def __init__(
        self,
        model: SimulatedModel,
        num_blocks: int,
        block_size: int,
        *,
        max_in_flight: int = 1,
        max_num_batched_tokens: int = 0,
        num_host_blocks: int = 0,
        num_disk_blocks: int = 0,
        disk: SimulatedDisk | None = None,
        failure_rule: FailureRule | None = None,
        namespace_of: Callable[[NewSequence], tuple[str, str]] = lambda facts: ("", ""),
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.max_in_flight = max_in_flight
        self.max_num_batched_tokens = max_num_batched_tokens
        self.failure_rule = failure_rule
        self._namespace_of = namespace_of
        self.num_disk_blocks = num_disk_blocks
        self.disk = disk if disk is not None else SimulatedDisk()
        self._blank: array[int] = array("Q", [NOTHING]) * block_size
        """Stands for every block that holds nothing; never written."""
        self.memory: list[array[int]] = [self._blank] * num_blocks
        self.host: list[array[int]] = [self._blank] * (num_host_blocks + 1)
        self.known: dict[int, Known] = {}
        """By sequence id."""
        self._owners: Counter[int] = Counter()
        self._forgotten: set[int] = set()
        self._last_step = -1
        self._running: dict[int, Transfer] = {}
        self._sources: dict[tuple[bool, int], list[Transfer]] = {}
        """(is in host memory, block) → running transfers that read it."""
        self._destinations: dict[tuple[bool, int], list[Transfer]] = {}
        """(is in host memory, block) → running transfers that write it."""

    # steps

    def compute(self, plan: StepPlan) -> StepTokens:
        self._check_plan(plan)
        for sequence_id in plan.finished_sequence_ids:
            if sequence_id not in self.known:
                raise PlanViolation(f"sequence {sequence_id} is finished and was never new, or is finished twice")
            self._drop_table(self.known.pop(sequence_id))
            self._forgotten.add(sequence_id)
        for sequence_id in plan.preempted_sequence_ids:
            known = self.known[sequence_id]
            self._drop_table(known)
            known.is_preempted = True
        for facts in plan.new_sequences:
            if facts.sequence_id in self.known or facts.sequence_id in self._forgotten:
                raise PlanViolation(f"sequence {facts.sequence_id} is new twice")
            self.known[facts.sequence_id] = Known(facts, tokens=self._told_tokens(facts))
        if plan.block_copies:
            self._copy_blocks(plan.block_copies)
        new_ids = {facts.sequence_id for facts in plan.new_sequences}
        for entry in plan.scheduled:
            self._extend_table(entry, entry.sequence_id in new_ids, plan.readmitted_sequence_ids)
        if self._destinations:
            for entry in plan.scheduled:
                for block_id in self.known[entry.sequence_id].table:
                    self._check_touched(block_id, f"sequence {entry.sequence_id} of step {plan.step}")
        for entry in plan.scheduled:
            self._write(entry)
        tokens = StepTokens([])
        for entry in plan.scheduled:
            if self.known[entry.sequence_id].facts.tells_prompt:
                self._tell_prompt(entry, tokens)
        for entry in plan.scheduled:
            if entry.samples:
                self._sample(entry, plan.step, tokens)
        self._last_step = plan.step
        return tokens

    def _told_tokens(self, facts: NewSequence) -> list[int]:
        """The tokens that a new sequence comes with. Later chunks must bring the same."""
        is_needed = facts.sampling.has_penalties or facts.tells_prompt
        if is_needed and len(facts.token_ids) < facts.num_prompt:
            raise PlanViolation(
                f"sequence {facts.sequence_id} has a prompt of {facts.num_prompt} tokens, whose ids are needed and of "
                f"which {len(facts.token_ids)} were told"
            )
        return facts.token_ids.copy()

    def _check_plan(self, plan: StepPlan) -> None:
        ids = [entry.sequence_id for entry in plan.scheduled]
        if not ids or len(set(ids)) != len(ids):
            raise PlanViolation(f"step {plan.step} is empty or has a sequence twice: {ids}")
        if plan.step <= self._last_step:
            raise PlanViolation(f"step {plan.step} came after step {self._last_step}")
        total = sum([entry.num_tokens for entry in plan.scheduled])
        num_prefills = sum([entry.is_prefill for entry in plan.scheduled])
        counted = (plan.total_num_scheduled_tokens, plan.num_prefill_requests, plan.num_decode_requests)
        if counted != (total, num_prefills, len(ids) - num_prefills):
            raise PlanViolation(f"step {plan.step} counts {counted}, holds {total} tokens and {num_prefills} prefills")
        if plan.load != load_of(plan):
            raise PlanViolation(f"step {plan.step} says its load is {plan.load}, it is {load_of(plan)}")
        if self.max_num_batched_tokens and total > self.max_num_batched_tokens and len(ids) > 1:
            raise PlanViolation(f"step {plan.step} has {total} tokens, over {self.max_num_batched_tokens}")
        if any(early.is_prefill and not late.is_prefill for early, late in pairwise(plan.scheduled)):
            raise PlanViolation(f"step {plan.step} has a decode after a prefill")

    def _drop_table(self, known: Known) -> None:
        self._owners.subtract(known.table)
        known.table = []
        known.num_computed = 0

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        sources, destinations = {source for source, _ in copies}, [destination for _, destination in copies]
        if sources & set(destinations) or len(set(destinations)) != len(destinations):
            raise PlanViolation(f"a block is copied and overwritten at once: {copies}")
        for source, destination in copies:
            if not self.memory[source][0]:
                raise PlanViolation(f"block {source} is copied and holds nothing")
            if self._owners[destination] or not destination:
                raise PlanViolation(f"block {destination} is overwritten by a copy and has an owner or is block 0")
            self._check_touched(source, "a copy")
            self._check_written(destination, "a copy")
            self.memory[destination] = self.memory[source][:]

    def _extend_table(self, entry: ScheduledSequence, is_new: bool, readmitted_ids: list[int]) -> None:
        known = self.known.get(entry.sequence_id)
        if known is None:
            raise PlanViolation(f"sequence {entry.sequence_id} is scheduled and was never new, or is finished")
        if known.is_preempted != (entry.sequence_id in readmitted_ids):
            raise PlanViolation(
                f"sequence {entry.sequence_id}: preempted {known.is_preempted}, readmitted {readmitted_ids}"
            )
        if is_new or known.is_preempted:
            known.num_computed = entry.start
            self._check_shared(entry)
            known.is_preempted = False
        if entry.start != known.num_computed:
            raise PlanViolation(
                f"sequence {entry.sequence_id} starts at {entry.start} and has {known.num_computed} computed"
            )
        new_ids = entry.new_block_ids
        if new_ids:
            if 0 in new_ids or len({*known.table, *new_ids}) != len(known.table) + len(new_ids):
                raise PlanViolation(f"sequence {entry.sequence_id}: block 0 or a block twice in its table")
            known.table.extend(new_ids)
            self._owners.update(new_ids)

    def _check_shared(self, entry: ScheduledSequence) -> None:
        """A sequence that starts behind its first token starts behind tokens that are there, in their places."""
        size = self.block_size
        for start, block_id in zip(range(0, entry.start, size), entry.new_block_ids, strict=False):
            num_tokens = min(size, entry.start - start)
            found = [num_tokens_before(value) for value in self.memory[block_id][:num_tokens]]
            if found != list(range(start, start + num_tokens)):
                raise PlanViolation(
                    f"sequence {entry.sequence_id} starts at {entry.start}, but its block {block_id} holds positions "
                    f"{found}"
                )

    def _write(self, entry: ScheduledSequence) -> None:
        known = self.known[entry.sequence_id]
        token_ids = entry.token_ids
        if not token_ids:
            if entry.num_tokens != 1 or self.max_in_flight < 2 or known.sampled_in_step != self._last_step:
                raise PlanViolation(
                    f"sequence {entry.sequence_id} is to take its token from the device, which was sampled in step "
                    f"{known.sampled_in_step}; the last one was {self._last_step}"
                )
            token_ids = known.tokens[entry.start : entry.start + 1]
        if len(token_ids) != entry.num_tokens or not token_ids:
            raise PlanViolation(f"sequence {entry.sequence_id} has {len(token_ids)} ids for {entry.num_tokens} tokens")
        size, start, table = self.block_size, entry.start, known.table
        end = start + len(token_ids)
        if end > len(table) * size:
            raise PlanViolation(f"sequence {entry.sequence_id} has no block for position {len(table) * size}")
        if start:
            before = self.memory[table[(start - 1) // size]][(start - 1) % size]
        else:
            before = start_of(self._namespace_of(known.facts))
        if not before:
            raise PlanViolation(f"sequence {entry.sequence_id} starts at {start}, and nothing is written before it")
        for first in range(start - start % size, end, size):
            block_id = table[first // size]
            if self._owners[block_id] != 1:
                raise PlanViolation(
                    f"sequence {entry.sequence_id} writes into block {block_id} of {self._owners[block_id]} owners"
                )
            self._check_written(block_id, f"sequence {entry.sequence_id}")
            values = self.memory[block_id]
            if values is self._blank:
                values = self.memory[block_id] = self._blank[:]
            for position in range(max(start, first), min(end, first + size)):
                before = values[position - first] = value_after(before, token_ids[position - start])
        self._remember(known, start, token_ids)
        known.num_computed = end

    def _remember(self, known: Known, start: int, token_ids: list[int]) -> None:
        tokens = known.tokens
        if start > len(tokens):
            tokens.extend([-1] * (start - len(tokens)))
        had = tokens[start : start + len(token_ids)]
        for place, (old, new) in enumerate(zip(had, token_ids, strict=False)):
            if old not in (new, -1):
                raise PlanViolation(f"sequence {known.facts.sequence_id} had {old} at {start + place}, now has {new}")
        tokens[start : start + len(token_ids)] = token_ids

    def _sample(self, entry: ScheduledSequence, step: int, tokens: StepTokens) -> None:
        """Read all earlier tokens back through the table and sample the next."""
        known = self.known[entry.sequence_id]
        facts, end = known.facts, known.num_computed
        blocks = [self.memory[block_id] for block_id in known.table[: -(-end // self.block_size)]]
        values = b"".join(blocks)[: end * self._blank.itemsize]
        known.sampled_in_step = step
        token_id = -1
        if self.failure_rule is not None and (reason := self.failure_rule(known)):
            tokens.failed[entry.sequence_id] = reason
        elif facts.sampling.beam_width:
            tokens.candidates[entry.sequence_id] = self.model.candidates(values, facts)
        else:
            token_id, _ = self.model.sample(values, facts)
            if facts.sampling.ranks_choices or facts.sampling.logprobs >= 0:
                num_top = max(0, facts.sampling.logprobs)
                tokens.logprobs[entry.sequence_id] = self.model.logprobs([token_id], end, num_top)
        tokens.token_ids.append(token_id)
        if end == len(known.tokens):
            known.tokens.append(token_id)
        elif known.tokens[end] != token_id and not facts.sampling.beam_width:
            raise PlanViolation(f"sequence {entry.sequence_id} sampled position {end} twice, with another token")

    def _tell_prompt(self, entry: ScheduledSequence, tokens: StepTokens) -> None:
        """Log probabilities of the prompt's tokens behind those of this chunk that this sequence has not yet told of.
        Another choice may have told of what it leaves out."""
        known = self.known[entry.sequence_id]
        facts = known.facts
        start = max(entry.start + 1, known.num_prompt_told)
        end = min(known.num_computed + 1, facts.num_prompt)
        if start < end:
            values = self.model.logprobs(facts.token_ids[start:end], start, facts.sampling.prompt_logprobs)
            tokens.prompt_logprobs[entry.sequence_id] = start, values
            known.num_prompt_told = end

    def spoil(self, block_ids: Iterable[int]) -> None:
        """Wipe blocks that are free, so that a later read shows. The device cannot know which blocks without an owner
        are free and which are kept for others to share."""
        for block_id in block_ids:
            if self._owners[block_id]:
                raise PlanViolation(f"block {block_id} is free and has an owner")
            if (False, block_id) in self._sources or (False, block_id) in self._destinations:
                raise PlanViolation(f"block {block_id} is free while a transfer touches it")
            self.memory[block_id] = self._blank

    # transfers

    def _check_touched(self, block_id: int, who: str) -> None:
        if (False, block_id) in self._destinations:
            raise PlanViolation(f"{who} reads block {block_id}, which a transfer still writes")

    def _check_written(self, block_id: int, who: str) -> None:
        if self._sources and (False, block_id) in self._sources:
            raise PlanViolation(f"{who} writes into block {block_id}, which a transfer still reads")
        self._check_touched(block_id, who)

    def begin(self, transfer: Transfer) -> None:
        """A transfer has been asked for. Until `finish` its destinations hold nothing.

        Copies between device and host memory are done in their order, so one may read what an earlier one writes, and
        write what an earlier one reads. The disk's order is its own.
        """
        name = f"transfer {transfer.transfer_id} ({transfer.kind.name})"
        if transfer.transfer_id in self._running:
            raise PlanViolation(f"{name} is started twice")
        self._check_lists(transfer, name)
        sources, destinations = self._ends(transfer)
        if len(set(destinations)) != len(destinations) or not set(sources).isdisjoint(destinations):
            raise PlanViolation(f"{name} writes a block twice, or one that it reads")
        for end in sources:
            writers = self._destinations.get(end, [])
            if not writers and not self._at(end)[0]:
                raise PlanViolation(f"{name} reads {_named(end)}, which holds nothing")
            for writer in writers:
                if not _are_in_order(writer, transfer):
                    raise PlanViolation(f"{name} reads {_named(end)}, which transfer {writer.transfer_id} writes")
        for end in destinations:
            others = self._sources.get(end, []) + self._destinations.get(end, [])
            if not all(_are_in_order(other, transfer) for other in others):
                raise PlanViolation(f"{name} writes {_named(end)}, which another transfer touches")
            if not others:
                self._put(end, self._blank)
        for end in destinations:
            self._destinations.setdefault(end, []).append(transfer)
        for end in sources:
            self._sources.setdefault(end, []).append(transfer)
        self._running[transfer.transfer_id] = transfer

    def finish(self, transfer: Transfer) -> list[int]:
        """Make the copies, now. Returns the indices of those that failed."""
        del self._running[transfer.transfer_id]
        sources, destinations = self._ends(transfer)
        failed: list[int] = []
        for index, end in enumerate(destinations):
            _take_away(self._destinations, end, transfer)
            if transfer.kind is TransferKind.DISK_TO_HOST:
                values = self.disk.read(transfer.stored[index])
                if values is None:
                    failed.append(index)
                    continue
            else:
                values = self._at(sources[index])
                if not values[0]:
                    raise PlanViolation(f"{_named(sources[index])} was lost while transfer {transfer.transfer_id} ran")
            self._put(end, values[:])
        for index, end in enumerate(sources):
            _take_away(self._sources, end, transfer)
            kind = transfer.kind
            if kind is TransferKind.HOST_TO_DISK and not self.disk.write(transfer.stored[index], self._at(end)[:]):
                failed.append(index)
        if len(self.disk.blocks) > self.num_disk_blocks:
            raise PlanViolation(f"{len(self.disk.blocks)} blocks are on disk, {self.num_disk_blocks} may be")
        if transfer.kind is TransferKind.DROP_FROM_DISK:
            for block in transfer.stored:
                self.disk.drop(block)
        return failed

    def _check_lists(self, transfer: Transfer, name: str) -> None:
        kind = transfer.kind
        lengths = (len(transfer.block_ids), len(transfer.host_ids), len(transfer.stored))
        count = max(lengths)
        wanted = (
            count if kind in _DEVICE_KINDS else 0,
            0 if kind is TransferKind.DROP_FROM_DISK else count,
            0 if kind in _DEVICE_KINDS else count,
        )
        if not count or lengths != wanted:
            raise PlanViolation(f"{name} has {lengths} blocks on device, in host memory and on disk")
        if not all(0 < block_id < len(self.memory) for block_id in transfer.block_ids):
            raise PlanViolation(f"{name} names block 0 or one beyond the pool: {transfer.block_ids}")
        if not all(0 < host_id < len(self.host) for host_id in transfer.host_ids):
            raise PlanViolation(f"{name} names host block 0 or one beyond host memory: {transfer.host_ids}")

    def _ends(self, transfer: Transfer) -> tuple[list[tuple[bool, int]], list[tuple[bool, int]]]:
        """(sources, destinations) outside the disk."""
        on_device = [(False, block_id) for block_id in transfer.block_ids]
        in_host = [(True, host_id) for host_id in transfer.host_ids]
        match transfer.kind:
            case TransferKind.DEVICE_TO_HOST:
                return on_device, in_host
            case TransferKind.HOST_TO_DEVICE:
                return in_host, on_device
            case TransferKind.HOST_TO_DISK:
                return in_host, []
            case TransferKind.DISK_TO_HOST:
                return [], in_host
            case TransferKind.DROP_FROM_DISK:
                return [], []

    def _at(self, end: tuple[bool, int]) -> "array[int]":
        return self.host[end[1]] if end[0] else self.memory[end[1]]

    def _put(self, end: tuple[bool, int], values: "array[int]") -> None:
        if end[0]:
            self.host[end[1]] = values
        else:
            self.memory[end[1]] = values


def load_of(plan: StepPlan) -> StepLoad:
    """What a plan costs the device, counted from its entries."""
    prefills = [(entry.start, entry.num_tokens) for entry in plan.scheduled if entry.is_prefill]
    decodes = [entry.start + 1 for entry in plan.scheduled if not entry.is_prefill]
    return StepLoad(
        num_prefill_tokens=sum([count for _, count in prefills]),
        num_prefill_pairs=sum([count * start + count * (count + 1) // 2 for start, count in prefills]),
        num_decodes=len(decodes),
        num_decode_kv_tokens=sum(decodes),
        num_prefills=len(prefills),
        num_prefill_kv_tokens=sum([start for start, _ in prefills]),
    )


def _are_in_order(first: Transfer, second: Transfer) -> bool:
    return first.kind in _DEVICE_KINDS and second.kind in _DEVICE_KINDS


def _take_away(transfers: dict[tuple[bool, int], list[Transfer]], end: tuple[bool, int], transfer: Transfer) -> None:
    transfers[end].remove(transfer)
    if not transfers[end]:
        del transfers[end]


def _named(end: tuple[bool, int]) -> str:
    return f"{'host block' if end[0] else 'block'} {end[1]}"
