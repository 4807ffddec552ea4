"""Penalties and log probabilities against transformers, through scheduler, block manager and runner: in any batch, in
chunks, from the cache, after a preemption and in a continuation."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, RepetitionPenaltyLogitsProcessor

from engine.execution import runner as runner_module
from engine.execution.runner import CpuRunner
from engine.kept_logprobs import KeptLogprobs
from engine.sequence import Request
from streamkv.config import EngineConfig
from streamkv.protocol import TokenLogprobs, unpack_floats, unpack_ids
from streamkv.sampling import SamplingParams
from tests.support.driven_engine import DrivenEngine
from tests.support.tiny_models import write_small_llama

BLOCK_SIZE = 4
NUM_OUTPUT = 16
ATOL = 2e-4
"""Of a log probability: both models compute in float32, but their sums in another order, and logits go up to 30."""
PROMPTS = [[7, 99, 250, 31, 8, 4, 77, 31, 31, 5], [9] * 17, [5, 6, 7, 8, 300], [7, 99, 250, 31, 8, 4, 77, 31, 31, 6]]
PENALTIES = {
    "presence_penalty": 0.9,
    "frequency_penalty": 0.6,
    "repetition_penalty": 1.4,
    "logit_bias": {30: 4.0, 2: -9},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    return write_small_llama(path)


@pytest.fixture(scope="module")
def reference(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def runner(folder: Path) -> Iterator[CpuRunner]:
    runner = CpuRunner(EngineConfig(model=str(folder), dtype="float32", block_size=BLOCK_SIZE, max_num_seqs=8))
    runner.load(lambda stage, percent: None)
    yield runner
    runner.close()


@torch.no_grad()
def logits_of(reference: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocab_size]"""
    logits: torch.Tensor = reference(torch.tensor([tokens])).logits[0]
    return logits


def generate(reference: LlamaForCausalLM, prompt: list[int], sampling: SamplingParams) -> list[int]:
    """Greedy, with transformers' repetition penalty and the other two as OpenAI defines them."""
    tokens = prompt.copy()
    for _ in range(sampling.max_tokens):
        scores = logits_of(reference, tokens)[-1:]
        for token_id, bias in sampling.logit_bias.items():
            scores[0, token_id] += bias
        if sampling.repetition_penalty != 1:
            scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(torch.tensor([tokens]), scores)
        for token_id, count in Counter(tokens[len(prompt) :]).items():
            scores[0, token_id] -= sampling.presence_penalty + count * sampling.frequency_penalty
        tokens.append(int(scores.argmax()))
    return tokens[len(prompt) :]


def asking(**settings: object) -> SamplingParams:
    values = {"seed": 3, "max_tokens": NUM_OUTPUT, "temperature": 0.0, "ignore_eos": True, **settings}
    return SamplingParams(**values)  # type: ignore[arg-type]


def told(engine: DrivenEngine, request: Request, choice: int = 0) -> TokenLogprobs:
    """Of all tokens that this choice was given."""
    kept = KeptLogprobs()
    for output in engine.outputs:
        if output.sequence.request is request and output.sequence.choice == choice and output.token_ids:
            assert output.logprobs is not None and output.logprobs.num_tokens == len(output.token_ids)
            kept.append(output.logprobs)
    return kept.values_from(0)


def told_of_prompt(engine: DrivenEngine, request: Request) -> TokenLogprobs:
    kept = KeptLogprobs()
    for output in engine.outputs:
        if output.sequence.request is request and output.prompt_logprobs is not None:
            start, values = output.prompt_logprobs
            assert start == len(kept) + 1, "each token is told of once, in order"
            kept.append(values)
    return kept.values_from(0)


def check(values: TokenLogprobs, logits: torch.Tensor, token_ids: list[int], num_top: int) -> None:
    """logits: [len(token_ids), vocab_size], those that chose them."""
    wanted = torch.log_softmax(logits, -1)
    chosen = wanted.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    assert values.num_tokens == len(token_ids) and values.num_top == num_top
    assert torch.allclose(torch.tensor(unpack_floats(values.chosen)), chosen, rtol=0, atol=ATOL)
    top = torch.tensor(unpack_floats(values.top_logprobs)).view(len(token_ids), num_top)
    ids = torch.tensor(unpack_ids(values.top_ids), dtype=torch.int64).view(len(token_ids), num_top)
    assert torch.allclose(top, wanted.topk(num_top).values, rtol=0, atol=ATOL)
    assert torch.allclose(top, wanted.gather(1, ids), rtol=0, atol=ATOL)


