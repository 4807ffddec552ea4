"""A caller's limits, whatever the request came over: who is refused, what is charged, what the headers say."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest

from gateway import keys as app_keys
from gateway.auth import ApiKeys, Caller
from gateway.cursor import FROM_START
from gateway.limits import Allowance, OwnBooks, Verdict
from gateway.outlet import NoOutlet
from tests.support.api_keys import ALICE, BOB, bearer, keys_with
from tests.support.running_gateway import (
    MODEL,
    VOCAB_SIZE,
    RunningGateway,
    eventually,
    eventually_async,
    running_gateway,
)
from tests.support.scripted_engine import serving
from tests.support.scripted_executor import ScriptedExecutor

TEXT = "/v1/completions"
PROMPT = list(range(30, 40))


def body(**more: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, **more}


@contextlib.asynccontextmanager
async def gateway_with(
    api_keys: ApiKeys | None = None, *, step_s: float = 0.0, **settings: Any
) -> AsyncIterator[RunningGateway]:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE, step_s=step_s)) as engine:
        async with running_gateway(engine.endpoint, api_keys=api_keys, **settings) as running:
            yield running


async def send(
    gateway: RunningGateway, request: dict[str, Any], key: str = ALICE, path: str = TEXT
) -> tuple[int, dict[str, str], str]:
    """Status, headers in lower case, and text of an answer."""
    async with gateway.session.post(gateway.url + path, json=request, headers=bearer(key)) as response:
        text = await response.text()
        return response.status, {name.lower(): value for name, value in response.headers.items()}, text


def limits_of(headers: dict[str, str]) -> dict[str, str]:
    prefix = "x-ratelimit-"
    return {name.removeprefix(prefix): value for name, value in headers.items() if name.startswith(prefix)}


async def standing(gateway: RunningGateway, name: str, allowance: Allowance) -> Any:
    return await gateway.app[app_keys.RECEPTION].books.look(name, allowance)


# Requests per minute


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_requests_beyond_the_limit_are_a_429_that_says_when(is_streamed: bool) -> None:
    async with gateway_with(keys_with(alice=Allowance(requests_per_minute=2), bob=Allowance())) as gateway:
        for remaining in ("1", "0"):
            status, headers, _ = await send(gateway, body(stream=is_streamed))
            limits = limits_of(headers)
            assert status == 200 and limits.keys() == {"limit-requests", "remaining-requests", "reset-requests"}
            assert (limits["limit-requests"], limits["remaining-requests"]) == ("2", remaining)
        status, headers, text = await send(gateway, body(stream=is_streamed))
        error = json.loads(text)["error"]
        assert (status, error["code"], error["type"], error["param"]) == (429, "rate_limit_exceeded", "requests", None)
        assert "2 requests per minute" in error["message"]
        assert 1 <= int(headers["retry-after"]) <= 30 and limits_of(headers)["remaining-requests"] == "0"
        assert (await send(gateway, body(), BOB))[0] == 200, "another key's limit is its own"
        assert limits_of((await send(gateway, body(), BOB))[1]) == {}, "without a limit there is nothing to tell"


async def test_every_counted_path_takes_from_the_same_budget_and_questions_take_nothing() -> None:
    chat = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 2}
    async with gateway_with(keys_with(alice=Allowance(requests_per_minute=10))) as gateway:
        requests = [
            ("/v1/chat/completions", chat),
            (TEXT, body()),
            ("/tokenize", {"prompt": "one"}),
            ("/detokenize", {"tokens": [30]}),
            (TEXT, body(max_tokens=-1)),
        ]
        for number, (path, request) in enumerate(requests, 1):
            status, headers, _ = await send(gateway, request, path=path)
            assert status == (400 if request.get("max_tokens") == -1 else 200)
            assert limits_of(headers)["remaining-requests"] == str(10 - number)
        for path, status in (("/v1/models", 200), ("/metrics", 200), ("/nothing", 404)):
            async with gateway.session.get(gateway.url + path, headers=bearer(ALICE)) as response:
                assert response.status == status
                assert response.headers["x-ratelimit-remaining-requests"] == str(10 - len(requests))
        for path in ("/health", "/ready"):
            async with gateway.session.get(gateway.url + path) as response:
                assert limits_of(dict(response.headers)) == {}


async def test_the_openai_client_sees_a_rate_limit_and_its_headers() -> None:
    async with (
        gateway_with(keys_with(alice=Allowance(requests_per_minute=1))) as gateway,
        openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key=ALICE, max_retries=0) as client,
    ):
        raw = await client.completions.with_raw_response.create(model=MODEL, prompt=PROMPT, max_tokens=2)
        assert raw.headers["x-ratelimit-remaining-requests"] == "0" and raw.headers["x-request-id"]
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=2)
        assert caught.value.code == "rate_limit_exceeded"
        assert int(caught.value.response.headers["retry-after"]) >= 1


async def test_the_settings_hold_for_everybody_without_a_key() -> None:
    async with gateway_with(requests_per_minute=1, tokens_per_minute=500, max_concurrent=7) as gateway:
        status, headers, _ = await send(gateway, body())
        assert status == 200 and limits_of(headers)["limit-tokens"] == "500"
        assert (await send(gateway, body()))[0] == 429


# Tokens per minute


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_tokens_of_prompt_and_answer_are_charged(is_streamed: bool) -> None:
    allowance = Allowance(tokens_per_minute=60_000)
    async with gateway_with(keys_with(alice=allowance)) as gateway:
        status, headers, _ = await send(gateway, body(stream=is_streamed, n=2))
        assert status == 200
        # A stream's headers go out before its answer is made
        remaining = 60_000 - len(PROMPT) - (0 if is_streamed else 8)
        assert remaining - 8 <= int(limits_of(headers)["remaining-tokens"]) <= remaining
        taken = 60_000 - (await standing(gateway, "alice", allowance)).num_tokens
        assert len(PROMPT) + 8 - 30 < taken <= len(PROMPT) + 8, "it fills up by a thousand a second meanwhile"


async def test_a_caller_in_debt_waits_until_it_is_paid() -> None:
    async with gateway_with(keys_with(alice=Allowance(tokens_per_minute=60))) as gateway:
        assert (await send(gateway, body(max_tokens=200)))[0] == 200
        status, headers, text = await send(gateway, body())
        assert status == 429 and json.loads(text)["error"]["type"] == "tokens"
        assert 100 <= int(headers["retry-after"]) <= 151
        assert limits_of(headers)["remaining-tokens"] == "0"


async def test_a_long_answer_is_charged_while_it_is_made() -> None:
    allowance = Allowance(tokens_per_minute=600)
    async with gateway_with(keys_with(alice=allowance), step_s=0.005) as gateway:
        live = asyncio.create_task(send(gateway, body(max_tokens=1900, stream=True)))

        async def is_charged() -> bool:
            return (await standing(gateway, "alice", allowance)).num_tokens < 600 - len(PROMPT) - 50

        await eventually_async(is_charged, 30)
        assert gateway.app[app_keys.GENERATION].num_live == 1
        live.cancel()
        await asyncio.gather(live, return_exceptions=True)
        await eventually(lambda: not gateway.app[app_keys.GENERATION].num_live, 30)


async def test_what_the_engine_did_not_take_is_not_charged() -> None:
    allowance = Allowance(tokens_per_minute=100)
    executor = ScriptedExecutor(vocab_size=VOCAB_SIZE, step_s=0.02)
    with serving(executor, max_queue=1, max_num_seqs=1) as engine:
        async with running_gateway(engine.endpoint, api_keys=keys_with(alice=allowance, bob=Allowance())) as gateway:
            busy = [asyncio.create_task(send(gateway, body(max_tokens=300), BOB)) for _ in range(2)]
            stats = gateway.app[app_keys.ENGINE]

            async def is_full() -> bool:
                figures = await stats.stats(5.0)
                return figures is not None and figures.gauges["num_waiting_requests"] >= 1

            await eventually_async(is_full, 30)
            status, headers, _ = await send(gateway, body())
            assert status == 503 and int(headers["retry-after"]) >= 1
            assert (await standing(gateway, "alice", allowance)).num_tokens == 100.0
            assert (await gateway.metrics(BOB))['gateway_shed_total{reason="queue_full"}'] == 1
            for task in busy:
                task.cancel()
            await asyncio.gather(*busy, return_exceptions=True)


# At once


async def test_a_place_is_taken_from_the_first_byte_to_the_last_token() -> None:
    allowance = Allowance(max_concurrent=2)
    async with gateway_with(keys_with(alice=allowance), step_s=0.01) as gateway:
        live = [asyncio.create_task(send(gateway, body(max_tokens=1500, stream=True))) for _ in range(2)]
        await eventually(lambda: gateway.app[app_keys.GENERATION].num_live == 2, 30)
        status, headers, text = await send(gateway, body())
        assert status == 429 and json.loads(text)["error"]["type"] == "concurrency"
        assert headers["retry-after"] == "1"
        live.pop().cancel()

        async def is_let_in() -> bool:
            return (await send(gateway, body()))[0] == 200

        await eventually_async(is_let_in, 30)
        live.pop().cancel()
        await eventually(lambda: not gateway.app[app_keys.GENERATION].num_live, 30)
        assert (await standing(gateway, "alice", allowance)).num_live == 0


@pytest.mark.parametrize(
    "request_body",
    [b"{", b'{"prompt": 7}', b'{"prompt": "one", "n": -1}', b'{"prompt": "one", "model": "other"}'],
)
async def test_a_refused_request_gives_its_place_back(request_body: bytes) -> None:
    allowance = Allowance(max_concurrent=1)
    async with gateway_with(keys_with(alice=allowance)) as gateway:
        for _ in range(2):
            status, _ = await gateway.post(TEXT, request_body, headers=bearer(ALICE))
            assert status in (400, 404)
        assert (await standing(gateway, "alice", allowance)).num_live == 0


async def test_several_prompts_are_one_request_and_all_their_tokens() -> None:
    allowance = Allowance(requests_per_minute=9, tokens_per_minute=60_000, max_concurrent=1)
    async with gateway_with(keys_with(alice=allowance)) as gateway:
        status, headers, _ = await send(gateway, body(prompt=[PROMPT, PROMPT, PROMPT]))
        assert status == 200
        limits = limits_of(headers)
        assert limits["remaining-requests"] == "8"
        assert int(limits["remaining-tokens"]) == 60_000 - 3 * (len(PROMPT) + 4)
        assert (await standing(gateway, "alice", allowance)).num_live == 0


async def test_a_stream_that_outlives_its_client_keeps_its_place_also_when_it_is_taken_up() -> None:
    allowance = Allowance(max_concurrent=1, tokens_per_minute=1_000_000)
    async with gateway_with(keys_with(alice=allowance), step_s=0.01) as gateway:
        async with gateway.session.ws_connect(gateway.url + "/v1/stream", headers=bearer(ALICE)) as socket:
            await socket.send_json({"type": "generate", "id": "a", "attach_grace_s": 60, **body(max_tokens=1500)})
            started = await read(socket, "started")
            await read(socket, "delta")
        service = gateway.app[app_keys.GENERATION]
        await eventually(lambda: not gateway.app[app_keys.SOCKETS].live, 30)
        assert service.num_live == 1 and (await send(gateway, body()))[0] == 429
        caller = Caller("alice", allowance=allowance)
        stream = await service.attach(bytes.fromhex(started["stream_id"]), FROM_START, NoOutlet(), caller)
        await asyncio.wait_for(asyncio.shield(stream.started), 30)
        assert (await standing(gateway, "alice", allowance)).num_live == 1
        assert (await send(gateway, body()))[0] == 429
        stream.cancel("cancelled")
        left = await standing(gateway, "alice", allowance)
        assert left.num_live == 0
        made = stream.num_output + len(PROMPT)
        assert 1_000_000 - left.num_tokens <= made + 1, "no token is charged twice"
        assert (await send(gateway, body()))[0] == 200


async def test_an_answer_that_is_taken_up_by_its_last_event_is_no_new_request() -> None:
    allowance = Allowance(requests_per_minute=1, max_concurrent=1)
    async with gateway_with(keys_with(alice=allowance), step_s=0.01) as gateway:
        headers = {**bearer(ALICE), "X-Attach-Grace": "60"}
        url, request = gateway.url + TEXT, body(max_tokens=30, stream=True)
        async with gateway.session.post(url, json=request, headers=headers) as response:
            first = await response.content.readuntil(b"\n\n")
        event_id = first.decode().partition("id: ")[2].splitlines()[0]
        headers["Last-Event-ID"] = event_id
        async with gateway.session.post(url, json=request, headers=headers) as response:
            assert response.status == 200
            assert response.headers["x-ratelimit-remaining-requests"] == "0"
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        assert (await standing(gateway, "alice", allowance)).num_live == 0
        status, _, _ = await send(gateway, {"prompt": "one"}, path="/tokenize")
        assert status == 429
        async with gateway.session.post(gateway.url + "/tokenize", json={"prompt": "one"}, headers=headers) as response:
            assert response.status == 429, "the header frees no other request"


class SlowBooks(OwnBooks):
    """As those of another process: the answer takes a while, whoever waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = asyncio.Event()
        self.num_asked = 0

    async def admit(self, name: str, allowance: Allowance) -> Verdict:
        self.num_asked += 1
        await self.answer.wait()
        return await super().admit(name, allowance)


