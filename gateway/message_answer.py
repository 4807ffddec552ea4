"""An answer of Anthropic's Messages API: an outlet that keeps it whole, and streams it where events are given.

An answer is a list of blocks, one after the other: thinking, texts, uses of tools. Text arrives JSON-escaped
(`Outlet`), so that it never passes an encoder again.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from gateway.answers import json_bytes
from gateway.deltas import Delta
from gateway.named_events import NamedEvents
from gateway.outlet import Ending, StreamFacts, Usage
from streamkv.errors import StreamKVError

_STOP_REASONS: Final = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
_DELTAS: Final = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
_FIELDS: Final = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}


class AnswerBrokenOff(StreamKVError):
    """An answer ended before its time, which Anthropic's API has no stop reason for."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"the answer was broken off: {cause or 'cancelled'}")
        self.is_timeout = cause == "timeout"


@dataclass(slots=True)
class _Block:
    kind: str
    tool_use_id: str = ""
    name: str = ""
    texts: list[bytes] = field(default_factory=list)

    def fields(self, is_whole: bool) -> dict[str, object]:
        """is_whole: with its text; without it as it begins."""
        text = msgspec.Raw(b'"' + (b"".join(self.texts) if is_whole else b"") + b'"')
        if self.kind == "text":
            return {"type": "text", "text": text, "citations": None}
        if self.kind == "thinking":
            return {"type": "thinking", "thinking": text, "signature": ""}
        fields: dict[str, object] = {"type": "tool_use", "id": self.tool_use_id, "name": self.name}
        return fields | {"input": _arguments(text) if is_whole else {}}


class MessageAnswer:
    """An `Outlet` for one choice."""

    def __init__(
        self,
        message_id: str,
        model: str,
        events: NamedEvents | None,
        error_body: Callable[[BaseException], bytes],
    ) -> None:
        """message_id: msg_…. error_body: an error in Anthropic's shape."""
        self._message_id = message_id
        self._model = model
        self._events = events
        self._error_body = error_body
        self._blocks: list[_Block] = []
        self._open: _Block | None = None
        self._ending: Ending | None = None
        self._usage = Usage(0, 0)

    # Outlet

    def begin(self, stream: StreamFacts) -> None:
        self._usage = Usage(stream.num_prompt, 0)
        self._send("message_start", {"message": self._fields()})
        self._send("ping", {})
        self.flush()

    def piece(self, choice: int, text: bytes, token_id: int) -> None:
        self._add("text", text)
        self.flush()

    def delta(self, choice: int, delta: Delta) -> None:
        if delta.reasoning:
            self._add("thinking", delta.reasoning)
        if delta.text:
            self._add("text", delta.text)
        for call in delta.tool_calls:
            if call.call_id:
                self._close_block()
                self._open_block(_Block("tool_use", call.call_id, call.name))
            if call.arguments:
                self._add("tool_use", call.arguments)

    def end(self, choice: int, ending: Ending) -> None:
        self._close_block()
        self._ending = ending

    def flush(self) -> None:
        if self._events is not None:
            self._events.flush()

    def close(self, usage: Usage, failure: StreamKVError | None) -> None:
        self._usage = usage
        if (error := failure or self.broken_off) is not None:
            if self._events is not None:
                self._events.add(b"error", self._error_body(error))
        else:
            stopped = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
            self._send("message_delta", {"delta": stopped, "usage": _usage_fields(usage)})
            self._send("message_stop", {})
        self.flush()

    # A stream that is silent for a while

    @property
    def num_bytes(self) -> int:
        return self._events.num_bytes if self._events is not None else 0

    def keep_alive(self) -> None:
        self._send("ping", {})
        self.flush()

    @property
    def broken_off(self) -> AnswerBrokenOff | None:
        """Why it has no stop reason, once it is closed."""
        if self._ending is not None and self._ending.finish_reason in _STOP_REASONS:
            return None
        return AnswerBrokenOff(self._ending.cause if self._ending is not None else "")

    def body(self) -> bytes:
        """The whole answer, once it is closed."""
        return json_bytes(self._fields())

    def _add(self, kind: str, text: bytes) -> None:
        if self._open is None or self._open.kind != kind:
            self._close_block()
            self._open_block(_Block(kind))
        assert self._open is not None
        self._open.texts.append(text)
        if self._events is not None:
            delta = {"type": _DELTAS[kind], _FIELDS[kind]: msgspec.Raw(b'"' + text + b'"')}
            self._send("content_block_delta", {"index": len(self._blocks) - 1, "delta": delta})

    def _open_block(self, block: _Block) -> None:
        self._open = block
        self._blocks.append(block)
        fields = {"index": len(self._blocks) - 1, "content_block": block.fields(is_whole=False)}
        self._send("content_block_start", fields)

    def _close_block(self) -> None:
        if self._open is not None:
            self._open = None
            self._send("content_block_stop", {"index": len(self._blocks) - 1})

    def _send(self, name: str, fields: dict[str, object]) -> None:
        if self._events is not None:
            self._events.add(name.encode(), json_bytes({"type": name, **fields}))

    @property
    def _stop_reason(self) -> str | None:
        if self._ending is None:
            return None
        return "stop_sequence" if self._stop_sequence is not None else _STOP_REASONS[self._ending.finish_reason]

    @property
    def _stop_sequence(self) -> str | None:
        """The stop string that ended it; a stop id is no string."""
        reason = self._ending.stop_reason if self._ending is not None else None
        return reason if isinstance(reason, str) else None

    def _fields(self) -> dict[str, object]:
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [block.fields(is_whole=True) for block in self._blocks],
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": _usage_fields(self._usage),
        }


def _arguments(text: msgspec.Raw) -> object:
    """A tool's input as an object; a text that was cut off on its way to one is kept as it is."""
    try:
        value = msgspec.json.decode(msgspec.json.decode(text, type=str))
    except msgspec.MsgspecError:
        value = None
    return value if isinstance(value, dict) else {"cut_off": text}


def _usage_fields(usage: Usage) -> dict[str, object]:
    """Anthropic counts what was found in the cache beside the input tokens, not among them."""
    return {
        "input_tokens": usage.num_prompt - usage.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached,
        "output_tokens": usage.num_output,
    }
