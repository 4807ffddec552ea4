"""Every exception has one status and OpenAI's shape, and what is ours stays ours."""

import json
import math

import pytest

from gateway.admission import UnknownModel
from gateway.auth import OriginRefused, Unauthorized
from gateway.engine_client import EngineUnavailable
from gateway.errors import describe, describe_status, error_body, error_fields
from gateway.failures import EngineFault, Overloaded, RequestTimeout, UnknownStream
from gateway.limits import Allowance, RateLimited, Standing, Verdict
from streamkv.errors import InvalidField, ModelError


def over_limit(limit: str, retry_after_s: float) -> RateLimited:
    return RateLimited(Verdict(Standing(Allowance(60, 600, 6)), limit, retry_after_s))


INVALID, SERVER = "invalid_request_error", "server_error"


@pytest.mark.parametrize(
    ("error", "status", "type_", "param", "code"),
    [
        (InvalidField("top_p", "must be over 0"), 400, INVALID, "top_p", "invalid_value"),
        (Unauthorized(is_missing=True), 401, INVALID, None, "invalid_api_key"),
        (OriginRefused(), 403, INVALID, None, "origin_not_allowed"),
        (UnknownModel("gpt-5", "smol"), 404, INVALID, "model", "model_not_found"),
        (UnknownStream("gone"), 404, INVALID, None, "unknown_stream"),
        (over_limit("tokens", 3.2), 429, "tokens", None, "rate_limit_exceeded"),
        (Overloaded("full", 3.2), 503, "overloaded_error", None, "overloaded"),
        (EngineUnavailable("loading", 0.0), 503, SERVER, None, "not_ready"),
        (RequestTimeout(600.0), 504, SERVER, None, "timeout"),
        (EngineFault("it broke"), 500, SERVER, None, "engine_error"),
        (ModelError("/secret/path"), 500, SERVER, None, "model_error"),
        (RuntimeError("/secret/path"), 500, SERVER, None, "internal_error"),
    ],
)
def test_an_exception_has_its_status_and_openai_s_shape(
    error: Exception, status: int, type_: str, param: str | None, code: str
) -> None:
    answer = describe(error)
    assert answer.status == status
    body = json.loads(answer.body)
    assert set(body) == {"error"}
    assert error_fields(error) == json.loads(error_body(error))["error"]
    assert body["error"] == {name: value for name, value in error_fields(error).items() if name != "retry_after_s"}
    assert {name: body["error"][name] for name in ("type", "param", "code")} == {
        "type": type_,
        "param": param,
        "code": code,
    }
    assert body["error"]["message"]
    assert "/secret" not in body["error"]["message"]
    if status < 500 or isinstance(error, EngineFault | EngineUnavailable | RequestTimeout):
        assert body["error"]["message"] == str(error)


@pytest.mark.parametrize(("retry_after_s", "header"), [(0.01, "1"), (1.0, "1"), (7.2, "8"), (5000.1, "5001")])
def test_429_says_when_however_long_it_takes(retry_after_s: float, header: str) -> None:
    error = over_limit("requests", retry_after_s)
    assert describe(error).headers == {"Retry-After": header}
    assert error_fields(error)["retry_after_s"] == int(header)


@pytest.mark.parametrize(
    ("retry_after_s", "header"),
    [
        (0.0, "1"),
        (0.2, "1"),
        (1.0, "1"),
        (3.2, "4"),
        (10.0, "10"),
        (-5.0, "1"),
        (1e9, "3600"),
        (math.inf, "3600"),
        (math.nan, "3600"),
    ],
)
def test_503_says_when_to_try_again_in_whole_seconds(retry_after_s: float, header: str) -> None:
    for error in (EngineUnavailable("loading", retry_after_s), Overloaded("full", retry_after_s)):
        assert describe(error).headers == {"Retry-After": header}
        assert error_fields(error)["retry_after_s"] == int(header), "an event has no header"
        assert json.loads(error_body(error))["error"]["retry_after_s"] == int(header)
    assert describe(InvalidField("n", "x")).headers == {}
    assert "retry_after_s" not in error_fields(InvalidField("n", "x"))


def test_401_says_how_to_bring_a_key() -> None:
    assert describe(Unauthorized(is_missing=True)).headers == {"WWW-Authenticate": 'Bearer realm="streamkv"'}
    assert 'error="invalid_token"' in describe(Unauthorized(is_missing=False)).headers["WWW-Authenticate"]


@pytest.mark.parametrize(
    ("status", "type_", "code", "message"),
    [
        (404, INVALID, "not_found", "there is nothing at this path"),
        (405, INVALID, "method_not_allowed", "this path does not take that method"),
        (413, INVALID, "body_too_large", "said"),
        (415, INVALID, "unsupported_media_type", "said"),
        (400, INVALID, None, "said"),
        (500, SERVER, "internal_error", "the server made a mistake"),
    ],
)
def test_what_aiohttp_finds_has_the_same_shape(status: int, type_: str, code: str | None, message: str) -> None:
    answer = describe_status(status, "said")
    assert answer.status == status
    error = json.loads(answer.body)["error"]
    assert (error["type"], error["param"], error["code"]) == (type_, None, code)
    assert error["message"].startswith(message)
