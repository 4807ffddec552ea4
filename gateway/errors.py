"""Exception → status, body and headers of an answer, and the error inside an event: the one place that does.

A field that breaks a rule is 400 and names it. What was not written for a client's eyes is 500 and says nothing;
the caller logs it.
"""

import math

import msgspec

from gateway.admission import UnknownModel
from gateway.auth import OriginRefused, Unauthorized
from gateway.engine_client import EngineUnavailable
from gateway.failures import EngineFault, Overloaded, RequestTimeout, UnknownStream
from gateway.limits import RateLimited
from gateway.message_answer import AnswerBrokenOff
from streamkv.errors import InvalidField, ModelError

_INVALID = "invalid_request_error"
_SERVER = "server_error"
_INTERNAL_MESSAGE = "the server made a mistake; its log says more"
_LONGEST_RETRY_S = 3600
"""Of a 503. A 429 says how long it takes, however long."""
_RETRIED = (429, 503)

_OF_STATUS = {
    404: ("not_found", "there is nothing at this path"),
    405: ("method_not_allowed", "this path does not take that method; the Allow header names those it takes"),
    408: ("request_timeout", ""),
    413: ("body_too_large", ""),
    415: ("unsupported_media_type", ""),
}
"""Code, and the message instead of aiohttp's own where that only repeats the status."""

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Status → Anthropic's type of the error, where it is not the one for all of 4xx or of 5xx."""


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
    """Of a 429 and a 503."""
    headers: dict[str, str] = {}

    def fields(self) -> dict[str, object]:
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    @property
    def retry_after(self) -> int:
        """Whole seconds, and never 0, which would say: at once."""
        if not math.isfinite(self.retry_after_s):
            return _LONGEST_RETRY_S
        whole_s = max(1, math.ceil(self.retry_after_s))
        return whole_s if self.status == 429 else min(whole_s, _LONGEST_RETRY_S)

    def event_fields(self) -> dict[str, object]:
        """An event has no header that could say when to try again."""
        return self.fields() | ({"retry_after_s": self.retry_after} if self.status in _RETRIED else {})


def _meaning(error: BaseException) -> _Meaning:
    match error:
        case InvalidField():
            return _Meaning(400, str(error), _INVALID, param=error.field, code="invalid_value")
        case Unauthorized():
            reason = "" if error.is_missing else ', error="invalid_token"'
            challenge = {"WWW-Authenticate": f'Bearer realm="streamkv"{reason}'}
            return _Meaning(401, str(error), _INVALID, code="invalid_api_key", headers=challenge)
        case OriginRefused():
            return _Meaning(403, str(error), _INVALID, code="origin_not_allowed")
        case UnknownModel():
            return _Meaning(404, str(error), _INVALID, param="model", code="model_not_found")
        case UnknownStream():
            return _Meaning(404, str(error), _INVALID, code="unknown_stream")
        case RateLimited():
            return _Meaning(
                429, str(error), error.refused_by, code="rate_limit_exceeded", retry_after_s=error.retry_after_s
            )
        case Overloaded():
            return _Meaning(503, str(error), "overloaded_error", code="overloaded", retry_after_s=error.retry_after_s)
        case EngineUnavailable():
            return _Meaning(503, str(error), _SERVER, code="not_ready", retry_after_s=error.retry_after_s)
        case RequestTimeout():
            return _Meaning(504, str(error), _SERVER, code="timeout")
        case AnswerBrokenOff():
            return _Meaning(504 if error.is_timeout else 503, str(error), _SERVER, code="broken_off")
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
    headers = meaning.headers | ({"Retry-After": str(meaning.retry_after)} if meaning.status in _RETRIED else {})
    return ErrorAnswer(meaning.status, _encode(meaning.fields()), headers)


def describe_status(status: int, message: str) -> ErrorAnswer:
    """The answer for an error that aiohttp found: no such path or method, a body over the limit or of a wrong type."""
    code, instead = _OF_STATUS.get(status, (None, ""))
    if status >= 500:
        meaning = _Meaning(status, _INTERNAL_MESSAGE, _SERVER, code="internal_error")
    else:
        meaning = _Meaning(status, instead or message, _INVALID, code=code)
    return ErrorAnswer(status, _encode(meaning.fields()))


def error_body(error: BaseException) -> bytes:
    """OpenAI's error object, as a stream's last event has it; of a 429 or 503 with retry_after_s."""
    return _encode(_meaning(error).event_fields())


def error_fields(error: BaseException) -> dict[str, object]:
    """message, type, param and code, and retry_after_s of a 429 or 503, for an event of a WebSocket."""
    return _meaning(error).event_fields()


def in_shape_of(path: str, answer: ErrorAnswer) -> ErrorAnswer:
    """An answer as clients of this path expect it: below /v1/messages in the shape of Anthropic's API, which has a
    type for each status, and the field only in the message."""
    if path != "/v1/messages" and not path.startswith("/v1/messages/"):
        return answer
    error = msgspec.json.decode(answer.body)["error"]
    type_ = _ANTHROPIC_TYPES.get(answer.status, "api_error" if answer.status >= 500 else _INVALID)
    body = msgspec.json.encode({"type": "error", "error": {"type": type_, "message": error["message"]}})
    return msgspec.structs.replace(answer, body=body)


def anthropic_error_body(error: BaseException) -> bytes:
    """An error as the last event of a stream of Anthropic's API has it."""
    return in_shape_of("/v1/messages", describe(error)).body


def _encode(fields: dict[str, object]) -> bytes:
    return msgspec.json.encode({"error": fields})
