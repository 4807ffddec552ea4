"""Spans of requests and generations, as an exporter gets them."""

import ast
import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from gateway import tracing as tracing_module
from gateway.limits import Allowance
from gateway.tracing import Tracing, load_tracing
from streamkv.errors import ConfigError
from tests.support.api_keys import ALICE, bearer, keys_with
from tests.support.running_gateway import MODEL, VOCAB_SIZE, RunningGateway, eventually, running_gateway
from tests.support.scripted_engine import serving
from tests.support.scripted_executor import ScriptedExecutor

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SECRET = "the cat's name is Bartholomew"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
async def gateway(exporter: InMemorySpanExporter) -> AsyncIterator[RunningGateway]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        async with running_gateway(
            engine.endpoint, api_keys=keys_with(alice=Allowance()), tracing=Tracing(provider)
        ) as running:
            await asyncio.sleep(0)
            exporter.clear()
            yield running


async def spans_of(exporter: InMemorySpanExporter, route: str, count: int = 1) -> list[ReadableSpan]:
    """The spans of requests to one path, once there are so many."""

    def found() -> list[ReadableSpan]:
        spans = exporter.get_finished_spans()
        return [span for span in spans if span.kind is SpanKind.SERVER and span.name.endswith(" " + route)]

    await eventually(lambda: len(found()) >= count, 30)
    return found()


def inside(exporter: InMemorySpanExporter, parent: ReadableSpan) -> list[ReadableSpan]:
    """The spans of a request's generations."""
    assert parent.context is not None
    return [
        span
        for span in exporter.get_finished_spans()
        if span.parent is not None and span.parent.span_id == parent.context.span_id
    ]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_chat_is_a_span_of_the_caller_s_trace_with_its_generation_inside(
    gateway: RunningGateway, exporter: InMemorySpanExporter, is_streamed: bool
) -> None:
    headers = {**bearer(ALICE), "traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
    request = {
        "messages": [{"role": "user", "content": SECRET}],
        "max_tokens": 5,
        "temperature": 0.5,
        "n": 2,
        "stop": SECRET,
        "stream": is_streamed,
    }
    async with gateway.session.post(gateway.url + CHAT, json=request, headers=headers) as response:
        assert response.status == 200
        await response.read()
    (span,) = await spans_of(exporter, CHAT)
    assert span.context is not None and span.parent is not None and span.attributes is not None
    assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == PARENT
    assert span.name == f"POST {CHAT}" and span.status.status_code is StatusCode.UNSET
    assert dict(span.attributes) == {
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "streamkv.request_id": "mine",
        "streamkv.key": "alice",
    }
    (child,) = inside(exporter, span)
    assert child.attributes is not None and child.name == f"chat {MODEL}"
    attributes: dict[str, Any] = dict(child.attributes)
    assert attributes.pop("gen_ai.usage.input_tokens") > 5
    assert 0 < attributes.pop("gen_ai.response.time_to_first_chunk") < 60
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "streamkv",
        "gen_ai.output.type": "text",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("length", "length"),
    }
    assert [event.name for event in child.events] == ["first token"]
    times = [span.start_time, child.start_time, child.events[0].timestamp, child.end_time, span.end_time]
    assert times == sorted(times, key=lambda time_ns: time_ns or 0) and None not in times
    assert SECRET not in "".join(each.to_json() for each in exporter.get_finished_spans())


async def test_refusals_and_lost_paths_are_spans_without_text(
    gateway: RunningGateway, exporter: InMemorySpanExporter
) -> None:
    await gateway.post(TEXT, {"prompt": SECRET, "max_tokens": -1}, headers=bearer(ALICE))
    await gateway.post(TEXT, {"prompt": SECRET}, headers=bearer("wrong"))
    refused, unknown = await spans_of(exporter, TEXT, 2)
    assert refused.attributes is not None and unknown.attributes is not None
    assert refused.attributes["http.response.status_code"] == 400
    assert refused.attributes["error.type"] == "InvalidField"
    assert refused.status.status_code is StatusCode.UNSET, "a client's mistake is none of this server's"
    assert unknown.attributes["http.response.status_code"] == 401 and "streamkv.key" not in unknown.attributes
    assert refused.parent is None
    async with gateway.session.get(gateway.url + f"/{ALICE}?{ALICE}", headers=bearer(ALICE)) as response:
        assert response.status == 404
    await eventually(lambda: any(span.name == "GET" for span in exporter.get_finished_spans()), 30)
    assert ALICE not in "".join(each.to_json() for each in exporter.get_finished_spans())


