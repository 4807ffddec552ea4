"""What chat and text completions share: a body in, one answer out, streamed or whole."""

import asyncio
import contextlib
import re
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec
from aiohttp import HttpVersion11, web

from gateway import keys
from gateway.answers import AnswerForm, GatheredAnswer, form_of, form_of_all
from gateway.bounded_writer import BoundedWriter
from gateway.cursor import Cursor, parse_event_id
from gateway.errors import error_body
from gateway.generation import Prepared, Request
from gateway.outlet import StreamFacts
from gateway.schema.completion import CompletionRequest
from gateway.schema.options import RequestLimits, read_grace
from gateway.schema.reader import FieldReader
from gateway.sse import SSE_HEADERS, EventOutlet, LateOutlet, SseOutlet
from gateway.stream_group import StreamGroup
from gateway.streams import Stream

_OFF_LOOP_BYTES: Final = 128 * 1024
"""Bodies over this are parsed on a thread, so that no other stream waits for them."""
_OFF_LOOP_LOGPROBS: Final = 1024
"""Answers with those of more tokens are written on a thread."""
_JSON_TYPES: Final = ("application/json", "application/octet-stream", "text/json")
"""octet-stream is what aiohttp says when there is no Content-Type."""
STREAM_ID_HEADER: Final = "X-Stream-Id"
LAST_EVENT_ID_HEADER: Final = "Last-Event-ID"
GRACE_HEADER: Final = "X-Attach-Grace"
_SECONDS: Final = re.compile(r"-?[0-9]{1,9}(\.[0-9]{1,9})?")
_ENCODINGS: Final = ("", "identity", "gzip", "deflate")


Parsed = TypeVar("Parsed")


async def read_body(request: web.Request) -> bytes:
    """The body, unpacked. Raises HTTPRequestEntityTooLarge (chunked and compressed ones included),
    HTTPUnsupportedMediaType, or HTTPBadRequest for one that cannot be unpacked."""
    if request.content_type not in _JSON_TYPES and not request.content_type.endswith("+json"):
        raise web.HTTPUnsupportedMediaType(text=f"Content-Type must be application/json, got {request.content_type!r}")
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in _ENCODINGS:
        raise web.HTTPUnsupportedMediaType(text=f"Content-Encoding must be gzip, deflate or none, got {encoding!r}")
    limit = request.app[keys.CONFIG].max_body_bytes
    if request.content_length is not None and request.content_length > limit:
        raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=request.content_length)
    try:
        return await request.read()
    except web.RequestPayloadError as error:
        raise web.HTTPBadRequest(text="the body does not come as its Content-Encoding or its framing says") from error


async def parse_body(request: web.Request, parse: Callable[[bytes, RequestLimits], Parsed]) -> Parsed:
    """The body, read and checked."""
    body = await read_body(request)
    limits = await request.app[keys.GENERATION].limits()
    if len(body) > _OFF_LOOP_BYTES:
        return await asyncio.to_thread(parse, body, limits)
    return parse(body, limits)


async def answer(request: web.Request, parse: Callable[[bytes, RequestLimits], Request]) -> web.StreamResponse:
    """One request of the OpenAI API."""
    request.app[keys.ADMISSION].check()
    if last_event_id := request.headers.get(LAST_EVENT_ID_HEADER):
        await read_body(request)  # said already what is asked for, when the stream was begun
        return await reattach(request, *parse_event_id(last_event_id, LAST_EVENT_ID_HEADER))
    parsed = _with_grace(request, await parse_body(request, parse))
    every = await request.app[keys.GENERATION].prepare_each(parsed, request[keys.CALLER])
    form = form_of_all([prepared.form for prepared in every])
    is_streamed = parsed.options.stream
    del parsed  # neither the text nor the ids of a long prompt are kept for as long as its answer takes
    if is_streamed:
        return await _streamed(request, every, form)
    return await _whole(request, every, form)


def _with_grace(request: web.Request, parsed: Request) -> Request:
    """attach_grace_s by a header, for clients that cannot add it to the body; the body's goes before. Raises
    InvalidField."""
    text = request.headers.get(GRACE_HEADER)
    options = parsed.options
    is_one = not isinstance(parsed, CompletionRequest) or len(parsed.prompts) == 1
    if text is None or options.attach_grace_s or not options.stream or not is_one:
        return parsed
    fields: dict[str, object] = {GRACE_HEADER: float(text) if _SECONDS.fullmatch(text) else text}
    grace_s = read_grace(FieldReader(fields), GRACE_HEADER, options.stream)
    return msgspec.structs.replace(parsed, options=msgspec.structs.replace(options, attach_grace_s=grace_s))


