"""Block copies within a GPU's pool, for copy-on-write: from a list of the host's to one kernel, waiting for neither."""

from typing import Final

import numpy as np
import torch

from engine.kernels.copy_blocks import copy_blocks

_NUM_TURNS: Final = 4
_FIRST_CAPACITY: Final = 256


class PinnedPairs:
    """Pairs of block ids on their way to the device: pinned memory, and what is copied from it."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._device = device
        is_gpu = device.type == "cuda"
        self._host = torch.empty(capacity, 2, dtype=torch.int32, pin_memory=is_gpu)
        self._on_device = torch.empty(capacity, 2, dtype=torch.int32, device=device)
        self._loaded = torch.cuda.Event(blocking=True) if is_gpu else None  # type: ignore[no-untyped-call]
        """The device has read what was last put into pinned memory."""

    def load(self, pairs: list[tuple[int, int]]) -> torch.Tensor:
        """[n, 2] int32 on the device, once the current stream is there; good until the next call.

        Returns at once, unless the device has not yet come to the call before. Allocates only for more pairs than ever.
        """
        if self._loaded is not None:
            self._loaded.synchronize()  # of an event that was never recorded, this returns
        if len(pairs) > len(self._host):
            self._grow(len(pairs))
        self._host.numpy()[: len(pairs)] = np.array(pairs, dtype=np.int32).reshape(-1, 2)
        loaded = self._on_device[: len(pairs)]
        loaded.copy_(self._host[: len(pairs)], non_blocking=True)
        if self._loaded is not None:
            self._loaded.record()
        return loaded

    def _grow(self, count: int) -> None:
        capacity = max(count, 2 * len(self._host))
        self._host = torch.empty(capacity, 2, dtype=torch.int32, pin_memory=self._loaded is not None)
        self._on_device = torch.empty(capacity, 2, dtype=torch.int32, device=self._device)


class DeviceBlockCopies:
    """Copies blocks within a pool, in the current stream.

    More steps than ever run at once have pinned memory of their own, so that none waits for that of another.
    """

    def __init__(self, planes: torch.Tensor) -> None:
        """planes: [num_planes, num_blocks, ...], as kernels.copy_blocks takes it."""
        self._planes = planes
        self._turns = [PinnedPairs(_FIRST_CAPACITY, planes.device) for _ in range(_NUM_TURNS)]
        self._next = 0

    def run(self, pairs: list[tuple[int, int]]) -> None:
        """(source, destination) each; no destination is also a source. Returns at once."""
        turn = self._turns[self._next]
        self._next = (self._next + 1) % _NUM_TURNS
        copy_blocks(self._planes, self._planes, turn.load(pairs))
