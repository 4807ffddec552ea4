"""Each field of a body has one rule; what breaks one is refused by its name."""

import re
from collections.abc import Callable

import msgspec
import pytest

from gateway.chat_template import ChatMessage
from gateway.schema.chat import ChatRequest
from gateway.schema.completion import CompletionRequest
from gateway.schema.options import GenerationOptions
from streamkv.errors import InvalidField
from tests.support.request_bodies import MESSAGES, chat, completion, refused


def test_a_request_without_options_has_openai_s_defaults() -> None:
    request = chat()
    assert request.messages == (ChatMessage("user", "hi"),)
    assert request.options == GenerationOptions(prompt_field="messages")
    assert request.add_generation_prompt
    assert not request.continue_final_message
    assert completion().options == GenerationOptions()


def test_every_option_arrives() -> None:
    given = {
        "model": "smol",
        "max_tokens": 5,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.25,
        "seed": 2**64 - 1,
        "n": 3,
        "stop": ["a", "b", "a"],
        "stop_token_ids": [0, 999],
        "ignore_eos": True,
        "min_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "cache_salt": "salt",
        "priority": -3,
        "user": "me",
        "request_id": "mine",
        "best_of": 3,
        "presence_penalty": -2,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.2,
        "prompt_logprobs": 20,
    }
    plain = {
        name: value
        for name, value in given.items()
        if name not in ("stop", "stop_token_ids", "stream_options", "best_of")
    }
    expected = GenerationOptions(
        **plain,  # type: ignore[arg-type]
        stop=("a", "b"),
        stop_token_ids=(0, 999),
        include_usage=True,
        continuous_usage_stats=True,
    )
    assert completion(**given).options == expected
    assert chat(**given).options == msgspec.structs.replace(expected, prompt_field="messages")
    assert chat(chat_template_kwargs={"x": [1]}).chat_template_kwargs == {"x": [1]}


@pytest.mark.parametrize(
    "name",
    [field for field in GenerationOptions.__struct_fields__ if not re.search("_field|usage|_as_ids|grammar", field)],
)
def test_null_is_the_same_as_leaving_it_out(name: str) -> None:
    assert chat(**{name: None}) == chat()
    assert completion(**{name: None}) == completion()


NEUTRAL: dict[str, list[object]] = {
    "bad_words": [[]],
    "store": [False],
    "service_tier": ["auto", "default"],
    "early_stopping": [False],
    "allowed_token_ids": [],
}
NEUTRAL_CHAT: dict[str, list[object]] = {
    "echo": [False],
    "functions": [[]],
    "function_call": ["none"],
    "modalities": [["text"]],
    "audio": [],
    "prediction": [],
    "reasoning_effort": [],
    "web_search_options": [],
    "chat_template": [],
    "documents": [],
    "add_special_tokens": [False],
}
NEUTRAL_COMPLETION: dict[str, list[object]] = {"top_logprobs": [0], "suffix": [""]}


@pytest.mark.parametrize("name", [*NEUTRAL, *NEUTRAL_CHAT])
def test_a_chat_field_that_does_not_work_is_taken_where_it_changes_nothing_and_else_refused(name: str) -> None:
    for value in (None, *(NEUTRAL | NEUTRAL_CHAT)[name]):
        assert chat(**{name: value}) == chat()
    for value in (2, True, {"type": "json_object"}, [{"type": "function"}], "high"):
        assert refused(chat, **{name: value}).field == name


@pytest.mark.parametrize("name", [*NEUTRAL, *NEUTRAL_COMPLETION])
def test_a_completion_field_that_does_not_work_is_taken_where_it_changes_nothing_and_else_refused(name: str) -> None:
    for value in (None, *(NEUTRAL | NEUTRAL_COMPLETION)[name]):
        assert completion(**{name: value}) == completion()
    for value in (5, True, {"type": "json_object"}, "x y"):
        assert refused(completion, **{name: value}).field == name


@pytest.mark.parametrize("parse", [chat, completion])
def test_choices_are_ranked_when_more_are_made_than_returned(parse: Callable[..., ChatRequest]) -> None:
    assert parse(n=3, best_of=3) == parse(n=3), "nothing is ranked"
    assert parse(n=3, best_of=3, stream=True).options.stream
    sampling = parse(n=2, best_of=5, seed=4).options.to_sampling(10, 256, 0)
    assert (sampling.n, sampling.best_of, sampling.num_sequences, sampling.temperature) == (2, 5, 5, 1.0)
    assert sampling.ranks_choices
    assert parse(best_of=128).options.best_of == 128


