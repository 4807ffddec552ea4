"""A request of OpenAI's Responses API, as the chat that it asks for. Nothing is stored: `input` is all there is."""

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
from streamkv.sampling import MAX_LOGPROBS

MAX_METADATA: Final = 16
MAX_METADATA_KEY_CHARS: Final = 64
MAX_METADATA_CHARS: Final = 512
_ROLES: Final = ("user", "assistant", "system", "developer")
_TEXT_PARTS: Final = ("input_text", "output_text", "text")
_ITEMS: Final = ("message", "function_call", "function_call_output", "reasoning")
_LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDABLE: Final = (_LOGPROBS, "reasoning.encrypted_content")
_STATUSES: Final = ("in_progress", "completed", "incomplete")


class ResponseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/responses."""

    chat: ChatRequest
    repeated: dict[str, object]
    """Fields that the answer repeats, defaults filled in."""
    names: Translation
    """Names errors of the engine as the client named what they are about."""


def parse_response(body: bytes, limits: RequestLimits) -> ResponseRequest:
    """POST /v1/responses. Raises InvalidField."""
    reader = FieldReader(decode_object(body))
    chat = Translation()
    if "input" not in reader:
        raise InvalidField("input", "is missing; send text or a list of messages")
    instructions = reader.text_or_none("instructions")
    if instructions is not None:
        chat.add_message({"role": "system", "content": instructions}, "instructions")
    _read_input(reader, chat)
    max_output_tokens = reader.integer("max_output_tokens", 1, MAX_MAX_TOKENS)
    chat.put("max_completion_tokens", max_output_tokens, "max_output_tokens")
    _read_stream_options(reader)
    chat.pass_on(reader)
    text_format = _read_text(reader, chat)
    metadata = _read_metadata(reader)
    user = reader.text("user", MAX_LABEL_CHARS) or None
    reader.neutral("store", False, instead="responses are not kept here")
    reader.neutral("previous_response_id", instead="responses are not kept here; send the whole input")
    reader.neutral("conversation", instead="conversations are not kept here; send the whole input")
    reader.neutral("background", False)
    reader.neutral("background_options")
    reader.neutral("prompt", instead="prompts are not kept here")
    reader.neutral("truncation", "disabled")
    _read_include(reader, chat)
    reader.neutral("max_tool_calls")
    tools = _read_tools(reader, chat)
    tool_choice = _read_tool_choice(reader, chat)
    _read_reasoning(reader, chat)
    reader.neutral("service_tier", "auto", "default")
    for name in ("context_management", "moderation", "image", "access_programs"):
        reader.neutral(name)
    reader.ignored("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options")
    reader.finish()
    request = chat.chat(limits, max_tokens_field="max_output_tokens", prompt_field="input")
    repeated: dict[str, object] = {
        "instructions": instructions,
        "max_output_tokens": max_output_tokens,
        "metadata": metadata,
        "parallel_tool_calls": request.tool_use.parallel,
        "temperature": request.options.temperature,
        "top_p": request.options.top_p,
        "text": {"format": text_format},
        "tools": tools,
        "tool_choice": tool_choice,
        "truncation": "disabled",
        "user": user,
    }
    return ResponseRequest(chat=request, repeated=repeated, names=chat)


def _read_stream_options(reader: FieldReader) -> None:
    inner = FieldReader(reader.mapping("stream_options"), "stream_options.")
    inner.neutral("include_obfuscation", False)
    inner.finish()


def _read_text(reader: FieldReader, chat: Translation) -> dict[str, object]:
    """text.format: text, json_object or json_schema, whose fields stand in it and not one level below as in a chat."""
    inner = FieldReader(reader.mapping("text"), "text.")
    text_format = inner.mapping("format") or {"type": "text"}
    inner.neutral("verbosity", "medium")
    inner.finish()
    if text_format.get("type") == "json_schema":
        schema = {"type": "json_schema", "json_schema": _without_type(text_format)}
        chat.put("response_format", schema, "text.format")
        chat.rename("response_format.json_schema", "text.format")
    else:
        chat.put("response_format", text_format, "text.format")
    return text_format


def _read_metadata(reader: FieldReader) -> dict[str, object]:
    """metadata: up to 16 short texts, which the answer repeats."""
    metadata = reader.mapping("metadata")
    if len(metadata) > MAX_METADATA:
        reader.refuse("metadata", f"takes at most {MAX_METADATA} entries, got {len(metadata)}")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_CHARS:
            reader.refuse("metadata", f"takes keys of at most {MAX_METADATA_KEY_CHARS} characters, got {len(key)}")
        if not isinstance(value, str):
            reader.refuse(f"metadata.{key}", f"must be text, got {kind(value)}")
        if len(value) > MAX_METADATA_CHARS:
            reader.refuse(f"metadata.{key}", f"must have at most {MAX_METADATA_CHARS} characters, got {len(value)}")
    return metadata


def _read_tools(reader: FieldReader, chat: Translation) -> list[object]:
    """tools: functions, whose fields stand in the tool and not one level below as in a chat."""
    value = reader.take("tools")
    if value is None:
        return []
    if not isinstance(value, list):
        reader.refuse("tools", f"must be a list of functions, got {kind(value)}")
    tools: list[object] = []
    for index, tool in enumerate(value):
        path = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise InvalidField(path, f"must be an object with type and name, got {kind(tool)}")
        inner = FieldReader(tool, path + ".")
        if (tool_type := inner.take("type")) != "function":
            inner.refuse("type", f"must be function; this server runs no tools, got {short(repr(tool_type))}")
        tools.append({"type": "function", "function": _without_type(tool)})
        chat.rename(f"{path}.function", path)
    chat.put("tools", tools, "tools")
    return value


def _without_type(fields: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if name != "type"}


def _read_tool_choice(reader: FieldReader, chat: Translation) -> object:
    """tool_choice: none, auto, required, or {"type": "function", "name": …}."""
    value = reader.take("tool_choice")
    if isinstance(value, dict):
        inner = FieldReader(value, "tool_choice.")
        if (wanted := inner.take("type")) != "function":
            inner.refuse("type", f"must be function, got {short(repr(wanted))}")
        chat.put("tool_choice", {"type": "function", "function": _without_type(value)}, "tool_choice")
        chat.rename("tool_choice.function", "tool_choice")
    else:
        chat.put("tool_choice", value, "tool_choice")
    return "auto" if value is None else value


def _read_reasoning(reader: FieldReader, chat: Translation) -> None:
    """reasoning.effort, as a chat's reasoning_effort. A summary is never made: the reasoning itself is sent."""
    inner = FieldReader(reader.mapping("reasoning"), "reasoning.")
    chat.put("reasoning_effort", inner.take("effort"), "reasoning.effort")
    inner.neutral("summary", "auto")
    inner.neutral("generate_summary", "auto")
    inner.finish()


