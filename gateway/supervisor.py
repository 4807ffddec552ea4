"""Owns a child process, the engine or one of several gateways: starts it, starts it again with back-off when it ends,
and stops it.

Either ends with its parent (`engine/__main__.py` watches for that, and a gateway's link to it breaks), so a parent that
is killed leaves nobody behind.
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from streamkv.errors import StreamKVError
from streamkv.log import fields
from streamkv.process import EXIT_UNUSABLE, HAND_OVER_SIGNAL

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S: Final = 0.25
MAX_BACKOFF_S: Final = 15.0
HEALTHY_S: Final = 60.0
"""An engine that lived this long after it was ready starts with the shortest back-off again."""
MAX_FAILED_STARTS: Final = 5
"""Ends in a row without having been ready, after which the supervisor gives up."""
_POLL_S: Final = 0.1
RESTART_SIGNAL: Final = signal.SIGUSR1
"""Asks a server, or a supervisor, for a new engine. Not SIGHUP, which also comes when a terminal is closed, and then
means the end."""


class ChildFailed(StreamKVError):
    """The child cannot run; `exit_code` is what this process should end with."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Watch(Protocol):
    """Looks whether a child makes progress (engine_watch.EngineWatch)."""

    async def until_hung(self, on_ready: Callable[[], None]) -> str:
        """Watch one life of the child, from its start. Returns why it counts as hung, if it ever does."""
        ...


