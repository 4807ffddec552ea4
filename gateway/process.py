"""A gateway's process, from its port to its exit status: alone, with an engine of its own, or one of several."""

import asyncio
import gc
import ipaddress
import logging
import os
import sys
from collections.abc import Coroutine
from typing import Final

import msgspec
import uvloop

from gateway import keys
from gateway.app import Server, allowance_of, make_app
from gateway.auth import ApiKeys, load_api_keys
from gateway.crew import FIGURES, Crew
from gateway.crew_link import Announced, Joined, Link, LinkLost, LinkRefusal, Started, connect
from gateway.engine_client import EngineState
from gateway.routes.ops import own_figures
from gateway.shared_books import LinkedBooks
from gateway.supervisor import RESTART_SIGNAL, ChildFailed, Supervisor
from gateway.tokenizer import Tokenizer
from gateway.tracing import load_tracing
from streamkv import log
from streamkv.config import GatewayConfig
from streamkv.errors import StreamKVError
from streamkv.model_files import resolve
from streamkv.process import EXIT_UNUSABLE, end_signals
from streamkv.transport import load_curve_keys

logger = logging.getLogger(__name__)

EXIT_FAILED: Final = 1
_COLLECT_AFTER: Final = (5000, 5, 20)
"""Objects, young and middle collections until the next collection of the young, middle and old ones."""


def run_process(config: GatewayConfig, endpoint: str, engine: Supervisor | None, link: tuple[str, int] | None) -> int:
    """Run until asked to end. Returns the exit status; raises ConfigError.

    engine: of its own; None where it runs elsewhere. link: where the process listens that started this gateway as one
    of several, and its number among them.
    """
    api_keys = load_api_keys(config.api_keys_file, os.environ, config.share_prefix_cache, allowance_of(config))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if config.gateway_workers > 1 and link is None:
            load_curve_keys(config.curve_secret_key_file, config.curve_server_key)  # fails here, and once
            return runner.run(Crew(config, endpoint, engine).run())
        return runner.run(_Process(config, endpoint, engine, api_keys, link).run())


