"""One client's connection, as far as it is counted."""

import asyncio
from typing import Any, Final

from aiohttp import web

EOF_FLUSH_S: Final = 5.0
"""For what is still on its way to a client that has closed its side."""


class CountedConnection(web.RequestHandler):
    """Knows how much has come in. A large message that takes its time is so told from a client that is gone."""

    __slots__ = ("num_received",)

    def __init__(self, server: web.Server) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), access_log=None)  # type: ignore[arg-type]  # None is what turns it off
        self.num_received = 0
        """Bytes."""

    def data_received(self, data: bytes) -> None:
        self.num_received += len(data)
        super().data_received(data)

    def log_exception(self, *args: Any, **named: Any) -> None:
        """A body that cannot be unpacked is no fault of ours, and its client has been told."""
        if not isinstance(named.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **named)

    def eof_received(self) -> None:
        """Who waits for an answer keeps its side open; this client is gone. The transport closes itself once everything
        is written, which to one that does not read would be never."""
        super().eof_received()
        transport = self.transport
        if transport is not None:
            asyncio.get_running_loop().call_later(EOF_FLUSH_S, transport.abort)
