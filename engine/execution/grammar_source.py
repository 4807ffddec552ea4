"""A Grammar, checked against its bounds → the text that llguidance compiles."""

import json
import re
from typing import Final

import llguidance
import msgspec
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from streamkv.errors import InvalidField
from streamkv.sampling import Grammar

MAX_SCHEMA_DEPTH: Final = 64
"""Objects and lists inside each other."""
MAX_SCHEMA_PARTS: Final = 8192
"""Objects, lists and keys of a schema: some seconds, if all are optional properties of one object."""
MAX_MULTIPLE_OF: Final = 10_000
"""Digits of multipleOf without the point: the grammar has a state for each remainder."""
MAX_PATTERN_CHARS: Final = 32 * 1024
"""Of a regular expression, and of all patterns of a schema. The time grows with its square."""
MAX_LARK_CHARS: Final = 64 * 1024
MAX_RULES: Final = 1000
MAX_TERMINALS: Final = 256
"""They are put into each other, and one out of a thousand others may take seconds for each mask."""
MAX_GBNF_CHARS: Final = 16 * 1024
"""The translation takes time with its square."""
MAX_INLINE_SCHEMAS: Final = 512
"""In one grammar."""

_BLANKS: Final = r" |\r?\n[ \t]{0,48}"
"""Between the parts of JSON, if anything: a model that may write blanks for ever sometimes does."""
_TERMINAL: Final = re.compile(r"^[ \t]*_?[A-Z][A-Z0-9_]*\b[^:\n]*:", re.MULTILINE)
_LARK_TOKEN: Final = re.compile(r'"(?:\\.|[^"\\\n])*"?|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/?|(?P<json>%json)\s*')
"""Texts, comments and patterns, in which %json means nothing; and %json."""


def to_source(grammar: Grammar) -> str:
    """As llguidance has it. Raises InvalidField."""
    match grammar.kind:
        case "json_object":
            return _json_source('{"type":"object"}')
        case "json_schema":
            schema = _decode(grammar, "a JSON schema")
            if not isinstance(schema, dict):
                raise InvalidField(grammar.field, "must be a JSON schema, an object")
            _check_schema(schema, grammar.field)
            return _json_source(grammar.text)
        case "regex":
            _check_pattern(grammar.text, grammar.field)
            # \d is a digit from 0 to 9, as in JSON schemas, and not one of any script.
            return llguidance.LLMatcher.grammar_from_regex(llguidance.regex_to_lark(grammar.text, "d"))
        case "choice":
            return llguidance.LLMatcher.grammar_from_regex(_choice_pattern(grammar))
        case _:
            source = grammar.text
            if not is_lark_syntax(source):
                if len(source) > MAX_GBNF_CHARS:
                    text = f"must have the rule `start` of Lark's notation; GBNF may have {MAX_GBNF_CHARS} characters"
                    raise InvalidField(grammar.field, text)
                source = gbnf_to_lark(source)
            return llguidance.LLMatcher.grammar_from_lark(_with_blanks(source, grammar.field))


def _json_source(schema: str) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _BLANKS})


def _decode(grammar: Grammar, what: str) -> object:
    try:
        return msgspec.json.decode(grammar.text)
    except RecursionError as error:
        raise InvalidField(grammar.field, f"is nested deeper than {MAX_SCHEMA_DEPTH} levels") from error
    except (msgspec.MsgspecError, UnicodeError, ValueError) as error:
        raise InvalidField(grammar.field, f"must be {what}, as JSON: {error}") from error


def _choice_pattern(grammar: Grammar) -> str:
    choices = _decode(grammar, "a list of texts")
    if not isinstance(choices, list) or not choices:
        raise InvalidField(grammar.field, "must be a list of at least one text")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise InvalidField(grammar.field, "must be a list of texts of at least one character")
    return "|".join(map(_pattern_of, choices))


def _pattern_of(text: str) -> str:
    return "".join(char if char.isalnum() and char.isascii() else f"\\x{{{ord(char):x}}}" for char in text)


