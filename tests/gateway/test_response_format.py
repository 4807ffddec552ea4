"""Which form of the answer a request's fields ask for, and what is refused by which name."""

import json
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer

from engine.execution.grammar import GrammarCompiler, read_tokenizer
from gateway.response_format import (
    HERMES_CALL,
    LLAMA_CALL,
    MAX_GRAMMAR_CHOICES,
    CallableFunction,
    CallForm,
    grammar_of_calls,
    literal,
    read_grammar,
)
from gateway.schema.reader import FieldReader
from streamkv.errors import InvalidField
from streamkv.sampling import MAX_GRAMMAR_CHARS, Grammar
from tests.support.small_tokenizers import train_byte_level, write_folder

SCHEMA: dict[str, object] = {"type": "object", "properties": {"ä": {"type": "integer"}}, "required": ["ä"]}
SCHEMA_TEXT = '{"type":"object","properties":{"ä":{"type":"integer"}},"required":["ä"]}'


def read(**fields: object) -> Grammar | None:
    reader = FieldReader(fields)
    grammar = read_grammar(reader)
    reader.finish()
    return grammar


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"response_format": None, "guided_json": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "text", "json_schema": None}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object", "", "response_format")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "description": "why", "strict": True, "schema": SCHEMA},
                }
            },
            Grammar("json_schema", SCHEMA_TEXT, "response_format.json_schema.schema"),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": None, "schema": {}}}},
            Grammar("json_schema", "{}", "response_format.json_schema.schema"),
        ),
        ({"guided_json": SCHEMA}, Grammar("json_schema", SCHEMA_TEXT, "guided_json")),
        ({"guided_json": SCHEMA_TEXT}, Grammar("json_schema", SCHEMA_TEXT, "guided_json")),
        ({"guided_regex": r"\d+"}, Grammar("regex", r"\d+", "guided_regex")),
        ({"guided_choice": ["a", "é", "a"]}, Grammar("choice", '["a","é"]', "guided_choice")),
        ({"guided_grammar": "start: x"}, Grammar("lark", "start: x", "guided_grammar")),
        ({"guided_regex": "a", "response_format": {"type": "text"}}, Grammar("regex", "a", "guided_regex")),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", SCHEMA_TEXT, "structured_outputs.json")),
        ({"structured_outputs": {"regex": "a"}}, Grammar("regex", "a", "structured_outputs.regex")),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar("choice", '["a"]', "structured_outputs.choice")),
        ({"structured_outputs": {"grammar": "x"}}, Grammar("lark", "x", "structured_outputs.grammar")),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object", "", "structured_outputs.json_object")),
        (
            {"structured_outputs": {"json_object": False, "regex": "a", "disable_any_whitespace": False}},
            Grammar("regex", "a", "structured_outputs.regex"),
        ),
    ],
)
def test_each_field_asks_for_its_grammar(fields: dict[str, object], wanted: Grammar | None) -> None:
    assert read(**fields) == wanted


