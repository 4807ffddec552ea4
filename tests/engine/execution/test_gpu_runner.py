"""The executor of a GPU, two steps under way, against that of a CPU on the same tiny model: the same tokens, and
the same told of them. Where there is no GPU its kernels run in Triton's interpreter, at seconds a step."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from engine.execution import gpu_runner
from engine.execution.gpu_runner import GpuRunner
from engine.execution.runner import CpuRunner
from engine.execution.warm_up import WarmUp
from engine.plan import NewSequence, ScheduledSequence, StepPlan
from engine.sequence import Request
from streamkv.config import EngineConfig
from streamkv.sampling import SamplingParams
from tests.support.driven_engine import DrivenEngine, OverlappedEngine
from tests.support.tiny_models import write_small_llama

BLOCK_SIZE = 4
Engines = Callable[..., tuple[DrivenEngine, OverlappedEngine]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_llama(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def runners(folder: Path, device: torch.device) -> Iterator[tuple[CpuRunner, GpuRunner]]:
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        block_size=BLOCK_SIZE,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=64,
        kv_cache_memory_gib=0.01,
        gpu_memory_utilization=0.3,
    )
    cpu, gpu = CpuRunner(config), GpuRunner(config, device)
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":  # the warm-up alone would take minutes
            patch.setattr(gpu_runner, "WarmUp", ColdStart)
        for runner in (cpu, gpu):
            runner.load(lambda stage, percent: None)
    yield cpu, gpu
    cpu.close()
    gpu.close()


class ColdStart(WarmUp):
    """No step is run before the first."""

    def run(self, report: Callable[[float], None]) -> None:
        report(100.0)


@pytest.fixture
def engines(runners: tuple[CpuRunner, GpuRunner]) -> Engines:
    """num_blocks → the two engines, on pools of that size."""

    def make(num_blocks: int, **more: int) -> tuple[DrivenEngine, OverlappedEngine]:
        cpu, gpu = runners
        return DrivenEngine(cpu, BLOCK_SIZE, num_blocks, **more), OverlappedEngine(gpu, BLOCK_SIZE, num_blocks, **more)  # type: ignore[arg-type]

    return make


def greedy(num_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(seed=1, max_tokens=num_tokens, temperature=0.0, ignore_eos=True, **more)  # type: ignore[arg-type]


def outcome(engine: DrivenEngine, prompts: list[list[int]], sampling: list[SamplingParams]) -> list[list[list[int]]]:
    """The tokens of every choice of every request."""
    requests: list[Request] = [engine.add(p, 0, s.n, s) for p, s in zip(prompts, sampling, strict=True)]
    engine.pump()
    assert all(request.is_finished for request in requests)
    return [
        [list(sequence.token_ids[len(p) :]) for sequence in r.sequences] for p, r in zip(prompts, requests, strict=True)
    ]


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.long
def test_chunks_decodes_and_choices_have_the_tokens_of_the_cpu(engines: Engines) -> None:
    prompts = [prompt(1, 21), prompt(2, 3), prompt(3, 9)]
    sampling = [greedy(3), greedy(4), SamplingParams(seed=3, max_tokens=3, temperature=1.0, n=2, ignore_eos=True)]
    cpu, gpu = engines(60, max_prefill_tokens=16)
    assert outcome(gpu, prompts, sampling) == outcome(cpu, prompts, sampling)


@pytest.mark.long
def test_what_is_told_and_changed_of_a_row_is_that_of_the_cpu(engines: Engines) -> None:
    """Log probabilities, penalties, biases and bans, with a plain sequence beside them."""
    shared = prompt(4, 6)
    prompts = [shared, shared[::-1], prompt(5, 5)]
    sampling = [
        greedy(4, logprobs=2, repetition_penalty=1.8, frequency_penalty=0.7),
        greedy(3, logit_bias={7: 100.0, 9: 99.5}, presence_penalty=1.5),
        greedy(3),
    ]
    cpu, gpu = engines(60)
    tokens = outcome(gpu, prompts, sampling)
    assert tokens == outcome(cpu, prompts, sampling)
    assert tokens[1][0][:2] == [7, 9], "the bias of 7 is less than that of 9 once it is penalised"


def told(runner: CpuRunner | GpuRunner, ids: list[int]) -> tuple[list[float], list[list[int]], list[float]]:
    """Of a prompt in two chunks, and of its first token: (chosen, top ids, of the sampled token)."""
    sampling = greedy(2, logprobs=1, prompt_logprobs=2)
    facts = NewSequence(900, 0, sampling, len(ids), (), ids, tells_prompt=True)
    blocks = list(range(1, 2 + len(ids) // BLOCK_SIZE))
    first = StepPlan(1, [ScheduledSequence(900, 0, 5, True, False, ids[:5], blocks)], new_sequences=[facts])
    rest = ScheduledSequence(900, 5, len(ids) - 5, True, True, ids[5:], [])
    ended = StepPlan(3, [ScheduledSequence(901, 0, 1, False, True, [5], blocks[:1])], finished_sequence_ids=[900],
                     new_sequences=[NewSequence(901, 0, greedy(1), 1, ())])  # fmt: skip
    steps = [runner.collect(runner.launch(plan, lambda: None)) for plan in (first, StepPlan(2, [rest]), ended)]
    runner.collect(
        runner.launch(
            StepPlan(4, [ScheduledSequence(902, 0, 1, False, True, [5], blocks[:1])], finished_sequence_ids=[901],
                     new_sequences=[NewSequence(902, 0, greedy(1), 1, ())]), lambda: None,
        )
    )  # fmt: skip
    chosen: list[float] = []
    top_ids: list[list[int]] = []
    position = 1
    for step in steps[:2]:
        start, values = step.prompt_logprobs[900]
        assert start == position
        position += values.num_tokens
        chosen += memoryview(values.chosen).cast("f").tolist()
        top_ids.append(memoryview(values.top_ids).cast("i").tolist())
    assert position == len(ids)
    return chosen, top_ids, [float(x) for x in memoryview(steps[1].logprobs[900].chosen).cast("f")]


def test_log_probabilities_of_a_prompt_are_those_of_the_cpu(runners: tuple[CpuRunner, GpuRunner]) -> None:
    cpu, gpu = (told(runner, prompt(6, 13)) for runner in runners)
    assert gpu[1] == cpu[1]
    assert gpu[0] + gpu[2] == pytest.approx(cpu[0] + cpu[2], abs=1e-3)


@pytest.mark.long
def test_under_pressure_sequences_lose_their_blocks_and_slots_and_no_token(engines: Engines) -> None:
    prompts = [prompt(10 + i, 5 + 2 * i) for i in range(6)]
    sampling = [greedy(8, presence_penalty=0.5) if i % 2 else greedy(8) for i in range(6)]
    cpu, gpu = engines(11)
    assert outcome(gpu, prompts, sampling) == outcome(cpu, prompts, sampling)
