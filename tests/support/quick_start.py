"""A runner's start without the steps that only measure: of a real model they take more than a second each time."""

from functools import partial
from typing import Any, Final

import pytest

from engine.execution import runner as runner_module
from engine.execution.runner import CpuRunner
from engine.execution.warm_up import WarmUp, Workload
from engine.executor import DeviceLimits
from streamkv.protocol import ModelFacts

_WORKLOAD: Final = Workload(num_prompt=8, shapes=(), most_runs=1, longest_s=0.0)


def load_quickly(runner: CpuRunner, **parts: Any) -> tuple[ModelFacts, DeviceLimits]:
    """As runner.load, for tests of what comes after it. parts: by name, what engine.execution.runner is to take for
    its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner_module, "WarmUp", partial(WarmUp, workload=_WORKLOAD))
        for name, part in parts.items():
            patch.setattr(runner_module, name, part)
        return runner.load(lambda stage, percent: None)