@pytest.mark.parametrize("traceparent", ["", "00-zz-b7ad6b7169203331-01", "00-" + "0" * 32 + "-b7ad6b7169203331-01"])
async def test_a_broken_traceparent_begins_a_trace_of_its_own(
    gateway: RunningGateway, exporter: InMemorySpanExporter, traceparent: str
) -> None:
    headers = {**bearer(ALICE), "traceparent": traceparent, "tracestate": "=,=" * 40}
    status, _ = await gateway.post(TEXT, {"prompt": [5], "max_tokens": 2}, headers=headers)
    (span,) = await spans_of(exporter, TEXT)
    assert status == 200 and span.parent is None and len(inside(exporter, span)) == 1


async def test_each_generation_of_a_websocket_is_a_span(
    gateway: RunningGateway, exporter: InMemorySpanExporter
) -> None:
    headers = {**bearer(ALICE), "traceparent": f"00-{TRACE}-{PARENT}-01"}
    async with gateway.session.ws_connect(gateway.url + "/v1/stream", headers=headers) as socket:
        for client_id in ("a", "b"):
            await socket.send_json({"type": "generate", "id": client_id, "prompt": [5, 6], "max_tokens": 3})
            while (await socket.receive_json(timeout=30))["type"] != "done":
                pass
    spans = await spans_of(exporter, "/v1/stream", 3)
    assert sorted(span.name for span in spans) == ["GET /v1/stream", "WS /v1/stream", "WS /v1/stream"]
    assert {f"{span.context.trace_id:032x}" for span in spans if span.context is not None} == {TRACE}
    for span in spans:
        assert len(inside(exporter, span)) == (1 if span.name.startswith("WS") else 0)


# When


def test_traces_are_off_unless_asked_for() -> None:
    assert load_tracing(False, {}) is None
    assert load_tracing(False, {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}) is None
    assert load_tracing(True, {"OTEL_SDK_DISABLED": "true"}) is None


async def test_traces_are_on_by_setting_or_by_the_library_s_own_variable() -> None:
    for is_wanted, environ in ((True, {}), (False, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"})):
        tracing = load_tracing(is_wanted, environ)
        assert tracing is not None
        assert tracing._provider.resource.attributes["service.name"] == "streamkv-gateway"
        await tracing.close()


async def test_a_collector_that_takes_nothing_does_not_hold_the_end_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing_module, "CLOSE_S", 0.1)
    release = threading.Event()

    class Stuck(SpanProcessor):
        def shutdown(self) -> None:
            release.wait(30)

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Stuck())
    try:
        await asyncio.wait_for(Tracing(provider).close(), 30)
        assert not release.is_set()
        assert [record.message for record in caplog.records] == ["traces were not sent in time"]
    finally:
        release.set()


def test_a_missing_library_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"tracing: needs .*streamkv\[tracing\]"):
        load_tracing(True, {})
    assert load_tracing(False, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}) is None
    assert [record.message for record in caplog.records] == ["no traces"], "a variable alone stops no server"


def test_the_library_is_not_loaded_without_need() -> None:
    """Modules of the gateway import it inside functions alone, or for types."""
    files = sorted((Path(__file__).resolve().parents[2] / "gateway").rglob("*.py"))
    assert [
        f"{path.name}:{node.lineno}"
        for path in files
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Import | ast.ImportFrom) and "opentelemetry" in ast.unparse(node)
    ] == []
