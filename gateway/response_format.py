"""What a request's fields say of the form of its answer → the engine's Grammar.

    response_format      OpenAI: {"type": "text" | "json_object" | "json_schema", "json_schema": {"schema": …}}
    guided_…             vLLM: guided_json, guided_regex, guided_choice, guided_grammar
    structured_outputs   vLLM: {"json" | "regex" | "choice" | "grammar" | "json_object": …}

A request may use one of them. What stands in a schema, a pattern or a grammar is the engine's to judge, which compiles
it and names the same field.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn

import msgspec

from gateway.schema.reader import FieldReader
from gateway.schema.wording import kind, short
from streamkv.errors import InvalidField
from streamkv.sampling import MAX_GRAMMAR_CHARS, Grammar

MAX_GRAMMAR_CHOICES: Final = 4096
MAX_SCHEMA_NAME_CHARS: Final = 64
_KINDS: Final = ("json", "regex", "choice", "grammar")
"""What stands behind guided_, and inside structured_outputs."""
_NO_IDS: Final[Mapping[str, int]] = {}


def read_grammar(reader: FieldReader) -> Grammar | None:
    """Every field that asks for a form, with its rule. None: any text. Raises InvalidField.

    The field of what it returns says where the client wrote it.
    """
    found = [_read_response_format(reader)]
    found += [_read_kind(reader, f"guided_{name}", name) for name in _KINDS]
    reader.ignored("guided_decoding_backend")
    reader.neutral("guided_whitespace_pattern")
    found += [_read_structured_outputs(reader)]
    grammars = [grammar for grammar in found if grammar is not None]
    if len(grammars) > 1:
        raise InvalidField(grammars[1].field, f"cannot be used together with {grammars[0].field}; send one of them")
    return grammars[0] if grammars else None


def _read_response_format(reader: FieldReader) -> Grammar | None:
    if "response_format" not in reader:
        reader.take("response_format")
        return None
    inner = FieldReader(reader.mapping("response_format"), reader.path("response_format."))
    wanted = inner.take("type")
    grammar = None
    if wanted == "json_schema":
        grammar = _read_json_schema(inner)
    elif wanted == "json_object":
        grammar = Grammar("json_object", field=reader.path("response_format"))
    elif wanted != "text":
        got = short(repr(wanted)) if isinstance(wanted, str) else kind(wanted)
        inner.refuse("type", f"must be text, json_object or json_schema, got {got}")
    inner.neutral("json_schema")
    inner.finish()
    return grammar


def _read_json_schema(reader: FieldReader) -> Grammar:
    """json_schema: name, schema and, without effect, description and strict: an answer always follows the schema."""
    if "json_schema" not in reader:
        reader.refuse("json_schema", "is missing; send an object with name and schema")
    inner = FieldReader(reader.mapping("json_schema"), reader.path("json_schema."))
    inner.text("name", MAX_SCHEMA_NAME_CHARS)
    inner.text("description", MAX_GRAMMAR_CHARS)
    inner.boolean("strict", default=False)
    if "schema" not in inner:
        inner.refuse("schema", "is missing; send a JSON schema")
    grammar = grammar_of_schema(inner.mapping("schema"), inner.path("schema"))
    inner.finish()
    return grammar


def _read_structured_outputs(reader: FieldReader) -> Grammar | None:
    if "structured_outputs" not in reader:
        reader.take("structured_outputs")
        return None
    inner = FieldReader(reader.mapping("structured_outputs"), reader.path("structured_outputs."))
    found = [_read_kind(inner, name, name) for name in _KINDS]
    if inner.boolean("json_object", default=False):
        found.append(Grammar("json_object", field=inner.path("json_object")))
    for option in ("disable_fallback", "disable_any_whitespace", "disable_additional_properties"):
        inner.neutral(option, False)
    inner.neutral("whitespace_pattern")
    inner.neutral("structural_tag")
    inner.finish()
    grammars = [grammar for grammar in found if grammar is not None]
    if len(grammars) > 1:
        raise InvalidField(grammars[1].field, f"cannot be used together with {grammars[0].field}; send one of them")
    if not grammars:
        reader.refuse("structured_outputs", f"must have one of {', '.join(_KINDS)}, json_object")
    return grammars[0]


def _read_kind(reader: FieldReader, name: str, wanted: str) -> Grammar | None:
    """One of _KINDS, in the field of this name."""
    field = reader.path(name)
    if name not in reader:
        reader.take(name)
        return None
    match wanted:
        case "json":
            return _read_schema(reader.take(name), field)
        case "choice":
            return _read_choice(reader.take(name), field)
        case "regex":
            return Grammar("regex", _read_source(reader, name, "a regular expression"), field)
        case _:
            return Grammar("lark", _read_source(reader, name, "a grammar in Lark's notation"), field)


def _read_source(reader: FieldReader, name: str, what: str) -> str:
    source = reader.text(name, MAX_GRAMMAR_CHARS)
    if not source:
        reader.refuse(name, f"is empty; send {what}")
    return source


def _read_schema(value: object, field: str) -> Grammar:
    """A JSON schema, as an object or as its text."""
    if isinstance(value, dict):
        return grammar_of_schema(value, field)
    if not isinstance(value, str):
        raise InvalidField(field, f"must be a JSON schema, as an object or as text, got {kind(value)}")
    if len(value) > MAX_GRAMMAR_CHARS:
        raise InvalidField(field, f"must have at most {MAX_GRAMMAR_CHARS} characters, got {len(value)}")
    try:
        schema = msgspec.json.decode(value)
    except RecursionError as error:
        raise InvalidField(field, "is nested too deeply") from error
    except (msgspec.MsgspecError, UnicodeError, ValueError) as error:
        raise InvalidField(field, f"is no JSON: {error}") from error
    if not isinstance(schema, dict):
        raise InvalidField(field, f"must be a JSON schema, an object, got {kind(schema)}")
    return Grammar("json_schema", value, field)


def _read_choice(value: object, field: str) -> Grammar:
    """1 to 4,096 texts, none empty; the same text twice is the same choice."""
    if not isinstance(value, list):
        raise InvalidField(field, f"must be a list of texts, got {kind(value)}")
    if not 1 <= len(value) <= MAX_GRAMMAR_CHOICES:
        raise InvalidField(field, f"must hold 1 to {MAX_GRAMMAR_CHOICES} texts, got {len(value)}")
    for index, choice in enumerate(value):
        if not isinstance(choice, str):
            raise InvalidField(f"{field}[{index}]", f"must be text, got {kind(choice)}")
        if not choice:
            raise InvalidField(f"{field}[{index}]", "must have at least one character")
    return Grammar("choice", _to_json(list(dict.fromkeys(value)), field), field)


def grammar_of_schema(schema: dict[str, object], field: str) -> Grammar:
    """JSON that follows this schema. Raises InvalidField with `field` for one that is too long."""
    return Grammar("json_schema", _to_json(schema, field), field)


class CallForm(msgspec.Struct, frozen=True, kw_only=True):
    """How a model writes that it calls functions: begin, call, separator, call, …, end, where a call is

    before + name + between + the arguments as a JSON object + after
    """

    begin: str = ""
    before: str
    between: str
    after: str
    separator: str = ""
    end: str = ""


HERMES_CALL: Final = CallForm(
    before='<tool_call>\n{"name": "', between='", "arguments": ', after="}\n</tool_call>", separator="\n"
)
"""Hermes and Qwen."""
LLAMA_CALL: Final = CallForm(before='{"name": "', between='", "parameters": ', after="}", separator="; ")
"""Llama 3."""


class CallableFunction(msgspec.Struct, frozen=True):
    """A function that a model may call."""

    name: str
    parameters: dict[str, object] | None = None
    """The JSON schema of its arguments; None: any object."""


def grammar_of_calls(
    functions: Sequence[CallableFunction],
    form: CallForm,
    field: str,
    *,
    max_calls: int = 1,
    special_ids: Mapping[str, int] = _NO_IDS,
) -> Grammar:
    """Text that is 1 to max_calls calls of these functions, of which there is at least one, and nothing else.

    For tool_choice `required`, or with one function and one call for a named one. Raises InvalidField with `field` for
    schemas that are too long together. special_ids: parts of the form that are special tokens.
    """
    # Each schema is a document of its own, in which its references look for their targets.
    rules = [f"call_{index}: {_call(function, form, index, special_ids)}" for index, function in enumerate(functions)]
    rules += [
        f"arguments_{index}: %json {_to_json(_arguments(function), field)}" for index, function in enumerate(functions)
    ]
    call = " | ".join(f"call_{index}" for index in range(len(functions)))
    further = f"({literal(form.separator, special_ids)} call){{0,{max_calls - 1}}}" if max_calls > 1 else ""
    start = f"start: {literal(form.begin, special_ids)} call {further} {literal(form.end, special_ids)}"
    return Grammar("lark", "\n".join([start, f"call: {call}", *rules, ""]), field)


def _call(function: CallableFunction, form: CallForm, index: int, special_ids: Mapping[str, int]) -> str:
    head = form.before + json.dumps(function.name)[1:-1] + form.between
    return f"{literal(head, special_ids)} arguments_{index} {literal(form.after, special_ids)}"


def _arguments(function: CallableFunction) -> dict[str, object]:
    """Its schema, in which the arguments are an object whatever it says."""
    return {"type": "object", **(function.parameters or {})}


def literal(text: str, special_ids: Mapping[str, int] = _NO_IDS) -> str:
    """As Lark has it; nothing for an empty one. special_ids: what in it are special tokens."""
    parts = re.split("(" + "|".join(map(re.escape, special_ids)) + ")", text) if special_ids else [text]
    return " ".join(f"<[{special_ids[part]}]>" if part in special_ids else json.dumps(part) for part in parts if part)


def _to_json(value: object, field: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:  # msgpack has bytes, NaN and the like
        _refuse_json(field, error)


def _refuse_json(field: str, error: Exception) -> NoReturn:
    raise InvalidField(field, f"cannot be written as JSON: {error}") from error
