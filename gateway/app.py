"""The application: its routes, what turns exceptions into answers, and what lives as long as it does."""

import asyncio
import contextlib
import logging
import socket as posix_socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

from aiohttp import WSCloseCode, web
from aiohttp.http_exceptions import BadHttpMethod, ContentEncodingError, LineTooLong
from aiohttp.typedefs import Handler

from gateway import keys
from gateway.access_log import AccessLog
from gateway.admission import Admission
from gateway.auth import ApiKeys, Caller, Unauthorized
from gateway.bounded_writer import Outbox
from gateway.connection import CountedConnection
from gateway.cors import Cors
from gateway.dashboard import Dashboard
from gateway.engine_client import EngineClient, EngineState
from gateway.errors import describe, describe_status, in_shape_of
from gateway.figures import OtherFigures
from gateway.generation import Generation, TokenizerSource
from gateway.limits import Allowance, Books
from gateway.listener import bind, url_of
from gateway.metrics import GatewayMetrics, LoopLag
from gateway.middlewares import add_headers, admit, note
from gateway.reception import Reception
from gateway.records import REQUEST_ID_HEADER, new_request_id
from gateway.routes import (
    attaching,
    chat,
    completions,
    description,
    messages,
    ops,
    page,
    responses,
    tokens,
    websocket,
)
from gateway.silence import ask_silent_ones, break_off_silent_ones
from gateway.sse import KeepAlives
from gateway.tokenizer import Tokenizer
from gateway.tracing import Tracing
from streamkv.config import GatewayConfig
from streamkv.log import fields
from streamkv.transport import CurveKeys

logger = logging.getLogger(__name__)

SEND_BUFFER_BYTES: Final = 64 * 1024
"""Of each accepted socket. Left alone, the kernel takes some 4 MB of a stream before anyone notices a slow reader."""
SHUTDOWN_TIMEOUT_S: Final = 2.0
OPEN_PATHS: Final = page.OPEN_PATHS | {"/health", "/ready", description.OPENAPI_PATH}
"""Need no API key: load balancers ask there, and learn nothing of what others do; so do browsers for the pages."""
_BACKLOG: Final = 1024


def make_app(
    config: GatewayConfig,
    load_tokenizer: Callable[[], Tokenizer],
    *,
    endpoint: str,
    curve_keys: CurveKeys | None = None,
    on_state: Callable[[EngineState], None] | None = None,
    api_keys: ApiKeys | None = None,
    books: Books | None = None,
    access_log: AccessLog | None = None,
    tracing: Tracing | None = None,
    other_figures: OtherFigures | None = None,
) -> web.Application:
    """The gateway for the engine at `endpoint`. load_tokenizer is slow and called once, on a thread.

    api_keys: who is let in; None: everybody. books: where the callers' limits are counted; None: here. access_log:
    None: as the setting says. tracing: is closed with the app. other_figures: asks the other gateways
    on this port for theirs.
    """
    app = web.Application(
        client_max_size=config.max_body_bytes, middlewares=[note, _answer_errors, _authenticate, admit]
    )
    app.on_response_prepare.append(add_headers)
    app[keys.CONFIG] = config
    app[keys.API_KEYS] = api_keys if api_keys is not None else ApiKeys(anonymous=Caller(allowance=allowance_of(config)))
    app[keys.STARTED_AT] = time.time()
    app[keys.METRICS] = GatewayMetrics()
    app[keys.OTHER_FIGURES] = other_figures or _no_others
    app[keys.LOOP_LAG] = LoopLag()
    app[keys.CORS] = Cors(config.origins)
    if access_log is None and config.access_log != "off":
        access_log = AccessLog(is_json=config.access_log == "json")
    app[keys.RECEPTION] = Reception(
        app[keys.METRICS], api_keys=app[keys.API_KEYS], books=books, access_log=access_log, tracing=tracing
    )
    app[keys.KEEP_ALIVES] = KeepAlives(config.keepalive_s)
    app[keys.OUTBOX] = Outbox()
    app[keys.SOCKETS] = keys.OpenSockets()
    app[keys.TOKENIZER] = TokenizerSource(load_tokenizer)
    app[keys.ENGINE] = EngineClient(
        endpoint,
        heartbeat_s=config.heartbeat_s,
        engine_timeout_s=config.engine_timeout_s,
        keys=curve_keys,
        on_state=on_state,
    )
    app[keys.ADMISSION] = Admission(app[keys.ENGINE], config.startup_wait_s)
    app[keys.GENERATION] = Generation(
        config, app[keys.ENGINE], app[keys.TOKENIZER], app[keys.ADMISSION], app[keys.METRICS], app[keys.RECEPTION]
    )
    app[keys.DASHBOARD] = Dashboard(app[keys.ENGINE])
    app[page.FILES] = page.PageFiles()
    app.cleanup_ctx.append(_live)
    app.on_shutdown.append(_end_streams)
    app.router.add_post("/v1/chat/completions", chat.chat_completions)
    app.router.add_post("/v1/completions", completions.completions)
    app.router.add_post("/v1/responses", responses.responses)
    app.router.add_post("/v1/messages", messages.messages)
    app.router.add_post("/v1/messages/count_tokens", messages.count_tokens)
    app.router.add_post("/v1/embeddings", description.embeddings)
    app.router.add_get("/v1/models", ops.models)
    app.router.add_get("/v1/models/{name:.+}", ops.model)
    app.router.add_get("/v1/stream", websocket.stream_socket)
    app.router.add_get("/v1/streams/{stream_id}", attaching.attach, allow_head=False)
    app.router.add_delete("/v1/streams/{stream_id}", attaching.cancel)
    app.router.add_post("/tokenize", tokens.tokenize)
    app.router.add_post("/detokenize", tokens.detokenize)
    app.router.add_get(description.OPENAPI_PATH, description.openapi)
    app.router.add_get("/health", ops.health)
    app.router.add_get("/ready", ops.ready)
    app.router.add_get("/metrics", ops.metrics)
    app.router.add_get(page.CHAT_PATH, page.chat)
    app.router.add_get(page.DASHBOARD_PATH, page.dashboard)
    app.router.add_get(page.DATA_PATH, page.data)
    app.router.add_get(page.FILE_PATH, page.file)
    return app


