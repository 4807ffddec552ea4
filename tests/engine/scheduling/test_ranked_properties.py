"""Ranked requests among others, in any order and on pools too small: all end once, with the right choices."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.kv.audit import audit
from engine.simulation.simulated_model import end_one_in
from streamkv.errors import InvalidField
from tests.engine.scheduling.driver import Driver
from tests.engine.scheduling.ranked import check_ranked
from tests.support.examples import examples

VOCAB_SIZE = 40
SHARED = list(range(3, 33))
PROMPTS = st.builds(
    lambda num_shared, tail: SHARED[:num_shared] + tail,
    st.integers(0, 20),
    st.lists(st.integers(3, 4), min_size=1, max_size=6),
)
WIDTHS = st.sampled_from([(1, 0, 1), (1, 0, 2), (1, 3, 0), (2, 4, 0), (1, 0, 3), (2, 0, 3), (3, 0, 4)])
"""(n, best_of, beam_width)."""


class RankedMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(4, 24),
        block_size=st.sampled_from([1, 2, 3, 4, 8]),
        max_in_flight=st.sampled_from([1, 2]),
        max_num_seqs=st.integers(4, 9),
        budget=st.integers(4, 24),
        max_prefill_tokens=st.integers(0, 10),
        max_num_partial_prefills=st.integers(1, 4),
        enable_chunked_prefill=st.booleans(),
        eos_odds=st.integers(2, 20),
        enable_prefix_caching=st.sampled_from([True, True, False]),
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
    ) -> None:
        self.driver = Driver(
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
        )

    @rule(
        prompt=PROMPTS,
        salt=st.sampled_from(["", "", "other"]),
        max_tokens=st.integers(1, 30),
        min_tokens=st.integers(0, 3),
        widths=WIDTHS,
        length_penalty=st.sampled_from([0.0, 1.0, -1.0, 2.0]),
        stop_token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2),
        ignore_eos=st.booleans(),
        priority=st.integers(-1, 1),
        deadline_in_s=st.one_of(st.just(float("inf")), st.just(float("inf")), st.floats(0.0, 1.0)),
    )
    def submit(
        self,
        prompt: list[int],
        salt: str,
        max_tokens: int,
        min_tokens: int,
        widths: tuple[int, int, int],
        length_penalty: float,
        stop_token_ids: list[int],
        ignore_eos: bool,
        priority: int,
        deadline_in_s: float,
    ) -> None:
        driver = self.driver
        n, best_of, beam_width = widths
        min_tokens = min(min_tokens, max_tokens)
        try:
            driver.submit(
                prompt,
                priority=priority,
                deadline_at_s=driver.now_s + deadline_in_s,
                cache_salt=salt,
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                temperature=0.0 if beam_width else 1.0,
                n=n,
                best_of=best_of,
                beam_width=beam_width,
                length_penalty=length_penalty,  # type: ignore[arg-type]
                stop_token_ids=stop_token_ids,
                ignore_eos=ignore_eos,
            )
        except InvalidField:
            assert len(prompt) + max(1, min_tokens) > driver.scheduler.max_len

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
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        audit(driver.blocks)
        roster = driver.scheduler._roster
        groups = roster.beam_groups.values()
        assert driver.blocks.num_held_blocks == sum(group.num_held_blocks for group in groups)
        assert driver.blocks.num_held_blocks <= driver.blocks.num_free_blocks + driver.blocks.num_cached_blocks
        assert roster.num_places_taken <= driver.limits.max_running

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        for request in driver.requests:
            driver.scheduler.resume(request)
        driver.run(max_turns=200 + 2000 * len(driver.requests))
        driver.check_all()
        for request in driver.requests:
            if request.sampling.ranks_choices:
                check_ranked(driver, request, may_outgrow=True)
        driver.executor.close()


RankedMachine.TestCase.settings = settings(
    max_examples=examples(40, 60),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestRanked = RankedMachine.TestCase
