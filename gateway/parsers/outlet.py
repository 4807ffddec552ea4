"""An outlet before another, that tells content, reasoning and calls apart in a stream's text."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import msgspec

from gateway.deltas import Delta, ToolCallDelta
from gateway.outlet import Ending, Outlet, StreamFacts, Usage
from gateway.parsers.answer_parser import AnswerParser, Parsing
from gateway.parsers.pieces import Pieces
from gateway.tokenizer import json_inside
from streamkv.errors import StreamKVError

_ID_CHARS: Final = 24
_MISTRAL_ID_CHARS: Final = 9
"""Its chat templates take no others."""


class ParsingOutlet:
    """Hands on each delta with its text parsed. Text that is certain to be content goes through as it is; log
    probabilities and token ids stay with the delta that their tokens came in, whatever those tokens say."""

    def __init__(self, outlet: Outlet, parsing: Parsing, num_choices: int) -> None:
        self._outlet = outlet
        self._parsing = parsing
        self._parsers = [AnswerParser(parsing) for _ in range(num_choices)]
        self._stream_id = b""

    def begin(self, stream: StreamFacts) -> None:
        self._stream_id = stream.stream_id
        self._outlet.begin(stream)

    def piece(self, choice: int, text: bytes, token_id: int) -> None:
        parser = self._parsers[choice]
        if parser.is_plain:
            self._outlet.piece(choice, text, token_id)
            return
        plain = _plain(text)
        pieces = parser.feed(plain)
        if not pieces.reasoning and not pieces.calls and "".join(pieces.content) == plain:
            self._outlet.piece(choice, text, token_id)
        else:
            self._outlet.delta(choice, self._delta(choice, pieces, (token_id,)))
            self._outlet.flush()

    def delta(self, choice: int, delta: Delta) -> None:
        if delta.text:
            parsed = self._delta(choice, self._parsers[choice].feed(_plain(delta.text)), ())
            delta = msgspec.structs.replace(
                delta, text=parsed.text, reasoning=parsed.reasoning, tool_calls=parsed.tool_calls
            )
        self._outlet.delta(choice, delta)

    def end(self, choice: int, ending: Ending) -> None:
        if choice < len(self._parsers):
            parser = self._parsers[choice]
            last = self._delta(choice, parser.finish(), ())
            if last.text or last.reasoning or last.tool_calls:
                self._outlet.delta(choice, last)
            if ending.finish_reason == "stop" and parser.has_calls:
                ending = replace(ending, finish_reason="tool_calls")
        self._outlet.end(choice, ending)

    def flush(self) -> None:
        self._outlet.flush()

    def close(self, usage: Usage, failure: StreamKVError | None) -> None:
        self._outlet.close(usage, failure)

    def _delta(self, choice: int, pieces: Pieces, token_ids: Sequence[int]) -> Delta:
        reasoning = "".join(pieces.reasoning) if self._parsing.include_reasoning else ""
        calls = [
            ToolCallDelta(
                call.index,
                self._call_id(choice, call.index) if call.name else "",
                call.name,
                json_inside(call.arguments),
            )
            for call in pieces.calls
        ]
        return Delta(
            json_inside("".join(pieces.content)), token_ids, reasoning=json_inside(reasoning), tool_calls=calls
        )

    def _call_id(self, choice: int, index: int) -> str:
        """The same at every gateway that the stream comes to."""
        digest = hashlib.sha256(b"%b %d %d" % (self._stream_id, choice, index)).hexdigest()
        if self._parsing.tool_format == "mistral":
            return digest[:_MISTRAL_ID_CHARS]
        return "call_" + digest[:_ID_CHARS]


def _plain(text: bytes) -> str:
    """JSON-escaped → text."""
    if b"\\" not in text:
        return text.decode()
    return msgspec.json.decode(b'"' + text + b'"', type=str)
