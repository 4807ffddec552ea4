"""A WebSocket's `generate` is the same as a body."""

import pytest

from gateway.schema.chat import ChatRequest
from gateway.schema.completion import CompletionRequest
from gateway.schema.generate import generate_from_fields
from streamkv.errors import InvalidField
from tests.support.request_bodies import LIMITS, MESSAGES


def test_a_websocket_generate_is_a_chat_or_a_completion_and_a_stream() -> None:
    got = generate_from_fields({"messages": MESSAGES, "max_tokens": 3}, LIMITS)
    assert isinstance(got, ChatRequest)
    assert got.options.stream
    got = generate_from_fields({"prompt": [1, 2], "stream_options": {"include_usage": True}}, LIMITS)
    assert isinstance(got, CompletionRequest)
    assert got.options.include_usage
    cases: list[tuple[dict[str, object], str]] = [
        ({"messages": MESSAGES, "prompt": "x"}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "x", "stream": False}, "stream"),
        ({"prompt": "x", "top_k": "x"}, "top_k"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"messages": MESSAGES, "use_beam_search": True}, "use_beam_search"),
        ({"prompt": ["x", "y"]}, "prompt"),
    ]
    for fields, field in cases:
        with pytest.raises(InvalidField) as caught:
            generate_from_fields(fields, LIMITS)
        assert caught.value.field == field
