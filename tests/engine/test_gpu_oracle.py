"""On a GPU: greedy tokens against transformers' on a real model, two steps under way, from requests to tokens; and what
--deterministic promises of bits."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("triton")

from engine.execution.gpu_runner import GpuRunner
from streamkv.config import EngineConfig
from streamkv.sampling import SamplingParams
from tests.support.driven_engine import OverlappedEngine, generated
from tests.support.oracle import BFLOAT16_NEAR_TIE, CASES, FLOAT32_NEAR_TIE, SHORT, Case, check, read_sampled_cases
from tests.support.reference_model import reference_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]
MakeRunner = Callable[..., GpuRunner]


@pytest.fixture(scope="module")
def make_runner() -> Iterator[MakeRunner]:
    """Settings → a runner with them. One at a time: the last is closed first."""
    folder = str(reference_folder())
    made: dict[tuple[tuple[str, object], ...], GpuRunner] = {}

    def make(**settings: object) -> GpuRunner:
        key = tuple(sorted(settings.items()))
        if key not in made:
            while made:
                made.popitem()[1].close()
            gc.collect()
            torch.cuda.empty_cache()
            config = EngineConfig(
                model=folder, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=2048, **settings  # type: ignore[arg-type]
            )  # fmt: skip
            made[key] = GpuRunner(config, torch.device("cuda", 0))
            made[key].load(lambda stage, percent: None)
        return made[key]

    yield make
    while made:
        made.popitem()[1].close()


def generate(
    runner: GpuRunner, block_size: int, cases: list[Case], *, chunk: int = 0, n: int = 1, pool_share: float = 1.0
) -> list[list[int]]:
    """The tokens of every choice of all cases, sent at once."""
    num_blocks = int(pool_share * sum(n * -(-(len(case.prompt) + 48) // block_size) for case in cases))
    engine = OverlappedEngine(runner, block_size, num_blocks, max_prefill_tokens=chunk)
    requests = [engine.add(case.prompt, len(case.tokens), n) for case in cases]
    engine.pump()
    assert (engine.scheduler.counts.num_preemptions > 0) == (pool_share < 1.0)
    return [list(generated(sequence)) for request in requests for sequence in request.sequences]


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_float32_has_every_token(make_runner: MakeRunner, block_size: int, enforce_eager: bool) -> None:
    runner = make_runner(dtype="float32", block_size=block_size, enforce_eager=enforce_eager)
    for chunk in (0, 64, 16, 7):
        for case, tokens in zip(CASES, generate(runner, block_size, CASES, chunk=chunk), strict=True):
            check(case, tokens, FLOAT32_NEAR_TIE)
    for case in CASES:
        check(case, generate(runner, block_size, [case])[0], FLOAT32_NEAR_TIE)
    for i, tokens in enumerate(generate(runner, block_size, SHORT[:3], chunk=16, n=2, pool_share=0.6)):
        check(SHORT[i // 2], tokens, FLOAT32_NEAR_TIE)


@pytest.mark.parametrize(("chunk", "num_blocks"), [(0, 900), (16, 90), (7, 900)])
def test_float32_has_every_sampled_token(make_runner: MakeRunner, chunk: int, num_blocks: int) -> None:
    engine = OverlappedEngine(make_runner(dtype="float32", block_size=8), 8, num_blocks, max_prefill_tokens=chunk)
    cases = read_sampled_cases()
    requests = [engine.add(case.prompt, 0, sampling=case.sampling()) for case in cases]
    engine.pump()
    assert (engine.scheduler.counts.num_preemptions > 0) == (num_blocks == 90)
    for request, case in zip(requests, cases, strict=True):
        assert [list(generated(choice)) for choice in request.sequences] == case.token_ids


@pytest.mark.parametrize("deterministic", [False, True])
def test_bfloat16_differs_at_near_ties_only(make_runner: MakeRunner, deterministic: bool) -> None:
    runner = make_runner(dtype="bfloat16", deterministic=deterministic)
    for chunk in (0, 64, 7):
        for case, tokens in zip(CASES, generate(runner, 16, CASES, chunk=chunk), strict=True):
            check(case, tokens, BFLOAT16_NEAR_TIE)


def told(runner: GpuRunner, cases: list[Case], chunk: int, num_blocks: int) -> list[tuple[list[int], bytes, bytes]]:
    """Tokens, and the bits of their and of the likeliest tokens' log probabilities."""
    sampling = SamplingParams(seed=9, max_tokens=40, temperature=0.8, ignore_eos=True, logprobs=5)
    engine = OverlappedEngine(runner, 16, num_blocks, max_prefill_tokens=chunk)
    requests = [engine.add(case.prompt, 0, 1, sampling) for case in cases]
    engine.pump()
    sequences = [request.sequences[0] for request in requests]
    values = {id(sequence): (bytearray(), bytearray()) for sequence in sequences}
    for output in engine.outputs:
        if output.logprobs is not None:
            values[id(output.sequence)][0].extend(output.logprobs.chosen)
            values[id(output.sequence)][1].extend(output.logprobs.top_logprobs)
    found: list[tuple[list[int], bytes, bytes]] = []
    for sequence in sequences:
        chosen, top = values[id(sequence)]
        found.append((list(generated(sequence)), bytes(chosen), bytes(top)))
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_deterministic_bits_do_not_depend_on_batch_chunks_cache_or_preemption(
    make_runner: MakeRunner, dtype: str
) -> None:
    runner = make_runner(dtype=dtype, deterministic=True)
    alone = [told(runner, [case], 0, 400)[0] for case in SHORT]
    assert all(len(chosen) == 4 * 40 for _, chosen, _ in alone)
    assert told(runner, SHORT, 0, 400) == alone
    assert told(runner, SHORT, 7, 400) == alone
    few_blocks = int(0.6 * sum(-(-(len(case.prompt) + 48) // 16) for case in SHORT))
    assert told(runner, SHORT, 16, few_blocks) == alone
    assert told(runner, SHORT + SHORT, 32, 400) == alone + alone, "the second time from the cache"
