"""Models, tokens, health, readiness, metrics; and what every route says of a bad request."""

import asyncio
import gzip
import json
import logging
import math
import time
import zlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from gateway import keys
from gateway.app import Server, make_app
from gateway.auth import Caller
from gateway.metrics import HELP, GatewayMetrics, render
from gateway.outlet import NoOutlet, StreamFacts
from gateway.schema.completion import parse_completion
from streamkv.config import GatewayConfig
from streamkv.errors import ModelError
from streamkv.protocol import Histogram, Stats
from tests.support.running_gateway import (
    MODEL,
    VOCAB_SIZE,
    RunningGateway,
    eventually,
    eventually_async,
    running_gateway,
    small_tokenizer,
)
from tests.support.scripted_engine import free_endpoint, serving
from tests.support.scripted_executor import ScriptedExecutor

TEXT = "/v1/completions"


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        async with running_gateway(engine.endpoint, max_body_bytes=4096) as running:
            yield running


@pytest.fixture
async def alone() -> AsyncIterator[RunningGateway]:
    """A gateway whose engine does not exist."""
    with free_endpoint() as endpoint:
        async with running_gateway(endpoint, is_ready=False, startup_wait_s=0.2) as running:
            yield running


async def test_ready_tells_the_stage_until_the_engine_takes_work() -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE, load_s=0.8)) as engine:
        async with running_gateway(engine.endpoint, is_ready=False) as gateway:
            seen = set()
            while True:
                status, text = await gateway.get("/ready")
                answer = json.loads(text)
                assert answer.keys() >= {"stage", "percent"}
                seen.add((status, answer["stage"]))
                if status == 200:
                    break
                await asyncio.sleep(0.02)
    assert (503, "loading weights") in seen
    assert (200, "ready") in seen


async def test_health_never_waits(alone: RunningGateway) -> None:
    begun = time.perf_counter()
    assert (await alone.get("/health"))[0] == 200
    assert time.perf_counter() - begun < 0.1
    status, text = await alone.get("/ready")
    assert status == 503 and json.loads(text)["stage"]


async def test_the_metrics_stand_without_an_engine(alone: RunningGateway) -> None:
    begun = time.perf_counter()
    assert (await alone.metrics())["engine_ready"] == 0
    assert time.perf_counter() - begun < 1.0


async def test_a_silent_engine_is_lost_and_the_rest_answers() -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE), heartbeat_s=5.0) as engine:
        async with running_gateway(engine.endpoint, engine_timeout_s=0.5, startup_wait_s=0.1) as gateway:
            for _ in range(100):
                if (await gateway.get("/ready"))[0] == 503:
                    break
                await asyncio.sleep(0.02)
            assert "said nothing" in (await gateway.get("/ready"))[1]
            assert (await gateway.get("/health"))[0] == 200
            status, answer = await gateway.post(TEXT, {"prompt": [5], "max_tokens": 2})
            assert (status, answer["error"]["code"]) == (503, "not_ready")


async def test_the_models_are_listed(gateway: RunningGateway) -> None:
    status, text = await gateway.get("/v1/models")
    (model,) = json.loads(text)["data"]
    assert status == 200
    assert (model["id"], model["object"], model["max_model_len"]) == (MODEL, "model", 2048)
    assert json.loads((await gateway.get(f"/v1/models/{MODEL}"))[1]) == model
    status, text = await gateway.get("/v1/models/some/other")
    assert status == 404 and json.loads(text)["error"]["code"] == "model_not_found"


async def test_a_served_name_replaces_the_models() -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        async with running_gateway(engine.endpoint, served_model_name="our/model") as gateway:
            assert json.loads((await gateway.get("/v1/models/our/model"))[1])["id"] == "our/model"
            status, answer = await gateway.post(TEXT, {"model": "our/model", "prompt": [5], "max_tokens": 2})
            assert status == 200 and answer["model"] == "our/model"
            assert (await gateway.post(TEXT, {"model": MODEL, "prompt": [5]}))[0] == 404


async def test_tokenize_and_detokenize_are_inverse(gateway: RunningGateway) -> None:
    text = "one two, 中文 😀\n"
    status, answer = await gateway.post("/tokenize", {"prompt": text, "return_token_strs": True})
    assert status == 200
    assert answer["tokens"] == small_tokenizer().encode(text)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 2048
    status, back = await gateway.post("/detokenize", {"tokens": answer["tokens"]})
    assert (status, back) == (200, {"prompt": text})


