"""Whatever OpenAI documents works, is taken, or is refused as what it is: nothing is unknown."""

import typing

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams

from streamkv.errors import InvalidField
from tests.support.request_bodies import chat, completion, refused

NOT_OPENAI_S: list[object] = [[[]], {"nonsense": [1]}, 1e9]
"""Values that no field of theirs takes."""
TAKEN = {
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
}
"""Labels and hints, whatever they are."""


@pytest.mark.parametrize("name", sorted(typing.get_type_hints(ChatParams)))
def test_a_field_of_chats_is_known(name: str) -> None:
    for value in NOT_OPENAI_S:
        check(chat, name, value)


@pytest.mark.parametrize("name", sorted(typing.get_type_hints(CompletionParams)))
def test_a_field_of_completions_is_known(name: str) -> None:
    for value in NOT_OPENAI_S:
        check(completion, name, value)


def check(parse: typing.Callable[..., object], name: str, value: object) -> None:
    if name in TAKEN:
        assert parse(**{name: value}) == parse()
        return
    error = refused(parse, **{name: value})
    assert error.field.startswith(name), error
    assert error.field != name or "is not a field" not in error.message, error


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix", "x"),
        ("bad_words", ["x"]),
        ("allowed_token_ids", [1]),
        ("logits_processors", ["x"]),
        ("truncate_prompt_tokens", 5),
        ("store", True),
        ("service_tier", "flex"),
    ],
)
def test_what_does_not_work_is_refused_and_not_overheard(name: str, value: object) -> None:
    with pytest.raises(InvalidField, match="is not supported") as caught:
        completion(**{name: value})
    assert caught.value.field == name
