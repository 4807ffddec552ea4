"""Bodies of chats and completions, parsed with one change each."""

import json

import pytest

from gateway.schema.chat import ChatRequest, parse_chat
from gateway.schema.completion import CompletionRequest, parse_completion
from gateway.schema.options import RequestLimits
from streamkv.errors import InvalidField

LIMITS = RequestLimits(vocab_size=1000, max_model_len=256)
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: object) -> ChatRequest:
    return parse_chat(json.dumps({"messages": MESSAGES, **fields}).encode(), LIMITS)


def completion(**fields: object) -> CompletionRequest:
    return parse_completion(json.dumps({"prompt": "hi", **fields}).encode(), LIMITS)


def refused(parse: object, **fields: object) -> InvalidField:
    assert callable(parse)
    with pytest.raises(InvalidField) as caught:
        parse(**fields)
    return caught.value
