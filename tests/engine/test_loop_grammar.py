"""Requests with a grammar over a real socket: the real loop and scheduler, and a scripted device whose grammars are
compiled when the test says so."""

import gc
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from engine import requests
from engine.plan import StepPlan
from engine.sequence import Request, Sequence
from streamkv.errors import InvalidField
from streamkv.protocol import Abort, Attach, Drain, GetStats, Pause, Ready, Rejected, Resume, Stats, Submit, pack_ids
from streamkv.sampling import Grammar, SamplingParams
from tests.support.scripted_engine import RunningEngine, serving
from tests.support.scripted_executor import ScriptedExecutor, ScriptedLaunch
from tests.support.wire_gateway import WireGateway, submission

PROMPT = list(range(10, 40))
GRAMMAR = Grammar("regex", "[a-z]+", "guided_regex")


class Recording(ScriptedExecutor):
    """Keeps the plans."""

    def __init__(self, max_in_flight: int = 1, **more: int) -> None:
        super().__init__(max_in_flight=max_in_flight, **more)
        self.grammars = []
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan, on_done: Callable[[], None]) -> ScriptedLaunch:
        self.plans.append(plan)
        return super().launch(plan, on_done)

    def wait_compiling(self, count: int = 1) -> "Future[object]":
        """The newest one, once so many have been begun."""
        assert self.grammars is not None
        until_s = time.monotonic() + 30.0
        while len(self.grammars) < count:
            assert time.monotonic() < until_s, f"{len(self.grammars)} grammars came"
            time.sleep(0.001)
        return self.grammars[-1][1]


@pytest.fixture(params=[1, 2])
def executor(request: pytest.FixtureRequest) -> Recording:
    return Recording(max_in_flight=request.param)


@pytest.fixture
def engine(executor: Recording) -> Iterator[RunningEngine]:
    with serving(executor) as running:
        yield running


@pytest.fixture
def gateway(engine: RunningEngine) -> Iterator[WireGateway]:
    with WireGateway(engine.endpoint) as connected:
        connected.wait_for(Ready)
        yield connected


def follows(max_tokens: int = 8, n: int = 1, best_of: int = 0) -> SamplingParams:
    return SamplingParams(seed=7, max_tokens=max_tokens, temperature=0.0, n=n, best_of=best_of, grammar=GRAMMAR)


def held(request_id: int = 1, **more: object) -> Submit:
    return submission(request_id, PROMPT, **{"sampling": follows(), **more})


def stats_of(gateway: WireGateway) -> Stats:
    gateway.send(GetStats(1))
    return gateway.wait_for(Stats)


def is_idle(gateway: WireGateway) -> bool:
    gauges = stats_of(gateway).gauges
    states = [f"num_{state}_{what}" for state in ("running", "waiting", "paused") for what in ("requests", "sequences")]
    return not any(gauges[name] for name in (*states, "num_allocated_blocks", "num_live_streams"))


def wait_idle(gateway: WireGateway) -> None:
    until_s = time.monotonic() + 30.0
    while not is_idle(gateway):
        assert time.monotonic() < until_s, f"still busy: {stats_of(gateway).gauges}"


def test_a_request_waits_for_its_grammar_while_others_run(executor: Recording, gateway: WireGateway) -> None:
    gateway.send(held())
    compiling = executor.wait_compiling()
    gateway.send(submission(2, PROMPT[1:], max_tokens=8))
    assert gateway.wait_end(2).tokens[0] == executor.expected_tokens(PROMPT[1:], 8)
    assert stats_of(gateway).gauges["num_waiting_requests"] == 1
    assert not gateway.requests[1].tokens
    compiling.set_result("compiled")
    assert gateway.wait_end(1).tokens[0] == executor.expected_tokens(PROMPT, 8)
    wait_idle(gateway)


def test_one_that_is_known_begins_at_once(executor: Recording, gateway: WireGateway) -> None:
    done: Future[object] = Future()
    done.set_result("compiled")
    executor.compile_grammar = lambda grammar, on_done: done  # type: ignore[method-assign]
    gateway.send(held())
    assert gateway.wait_end(1).tokens[0] == executor.expected_tokens(PROMPT, 8)


def num_live_objects() -> int:
    return sum(type(each) in (Request, Sequence) for each in gc.get_objects())


def test_those_that_are_refused_are_freed_without_a_garbage_collection(
    executor: Recording, gateway: WireGateway
) -> None:
    """The engine has switched it off, and calls it only when nothing is live."""
    gc.collect()
    gc.disable()
    num_before = num_live_objects()  # the tests before may have left some
    try:
        for number in range(1, 201):
            gateway.send(held(number))
            executor.wait_compiling(number).set_exception(InvalidField("guided_regex", "cannot be compiled"))
            assert gateway.wait_for(Rejected).request_id == number
        assert executor.grammars is not None
        executor.grammars.clear()
        wait_idle(gateway)
        num_left = num_live_objects() - num_before
    finally:
        gc.enable()
    assert num_left <= 160, "400 were made; the queue remembers some of the last ones"


