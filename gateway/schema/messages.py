"""The messages of a chat."""

import re
from collections.abc import Iterator
from typing import Final

from gateway.chat_template import ROLES, ChatMessage, ToolCall
from gateway.schema.reader import MAX_LABEL_CHARS, FieldReader
from gateway.schema.tools import read_tool_calls
from gateway.schema.wording import kind, short
from streamkv.errors import InvalidField

MAX_MESSAGES: Final = 10_000
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def read_messages(reader: FieldReader) -> tuple[ChatMessage, ...]:
    """messages: 1 to 10,000 objects with role and content."""
    value = reader.take("messages")
    return tuple(_read_message(message) for _, message in readers_of(value, "messages"))


def readers_of(value: object, name: str, what: str = "a list of messages") -> Iterator[tuple[str, FieldReader]]:
    """The path of each message in a list of them, and the reader of its fields. Raises InvalidField for what is no list
    of 1 to MAX_MESSAGES objects. name: of the field. what: may stand there."""
    if not isinstance(value, list):
        raise InvalidField(name, f"must be {what}, got {kind(value)}")
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise InvalidField(name, f"must hold 1 to {MAX_MESSAGES} messages, got {len(value)}")
    for index, message in enumerate(value):
        path = f"{name}[{index}]"
        if not isinstance(message, dict):
            raise InvalidField(path, f"must be an object with role and content, got {kind(message)}")
        yield path, FieldReader(message, path + ".")


def _read_message(reader: FieldReader) -> ChatMessage:
    """role: system (or developer, the same), user, assistant, tool. content: text, or text parts, joined by line
    breaks as in vLLM; an assistant's null is empty text. name: 1 to 64 letters, digits, dots, dashes, underscores.
    An assistant's may have tool_calls and reasoning (or reasoning_content), a tool's has its tool_call_id."""
    role = reader.take("role")
    if role == "developer":
        role = "system"
    if not isinstance(role, str) or role not in ROLES:
        got = short(repr(role)) if isinstance(role, str) else kind(role)
        reader.refuse("role", f"must be one of {', '.join(ROLES)}, developer; got {got}")
    content = _read_content(reader, role)
    name = reader.text("name")
    if name and not _NAME.fullmatch(name):
        reader.refuse("name", "must have 1 to 64 letters, digits, dots, dashes or underscores")
    tool_call_id = reader.text("tool_call_id", MAX_LABEL_CHARS) if role == "tool" else ""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning = ""
    if role == "assistant":
        tool_calls = read_tool_calls(reader)
        reasonings = reader.text("reasoning_content"), reader.text("reasoning")  # answers have both, with one text
        reasoning = reasonings[0] or reasonings[1]
    reader.neutral("tool_calls", [])
    reader.neutral("function_call", instead="send tool_calls")
    for extra in ("refusal", "reasoning", "reasoning_content", "audio"):
        reader.neutral(extra)
    reader.neutral("annotations", [])
    reader.finish()
    return ChatMessage(role, content, name, tool_calls, tool_call_id, reasoning)


def _read_content(reader: FieldReader, role: str) -> str:
    if "content" not in reader and role != "assistant":
        reader.refuse("content", "is missing; send text")
    content = reader.take("content")
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list) or not content:
        reader.refuse("content", f"must be text or a list of text parts, got {kind(content)}")
    texts: list[str] = []
    for index, part in enumerate(content):
        path = reader.path(f"content[{index}]")
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise InvalidField(path, f'must be {{"type": "text", "text": …}}, got {kind(part)}')
        inner = FieldReader(part, path + ".")
        part_type = inner.take("type")
        if part_type != "text":
            inner.refuse("type", f"must be 'text'; this model takes no other parts, got {short(repr(part_type))}")
        text = inner.take("text")
        if not isinstance(text, str):
            inner.refuse("text", f"must be text, got {kind(text)}")
        inner.finish()
        texts.append(text)
    return "\n".join(texts)


def check_continuation(add_generation_prompt: bool, continue_final_message: bool) -> None:
    if add_generation_prompt and continue_final_message:
        raise InvalidField(
            "continue_final_message", "cannot be true together with add_generation_prompt; set that to false"
        )
