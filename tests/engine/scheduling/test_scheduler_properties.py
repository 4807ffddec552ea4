"""Whatever happens in whatever order: every request ends once, with its tokens, and memory comes back."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.kv.audit import audit
from engine.plan import StepLoad
from engine.scheduling.latency import LatencyModel
from engine.sequence import Request
from engine.simulation.device import SimulatedDisk
from engine.simulation.simulated_model import end_one_in
from streamkv.config import PreemptionMode
from streamkv.errors import InvalidField
from streamkv.sampling import Grammar
from tests.engine.scheduling.driver import Driver
from tests.support.examples import examples

VOCAB_SIZE = 40
GRAMMAR = Grammar("regex", "a+")
"""Changes no token here; whoever has one needs each token on the host before the next."""
SHARED = list(range(3, 33))
PROMPTS = st.one_of(
    st.lists(st.integers(3, VOCAB_SIZE - 1), min_size=1, max_size=30),
    # The same beginning, to every length, and a tail of two different tokens: prefixes part at every offset.
    st.builds(
        lambda num_shared, tail: SHARED[:num_shared] + tail,
        st.integers(0, 30),
        st.lists(st.integers(3, 4), min_size=1, max_size=6),
    ),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, aborts, pauses, deadlines and steps in any order, on pools so small that memory runs out."""

    @initialize(
        num_blocks=st.integers(4, 24),
        block_size=st.sampled_from([1, 2, 3, 4, 8]),
        max_in_flight=st.sampled_from([1, 2]),
        max_num_seqs=st.integers(1, 8),
        budget=st.integers(1, 24),
        max_prefill_tokens=st.integers(0, 10),
        max_num_partial_prefills=st.integers(1, 4),
        enable_chunked_prefill=st.booleans(),
        eos_odds=st.integers(5, 40),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
        num_host_blocks=st.sampled_from([0, 0, 1, 2, 5, 12, 30]),
        num_disk_blocks=st.sampled_from([0, 1, 4, 20, 50]),
        preemption_mode=st.sampled_from(["auto", "auto", "recompute", "swap", "swap"]),
        copy_cost=st.sampled_from([0.0, 0.1, 0.1, 1.0, 10.0]),
        ageing_s=st.sampled_from([0.02, 0.2, 30.0]),
        transfer_turns=st.integers(1, 5),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_in_flight: int,
        max_num_seqs: int,
        budget: int,
        max_prefill_tokens: int,
        max_num_partial_prefills: int,
        enable_chunked_prefill: bool,
        eos_odds: int,
        enable_prefix_caching: bool,
        num_host_blocks: int,
        num_disk_blocks: int,
        preemption_mode: PreemptionMode,
        copy_cost: float,
        ageing_s: float,
        transfer_turns: int,
    ) -> None:
        """copy_cost: of copying a block, against computing a token; 0: nothing is known."""
        latency = None
        if copy_cost:
            steps = [(StepLoad(num, num * num, 0, 0, 1), num * 0.001) for num in (1, 8, 64)]
            latency = LatencyModel(steps, block_bytes=1000, host_bytes_per_s=1e6 / copy_cost)
        self.disk = SimulatedDisk()
        self.make_driver = lambda: Driver(
            num_blocks=num_blocks,
            block_size=block_size,
            max_in_flight=max_in_flight,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_prefill_tokens=max_prefill_tokens,
            max_num_partial_prefills=max_num_partial_prefills,
            enable_chunked_prefill=enable_chunked_prefill,
            max_model_len=60,
            vocab_size=VOCAB_SIZE,
            eos_rule=end_one_in(eos_odds),
            enable_prefix_caching=enable_prefix_caching,
            num_host_blocks=num_host_blocks if enable_prefix_caching else 0,
            num_disk_blocks=num_disk_blocks if num_host_blocks and enable_prefix_caching else 0,
            preemption_mode=preemption_mode,
            latency=latency,
            ageing_s=ageing_s,
            transfer_turns=transfer_turns,
            disk=self.disk,
        )
        self.driver = self.make_driver()

    @rule(
        prompt=PROMPTS,
        num_earlier=st.integers(0, 40),
        earlier=st.integers(0, 100),
        salt=st.sampled_from(["", "", "", "other"]),
        tenant=st.sampled_from(["", "", "", "other", "third"]),
        max_tokens=st.integers(1, 30),
        min_tokens=st.integers(0, 3),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        is_greedy=st.booleans(),
        stop_token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2),
        ignore_eos=st.booleans(),
        priority=st.integers(-1, 1),
        deadline_in_s=st.one_of(st.just(float("inf")), st.floats(0.0, 1.0)),
        num_prior=st.integers(0, 4),
        has_finished=st.booleans(),
        has_grammar=st.sampled_from([False, False, False, True]),
    )
    def submit(
        self,
        prompt: list[int],
        num_earlier: int,
        earlier: int,
        salt: str,
        tenant: str,
        max_tokens: int,
        min_tokens: int,
        n: int,
        is_greedy: bool,
        stop_token_ids: list[int],
        ignore_eos: bool,
        priority: int,
        deadline_in_s: float,
        num_prior: int,
        has_finished: bool,
        has_grammar: bool,
    ) -> None:
        """Half the prompts begin with what an earlier sequence has, its answer included: the next turn of a chat."""
        driver = self.driver
        sequences = [sequence for request in driver.requests for sequence in request.sequences]
        if sequences and num_earlier > 10:
            prompt = [*sequences[earlier % len(sequences)].token_ids[: num_earlier - 10], *prompt][:45]
        sampling = {
            "max_tokens": max_tokens,
            # A grammar says when a text is complete, whatever min_tokens is.
            "min_tokens": 0 if has_grammar else min(min_tokens, max_tokens),
            "n": n,
            "temperature": 0.0 if is_greedy else 1.0,
            "stop_token_ids": stop_token_ids,
            "ignore_eos": ignore_eos,
        }
        try:
            request = driver.submit(
                prompt,
                priority=priority,
                deadline_at_s=driver.now_s + deadline_in_s,
                tenant=tenant,
                cache_salt=salt,
                grammar=GRAMMAR if has_grammar else None,
                **sampling,  # type: ignore[arg-type]
            )
        except InvalidField:
            assert len(prompt) + max(1, sampling["min_tokens"]) > driver.scheduler.max_len
            return
        if num_prior:
            # The same request as a continuation: what an engine that died had generated so far.
            driver.abort(request)
            priors = [
                driver.executor.expected_tokens(prompt, num_prior, request.sampling, choice) for choice in range(n)
            ]
            continued = Request(
                request_id=request.request_id,
                gateway_id=b"",
                stream_id=request.stream_id,
                prompt_token_ids=prompt,
                sampling=request.sampling,
                arrival_s=driver.now_s,
                priority=priority,
                tenant=tenant,
                cache_salt=salt,
                prior_token_ids=priors,
                finished_choices=[0] if has_finished and n > 1 else [],
            )
            driver.scheduler.add(continued)
            driver.requests.append(continued)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.driver.requests:
            self.driver.abort(data.draw(st.sampled_from(self.driver.requests)))

    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        if live := [request for request in self.driver.requests if not request.is_finished]:
            self.driver.pause(data.draw(st.sampled_from(live)))

    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        if paused := [request for request in self.driver.requests if request.is_paused]:
            self.driver.scheduler.resume(data.draw(st.sampled_from(paused)))

    @rule(is_on_disk=st.booleans())
    def finish_transfer(self, is_on_disk: bool) -> None:
        self.driver.finish_transfer(is_on_disk)

    @rule(is_full=st.sampled_from([False, False, False, True]), first=st.integers(0, 5), every=st.integers(1, 6))
    def harm_disk(self, is_full: bool, first: int, every: int) -> None:
        """Some blocks cannot be read any more, and perhaps no more can be written."""
        self.disk.is_full = is_full
        self.disk.damaged.update(list(self.disk.blocks)[first::every])

    @rule()
    def plan(self) -> None:
        self.driver.plan()

    @rule()
    def collect(self) -> None:
        self.driver.collect()

    @rule(num_turns=st.integers(1, 12))
    def turns(self, num_turns: int) -> None:
        for _ in range(num_turns):
            self.driver.turn()

    @rule(seconds=st.floats(0.0, 0.5))
    def wait(self, seconds: float) -> None:
        self.driver.now_s += seconds

    @invariant()
    def memory_is_sound(self) -> None:
        if hasattr(self, "driver"):
            audit(self.driver.blocks)
            assert self.driver.scheduler.kv_usage().num_computed_tokens <= (
                self.driver.blocks.num_owned_blocks * self.driver.blocks.block_size
            )

    @rule()
    def restart(self) -> None:
        """The engine is drained, and another one begins with what the disk has."""
        self.finish()
        self.driver.flush()
        self.driver.executor.close()
        self.driver = self.make_driver()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.finish()
            self.driver.executor.close()

    def finish(self) -> None:
        """All that is live ends by itself."""
        driver = self.driver
        for request in driver.requests:
            driver.scheduler.resume(request)
        # Each turn computes a token of something, and a preemption repeats at most one sequence's tokens.
        driver.run(max_turns=200 + 400 * sum(len(request.sequences) for request in driver.requests))
        driver.check_all()


SchedulerMachine.TestCase.settings = settings(
    max_examples=examples(60, 300), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestScheduler = SchedulerMachine.TestCase
