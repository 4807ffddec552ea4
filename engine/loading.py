"""Loads the executor on a thread of its own, so that the loop answers meanwhile."""

import threading
from collections.abc import Callable

from engine.executor import DeviceLimits, Executor, ReportProgress
from streamkv.protocol import Loading, ModelFacts


class Loader:
    """One run of `Executor.load`. `progress` and `result` may be read from any thread."""

    def __init__(self, executor: Executor, wake: Callable[[], None], report: ReportProgress | None) -> None:
        """wake: called whenever something has changed. report: told of progress beside that, on the loading thread."""
        self.progress = Loading("starting", 0.0)
        self.result: tuple[ModelFacts, DeviceLimits] | BaseException | None = None
        """None until it is over."""
        self._executor = executor
        self._wake = wake
        self._report = report
        self._thread = threading.Thread(target=self._load, name="load", daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def _load(self) -> None:
        try:
            self.result = self._executor.load(self._take_progress)
        except BaseException as error:
            self.result = error
        self._wake()

    def _take_progress(self, stage: str, percent: float) -> None:
        self.progress = Loading(stage, percent)
        self._wake()
        if self._report is not None:
            self._report(stage, percent)
