"""Greedy tokens against transformers' on a real model: the whole engine below the loop, from requests to tokens."""

from collections.abc import Callable, Iterator

import pytest
import torch

from engine.execution.runner import CpuRunner
from engine.kv.block_manager import BlockManager
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.load import load_model
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Request
from streamkv.config import Dtype, EngineConfig
from streamkv.model_files import ModelFiles, ReportProgress
from streamkv.sampling import SamplingParams
from tests.support.oracle import BFLOAT16_NEAR_TIE, CASES, FLOAT32_NEAR_TIE, SHORT, Case, check
from tests.support.quick_start import load_quickly
from tests.support.reference_model import reference_folder

RunnerFactory = Callable[[Dtype, int], CpuRunner]

SOME = [case.first(24) for case in SHORT if len(case.prompt) < 100]
"""What `make test` has time for: a step reads all weights, however few tokens it computes."""


@pytest.fixture(scope="module")
def make_runner() -> Iterator[RunnerFactory]:
    """(dtype, block size) → a loaded runner. The weights of one dtype are read once for all block sizes."""
    loaded: dict[Dtype, tuple[Decoder, ModelConfig]] = {}
    runners: dict[tuple[Dtype, int], CpuRunner] = {}
    folder = str(reference_folder())

    def make(dtype: Dtype, block_size: int) -> CpuRunner:
        if (dtype, block_size) not in runners:
            runner = runners[dtype, block_size] = CpuRunner(
                EngineConfig(
                    model=folder,
                    dtype=dtype,
                    block_size=block_size,
                    kv_cache_memory_gib=0.75,
                    max_num_batched_tokens=64,
                )
            )

            def load_once(
                files: ModelFiles, torch_dtype: torch.dtype, report: ReportProgress
            ) -> tuple[Decoder, ModelConfig]:
                if dtype not in loaded:
                    loaded[dtype] = load_model(files, torch_dtype, report)
                return loaded[dtype]

            load_quickly(runner, load_model=load_once)
        return runners[dtype, block_size]

    yield make
    for runner in runners.values():
        runner.close()


