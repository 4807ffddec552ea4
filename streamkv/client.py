"""The public client: answers of an OpenAI-compatible server as they are generated, over SSE, and StreamKV's WebSocket.

    async with Client("http://127.0.0.1:8000") as client:
        async for delta in client.stream({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}):
            print(delta.text, end="", flush=True)
        async with client.socket() as socket:
            async for delta in socket.generate({"prompt": "Once", "max_tokens": 64}):
                print(delta.text, end="", flush=True)

`stream` and `socket` come back by themselves: when the connection breaks, the answer is attached to again, at this
server or whichever one the address leads to then, and goes on where it broke off. Nothing of it is lost or comes twice.
`chat` and `complete` do so for a StreamKV server when their options have `attach_grace_s`; without it they suit any
OpenAI-compatible server.

Leaving an `async for` early, or cancelling its task, ends the request at the server, too.
"""

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Final, NamedTuple, Self

import aiohttp
import msgspec

from streamkv.errors import StreamKVError

MAX_EVENT_BYTES: Final = 16 * 1024 * 1024
"""A server that sends a longer event is refused, not buffered without end."""
CREDIT_TOKENS: Final = 1024
"""Of one generation on a WebSocket, what the server may send before its reader has taken any of it."""
MAX_QUEUED_EVENTS: Final = CREDIT_TOKENS + 1024
"""Of one generation on a WebSocket; the credit keeps it below. When it is full, the whole socket waits."""
_CANCEL_TIMEOUT_S: Final = 5.0
_SILENCE_S: Final = 60.0
"""A stream that can be attached to again is taken for broken after this; a StreamKV server sends comments meanwhile."""
_FIRST_WAIT_S: Final = 0.1
_LONGEST_WAIT_S: Final = 3.0


class ServerError(StreamKVError):
    """The server refused a request, broke off its answer or cannot be reached."""

    def __init__(self, message: str, status: int = 0, retry_after_s: float | None = None, code: str = "") -> None:
        """status: 0 without an HTTP answer. code: the server's word for what it is, where it has one."""
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.code = code


class RequestRefused(ServerError):
    """The request breaks a rule or may not be made: it would be refused again."""


class ServerBusy(ServerError):
    """There is no room for it now, or no engine; `retry_after_s` later there may be."""


class StreamLost(ServerError):
    """The server has no such stream, or not any more."""


class StreamBroken(ServerError):
    """The server cannot be reached, or broke off its answer, and it was not to be mended."""


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str


class Usage(msgspec.Struct, frozen=True):
    """What the server counted, in tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Delta(msgspec.Struct, frozen=True):
    """One piece of a streamed answer. The last pieces carry `finish_reason` and `usage`, mostly without text."""

    text: str = ""
    choice: int = 0
    finish_reason: str | None = None
    usage: Usage | None = None
    reasoning: str = ""
    """What the model thought before it answered, where the server tells that apart."""
    raw: bytes = b""
    """The event's JSON, for all else that it may hold: log probabilities, token ids, tool calls."""


class _ChoiceDelta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _ChoiceDelta | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: object = None


class _SocketEvent(msgspec.Struct):
    """Any event of the WebSocket; docs/websocket.md says which of them has which fields."""

    type: str
    id: str | None = None
    index: int = 0
    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None
    error: object = None
    n: int = 1
    stream_id: str = ""
    num_tokens: int = 0
    cursor: str = ""


class _Error(msgspec.Struct):
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_event_decoder = msgspec.json.Decoder(_Event)
_models_decoder = msgspec.json.Decoder(_Models)
_socket_decoder = msgspec.json.Decoder(_SocketEvent)


def api_url(base_url: str, path: str) -> str:
    """`path` (as /v1/models) at a server that was named with or without /v1 at its end."""
    return base_url.rstrip("/").removesuffix("/v1") + path


class ServerSentEvent(NamedTuple):
    """data: of one line, or several with breaks between. event_id: of this event or the last one that had any."""

    data: bytes
    event_id: str


