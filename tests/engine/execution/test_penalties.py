"""Biases and penalties, against transformers where it has the same, and against their definitions."""

from collections import Counter

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from engine.execution.penalties import LogitChanges, TokenCounts
from engine.execution.sampler import SampledRow, sample, sample_step
from engine.plan import NewSequence
from streamkv.sampling import SamplingParams

VOCAB_SIZE = 600
PROMPT = [3, 3, 17, 599, 0]
OUTPUT = [17, 4, 4, 4, 250]


def facts(prompt: list[int] = PROMPT, prior: list[int] | None = None, **settings: object) -> NewSequence:
    sampling = SamplingParams(seed=5, max_tokens=1000, **settings)  # type: ignore[arg-type]
    return NewSequence(1, 0, sampling, len(prompt), (), [*prompt, *(prior or [])])


def random_logits(seed: int = 1) -> torch.Tensor:
    return 4 * torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def expected(logits: torch.Tensor, prompt: list[int], output: list[int], sampling: SamplingParams) -> torch.Tensor:
    """Word by word, one token at a time."""
    logits, counts = logits.clone(), Counter(output)
    for token_id, bias in sampling.logit_bias.items():
        logits[token_id] += bias
    for token_id in {*prompt, *output}:
        value = logits[token_id].item()
        value = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
        value -= sampling.frequency_penalty * counts[token_id]
        logits[token_id] = value - sampling.presence_penalty * (counts[token_id] > 0)
    return logits


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    logits = random_logits()
    wanted = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([PROMPT + OUTPUT]), logits[None].clone())[0]
    LogitChanges(facts(prior=OUTPUT, repetition_penalty=1.3)).apply(logits)
    assert torch.equal(logits, wanted)


@pytest.mark.parametrize(
    "settings",
    [
        {"presence_penalty": 1.5},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 0.7},
        {"frequency_penalty": -0.3},
        {"repetition_penalty": 0.5},
        {"logit_bias": {3: 1.5, 4: -100.0, 599: 100.0}},
        {
            "presence_penalty": 0.4,
            "frequency_penalty": 0.9,
            "repetition_penalty": 2.5,
            "logit_bias": {3: 20.0, 4: -7.5, 100: 2.0},
        },
    ],
)
def test_each_does_what_its_definition_says(settings: dict[str, object]) -> None:
    sequence = facts(**settings)
    changes = LogitChanges(sequence)
    for num_tokens in range(len(OUTPUT) + 1):
        logits = random_logits(num_tokens)
        wanted = expected(logits, PROMPT, OUTPUT[:num_tokens], sequence.sampling)
        changes.apply(logits)
        assert torch.allclose(logits, wanted, rtol=0, atol=1e-5), "float32, in another order"
        changes.append(OUTPUT[num_tokens] if num_tokens < len(OUTPUT) else 0)


@pytest.mark.parametrize("cut", range(len(OUTPUT) + 1))
def test_the_tokens_of_a_continuation_count_as_output(cut: int) -> None:
    settings = {"presence_penalty": 0.4, "frequency_penalty": 0.9, "repetition_penalty": 1.7}
    whole, continued = LogitChanges(facts(**settings)), LogitChanges(facts(prior=OUTPUT[:cut], **settings))
    for token_id in OUTPUT:
        whole.append(token_id)
    for token_id in OUTPUT[cut:]:
        continued.append(token_id)
    one, other = random_logits(), random_logits()
    whole.apply(one)
    continued.apply(other)
    assert torch.equal(one, other)


def test_counts_grow_over_any_number_of_different_tokens() -> None:
    generator = torch.Generator().manual_seed(2)
    prompt = torch.randint(0, 40, (5,), generator=generator).tolist()
    output = torch.randint(0, VOCAB_SIZE, (3000,), generator=generator).tolist()
    counts = TokenCounts([*prompt, *output[:100]], len(prompt))
    for token_id in output[100:]:
        counts.append(token_id)
    counted = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert len(counts) == len(counted) == len({*prompt, *output})
    assert counted == {token_id: Counter(output)[token_id] for token_id in {*prompt, *output}}


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_a_bias_of_a_hundred_forces_a_token_and_of_minus_a_hundred_bans_it(temperature: float) -> None:
    logits = random_logits().repeat(200, 1)
    likeliest = int(logits[0].argmax())
    for bias in ({7: 100.0}, {likeliest: -100.0}):
        sequence = facts(temperature=temperature, logit_bias=bias)
        rows = [SampledRow(sequence, position, LogitChanges(sequence)) for position in range(200)]
        drawn = set(sample_step(logits.clone(), rows).token_ids)
        assert drawn == {7} if 7 in bias else likeliest not in drawn


def test_draws_follow_the_penalised_distribution() -> None:
    """And only the rows that ask for it: others of the same step draw as without."""
    num_draws, temperature = 4000, 1.4
    settings = {"presence_penalty": 0.8, "frequency_penalty": 0.6, "repetition_penalty": 1.5}
    sequence = facts([1, 2, 2], [2, 5, 5, 5], temperature=temperature, logit_bias={0: 1.0, 7: -0.5}, **settings)
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 2
    changes = LogitChanges(sequence)
    rows = [SampledRow(sequence, position, changes) for position in range(num_draws)]
    plain = SampledRow(facts([1], temperature=1.0), 50)
    *drawn, other = sample_step(logits.repeat(num_draws + 1, 1), [*rows, plain]).token_ids
    assert [other] == sample(logits[None].clone(), [plain])
    counts = torch.bincount(torch.tensor(drawn), minlength=12)
    changed = expected(logits, [1, 2, 2], [2, 5, 5, 5], sequence.sampling)
    wanted = torch.softmax(changed.double() / temperature, -1) * num_draws
    often = wanted >= 5
    observed = torch.cat((counts[often], counts[~often].sum()[None])).double()
    wanted = torch.cat((wanted[often], wanted[~often].sum()[None]))
    chi_square = ((observed - wanted) ** 2 / wanted.clamp(min=1e-9)).sum().item()
    degrees = len(wanted) - 1
    # Wilson and Hilferty's approximation of the quantile that is passed once in 10,000.
    limit = degrees * (1 - 2 / (9 * degrees) + 3.72 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert chi_square < limit
    unchanged = torch.softmax(logits.double() / temperature, -1)[often] * num_draws
    assert ((counts[often] - unchanged) ** 2 / unchanged).sum() > 3 * limit, "the penalties must show"