@pytest.mark.parametrize("is_known", [False, True])
def test_one_that_cannot_be_followed_is_refused_by_its_field(
    executor: Recording, gateway: WireGateway, is_known: bool
) -> None:
    error = InvalidField("guided_regex", "cannot be compiled: unclosed group")
    if is_known:
        done: Future[object] = Future()
        done.set_exception(error)
        executor.compile_grammar = lambda grammar, on_done: done  # type: ignore[method-assign]
        gateway.send(held())
    else:
        gateway.send(held())
        executor.wait_compiling().set_exception(error)
    rejected = gateway.wait_for(Rejected)
    assert (rejected.request_id, rejected.code, rejected.field) == (1, "invalid", "guided_regex")
    assert rejected.message == "cannot be compiled: unclosed group"
    wait_idle(gateway)
    gateway.send(submission(1, PROMPT, max_tokens=3))  # neither of its names is in use
    assert gateway.wait_end(1).tokens[0] == executor.expected_tokens(PROMPT, 3)


def test_an_executor_without_grammars_refuses_them(executor: Recording, gateway: WireGateway) -> None:
    executor.grammars = None
    gateway.send(held())
    rejected = gateway.wait_for(Rejected)
    assert (rejected.code, rejected.field) == ("invalid", "guided_regex")
    wait_idle(gateway)


def test_abort_ends_one_that_waits_for_its_grammar(executor: Recording, gateway: WireGateway) -> None:
    gateway.send(held(sampling=follows(n=2)))
    compiling = executor.wait_compiling()
    gateway.send(Abort(1, "cancelled", choice=1))
    gateway.send(Abort(1, "timeout"))
    received = gateway.wait_end(1, num_choices=2)
    assert {choice: end.cause for choice, end in received.finished.items()} == {0: "timeout", 1: "cancelled"}
    wait_idle(gateway)
    assert compiling.cancelled(), "nobody is left to wait for it"
    assert not received.tokens and not executor.plans


def test_a_result_that_comes_after_the_end_changes_nothing(executor: Recording, gateway: WireGateway) -> None:
    gateway.send(held())
    compiling = executor.wait_compiling()
    assert compiling.set_running_or_notify_cancel()
    gateway.send(Abort(1))
    assert gateway.wait_end(1).finished[0].finish_reason == "abort"
    compiling.set_exception(InvalidField("guided_regex", "too late"))
    gateway.pump_for(0.1)
    assert not gateway.messages or not any(isinstance(message, Rejected) for message in gateway.messages)
    wait_idle(gateway)


def test_deadline_ends_one_that_waits_for_its_grammar(executor: Recording, gateway: WireGateway) -> None:
    gateway.send(held(deadline_s=0.05))
    end = gateway.wait_end(1).finished[0]
    assert (end.finish_reason, end.cause) == ("abort", "deadline")
    wait_idle(gateway)


@pytest.mark.parametrize("is_in_time", [True, False])
def test_drain_lets_it_finish_within_the_limit(
    executor: Recording, engine: RunningEngine, gateway: WireGateway, is_in_time: bool
) -> None:
    gateway.send(held())
    compiling = executor.wait_compiling()
    gateway.send(Drain(30.0 if is_in_time else 0.05))
    if is_in_time:
        gateway.pump_for(0.05)
        compiling.set_result("compiled")
    end = gateway.wait_end(1).finished[0]
    assert (end.finish_reason, end.cause) == (("length", "") if is_in_time else ("abort", "drain"))
    assert engine.join() == 0


def test_a_lost_gateway_ends_it_unless_somebody_may_attach(executor: Recording) -> None:
    with serving(executor, gateway_timeout_s=0.5) as engine, WireGateway(engine.endpoint) as second:
        with WireGateway(engine.endpoint) as first:
            first.wait_for(Ready)
            first.send(held(1))
            first.send(held(2, attach_grace_s=30.0))
            executor.wait_compiling(2)
        until_s = time.monotonic() + 30.0
        while stats_of(second).gauges["num_detached_streams"] != 1:
            assert time.monotonic() < until_s
        assert stats_of(second).gauges["num_live_streams"] == 1
        assert executor.grammars is not None
        second.send(Attach(5, (2).to_bytes(16, "big")))
        executor.grammars[1][1].set_result("compiled")
        assert second.wait_end(5).tokens[0] == executor.expected_tokens(PROMPT, 8)
        wait_idle(second)


