"""What an executor runs before it serves, over a device whose times are known."""

from collections.abc import Callable

import pytest

from engine.execution.warm_up import CPU_WORKLOAD, GPU_WORKLOAD, WarmUp, Workload
from engine.plan import StepLoad, StepPlan
from engine.scheduling.latency import LatencyModel

BLOCK_SIZE = 16
NUM_BLOCKS = 40_000


class TimedDevice:
    """Keeps the plans that it was given, and a clock that only they move."""

    def __init__(self, seconds_of: Callable[[StepLoad], float]) -> None:
        self.now_s = 0.0
        self.plans: list[StepPlan] = []
        self._seconds_of = seconds_of

    def step(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.now_s += self._seconds_of(load_of(plan)) if plan.scheduled else 0.0

    def warm_up(
        self,
        max_model_len: int = 8192,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 0,
        workload: Workload = CPU_WORKLOAD,
        num_blocks: int = 0,
    ) -> WarmUp:
        warm_up = WarmUp(
            self.step,
            BLOCK_SIZE,
            max_model_len,
            max_num_seqs,
            max_num_batched_tokens,
            clock=lambda: self.now_s,
            workload=workload,
            num_blocks=num_blocks,
        )
        warm_up.run(lambda percent: None)
        return warm_up

    def warm_up_gpu(self, max_num_seqs: int = 256) -> WarmUp:
        return self.warm_up(131072, max_num_seqs, 8192, GPU_WORKLOAD, NUM_BLOCKS)


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
@pytest.mark.parametrize("workload", [CPU_WORKLOAD, GPU_WORKLOAD])
def test_every_step_keeps_the_limits(
    max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int, workload: Workload
) -> None:
    device = TimedDevice(seconds_of)
    num_blocks = -(-max_model_len // BLOCK_SIZE) + 1
    is_gpu = workload is GPU_WORKLOAD
    device.warm_up(max_model_len, max_num_seqs, max_num_batched_tokens, workload, num_blocks if is_gpu else 0)
    tables: dict[int, list[int]] = {}
    for plan in device.plans:
        for sequence_id in plan.finished_sequence_ids:
            del tables[sequence_id]
        tables.update({facts.sequence_id: [] for facts in plan.new_sequences})
        assert len(tables) <= max_num_seqs
        assert sum(entry.num_tokens for entry in plan.scheduled) <= (max_num_batched_tokens or workload.num_prompt)
        for entry in plan.scheduled:
            tables[entry.sequence_id] += entry.new_block_ids
            end, table = entry.start + entry.num_tokens, tables[entry.sequence_id]
            assert entry.num_tokens == len(entry.token_ids) > 0
            assert end <= max_model_len
            assert end <= len(table) * BLOCK_SIZE and len(table) <= -(-max_model_len // BLOCK_SIZE)
            assert 0 < min(table) <= max(table) < num_blocks
    assert not tables, "nothing is left of the sequences"


def test_no_sequence_comes_again() -> None:
    for workload in (CPU_WORKLOAD, GPU_WORKLOAD):
        device = TimedDevice(seconds_of)
        device.warm_up(workload=workload)
        begun = [facts.sequence_id for plan in device.plans for facts in plan.new_sequences]
        assert len(set(begun)) == len(begun)


def test_on_a_gpu_the_sequences_of_a_step_share_no_block() -> None:
    device = TimedDevice(h200_8b)
    device.warm_up_gpu()
    tables: dict[int, list[int]] = {}
    for plan in device.plans:
        for entry in plan.scheduled:
            tables[entry.sequence_id] = tables.get(entry.sequence_id, []) + entry.new_block_ids
        read = [block for entry in plan.scheduled for block in tables[entry.sequence_id]]
        assert len(set(read)) == len(read)


def h200(load: StepLoad, num_parameters: float, num_layers: int, kv_bytes: int, width: int) -> float:
    """Seconds of a step of an H200, by its ceilings: linear layers in bfloat16 wait for their weights or for
    arithmetic, in tiles of 64 tokens, and lose some of the time where both are scarce; attention."""
    num_tokens = load.num_prefill_tokens + load.num_decodes
    reading_s = 2 * num_parameters / 4.0e12
    computing_s = 2 * num_parameters * -(-num_tokens // 64) * 64 / 620e12
    linear_s = max(reading_s, computing_s) + (0.2 * min(reading_s, computing_s) if num_tokens > 8 else 0)
    decode_s = load.num_decode_kv_tokens * kv_bytes / 3.9e12
    prefill_s = load.num_prefill_pairs * 4 * width * num_layers / 500e12 + load.num_prefill_kv_tokens * kv_bytes / 3e12
    return 0.6e-3 + num_layers * 20e-6 + linear_s + decode_s + prefill_s


def h200_8b(load: StepLoad) -> float:
    return h200(load, 7.5e9, 32, 131072, 4096)


def h200_small(load: StepLoad) -> float:
    """A model of 0.6 billion parameters."""
    return h200(load, 0.44e9, 28, 114688, 2048)


def plain_roofline(load: StepLoad) -> float:
    """Each token is free up to 170 of them, and paid for in full beyond."""
    num_tokens = load.num_prefill_tokens + load.num_decodes
    attention_s = 32e-9 * load.num_decode_kv_tokens + 0.9e-9 * load.num_prefill_pairs
    return 0.6e-3 + max(4.2e-3, 24.7e-6 * num_tokens) + attention_s


GPUS = [h200_8b, h200_small, plain_roofline]


@pytest.mark.parametrize("seconds_on", GPUS)
def test_on_a_gpu_the_samples_size_chunks_within_a_tenth_of_the_target(seconds_on: Callable[[StepLoad], float]) -> None:
    device = TimedDevice(seconds_on)
    model = LatencyModel(device.warm_up_gpu().samples)
    target_s = 0.03
    for num_decodes in (1, 8, 32, 64, 128):
        for context in (256, 1024, 2048):
            decodes = StepLoad(num_decodes=num_decodes, num_decode_kv_tokens=num_decodes * context)
            for prompt_context in (0, 1000, 4096, 12_000):
                num_tokens = model.prefill_tokens_within(target_s, decodes, prompt_context)
                taken_s = seconds_on(decodes.with_chunk(num_tokens, prompt_context))
                assert taken_s == pytest.approx(target_s, rel=0.1)


@pytest.mark.parametrize("seconds_on", GPUS)
def test_on_a_gpu_the_samples_predict_decodes_and_prompts(seconds_on: Callable[[StepLoad], float]) -> None:
    model = LatencyModel(TimedDevice(seconds_on).warm_up_gpu().samples)
    loads = [StepLoad(num_decodes=n, num_decode_kv_tokens=n * 700) for n in (1, 5, 20, 60, 130, 256)]
    loads += [StepLoad().with_chunk(n, context) for n in (30, 150, 700, 3000, 8000) for context in (0, 3000)]
    errors = [abs(model.predict_s(load) / seconds_on(load) - 1) for load in loads]
    assert max(errors) < 0.25 and sum(errors) / len(errors) < 0.06


def test_on_a_gpu_it_takes_a_second_and_a_half() -> None:
    device = TimedDevice(h200_8b)
    samples = device.warm_up_gpu().samples
    assert device.now_s < 1.6
    assert len(samples) == len(GPU_WORKLOAD.shapes) + 1


def test_slow_starts_cost_no_sample_and_are_not_among_them() -> None:
    """The first step of each kind compiles for three seconds."""
    seen: set[tuple[bool, bool, int]] = set()

    def seconds_on(load: StepLoad) -> float:
        kind = (load.num_decodes > 0, load.num_prefill_tokens > 0, load.num_prefill_tokens + load.num_decodes)
        is_new = kind not in seen
        seen.add(kind)
        return h200_8b(load) + 3.0 * is_new

    samples = TimedDevice(seconds_on).warm_up_gpu().samples
    assert len(samples) == len(GPU_WORKLOAD.shapes) + 1
    assert max(seconds for _, seconds in samples) < 0.3


def test_a_slow_gpu_is_not_kept_busy_for_long() -> None:
    device = TimedDevice(lambda load: 30 * h200_8b(load))
    samples = device.warm_up_gpu().samples
    assert device.now_s < 6.0
    assert any(load.num_decodes for load, _ in samples) and any(load.num_prefill_tokens for load, _ in samples)