def _read_include(reader: FieldReader, chat: Translation) -> None:
    """include: log probabilities, with so many beside each as top_logprobs says. Reasoning is sent as it is, so nobody
    needs it encrypted."""
    value = reader.take("include")
    if not isinstance(value, list | None):
        reader.refuse("include", f"must be a list, got {kind(value)}")
    for index, name in enumerate(value or []):
        if name not in _INCLUDABLE:
            reader.refuse(f"include[{index}]", f"must be one of {', '.join(_INCLUDABLE)}, got {short(repr(name))}")
    wants_logprobs = value is not None and _LOGPROBS in value
    num_top = reader.integer("top_logprobs", 0, MAX_LOGPROBS)
    if num_top and not wants_logprobs:
        reader.refuse("top_logprobs", f"needs {_LOGPROBS} in include")
    if wants_logprobs:
        chat.put("logprobs", True, "include")
        chat.put("top_logprobs", num_top, "top_logprobs")


def _read_input(reader: FieldReader, chat: Translation) -> None:
    """input: a text of the user, or a list of items."""
    value = reader.take("input")
    if isinstance(value, str):
        chat.add_message({"role": "user", "content": value}, "input")
        return
    for path, inner in readers_of(value, "input", "text or a list of messages"):
        item_type = inner.take("type")
        match item_type:
            case None | "message":
                _read_message(inner, path, chat)
            case "function_call":
                _read_call(inner, path, chat)
            case "function_call_output":
                _read_call_output(inner, path, chat)
            case "reasoning":
                chat.add_reasoning(_read_reasoning_item(inner, path))
            case _:
                inner.refuse("type", f"must be one of {', '.join(_ITEMS)}, got {short(repr(item_type))}")


