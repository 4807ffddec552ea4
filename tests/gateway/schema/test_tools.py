"""Tools, what is wanted of them and the calls of earlier turns: one rule per field, and its name where it is broken."""

import json
from typing import Any

import pytest

from gateway.chat_template import ToolCall
from gateway.schema.chat import ChatRequest, chat_from_fields
from gateway.schema.options import RequestLimits
from gateway.schema.tokens import parse_tokenize
from gateway.schema.tools import Function
from streamkv.errors import InvalidField

LIMITS = RequestLimits(vocab_size=1000, max_model_len=100)
EMPTY: dict[str, object] = {"type": "object", "properties": {}}


def tool(name: str = "now", **fields: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def chat(**fields: object) -> ChatRequest:
    return chat_from_fields({"messages": [{"role": "user", "content": "x"}], **fields}, LIMITS)


def call(**function: object) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def refusal(**fields: object) -> tuple[str, str]:
    with pytest.raises(InvalidField) as error:
        chat(**fields)
    return error.value.field, error.value.message


def deep(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


def test_tools_are_functions_with_a_name_and_a_schema() -> None:
    schema: dict[str, object] = {"type": "object", "properties": {"a": {"type": "integer"}}}
    request = chat(tools=[tool(), tool("f.g-h_2", description="Does.", parameters=schema, strict=True)])
    assert request.tool_use.functions == (Function("now", EMPTY), Function("f.g-h_2", schema, "Does."))
    assert request.tool_use.as_tools() == [
        {"type": "function", "function": {"name": "now", "parameters": EMPTY}},
        {"type": "function", "function": {"name": "f.g-h_2", "description": "Does.", "parameters": schema}},
    ]


@pytest.mark.parametrize(
    ("tools", "field", "rule"),
    [
        ("now", "tools", "list of tools, got text"),
        ([tool(f"f{index}") for index in range(129)], "tools", "at most 128"),
        (["now"], "tools[0]", "type and function"),
        ([{"type": "web_search"}], "tools[0].type", "'function', got 'web_search'"),
        ([{"type": "function"}], "tools[0].function", "is missing"),
        ([{"type": "function", "function": "now"}], "tools[0].function", "an object"),
        ([{"type": "function", "function": {"name": "now"}, "now": 1}], "tools[0].now", "not a field"),
        ([{"type": "function", "function": {}}], "tools[0].function.name", "is missing"),
        ([tool("")], "tools[0].function.name", "1 to 128"),
        ([tool("now"), tool("no w")], "tools[1].function.name", "'no w'"),
        ([tool("x" * 129)], "tools[0].function.name", "1 to 128"),
        ([tool("now"), tool("now")], "tools[1].function.name", "an earlier tool"),
        ([tool(description=1)], "tools[0].function.description", "must be text"),
        ([tool(description="x" * 65537)], "tools[0].function.description", "65536"),
        ([tool(parameters=[])], "tools[0].function.parameters", "an object"),
        ([tool(parameters={"type": "string"})], "tools[0].function.parameters.type", "'object'"),
        ([tool(parameters={"properties": []})], "tools[0].function.parameters.properties", "an object"),
        ([tool(parameters={"title": "x" * 65536})], "tools[0].function.parameters", "65536"),
        ([tool(f"f{i}", description="x" * 65000) for i in range(20)], "tools", "1048576 characters together"),
        ([tool(strict=1)], "tools[0].function.strict", "true or false"),
        ([tool(name_=1)], "tools[0].function.name_", "did you mean 'name'"),
    ],
)
def test_what_is_no_tool_is_refused_by_its_place(tools: object, field: str, rule: str) -> None:
    found, message = refusal(tools=tools)
    assert (found, rule in message) == (field, True), message


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", "")),
        ("auto", ("auto", "")),
        ("none", ("none", "")),
        ("required", ("required", "")),
        ({"type": "function", "function": {"name": "now"}}, ("function", "now")),
    ],
)
def test_a_choice_of_tools(choice: object, expected: tuple[str, str]) -> None:
    tool_use = chat(tools=[tool(), tool("f")], tool_choice=choice).tool_use
    assert (tool_use.choice, tool_use.named) == expected
    assert tool_use.may_call == (choice != "none")
    assert tool_use.must_call == (expected[0] in ("required", "function"))