def allowance_of(config: GatewayConfig) -> Allowance:
    """The limits of a key that says nothing else."""
    return Allowance(config.requests_per_minute, config.tokens_per_minute, config.max_concurrent)


async def _no_others() -> list[bytes]:
    return []


async def _live(app: web.Application) -> AsyncIterator[None]:
    """The engine's connection, the tokenizer and the API keys, from start to end."""
    loading = app[keys.TOKENIZER].start()
    app[keys.ENGINE].start()
    app[keys.LOOP_LAG].start()
    following = asyncio.create_task(app[keys.API_KEYS].follow(lambda: _forget_keys(app)))
    yield
    following.cancel()
    app[keys.LOOP_LAG].close()
    await app[keys.RECEPTION].close()
    app[keys.ENGINE].close()
    if not loading.done():
        loading.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await loading
    app[keys.TOKENIZER].close()


def _forget_keys(app: web.Application) -> None:
    """There are other API keys now; nothing is kept of those that are gone."""
    names = app[keys.API_KEYS].names
    app[keys.METRICS].keep(names)
    app[keys.RECEPTION].books.keep(names)


async def _end_streams(app: web.Application) -> None:
    """Streams that are still live are told that they end, while their connections stand."""
    app[keys.ADMISSION].drain()
    app[keys.GENERATION].cancel_all("drain")
    app[keys.OUTBOX].flush()
    sockets = list(app[keys.SOCKETS].live)
    # Whoever does not read does not get to the end of it, and keeps nobody waiting
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
            await asyncio.gather(*map(_close, sockets))


async def _close(socket: web.WebSocketResponse) -> None:
    await socket.close(code=WSCloseCode.GOING_AWAY, message=b"the server is shutting down")


@web.middleware
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error as an OpenAI-shaped body. One that comes after the headers breaks the connection off instead."""
    headers: dict[str, str] = {}
    try:
        return await handler(request)
    except ConnectionResetError:
        return web.Response(status=499)  # nobody is there to be told
    except web.HTTPException as error:
        if error.status < 400:
            raise
        answer = describe_status(error.status, error.text or error.reason)
        if "Allow" in error.headers:
            headers["Allow"] = error.headers["Allow"]
            if request.method == "OPTIONS":  # which asks for just that
                return web.Response(status=204, headers=headers)
    except Exception as error:
        if request.writer.output_size:  # a status line is out: a second answer would end up in the body of the first
            logger.exception("a request failed after its headers")
            if request.transport is not None:
                request.transport.close()
            return web.Response(status=499)
        answer = describe(error)
        if answer.status == 500:
            logger.exception("a request failed")
    request.app[keys.METRICS].refused[str(answer.status)] += 1
    answer = in_shape_of(request.path, answer)
    headers |= answer.headers
    return web.Response(body=answer.body, status=answer.status, content_type="application/json", headers=headers)


@web.middleware
async def _authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Who asks; nobody learns without a key which paths there are. Raises Unauthorized.

    Of a flood a few requests are taken in for each turn of the loop, and a few without a key are refused: neither take
    the places of the others. A body is read behind that.
    """
    resource = request.match_info.route.resource
    admission = request.app[keys.ADMISSION]
    if resource is None or resource.canonical not in OPEN_PATHS:
        try:
            request[keys.CALLER] = request.app[keys.API_KEYS].authenticate(request.headers)
        except Unauthorized:
            await admission.refusals.enter()
            raise
    if request.method == "POST":
        await admission.turnstile.enter()
    return await handler(request)


