"""Request ids in and out, and each request's line in the log: nothing of a prompt, an answer, a key or a query."""

import asyncio
import io
import json
import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import keys as app_keys
from gateway.access_log import AccessLog
from gateway.limits import Allowance
from gateway.records import take_request_id
from tests.support.api_keys import ALICE, BOB, bearer, keys_with
from tests.support.running_gateway import VOCAB_SIZE, RunningGateway, eventually, running_gateway
from tests.support.scripted_engine import free_endpoint, serving
from tests.support.scripted_executor import ScriptedExecutor

TEXT = "/v1/completions"
SECRET = "the cat's name is Bartholomew"


class Lines(io.StringIO):
    """What an access log wrote."""

    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.getvalue().splitlines()]

    async def of(self, route: str, count: int = 1) -> list[dict[str, Any]]:
        """Those of one path, once there are so many."""
        await eventually(lambda: len([line for line in self.objects() if line["path"] == route]) >= count, 30)
        return [line for line in self.objects() if line["path"] == route]


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
async def gateway(lines: Lines) -> AsyncIterator[RunningGateway]:
    api_keys = keys_with(alice=Allowance(), bob=Allowance(requests_per_minute=1))
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE, step_s=0.002)) as engine:
        async with running_gateway(engine.endpoint, api_keys=api_keys, access_log=AccessLog(True, lines)) as running:
            yield running


def body(**more: Any) -> dict[str, Any]:
    return {"prompt": SECRET, "max_tokens": 4, "temperature": 0, **more}


# Request ids


@pytest.mark.parametrize("sound", ["a", "x" * 128, "req_01HZ.A-b:c/d=e+f@g", "Root=1-67891233-abcdef01"])
def test_a_sound_request_id_is_kept(sound: str) -> None:
    assert take_request_id({"X-Request-Id": sound}) == sound


@pytest.mark.parametrize("odd", ["", "x" * 129, "two words", 'a"b', "a\nb", "ü", "\udcff", "a{b}", "a\\b", "<b>"])
def test_an_odd_request_id_is_replaced(odd: str) -> None:
    given = take_request_id({"X-Request-Id": odd})
    assert given != odd and re.fullmatch(r"[0-9a-f]{32}", given)


