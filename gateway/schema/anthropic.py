"""A request of Anthropic's Messages API, as the chat that it asks for."""

import json
from typing import Final

import msgspec

from gateway.schema.body import decode_object
from gateway.schema.chat import ChatRequest
from gateway.schema.messages import readers_of
from gateway.schema.options import MAX_MAX_TOKENS, RequestLimits
from gateway.schema.reader import MAX_LABEL_CHARS, FieldReader
from gateway.schema.translation import Translation
from gateway.schema.wording import kind, short
from streamkv.errors import InvalidField

_ROLES: Final = ("user", "assistant", "system")
_TOOL_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
"""Anthropic's word → that of a chat."""
_THINKING: Final = ("enabled", "adaptive", "disabled")


class MessageRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/messages."""

    chat: ChatRequest
    names: Translation
    """Names errors of the engine as the client named what they are about."""


def parse_message(body: bytes, limits: RequestLimits) -> MessageRequest:
    """POST /v1/messages. Raises InvalidField."""
    reader = FieldReader(decode_object(body))
    chat = Translation()
    _read_conversation(reader, chat)
    max_tokens = reader.integer("max_tokens", 1, MAX_MAX_TOKENS)
    if max_tokens is None:
        raise InvalidField("max_tokens", "is missing; send how many tokens the answer may have")
    chat.put("max_tokens", max_tokens, "max_tokens")
    chat.put("stop", reader.take("stop_sequences"), "stop_sequences")
    chat.pass_on(reader)
    inner = FieldReader(reader.mapping("metadata"), "metadata.")
    chat.put("user", inner.text("user_id", MAX_LABEL_CHARS) or None, "metadata.user_id")
    inner.finish()
    reader.neutral("service_tier", "auto", "standard_only")
    reader.neutral("mcp_servers", [])
    for name in ("container", "context_management", "inference_geo", "diagnostics"):
        reader.neutral(name)
    reader.neutral("speed", "standard")
    reader.finish()
    return MessageRequest(chat=_finished(chat, limits), names=chat)


def parse_count(body: bytes, limits: RequestLimits) -> MessageRequest:
    """POST /v1/messages/count_tokens: what of a message's fields makes the prompt. Raises InvalidField."""
    reader = FieldReader(decode_object(body))
    chat = Translation()
    _read_conversation(reader, chat)
    chat.put("model", reader.take("model"), "model")
    chat.put("chat_template_kwargs", reader.take("chat_template_kwargs"), "chat_template_kwargs")
    reader.finish()
    return MessageRequest(chat=_finished(chat, limits), names=chat)


def _finished(chat: Translation, limits: RequestLimits) -> ChatRequest:
    return chat.chat(limits, max_tokens_field="max_tokens", prompt_field="messages")


def _read_conversation(reader: FieldReader, chat: Translation) -> None:
    """The fields that a message and a count share."""
    _read_system(reader, chat)
    _read_messages(reader, chat)
    _read_tools(reader, chat)
    _read_tool_choice(reader, chat)
    _read_output_config(reader, chat)
    _read_thinking(reader, chat)
    reader.ignored("cache_control")  # prompts are found in the cache without being asked for


def _read_system(reader: FieldReader, chat: Translation) -> None:
    """system: a text, or text blocks."""
    value = reader.take("system")
    if value is None or value == []:
        return
    if isinstance(value, list):
        value = [_text_part(_Block(block, f"system[{index}]")) for index, block in enumerate(value)]
    elif not isinstance(value, str):
        reader.refuse("system", f"must be text or a list of text blocks, got {kind(value)}")
    chat.add_message({"role": "system", "content": value}, "system")


def _read_messages(reader: FieldReader, chat: Translation) -> None:
    value = reader.take("messages")
    if value is None:
        reader.refuse("messages", "is missing; send a list of messages")
    for path, inner in readers_of(value, "messages"):
        role = inner.take("role")
        if role not in _ROLES:
            inner.refuse("role", f"must be one of {', '.join(_ROLES)}, got {short(repr(role))}")
        content = inner.take("content")
        inner.finish()
        if isinstance(content, str):
            chat.add_message({"role": role, "content": content}, path)
        elif not isinstance(content, list) or not content:
            inner.refuse("content", f"must be text or a list of blocks, got {kind(content)}")
        else:
            blocks = [_Block(block, f"{path}.content[{place}]") for place, block in enumerate(content)]
            if role == "assistant":
                _add_assistant(blocks, path, chat)
            else:
                _add_blocks(blocks, str(role), path, chat)


class _Block:
    """A block of content and the reader of its fields."""

    def __init__(self, value: object, path: str) -> None:
        if not isinstance(value, dict):
            raise InvalidField(path, f'must be a block such as {{"type": "text", "text": …}}, got {kind(value)}')
        self.path = path
        self.reader = FieldReader(value, path + ".")
        self.type = self.reader.take("type")
        self.reader.ignored("cache_control")

    def refuse_type(self, *allowed: str) -> InvalidField:
        return InvalidField(
            self.path + ".type",
            f"must be {' or '.join(allowed)}; this model takes no others, got {short(repr(self.type))}",
        )


def _text_part(block: _Block) -> dict[str, object]:
    if block.type != "text":
        raise block.refuse_type("text")
    text = block.reader.take("text")
    if not isinstance(text, str):
        block.reader.refuse("text", f"must be text, got {kind(text)}")
    block.reader.ignored("citations")
    block.reader.finish()
    return {"type": "text", "text": text}


