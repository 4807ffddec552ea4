"""The application: its routes, what turns exceptions into answers, and what lives as long as it does."""

import asyncio
import contextlib
import logging
import socket as posix_socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

from aiohttp import WSCloseCode, web
from aiohttp.http_exceptions import BadHttpMethod, LineTooLong
from aiohttp.typedefs import Handler

from gateway import keys
from gateway.admission import Admission
from gateway.auth import ApiKeys
from gateway.engine_client import EngineClient, EngineState
from gateway.errors import describe, describe_status
from gateway.generation import Generation, TokenizerSource
from gateway.metrics import GatewayMetrics
from gateway.routes import chat, completions, ops, tokens, websocket
from gateway.sse import KeepAlives
from gateway.streams import Outbox
from gateway.tokenizer import Tokenizer
from streamkv.config import GatewayConfig
from streamkv.log import fields
from streamkv.transport import CurveKeys

logger = logging.getLogger(__name__)

SEND_BUFFER_BYTES: Final = 64 * 1024
"""Of each accepted socket. Left alone, the kernel takes some 4 MB of a stream before anyone notices a slow reader."""
SHUTDOWN_TIMEOUT_S: Final = 2.0
OPEN_PATHS: Final = frozenset({"/health", "/ready"})
"""Need no API key: load balancers ask there, and learn nothing of what others do."""
_BACKLOG: Final = 1024


def make_app(
    config: GatewayConfig,
    load_tokenizer: Callable[[], Tokenizer],
    *,
    endpoint: str,
    curve_keys: CurveKeys | None = None,
    on_state: Callable[[EngineState], None] | None = None,
    api_keys: ApiKeys | None = None,
) -> web.Application:
    """The gateway for the engine at `endpoint`. load_tokenizer is slow and called once, on a thread.

    api_keys: who is let in; None: everybody.
    """
    app = web.Application(client_max_size=config.max_body_bytes, middlewares=[_answer_errors, _authenticate])
    app[keys.CONFIG] = config
    app[keys.API_KEYS] = api_keys or ApiKeys()
    app[keys.STARTED_AT] = time.time()
    app[keys.METRICS] = GatewayMetrics()
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
        config, app[keys.ENGINE], app[keys.TOKENIZER], app[keys.ADMISSION], app[keys.METRICS]
    )
    app.cleanup_ctx.append(_live)
    app.on_shutdown.append(_end_streams)
    app.router.add_post("/v1/chat/completions", chat.chat_completions)
    app.router.add_post("/v1/completions", completions.completions)
    app.router.add_get("/v1/models", ops.models)
    app.router.add_get("/v1/models/{name:.+}", ops.model)
    app.router.add_get("/v1/stream", websocket.stream_socket)
    app.router.add_post("/tokenize", tokens.tokenize)
    app.router.add_post("/detokenize", tokens.detokenize)
    app.router.add_get("/health", ops.health)
    app.router.add_get("/ready", ops.ready)
    app.router.add_get("/metrics", ops.metrics)
    return app


async def _live(app: web.Application) -> AsyncIterator[None]:
    """The engine's connection and the tokenizer, from start to end."""
    loading = app[keys.TOKENIZER].start()
    app[keys.ENGINE].start()
    yield
    app[keys.ENGINE].close()
    if not loading.done():
        loading.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await loading
    app[keys.TOKENIZER].close()


async def _end_streams(app: web.Application) -> None:
    """Streams that are still live are told that they end, while their connections stand."""
    app[keys.ADMISSION].drain()
    app[keys.GENERATION].cancel_all("drain")
    app[keys.OUTBOX].flush()
    for socket in list(app[keys.SOCKETS].live):
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
    headers |= answer.headers
    return web.Response(body=answer.body, status=answer.status, content_type="application/json", headers=headers)


@web.middleware
async def _authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Who asks; nobody learns without a key which paths there are. Raises Unauthorized."""
    resource = request.match_info.route.resource
    if resource is None or resource.canonical not in OPEN_PATHS:
        request[keys.CALLER] = request.app[keys.API_KEYS].authenticate(request.headers)
    return await handler(request)


class _Connection(web.RequestHandler):
    """One connection. What aiohttp's parser refuses is answered like any other error, and logged in one line: neither
    has what came, which may be part of a key or of a prompt."""

    __slots__ = ("_metrics",)

    def __init__(self, server: web.Server, metrics: GatewayMetrics) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, access_log=None)  # type: ignore[arg-type]  # None is what turns it off
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
        answer = describe_status(status, f"the request cannot be read: {what}")
        self._metrics.refused[str(status)] += 1
        response = web.Response(body=answer.body, status=status, content_type="application/json")
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
        self.url = ""

    async def start(self, host: str, port: int) -> None:
        """Open the port; the engine need not be there. Raises OSError when the address is taken."""
        await self._runner.setup()
        listener = _listen(host, port)
        await web.SockSite(self._runner, listener, backlog=_BACKLOG).start()
        address = listener.getsockname()
        shown = "127.0.0.1" if address[0] in ("0.0.0.0", "::") else address[0]
        self.url = f"http://[{shown}]:{address[1]}" if ":" in shown else f"http://{shown}:{address[1]}"

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
        await self._runner.cleanup()


def _listen(host: str, port: int) -> posix_socket.socket:
    family, kind, protocol, _, address = posix_socket.getaddrinfo(
        host, port, type=posix_socket.SOCK_STREAM, flags=posix_socket.AI_PASSIVE
    )[0]
    listener = posix_socket.socket(family, kind, protocol)
    listener.setsockopt(posix_socket.SOL_SOCKET, posix_socket.SO_REUSEADDR, 1)
    # Accepted sockets inherit it.
    listener.setsockopt(posix_socket.SOL_SOCKET, posix_socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    try:
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
