"""`streamkv engine --supervise`: an engine that is started again when it ends or hangs, without a gateway beside it.

The first process of the engine's container, so it reaps what nobody else waits for. SIGUSR1 gives it a new engine, in
which the live streams go on. Ends with 0 when asked to end (SIGTERM drains; a second signal ends now), with the
engine's own status for settings or a model that cannot run, else with 1.
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

from gateway.engine_watch import EngineWatch
from gateway.supervisor import RESTART_SIGNAL, ChildFailed, Supervisor, engine_command
from streamkv import log
from streamkv.config import EngineConfig, exit_with, load, to_argv
from streamkv.errors import ConfigError
from streamkv.process import end_signals
from streamkv.transport import CurveKeys, default_endpoint, load_curve_keys

logger = logging.getLogger(__name__)

STOP_GRACE_S: Final = 45.0
"""An engine that was asked to end lets its streams finish for 30 s, then writes its cache to disk for a few more."""


def main(argv: Sequence[str]) -> int:
    """Run until asked to end. Returns the exit status; raises SystemExit(2) for a wrong setting."""
    try:
        config = load(EngineConfig, argv, os.environ)
        log.configure(config.log_level, "supervisor")
        endpoint = config.endpoint or default_endpoint()
        watch = None
        if endpoint.startswith("ipc://"):
            watch = EngineWatch(endpoint, None, heartbeat_s=config.heartbeat_s)
        elif (keys := _own_keys(config)) is not None and (reached_at := from_here(endpoint)):
            watch = EngineWatch(reached_at, keys, heartbeat_s=config.heartbeat_s)
    except ConfigError as error:
        exit_with(error)
    command = engine_command([*to_argv(config), f"--endpoint={endpoint}"])
    return asyncio.run(_run(Supervisor(command, watch=watch, stop_grace_s=STOP_GRACE_S)))


def from_here(endpoint: str) -> str:
    """Where an engine that binds this tcp endpoint is reached on its own machine; empty where only the engine knows:
    for a port that is chosen for it, or the name of a network interface."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if port in ("*", "0"):
        return ""
    if host == "*":
        return f"tcp://127.0.0.1:{port}"
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return endpoint if host == "localhost" else ""
    return endpoint


def _own_keys(config: EngineConfig) -> CurveKeys | None:
    """Keys to speak to one's own engine with: those of the engine serve for both sides. Raises ConfigError."""
    keys = load_curve_keys(config.curve_secret_key_file)
    return None if keys is None else load_curve_keys(config.curve_secret_key_file, keys.public.decode("ascii"))


async def _run(supervisor: Supervisor) -> int:
    asked, at_once = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (at_once if asked.is_set() else asked).set()

    loop = asyncio.get_running_loop()
    for number in end_signals():
        loop.add_signal_handler(number, on_signal)
    loop.add_signal_handler(RESTART_SIGNAL, supervisor.restart)
    loop.add_signal_handler(signal.SIGCHLD, lambda: _reap_orphans(supervisor.pid))
    running = asyncio.create_task(supervisor.run())
    waiting = asyncio.create_task(asked.wait())
    try:
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            error = running.exception()
            print(f"streamkv: {error}", file=sys.stderr)
            return error.exit_code if isinstance(error, ChildFailed) else 1
        return 0
    finally:
        waiting.cancel()
        await supervisor.end(running, at_once)


def _reap_orphans(engine_pid: int | None) -> None:
    """Wait for ended children that are not the engine: as a container's first process, this one inherits them."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        for pid in map(int, children):
            if pid != engine_pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
