"""KV blocks between a GPU and pinned host memory, beside the steps.

A block lies in the pool in as many places as there are layers, twice over. A kernel gathers some blocks into a staging
buffer, where each is one piece as in host memory, and the card's copy engine moves them from there, as many as lie side
by side at once; back the same way. So the bus is read and written in long runs at its full speed, the processors only
do the part that takes microseconds, and nothing that they run waits for the bus.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch

from engine.execution.block_copies import PinnedPairs
from engine.execution.offload import Mark, check_ids
from engine.execution.pinned_memory import PinnedMemory
from engine.kernels.copy_blocks import copy_blocks

_STAGING_BYTES: Final = 32 * 2**20
_NUM_LANES: Final = 2
_UNIT_BYTES: Final = 2 * 2**20
"""In multiples of which PyTorch takes the device's memory, once for small things such as a lane's pairs."""
_PIECE_BYTES: Final = 20 * 2**20
"""The least that it takes for a tensor over 1 MiB."""


def staging_bytes(block_bytes: int, num_host_blocks: int) -> int:
    """How much of the device's memory the lanes of a GpuBlockCopier take at most."""
    lane_bytes = -(-_num_staged(block_bytes, num_host_blocks) * block_bytes // _UNIT_BYTES) * _UNIT_BYTES
    return _NUM_LANES * (max(lane_bytes, _PIECE_BYTES) + _UNIT_BYTES)


def _num_staged(block_bytes: int, most: int) -> int:
    """Blocks of a lane."""
    return max(1, min(_STAGING_BYTES // block_bytes, most))


class _Lane:
    """A stream with a staging buffer: while the bus is busy with one's blocks, another gathers."""

    def __init__(self, planes: torch.Tensor, num_blocks: int) -> None:
        is_gpu = planes.device.type == "cuda"
        self._stream = torch.cuda.Stream(planes.device) if is_gpu else None  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event(blocking=True) if is_gpu else None  # type: ignore[no-untyped-call]
        staging = torch.empty(num_blocks, len(planes), *planes.shape[2:], dtype=planes.dtype, device=planes.device)
        self.blocks = staging.transpose(0, 1)
        """[num_planes, num_blocks, ...], as the pool."""
        self.rows = staging.view(torch.uint8).view(num_blocks, -1)
        """[num_blocks, block_bytes], as host memory."""
        self.pairs = PinnedPairs(num_blocks, planes.device)

    def use(self) -> AbstractContextManager[object]:
        """What is done inside stands in this lane's stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def mark_done(self) -> None:
        if self._done is not None:
            self._done.record(self._stream)

    def wait(self) -> None:
        """Until the device has done all up to the last mark_done. Sleeps meanwhile."""
        if self._done is not None:
            self._done.synchronize()


class GpuBlockCopier:
    """Copies whole blocks between a GPU's pool and pinned host memory. Implements offload.BlockCopier.

    `mark` is called on the thread that launches the steps, all else on another one. Works on a CPU's tensors, too, in
    Triton's interpreter and without streams, but only while no other thread runs a kernel there.
    """

    def __init__(self, storage: torch.Tensor, host: PinnedMemory, steps: torch.cuda.Stream | None) -> None:
        """storage: KvCache.storage, any dtype. host: rows of a block's bytes in it. steps: the stream in which the
        steps run; None: all lies on a CPU. Takes up to staging_bytes of the device's memory."""
        planes = storage.flatten(0, 1)
        num_planes, num_blocks = planes.shape[:2]
        block_bytes = num_planes * planes[0, 0].numel() * planes.itemsize
        if host.rows.shape[1] != block_bytes:
            raise ValueError(f"blocks have {block_bytes} bytes, rows of host memory {host.rows.shape[1]}")
        self._planes = planes
        self._steps = steps
        self._host = host
        self._rows = torch.from_numpy(host.rows)
        most = min(num_blocks, len(host.rows)) - 1
        self._num_staged = _num_staged(block_bytes, most)
        self._lanes = [_Lane(planes, self._num_staged) for _ in range(_NUM_LANES)]

    def mark(self) -> Mark:
        """As BlockCopier.mark. Costs a few microseconds."""
        if self._steps is None:
            return None
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._steps)
        return event

    def wait(self, mark: Mark) -> None:
        if mark is not None:
            mark.synchronize()

    @torch.inference_mode()
    def to_host(self, block_ids: list[int], host_ids: list[int]) -> None:
        for lane, part in self._parts(block_ids, host_ids):
            with lane.use():
                pairs = lane.pairs.load([(block_id, i) for i, (_, block_id) in enumerate(part)])
                copy_blocks(self._planes, lane.blocks, pairs)
                for start, end in self._runs(part):
                    first = part[start][0]
                    with self._host.lock_of(self._host.piece_of(first)):
                        self._rows[first : first + end - start].copy_(lane.rows[start:end], non_blocking=True)
                lane.mark_done()
        self._wait()

    @torch.inference_mode()
    def to_device(self, host_ids: list[int], block_ids: list[int]) -> None:
        for lane, part in self._parts(block_ids, host_ids):
            with lane.use():
                pairs = lane.pairs.load([(i, block_id) for i, (_, block_id) in enumerate(part)])
                for start, end in self._runs(part):
                    first = part[start][0]
                    with self._host.lock_of(self._host.piece_of(first)):
                        lane.rows[start:end].copy_(self._rows[first : first + end - start], non_blocking=True)
                copy_blocks(lane.blocks, self._planes, pairs)
                lane.mark_done()
        self._wait()

    def _parts(self, block_ids: list[int], host_ids: list[int]) -> Iterator[tuple[_Lane, list[tuple[int, int]]]]:
        """(lane, (host id, block id) by host id), the lanes in turn, each when its part before is done.

        Raises ValueError for ids that are no blocks.
        """
        check_ids(block_ids, self._planes.shape[1], host_ids, len(self._rows))
        pairs = sorted(zip(host_ids, block_ids, strict=True))
        for number, start in enumerate(range(0, len(pairs), self._num_staged)):
            lane = self._lanes[number % _NUM_LANES]
            lane.wait()
            yield lane, pairs[start : start + self._num_staged]

    def _runs(self, part: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """(first, end) of stretches whose rows lie side by side in one piece of host memory: a copy each."""
        start = 0
        for end in range(1, len(part) + 1):
            is_end = end == len(part) or part[end][0] != part[end - 1][0] + 1
            if is_end or self._host.piece_of(part[end][0]) != self._host.piece_of(part[start][0]):
                yield start, end
                start = end

    def _wait(self) -> None:
        for lane in self._lanes:
            lane.wait()
