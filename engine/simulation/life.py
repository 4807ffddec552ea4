"""One life of a simulated engine: the real scheduler and block manager, turn by turn as in engine.loop."""

import random
from collections import deque
from collections.abc import Callable, Iterator
from math import inf
from typing import Final

from engine.executor import DeviceLimits
from engine.kv.audit import audit
from engine.kv.block_manager import BlockManager
from engine.kv.prefix_tree import Node
from engine.kv.tiers import TierSizes
from engine.plan import StepLoad, StepPlan
from engine.scheduling.latency import LatencyModel
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.scheduler import Scheduler
from engine.sequence import SequenceOutput
from engine.simulation.device import Known, SimulatedDevice, SimulatedDisk
from engine.simulation.executor import SimulatedExecutor, SimulatedLaunch
from engine.simulation.expectation import FAILURE
from engine.simulation.scenario import EngineSetup
from engine.simulation.simulated_model import start_of, values_behind
from streamkv.protocol import unpack_ids

BLOCK_BYTES: Final = 1000
_AUDIT_ODDS: Final = 0.1
"""Of an audit in the middle of a turn and at its end, though no block has changed hands."""


class Standstill(AssertionError):
    """Something could run, nothing is on its way, and no step is planned."""


class EngineLife:
    """Whoever owns the clock calls `turn` whenever something is due."""

    def __init__(
        self,
        setup: EngineSetup,
        disk: SimulatedDisk,
        clock: Callable[[], float],
        dice: random.Random,
        failures: dict[tuple[int, int], int],
        namespaces: dict[int, tuple[str, str]],
        note: Callable[[str], None] | None,
    ) -> None:
        """failures: (seed, choice) → so many tokens are generated before no more can be sampled. namespaces: by
        seed, who may share blocks."""
        self._clock = clock
        self._dice = dice
        self._note = note

        def failure(known: Known) -> str:
            facts = known.facts
            after = failures.get((facts.sampling.seed, facts.choice))
            return FAILURE if after is not None and known.num_computed - facts.num_prompt >= after else ""

        self.device = SimulatedDevice(
            setup.model,
            setup.num_blocks,
            setup.block_size,
            max_in_flight=setup.max_in_flight,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            num_host_blocks=setup.num_host_blocks,
            num_disk_blocks=setup.num_disk_blocks,
            disk=disk,
            failure_rule=failure if failures else None,
            namespace_of=lambda facts: namespaces[facts.sampling.seed],
        )
        limits = DeviceLimits(
            num_blocks=setup.num_blocks,
            block_size=setup.block_size,
            max_model_len=setup.max_model_len,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            block_bytes=BLOCK_BYTES,
            num_host_blocks=setup.num_host_blocks,
            num_disk_blocks=setup.num_disk_blocks,
            stored=disk.stored(),
            step_samples=calibrate(setup) if setup.is_calibrated else [],
            host_bytes_per_s=setup.cost.host_bytes_per_s if setup.is_calibrated else 0.0,
        )
        self.executor = SimulatedExecutor(self.device, limits, setup.cost, clock, dice, setup.disturbance)
        tiers = None
        if setup.num_host_blocks:
            tiers = TierSizes(setup.num_host_blocks, setup.num_disk_blocks, limits.stored)
        self.blocks = BlockManager(setup.num_blocks, setup.block_size, setup.enable_prefix_caching, tiers)
        self.latency = LatencyModel(limits.step_samples, limits.block_bytes, limits.host_bytes_per_s)
        self.scheduler = Scheduler(
            SchedulerLimits(
                max_num_seqs=setup.max_num_seqs,
                max_num_batched_tokens=setup.max_num_batched_tokens,
                max_prefill_tokens=setup.max_prefill_tokens,
                max_num_partial_prefills=setup.max_num_partial_prefills,
                enable_chunked_prefill=setup.enable_chunked_prefill,
                max_model_len=setup.max_model_len,
                max_queue=setup.max_queue,
                eos_token_ids=setup.model.eos_token_ids,
                preemption_mode=setup.preemption_mode,
                ageing_s=setup.ageing_s,
                itl_target_s=setup.itl_target_s,
            ),
            self.blocks,
            clock,
            self.latency,
        )
        self.in_flight: deque[SimulatedLaunch] = deque()
        self._collected_s = 0.0
        self.num_planned = 0
        self._has_moved = False
        """Blocks have changed hands since the last audit."""

    @property
    def next_event_s(self) -> float:
        event_s = min(self.executor.next_event_s, self.scheduler.next_deadline_s)
        plan_s = self._plan_from_s
        return min(event_s, plan_s) if plan_s > self._clock() else event_s

    @property
    def _plan_from_s(self) -> float:
        """When to plan the next step; inf: once the oldest is done."""
        if not self.in_flight:
            return 0.0
        if len(self.in_flight) == self.executor.max_in_flight:
            return inf
        launch = self.in_flight[-1]
        return self.latency.plan_next_from_s(max(launch.launched_s, self._collected_s), launch.plan.load)

    def turn(self) -> Iterator[list[SequenceOutput]]:
        """What a turn of the loop brings: outputs, to be looked at before it goes on. Audits memory
        at its end whenever a block has changed hands."""
        while self.in_flight and self.in_flight[0].is_done:
            launch = self.in_flight.popleft()
            tokens = self.executor.collect(launch)
            self.latency.observe(launch.plan.load, self._clock() - max(launch.launched_s, self._collected_s))
            self._collected_s = self._clock()
            if self._note is not None:
                self._note(f"step {launch.plan.step} done: {tokens.token_ids} {tokens.failed or ''}")
            outputs = self.scheduler.update(launch.plan, tokens)
            self._has_moved |= any(output.finish_reason for output in outputs)
            yield outputs
        self._finish_transfers()
        yield self.scheduler.expire()
        if self._dice.random() < _AUDIT_ODDS:
            audit(self.blocks)
            self.check_content()
            self._has_moved = True
        while self._clock() >= self._plan_from_s and (plan := self.scheduler.plan()) is not None:
            self._launch(plan)
        self._start_transfers()
        if self._has_moved:
            audit(self.blocks)
            self._has_moved = False
        is_idle = not self.in_flight and not self.executor.num_transfers
        if is_idle and self.scheduler.has_runnable and self.scheduler.next_deadline_s > self._clock():
            num_running, num_waiting = self.scheduler.num_running, self.scheduler.num_waiting
            raise Standstill(f"{num_running} run, {num_waiting} wait, no step is planned and nothing is on its way")

    def begin_flush(self) -> None:
        """The engine was asked to end: it takes no more turns and writes to disk what it has cached."""
        self.blocks.flush()
        self._start_transfers()

    def flush(self) -> bool:
        """One turn of that. Whether all is written."""
        self._finish_transfers()
        self._start_transfers()
        audit(self.blocks)
        return not self.blocks.num_unfinished_transfers

    def _launch(self, plan: StepPlan) -> None:
        self.num_planned += 1
        self._has_moved |= bool(
            plan.new_sequences
            or plan.finished_sequence_ids
            or plan.preempted_sequence_ids
            or plan.readmitted_sequence_ids
            or any(entry.new_block_ids for entry in plan.scheduled)
        )
        if self._note is not None:
            self._note(describe(plan))
        self.in_flight.append(self.executor.launch(plan, lambda: None))
        self.device.spoil(filter(self.blocks.pool.is_free, range(1, self.blocks.pool.num_blocks)))

    def _finish_transfers(self) -> None:
        results = self.executor.finished_transfers()
        if results:
            self._has_moved = True
            if self._note is not None:
                for result in results:
                    self._note(
                        f"transfer {result.transfer_id} done{f', failed {result.failed}' if result.failed else ''}"
                    )
            self.scheduler.finish_transfers(results)

    def _start_transfers(self) -> None:
        for transfer in self.scheduler.take_transfers():
            self._has_moved = True
            if self._note is not None:
                places = f"{transfer.block_ids or ''} {transfer.host_ids or ''}"
                names = " ".join(block.digest.hex()[:8] for block in transfer.stored)
                self._note(f"transfer {transfer.transfer_id} {transfer.kind.name} {places} {names}")
            self.executor.start_transfer(transfer, lambda: None)

    def check_content(self) -> None:
        """What the prefix tree says is in a block is in it, on every tier, though nobody reads it. Raises
        AssertionError."""
        below: list[tuple[Node, int]] = [
            (root, start_of(root.namespace)) for root in self.blocks.tree.roots.values() if root.namespace is not None
        ]
        device = self.device
        while below:
            parent, before = below.pop()
            for node in parent.children.values():
                values = values_behind(before, unpack_ids(node.key))
                where = {"on the device": device.memory[node.block_id] if node.is_on_device else None}
                if node.host_id and node.is_complete_on_host:
                    where["in host memory"] = device.host[node.host_id]
                if node.disk_id and node.digest in device.disk.blocks:
                    where["on disk"] = device.disk.blocks[node.digest][1]
                for tier, held in where.items():
                    assert held is None or held[: len(values)] == values, (
                        f"{tier}, block {node.block_id}, host block {node.host_id}: not what the tree says"
                    )
                below.append((node, values[-1]))

    def check_idle(self) -> None:
        """Nothing is left of what has been served. Raises AssertionError."""
        scheduler, blocks = self.scheduler, self.blocks
        assert not scheduler.has_work and not self.in_flight, "work is left"
        gauges = (scheduler.num_running, scheduler.num_waiting, scheduler.num_paused)
        assert gauges == (0, 0, 0), f"running, waiting, paused: {gauges}"
        assert blocks.num_owned_blocks == 0, f"{blocks.num_owned_blocks} blocks have an owner"
        num_free, num_cached = blocks.num_free_blocks, blocks.num_cached_blocks
        assert num_free + num_cached == blocks.pool.num_blocks - 1, f"{num_free} free, {num_cached} cached"
        coming = (blocks.num_in_transfer_blocks, blocks.num_unfinished_transfers, scheduler.num_transfers)
        assert coming == (0, 0, 0) and not blocks.num_held_blocks, (
            f"{coming} in transfer, {blocks.num_held_blocks} held"
        )
        assert not blocks.places and not blocks.producers and not blocks.holders, "sequences are remembered"
        usage = scheduler.kv_usage()
        assert (usage.num_owned_blocks, usage.num_computed_tokens) == (0, 0), f"{usage}"


