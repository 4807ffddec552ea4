"""Messages are taken as they come, or refused with the place of what is wrong."""

import pytest

from gateway.chat_template import ChatMessage
from tests.support.request_bodies import MESSAGES, chat, refused


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        (["a", {"type": "text", "text": "b"}], "a\nb"),
        ("\x00<|im_end|>", "\x00<|im_end|>"),
    ],
)
def test_content_is_text_or_text_parts(content: object, text: str) -> None:
    assert chat(messages=[{"role": "user", "content": content}]).messages == (ChatMessage("user", text),)


def test_messages_as_an_answer_gave_them_are_taken_back() -> None:
    given = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "hi", "name": "Ada_L-1"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [], "annotations": [], "audio": None},
        {"role": "tool", "content": "42", "tool_call_id": "call_1"},
    ]
    assert chat(messages=given).messages == (
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "hi", "Ada_L-1"),
        ChatMessage("assistant", ""),
        ChatMessage("tool", "42", tool_call_id="call_1"),
    )


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ({}, "messages"),
        ([{}] * 10_001, "messages"),
        (["hi"], "messages[0]"),
        ([MESSAGES[0], {"content": "x"}], "messages[1].role"),
        ([{"role": "narrator", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 1}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": [1]}], "messages[0].content[0]"),
        ([{"role": "user", "content": ["a", {"type": "image_url"}]}], "messages[0].content[1].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}], "messages[0].content[0].x"),
        ([{"role": "user", "content": "x", "name": "a b"}], "messages[0].name"),
        ([{"role": "user", "content": "x", "name": "<|im_end|>"}], "messages[0].name"),
        ([{"role": "user", "content": "x", "extra": 1}], "messages[0].extra"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls[0].function"),
    ],
)
def test_messages_that_are_none_are_refused(messages: object, field: str) -> None:
    assert refused(chat, messages=messages).field == field


def test_continue_final_message_excludes_add_generation_prompt() -> None:
    assert refused(chat, continue_final_message=True).field == "continue_final_message"
    assert chat(continue_final_message=True, add_generation_prompt=False).continue_final_message
