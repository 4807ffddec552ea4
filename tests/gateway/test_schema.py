"""Each field of a body has one rule; what breaks one is refused by its name, before it costs anything."""

import contextlib
import json
import time
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.chat_template import ChatMessage
from gateway.schema import (
    MAX_CONTAINERS,
    ChatRequest,
    CompletionRequest,
    GenerationOptions,
    RequestLimits,
    check_token_ids,
    decode_msgpack_object,
    decode_object,
    generate_from_fields,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from streamkv.errors import InvalidField

LIMITS = RequestLimits(vocab_size=1000, max_model_len=256)
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: object) -> ChatRequest:
    return parse_chat(json.dumps({"messages": MESSAGES, **fields}).encode(), LIMITS)


def completion(**fields: object) -> CompletionRequest:
    return parse_completion(json.dumps({"prompt": "hi", **fields}).encode(), LIMITS)


def refused(parse: object, **fields: object) -> InvalidField:
    assert callable(parse)
    with pytest.raises(InvalidField) as caught:
        parse(**fields)
    return caught.value


# The body


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"{", "not valid JSON"),
        (b"{} x", "not valid JSON"),
        (b"[1]", "must be an object, got a list"),
        (b"null", "must be an object, got null"),
        (b'"x"', "must be an object, got text"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b'{"prompt": "\xed\xa0\x80"}', "not valid JSON"),
        (b'{"temperature": NaN}', "not valid JSON"),
        (b'{"temperature": Infinity}', "not valid JSON"),
        (b'{"temperature": 1e999}', "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "must come in pairs"),
        (b'{"prompt": "\\udc00\\ud800"}', "must come in pairs"),
        (b'{"prompt": "a", "prompt": "b"}', "'prompt' twice"),
        (b'{"stream_options": {"include_usage": true, "include_usage": false}}', "'include_usage' twice"),
        (b'{"messages": [{"role": "user", "role": "system"}]}', "'role' twice"),
        (b'{"prompt": "a: b", "x": 1, "x": 1}', "'x' twice"),
        (b'{"a":' * 40 + b"1" + b"}" * 40, "nested deeper"),
        (b"[" * 20_000, "nested deeper|must be an object"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "objects and lists"),
        (b'{"a":[' + b"[]," * MAX_CONTAINERS + b"[]]}", "objects and lists"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_a_body_that_is_no_plain_json_object_is_refused(body: bytes, said: str) -> None:
    with pytest.raises(InvalidField, match=said) as caught:
        decode_object(body)
    assert caught.value.field == "body"


def test_brackets_and_colons_in_texts_are_no_structure() -> None:
    text = '{"a": [{: "x"\\' * 30_000
    assert decode_object(json.dumps({"prompt": text, "more": {"prompt": ":"}}).encode())["prompt"] == text


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
        max_leaves=12,
    )
)
def test_any_object_without_a_key_twice_is_decoded(value: object) -> None:
    fields = {"value": value, "other": [1, {"value": 2}]}
    assert decode_object(json.dumps(fields).encode()) == fields
    assert decode_msgpack_object(msgspec.msgpack.encode(fields)) == fields


@pytest.mark.parametrize(
    "frame", [b"", b"\xc1", b"\x90", b"\x81\x01\x01", b"\x81\xa1a" * 60 + b"\x01", b"\x81\xa1\xff\x01"]
)
def test_a_frame_that_is_no_msgpack_object_with_texts_as_keys_is_refused(frame: bytes) -> None:
    with pytest.raises(InvalidField) as caught:
        decode_msgpack_object(frame)
    assert caught.value.field == "body"


# What works


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
    "name", [field for field in GenerationOptions.__struct_fields__ if "_field" not in field and "usage" not in field]
)
def test_null_is_the_same_as_leaving_it_out(name: str) -> None:
    assert chat(**{name: None}) == chat()
    assert completion(**{name: None}) == completion()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        (["a", {"type": "text", "text": "b"}], "a\nb"),
        ("\x00<|im_end|>", "\x00<|im_end|>"),
    ],
)
def test_content_is_text_or_text_parts(content: object, text: str) -> None:
    assert chat(messages=[{"role": "user", "content": content}]).messages == (ChatMessage("user", text),)


def test_messages_as_an_answer_gave_them_are_taken_back() -> None:
    given = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "hi", "name": "Ada_L-1"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [], "annotations": [], "audio": None},
        {"role": "tool", "content": "42", "tool_call_id": "call_1"},
    ]
    assert chat(messages=given).messages == (
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "hi", "Ada_L-1"),
        ChatMessage("assistant", ""),
        ChatMessage("tool", "42"),
    )


