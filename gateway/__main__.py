"""The gateway's process.

    python -m gateway [gateway flags]                              the gateway alone; an engine runs elsewhere
    python -m gateway [gateway flags] --with-engine [engine flags]  the gateway, which starts and watches an engine

Everything after `--with-engine` is handed to `python -m engine` as it stands. When the gateway's endpoint is empty,
both get an ipc socket of their own, so that several servers run side by side. Ends with 0 only when asked to end:
SIGTERM or SIGINT drains (readiness off, live streams go on for shutdown_grace_s), a second one ends now.
"""

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import uvloop

from gateway import keys
from gateway.app import Server, make_app
from gateway.auth import ApiKeys, load_api_keys
from gateway.engine_client import EngineState
from gateway.supervisor import EngineFailed, Supervisor, engine_command
from gateway.tokenizer import Tokenizer
from streamkv import log
from streamkv.config import GatewayConfig, exit_with, load
from streamkv.errors import ConfigError, StreamKVError
from streamkv.model_files import resolve
from streamkv.transport import default_endpoint, load_curve_keys

logger = logging.getLogger(__name__)

WITH_ENGINE: Final = "--with-engine"
EXIT_FAILED: Final = 1


def main(argv: Sequence[str]) -> int:
    """Run until asked to end. Returns the exit status; raises SystemExit(2) for a wrong setting."""
    flags = list(argv)
    engine_flags: list[str] | None = None
    if WITH_ENGINE in flags:
        split = flags.index(WITH_ENGINE)
        flags, engine_flags = flags[:split], flags[split + 1 :]
    try:
        config = load(GatewayConfig, flags, os.environ)
        log.configure(config.log_level, "gateway")
        if config.endpoint:
            endpoint = config.endpoint
        elif engine_flags is not None:
            endpoint = default_endpoint(f"engine-{os.getpid()}")
        else:
            endpoint = default_endpoint()
        api_keys = load_api_keys(config.api_keys_file, os.environ, config.share_prefix_cache)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_Process(config, endpoint, engine_flags, api_keys).run())
    except ConfigError as error:
        exit_with(error)


class _Process:
    """What lives from the first line to the exit status."""

    def __init__(self, config: GatewayConfig, endpoint: str, engine_flags: list[str] | None, api_keys: ApiKeys) -> None:
        self._config = config
        self._api_keys = api_keys
        self._endpoint = endpoint
        self._supervisor: Supervisor | None = None
        if engine_flags is not None:
            self._supervisor = Supervisor(engine_command([*engine_flags, f"--endpoint={endpoint}"]))
        self._app = make_app(
            config,
            self._load_tokenizer,
            endpoint=endpoint,
            curve_keys=load_curve_keys(config.curve_secret_key_file, config.curve_server_key),
            on_state=self._on_state,
            api_keys=api_keys,
        )
        self._server = Server(self._app)
        self._stage = ""
        self._asked_to_end = asyncio.Event()
        self._asked_twice = asyncio.Event()
        self._has_announced = False

    def _load_tokenizer(self) -> Tokenizer:
        return Tokenizer.load(resolve(self._config.model, lambda stage, percent: None), self._config.chat_template)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            await self._server.start(self._config.host, self._config.port)
        except OSError as error:
            print(f"streamkv: cannot listen on {self._config.host}:{self._config.port}: {error}", file=sys.stderr)
            await self._server.close()
            return EXIT_FAILED
        logger.info("listening", extra=log.fields(url=self._server.url, num_api_keys=len(self._api_keys)))
        if not self._api_keys and not _is_loopback(self._config.host):
            logger.warning("anybody who can reach this port can use it: there are no API keys")
        supervising = asyncio.create_task(self._supervisor.run()) if self._supervisor is not None else None
        tokenizing = self._app[keys.TOKENIZER].start()
        tokenizing.add_done_callback(lambda _: self._announce())
        try:
            return await self._until_end(supervising, tokenizing)
        finally:
            try:
                await self._server.close()
            finally:
                if supervising is not None:
                    await self._stop_engine(supervising)

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
                        if not isinstance(error, StreamKVError):
                            logger.error("failed", exc_info=error)
                        return error.exit_code if isinstance(error, EngineFailed) else EXIT_FAILED
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

    async def _stop_engine(self, supervising: "asyncio.Task[None]") -> None:
        assert self._supervisor is not None
        supervising.cancel()
        twice = asyncio.create_task(self._asked_twice.wait())
        await asyncio.wait({supervising, twice}, return_when=asyncio.FIRST_COMPLETED)
        twice.cancel()
        if not supervising.done():
            self._supervisor.kill()
        with contextlib.suppress(asyncio.CancelledError, StreamKVError):
            await supervising
        for path in (
            Path(self._endpoint.removeprefix("ipc://")),
            Path(self._endpoint.removeprefix("ipc://") + ".lock"),
        ):
            if not self._config.endpoint:  # made by this process alone
                path.unlink(missing_ok=True)

    def _on_signal(self) -> None:
        if self._asked_to_end.is_set():
            self._asked_twice.set()
        self._asked_to_end.set()

    def _on_state(self, state: EngineState) -> None:
        engine = self._app[keys.ENGINE]
        if state is EngineState.READY:
            if self._supervisor is not None:
                self._supervisor.note_ready()
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
        body = '{"messages":[{"role":"user","content":"Why is the sky blue?"}],"stream":true}'
        name = self._app[keys.GENERATION].model_name
        url = self._server.url
        key = '-H "Authorization: Bearer $STREAMKV_API_KEY" ' if self._api_keys else ""
        print(
            f"Ready: {name} at {url}   Try: curl -N {url}/v1/chat/completions "
            f"{key}-H 'Content-Type: application/json' -d '{body}'",
            flush=True,
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
