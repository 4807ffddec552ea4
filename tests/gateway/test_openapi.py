"""The OpenAPI document says what the parsers do: the same fields, the same rules, every route."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import schemathesis

from docs.api import page
from gateway.app import make_app
from gateway.openapi.document import document
from gateway.openapi.rules import SUPPORT
from gateway.schema.anthropic import parse_count, parse_message
from gateway.schema.chat import parse_chat
from gateway.schema.completion import parse_completion
from gateway.schema.options import RequestLimits
from gateway.schema.reader import FieldReader
from gateway.schema.response import parse_response
from gateway.schema.tokens import parse_detokenize, parse_tokenize
from streamkv.config import GatewayConfig
from streamkv.errors import InvalidField
from tests.support.running_gateway import small_tokenizer

LIMITS: Final = RequestLimits(vocab_size=100, max_model_len=0)
DOCUMENT: Final = document()
Parse = Callable[[bytes, RequestLimits], Any]

_MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: Final[dict[str, tuple[Parse, dict[str, object]]]] = {
    "/v1/chat/completions": (parse_chat, {"messages": _MESSAGES}),
    "/v1/completions": (parse_completion, {"prompt": "hi"}),
    "/v1/responses": (parse_response, {"input": "hi"}),
    "/v1/messages": (parse_message, {"messages": _MESSAGES, "max_tokens": 5}),
    "/v1/messages/count_tokens": (parse_count, {"messages": _MESSAGES}),
    "/tokenize": (parse_tokenize, {"prompt": "hi"}),
    "/detokenize": (parse_detokenize, {"tokens": [1]}),
}
"""Path → its parser, and the shortest body that it takes."""

INNER: Final[list[tuple[str, dict[str, object], str, str]]] = [
    (
        "/v1/chat/completions",
        {"stream": True, "stream_options": {"include_usage": True}},
        "stream_options.",
        "properties.stream_options",
    ),
    (
        "/v1/chat/completions",
        {"structured_outputs": {"regex": "a"}},
        "structured_outputs.",
        "properties.structured_outputs",
    ),
    (
        "/v1/chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
        "response_format.json_schema.",
        "properties.response_format.anyOf.2.properties.json_schema",
    ),
    ("/v1/responses", {"text": {"format": {"type": "text"}}}, "text.", "properties.text"),
    ("/v1/responses", {"reasoning": {"summary": "auto"}}, "reasoning.", "properties.reasoning"),
    (
        "/v1/responses",
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        "stream_options.",
        "properties.stream_options",
    ),
    ("/v1/messages", {"thinking": {"type": "disabled"}}, "thinking.", "properties.thinking"),
    ("/v1/messages", {"output_config": {"effort": "high"}}, "output_config.", "properties.output_config"),
    ("/v1/messages", {"metadata": {"user_id": "x"}}, "metadata.", "properties.metadata"),
]
"""Path, what of a body holds an object, how its fields begin, and where the document has it."""

NEEDED: Final[dict[str, dict[str, object]]] = {
    "length_penalty": {"use_beam_search": True},
    "attach_grace_s": {"stream": True},
}
"""What a field needs beside it."""


def schema_of(path: str) -> dict[str, Any]:
    content = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]  # type: ignore[index]
    schema: dict[str, Any] = content["application/json"]["schema"]
    return schema


class Recorder:
    """The rules by which a body's fields were taken: path → name → (kind of rule, its arguments)."""

    def __init__(self) -> None:
        self.rules: dict[str, dict[str, tuple[str, tuple[Any, ...]]]] = {}
        self._watched: set[int] = set()

    def note(self, reader: FieldReader, name: str, kind: str, *arguments: Any) -> None:
        self.rules.setdefault(reader.path(""), {}).setdefault(name, (kind, arguments))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Records what the first reader of each path does: later ones read a translated body."""
    recorder = Recorder()
    firsts: dict[str, FieldReader] = {}
    begin = FieldReader.__init__

    def init(self: FieldReader, fields: dict[str, object], path: str = "") -> None:
        begin(self, fields, path)
        firsts.setdefault(path, self)

    def record(method: str) -> None:
        original = getattr(FieldReader, method)

        def call(self: FieldReader, name: str, *arguments: Any, **named: Any) -> Any:
            if firsts.get(self.path("")) is self:
                for each in (name, *arguments) if method == "ignored" else (name,):
                    recorder.note(self, each, method, *arguments, *(v for k, v in named.items() if k != "instead"))
            return original(self, name, *arguments, **named)

        monkeypatch.setattr(FieldReader, method, call)

    monkeypatch.setattr(FieldReader, "__init__", init)
    for method in ("take", "boolean", "integer", "number", "text", "mapping", "token_ids", "neutral", "ignored"):
        record(method)
    yield recorder


def parse(path: str, **more: object) -> Any:
    parser, body = BODIES[path]
    return parser(json.dumps({**body, **more}).encode(), LIMITS)


def agree(name: str, rule: tuple[str, tuple[Any, ...]], described: Mapping[str, Any]) -> None:
    """What the document says of a field is the rule by which it was taken."""
    kind, arguments = rule
    support = described.get(SUPPORT, "works")
    match kind:
        case "neutral":
            assert support == "refused", name
            accepted = described.get("enum", [None])
            assert accepted == [*arguments, None], name
        case "ignored":
            assert support == "ignored", name
        case "boolean":
            assert (described["type"], described["default"]) == (["boolean", "null"], arguments[0]), name
        case "integer":
            assert (described["minimum"], described["maximum"]) == arguments[:2], name
            assert "integer" in described["type"], name
        case "number":
            assert described["default"] == arguments[0] and "number" in described["type"], name
        case "text":
            assert described.get("maxLength") == (arguments[0] if arguments else None), name
            assert "string" in described["type"], name
    if kind not in ("neutral", "ignored"):
        assert support == "works", name


@pytest.mark.parametrize("path", BODIES)
def test_the_documented_fields_are_those_that_are_taken_and_by_the_same_rules(path: str, recorder: Recorder) -> None:
    parse(path)
    if path == "/tokenize":
        parse_tokenize(json.dumps({"messages": _MESSAGES, "add_special_tokens": False}).encode(), LIMITS)
        recorder.rules[""]["messages"] = ("take", ())
    taken, described = recorder.rules[""], schema_of(path)["properties"]
    assert set(described) == set(taken)
    for name, rule in taken.items():
        agree(name, rule, described[name])


@pytest.mark.parametrize(("path", "more", "begins", "place"), INNER)
def test_so_are_the_fields_inside_fields(
    path: str, more: dict[str, object], begins: str, place: str, recorder: Recorder
) -> None:
    parse(path, **more)
    described: Any = schema_of(path)
    for step in place.split("."):
        described = described[int(step) if step.isdigit() else step]
    taken = recorder.rules[begins]
    assert set(described["properties"]) == set(taken)
    for name, rule in taken.items():
        agree(name, rule, described["properties"][name])


def fields_where(has: Callable[[dict[str, Any]], bool]) -> list[tuple[str, str]]:
    return [
        (path, name)
        for path in BODIES
        for name, described in schema_of(path)["properties"].items()
        if described.get(SUPPORT) == "works" and has(described)
    ]


@pytest.mark.parametrize(("path", "name"), fields_where(lambda field: "number" in field.get("type", "")))
def test_numbers_are_taken_within_their_bounds_only(path: str, name: str) -> None:
    described = schema_of(path)["properties"][name]
    low, high = described.get("minimum", described.get("exclusiveMinimum")), described["maximum"]
    beside = NEEDED.get(name, {})
    parse(path, **{name: high}, **beside)
    refused = [high + 0.01, low - 0.01]
    if "minimum" in described:
        parse(path, **{name: low}, **beside)
    else:
        refused.append(low)
    for value in refused:
        with pytest.raises(InvalidField) as caught:
            parse(path, **{name: value}, **beside)
        assert caught.value.field == name


@pytest.mark.parametrize(("path", "name"), fields_where(lambda field: "default" in field))
def test_a_documented_default_is_what_leaving_out_means(path: str, name: str) -> None:
    value = schema_of(path)["properties"][name]["default"]
    beside = {"stream": True} if name == "stream_options" else {}
    said, left_out = parse(path, **{name: value}, **beside), parse(path, **beside)
    assert getattr(said, "chat", said) == getattr(left_out, "chat", left_out)


@pytest.mark.parametrize("path", BODIES)
def test_null_is_the_same_as_leaving_out(path: str) -> None:
    required = schema_of(path).get("required", ["prompt"])
    nulls = {name: None for name in schema_of(path)["properties"] if name not in required}
    said, left_out = parse(path, **nulls), parse(path)
    assert getattr(said, "chat", said) == getattr(left_out, "chat", left_out)


@pytest.mark.parametrize("path", BODIES)
def test_what_is_required_is_missed_by_its_name(path: str) -> None:
    parser, body = BODIES[path]
    for name in schema_of(path).get("required", ()):
        with pytest.raises(InvalidField) as caught:
            parser(json.dumps({key: value for key, value in body.items() if key != name}).encode(), LIMITS)
        assert caught.value.field == name and "missing" in caught.value.message


def test_every_route_is_described_and_nothing_else() -> None:
    app = make_app(GatewayConfig(), small_tokenizer, endpoint="ipc:///tmp/nobody")
    routes = {
        (re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.resource.canonical), route.method.lower())
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    described = {
        (path, method)
        for path, operations in DOCUMENT["paths"].items()  # type: ignore[attr-defined]
        for method in operations
    }
    assert described == routes


def test_the_document_is_valid_openapi() -> None:
    schemathesis.openapi.from_dict(json.loads(json.dumps(DOCUMENT))).validate()


def test_the_page_of_the_api_is_current() -> None:
    """Made by `python -m docs.api`."""
    page_text = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    assert page_text == page()
