"""The latency model against devices whose times are known: fitted, corrected, never fooled by one slow step."""

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.plan import StepLoad
from engine.scheduling.latency import LatencyModel

Device = Callable[[StepLoad], float]
TWICE_AS_SLOW = 2.0


def cpu(load: StepLoad) -> float:
    """Seconds of a step where arithmetic is scarce from the first token on."""
    num_tokens = load.num_prefill_tokens + load.num_decodes
    return (
        27e-3
        + 1.6e-3 * num_tokens
        + 0.8e-6 * load.num_prefill_pairs
        + 0.8e-3 * load.num_decodes
        + 4e-6 * load.num_decode_kv_tokens
    )


def gpu(load: StepLoad) -> float:
    """Seconds of a step that waits for memory up to 200 tokens and for arithmetic beyond."""
    num_tokens = load.num_prefill_tokens + load.num_decodes
    memory_s = 4e-3 + 0.02e-6 * load.num_decode_kv_tokens
    return max(memory_s, 20e-6 * num_tokens) + 0.5e-9 * load.num_prefill_pairs


def chunk(num_tokens: int, context: int = 0, decodes: int = 0, decode_context: int = 256) -> StepLoad:
    load = StepLoad(num_decodes=decodes, num_decode_kv_tokens=decodes * decode_context)
    return load.with_chunk(num_tokens, context) if num_tokens else load


CALIBRATION = [
    chunk(256),
    chunk(16),
    chunk(16, 1024),
    chunk(128, 1024),
    chunk(1024),
    chunk(0, decodes=1),
    chunk(0, decodes=8, decode_context=32),
    chunk(0, decodes=8, decode_context=1024),
    chunk(0, decodes=32, decode_context=64),
    chunk(64, 256, decodes=8),
]


def calibrated(device: Device) -> LatencyModel:
    return LatencyModel([(load, device(load)) for load in CALIBRATION])


def random_loads(count: int, seed: int = 0) -> list[StepLoad]:
    choose = random.Random(seed)
    return [
        chunk(
            choose.choice([0, 16, 60, 200, 500]), choose.randrange(4000), choose.randint(1, 64), choose.randrange(2000)
        )
        for _ in range(count)
    ]


def worst_error(model: LatencyModel, device: Device, loads: Sequence[StepLoad], factor: float = 1.0) -> float:
    return max(abs(model.predict_s(load) / (factor * device(load)) - 1) for load in loads)


def feed(model: LatencyModel, device: Device, loads: Sequence[StepLoad], factor: float = 1.0) -> None:
    for load in loads:
        model.observe(load, factor * device(load))


@pytest.mark.parametrize(("device", "bound"), [(cpu, 0.05), (gpu, 0.3)])
def test_a_short_calibration_predicts_steps_that_were_not_in_it(device: Device, bound: float) -> None:
    assert worst_error(calibrated(device), device, random_loads(200)) < bound


def test_a_device_that_pads_its_steps_is_predicted_and_its_steps_are_filled() -> None:
    buckets = [64, 128, 256, 512, 768, 1024]

    def padded(load: StepLoad) -> float:
        """As the CPU, for as many tokens as the smallest bucket that holds those of a step with prompts."""
        num_tokens = load.num_prefill_tokens + load.num_decodes
        size = min([size for size in buckets if size >= num_tokens], default=num_tokens)
        return cpu(load) + (1.6e-3 * (size - num_tokens) if load.num_prefill_tokens else 0.0)

    model = LatencyModel([(load, padded(load)) for load in CALIBRATION], token_buckets=buckets)
    assert worst_error(model, padded, random_loads(200)) < 0.05
    assert worst_error(model, padded, [chunk(2000), chunk(1020, 50, decodes=5)]) < 0.05
    for target_s in (0.3, 0.6, 1.0):
        decodes = chunk(0, decodes=9)
        num_tokens = model.prefill_tokens_within(target_s, decodes, 100)
        assert padded(decodes.with_chunk(num_tokens, 100)) <= target_s * 1.05
        size = min(size for size in buckets if size >= num_tokens + 9)
        assert num_tokens + 9 > 0.9 * size, "hardly any padding"


def test_a_calibration_with_a_tenth_of_noise_is_no_worse_than_that() -> None:
    noise = random.Random(5)
    model = LatencyModel([(load, cpu(load) * noise.uniform(0.9, 1.1)) for load in CALIBRATION])
    errors = [abs(model.predict_s(load) / cpu(load) - 1) for load in random_loads(200)]
    assert sum(errors) / len(errors) < 0.1


