"""KV blocks between device, host memory and disk, on threads of their own, beside the steps."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.execution.disk_store import DiskStore
from engine.transfer import Transfer, TransferKind, TransferResult

HostMemory = npt.NDArray[np.uint8]
"""[num_host_blocks + 1, block_bytes]: a block in one piece, keys and values of one layer after the other. Row 0 is not
used."""

DISK_KINDS: Final = (TransferKind.HOST_TO_DISK, TransferKind.DISK_TO_HOST, TransferKind.DROP_FROM_DISK)
"""They do not touch the device, so they wait for no step."""
_MEASURED_BLOCKS: Final = 32
_MEASURED_TURNS: Final = 3


def allocate_host_memory(num_host_blocks: int, block_bytes: int) -> HostMemory:
    """Zeros that the system gives untouched, so that a block takes memory only once something is put there."""
    return np.zeros((num_host_blocks + 1, block_bytes), dtype=np.uint8)


class BlockCopier(Protocol):
    """Copies whole blocks between a device and host memory. Returns when they have arrived; one call at a time."""

    def to_host(self, block_ids: list[int], host_ids: list[int]) -> None: ...

    def to_device(self, host_ids: list[int], block_ids: list[int]) -> None: ...


class CpuBlockCopier:
    """Where the device's memory is the host's, too. Bound by the memory's bandwidth.

    NumPy copies, since it lets the interpreter go meanwhile and, other than PyTorch, uses the calling thread alone:
    a second team of threads would slow the first one down (see CpuRunner).
    """

    def __init__(self, storage: torch.Tensor, host: HostMemory) -> None:
        """storage: KvCache.storage, any dtype. host: rows of a block's bytes in it."""
        num_layers, num_halves, num_blocks = storage.shape[:3]
        by_half = storage.view(torch.uint8).numpy().reshape(num_layers * num_halves, num_blocks, -1)
        self._device = by_half.transpose(1, 0, 2)
        """[num_blocks, num_layers * 2, bytes]: the storage itself."""
        self._host = host.reshape(len(host), *self._device.shape[1:])

    def to_host(self, block_ids: list[int], host_ids: list[int]) -> None:
        for device, host in self._stretches(block_ids, host_ids):
            self._host[host] = self._device[device]

    def to_device(self, host_ids: list[int], block_ids: list[int]) -> None:
        for device, host in self._stretches(block_ids, host_ids):
            self._device[device] = self._host[host]

    def _stretches(self, block_ids: list[int], host_ids: list[int]) -> Iterator[tuple[slice, slice]]:
        """Ids that count up on both sides, as slices: one copy, for which the interpreter is let go once.

        Raises ValueError for ids that are no blocks, which slices would pass over in silence.
        """
        for ids, num_blocks in ((block_ids, len(self._device)), (host_ids, len(self._host))):
            if len(ids) != len(block_ids) or not all(0 < i < num_blocks for i in ids):
                raise ValueError(f"{len(block_ids)} blocks between {ids} and others; ids are 1 to {num_blocks - 1}")
        start = 0
        for end in range(1, len(block_ids) + 1):
            is_end = end == len(block_ids)
            if is_end or block_ids[end] != block_ids[end - 1] + 1 or host_ids[end] != host_ids[end - 1] + 1:
                yield slice(block_ids[start], block_ids[end - 1] + 1), slice(host_ids[start], host_ids[end - 1] + 1)
                start = end


