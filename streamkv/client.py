"""The public client: answers of an OpenAI-compatible server as they are generated, over SSE, and StreamKV's WebSocket.

    async with Client("http://127.0.0.1:8000") as client:
        async for delta in client.chat([Message("user", "Hello")], {"max_tokens": 64}):
            print(delta.text, end="", flush=True)
        async with client.socket() as socket:
            async for delta in socket.generate({"prompt": "Once", "max_tokens": 64}):
                print(delta.text, end="", flush=True)

Leaving an `async for` early, or cancelling its task, closes the connection, on which the server aborts the request.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Final, Self

import aiohttp
import msgspec

from streamkv.errors import StreamKVError

MAX_EVENT_BYTES: Final = 16 * 1024 * 1024
"""A server that sends a longer event is refused, not buffered without end."""
MAX_QUEUED_EVENTS: Final = 1024
"""Of one generation on a WebSocket. When a reader is further behind, the whole socket waits for it."""


class ServerError(StreamKVError):
    """The server refused a request, broke off its answer or cannot be reached. `status` is 0 without an HTTP answer."""

    def __init__(self, message: str, status: int = 0, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


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


class _ChoiceDelta(msgspec.Struct):
    content: str | None = None


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
    finish_reason: str | None = None
    usage: Usage | None = None
    error: object = None


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


async def sse_data(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event; comments, ids and event names are passed over.

    Raises ServerError for an event over MAX_EVENT_BYTES.
    """
    data: list[bytes] = []
    pending = b""
    while piece := await content.readany():
        *lines, pending = (pending + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
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


class Client:
    """A server's client, an async context manager. Its streams may run side by side."""

    def __init__(self, base_url: str, api_key: str = "", timeout_s: float = 600.0) -> None:
        """timeout_s: how long the server may stay silent within a stream."""
        self._base_url = base_url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
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
            raise ServerError(f"no list of models from {self._base_url}: {_reason(error)}") from error

    def chat(self, messages: Sequence[Message], options: Mapping[str, object]) -> AsyncGenerator[Delta]:
        """The answer to a conversation. options: further fields of the request's body, `model` among them.

        Raises ServerError for a refusal, an error within the stream, or a stream that breaks off.
        """
        return self._stream("/v1/chat/completions", {**options, "messages": list(messages)})

    def complete(self, prompt: str | Sequence[int], options: Mapping[str, object]) -> AsyncGenerator[Delta]:
        """The continuation of a text or of token ids; otherwise as chat."""
        return self._stream("/v1/completions", {**options, "prompt": prompt})

    @asynccontextmanager
    async def socket(self) -> AsyncIterator["StreamSocket"]:
        """StreamKV's WebSocket, on which many generations run side by side. Raises ServerError."""
        url = api_url(self._base_url, "/v1/stream")
        try:
            async with self._opened.ws_connect(url, max_msg_size=MAX_EVENT_BYTES) as connection:
                socket = StreamSocket(connection)
                reader = asyncio.create_task(socket.read())
                try:
                    yield socket
                finally:
                    reader.cancel()
                    await asyncio.wait([reader])
        except aiohttp.WSServerHandshakeError as error:
            raise ServerError(f"{url}: HTTP {error.status}: the server refused the WebSocket", error.status) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerError(f"{url}: {_reason(error)}") from error

    async def _stream(self, path: str, body: Mapping[str, object]) -> AsyncGenerator[Delta]:
        data = msgspec.json.encode({"stream": True, "stream_options": {"include_usage": True}, **body})
        finished = False
        try:
            async with self._opened.post(
                api_url(self._base_url, path), data=data, headers={"Content-Type": "application/json"}
            ) as response:
                await _raise_for_status(response)
                async for event in sse_data(response.content):
                    if event == b"[DONE]":
                        return
                    for delta in _deltas(event):
                        finished = finished or delta.finish_reason is not None
                        yield delta
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerError(f"{api_url(self._base_url, path)}: {_reason(error)}") from error
        if not finished:
            raise ServerError("the server broke off its answer without saying why")


class StreamSocket:
    """One open WebSocket. `read` runs as long as the socket does and hands each event to its generation."""

    def __init__(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self._live: dict[str, asyncio.Queue[_SocketEvent]] = {}
        self._closed = False

    async def generate(self, request: Mapping[str, object]) -> AsyncGenerator[Delta]:
        """The answer to a request with the fields of a chat body (`messages`) or a completion body (`prompt`).

        Leaving early cancels this generation alone. Raises ServerError.
        """
        name = f"g{next(self._numbers)}"
        events: asyncio.Queue[_SocketEvent] = asyncio.Queue(MAX_QUEUED_EVENTS)
        self._live[name] = events
        ended = False
        try:
            await self._send({**request, "type": "generate", "id": name})
            while not ended:
                event = await events.get()
                ended = event.type in ("done", "error")
                if event.type == "error":
                    raise _told(event.error)
                if event.type in ("delta", "finished"):
                    yield Delta(event.text, event.index, event.finish_reason)
                elif event.usage is not None:
                    yield Delta(usage=event.usage)
        finally:
            del self._live[name]
            while not events.empty():
                events.get_nowait()  # read() may be waiting for room
            if not ended and not self._connection.closed:
                await self._send({"type": "cancel", "id": name})

    async def read(self) -> None:
        """Hand out events until the socket closes; then every live generation gets an error."""
        reason = "the server closed the WebSocket"
        try:
            async for message in self._connection:
                event = _socket_decoder.decode(message.data)
                if event.id is None and event.type == "error":
                    reason = error_text(msgspec.json.encode({"error": event.error}))
                    return
                if event.id in self._live:
                    await self._live[event.id].put(event)
        except msgspec.MsgspecError as error:
            reason = f"the server sent an event that is not understood: {error}"
        finally:
            self._closed = True
            for name, events in self._live.items():
                if events.full():
                    events.get_nowait()  # its reader is told of the end, if not of everything before it
                events.put_nowait(_SocketEvent("error", name, error={"message": reason}))

    async def _send(self, fields: Mapping[str, object]) -> None:
        if self._closed:
            raise ServerError("the WebSocket is closed")
        await self._connection.send_str(msgspec.json.encode(fields).decode())


def _deltas(event: bytes) -> list[Delta]:
    try:
        parsed = _event_decoder.decode(event)
    except msgspec.MsgspecError as error:
        raise ServerError(f"the server sent an event that is not understood: {error}: {event[:200]!r}") from error
    if parsed.error is not None:
        raise _told(parsed.error)
    deltas = [
        Delta((choice.delta.content if choice.delta else choice.text) or "", choice.index, choice.finish_reason)
        for choice in parsed.choices
    ]
    return [*deltas, Delta(usage=parsed.usage)] if parsed.usage else deltas


def _told(error: object) -> ServerError:
    """The error that an event holds."""
    retry_after_s = error.get("retry_after_s") if isinstance(error, dict) else None
    return ServerError(
        error_text(msgspec.json.encode({"error": error})),
        retry_after_s=float(retry_after_s) if isinstance(retry_after_s, int | float) else None,
    )


async def _raise_for_status(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    retry_after = response.headers.get("Retry-After", "")
    raise ServerError(
        f"HTTP {response.status}: {error_text(await response.read())}",
        response.status,
        float(retry_after) if retry_after.isdecimal() else None,
    )


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
