"""The engine's process: settings → executor → loop.

    python -m engine [flags]        as `streamkv engine`

SIGTERM ends it when its live streams have ended, after 30 s at the latest; a second one, or SIGINT, at once. SIGRTMIN
ends it now for the sake of a next engine, to which its gateways send their live streams. Exit codes: 0 the end was
asked for; 1 a fault, starting again may help; 2 these settings or this model cannot run.
With STREAMKV_EXIT_WITH_PARENT=PID, the parent process, its end counts as a SIGTERM.
"""

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from select import POLLIN, poll
from types import FrameType

# Read when PyTorch and its OpenMP are first imported, so before the imports below. Some CPUs read weights faster from
# 2 MiB pages. The spin is how long a thread waits awake at the end of a parallel region, some 0.3 ms: longer than the
# gap to the next operator of a step, or each would pay for waking the others (a third of a step), and far shorter than
# libgomp's own choice, with which spinning threads keep the core from the gateway, or from whoever else they wait for,
# until a step takes four times as long.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from engine.execution.runner import CpuRunner
from engine.executor import Executor
from engine.loop import EngineLoop
from streamkv import config, log
from streamkv.config import EngineConfig
from streamkv.errors import ConfigError
from streamkv.log import fields
from streamkv.process import HAND_OVER_SIGNAL, end_signals

logger = logging.getLogger(__name__)

_LOG_PROGRESS_EVERY = 25.0
"""Percent of a stage between two log lines."""
_WATCH_PARENT_S = 1.0
"""Between two looks for the parent, where nothing tells of its end."""

_TAKEN = ("out of memory", "busy or unavailable")
"""What CUDA says where other processes leave no memory, or where the GPU is kept for one."""


class LoadingDisplay:
    """Shows on stderr how far loading is: one bar per stage on a terminal, log lines elsewhere."""

    def __init__(self) -> None:
        self._bars: Progress | None = None
        self._stage = ""
        self._bar = TaskID(0)
        self._logged_percent = 0.0
        console = Console(stderr=True)
        if console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:3.0f} %"),
                TimeElapsedColumn(),
                console=console,
            )

    def show(self, stage: str, percent: float) -> None:
        """From the loading thread only."""
        is_new = stage != self._stage
        self._stage = stage
        if self._bars is not None:
            if is_new:
                self._bars.start()
                self._bar = self._bars.add_task(stage, total=100.0)
            self._bars.update(self._bar, completed=percent)
        elif is_new or percent >= self._logged_percent + _LOG_PROGRESS_EVERY:
            self._logged_percent = percent
            logger.info("loading", extra=fields(stage=stage, percent=round(percent)))

    def close(self) -> None:
        """Take the bars off the terminal. From any thread."""
        if self._bars is not None:
            self._bars.stop()


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run an engine to its end. Returns the exit code."""
    try:
        settings = config.load(config.EngineConfig, argv, environ)
        log.configure(settings.log_level, "engine")
        display = LoadingDisplay()

        def on_loaded() -> None:
            display.close()
            gc.disable()
            collect()

        def collect() -> None:
            # A collection looks at every token of every live sequence, a full one at every block of the cache, too: up
            # to a fifth of the loop's time, and 0.1 s in a piece. So it waits until nothing is live. What is there then
            # stays.
            gc.collect()
            gc.freeze()

        loop = EngineLoop(settings, make_executor(settings), report=display.show, on_loaded=on_loaded, on_lull=collect)
    except ConfigError as error:
        config.exit_with(error)
    _end_on_signals(loop)
    parent_pid = environ.get("STREAMKV_EXIT_WITH_PARENT", "")
    if parent_pid.isdecimal():
        threading.Thread(target=_watch_parent, args=(int(parent_pid),), name="parent", daemon=True).start()
    return loop.run()


def make_executor(settings: EngineConfig) -> Executor:
    """Whoever computes on settings.device. Raises ConfigError for a device that is not there, or that cannot do what
    another setting asks for."""
    has_gpu = torch.cuda.is_available()
    if settings.device == "cuda" and not has_gpu:
        raise ConfigError("device", "is cuda, but PyTorch finds no NVIDIA GPU (or is built without CUDA); cpu works")
    if settings.device == "cuda" or (settings.device == "auto" and has_gpu):
        # While CUDA begins the rest can be imported.
        threading.Thread(target=_begin_cuda, name="cuda", daemon=True).start()
        try:
            from engine.execution.gpu_runner import GpuRunner  # Triton, which an engine on a CPU need not have
        except ImportError as error:
            raise ConfigError("device", f"a GPU needs the package triton: install streamkv[gpu] ({error})") from error
        try:
            return GpuRunner(settings, torch.device("cuda", torch.cuda.current_device()))
        except RuntimeError as error:  # the first that asks something of the GPU itself, and not of its driver
            if not any(sign in str(error) for sign in _TAKEN):
                raise
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                "device", f"the NVIDIA GPU is taken by other processes ({reason}); end them, or use cpu"
            ) from error
    for field, is_asked in (
        ("quantization", settings.quantization != "none"),
        ("kv_cache_dtype", settings.kv_cache_dtype != "auto"),
        ("deterministic", settings.deterministic),
    ):
        if is_asked:
            raise ConfigError(field, "needs an NVIDIA GPU; this engine runs on the CPU")
    return CpuRunner(settings)


def _begin_cuda() -> None:
    with contextlib.suppress(RuntimeError, AssertionError):  # PyTorch says it again where it can be told
        torch.zeros(1, device="cuda")


def _end_on_signals(loop: EngineLoop) -> None:
    is_draining = False

    def on_signal(number: int, _: FrameType | None) -> None:
        nonlocal is_draining
        if number == signal.SIGINT or is_draining:
            loop.stop()
        else:
            is_draining = True
            loop.drain()

    for number in end_signals():
        signal.signal(number, on_signal)
    signal.signal(HAND_OVER_SIGNAL, lambda number, frame: loop.hand_over())


def _watch_parent(parent_pid: int) -> None:
    """Sleeps until that process is gone, then sends this one a SIGTERM."""
    poller = poll()
    with contextlib.suppress(OSError):  # a sandbox may have no such descriptors
        poller.register(os.pidfd_open(parent_pid), POLLIN)
        # Or else it went while this process was loading, and another may have its number.
        if os.getppid() == parent_pid:
            poller.poll()
    while os.getppid() == parent_pid:
        time.sleep(_WATCH_PARENT_S)
    logger.warning("the parent process has ended")
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    exit_code = main(sys.argv[1:], os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # not sys.exit: a thread that still loads may be deep inside PyTorch
