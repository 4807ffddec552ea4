"""KV blocks between device, host memory and disk, on threads of their own, beside the steps."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.execution.disk_store import DiskStore
from engine.transfer import Transfer, TransferKind, TransferResult
from streamkv.errors import ConfigError
from streamkv.log import fields

HostMemory = npt.NDArray[np.uint8]
"""[num_host_blocks + 1, block_bytes]: a block in one piece, keys and values of one layer after the other. Row 0 is not
used."""

DISK_KINDS: Final = (TransferKind.HOST_TO_DISK, TransferKind.DISK_TO_HOST, TransferKind.DROP_FROM_DISK)
"""They do not touch the device, so they wait for no step."""
_MEASURED_BLOCKS: Final = 32
_MEASURED_TURNS: Final = 3
_DISK_LIMIT_S: Final = 20.0
"""What one block may take on its way from or to the disk, before the disk counts as hung."""
_JOIN_S: Final = 5.0
"""What a thread that is asked to end may still take for the block under its hands."""

logger = logging.getLogger(__name__)


def allocate_host_memory(num_host_blocks: int, block_bytes: int) -> HostMemory:
    """Zeros that the system gives untouched, so that a block takes memory only once something is put there. Raises
    ConfigError where the system promises no more than it has, and has less."""
    try:
        return np.zeros((num_host_blocks + 1, block_bytes), dtype=np.uint8)
    except MemoryError as error:
        raise no_host_memory((num_host_blocks + 1) * block_bytes) from error


def no_host_memory(num_bytes: int) -> ConfigError:
    """What is said of so many bytes that cannot be had."""
    return ConfigError(
        "host_kv_memory_gib", f"the system does not give {num_bytes / 2**30:.3g} GiB of memory in one piece; lower it"
    )


Mark = torch.cuda.Event | None
"""A place in the device's work; None: what was asked of it is done already."""


class BlockCopier(Protocol):
    """Copies whole blocks between a device and host memory. Returns when they have arrived; one call at a time."""

    def mark(self) -> Mark:
        """Behind all steps that are launched by now. Called by whoever launches them; returns at once."""
        ...

    def wait(self, mark: Mark) -> None:
        """Until the device is there. Called where the copies are."""
        ...

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

    def mark(self) -> Mark:
        """The CPU's runner starts a transfer when the steps before it are done."""
        return None

    def wait(self, mark: Mark) -> None:
        pass

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
        check_ids(block_ids, len(self._device), host_ids, len(self._host))
        start = 0
        for end in range(1, len(block_ids) + 1):
            is_end = end == len(block_ids)
            if is_end or block_ids[end] != block_ids[end - 1] + 1 or host_ids[end] != host_ids[end - 1] + 1:
                yield slice(block_ids[start], block_ids[end - 1] + 1), slice(host_ids[start], host_ids[end - 1] + 1)
                start = end


def check_ids(block_ids: list[int], num_blocks: int, host_ids: list[int], num_rows: int) -> None:
    """Raises ValueError for ids that are no blocks. num_blocks, num_rows: those numbered 0, which none is, included."""
    for ids, num in ((block_ids, num_blocks), (host_ids, num_rows)):
        if len(ids) != len(block_ids) or not all(0 < i < num for i in ids):
            raise ValueError(f"{len(block_ids)} blocks between {ids} and others; ids are 1 to {num - 1}")


@dataclass(slots=True, eq=False)
class _DiskWork:
    """A transfer from or to the disk, until it is reported. Guarded by Offload's lock."""

    transfer: Transfer
    on_done: Callable[[], None]
    begun_s: float = 0.0
    num_done: int = 0
    """Of its blocks, those that are over, in order."""
    failed: list[int] = field(default_factory=list)
    is_over: bool = False
    """Reported, or given up. The thread may not touch host memory for it any more: others use those blocks."""


