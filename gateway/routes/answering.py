"""What chat and text completions share: a body in, one answer out, streamed or whole."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final, TypeVar

from aiohttp import HttpVersion11, web

from gateway import keys
from gateway.answers import GatheredAnswer
from gateway.errors import error_body
from gateway.generation import Prepared, Request
from gateway.schema import RequestLimits
from gateway.sse import SSE_HEADERS, SseOutlet
from gateway.streams import BoundedWriter, Stream

_OFF_LOOP_BYTES: Final = 128 * 1024
"""Bodies over this are parsed on a thread, so that no other stream waits for them."""
_JSON_TYPES: Final = ("application/json", "application/octet-stream", "text/json")
"""octet-stream is what aiohttp says when there is no Content-Type."""
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
    parsed = await parse_body(request, parse)
    prepared = await request.app[keys.GENERATION].prepare(parsed, request[keys.CALLER])
    if parsed.options.stream:
        return await _streamed(request, prepared)
    return await _whole(request, prepared)


async def _whole(request: web.Request, prepared: Prepared) -> web.Response:
    gathered = GatheredAnswer(prepared.num_choices)
    stream = request.app[keys.GENERATION].start(prepared, gathered)
    try:
        await asyncio.wait([stream.ended])
    finally:
        stream.cancel("disconnected")
    if stream.failure is not None:
        raise stream.failure
    return web.Response(body=gathered.body(prepared.form), content_type="application/json")


async def _streamed(request: web.Request, prepared: Prepared) -> web.StreamResponse:
    app = request.app
    config = app[keys.CONFIG]
    writer = BoundedWriter(app[keys.OUTBOX], config.max_stream_buffer_bytes)
    outlet = SseOutlet(
        writer,
        prepared.form,
        prepared.num_choices,
        is_chunked=request.version >= HttpVersion11,
        error_body=error_body,
    )
    stream = app[keys.GENERATION].start(prepared, outlet)
    writer.on_full, writer.on_drained = _flow(app, stream)
    try:
        # Until the engine took it up, an error is still a status.
        await asyncio.wait([stream.started], timeout=config.keepalive_s)
        if stream.failure is not None:
            raise stream.failure
        response = web.StreamResponse(headers=SSE_HEADERS)
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
        with contextlib.suppress(ConnectionResetError):  # a client may hang up as soon as it has read [DONE]
            await response.write_eof()
        return response
    finally:
        app[keys.KEEP_ALIVES].discard(outlet)
        writer.close()
        app[keys.GENERATION].leave(stream)


def _flow(app: web.Application, stream: Stream) -> tuple[Callable[[], None], Callable[[], None]]:
    metrics = app[keys.METRICS]

    def on_full() -> None:
        metrics.num_slow_reader_pauses += 1
        stream.pause("slow reader")

    return on_full, lambda: stream.resume("slow reader")
