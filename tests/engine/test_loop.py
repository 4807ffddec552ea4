"""The engine's rules, each over a real socket: the real loop and scheduler, a scripted device."""

import gc
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from engine.executor import DeviceLimits, ReportProgress
from engine.kv.audit import audit
from engine.loop import EXIT_ASKED, EXIT_FAULT, EngineLoop
from engine.plan import StepLoad, StepPlan
from engine.sequence import Request, Sequence
from engine.simulation.simulated_model import end_after
from streamkv.errors import ModelError
from streamkv.process import EXIT_UNUSABLE
from streamkv.protocol import (
    WIRE_VERSION,
    Abort,
    Attach,
    Drain,
    GatewayMessage,
    GetStats,
    Heartbeat,
    Hello,
    Loading,
    ModelFacts,
    Pause,
    Ready,
    Rejected,
    Resume,
    Stats,
    Submit,
    WireError,
    encode,
    pack_ids,
)
from streamkv.sampling import SamplingParams
from tests.support.scripted_engine import TEST_CONFIG, RunningEngine, serving
from tests.support.scripted_executor import ScriptedExecutor, ScriptedLaunch
from tests.support.wire_gateway import WireGateway, submission

PROMPT = list(range(10, 40))
STATES = ("running", "waiting", "paused")


@pytest.fixture
def engine() -> Iterator[RunningEngine]:
    with serving() as running:
        yield running


@pytest.fixture
def gateway(engine: RunningEngine) -> Iterator[WireGateway]:
    with WireGateway(engine.endpoint) as connected:
        connected.wait_for(Ready)
        yield connected


def figures(gateway: WireGateway) -> Stats:
    gateway.send(GetStats(1))
    return gateway.wait_for(Stats)


def wait_idle(gateway: WireGateway, engine: RunningEngine) -> Stats:
    """The engine's figures once nothing runs and no block is owned; the memory is audited then."""
    until_s = time.monotonic() + 5.0
    while True:
        stats = figures(gateway)
        gauges = stats.gauges
        busy = [f"num_{state}_{what}" for state in STATES for what in ("requests", "sequences")]
        if not any(gauges[name] for name in (*busy, "num_allocated_blocks", "num_live_streams")):
            audit(engine.loop._blocks)
            return stats
        assert time.monotonic() < until_s, f"still busy: {gauges}"
        time.sleep(0.01)


# Tokens


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_every_token_of_every_stream_arrives_once_and_in_order(max_in_flight: int) -> None:
    executor = ScriptedExecutor(num_blocks=64, max_in_flight=max_in_flight)
    with serving(executor, max_num_seqs=8) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        for request_id in range(40):
            gateway.send(submission(request_id, PROMPT[request_id % 20 :], max_tokens=1 + request_id))
        for request_id in range(40):
            received = gateway.wait_end(request_id)
            expected = executor.expected_tokens(PROMPT[request_id % 20 :], 1 + request_id)
            assert received.tokens[0] == expected
            assert received.finished[0].finish_reason == "length"
        wait_idle(gateway, engine)


def test_every_choice_ends_once_and_says_which_id_stopped_it() -> None:
    executor = ScriptedExecutor(eos_rule=end_after(5))
    with serving(executor) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        sampling = SamplingParams(seed=3, max_tokens=20, n=3, temperature=1.0)
        gateway.send(submission(1, PROMPT, sampling=sampling))
        received = gateway.wait_end(1, num_choices=3)
        for choice in range(3):
            tokens, reason, cause = executor.expected_output(PROMPT, sampling, choice)
            assert (reason, cause) == ("stop", "eos")
            assert received.tokens[choice] == tokens
            end = received.finished[choice]
            assert (end.finish_reason, end.cause, end.stop_token_id) == ("stop", "eos", tokens[-1])


def test_a_continuation_gives_what_the_uninterrupted_stream_would_have_given(
    engine: RunningEngine, gateway: WireGateway
) -> None:
    whole = engine.executor.expected_tokens(PROMPT, 12)
    for cut in range(12):
        gateway.send(submission(cut, PROMPT, max_tokens=12, prior_token_ids=[pack_ids(whole[:cut])]))
        assert gateway.wait_end(cut).tokens[0] == whole[cut:]


def test_a_continuation_does_not_run_finished_choices_again(engine: RunningEngine, gateway: WireGateway) -> None:
    gateway.send(submission(1, PROMPT, 4, n=2, prior_token_ids=[pack_ids([5, 6])], finished_choices=[0]))
    received = gateway.wait_end(1)
    gateway.pump_for(0.2)
    assert list(received.finished) == [1]
    assert received.tokens == {1: engine.executor.expected_tokens(PROMPT, 4)}


# Hello, versions, bad messages


def test_whoever_has_not_said_hello_is_refused(engine: RunningEngine) -> None:
    with WireGateway(engine.endpoint, say_hello=False) as gateway:
        gateway.send(submission(4, PROMPT))
        error = gateway.wait_for(WireError)
        assert (error.code, error.request_id) == ("hello_first", 4)
        gateway.send(Heartbeat(0))
        assert gateway.wait_for(WireError).code == "hello_first"


def test_another_wire_version_is_refused_and_told_both(engine: RunningEngine) -> None:
    with WireGateway(engine.endpoint, say_hello=False) as gateway:
        gateway.send(Hello(WIRE_VERSION + 41, gateway.gateway_id))
        error = gateway.wait_for(WireError)
        assert error.code == "wire_version"
        assert f"version {WIRE_VERSION} " in error.message and f"version {WIRE_VERSION + 41};" in error.message
        gateway.send(submission(1, PROMPT))
        assert gateway.wait_for(WireError).code == "hello_first"


def test_a_gateway_cannot_say_hello_for_another(engine: RunningEngine) -> None:
    with WireGateway(engine.endpoint, say_hello=False) as gateway:
        gateway.send(Hello(WIRE_VERSION, b"x" * 16))
        assert gateway.wait_for(WireError).code == "undecodable"