async def sse_events(content: aiohttp.StreamReader) -> AsyncIterator[ServerSentEvent]:
    """Each server-sent event that is complete and has data; comments and event names are passed over.

    Raises ServerError for an event over MAX_EVENT_BYTES.
    """
    data: list[bytes] = []
    event_id = ""
    pending = b""
    while piece := await content.readany():
        *lines, pending = (pending + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif line.startswith(b"id:"):
                event_id = line[3:].removeprefix(b" ").decode("latin-1")
            elif not line and data:
                yield ServerSentEvent(b"\n".join(data), event_id)
                data = []
        if len(pending) + sum(map(len, data)) > MAX_EVENT_BYTES:
            raise ServerError(f"the server sent an event of over {MAX_EVENT_BYTES} bytes")


def error_text(body: bytes) -> str:
    """What an error answer says: its message when it has OpenAI's form, otherwise its beginning."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return body[:300].decode("utf-8", "replace")
    error = found.get("error", found) if isinstance(found, dict) else found
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:1000]


class _Patience:
    """When to try again after a break, and for how long."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: float | None = None
        self._wait_s = _FIRST_WAIT_S

    def reset(self) -> None:
        """It works again."""
        self._since = None
        self._wait_s = _FIRST_WAIT_S

    async def wait(self, error: ServerError) -> None:
        """A while, each time longer, no shorter than the server asks for. Raises the error when the time is over."""
        now = asyncio.get_running_loop().time()
        self._since = now if self._since is None else self._since
        left_s = self._since + self._limit_s - now
        if left_s <= 0:
            raise error
        wait_s = max(self._wait_s * random.uniform(0.5, 1.0), error.retry_after_s or 0.0)
        self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)
        await asyncio.sleep(min(wait_s, left_s))


class _Place:
    """How far into a stream its reader has come."""

    last_event_id = ""

    @property
    def stream_id(self) -> str:
        return self.last_event_id.partition(".")[0]


class Answer:
    """A streamed answer: `async for delta in answer`. Raises ServerError there, as Client.chat does."""

    def __init__(self, client: "Client", deltas: AsyncGenerator[Delta], place: _Place) -> None:
        self._client = client
        self._deltas = deltas
        self._place = place

    @property
    def last_event_id(self) -> str:
        """The stream's id and the place in it, as `Last-Event-ID` takes it; empty before the server's answer."""
        return self._place.last_event_id

    @property
    def stream_id(self) -> str:
        """Empty while it is not known."""
        return self._place.stream_id

    def __aiter__(self) -> AsyncGenerator[Delta]:
        return self._deltas

    async def aclose(self) -> None:
        """Leave it, which ends it at the server."""
        await self._deltas.aclose()

    async def cancel(self) -> None:
        """End it at the server, from any task, which keeps nothing of it. Whoever reads it sees its end, by `abort`, or
        where the connection is broken just then, StreamLost. Raises ServerError."""
        await self._client.cancel(self.stream_id)


