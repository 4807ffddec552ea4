"""The link between the gateways of one server and the process that started them: a Unix socket, msgpack frames.

Each frame is its length (4 bytes, little-endian) and one message. A worker's questions carry a number that comes back
with the answer; what is only told has none. The socket lies in a folder that only its owner can enter.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES: Final = 16 * 1024 * 1024


class Joined(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """Worker: its port is open. First message."""

    worker: int


class Started(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """Worker: what it needs of its own is there, so that its start has not failed."""


class Announced(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Worker: all is there. For the terminal."""

    line: str


class Told(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """Worker: something that needs no answer."""

    what: str
    body: bytes = b""
    """msgpack, by `what`."""


class Asked(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Either way: a question, answered by Answered with the same number."""

    number: int
    what: str
    body: bytes = b""
    """msgpack, by `what`."""


class Answered(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """The answer."""

    number: int
    body: bytes = b""
    is_refused: bool = False
    """The question could not be answered; `body` is a text that says why."""


LinkMessage = Joined | Started | Announced | Told | Asked | Answered
Answer = Callable[[str, bytes], Awaitable[bytes]]
"""(what, body) → the answer's body. What it raises goes back as a refusal."""

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(LinkMessage)


class LinkLost(Exception):
    """The other side is gone."""


class LinkRefusal(Exception):
    """The other side could not answer."""


class Link:
    """One end of one connection. `run` reads until the other side is gone."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answer: Answer,
        on_told: Callable[[LinkMessage], None] | None = None,
    ) -> None:
        """answer: gives the answers to the other side's questions. on_told: takes what is no question."""
        self._reader = reader
        self._writer = writer
        self._answer = answer
        self._on_told = on_told
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._is_lost = False

    def tell(self, message: LinkMessage) -> None:
        """Send, unless the other side is gone."""
        if not self._is_lost:
            frame = _ENCODER.encode(message)
            self._writer.write(len(frame).to_bytes(4, "little") + frame)

    async def ask(self, what: str, body: bytes = b"") -> bytes:
        """The answer's body. Raises LinkLost, LinkRefusal."""
        if self._is_lost:
            raise LinkLost
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self.tell(Asked(number, what, body))
            answer: bytes = await waiting
            return answer
        finally:
            del self._waiting[number]

    async def run(self) -> None:
        """Returns when the other side is gone, or says what is no message."""
        try:
            while True:
                size = int.from_bytes(await self._reader.readexactly(4), "little")
                if size > MAX_FRAME_BYTES:
                    raise ValueError(f"a frame of {size} bytes")
                self._take(_DECODER.decode(await self._reader.readexactly(size)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except (ValueError, msgspec.MsgspecError) as error:
            logger.error("the link between gateways broke", exc_info=error)
        finally:
            self._is_lost = True
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(LinkLost())
            for task in self._answering:
                task.cancel()
            self._writer.close()
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()

    def _take(self, message: LinkMessage) -> None:
        if isinstance(message, Asked):
            task = asyncio.create_task(self._give_answer(message))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        elif isinstance(message, Answered):
            waiting = self._waiting.get(message.number)
            if waiting is None or waiting.done():  # whoever asked has gone
                return
            if message.is_refused:
                waiting.set_exception(LinkRefusal(message.body.decode(errors="replace")))
            else:
                waiting.set_result(message.body)
        elif self._on_told is not None:
            self._on_told(message)

    async def _give_answer(self, question: Asked) -> None:
        try:
            body = await self._answer(question.what, question.body)
        except Exception as error:
            logger.exception("a question from another gateway could not be answered")
            self.tell(Answered(question.number, str(error).encode(), is_refused=True))
        else:
            self.tell(Answered(question.number, body))


async def connect(path: str, answer: Answer) -> Link:
    """A worker's end. Raises OSError."""
    reader, writer = await asyncio.open_unix_connection(path)
    return Link(reader, writer, answer)
