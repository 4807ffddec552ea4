"""What every HTTP request passes on its way in and out: it is noted, named, counted against its caller's limits."""

from typing import Final

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from gateway import keys
from gateway.auth import key_digest
from gateway.limits import rate_limit_headers
from gateway.reception import CLIENT_GONE
from gateway.records import REQUEST_ID_HEADER
from gateway.routes.answering import LAST_EVENT_ID_HEADER
from streamkv.errors import StreamKVError

COUNTED_ROUTES: Final = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/tokenize",
        "/detokenize",
    }
)
"""A POST there is one request of its caller's budget. On a WebSocket each `generate` is one."""
_RESUMABLE_ROUTES: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
"""A POST there with Last-Event-ID begins nothing: it takes up an answer that was counted."""

_ANTHROPIC_ROUTE: Final = "/v1/messages"


def route_of(request: web.Request) -> str:
    """The path as the router has it; empty for one that does not exist."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else ""


@web.middleware
async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The outermost one: a record of the request, and the answer to a browser's question whether it may send it."""
    reception = request.app[keys.RECEPTION]
    record = request[keys.RECORD] = reception.arrive(request.method[:32], route_of(request), request.headers)
    status = CLIENT_GONE
    try:
        preflight = request.app[keys.CORS].preflight_headers(request.method, request.headers)
        response = await handler(request) if preflight is None else web.Response(status=204, headers=preflight)
        status = response.status
        if isinstance(response, web.Response) and isinstance(response.body, bytes):
            record.num_bytes += len(response.body)
        return response
    except web.HTTPException as error:
        status = error.status
        raise
    finally:
        reception.leave(record, status)


@web.middleware
async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The innermost one: the caller is known. Raises RateLimited."""
    caller, record = request.get(keys.CALLER), request[keys.RECORD]
    if caller is None:
        return await handler(request)
    record.key = caller.name
    record.key_digest = key_digest(request.headers)
    request[keys.CALLER] = caller = msgspec.structs.replace(caller, record=record)
    reception = request.app[keys.RECEPTION]
    try:
        if _is_counted(request, record.route):
            await reception.admit(record, caller)
        else:
            await reception.look(record, caller)
        return await handler(request)
    except StreamKVError as error:
        record.error = type(error).__name__
        raise


def _is_counted(request: web.Request, route: str) -> bool:
    is_resumed = route in _RESUMABLE_ROUTES and bool(request.headers.get(LAST_EVENT_ID_HEADER))
    return request.method == "POST" and route in COUNTED_ROUTES and not is_resumed


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Before an answer's headers go out, a stream's and an error's too."""
    record = request.get(keys.RECORD)
    if record is None:
        return
    headers = response.headers
    headers[REQUEST_ID_HEADER] = record.request_id
    if record.route.startswith(_ANTHROPIC_ROUTE):
        headers["request-id"] = record.request_id  # which its clients read
    if record.rest is not None:
        headers.update(rate_limit_headers(record.rest))
    for name, value in request.app[keys.CORS].answer_headers(request.headers).items():
        headers[name] = f"{headers[name]}, {value}" if name == "Vary" and name in headers else value
