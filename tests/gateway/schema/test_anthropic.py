"""A Messages request is a chat with other names, and is refused by those names."""

import json

import pytest

from gateway.schema.anthropic import MessageRequest, parse_count, parse_message
from gateway.schema.options import RequestLimits
from streamkv.errors import InvalidField

LIMITS = RequestLimits(vocab_size=1000, max_model_len=256)
MESSAGES = [{"role": "user", "content": "one two"}]
TOOL = {"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {}}}


def parse(**fields: object) -> MessageRequest:
    return parse_message(json.dumps({"messages": MESSAGES, "max_tokens": 12, **fields}).encode(), LIMITS)


def test_its_fields_are_those_of_a_chat() -> None:
    request = parse(
        system="be",
        stop_sequences=["x", "y"],
        top_k=3,
        temperature=0.5,
        metadata={"user_id": "me"},
        stream=True,
        seed=5,
        service_tier="auto",
    )
    options = request.chat.options
    assert [(message.role, message.content) for message in request.chat.messages] == [
        ("system", "be"),
        ("user", "one two"),
    ]
    assert (options.max_tokens, options.max_tokens_field, options.prompt_field) == (12, "max_tokens", "messages")
    assert (options.stop, options.top_k, options.temperature, options.user) == (("x", "y"), 3, 0.5, "me")
    assert (options.stream, options.seed) == (True, 5)


@pytest.mark.parametrize(
    ("tool_choice", "choice", "parallel"),
    [
        (None, "auto", True),
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "add"}, "function", True),
    ],
)
def test_a_choice_of_tools_is_that_of_a_chat(tool_choice: object, choice: str, parallel: bool) -> None:
    use = parse(tools=[TOOL], tool_choice=tool_choice).chat.tool_use
    assert [function.name for function in use.functions] == ["add"]
    assert (use.choice, use.parallel, use.named) == (choice, parallel, "add" if choice == "function" else "")


@pytest.mark.parametrize(("thinking", "enabled"), [("enabled", True), ("adaptive", True), ("disabled", False)])
def test_thinking_is_the_templates_unless_it_is_told_itself(thinking: str, enabled: bool) -> None:
    fields: dict[str, object] = {"thinking": {"type": thinking, "budget_tokens": 1024}}
    assert parse(**fields).chat.chat_template_kwargs == {"enable_thinking": enabled}
    given = {"enable_thinking": not enabled, "x": 1}
    assert parse(**fields, chat_template_kwargs=given).chat.chat_template_kwargs == given
    assert parse().chat.chat_template_kwargs == {}


def test_an_output_format_is_a_response_format() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    request = parse(output_config={"format": {"type": "json_schema", "schema": schema}})
    grammar = request.chat.options.grammar
    assert grammar is not None and (grammar.kind, json.loads(grammar.text)) == ("json_schema", schema)
    assert request.names.named(InvalidField(grammar.field, "is wrong")).field == "output_config.format.schema"


BAD = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "extra": 1}]}, "messages[0].extra"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "", "input": {}}]}]},
        "messages[0].content[0].name",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "x", "input": 5}]}]},
        "messages[0].content[0].input",
    ),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "tools[0].type"),
    ({"tools": [{"name": "x", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
    ({"tools": [{"input_schema": {"type": "object"}}]}, "tools[0].name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"thinking": {"type": "hard", "budget_tokens": 1000}}, "thinking.type"),
    ({"model": 5}, "model"),
]


@pytest.mark.parametrize(
    ("more", "field"),
    [
        *BAD,
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": 5}, "stop_sequences"),
        ({"metadata": {"user_id": 5}}, "metadata.user_id"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"n": 2}, "n"),
        ({"stop": "x"}, "stop"),
    ],
)
def test_what_does_not_work_is_refused_by_the_name_that_the_client_gave_it(more: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        parse(**more)
    assert caught.value.field == field


@pytest.mark.parametrize(("more", "field"), BAD)
def test_a_count_refuses_the_same(more: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        parse_count(json.dumps({"messages": MESSAGES, **more}).encode(), LIMITS)
    assert caught.value.field == field


@pytest.mark.parametrize("field", ["max_tokens", "temperature", "stream"])
def test_a_count_takes_only_what_makes_the_prompt(field: str) -> None:
    with pytest.raises(InvalidField, match=field):
        parse_count(json.dumps({"messages": MESSAGES, field: 1}).encode(), LIMITS)
