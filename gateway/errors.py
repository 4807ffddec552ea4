"""Exception → status, body and headers of an answer, and the error inside an event: the one place that does.

A field that breaks a rule is 400 and names it. What was not written for a client's eyes is 500 and says nothing;
the caller logs it.
"""

import math

import msgspec

from gateway.admission import UnknownModel
from gateway.engine_client import EngineUnavailable
from gateway.streams import EngineFault, Overloaded, RequestTimeout, UnknownStream
from streamkv.errors import InvalidField, ModelError

_INVALID = "invalid_request_error"
_SERVER = "server_error"
_INTERNAL_MESSAGE = "the server made a mistake; its log says more"

_OF_STATUS = {
    404: ("not_found", "there is nothing at this path"),
    405: ("method_not_allowed", "this path does not take that method; the Allow header names those it takes"),
    408: ("request_timeout", ""),
    413: ("body_too_large", ""),
    415: ("unsupported_media_type", ""),
}
"""Code, and the message instead of aiohttp's own where that only repeats the status."""


class ErrorAnswer(msgspec.Struct, frozen=True):
    """What goes out. headers are those besides Content-Type."""

    status: int
    body: bytes
    headers: dict[str, str] = {}


class _Meaning(msgspec.Struct, frozen=True):
    """An error in OpenAI's terms."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float = 0.0

    def fields(self) -> dict[str, object]:
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}


def _meaning(error: BaseException) -> _Meaning:
    match error:
        case InvalidField():
            return _Meaning(400, str(error), _INVALID, param=error.field, code="invalid_value")
        case UnknownModel():
            return _Meaning(404, str(error), _INVALID, param="model", code="model_not_found")
        case UnknownStream():
            return _Meaning(404, str(error), _INVALID, code="unknown_stream")
        case Overloaded():
            return _Meaning(503, str(error), "overloaded_error", code="overloaded", retry_after_s=error.retry_after_s)
        case EngineUnavailable():
            return _Meaning(503, str(error), _SERVER, code="not_ready", retry_after_s=error.retry_after_s)
        case RequestTimeout():
            return _Meaning(504, str(error), _SERVER, code="timeout")
        case EngineFault():
            return _Meaning(500, str(error), _SERVER, code="engine_error")
        case ModelError():
            message = "the model's tokenizer cannot be used; the server's log says why"
            return _Meaning(500, message, _SERVER, code="model_error")
        case _:
            return _Meaning(500, _INTERNAL_MESSAGE, _SERVER, code="internal_error")


def describe(error: BaseException) -> ErrorAnswer:
    """The whole answer for an exception. Of one that has no entry here a client learns nothing but the 500."""
    meaning = _meaning(error)
    # Whole seconds, and never 0, which would say: at once
    headers = {"Retry-After": str(max(1, math.ceil(meaning.retry_after_s)))} if meaning.status == 503 else {}
    return ErrorAnswer(meaning.status, _encode(meaning), headers)


def describe_status(status: int, message: str) -> ErrorAnswer:
    """The answer for an error that aiohttp found: no such path or method, a body over the limit or of a wrong type."""
    code, instead = _OF_STATUS.get(status, (None, ""))
    if status >= 500:
        return ErrorAnswer(status, _encode(_Meaning(status, _INTERNAL_MESSAGE, _SERVER, code="internal_error")))
    return ErrorAnswer(status, _encode(_Meaning(status, instead or message, _INVALID, code=code)))


def error_body(error: BaseException) -> bytes:
    """OpenAI's error object, as a stream's last event has it."""
    return _encode(_meaning(error))


def error_fields(error: BaseException) -> dict[str, object]:
    """message, type, param and code, for an event of a WebSocket."""
    return _meaning(error).fields()


def _encode(meaning: _Meaning) -> bytes:
    return msgspec.json.encode({"error": meaning.fields()})