class Client:
    """A server's client, an async context manager. Its streams may run side by side."""

    def __init__(
        self, base_url: str, api_key: str = "", timeout_s: float = 600.0, attach_grace_s: float = 60.0
    ) -> None:
        """timeout_s: how long the server may stay silent within a stream. attach_grace_s: how long `stream` and
        `socket` try to come back after a break, and the server is asked to wait for them."""
        self._base_url = base_url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self._attach_grace_s = attach_grace_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0, sock_read=self._timeout_s)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=timeout, headers=self._headers
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._opened.close()

    @property
    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("a Client is used inside `async with Client(...) as client`")
        return self._session

    async def models(self) -> list[str]:
        """The names of the models that the server has. Raises ServerError."""
        try:
            async with self._opened.get(api_url(self._base_url, "/v1/models")) as response:
                body = await response.read()
                await _raise_for_status(response)
            return [model.id for model in _models_decoder.decode(body).data]
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
            raise StreamBroken(f"no list of models from {self._base_url}: {_reason(error)}") from error

    def chat(self, messages: Sequence[Message], options: Mapping[str, object]) -> AsyncGenerator[Delta]:
        """The answer to a conversation. options: further fields of the request's body, `model` among them.

        Raises ServerError for a refusal, an error within the stream, or a stream that breaks off.
        """
        return self._stream("/v1/chat/completions", {**options, "messages": list(messages)}, _Place())

    def complete(self, prompt: str | Sequence[int], options: Mapping[str, object]) -> AsyncGenerator[Delta]:
        """The continuation of a text or of token ids; otherwise as chat."""
        return self._stream("/v1/completions", {**options, "prompt": prompt}, _Place())

    def stream(self, request: Mapping[str, object]) -> Answer:
        """A StreamKV server's answer to a chat body (`messages`) or a completion body (`prompt`), which outlives its
        connection. Otherwise as chat."""
        path = "/v1/chat/completions" if "messages" in request else "/v1/completions"
        place = _Place()
        return Answer(self, self._stream(path, {"attach_grace_s": self._attach_grace_s, **request}, place), place)

    async def cancel(self, stream_id: str) -> None:
        """End a StreamKV server's stream. One that is not there has ended. Raises ServerError."""
        url = api_url(self._base_url, f"/v1/streams/{stream_id}")
        try:
            async with self._opened.delete(url) as response:
                await _raise_for_status(response)
        except StreamLost:
            return
        except (aiohttp.ClientError, TimeoutError) as error:
            raise StreamBroken(f"{url}: {_reason(error)}") from error

    @asynccontextmanager
    async def socket(self) -> AsyncIterator["StreamSocket"]:
        """StreamKV's WebSocket, on which many generations run side by side; it connects again when it breaks. Raises
        ServerError."""
        socket = StreamSocket(self._opened, api_url(self._base_url, "/v1/stream"), self._attach_grace_s)
        await socket.open()
        try:
            yield socket
        finally:
            await socket.close()

    async def _stream(self, path: str, body: Mapping[str, object], place: _Place) -> AsyncGenerator[Delta]:
        """`place` is told of each event's id. Attached to again after a break where that was asked for and the server
        gives ids."""
        data = msgspec.json.encode({"stream": True, "stream_options": {"include_usage": True}, **body})
        grace_s = body.get("attach_grace_s")
        patience = _Patience(grace_s if isinstance(grace_s, int | float) else 0.0)
        has_finished = is_over = False
        try:
            while True:
                broken: ServerError = StreamBroken("the server broke off its answer without saying why")
                try:
                    async with self._open(path, data, place.last_event_id) as response:
                        if not place.last_event_id:
                            place.last_event_id = response.headers.get("X-Stream-Id", "")
                        async for event in sse_events(response.content):
                            patience.reset()
                            if event.data == b"[DONE]":
                                is_over = True
                                return
                            for delta in _deltas(event.data):
                                has_finished = has_finished or delta.finish_reason is not None
                                yield delta
                            place.last_event_id = event.event_id or place.last_event_id
                        if response.status == 204:
                            is_over = True
                            return
                except (aiohttp.ClientError, TimeoutError) as error:
                    broken = StreamBroken(f"{api_url(self._base_url, path)}: {_reason(error)}")
                    broken.__cause__ = error
                except ServerBusy as error:
                    if not place.last_event_id:
                        raise
                    broken = error
                can_attach = grace_s and place.stream_id
                if has_finished and not can_attach:
                    is_over = True
                    return
                if not can_attach:
                    raise broken
                await patience.wait(broken)
        except ServerError:
            is_over = True
            raise
        finally:
            if not is_over and grace_s and place.stream_id and not self._opened.closed:
                with contextlib.suppress(ServerError, TimeoutError):
                    async with asyncio.timeout(_CANCEL_TIMEOUT_S):
                        await self.cancel(place.stream_id)

    @asynccontextmanager
    async def _open(self, path: str, data: bytes, last_event_id: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """The request, or what is left of its answer behind the last event that came."""
        session = self._opened
        if not last_event_id:
            headers = {"Content-Type": "application/json"}
            opening = session.post(api_url(self._base_url, path), data=data, headers=headers)
        else:
            stream_id, _, cursor = last_event_id.partition(".")
            headers = {"Last-Event-ID": last_event_id} if cursor else {}
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=min(self._timeout_s, _SILENCE_S))
            opening = session.get(api_url(self._base_url, f"/v1/streams/{stream_id}"), headers=headers, timeout=timeout)
        async with opening as response:
            await _raise_for_status(response)
            yield response


class _Generation:
    """One that a StreamSocket's client reads, and where it stands."""

    def __init__(self, name: str, request: Mapping[str, object], grace_s: float) -> None:
        self.name = name
        self.request = request
        self.events: asyncio.Queue[_SocketEvent] = asyncio.Queue(MAX_QUEUED_EVENTS)
        self.patience = _Patience(grace_s)
        self.stream_id = ""
        """Empty until the server has taken it up."""
        self.entries: list[str] = []
        """The cursor, choice by choice."""
        self.num_tokens: list[int] = []
        self.num_unread = 0
        """Tokens that came, and that its reader has not taken."""
        self.num_taken = 0
        """Tokens that its reader took since the last grant."""
        self.is_attaching = False
        """An attach was sent and is not answered."""
        self.retry: asyncio.Task[None] | None = None

    def opening(self) -> dict[str, object]:
        """The message that begins it, or goes on with it."""
        self.num_taken = 0
        credit = max(0, CREDIT_TOKENS - self.num_unread)
        self.is_attaching = bool(self.stream_id)
        if not self.stream_id:
            return {**self.request, "type": "generate", "id": self.name, "credit": credit}
        cursor = ",".join(self.entries)
        return {"type": "attach", "id": self.name, "stream_id": self.stream_id, "cursor": cursor, "credit": credit}

    def came(self, event: _SocketEvent) -> int:
        """Note where it stands behind this event. Returns the number of its tokens."""
        self.patience.reset()
        if event.type == "started":
            self.is_attaching = False
            if not self.stream_id:
                self.stream_id = event.stream_id
                self.entries, self.num_tokens = ["-"] * event.n, [0] * event.n
            return 0
        if event.type not in ("delta", "finished") or event.index >= len(self.entries):
            return 0
        num_new = max(0, event.num_tokens - self.num_tokens[event.index])
        self.num_tokens[event.index] += num_new
        self.num_unread += num_new
        end = "e" if event.type == "finished" else ""
        self.entries[event.index] = event.cursor or f"{event.num_tokens}{end}"
        return num_new