@pytest.mark.parametrize("parse", [chat, completion])
@pytest.mark.parametrize(
    ("fields", "beam_width"),
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"n": 2, "best_of": 5}, 5),
        ({"n": 2, "beam_width": 4}, 4),
        ({"n": 2, "beam_width": 4, "best_of": 4}, 4),
        ({"temperature": 0}, 1),
        ({"temperature": 0.0, "length_penalty": -2}, 1),
    ],
)
def test_beam_search_is_greedy_and_as_wide_as_it_is_told(
    parse: Callable[..., ChatRequest], fields: dict[str, object], beam_width: int
) -> None:
    sampling = parse(use_beam_search=True, **fields).options.to_sampling(10, 256, 0)
    assert (sampling.beam_width, sampling.best_of, sampling.temperature) == (beam_width, 0, 0.0)
    assert (sampling.n, sampling.length_penalty) == (fields.get("n", 1), fields.get("length_penalty", 1.0))
    assert sampling.ranks_choices


@pytest.mark.parametrize("parse", [chat, completion])
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"best_of": 0}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"best_of": True}, "best_of"),
        ({"best_of": 2.0}, "best_of"),
        ({"best_of": 2**63}, "best_of"),
        ({"n": 4, "best_of": 3}, "best_of"),
        ({"n": 4, "best_of": 3, "use_beam_search": True}, "best_of"),
        ({"n": 2, "best_of": 3, "beam_width": 4, "use_beam_search": True}, "best_of"),
        ({"n": 4, "beam_width": 3, "use_beam_search": True}, "beam_width"),
        ({"beam_width": 0, "use_beam_search": True}, "beam_width"),
        ({"beam_width": 129, "use_beam_search": True}, "beam_width"),
        ({"beam_width": "4", "use_beam_search": True}, "beam_width"),
        ({"beam_width": 1}, "beam_width"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"length_penalty": 10.5, "use_beam_search": True}, "length_penalty"),
        ({"length_penalty": "1", "use_beam_search": True}, "length_penalty"),
        ({"use_beam_search": 1}, "use_beam_search"),
        ({"use_beam_search": True, "temperature": 1.0}, "temperature"),
        ({"use_beam_search": True, "temperature": 0.1}, "temperature"),
        ({"use_beam_search": True, "stream": True}, "use_beam_search"),
        ({"n": 2, "best_of": 3, "stream": True}, "best_of"),
        ({"best_of": 3, "stop": "x"}, "stop"),
        ({"use_beam_search": True, "stop": ["x", "y"]}, "stop"),
    ],
)
def test_wishes_that_rank_choices_are_refused_by_name_where_they_cannot_be(
    parse: Callable[..., ChatRequest], fields: dict[str, object], field: str
) -> None:
    assert refused(parse, **fields).field == field


@pytest.mark.parametrize("name", ["metadata", "prompt_cache_key", "safety_identifier", "spaces_between_special_tokens"])
def test_labels_and_hints_are_taken(name: str) -> None:
    assert chat(**{name: {"a": "b"}}) == chat()


# What is refused

WRONG: list[tuple[str, list[object]]] = [
    ("max_tokens", [-1, True, 1.0, 1.5, "5", [5], 2**31, 2**63, 10**40]),
    ("min_tokens", [-1, True, 1.5, "1", 2**63]),
    ("temperature", [-0.1, 2.1, True, "1", [], {}]),
    ("top_p", [0, -0.1, 1.01, False, "1"]),
    ("top_k", [-2, True, 1.5, 2**31, 2**63]),
    ("min_p", [-0.1, 1.1, True]),
    ("seed", [-1, True, 1.0, 2**64, "1"]),
    ("n", [0, -1, 129, True, 1.0, 2**63]),
    ("ignore_eos", [0, 1, "true"]),
    ("stream", [0, 1, "true", []]),
    ("return_token_ids", [1]),
    ("skip_special_tokens", ["no"]),
    ("include_stop_str_in_output", [0]),
    ("cache_salt", [1, "x" * 1025]),
    ("priority", [True, 1.5, 2**31, -(2**31) - 1]),
    ("user", [1, {}, "x" * 1025]),
    ("request_id", [1]),
    ("model", [1, True, [], "x" * 1025]),
    ("stop_token_ids", [1, "1", {}, [1] * 129]),
    ("stream_options", [1, "x", [], {"include_usage": True}]),
    ("stop", [1, True, {}, ["x"] * 17]),
    ("presence_penalty", [-2.1, 2.1, True, "1"]),
    ("frequency_penalty", [-2.1, 2.1, True, "1"]),
    ("repetition_penalty", [0, -1, 10.1, True, "1"]),
    ("logit_bias", [1, [], "x", {str(index): 1 for index in range(1025)}]),
    ("prompt_logprobs", [-1, 21, True, 1.0, "1"]),
    ("return_tokens_as_token_ids", [1, "yes"]),
]


