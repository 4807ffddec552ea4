"""Streams keep their gap while prompts are computed beside them: the real scheduler, a device on a virtual clock."""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Ids
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from engine.plan import StepLoad, StepPlan
from engine.scheduling.latency import LatencyModel
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Request, Sequence, SequenceOutput
from tests.engine.scheduling.driver import Driver

HOST_S = 0.0005
"""Of the loop's own work between two steps."""
TARGET_S = 0.06
NUM_STREAMS = 8
LONG = 1500
CALIBRATION = [
    StepLoad().with_chunk(512, 0),
    StepLoad().with_chunk(256, 0),
    StepLoad().with_chunk(16, 0),
    StepLoad().with_chunk(16, 1024),
    StepLoad().with_chunk(128, 1024),
    StepLoad(num_decodes=1, num_decode_kv_tokens=200),
    StepLoad(num_decodes=8, num_decode_kv_tokens=300),
    StepLoad(num_decodes=8, num_decode_kv_tokens=8000),
    StepLoad(num_decodes=8, num_decode_kv_tokens=800).with_chunk(64, 256),
]

Device = Callable[[StepLoad], float]


def cpu(load: StepLoad) -> float:
    """Seconds of a step; a decode step of eight takes about 15 ms, a whole budget of prompt 400 ms."""
    num_tokens = load.num_prefill_tokens + load.num_decodes
    return 0.01 + 0.0007 * num_tokens + 1e-7 * load.num_prefill_pairs + 5e-7 * load.num_decode_kv_tokens


def gpu(load: StepLoad) -> float:
    """Seconds of a step that waits for memory up to 200 tokens and for arithmetic beyond."""
    num_tokens = load.num_prefill_tokens + load.num_decodes
    return max(0.008, 40e-6 * num_tokens) + 3e-9 * load.num_prefill_pairs


class TimedDriver(Driver):
    """A driver whose steps take time, one after the other, and whose latency model observes them."""

    def __init__(
        self, device: Device, target_s: float, *, max_in_flight: int = 1, is_calibrated: bool = True, **options: Any
    ) -> None:
        super().__init__(
            num_blocks=600,
            block_size=16,
            max_model_len=2000,
            max_num_batched_tokens=512,
            max_in_flight=max_in_flight,
            **options,
        )
        self.device = device
        self.slowness = 1.0
        self.limits = replace(self.limits, itl_target_s=target_s)
        self.latency = LatencyModel([(load, device(load)) for load in CALIBRATION] if is_calibrated else ())
        self.scheduler = Scheduler(self.limits, self.blocks, lambda: self.now_s, self.latency)
        self.published: dict[Sequence, list[float]] = {}
        self._ends: deque[tuple[float, float]] = deque()
        """When the steps in flight were launched and will be done."""
        self._free_s = 0.0
        self._collected_s = 0.0

    def plan(self) -> StepPlan | None:
        plan = super().plan()
        if plan is not None:
            self._free_s = max(self._free_s, self.now_s) + self.slowness * self.device(plan.load)
            self._ends.append((self.now_s, self._free_s))
        return plan

    def collect(self) -> list[SequenceOutput]:
        if not self.in_flight:
            return []
        launched_s, done_s = self._ends.popleft()
        load = self.in_flight[0].plan.load
        self.now_s = max(self.now_s, done_s)
        self.latency.observe(load, self.now_s - max(launched_s, self._collected_s))
        self._collected_s = self.now_s
        outputs = super().collect()
        for output in outputs:
            if output.token_ids:
                self.published.setdefault(output.sequence, []).append(self.now_s)
        return outputs

    def turn(self) -> StepPlan | None:
        """As the loop: plan while the executor has room, then wait for the oldest step."""
        self.take(self.scheduler.expire())
        self.now_s += HOST_S
        plan = self.plan()
        if plan is None or len(self.in_flight) >= self.executor.max_in_flight:
            self.collect()
        return plan

    def gaps(self, request: Request) -> list[tuple[float, float]]:
        """(when, how long) between the published tokens of a request's first choice."""
        times = self.published[request.sequences[0]]
        return [(late, late - early) for early, late in pairwise(times)]

    def start_streams(self, num_tokens: int = 800) -> list[Request]:
        streams = [self.submit([7 + i, 5, 9], max_tokens=num_tokens) for i in range(NUM_STREAMS)]
        while not all(stream.sequences[0].num_output >= 5 for stream in streams):
            self.turn()
        return streams

    def submit(self, prompt: Ids[int], **options: Any) -> Request:
        """As Driver.submit, in no time."""
        now_s = self.now_s
        request = super().submit(prompt, **options)
        self.now_s = now_s
        return request

    def submit_long(self, number: int = 0, max_tokens: int = 4) -> Request:
        return self.submit([(i * 7 + number) % 900 for i in range(LONG)], max_tokens=max_tokens)

    def run_until_first_token(self, request: Request, max_turns: int = 3000) -> None:
        for _ in range(max_turns):
            if request.first_token_s:
                return
            self.turn()
        raise AssertionError(f"no first token after {max_turns} turns")


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize(("device", "target_s"), [(cpu, TARGET_S), (gpu, 0.015)])
def test_streams_keep_the_target_beside_long_prompts(device: Device, target_s: float, max_in_flight: int) -> None:
    driver = TimedDriver(device, target_s, max_in_flight=max_in_flight)
    streams = driver.start_streams()
    begun_s = driver.now_s
    prompts = [driver.submit_long(number) for number in range(3)]
    for prompt in prompts:
        driver.run_until_first_token(prompt)
    gaps = [gap for stream in streams for at_s, gap in driver.gaps(stream) if at_s > begun_s]
    assert max(gaps) <= target_s
    assert max(gaps) > 0.7 * target_s, "what the target leaves is used"
    for stream in streams:
        driver.abort(stream)
    driver.run()
    driver.check_all()


