"""What an executor runs before it serves, over a device whose times are known."""

from collections.abc import Callable

import pytest

from engine.execution.warm_up import WarmUp
from engine.plan import StepLoad, StepPlan
from engine.scheduling.latency import LatencyModel

BLOCK_SIZE = 16


class TimedDevice:
    """Keeps the plans that it was given, and a clock that only they move."""

    def __init__(self, seconds_of: Callable[[StepLoad], float]) -> None:
        self.now_s = 0.0
        self.plans: list[StepPlan] = []
        self._seconds_of = seconds_of

    def step(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.now_s += self._seconds_of(load_of(plan)) if plan.scheduled else 0.0

    def warm_up(self, max_model_len: int = 8192, max_num_seqs: int = 256, max_num_batched_tokens: int = 0) -> WarmUp:
        warm_up = WarmUp(
            self.step, BLOCK_SIZE, max_model_len, max_num_seqs, max_num_batched_tokens, clock=lambda: self.now_s
        )
        warm_up.run(lambda percent: None)
        return warm_up


def load_of(plan: StepPlan) -> StepLoad:
    decodes = [entry for entry in plan.scheduled if not entry.is_prefill]
    load = StepLoad(num_decodes=len(decodes), num_decode_kv_tokens=sum(entry.start + 1 for entry in decodes))
    for entry in plan.scheduled:
        if entry.is_prefill:
            load = load.with_chunk(entry.num_tokens, entry.start)
    return load


def seconds_of(load: StepLoad) -> float:
    num_tokens = load.num_prefill_tokens + load.num_decodes
    return (
        0.01
        + 0.0005 * num_tokens
        + 2e-7 * load.num_prefill_pairs
        + 0.0003 * load.num_decodes
        + 1e-6 * load.num_decode_kv_tokens
    )


def test_the_samples_are_what_was_run_and_enough_to_predict_other_steps() -> None:
    device = TimedDevice(seconds_of)
    samples = device.warm_up().samples
    assert {load for load, _ in samples} == {load_of(plan) for plan in device.plans if plan.scheduled}
    assert all(seconds == pytest.approx(seconds_of(load)) for load, seconds in samples)
    model = LatencyModel(samples)
    for load in (
        StepLoad().with_chunk(400, 0),
        StepLoad().with_chunk(50, 3000),
        StepLoad(num_decodes=64, num_decode_kv_tokens=64 * 500),
        StepLoad(num_decodes=16, num_decode_kv_tokens=16 * 200).with_chunk(100, 600),
    ):
        assert model.predict_s(load) == pytest.approx(seconds_of(load), rel=0.05)


def test_the_fastest_run_counts() -> None:
    hiccups = iter([1.0, 7.0, 1.0, 3.0] * 1000)
    device = TimedDevice(lambda load: seconds_of(load) * next(hiccups) / 10)
    warm_up = device.warm_up()
    fastest_s = min(seconds for load, seconds in warm_up.samples if load == StepLoad().with_chunk(256, 0))
    assert fastest_s == pytest.approx(seconds_of(StepLoad().with_chunk(256, 0)) / 10)
    assert warm_up.tokens_per_s == pytest.approx(256 / fastest_s)


@pytest.mark.parametrize("slowness", [1.0, 10.0, 100.0])
def test_a_slow_device_is_not_kept_busy_for_long(slowness: float) -> None:
    device = TimedDevice(lambda load: slowness * seconds_of(load))
    samples = device.warm_up().samples
    longest_s = max(seconds for _, seconds in samples)
    prompt_s = slowness * seconds_of(StepLoad().with_chunk(256, 0))
    assert device.now_s <= 2 * prompt_s + 1.0 + longest_s
    assert any(load.num_decodes for load, _ in samples) and any(load.num_prefill_tokens for load, _ in samples)


@pytest.mark.parametrize(
    ("max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    [(8192, 256, 0), (2, 1, 1), (20, 3, 0), (300, 256, 24), (8192, 1, 4), (8192, 2, 2), (1000, 256, 4096)],
)
def test_every_step_keeps_the_limits(max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
    device = TimedDevice(seconds_of)
    device.warm_up(max_model_len, max_num_seqs, max_num_batched_tokens)
    num_blocks = -(-max_model_len // BLOCK_SIZE)
    for plan in device.plans:
        decodes = [entry for entry in plan.scheduled if not entry.is_prefill]
        assert len(decodes) <= max_num_seqs
        assert sum(entry.num_tokens for entry in plan.scheduled) <= (max_num_batched_tokens or 256)
        for entry in plan.scheduled:
            assert entry.num_tokens == len(entry.token_ids) > 0
            assert entry.start + entry.num_tokens <= max_model_len
            assert entry.start + entry.num_tokens <= len(entry.new_block_ids) * BLOCK_SIZE
            assert 0 < min(entry.new_block_ids) <= max(entry.new_block_ids) <= num_blocks


def test_nothing_is_left_of_the_sequences() -> None:
    device = TimedDevice(seconds_of)
    device.warm_up()
    begun = [facts.sequence_id for plan in device.plans for facts in plan.new_sequences]
    assert sorted(device.plans[-1].finished_sequence_ids) == sorted(begun)
    assert len(set(begun)) == len(begun)
