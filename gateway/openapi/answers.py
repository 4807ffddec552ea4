"""What answers look like: the schemas that the document's paths refer to by name."""

from typing import Final

from gateway.openapi.rules import Schema, answer, ref

_STRING: Final[Schema] = {"type": "string"}
_NUMBER: Final[Schema] = {"type": "number"}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
_TEXT_OR_NULL: Final[Schema] = {"type": ["string", "null"]}
_IDS: Final[Schema] = {"type": "array", "items": _COUNT}
_ANY: Final[Schema] = {"type": ["object", "null"]}
_ASK: Final[Schema] = {"type": ["array", "object", "null"]}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _const(value: str) -> Schema:
    return {"const": value}


_FINISH: Final[dict[str, Schema]] = {
    "index": _COUNT,
    "finish_reason": {"enum": ["stop", "length", "tool_calls", "abort", "error"]},
    "stop_reason": {
        "description": "The stop string or stop token id that ended it.",
        "type": ["string", "integer", "null"],
    },
    "logprobs": _ANY,
    "token_ids": _IDS,
}
_TOOL_CALL: Final = answer(
    {
        "id": _STRING,
        "type": _const("function"),
        "function": answer({"name": _STRING, "arguments": {"description": "JSON, as the model wrote it.", **_STRING}}),
    }
)
_COMPLETION: Final[dict[str, Schema]] = {
    "id": _STRING,
    "created": {"description": "Unix time, s.", **_COUNT},
    "model": _STRING,
    "usage": ref("Usage"),
}
ANSWERS: Final[dict[str, Schema]] = {
    "Error": answer(
        {
            "error": answer(
                {
                    "message": _STRING,
                    "type": _STRING,
                    "param": {"description": "The field that it is about.", **_TEXT_OR_NULL},
                    "code": _TEXT_OR_NULL,
                }
            )
        }
    ),
    "AnthropicError": answer({"type": _const("error"), "error": answer({"type": _STRING, "message": _STRING})}),
    "Usage": answer(
        {
            "prompt_tokens": _COUNT,
            "completion_tokens": _COUNT,
            "total_tokens": _COUNT,
            "prompt_tokens_details": answer({"cached_tokens": _COUNT}),
        }
    ),
    "ChatAnswer": answer(
        _COMPLETION
        | {
            "object": _const("chat.completion"),
            "choices": _array(
                answer(
                    _FINISH
                    | {
                        "message": answer(
                            {
                                "role": _const("assistant"),
                                "content": _TEXT_OR_NULL,
                                "reasoning": _TEXT_OR_NULL,
                                "reasoning_content": _TEXT_OR_NULL,
                                "tool_calls": _array(_TOOL_CALL),
                            },
                            ["reasoning", "reasoning_content", "tool_calls"],
                        )
                    },
                    ["token_ids"],
                )
            ),
            "prompt_token_ids": _IDS,
            "prompt_logprobs": _ASK,
        },
        ["prompt_token_ids", "prompt_logprobs"],
    ),
    "CompletionAnswer": answer(
        _COMPLETION
        | {
            "object": _const("text_completion"),
            "choices": _array(
                answer(
                    _FINISH | {"text": _STRING, "prompt_token_ids": _IDS, "prompt_logprobs": _ASK},
                    ["token_ids", "prompt_token_ids", "prompt_logprobs"],
                )
            ),
        }
    ),
    "Response": answer(
        {
            "id": _STRING,
            "object": _const("response"),
            "created_at": {"description": "Unix time, s.", **_COUNT},
            "completed_at": {"type": ["integer", "null"]},
            "status": {"enum": ["completed", "incomplete", "failed", "in_progress"]},
            "error": {"anyOf": [answer({"code": _STRING, "message": _STRING}), {"type": "null"}]},
            "incomplete_details": {"anyOf": [answer({"reason": _STRING}), {"type": "null"}]},
            "model": _STRING,
            "output": _array(answer({"id": _STRING, "type": {"enum": ["reasoning", "message", "function_call"]}})),
            "usage": {
                "anyOf": [
                    answer({"input_tokens": _COUNT, "output_tokens": _COUNT, "total_tokens": _COUNT}),
                    {"type": "null"},
                ]
            },
            "instructions": _TEXT_OR_NULL,
            "max_output_tokens": {"type": ["integer", "null"]},
            "metadata": {"type": "object"},
            "parallel_tool_calls": {"type": "boolean"},
            "temperature": _NUMBER,
            "top_p": _NUMBER,
            "text": {"type": "object"},
            "tools": {"type": "array"},
            "tool_choice": {"type": ["string", "object"]},
            "truncation": _STRING,
            "user": _TEXT_OR_NULL,
            "store": {"const": False},
            "background": {"const": False},
            "previous_response_id": {"type": "null"},
        }
    ),
    "Message": answer(
        {
            "id": _STRING,
            "type": _const("message"),
            "role": _const("assistant"),
            "model": _STRING,
            "content": _array(answer({"type": {"enum": ["text", "thinking", "tool_use"]}})),
            "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
            "stop_sequence": _TEXT_OR_NULL,
            "usage": answer(
                {
                    "input_tokens": {"description": "Without those that were found in the cache.", **_COUNT},
                    "cache_creation_input_tokens": _COUNT,
                    "cache_read_input_tokens": _COUNT,
                    "output_tokens": _COUNT,
                }
            ),
        }
    ),
    "MessageCount": answer({"input_tokens": _COUNT}),
    "Model": answer(
        {
            "id": _STRING,
            "object": _const("model"),
            "type": _const("model"),
            "created": {"description": "Unix time, s.", **_COUNT},
            "created_at": {"type": "string", "format": "date-time"},
            "display_name": _STRING,
            "owned_by": _STRING,
            "root": _STRING,
            "max_model_len": {"description": "Most tokens of a prompt and its answer.", **_COUNT},
        }
    ),
    "ModelList": answer(
        {
            "object": _const("list"),
            "data": _array(ref("Model")),
            "has_more": {"const": False},
            "first_id": _TEXT_OR_NULL,
            "last_id": _TEXT_OR_NULL,
        }
    ),
    "TokenizeAnswer": answer(
        {
            "count": _COUNT,
            "max_model_len": {"type": ["integer", "null"]},
            "tokens": _IDS,
            "token_strs": {"type": ["array", "null"], "items": _STRING},
        }
    ),
    "DetokenizeAnswer": answer({"prompt": _STRING}),
    "Health": answer({"status": _const("ok")}),
    "Ready": answer(
        {
            "status": _STRING,
            "stage": {"description": "What the engine does at the moment, or what is wrong.", **_STRING},
            "percent": {"type": "number", "minimum": 0, "maximum": 100},
        }
    ),
}
