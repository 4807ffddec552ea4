"""An answer of OpenAI's Responses API: an outlet that keeps it whole, and streams it where events are given.

An answer is a list of items, one after the other: reasoning, a message, calls of functions. Text arrives JSON-escaped
(`Outlet`), so that it never passes an encoder again.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from gateway.answers import json_bytes
from gateway.deltas import Delta, TokenLogprob
from gateway.logprobs import LogprobForms
from gateway.named_events import NamedEvents
from gateway.outlet import Ending, StreamFacts, Usage
from streamkv.errors import StreamKVError

_ITEM_PREFIXES: Final = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
_PART_TYPES: Final = {"message": "output_text", "reasoning": "reasoning_text"}


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """What every state of one answer repeats."""

    response_id: str
    """resp_…"""
    created: int
    """Unix time, s."""
    model: str
    repeated: dict[str, object]
    """Of the request's fields."""


@dataclass(slots=True)
class _Item:
    kind: str
    item_id: str
    call_id: str = ""
    name: str = ""
    status: str = "in_progress"
    texts: list[bytes] = field(default_factory=list)
    """Of its one part, or of the call's arguments."""
    logprobs: list[dict[str, object]] = field(default_factory=list)
    """Of a message's tokens, where they are wanted."""

    @property
    def text(self) -> msgspec.Raw:
        return msgspec.Raw(b'"' + b"".join(self.texts) + b'"')

    def part(self) -> dict[str, object]:
        """The one part of a message or of reasoning, as far as it has come."""
        if self.kind == "message":
            return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}
        return {"type": "reasoning_text", "text": self.text}

    def fields(self) -> dict[str, object]:
        """As it stands in the output; while it is in progress without its text."""
        fields: dict[str, object] = {"id": self.item_id, "type": self.kind, "status": self.status}
        if self.kind == "function_call":
            return fields | {"call_id": self.call_id, "name": self.name, "arguments": self.text}
        content = [] if self.status == "in_progress" else [self.part()]
        if self.kind == "reasoning":
            return fields | {"summary": [], "content": content}
        return fields | {"role": "assistant", "content": content}


