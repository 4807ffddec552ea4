"""Which pages of other sites may ask and read, as a browser sees it."""

from collections.abc import AsyncIterator

import pytest

from gateway.cors import Cors
from gateway.limits import Allowance
from tests.support.api_keys import ALICE, bearer, keys_with
from tests.support.running_gateway import VOCAB_SIZE, RunningGateway, running_gateway
from tests.support.scripted_engine import serving
from tests.support.scripted_executor import ScriptedExecutor

TEXT = "/v1/completions"
PAGE = "https://front.example"
SDK_HEADERS = (
    "authorization,content-type,x-request-id,openai-organization,openai-project,x-api-key,anthropic-version,"
    "anthropic-dangerous-direct-browser-access,x-stainless-arch,x-stainless-lang,x-stainless-os,"
    "x-stainless-package-version,x-stainless-retry-count,x-stainless-runtime,x-stainless-runtime-version,"
    "x-stainless-timeout,last-event-id,traceparent"
)
PREFLIGHT = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": SDK_HEADERS}


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        async with running_gateway(
            engine.endpoint, api_keys=keys_with(alice=Allowance(requests_per_minute=3)), allowed_origins=PAGE
        ) as running:
            yield running


async def test_a_preflight_needs_no_key_and_allows_what_client_libraries_send(gateway: RunningGateway) -> None:
    for path in (TEXT, "/v1/models", "/v1/chat/completions"):
        async with gateway.session.options(gateway.url + path, headers=PREFLIGHT) as response:
            assert response.status == 204 and await response.read() == b""
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            assert "POST" in response.headers["Access-Control-Allow-Methods"].split(", ")
            assert response.headers["Access-Control-Allow-Headers"] == SDK_HEADERS
            assert int(response.headers["Access-Control-Max-Age"]) > 0
            assert response.headers["Vary"] == "Origin"
            assert "Access-Control-Allow-Credentials" not in response.headers


async def test_another_site_is_told_nothing(gateway: RunningGateway) -> None:
    for origin in ("https://evil.example", "https://front.example.evil.example", "http://front.example", "null"):
        async with gateway.session.options(gateway.url + TEXT, headers={**PREFLIGHT, "Origin": origin}) as response:
            assert response.status == 401
            assert not [name for name in response.headers if name.startswith("Access-Control-")]
            assert response.headers["Vary"] == "Origin"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_answers_may_be_read_with_their_headers_errors_too(gateway: RunningGateway, is_streamed: bool) -> None:
    url, request = gateway.url + TEXT, {"prompt": [5], "max_tokens": 2, "stream": is_streamed}
    for headers, body, status in (
        (bearer(ALICE), request, 200),
        (bearer(ALICE), {"prompt": 7}, 400),
        (bearer("wrong"), request, 401),
        (bearer(ALICE), request, 200),
        (bearer(ALICE), request, 429),
    ):
        async with gateway.session.post(url, json=body, headers={**headers, "Origin": PAGE}) as response:
            assert response.status == status
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            exposed = {name.lower() for name in response.headers["Access-Control-Expose-Headers"].split(", ")}
            wanted = {
                name.lower() for name in response.headers if name.lower().startswith(("x-ratelimit", "x-req", "retry"))
            }
            assert wanted and wanted <= exposed


async def test_without_origins_there_is_no_such_header() -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        async with running_gateway(engine.endpoint) as gateway:
            async with gateway.session.get(gateway.url + "/v1/models", headers={"Origin": PAGE}) as response:
                assert not [name for name in response.headers if name.startswith(("Access-Control-", "Vary"))]
            async with gateway.session.options(gateway.url + TEXT, headers=PREFLIGHT) as response:
                assert not [name for name in response.headers if name.startswith("Access-Control-")]


def test_a_star_is_for_all_and_does_not_vary() -> None:
    cors = Cors({"*"})
    assert cors.answer_headers({"Origin": "https://any.example"})["Access-Control-Allow-Origin"] == "*"
    assert "Vary" not in cors.answer_headers({"Origin": "https://any.example"})
    assert cors.answer_headers({}) == {}


@pytest.mark.parametrize("names", ["a b", "x-a,", "x\r\nset-cookie: a", "ü", "a" * 3000, ",", ""])
def test_header_names_that_are_none_are_not_given_back(names: str) -> None:
    headers = {**PREFLIGHT, "Access-Control-Request-Headers": names}
    answer = Cors({PAGE}).preflight_headers("OPTIONS", headers)
    assert answer is not None and "Access-Control-Allow-Headers" not in answer


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("GET", PREFLIGHT),
        ("OPTIONS", {"Origin": PAGE}),
        ("OPTIONS", {"Access-Control-Request-Method": "POST"}),
    ],
)
def test_what_is_no_preflight_is_not_answered_as_one(method: str, headers: dict[str, str]) -> None:
    assert Cors({PAGE}).preflight_headers(method, headers) is None