@pytest.mark.parametrize(
    ("num_blocks", "max_prefill_tokens", "settings"),
    [
        (200, 0, PENALTIES),
        (200, 3, PENALTIES),
        (20, 0, PENALTIES),
        (200, 0, {"repetition_penalty": 0.8}),
        (20, 3, {"frequency_penalty": -0.7}),
        (20, 0, {}),
    ],
)
def test_tokens_and_their_logprobs_are_those_of_transformers(
    reference: LlamaForCausalLM,
    runner: CpuRunner,
    num_blocks: int,
    max_prefill_tokens: int,
    settings: dict[str, object],
) -> None:
    engine = DrivenEngine(runner, BLOCK_SIZE, num_blocks, max_prefill_tokens=max_prefill_tokens)
    sampling = asking(logprobs=3, **settings)
    requests = [engine.add(prompt, NUM_OUTPUT, sampling=sampling) for prompt in PROMPTS]
    engine.pump()
    assert (engine.scheduler.counts.num_preemptions > 0) == (num_blocks == 20)
    for request, prompt in zip(requests, PROMPTS, strict=True):
        tokens = request.sequences[0].token_ids
        assert tokens[len(prompt) :] == generate(reference, prompt, sampling)
        logits = logits_of(reference, tokens)[len(prompt) - 1 : -1]
        check(told(engine, request), logits, tokens[len(prompt) :], 3)


@pytest.mark.parametrize("cut", [1, 7, NUM_OUTPUT - 1])
def test_a_continuation_counts_what_came_before(runner: CpuRunner, cut: int) -> None:
    """Beside a prompt that is wholly cached, of which the runner is scheduled the last token alone."""
    engine = DrivenEngine(runner, BLOCK_SIZE, 200)
    sampling = asking(temperature=0.9, n=2, logprobs=2, **PENALTIES)
    whole = engine.add(PROMPTS[0], 0, sampling=sampling)
    engine.pump()
    prior = [sequence.token_ids[sequence.num_prompt :][:cut] for sequence in whole.sequences]
    again = Request(99, b"g", bytes(16), PROMPTS[0], sampling, arrival_s=0.0, prior_token_ids=prior)
    engine.scheduler.add(again)
    engine.pump()
    assert again.sequences[0].num_cached_tokens
    for choice in range(2):
        assert again.sequences[choice].token_ids == whole.sequences[choice].token_ids
        late, early = told(engine, again, choice), told(engine, whole, choice).between(cut, NUM_OUTPUT)
        assert unpack_ids(late.top_ids) == unpack_ids(early.top_ids)
        assert unpack_floats(late.chosen) == pytest.approx(unpack_floats(early.chosen), abs=ATOL)


@pytest.mark.parametrize(
    ("num_top", "num_blocks", "max_prefill_tokens"), [(0, 200, 5), (4, 200, 0), (4, 200, 5), (4, 19, 5)]
)
def test_a_prompts_logprobs_are_those_of_transformers(
    reference: LlamaForCausalLM,
    runner: CpuRunner,
    monkeypatch: pytest.MonkeyPatch,
    num_top: int,
    num_blocks: int,
    max_prefill_tokens: int,
) -> None:
    monkeypatch.setattr(runner_module, "_LOGITS_BYTES", 4 * 320 * 4)  # four rows at once
    engine = DrivenEngine(runner, BLOCK_SIZE, num_blocks, max_prefill_tokens=max_prefill_tokens)
    prompts = [PROMPTS[0] + PROMPTS[1], PROMPTS[2], PROMPTS[0] + PROMPTS[1] + [4], [8]]
    plain = engine.add(prompts[0], 0, sampling=asking(max_tokens=3))
    engine.pump()
    requests = [engine.add(prompt, 0, sampling=asking(prompt_logprobs=num_top, n=2, logprobs=1)) for prompt in prompts]
    engine.pump()
    assert (engine.scheduler.counts.num_preemptions > 0) == (num_blocks == 19)
    for request, prompt in zip(requests, prompts, strict=True):
        values = told_of_prompt(engine, request)
        if len(prompt) > 1:
            check(values, logits_of(reference, prompt)[:-1], prompt[1:], num_top)
        else:
            assert not values.num_tokens
        tokens = request.sequences[1].token_ids
        assert tokens[len(prompt) :] == generate(reference, prompt, request.sampling)
    assert not told_of_prompt(engine, plain).num_tokens