def _add_blocks(blocks: list[_Block], role: str, path: str, chat: Translation) -> None:
    """A user's blocks: texts are one message, and each result of a tool is one of its own, in their order."""
    texts: list[dict[str, object]] = []
    for block in blocks:
        if block.type == "tool_result" and role == "user":
            if texts:
                chat.add_message({"role": role, "content": texts}, path)
                texts = []
            _add_result(block, chat)
        elif block.type != "text" and role == "user":
            raise block.refuse_type("text", "tool_result")
        else:
            texts.append(_text_part(block))
    if texts:
        chat.add_message({"role": role, "content": texts}, path)


def _add_result(block: _Block, chat: Translation) -> None:
    content = block.reader.take("content")
    if isinstance(content, list):
        content = [_text_part(_Block(part, f"{block.path}.content[{index}]")) for index, part in enumerate(content)]
    elif content is not None and not isinstance(content, str):
        block.reader.refuse("content", f"must be text or a list of text blocks, got {kind(content)}")
    call_id = block.reader.text("tool_use_id", MAX_LABEL_CHARS)
    block.reader.boolean("is_error", default=False)  # what went wrong stands in the content
    block.reader.finish()
    chat.add_message({"role": "tool", "content": content or "", "tool_call_id": call_id}, block.path)
    chat.rename_in_last("tool_call_id", f"{block.path}.tool_use_id")


def _add_assistant(blocks: list[_Block], path: str, chat: Translation) -> None:
    """An assistant's blocks: one message with its thinking, its texts and its calls."""
    texts: list[dict[str, object]] = []
    thinking: list[str] = []
    calls: list[_Block] = []
    for block in blocks:
        if block.type == "tool_use":
            calls.append(block)
        elif block.type in ("thinking", "redacted_thinking"):
            thinking.append(block.reader.text("thinking"))
            block.reader.ignored("signature", "data")
            block.reader.finish()
        elif block.type == "text":
            texts.append(_text_part(block))
        else:
            raise block.refuse_type("text", "thinking", "tool_use")
    chat.add_reasoning("\n".join(filter(None, thinking)))
    chat.add_message({"role": "assistant", "content": texts or None}, path)
    for block in calls:
        arguments = block.reader.mapping("input")
        call: dict[str, object] = {
            "id": block.reader.text("id", MAX_LABEL_CHARS),
            "type": "function",
            "function": {"name": block.reader.take("name"), "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        block.reader.finish()
        chat.add_tool_call(call, block.path)


def _read_tools(reader: FieldReader, chat: Translation) -> None:
    """tools: functions with an input_schema. Tools that Anthropic runs itself are refused by their type."""
    value = reader.take("tools")
    if value is None:
        return
    if not isinstance(value, list):
        reader.refuse("tools", f"must be a list of tools, got {kind(value)}")
    tools: list[object] = []
    for index, tool in enumerate(value):
        path = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise InvalidField(path, f"must be an object with name and input_schema, got {kind(tool)}")
        inner = FieldReader(tool, path + ".")
        inner.neutral("type", "custom", instead="this server runs no tools")
        function = {
            "name": inner.take("name"),
            "description": inner.take("description"),
            "parameters": inner.take("input_schema"),
            "strict": inner.take("strict"),
        }
        inner.ignored("cache_control", "input_examples", "eager_input_streaming")
        inner.neutral("defer_loading", False)
        inner.finish()
        tools.append({"type": "function", "function": {k: v for k, v in function.items() if v is not None}})
        chat.rename(f"{path}.function", path)
        chat.rename(f"{path}.function.parameters", f"{path}.input_schema")
    chat.put("tools", tools or None, "tools")


def _read_tool_choice(reader: FieldReader, chat: Translation) -> None:
    """tool_choice: an object with the type auto, any, none, or tool and its name."""
    if "tool_choice" not in reader:
        reader.take("tool_choice")
        return
    inner = FieldReader(reader.mapping("tool_choice"), "tool_choice.")
    wanted = inner.take("type")
    if wanted == "tool":
        chosen: object = {"type": "function", "function": {"name": inner.take("name")}}
        chat.rename("tool_choice.function", "tool_choice")
    elif isinstance(wanted, str) and wanted in _TOOL_CHOICES:
        chosen = _TOOL_CHOICES[wanted]
    else:
        inner.refuse("type", f"must be one of {', '.join(_TOOL_CHOICES)}, tool; got {short(repr(wanted))}")
    if inner.boolean("disable_parallel_tool_use", default=False):
        chat.put("parallel_tool_calls", False, "tool_choice.disable_parallel_tool_use")
    inner.finish()
    chat.put("tool_choice", chosen, "tool_choice")


def _read_output_config(reader: FieldReader, chat: Translation) -> None:
    """output_config.format: json_schema with its schema. effort asks for what this server does not vary."""
    inner = FieldReader(reader.mapping("output_config"), "output_config.")
    inner.neutral("effort", "high")
    form = inner.mapping("format")
    inner.finish()
    if not form:
        return
    fields = FieldReader(form, "output_config.format.")
    if (wanted := fields.take("type")) != "json_schema":
        fields.refuse("type", f"must be json_schema, got {short(repr(wanted))}")
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": fields.take("schema")}}
    fields.finish()
    chat.put("response_format", schema, "output_config.format")
    chat.rename("response_format.json_schema", "output_config.format")


def _read_thinking(reader: FieldReader, chat: Translation) -> None:
    """thinking: enabled, adaptive or disabled, as the template's enable_thinking, where it has that. There is no budget
    of its own: thoughts are part of max_tokens."""
    inner = FieldReader(reader.mapping("thinking"), "thinking.")
    wanted = inner.take("type")
    if wanted not in (None, *_THINKING):
        inner.refuse("type", f"must be one of {', '.join(_THINKING)}, got {short(repr(wanted))}")
    inner.ignored("budget_tokens")
    inner.neutral("display", "summarized")
    inner.finish()
    if wanted is not None:
        chat.set_template_default("enable_thinking", wanted != "disabled")
