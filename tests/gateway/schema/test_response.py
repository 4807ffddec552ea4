"""A Responses request is a chat with other names, and is refused by those names."""

import json

import pytest

from gateway.schema.options import RequestLimits
from gateway.schema.response import ResponseRequest, parse_response
from streamkv.errors import InvalidField

LIMITS = RequestLimits(vocab_size=1000, max_model_len=256)


def parse(**fields: object) -> ResponseRequest:
    return parse_response(json.dumps({"input": "one two", "max_output_tokens": 12, **fields}).encode(), LIMITS)


def test_its_fields_are_those_of_a_chat() -> None:
    request = parse(
        instructions="be",
        temperature=0.5,
        top_p=0.5,
        top_k=3,
        seed=5,
        min_tokens=2,
        stream=True,
        cache_salt="mine",
        request_id="r1",
        parallel_tool_calls=False,
    )
    options = request.chat.options
    assert [(message.role, message.content) for message in request.chat.messages] == [
        ("system", "be"),
        ("user", "one two"),
    ]
    assert (options.max_tokens, options.max_tokens_field, options.prompt_field) == (12, "max_output_tokens", "input")
    assert (options.temperature, options.top_p, options.top_k, options.seed) == (0.5, 0.5, 3, 5)
    assert (options.min_tokens, options.stream, options.cache_salt, options.request_id) == (2, True, "mine", "r1")
    assert request.chat.tool_use.parallel is False and request.repeated["parallel_tool_calls"] is False


def test_a_form_of_the_text_is_a_response_format() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    request = parse(text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}})
    grammar = request.chat.options.grammar
    assert grammar is not None and (grammar.kind, json.loads(grammar.text)) == ("json_schema", schema)
    assert request.names.named(InvalidField(grammar.field, "is wrong")).field == "text.format.schema"
    grammar = parse(text={"format": {"type": "json_object"}}).chat.options.grammar
    assert grammar is not None and grammar.kind == "json_object"
    assert parse(text={"format": {"type": "text"}}).chat.options.grammar is None


def test_what_an_answer_repeats_has_its_defaults() -> None:
    assert parse().repeated == {
        "instructions": None,
        "max_output_tokens": 12,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "top_p": 1.0,
        "text": {"format": {"type": "text"}},
        "tools": [],
        "tool_choice": "auto",
        "truncation": "disabled",
        "user": None,
    }


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": "x", "extra": 1}]}, "input[0].extra"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "", "arguments": "{}"}]},
            "input[0].name",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "x", "arguments": "{"}]},
            "input[0].arguments",
        ),
        ({"input": [{"type": "function_call_output", "output": 5}]}, "input[0].output"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"min_tokens": 13}, "min_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "x", "extra": 1}]}, "tools[0].extra"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"n": 2}, "n"),
        ({"stop": "x"}, "stop"),
        ({"model": 5}, "model"),
    ],
)
def test_what_does_not_work_is_refused_by_the_name_that_the_client_gave_it(more: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidField) as caught:
        parse(**more)
    assert caught.value.field == param
    assert "messages[" not in str(caught.value) and "max_completion_tokens" not in str(caught.value)
