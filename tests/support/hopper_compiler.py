"""Has Triton compile for a Hopper GPU what a runner launches, where there is none: nothing is computed, and what the
interpreter takes and a GPU's compiler refuses is found anywhere.

usage: python -m tests.support.hopper_compiler SETTINGS    (JSON: fields of EngineConfig; without TRITON_INTERPRET)
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from engine.execution import gpu_runner
from engine.execution.gpu_runner import GpuRunner
from engine.execution.gpu_start import GpuStart, first_of_each_kind
from engine.execution.warm_up import WarmUp
from streamkv.config import EngineConfig

HOPPER = GPUTarget("cuda", 90, 32)


class _Driver:
    """Of a GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class _NoWarmUp(WarmUp):
    def run(self, report: Callable[[float], None]) -> None:
        report(100.0)


def _cache_dtype_on_a_gpu(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    return torch.float8_e4m3fn if name == "fp8" else dtype


def compile_all(config: EngineConfig) -> int:
    """Every kernel that an engine with this configuration launches on a GPU → how many launches there were."""
    num_launches = 0
    run = JITFunction.run

    def compile_only(self: Any, *args: object, **options: Any) -> object:
        nonlocal num_launches
        num_launches += 1
        return run(self, *args, **{**options, "warmup": True})

    triton.runtime.driver.set_active(_Driver())  # type: ignore[no-untyped-call]
    JITFunction.run = compile_only
    gpu_runner.WarmUp = _NoWarmUp  # type: ignore[misc]
    gpu_runner.resolve_cache_dtype = _cache_dtype_on_a_gpu
    runner = GpuRunner(config, torch.device("cpu"))
    runner.load(lambda stage, percent: None)
    parts = runner._parts
    start = GpuStart(config, parts, None, config.max_model_len, runner._compute)
    with runner._on_device():
        start.compile(list(parts.all()), lambda percent: None)
        start.compute_largest(first_of_each_kind(parts.all()))
    runner.close()
    return num_launches


if __name__ == "__main__":
    print(compile_all(EngineConfig(**json.loads(sys.argv[1]))))