class ResponseAnswer:
    """An `Outlet` for one choice."""

    def __init__(
        self,
        form: ResponseForm,
        events: NamedEvents | None,
        error_fields: Callable[[BaseException], dict[str, object]],
    ) -> None:
        self._form = form
        self._events = events
        self._error_fields = error_fields
        self._items: list[_Item] = []
        self._open: _Item | None = None
        self._num_sent = 0
        self._num_reasoning = 0
        """Tokens that came with nothing but reasoning."""
        self._ending: Ending | None = None
        self._usage: Usage | None = None
        self._failure: StreamKVError | None = None
        self._completed: int | None = None
        self._forms: LogprobForms | None = None
        self._logprobs: list[TokenLogprob] = []
        """Of tokens whose text has not come, and which may turn out to belong to no message."""

    # Outlet

    def begin(self, stream: StreamFacts) -> None:
        self._forms = stream.logprob_forms
        for name in ("response.created", "response.in_progress"):
            self._send(name, {"response": self._fields()})
        self.flush()

    def piece(self, choice: int, text: bytes, token_id: int) -> None:
        self._add("message", text)
        self.flush()

    def delta(self, choice: int, delta: Delta) -> None:
        if delta.reasoning:
            self._logprobs.clear()
            self._add("reasoning", delta.reasoning)
            if not delta.text and not delta.tool_calls:
                self._num_reasoning += len(delta.token_ids)
        elif delta.text or self._open is None or self._open.kind == "message":
            self._logprobs += delta.logprobs
        if delta.text:
            self._add("message", delta.text)
        for call in delta.tool_calls:
            self._logprobs.clear()
            if call.call_id:
                self._close_item("completed")
                self._open_item("function_call", call.call_id, call.name)
            if call.arguments:
                self._add("function_call", call.arguments)

    def end(self, choice: int, ending: Ending) -> None:
        self._ending = ending
        if not self._items:
            self._open_item("message")
        if self._logprobs and self._open is not None and self._open.kind == "message":
            self._add("message", b"")
        self._close_item("completed" if ending.finish_reason in ("stop", "tool_calls") else "incomplete")

    def flush(self) -> None:
        if self._events is not None:
            self._events.flush()

    def close(self, usage: Usage, failure: StreamKVError | None) -> None:
        self._usage, self._failure = usage, failure
        if self._status == "completed":
            self._completed = int(time.time())
        self._send(f"response.{self._status}", {"response": self._fields()})
        self.flush()

    # A stream that is silent for a while

    @property
    def num_bytes(self) -> int:
        return self._events.num_bytes if self._events is not None else 0

    def keep_alive(self) -> None:
        if self._events is not None:
            self._events.comment(b"keep-alive")
            self._events.flush()

    @property
    def broken_off(self) -> StreamKVError | None:
        """None: its status says so."""
        return None

    def body(self) -> bytes:
        """The whole answer, once it is closed."""
        return json_bytes(self._fields())

    def _add(self, kind: str, text: bytes) -> None:
        """More of the open item, or the first of a new one."""
        if self._open is None or self._open.kind != kind:
            self._close_item("completed")
            self._open_item(kind)
        item = self._open
        assert item is not None
        item.texts.append(text)
        logprobs: list[dict[str, object]] = []
        if kind == "message" and self._logprobs and self._forms is not None:
            logprobs = self._forms.chat(self._logprobs)
            item.logprobs += logprobs
            self._logprobs.clear()
        if self._events is not None:
            fields = self._place(item) | {"delta": msgspec.Raw(b'"' + text + b'"')}
            self._send(_event_of(kind, "delta"), fields | ({"logprobs": logprobs} if kind == "message" else {}))

    def _open_item(self, kind: str, call_id: str = "", name: str = "") -> None:
        self._open = item = _Item(kind, _ITEM_PREFIXES[kind] + secrets.token_hex(16), call_id, name)
        self._items.append(item)
        self._send("response.output_item.added", {"output_index": len(self._items) - 1, "item": item.fields()})
        if kind in _PART_TYPES:
            self._send("response.content_part.added", self._place(item) | {"part": item.part()})

    def _close_item(self, status: str) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        item.status = status
        place = self._place(item)
        if item.kind == "function_call":
            done: dict[str, object] = {"name": item.name, "arguments": item.text}
        else:
            done = {"text": item.text} | ({"logprobs": item.logprobs} if item.kind == "message" else {})
        self._send(_event_of(item.kind, "done"), place | done)
        if item.kind in _PART_TYPES:
            self._send("response.content_part.done", place | {"part": item.part()})
        self._send("response.output_item.done", {"output_index": len(self._items) - 1, "item": item.fields()})

    def _place(self, item: _Item) -> dict[str, object]:
        place: dict[str, object] = {"item_id": item.item_id, "output_index": len(self._items) - 1}
        return place | ({"content_index": 0} if item.kind in _PART_TYPES else {})

    def _send(self, name: str, fields: dict[str, object]) -> None:
        if self._events is not None:
            data = json_bytes({"type": name, "sequence_number": self._num_sent, **fields})
            self._events.add(name.encode(), data)
            self._num_sent += 1

    @property
    def _status(self) -> str:
        """in_progress until it is closed; then completed, incomplete (cut off by length) or failed."""
        if self._usage is None:
            return "in_progress"
        reason = self._ending.finish_reason if self._ending is not None and self._failure is None else "error"
        return {"stop": "completed", "tool_calls": "completed", "length": "incomplete"}.get(reason, "failed")

    def _fields(self) -> dict[str, object]:
        form, status = self._form, self._status
        return {
            "id": form.response_id,
            "object": "response",
            "created_at": form.created,
            "completed_at": self._completed,
            "status": status,
            "error": self._error() if status == "failed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": form.model,
            "output": [item.fields() for item in self._items if item is not self._open],
            "usage": _usage_fields(self._usage, self._num_reasoning) if self._usage is not None else None,
            "background": False,
            "store": False,
            "previous_response_id": None,
            **form.repeated,
        }

    def _error(self) -> dict[str, object]:
        if self._failure is not None:
            return {"code": "server_error", "message": self._error_fields(self._failure)["message"]}
        cause = self._ending.cause if self._ending is not None else ""
        return {"code": "server_error", "message": f"the answer was broken off: {cause or 'cancelled'}"}


def _event_of(kind: str, step: str) -> str:
    if kind == "function_call":
        return f"response.function_call_arguments.{step}"
    return f"response.{_PART_TYPES[kind]}.{step}"


def _usage_fields(usage: Usage, num_reasoning: int) -> dict[str, object]:
    return {
        "input_tokens": usage.num_prompt,
        "input_tokens_details": {"cached_tokens": usage.num_cached, "cache_write_tokens": 0},
        "output_tokens": usage.num_output,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": usage.num_prompt + usage.num_output,
    }
