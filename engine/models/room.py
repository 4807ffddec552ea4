"""Memory that runs out while an engine starts: told in the words of the setting that can mend it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from engine.memory import available_memory_bytes
from engine.models.config import ModelConfig
from streamkv.errors import ConfigError

_GIB: Final = 2**30
_SIGNS: Final = ("out of memory", "STATUS_ALLOC_FAILED")
"""What CUDA, Triton and CUDA's libraries say where PyTorch's allocator is not asked; each has its own exception."""
_HOST_SIGN: Final = "DefaultCPUAllocator"
"""In what PyTorch says of the host's memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device's memory has run out, or the host's."""
    if isinstance(error, torch.OutOfMemoryError) or is_out_of_host_memory(error):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def is_out_of_host_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _HOST_SIGN in str(error))


def fullness(device: torch.device) -> str:
    """How full it is: the end of a sentence that begins with what does not fit."""
    if device.type != "cuda":
        left_bytes = available_memory_bytes()
        left = "" if left_bytes is None else f", which has {left_bytes / _GIB:.3g} GiB left"
        return f"into this machine's memory{left}"
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    own_bytes = torch.cuda.memory_reserved(device)
    return (
        f"on this GPU: of its {total_bytes / _GIB:.3g} GiB this engine had taken {own_bytes / _GIB:.3g}, and "
        f"{free_bytes / _GIB:.3g} were free"
    )


@contextmanager
def room_for_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, is_quantised: bool
) -> Iterator[None]:
    """In its block the weights are loaded. Raises ConfigError where they do not fit."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        where = torch.device("cpu") if is_out_of_host_memory(error) else device
        needed_gib = config.num_parameters * dtype.itemsize / _GIB
        wide = str(dtype).removeprefix("torch.")
        ways = []
        if device.type == "cuda" and not config.transformers_id and not is_quantised:
            ways.append("quantization fp8, which takes about half")
        if device.type == "cuda" and dtype == torch.float32:
            ways.append("dtype bfloat16, which takes half")
        others = "this GPU" if where.type == "cuda" else "this machine"
        ways += ["a smaller model", f"end what else runs on {others}"]
        size = f"{needed_gib:.3g} GiB in {wide}" + (", about half of that in fp8," if is_quantised else ",")
        raise ConfigError(
            "model", f"its weights, {size} do not fit {fullness(where)}; use {', '.join(ways[:-1])}, or {ways[-1]}"
        ) from error
