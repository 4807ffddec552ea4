"""Why a stream failed, and what the engine's refusal means to its client."""

from gateway.engine_client import EngineUnavailable
from streamkv.errors import InvalidField, StreamKVError
from streamkv.protocol import Rejected


class EngineFault(StreamKVError):
    """The engine ended this request with an error, or kept dying under it."""


class Overloaded(EngineUnavailable):
    """The engine's queue is full."""


class UnknownStream(StreamKVError):
    """Nobody has this stream, or not any more."""


class RequestTimeout(StreamKVError):
    """request_timeout_s was over before the first token."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"the request took longer than {limit_s:g} s and was ended")


def failure_of(rejected: Rejected, prompt_field: str) -> StreamKVError:
    """prompt_field: what the client calls its prompt."""
    message = rejected.message
    if rejected.code == "invalid":
        return InvalidField(prompt_field if rejected.field in ("", "prompt_token_ids") else rejected.field, message)
    if rejected.code == "overloaded":
        return Overloaded(message or "the server is full", rejected.retry_after_s)
    if rejected.code == "draining":
        return EngineUnavailable(message or "the engine is about to end", rejected.retry_after_s)
    if rejected.code == "unknown_stream" and rejected.retry_after_s:
        return EngineUnavailable("a new engine does not know this stream yet; try again", rejected.retry_after_s)
    if rejected.code == "unknown_stream":
        return UnknownStream(message)
    return EngineFault(f"the engine refused the request: {message}")
