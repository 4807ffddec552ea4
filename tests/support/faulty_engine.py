"""python -m tests.support.faulty_engine ENDPOINT FAULTS VOCAB_SIZE: an engine process whose device fails.

FAULTS is a file with a kind of fault in each line. Each life takes the first one, and meets it at its tenth step; with
none left it is healthy.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.loop import EngineLoop
from engine.plan import StepPlan, StepTokens
from streamkv import log
from streamkv.config import EngineConfig
from tests.support.scripted_engine import TEST_CONFIG
from tests.support.scripted_executor import ScriptedExecutor, ScriptedLaunch

FAULT_AT_STEP = 10
KINDS = ("collect", "launch", "close", "hang", "abort", "memory", "kill")


class BrokenDevice(ScriptedExecutor):
    """As a CUDA device after an assert: once one call has failed, every later one does, the last included."""

    def __init__(self, kind: str, vocab_size: int) -> None:
        super().__init__(vocab_size=vocab_size, step_s=0.004)
        self._kind = kind
        self._num_launched = 0
        self._is_broken = False

    def launch(self, plan: StepPlan, on_done: Callable[[], None]) -> ScriptedLaunch:
        self._num_launched += 1
        self._check()
        if self._num_launched > FAULT_AT_STEP:
            match self._kind:
                case "launch":
                    self._is_broken = True
                    self._check()
                case "hang":
                    self.block_at_step[self.num_steps] = 3600.0
                case "abort":
                    os.abort()
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
        return super().launch(plan, on_done)

    def collect(self, launch: ScriptedLaunch) -> StepTokens:
        tokens = super().collect(launch)
        if self._num_launched > FAULT_AT_STEP and self._kind == "memory":
            raise MemoryError("no room for a step")
        self._is_broken |= self._num_launched > FAULT_AT_STEP and self._kind in ("collect", "close")
        self._check()
        return tokens

    def close(self) -> None:
        if self._kind == "close" and self._is_broken:
            threading.Event().wait()
        self._check()
        super().close()

    def _check(self) -> None:
        if self._is_broken:
            raise RuntimeError("CUDA error: device-side assert triggered")


def main(endpoint: str, faults: Path, vocab_size: int) -> int:
    kind, _, rest = faults.read_text().partition("\n")
    faults.write_text(rest)
    log.configure("warning", "engine")
    config = msgspec.convert({"endpoint": endpoint, **TEST_CONFIG}, EngineConfig)
    return EngineLoop(config, BrokenDevice(kind, vocab_size)).run()


if __name__ == "__main__":
    os._exit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
