"""Ranked requests over a real socket: the real loop and scheduler, a scripted device."""

from collections.abc import Iterator

import pytest

from engine.simulation.simulated_model import end_one_in
from streamkv.protocol import Abort, Attach, GetStats, Pause, Ready, Rejected, Stats, pack_ids
from streamkv.sampling import SamplingParams
from tests.engine.scheduling import ranked
from tests.support.scripted_engine import serving
from tests.support.scripted_executor import ScriptedExecutor
from tests.support.wire_gateway import WireGateway, submission

PROMPT = list(range(10, 40))
BEAMS = SamplingParams(seed=3, max_tokens=20, n=2, temperature=0.0, beam_width=4)
BEST_OF = SamplingParams(seed=3, max_tokens=20, n=2, temperature=1.0, best_of=5)


@pytest.fixture(params=[1, 2])
def executor(request: pytest.FixtureRequest) -> Iterator[ScriptedExecutor]:
    """Its third step takes long enough to be overtaken by what a test sends."""
    yield ScriptedExecutor(max_in_flight=request.param, block_at_step={2: 0.3}, eos_rule=end_one_in(9))


def expected(executor: ScriptedExecutor, sampling: SamplingParams) -> list[ranked.Choice]:
    return (ranked.beams if sampling.beam_width else ranked.best_of)(executor, PROMPT, sampling)


@pytest.mark.parametrize("sampling", [BEAMS, BEST_OF])
def test_all_choices_come_with_all_tokens_in_one_message(executor: ScriptedExecutor, sampling: SamplingParams) -> None:
    choices = expected(executor, sampling)
    with serving(executor) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        gateway.send(submission(1, PROMPT, sampling=sampling))
        gateway.send(Pause(1))  # nothing comes before the end, so there is nothing to hold back
        received = gateway.wait_end(1, num_choices=sampling.n)
        assert len(gateway.steps) == 1
        for choice, (tokens, reason, cause) in enumerate(choices):
            assert received.tokens[choice] == tokens
            end = received.finished[choice]
            assert (end.finish_reason, end.cause) == (reason, cause)
            assert end.stop_token_id == (tokens[-1] if reason == "stop" else -1)
        gateway.send(GetStats(1))
        stats = gateway.wait_for(Stats)
        num_returned = sum(len(tokens) for tokens, _, _ in choices)
        assert stats.counters["generated_tokens_total"] == num_returned
        assert stats.counters["unreturned_tokens_total"] > 0
        assert sum(stats.counters[name] for name in stats.counters if name.startswith("requests_ended_total")) == 1
        assert stats.gauges["num_allocated_blocks"] == stats.gauges["num_running_sequences"] == 0


@pytest.mark.parametrize("sampling", [BEAMS, BEST_OF])
def test_attach_before_the_end_brings_no_token_and_after_it_all(
    executor: ScriptedExecutor, sampling: SamplingParams
) -> None:
    choices = [tokens for tokens, _, _ in expected(executor, sampling)]
    with serving(executor) as engine, WireGateway(engine.endpoint) as first, WireGateway(engine.endpoint) as second:
        first.wait_for(Ready)
        submit = submission(1, PROMPT, sampling=sampling, attach_grace_s=5.0)
        first.send(submit)
        first.send(GetStats(1))
        first.wait_for(Stats)  # its answer comes behind the Submit, which the other gateway's Attach could overtake
        second.send(Attach(7, submit.stream_id, from_token=1))
        assert second.wait_for(Rejected).field == "from_token"
        second.send(Attach(8, submit.stream_id, from_token=0))
        received = second.wait_end(8, num_choices=sampling.n)
        assert received.attached is not None
        assert received.attached.token_ids == [b""] * sampling.n
        assert [received.tokens[choice] for choice in range(sampling.n)] == choices
        assert {end.cause for end in first.wait_end(1, num_choices=sampling.n).finished.values()} == {
            "attached_elsewhere"
        }
        first.send(Attach(9, submit.stream_id, from_token=1))
        kept = first.wait_end(9, num_choices=sampling.n)
        assert [kept.tokens[choice] for choice in range(sampling.n)] == [tokens[1:] for tokens in choices]


@pytest.mark.parametrize("sampling", [BEAMS, BEST_OF])
def test_abort_ends_each_choice_once_and_without_a_token(executor: ScriptedExecutor, sampling: SamplingParams) -> None:
    with serving(executor) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        gateway.send(submission(1, PROMPT, sampling=sampling))
        gateway.pump_for(0.02)
        gateway.send(Abort(1, "cancelled"))
        received = gateway.wait_end(1, num_choices=sampling.n)
        assert {(end.finish_reason, end.cause) for end in received.finished.values()} == {("abort", "cancelled")}
        assert not any(received.tokens.values())


def test_a_continuation_of_ranked_choices_is_refused_by_name(executor: ScriptedExecutor) -> None:
    """Nothing of them was handed out, so there is nothing to go on with: they are sent again as they were."""
    with serving(executor) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        for more in ({"prior_token_ids": [pack_ids([5])]}, {"finished_choices": [0]}):
            gateway.send(submission(1, PROMPT, sampling=BEAMS, **more))
            refusal = gateway.wait_for(Rejected)
            assert (refusal.code, refusal.field) == ("invalid", "prior_token_ids")
