"""Host memory that a GPU copies from and to by itself: pinned piece by piece, beside whatever else the start does."""

import ctypes
import errno
import logging
import math
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

import numpy as np
import torch

from engine.execution.offload import HostMemory, no_host_memory
from streamkv.log import fields

_PIECE_BYTES: Final = 64 * 2**20
"""What is pinned at once: a few milliseconds, in which other calls of the driver may wait."""
_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14: bring pages in, as if something were written, without changing what stands there."""
_FOR_ALL_DEVICES: Final = 1
"""cudaHostRegisterPortable."""
_MOST_THREADS: Final = 4
_WAIT_S: Final = 0.2

logger = logging.getLogger(__name__)


class Pins(Protocol):
    """Pins memory of this process, so that it cannot be moved or swapped."""

    def pin(self, address: int, num_bytes: int) -> bool:
        """Whether that could be done."""
        ...

    def unpin(self, address: int) -> None: ...


class CudaPins:
    """For copies to and from NVIDIA GPUs."""

    def __init__(self) -> None:
        self._runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def pin(self, address: int, num_bytes: int) -> bool:
        return int(self._runtime.cudaHostRegister(address, num_bytes, _FOR_ALL_DEVICES)) == 0

    def unpin(self, address: int) -> None:
        self._runtime.cudaHostUnregister(address)


class PinnedMemory:
    """Rows for KV blocks in host memory, of which a thread pins piece after piece.

    Rows can be used from the start: copies of those that are not pinned yet are right, but slow. No row lies in two
    pieces, and no copy may cross a border between two, for the driver knows each by itself.
    """

    def __init__(
        self, num_host_blocks: int, block_bytes: int, pins: Pins | None = None, piece_bytes: int = _PIECE_BYTES
    ) -> None:
        """pins: None takes a GPU's; where there is none, nothing is pinned. Raises ConfigError for memory that cannot
        be had."""
        num_rows = num_host_blocks + 1
        # Pieces begin with a row and with a page.
        unit = mmap.PAGESIZE // math.gcd(block_bytes, mmap.PAGESIZE)
        self._rows_per_piece = max(1, round(piece_bytes / (unit * block_bytes))) * unit
        num_bytes = -(-num_rows * block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise no_host_memory(num_bytes) from error
        memory.madvise(mmap.MADV_HUGEPAGE)
        self.rows: HostMemory = np.frombuffer(memory, dtype=np.uint8, count=num_rows * block_bytes).reshape(
            num_rows, block_bytes
        )
        """The system's untouched zeros, which live as long as someone looks at them."""
        self._pins = CudaPins() if pins is None and torch.cuda.is_available() else pins
        self._num_bytes = num_bytes
        self._locks = [threading.Lock() for _ in range(-(-num_rows // self._rows_per_piece))]
        self._pinned: list[int] = []
        """Addresses."""
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def piece_of(self, row: int) -> int:
        return row // self._rows_per_piece

    def lock_of(self, piece: int) -> threading.Lock:
        """Held while a copy from or to these rows is begun, so that it finds them pinned or not, and not in between."""
        return self._locks[piece]

    @property
    def num_pinned_pieces(self) -> int:
        return len(self._pinned)

    @property
    def num_pieces(self) -> int:
        return len(self._locks)

    def start_pinning(self) -> None:
        """Return at once; a thread pins the pieces in order. Called once, and as early as it can be."""
        if self._pins is not None:
            self._thread = threading.Thread(target=self._pin, args=(self._pins,), name="kv-pin", daemon=True)
            self._thread.start()

    def wait(self, report: Callable[[str, float], None]) -> None:
        """Until all is pinned, or cannot be; reports ("pinning host memory", percent) meanwhile."""
        while self._thread is not None and self._thread.is_alive():
            report("pinning host memory", 100.0 * self.num_pinned_pieces / self.num_pieces)
            self._thread.join(_WAIT_S)

    def close(self) -> None:
        """Let the pages go. After the last copy. Idempotent."""
        self._is_closing = True
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        while self._pinned and self._pins is not None:
            self._pins.unpin(self._pinned.pop())

    def _pin(self, pins: Pins) -> None:
        """Several threads bring the pages in, which is most of the work, before the driver is asked for each piece."""
        start = self.rows.ctypes.data
        piece_bytes = self._rows_per_piece * self.rows.shape[1]
        starts = range(start, start + self._num_bytes, piece_bytes)
        sizes = [min(piece_bytes, start + self._num_bytes - address) for address in starts]
        num_threads = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // 2))
        with ThreadPoolExecutor(num_threads, "kv-pages") as pool:
            for piece, (address, num_bytes, _) in enumerate(
                zip(starts, sizes, pool.map(self._bring_in, starts, sizes), strict=True)
            ):
                if self._is_closing:
                    return
                with self._locks[piece]:
                    is_pinned = pins.pin(address, num_bytes)
                if not is_pinned:
                    logger.warning(
                        "host memory for KV blocks cannot be pinned: copies to and from the rest of it are slow",
                        extra=fields(pinned_pieces=len(self._pinned), pieces=self.num_pieces),
                    )
                    self._is_closing = True
                    return
                self._pinned.append(address)

    def _bring_in(self, address: int, num_bytes: int) -> None:
        if self._is_closing:
            return
        # By ctypes, which lets the interpreter go meanwhile; mmap.madvise would not.
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _MADV_POPULATE_WRITE):
            # An older kernel knows no such advice; then the driver brings the pages in, one thread alone.
            code = ctypes.get_errno()
            if code != errno.EINVAL:
                logger.warning("pages for KV blocks cannot be had", extra=fields(error=os.strerror(code)))