@pytest.mark.parametrize("device", [cpu, gpu])
def test_what_the_calibration_got_wrong_is_corrected_by_what_is_measured(device: Device) -> None:
    def measured(load: StepLoad) -> float:
        """Twice the price for the KV of decodes, and half as much again for that of prefills."""
        more_kv = chunk(0, decodes=1, decode_context=load.num_decode_kv_tokens + 1)
        return device(load) + device(more_kv) - device(chunk(0, decodes=1, decode_context=1))

    model = calibrated(device)
    before = worst_error(model, measured, random_loads(50, seed=1))
    feed(model, measured, random_loads(300))
    after = worst_error(model, measured, random_loads(50, seed=1))
    assert after < max(0.1, before / 2)


@pytest.mark.parametrize("device", [cpu, gpu])
def test_without_samples_it_learns_from_the_first_steps(device: Device) -> None:
    model = LatencyModel()
    assert model.predict_s(chunk(100)) == 0.0
    assert model.prefill_tokens_within(10.0, chunk(0, decodes=4), 0) == 0
    feed(model, device, random_loads(100))
    errors = [abs(model.predict_s(load) / device(load) - 1) for load in random_loads(100, seed=1)]
    assert sum(errors) / len(errors) < 0.15


@pytest.mark.parametrize("kind", ["decodes", "mixed"])
@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_lasting_change_of_speed_is_followed_within_some_tens_of_steps(kind: str, factor: float) -> None:
    model = calibrated(cpu)
    loads = [chunk(64 if kind == "mixed" else 0, 300, 16, 300 + i) for i in range(120)]
    feed(model, cpu, loads[:60])
    feed(model, cpu, loads[60:100], factor)
    assert worst_error(model, cpu, loads[100:], factor) < 0.15


def test_a_slower_machine_that_shows_in_decodes_is_expected_of_prefills_too() -> None:
    model = calibrated(cpu)
    loads = [chunk(0, decodes=16, decode_context=300 + i) for i in range(160)]
    feed(model, cpu, loads[:100])
    feed(model, cpu, loads[100:], TWICE_AS_SLOW)
    assert model.predict_s(chunk(256, 0, 16)) > 1.5 * cpu(chunk(256, 0, 16))


def test_one_slow_step_hardly_moves_the_prediction() -> None:
    model = calibrated(cpu)
    load = chunk(64, 300, 16)
    feed(model, cpu, [load] * 50)
    before = model.predict_s(load)
    model.observe(load, 30 * cpu(load))
    assert model.predict_s(load) < 1.1 * before
    feed(model, cpu, [load] * 10)
    assert model.predict_s(load) == pytest.approx(before, rel=0.03)


def test_what_was_not_measured_for_long_is_still_known_and_does_not_follow_one_slow_step() -> None:
    model = calibrated(cpu)
    for _ in range(20):
        feed(model, cpu, [chunk(0, decodes=number, decode_context=300) for number in range(1, 65)] * 8)
    mixed = chunk(200, 300, 16)
    assert model.predict_s(mixed) == pytest.approx(cpu(mixed), rel=0.1)
    model.observe(mixed, 10 * cpu(mixed))
    assert model.predict_s(mixed) < 2 * cpu(mixed)
    feed(model, cpu, [mixed] * 20)
    assert model.predict_s(mixed) == pytest.approx(cpu(mixed), rel=0.1)


def test_the_error_is_that_of_the_recent_steps() -> None:
    model = calibrated(cpu)
    assert model.error == 0.0
    feed(model, cpu, random_loads(64))
    assert model.error < 0.05
    model.observe(chunk(64), 4 * cpu(chunk(64)))
    assert 0.01 < model.error < 0.07


@pytest.mark.parametrize("device", [cpu, gpu])
@pytest.mark.parametrize("context", [0, 500, 7000])
def test_the_most_prefill_tokens_within_a_target_are_the_most(device: Device, context: int) -> None:
    model = calibrated(device)
    load = chunk(0, decodes=8)
    target_s = 3 * device(load)
    num_tokens = model.prefill_tokens_within(target_s, load, context)
    assert num_tokens > 0
    assert model.predict_s(load.with_chunk(num_tokens, context)) <= target_s
    at_limit = num_tokens + load.num_decodes == 2 * 1024
    assert at_limit or model.predict_s(load.with_chunk(num_tokens + 1, context)) > target_s
    assert model.prefill_tokens_within(device(load) / 2, load, context) == 0


