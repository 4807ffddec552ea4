"""The gateway's process.

    python -m gateway [gateway flags]                              the gateway alone; an engine runs elsewhere
    python -m gateway [gateway flags] --with-engine [engine flags]  the gateway, which starts and watches an engine
    python -m gateway [gateway flags] --as-worker PATH NUMBER       one of several, started by the process of `crew`

Everything after `--with-engine` is handed to `python -m engine` as it stands. When the gateway's endpoint is empty,
both get an ipc socket of their own, so that several servers run side by side. Ends with 0 only when asked to end:
SIGTERM, SIGINT or SIGHUP drains (readiness off, live streams go on for shutdown_grace_s), a second one ends now.
SIGUSR1 gives a gateway that started an engine a new one, in which the live streams go on.
"""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from gateway.engine_watch import EngineWatch
from gateway.supervisor import Supervisor, engine_command
from gateway.worker_flags import split_worker_flags
from streamkv import log
from streamkv.config import GatewayConfig, exit_with, load
from streamkv.errors import ConfigError
from streamkv.process import HAND_OVER_SIGNAL, end_signals
from streamkv.transport import default_endpoint, flight_record_path, load_curve_keys, refuse_taken

WITH_ENGINE: Final = "--with-engine"


def main(argv: Sequence[str]) -> int:
    """Run until asked to end. Returns the exit status; raises SystemExit(2) for a wrong setting."""
    for number in end_signals():  # until there is more to end than this process
        signal.signal(number, lambda *_: sys.exit(0))
    flags = list(argv)
    engine_flags: list[str] | None = None
    if WITH_ENGINE in flags:
        split = flags.index(WITH_ENGINE)
        flags, engine_flags = flags[:split], flags[split + 1 :]
    try:
        flags, link = split_worker_flags(flags)
        config = load(GatewayConfig, flags, os.environ)
        log.configure(config.log_level, "gateway")
        if engine_flags is None:
            from gateway.process import run_process  # late, as below

            return run_process(config, config.endpoint or default_endpoint(), None, link)
        endpoint = config.endpoint or default_endpoint(f"engine-{os.getpid()}")
        with _own_engine(config, endpoint, engine_flags) as engine:
            # The engine loads for much longer than this process, so it does not wait for that either.
            from gateway.process import run_process

            return run_process(config, endpoint, engine, link)
    except ConfigError as error:
        exit_with(error)


@contextmanager
def _own_engine(config: GatewayConfig, endpoint: str, engine_flags: Sequence[str]) -> Iterator[Supervisor]:
    """In its block the engine is there, or on its way; behind it nothing is left of it, whatever has happened."""
    if config.endpoint:
        refuse_taken(endpoint)  # or the gateway would talk to another's engine, and its own could never start
    watch = EngineWatch(
        endpoint,
        load_curve_keys(config.curve_secret_key_file, config.curve_server_key),
        heartbeat_s=config.heartbeat_s,
        silence_s=config.engine_timeout_s,
    )
    # It is asked last, when the gateway has drained: what still lives then has nobody to take it up. So it ends
    # at once, but for its cache, which goes to disk; SIGTERM would let it drain for longer than it is given.
    engine = Supervisor(
        engine_command([*engine_flags, f"--endpoint={endpoint}"]), watch=watch, stop_signal=HAND_OVER_SIGNAL
    )
    engine.start_early()
    try:
        yield engine
    finally:
        engine.end_early()
        if not config.endpoint:
            _remove_socket(endpoint)


def _remove_socket(endpoint: str) -> None:
    """An engine that was killed leaves its socket, which has this process's number in its name, behind."""
    path = endpoint.removeprefix("ipc://")
    for each in (path, path + ".lock", flight_record_path(endpoint)):
        Path(each).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
