"""The simulated device on a virtual clock: steps and transfers take time, and nobody waits for real."""

import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from math import inf
from typing import Final

from engine.executor import DeviceLimits, ReportProgress
from engine.plan import StepPlan, StepTokens
from engine.simulation.device import PlanViolation, SimulatedDevice
from engine.simulation.step_cost import StepCost
from engine.transfer import Transfer, TransferKind, TransferResult
from streamkv.errors import InvalidField
from streamkv.protocol import ModelFacts
from streamkv.sampling import Grammar

_DISK_KINDS: Final = (TransferKind.HOST_TO_DISK, TransferKind.DISK_TO_HOST, TransferKind.DROP_FROM_DISK)


@dataclass(frozen=True, slots=True)
class Disturbance:
    """How far a device strays from what it costs on paper. Odds are chances from 0 to 1."""

    jitter: float = 0.0
    """Each step and each transfer takes up to so much longer, as a share of its time."""
    slow_step_odds: float = 0.0
    slow_step_factor: float = 20.0
    slow_transfer_odds: float = 0.0
    slow_transfer_factor: float = 50.0
    damage_odds: float = 0.0
    """Of a block on disk, each time that it is read."""
    full_odds: float = 0.0
    """Of a block on its way to disk: it finds no room."""


class SimulatedLaunch:
    """A step on its way. Its tokens are there at done_at_s."""

    def __init__(
        self, plan: StepPlan, tokens: StepTokens, launched_s: float, done_at_s: float, clock: Callable[[], float]
    ) -> None:
        self.plan = plan
        self.tokens = tokens
        self.launched_s = launched_s
        self.done_at_s = done_at_s
        self._clock = clock

    @property
    def is_done(self) -> bool:
        return self._clock() >= self.done_at_s


class SimulatedExecutor:
    """Implements engine.executor.Executor without threads: whoever owns the clock asks for next_event_s and moves it
    there; on_done is never called."""

    def __init__(
        self,
        device: SimulatedDevice,
        limits: DeviceLimits,
        cost: StepCost,
        clock: Callable[[], float],
        dice: random.Random,
        disturbance: Disturbance | None = None,
    ) -> None:
        self.device = device
        self.max_in_flight = device.max_in_flight
        self.num_steps = 0
        self.busy_s = 0.0
        """Time in which a step ran."""
        self._limits = limits
        self._cost = cost
        self._clock = clock
        self._dice = dice
        self._disturbance = disturbance or Disturbance()
        self._in_flight: deque[SimulatedLaunch] = deque()
        self._device_free_s = 0.0
        self._copying: deque[tuple[float, float, Transfer]] = deque()
        """(finished at, time it takes, transfer) between device and host, in their order."""
        self._storing: deque[tuple[float, float, Transfer]] = deque()
        """The same for the disk."""

    # engine.executor.Executor

    def load(self, report: ReportProgress) -> tuple[ModelFacts, DeviceLimits]:
        report("simulating", 100.0)
        model = self.device.model
        facts = ModelFacts(
            name="simulated",
            vocab_size=model.vocab_size,
            max_model_len=self._limits.max_model_len,
            eos_token_ids=list(model.eos_token_ids),
            dtype="none",
            device="simulated",
        )
        return facts, self._limits

    def launch(self, plan: StepPlan, on_done: Callable[[], None]) -> SimulatedLaunch:
        if len(self._in_flight) >= self.max_in_flight:
            raise PlanViolation(f"{len(self._in_flight)} steps are in flight, at most {self.max_in_flight} may be")
        tokens = self.device.compute(plan)
        step_s = self._cost.step_s(plan.load, len(plan.block_copies))
        step_s = self._stray(step_s, self._disturbance.slow_step_odds, self._disturbance.slow_step_factor)
        self._device_free_s = max(self._clock(), self._device_free_s) + step_s
        launch = SimulatedLaunch(plan, tokens, self._clock(), self._device_free_s, self._clock)
        self._in_flight.append(launch)
        self.num_steps += 1
        self.busy_s += step_s
        return launch

    def collect(self, launch: SimulatedLaunch) -> StepTokens:
        if self._in_flight[0] is not launch:
            raise PlanViolation(f"step {launch.plan.step} was collected before step {self._in_flight[0].plan.step}")
        assert launch.is_done, "nobody waits on a virtual clock"
        self._in_flight.popleft()
        return launch.tokens

    def start_transfer(self, transfer: Transfer, on_done: Callable[[], None]) -> None:
        self.device.begin(transfer)
        is_on_disk = transfer.kind in _DISK_KINDS
        queue = self._storing if is_on_disk else self._copying
        num_blocks = len(transfer.stored) or len(transfer.block_ids)
        taken_s = (
            num_blocks
            * self._limits.block_bytes
            / (self._cost.disk_bytes_per_s if is_on_disk else self._cost.host_bytes_per_s)
        )
        disturbance = self._disturbance
        taken_s = self._stray(taken_s, disturbance.slow_transfer_odds, disturbance.slow_transfer_factor)
        begin_s = max(self._clock(), 0.0 if is_on_disk else self._device_free_s)
        if queue:
            begin_s = max(begin_s, queue[-1][0])
        queue.append((begin_s + taken_s, taken_s, transfer))

    def finished_transfers(self) -> list[TransferResult]:
        results = []
        for queue in (self._copying, self._storing):
            while queue and queue[0][0] <= self._clock():
                _, taken_s, transfer = queue.popleft()
                self._damage(transfer)
                failed = self.device.finish(transfer)
                num_blocks = len(transfer.stored) or len(transfer.block_ids)
                num_bytes = (num_blocks - len(failed)) * self._limits.block_bytes
                results.append(TransferResult(transfer.transfer_id, failed, taken_s, num_bytes))
        self._dice.shuffle(results)
        return results

    def compile_grammar(self, grammar: Grammar, on_done: Callable[[], None]) -> Future[object]:
        """Its tokens have no text that could match."""
        raise InvalidField(grammar.field, "cannot be followed by a simulated device, whose tokens have no text")

    def close(self) -> None:
        """What has not reached the disk is lost."""
        self._copying.clear()
        self._storing.clear()

    def abandon_steps(self) -> None:
        """Nobody will collect those in flight."""
        self._in_flight.clear()

    # the clock

    @property
    def next_event_s(self) -> float:
        """When the next step or transfer is done; inf: nothing is on its way."""
        times = [self._in_flight[0].done_at_s] if self._in_flight else []
        times += [queue[0][0] for queue in (self._copying, self._storing) if queue]
        return min(times, default=inf)

    @property
    def num_transfers(self) -> int:
        return len(self._copying) + len(self._storing)

    def _stray(self, seconds: float, slow_odds: float, slow_factor: float) -> float:
        if self._disturbance.jitter:
            seconds *= 1.0 + self._disturbance.jitter * self._dice.random()
        if slow_odds and self._dice.random() < slow_odds:
            seconds *= slow_factor
        return seconds

    def _damage(self, transfer: Transfer) -> None:
        disk, disturbance = self.device.disk, self._disturbance
        if transfer.kind is TransferKind.DISK_TO_HOST and disturbance.damage_odds:
            disk.damaged.update(
                block.digest for block in transfer.stored if self._dice.random() < disturbance.damage_odds
            )
        if transfer.kind is TransferKind.HOST_TO_DISK and disturbance.full_odds:
            disk.rejected.update(
                block.digest for block in transfer.stored if self._dice.random() < disturbance.full_odds
            )