def test_steps_grow_at_most_twice_beyond_what_was_measured() -> None:
    model = LatencyModel([(chunk(100), 0.1), (chunk(0, decodes=1), 0.1)])
    assert model.prefill_tokens_within(math.inf, chunk(0, decodes=20), 0) == 180
    model.observe(chunk(150), 0.1)
    assert model.prefill_tokens_within(math.inf, chunk(0, decodes=20), 0) == 280


def test_steps_that_overran_their_prediction_are_allowed_for() -> None:
    model = calibrated(cpu)
    load = chunk(64, 300, 16)
    assert model.overrun == pytest.approx(1.2)
    noise = random.Random(3)
    for _ in range(64):
        model.observe(load, cpu(load) * noise.uniform(0.9, 1.1))
    assert 1.05 < model.overrun < 1.2
    model.observe(load, 5 * cpu(load))
    assert model.overrun < 1.2, "one of 64 may be worse"
    for _ in range(64):
        model.observe(load, cpu(load) * noise.choice([0.5, 3.0]))
    assert model.overrun == 1.5


def test_recomputing_costs_what_its_tokens_add() -> None:
    model = calibrated(cpu)
    assert model.recompute_s(1000) == pytest.approx(cpu(chunk(1000)) - cpu(StepLoad()), rel=0.1)
    assert model.recompute_s(0) == 0.0


def test_copies_are_predicted_from_their_speed() -> None:
    assert LatencyModel().transfer_s(3) == math.inf
    model = LatencyModel(block_bytes=1000, host_bytes_per_s=1e6)
    assert model.transfer_s(50) == pytest.approx(0.05)
    model.observe_transfer(100_000, 1000.0)
    assert model.transfer_s(50) < 0.1, "one that was held up"
    for _ in range(40):
        model.observe_transfer(100_000, 0.2)
    assert model.transfer_s(50) == pytest.approx(0.1, rel=0.1)
    unknown = LatencyModel(block_bytes=1000)
    unknown.observe_transfer(100_000, 0.2)
    assert unknown.transfer_s(50) == pytest.approx(0.1)


def test_what_waits_drains_at_the_predicted_speed() -> None:
    model = calibrated(cpu)
    prompts_s = 40 * cpu(chunk(256, 128))
    outputs_s = 100 * cpu(chunk(0, decodes=16))
    predicted_s = model.drain_s(40 * 256, 16 * 100, num_at_once=16, context_tokens=256, step_tokens=256)
    assert predicted_s == pytest.approx(prompts_s + outputs_s, rel=0.1)
    assert LatencyModel().drain_s(1000, 1000, 8, 100, 256) == 0.0


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_times_that_are_none_teach_nothing(seconds: float) -> None:
    model = LatencyModel([(chunk(64), seconds), *[(load, cpu(load)) for load in CALIBRATION]])
    before = [model.predict_s(load) for load in CALIBRATION]
    model.observe(chunk(64), seconds)
    model.observe(chunk(0, decodes=3), seconds)
    model.observe_transfer(100, seconds)
    assert [model.predict_s(load) for load in CALIBRATION] == before
    assert model.transfer_s(1) == math.inf


LOADS = st.builds(
    lambda decodes, context, chunks: _with_chunks(chunk(0, decodes=decodes, decode_context=context), chunks),
    st.integers(0, 1024),
    st.integers(1, 100_000),
    st.lists(st.tuples(st.integers(1, 8192), st.integers(0, 100_000)), max_size=3),
)
SECONDS = st.floats(1e-6, 1e4)
STEPS = st.lists(st.tuples(LOADS, SECONDS), max_size=30)


def _with_chunks(load: StepLoad, chunks: list[tuple[int, int]]) -> StepLoad:
    for num_tokens, context in chunks:
        load = load.with_chunk(num_tokens, context)
    return load


@settings(max_examples=60, deadline=None)
@given(STEPS, STEPS, LOADS, st.floats(0, 10))
def test_whatever_it_is_told_it_answers_with_numbers_that_grow_with_the_step(
    samples: list[tuple[StepLoad, float]], steps: list[tuple[StepLoad, float]], load: StepLoad, target_s: float
) -> None:
    model = LatencyModel(samples)
    for observed, seconds in steps:
        model.observe(observed, seconds)
    predicted_s = model.predict_s(load)
    assert math.isfinite(predicted_s) and predicted_s >= 0
    assert model.predict_s(load.with_chunk(100, 50)) >= predicted_s
    assert math.isfinite(model.error) and 1 <= model.overrun <= 1.5
    num_tokens = model.prefill_tokens_within(target_s, load, 70)
    assert num_tokens >= 0
    assert not num_tokens or model.predict_s(load.with_chunk(num_tokens, 70)) <= target_s