class StreamSocket:
    """One WebSocket after another to the same server. A task of its own hands each event to its generation."""

    def __init__(self, session: aiohttp.ClientSession, url: str, grace_s: float) -> None:
        self._session = session
        self._url = url
        self._grace_s = grace_s
        self._numbers = itertools.count(1)
        self._live: dict[str, _Generation] = {}
        self._left: dict[str, str] = {}
        """Stream ids by name of those that were left while there was no connection; to be cancelled."""
        self._connection: aiohttp.ClientWebSocketResponse | None = None
        self._reader: asyncio.Task[None] | None = None
        self._end: ServerError | None = None
        """Why there will be no further connection."""

    async def open(self) -> None:
        """Raises ServerError."""
        self._connection = await self._connect()
        self._reader = asyncio.create_task(self._run(self._connection))

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])
        self._stop(StreamBroken("the WebSocket is closed"))
        if self._connection is not None:
            await self._connection.close()

    async def generate(self, request: Mapping[str, object]) -> AsyncGenerator[Delta]:
        """The answer to a request with the fields of a chat body (`messages`) or a completion body (`prompt`).

        Leaving early cancels this generation alone. Raises ServerError.
        """
        if self._end is not None:
            raise StreamBroken(f"the WebSocket is closed: {self._end}")
        name = f"g{next(self._numbers)}"
        generation = _Generation(name, {"attach_grace_s": self._grace_s, **request}, self._grace_s)
        self._live[name] = generation
        ended = False
        try:
            await self._send(generation.opening())
            while not ended:
                event = await generation.events.get()
                ended = event.type in ("done", "error")
                if event.type == "error":
                    raise _told(event.error)
                if event.type in ("delta", "finished"):
                    await self._grant(generation, event)
                    yield Delta(event.text, event.index, event.finish_reason, reasoning=event.reasoning)
                elif event.usage is not None:
                    yield Delta(usage=event.usage)
        finally:
            del self._live[name]
            if generation.retry is not None:
                generation.retry.cancel()
            while not generation.events.empty():
                generation.events.get_nowait()  # the reader may be waiting for room
            if not ended and self._end is None and not await self._send({"type": "cancel", "id": name}):
                self._left[name] = generation.stream_id

    async def _grant(self, generation: _Generation, event: _SocketEvent) -> None:
        """Its reader takes this event: let the server send as many more, a good number at a time."""
        if event.type != "delta":
            return
        num_taken = event.num_tokens  # those of the event, as `_hand_out` put it
        generation.num_unread -= num_taken
        generation.num_taken += num_taken
        if generation.num_taken >= CREDIT_TOKENS // 2:
            grant = {"type": "credit", "id": generation.name, "tokens": generation.num_taken}
            generation.num_taken = 0
            await self._send(grant)

    async def _send(self, fields: Mapping[str, object]) -> bool:
        """Whether there is a connection to send it over; without one, the next begins with all that is live."""
        connection = self._connection
        if connection is None or connection.closed:
            return False
        try:
            await connection.send_str(msgspec.json.encode(fields).decode())
        except (aiohttp.ClientError, ConnectionError):
            return False
        return True

    async def _connect(self) -> aiohttp.ClientWebSocketResponse:
        try:
            return await self._session.ws_connect(self._url, max_msg_size=MAX_EVENT_BYTES)
        except aiohttp.WSServerHandshakeError as error:
            kind = _kind_of(error.status)
            raise kind(f"{self._url}: HTTP {error.status}: the server refused the WebSocket", error.status) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise StreamBroken(f"{self._url}: {_reason(error)}") from error

    async def _run(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        """Read, and connect again, until that fails for too long."""
        patience = _Patience(self._grace_s)
        try:
            while True:
                broken: ServerError = StreamBroken("the server closed the WebSocket")
                try:
                    async for message in connection:
                        if message.type is not aiohttp.WSMsgType.TEXT:
                            break
                        patience.reset()
                        await self._hand_out(_socket_decoder.decode(message.data))
                except msgspec.MsgspecError as error:
                    raise ServerError(f"the server sent an event that is not understood: {error}") from error
                self._connection = None
                await connection.close()
                connection = await self._connect_again(patience, broken)
                self._connection = connection
                for name, stream_id in self._left.items():
                    if stream_id:
                        await self._send({"type": "attach", "id": name, "stream_id": stream_id})
                        await self._send({"type": "cancel", "id": name})
                self._left.clear()
                for generation in list(self._live.values()):
                    await self._send(generation.opening())
        except ServerError as error:
            self._stop(error)

    async def _connect_again(self, patience: _Patience, broken: ServerError) -> aiohttp.ClientWebSocketResponse:
        while True:
            await patience.wait(broken)
            try:
                return await self._connect()
            except (StreamBroken, ServerBusy) as error:
                broken = error

    async def _hand_out(self, event: _SocketEvent) -> None:
        """Raises ServerError for an error that is about no generation."""
        if event.id is None and event.type == "error":
            raise _told(event.error)
        generation = self._live.get(event.id or "")
        if generation is None:
            return
        if event.type == "error" and generation.is_attaching:
            error = _told(event.error)
            if isinstance(error, ServerBusy):  # an attach that came while there is no engine
                generation.retry = asyncio.create_task(self._attach_later(generation, error))
                return
        num_new = generation.came(event)
        if event.type == "delta":
            event.num_tokens = num_new
        await generation.events.put(event)

    async def _attach_later(self, generation: _Generation, error: ServerError) -> None:
        connection = self._connection
        try:
            await generation.patience.wait(error)
        except ServerError:
            _put_error(generation, str(error))
            return
        if self._connection is connection:  # a newer one began with all that is live
            await self._send(generation.opening())

    def _stop(self, error: ServerError) -> None:
        """Every generation that is live ends with this error."""
        self._end = self._end or error
        for generation in self._live.values():
            _put_error(generation, str(error))


def _put_error(generation: _Generation, message: str) -> None:
    if generation.events.full():
        generation.events.get_nowait()  # its reader is told of the end, if not of everything before it
    generation.events.put_nowait(_SocketEvent("error", generation.name, error={"message": message, "code": "broken"}))


def _deltas(event: bytes) -> list[Delta]:
    try:
        parsed = _event_decoder.decode(event)
    except msgspec.MsgspecError as error:
        raise ServerError(f"the server sent an event that is not understood: {error}: {event[:200]!r}") from error
    if parsed.error is not None:
        raise _told(parsed.error)
    deltas = [
        Delta(
            (choice.delta.content if choice.delta else choice.text) or "",
            choice.index,
            choice.finish_reason,
            reasoning=(choice.delta.reasoning_content if choice.delta else None) or "",
            raw=event,
        )
        for choice in parsed.choices
    ]
    return [*deltas, Delta(usage=parsed.usage, raw=event)] if parsed.usage else deltas


_BUSY_CODES: Final = frozenset({"not_ready", "overloaded", "rate_limit_exceeded"})


def _told(error: object) -> ServerError:
    """The error that an event holds."""
    fields = error if isinstance(error, dict) else {}
    retry_after_s, code = fields.get("retry_after_s"), fields.get("code")
    code = code if isinstance(code, str) else ""
    kind = ServerError
    if code in _BUSY_CODES:
        kind = ServerBusy
    elif code == "unknown_stream":
        kind = StreamLost
    elif code == "broken":
        kind = StreamBroken
    elif fields.get("type") == "invalid_request_error":
        kind = RequestRefused
    return kind(
        error_text(msgspec.json.encode({"error": error})),
        retry_after_s=float(retry_after_s) if isinstance(retry_after_s, int | float) else None,
        code=code,
    )


def _kind_of(status: int) -> type[ServerError]:
    if status in (429, 502, 503, 504):
        return ServerBusy
    return RequestRefused if 400 <= status < 500 else ServerError


async def _raise_for_status(response: aiohttp.ClientResponse) -> None:
    if response.status in (200, 204):
        return
    body = await response.read()
    code = _code_of(body)
    kind = StreamLost if code == "unknown_stream" else _kind_of(response.status)
    retry_after = response.headers.get("Retry-After", "")
    raise kind(
        f"HTTP {response.status}: {error_text(body)}",
        response.status,
        float(retry_after) if retry_after.isdecimal() else None,
        code,
    )


def _code_of(body: bytes) -> str:
    with contextlib.suppress(msgspec.MsgspecError):
        found = msgspec.json.decode(body, type=_ErrorBody).error
        return found.code or ""
    return ""


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