async def test_a_client_that_goes_while_the_books_are_asked_keeps_no_place() -> None:
    allowance = Allowance(max_concurrent=1)
    async with gateway_with(keys_with(alice=allowance)) as gateway:
        books = gateway.app[app_keys.RECEPTION].books = SlowBooks()
        gone = asyncio.create_task(send(gateway, body()))
        await eventually(lambda: books.num_asked == 1, 30)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await eventually(lambda: bool(gateway.app[app_keys.RECEPTION]._unheard), 30)
        books.answer.set()
        await eventually(lambda: not gateway.app[app_keys.RECEPTION]._unheard, 30)
        assert (await send(gateway, body()))[0] == 200
        assert (await standing(gateway, "alice", allowance)).num_live == 0


# On a WebSocket


async def read(socket: aiohttp.ClientWebSocketResponse, *kinds: str) -> dict[str, Any]:
    """The next event of one of these kinds."""
    while True:
        event: dict[str, Any] = json.loads((await socket.receive(timeout=30)).data)
        if event["type"] in kinds:
            return event


async def test_a_generate_beyond_the_limit_is_an_error_that_says_when() -> None:
    allowance = Allowance(requests_per_minute=2)
    async with (
        gateway_with(keys_with(alice=allowance)) as gateway,
        gateway.session.ws_connect(gateway.url + "/v1/stream", headers=bearer(ALICE)) as socket,
    ):
        for name in ("a", "b"):
            await socket.send_json({"type": "generate", "id": name, **body()})
            assert (await read(socket, "done", "error"))["type"] == "done"
        await socket.send_json({"type": "generate", "id": "c", **body()})
        event = await read(socket, "done", "error")
        assert (event["type"], event["id"], event["error"]["code"]) == ("error", "c", "rate_limit_exceeded")
        assert 1 <= event["error"]["retry_after_s"] <= 30
        await socket.send_json({"type": "ping"})
        await read(socket, "pong")
        await socket.send_json({"type": "generate", "id": "c", **body()})
        assert (await read(socket, "error"))["error"]["code"] == "rate_limit_exceeded", "the id is free again"
        assert gateway.app[app_keys.GENERATION].num_live == 0