def test_messages_of_several_frames_are_refused(gateway: WireGateway) -> None:
    gateway.send_frame(b"", encode(submission(1, PROMPT)))
    assert gateway.wait_for(WireError).code == "undecodable"
    gateway.send(submission(1, PROMPT))
    gateway.wait_end(1)


ONE = SamplingParams(seed=0, max_tokens=4, temperature=0.0)
BAD_SUBMITS: list[tuple[str, Submit]] = [
    ("stream_id", Submit(1, b"short", pack_ids([1]), ONE)),
    ("prompt_token_ids", submission(1, [])),
    ("prompt_token_ids", submission(1, [5, 1000])),
    ("prompt_token_ids", submission(1, [-1])),
    ("prompt_token_ids", Submit(1, b"s" * 16, b"abc", ONE)),
    ("prompt", submission(1, [3] * 2048)),
    ("min_tokens", submission(1, [3] * 2000, sampling=SamplingParams(seed=0, max_tokens=90, min_tokens=90))),
    ("stop_token_ids", submission(1, [3], sampling=SamplingParams(seed=0, max_tokens=9, stop_token_ids=[1000]))),
    ("prior_token_ids", submission(1, [3], 4, prior_token_ids=[pack_ids([1, 2, 3, 4])])),
    ("prior_token_ids", submission(1, [3], 4, prior_token_ids=[b"", b""])),
    ("prior_token_ids", submission(1, [3], 4, prior_token_ids=[pack_ids([1000])])),
    ("finished_choices", submission(1, [3], 4, finished_choices=[0])),
    ("finished_choices", submission(1, [3], 4, finished_choices=[1])),
    ("finished_choices", submission(1, [3], 4, n=3, finished_choices=[1, 1])),
    ("deadline_s", submission(1, [3], deadline_s=float("nan"))),
    ("deadline_s", submission(1, [3], deadline_s=-1.0)),
    ("attach_grace_s", submission(1, [3], attach_grace_s=float("inf"))),
    ("priority", submission(1, [3], priority=2**40)),
    ("gateway_state", submission(1, [3], gateway_state=b"x" * (1024 * 1024 + 1))),
]


@pytest.mark.parametrize(("field", "submit"), BAD_SUBMITS, ids=[f"{i}-{f}" for i, (f, _) in enumerate(BAD_SUBMITS)])
def test_a_bad_field_is_refused_by_name(gateway: WireGateway, field: str, submit: Submit) -> None:
    gateway.send(submit)
    rejected = gateway.wait_for(Rejected)
    assert (rejected.request_id, rejected.code, rejected.field) == (1, "invalid", field)
    assert rejected.message


def test_a_request_id_outside_int32_is_refused(gateway: WireGateway) -> None:
    for request_id in (-1, 2**31, 2**63):
        gateway.send(submission(request_id, PROMPT, stream_id=b"i" * 16))
        assert gateway.wait_for(Rejected).field == "request_id"


def test_bad_sampling_is_refused_by_name_although_it_does_not_decode(gateway: WireGateway) -> None:
    sampling = SamplingParams(seed=7, max_tokens=4, temperature=0.0)
    frame, good = encode(submission(6, PROMPT, sampling=sampling)), encode(sampling)
    assert frame.count(good) == 1 and good.count(b"\x07\x04") == 1, "seed 7, max_tokens 4"
    gateway.send_frame(frame.replace(good, good.replace(b"\x07\x04", b"\x07\x00")))
    rejected = gateway.wait_for(Rejected)
    assert (rejected.request_id, rejected.code, rejected.field) == (6, "invalid", "max_tokens")


def test_a_live_request_id_or_stream_id_is_not_taken_twice(gateway: WireGateway) -> None:
    with_id = submission(1, PROMPT, max_tokens=1900)
    gateway.send(with_id)
    gateway.wait_tokens(1, 1)
    gateway.send(submission(1, PROMPT, stream_id=b"other stream id."))
    assert gateway.wait_for(Rejected).code == "duplicate"
    gateway.send(submission(2, PROMPT, stream_id=with_id.stream_id))
    rejected = gateway.wait_for(Rejected)
    assert (rejected.request_id, rejected.code) == (2, "duplicate")
    gateway.send(Abort(1))
    gateway.wait_end(1)
    gateway.send(submission(1, PROMPT, 3, stream_id=with_id.stream_id))
    del gateway.requests[1]
    assert gateway.wait_end(1).finished[0].finish_reason == "length"


def test_beyond_the_queue_bound_requests_are_refused_with_a_time_to_come_back() -> None:
    executor = ScriptedExecutor(step_s=0.02)
    with (
        serving(executor, max_num_seqs=1, max_queue=2) as engine,
        WireGateway(engine.endpoint) as gateway,
    ):
        gateway.wait_for(Ready)
        for request_id in range(8):
            gateway.send(submission(request_id, PROMPT, max_tokens=8))
        rejected = [gateway.wait_for(Rejected) for _ in range(5)]
        assert {message.code for message in rejected} == {"overloaded"}
        assert all(message.retry_after_s >= 1.0 for message in rejected)
        refused = {message.request_id for message in rejected}
        for request_id in set(range(8)) - refused:
            gateway.wait_end(request_id)
        counters = wait_idle(gateway, engine).counters
        assert counters['requests_rejected_total{code="overloaded"}'] == 5
        assert counters["requests_received_total"] == 8


def test_the_time_to_come_back_is_that_in_which_what_waits_is_served() -> None:
    with (
        serving(ScriptedExecutor(step_s=0.05), max_num_seqs=1, max_queue=3) as engine,
        WireGateway(engine.endpoint) as gateway,
    ):
        gateway.wait_for(Ready)
        gateway.send(submission(0, PROMPT, max_tokens=100))
        gateway.wait_tokens(0, 8)
        for request_id in range(1, 5):
            gateway.send(submission(request_id, PROMPT, max_tokens=100))
        # Nearly 400 tokens, one at a time: the clock can be late, never early.
        assert 15.0 <= gateway.wait_for(Rejected).retry_after_s <= 120.0


# Loading


