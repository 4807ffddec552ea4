"""A chat request."""

import msgspec

from gateway.chat_template import ChatMessage
from gateway.schema.body import decode_object
from gateway.schema.messages import check_continuation, read_messages
from gateway.schema.options import GenerationOptions, RequestLimits, read_options
from gateway.schema.reader import FieldReader
from gateway.schema.tools import ToolUse, read_tool_use
from streamkv.errors import InvalidField


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/chat/completions, or a `generate` with messages."""

    options: GenerationOptions
    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, object] = {}
    tool_use: ToolUse = ToolUse()
    include_reasoning: bool = True
    """False: what the model thought is left out of the answer."""


def parse_chat(body: bytes, limits: RequestLimits) -> ChatRequest:
    """POST /v1/chat/completions. Raises InvalidField."""
    return chat_from_fields(decode_object(body), limits)


def chat_from_fields(fields: dict[str, object], limits: RequestLimits) -> ChatRequest:
    """The fields of a chat request. Raises InvalidField."""
    reader = FieldReader(fields)
    if "messages" not in reader:
        raise InvalidField("messages", "is missing; send a list of messages")
    options = read_options(reader, limits, is_chat=True)
    messages = read_messages(reader)
    add_generation_prompt = reader.boolean("add_generation_prompt", default=True)
    continue_final_message = reader.boolean("continue_final_message", default=False)
    check_continuation(add_generation_prompt, continue_final_message)
    kwargs = reader.mapping("chat_template_kwargs")
    tool_use = read_tool_use(reader)
    include_reasoning = reader.boolean("include_reasoning", default=True)
    reader.neutral("modalities", ["text"])
    reader.neutral("audio")
    reader.neutral("moderation")
    reader.neutral("prediction")
    reader.neutral("reasoning_effort", "none")
    reader.neutral("reasoning")
    reader.neutral("verbosity", "medium")
    reader.neutral("web_search_options")
    reader.neutral("documents", [])
    reader.neutral("chat_template", instead="the server's own template is used")
    reader.neutral("mm_processor_kwargs", {})
    reader.neutral("add_special_tokens", False, instead="the chat template puts the special tokens")
    reader.neutral("echo", False)
    reader.finish()
    return ChatRequest(
        options=options,
        messages=messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        chat_template_kwargs=kwargs,
        tool_use=tool_use,
        include_reasoning=include_reasoning,
    )
