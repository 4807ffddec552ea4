"""GET /v1/stream: many generations on one WebSocket. docs/websocket.md is the protocol."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from aiohttp import WSCloseCode, WSMessage, WSMsgType, web

from gateway import keys
from gateway.auth import KEY_PROTOCOL_PREFIX, Caller, check_origin, offered_protocols
from gateway.bounded_writer import BoundedWriter
from gateway.connection import CountedConnection
from gateway.credit import MAX_TOKENS, Credit, CreditedOutlet
from gateway.cursor import Cursor, at_token, parse_cursor, parse_stream_id
from gateway.errors import error_fields
from gateway.failures import UnknownStream
from gateway.outlet import Ending, Outlet, Usage
from gateway.schema.body import decode_msgpack_object, decode_object
from gateway.schema.generate import generate_from_fields
from gateway.socket_events import JSON_PROTOCOL, MSGPACK_PROTOCOL, EventCodec, JsonCodec, MsgpackCodec, SocketOutlet
from gateway.streams import Stream
from streamkv.errors import InvalidField, StreamKVError

logger = logging.getLogger(__name__)

MAX_GENERATIONS: Final = 1024
"""Live ones of one socket."""
MAX_ID_CHARS: Final = 128
_PING_S: Final = 20.0
_MAX_SILENT_PINGS: Final = 2
"""Pings in a row, and nothing received, after which a client that has read everything is gone."""
_MAX_STUCK_PINGS: Final = 15
"""Ping times in which a client that has not read everything may take nothing and say nothing."""
_MAX_UNREAD_TIMES: Final = 4
"""Unread output, in times of what pauses the generations, at which no further message is read."""
_OFF_LOOP_BYTES: Final = 128 * 1024
_KINDS: Final = ("generate", "attach", "cancel", "pause", "resume", "credit")
_PROTOCOLS: Final = frozenset({JSON_PROTOCOL, MSGPACK_PROTOCOL})


async def stream_socket(request: web.Request) -> web.WebSocketResponse:
    """One socket from its handshake to its end. Raises OriginRefused, and InvalidField for subprotocols of which it
    speaks none."""
    app = request.app
    check_origin(request.headers, app[keys.CONFIG].origins)
    offered = offered_protocols(request.headers)
    if offered and not _PROTOCOLS.intersection(offered):
        beside = " beside the key" if any(name.startswith(KEY_PROTOCOL_PREFIX) for name in offered) else ""
        raise InvalidField(
            "Sec-WebSocket-Protocol", f"must offer {JSON_PROTOCOL} or {MSGPACK_PROTOCOL}{beside}, or be left out"
        )
    socket = web.WebSocketResponse(
        protocols=(JSON_PROTOCOL, MSGPACK_PROTOCOL),
        autoping=False,  # pongs are to be seen: aiohttp's own heartbeat cuts a slow reader, whose ping waits unread
        max_msg_size=app[keys.CONFIG].max_body_bytes,
        compress=False,
    )
    await socket.prepare(request)
    if request.transport is None:
        return socket
    assert isinstance(request.protocol, CountedConnection)
    session = _Session(
        app,
        request[keys.CALLER],
        is_msgpack=socket.ws_protocol == MSGPACK_PROTOCOL,
        transport=request.transport,
        connection=request.protocol,
    )
    app[keys.SOCKETS].live.add(socket)
    watching = asyncio.create_task(session.watch(socket, request.transport))
    try:
        async for message in socket:
            if message.type is WSMsgType.PING:
                await socket.pong(message.data)
            await session.take(message)
    finally:
        watching.cancel()
        app[keys.SOCKETS].live.discard(socket)
        session.close()
    if socket.close_code == WSCloseCode.MESSAGE_TOO_BIG:
        logger.info("closed a WebSocket: message too big")
    return socket


@dataclass(slots=True, eq=False)
class _Generation:
    """What the client knows by an id of its own."""

    outlet: SocketOutlet
    is_attach: bool
    is_large: bool
    """The message that begins it: it is checked on a thread."""
    stream: Stream | None = None
    """None until it is checked, encoded and submitted."""
    task: asyncio.Task[None] | None = None
    is_paused: bool = False
    is_cancelled: bool = False
    """While it was attached to; it has to be found first."""
    credit: Credit | None = None
    """None: the client takes whatever comes."""


class _Session:
    """One socket's generations; they share its writer and so its bound on unread output."""

    def __init__(
        self,
        app: web.Application,
        caller: Caller,
        *,
        is_msgpack: bool,
        transport: asyncio.WriteTransport,
        connection: CountedConnection,
    ) -> None:
        self._app = app
        self._caller = caller
        self._decode = decode_msgpack_object if is_msgpack else decode_object
        self._codec: EventCodec = MsgpackCodec() if is_msgpack else JsonCodec()
        self._is_msgpack = is_msgpack
        self._writer = BoundedWriter(
            app[keys.OUTBOX], app[keys.CONFIG].max_stream_buffer_bytes, self._on_full, self._on_drained
        )
        self._writer.open(transport)
        self._drained = asyncio.Event()
        self._drained.set()
        self._connection = connection
        self._live: dict[str, _Generation] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def take(self, message: WSMessage) -> None:
        """One message of the client. Whatever is wrong with it is answered, and the socket stays open."""
        await self._wait_for_reader()
        client_id: str | None = None
        try:
            if message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                return
            if (message.type is WSMsgType.BINARY) != self._is_msgpack:
                taken = "binary msgpack frames" if self._is_msgpack else "JSON text frames"
                raise InvalidField("frame", f"this socket's subprotocol takes {taken}")
            data = message.data.encode() if isinstance(message.data, str) else message.data
            is_large = len(data) > _OFF_LOOP_BYTES
            fields = await asyncio.to_thread(self._decode, data) if is_large else self._decode(data)
            kind = fields.pop("type", None)
            if kind == "ping":
                self._send({"type": "pong"})
                return
            if not isinstance(kind, str) or kind not in _KINDS:
                raise InvalidField("type", f"must be {', '.join(_KINDS)} or ping, got {kind!r}"[:300])
            client_id = _take_id(fields)
            if kind in ("generate", "attach"):
                self._begin(kind, client_id, fields, is_large)
            elif kind == "credit":
                self._grant(client_id, _take_tokens(fields, "tokens", least=1))
                _refuse_rest(fields)
            else:
                _refuse_rest(fields)
                self._steer(kind, client_id)
        except (StreamKVError, UnicodeEncodeError) as error:
            self._send_error(client_id, error)

    async def watch(self, socket: web.WebSocketResponse, transport: asyncio.WriteTransport) -> None:
        """Ping the client, and break the connection off when it is gone.

        A ping waits behind what the client has not read, so a missing pong says nothing of a slow reader: that one
        lives as long as it takes something. So does one that sends: a pong cannot come amid a large frame.
        """
        num_missed = num_taken = 0
        num_received = self._connection.num_received
        with contextlib.suppress(ConnectionResetError):
            while num_missed <= (_MAX_STUCK_PINGS if self._writer.num_unread else _MAX_SILENT_PINGS):
                if not self._writer.num_unread:
                    await socket.ping()
                await asyncio.sleep(_PING_S)
                taken = self._writer.num_bytes - self._writer.num_unread
                received = self._connection.num_received
                lives = received != num_received or (self._writer.num_unread and taken != num_taken)
                num_missed = 0 if lives else num_missed + 1
                num_received, num_taken = received, taken
            logger.info("broke a WebSocket off: its client is gone")
            transport.abort()

    async def _wait_for_reader(self) -> None:
        """A client that sends and does not read is not listened to: each of its messages is worth an answer. A cancel
        of a reader who is merely slow comes through, since its generations are paused long before."""
        if self._writer.num_unread > _MAX_UNREAD_TIMES * self._writer.max_bytes:
            self._writer.flush()
            await self._drained.wait()

    def close(self) -> None:
        """The socket is gone: what nobody can attach to is aborted."""
        self._writer.close()
        for task in self._tasks:
            task.cancel()
        for generation in list(self._live.values()):
            if generation.stream is not None:
                self._app[keys.GENERATION].leave(generation.stream)
        self._live.clear()

    def _begin(self, kind: str, client_id: str, fields: dict[str, object], is_large: bool) -> None:
        if client_id in self._live:
            raise InvalidField("id", f"{client_id!r} is the id of a live generation on this socket")
        if len(self._live) >= MAX_GENERATIONS:
            raise InvalidField("id", f"this socket has {MAX_GENERATIONS} live generations, which is the most")
        outlet = SocketOutlet(
            self._writer,
            self._codec,
            client_id,
            error_fields=error_fields,
            on_close=lambda: self._forget(client_id, generation),
        )
        generation = _Generation(outlet, is_attach=kind == "attach", is_large=is_large)
        run = self._generate if kind == "generate" else self._attach
        self._live[client_id] = generation
        generation.task = asyncio.create_task(self._guard(run, client_id, generation, fields))
        self._tasks.add(generation.task)
        generation.task.add_done_callback(self._tasks.discard)

    async def _guard(
        self,
        run: Callable[[_Generation, dict[str, object]], Awaitable[None]],
        client_id: str,
        generation: _Generation,
        fields: dict[str, object],
    ) -> None:
        """Whatever happens before the stream stands is told to the client."""
        try:
            await run(generation, fields)
            assert generation.stream is not None
            generation.stream.ended.add_done_callback(lambda _: self._on_ended(client_id, generation))
        except StreamKVError as error:
            generation.outlet.fail(error)
            self._forget(client_id, generation)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logger.exception("a WebSocket request failed")
            self._send_error(client_id, error)
            self._forget(client_id, generation)

    async def _generate(self, generation: _Generation, fields: dict[str, object]) -> None:
        service = self._app[keys.GENERATION]
        outlet = self._credited(generation, fields)
        limits = await service.limits()
        await self._app[keys.ADMISSION].turnstile.enter()
        if generation.is_large:
            parsed = await asyncio.to_thread(generate_from_fields, fields, limits)
        else:
            parsed = generate_from_fields(fields, limits)
        reception = self._app[keys.RECEPTION]
        async with reception.on_socket(self._caller, parsed.options.request_id, is_new=True) as caller:
            prepared = await service.prepare(parsed, caller)
            stream = service.start(prepared, outlet)
        self._stands(generation, stream)

    async def _attach(self, generation: _Generation, fields: dict[str, object]) -> None:
        outlet = self._credited(generation, fields)
        known = _take_known(fields)
        stream_id = parse_stream_id(fields.pop("stream_id", None), "stream_id")
        _refuse_rest(fields)
        service = self._app[keys.GENERATION]
        async with self._app[keys.RECEPTION].on_socket(self._caller, is_new=False) as caller:
            stream = await service.attach(stream_id, known, outlet, caller)
        self._stands(generation, stream)

    def _credited(self, generation: _Generation, fields: dict[str, object]) -> Outlet:
        """Where its stream's text goes: counted, when the client gives credit."""
        if fields.get("credit") is None:
            fields.pop("credit", None)
            return generation.outlet
        generation.credit = Credit(_take_tokens(fields, "credit", least=0))
        return CreditedOutlet(generation.outlet, generation.credit, lambda: _pause_for_credit(generation))

    def _grant(self, client_id: str, num_tokens: int) -> None:
        generation = self._find(client_id)
        if generation.credit is None:
            raise InvalidField("tokens", "this generation was begun without `credit`: it sends whatever it has")
        generation.credit.grant(num_tokens)
        if generation.stream is not None and not generation.credit.is_used_up:
            generation.stream.resume("credit")

    def _stands(self, generation: _Generation, stream: Stream) -> None:
        generation.stream = stream
        if generation.is_cancelled:
            stream.cancel("cancelled")
        if generation.is_paused:
            stream.pause("client")
        if self._writer.is_full:
            stream.pause("slow reader")
        _pause_for_credit(generation)

    def _find(self, client_id: str) -> _Generation:
        generation = self._live.get(client_id)
        if generation is None:
            raise UnknownStream(f"this socket has no live generation {client_id!r}")
        return generation

    def _steer(self, kind: str, client_id: str) -> None:
        generation = self._find(client_id)
        stream = generation.stream
        if kind == "cancel":
            if stream is not None:
                stream.cancel("cancelled")
            elif generation.is_attach:
                generation.is_cancelled = True
            elif generation.task is not None:
                generation.task.cancel()
                generation.outlet.end(0, Ending("abort", "cancelled"))
                generation.outlet.close(Usage(0, 0), None)
            return
        generation.is_paused = kind == "pause"
        if stream is not None:
            if generation.is_paused:
                stream.pause("client")
            else:
                stream.resume("client")
        self._send({"type": "paused" if generation.is_paused else "resumed", "id": client_id})

    def _forget(self, client_id: str, generation: _Generation) -> None:
        if self._live.get(client_id) is generation:
            del self._live[client_id]

    def _on_ended(self, client_id: str, generation: _Generation) -> None:
        """An outlet that has told the end is forgotten by then, but it may have failed at that. A stream that goes on
        in the engine has no failure."""
        stream = generation.stream
        if stream is not None and stream.failure is not None and self._live.get(client_id) is generation:
            self._send_error(client_id, stream.failure)
            self._forget(client_id, generation)

    def _send(self, fields: dict[str, object]) -> None:
        self._writer.write(self._codec.event(fields))

    def _send_error(self, client_id: str | None, error: Exception) -> None:
        self._send({"type": "error", "id": client_id, "error": error_fields(error)})

    def _on_full(self) -> None:
        self._drained.clear()
        self._app[keys.METRICS].num_slow_reader_pauses += 1
        for generation in self._live.values():
            if generation.stream is not None:
                generation.stream.pause("slow reader")

    def _on_drained(self) -> None:
        self._drained.set()
        for generation in self._live.values():
            if generation.stream is not None:
                generation.stream.resume("slow reader")