class _Process:
    """What lives from the first line to the exit status."""

    def __init__(
        self,
        config: GatewayConfig,
        endpoint: str,
        engine: Supervisor | None,
        api_keys: ApiKeys,
        link: tuple[str, int] | None,
    ) -> None:
        """link: where the process listens that started this gateway as one of several, and its number among them."""
        self._config = config
        self._api_keys = api_keys
        self._supervisor = engine
        self._link_address = link
        self._link: Link | None = None
        self._books = LinkedBooks() if link is not None else None
        self._app = make_app(
            config,
            self._load_tokenizer,
            endpoint=endpoint,
            curve_keys=load_curve_keys(config.curve_secret_key_file, config.curve_server_key),
            on_state=self._on_state,
            api_keys=api_keys,
            books=self._books,
            other_figures=self._other_figures,
            tracing=load_tracing(config.tracing, os.environ),
        )
        self._server = Server(self._app)
        self._stage = ""
        self._asked_to_end = asyncio.Event()
        self._asked_twice = asyncio.Event()
        self._has_announced = False

    def _load_tokenizer(self) -> Tokenizer:
        files = resolve(self._config.model, lambda stage, percent: None, with_weights=False)
        return Tokenizer.load(files, self._config.chat_template)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in end_signals():
            loop.add_signal_handler(number, self._on_signal)
        if self._supervisor is not None:
            loop.add_signal_handler(RESTART_SIGNAL, self._supervisor.restart)
        linked: asyncio.Task[None] | None = None
        try:
            if self._link_address is not None:
                linked = asyncio.create_task(await self._connect(self._link_address[0]))
            await self._server.start(self._config.host, self._config.port, shares_port=self._link_address is not None)
            if self._link is not None and self._link_address is not None:
                self._link.tell(Joined(self._link_address[1]))
        except OSError as error:
            print(f"streamkv: cannot listen on {self._config.host}:{self._config.port}: {error}", file=sys.stderr)
            await self._server.close()
            return EXIT_FAILED
        logger.info("listening", extra=log.fields(url=self._server.url, num_api_keys=len(self._api_keys)))
        if not self._api_keys and not _is_loopback(self._config.host):
            logger.warning("anybody who can reach this port can use it: there are no API keys")
        supervising = asyncio.create_task(self._supervisor.run()) if self._supervisor is not None else None
        tokenizing = self._app[keys.TOKENIZER].start()
        tokenizing.add_done_callback(self._on_tokenizer)
        try:
            return await self._until_end(supervising, tokenizing)
        finally:
            try:
                await self._server.close()
            finally:
                if self._supervisor is not None and supervising is not None:
                    await self._supervisor.end(supervising, self._asked_twice)
                if linked is not None:
                    linked.cancel()

    def _on_tokenizer(self, tokenizing: "asyncio.Task[Tokenizer]") -> None:
        if tokenizing.cancelled() or tokenizing.exception() is not None:
            return
        if self._link is not None:
            self._link.tell(Started())
        self._announce()

    async def _until_end(self, supervising: "asyncio.Task[None] | None", tokenizing: "asyncio.Task[Tokenizer]") -> int:
        """Wait for the word to end, or for what cannot be mended. Returns the exit status."""
        asked = asyncio.create_task(self._asked_to_end.wait())
        try:
            vital: set[asyncio.Task[object]] = {asked, tokenizing}
            if supervising is not None:
                vital.add(supervising)
            while not self._asked_to_end.is_set():
                done, _ = await asyncio.wait(vital, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {asked}:
                    vital.discard(task)
                    error = task.exception()
                    if error is not None:
                        print(f"streamkv: {error}", file=sys.stderr)
                        if isinstance(error, ChildFailed):
                            return error.exit_code
                        if isinstance(error, StreamKVError):
                            return EXIT_UNUSABLE
                        logger.error("failed", exc_info=error)
                        return EXIT_FAILED
        finally:
            asked.cancel()
        twice = asyncio.create_task(self._asked_twice.wait())
        drain = asyncio.create_task(self._server.drain(self._config.shutdown_grace_s))
        try:
            await asyncio.wait({twice, drain}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (twice, drain):
                task.cancel()
            await asyncio.gather(twice, drain, return_exceptions=True)
        return 0

    async def _connect(self, path: str) -> Coroutine[None, None, None]:
        """To the process that started this gateway → what listens on the link from now on. Raises OSError."""
        link = self._link = await connect(path, self._answer)
        assert self._books is not None
        self._books.link = link

        async def run() -> None:
            await link.run()
            logger.warning("the process that started this gateway has ended")
            self._asked_to_end.set()

        return run()

    async def _answer(self, what: str, body: bytes) -> bytes:
        """What the other gateways of this server want to know."""
        assert what == FIGURES, what
        return own_figures(self._app).pack()

    async def _other_figures(self) -> list[bytes]:
        if self._link is None:
            return []
        try:
            return msgspec.msgpack.decode(await self._link.ask(FIGURES), type=list[bytes])
        except (LinkLost, LinkRefusal):
            return []

    def _on_signal(self) -> None:
        if self._asked_to_end.is_set():
            self._asked_twice.set()
        self._asked_to_end.set()

    def _on_state(self, state: EngineState) -> None:
        engine = self._app[keys.ENGINE]
        if state is EngineState.READY:
            self._announce()
        elif state is EngineState.LOADING and self._supervisor is None and engine.stage != self._stage:
            # A supervised engine shows its progress itself, on the same terminal.
            self._stage = engine.stage
            logger.info("engine loading", extra=log.fields(stage=engine.stage))

    def _announce(self) -> None:
        """Once both the engine and the tokenizer are there: where the server is, and how to try it."""
        if not self._app[keys.ENGINE].is_ready or not self._app[keys.TOKENIZER].is_loaded:
            return
        if self._app[keys.GENERATION].misfit:
            return  # logged there
        if self._has_announced:
            logger.info("ready again")
            return
        self._has_announced = True
        # What start-up has made lives to the end, so no collection need look through it while tokens wait; and what is
        # made for a token is gone before the next.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_COLLECT_AFTER)
        body = '{"messages":[{"role":"user","content":"Why is the sky blue?"}],"stream":true}'
        name = self._app[keys.GENERATION].model_name
        url = self._server.url
        key = '-H "Authorization: Bearer $STREAMKV_API_KEY" ' if self._api_keys else ""
        line = (
            f"Ready: {name} at {url}   Try: curl -N {url}/v1/chat/completions "
            f"{key}-H 'Content-Type: application/json' -d '{body}'"
        )
        if self._link is not None:
            self._link.tell(Announced(line))
        else:
            print(line, flush=True)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
