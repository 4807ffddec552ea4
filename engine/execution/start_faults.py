"""What a GPU's engine may lack when it starts, told in the words of what can mend it.

A traceback of CUDA or Triton says neither which setting is too large nor what the machine lacks. Whoever reads it is at
the door, not in the house.
"""

import subprocess
import traceback
from pathlib import Path
from types import TracebackType

import torch
import triton
from triton.runtime.errors import OutOfResources

from engine.models.room import fullness, is_out_of_host_memory, is_out_of_memory
from streamkv.errors import ConfigError, ModelError, StreamKVError

_BUILD = "triton/runtime/build.py"
_CACHE = "triton/runtime/cache.py"
_DRIVER = "triton/backends/nvidia/driver.py"


class StartFaults:
    """Around a start, from before the weights are read: turns what is raised into ConfigError or ModelError.

    What has no words here is raised as it came.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.has_pool = False
        """Whether the KV pool's size is settled: then it is what has taken all that was left."""

    def __enter__(self) -> None:
        if self._device.type != "cuda":
            return
        try:
            # Builds the part of Triton that is in C, so that what that lacks is told before minutes of loading.
            triton.runtime.driver.active.utils  # noqa: B018
        except Exception as error:
            self._tell(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, StreamKVError):
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        if is_out_of_memory(error):
            raise self._no_room(is_out_of_host_memory(error)) from error
        if isinstance(error, OutOfResources):
            frames = traceback.extract_tb(error.__traceback__)
            is_attention = any("attention" in Path(frame.filename).name for frame in frames)
            reason = "its heads (head_dim) are too wide for this GPU in this dtype; " if is_attention else ""
            raise ModelError(
                f"a kernel for this model needs {error.required} of this GPU's {error.name}, of which it has "
                f"{error.limit}: {reason}use a narrower dtype, or device cpu"
            ) from error
        lacking = lacking_for_triton(error)
        if lacking is not None:
            raise lacking from error

    def _no_room(self, is_on_host: bool) -> ConfigError:
        full = fullness(torch.device("cpu") if is_on_host else self._device)
        if self.has_pool and not is_on_host:
            return ConfigError(
                "gpu_memory_utilization",
                f"leaves too little for what is made beside the KV pool, which does not fit {full}; lower it, or end "
                "what else runs on this GPU",
            )
        return ConfigError(
            "max_num_batched_tokens",
            f"the buffers and steps for so many tokens, and for max_num_seqs sequences, do not fit {full}; lower one "
            "of the two, use quantization fp8, or end what else runs on this GPU",
        )


def lacking_for_triton(error: Exception) -> ConfigError | None:
    """What this machine lacks for kernels to be compiled, by where in Triton it is missed; None: something else."""
    frames = {(frame.filename.replace("\\", "/"), frame.name) for frame in traceback.extract_tb(error.__traceback__)}
    files = {filename for filename, _ in frames}

    def is_in(path: str) -> bool:
        return any(filename.endswith(path) for filename in files)

    if any(name == "_build" and filename.endswith(_BUILD) for filename, name in frames):
        if isinstance(error, subprocess.CalledProcessError):
            reason = f"the C compiler {error.cmd[0]} fails (status {error.returncode}; what it says stands above)"
        elif isinstance(error, OSError):
            reason = f"the C compiler {error.filename} cannot be run ({error.strerror})"
        else:
            reason = "there is no C compiler"
        return ConfigError(
            "CC",
            f"Triton's kernels cannot be launched: {reason}; install gcc with the headers of libc (Debian: gcc "
            "libc6-dev) and of Python, or set the variable CC to a C compiler",
        )
    if isinstance(error, OSError) and is_in("/tempfile.py"):
        return ConfigError(
            "TMPDIR", f"a temporary file cannot be written ({error}); set the variable to a folder that can be written"
        )
    if is_in(_CACHE) and (isinstance(error, OSError) or "cache dir" in str(error)):
        folder = triton.knobs.cache.dir
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        return ConfigError(
            "TRITON_CACHE_DIR",
            f"compiled kernels cannot be kept in {folder} ({reason}); set the variable to a folder that can be written",
        )
    if is_in(_DRIVER) and "libcuda" in str(error):
        return ConfigError(
            "TRITON_LIBCUDA_PATH",
            "the driver's libcuda.so.1 is not found; run ldconfig, or set the variable to its folder",
        )
    return None