def test_while_the_model_loads_the_engine_answers_with_its_progress() -> None:
    with serving(ScriptedExecutor(load_s=0.8)) as engine, WireGateway(engine.endpoint) as gateway:
        loading = gateway.wait_for(Loading)
        assert loading.stage
        gateway.send(submission(3, PROMPT))
        error = gateway.wait_for(WireError)
        assert (error.code, error.request_id) == ("not_ready", 3)
        gateway.wait_for(Heartbeat)
        gateway.send(GetStats(5))
        assert gateway.wait_for(Stats).query_id == 5
        ready = gateway.wait_for(Ready)
        assert ready.epoch and ready.model.vocab_size == 1000
        assert any(isinstance(message, Loading) and message.percent >= 50 for message in gateway.messages)
        gateway.send(submission(3, PROMPT))
        gateway.wait_end(3)


def test_drain_while_loading_ends_at_once() -> None:
    with serving(ScriptedExecutor(load_s=3.0)) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Loading)
        gateway.send(Drain(30.0))
        assert engine.join(1.0) == EXIT_ASKED


class BrokenExecutor(ScriptedExecutor):
    def __init__(self, error: Exception) -> None:
        super().__init__(threaded=False)
        self.error = error

    def load(self, report: ReportProgress) -> tuple[ModelFacts, DeviceLimits]:
        raise self.error


@pytest.mark.parametrize(("error", "code"), [(ModelError("no weights"), EXIT_UNUSABLE), (OSError("disk"), EXIT_FAULT)])
def test_a_model_that_does_not_load_ends_the_engine_with_an_honest_code(error: Exception, code: int) -> None:
    with serving(BrokenExecutor(error)) as engine:
        assert engine.join(5.0) == code


# Sleep and wake


def test_an_idle_engine_uses_no_cpu() -> None:
    with serving(heartbeat_s=1.0) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        gateway.send(submission(1, PROMPT, max_tokens=4))
        gateway.wait_end(1)
        before = time.process_time()
        time.sleep(2.0)
        assert time.process_time() - before < 0.02, "1 % of two seconds"


def test_an_engine_whose_streams_are_all_paused_uses_no_cpu() -> None:
    with serving(heartbeat_s=1.0) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        gateway.send(submission(1, PROMPT, max_tokens=1500))
        gateway.send(Pause(1))
        gateway.pump_for(0.3)
        before = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - before < 0.01


def test_a_request_wakes_an_idle_engine_at_once(gateway: WireGateway) -> None:
    delays = []
    for request_id in range(15):
        time.sleep(0.02)
        start = time.perf_counter()
        gateway.send(submission(request_id, PROMPT, max_tokens=1))
        gateway.wait_end(request_id)
        delays.append(time.perf_counter() - start)
    assert statistics.median(delays) < 0.02, "far under the heartbeat of 100 ms"


# Abort, pause, deadline


@pytest.mark.parametrize("phase", ["waiting", "prefill", "decode", "paused"])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_abort_frees_every_block_in_every_phase(phase: str, max_in_flight: int) -> None:
    executor = ScriptedExecutor(step_s=0.005, max_in_flight=max_in_flight)
    settings = {"max_prefill_tokens": 16, "max_num_seqs": 1 if phase == "waiting" else 8}
    with serving(executor, **settings) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        if phase == "waiting":
            gateway.send(submission(9, PROMPT, max_tokens=1500))
            gateway.wait_tokens(9, 1)
        gateway.send(submission(1, [7] * 1000 if phase == "prefill" else PROMPT, max_tokens=900))
        if phase in ("decode", "paused"):
            gateway.wait_tokens(1, 3)
        if phase == "paused":
            gateway.send(Pause(1))
        gateway.pump_for(0.05)
        if phase in ("waiting", "prefill"):
            assert not gateway.requests[1].tokens[0]
        gateway.send(Abort(1, "disconnected"))
        end = gateway.wait_end(1).finished[0]
        assert (end.finish_reason, end.cause) == ("abort", "disconnected")
        gateway.send(Abort(9, "cancelled"))
        gateway.wait_end(9)
        stats = wait_idle(gateway, engine)
        assert stats.counters['aborts_total{cause="disconnected"}'] == 1


def test_abort_of_an_unknown_request_is_answered(gateway: WireGateway) -> None:
    gateway.send(Abort(77, "timeout"))
    end = gateway.wait_end(77).finished[0]
    assert (end.finish_reason, end.cause) == ("abort", "timeout")


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_abort_of_one_choice_leaves_the_others(max_in_flight: int) -> None:
    executor = ScriptedExecutor(step_s=0.003, max_in_flight=max_in_flight)
    sampling = SamplingParams(seed=5, max_tokens=80, n=3)
    with serving(executor) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        gateway.send(submission(1, PROMPT, sampling=sampling))
        gateway.wait_tokens(1, 5, choice=1)
        for _ in range(2):
            gateway.send(Abort(1, "stop_string", 1))
        for choice in (3, 2**31 - 1):
            gateway.send(Abort(1, "cancelled", choice))
        received = gateway.wait_end(1, 3)
        assert (received.finished[1].finish_reason, received.finished[1].cause) == ("abort", "stop_string")
        assert 5 <= len(received.tokens[1]) < 80
        for choice in range(3):
            expected = executor.expected_tokens(PROMPT, len(received.tokens[choice]), sampling, choice)
            assert received.tokens[choice] == expected
        assert [received.finished[choice].finish_reason for choice in (0, 2)] == ["length", "length"]
        wait_idle(gateway, engine)


@pytest.mark.parametrize("phase", ["waiting", "prefill", "paused"])
def test_abort_of_the_choice_that_the_others_wait_for_lets_another_take_over(phase: str) -> None:
    prompt, sampling = [7] * 400, SamplingParams(seed=5, max_tokens=6, n=3)
    executor = ScriptedExecutor(step_s=0.005)
    settings = {"max_prefill_tokens": 16, "max_num_seqs": 1 if phase == "waiting" else 8}
    with serving(executor, **settings) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        if phase == "waiting":
            gateway.send(submission(9, PROMPT, max_tokens=200))
            gateway.wait_tokens(9, 1)
        gateway.send(submission(1, prompt, sampling=sampling))
        gateway.pump_for(0.03)
        if phase == "paused":
            gateway.send(Pause(1))
        gateway.send(Abort(1, "cancelled", 0))
        if phase == "paused":
            gateway.send(Resume(1))
        received = gateway.wait_end(1, 3)
        assert received.finished[0].cause == "cancelled" and not received.tokens[0]
        for choice in (1, 2):
            assert received.tokens[choice] == executor.expected_tokens(prompt, 6, sampling, choice)
        if phase == "waiting":
            gateway.wait_end(9)
        wait_idle(gateway, engine)