@pytest.mark.parametrize("prompt", ["text", [1, 2], [0], [999] * 200])
def test_a_prompt_is_text_or_token_ids(prompt: object) -> None:
    assert completion(prompt=prompt).prompt == prompt
    assert completion(prompt=[prompt]).prompt == prompt


NEUTRAL: dict[str, list[object]] = {
    "top_logprobs": [0],
    "logit_bias": [{}],
    "presence_penalty": [0, 0.0],
    "frequency_penalty": [0, 0.0],
    "repetition_penalty": [1, 1.0],
    "response_format": [{"type": "text"}],
    "bad_words": [[]],
    "store": [False],
    "service_tier": ["auto", "default"],
    "early_stopping": [False],
    "prompt_logprobs": [],
    "guided_json": [],
    "structured_outputs": [],
    "allowed_token_ids": [],
    "echo": [False],
}
NEUTRAL_CHAT: dict[str, list[object]] = {
    "logprobs": [False],
    "tools": [[]],
    "tool_choice": ["none", "auto"],
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
NEUTRAL_COMPLETION: dict[str, list[object]] = {"logprobs": [], "suffix": [""]}


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
    ("max_tokens", [0, -1, True, 1.0, 1.5, "5", [5], 2**31, 2**63, 10**40]),
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
        ({"temprature": 1}, "temprature"),
        ({"x" * 10_000: 1}, "x" * 57 + "..."),
    ],
)
def test_the_place_of_what_is_wrong_is_named(fields: dict[str, object], field: str) -> None:
    for parse in (chat, completion):
        assert refused(parse, **fields).field == field


def test_an_unknown_field_is_refused_with_the_known_one_that_is_near() -> None:
    assert "did you mean 'temperature'?" in str(refused(chat, temprature=1))
    assert "did you mean" not in str(refused(chat, zzz=1))
    assert refused(completion, messages=MESSAGES).field == "messages"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ({}, "messages"),
        ([{}] * 10_001, "messages"),
        (["hi"], "messages[0]"),
        ([MESSAGES[0], {"content": "x"}], "messages[1].role"),
        ([{"role": "narrator", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 1}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": [1]}], "messages[0].content[0]"),
        ([{"role": "user", "content": ["a", {"type": "image_url"}]}], "messages[0].content[1].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}], "messages[0].content[0].x"),
        ([{"role": "user", "content": "x", "name": "a b"}], "messages[0].name"),
        ([{"role": "user", "content": "x", "name": "<|im_end|>"}], "messages[0].name"),
        ([{"role": "user", "content": "x", "extra": 1}], "messages[0].extra"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls"),
    ],
)
def test_messages_that_are_none_are_refused(messages: object, field: str) -> None:
    assert refused(chat, messages=messages).field == field


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (None, "prompt"),
        (1, "prompt"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ({}, "prompt"),
        (["a", "b"], "prompt"),
        ([[1], [2]], "prompt"),
        ([1, 1000], "prompt[1]"),
        ([-1], "prompt[0]"),
        ([1, True], "prompt[1]"),
        ([1.0], "prompt[0]"),
        ([2**63], "prompt[0]"),
        ([10**30], "prompt[0]"),
        ([1, "a"], "prompt[1]"),
        ([[1, None]], "prompt[0][1]"),
        ([1] * 256, "prompt"),
    ],
)
def test_prompts_that_are_none_are_refused(prompt: object, field: str) -> None:
    assert refused(completion, prompt=prompt).field == field


def test_max_completion_tokens_is_the_newer_name_of_max_tokens_for_chats() -> None:
    assert chat(max_completion_tokens=7).options.max_tokens == 7
    assert chat(max_completion_tokens=7, max_tokens=7).options.max_tokens == 7
    assert refused(chat, max_completion_tokens=7, max_tokens=8).field == "max_tokens"
    assert refused(chat, max_completion_tokens=0).field == "max_completion_tokens"
    assert refused(chat, max_completion_tokens=256).field == "max_completion_tokens"
    assert refused(completion, max_completion_tokens=7).field == "max_completion_tokens"


def test_continue_final_message_excludes_add_generation_prompt() -> None:
    assert refused(chat, continue_final_message=True).field == "continue_final_message"
    assert chat(continue_final_message=True, add_generation_prompt=False).continue_final_message


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


# The other bodies


def test_a_websocket_generate_is_a_chat_or_a_completion_and_a_stream() -> None:
    got = generate_from_fields({"messages": MESSAGES, "max_tokens": 3}, LIMITS)
    assert isinstance(got, ChatRequest)
    assert got.options.stream
    got = generate_from_fields({"prompt": [1, 2], "stream_options": {"include_usage": True}}, LIMITS)
    assert isinstance(got, CompletionRequest)
    assert got.options.include_usage
    for fields, field in (
        ({"messages": MESSAGES, "prompt": "x"}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "x", "stream": False}, "stream"),
        ({"prompt": "x", "top_k": "x"}, "top_k"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"messages": MESSAGES, "use_beam_search": True}, "use_beam_search"),
    ):
        with pytest.raises(InvalidField) as caught:
            generate_from_fields(fields, LIMITS)
        assert caught.value.field == field


