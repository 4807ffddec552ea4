"""An executor without a model: simulated KV memory in which every mistake of the scheduler shows.

Every computed token writes (token, position) into the slot that its block table gives. A sampled token is a function
of all earlier tokens, read back through the block table: a wrong block, slot or copy gives a wrong token. A plan that
breaks a promise of engine.plan raises PlanViolation, and so does a transfer that breaks one of engine.transfer's.
"""

import queue
import threading
import time
import zlib
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from engine.executor import DeviceLimits, ReportProgress
from engine.plan import NewSequence, ScheduledSequence, StepPlan, StepTokens
from engine.transfer import StoredBlock, Transfer, TransferKind, TransferResult
from streamkv.protocol import ModelFacts
from streamkv.sampling import SamplingParams
from tests.support.scripted_candidates import Candidates, likeliest, logprob

EosRule = Callable[[Sequence[int], int], bool]
"""(all earlier tokens, number of prompt tokens) → whether the next token is end-of-sequence."""


class PlanViolation(AssertionError):
    """The plan breaks a promise that it makes to the executor."""


class InjectedFault(RuntimeError):
    """What a step raises that was asked to fail."""


def end_after(num_output: int) -> EosRule:
    """The sequence says end-of-sequence after this many other tokens."""
    return lambda tokens, num_prompt: len(tokens) - num_prompt >= num_output


def end_one_in(odds: int) -> EosRule:
    """Each token is end-of-sequence with a chance of one in `odds`, by a hash of all earlier tokens."""
    return lambda tokens, num_prompt: zlib.crc32(array("i", tokens).tobytes(), 77) % odds == 0


Content = tuple["array[int]", "array[int]"]
"""Tokens and positions of a block."""


