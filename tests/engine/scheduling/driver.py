"""The loop's turns, one call at a time: the real scheduler over the scripted executor and a virtual clock.

After every call KV memory is audited, and the promises that hold for every plan are checked.
"""

from collections import deque
from collections.abc import Sequence as Ids

from engine.kv.audit import audit
from engine.kv.block_manager import BlockManager
from engine.kv.prefix_tree import Node
from engine.kv.tiers import TierSizes
from engine.plan import StepPlan
from engine.scheduling.latency import LatencyModel
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Request, Sequence, SequenceOutput, SequenceState
from engine.simulation.device import SimulatedDisk
from engine.simulation.simulated_model import EosRule
from streamkv.config import PreemptionMode
from streamkv.protocol import pack_ids
from streamkv.sampling import Grammar, SamplingParams
from tests.support.scripted_executor import ScriptedExecutor, ScriptedLaunch


class Driver:
    """Submit requests, take turns, ask whether all of it was right."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_in_flight: int = 1,
        eos_rule: EosRule | None = None,
        vocab_size: int = 1000,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 64,
        max_prefill_tokens: int = 0,
        max_num_partial_prefills: int = 4,
        enable_chunked_prefill: bool = True,
        max_model_len: int = 200,
        max_queue: int = 1000,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
        num_disk_blocks: int = 0,
        disk: SimulatedDisk | None = None,
        preemption_mode: PreemptionMode = "auto",
        latency: LatencyModel | None = None,
        ageing_s: float = 30.0,
        transfer_turns: int = 1,
    ) -> None:
        """transfer_turns: a turn in so many finishes a transfer of those with the device and one of those with the
        disk."""
        self.now_s = 0.0
        self.executor = ScriptedExecutor(
            num_blocks,
            block_size,
            max_model_len,
            vocab_size,
            max_in_flight=max_in_flight,
            max_num_batched_tokens=max_num_batched_tokens,
            threaded=False,
            eos_rule=eos_rule,
            num_host_blocks=num_host_blocks,
            num_disk_blocks=num_disk_blocks,
            disk=disk,
            holds_transfers=True,
        )
        self.limits = SchedulerLimits(
            max_num_seqs,
            max_num_batched_tokens,
            max_prefill_tokens,
            max_num_partial_prefills,
            enable_chunked_prefill,
            max_model_len,
            max_queue,
            self.executor.eos_token_ids,
            preemption_mode=preemption_mode,
            ageing_s=ageing_s,
        )
        tiers = None
        if num_host_blocks:
            tiers = TierSizes(num_host_blocks, num_disk_blocks, self.executor.disk.stored())
        self.blocks = BlockManager(num_blocks, block_size, enable_prefix_caching, tiers)
        self.scheduler = Scheduler(self.limits, self.blocks, lambda: self.now_s, latency)
        self.transfer_turns = transfer_turns
        self.num_turns = 0
        self.in_flight: deque[ScriptedLaunch] = deque()
        self.requests: list[Request] = []
        self.plans: list[StepPlan] = []
        self.tokens: dict[Sequence, list[int]] = {}
        """Generated tokens that came out, without those of a continuation."""
        self.ends: dict[Sequence, SequenceOutput] = {}
        self._len_when_preempted: dict[Sequence, int] = {}
        self._num_preemptions: dict[Sequence, int] = {}

    def submit(
        self,
        prompt: Ids[int],
        *,
        priority: int = 0,
        deadline_at_s: float = float("inf"),
        prior: list[list[int]] | None = None,
        finished_choices: list[int] | None = None,
        tenant: str = "",
        cache_salt: str | None = None,
        max_tokens: int = 8,
        temperature: float = 0.0,
        **sampling: int | bool | list[int] | Grammar | None,
    ) -> Request:
        """Without a cache_salt the request shares no prefix with another."""
        params = SamplingParams(
            seed=len(self.requests),
            max_tokens=max_tokens,
            temperature=temperature,
            **sampling,  # type: ignore[arg-type]
        )
        self.scheduler.check(len(prompt), params)
        request = Request(
            request_id=len(self.requests),
            gateway_id=b"",
            stream_id=len(self.requests).to_bytes(16, "little"),
            prompt_token_ids=list(prompt),
            sampling=params,
            arrival_s=self.now_s,
            priority=priority,
            deadline_at_s=deadline_at_s,
            tenant=tenant,
            cache_salt=f"alone {len(self.requests)}" if cache_salt is None else cache_salt,
            prior_token_ids=prior or [],
            finished_choices=finished_choices or [],
            packed_prompt=pack_ids(prompt) if len(self.requests) % 2 else b"",
        )
        self.scheduler.add(request)
        self.requests.append(request)
        self.now_s += 0.001
        return request

    def plan(self) -> StepPlan | None:
        """Plan and launch a step, if anything can run and the executor has room; start the transfers."""
        if len(self.in_flight) >= self.executor.max_in_flight:
            return None
        running = self.scheduler._roster.running.sequences
        protected = running[0] if running else None
        before = protected.num_preemptions if protected else 0
        nodes = list(self.blocks.tree.nodes)
        owned = {block_id for sequence in self.blocks.holders for block_id in sequence.block_table}
        plan = self.scheduler.plan()
        if protected is not None:
            assert protected.num_preemptions == before, "the oldest of the highest priority lost its blocks"
        self._check_preemptions()
        audit(self.blocks)
        if plan is None:
            self._start_transfers()
            assert (
                self.in_flight
                or self.executor.num_transfers
                or not self.scheduler.has_runnable
                or self.scheduler._ended
            ), "a standstill"
            return None
        chunk_limit = self.limits.max_prefill_tokens or self.limits.max_num_batched_tokens
        if self.limits.enable_chunked_prefill:
            assert all(entry.num_tokens <= chunk_limit for entry in plan.scheduled)
        assert len(plan.scheduled) <= self.limits.max_num_seqs
        num_partial = sum(sequence.is_prefilling for sequence in running)
        assert num_partial <= self.limits.max_num_partial_prefills
        assert num_partial == self.scheduler._roster.running.num_prefilling
        self._check_writes(plan, nodes, owned)
        for entry, sequence in zip(plan.scheduled, self.scheduler.newest_launched, strict=True):
            assert entry.token_ids or not sequence.follows_grammar, (
                "its next token depends on one that is on the device"
            )
        self.plans.append(plan)
        self.in_flight.append(self.executor.launch(plan, lambda: None))
        self.executor.spoil(filter(self.blocks.pool.is_free, range(1, self.blocks.pool.num_blocks)))
        self._start_transfers()
        return plan

    def _start_transfers(self) -> None:
        for transfer in self.scheduler.take_transfers():
            self.executor.start_transfer(transfer, lambda: None)
        assert self.scheduler.num_transfers == self.executor.num_transfers == self.blocks.num_unfinished_transfers
        audit(self.blocks)

    def finish_transfer(self, is_on_disk: bool) -> bool:
        """Let the oldest transfer with the disk, or else with the device, come to its end; False: there is none."""
        has_finished = self.executor.finish_transfer(is_on_disk)
        if has_finished:
            self.scheduler.finish_transfers(self.executor.finished_transfers())
            audit(self.blocks)
            self._start_transfers()
        return has_finished

    def flush(self) -> None:
        """What an asked-for end does: write to disk what is cached."""
        self.blocks.flush()
        self._start_transfers()
        while self.finish_transfer(is_on_disk=True) or self.finish_transfer(is_on_disk=False):
            pass

    def _check_writes(self, plan: StepPlan, nodes: list[Node | None], owned: set[int]) -> None:
        """Nothing is written into a block that was in the tree before this plan and still is.

        One that nobody owned and that is on a lower tier, too, may have been evicted and put back by whoever computed
        the same in the same block.
        """
        for entry, sequence in zip(plan.scheduled, self.scheduler._launched[-1][1], strict=True):
            size = self.blocks.block_size
            for index in range(entry.start // size, -(-(entry.start + entry.num_tokens) // size)):
                block_id = sequence.block_table[index]
                node = nodes[block_id]
                if node is not None and self.blocks.tree.nodes[block_id] is node:
                    is_below = bool(node.host_id or node.disk_id)
                    assert is_below and block_id not in owned, f"block {block_id} is read-only"

    def collect(self) -> list[SequenceOutput]:
        """Take in the oldest step in flight, if there is one."""
        outputs: list[SequenceOutput] = []
        if self.in_flight:
            launch = self.in_flight.popleft()
            outputs = self.take(self.scheduler.update(launch.plan, self.executor.collect(launch)))
            audit(self.blocks)
        return outputs

    def turn(self) -> StepPlan | None:
        """Plan; then collect when the executor is full or nothing more can be planned."""
        self.now_s += 0.01
        self.num_turns += 1
        if self.num_turns % self.transfer_turns == 0:
            self.finish_transfer(is_on_disk=False)
            self.finish_transfer(is_on_disk=True)
        self.take(self.scheduler.expire())
        plan = self.plan()
        if plan is None or len(self.in_flight) >= self.executor.max_in_flight:
            self.collect()
        return plan

    def run(self, max_turns: int = 5000) -> "Driver":
        """Take turns until nothing is left to do."""
        for _ in range(max_turns):
            if not self.scheduler.has_work:
                self._start_transfers()
                while self.finish_transfer(is_on_disk=False) or self.finish_transfer(is_on_disk=True):
                    pass
                return self
            self.turn()
        raise AssertionError(f"not done after {max_turns} turns")

    def abort(self, request: Request, cause: str = "cancelled") -> list[SequenceOutput]:
        outputs = self.take(self.scheduler.abort(request, cause))
        audit(self.blocks)
        return outputs

    def take(self, outputs: list[SequenceOutput]) -> list[SequenceOutput]:
        for output in outputs:
            assert output.sequence not in self.ends, "something came after the end"
            self.tokens.setdefault(output.sequence, []).extend(output.token_ids)
            if output.finish_reason:
                self.ends[output.sequence] = output
        return outputs

    def output_of(self, sequence: Sequence) -> list[int]:
        return self.tokens.get(sequence, [])

    def check_all(self) -> None:
        """Everything ended once, with the right tokens and reason, and all memory is free.

        Of requests that rank their choices only the end is looked at: see ranked.py.
        """
        for request in self.requests:
            for sequence in [] if request.sampling.ranks_choices else request.sequences:
                if sequence.choice not in request.finished_choices:
                    self.check_one(sequence)
        scheduler = self.scheduler
        assert self.blocks.num_owned_blocks == 0
        assert self.blocks.num_available_blocks == self.blocks.pool.num_blocks - 1
        assert not self.blocks.places and not self.blocks.producers
        assert not scheduler.has_work
        assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_paused) == (0, 0, 0)
        assert scheduler.next_deadline_s == float("inf")
        assert not scheduler._roster.beam_groups and not scheduler._roster.num_held_places
        assert not self.blocks.num_held_blocks
        assert not len(scheduler._roster.shares) and not scheduler._roster.waiting.num_tenants
        assert (
            not scheduler._roster.unstarted
            and not scheduler._roster.parked
            and not scheduler._roster.running.num_prefilling
        )

    def check_one(self, sequence: Sequence) -> None:
        request = sequence.request
        end = self.ends[sequence]
        priors = request.prior_token_ids
        prior = priors[sequence.choice] if sequence.choice < len(priors) else []
        shown = prior + self.output_of(sequence)
        tokens, reason, cause = self.executor.expected_output(
            request.prompt_token_ids, request.sampling, sequence.choice
        )
        if end.finish_reason == "abort":
            assert shown == tokens[: len(shown)]
        else:
            assert shown == tokens
            assert (end.finish_reason, end.cause) == (reason, cause)
            assert end.stop_token_id == (tokens[-1] if reason == "stop" else -1)

    def _check_preemptions(self) -> None:
        for request in self.requests:
            for sequence in request.sequences:
                if sequence.num_preemptions == self._num_preemptions.get(sequence, 0):
                    continue
                self._num_preemptions[sequence] = sequence.num_preemptions
                if sequence.state is SequenceState.WAITING and sequence in self._len_when_preempted:
                    assert sequence.num_tokens > self._len_when_preempted[sequence], "preempted without progress"
                self._len_when_preempted[sequence] = sequence.num_tokens

    def pause(self, request: Request) -> None:
        self.scheduler.pause(request)
        for sequence in request.sequences:
            self._len_when_preempted.pop(sequence, None)
        audit(self.blocks)