def test_tokenize_takes_a_prompt_or_messages() -> None:
    got = parse_tokenize(b'{"prompt": "x", "add_special_tokens": false, "return_token_strs": true}', LIMITS)
    assert (got.prompt, got.messages, got.add_special_tokens, got.return_token_strs) == ("x", None, False, True)
    got = parse_tokenize(json.dumps({"messages": MESSAGES, "model": "m"}).encode(), LIMITS)
    assert (got.prompt, got.messages, got.model) == (None, (ChatMessage("user", "hi"),), "m")
    for body, field in (
        (b"{}", "prompt"),
        (b'{"prompt": "x", "messages": [{"role": "user", "content": ""}]}', "prompt"),
        (b'{"prompt": [1]}', "prompt"),
        (b'{"prompt": "x", "x": 1}', "x"),
        (b'{"messages": [{"role": "user", "content": ""}], "add_special_tokens": true}', "add_special_tokens"),
    ):
        with pytest.raises(InvalidField) as caught:
            parse_tokenize(body, LIMITS)
        assert caught.value.field == field


def test_detokenize_takes_ids() -> None:
    assert parse_detokenize(b'{"tokens": [1, 2], "model": "m"}', LIMITS).tokens == [1, 2]
    assert parse_detokenize(b'{"tokens": []}', LIMITS).tokens == []
    for body, field in (
        (b"{}", "tokens"),
        (b'{"tokens": "x"}', "tokens"),
        (b'{"tokens": [1, 1000]}', "tokens[1]"),
        (b'{"tokens": [1], "x": 1}', "x"),
    ):
        with pytest.raises(InvalidField) as caught:
            parse_detokenize(body, LIMITS)
        assert caught.value.field == field


# What it costs


@given(st.lists(st.one_of(st.integers(-3, 12), st.booleans(), st.floats(0, 3), st.just(2**64), st.none()), max_size=6))
def test_token_ids_are_whole_numbers_in_range_and_the_first_other_is_named(values: list[object]) -> None:
    wrong = [index for index, value in enumerate(values) if type(value) is not int or not 0 <= value < 10]
    if not wrong:
        assert check_token_ids(values, 10, "x") == values
    else:
        with pytest.raises(InvalidField) as caught:
            check_token_ids(values, 10, "x")
        assert caught.value.field == f"x[{wrong[0]}]"


def cpu_seconds(body: bytes, limits: RequestLimits) -> float:
    """CPU time to parse or to refuse a completion, the best of three."""
    best = float("inf")
    for _ in range(3):
        began = time.process_time()
        with contextlib.suppress(InvalidField):
            parse_completion(body, limits)
        best = min(best, time.process_time() - began)
    return best


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"prompt": [index % 1000 for index in range(230_000)]}).encode(),
        json.dumps({"prompt": [*range(230_000)]}).encode(),
        json.dumps({"prompt": 'a "quoted": {line}\n' * 45_000}).encode(),
        b'{"prompt":' + b"[" * 1_000_000,
        b'{"prompt":[' + b"[]," * 300_000 + b"1]}",
        b'{"prompt":"' + b"\\n" * 500_000 + b'"}',
        b"[" * 500_000 + b"]" * 500_000,
        b'{"prompt":"x","seed":' + b"1" * 1_000_000 + b"}",
    ],
    ids=["ids", "bad ids", "text", "deep", "wide", "escapes", "deep list", "long number"],
)
def test_a_megabyte_is_parsed_or_refused_for_a_tenth_of_a_second_of_cpu(body: bytes) -> None:
    assert cpu_seconds(body, RequestLimits(vocab_size=1000)) < 0.1