def test_a_request_whose_choices_are_aborted_one_by_one_has_ended(gateway: WireGateway, engine: RunningEngine) -> None:
    gateway.send(submission(1, PROMPT, max_tokens=1500, n=2))
    gateway.wait_tokens(1, 2)
    for choice in (1, 0):
        gateway.send(Abort(1, "stop_string", choice))
    received = gateway.wait_end(1, 2)
    assert [received.finished[choice].cause for choice in (0, 1)] == ["stop_string", "stop_string"]
    stats = wait_idle(gateway, engine)
    assert stats.counters['requests_ended_total{reason="abort"}'] == 1
    del gateway.requests[1]
    gateway.send(submission(1, PROMPT, max_tokens=3))
    assert gateway.wait_end(1).finished[0].finish_reason == "length", "its number is free again"


def test_a_stream_is_unknown_to_other_tenants() -> None:
    with (
        serving(ScriptedExecutor(step_s=0.003)) as engine,
        WireGateway(engine.endpoint) as gateway,
        WireGateway(engine.endpoint) as other,
    ):
        for connected in (gateway, other):
            connected.wait_for(Ready)
        gateway.send(submission(1, PROMPT, max_tokens=60, attach_grace_s=20.0, tenant="alice"))
        gateway.wait_tokens(1, 3)
        stream_id = (1).to_bytes(16, "big")
        for tenant in ("bob", "", "alice "):
            other.send(Attach(5, stream_id, 0, tenant))
            assert other.wait_for(Rejected).code == "unknown_stream"
        other.send(Attach(5, stream_id, 0, "alice"))
        other.wait_end(5)
        assert gateway.wait_end(1).finished[0].cause == "attached_elsewhere"
        other.send(Attach(6, stream_id, 0, "bob"))  # kept after its end
        assert other.wait_for(Rejected).code == "unknown_stream"
        other.send(Attach(6, stream_id, 0, "alice"))
        assert other.wait_end(6).tokens[0] == other.requests[5].tokens[0]


@pytest.mark.parametrize(
    ("first", "second", "is_found"),
    [
        ({}, {}, True),
        ({"tenant": "a"}, {"tenant": "a"}, True),
        ({"tenant": "a"}, {"tenant": "b"}, False),
        ({"tenant": "a"}, {}, False),
        ({"tenant": "a"}, {"tenant": "a", "cache_salt": "s"}, False),
        ({"tenant": "a", "cache_salt": "s"}, {"tenant": "a", "cache_salt": "s"}, True),
        ({"tenant": "a", "shares_prefix": True}, {"tenant": "b", "shares_prefix": True}, True),
        ({"tenant": "a", "shares_prefix": True}, {}, True),
        ({"tenant": "a", "shares_prefix": True}, {"tenant": "a"}, False),
        ({"tenant": "a"}, {"tenant": "b", "shares_prefix": True}, False),
        (
            {"tenant": "a", "shares_prefix": True, "cache_salt": "s"},
            {"tenant": "b", "shares_prefix": True, "cache_salt": "s"},
            True,
        ),
        ({"tenant": "a", "shares_prefix": True, "cache_salt": "s"}, {"tenant": "b", "shares_prefix": True}, False),
    ],
)
def test_prefixes_are_found_within_tenant_and_salt_or_among_those_who_share(
    gateway: WireGateway, first: dict[str, str | bool], second: dict[str, str | bool], is_found: bool
) -> None:
    gateway.send(submission(1, PROMPT, max_tokens=2, **first))
    assert gateway.wait_end(1).finished[0].num_cached_tokens == 0
    gateway.send(submission(2, PROMPT, max_tokens=2, **second))
    assert gateway.wait_end(2).finished[0].num_cached_tokens == (len(PROMPT) - 1 if is_found else 0)


def test_pause_stops_one_stream_and_resume_goes_on_where_it_stopped() -> None:
    executor = ScriptedExecutor(step_s=0.002)
    with serving(executor) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        for request_id in (1, 2):
            gateway.send(submission(request_id, PROMPT, max_tokens=120))
        gateway.wait_tokens(1, 5)
        gateway.send(Pause(1))
        gateway.pump_for(0.05)
        stopped_at = len(gateway.requests[1].tokens[0])
        assert stopped_at < 120
        gateway.wait_end(2)
        gateway.pump_for(0.1)
        assert len(gateway.requests[1].tokens[0]) == stopped_at
        gateway.send(Pause(555))
        gateway.send(Resume(555))
        gateway.send(Resume(1))
        assert gateway.wait_end(1).tokens[0] == executor.expected_tokens(PROMPT, 120)


def test_a_deadline_aborts_whatever_the_request_does() -> None:
    with serving(ScriptedExecutor(step_s=0.005)) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        start = time.monotonic()
        gateway.send(submission(1, PROMPT, max_tokens=1500, deadline_s=0.3))
        gateway.send(submission(2, PROMPT, max_tokens=1500, deadline_s=0.3))
        gateway.send(Pause(2))
        for request_id in (1, 2):
            end = gateway.wait_end(request_id).finished[0]
            assert (end.finish_reason, end.cause) == ("abort", "deadline")
        assert 0.25 < time.monotonic() - start < 1.5
        wait_idle(gateway, engine)


# Attach