def _read_message(reader: FieldReader, path: str, chat: Translation) -> None:
    """role, and content: a text or text parts. What an earlier answer had beside them is taken and not looked at."""
    role = reader.take("role")
    if role not in _ROLES:
        reader.refuse("role", f"must be one of {', '.join(_ROLES)}, got {short(repr(role))}")
    content = reader.take("content")
    if content is None:
        reader.refuse("content", "is missing; send text")
    if isinstance(content, list):
        content = _read_parts(content, f"{path}.content")
    reader.neutral("status", *_STATUSES)
    reader.ignored("id", "phase")
    reader.finish()
    chat.add_message({"role": role, "content": content}, path)


def _read_reasoning_item(reader: FieldReader, path: str) -> str:
    """What an earlier answer thought before it spoke; summaries and encrypted ones are taken and not looked at."""
    content = reader.take("content")
    texts: list[str] = []
    for index, part in enumerate(content if isinstance(content, list) else []):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise InvalidField(f"{path}.content[{index}].text", f"must be text, got {kind(text)}")
        texts.append(text)
    if not isinstance(content, list | None):
        reader.refuse("content", f"must be a list of texts, got {kind(content)}")
    reader.neutral("status", *_STATUSES)
    reader.ignored("id", "summary", "encrypted_content")
    reader.finish()
    return "\n".join(texts)


def _read_call(reader: FieldReader, path: str, chat: Translation) -> None:
    """A call that an earlier answer made: with those beside it, and the text before it, one message of a chat."""
    call: dict[str, object] = {
        "id": reader.text("call_id", MAX_LABEL_CHARS),
        "type": "function",
        "function": {"name": reader.take("name"), "arguments": reader.take("arguments")},
    }
    reader.neutral("status", *_STATUSES)
    reader.ignored("id")
    reader.finish()
    chat.add_tool_call(call, path)


def _read_call_output(reader: FieldReader, path: str, chat: Translation) -> None:
    """What a called function gave: a text, or text parts."""
    output = reader.take("output")
    if isinstance(output, list):
        output = _read_parts(output, f"{path}.output")
    elif not isinstance(output, str):
        reader.refuse("output", f"must be text or a list of text parts, got {kind(output)}")
    message: dict[str, object] = {
        "role": "tool",
        "content": output,
        "tool_call_id": reader.text("call_id", MAX_LABEL_CHARS),
    }
    reader.neutral("status", *_STATUSES)
    reader.ignored("id")
    reader.finish()
    chat.add_message(message, path)
    chat.rename_in_last("content", f"{path}.output")
    chat.rename_in_last("tool_call_id", f"{path}.call_id")


def _read_parts(parts: list[object], path: str) -> list[dict[str, object]]:
    return [_read_part(part, f"{path}[{index}]") for index, part in enumerate(parts)]


def _read_part(value: object, path: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise InvalidField(path, f'must be {{"type": "input_text", "text": …}}, got {kind(value)}')
    reader = FieldReader(value, path + ".")
    part_type = reader.take("type")
    if part_type == "refusal":
        text = reader.take("refusal")
        field = "refusal"
    elif part_type in _TEXT_PARTS:
        text = reader.take("text")
        field = "text"
    else:
        reader.refuse(
            "type", f"must be input_text or output_text; this model takes no others, got {short(repr(part_type))}"
        )
    if not isinstance(text, str):
        reader.refuse(field, f"must be text, got {kind(text)}")
    reader.ignored("annotations", "logprobs", "prompt_cache_breakpoint")
    reader.finish()
    return {"type": "text", "text": text}