def test_without_a_target_a_prompt_takes_the_whole_step_as_before() -> None:
    driver = TimedDriver(cpu, 0.0)
    streams = driver.start_streams(200)
    begun_s = driver.now_s
    driver.run_until_first_token(driver.submit_long())
    assert max(plan.load.num_prefill_tokens for plan in driver.plans) == 512 - NUM_STREAMS
    assert max(gap for stream in streams for at_s, gap in driver.gaps(stream) if at_s > begun_s) > 0.3


def test_with_nobody_to_wait_for_it_a_prompt_takes_the_whole_step() -> None:
    driver = TimedDriver(cpu, TARGET_S)
    driver.run_until_first_token(driver.submit_long())
    assert [plan.load.num_prefill_tokens for plan in driver.plans] == [512, 512, LONG - 2 * 512]


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_stream_that_has_only_its_first_token_counts(max_in_flight: int) -> None:
    driver = TimedDriver(cpu, TARGET_S, max_in_flight=max_in_flight)
    stream = driver.submit([5, 6, 7], max_tokens=200)
    prompt = driver.submit_long()
    driver.run_until_first_token(prompt)
    assert max(gap for _, gap in driver.gaps(stream)) <= TARGET_S


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_device_that_becomes_twice_as_slow_is_followed(max_in_flight: int) -> None:
    target_s = 2 * TARGET_S
    driver = TimedDriver(cpu, target_s, max_in_flight=max_in_flight)
    streams = driver.start_streams()
    prompts = [driver.submit_long(number) for number in range(4)]
    for _ in range(15):
        driver.turn()
    slow_from_s, driver.slowness = driver.now_s, 2.0
    for prompt in prompts:
        driver.run_until_first_token(prompt)
    gaps = [gap for at_s, gap in driver.gaps(streams[0]) if at_s > slow_from_s]
    assert len(gaps) > 60
    assert max(gaps[25:]) <= target_s
    assert max(gaps) < 2.1 * target_s


def test_one_slow_step_does_not_stop_the_prompts() -> None:
    driver = TimedDriver(cpu, TARGET_S)
    driver.start_streams()
    driver.submit_long()
    before = [driver.turn() for _ in range(15)][-1]
    driver.slowness = 20.0
    driver.turn()
    driver.slowness = 1.0
    after = driver.turn()
    assert before is not None and after is not None
    assert after.load.num_prefill_tokens > 0.8 * before.load.num_prefill_tokens > 0


def test_an_uncalibrated_model_begins_with_small_chunks_and_learns() -> None:
    driver = TimedDriver(cpu, TARGET_S, is_calibrated=False)
    streams = driver.start_streams()
    begun_s = driver.now_s
    driver.run_until_first_token(driver.submit_long(0))
    learnt_s = driver.now_s
    driver.run_until_first_token(driver.submit_long(1))
    gaps = driver.gaps(streams[0])
    assert max(gap for at_s, gap in gaps if at_s > begun_s) < 2 * TARGET_S
    late = [gap for at_s, gap in gaps if at_s > learnt_s]
    assert len(late) > 30
    assert sorted(late)[-4] <= TARGET_S and max(late) < 1.25 * TARGET_S


def test_a_target_that_cannot_be_kept_still_lets_every_step_compute_some_of_a_prompt() -> None:
    driver = TimedDriver(cpu, 0.001)
    driver.start_streams()
    first = len(driver.plans)
    driver.run_until_first_token(driver.submit_long())
    chunks = [plan.load.num_prefill_tokens for plan in driver.plans[first:] if plan.load.num_prefill_tokens]
    assert chunks == [16] * (LONG // 16) + [LONG % 16]


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    driver = TimedDriver(cpu, TARGET_S)
    driver.start_streams()
    long = driver.submit_long()
    for _ in range(3):
        driver.turn()
    short = driver.submit([3] * 100, max_tokens=2)
    driver.run_until_first_token(short)
    assert long.sequences[0].num_computed < LONG / 2
    assert long.sequences[0].is_prefilling


def test_a_cached_prefix_is_read_and_its_cost_counted() -> None:
    driver = TimedDriver(lambda load: cpu(load) + 1e-6 * load.num_prefill_pairs, TARGET_S)
    head = [(i * 11) % 900 for i in range(LONG)]
    driver.run_until_first_token(driver.submit(head, max_tokens=2, cache_salt="shared"))
    streams = driver.start_streams()
    begun_s = driver.now_s
    hits = [driver.submit([*head, *([number] * 150)], max_tokens=2, cache_salt="shared") for number in range(4)]
    for hit in hits:
        driver.run_until_first_token(hit)
    assert all(hit.sequences[0].num_cached_tokens >= LONG - 16 for hit in hits)
    assert max(gap for stream in streams for at_s, gap in driver.gaps(stream) if at_s > begun_s) <= TARGET_S


def test_the_load_of_a_step_is_what_is_scheduled_in_it() -> None:
    driver = TimedDriver(cpu, TARGET_S)
    driver.start_streams(40)
    driver.submit_long()
    driver.submit([3] * 100)
    driver.run()
    for plan in driver.plans:
        load = StepLoad(
            num_decodes=plan.num_decode_requests,
            num_decode_kv_tokens=sum(entry.start + 1 for entry in plan.scheduled if not entry.is_prefill),
        )
        for entry in plan.scheduled:
            if entry.is_prefill:
                load = load.with_chunk(entry.num_tokens, entry.start)
        assert plan.load == load
    assert any(plan.load.num_prefills > 1 and plan.load.num_decodes for plan in driver.plans)
