"""The rules of the fields that rank choices, change logits and tell of them."""

import pytest

from streamkv.errors import InvalidField
from streamkv.sampling import SamplingParams


def params(**fields: float) -> SamplingParams:
    return SamplingParams(seed=0, max_tokens=8, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("best_of", {"best_of": 2, "n": 3}),
        ("best_of", {"best_of": 129}),
        ("best_of", {"best_of": 4, "beam_width": 4, "temperature": 0.0}),
        ("beam_width", {"beam_width": 2, "n": 3, "temperature": 0.0}),
        ("beam_width", {"beam_width": 129, "temperature": 0.0}),
        ("temperature", {"beam_width": 2}),
        ("top_k", {"beam_width": 2, "temperature": 0.0, "top_k": 5}),
        ("top_p", {"beam_width": 2, "temperature": 0.0, "top_p": 0.9}),
        ("min_p", {"beam_width": 2, "temperature": 0.0, "min_p": 0.1}),
        ("length_penalty", {"length_penalty": float("nan")}),
        ("length_penalty", {"length_penalty": 11.0}),
        ("presence_penalty", {"presence_penalty": 2.1}),
        ("frequency_penalty", {"frequency_penalty": float("-inf")}),
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("repetition_penalty", {"repetition_penalty": float("nan")}),
        ("logit_bias", {"logit_bias": {-1: 0.0}}),
        ("logit_bias", {"logit_bias": dict.fromkeys(range(1025), 1.0)}),
        ("logit_bias[7]", {"logit_bias": {7: 100.5}}),
        ("logprobs", {"logprobs": 21}),
        ("prompt_logprobs", {"prompt_logprobs": -2}),
        ("logprobs", {"beam_width": 2, "temperature": 0.0, "logprobs": 0}),
        ("logit_bias", {"beam_width": 2, "temperature": 0.0, "logit_bias": {7: 1.0}}),
        ("repetition_penalty", {"beam_width": 2, "temperature": 0.0, "repetition_penalty": 1.1}),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(field: str, fields: dict[str, float]) -> None:
    with pytest.raises(InvalidField) as refusal:
        params(**fields)
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("fields", "num_sequences", "ranks_choices"),
    [
        ({}, 1, False),
        ({"n": 3}, 3, False),
        ({"n": 3, "best_of": 3}, 3, False),
        ({"n": 3, "best_of": 5}, 5, True),
        ({"beam_width": 1, "temperature": 0.0}, 1, True),
        ({"n": 2, "beam_width": 4, "temperature": 0.0, "top_k": -1}, 4, True),
    ],
)
def test_choices_are_ranked_where_more_are_made_or_beams_are_searched(
    fields: dict[str, float], num_sequences: int, ranks_choices: bool
) -> None:
    made = params(**fields)
    assert (made.num_sequences, made.ranks_choices) == (num_sequences, ranks_choices)


@pytest.mark.parametrize(
    ("fields", "has_penalties", "changes_logits"),
    [
        ({}, False, False),
        ({"presence_penalty": -0.5}, True, True),
        ({"frequency_penalty": 0.5}, True, True),
        ({"repetition_penalty": 0.9}, True, True),
        ({"logit_bias": {0: 1.0}}, False, True),
        ({"temperature": 0.0, "logprobs": 0, "prompt_logprobs": 20, "min_tokens": 3}, False, False),
    ],
)
def test_only_penalties_look_at_earlier_tokens(
    fields: dict[str, float], has_penalties: bool, changes_logits: bool
) -> None:
    made = params(**fields)
    assert (made.has_penalties, made.changes_logits) == (has_penalties, changes_logits)
