"""How the same requests fare on the same device under the real scheduler and under static batching.

Both modes share the clock, the cost of a step (`step_cost`) and the pool. Paged: the real scheduler, block manager and
simulated device, content and all. Static, as W. Kwon et al. (SOSP 2023) describe the systems before paged memory:
requests are taken in their order until memory is full, each reserves room in one piece for the longest sequence that
there may be, and the batch runs until its last member has ended. In favour of static batching nothing is padded, an
ended member costs no more time (only its place and its memory), and `exact` reserves no more than the request turns
out to need, which no real server can know.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isnan
from typing import Final, Literal

from engine.executor import DeviceLimits
from engine.kv.block_manager import BlockManager
from engine.plan import StepLoad
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Request
from engine.simulation.device import SimulatedDevice
from engine.simulation.executor import SimulatedExecutor, SimulatedLaunch
from engine.simulation.simulated_model import SimulatedModel
from engine.simulation.step_cost import StepCost
from streamkv import lengths
from streamkv.protocol import pack_ids
from streamkv.sampling import SamplingParams

Mode = Literal["paged", "static", "exact"]

H200_LLAMA_8B: Final = StepCost(
    base_s=0.6e-3,
    weights_s=4.2e-3,
    token_s=24.7e-6,
    pair_s=1.3e-9,
    kv_token_s=31e-9,
    block_copy_s=1e-6,
    host_bytes_per_s=50e9,
    disk_bytes_per_s=5e9,
)
"""An 8B model (32 layers, 8 KV heads of 128, bfloat16) on one H200. weights_s: its 32 layers and head measured at one
token. token_s: 16.1 GFLOP at 650 TFLOP/s. pair_s: 0.52 MFLOP at 400 TFLOP/s. kv_token_s: 131,072 bytes at 4.2 TB/s.
base_s: what a decode step took beyond that (4.9 ms a token at one sequence)."""
KV_BYTES_PER_TOKEN: Final = 131_072

_BLOCK_SIZE: Final = 16
MAX_LEN: Final = lengths.MIXED_PROMPTS[3] + lengths.MIXED_OUTPUTS[3]
_BUDGET_TOKENS: Final = 8192
_VOCAB: Final = range(1000, 30000)
_FULL_SHARE: Final = 0.8
"""Of the pool, owned: from there on its use is measured."""
_MEASURE_EVERY: Final = 4
"""Steps."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request."""

    prompt: list[int]
    output_tokens: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What a mode came to."""

    mode: Mode
    elapsed_s: float
    output_tokens_per_s: float
    largest_batch: int
    mean_batch: float
    """Over the steps."""
    latency_p50_s: float
    """From arrival to the last token."""
    latency_p99_s: float
    mean_use: float
    """Computed tokens over slots that are owned (static: reserved), while at least 80 % of the pool is. NaN: never."""
    least_use: float
    mean_pool_use: float
    """Computed tokens over all slots of the pool, meanwhile."""
    num_preemptions: int = 0


def mixed_arrivals(num_requests: int, rate: float, seed: int) -> list[Arrival]:
    """The requests of workload `mixed`, those that `streamkv bench` sends; all at once, or as a Poisson process of so
    many a second."""
    dice, gaps = random.Random(f"{seed} mixed"), random.Random(f"{seed} arrivals")
    arrivals: list[Arrival] = []
    at_s = 0.0
    for _ in range(num_requests):
        num_prompt, num_output = lengths.mixed(dice)
        arrivals.append(Arrival(dice.choices(_VOCAB, k=num_prompt), num_output, at_s))
        if rate:
            at_s += gaps.expovariate(rate)
    return arrivals


def compare(
    arrivals: Sequence[Arrival],
    modes: Sequence[Mode],
    pool_tokens: int,
    max_num_seqs: int,
    cost: StepCost = H200_LLAMA_8B,
) -> list[Figures]:
    """Each mode on a device of its own. pool_tokens: tokens that KV memory holds."""
    return [
        _run_paged(arrivals, pool_tokens, max_num_seqs, cost)
        if mode == "paged"
        else _run_static(arrivals, mode, pool_tokens, max_num_seqs, cost)
        for mode in modes
    ]


class _Use:
    """How well memory is used, step by step, weighted by time."""

    def __init__(self) -> None:
        self._seconds = self._use = self._pool_use = 0.0
        self._least = inf

    def add(self, seconds: float, num_computed: int, num_owned: int, pool_tokens: int) -> None:
        if num_owned < _FULL_SHARE * pool_tokens:
            return
        self._seconds += seconds
        self._use += seconds * num_computed / num_owned
        self._pool_use += seconds * num_computed / pool_tokens
        self._least = min(self._least, num_computed / num_owned)

    def figures(self) -> tuple[float, float, float]:
        """(mean over owned, least over owned, mean over the pool)"""
        if not self._seconds:
            return float("nan"), float("nan"), float("nan")
        return self._use / self._seconds, self._least, self._pool_use / self._seconds


def _summarise(
    mode: Mode,
    arrivals: Sequence[Arrival],
    ended_s: Sequence[float],
    batches: Sequence[int],
    use: _Use,
    num_preemptions: int,
) -> Figures:
    elapsed_s = max(ended_s) - arrivals[0].at_s
    latencies = sorted(end - arrival.at_s for end, arrival in zip(ended_s, arrivals, strict=True))
    mean_use, least_use, mean_pool_use = use.figures()
    return Figures(
        mode=mode,
        elapsed_s=elapsed_s,
        output_tokens_per_s=sum(arrival.output_tokens for arrival in arrivals) / elapsed_s,
        largest_batch=max(batches),
        mean_batch=sum(batches) / len(batches),
        latency_p50_s=latencies[len(latencies) // 2],
        latency_p99_s=latencies[min(len(latencies) - 1, int(len(latencies) * 0.99))],
        mean_use=mean_use,
        least_use=least_use,
        mean_pool_use=mean_pool_use,
        num_preemptions=num_preemptions,
    )


def _run_paged(arrivals: Sequence[Arrival], pool_tokens: int, max_num_seqs: int, cost: StepCost) -> Figures:
    """Two steps in flight, as on a GPU. Raises AssertionError for a wrong token."""
    now_s = 0.0

    def clock() -> float:
        return now_s

    num_blocks = pool_tokens // _BLOCK_SIZE + 1
    model = SimulatedModel(_VOCAB.stop)
    device = SimulatedDevice(model, num_blocks, _BLOCK_SIZE, max_in_flight=2, max_num_batched_tokens=_BUDGET_TOKENS)
    limits = DeviceLimits(num_blocks, _BLOCK_SIZE, MAX_LEN, _BUDGET_TOKENS)
    executor = SimulatedExecutor(device, limits, cost, clock, random.Random(0))
    scheduler = Scheduler(
        SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=_BUDGET_TOKENS,
            max_prefill_tokens=0,
            max_num_partial_prefills=4,
            enable_chunked_prefill=True,
            max_model_len=MAX_LEN,
            max_queue=len(arrivals),
            eos_token_ids=model.eos_token_ids,
        ),
        BlockManager(num_blocks, _BLOCK_SIZE),
        clock,
    )
    waiting = deque(enumerate(arrivals))
    ended_s = [0.0] * len(arrivals)
    in_flight: deque[SimulatedLaunch] = deque()
    batches: list[int] = []
    use, measured_s = _Use(), 0.0
    while waiting or scheduler.has_work:
        while waiting and waiting[0][1].at_s <= now_s:
            index, arrival = waiting.popleft()
            sampling = SamplingParams(index, arrival.output_tokens, temperature=0.0, ignore_eos=True)
            request = Request(index, b"", b"", arrival.prompt, sampling, now_s)
            request.packed_prompt = pack_ids(arrival.prompt)
            scheduler.check(len(arrival.prompt), sampling)
            scheduler.add(request)
        while in_flight and in_flight[0].is_done:
            launch = in_flight.popleft()
            for output in scheduler.update(launch.plan, executor.collect(launch)):
                if output.finish_reason:
                    request = output.sequence.request
                    ended_s[request.request_id] = now_s
                    _check_tokens(model, request)
            if launch.plan.step % _MEASURE_EVERY == 0:
                usage = scheduler.kv_usage()
                owned = usage.num_owned_blocks * _BLOCK_SIZE
                use.add(now_s - measured_s, usage.num_computed_tokens, owned, pool_tokens)
                measured_s = now_s
        while len(in_flight) < 2 and (plan := scheduler.plan()) is not None:
            in_flight.append(executor.launch(plan, lambda: None))
            batches.append(len(plan.scheduled))
        next_s = min(executor.next_event_s, waiting[0][1].at_s if waiting else inf)
        now_s = max(now_s, next_s) if next_s < inf else now_s
    return _summarise("paged", arrivals, ended_s, batches, use, scheduler.counts.num_preemptions)


def _check_tokens(model: SimulatedModel, request: Request) -> None:
    (sequence,) = request.sequences
    right = model.generate(request.prompt_token_ids, request.sampling, 0, MAX_LEN)
    num_prompt = len(request.prompt_token_ids)
    assert sequence.token_ids[num_prompt:] == right.token_ids, f"request {request.request_id} has wrong tokens"


def _run_static(
    arrivals: Sequence[Arrival], mode: Mode, pool_tokens: int, max_num_seqs: int, cost: StepCost
) -> Figures:
    def reserved(arrival: Arrival) -> int:
        return len(arrival.prompt) + arrival.output_tokens if mode == "exact" else MAX_LEN

    waiting = deque(enumerate(arrivals))
    ended_s = [0.0] * len(arrivals)
    batches: list[int] = []
    use = _Use()
    now_s = 0.0
    while waiting:
        now_s = max(now_s, waiting[0][1].at_s)
        batch: list[tuple[int, Arrival]] = []
        num_reserved = 0
        while (
            waiting
            and waiting[0][1].at_s <= now_s
            and len(batch) < max_num_seqs
            and num_reserved + reserved(waiting[0][1]) <= pool_tokens
        ):
            batch.append(waiting.popleft())
            num_reserved += reserved(batch[-1][1])
        now_s = _run_batch(batch, num_reserved, pool_tokens, cost, now_s, ended_s, batches, use)
    return _summarise(mode, arrivals, ended_s, batches, use, 0)


def _run_batch(
    batch: list[tuple[int, Arrival]],
    num_reserved: int,
    pool_tokens: int,
    cost: StepCost,
    now_s: float,
    ended_s: list[float],
    batches: list[int],
    use: _Use,
) -> float:
    """Prompts first, as many as the budget takes in each step, then decodes until the last has ended. Returns when."""
    num_computed = 0

    def step(load: StepLoad, num_sequences: int) -> None:
        nonlocal now_s
        step_s = cost.step_s(load)
        use.add(step_s, num_computed, num_reserved, pool_tokens)
        batches.append(num_sequences)
        now_s += step_s

    prompts = deque(len(arrival.prompt) for _, arrival in batch)
    while prompts:
        num_tokens = num_pairs = num_prompts = 0
        while prompts and (not num_prompts or num_tokens + prompts[0] <= _BUDGET_TOKENS):
            length = prompts.popleft()
            num_tokens += length
            num_pairs += length * (length + 1) // 2
            num_prompts += 1
        num_computed += num_tokens
        step(StepLoad(num_tokens, num_pairs, num_prefills=num_prompts), num_prompts)
    for generated in range(1, max(arrival.output_tokens for _, arrival in batch) + 1):
        for index, arrival in batch:
            if arrival.output_tokens == generated:
                ended_s[index] = now_s
        running = [arrival for _, arrival in batch if arrival.output_tokens > generated]
        if running:
            num_computed += len(running)
            num_kv_tokens = sum(len(arrival.prompt) for arrival in running) + generated * len(running)
            step(StepLoad(num_decodes=len(running), num_decode_kv_tokens=num_kv_tokens), len(running))
    return now_s


def table(figures: Sequence[Figures]) -> str:
    """Markdown."""
    rows = [
        "| mode | output tokens/s | batch, largest / mean | latency p50 / p99, s | use of owned memory, mean / least "
        "| of all KV memory | preemptions |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for f in figures:
        use = "never so full" if isnan(f.mean_use) else f"{f.mean_use:.1%} / {f.least_use:.1%}"
        pool_use = "" if isnan(f.mean_pool_use) else f"{f.mean_pool_use:.1%}"
        rows.append(
            f"| {_NAMES[f.mode]} | {f.output_tokens_per_s:,.0f} | {f.largest_batch} / {f.mean_batch:.0f} "
            f"| {f.latency_p50_s:.1f} / {f.latency_p99_s:.1f} | {use} | {pool_use} | {f.num_preemptions} |"
        )
    return "\n".join(rows)


_NAMES: Final[dict[Mode, str]] = {
    "paged": "paged, the real scheduler",
    "static": "static batches, the longest length reserved",
    "exact": "static batches, the true length reserved",
}
