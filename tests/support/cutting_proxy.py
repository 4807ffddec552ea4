"""A TCP proxy that breaks connections off, for the tests of whoever comes back after a break."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator


class CuttingProxy:
    """Passes bytes on, and resets each connection after as many bytes of the server's as the next of `budgets` says;
    when they have run out, none."""

    def __init__(self, target_url: str, budgets: Iterator[int]) -> None:
        self.target_url = target_url
        """Where new connections go; may change."""
        self.is_open = True
        """While it is not, new connections are reset at once."""
        self.num_cuts = 0
        self.num_connections = 0
        self.url = ""
        self._budgets = budgets
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it or it is cut."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.num_connections += 1
        try:
            if self.is_open:
                with contextlib.suppress(asyncio.CancelledError):  # by `close`; the server would log it
                    await self._pass_on(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self.target_url.removeprefix("http://").split(":")
        with contextlib.suppress(OSError):
            there, to_there = await asyncio.open_connection(host, int(port))
            self._writers.add(writer)
            upwards = asyncio.create_task(_copy(reader, to_there))
            try:
                await self._copy_until_cut(there, writer)
            finally:
                self._writers.discard(writer)
                upwards.cancel()
                to_there.close()

    async def _copy_until_cut(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        left = next(self._budgets, None)
        while data := await source.read(1000 if left is None else min(left, 1000)):
            sink.write(data)
            await sink.drain()
            if left is not None:
                left -= len(data)
                if left <= 0:
                    self.num_cuts += 1
                    return

    def cut_all(self) -> None:
        """Reset every connection that is open."""
        for writer in list(self._writers):
            self.num_cuts += 1
            writer.transport.abort()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
        sink.write_eof()


@contextlib.asynccontextmanager
async def cutting_proxy(target_url: str, budgets: Iterable[int] = ()) -> AsyncIterator[CuttingProxy]:
    """One on a free port of this machine."""
    proxy = CuttingProxy(target_url, iter(budgets))
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