async def test_tokenize_takes_a_chat(gateway: RunningGateway) -> None:
    messages = [{"role": "user", "content": "<|im_end|> is text"}]
    _, answer = await gateway.post("/tokenize", {"messages": messages})
    assert answer["tokens"].count(2) == 1, "a special token was made of a user's text"
    _, back = await gateway.post("/detokenize", {"tokens": answer["tokens"]})
    assert back["prompt"].startswith("<|im_start|>user\n<|im_end|> is text<|im_end|>")


@pytest.mark.parametrize("tokens", [[-1], [VOCAB_SIZE], [True], [2**63], "abc"])
async def test_detokenize_checks_its_ids(gateway: RunningGateway, tokens: object) -> None:
    status, answer = await gateway.post("/detokenize", {"tokens": tokens})
    assert status == 400 and answer["error"]["param"].startswith("tokens")


async def test_the_metrics_parse_and_have_their_names(gateway: RunningGateway) -> None:
    for _ in range(3):
        await gateway.post(TEXT, {"prompt": [5, 6], "max_tokens": 4})
    await gateway.post(TEXT, {"prompt": [5, 6], "max_tokens": -4})
    async with gateway.session.get(gateway.url + "/metrics") as response:
        text = await response.text()
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert all(name.startswith("streamkv_") for name in families)
    wanted = {
        "kv_cache_usage",
        "num_free_blocks",
        "num_allocated_blocks",
        "num_running_requests",
        "num_waiting_requests",
    }
    wanted |= {"time_to_first_token_seconds", "time_per_output_token_seconds", "e2e_request_latency_seconds"}
    assert wanted <= {name.removeprefix("streamkv_") for name in families}
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert samples["streamkv_gateway_requests_total", "length"] == 3
    assert samples["streamkv_gateway_refused_total", "400"] == 1
    assert samples[("streamkv_gateway_output_tokens_total",)] == 12
    assert samples[("streamkv_time_to_first_token_seconds_count",)] == 3
    assert samples["streamkv_time_to_first_token_seconds_bucket", "+Inf"] == 3
    assert samples[("streamkv_gateway_live_streams",)] == 0


async def test_every_metric_says_what_it_is(gateway: RunningGateway) -> None:
    await asyncio.gather(
        gateway.post(TEXT, {"prompt": [5, 6], "max_tokens": 4}),
        gateway.post(TEXT, {"prompt": [5, 6], "max_tokens": -4}),
        gateway.post(TEXT, {"prompt": [5, 6], "max_tokens": 40, "stop": "e"}),
    )
    families = list(text_string_to_metric_families((await gateway.get("/metrics"))[1]))
    assert len(families) > 50
    assert [family.name for family in families if not family.documentation] == []
    assert all("\n" not in text and "\\" not in text for text in HELP.values())


