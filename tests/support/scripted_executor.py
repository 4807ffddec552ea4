"""An executor without a model, on threads and a real clock: the simulated device, in which every mistake of the
scheduler shows, behind what the loop asks of an executor.

A plan or a transfer that breaks a promise raises PlanViolation; a wrong block, slot or copy gives a wrong token.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from engine.executor import DeviceLimits, ReportProgress
from engine.plan import NewSequence, StepPlan, StepTokens
from engine.simulation.device import Known, PlanViolation, SimulatedDevice, SimulatedDisk
from engine.simulation.simulated_model import Context, EosRule, SimulatedModel
from engine.transfer import Transfer, TransferKind, TransferResult
from streamkv.errors import InvalidField
from streamkv.protocol import ModelFacts
from streamkv.sampling import Grammar, SamplingParams


class InjectedFault(RuntimeError):
    """What a step raises that was asked to fail."""


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
    that they sleep in addition. A sequence that was told `poison_token` gets no token and is named failed.
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
        disk: SimulatedDisk | None = None,
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
        self.fail_at_step = fail_at_step
        self.poison_token = poison_token
        self.block_at_step = dict(block_at_step or {})
        self.num_steps = 0
        """Steps computed."""
        self.num_host_blocks = num_host_blocks
        self.num_disk_blocks = num_disk_blocks
        self.disk = disk if disk is not None else SimulatedDisk()
        self.model = SimulatedModel(vocab_size, self.eos_token_ids, eos_rule)
        self.device = SimulatedDevice(
            self.model,
            num_blocks,
            block_size,
            max_in_flight=max_in_flight,
            max_num_batched_tokens=max_num_batched_tokens,
            num_host_blocks=num_host_blocks,
            num_disk_blocks=num_disk_blocks,
            disk=self.disk,
            failure_rule=self._failure,
        )
        self.disk_s = 0.001
        """What a block is said to take on its way from or to the disk."""
        self.started: list[Transfer] = []
        self.grammars: list[tuple[Grammar, Future[object]]] | None = None
        """Those that are being compiled until the test says what becomes of them, and that change no token; None: all
        are refused."""
        self.transfer_s = transfer_s
        self._step_s, self._load_s, self._sleep = step_s, load_s, sleep
        self._holds_transfers = holds_transfers
        self._transfers: tuple[deque[tuple[Transfer, Callable[[], None]]], ...] = (deque(), deque())
        """Those that touch the device, and those that touch the disk."""
        self._finished: list[TransferResult] = []
        self._transfer_fault: PlanViolation | None = None
        self._device_lock = threading.RLock()
        self._in_flight: deque[ScriptedLaunch] = deque()
        self._closed = False
        self._work: queue.SimpleQueue[Job | None] | None = None
        if threaded:
            self._work = queue.SimpleQueue()
            self._worker = threading.Thread(target=self._serve, args=(self._work,), name="scripted", daemon=True)
            self._worker.start()

    # engine.executor.Executor

    @property
    def loads_slowly(self) -> bool:
        return self._load_s > 0

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

    def finished_transfers(self) -> list[TransferResult]:
        if self._transfer_fault is not None:
            raise self._transfer_fault
        with self._device_lock:
            results, self._finished = self._finished, []
        return results

    def compile_grammar(self, grammar: Grammar, on_done: Callable[[], None]) -> Future[object]:
        if self.grammars is None:
            raise InvalidField(grammar.field, "cannot be followed by a script")
        compiling: Future[object] = Future()
        compiling.add_done_callback(lambda _: on_done())
        self.grammars.append((grammar, compiling))
        return compiling

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._work is not None:
                self._work.put(None)
                self._worker.join()

    # what a test may do

    @property
    def num_transfers(self) -> int:
        """Started and not yet handed out as finished."""
        return len(self._transfers[0]) + len(self._transfers[1]) + len(self._finished)

    def finish_transfer(self, is_on_disk: bool) -> bool:
        """Finish the oldest transfer of those that touch the device, or of those that touch the disk; False: there is
        none."""
        with self._device_lock:
            transfers = self._transfers[is_on_disk]
            if not transfers:
                return False
            transfer, on_done = transfers.popleft()
            failed = self.device.finish(transfer)
            num_blocks = len(transfer.stored) or len(transfer.block_ids)
            elapsed_s = num_blocks * (self.disk_s if is_on_disk else 0.0001)
            num_bytes = 1000 * (num_blocks - len(failed))
            self._finished.append(TransferResult(transfer.transfer_id, failed, elapsed_s, num_bytes))
        on_done()
        return True

    def spoil(self, block_ids: Iterable[int]) -> None:
        """Wipe blocks that are free, so that a later read shows. With no step on its way."""
        self.device.spoil(block_ids)

    # what is right, computed without any block

    def next_token(self, tokens: Sequence[int], facts: NewSequence) -> int:
        """The token after `tokens`; end-of-sequence and stop ids are not sampled before min_tokens."""
        return self.model.choose(Context(tokens).digest, facts, len(tokens))[0]

    def likeliest(self, tokens: Sequence[int], facts: NewSequence) -> list[tuple[int, float]]:
        """The next tokens after `tokens` that beam search chooses from, with their log probabilities."""
        return self.model.rank(Context(tokens).digest, facts, len(tokens))

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
        ending = self.model.generate(prompt, sampling, choice, self.max_len, num_tokens)
        return ending.token_ids, ending.finish_reason, ending.cause

    @property
    def max_len(self) -> int:
        """Most tokens of a sequence."""
        return min(self.max_model_len, (self.num_blocks - 1) * self.block_size)

    # the worker

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
            with self._device_lock:
                launch.result = self.device.compute(launch.plan)
        except BaseException as fault:
            launch.fault = fault
        self.num_steps += 1
        launch.done.set()
        launch.on_done()

    def _run_transfer(self, transfer: Transfer, on_done: Callable[[], None]) -> None:
        is_on_disk = transfer.kind not in (TransferKind.DEVICE_TO_HOST, TransferKind.HOST_TO_DEVICE)
        try:
            with self._device_lock:
                self.device.begin(transfer)
        except PlanViolation as violation:
            if self._work is None:
                raise
            self._transfer_fault = violation
            on_done()
            return
        self._transfers[is_on_disk].append((transfer, on_done))
        if self.transfer_s:
            threading.Timer(self.transfer_s, self.finish_transfer, [is_on_disk]).start()
        elif not self._holds_transfers:
            self.finish_transfer(is_on_disk)

    def _failure(self, known: Known) -> str:
        return "poisoned" if self.poison_token is not None and self.poison_token in known.tokens else ""