class Offload:
    """Carries out transfers: one thread for copies between device and host memory, one for the disk.

    Each does its transfers in the order in which they came; how many wait is bounded by the blocks in them, which
    nobody else may use meanwhile.
    """

    def __init__(
        self,
        host: HostMemory,
        copier: BlockCopier,
        store: DiskStore | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """store: open, or None for no disk tier. The caller closes it after this."""
        self._host = host
        self._copier = copier
        self._store = store
        self._clock = clock
        self._finished: deque[TransferResult] = deque()
        self._error: BaseException | None = None
        self._is_closing = False
        self._queues: list[queue.SimpleQueue[tuple[Transfer, Callable[[], None]] | None]] = []
        self._threads: list[threading.Thread] = []
        for name in ("kv-copy", "kv-disk")[: 1 if store is None else 2]:
            waiting: queue.SimpleQueue[tuple[Transfer, Callable[[], None]] | None] = queue.SimpleQueue()
            self._queues.append(waiting)
            self._threads.append(threading.Thread(target=self._work, args=(waiting,), name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    def start(self, transfer: Transfer, on_done: Callable[[], None]) -> None:
        """Begin as soon as those before it are done, and return at once. From any thread.

        For the kinds that touch the device: call it when the steps launched before are done.
        """
        is_disk = transfer.kind in DISK_KINDS
        assert not is_disk or self._store is not None, "there is no disk tier"
        self._queues[is_disk].put((transfer, on_done))

    def take_finished(self) -> list[TransferResult]:
        """As Executor.finished_transfers."""
        if self._error is not None:
            raise self._error
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def measure_bytes_per_s(self, num_device_blocks: int) -> float:
        """Time copies down and up again, before the first transfer, with blocks that nobody owns. The fastest counts.

        num_device_blocks: in the pool, block 0 included.
        """
        count = min(_MEASURED_BLOCKS, num_device_blocks - 1, len(self._host) - 1)
        ids = list(range(1, count + 1))
        times_s = []
        for _ in range(_MEASURED_TURNS):
            start_s = self._clock()
            self._copier.to_host(ids, ids)
            self._copier.to_device(ids, ids)
            times_s.append(self._clock() - start_s)
        num_bytes: int = 2 * count * self._host.shape[1]
        return num_bytes / max(min(times_s), 1e-9)

    def close(self) -> None:
        """End the threads after the block that each has under its hands. What still waits is not done. Idempotent."""
        self._is_closing = True
        for waiting in self._queues:
            waiting.put(None)
        for thread in self._threads:
            thread.join()
        self._queues, self._threads = [], []

    # on the threads

    def _work(self, waiting: "queue.SimpleQueue[tuple[Transfer, Callable[[], None]] | None]") -> None:
        while (entry := waiting.get()) is not None:
            transfer, on_done = entry
            if self._is_closing or self._error is not None:
                continue
            start_s = self._clock()
            try:
                failed = self._carry_out(transfer)
            except BaseException as error:
                self._error = error
            else:
                num_moved = max(0, len(transfer.host_ids) - len(failed))  # nothing for what is only dropped
                num_bytes = num_moved * self._host.shape[1]
                self._finished.append(TransferResult(transfer.transfer_id, failed, self._clock() - start_s, num_bytes))
            on_done()

    def _carry_out(self, transfer: Transfer) -> list[int]:
        """→ the indices that failed."""
        match transfer.kind:
            case TransferKind.DEVICE_TO_HOST:
                self._copier.to_host(transfer.block_ids, transfer.host_ids)
            case TransferKind.HOST_TO_DEVICE:
                self._copier.to_device(transfer.host_ids, transfer.block_ids)
            case _:
                return self._carry_out_on_disk(transfer)
        return []

    def _carry_out_on_disk(self, transfer: Transfer) -> list[int]:
        assert self._store is not None
        failed: list[int] = []
        for i, stored in enumerate(transfer.stored):
            if self._is_closing:
                is_done = False
            elif transfer.kind is TransferKind.DROP_FROM_DISK:
                is_done = self._store.drop(stored)
            else:
                row = memoryview(self._host[transfer.host_ids[i]])
                is_write = transfer.kind is TransferKind.HOST_TO_DISK
                is_done = self._store.write(stored, row) if is_write else self._store.read(stored, row)
            if not is_done:
                failed.append(i)
        return failed
