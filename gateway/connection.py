"""One client's connection, as far as it is counted."""

import asyncio

from aiohttp import web


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
