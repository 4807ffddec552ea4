"""The WebSocket's events as frames, as JSON text or as msgpack, and the outlet that sends a stream's.

docs/websocket.md says what each event means; the bytes are made here. A frame goes straight to the transport: a
server's frames carry no mask, so that one is a header of 2, 4 or 10 bytes and the payload.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from gateway.answers import json_bytes, usage_fields
from gateway.bounded_writer import BoundedWriter
from gateway.cursor import Bookmark
from gateway.deltas import Delta, ToolCallDelta
from gateway.logprobs import LogprobForms
from gateway.outlet import Ending, StreamFacts, Usage
from streamkv.errors import StreamKVError

JSON_PROTOCOL: Final = "streamkv.json"
MSGPACK_PROTOCOL: Final = "streamkv.msgpack"
_TEXT: Final = 0x81
_BINARY: Final = 0x82
_NOTHING: Final[Mapping[str, object]] = {}


def frame(payload: bytes, is_text: bool) -> bytes:
    """One unfragmented, unmasked frame (RFC 6455, 5.2)."""
    opcode = _TEXT if is_text else _BINARY
    size = len(payload)
    if size < 126:
        return b"%c%c%b" % (opcode, size, payload)
    if size < 65536:
        return b"%c\x7e%b%b" % (opcode, size.to_bytes(2, "big"), payload)
    return b"%c\x7f%b%b" % (opcode, size.to_bytes(8, "big"), payload)


class EventCodec(Protocol):
    """How events are written on one socket."""

    def event(self, fields: Mapping[str, object]) -> bytes:
        """A frame with any event."""

    def delta(
        self,
        client_id: str,
        choice: int,
        text: bytes,
        num_tokens: int,
        token_ids: Sequence[int] | None,
        more: Mapping[str, object] = _NOTHING,
    ) -> bytes:
        """A frame with a delta; text is JSON-escaped. more: its further fields."""


class JsonCodec:
    """Text frames."""

    def event(self, fields: Mapping[str, object]) -> bytes:
        return frame(json_bytes(fields), is_text=True)

    def delta(
        self,
        client_id: str,
        choice: int,
        text: bytes,
        num_tokens: int,
        token_ids: Sequence[int] | None,
        more: Mapping[str, object] = _NOTHING,
    ) -> bytes:
        ids = b"" if token_ids is None else b',"token_ids":' + json_bytes(token_ids)
        if more:
            ids += b"," + json_bytes(more)[1:-1]
        return frame(
            b'{"type":"delta","id":%b,"index":%d,"num_tokens":%d,"text":"%b"%b}'
            % (json_bytes(client_id), choice, num_tokens, text, ids),
            is_text=True,
        )


class MsgpackCodec:
    """Binary frames."""

    def event(self, fields: Mapping[str, object]) -> bytes:
        return frame(msgspec.msgpack.encode(fields), is_text=False)

    def delta(
        self,
        client_id: str,
        choice: int,
        text: bytes,
        num_tokens: int,
        token_ids: Sequence[int] | None,
        more: Mapping[str, object] = _NOTHING,
    ) -> bytes:
        fields: dict[str, object] = {
            "type": "delta",
            "id": client_id,
            "index": choice,
            "num_tokens": num_tokens,
            "text": _plain(text),
        }
        if token_ids is not None:
            fields["token_ids"] = token_ids
        fields.update(more)
        return self.event(fields)


def _plain(text: bytes) -> str:
    """JSON-escaped → text."""
    return msgspec.json.decode(b'"' + text + b'"', type=str)


def _call_fields(call: ToolCallDelta) -> dict[str, object]:
    """index, the next piece of the arguments, and with the first one id and name."""
    head: dict[str, object] = {"index": call.index}
    if call.call_id:
        head |= {"id": call.call_id, "name": call.name}
    return head | {"arguments": _plain(call.arguments)}


class SocketOutlet:
    """An `Outlet` for one generation among the others of its socket."""

    def __init__(
        self,
        writer: BoundedWriter,
        codec: EventCodec,
        client_id: str,
        *,
        error_fields: Callable[[StreamKVError], dict[str, object]],
        on_close: Callable[[], None],
    ) -> None:
        self._writer = writer
        self._codec = codec
        self._client_id = client_id
        self._error_fields = error_fields
        self._on_close = on_close
        self._gathered: list[bytes] = []
        self._bookmark: Bookmark[Callable[[bytes], bytes]] = Bookmark(0)
        """Its events are made into frames when it is known where each one stands."""
        self._num_tokens: list[int] = []
        self._wants_ids = False
        self._forms: LogprobForms | None = None

    def begin(self, stream: StreamFacts) -> None:
        """Tell the client that its request is on its way, and under which name it can be attached to."""
        state = stream.state
        assert state is not None
        self._wants_ids = state.return_token_ids
        self._forms = stream.logprob_forms
        self._bookmark = Bookmark(state.sampling.n, stream.known)
        self._num_tokens = self._bookmark.num_tokens
        fields: dict[str, object] = {
            "type": "started",
            "id": self._client_id,
            "stream_id": stream.stream_id.hex(),
            "request_id": state.label,
            "model": state.model,
            "n": state.sampling.n,
            "num_prompt_tokens": stream.num_prompt,
            "from_token": min(stream.known.mark(choice).num_tokens for choice in range(state.sampling.n)),
        }
        if self._wants_ids:
            fields["prompt_token_ids"] = stream.prompt_token_ids
        self._gathered.append(self._codec.event(fields))
        self.flush()

    def piece(self, choice: int, text: bytes, token_id: int) -> None:
        self._num_tokens[choice] += 1
        self._writer.write(
            self._codec.delta(
                self._client_id, choice, text, self._num_tokens[choice], (token_id,) if self._wants_ids else None
            )
        )

    def delta(self, choice: int, delta: Delta) -> None:
        more: dict[str, object] = {}
        if self._forms is not None and delta.logprobs:
            more["logprobs"] = self._forms.chat(delta.logprobs)
        if self._forms is not None and delta.prompt_logprobs is not None:
            more["prompt_logprobs"] = self._forms.prompt(delta.prompt_logprobs)
        if delta.reasoning:
            more["reasoning"] = _plain(delta.reasoning)
        if delta.tool_calls:
            more["tool_calls"] = [_call_fields(call) for call in delta.tool_calls]
        num_tokens = self._num_tokens[choice] + len(delta.token_ids)
        token_ids = delta.token_ids if self._wants_ids else None

        def to_frame(entry: bytes) -> bytes:
            fields = more if entry == b"%d" % num_tokens else {**more, "cursor": entry.decode()}
            return self._codec.delta(self._client_id, choice, delta.text, num_tokens, token_ids, fields)

        self._bookmark.tell(choice, len(delta.token_ids), to_frame)

    def end(self, choice: int, ending: Ending) -> None:
        fields: dict[str, object] = {
            "type": "finished",
            "id": self._client_id,
            "index": choice,
            "finish_reason": ending.finish_reason,
            "stop_reason": ending.stop_reason,
            "cause": ending.cause,
        }
        if choice >= len(self._num_tokens):
            self._gathered.append(self._codec.event({**fields, "num_tokens": 0}))
            return
        fields["num_tokens"] = num_tokens = self._num_tokens[choice]

        def to_frame(entry: bytes) -> bytes:
            is_simple = entry == b"%de" % num_tokens
            return self._codec.event(fields if is_simple else {**fields, "cursor": entry.decode()})

        self._bookmark.tell(choice, 0, to_frame, ends=not ending.is_only_here)

    def flush(self) -> None:
        for _, entry, to_frame in self._bookmark.take():
            self._gathered.append(to_frame(entry))
        if self._gathered:
            frames = b"".join(self._gathered)
            self._gathered.clear()
            self._writer.write(frames)

    def close(self, usage: Usage, failure: StreamKVError | None) -> None:
        self.flush()
        if failure is not None:
            self.fail(failure)
        else:
            self._gathered.append(
                self._codec.event({"type": "done", "id": self._client_id, "usage": usage_fields(usage)})
            )
        self.flush()
        self._on_close()

    def fail(self, failure: StreamKVError) -> None:
        """The generation's last event, instead of `done`."""
        self._gathered.append(
            self._codec.event({"type": "error", "id": self._client_id, "error": self._error_fields(failure)})
        )
        self.flush()