def test_attach_from_another_gateway_gives_the_same_stream_at_every_cut() -> None:
    executor = ScriptedExecutor(step_s=0.002)
    num_tokens = 24
    expected = executor.expected_tokens(PROMPT, num_tokens)
    with (
        serving(executor) as engine,
        WireGateway(engine.endpoint) as first,
        WireGateway(engine.endpoint) as second,
    ):
        first.wait_for(Ready)
        second.wait_for(Ready)
        for cut in range(num_tokens + 1):
            submit = submission(cut, PROMPT, num_tokens, attach_grace_s=5.0, gateway_state=b"state %d" % cut)
            first.send(submit)
            figures(first)  # its answer comes behind the Submit, which the other gateway's Attach could overtake
            had = first.wait_tokens(cut, cut)[:cut]
            second.send(Attach(100 + cut, submit.stream_id, from_token=cut))
            received = second.wait_end(100 + cut)
            assert had + received.tokens[0] == expected
            assert received.finished[0].finish_reason == "length"
            assert received.attached is not None
            assert received.attached.gateway_state == submit.gateway_state
            assert received.attached.prompt_token_ids == submit.prompt_token_ids
            end = first.wait_end(cut).finished[0]  # by `length` if the stream had ended before it was taken over
            assert (end.finish_reason, end.cause) in [("abort", "attached_elsewhere"), ("length", "")]
        wait_idle(first, engine)


def test_attach_brings_every_choice_and_its_end() -> None:
    executor = ScriptedExecutor(step_s=0.002)
    sampling = SamplingParams(seed=3, max_tokens=30, n=3, temperature=1.0)
    with serving(executor) as engine, WireGateway(engine.endpoint) as first, WireGateway(engine.endpoint) as second:
        first.wait_for(Ready)
        submit = submission(1, PROMPT, sampling=sampling, attach_grace_s=5.0)
        first.send(submit)
        first.wait_tokens(1, 4, choice=2)
        second.send(Attach(1, submit.stream_id, from_token=0))
        received = second.wait_end(1, num_choices=3)
        for choice in range(3):
            assert received.tokens[choice] == executor.expected_output(PROMPT, sampling, choice)[0]


def test_a_stream_can_be_attached_after_its_end_until_its_grace_period_is_over() -> None:
    with serving() as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        submit = submission(1, PROMPT, 6, attach_grace_s=0.6)
        gateway.send(submit)
        tokens = gateway.wait_end(1).tokens[0]
        for request_id, from_token in ((2, 0), (3, 4), (4, 6)):
            gateway.send(Attach(request_id, submit.stream_id, from_token))
            received = gateway.wait_end(request_id)
            assert received.tokens[0] == tokens[from_token:]
            assert received.finished[0].finish_reason == "length"
        gateway.send(Attach(5, submit.stream_id, 7))
        rejected = gateway.wait_for(Rejected)
        assert (rejected.code, rejected.field) == ("invalid", "from_token")
        assert figures(gateway).gauges["num_kept_streams"] == 1
        gateway.pump_for(0.8)
        gateway.send(Attach(6, submit.stream_id))
        assert gateway.wait_for(Rejected).code == "unknown_stream"
        assert figures(gateway).gauges["num_kept_streams"] == 0


def test_a_stream_without_a_grace_period_is_nobody_elses() -> None:
    with serving() as engine, WireGateway(engine.endpoint) as first, WireGateway(engine.endpoint) as second:
        first.wait_for(Ready)
        submit = submission(1, PROMPT, 1500)
        first.send(submit)
        first.wait_tokens(1, 1)
        second.send(Attach(1, submit.stream_id))
        assert second.wait_for(Rejected).code == "unknown_stream"


def test_a_gateway_that_reconnects_takes_up_its_own_stream_without_a_gap() -> None:
    executor = ScriptedExecutor(step_s=0.002)
    with serving(executor) as engine:
        with WireGateway(engine.endpoint) as before:
            before.wait_for(Ready)
            submit = submission(1, PROMPT, 60)
            before.send(submit)
            had = list(before.wait_tokens(1, 5))
        time.sleep(0.05)  # what is published now cannot be addressed
        with WireGateway(engine.endpoint, gateway_id=before.gateway_id) as after:
            after.wait_for(Ready)
            after.send(Attach(2, submit.stream_id, len(had)))
            assert had + after.wait_end(2).tokens[0] == executor.expected_tokens(PROMPT, 60)


# Gateways that fall silent or do not read


def test_a_silent_gateway_is_gone_and_only_its_reattachable_streams_go_on() -> None:
    executor = ScriptedExecutor(step_s=0.002)
    expected = executor.expected_tokens(PROMPT, 400)
    with (
        serving(executor, gateway_timeout_s=0.4) as engine,
        WireGateway(engine.endpoint) as silent,
        WireGateway(engine.endpoint, heartbeat_s=0.1) as other,
    ):
        silent.wait_for(Ready)
        kept = submission(2, PROMPT, 400, attach_grace_s=20.0)
        silent.send(submission(1, PROMPT, 1900))
        silent.send(kept)
        silent.send(submission(3, PROMPT, 1900, attach_grace_s=0.5))
        silent.send(Pause(2))
        other.pump_for(0.7)
        gauges = figures(other).gauges
        assert (gauges["num_live_streams"], gauges["num_detached_streams"]) == (2, 2)
        counters = figures(other).counters
        assert counters['aborts_total{cause="gateway_lost"}'] == 1
        other.pump_for(0.8)  # nobody comes for request 3
        assert figures(other).counters['aborts_total{cause="gateway_lost"}'] == 2
        other.send(Attach(1, kept.stream_id))
        assert other.wait_end(1).tokens[0] == expected
        wait_idle(other, engine)

        silent.send(Heartbeat(0))
        assert silent.wait_for(WireError).code == "hello_first"
        silent.send(Hello(WIRE_VERSION, silent.gateway_id))
        silent.wait_for(Ready)


def test_time_in_which_the_engine_could_not_listen_is_nobodys_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen_s = 0.0
    clocked = partial(EngineLoop, clock=lambda: time.monotonic() + frozen_s)
    monkeypatch.setattr("tests.support.scripted_engine.EngineLoop", clocked)
    executor = ScriptedExecutor(step_s=0.004)
    with serving(executor) as engine, WireGateway(engine.endpoint, heartbeat_s=60.0) as gateway:
        gateway.wait_for(Ready)
        gateway.send(submission(1, PROMPT, 150))
        gateway.wait_tokens(1, 5)
        frozen_s = 1000.0
        assert gateway.wait_end(1).tokens[0] == executor.expected_tokens(PROMPT, 150)
        frozen_s += 2 * TEST_CONFIG["gateway_timeout_s"]
        gateway.pump_for(0.5)
        gateway.send(submission(2, PROMPT, 3))
        assert gateway.wait_end(2).finished[0].finish_reason == "length", "it need not say Hello again"