class _Connection(CountedConnection):
    """One connection. What aiohttp's parser refuses is answered like any other error, and logged in one line: neither
    has what came, which may be part of a key or of a prompt."""

    __slots__ = ("_metrics",)

    def __init__(self, server: web.Server, metrics: GatewayMetrics) -> None:
        super().__init__(server)
        self._metrics = metrics

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status < 500:
            level = logging.DEBUG if isinstance(exc, BadHttpMethod) else logging.INFO  # many speak TLS to an open port
            logger.log(level, "refused what is not HTTP", extra=fields(error=type(exc).__name__))
        else:
            logger.error("a request failed outside of its handler", exc_info=exc)
        if request.writer.output_size:
            raise ConnectionError("a status line is out: there can be no second answer")
        what = "a line of it is too long" if isinstance(exc, LineTooLong) else "it breaks the rules of HTTP/1.1"
        if isinstance(exc, ContentEncodingError):  # which aiohttp knows, but has no library for
            status, what = 415, "Content-Encoding must be gzip, deflate or none"
        answer = describe_status(status, f"the request cannot be read: {what}")
        self._metrics.refused[str(status)] += 1
        response = web.Response(
            body=answer.body,
            status=status,
            content_type="application/json",
            headers={REQUEST_ID_HEADER: new_request_id()},
        )
        response.force_close()
        return response


class _Connections(web.Server):
    """Makes a _Connection for each socket; otherwise the server that it was made from."""

    def __init__(self, server: web.Server, metrics: GatewayMetrics) -> None:
        super().__init__(
            server.request_handler,
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
        )
        self._metrics = metrics

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, self._metrics)


class _Runner(web.AppRunner):
    """An application's runner whose connections are _Connections."""

    __slots__ = ()

    async def _make_server(self) -> web.Server:
        return _Connections(await super()._make_server(), self.app[keys.METRICS])


class Server:
    """The application behind an open port."""

    def __init__(self, app: web.Application) -> None:
        # Without handler_cancellation a handler would run on after its client has gone.
        self._app = app
        self._runner = _Runner(app, handler_cancellation=True, shutdown_timeout=SHUTDOWN_TIMEOUT_S)
        self._watching: asyncio.Task[None] | None = None
        self.url = ""

    async def start(self, host: str, port: int, shares_port: bool = False) -> None:
        """Open the port; the engine need not be there. Raises OSError when the address is taken.

        shares_port: other gateways of this server listen there, too, and the kernel deals out the connections.
        """
        await self._runner.setup()
        listener = bind(host, port, shares_port)
        listener.setsockopt(posix_socket.SOL_SOCKET, posix_socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # accepted ones inherit
        timeout_s = self._app[keys.CONFIG].keepalive_timeout_s
        ask_silent_ones(listener, timeout_s)
        await web.SockSite(self._runner, listener, backlog=_BACKLOG).start()
        self.url = url_of(listener)
        self._watching = asyncio.create_task(break_off_silent_ones(self._transports, timeout_s))

    def _transports(self) -> list[asyncio.Transport]:
        server = self._runner.server
        assert server is not None
        return [each.transport for each in server.connections if each.transport is not None]

    async def drain(self, grace_s: float) -> None:
        """Refuse new work, and wait until the live streams have ended or the grace period is over."""
        app = self._app
        app[keys.ADMISSION].drain()
        num_live = app[keys.GENERATION].num_live
        if num_live:
            logger.info("draining live streams, a second signal ends them now")
        await app[keys.GENERATION].wait_idle(grace_s)

    async def close(self) -> None:
        """End what is left, tell its clients, close the port."""
        if self._watching is not None:
            self._watching.cancel()
        await self._runner.cleanup()
