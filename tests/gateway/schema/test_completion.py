"""A prompt is text or token ids, or refused with the place of what is wrong."""

import pytest

from gateway.schema.completion import MAX_PROMPTS
from tests.support.request_bodies import completion, refused


@pytest.mark.parametrize("prompt", ["text", [1, 2], [0], [999] * 200])
def test_a_prompt_is_text_or_token_ids(prompt: object) -> None:
    assert completion(prompt=prompt).prompts == (prompt,)
    assert completion(prompt=[prompt]).prompts == (prompt,)
    assert completion(prompt=[prompt, "x", prompt]).prompts == (prompt, "x", prompt)


def test_prompts_and_their_choices_have_a_number() -> None:
    assert len(completion(prompt=["x"] * MAX_PROMPTS, n=4).prompts) == MAX_PROMPTS
    assert refused(completion, prompt=["x"] * (MAX_PROMPTS + 1)).field == "prompt"
    assert refused(completion, prompt=["x"] * MAX_PROMPTS, n=5).field == "prompt"
    assert refused(completion, prompt=["x"] * MAX_PROMPTS, n=1, best_of=5).field == "prompt"


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (None, "prompt"),
        (1, "prompt"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ({}, "prompt"),
        (["a", 1], "prompt[1]"),
        (["a", None], "prompt[1]"),
        ([[1], []], "prompt[1]"),
        ([[1], [2, 1000]], "prompt[1][1]"),
        ([[1], [[2]]], "prompt[1][0]"),
        ([1, 1000], "prompt[1]"),
        ([-1], "prompt[0]"),
        ([1, True], "prompt[1]"),
        ([1.0], "prompt[0]"),
        ([2**63], "prompt[0]"),
        ([10**30], "prompt[0]"),
        ([1, "a"], "prompt[1]"),
        ([[1, None]], "prompt[0][1]"),
        ([1] * 256, "prompt"),
        (["a", [1] * 256], "prompt[1]"),
    ],
)
def test_prompts_that_are_none_are_refused(prompt: object, field: str) -> None:
    assert refused(completion, prompt=prompt).field == field