@pytest.mark.parametrize(
    ("fields", "field", "rule"),
    [
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": "any", "tools": [tool()]}, "tool_choice", "none, auto, required"),
        ({"tool_choice": 1, "tools": [tool()]}, "tool_choice", "got a whole number"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [tool()]}, "tool_choice.type", "'function'"),
        ({"tool_choice": {"type": "function"}, "tools": [tool()]}, "tool_choice.function", "is missing"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [tool()]},
            "tool_choice.function.name",
            "not the name of one of the tools",
        ),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
        ({"include_reasoning": "no"}, "include_reasoning", "true or false"),
        ({"functions": [{"name": "now"}]}, "functions", "send tools"),
        ({"function_call": {"name": "now"}}, "function_call", "send tool_choice"),
    ],
)
def test_what_is_no_choice_is_refused_by_its_place(fields: dict[str, Any], field: str, rule: str) -> None:
    found, message = refusal(**fields)
    assert (found, rule in message) == (field, True), message


def test_earlier_turns_have_calls_answers_and_thoughts() -> None:
    messages = [
        {"role": "user", "content": "x"},
        call(name="now", arguments='{"a": [1, {"b": null}]}') | {"reasoning": "hm", "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
        call(name="now", arguments=" "),
        {"role": "assistant", "content": "x", "tool_calls": [], "reasoning": "so"},
    ]
    request = chat(messages=messages)
    _, called, answered, plain, thought = request.messages
    assert called.tool_calls == (ToolCall("1", "now", {"a": [1, {"b": None}]}),)
    assert (called.content, called.reasoning) == ("", "hm")
    assert (answered.tool_call_id, answered.content) == ("1", "noon")
    assert plain.tool_calls == (ToolCall("1", "now", {}),)
    assert (thought.tool_calls, thought.reasoning) == ((), "so")


@pytest.mark.parametrize(
    ("message", "field", "rule"),
    [
        ({"role": "assistant", "tool_calls": {}}, "tool_calls", "a list of calls"),
        ({"role": "assistant", "tool_calls": [1]}, "tool_calls[0]", "id, type and function"),
        ({"role": "assistant", "tool_calls": [{"id": 1}]}, "tool_calls[0].id", "must be text"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "tool_calls[0].type", "'function'"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "tool_calls[0].function", "is missing"),
        (call(), "tool_calls[0].function.name", "is missing"),
        (call(name="no w"), "tool_calls[0].function.name", "1 to 128"),
        (call(name="now", arguments="{"), "tool_calls[0].function.arguments", "JSON object as text"),
        (call(name="now", arguments="[]"), "tool_calls[0].function.arguments", "got a list"),
        (call(name="now", arguments=1), "tool_calls[0].function.arguments", "got a whole number"),
        (call(name="now", arguments=deep(33)), "tool_calls[0].function.arguments", "deeper than 32"),
        (call(name="now", arguments=deep(5000)), "tool_calls[0].function.arguments", "too deeply"),
        (call(name="now", arguments='"' + "x" * 1048576 + '"'), "tool_calls[0].function.arguments", "1048576"),
        ({"role": "assistant", "tool_calls": [call(name="f")] * 129}, "tool_calls", "at most 128"),
        ({"role": "user", "content": "x", "tool_calls": [call(name="f")]}, "tool_calls", "is not supported"),
        ({"role": "user", "content": "x", "tool_call_id": "1"}, "tool_call_id", "not a field"),
        ({"role": "user", "content": "x", "reasoning": "hm"}, "reasoning", "is not supported"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "function_call", "send tool_calls"),
        ({"role": "tool", "tool_call_id": 1, "content": "x"}, "tool_call_id", "must be text"),
    ],
)
def test_what_is_no_call_is_refused_by_its_place(message: dict[str, Any], field: str, rule: str) -> None:
    found, said = refusal(messages=[message])
    assert (found, rule in said) == (f"messages[0].{field}", True), said


def test_arguments_may_be_as_deep_as_a_body() -> None:
    (message,) = chat(messages=[call(name="now", arguments=deep(32))]).messages
    assert json.dumps(message.tool_calls[0].arguments).count("{") == 32


def test_tokenize_takes_the_tools_of_a_chat() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool()]}
    assert parse_tokenize(json.dumps(body).encode(), LIMITS).functions == (Function("now", EMPTY),)
    with pytest.raises(InvalidField, match="needs messages"):
        parse_tokenize(json.dumps({"prompt": "x", "tools": [tool()]}).encode(), LIMITS)