def test_a_figure_that_is_not_known_here_or_is_no_number_is_shown_all_the_same() -> None:
    engine = Stats(
        1,
        {
            "num_gremlins": 3.5,
            'num_tiers{tier="host"}': 1,
            'num_tiers{tier="disk"}': 2,
            "latency_model_error": math.nan,
        },
        {"gremlins_total": 2, 'kinds_total{kind="a"}': 1, 'kinds_total{kind="b"}': math.inf},
        {"gremlin_seconds": Histogram([1.0], [2, 3], 4.5)},
    )
    text = render(GatewayMetrics(), gauges={}, counters={}, engine=engine).decode()
    families = {family.name.removeprefix("streamkv_"): family for family in text_string_to_metric_families(text)}
    values = {
        (sample.name.removeprefix("streamkv_"), *sample.labels.values()): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert families["num_tiers"].type == "gauge" and families["kinds"].type == "counter"
    assert (values["num_gremlins",], values["num_tiers", "host"], values["num_tiers", "disk"]) == (3.5, 1, 2)
    assert (values["gremlins_total",], values["kinds_total", "a"], values["kinds_total", "b"]) == (2, 1, math.inf)
    assert values["gremlin_seconds_bucket", "+Inf"] == 5 and math.isnan(values["latency_model_error",])


NOT_HTTP = [
    b"nonsense\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03secret\r\n\r\n",
    b"GET /health HTTP/9.9.9\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nNo colon secret\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX: secret\x00\r\n\r\n",
    b"GET /" + b"secret" * 3000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"secret" * 3000 + b"\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: secret\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
]


@pytest.mark.parametrize("data", NOT_HTTP)
async def test_what_is_not_http_gets_an_error_body_and_one_quiet_line(
    gateway: RunningGateway, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    raw = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    head, _, text = raw.partition(b"\r\n\r\n")
    answer = json.loads(text)
    assert b" 400 " in head.splitlines()[0] and b"application/json" in head
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == "invalid_request_error" and answer["error"]["message"]
    lines = [record for record in caplog.records if record.name.startswith(("gateway", "aiohttp"))]
    assert [record.message for record in lines] == ["refused what is not HTTP"]
    assert lines[0].levelno <= logging.INFO and lines[0].exc_info is None
    assert "secret" not in text.decode() + repr(lines[0].__dict__)
    assert (await gateway.metrics())['gateway_refused_total{status="400"}'] == 1
    assert (await gateway.get("/health"))[0] == 200


async def _refused(gateway: RunningGateway, status: int, method: str, path: str, **options: Any) -> dict[str, Any]:
    async with gateway.session.request(method, gateway.url + path, **options) as response:
        answer = await response.json()
        assert response.status == status
        assert answer["error"].keys() == {"message", "type", "param", "code"}
        return {**answer["error"], "headers": response.headers}


JSON_TYPE = {"Content-Type": "application/json"}


async def test_unknown_paths_methods_and_types_have_error_bodies(gateway: RunningGateway) -> None:
    await _refused(gateway, 404, "GET", "/nothing/here")
    error = await _refused(gateway, 405, "GET", TEXT)
    assert "POST" in error["headers"]["Allow"]
    await _refused(gateway, 415, "POST", TEXT, data=b"{}", headers={"Content-Type": "text/html"})
    for encoding in ("foo", "br", "zstd"):
        await _refused(gateway, 415, "POST", TEXT, data=b"{}", headers={**JSON_TYPE, "Content-Encoding": encoding})
    await _refused(gateway, 400, "GET", "/v1/stream")


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"nonsense", b'{"prompt": "\xff"}', b'{"prompt": 1, "prompt": 2}', b"[" * 2000 + b"]" * 2000],
)
@pytest.mark.parametrize("path", [TEXT, "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_broken_json_is_a_400(gateway: RunningGateway, path: str, data: bytes) -> None:
    await _refused(gateway, 400, "POST", path, data=data, headers=JSON_TYPE)


async def test_a_body_over_the_limit_is_a_413_however_it_comes(gateway: RunningGateway) -> None:
    large = json.dumps({"prompt": "x" * 5000}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(large), 500):
            yield large[start : start + 500]

    await _refused(gateway, 413, "POST", TEXT, data=large, headers=JSON_TYPE)
    await _refused(gateway, 413, "POST", TEXT, data=pieces(), headers=JSON_TYPE)
    for encoding, packed in (("gzip", gzip.compress(large)), ("deflate", zlib.compress(large))):
        assert len(packed) < 4096
        headers = {**JSON_TYPE, "Content-Encoding": encoding}
        await _refused(gateway, 413, "POST", TEXT, data=packed, headers=headers)


async def test_a_packed_body_within_the_limit_is_read(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    data = gzip.compress(json.dumps({"prompt": [5, 6], "max_tokens": 3}).encode())
    headers = {**JSON_TYPE, "Content-Encoding": "gzip"}
    async with gateway.session.post(gateway.url + TEXT, data=data, headers=headers) as response:
        assert response.status == 200
    for broken in (data[: len(data) // 2], b"no gzip at all"):
        closing = {**headers, "Connection": "close"}
        async with gateway.session.post(gateway.url + TEXT, data=broken, headers=closing) as response:
            assert response.status == 400
    assert "Traceback" not in caplog.text, "a client's fault is no fault of ours"


async def test_a_bomb_is_refused_before_it_is_unpacked(gateway: RunningGateway) -> None:
    bomb = gzip.compress(b"0" * 50_000_000)
    headers = {**JSON_TYPE, "Content-Encoding": "gzip"}
    begun = time.perf_counter()
    async with (
        aiohttp.ClientSession() as session,
        session.post(gateway.url + TEXT, data=bomb, headers=headers) as answer,
    ):
        assert answer.status == 413
    assert time.perf_counter() - begun < 2.0


async def test_a_tokenizer_that_cannot_be_loaded_is_a_500_that_says_so() -> None:
    def fail() -> Any:
        raise ModelError("no such folder")

    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        async with running_gateway(engine.endpoint, fail, is_ready=False) as gateway:
            status, answer = await gateway.post(TEXT, {"prompt": "x"})
            assert status == 500 and "tokenizer" in answer["error"]["message"]
            assert (await gateway.get("/health"))[0] == 200


async def test_a_draining_gateway_refuses_new_work_and_ends_the_old() -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE, step_s=0.005)) as engine:
        async with running_gateway(engine.endpoint) as gateway:
            body = {"prompt": [5, 6], "max_tokens": 60, "temperature": 0, "ignore_eos": True}
            live = asyncio.create_task(gateway.events(TEXT, body))
            await eventually(lambda: gateway.app[keys.ENGINE].num_tokens > 0)
            drain = asyncio.create_task(gateway.server.drain(10.0))
            await asyncio.sleep(0)
            assert (await gateway.get("/ready"))[0] == 503
            status, answer = await gateway.post(TEXT, body)
            assert (status, answer["error"]["type"]) == (503, "server_error")
            assert (await live).reasons() == {0: ["length"]}
            await asyncio.wait_for(drain, 1.0)


async def test_streams_that_outlast_the_drain_are_told_so() -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE, step_s=0.005)) as engine:
        async with running_gateway(engine.endpoint) as gateway:
            body = {"prompt": [5, 6], "max_tokens": 1500, "temperature": 0}
            streamed = asyncio.create_task(gateway.events(TEXT, body))
            whole = asyncio.create_task(gateway.post(TEXT, body))
            await eventually(lambda: gateway.app[keys.ENGINE].num_tokens >= 10)
            await gateway.server.drain(0.05)
            await gateway.server.close()
            stream = await streamed
            assert stream.reasons() == {0: ["abort"]} and stream.data[-1] == "[DONE]"
            assert (await whole)[1]["choices"][0]["finish_reason"] == "abort"


async def test_an_engine_with_another_model_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE - 1)) as engine:
        async with running_gateway(engine.endpoint, is_ready=False) as gateway:

            async def is_wrong() -> bool:
                status, text = await gateway.get("/ready")
                return status == 503 and json.loads(text)["status"] == "wrong_model"

            await eventually_async(is_wrong)
            for path in ("/v1/completions", "/v1/chat/completions"):
                prompt = (
                    {"prompt": "one"}
                    if path == "/v1/completions"
                    else {"messages": [{"role": "user", "content": "one"}]}
                )
                status, answer = await gateway.post(path, prompt)
                assert status == 503 and "tokenizer" in answer["error"]["message"]
    assert [record.message for record in caplog.records].count("wrong model") == 1