@pytest.mark.parametrize(
    ("fields", "field", "complaint"),
    [
        ({"response_format": "json"}, "response_format", "an object"),
        ({"response_format": {}}, "response_format.type", "json_schema, got null"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
        ({"response_format": {"type": ["text"]}}, "response_format.type", "a list"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "not a field"),
        ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format.json_schema", "supported"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "{}"}}},
            "response_format.json_schema.schema",
            "an object, got text",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
            "response_format.json_schema.strict",
            "true or false",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "extra": 1}}},
            "response_format.json_schema.extra",
            "not a field",
        ),
        ({"guided_json": 5}, "guided_json", "a whole number"),
        ({"guided_json": "{"}, "guided_json", "no JSON"),
        ({"guided_json": "[]"}, "guided_json", "a list"),
        ({"guided_json": "[" * 100_000}, "guided_json", ""),
        ({"guided_json": " " * (MAX_GRAMMAR_CHARS + 1)}, "guided_json", "at most"),
        ({"guided_json": {"description": "x" * MAX_GRAMMAR_CHARS}}, "guided_json", str(MAX_GRAMMAR_CHARS)),
        ({"guided_json": {"const": float("nan")}}, "guided_json", "JSON"),
        ({"guided_json": {"const": b"x"}}, "guided_json", "JSON"),
        ({"guided_regex": ""}, "guided_regex", "empty"),
        ({"guided_regex": ["a"]}, "guided_regex", "text, got a list"),
        ({"guided_regex": "x" * (MAX_GRAMMAR_CHARS + 1)}, "guided_regex", "at most"),
        ({"guided_choice": "a"}, "guided_choice", "a list of texts"),
        ({"guided_choice": []}, "guided_choice", "1 to"),
        ({"guided_choice": ["x"] * (MAX_GRAMMAR_CHOICES + 1)}, "guided_choice", "1 to"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]", "must be text"),
        ({"guided_choice": ["a", ""]}, "guided_choice[1]", "at least one"),
        ({"guided_grammar": {}}, "guided_grammar", "must be text"),
        ({"guided_grammar": ""}, "guided_grammar", "Lark"),
        ({"guided_whitespace_pattern": " *"}, "guided_whitespace_pattern", "not supported"),
        ({"structured_outputs": []}, "structured_outputs", "an object"),
        ({"structured_outputs": {}}, "structured_outputs", "must have one of"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "must have one of"),
        ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object", "true or false"),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs.xml", "not a field"),
        ({"structured_outputs": {"regex": "a", "structural_tag": "x"}}, "structured_outputs.structural_tag", "not"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice", "outputs.regex"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "response_format"),
        (
            {"structured_outputs": {"json_object": True}, "guided_json": {}},
            "structured_outputs.json_object",
            "guided_json",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_its_field(fields: dict[str, object], field: str, complaint: str) -> None:
    with pytest.raises(InvalidField) as caught:
        read(**fields)
    assert caught.value.field == field
    assert complaint in caught.value.message and len(caught.value.message) < 400


# Calls


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_byte_level("gpt-2")


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarCompiler]:
    files = write_folder(tmp_path_factory.mktemp("calls"), tokenizer)
    compiler = GrammarCompiler(lambda: read_tokenizer(files, tokenizer.get_vocab_size(), [2]))
    yield compiler
    compiler.close()


def matches(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, token_ids: list[int]) -> bool:
    matcher = compiler.get(grammar).begin()
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


FUNCTIONS = [
    CallableFunction(
        "weather",
        {
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Köln", "Rome"]}},
        },
    ),
    CallableFunction("stop"),
]
ROME = '{"city": "Rome"}'
LISTED = CallForm(begin="[CALLS][", before='{"name": "', between='", "arguments": ', after="}", separator=", ", end="]")


@pytest.mark.parametrize(
    ("form", "text", "is_right"),
    [
        (HERMES_CALL, '<tool_call>\n{"name": "weather", "arguments": ' + ROME + "}\n</tool_call>", True),
        (HERMES_CALL, '<tool_call>\n{"name": "weather", "arguments": {"city":\n  "Köln"}}\n</tool_call>', True),
        (HERMES_CALL, '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>', False),
        (HERMES_CALL, '<tool_call>\n{"name": "weather", "arguments": []}\n</tool_call>', False),
        (HERMES_CALL, '<tool_call>\n{"name": "rain", "arguments": {}}\n</tool_call>', False),
        (HERMES_CALL, '<tool_call>\n{"name": "stop", "arguments": {"any": [1, null]}}\n</tool_call>', True),
        (HERMES_CALL, "I will not call anything.", False),
        (LLAMA_CALL, '{"name": "stop", "parameters": {}}; {"name": "weather", "parameters": ' + ROME + "}", True),
        (LLAMA_CALL, '{"name": "stop", "parameters": {}}' + '; {"name": "stop", "parameters": {}}' * 2, False),
        (LISTED, '[CALLS][{"name": "stop", "arguments": {}}]', True),
        (LISTED, '[CALLS][{"name": "stop", "arguments": {}}, {"name": "stop", "arguments": {}}]', True),
        (LISTED, "[CALLS][]", False),
    ],
)
def test_calls_are_those_of_the_functions_in_the_models_form(
    compiler: GrammarCompiler, tokenizer: Tokenizer, form: CallForm, text: str, is_right: bool
) -> None:
    grammar = grammar_of_calls(FUNCTIONS, form, "tools", max_calls=2)
    assert grammar.field == "tools"
    assert matches(compiler, tokenizer, grammar, tokenizer.encode(text).ids) == is_right


def test_a_mark_may_be_a_special_token(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    form = CallForm(begin="<|im_start|>", before='{"name": "', between='", "arguments": ', after="}")
    grammar = grammar_of_calls(FUNCTIONS, form, "tools", special_ids={"<|im_start|>": 1})
    call = tokenizer.encode('{"name": "stop", "arguments": {}}').ids
    assert matches(compiler, tokenizer, grammar, [1, *call])
    assert not matches(compiler, tokenizer, grammar, call)


def test_arguments_have_no_endless_blanks(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = grammar_of_calls(FUNCTIONS, LLAMA_CALL, "tools")
    text = '{"name": "stop", "parameters": {' + "\n" * 5 + "}}"
    assert not matches(compiler, tokenizer, grammar, tokenizer.encode(text).ids)


@pytest.mark.parametrize("text", ['a"b\\c\n\t', "\x7f\x01\u2028", "é😀", "/x/ # //"])
def test_a_literal_is_its_text(compiler: GrammarCompiler, tokenizer: Tokenizer, text: str) -> None:
    grammar = Grammar("lark", f"start: {literal(text)}")
    assert matches(compiler, tokenizer, grammar, tokenizer.encode(text).ids)
    assert literal("") == ""


def test_schemas_that_are_too_long_together_are_refused() -> None:
    many = [CallableFunction(f"f{i}", {"description": "x" * 3000}) for i in range(100)]
    with pytest.raises(InvalidField) as caught:
        grammar_of_calls(many, HERMES_CALL, "tools")
    assert caught.value.field == "tools"
    assert json.dumps(MAX_GRAMMAR_CHARS) in caught.value.message
