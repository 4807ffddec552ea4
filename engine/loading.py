"""Loads the executor on a thread of its own, so that the loop answers meanwhile."""

import logging
import re
import threading
import time
from collections.abc import Callable

from engine.executor import DeviceLimits, Executor, ReportProgress
from streamkv.log import fields
from streamkv.protocol import Loading, ModelFacts

logger = logging.getLogger(__name__)


class Loader:
    """One run of `Executor.load`. `progress` and `result` may be read from any thread."""

    def __init__(
        self,
        executor: Executor,
        wake: Callable[[], None],
        report: ReportProgress | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """wake: called whenever something has changed. report: told of progress beside that, on the loading thread."""
        self.progress = Loading("starting", 0.0)
        self.result: tuple[ModelFacts, DeviceLimits] | BaseException | None = None
        """None until it is over."""
        self._executor = executor
        self._wake = wake
        self._report = report
        self._clock = clock
        self._since_s = 0.0
        """When the newest stage began, or began again."""
        self._stages_s: dict[str, float] = {}
        """What each has taken, those that are over."""
        self._thread = threading.Thread(target=self._load, name="load", daemon=True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def _load(self) -> None:
        self._since_s = self._clock()
        try:
            result = self._executor.load(self._take_progress)
            self._tell_stages()
            self.result = result
        except BaseException as error:
            self.result = error
        self._wake()

    def _tell_stages(self) -> None:
        """What is done between two stages counts as the one before."""
        self._end_stage()
        # A stage may have a model's name or path in it, which may not begin a field or a line of its own.
        names = {stage: re.sub(r"\W+", "_", stage, flags=re.ASCII) for stage in self._stages_s}
        stages_s = {f"{names[stage]}_s": round(spent_s, 3) for stage, spent_s in self._stages_s.items()}
        logger.info("loaded", extra=fields(total_s=round(sum(self._stages_s.values()), 3), **stages_s))

    def _take_progress(self, stage: str, percent: float) -> None:
        if stage != self.progress.stage:
            self._end_stage()
        self.progress = Loading(stage, percent)
        self._wake()
        if self._report is not None:
            self._report(stage, percent)

    def _end_stage(self) -> None:
        now_s = self._clock()
        stage = self.progress.stage
        self._stages_s[stage] = self._stages_s.get(stage, 0.0) + now_s - self._since_s
        self._since_s = now_s
