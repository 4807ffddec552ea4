"""Parts of request bodies that stand in more than one place: messages, items, blocks, tools."""

from typing import Final

from gateway.openapi.rules import Schema, either, listed, mapping, record, ref, text
from gateway.schema.tools import MAX_TOOL_CHARS

_STRING: Final[Schema] = {"type": "string"}


def _const(value: str) -> Schema:
    return {"const": value}


_ROLE: Final[Schema] = {"enum": ["user", "assistant", "system", "developer"]}
_CALL_ID: Final = text("Which call it is, or answers.")
_TEXT_PART: Final = record({"type": _const("text"), "text": _STRING}, ["type", "text"])
_RESPONSE_PART: Final[Schema] = {
    "type": "object",
    "properties": {"type": {"enum": ["input_text", "output_text", "text"]}, "text": _STRING},
    "required": ["type", "text"],
}
_CACHE: Final[Schema] = {"description": "Taken without effect."}

PARTS: Final[dict[str, Schema]] = {
    "ChatMessage": record(
        {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": either(
                "A text, or text parts, which are joined by line breaks.",
                _STRING,
                {"type": "array", "items": {"anyOf": [_STRING, _TEXT_PART]}, "minItems": 1},
            ),
            "name": {"type": ["string", "null"], "pattern": "^([A-Za-z0-9_.-]{1,64})?$"},
            "tool_call_id": text("Of a tool's message: the call that it answers.", 1024),
            "tool_calls": listed("Of an assistant's message: the functions that it called.", {"type": "object"}),
            "reasoning_content": text("What the assistant thought; used where the template does."),
        },
        ["role"],
    ),
    "ChatTool": record(
        {
            "type": {"enum": ["function", None]},
            "function": record(
                {
                    "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,128}$"},
                    "description": text("", MAX_TOOL_CHARS),
                    "parameters": mapping("The JSON schema of its arguments, an object."),
                    "strict": {"type": ["boolean", "null"]},
                },
                ["name"],
            ),
        },
        ["function"],
    ),
    "ResponseItem": {
        "anyOf": [
            {
                "description": "A message. What an earlier answer had beside these fields is taken, too.",
                "type": "object",
                "properties": {
                    "type": {"enum": ["message", None]},
                    "role": _ROLE,
                    "content": {"anyOf": [_STRING, {"type": "array", "items": _RESPONSE_PART}]},
                },
                "required": ["role", "content"],
            },
            {
                "description": "A call that an earlier answer made.",
                "type": "object",
                "properties": {
                    "type": _const("function_call"),
                    "call_id": _CALL_ID,
                    "name": _STRING,
                    "arguments": _STRING,
                },
                "required": ["type", "name", "arguments"],
            },
            {
                "description": "What a called function gave.",
                "type": "object",
                "properties": {
                    "type": _const("function_call_output"),
                    "call_id": _CALL_ID,
                    "output": {"anyOf": [_STRING, {"type": "array", "items": _RESPONSE_PART}]},
                },
                "required": ["type", "output"],
            },
            {
                "description": "What an earlier answer thought; left out of the prompt.",
                "type": "object",
                "properties": {"type": _const("reasoning")},
                "required": ["type"],
            },
        ]
    },
    "ResponseTool": record(
        {
            "type": _const("function"),
            "name": _STRING,
            "description": text(""),
            "parameters": mapping("The JSON schema of its arguments."),
            "strict": {"type": ["boolean", "null"]},
        },
        ["type", "name"],
    ),
    "AnthropicText": record(
        {"type": _const("text"), "text": _STRING, "cache_control": _CACHE, "citations": _CACHE}, ["type", "text"]
    ),
    "AnthropicMessage": record(
        {
            "role": {"enum": ["user", "assistant", "system"]},
            "content": {
                "anyOf": [_STRING, {"type": "array", "items": ref("AnthropicBlock"), "minItems": 1}],
            },
        },
        ["role", "content"],
    ),
    "AnthropicBlock": {
        "anyOf": [
            ref("AnthropicText"),
            record(
                {
                    "type": _const("tool_use"),
                    "id": text("", 1024),
                    "name": _STRING,
                    "input": mapping(""),
                    "cache_control": _CACHE,
                },
                ["type", "name"],
            ),
            record(
                {
                    "type": _const("tool_result"),
                    "tool_use_id": text("", 1024),
                    "content": either("", _STRING, {"type": "array", "items": ref("AnthropicText")}),
                    "is_error": {"type": ["boolean", "null"]},
                    "cache_control": _CACHE,
                },
                ["type"],
            ),
            {
                "description": "What an earlier answer thought; left out of the prompt.",
                "type": "object",
                "properties": {"type": {"enum": ["thinking", "redacted_thinking"]}},
                "required": ["type"],
            },
        ]
    },
    "AnthropicTool": record(
        {
            "type": {"enum": ["custom", None]},
            "name": _STRING,
            "description": text(""),
            "input_schema": mapping("The JSON schema of its input."),
            "strict": {"type": ["boolean", "null"]},
            "cache_control": _CACHE,
            "input_examples": _CACHE,
            "eager_input_streaming": _CACHE,
            "defer_loading": {"enum": [False, None]},
        },
        ["name"],
    ),
}
