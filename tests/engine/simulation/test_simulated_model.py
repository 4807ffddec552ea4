"""The simulated model is a pure function, and follows the rules of a sampler."""

from dataclasses import replace

import pytest

from engine.simulation.expectation import right_endings
from engine.simulation.scenario import ClientRequest, make_scenario
from engine.simulation.simulated_model import (
    Context,
    SimulatedModel,
    end_after,
    end_one_in,
    num_tokens_before,
    values_of,
)
from streamkv.sampling import SamplingParams

PROMPT = [5, 6, 7, 8]
SETUP = replace(make_scenario(0).setup, vocab_size=100, eos_odds=10, num_blocks=200, block_size=4, max_model_len=60)


def test_values_depend_on_all_tokens_before_and_count_positions():
    values = values_of(PROMPT)
    assert [num_tokens_before(value) for value in values] == [0, 1, 2, 3]
    assert values[:2] == values_of([5, 6, 9])[:2]
    other = values_of([4, 6, 7, 8])
    assert all(a != b for a, b in zip(values, other, strict=True))
    assert all(a != b for a, b in zip(values, values_of(PROMPT, ("tenant", "")), strict=True))


def test_a_context_grows_token_by_token():
    context = Context(PROMPT[:1])
    for token_id in PROMPT[1:]:
        context = context.extended(token_id)
    assert context.digest == Context(PROMPT).digest


def test_ends_are_not_sampled_before_min_tokens():
    model = SimulatedModel(10, (2,), end_after(0))
    sampling = SamplingParams(seed=1, max_tokens=30, min_tokens=9, stop_token_ids=[3, 4])
    ending = model.generate(PROMPT, sampling, 0, 100)
    assert not {2, 3, 4} & set(ending.token_ids[:9])
    assert ending.finish_reason == "stop" and len(ending.token_ids) == 10


def test_draws_depend_on_seed_and_choice_unless_greedy():
    model = SimulatedModel()

    def tokens(choice: int, **changes) -> list[int]:
        sampling = SamplingParams(**{"seed": 1, "max_tokens": 10, **changes})
        return model.generate(PROMPT, sampling, choice, 100).token_ids

    assert tokens(0) == tokens(0) != tokens(1)
    assert tokens(0, seed=2) != tokens(0)
    assert tokens(0, temperature=0.0) == tokens(1, temperature=0.0, seed=2)


def test_limits_are_reported_as_length():
    model = SimulatedModel()
    long = SamplingParams(seed=0, max_tokens=50)
    assert len(model.generate(PROMPT, long, 0, 20).token_ids) == 16
    assert model.generate(PROMPT, long, 0, 20).finish_reason == "length"
    assert len(model.generate(PROMPT, replace_max(long, 5), 0, 20).token_ids) == 5


def replace_max(sampling: SamplingParams, max_tokens: int) -> SamplingParams:
    return SamplingParams(seed=sampling.seed, max_tokens=max_tokens)


def test_candidates_are_different_tokens_in_order():
    model = SimulatedModel(60, (2,), end_one_in(2))
    sampling = SamplingParams(seed=0, max_tokens=9, temperature=0.0, beam_width=4, stop_token_ids=[9, 10], min_tokens=3)
    facts = model.facts(PROMPT, sampling, 0)
    with_eos = 0
    for last in range(40):
        for num_before in (0, 5):
            ranked = model.rank(Context([*PROMPT, last]).digest, facts, len(PROMPT) + num_before)
            ids = [token_id for token_id, _ in ranked]
            assert len(set(ids)) == len(ids) == facts.num_candidates == 7
            assert [logprob for _, logprob in ranked] == sorted((lp for _, lp in ranked), reverse=True)
            assert num_before or not {2, 9, 10} & set(ids)
            with_eos += 2 in ids
    assert 5 < with_eos < 35


def wish(sampling: SamplingParams, **changes) -> ClientRequest:
    return ClientRequest(0, PROMPT, sampling, 0.0, **changes)


def test_the_best_of_many_are_expected_best_first_and_failed_ones_last():
    sampling = SamplingParams(seed=3, max_tokens=12, n=2, best_of=5)
    (best,) = right_endings(wish(sampling), SETUP)
    everything = [SETUP.model.generate(PROMPT, sampling, choice, 60) for choice in range(5)]
    means = sorted((e.total / len(e.token_ids) for e in everything), reverse=True)
    assert [e.total / len(e.token_ids) for e in best] == means[:2]
    (failed,) = right_endings(wish(sampling, fails_at=dict.fromkeys(range(4), 0)), SETUP)
    assert [ending.finish_reason for ending in failed] == [everything[4].finish_reason, "error"]


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0])
def test_a_beam_search_of_width_one_is_greedy_among_its_candidates(length_penalty: float):
    sampling = SamplingParams(seed=0, max_tokens=6, temperature=0.0, beam_width=1, length_penalty=length_penalty)
    (endings,) = right_endings(wish(sampling), SETUP)
    tokens, model = [], SETUP.model
    facts = model.facts(PROMPT, sampling, 0)
    while len(tokens) < 6 and 2 not in tokens:
        tokens.append(model.rank(Context([*PROMPT, *tokens]).digest, facts, len(PROMPT) + len(tokens))[0][0])
    assert endings[0].token_ids == tokens or length_penalty < 1.0  # a shorter one may score better
    assert endings[0].finish_reason in ("stop", "length")


def test_a_small_pool_may_cut_a_search_short():
    sampling = SamplingParams(seed=0, max_tokens=20, temperature=0.0, beam_width=3)
    assert len(right_endings(wish(sampling), SETUP)) == 1
    cut = right_endings(wish(sampling), replace(SETUP, num_blocks=14))
    assert len(cut) > 1
    assert cut[-1] == right_endings(wish(sampling), SETUP)[0]
