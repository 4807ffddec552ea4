"""Several gateways on one port and one engine, for more streams than one core can carry (`--gateway-workers`).

This process owns the port's number, the engine, and the gateways, each a process of its own that listens on the same
port (SO_REUSEPORT). What must hold for all of them together it holds itself: `shared` answers their questions.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Final

import msgspec

from gateway.crew_link import Announced, Joined, Link, LinkLost, LinkMessage, LinkRefusal, Started, Told
from gateway.limits import Ledger
from gateway.listener import reserve, url_of
from gateway.shared_books import LedgerDesk
from gateway.supervisor import RESTART_SIGNAL, ChildFailed, Supervisor
from gateway.worker_flags import AS_WORKER
from streamkv.config import GatewayConfig, to_argv
from streamkv.log import fields
from streamkv.process import end_signals
from streamkv.transport import default_endpoint

logger = logging.getLogger(__name__)

FIGURES: Final = "figures"
"""What this process and its gateways ask each other for: figures, to be added up."""
EXIT_FAILED: Final = 1
_STOP_GRACE_S: Final = 10.0
"""Beyond shutdown_grace_s, before a gateway that was asked to end is killed."""
_FIGURES_TIMEOUT_S: Final = 2.0


class Crew:
    """The gateways of one server, and its engine if it has one of its own."""

    def __init__(
        self,
        config: GatewayConfig,
        endpoint: str,
        engine: Supervisor | None,
    ) -> None:
        """engine: None where it runs elsewhere."""
        self._config = config
        self._endpoint = endpoint
        self._engine = engine
        self._ledger = Ledger()
        self._link_path = default_endpoint(f"crew-{os.getpid()}").removeprefix("ipc://")
        self._links: dict[Link, int] = {}
        """→ the worker's number; -1: has not said it yet."""
        self._gateways: list[Supervisor] = []
        self._asked_to_end = asyncio.Event()
        self._asked_twice = asyncio.Event()
        self._has_announced = False

    async def run(self) -> int:
        """Until asked to end, or until something cannot be mended. Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in end_signals():
            loop.add_signal_handler(number, self._on_signal)
        if self._engine is not None:
            loop.add_signal_handler(RESTART_SIGNAL, self._engine.restart)
        config = self._config
        try:
            port = reserve(config.host, config.port)
        except OSError as error:
            print(f"streamkv: cannot listen on {config.host}:{config.port}: {error}", file=sys.stderr)
            return EXIT_FAILED
        with port:
            number = port.getsockname()[1]
            server = await asyncio.start_unix_server(self._on_worker, self._link_path)
            logger.info("listening", extra=fields(url=url_of(port), num_workers=config.gateway_workers))
            self._gateways = [self._gateway(worker, number) for worker in range(config.gateway_workers)]
            running = {gateway: asyncio.create_task(gateway.run()) for gateway in self._gateways}
            engine_run = asyncio.create_task(self._engine.run()) if self._engine is not None else None
            try:
                return await self._until_end([*running.values(), *([engine_run] if engine_run else [])])
            finally:
                await asyncio.gather(*(gateway.end(task, self._asked_twice) for gateway, task in running.items()))
                if self._engine is not None and engine_run is not None:
                    await self._engine.end(engine_run, self._asked_twice)
                server.close()
                os.unlink(self._link_path)

    def _gateway(self, worker: int, port: int) -> Supervisor:
        config = msgspec.structs.replace(self._config, port=port, endpoint=self._endpoint)
        command = [sys.executable, "-m", "gateway", *to_argv(config), AS_WORKER, self._link_path, str(worker)]
        return Supervisor(command, name="gateway", stop_grace_s=config.shutdown_grace_s + _STOP_GRACE_S)

    async def _until_end(self, running: Sequence["asyncio.Task[None]"]) -> int:
        asked = asyncio.create_task(self._asked_to_end.wait())
        try:
            done, _ = await asyncio.wait([asked, *running], return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
        for task in done - {asked}:
            error = task.exception()
            print(f"streamkv: {error}", file=sys.stderr)
            return error.exit_code if isinstance(error, ChildFailed) else EXIT_FAILED
        return 0

    def _on_signal(self) -> None:
        if self._asked_to_end.is_set():
            self._asked_twice.set()
        self._asked_to_end.set()

    # what the gateways say and ask

    async def _on_worker(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        desk = LedgerDesk(self._ledger)

        async def answer(what: str, body: bytes) -> bytes:
            return await self._others_figures(link) if what == FIGURES else desk.answer(what, body)

        link = Link(reader, writer, answer, lambda message: self._on_told(link, desk, message))
        self._links[link] = -1
        try:
            await link.run()
        finally:
            del self._links[link]
            desk.close()

    def _on_told(self, link: Link, desk: LedgerDesk, message: LinkMessage) -> None:
        if isinstance(message, Told):
            desk.take(message.what, message.body)
        elif isinstance(message, Joined):
            self._links[link] = message.worker
        elif isinstance(message, Started):
            self._gateways[self._links[link]].note_ready()
        elif isinstance(message, Announced) and not self._has_announced:
            self._has_announced = True
            print(message.line, flush=True)

    async def _others_figures(self, asking: Link) -> bytes:
        """A list of the figures of the other gateways, as each has given them."""
        others = [link for link, worker in self._links.items() if link is not asking and worker >= 0]
        gathered = await asyncio.gather(*(_figures_of(link) for link in others))
        return msgspec.msgpack.encode([figures for figures in gathered if figures])


async def _figures_of(link: Link) -> bytes:
    """Empty for a gateway that is gone or too busy: its figures are left out of this scrape."""
    with contextlib.suppress(LinkLost, LinkRefusal, TimeoutError):
        async with asyncio.timeout(_FIGURES_TIMEOUT_S):
            return await link.ask(FIGURES)
    return b""