@pytest.mark.parametrize(("name", "values"), WRONG, ids=[name for name, _ in WRONG])
def test_a_wrong_value_is_refused_by_the_field_s_name(name: str, values: list[object]) -> None:
    for value in values:
        for parse in (chat, completion):
            if value == [] and name == "stream_options":
                continue
            assert refused(parse, **{name: value}).field == name, value


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop": ["x" * 1025]}, "stop[0]"),
        ({"stop_token_ids": [1, 1000]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [2**63]}, "stop_token_ids[0]"),
        ({"max_tokens": 256}, "max_tokens"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"logit_bias": {"x": 1}}, "logit_bias[x]"),
        ({"logit_bias": {"1": 1, "1.0": 1}}, "logit_bias[1.0]"),
        ({"logit_bias": {"-1": 1}}, "logit_bias[-1]"),
        ({"logit_bias": {"": 1}}, "logit_bias[]"),
        ({"logit_bias": {"1000": 1}}, "logit_bias[1000]"),
        ({"logit_bias": {"9" * 100: 1}}, f"logit_bias[{'9' * 57}...]"),
        ({"logit_bias": {"7": 1, "07": 1}}, "logit_bias[07]"),
        ({"logit_bias": {"7": "1"}}, "logit_bias[7]"),
        ({"logit_bias": {"7": True}}, "logit_bias[7]"),
        ({"logit_bias": {"7": 100.5}}, "logit_bias[7]"),
        ({"use_beam_search": True, "prompt_logprobs": 1, "presence_penalty": 1}, "presence_penalty"),
        ({"temprature": 1}, "temprature"),
        ({"x" * 10_000: 1}, "x" * 57 + "..."),
    ],
)
def test_the_place_of_what_is_wrong_is_named(fields: dict[str, object], field: str) -> None:
    for parse in (chat, completion):
        assert refused(parse, **fields).field == field


def test_a_logit_bias_is_an_object_from_token_ids_to_numbers() -> None:
    for parse in (chat, completion):
        assert parse(logit_bias={"0": -100, "999": 0.5}).options.logit_bias == {0: -100.0, 999: 0.5}
        assert parse(logit_bias={}).options == parse().options


