"""The bound on what waits unread: a write per client and turn of the loop, and the word when a client does not read."""

import asyncio
from collections.abc import Callable
from typing import Final

_DRAIN_CHECK_S: Final = 0.02
_WRITES_PER_TURN: Final = 256
"""Some 3 ms."""


def _ignore() -> None: ...


class Outbox:
    """The writers that have something to send, until the end of this turn of the loop.

    A turn hands out every frame of the engine that has come in, so a stream's write takes along all steps that are
    there: one when the gateway keeps up, several when it is behind. A write is a system call of some 7 µs, more than
    all the rest of a token's way, so this is what lets the gateway catch up. Of more than _WRITES_PER_TURN the later
    ones wait for the next turn, so that whoever else wants something of the loop gets it between them.
    """

    def __init__(self) -> None:
        self._waiting: list[BoundedWriter] = []

    def add(self, writer: "BoundedWriter") -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._send_some)
        self._waiting.append(writer)

    def _send_some(self) -> None:
        waiting = self._waiting
        if len(waiting) <= _WRITES_PER_TURN:
            self.flush()
            return
        self._waiting = waiting[_WRITES_PER_TURN:]
        asyncio.get_running_loop().call_soon(self._send_some)
        for writer in waiting[:_WRITES_PER_TURN]:
            writer.flush()

    def flush(self) -> None:
        """Send what waits."""
        waiting, self._waiting = self._waiting, []
        for writer in waiting:
            writer.flush()


class BoundedWriter:
    """Whole events to one client's transport, and the word when that client does not read.

    Until `open` everything is held, since a status line must come first. Past `max_bytes` unread, `on_full` is
    called; when half of that is read again, `on_drained`. What is written in between is kept all the same: it is the
    few steps that were on their way when the pause was sent.
    """

    __slots__ = (
        "_held",
        "_is_closed",
        "_outbox",
        "_pending",
        "_timer",
        "_transport",
        "is_full",
        "max_bytes",
        "num_bytes",
        "on_drained",
        "on_full",
    )

    def __init__(
        self,
        outbox: Outbox,
        max_bytes: int,
        on_full: Callable[[], None] = _ignore,
        on_drained: Callable[[], None] = _ignore,
    ) -> None:
        self.max_bytes = max_bytes
        self.on_full = on_full
        self.on_drained = on_drained
        self.num_bytes = 0
        """Given to the transport since the start; what the keep-alive looks at."""
        self.is_full = False
        self._outbox = outbox
        self._transport: asyncio.WriteTransport | None = None
        self._pending: list[bytes] = []
        self._held = bytearray()
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    @property
    def num_unread(self) -> int:
        """Bytes that the client's side of the transport has not taken, those of this turn included."""
        held = len(self._held) if self._transport is None else self._transport.get_write_buffer_size()
        return held + sum(map(len, self._pending))

    def open(self, transport: asyncio.WriteTransport) -> None:
        """Its headers are out: write what was held, and from now on at the end of each turn."""
        self._transport = transport
        if self._held:
            self._pending.insert(0, bytes(self._held))
            self._held.clear()
        self.flush()

    def write(self, data: bytes) -> None:
        """Send it with the others of this turn."""
        pending = self._pending
        if not pending:
            self._outbox.add(self)
        pending.append(data)

    def flush(self) -> None:
        """Send what waits, now."""
        pending = self._pending
        if not pending:
            return
        self._pending = []
        data = pending[0] if len(pending) == 1 else b"".join(pending)
        transport = self._transport
        if transport is not None:
            self.num_bytes += len(data)
            try:
                transport.write(data)
                num_unread = transport.get_write_buffer_size()
            except RuntimeError:  # uvloop's word for a client that has just gone, of which aiohttp tells the handler
                self.close()
                return
        elif not self._is_closed:
            self._held += data
            num_unread = len(self._held)
        else:
            return
        if num_unread > self.max_bytes and not self.is_full:
            self._fill()

    def close(self) -> None:
        """The client is gone or has got everything: nothing is written any more."""
        self._is_closed = True
        self._transport = None
        self._pending = []
        self._held.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _fill(self) -> None:
        self.is_full = True
        self._timer = asyncio.get_running_loop().call_later(_DRAIN_CHECK_S, self._check)
        self.on_full()

    def _check(self) -> None:
        """The transport tells its own protocol when it drains, and that is aiohttp's; so look, while it is full."""
        if self._is_closed:
            return
        transport = self._transport
        unread = len(self._held) if transport is None else transport.get_write_buffer_size()
        if unread <= self.max_bytes // 2:
            self.is_full = False
            self.on_drained()
        else:
            self._timer = asyncio.get_running_loop().call_later(_DRAIN_CHECK_S, self._check)