def _take_id(fields: dict[str, object]) -> str:
    value = fields.pop("id", None)
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_ID_CHARS:
        raise InvalidField("id", f"must be a text of 1 to {MAX_ID_CHARS} characters, chosen by the client")
    return value


def _take_known(fields: dict[str, object]) -> Cursor:
    """What an `attach` says that its client has: `cursor`, or `from_token`, which is one number for all choices."""
    cursor, from_token = fields.pop("cursor", None), fields.pop("from_token", None)
    if cursor is None:
        from_token = 0 if from_token is None else from_token
        if not isinstance(from_token, int) or isinstance(from_token, bool) or not 0 <= from_token < 2**31:
            raise InvalidField("from_token", f"must be a whole number from 0 on, got {from_token!r}"[:300])
        return at_token(from_token, "from_token")
    if from_token is not None:
        raise InvalidField("from_token", "send either cursor or from_token")
    if not isinstance(cursor, str):
        raise InvalidField("cursor", f"must be a text, got {cursor!r}"[:300])
    return parse_cursor(cursor, "cursor")


def _take_tokens(fields: dict[str, object], name: str, least: int) -> int:
    value = fields.pop(name, None)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_TOKENS:
        raise InvalidField(name, f"must be a whole number of tokens from {least} to {MAX_TOKENS}, got {value!r}"[:300])
    return value


def _pause_for_credit(generation: _Generation) -> None:
    if generation.stream is not None and generation.credit is not None and generation.credit.is_used_up:
        generation.stream.pause("credit")


def _refuse_rest(fields: dict[str, object]) -> None:
    if fields:
        name = next(iter(fields))
        raise InvalidField(str(name)[:100], "is not a field of this message")
