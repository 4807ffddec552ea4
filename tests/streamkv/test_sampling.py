"""The rules of the fields that rank choices."""

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