def generate(
    runner: CpuRunner,
    block_size: int,
    cases: list[Case],
    max_prefill_tokens: int,
    *,
    n: int = 1,
    pool_share: float = 1.0,
) -> list[list[int]]:
    """The tokens of every choice of all cases, sent at once, through the real scheduler and block manager.

    pool_share: blocks in the pool, as a share of what all choices would take; under 1 some are preempted.
    """
    limits = SchedulerLimits(
        max_num_seqs=16,
        max_num_batched_tokens=256,
        max_prefill_tokens=max_prefill_tokens,
        max_num_partial_prefills=16,
        enable_chunked_prefill=True,
        max_model_len=2048,
        max_queue=64,
        eos_token_ids=(2,),
    )
    blocks_needed = sum(n * -(-(len(case.prompt) + 48) // block_size) for case in cases)
    blocks = BlockManager(int(blocks_needed * pool_share) + 1, block_size)
    scheduler = Scheduler(limits, blocks, clock=lambda: 0.0)
    requests = []
    for i, case in enumerate(cases):
        sampling = SamplingParams(seed=0, max_tokens=len(case.tokens), temperature=0.0, ignore_eos=True, n=n)
        request = Request(i, b"g", bytes([i]) * 16, case.prompt, sampling, arrival_s=0.0)
        scheduler.check(len(case.prompt), sampling)
        scheduler.add(request)
        requests.append(request)
    while (plan := scheduler.plan()) is not None:
        scheduler.update(plan, runner.collect(runner.launch(plan, lambda: None)))
    assert blocks.num_owned_blocks == 0
    assert (scheduler.counts.num_preemptions > 0) == (pool_share < 1.0)
    assert scheduler.num_block_copies > 0 or n == 1
    return [sequence.token_ids[sequence.num_prompt :] for request in requests for sequence in request.sequences]


def check_float32(make_runner: RunnerFactory, block_size: int, cases: list[Case], max_prefill_tokens: int) -> None:
    outputs = generate(make_runner("float32", block_size), block_size, cases, max_prefill_tokens)
    for case, tokens in zip(cases, outputs, strict=True):
        check(case, tokens, FLOAT32_NEAR_TIE)


def test_the_oracle_has_no_near_tie_in_float32() -> None:
    """So `check` compares every token."""
    assert min(min(case.margins) for case in CASES) > FLOAT32_NEAR_TIE


@pytest.mark.parametrize(("block_size", "max_prefill_tokens"), [(8, 7), (32, 16)])
def test_short_prompts_at_once_in_chunks(make_runner: RunnerFactory, block_size: int, max_prefill_tokens: int) -> None:
    check_float32(make_runner, block_size, SOME, max_prefill_tokens)


def test_a_short_prompt_alone_and_in_one_piece(make_runner: RunnerFactory) -> None:
    check_float32(make_runner, 16, SOME[:1], 0)


def test_choices_that_share_a_prompt_and_preempted_sequences(make_runner: RunnerFactory) -> None:
    cases = SHORT[:3]
    outputs = generate(make_runner("float32", 8), 8, cases, 16, n=2, pool_share=0.6)
    for i, tokens in enumerate(outputs):
        check(cases[i // 2], tokens, FLOAT32_NEAR_TIE)


def test_cached_prefixes_of_every_length(make_runner: RunnerFactory) -> None:
    """Whole blocks shared and a block of which the first 1, 2, … 15 tokens match; and a prompt that is all there."""
    block_size, case = 16, next(case for case in SHORT if len(case.prompt) > 32)
    runner = make_runner("float32", block_size)
    limits = SchedulerLimits(16, 256, 0, 16, True, 2048, 64, (2,))
    scheduler = Scheduler(limits, BlockManager(400, block_size), clock=lambda: 0.0)

    def run(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        sampling = SamplingParams(seed=0, max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        requests = [
            Request(i, b"g", bytes([i]) * 16, prompt, sampling, arrival_s=0.0, cache_salt=str(i))
            for i, prompt in enumerate(prompts)
        ]
        for request in requests:
            scheduler.add(request)
        while (plan := scheduler.plan()) is not None:
            scheduler.update(plan, runner.collect(runner.launch(plan, lambda: None)))
        found.append([request.sequences[0].num_cached_tokens for request in requests])
        return [request.sequences[0].token_ids[len(case.prompt) :] for request in requests]

    found: list[list[int]] = []
    other = next(token for token in range(1000, 1100) if token not in case.prompt)
    run([case.prompt[: 16 + k] + [other] * 3 for k in range(1, 16)] + [case.prompt], 1)
    outputs = run([case.prompt] * 16, 12)
    assert found == [[0] * 16, [*range(17, 32), len(case.prompt) - 1]]
    assert outputs == [case.tokens[:12]] * 16


def test_bfloat16_differs_at_near_ties_only(make_runner: RunnerFactory) -> None:
    cases = SOME[:4]
    for case, tokens in zip(cases, generate(make_runner("bfloat16", 16), 16, cases, 0), strict=True):
        check(case, tokens, BFLOAT16_NEAR_TIE)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("max_prefill_tokens", [0, 1, 7, 16, 64])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_all_prompts_at_once(make_runner: RunnerFactory, block_size: int, max_prefill_tokens: int) -> None:
    check_float32(make_runner, block_size, CASES, max_prefill_tokens)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_one_by_one(make_runner: RunnerFactory, block_size: int, case: Case) -> None:
    check_float32(make_runner, block_size, [case], 0)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_bfloat16_differs_at_near_ties_only_with_all_prompts(make_runner: RunnerFactory) -> None:
    for case, tokens in zip(CASES, generate(make_runner("bfloat16", 16), 16, CASES, 64), strict=True):
        check(case, tokens, BFLOAT16_NEAR_TIE)
