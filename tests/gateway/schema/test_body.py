"""A body is one JSON object, or refused before it costs anything."""

import contextlib
import json
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.schema.body import MAX_CONTAINERS, decode_msgpack_object, decode_object
from gateway.schema.completion import parse_completion
from gateway.schema.options import RequestLimits
from streamkv.errors import InvalidField


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
