"""How long what waits and runs will take, by a model that knows the device."""

from dataclasses import replace

import pytest

from engine.plan import StepLoad
from engine.scheduling.drain import predict_drain_s
from engine.scheduling.latency import LatencyModel
from engine.scheduling.limits import SchedulerLimits
from engine.sequence import Request, Sequence, SequenceState
from streamkv.sampling import SamplingParams

LIMITS = SchedulerLimits(16, 512, 0, 4, True, 4096, 100)
SAMPLES = [
    StepLoad().with_chunk(256, 0),
    StepLoad().with_chunk(16, 0),
    StepLoad().with_chunk(64, 1024),
    StepLoad(num_decodes=1, num_decode_kv_tokens=200),
    StepLoad(num_decodes=8, num_decode_kv_tokens=4000),
]


def seconds_of(load: StepLoad) -> float:
    return 0.02 + 0.001 * load.num_prefill_tokens + 0.001 * load.num_decodes


MODEL = LatencyModel([(load, seconds_of(load)) for load in SAMPLES])


def request(
    num_prompt: int = 100, max_tokens: int = 50, state: SequenceState = SequenceState.WAITING, num_output: int = 0
) -> Request:
    made = Request(0, b"", b"", [5] * num_prompt, SamplingParams(seed=0, max_tokens=max_tokens), 0.0)
    sequence = Sequence(0, made, 0, [5] * (num_prompt + num_output), num_prompt, num_prompt + max_tokens, state=state)
    sequence.num_computed = num_prompt + num_output - 1 if num_output else 0
    made.sequences = [sequence]
    return made


def drain_s(requests: list[Request], mean_output: float = 50.0, limits: SchedulerLimits = LIMITS) -> float:
    return predict_drain_s(requests, 8, mean_output, limits, MODEL)


def test_it_is_the_time_of_the_prompts_and_of_the_outputs() -> None:
    prompts_s = 40 * 100 / 512 * seconds_of(StepLoad().with_chunk(512, 0))
    outputs_s = 40 * 50 / 8 * seconds_of(StepLoad(num_decodes=8))
    assert drain_s([request() for _ in range(40)]) == pytest.approx(prompts_s + outputs_s, rel=0.1)


def test_what_is_done_of_a_running_request_does_not_count() -> None:
    running = request(state=SequenceState.RUNNING, num_output=40)
    assert drain_s([running]) == pytest.approx(10 * seconds_of(StepLoad(num_decodes=1)), rel=0.1)


def test_a_request_is_expected_to_be_as_long_as_others_were() -> None:
    assert drain_s([request(max_tokens=4000)], mean_output=20) == drain_s([request(max_tokens=20)], mean_output=3000)
    beyond = request(max_tokens=4000, state=SequenceState.RUNNING, num_output=300)
    assert drain_s([beyond], mean_output=20) == pytest.approx(seconds_of(StepLoad(num_decodes=1)), rel=0.1)


def test_more_work_takes_longer_and_a_gap_target_slows_prompts_down() -> None:
    few, many = [request(1000) for _ in range(10)], [request(1000) for _ in range(20)]
    assert drain_s(many) > 1.8 * drain_s(few)
    assert drain_s(few, limits=replace(LIMITS, itl_target_s=0.05)) > 1.3 * drain_s(few)


def test_nothing_takes_no_time_and_the_unknown_is_zero() -> None:
    assert drain_s([]) == 0.0
    assert drain_s([request(state=SequenceState.PAUSED), request(state=SequenceState.FINISHED)]) == 0.0
    assert predict_drain_s([request()], 8, 50.0, LIMITS, LatencyModel()) == 0.0