class ScriptedDisk:
    """What outlives an executor: blocks by their names. Shared by those that are made one after the other."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, tuple[StoredBlock, Content]] = {}
        """By digest, in the order in which they were written."""
        self.damaged: set[bytes] = set()
        """Digests of blocks that will be found unreadable."""
        self.is_full = False
        """Nothing more can be written."""

    def stored(self) -> list[StoredBlock]:
        """As DeviceLimits has it."""
        return sorted([block for block, _ in self.blocks.values()], key=lambda block: block.depth)


@dataclass(slots=True)
class _RunningTransfer:
    transfer: Transfer
    on_done: Callable[[], None]
    contents: list[Content | None]
    """Of the sources in memory when it began; of those on disk when it ended, None of what the disk could not give."""


@dataclass(slots=True)
class _Known:
    """What the executor keeps of one sequence."""

    facts: NewSequence
    table: list[int] = field(default_factory=list)
    num_computed: int = 0
    tokens: list[int] = field(default_factory=list)
    """By position, all tokens ever put in or sampled: a recomputation must bring the same."""
    sampled_in_step: int = -1
    is_preempted: bool = False


class ScriptedLaunch:
    """A step on its way."""

    def __init__(self, plan: StepPlan, on_done: Callable[[], None]) -> None:
        self.plan = plan
        self.on_done = on_done
        self.done = threading.Event()
        self.result: StepTokens | None = None
        self.fault: BaseException | None = None

    @property
    def is_done(self) -> bool:
        return self.done.is_set()


Job = ScriptedLaunch | tuple[Transfer, Callable[[], None]]
"""A step, or a transfer and whom to tell of its end."""


class ScriptedExecutor:
    """See the module. Implements engine.executor.Executor.

    With `threaded` steps run on a worker thread, else inside `launch`. `step_s` is slept in every step, `load_s` in
    `load`. `fail_at_step` raises InjectedFault in that step (counted from 0), `block_at_step` maps steps to seconds
    that they sleep in addition. A sequence that holds `poison_token` gets no token and is named failed.
    `max_num_batched_tokens` 0: no limit is checked. By default no token is end-of-sequence; `eos_rule` says which
    are.

    Transfers are finished when they begin, or after `transfer_s` on a thread of their own, or, with `holds_transfers`,
    by `finish_transfer`: those that touch the device in their order, those that touch only host memory and disk in
    theirs. Until then their destinations hold nothing.
    """

    def __init__(
        self,
        num_blocks: int = 256,
        block_size: int = 16,
        max_model_len: int = 2048,
        vocab_size: int = 1000,
        eos_token_ids: Sequence[int] = (2,),
        max_in_flight: int = 1,
        step_s: float = 0.0,
        load_s: float = 0.0,
        *,
        max_num_batched_tokens: int = 0,
        threaded: bool = True,
        eos_rule: EosRule | None = None,
        fail_at_step: int | None = None,
        poison_token: int | None = None,
        block_at_step: dict[int, float] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        num_host_blocks: int = 0,
        num_disk_blocks: int = 0,
        disk: ScriptedDisk | None = None,
        holds_transfers: bool = False,
        transfer_s: float = 0.0,
    ) -> None:
        self.max_in_flight = max_in_flight
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.eos_rule = eos_rule
        self.fail_at_step = fail_at_step
        self.poison_token = poison_token
        self.block_at_step = dict(block_at_step or {})
        self.num_steps = 0
        """Steps computed."""
        self._step_s, self._load_s, self._sleep = step_s, load_s, sleep
        self._tokens = array("i", [-1]) * (num_blocks * block_size)
        self._positions = array("i", [-1]) * (num_blocks * block_size)
        self.num_host_blocks = num_host_blocks
        self.num_disk_blocks = num_disk_blocks
        self.disk = disk or ScriptedDisk()
        self.disk_s = 0.001
        """What a block is said to take on its way from or to the disk."""
        self.started: list[Transfer] = []
        self._holds_transfers, self.transfer_s = holds_transfers, transfer_s
        self._host: dict[int, Content] = {}
        self._transfers: tuple[deque[_RunningTransfer], deque[_RunningTransfer]] = (deque(), deque())
        """Those that touch the device, and those that touch the disk."""
        self._finished: list[TransferResult] = []
        self._transfer_fault: PlanViolation | None = None
        self._transfer_lock = threading.RLock()
        self._read: Counter[tuple[str, int]] = Counter()
        """("device" or "host", block): running transfers that read it."""
        self._written: set[tuple[str, int]] = set()
        """The same: a running transfer writes it."""
        self._owners: Counter[int] = Counter()
        self._known: dict[int, _Known] = {}
        self._forgotten: set[int] = set()
        self._in_flight: deque[ScriptedLaunch] = deque()
        self._last_step = -1
        self._closed = False
        self._work: queue.SimpleQueue[Job | None] | None = None
        if threaded:
            self._work = queue.SimpleQueue()
            self._worker = threading.Thread(target=self._serve, args=(self._work,), name="scripted", daemon=True)
            self._worker.start()

    # engine.executor.Executor

    def load(self, report: ReportProgress) -> tuple[ModelFacts, DeviceLimits]:
        for percent in (0.0, 50.0, 100.0):
            report("loading weights", percent)
            if self._load_s and percent < 100.0:
                self._sleep(self._load_s / 2)
        facts = ModelFacts(
            name="scripted",
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=list(self.eos_token_ids),
            dtype="none",
            device="script",
        )
        budget = self.max_num_batched_tokens or 8192
        return facts, DeviceLimits(
            self.num_blocks,
            self.block_size,
            self.max_model_len,
            budget,
            num_host_blocks=self.num_host_blocks,
            num_disk_blocks=self.num_disk_blocks,
            stored=self.disk.stored(),
        )

    def launch(self, plan: StepPlan, on_done: Callable[[], None]) -> ScriptedLaunch:
        assert not self._closed, "launch after close"
        if len(self._in_flight) >= self.max_in_flight:
            raise PlanViolation(f"{len(self._in_flight)} steps are in flight, at most {self.max_in_flight} may be")
        launch = ScriptedLaunch(plan, on_done)
        self._in_flight.append(launch)
        if self._work is None:
            self._run(launch)
        else:
            self._work.put(launch)
        return launch

    def collect(self, launch: ScriptedLaunch) -> StepTokens:
        if self._in_flight[0] is not launch:
            raise PlanViolation(f"step {launch.plan.step} was collected before step {self._in_flight[0].plan.step}")
        launch.done.wait()
        self._in_flight.popleft()
        if launch.fault is not None:
            raise launch.fault
        assert launch.result is not None
        return launch.result

    def start_transfer(self, transfer: Transfer, on_done: Callable[[], None]) -> None:
        assert not self._closed, "start_transfer after close"
        self.started.append(transfer)
        if self._work is None:
            self._run_transfer(transfer, on_done)
        else:
            self._work.put((transfer, on_done))

    def _run_transfer(self, transfer: Transfer, on_done: Callable[[], None]) -> None:
        with self._transfer_lock:
            try:
                self._begin_transfer(transfer, on_done)
            except PlanViolation as violation:
                if self._work is None:
                    raise
                self._transfer_fault = violation
                on_done()
                return
        if self.transfer_s:
            threading.Timer(self.transfer_s, self.finish_transfer, [self._is_on_disk(transfer)]).start()
        elif not self._holds_transfers:
            self.finish_transfer(self._is_on_disk(transfer))

    def finished_transfers(self) -> list[TransferResult]:
        if self._transfer_fault is not None:
            raise self._transfer_fault
        with self._transfer_lock:
            results, self._finished = self._finished, []
        return results

    @property
    def num_transfers(self) -> int:
        """Started and not yet handed out as finished."""
        return len(self._transfers[0]) + len(self._transfers[1]) + len(self._finished)

    def finish_transfer(self, is_on_disk: bool) -> bool:
        """Finish the oldest transfer of those that touch the device, or of those that touch the disk; False: there is
        none."""
        with self._transfer_lock:
            transfers = self._transfers[is_on_disk]
            if not transfers:
                return False
            running = transfers.popleft()
            self._finished.append(self._end_transfer(running))
        running.on_done()
        return True

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._work is not None:
                self._work.put(None)
                self._worker.join()

    # what is right, computed without any block

    def next_token(self, tokens: Sequence[int], facts: NewSequence) -> int:
        """The token after `tokens`, by hash; end-of-sequence and stop ids are not sampled before min_tokens."""
        return self._sample(array("i", tokens), array("i", range(len(tokens))), facts)

    def expected_tokens(
        self,
        prompt: Sequence[int],
        num_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        choice: int = 0,
    ) -> list[int]:
        """What a choice generates after `prompt`: num_tokens of them, or fewer if it ends before."""
        return self.expected_output(prompt, sampling, choice, num_tokens)[0]

    def expected_output(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        choice: int = 0,
        num_tokens: int | None = None,
    ) -> tuple[list[int], str, str]:
        """(tokens, finish_reason, cause) of a choice; the reason is empty if num_tokens ends it first."""
        sampling = sampling or SamplingParams(seed=0, max_tokens=num_tokens or 1, temperature=0.0)
        eos = () if sampling.ignore_eos else self.eos_token_ids
        facts = NewSequence(0, choice, sampling, len(prompt), eos)
        max_len = min(self.max_model_len, (self.num_blocks - 1) * self.block_size, len(prompt) + sampling.max_tokens)
        tokens = list(prompt)
        while num_tokens is None or len(tokens) < len(prompt) + num_tokens:
            token = self.next_token(tokens, facts)
            tokens.append(token)
            if len(tokens) - len(prompt) > sampling.min_tokens:
                if token in eos:
                    return tokens[len(prompt) :], "stop", "eos"
                if token in sampling.stop_token_ids:
                    return tokens[len(prompt) :], "stop", "stop_id"
            if len(tokens) >= max_len:
                return tokens[len(prompt) :], "length", ""
        return tokens[len(prompt) :], "", ""

    def likeliest(self, tokens: "array[int]", positions: "array[int]", facts: NewSequence) -> Candidates:
        """The next tokens that beam search chooses from."""
        ends = self.eos_rule is not None and self.eos_rule(tokens, facts.num_prompt)
        return likeliest(tokens, positions, facts, self.vocab_size, ends)

    def _sample(self, tokens: "array[int]", positions: "array[int]", facts: NewSequence) -> int:
        sampling = facts.sampling
        banned: Sequence[int] = ()
        if len(tokens) - facts.num_prompt < sampling.min_tokens:
            banned = (*self.eos_token_ids, *sampling.stop_token_ids)
        elif self.eos_rule is not None and self.eos_rule(tokens, facts.num_prompt):
            return self.eos_token_ids[0]
        draw = 0 if sampling.is_greedy else sampling.seed * 131 + facts.choice + 1
        digest = zlib.crc32(positions.tobytes(), zlib.crc32(tokens.tobytes(), draw & 0xFFFFFFFF))
        token = digest % self.vocab_size
        while token in self.eos_token_ids or token in banned:
            token = (token + 1) % self.vocab_size
        return token

    # the device

    def _serve(self, work: "queue.SimpleQueue[Job | None]") -> None:
        while (job := work.get()) is not None:
            if isinstance(job, ScriptedLaunch):
                self._run(job)
            else:
                self._run_transfer(*job)

    def _run(self, launch: ScriptedLaunch) -> None:
        step = self.num_steps
        try:
            if pause_s := self._step_s + self.block_at_step.get(step, 0.0):
                self._sleep(pause_s)
            if step == self.fail_at_step:
                raise InjectedFault(f"step {step} was asked to fail")
            launch.result = self._compute(launch.plan)
        except BaseException as fault:
            launch.fault = fault
        self.num_steps += 1
        launch.done.set()
        launch.on_done()

    def _compute(self, plan: StepPlan) -> StepTokens:
        self._check_plan(plan)
        for sequence_id in plan.finished_sequence_ids:
            self._drop_table(self._known.pop(sequence_id))
            self._forgotten.add(sequence_id)
        for sequence_id in plan.preempted_sequence_ids:
            known = self._known[sequence_id]
            self._drop_table(known)
            known.is_preempted = True
        for facts in plan.new_sequences:
            if facts.sequence_id in self._known or facts.sequence_id in self._forgotten:
                raise PlanViolation(f"sequence {facts.sequence_id} is new twice")
            self._known[facts.sequence_id] = _Known(facts)
        self._copy_blocks(plan.block_copies)
        new_ids = {facts.sequence_id for facts in plan.new_sequences}
        for entry in plan.scheduled:
            self._extend_table(entry, entry.sequence_id in new_ids, plan.readmitted_sequence_ids)
        for entry in plan.scheduled:
            self._write(entry)
        tokens = StepTokens([])
        for entry in plan.scheduled:
            if entry.samples:
                tokens.token_ids.append(self._sample_entry(entry, plan.step, tokens))
        self._last_step = plan.step
        failed = {
            entry.sequence_id: "poisoned"
            for entry in plan.scheduled
            if entry.samples and self.poison_token in self._known[entry.sequence_id].tokens
        }
        tokens.failed.update(failed)
        return tokens

    def _check_plan(self, plan: StepPlan) -> None:
        ids = [entry.sequence_id for entry in plan.scheduled]
        if not ids or len(set(ids)) != len(ids):
            raise PlanViolation(f"step {plan.step} is empty or has a sequence twice: {ids}")
        if plan.step <= self._last_step:
            raise PlanViolation(f"step {plan.step} came after step {self._last_step}")
        total = sum(entry.num_tokens for entry in plan.scheduled)
        num_prefills = sum(entry.is_prefill for entry in plan.scheduled)
        counted = (plan.total_num_scheduled_tokens, plan.num_prefill_requests, plan.num_decode_requests)
        if counted != (total, num_prefills, len(ids) - num_prefills):
            raise PlanViolation(f"step {plan.step} counts {counted}, holds {total} tokens and {num_prefills} prefills")
        if self.max_num_batched_tokens and total > self.max_num_batched_tokens and len(ids) > 1:
            raise PlanViolation(f"step {plan.step} has {total} tokens, over {self.max_num_batched_tokens}")
        if any(early.is_prefill and not late.is_prefill for early, late in pairwise(plan.scheduled)):
            raise PlanViolation(f"step {plan.step} has a decode after a prefill")

    def spoil(self, block_ids: Iterable[int]) -> None:
        """Wipe blocks that are free, so that a later read shows. With no step on its way.

        The executor cannot know which blocks without an owner are free and which are kept for others to share.
        """
        nothing = array("i", [-1]) * self.block_size
        for block_id in block_ids:
            if self._owners[block_id]:
                raise PlanViolation(f"block {block_id} is free and has an owner")
            self._check_idle(block_id, "whoever is next", writes=True)
            start = block_id * self.block_size
            self._tokens[start : start + self.block_size] = nothing
            self._positions[start : start + self.block_size] = nothing

    # transfers

    @staticmethod
    def _is_on_disk(transfer: Transfer) -> bool:
        return transfer.kind not in (TransferKind.DEVICE_TO_HOST, TransferKind.HOST_TO_DEVICE)

    def _begin_transfer(self, transfer: Transfer, on_done: Callable[[], None]) -> None:
        """Look at the sources, wipe the destinations."""
        kind, name = transfer.kind, f"transfer {transfer.transfer_id}"
        touches_host = kind is not TransferKind.DROP_FROM_DISK
        num_blocks = len(transfer.stored) if self._is_on_disk(transfer) else len(transfer.block_ids)
        if not num_blocks or len(transfer.host_ids) != (num_blocks if touches_host else 0):
            raise PlanViolation(f"{name} has {num_blocks} blocks and {len(transfer.host_ids)} of host memory")
        if len(set(self._destinations(transfer))) != len(self._destinations(transfer)):
            raise PlanViolation(f"{name} writes a block twice: {self._destinations(transfer)}")
        contents: list[Content | None] = [self._content_then(place, transfer) for place in self._sources(transfer)]
        for place, content in zip(self._sources(transfer), contents, strict=True):
            if content is None or content[1][0] < 0:
                raise PlanViolation(f"{name} reads {place}, which holds nothing or which another still writes")
        for place in self._destinations(transfer):
            if place in self._written or self._read[place]:
                raise PlanViolation(f"{name} writes {place}, which another still touches")
            if place == ("device", 0):  # owners are not looked at: who lost blocks is told with the next plan only
                raise PlanViolation(f"{name} writes block 0")
        self._read.update(self._sources(transfer))
        for place in self._destinations(transfer):
            self._written.add(place)
            self._put(place, None)
        self._transfers[self._is_on_disk(transfer)].append(_RunningTransfer(transfer, on_done, contents))

    def _end_transfer(self, running: _RunningTransfer) -> TransferResult:
        transfer, failed = running.transfer, []
        for place, content in zip(self._sources(transfer), running.contents, strict=False):
            if self._content(place) != content:
                raise PlanViolation(f"{place} was changed while transfer {transfer.transfer_id} read it")
        self._read.subtract(self._sources(transfer))
        self._written.difference_update(self._destinations(transfer))
        if transfer.kind is TransferKind.DISK_TO_HOST:
            running.contents = [self._read_disk(block) for block in transfer.stored]
        elif transfer.kind is TransferKind.DROP_FROM_DISK:
            for block in transfer.stored:
                self.disk.blocks.pop(block.digest, None)
        elif transfer.kind is TransferKind.HOST_TO_DISK:
            for index, (block, content) in enumerate(zip(transfer.stored, running.contents, strict=True)):
                assert content is not None
                if self.disk.is_full:
                    failed.append(index)
                    continue
                self.disk.blocks.pop(block.digest, None)
                self.disk.blocks[block.digest] = block, content
                self.disk.damaged.discard(block.digest)
            if len(self.disk.blocks) > self.num_disk_blocks:
                raise PlanViolation(f"{len(self.disk.blocks)} blocks are on disk, {self.num_disk_blocks} may be")
        for index, (place, content) in enumerate(zip(self._destinations(transfer), running.contents, strict=False)):
            self._put(place, content)
            if content is None:
                failed.append(index)
        num_blocks = len(transfer.stored) or len(transfer.block_ids)
        elapsed_s = num_blocks * (self.disk_s if self._is_on_disk(transfer) else 0.0001)
        return TransferResult(transfer.transfer_id, failed, elapsed_s, 1000 * (num_blocks - len(failed)))

    def _sources(self, transfer: Transfer) -> list[tuple[str, int]]:
        """Places in memory, device or host."""
        if transfer.kind is TransferKind.DEVICE_TO_HOST:
            return [("device", block_id) for block_id in transfer.block_ids]
        if transfer.kind in (TransferKind.HOST_TO_DEVICE, TransferKind.HOST_TO_DISK):
            return [("host", host_id) for host_id in transfer.host_ids]
        return []

    def _destinations(self, transfer: Transfer) -> list[tuple[str, int]]:
        if transfer.kind is TransferKind.HOST_TO_DEVICE:
            return [("device", block_id) for block_id in transfer.block_ids]
        if transfer.kind in (TransferKind.DEVICE_TO_HOST, TransferKind.DISK_TO_HOST):
            return [("host", host_id) for host_id in transfer.host_ids]
        return []

    def _content(self, place: tuple[str, int]) -> Content:
        tier, block_id = place
        nothing = array("i", [-1]) * self.block_size
        if tier == "host":
            if not 1 <= block_id <= self.num_host_blocks:
                raise PlanViolation(f"there is no block {block_id} in host memory")
            return self._host.get(block_id, (nothing, nothing))
        start = block_id * self.block_size
        return self._tokens[start : start + self.block_size], self._positions[start : start + self.block_size]

    def _content_then(self, place: tuple[str, int], transfer: Transfer) -> Content | None:
        """What a place will hold when `transfer`, which is about to begin, reads it: those that touch the device are
        done in their order. None: nobody can tell."""
        if place not in self._written:
            return self._content(place)
        if not self._is_on_disk(transfer):
            for running in reversed(self._transfers[0]):
                if place in self._destinations(running.transfer):
                    return running.contents[self._destinations(running.transfer).index(place)]
        return None

    def _put(self, place: tuple[str, int], content: Content | None) -> None:
        tier, block_id = place
        nothing = array("i", [-1]) * self.block_size
        tokens, positions = content or (nothing, nothing)
        if tier == "host":
            self._content(place)
            self._host[block_id] = tokens, positions
        else:
            start = block_id * self.block_size
            self._tokens[start : start + self.block_size] = tokens
            self._positions[start : start + self.block_size] = positions

    def _read_disk(self, block: StoredBlock) -> Content | None:
        """None, and the block is gone, if it is damaged, foreign or not there."""
        found = self.disk.blocks.get(block.digest)
        if found is None or found[0] != block or block.digest in self.disk.damaged:
            self.disk.blocks.pop(block.digest, None)
            return None
        return found[1]

    def _check_idle(self, block_id: int, name: str, writes: bool) -> None:
        """A step may not read what a transfer writes, nor write what one touches."""
        place = "device", block_id
        if place in self._written or (writes and self._read[place]):
            raise PlanViolation(f"{name} touches block {block_id}, as a running transfer does")

    def _drop_table(self, known: _Known) -> None:
        self._owners.subtract(known.table)
        known.table = []
        known.num_computed = 0

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        sources, destinations = {source for source, _ in copies}, [destination for _, destination in copies]
        if sources & set(destinations) or len(set(destinations)) != len(destinations):
            raise PlanViolation(f"a block is copied and overwritten at once: {copies}")
        for source, destination in copies:
            self._check_idle(source, "a copy", writes=False)
            self._check_idle(destination, "a copy", writes=True)
            if self._positions[source * self.block_size] < 0:
                raise PlanViolation(f"block {source} is copied and holds nothing")
            if self._owners[destination] or not destination:
                raise PlanViolation(f"block {destination} is overwritten by a copy and has an owner or is block 0")
            src, dst, size = source * self.block_size, destination * self.block_size, self.block_size
            self._tokens[dst : dst + size] = self._tokens[src : src + size]
            self._positions[dst : dst + size] = self._positions[src : src + size]

    def _extend_table(self, entry: ScheduledSequence, is_new: bool, readmitted_ids: list[int]) -> None:
        known = self._known.get(entry.sequence_id)
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
        if 0 in entry.new_block_ids or len({*known.table, *entry.new_block_ids}) != len(known.table) + len(
            entry.new_block_ids
        ):
            raise PlanViolation(f"sequence {entry.sequence_id}: block 0 or a block twice in its table")
        known.table.extend(entry.new_block_ids)
        self._owners.update(entry.new_block_ids)

    def _check_shared(self, entry: ScheduledSequence) -> None:
        """A sequence that starts behind its first token starts behind tokens that are there, in their places."""
        size = self.block_size
        for start, block_id in zip(range(0, entry.start, size), entry.new_block_ids, strict=False):
            num_tokens = min(size, entry.start - start)
            found = self._positions[block_id * size : block_id * size + num_tokens]
            if found != array("i", range(start, start + num_tokens)):
                raise PlanViolation(
                    f"sequence {entry.sequence_id} starts at {entry.start}, but its block {block_id} holds positions "
                    f"{found.tolist()}"
                )

    def _write(self, entry: ScheduledSequence) -> None:
        known = self._known[entry.sequence_id]
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
        for position, token_id in enumerate(token_ids, entry.start):
            if position // self.block_size >= len(known.table):
                raise PlanViolation(f"sequence {entry.sequence_id} has no block for position {position}")
            block_id = known.table[position // self.block_size]
            if self._owners[block_id] != 1:
                raise PlanViolation(
                    f"sequence {entry.sequence_id} writes into block {block_id} of {self._owners[block_id]} owners"
                )
            self._check_idle(block_id, f"sequence {entry.sequence_id}", writes=True)
            slot = block_id * self.block_size + position % self.block_size
            self._tokens[slot] = token_id
            self._positions[slot] = position
            if position < len(known.tokens):
                if known.tokens[position] not in (token_id, -1):
                    raise PlanViolation(
                        f"sequence {entry.sequence_id} had {known.tokens[position]} at {position}, now has {token_id}"
                    )
                known.tokens[position] = token_id
            else:
                known.tokens.extend([-1] * (position - len(known.tokens)))
                known.tokens.append(token_id)
        known.num_computed += entry.num_tokens

    def _sample_entry(self, entry: ScheduledSequence, step: int, collected: StepTokens) -> int:
        """Read all earlier tokens back through the table and sample the next. Ranked ones get their probabilities."""
        known = self._known[entry.sequence_id]
        tokens, positions = array("i"), array("i")
        left = end = known.num_computed
        for block_id in known.table:
            self._check_idle(block_id, f"sequence {entry.sequence_id}", writes=False)
            size = min(left, self.block_size)
            start = block_id * self.block_size
            tokens.extend(self._tokens[start : start + size])
            positions.extend(self._positions[start : start + size])
            left -= size
        token, sampling = -1, known.facts.sampling
        if self.poison_token not in tokens and sampling.beam_width:
            collected.candidates[entry.sequence_id] = self.likeliest(tokens, positions, known.facts)
        elif self.poison_token not in tokens:
            token = self._sample(tokens, positions, known.facts)
            if sampling.ranks_choices:
                collected.logprobs[entry.sequence_id] = logprob(tokens, token)
        if end < len(known.tokens):
            if known.tokens[end] != token:
                raise PlanViolation(f"sequence {entry.sequence_id} sampled position {end} twice, with another token")
        else:
            known.tokens.append(token)
        known.sampled_in_step = step
        return token