class Offload:
    """Carries out transfers: one thread for copies between device and host memory, one for the disk.

    Each does its transfers in the order in which they came; how many wait is bounded by the blocks in them, which
    nobody else may use meanwhile. A disk that takes `disk_limit_s` for one block counts as hung (a network file system
    whose server is gone, say): all that waits for it has failed, and so does what comes until it answers again.
    """

    def __init__(
        self,
        host: HostMemory,
        copier: BlockCopier,
        store: DiskStore | None,
        clock: Callable[[], float] = time.perf_counter,
        disk_limit_s: float = _DISK_LIMIT_S,
        join_s: float = _JOIN_S,
    ) -> None:
        """store: open, or None for no disk tier. The caller closes it after this."""
        self._host = host
        self._copier = copier
        self._store = store
        self._clock = clock
        self._disk_limit_s = disk_limit_s
        self._join_s = join_s
        self._finished: deque[TransferResult] = deque()
        self._error: BaseException | None = None
        self._is_closing = False
        self._copies: queue.SimpleQueue[tuple[Transfer, Mark, Callable[[], None]] | None] = queue.SimpleQueue()
        self._disk_queue: queue.SimpleQueue[_DiskWork | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        """Guards what follows, and every access of the disk's thread to host memory."""
        self._disk_pending: deque[_DiskWork] = deque()
        """Not yet over, in their order; the thread works on the first."""
        self._block_since_s = 0.0
        """When the thread began with the block under its hands."""
        self._is_hung = False
        self._threads = [threading.Thread(target=self._copy, name="kv-copy", daemon=True)]
        if store is not None:
            self._threads.append(threading.Thread(target=self._use_disk, args=(store,), name="kv-disk", daemon=True))
        for thread in self._threads:
            thread.start()

    def start(self, transfer: Transfer, on_done: Callable[[], None]) -> None:
        """Begin as soon as those before it are done, and return at once.

        From any thread, but for the kinds that touch the device from the one that launches steps, behind those before.
        """
        if transfer.kind not in DISK_KINDS:
            self._copies.put((transfer, self._copier.mark(), on_done))
            return
        assert self._store is not None, "there is no disk tier"
        work = _DiskWork(transfer, on_done)
        with self._lock:
            is_hung = self._is_hung
            if is_hung:
                self._give_up(work)
            else:
                if not self._disk_pending:
                    self._block_since_s = self._clock()
                self._disk_pending.append(work)
                self._disk_queue.put(work)
        if is_hung:
            on_done()

    def take_finished(self) -> list[TransferResult]:
        """As Executor.finished_transfers."""
        if self._error is not None:
            raise self._error
        if self._store is not None:
            self._look_at_disk()
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def measure_bytes_per_s(self, num_device_blocks: int) -> float:
        """Time copies down and up again, before the first transfer, with blocks that nobody owns. The fastest counts.

        num_device_blocks: in the pool, block 0 included. The steps before it are done.
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

    def close(self) -> bool:
        """End the threads after the block that each has under its hands → whether they have ended. What still waits is
        not done. Idempotent.

        If False a disk or the device hangs: the thread goes with the process, and the store and the host's memory have
        to stay as they are, since it may come back to them.
        """
        self._is_closing = True
        self._copies.put(None)
        self._disk_queue.put(None)
        for thread in self._threads:
            thread.join(self._join_s)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for thread in self._threads:
            what = "disk" if thread.name == "kv-disk" else "device"
            logger.warning(f"the {what} does not end what it does with KV blocks; left as it is")
        return not self._threads

    # a disk that hangs

    def _look_at_disk(self) -> None:
        with self._lock:
            if not self._disk_pending or self._clock() - self._block_since_s < self._disk_limit_s:
                return
            self._is_hung = True
            logger.warning(
                "the disk for KV blocks does not answer: it counts as empty and full until it does",
                extra=fields(limit_s=self._disk_limit_s, num_transfers=len(self._disk_pending)),
            )
            while self._disk_pending:
                self._give_up(self._disk_pending.popleft())

    def _give_up(self, work: _DiskWork) -> None:
        """Report it with what is not done as failed. The lock is held."""
        transfer = work.transfer
        work.failed.extend(range(work.num_done, len(transfer.stored)))
        self._report(work)

    def _report(self, work: _DiskWork) -> None:
        """The lock is held."""
        work.is_over = True
        transfer = work.transfer
        num_moved = max(0, len(transfer.host_ids) - len(work.failed))  # nothing for what is only dropped
        elapsed_s = self._clock() - work.begun_s if work.begun_s else 0.0
        num_bytes = num_moved * self._host.shape[1]
        self._finished.append(TransferResult(transfer.transfer_id, work.failed, elapsed_s, num_bytes))

    # on the threads

    def _copy(self) -> None:
        while (entry := self._copies.get()) is not None:
            transfer, mark, on_done = entry
            if self._is_closing or self._error is not None:
                continue
            try:
                self._copier.wait(mark)
                start_s = self._clock()
                if transfer.kind is TransferKind.DEVICE_TO_HOST:
                    self._copier.to_host(transfer.block_ids, transfer.host_ids)
                else:
                    self._copier.to_device(transfer.host_ids, transfer.block_ids)
            except BaseException as error:
                self._error = error
            else:
                num_bytes = len(transfer.host_ids) * self._host.shape[1]
                self._finished.append(TransferResult(transfer.transfer_id, [], self._clock() - start_s, num_bytes))
            on_done()

    def _use_disk(self, store: DiskStore) -> None:
        # Between disk and host memory: a block that was given up may not be touched any more, whenever that was.
        buffer = memoryview(bytearray(self._host.shape[1]))
        while (work := self._disk_queue.get()) is not None:
            if self._is_closing or self._error is not None:
                continue
            try:
                self._carry_out(work, store, buffer)
            except BaseException as error:
                self._error = error
            work.on_done()

    def _carry_out(self, work: _DiskWork, store: DiskStore, buffer: memoryview) -> None:
        kind = work.transfer.kind
        for i, stored in enumerate(work.transfer.stored):
            with self._lock:
                if work.is_over:
                    return
                self._block_since_s = self._clock()
                work.begun_s = work.begun_s or self._block_since_s
                if kind is TransferKind.HOST_TO_DISK:
                    buffer[:] = self._host[work.transfer.host_ids[i]].data
            if self._is_closing:
                is_done = False
            elif kind is TransferKind.DROP_FROM_DISK:
                is_done = store.drop(stored)
            elif kind is TransferKind.HOST_TO_DISK:
                is_done = store.write(stored, buffer)
            else:
                is_done = store.read(stored, buffer)
            with self._lock:
                if self._is_hung:
                    self._is_hung = False
                    logger.info("the disk for KV blocks answers again")
                if work not in self._disk_pending:
                    return
                if is_done and kind is TransferKind.DISK_TO_HOST:
                    self._host[work.transfer.host_ids[i]] = np.frombuffer(buffer, dtype=np.uint8)
                work.num_done = i + 1
                if not is_done:
                    work.failed.append(i)
        with self._lock:
            if work in self._disk_pending:
                self._disk_pending.remove(work)
                self._report(work)
                self._block_since_s = self._clock()
