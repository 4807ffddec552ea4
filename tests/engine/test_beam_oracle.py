"""Beam search against transformers' generate: the whole engine below the loop, in float32.

With a random model transformers runs beside it, and end-of-sequence ids are many enough to come in the middle. With the
reference model tests/data/smol135m-beams.json holds what transformers gave, and says how it was made.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.execution.runner import CpuRunner
from engine.kv.audit import audit
from engine.kv.block_manager import BlockManager
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Request, SequenceOutput
from streamkv.config import EngineConfig
from streamkv.sampling import SamplingParams
from tests.support.oracle import CASES
from tests.support.quick_start import load_quickly
from tests.support.reference_model import reference_folder
from tests.support.tiny_models import make_tiny_model

BLOCK_SIZE = 4
REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "smol135m-beams.json").read_text())["cases"]


@dataclass(frozen=True)
class Search:
    """What is asked of both."""

    prompt: list[int]
    beam_width: int
    n: int
    length_penalty: float
    max_tokens: int
    eos_token_ids: list[int]
    min_tokens: int = 0


def generate(runner: CpuRunner, searches: list[Search], num_blocks: int) -> tuple[list[list[list[int]]], int]:
    """All searches at once → (the choices of each, number of preemptions)."""
    limits = SchedulerLimits(32, 256, 0, 16, True, 200, 64, ())
    blocks = BlockManager(num_blocks, BLOCK_SIZE)
    scheduler = Scheduler(limits, blocks, clock=lambda: 0.0)
    ended: dict[Request, list[SequenceOutput]] = {}
    for i, search in enumerate(searches):
        sampling = SamplingParams(
            seed=0,
            max_tokens=search.max_tokens,
            min_tokens=search.min_tokens,
            n=search.n,
            temperature=0.0,
            stop_token_ids=search.eos_token_ids,
            beam_width=search.beam_width,
            length_penalty=search.length_penalty,
        )
        request = Request(i, b"g", bytes([i]) * 16, search.prompt, sampling, arrival_s=0.0)
        scheduler.check(len(search.prompt), sampling)
        scheduler.add(request)
        ended[request] = []
    while (plan := scheduler.plan()) is not None:
        for output in scheduler.update(plan, runner.collect(runner.launch(plan, lambda: None))):
            ended[output.sequence.request].append(output)
        audit(blocks)
    assert blocks.num_owned_blocks == 0
    for request, outputs in ended.items():
        assert [output.sequence.choice for output in outputs] == list(range(request.sampling.n))
        for output in outputs:
            assert output.finish_reason == ("stop" if output.stop_token_id >= 0 else "length")
    choices = [[output.token_ids for output in outputs] for outputs in ended.values()]
    return choices, scheduler.counts.num_preemptions


def transformers_choices(model: PreTrainedModel, search: Search) -> list[list[int]]:
    with torch.inference_mode():
        sequences = model.generate(
            torch.tensor([search.prompt]),
            attention_mask=torch.ones(1, len(search.prompt), dtype=torch.int64),
            num_beams=search.beam_width,
            num_return_sequences=search.n,
            length_penalty=search.length_penalty,
            early_stopping=False,
            do_sample=False,
            max_new_tokens=search.max_tokens,
            min_new_tokens=search.min_tokens or None,
            eos_token_id=search.eos_token_ids or None,
            pad_token_id=0,
        )
    choices = []
    for sequence in sequences[:, len(search.prompt) :].tolist():
        ends = [place + 1 for place, token in enumerate(sequence) if token in search.eos_token_ids]
        choices.append(sequence[: min(ends, default=len(sequence))])
    return choices


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PreTrainedModel, CpuRunner]]:
    """A random model, in transformers and in our runner."""
    folder: Path = tmp_path_factory.mktemp("tiny")
    model = make_tiny_model("llama", folder)
    config = EngineConfig(
        model=str(folder), dtype="float32", block_size=BLOCK_SIZE, kv_cache_memory_gib=0.01, max_num_batched_tokens=256
    )
    runner = CpuRunner(config)
    runner.load(lambda stage, percent: None)
    yield model, runner
    runner.close()


@pytest.fixture(scope="module")
def reference() -> Iterator[CpuRunner]:
    config = EngineConfig(
        model=str(reference_folder()),
        dtype="float32",
        block_size=BLOCK_SIZE,
        kv_cache_memory_gib=0.1,
        max_num_batched_tokens=256,
    )
    runner = CpuRunner(config)
    load_quickly(runner)
    yield runner
    runner.close()


SEARCHES = [
    Search([5, 17, 140, 3, 99], beam_width=4, n=1, length_penalty=1.0, max_tokens=20, eos_token_ids=[]),
    Search(
        [5, 17, 140, 3, 99], beam_width=3, n=3, length_penalty=0.0, max_tokens=13, eos_token_ids=[7, 19, 71, 80, 101]
    ),
    Search([8], beam_width=4, n=2, length_penalty=2.0, max_tokens=24, eos_token_ids=[11, 33, 54, 75, 96, 117, 138]),
    Search([1, 2, 3, 4, 5, 6, 7, 8, 9], 2, 2, -1.0, max_tokens=16, eos_token_ids=list(range(0, 160, 9))),
    Search([33] * 17, beam_width=6, n=4, length_penalty=0.5, max_tokens=18, eos_token_ids=list(range(3, 160, 11))),
    Search([150, 21, 90], 4, 4, 1.0, max_tokens=18, eos_token_ids=list(range(5, 160, 7)), min_tokens=6),
    Search([64, 65], beam_width=8, n=5, length_penalty=1.0, max_tokens=1, eos_token_ids=[40]),
]


@pytest.mark.parametrize(("num_blocks", "is_short"), [(2000, False), (32, True)])
def test_a_random_model_gives_the_choices_of_transformers(
    tiny: tuple[PreTrainedModel, CpuRunner], num_blocks: int, is_short: bool
) -> None:
    model, runner = tiny
    expected = [transformers_choices(model, search) for search in SEARCHES]
    lengths = [[len(choice) for choice in choices] for choices in expected]
    assert any(
        min(search_lengths) < search.max_tokens for search, search_lengths in zip(SEARCHES, lengths, strict=True)
    )
    outputs, num_preemptions = generate(runner, SEARCHES, num_blocks)
    assert outputs == expected
    assert (num_preemptions > 0) == is_short


@pytest.mark.parametrize("num_blocks", [pytest.param(400, marks=pytest.mark.long), 100])
def test_the_reference_model_gives_the_choices_of_transformers(reference: CpuRunner, num_blocks: int) -> None:
    prompts = {case.name: case.prompt for case in CASES}
    searches = [
        Search(
            prompts[case["prompt"]],
            case["beam_width"],
            case["n"],
            case["length_penalty"],
            case["max_tokens"],
            case["eos_token_ids"],
            case["min_tokens"],
        )
        for case in REFERENCE
    ]
    outputs, num_preemptions = generate(reference, searches, num_blocks)
    assert outputs == [case["token_ids"] for case in REFERENCE]
    assert (num_preemptions > 0) == (num_blocks < 400)
