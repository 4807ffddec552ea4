"""Sampled tokens against another sampler on transformers' logits: the same in any batch, in chunks, after a preemption
and in a continuation."""

from collections.abc import Iterator

import pytest

from engine.execution.runner import CpuRunner
from streamkv.config import EngineConfig
from tests.support.driven_engine import DrivenEngine, generated
from tests.support.oracle import SampledCase, read_sampled_cases
from tests.support.quick_start import load_quickly
from tests.support.reference_model import reference_folder

BLOCK_SIZE = 8
SAMPLED = read_sampled_cases()


@pytest.fixture(scope="module")
def runner() -> Iterator[CpuRunner]:
    runner = CpuRunner(
        EngineConfig(model=str(reference_folder()), dtype="float32", block_size=BLOCK_SIZE, kv_cache_memory_gib=0.4)
    )
    load_quickly(runner)
    yield runner
    runner.close()


@pytest.mark.parametrize(
    ("cases", "max_prefill_tokens", "num_blocks"),
    [(SAMPLED[:8], 16, 90), pytest.param(SAMPLED, 0, 900, marks=pytest.mark.long)],
)
def test_sampled_tokens_at_once_are_the_oracles(
    runner: CpuRunner, cases: list[SampledCase], max_prefill_tokens: int, num_blocks: int
) -> None:
    engine = DrivenEngine(runner, BLOCK_SIZE, num_blocks, max_prefill_tokens=max_prefill_tokens)
    requests = [engine.add(case.prompt, 0, sampling=case.sampling()) for case in cases]
    engine.pump()
    assert (engine.scheduler.counts.num_preemptions > 0) == (num_blocks == 90)
    assert [[list(generated(choice)) for choice in request.sequences] for request in requests] == [
        case.token_ids for case in cases
    ]


def test_a_sampled_answer_alone_is_the_oracles(runner: CpuRunner) -> None:
    engine = DrivenEngine(runner, BLOCK_SIZE, 100)
    request = engine.add(SAMPLED[0].prompt, 0, sampling=SAMPLED[0].sampling())
    engine.pump()
    assert [list(generated(choice)) for choice in request.sequences] == SAMPLED[0].token_ids