async def _whole(request: web.Request, every: list[Prepared], form: AnswerForm) -> web.Response:
    gathered = GatheredAnswer(form.num_choices)
    stream = request.app[keys.GENERATION].start_each(every, gathered)
    every.clear()
    try:
        await asyncio.wait([stream.ended])
    finally:
        stream.cancel("disconnected")
    if stream.failure is not None:
        raise stream.failure
    if gathered.num_logprobs > _OFF_LOOP_LOGPROBS:
        body = await asyncio.to_thread(gathered.body, form)
    else:
        body = gathered.body(form)
    return web.Response(body=body, content_type="application/json")


async def _streamed(request: web.Request, every: list[Prepared], form: AnswerForm) -> web.StreamResponse:
    app = request.app
    writer = BoundedWriter(app[keys.OUTBOX], app[keys.CONFIG].max_stream_buffer_bytes)
    outlet = SseOutlet(
        writer,
        form,
        form.num_choices,
        is_chunked=request.version >= HttpVersion11,
        error_body=error_body,
    )
    stream = app[keys.GENERATION].start_each(every, outlet)
    every.clear()
    return await send_events(request, stream, writer, outlet)


async def reattach(request: web.Request, stream_id: bytes, known: Cursor) -> web.StreamResponse:
    """What is left of an answer behind `known`, in the form in which it was begun. Raises UnknownStream,
    EngineUnavailable, and InvalidField for a cursor that is none of this stream's."""
    if known.is_done:
        return web.Response(status=204)  # which also tells a browser's EventSource not to ask again
    app = request.app
    writer = BoundedWriter(app[keys.OUTBOX], app[keys.CONFIG].max_stream_buffer_bytes)

    def make(stream: StreamFacts) -> SseOutlet:
        assert stream.state is not None
        return SseOutlet(
            writer,
            form_of(stream.state, stream.prompt_token_ids),
            stream.state.sampling.n,
            is_chunked=request.version >= HttpVersion11,
            error_body=error_body,
        )

    outlet = LateOutlet(make)
    try:
        stream = await app[keys.GENERATION].attach(stream_id, known, outlet, request[keys.CALLER])
    except BaseException:
        writer.close()
        raise
    return await send_events(request, stream, writer, outlet)


async def send_events(
    request: web.Request, stream: Stream | StreamGroup, writer: BoundedWriter, outlet: EventOutlet
) -> web.StreamResponse:
    """Send what a stream's outlet writes, to the end of both. Raises the stream's failure, if it comes first."""
    app = request.app
    config = app[keys.CONFIG]
    writer.on_full, writer.on_drained = _flow(app, stream)
    if writer.is_full:
        writer.on_full()  # with what an attached stream had made before
    try:
        # Until the engine took it up, an error is still a status.
        await asyncio.wait([stream.started], timeout=config.keepalive_s)
        if stream.failure is not None:
            raise stream.failure
        named = {STREAM_ID_HEADER: stream.stream_id.hex()} if isinstance(stream, Stream) else {}
        response = web.StreamResponse(headers={**SSE_HEADERS, **named})
        payload = await response.prepare(request)
        transport = request.transport
        assert payload is not None
        if transport is None:
            raise ConnectionResetError("the client is gone")
        payload.send_headers()  # aiohttp keeps them for the first body write, and that is not made through it
        writer.open(transport)
        if not stream.started.done():
            outlet.keep_alive()
        app[keys.KEEP_ALIVES].add(outlet)
        await asyncio.wait([stream.ended])
        writer.flush()
        if stream.is_broken_off and request.transport is not None:
            request.transport.close()  # without the last chunk, or the answer would look whole
        with contextlib.suppress(ConnectionResetError):  # a client may hang up as soon as it has read [DONE]
            await response.write_eof()
        return response
    finally:
        app[keys.KEEP_ALIVES].discard(outlet)
        request[keys.RECORD].num_bytes += writer.num_bytes
        writer.close()
        app[keys.GENERATION].leave(stream)


def _flow(app: web.Application, stream: Stream | StreamGroup) -> tuple[Callable[[], None], Callable[[], None]]:
    metrics = app[keys.METRICS]

    def on_full() -> None:
        metrics.num_slow_reader_pauses += 1
        stream.pause("slow reader")

    return on_full, lambda: stream.resume("slow reader")
