"""/tokenize and /detokenize."""

import json

import pytest

from gateway.chat_template import ChatMessage
from gateway.schema.tokens import parse_detokenize, parse_tokenize
from streamkv.errors import InvalidField
from tests.support.request_bodies import LIMITS, MESSAGES


def test_tokenize_takes_a_prompt_or_messages() -> None:
    got = parse_tokenize(b'{"prompt": "x", "add_special_tokens": false, "return_token_strs": true}', LIMITS)
    assert (got.prompt, got.messages, got.add_special_tokens, got.return_token_strs) == ("x", None, False, True)
    got = parse_tokenize(json.dumps({"messages": MESSAGES, "model": "m"}).encode(), LIMITS)
    assert (got.prompt, got.messages, got.model) == (None, (ChatMessage("user", "hi"),), "m")
    for body, field in (
        (b"{}", "prompt"),
        (b'{"prompt": "x", "messages": [{"role": "user", "content": ""}]}', "prompt"),
        (b'{"prompt": [1]}', "prompt"),
        (b'{"prompt": "x", "x": 1}', "x"),
        (b'{"messages": [{"role": "user", "content": ""}], "add_special_tokens": true}', "add_special_tokens"),
    ):
        with pytest.raises(InvalidField) as caught:
            parse_tokenize(body, LIMITS)
        assert caught.value.field == field


def test_detokenize_takes_ids() -> None:
    assert parse_detokenize(b'{"tokens": [1, 2], "model": "m"}', LIMITS).tokens == [1, 2]
    assert parse_detokenize(b'{"tokens": []}', LIMITS).tokens == []
    for body, field in (
        (b"{}", "tokens"),
        (b'{"tokens": "x"}', "tokens"),
        (b'{"tokens": [1, 1000]}', "tokens[1]"),
        (b'{"tokens": [1], "x": 1}', "x"),
    ):
        with pytest.raises(InvalidField) as caught:
            parse_detokenize(body, LIMITS)
        assert caught.value.field == field
