"""Copies between host and device that nobody waits for.

The pinned side of each is memory of its own from PyTorch's caching allocator, which notes an event behind the copy and
hands the memory out again when that has passed. So it does not matter how many steps are on their way.
"""

import torch


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """values: in host memory, not changed afterwards. Begun on the current stream."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def begin_to_host(values: torch.Tensor) -> torch.Tensor:
    """→ a tensor in host memory, which has the values when an event behind this call has passed."""
    if values.device.type == "cpu":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