def test_a_gateway_that_does_not_acknowledge_pauses_at_the_bound_and_loses_nothing() -> None:
    executor = ScriptedExecutor(num_blocks=2000)
    settings = {"max_unacked_bytes": 4096}
    with (
        serving(executor, **settings) as engine,
        WireGateway(engine.endpoint, auto_acknowledge=False, heartbeat_s=0.2) as slow,
        WireGateway(engine.endpoint) as quick,
    ):
        slow.wait_for(Ready)
        for request_id in range(8):
            slow.send(submission(request_id, PROMPT, 150))
        quick.wait_for(Ready)
        while figures(quick).gauges["num_paused_requests"] < 8:
            slow.pump_for(0.05)
        slow.pump_for(0.3)
        stopped_at = slow.num_bytes
        assert 2048 < stopped_at <= 4096
        quick.send(submission(1, PROMPT, 150, stream_id=b"of the quick one"))
        quick.wait_end(1)
        slow.pump_for(0.3)
        assert slow.num_bytes == stopped_at
        gauges = figures(slow).gauges
        assert gauges["unacked_bytes"] == stopped_at and gauges["num_paused_requests"] == 8
        slow.send(submission(99, PROMPT, 5))  # comes in while its gateway is over the bound
        slow.pump_for(0.2)
        assert not slow.requests[99].tokens[0]

        largest_gap, acknowledged = 0, 0
        while len([r for r in slow.requests.values() if r.finished]) < 9:
            before = slow.num_bytes
            slow.acknowledge()
            slow.pump_for(0.05)
            largest_gap = max(largest_gap, slow.num_bytes - before)
            acknowledged += 1
            assert acknowledged < 200
        assert largest_gap <= 2 * 4096, "what was on its way, and what the acknowledgement made room for"
        expected = executor.expected_tokens(PROMPT, 150)
        assert all(slow.requests[request_id].tokens[0] == expected for request_id in range(8))
        assert slow.requests[99].tokens[0] == expected[:5]


def test_acknowledgements_of_another_epoch_do_not_count() -> None:
    with (
        serving(max_unacked_bytes=4096) as engine,
        WireGateway(engine.endpoint, auto_acknowledge=False) as gateway,
    ):
        gateway.wait_for(Ready)
        gateway.send(submission(1, PROMPT, 1500))
        gateway.pump_for(0.4)
        before = gateway.num_bytes
        gateway.send(Heartbeat(2**40, gateway.epoch + 1))
        gateway.pump_for(0.2)
        assert gateway.num_bytes == before > 1000


# The end


def test_drain_refuses_new_work_and_lets_live_streams_finish() -> None:
    executor = ScriptedExecutor(step_s=0.003)
    with serving(executor) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        gateway.send(submission(1, PROMPT, 60))
        gateway.wait_tokens(1, 2)
        gateway.send(Drain(20.0))
        gateway.send(submission(2, PROMPT, 5))
        assert gateway.wait_for(Rejected).code == "draining"
        assert gateway.wait_end(1).tokens[0] == executor.expected_tokens(PROMPT, 60)
        assert engine.join(3.0) == EXIT_ASKED


def test_drain_aborts_what_outlives_its_limit() -> None:
    with serving(ScriptedExecutor(step_s=0.003)) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        gateway.send(submission(1, PROMPT, 1900))
        gateway.send(submission(2, PROMPT, 1900))
        gateway.send(Pause(2))
        gateway.wait_tokens(1, 2)
        start = time.monotonic()
        engine.loop.drain(0.3)
        for request_id in (1, 2):
            end = gateway.wait_end(request_id).finished[0]
            assert (end.finish_reason, end.cause) == ("abort", "drain")
        assert engine.join(3.0) == EXIT_ASKED
        assert 0.25 < time.monotonic() - start < 1.5


def test_drain_of_an_idle_engine_ends_it_at_once() -> None:
    with serving() as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        gateway.send(Drain(60.0))
        assert engine.join(1.0) == EXIT_ASKED


def test_stop_ends_at_once() -> None:
    with serving(ScriptedExecutor(step_s=0.01)) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        gateway.send(submission(1, PROMPT, 1900))
        gateway.wait_tokens(1, 1)
        engine.loop.stop()
        assert engine.join(1.0) == EXIT_ASKED


def test_a_failed_step_ends_the_engine_without_a_terminal_event() -> None:
    with serving(ScriptedExecutor(fail_at_step=4)) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        gateway.send(submission(1, PROMPT, 50))
        assert engine.join(5.0) == EXIT_FAULT
        gateway.pump_for(0.2)
        assert not gateway.requests[1].finished, "the stream goes on in the next engine"


def test_every_engine_start_has_an_epoch_of_its_own() -> None:
    epochs = set()
    for _ in range(3):
        with serving() as engine, WireGateway(engine.endpoint) as gateway:
            epochs.add(gateway.wait_for(Ready).epoch)
    assert len(epochs) == 3


# Figures and progress


def test_counters_add_up_to_the_requests_sent(engine: RunningEngine, gateway: WireGateway) -> None:
    for request_id in range(10):
        gateway.send(submission(request_id, PROMPT, 3))
    gateway.send(submission(10, PROMPT, 1900))
    gateway.wait_tokens(10, 1)
    gateway.send(Abort(10, "stop_string"))
    gateway.send(submission(11, []))
    for request_id in range(11):
        gateway.wait_end(request_id)
    stats = wait_idle(gateway, engine)
    counters = stats.counters
    ended = sum(count for name, count in counters.items() if name.startswith("requests_ended_total"))
    rejected = sum(count for name, count in counters.items() if name.startswith("requests_rejected_total"))
    assert counters["requests_received_total"] == 12 == ended + rejected
    assert rejected == 1
    assert sum(stats.histograms["engine_e2e_seconds"].counts) == 11
    assert sum(stats.histograms["engine_time_to_first_token_seconds"].counts) == 11
    assert counters["generated_tokens_total"] >= 31
    assert stats.gauges["tokens_per_second"] > 0


