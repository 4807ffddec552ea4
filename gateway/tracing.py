"""OpenTelemetry traces: a span for each HTTP request, and one inside it for each generation.

Attributes are those of OpenTelemetry's conventions for HTTP and for generative AI; none has text of a prompt or an
answer. A caller's W3C `traceparent` makes the spans part of its own trace. The library is imported only when traces
are wanted, and sends them from a thread of its own.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from gateway.records import SOCKET_METHOD, Record
from gateway.streams import Stream
from streamkv.errors import ConfigError
from streamkv.log import fields

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span
    from opentelemetry.util.types import AttributeValue

logger = logging.getLogger(__name__)

CLOSE_S: Final = 3.0
"""How long the last traces may take to go out."""
TRACE_HEADERS: Final = ("traceparent", "tracestate")
_ENDPOINT_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_SERVICE_NAME: Final = "streamkv-gateway"
_PROVIDER_NAME: Final = "streamkv"


class Tracing:
    """Makes spans of what was noted of a request, when it is over."""

    def __init__(self, provider: "TracerProvider") -> None:
        """Takes the provider over: `close` shuts it down."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("streamkv.gateway")
        self._propagator = TraceContextTextMapPropagator()

    def headers_of(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Those that say which trace a request is part of."""
        return {name: headers[name] for name in TRACE_HEADERS if name in headers}

    def write(self, record: Record, status: int | None, ended_s: float) -> None:
        """status: None of a WebSocket's generation. ended_s: loop time."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        parent = self._propagator.extract(dict(record.trace))
        attributes: dict[str, AttributeValue] = {"streamkv.request_id": record.request_id}
        if record.key:
            attributes["streamkv.key"] = record.key
        if record.method != SOCKET_METHOD:
            attributes["http.request.method"] = record.method
            if record.route:
                attributes["http.route"] = record.route
            if status is not None:
                attributes["http.response.status_code"] = status
        if record.error:
            attributes["error.type"] = record.error
        elif status is not None and status >= 500:
            attributes["error.type"] = str(status)
        span = self._tracer.start_span(
            f"{record.method} {record.route}".rstrip(),
            context=parent,
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=record.arrived_ns,
        )
        if (status is not None and status >= 500) or (status is None and record.error):
            span.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(span, parent)
        for stream in record.streams:
            self._write_stream(record, stream, inside, ended_s)
        span.end(_unix_ns(record, ended_s))

    def _write_stream(self, record: Record, stream: Stream, inside: "Context", ended_s: float) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        state, times = stream.state, stream.times
        operation = "chat" if state is not None and state.is_chat else "text_completion"
        model = state.model if state is not None else ""
        span: Span = self._tracer.start_span(
            f"{operation} {model}".rstrip(),
            context=inside,
            kind=SpanKind.INTERNAL,
            attributes=_generation_attributes(stream, operation),
            start_time=_unix_ns(record, times.arrived),
        )
        if times.first_token:
            span.set_attribute("gen_ai.response.time_to_first_chunk", max(0.0, times.first_token - times.arrived))
            span.add_event("first token", timestamp=_unix_ns(record, times.first_token))
        if stream.failure is not None:
            span.set_attribute("error.type", type(stream.failure).__name__)
            span.set_status(Status(StatusCode.ERROR))
        span.end(_unix_ns(record, times.ended or ended_s))

    async def close(self) -> None:
        """Send what waits, if somebody takes it soon."""
        loop, is_sent = asyncio.get_running_loop(), asyncio.Event()

        def send() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop did not wait for it
                loop.call_soon_threadsafe(is_sent.set)

        # Not on the loop's own threads, which a process waits for when it ends.
        threading.Thread(target=send, name="traces", daemon=True).start()
        try:
            async with asyncio.timeout(CLOSE_S):
                await is_sent.wait()
        except TimeoutError:
            logger.warning("traces were not sent in time")


def _generation_attributes(stream: Stream, operation: str) -> "dict[str, AttributeValue]":
    found: dict[str, AttributeValue] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": _PROVIDER_NAME,
        "gen_ai.output.type": "text",
        "gen_ai.usage.input_tokens": stream.num_prompt,
        "gen_ai.usage.output_tokens": stream.num_output,
        "gen_ai.usage.cache_read.input_tokens": stream.num_cached,
        "gen_ai.response.finish_reasons": [ending.finish_reason for ending in stream.endings],
    }
    state = stream.state
    if state is not None:
        sampling = state.sampling
        found |= {
            "gen_ai.request.model": state.model,
            "gen_ai.response.model": state.model,
            "gen_ai.request.choice.count": sampling.n,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_k": float(sampling.top_k),
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.presence_penalty": sampling.presence_penalty,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        }
    return found


def _unix_ns(record: Record, loop_s: float) -> int:
    return record.arrived_ns + int((loop_s - record.arrived_s) * 1e9)


def load_tracing(is_wanted: bool, environ: Mapping[str, str]) -> Tracing | None:
    """Traces by OTLP over HTTP to where OTEL_EXPORTER_OTLP_ENDPOINT says, or to this machine. None unless that
    variable is set or they are wanted. Raises ConfigError when they are wanted and the library is not installed."""
    is_told = any(environ.get(name) for name in _ENDPOINT_VARIABLES)
    if not (is_wanted or is_told) or environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        rule = "needs the extra packages of `pip install 'streamkv[tracing]'`"
        if is_wanted:
            raise ConfigError("tracing", rule) from error
        logger.warning("no traces", extra=fields(reason=f"OTEL_EXPORTER_OTLP_ENDPOINT {rule}"))
        return None
    is_named = environ.get("OTEL_SERVICE_NAME") or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = Resource.create({} if is_named else {"service.name": _SERVICE_NAME})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider)