def test_a_slow_reader_and_a_grammar_are_both_waited_for(executor: Recording, gateway: WireGateway) -> None:
    for request_id, resume_first in ((1, True), (2, False)):
        gateway.send(held(request_id))
        compiling = executor.wait_compiling(request_id)
        gateway.send(Pause(request_id))
        if resume_first:
            gateway.send(Resume(request_id))
            stats_of(gateway)
            gateway.pump_for(0.05)
            assert not gateway.requests[request_id].tokens
            compiling.set_result("compiled")
        else:
            stats_of(gateway)
            compiling.set_result("compiled")
            gateway.pump_for(0.05)
            assert not gateway.requests[request_id].tokens
            gateway.send(Resume(request_id))
        assert gateway.wait_end(request_id).tokens[0] == executor.expected_tokens(PROMPT, 8)
    wait_idle(gateway)


def test_ranked_choices_wait_for_their_grammar_too(executor: Recording, gateway: WireGateway) -> None:
    gateway.send(held(sampling=follows(n=2, best_of=3)))
    compiling = executor.wait_compiling()
    gateway.pump_for(0.05)
    assert not executor.plans
    gateway.send(Pause(1))
    compiling.set_result("compiled")
    assert len(gateway.wait_end(1, num_choices=2).tokens) == 2
    wait_idle(gateway)


def test_those_that_wait_for_grammars_count_as_queued() -> None:
    executor = Recording()
    with serving(executor, max_queue=2, max_num_seqs=1) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        for request_id in range(3):
            gateway.send(held(request_id))
        executor.wait_compiling(3)
        gateway.send(held(3))
        rejected = gateway.wait_for(Rejected)
        assert (rejected.request_id, rejected.code) == (3, "overloaded")
        assert executor.grammars is not None
        for _, compiling in executor.grammars:
            compiling.set_result("compiled")
        for request_id in range(3):
            assert gateway.wait_end(request_id).tokens[0] == executor.expected_tokens(PROMPT, 8)


@pytest.mark.parametrize(
    ("is_running", "code", "field"), [(True, "invalid", "guided_regex"), (False, "overloaded", "")]
)
def test_what_takes_too_long_is_refused(
    executor: Recording, gateway: WireGateway, monkeypatch: pytest.MonkeyPatch, is_running: bool, code: str, field: str
) -> None:
    monkeypatch.setattr(requests, "_COMPILE_LIMIT_S", 0.1)
    gateway.send(held())
    if is_running:
        executor.wait_compiling().set_running_or_notify_cancel()
    rejected = gateway.wait_for(Rejected)
    assert (rejected.request_id, rejected.code, rejected.field) == (1, code, field)
    wait_idle(gateway)


def test_a_continuation_whose_choice_had_ended_is_held_for_the_other(executor: Recording, gateway: WireGateway) -> None:
    prior = [pack_ids([5, 6, 7]), pack_ids(executor.expected_tokens(PROMPT, 3))]
    gateway.send(held(sampling=follows(n=2), prior_token_ids=prior, finished_choices=[0]))
    compiling = executor.wait_compiling()
    compiling.set_result("compiled")
    assert gateway.wait_tokens(1, 5, choice=1) == executor.expected_tokens(PROMPT, 8)[3:]
    wait_idle(gateway)


def test_with_two_steps_in_flight_it_sits_out_until_its_token_is_there() -> None:
    executor = Recording(max_in_flight=2)
    with serving(executor) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        gateway.send(submission(2, PROMPT[1:], max_tokens=60))
        gateway.send(held(sampling=follows(20)))
        executor.wait_compiling().set_result("compiled")
        assert gateway.wait_end(1).tokens[0] == executor.expected_tokens(PROMPT, 20)
        assert gateway.wait_end(2).tokens[0] == executor.expected_tokens(PROMPT[1:], 60)
        wait_idle(gateway)
    names = {
        facts.sequence_id: facts.sampling.grammar is not None for plan in executor.plans for facts in plan.new_sequences
    }
    on_device = [names[entry.sequence_id] for plan in executor.plans for entry in plan.scheduled if not entry.token_ids]
    assert on_device and not any(on_device), "the others run ahead, it does not"


def test_end_of_sequence_is_not_ignored_with_a_grammar(executor: Recording, gateway: WireGateway) -> None:
    sampling = SamplingParams(seed=7, max_tokens=8, temperature=0.0, ignore_eos=True, grammar=GRAMMAR)
    gateway.send(held(sampling=sampling))
    executor.wait_compiling().set_result("compiled")
    gateway.wait_end(1)
    (facts,) = [facts for plan in executor.plans for facts in plan.new_sequences]
    assert facts.eos_token_ids == executor.eos_token_ids
    assert facts.token_ids[:30] == PROMPT
