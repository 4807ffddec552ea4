"""What the gateway notes of one request, from its arrival to its end, for the access log, the traces and the limits.

A request is named by its request id: the client's X-Request-Id where that is sound, else one made here. It goes back
with the answer, to the engine as the request's label, and into every line about it.
"""

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from gateway.limits import Permit, Standing
from gateway.streams import Stream

REQUEST_ID_HEADER: Final = "X-Request-Id"
SOCKET_METHOD: Final = "WS"
"""Stands for the HTTP method of a generation on a WebSocket."""
SOCKET_ROUTE: Final = "/v1/stream"
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/=+@-]{1,128}")


def new_request_id() -> str:
    return secrets.token_hex(16)


def take_request_id(headers: Mapping[str, str]) -> str:
    """The client's own, if it has 1 to 128 letters, digits and ._:/=+@- and nothing else; otherwise a new one."""
    given = headers.get(REQUEST_ID_HEADER, "")
    return given if _REQUEST_ID.fullmatch(given) else new_request_id()


@dataclass(slots=True, eq=False)
class Record:
    """One HTTP request, or one generation of a WebSocket."""

    request_id: str
    method: str
    route: str
    """The path as the router has it, `/v1/models/{name}`, so that nothing of a client's is in it; empty for a path that
    does not exist."""
    arrived_s: float
    """Loop time."""
    arrived_ns: int = field(default_factory=time.time_ns)
    """Unix time."""
    key: str = ""
    """The name of the caller's API key."""
    key_digest: bytes = b""
    """SHA-256 of the key itself; never shown."""
    permit: Permit | None = None
    standing: Standing | None = None
    """What the caller has left, where no permit knows it."""
    streams: list[Stream] = field(default_factory=list)
    """Begun or taken up by this request."""
    num_bytes: int = 0
    """Of the answer's body."""
    error: str = ""
    """The kind of what went wrong, for people."""
    trace: Mapping[str, str] = field(default_factory=dict)
    """traceparent and tracestate, as they came."""

    @property
    def rest(self) -> Standing | None:
        """What the caller has left now."""
        return self.permit.standing if self.permit is not None else self.standing

    @property
    def num_prompt(self) -> int:
        return sum(stream.num_prompt for stream in self.streams)

    @property
    def num_output(self) -> int:
        return sum(stream.num_output for stream in self.streams)

    @property
    def num_cached(self) -> int:
        return sum(stream.num_cached for stream in self.streams)

    @property
    def ttft_s(self) -> float | None:
        """From arrival to the first token of any stream; None before."""
        times = [stream.times.first_token for stream in self.streams if stream.times.first_token]
        return max(0.0, min(times) - self.arrived_s) if times else None

    @property
    def finish_reasons(self) -> list[str]:
        """Each one once, in the order of the choices."""
        return list(dict.fromkeys(ending.finish_reason for stream in self.streams for ending in stream.endings))