def test_requests_are_counted_as_requests_however_many_choices_they_have() -> None:
    with (
        serving(ScriptedExecutor(num_blocks=1024, step_s=0.005), max_num_seqs=4) as engine,
        WireGateway(engine.endpoint) as gateway,
    ):
        gateway.wait_for(Ready)
        for request_id in range(3):
            gateway.send(submission(request_id, PROMPT, 1900, n=3))
        gateway.wait_tokens(0, 3)
        gateway.send(Pause(0))
        gateway.wait_tokens(1, 1)
        gateway.wait_tokens(2, 1)
        # The choices behind the first are admitted a step or two after it.
        until_s = time.monotonic() + 10.0
        while [figures(gateway).gauges[f"num_{state}_sequences"] for state in STATES] != [4, 2, 3]:
            assert time.monotonic() < until_s
        gauges = figures(gateway).gauges
        assert [gauges[f"num_{state}_requests"] for state in STATES] == [2, 0, 1]
        for request_id in range(3):
            gateway.send(Abort(request_id))
            gateway.wait_end(request_id, num_choices=3)
        stats = wait_idle(gateway, engine)
        assert stats.counters['requests_ended_total{reason="abort"}'] == 3
        assert stats.counters['aborts_total{cause="cancelled"}'] == 3
        assert sum(stats.histograms["engine_e2e_seconds"].counts) == 3


def test_odd_abort_causes_do_not_become_metrics(gateway: WireGateway) -> None:
    for number, cause in enumerate(['x"} 1\nfake 2', "Ä" * 100, "", *[f"cause_{n}" for n in range(40)]]):
        gateway.send(submission(number, PROMPT, 1900))
        gateway.send(Abort(number, cause))
        assert gateway.wait_end(number).finished[0].cause == cause
    names = [name for name in figures(gateway).counters if name.startswith("aborts_total")]
    assert len(names) <= 33
    assert figures(gateway).counters['aborts_total{cause="other"}'] >= 10


def test_heartbeats_show_a_step_that_hangs() -> None:
    with (
        serving(ScriptedExecutor(block_at_step={2: 0.8})) as engine,
        WireGateway(engine.endpoint) as gateway,
    ):
        gateway.wait_for(Ready)
        gateway.send(submission(1, PROMPT, 6))
        gateway.wait_end(1)
        beats = [message for message in gateway.messages if isinstance(message, Heartbeat)]
        assert max(beat.step_age_s for beat in beats if beat.has_work) > 0.5
        gateway.messages.clear()
        gateway.pump_for(0.3)
        beats = [message for message in gateway.messages if isinstance(message, Heartbeat)]
        assert beats and not any(beat.has_work or beat.step_age_s for beat in beats)


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_step_is_observed_without_the_time_that_it_waited_for_the_one_before(max_in_flight: int) -> None:
    with (
        serving(ScriptedExecutor(step_s=0.02, max_in_flight=max_in_flight)) as engine,
        WireGateway(engine.endpoint) as gateway,
    ):
        gateway.wait_for(Ready)
        observed: list[tuple[StepLoad, float]] = []
        engine.loop._latency.observe = lambda load, seconds: observed.append((load, seconds))
        started_s = time.monotonic()
        gateway.send(submission(1, PROMPT, 20))
        gateway.wait_end(1)
        took_s = time.monotonic() - started_s
        assert len(observed) >= 20 and all(seconds >= 0.015 for _, seconds in observed)
        assert sum(seconds for _, seconds in observed) <= took_s
        assert observed[0][0] == StepLoad().with_chunk(len(PROMPT), 0)
        assert observed[3][0] == StepLoad(num_decodes=1, num_decode_kv_tokens=len(PROMPT) + 3)


def test_heartbeats_say_how_long_the_running_step_should_take() -> None:
    with (
        serving(ScriptedExecutor(step_s=0.05), heartbeat_s=0.02) as engine,
        WireGateway(engine.endpoint) as gateway,
    ):
        gateway.wait_for(Ready)
        assert gateway.wait_for(Heartbeat).expected_step_s == 0.0
        gateway.send(submission(1, PROMPT, 400))
        gateway.wait_tokens(1, 30)
        assert figures(gateway).gauges["latency_model_error"] > 0.0, "the first step could not be predicted"
        gateway.messages.clear()
        # One that says nothing runs was sent between two steps, as all are that are due when steps end.
        beats = (gateway.wait_for(Heartbeat).expected_step_s for _ in range(40))
        assert next(filter(None, beats)) >= 0.04


def test_steps_that_are_found_done_together_took_as_long_as_they_took() -> None:
    executor = ScriptedExecutor(step_s=0.02, max_in_flight=2)
    with serving(executor) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        observed: list[float] = []

        def observe(load: StepLoad, seconds: float) -> None:
            observed.append(seconds)
            time.sleep(0.05)  # so two are done when it comes round

        engine.loop._latency.observe = observe
        gateway.send(submission(1, PROMPT, 20))
        gateway.wait_end(1)
    assert len(observed) >= 20 and all(seconds >= 0.015 for seconds in observed)


def times_of_steps(executor: ScriptedExecutor, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], dict[int, float]]:
    """When each step is launched, and when it is done; both grow as it runs."""
    launched_s: list[float] = []
    done_s: dict[int, float] = {}
    launch = executor.launch

    def watched(plan: StepPlan, on_done: Callable[[], None]) -> ScriptedLaunch:
        step = len(launched_s)

        def tell() -> None:
            done_s[step] = time.monotonic()
            on_done()

        launched_s.append(time.monotonic())
        return launch(plan, tell)

    monkeypatch.setattr(executor, "launch", watched)
    return launched_s, done_s


