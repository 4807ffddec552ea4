"""The access log: one line for each request, when it is over. It has no prompt, no answer, no key and no query."""

import contextlib
import logging
import sys
import time
from typing import Final, TextIO

import msgspec

from gateway.records import Record
from streamkv.log import fields

logger = logging.getLogger(__name__)

_QUIET_ROUTES: Final = frozenset({"/health", "/ready", "/metrics"})
"""Asked every few seconds by machines; logged only where they fail."""


class Line(msgspec.Struct, frozen=True):
    """A line's fields, in their order."""

    time: str
    """Of the end: UTC, ISO 8601."""
    request_id: str
    method: str
    """WS: one generation of a WebSocket."""
    path: str
    """As the router has it; empty for one that does not exist."""
    status: int | None
    """None of a WebSocket's generation. 499: the client went before the answer was whole."""
    bytes: int
    """Of the answer's body."""
    seconds: float
    ttft: float | None
    """Seconds to the first token; None without one."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    key: str | None
    """The API key's name."""
    finish_reason: str | None
    """Those of all choices, each once, with commas between."""
    error: str | None
    """The kind of error that ended it."""


class AccessLog:
    """Writes the lines: as JSON to a stream, by default stdout, or as key=value among the log lines on stderr."""

    def __init__(self, is_json: bool, stream: TextIO | None = None) -> None:
        self._is_json = is_json
        self._stream = stream or sys.stdout

    def write(self, record: Record, status: int | None, ended_s: float) -> None:
        """ended_s: loop time."""
        if record.route in _QUIET_ROUTES and status is not None and status < 400:
            return
        seconds = max(0.0, ended_s - record.arrived_s)
        ttft_s = record.ttft_s
        line = Line(
            time=_utc(record.arrived_ns + int(seconds * 1e9)),
            request_id=record.request_id,
            method=record.method,
            path=record.route,
            status=status,
            bytes=record.num_bytes,
            seconds=round(seconds, 6),
            ttft=None if ttft_s is None else round(ttft_s, 6),
            prompt_tokens=record.num_prompt,
            output_tokens=record.num_output,
            cached_tokens=record.num_cached,
            key=record.key or None,
            finish_reason=",".join(record.finish_reasons) or None,
            error=record.error or None,
        )
        if self._is_json:
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                self._stream.write(msgspec.json.encode(line).decode() + "\n")
                self._stream.flush()
        else:
            values = msgspec.structs.asdict(line)
            del values["time"]  # the line has one
            logger.info("request", extra=fields(**values))


def _utc(unix_ns: int) -> str:
    """ISO 8601 with milliseconds."""
    seconds, rest_ns = divmod(unix_ns, 1_000_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest_ns // 1_000_000:03d}Z"