def _with_blanks(source: str, field_name: str) -> str:
    """A grammar, checked, whose schemas behind %json have the same blanks as others. Raises InvalidField."""
    decoder = json.JSONDecoder()
    parts: list[str] = []
    done = at = num_schemas = 0
    while found := _LARK_TOKEN.search(source, at):
        at = found.end()
        if found["json"] is None:
            continue
        num_schemas += 1
        if num_schemas > MAX_INLINE_SCHEMAS:
            raise InvalidField(field_name, f"has more than {MAX_INLINE_SCHEMAS} schemas")
        try:
            schema, end = decoder.raw_decode(source, at)
        except RecursionError as error:
            raise InvalidField(field_name, f"is nested deeper than {MAX_SCHEMA_DEPTH} levels") from error
        except ValueError as error:
            raise InvalidField(field_name, f"must have JSON behind each %json: {error}") from error
        _check_schema(schema, field_name)
        if isinstance(schema, dict):
            schema.setdefault("x-guidance", {"whitespace_pattern": _BLANKS})
        parts += (source[done:at], json.dumps(schema))
        done = at = end
    parts.append(source[done:])
    _check_rules("".join(parts[::2]), field_name)
    return "".join(parts)


def _check_rules(source: str, field_name: str) -> None:
    """source: without its schemas. Raises InvalidField for what would take too long."""
    for what, count, most in (
        ("characters beside its schemas", len(source), MAX_LARK_CHARS),
        ("colons, so rules", source.count(":"), MAX_RULES),
        ("terminals", len(_TERMINAL.findall(source)), MAX_TERMINALS),
    ):
        if count > most:
            raise InvalidField(field_name, f"has {count} {what}; at most {most} are taken")


def _check_schema(schema: object, field_name: str) -> None:
    """Raises InvalidField for one that is too deep, too large, or would take too long."""
    num_parts = depth = num_pattern_chars = 0
    level = [schema]
    while level := [part for part in level if isinstance(part, dict | list)]:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise InvalidField(field_name, f"is nested deeper than {MAX_SCHEMA_DEPTH} levels")
        num_parts += len(level)
        below: list[object] = []
        for part in level:
            if isinstance(part, dict):
                num_parts += len(part)
                _check_multiple(part.get("multipleOf"), field_name)
                num_pattern_chars += _num_pattern_chars(part)
                below += part.values()
            elif isinstance(part, list):
                below += part
        if num_parts > MAX_SCHEMA_PARTS:
            raise InvalidField(field_name, f"has more than {MAX_SCHEMA_PARTS} objects, lists and keys")
        level = below
    if num_pattern_chars > MAX_PATTERN_CHARS:
        raise InvalidField(field_name, f"has patterns of {num_pattern_chars} characters; at most {MAX_PATTERN_CHARS}")


def _num_pattern_chars(schema: dict[str, object]) -> int:
    """Characters of the patterns that stand in this object itself, those of the library's own options included."""
    by_pattern = schema.get("patternProperties")
    found = [schema.get("pattern"), *(by_pattern if isinstance(by_pattern, dict) else ()), schema.get("x-guidance")]
    return sum(len(part if isinstance(part, str) else json.dumps(part)) for part in found if part)


def _check_pattern(pattern: str, field_name: str) -> None:
    if len(pattern) > MAX_PATTERN_CHARS:
        raise InvalidField(field_name, f"has {len(pattern)} characters; at most {MAX_PATTERN_CHARS} are taken")


def _check_multiple(value: object, field_name: str) -> None:
    if isinstance(value, int | float):
        digits = re.sub(r"e.*|\D", "", repr(value)).strip("0")
        if len(digits) > 5 or int(digits or 0) > MAX_MULTIPLE_OF:
            raise InvalidField(
                field_name, f"multipleOf may have no more than {MAX_MULTIPLE_OF} as its digits, got {value!r:.40}"
            )