class Supervisor:
    """Runs one child at a time. `run` is the task to keep; it ends by cancellation, or with ChildFailed."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str = "engine",
        watch: "Watch | None" = None,
        stop_grace_s: float = 10.0,
        stop_signal: signal.Signals = signal.SIGTERM,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """command: the child's argument list. name: for messages. watch: tells when it hangs; None: only its end is
        seen. stop_signal: asks the child to end. stop_grace_s: from it to SIGKILL."""
        self._command = list(command)
        self._name = name
        self._watch = watch
        self._stop_grace_s = stop_grace_s
        self._stop_signal = stop_signal
        self._clock = clock
        self._process: asyncio.subprocess.Process | _EarlyChild | None = None
        self._early: _EarlyChild | None = None
        """Started, and not yet under the eyes of `run`."""
        self._was_ready = self._has_worked = False
        """Whether this child has been ready, and whether any has."""
        self._ready_at = 0.0
        self._is_restart_asked = False
        self._limit: asyncio.TimerHandle | None = None
        """When a child that was asked to make room for a new one is killed."""
        self.num_restarts = 0
        self.num_hangs = 0
        """Of the restarts, those of a child that lived and made no progress."""

    @property
    def pid(self) -> int | None:
        """The living child's process id."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def note_ready(self) -> None:
        """The child takes work: its start has not failed."""
        if not self._was_ready:
            self._was_ready = self._has_worked = True
            self._ready_at = self._clock()

    def start_early(self) -> None:
        """Start the first child before there is a loop, so that it loads while this process does. `run` goes on with
        it; who does not come to that has to `end_early`."""
        # Of a session of its own, so that a Ctrl-C on the terminal reaches the parent alone, which then stops both.
        self._early = self._process = _EarlyChild(
            subprocess.Popen(self._command, stdin=subprocess.DEVNULL, start_new_session=True, env=_child_environ())
        )

    def end_early(self) -> None:
        """Kill a child whose `run` was never begun, and wait until it is gone."""
        if self._early is not None:
            self._early.kill()
            self._early.wait_blocking()
            self._early = None

    async def run(self) -> None:
        """Keep a child running. Raises ChildFailed when it ends with EXIT_UNUSABLE before any was ready, or has failed
        to start MAX_FAILED_STARTS times in a row. When cancelled, the child has ended before this returns."""
        num_failed = 0
        backoff_s = FIRST_BACKOFF_S
        while True:
            self._was_ready = False
            code = await self._run_once()
            if self._is_restart_asked:
                self._is_restart_asked = False
                num_failed = 0
                logger.info(f"{self._name} ended to be started anew", extra=fields(exit=describe_exit(code)))
                self.num_restarts += 1
                continue
            if self._was_ready:
                num_failed = 0
                if self._clock() - self._ready_at >= HEALTHY_S:
                    backoff_s = FIRST_BACKOFF_S
            else:
                num_failed += 1
                # What has worked once may do so again: memory may be full for a moment, say.
                if code == EXIT_UNUSABLE and not self._has_worked:
                    raise ChildFailed(
                        f"the {self._name} refused its settings or its model; see its message above", code
                    )
                if num_failed >= MAX_FAILED_STARTS:
                    raise ChildFailed(f"the {self._name} failed to start {num_failed} times ({describe_exit(code)})", 1)
            logger.error(f"{self._name} ended", extra=fields(exit=describe_exit(code), restart_in_s=backoff_s))
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
            self.num_restarts += 1

    async def _run_once(self) -> int:
        process = self._process = await self._next_child()
        logger.info(f"{self._name} started", extra=fields(pid=process.pid))
        watching = asyncio.create_task(self._kill_when_hung(process)) if self._watch is not None else None
        try:
            return await process.wait()
        finally:
            if watching is not None:
                watching.cancel()
            if self._limit is not None:
                self._limit.cancel()
            await asyncio.shield(self._stop(process))

    async def _next_child(self) -> "asyncio.subprocess.Process | _EarlyChild":
        if self._early is not None:
            early, self._early = self._early, None
            return early
        return await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.DEVNULL, start_new_session=True, env=_child_environ()
        )

    async def _kill_when_hung(self, process: "asyncio.subprocess.Process | _EarlyChild") -> None:
        """SIGKILL: what hangs may not come to handle anything else, and is started again when it is gone."""
        assert self._watch is not None
        reason = await self._watch.until_hung(self.note_ready)
        self.num_hangs += 1
        logger.error(f"{self._name} hangs; killed", extra=fields(pid=process.pid, reason=reason))
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    async def _stop(self, process: "asyncio.subprocess.Process | _EarlyChild") -> None:
        """The stop signal, then SIGKILL; returns when the child is gone."""
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(self._stop_signal)
        try:
            async with asyncio.timeout(self._stop_grace_s):
                await process.wait()
        except TimeoutError:
            logger.warning(f"{self._name} did not stop in time; killed", extra=fields(pid=process.pid))
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def end(self, running: "asyncio.Task[None]", at_once: asyncio.Event) -> None:
        """Stop the child and the task of `run`; when `at_once` is set meanwhile, or before, by SIGKILL."""
        running.cancel()
        impatient = asyncio.create_task(at_once.wait())
        await asyncio.wait({running, impatient}, return_when=asyncio.FIRST_COMPLETED)
        impatient.cancel()
        if not running.done():
            self.kill()
        with contextlib.suppress(asyncio.CancelledError, StreamKVError):
            await running

    def restart(self) -> None:
        """Ask the child to make room for a new one, by HAND_OVER_SIGNAL; by SIGKILL when it takes longer than to stop.
        Nothing happens while there is none. Its end counts neither as a crash nor as a failed start, and the new one is
        started at once."""
        process = self._process
        if process is None or process.returncode is not None or self._is_restart_asked:
            return
        self._is_restart_asked = True
        logger.info(f"{self._name} is asked to make room for a new one", extra=fields(pid=process.pid))
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(HAND_OVER_SIGNAL)
        self._limit = asyncio.get_running_loop().call_later(self._stop_grace_s, self.kill)

    def kill(self) -> None:
        """SIGKILL at once, for a second signal from an impatient user."""
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


class _EarlyChild:
    """As asyncio's Process, of a child that is older than the loop."""

    def __init__(self, popen: "subprocess.Popen[bytes]") -> None:
        self._popen = popen
        self.pid = popen.pid
        self.send_signal = popen.send_signal
        self.kill = popen.kill
        self.wait_blocking = popen.wait

    @property
    def returncode(self) -> int | None:
        return self._popen.poll()

    async def wait(self) -> int:
        if (code := self.returncode) is not None:
            return code
        try:
            pidfd = os.pidfd_open(self.pid)
        except OSError:  # a sandbox without them, or no more descriptors
            while (code := self.returncode) is None:  # noqa: ASYNC110 (nothing would set an event)
                await asyncio.sleep(_POLL_S)
            return code
        loop, is_over = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(pidfd, is_over.set)
        try:
            await is_over.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        return self._popen.wait()


def _child_environ() -> dict[str, str]:
    return {**os.environ, "STREAMKV_EXIT_WITH_PARENT": str(os.getpid())}


def engine_command(engine_args: Sequence[str]) -> list[str]:
    """The engine's argument list, with this interpreter."""
    return [sys.executable, "-m", "engine", *engine_args]


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
