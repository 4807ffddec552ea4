"""Pinned piece by piece: what is pinned, when it can be used, and what is left of it."""

import ctypes
import logging
import mmap
import threading

import pytest
import torch

from engine.execution.offload import allocate_host_memory
from engine.execution.pinned_memory import PinnedMemory
from streamkv.errors import ConfigError

WAIT_S = 30.0


class RecordedPins:
    """Keeps what is pinned; can be told to stop before a piece, and to refuse from one on."""

    def __init__(self, num_granted: int = 1_000_000) -> None:
        self.pinned: list[tuple[int, int]] = []
        self.num_calls = 0
        self.may_go = threading.Event()
        self.may_go.set()
        self.begun = threading.Event()
        self._num_granted = num_granted

    def pin(self, address: int, num_bytes: int) -> bool:
        self.num_calls += 1
        self.begun.set()
        assert self.may_go.wait(WAIT_S)
        ctypes.string_at(address, num_bytes)  # all of it is there
        if self.num_calls > self._num_granted:
            return False
        self.pinned.append((address, num_bytes))
        return True

    def unpin(self, address: int) -> None:
        self.pinned = [each for each in self.pinned if each[0] != address]


def ignore(stage: str, percent: float) -> None:
    pass


@pytest.mark.parametrize("block_bytes", [64, 4096, 3 * 4096, 5000, 4097, 1])
def test_pieces_cover_all_rows_begin_with_a_page_and_cut_no_row(block_bytes: int) -> None:
    pins = RecordedPins()
    memory = PinnedMemory(9000, block_bytes, pins, piece_bytes=2**20)
    memory.start_pinning()
    memory.wait(ignore)
    start = memory.rows.ctypes.data
    assert memory.rows.shape == (9001, block_bytes)
    end = start
    for piece, (address, num_bytes) in enumerate(pins.pinned):
        assert address == end and address % mmap.PAGESIZE == 0 and num_bytes % mmap.PAGESIZE == 0
        assert (address - start) % block_bytes == 0
        row = (address - start) // block_bytes
        assert memory.piece_of(row) == piece and (row == 0 or memory.piece_of(row - 1) == piece - 1)
        end = address + num_bytes
    assert 0 <= end - (start + memory.rows.nbytes) < mmap.PAGESIZE
    assert memory.num_pinned_pieces == memory.num_pieces == len(pins.pinned)
    memory.close()
    assert pins.pinned == []


def test_rows_can_be_used_before_they_are_pinned_and_keep_what_was_put_there() -> None:
    pins = RecordedPins()
    pins.may_go.clear()
    memory = PinnedMemory(1000, 4096, pins, piece_bytes=2**20)
    memory.start_pinning()
    assert pins.begun.wait(WAIT_S)
    memory.rows[1:] = 7
    assert memory.num_pinned_pieces == 0
    assert not memory.lock_of(0).acquire(blocking=False), "no copy begins while the piece is being pinned"
    assert memory.lock_of(1).acquire(blocking=False)
    memory.lock_of(1).release()
    pins.may_go.set()
    told: list[tuple[str, float]] = []
    memory.wait(lambda stage, percent: told.append((stage, percent)))
    assert memory.num_pinned_pieces == memory.num_pieces == 4
    assert all(stage == "pinning host memory" and 0 <= percent <= 100 for stage, percent in told)
    assert (memory.rows[1:] == 7).all() and not memory.rows[0].any()
    memory.close()
    assert (memory.rows[1:] == 7).all()


def test_what_cannot_be_pinned_is_said_and_stays_of_use(caplog: pytest.LogCaptureFixture) -> None:
    pins = RecordedPins(num_granted=2)
    memory = PinnedMemory(1000, 4096, pins, piece_bytes=2**20)
    with caplog.at_level(logging.WARNING):
        memory.start_pinning()
        memory.wait(ignore)
    assert "cannot be pinned" in caplog.text
    assert (memory.num_pinned_pieces, pins.num_calls, memory.num_pieces) == (2, 3, 4)
    memory.rows[:] = 9
    memory.close()
    assert pins.pinned == []


def test_an_end_in_the_middle_lets_go_of_what_is_pinned() -> None:
    pins = RecordedPins()
    pins.may_go.clear()
    memory = PinnedMemory(1000, 4096, pins, piece_bytes=2**20)
    memory.start_pinning()
    assert pins.begun.wait(WAIT_S)
    closer = threading.Thread(target=memory.close)
    closer.start()
    pins.may_go.set()
    closer.join(WAIT_S)
    assert not closer.is_alive()
    assert pins.pinned == []
    memory.close()


def test_memory_is_pinned_where_there_is_a_gpu() -> None:
    memory = PinnedMemory(10, 64)
    memory.start_pinning()
    memory.wait(ignore)
    assert memory.num_pinned_pieces == (1 if torch.cuda.is_available() else 0)
    assert torch.from_numpy(memory.rows).is_pinned() == torch.cuda.is_available()
    memory.close()


def test_memory_that_the_system_does_not_give_names_the_setting() -> None:
    for allocate in (lambda: PinnedMemory(2**34, 2**20), lambda: allocate_host_memory(2**34, 2**20)):
        with pytest.raises(ConfigError, match=r"host_kv_memory_gib: the system does not give 1\.68e\+07 GiB"):
            allocate()