def test_behind_a_long_step_the_next_is_planned_late_and_before_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes while a long step runs is in the one behind it, and the device does not wait."""
    step_s = 0.04
    executor = ScriptedExecutor(step_s=step_s, max_in_flight=2)
    launched_s, done_s = times_of_steps(executor, monkeypatch)
    with serving(executor) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        engine.loop._latency.predict_s = lambda load: step_s
        gateway.send(submission(1, PROMPT, 20))
        gateway.wait_end(1)
        begun_s = [max(launched_s[step], done_s.get(step - 1, 0.0)) for step in range(19)]
        waited_s = [later - sooner for sooner, later in zip(begun_s, launched_s[1:], strict=True)]
        assert all(seconds >= 0.8 * step_s - 0.004 - 0.002 for seconds in waited_s)
        assert any(launched_s[step + 1] < done_s[step] for step in range(19)), "none is planned before the end"
        engine.loop._latency.predict_s = lambda load: 0.004  # a short one leaves no time to wait
        gateway.send(submission(2, PROMPT, 4))
        gateway.wait_end(2)
        assert any(launched_s[step + 1] < done_s[step] - step_s / 2 for step in range(20, 23))


def test_a_turn_that_ends_after_the_time_to_plan_does_not_sleep_past_it(monkeypatch: pytest.MonkeyPatch) -> None:
    step_s = 0.2
    executor = ScriptedExecutor(step_s=step_s, max_in_flight=2)
    launched_s, done_s = times_of_steps(executor, monkeypatch)
    with serving(executor, heartbeat_s=30.0) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        publish = engine.loop._publish

        def publish_slowly() -> None:
            has_output = bool(engine.loop._outputs)
            publish()
            if has_output:
                time.sleep(0.8 * step_s)  # the next one was to be planned a little before

        engine.loop._publish = publish_slowly
        engine.loop._latency.predict_s = lambda load: step_s
        gateway.send(submission(1, PROMPT, 8))
        time.sleep(9 * step_s)  # a gateway that answered would wake the engine
        gateway.wait_end(1)
    assert sum(launched_s[step + 1] < done_s[step] for step in range(1, 7)) >= 3


# Memory and time that are nobody's


def num_live_objects() -> int:
    return sum(type(each) in (Request, Sequence) for each in gc.get_objects())


def test_requests_that_have_ended_are_freed_without_a_garbage_collection() -> None:
    """With one in flight or two, and for every way in which requests end."""
    executor = ScriptedExecutor(max_in_flight=2, eos_rule=end_after(3), max_num_batched_tokens=64)
    with serving(executor) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        gc.collect()
        gc.disable()
        num_before = num_live_objects()
        try:
            for request_id in range(1, 201):
                is_aborted = request_id % 4 == 0
                sampling = SamplingParams(
                    seed=request_id,
                    max_tokens=1000 if is_aborted else 10,  # an abort that comes behind the end is answered, too
                    n=1 + request_id % 3,
                    temperature=1.0,
                    ignore_eos=is_aborted,
                )
                gateway.send(submission(request_id, [*PROMPT, request_id], sampling=sampling))
                if is_aborted:
                    gateway.send(Abort(request_id))
                gateway.wait_end(request_id)
            wait_idle(gateway, engine)
            num_left = num_live_objects() - num_before
        finally:
            gc.enable()
    assert num_left <= 160, "600 were made; the queue and the newest steps remember some of the last ones"


def test_collections_of_garbage_wait_until_nothing_is_live() -> None:
    lulls: list[int] = []
    with serving(ScriptedExecutor(step_s=0.005), heartbeat_s=0.02) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        engine.loop._on_lull = lambda: lulls.append(engine.loop._publisher.num_live)
        gateway.send(submission(1, PROMPT, 60))
        gateway.wait_tokens(1, 2)
        engine.loop._lull_s -= 100_000  # days without a lull
        gateway.wait_tokens(1, 40)
        assert not lulls
        gateway.wait_end(1)
        gateway.pump_for(0.1)
        assert lulls == [0]


def test_an_engine_that_fills_with_new_objects_has_its_lull_though_somebody_is_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lulls: list[int] = []
    with serving(ScriptedExecutor(step_s=0.005), heartbeat_s=0.02) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        engine.loop._on_lull = lambda: lulls.append(engine.loop._publisher.num_live)
        gateway.send(submission(1, PROMPT, 60))
        gateway.wait_tokens(1, 2)
        monkeypatch.setattr("engine.loop._MOST_NEW_OBJECTS", -1)
        gateway.wait_tokens(1, 40)
        assert 1 in lulls


def test_a_lull_is_told_of_once_when_nothing_is_live_any_more() -> None:
    lulls: list[int] = []
    with serving(ScriptedExecutor(step_s=0.01), heartbeat_s=0.02) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        engine.loop._on_lull = lambda: lulls.append(engine.loop._publisher.num_live)
        gateway.send(submission(1, PROMPT, 20))
        gateway.wait_end(1)
        assert not lulls
        gateway.messages.clear()
        for _ in range(5):
            gateway.wait_for(Heartbeat)
        assert lulls == [0]


def test_a_turn_that_took_its_time_does_not_keep_the_loop_awake() -> None:
    """A turn ends with the last message that was there, since one before it took so long: whether there is more, it
    looks at once, not when more has come."""
    executor = ScriptedExecutor()
    with serving(executor) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        handle, handled = engine.loop._handle, threading.Event()

        def slow(gateway_id: bytes, message: GatewayMessage) -> None:
            handle(gateway_id, message)
            time.sleep(0.05)
            if isinstance(message, GetStats) and message.query_id == 2:
                handled.set()

        engine.loop._handle = slow  # type: ignore[method-assign]
        gateway.send(GetStats(1))
        gateway.send(GetStats(2))
        assert handled.wait(10)
        turns = 0
        wait = engine.loop._socket.wait

        def counted(timeout_s: float) -> bool:
            nonlocal turns
            turns += 1
            return wait(timeout_s)

        engine.loop._socket.wait = counted  # type: ignore[method-assign]
        time.sleep(0.3)
    assert turns < 50, "it looked again and again for messages that were not there"