async def test_generations_of_a_socket_share_its_caller_s_places() -> None:
    allowance = Allowance(max_concurrent=1)
    async with (
        gateway_with(keys_with(alice=allowance), step_s=0.01) as gateway,
        gateway.session.ws_connect(gateway.url + "/v1/stream", headers=bearer(ALICE)) as socket,
    ):
        await socket.send_json({"type": "generate", "id": "a", **body(max_tokens=1500)})
        await read(socket, "delta")
        await socket.send_json({"type": "generate", "id": "b", **body()})
        assert (await read(socket, "error"))["error"]["type"] == "concurrency"
        await socket.send_json({"type": "cancel", "id": "a"})
        await read(socket, "done")
        await socket.send_json({"type": "generate", "id": "b", **body()})
        assert (await read(socket, "done", "error"))["type"] == "done"
        assert (await standing(gateway, "alice", allowance)).num_live == 0


# Usage by key


async def test_usage_is_told_by_key_and_only_of_keys_that_there_are() -> None:
    api_keys = keys_with(alice=Allowance(requests_per_minute=1), bob=Allowance())
    async with gateway_with(api_keys) as gateway:
        await send(gateway, body())
        await send(gateway, body())
        for _ in range(2):
            await send(gateway, body(n=2), BOB)
        await send(gateway, body(), "sk-nobody-0123456789abcdef")
        figures = await gateway.metrics(BOB)
        of_keys = {name: value for name, value in figures.items() if name.startswith("key_")}
        assert of_keys == {
            'key_requests_total{key="alice"}': 1,
            'key_requests_total{key="bob"}': 2,
            'key_prompt_tokens_total{key="alice"}': 10,
            'key_prompt_tokens_total{key="bob"}': 20,
            'key_output_tokens_total{key="alice"}': 4,
            'key_output_tokens_total{key="bob"}': 16,
            'key_live_streams{key="alice"}': 0,
            'key_live_streams{key="bob"}': 0,
            'key_refused_total{key="alice",limit="requests"}': 1,
            'key_refused_total{key="alice",limit="tokens"}': 0,
            'key_refused_total{key="alice",limit="concurrency"}': 0,
            'key_refused_total{key="bob",limit="requests"}': 0,
            'key_refused_total{key="bob",limit="tokens"}': 0,
            'key_refused_total{key="bob",limit="concurrency"}': 0,
        }
        assert figures['gateway_shed_total{reason="caller_requests"}'] == 1


async def test_without_keys_there_are_no_labels() -> None:
    async with gateway_with() as gateway:
        await send(gateway, body())
        assert not [name for name in await gateway.metrics() if name.startswith("key_")]


async def test_limits_without_keys_hold_for_sockets_too() -> None:
    """An ApiKeys without keys is empty, and must not be taken for none."""
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE, step_s=0.01)) as engine:
        async with (
            running_gateway(engine.endpoint, max_concurrent=1) as gateway,
            gateway.session.ws_connect(gateway.url + "/v1/stream") as socket,
        ):
            generate = {"type": "generate", "id": "a", "prompt": "the", "max_tokens": 400, "ignore_eos": True}
            await socket.send_json(generate)
            assert (await socket.receive_json())["type"] == "started"
            assert (await gateway.post("/v1/completions", {"prompt": "the", "max_tokens": 1}))[0] == 429
            await socket.send_json({**generate, "id": "b"})
            event = await socket.receive_json()
            while event["id"] != "b":
                event = await socket.receive_json()
            assert event["error"]["code"] == "rate_limit_exceeded"
