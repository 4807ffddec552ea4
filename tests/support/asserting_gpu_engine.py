"""python -m tests.support.asserting_gpu_engine ENDPOINT MODEL STEP: an engine on a GPU that fails an assert at a step.

STEP counts from the first that a request is in; 0: never. From then on every call of CUDA fails in this process.
"""

import os
import sys
from collections.abc import Callable

import msgspec
import torch

from engine.execution.gpu_runner import GpuRunner
from engine.executor import Launch
from engine.loop import EngineLoop
from engine.plan import StepPlan
from streamkv import log
from streamkv.config import EngineConfig
from tests.support.scripted_engine import TEST_CONFIG


class AssertingGpuRunner(GpuRunner):
    """Reads beyond a tensor beside the given step."""

    def __init__(self, config: EngineConfig, step: int) -> None:
        super().__init__(config, torch.device("cuda", 0))
        self._steps_left = step
        self.is_serving = False

    def launch(self, plan: StepPlan, on_done: Callable[[], None]) -> Launch:
        if self.is_serving:
            self._steps_left -= 1
            if self._steps_left == 0:
                beyond = torch.tensor([1 << 20], device="cuda")
                torch.zeros(8, device="cuda").index_select(0, beyond)
        return super().launch(plan, on_done)


def main(endpoint: str, model: str, step: int) -> int:
    log.configure("warning", "engine")
    settings = {"endpoint": endpoint, "model": model, "device": "cuda", "dtype": "float32", "enforce_eager": True}
    config = msgspec.convert({**TEST_CONFIG, **settings, "gpu_memory_utilization": 0.2}, EngineConfig)
    runner = AssertingGpuRunner(config, step)

    def on_loaded() -> None:
        runner.is_serving = True

    return EngineLoop(config, runner, on_loaded=on_loaded).run()


if __name__ == "__main__":
    os._exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