def calibrate(setup: EngineSetup) -> list[tuple[StepLoad, float]]:
    """What an engine measures while it warms up."""
    loads = [StepLoad(num_decodes=count, num_decode_kv_tokens=count * 20) for count in (1, 8, 32)]
    loads += [StepLoad().with_chunk(count, context) for count in (1, 8, 64) for context in (0, 30)]
    return [(load, setup.cost.step_s(load)) for load in loads]


def describe(plan: StepPlan) -> str:
    """A plan on one line."""
    words = [f"step {plan.step}:"]
    for entry in plan.scheduled:
        source = "" if entry.token_ids else " from device"
        blocks = f" +{entry.new_block_ids}" if entry.new_block_ids else ""
        kind = "prefill" if entry.is_prefill else "decode"
        end = entry.start + entry.num_tokens
        words.append(
            f"{kind} s{entry.sequence_id}[{entry.start}:{end}]{source}{blocks}{'' if entry.samples else ' …'};"
        )
    for name, ids in (
        ("new", [facts.sequence_id for facts in plan.new_sequences]),
        ("finished", plan.finished_sequence_ids),
        ("preempted", plan.preempted_sequence_ids),
        ("readmitted", plan.readmitted_sequence_ids),
        ("copies", plan.block_copies),
    ):
        if ids:
            words.append(f"{name} {ids};")
    return " ".join(words)
