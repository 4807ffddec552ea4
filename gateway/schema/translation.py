"""A request of another API on its way into a chat request: the same rules, under the names that its client knows."""

from typing import Final

import msgspec

from gateway.schema.chat import ChatRequest, chat_from_fields
from gateway.schema.options import RequestLimits
from gateway.schema.reader import FieldReader
from streamkv.errors import InvalidField

PASSED_FIELDS: Final = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "parallel_tool_calls",
    # What StreamKV has beyond the other APIs, by the names of /v1/chat/completions
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "chat_template_kwargs",
    "cache_salt",
    "priority",
    "request_id",
)
"""Fields that mean in every API what they mean in a chat."""


class Translation:
    """Fields of a chat request, each with the name of what it was made from."""

    def __init__(self) -> None:
        self._fields: dict[str, object] = {}
        self._messages: list[dict[str, object]] = []
        self._names: dict[str, str] = {}
        self._reasoning = ""
        self._template_defaults: dict[str, object] = {}

    def pass_on(self, reader: FieldReader) -> None:
        """Take the fields that are a chat's own."""
        for name in PASSED_FIELDS:
            value = reader.take(name)
            if value is not None:
                self._fields[name] = value

    def put(self, name: str, value: object, made_from: str) -> None:
        """made_from: what the client calls it. A value of None is left out."""
        if value is not None:
            self._fields[name] = value
            self.rename(name, made_from)

    def rename(self, path: str, made_from: str) -> None:
        """A place inside a field that has another name than the field's says."""
        if path != made_from:
            self._names[path] = made_from

    def set_template_default(self, name: str, value: object) -> None:
        """A variable for the chat template, where the client does not give it itself."""
        self._template_defaults[name] = value

    def add_message(self, message: dict[str, object], made_from: str) -> None:
        if self._reasoning and message["role"] == "assistant":
            message["reasoning_content"] = self._reasoning
        self._reasoning = ""
        self._names[f"messages[{len(self._messages)}]"] = made_from
        self._messages.append(message)

    def add_reasoning(self, text: str) -> None:
        """What the assistant thought before its next message."""
        self._reasoning = text

    def add_tool_call(self, call: dict[str, object], made_from: str) -> None:
        """A call of the assistant, beside those before it and the text before them, which are one message in a chat."""
        last = self._messages[-1] if self._messages else None
        if last is None or last["role"] != "assistant" or self._reasoning:
            last = {"role": "assistant", "content": None}
            self.add_message(last, made_from)
        calls = last.setdefault("tool_calls", [])
        assert isinstance(calls, list)
        path = f"messages[{len(self._messages) - 1}].tool_calls[{len(calls)}]"
        self._names |= {path: made_from, f"{path}.function": made_from, f"{path}.id": f"{made_from}.call_id"}
        calls.append(call)

    def rename_in_last(self, field: str, made_from: str) -> None:
        """A field of the last message."""
        self._names[f"messages[{len(self._messages) - 1}].{field}"] = made_from

    def chat(self, limits: RequestLimits, *, max_tokens_field: str, prompt_field: str) -> ChatRequest:
        """The chat, checked by its rules. Raises InvalidField."""
        fields = {**self._fields, "messages": self._messages}
        given = fields.get("chat_template_kwargs", {})
        if self._template_defaults and isinstance(given, dict):
            fields["chat_template_kwargs"] = {**self._template_defaults, **given}
        try:
            chat = chat_from_fields(fields, limits)
        except InvalidField as error:
            raise self.named(error) from error
        options = msgspec.structs.replace(chat.options, max_tokens_field=max_tokens_field, prompt_field=prompt_field)
        return msgspec.structs.replace(chat, options=options)

    def named(self, error: InvalidField) -> InvalidField:
        """The same error under the client's name of the field."""
        path = error.field
        for end in range(len(path), 0, -1):
            if (end == len(path) or path[end] in ".[") and path[:end] in self._names:
                return InvalidField(self._names[path[:end]] + path[end:], error.message)
        return error