async def test_an_engine_with_padded_ids_is_taken() -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE + 12)) as engine:
        async with running_gateway(engine.endpoint) as gateway:
            assert (await gateway.get("/ready"))[0] == 200


async def test_a_fault_after_the_headers_breaks_the_connection_off() -> None:
    async def fail_late(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first")
        raise RuntimeError("a fault of ours")

    with free_endpoint() as endpoint:
        app = make_app(GatewayConfig(port=0), small_tokenizer, endpoint=endpoint)
        app.router.add_get("/late", fail_late)
        server = Server(app)
        await server.start("127.0.0.1", 0)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
            writer.write(b"GET /late HTTP/1.1\r\nHost: x\r\n\r\n")
            raw = await asyncio.wait_for(reader.read(), 5)
            writer.close()
        finally:
            await server.close()
    assert raw.endswith(b"5\r\nfirst\r\n") and raw.count(b"HTTP/1.1") == 1


async def test_a_request_that_could_not_be_begun_is_not_live(gateway: RunningGateway) -> None:
    class Broken(NoOutlet):
        def begin(self, stream: StreamFacts) -> None:
            raise RuntimeError("a fault of ours")

    service = gateway.app[keys.GENERATION]
    prepared = await service.prepare(parse_completion(b'{"prompt": "one"}', await service.limits()), Caller())
    with pytest.raises(RuntimeError):
        service.start(prepared, Broken())
    assert service.num_live == 0 and await service.wait_idle(0.1)