@given(st.text())
def test_no_request_id_can_break_a_line(text: str) -> None:
    assert re.fullmatch(r"[!-~]{1,128}", take_request_id({"X-Request-Id": text}))


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_request_id_comes_back_goes_to_the_engine_and_into_the_log(
    gateway: RunningGateway, lines: Lines, is_streamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    headers = {**bearer(ALICE), "X-Request-Id": "my-request.1"}
    url = gateway.url + TEXT
    async with gateway.session.post(url, json=body(stream=is_streamed, max_tokens=50), headers=headers) as response:
        assert response.headers["x-request-id"] == "my-request.1"
        (stream,) = gateway.app[app_keys.GENERATION]._live.values() if is_streamed else (None,)
        if stream is not None:
            submit = stream.submission(1)
            assert submit is not None and submit.label == "my-request.1"
        await response.read()
    (line,) = await lines.of(TEXT)
    assert line["request_id"] == "my-request.1"
    ended = [record for record in caplog.records if record.message == "request ended"]
    assert [record.__dict__["fields"]["request_id"] for record in ended] == ["my-request.1"]


async def test_every_answer_has_a_request_id(gateway: RunningGateway) -> None:
    seen = set()
    for method, path, key in (
        ("POST", TEXT, ALICE),
        ("POST", TEXT, "wrong"),
        ("GET", "/nothing", ALICE),
        ("DELETE", TEXT, ALICE),
        ("GET", "/health", ""),
        ("GET", "/metrics", ALICE),
        ("GET", "/v1/stream", ALICE),
    ):
        async with gateway.session.request(method, gateway.url + path, headers=bearer(key)) as response:
            seen.add(response.headers["x-request-id"])
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n")
    raw = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    (found,) = re.findall(rb"X-Request-Id: ([0-9a-f]{32})\r\n", raw, re.IGNORECASE)
    assert len(seen | {found.decode()}) == 8


async def test_a_generation_on_a_websocket_has_a_request_id_of_its_own(gateway: RunningGateway, lines: Lines) -> None:
    headers = {**bearer(ALICE), "X-Request-Id": "socket-1"}
    async with gateway.session.ws_connect(gateway.url + "/v1/stream", headers=headers) as socket:
        assert socket._response.headers["x-request-id"] == "socket-1"
        told = []
        for client_id, more in (("a", {}), ("b", {"request_id": "mine"})):
            await socket.send_json({"type": "generate", "id": client_id, **body(**more)})
            while (event := json.loads((await socket.receive(timeout=30)).data))["type"] != "done":
                if event["type"] == "started":
                    told.append(event["request_id"])
        assert re.fullmatch(r"[0-9a-f]{32}", told[0]) and told[1] == "mine"
    generations = [line for line in await lines.of("/v1/stream", 3) if line["method"] == "WS"]
    assert [line["request_id"] for line in generations] == told
    assert {line["finish_reason"] for line in generations} == {"length"}
    (socket_line,) = [line for line in await lines.of("/v1/stream", 3) if line["method"] == "GET"]
    assert (socket_line["request_id"], socket_line["status"]) == ("socket-1", 101)


# The lines


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_line_tells_what_a_request_was_and_took(
    gateway: RunningGateway, lines: Lines, is_streamed: bool
) -> None:
    async with gateway.session.post(
        gateway.url + TEXT + "?token=hidden", json=body(stream=is_streamed, n=2), headers=bearer(ALICE)
    ) as response:
        raw = await response.read()
    (line,) = await lines.of(TEXT)
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert 0 < line["ttft"] <= line["seconds"] < 60
    assert line["prompt_tokens"] > 3 and line["cached_tokens"] < line["prompt_tokens"]
    # What a stream writes is counted with its chunks' framing
    assert line.pop("bytes") == len(raw) or is_streamed
    for name in ("ttft", "seconds", "prompt_tokens", "cached_tokens", "request_id"):
        del line[name]
    assert line == {
        "method": "POST",
        "path": TEXT,
        "status": 200,
        "output_tokens": 8,
        "key": "alice",
        "finish_reason": "length",
        "error": None,
    }


async def test_a_stream_s_bytes_are_counted(gateway: RunningGateway, lines: Lines) -> None:
    async with gateway.session.post(gateway.url + TEXT, json=body(stream=True), headers=bearer(ALICE)) as response:
        num_bytes = len(await response.read())
    (line,) = await lines.of(TEXT)
    assert num_bytes <= line["bytes"] <= num_bytes + 12 * 20


async def test_refusals_have_lines_too(gateway: RunningGateway, lines: Lines) -> None:
    await gateway.post(TEXT, body(max_tokens=-1), headers=bearer(ALICE))
    await gateway.post(TEXT, body(), headers=bearer("sk-wrong-0123456789abcdef"))
    await gateway.post(TEXT, body(), headers=bearer(BOB))
    await gateway.post(TEXT, body(), headers=bearer(BOB))
    told = [(line["status"], line["key"], line["error"], line["output_tokens"]) for line in await lines.of(TEXT, 4)]
    assert told == [
        (400, "alice", "InvalidField", 0),
        (401, None, None, 0),
        (200, "bob", None, 4),
        (429, "bob", "RateLimited", 0),
    ]
    async with gateway.session.get(gateway.url + "/no/such/path?key=secret", headers=bearer(ALICE)) as response:
        assert response.status == 404
    (line,) = await lines.of("")
    assert (line["status"], line["method"]) == (404, "GET")


async def test_a_client_that_goes_is_noted(gateway: RunningGateway, lines: Lines) -> None:
    async with gateway.session.post(
        gateway.url + TEXT, json=body(stream=True, max_tokens=1500), headers=bearer(ALICE)
    ) as response:
        await response.content.readany()
    (line,) = await lines.of(TEXT)
    assert (line["status"], line["finish_reason"]) == (499, "abort")


async def test_probes_that_succeed_are_left_out(gateway: RunningGateway, lines: Lines) -> None:
    await gateway.get("/health")
    await gateway.metrics(ALICE)
    assert [line for line in lines.objects() if line["status"] == 200] == []
    assert (await gateway.get("/metrics"))[0] == 401
    assert (await lines.of("/metrics"))[0]["status"] == 401


async def test_a_reader_of_the_log_that_is_gone_stops_no_request() -> None:
    stream = Lines()
    with free_endpoint() as endpoint:
        async with running_gateway(
            endpoint, is_ready=False, startup_wait_s=0.1, access_log=AccessLog(True, stream)
        ) as gateway:
            stream.close()
            assert (await gateway.get("/v1/models"))[0] == 503
            assert (await gateway.get("/nothing"))[0] == 404


async def test_as_text_it_is_among_the_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        async with running_gateway(engine.endpoint, access_log=AccessLog(False)) as gateway:
            await gateway.post(TEXT, body())
    (record,) = [
        record for record in caplog.records if record.name == "gateway.access_log" and "POST" in str(vars(record))
    ]
    fields = record.__dict__["fields"]
    assert (record.message, fields["status"], fields["output_tokens"]) == ("request", 200, 4)


async def test_neither_prompt_nor_answer_nor_key_nor_query_is_in_any_line(
    gateway: RunningGateway, lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = "sk-wrong-fedcba9876543210"
    _, answer = await gateway.post(TEXT, body(max_tokens=30), headers=bearer(ALICE))
    made = answer["choices"][0]["text"]
    await gateway.post(f"{TEXT}?api_key={ALICE}", body(stop=SECRET), headers=bearer(ALICE))
    await gateway.post(TEXT, body(nonsense=SECRET), headers=bearer(ALICE))
    await gateway.post(TEXT, body(), headers={"x-api-key": ALICE})
    await gateway.post(TEXT, body(), headers={"x-api-key": wrong})
    for path in (f"/v1/models/{ALICE}", f"/{ALICE}", f"/metrics?key={ALICE}"):
        async with gateway.session.get(gateway.url + path, headers=bearer(ALICE)) as response:
            text = await response.text()
            assert response.status in (200, 404)
            assert path.startswith("/v1/models") or ALICE not in text
    protocols = ["streamkv.json", f"streamkv.key.{ALICE}"]
    async with gateway.session.ws_connect(f"{gateway.url}/v1/stream?k={ALICE}", protocols=protocols) as socket:
        await socket.send_json({"type": "generate", "id": SECRET, **body()})
        while json.loads((await socket.receive(timeout=30)).data)["type"] != "done":
            pass
    await lines.of("/v1/stream", 2)
    logged = lines.getvalue() + "".join(repr(vars(record)) for record in caplog.records if record.name != "asyncio")
    assert '"key":"alice"' in logged
    for secret in (ALICE, wrong, SECRET, "Bartholomew", made, "api_key="):
        assert secret not in logged, secret
