"""What a step costs the scheduler: python -m tests.bench.scheduler_cost

Time of this thread, so that others on the machine do not count. A stand-in for the device answers at once: what is
measured is planning a step and taking in its tokens, with the prefix tree on.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable

from engine.kv.block_manager import BlockManager
from engine.plan import StepTokens
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Request
from streamkv.protocol import pack_ids
from streamkv.sampling import SamplingParams

LONG_PROMPT = 32 * 1024


def make_scheduler(num_seqs: int, block_size: int, num_tokens: int) -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(8192, num_seqs),
        max_prefill_tokens=0,
        max_num_partial_prefills=4,
        enable_chunked_prefill=True,
        max_model_len=64 * 1024,
        max_queue=10_000,
        eos_token_ids=(2,),
    )
    return Scheduler(limits, BlockManager(num_tokens // block_size + 2, block_size), time.perf_counter)


def add(scheduler: Scheduler, request_id: int, prompt: list[int], max_tokens: int, tenant: str = "") -> Request:
    sampling = SamplingParams(seed=request_id, max_tokens=max_tokens)
    request = Request(request_id, b"", b"", prompt, sampling, time.perf_counter(), tenant=tenant)
    request.packed_prompt = pack_ids(prompt)  # as it comes over the wire
    scheduler.add(request)
    return request


def step(scheduler: Scheduler, next_token: Callable[[], int]) -> tuple[float, float]:
    """Seconds of this thread for the plan and for its tokens."""
    start = time.thread_time()
    plan = scheduler.plan()
    planned = time.thread_time()
    assert plan is not None
    tokens = StepTokens([next_token() for entry in plan.scheduled if entry.samples])
    answered = time.thread_time()
    scheduler.update(plan, tokens)
    return planned - start, time.thread_time() - answered


def decode_cost(num_seqs: int, block_size: int, num_steps: int = 320) -> tuple[float, float, float]:
    """Milliseconds a step at steady decode: median of the plans, of the updates, 99th percentile of both together."""
    scheduler = make_scheduler(num_seqs, block_size, num_seqs * 1024)
    for i in range(num_seqs):
        add(scheduler, i, [(i * 7919 + j * 31) % 50_000 + 3 for j in range(100 + i % 64)], 900)
    counter = 0

    def next_token() -> int:
        nonlocal counter
        counter += 1
        return counter * 7 % 50_000 + 3

    while (
        any(not sequence.num_computed for sequence in list(scheduler._roster.running.sequences))
        or scheduler.num_waiting
    ):
        step(scheduler, next_token)
    for _ in range(40):
        step(scheduler, next_token)
    times = [step(scheduler, next_token) for _ in range(num_steps)]
    assert scheduler.num_running == num_seqs
    both = sorted(sum(pair) for pair in times)
    return (
        1000 * statistics.median(plan for plan, _ in times),
        1000 * statistics.median(update for _, update in times),
        1000 * both[int(len(both) * 0.99)],
    )


def admission_cost(block_size: int, num_rounds: int = 30) -> tuple[float, float, float]:
    """Milliseconds for a request whose 32k-token prompt is cached: the plan that admits it, the first time that its
    prompt is seen and again when it could not be admitted at once; and its end."""
    scheduler = make_scheduler(8, block_size, 3 * LONG_PROMPT)
    prompt = [(j * 31) % 50_000 + 3 for j in range(LONG_PROMPT)]
    add(scheduler, 0, prompt, 1)
    while scheduler.has_runnable:
        step(scheduler, lambda: 5)
    admissions, ends, looks = [], [], []
    for i in range(1, num_rounds + 1):
        request = add(scheduler, i, prompt, 4)
        planned, _ = step(scheduler, lambda: 5)
        admissions.append(planned)
        assert request.sequences[0].num_cached_tokens == LONG_PROMPT - 1
        start = time.thread_time()
        scheduler.abort(request, "cancelled")
        ends.append(time.thread_time() - start)
        waiting = add(scheduler, 100 + i, prompt, 4).sequences[0]
        scheduler._blocks.find(waiting)
        start = time.thread_time()
        scheduler._blocks.find(waiting)
        looks.append(time.thread_time() - start)
        scheduler.abort(waiting.request, "cancelled")
    return tuple(1000 * statistics.median(times) for times in (admissions, looks, ends))  # type: ignore[return-value]


def choice_cost(num_tenants: int, num_waiting: int = 1000, num_rounds: int = 200) -> float:
    """Milliseconds for a plan that admits one of so many waiting requests of so many tenants, beside 8 that run."""
    scheduler = make_scheduler(9, 16, 64 * 1024)
    for i in range(8):
        add(scheduler, i, [(j * 31 + i) % 50_000 + 3 for j in range(64)], 4000)
    step(scheduler, lambda: 5)
    for i in range(num_waiting + num_rounds):
        add(scheduler, 100 + i, [i % 50_000 + 3] * 8, 1, tenant=str(i % num_tenants))
    return 1000 * statistics.median([step(scheduler, lambda: 5)[0] for _ in range(num_rounds)])


def main() -> None:
    gc.collect()
    print("| sequences | block size | plan, ms | update, ms | both, µs a sequence | p99 of both, ms |")
    print("|---|---|---|---|---|---|")
    for num_seqs in (256, 1024):
        for block_size in (8, 16, 32):
            plan, update, p99 = decode_cost(num_seqs, block_size)
            a_sequence = 1000 * (plan + update) / num_seqs
            print(f"| {num_seqs} | {block_size} | {plan:.3f} | {update:.3f} | {a_sequence:.2f} | {p99:.3f} |")
            sys.stdout.flush()
    print("\n| cached 32k prompt, block size | its admission, ms | looked up again, ms | its end, ms |")
    print("|---|---|---|---|")
    for block_size in (8, 16, 32):
        admission, look, end = admission_cost(block_size)
        print(f"| {block_size} | {admission:.2f} | {look:.3f} | {end:.2f} |")
        sys.stdout.flush()
    print("\n| tenants of 1000 waiting requests | plan that admits one, ms |")
    print("|---|---|")
    for num_tenants in (1, 10, 100, 1000):
        print(f"| {num_tenants} | {choice_cost(num_tenants):.3f} |")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
