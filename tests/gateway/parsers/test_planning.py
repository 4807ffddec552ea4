"""Which format a model writes in, and what an answer must look like where a call has to be made."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from gateway.chat_template import AddedToken
from gateway.parsers.model_formats import ModelFormats, find_formats
from gateway.parsers.planning import begins_in_reasoning, plan_grammar, plan_parsing
from gateway.schema.chat import ChatRequest, chat_from_fields
from gateway.schema.options import RequestLimits
from streamkv.config import GatewayConfig
from streamkv.errors import InvalidField
from streamkv.sampling import Grammar
from tests.support.tool_models import tool_model

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
HERMES_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
ANSWER = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "required": ["n"]}}}
BYTES = LLTokenizer("byte")
HERMES_MODEL = tool_model("hermes")


def request(**fields: Any) -> ChatRequest:
    asked = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, **fields}
    return chat_from_fields(asked, RequestLimits(vocab_size=1000, max_model_len=100))


def grammar(formats: ModelFormats, is_open: bool = False, **fields: Any) -> Grammar:
    if is_open:
        fields["chat_template_kwargs"] = {"opens_thoughts": True}
    asked = request(**fields)
    ids = HERMES_MODEL.encode_chat(asked.messages, template_kwargs=asked.chat_template_kwargs)
    parsing = plan_parsing(asked, formats, ids, HERMES_MODEL)
    assert parsing is not None
    found = plan_grammar(asked, formats, parsing)
    assert found is not None
    return found


def allows(grammar: Grammar, text: str) -> bool:
    """Whether a whole answer may be this."""
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(grammar.text))
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def formats(tool_format: str, thinks: bool = False, named: bool = False) -> ModelFormats:
    return ModelFormats(tool_format, thinks, {}, names_before_arguments=named)


@pytest.mark.parametrize(
    ("template", "tokens", "expected"),
    [
        ("… <tool_call> …", ["<|python_tag|>"], ("hermes", False)),
        ("… {{ tools }} …", ["<tool_call>", "</tool_call>"], ("hermes", False)),
        ("… {{ tools }} …", ["<|python_tag|>", "<|eot_id|>"], ("llama3", False)),
        ("… [TOOL_CALLS] …", [], ("mistral", False)),
        ("… {{ tools }} …", ["[TOOL_CALLS]"], ("mistral", False)),
        ("… content.split('</think>') … <think> …", [], ("", True)),
        ("… {{ tools }} …", ["<think>", "</think>", "<tool_call>"], ("hermes", True)),
        ("… {{ tools }} …", ["<|im_end|>"], ("", False)),
    ],
)
def test_a_models_format_is_found_in_its_template_and_its_tokens(
    template: str, tokens: list[str], expected: tuple[str, bool]
) -> None:
    added = [AddedToken(text, 5 + index, is_special=False) for index, text in enumerate(tokens)]
    found = find_formats(template, added, GatewayConfig())
    assert (found.tool_format, found.splits_reasoning) == expected
    said = GatewayConfig(tool_call_parser="llama3", reasoning_parser="think")
    found = find_formats(template, added, said)
    assert (found.tool_format, found.splits_reasoning) == ("llama3", True)
    found = find_formats(template, added, GatewayConfig(tool_call_parser="none", reasoning_parser="none"))
    assert (found.tool_format, found.splits_reasoning) == ("", False)


def test_special_marks_are_shown_to_the_parser_only_where_it_looks_for_them() -> None:
    added = [AddedToken(text, 5 + index) for index, text in enumerate(["<|python_tag|>", "<think>", "<tool_call>"])]
    found = find_formats("<tool_call>", added, GatewayConfig())
    assert found.special_marks("hermes") == ("<tool_call>", "<think>")
    assert found.special_marks("") == ("<think>",)
    asked = request()
    parsing = plan_parsing(asked, found, [3], HERMES_MODEL)
    assert parsing is not None and parsing.shown_special_ids == (7, 6)
    assert parsing.hidden_marks == ("<tool_call>", "<think>")
    shown = plan_parsing(request(skip_special_tokens=False), found, [3], HERMES_MODEL)
    assert shown is not None and (shown.hidden_marks, shown.shown_special_ids) == ((), ())


def test_plain_requests_are_not_parsed() -> None:
    for asked, found in (
        (request(tools=None), formats("hermes")),
        (request(tool_choice="none"), formats("hermes")),
        (request(), ModelFormats("", False, {}, leaves_calls_alone=True)),
    ):
        assert plan_parsing(asked, found, [3], HERMES_MODEL) is None


@pytest.mark.parametrize(("choice", "field"), [(None, "tools"), ("auto", "tools"), ("required", "tool_choice")])
def test_calls_that_nobody_could_tell_are_refused(choice: str | None, field: str) -> None:
    with pytest.raises(InvalidField, match="--tool-call-parser") as error:
        plan_parsing(request(tool_choice=choice), formats("", thinks=True), [3], HERMES_MODEL)
    assert error.value.field == field
    left_alone = ModelFormats("", True, {}, leaves_calls_alone=True)
    if choice == "required":
        with pytest.raises(InvalidField, match="--tool-call-parser"):
            plan_parsing(request(tool_choice=choice), left_alone, [3], HERMES_MODEL)
    else:
        found = plan_parsing(request(tool_choice=choice), left_alone, [3], HERMES_MODEL)
        assert found is not None and not found.tool_format


@pytest.mark.parametrize(
    ("model", "one", "two"),
    [
        (formats("hermes"), HERMES, f"{HERMES}\n{HERMES_NOW}"),
        (
            formats("llama3"),
            '{"name": "get_weather", "parameters": {"city": "Oslo"}}',
            '{"name": "get_weather", "parameters": {"city": "Oslo"}}; {"name": "now", "parameters": {}}',
        ),
        (
            formats("mistral"),
            '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}}]',
            '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Oslo"}}, {"name": "now", "arguments": {}}]',
        ),
        (
            formats("mistral", named=True),
            '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}',
            '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]now[ARGS]{}',
        ),
    ],
)
def test_a_call_that_must_be_made_is_made_in_the_models_own_form(model: ModelFormats, one: str, two: str) -> None:
    required = grammar(model, tool_choice="required")
    assert allows(required, one) and allows(required, two)
    for other in ("", "Hello", one[:-1], one + " so", one.replace("Oslo", '"'), one.replace("city", "town")):
        assert not allows(required, other)
    single = grammar(model, tool_choice="required", parallel_tool_calls=False)
    assert allows(single, one) and not allows(single, two)
    named = grammar(model, tool_choice={"type": "function", "function": {"name": "now"}})
    assert not allows(named, one)
    assert allows(named, one.replace("get_weather", "now"))


def test_thoughts_before_a_call_that_must_be_made_are_free() -> None:
    thinking = grammar(formats("hermes", thinks=True), tool_choice="required")
    for text in (HERMES, f"<think>\nhm <b\n</think>\n\n{HERMES}", f"<think></think>{HERMES}"):
        assert allows(thinking, text)
    assert not allows(thinking, "<think>hm")
    assert not allows(thinking, f"hm</think>{HERMES}")
    opened = grammar(formats("hermes", thinks=True), is_open=True, tool_choice="required")
    assert allows(opened, f"hm {HERMES}\n</think>\n{HERMES}") and not allows(opened, HERMES)


@pytest.mark.parametrize(
    ("form", "answer", "other"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": 1}', "a"),
        ({"response_format": ANSWER}, '{"n": 1}', '{"m": 1}'),
        ({"guided_regex": r"a/[b\/]+"}, "a/b/", "ab"),
        ({"guided_choice": ["yes", 'n"ö']}, 'n"ö', "no"),
        ({"guided_grammar": 'start: "x" y\ny: "{"+'}, "x{{", "x"),
    ],
)
def test_a_form_of_the_answer_leaves_room_for_calls_and_thoughts(form: dict[str, Any], answer: str, other: str) -> None:
    either = grammar(formats("hermes", thinks=True), **form)
    assert allows(either, answer) and allows(either, HERMES)
    assert allows(either, f"<think>hm</think>\n\n{answer}") and allows(either, f"<think>hm</think>\n\n{HERMES}")
    assert not allows(either, other) and not allows(either, answer + HERMES)
    without = grammar(formats("hermes", thinks=True), is_open=True, tools=None, **form)
    assert allows(without, f"hm</think>\n\n{answer}")
    assert not allows(without, answer) and not allows(without, f"hm</think>\n\n{HERMES}")


def test_special_marks_are_asked_for_as_tokens() -> None:
    ids = {"[TOOL_CALLS]": 7, "[ARGS]": 8, "</think>": 9}
    found = grammar(ModelFormats("mistral", True, ids, names_before_arguments=True), tool_choice="required")
    for written in ('<[7]> "get_weather" <[8]>', "thoughts: /(.|\\n)*/ <[9]>"):
        assert written in found.text
    assert "TOOL_CALLS" not in found.text


def test_a_form_cannot_be_asked_for_beside_a_call_that_must_be_made() -> None:
    with pytest.raises(InvalidField, match="tool_choice") as error:
        grammar(formats("hermes"), tool_choice="required", guided_regex="a")
    assert error.value.field == "guided_regex"


@pytest.mark.parametrize(
    ("kwargs", "expected"), [({}, False), ({"opens_thoughts": False}, False), ({"opens_thoughts": True}, True)]
)
def test_the_template_says_whether_thoughts_are_open(kwargs: dict[str, object], expected: bool) -> None:
    for kind in ("hermes", "thinker"):
        tokenizer = tool_model(kind)
        asked = request(chat_template_kwargs=kwargs)
        ids = tokenizer.encode_chat(asked.messages, template_kwargs=kwargs)
        assert begins_in_reasoning(asked, ids, tokenizer) is expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [("Yes", False), ("<think>hm", True), ("<think>hm</think>Yes", False), ("<think>a</think><think>b", True)],
)
def test_a_message_that_goes_on_says_whether_thoughts_are_open(content: str, expected: bool) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]
    asked = request(messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert begins_in_reasoning(asked, [], tool_model("hermes")) is expected


def test_the_schema_of_each_function_stands_for_itself() -> None:
    """References look for their targets in their own document."""
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"]}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {**schema, "$defs": {"x": {"const": value}}}}}
        for name, value in (("f", 1), ("g", 2))
    ]
    found = grammar(formats("llama3"), tools=tools, tool_choice="required")
    assert allows(found, json.dumps({"name": "f", "parameters": {"a": 1}}))
    assert allows(found, json.dumps({"name": "g", "parameters": {"a": 2}}))
    assert not allows(found, json.dumps({"name": "g", "parameters": {"a": 1}}))
