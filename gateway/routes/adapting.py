"""What the Responses and the Messages API share: one chat in, one answer out, streamed or whole."""

import asyncio
from collections.abc import Callable

from aiohttp import HttpVersion11, web

from gateway import keys
from gateway.bounded_writer import BoundedWriter
from gateway.generation import Prepared
from gateway.message_answer import MessageAnswer
from gateway.named_events import NamedEvents
from gateway.response_answer import ResponseAnswer
from gateway.routes.answering import send_events

Answer = ResponseAnswer | MessageAnswer


async def send(
    request: web.Request, prepared: Prepared, make: Callable[[NamedEvents | None], Answer], *, is_streamed: bool
) -> web.StreamResponse:
    """The answer of a prepared chat; `make` makes what gathers it, and sends it where it is given events."""
    app = request.app
    if is_streamed:
        writer = BoundedWriter(app[keys.OUTBOX], app[keys.CONFIG].max_stream_buffer_bytes)
        answer = make(NamedEvents(writer, is_chunked=request.version >= HttpVersion11))
        return await send_events(request, app[keys.GENERATION].start_each([prepared], answer), writer, answer)
    answer = make(None)
    stream = app[keys.GENERATION].start_each([prepared], answer)
    try:
        await asyncio.wait([stream.ended])
    finally:
        stream.cancel("disconnected")
    if (failure := stream.failure or answer.broken_off) is not None:
        raise failure
    return web.Response(body=answer.body(), content_type="application/json")
