"""/v1/streams/{id}: a stream that outlived its connection, taken up again or ended."""

from aiohttp import web

from gateway import keys
from gateway.cursor import FROM_START, Cursor, parse_cursor, parse_event_id, parse_stream_id
from gateway.routes.answering import LAST_EVENT_ID_HEADER, reattach
from streamkv.errors import InvalidField


async def attach(request: web.Request) -> web.StreamResponse:
    """GET: what is left of an answer behind the event that `Last-Event-ID` names, or else behind `?cursor=`; without
    either, all of it. Raises InvalidField, UnknownStream, EngineUnavailable."""
    stream_id = _stream_id(request)
    return await reattach(request, stream_id, _known(request, stream_id))


async def cancel(request: web.Request) -> web.Response:
    """DELETE: end it. Raises InvalidField, UnknownStream, EngineUnavailable."""
    await request.app[keys.GENERATION].cancel(_stream_id(request), request[keys.CALLER])
    return web.Response(status=204)


def _stream_id(request: web.Request) -> bytes:
    return parse_stream_id(request.match_info["stream_id"], "stream_id")


def _known(request: web.Request, stream_id: bytes) -> Cursor:
    """A browser's EventSource asks again with the same address, so its header is the newer one."""
    if last_event_id := request.headers.get(LAST_EVENT_ID_HEADER):
        named, known = parse_event_id(last_event_id, LAST_EVENT_ID_HEADER)
        if named != stream_id:
            raise InvalidField(LAST_EVENT_ID_HEADER, "is the id of another stream's event")
        return known
    cursor = request.query.get("cursor")
    return FROM_START if cursor is None else parse_cursor(cursor, "cursor")