def test_log_probabilities_are_asked_for_as_openai_and_vllm_have_it() -> None:
    def asked(request: ChatRequest | CompletionRequest) -> tuple[int, int]:
        sampling = request.options.to_sampling(10, 256, 0)
        return sampling.logprobs, sampling.prompt_logprobs

    assert (
        asked(chat()) == asked(chat(logprobs=False)) == asked(chat(top_logprobs=0)) == asked(completion()) == (-1, -1)
    )
    assert asked(chat(logprobs=True)) == asked(completion(logprobs=0)) == (0, -1)
    assert asked(chat(logprobs=True, top_logprobs=20)) == asked(completion(logprobs=20)) == (20, -1)
    assert asked(chat(prompt_logprobs=0)) == asked(completion(prompt_logprobs=0)) == (-1, 0)
    assert asked(completion(echo=True)) == (-1, -1)
    assert asked(completion(echo=True, logprobs=3)) == (3, 3)
    assert asked(completion(echo=True, logprobs=3, prompt_logprobs=5)) == (3, 5)
    assert completion(echo=True, logprobs=3, prompt_logprobs=1).options.prompt_logprobs == 1
    for parse, fields, field in (
        (chat, {"logprobs": 1}, "logprobs"),
        (chat, {"top_logprobs": 1}, "top_logprobs"),
        (chat, {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        (chat, {"top_logprobs": True, "logprobs": True}, "top_logprobs"),
        (chat, {"echo": True}, "echo"),
        (completion, {"logprobs": True}, "logprobs"),
        (completion, {"logprobs": 21}, "logprobs"),
        (completion, {"logprobs": -1}, "logprobs"),
        (completion, {"echo": 1}, "echo"),
    ):
        assert refused(parse, **fields).field == field


def test_no_token_is_asked_for_only_where_the_prompt_is_told() -> None:
    for fields in ({"echo": True}, {"prompt_logprobs": 0}, {"echo": True, "logprobs": 1}):
        options = completion(max_tokens=0, **fields).options
        assert options.is_prompt_only
        assert options.to_sampling(10, 256, 0).max_tokens == 1
        assert refused(chat, max_tokens=0, **fields).field in ("max_tokens", "echo")
    assert refused(completion, max_tokens=0).field == "max_tokens"
    assert refused(completion, max_tokens=0, echo=True, min_tokens=1).field == "min_tokens"
    assert not completion(max_tokens=1, echo=True).options.is_prompt_only


@pytest.mark.parametrize(
    ("fields", "field", "most"),
    [
        ({"prompt_logprobs": 20}, "prompt_logprobs", 65_536 // 21),
        ({"prompt_logprobs": 0, "n": 128}, "prompt_logprobs", 512),
        ({"logprobs": 4, "echo": True, "n": 2}, "logprobs", 6553),
        ({"logprobs": 4, "echo": True, "prompt_logprobs": 2}, "prompt_logprobs", 8192),
    ],
)
def test_log_probabilities_of_a_prompt_have_a_number(fields: dict[str, object], field: str, most: int) -> None:
    options = completion(**fields).options
    assert options.to_sampling(most, 100_000, 0).prompt_logprobs >= 0
    with pytest.raises(InvalidField, match="log probabilities of the prompt") as caught:
        options.to_sampling(most + 1, 100_000, 0)
    assert caught.value.field == field
    assert completion(logprobs=20, n=128).options.to_sampling(90_000, 100_000, 0), "those of the answer have none"


@pytest.mark.parametrize("field", ["echo", "return_token_ids"])
def test_a_long_prompt_does_not_come_back_with_every_of_many_choices(field: str) -> None:
    options = completion(n=128, **{field: True}).options
    assert options.to_sampling(2048, 100_000, 0).n == 128
    with pytest.raises(InvalidField, match=r"^n: .*2049 tokens come back with each choice"):
        options.to_sampling(2049, 100_000, 0)
    assert completion(**{field: True}).options.to_sampling(90_000, 100_000, 0).n == 1


def test_an_unknown_field_is_refused_with_the_known_one_that_is_near() -> None:
    assert "did you mean 'temperature'?" in str(refused(chat, temprature=1))
    assert "did you mean" not in str(refused(chat, zzz=1))
    assert refused(completion, messages=MESSAGES).field == "messages"


def test_max_completion_tokens_is_the_newer_name_of_max_tokens_for_chats() -> None:
    assert chat(max_completion_tokens=7).options.max_tokens == 7
    assert chat(max_completion_tokens=7, max_tokens=7).options.max_tokens == 7
    assert refused(chat, max_completion_tokens=7, max_tokens=8).field == "max_tokens"
    assert refused(chat, max_completion_tokens=0).field == "max_completion_tokens"
    assert refused(chat, max_completion_tokens=256).field == "max_completion_tokens"
    assert refused(completion, max_completion_tokens=7).field == "max_completion_tokens"


def test_max_tokens_defaults_to_what_the_prompt_leaves() -> None:
    sampling = chat(seed=7).options.to_sampling(100, 256, seed=1)
    assert (sampling.max_tokens, sampling.seed) == (156, 7)
    assert chat().options.to_sampling(255, 256, seed=1).seed == 1


def test_a_prompt_that_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(InvalidField, match=r"lower max_tokens to 56 or shorten the prompt") as caught:
        completion(max_tokens=57).options.to_sampling(200, 256, seed=1)
    assert caught.value.field == "max_tokens"
    with pytest.raises(InvalidField, match="lower max_completion_tokens to 56") as caught:
        chat(max_completion_tokens=57).options.to_sampling(200, 256, seed=1)
    assert caught.value.field == "max_completion_tokens"
    for request, field in ((chat(), "messages"), (completion(), "prompt")):
        with pytest.raises(InvalidField, match="256 tokens, which leaves no room") as caught:
            request.options.to_sampling(256, 256, seed=1)
        assert caught.value.field == field
