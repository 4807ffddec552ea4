"""Blocks between device, host memory and disk: bit by bit, in order, beside the steps."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.execution.disk_store import DiskStore
from engine.execution.offload import CpuBlockCopier, HostMemory, Mark, Offload, allocate_host_memory
from engine.transfer import StoredBlock, Transfer, TransferKind, TransferResult, block_digest
from streamkv.protocol import pack_ids

NUM_BLOCKS = 9
NUM_HOST_BLOCKS = 7
WAIT_S = 20.0

DOWN, UP = TransferKind.DEVICE_TO_HOST, TransferKind.HOST_TO_DEVICE
WRITE, READ, DROP = TransferKind.HOST_TO_DISK, TransferKind.DISK_TO_HOST, TransferKind.DROP_FROM_DISK


class Rig:
    """An offload over a random pool and, with a folder, a disk."""

    def __init__(self, storage: torch.Tensor, folder: Path | None) -> None:
        self.storage = storage
        self.block_bytes = storage[:, :, 0].numel() * storage.element_size()
        self.host = allocate_host_memory(NUM_HOST_BLOCKS, self.block_bytes)
        self.store = DiskStore(str(folder)) if folder else None
        self.stored: list[StoredBlock] = []
        if self.store:
            _, self.stored = self.store.open(b"f" * 32, 4, self.block_bytes, 2**24, lambda stage, percent: None)
        self.copier = CpuBlockCopier(storage, self.host)
        self.offload = Offload(self.host, self.copier, self.store)
        self.num_started = 0

    def run(
        self, kind: TransferKind, block_ids: list[int], host_ids: list[int], stored: list[StoredBlock] | None = None
    ) -> TransferResult:
        """Start one transfer and wait for it."""
        done = threading.Event()
        self.num_started += 1
        self.offload.start(Transfer(self.num_started, kind, block_ids, host_ids, stored or []), done.set)
        assert done.wait(WAIT_S)
        (result,) = self.offload.take_finished()
        assert result.transfer_id == self.num_started and result.elapsed_s >= 0
        return result

    def block(self, block_id: int) -> bytes:
        """A block's bytes as they lie in the pool, layer by layer, keys before values."""
        return b"".join(
            half[block_id].contiguous().view(torch.uint8).numpy().tobytes() for layer in self.storage for half in layer
        )

    def close(self) -> None:
        self.offload.close()
        if self.store:
            self.store.close()


def random_storage(
    dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (3, 2, NUM_BLOCKS, 4, 2, 8)
) -> torch.Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).reshape(shape)


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(storage: torch.Tensor | None = None, has_disk: bool = True) -> Rig:
        for rig in rigs:
            rig.close()
        rigs.append(Rig(random_storage() if storage is None else storage, tmp_path / "kv" if has_disk else None))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def stored_block(*tokens: int) -> StoredBlock:
    packed = pack_ids(tokens)
    return StoredBlock(block_digest(b"n" * 32, packed), b"n" * 32, 1, packed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(
    "shape", [(3, 2, NUM_BLOCKS, 4, 2, 8), (1, 2, NUM_BLOCKS, 1, 1, 3), (2, 2, NUM_BLOCKS, 5, 3, 24)]
)
def test_blocks_go_down_all_the_way_and_come_back_bit_by_bit(
    make_rig: Callable[..., Rig], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """NaNs and all: the pool holds random bytes."""
    rig = make_rig(random_storage(dtype, shape))
    before = [rig.block(i) for i in range(NUM_BLOCKS)]
    blocks, rows = [7, 2, 3, 4, 8], [1, 4, 5, 6, 2]
    stored = [stored_block(i) for i in blocks]
    num_bytes = 5 * rig.block_bytes
    assert rig.run(DOWN, blocks, rows).num_bytes == num_bytes
    for block_id, row in zip(blocks, rows, strict=True):
        assert rig.host[row].tobytes() == before[block_id], "one block is one piece"
    assert rig.run(WRITE, [], rows, stored).num_bytes == num_bytes
    rig.host[:] = 255
    assert rig.run(READ, [], [3, 1, 2, 7, 6], stored).num_bytes == num_bytes
    back = [1, 5, 6, 2, 4]
    assert rig.run(UP, back, [3, 1, 2, 7, 6]).num_bytes == num_bytes
    after = [rig.block(i) for i in range(NUM_BLOCKS)]
    moved = dict(zip(back, blocks, strict=True))
    assert after == [before[moved.get(i, i)] for i in range(NUM_BLOCKS)]


def test_every_order_of_ids_moves_what_it_names_and_nothing_else(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(has_disk=False)
    generator = torch.Generator().manual_seed(3)
    expected = [rig.host[row].tobytes() for row in range(NUM_HOST_BLOCKS + 1)]
    for _ in range(60):
        count = int(torch.randint(0, NUM_HOST_BLOCKS + 1, (), generator=generator))
        blocks = (torch.randperm(NUM_BLOCKS - 1, generator=generator)[:count] + 1).tolist()
        rows = (torch.randperm(NUM_HOST_BLOCKS, generator=generator)[:count] + 1).tolist()
        if count % 2:
            blocks, rows = sorted(blocks), sorted(rows)
        rig.run(DOWN, blocks, rows)
        for block_id, row in zip(blocks, rows, strict=True):
            expected[row] = rig.block(block_id)
        assert [rig.host[row].tobytes() for row in range(NUM_HOST_BLOCKS + 1)] == expected


def test_a_restart_finds_the_same_blocks(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    stored = [stored_block(i) for i in range(3)]
    rig.run(DOWN, [1, 2, 3], [1, 2, 3])
    rig.run(WRITE, [], [1, 2, 3], stored)
    rig.run(DROP, [], [], [stored[1]])
    wanted = [rig.block(1), rig.block(3)]
    rig = make_rig()
    assert rig.stored == [stored[0], stored[2]]
    assert rig.run(READ, [], [5, 4], rig.stored).failed == []
    assert [rig.host[5].tobytes(), rig.host[4].tobytes()] == wanted


def test_what_fails_on_disk_is_named_and_the_others_arrive(make_rig: Callable[..., Rig], tmp_path: Path) -> None:
    rig = make_rig()
    stored = [stored_block(i) for i in range(4)]
    rig.run(DOWN, [1, 2, 3, 4], [1, 2, 3, 4])
    rig.run(WRITE, [], [1, 2, 3, 4], stored)
    paths = [next((tmp_path / "kv").rglob(f"{each.digest.hex()}.kv")) for each in stored]
    spoilt = bytearray(paths[1].read_bytes())
    spoilt[-100] ^= 4
    paths[1].write_bytes(spoilt)
    paths[2].unlink()
    rig.host[:] = 0
    result = rig.run(READ, [], [7, 6, 5, 4], stored)
    assert (result.failed, result.num_bytes) == ([1, 2], 2 * rig.block_bytes)
    assert [rig.host[7].tobytes(), rig.host[4].tobytes()] == [rig.block(1), rig.block(4)]
    assert not paths[1].exists()
    assert rig.run(DROP, [], [], stored) == TransferResult(rig.num_started, [], pytest.approx(0, abs=WAIT_S), 0)
    assert list((tmp_path / "kv").rglob("*.kv")) == []


def test_a_write_that_finds_no_room_is_named(make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig()
    assert rig.store is not None
    write, full = rig.store.write, stored_block(2)
    monkeypatch.setattr(rig.store, "write", lambda stored, row: stored != full and write(stored, row))
    result = rig.run(WRITE, [], [1, 2, 3], [stored_block(1), full, stored_block(3)])
    assert (result.failed, result.num_bytes) == ([1], 2 * rig.block_bytes)


class HeldCopier:
    """Copies once it is let, and keeps the order of the calls."""

    def __init__(self, host: HostMemory) -> None:
        self.may_go = threading.Event()
        self.begun = threading.Event()
        self.calls: list[tuple[list[int], list[int]]] = []
        self.marked_by: list[threading.Thread] = []
        self.waited_by: list[threading.Thread] = []

    def mark(self) -> Mark:
        self.marked_by.append(threading.current_thread())
        return None

    def wait(self, mark: Mark) -> None:
        self.waited_by.append(threading.current_thread())

    def to_host(self, block_ids: list[int], host_ids: list[int]) -> None:
        self.begun.set()
        assert self.may_go.wait(WAIT_S)
        self.calls.append((block_ids, host_ids))

    def to_device(self, host_ids: list[int], block_ids: list[int]) -> None:
        raise RuntimeError("the device is lost")


def test_starting_and_asking_never_wait_and_the_disk_does_not_wait_for_copies(tmp_path: Path) -> None:
    store = DiskStore(str(tmp_path))
    store.open(b"f" * 32, 4, 64, 2**24, lambda stage, percent: None)
    host = allocate_host_memory(4, 64)
    copier = HeldCopier(host)
    offload = Offload(host, copier, store)
    all_done = threading.Semaphore(0)
    for i in (1, 2, 3):
        offload.start(Transfer(i, DOWN, [i], [i]), all_done.release)
    assert copier.begun.wait(WAIT_S)
    offload.start(Transfer(4, WRITE, [], [4], [stored_block(1)]), all_done.release)
    assert all_done.acquire(timeout=WAIT_S)
    assert [result.transfer_id for result in offload.take_finished()] == [4]
    assert offload.take_finished() == []
    copier.may_go.set()
    for _ in range(3):
        assert all_done.acquire(timeout=WAIT_S)
    assert [result.transfer_id for result in offload.take_finished()] == [1, 2, 3]
    assert copier.calls == [([1], [1]), ([2], [2]), ([3], [3])]
    assert copier.marked_by == [threading.current_thread()] * 3, "behind the steps that this thread has launched"
    assert len(copier.waited_by) == 3 and threading.current_thread() not in copier.waited_by
    offload.close()
    store.close()


def test_a_fault_in_a_copy_wakes_the_loop_and_is_raised_from_then_on() -> None:
    host = allocate_host_memory(4, 64)
    offload = Offload(host, HeldCopier(host), None)
    done = threading.Event()
    offload.start(Transfer(1, UP, [1], [1]), done.set)
    assert done.wait(WAIT_S)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the device is lost"):
            offload.take_finished()
    offload.close()


@pytest.mark.parametrize(
    ("blocks", "rows"), [([NUM_BLOCKS], [1]), ([1], [NUM_HOST_BLOCKS + 1]), ([0], [1]), ([1], [0]), ([1, 2], [1])]
)
def test_ids_that_are_no_blocks_are_an_error_and_move_nothing(
    make_rig: Callable[..., Rig], blocks: list[int], rows: list[int]
) -> None:
    rig = make_rig(has_disk=False)
    done = threading.Event()
    rig.offload.start(Transfer(1, DOWN, blocks, rows), done.set)
    assert done.wait(WAIT_S)
    with pytest.raises(ValueError, match="ids are 1 to"):
        rig.offload.take_finished()
    assert not rig.host.any()


def test_close_waits_for_the_block_that_is_being_written_and_does_not_begin_another(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    assert rig.store is not None
    real, begun, may_go = rig.store.write, threading.Event(), threading.Event()

    def write(stored: StoredBlock, row: memoryview) -> bool:
        begun.set()
        assert may_go.wait(WAIT_S)
        return real(stored, row)

    monkeypatch.setattr(rig.store, "write", write)
    stored = [stored_block(i) for i in range(3)]
    rig.offload.start(Transfer(1, WRITE, [], [1, 2], stored[:2]), lambda: None)
    rig.offload.start(Transfer(2, WRITE, [], [3], stored[2:]), lambda: None)
    assert begun.wait(WAIT_S)
    closer = threading.Thread(target=rig.offload.close)
    closer.start()
    closer.join(0.1)
    assert closer.is_alive()
    may_go.set()
    closer.join(WAIT_S)
    assert not closer.is_alive()
    rig.offload.close()
    assert make_rig().stored == stored[:1]


class HungDisk:
    """In place of a store's method: waits at a block until it is let go on."""

    def __init__(self, real: Callable[[StoredBlock, memoryview], bool], hangs_at: StoredBlock) -> None:
        self.real, self.hangs_at = real, hangs_at
        self.begun, self.may_go = threading.Event(), threading.Event()

    def __call__(self, stored: StoredBlock, row: memoryview) -> bool:
        if stored == self.hangs_at and not self.may_go.is_set():
            self.begun.set()
            assert self.may_go.wait(WAIT_S)
        return self.real(stored, row)


@pytest.mark.parametrize("kind", [WRITE, READ])
def test_a_disk_that_hangs_fails_what_waits_for_it_touches_nothing_later_and_may_come_back(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, kind: TransferKind
) -> None:
    rig = make_rig()
    assert rig.store is not None
    stored = [stored_block(i) for i in range(5)]
    for row in range(1, 6):
        rig.host[row] = row
    rig.run(WRITE, [], [1, 2, 3, 4, 5], stored)
    now_s = [0.0]
    offload = Offload(rig.host, rig.copier, rig.store, clock=lambda: now_s[0], disk_limit_s=10.0)
    disk = HungDisk(rig.store.write if kind is WRITE else rig.store.read, stored[1])
    monkeypatch.setattr(rig.store, "write" if kind is WRITE else "read", disk)
    rig.host[:] = 99
    all_done = threading.Semaphore(0)
    offload.start(Transfer(1, kind, [], [1, 2, 3], stored[:3]), all_done.release)
    offload.start(Transfer(2, kind, [], [4], stored[3:4]), all_done.release)
    assert disk.begun.wait(WAIT_S)
    now_s[0] = 9.0
    assert offload.take_finished() == []
    now_s[0] = 11.0
    assert [(each.transfer_id, each.failed) for each in offload.take_finished()] == [(1, [1, 2]), (2, [0])]
    offload.start(Transfer(3, kind, [], [5], stored[4:]), all_done.release)
    assert all_done.acquire(timeout=WAIT_S), "told at once"
    assert [(each.transfer_id, each.failed) for each in offload.take_finished()] == [(3, [0])]

    rig.host[2:] = 77  # others use them now
    disk.may_go.set()
    for _ in range(2):
        assert all_done.acquire(timeout=WAIT_S), "the thread has passed over what was given up"
    assert (rig.host[2:] == 77).all()
    offload.start(Transfer(4, READ, [], [2, 3], [stored[1], stored[4]]), all_done.release)
    assert all_done.acquire(timeout=WAIT_S)
    assert [(each.transfer_id, each.failed) for each in offload.take_finished()] == [(4, [])]
    assert rig.host[2].tolist() == [99 if kind is WRITE else 2] * rig.block_bytes, "what the write began with"
    assert rig.host[3].tolist() == [5] * rig.block_bytes
    assert offload.close()


def test_close_does_not_wait_for_a_disk_that_hangs(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    assert rig.store is not None
    disk = HungDisk(rig.store.write, stored_block(1))
    monkeypatch.setattr(rig.store, "write", disk)
    offload = Offload(rig.host, rig.copier, rig.store, join_s=0.05)
    offload.start(Transfer(1, WRITE, [], [1], [stored_block(1)]), lambda: None)
    assert disk.begun.wait(WAIT_S)
    assert not offload.close()
    disk.may_go.set()
    for thread in threading.enumerate():
        if thread.name == "kv-disk" and thread not in rig.offload._threads:
            thread.join(WAIT_S)
    assert offload.close()


def test_close_does_not_wait_for_a_device_that_hangs(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(has_disk=False)
    has_begun, may_go = threading.Event(), threading.Event()

    def hang(block_ids: list[int], host_ids: list[int]) -> None:
        has_begun.set()
        assert may_go.wait(WAIT_S)

    monkeypatch.setattr(rig.copier, "to_host", hang)
    offload = Offload(rig.host, rig.copier, None, join_s=0.05)
    offload.start(Transfer(1, DOWN, [1], [1]), lambda: None)
    assert has_begun.wait(WAIT_S)
    (copying,) = offload._threads
    try:
        assert not offload.close()
        assert "the device does not end" in caplog.text
    finally:
        may_go.set()
    copying.join(WAIT_S)
    assert offload.close()


def test_threads_end_with_close_and_only_a_disk_has_one(make_rig: Callable[..., Rig]) -> None:
    def names() -> set[str]:
        return {thread.name for thread in threading.enumerate()} & {"kv-copy", "kv-disk"}

    assert names() == set()
    rig = make_rig(has_disk=False)
    assert names() == {"kv-copy"}
    rig = make_rig()
    assert names() == {"kv-copy", "kv-disk"}
    rig.close()
    assert names() == set()


def test_the_speed_is_what_a_clock_says_of_copies_both_ways(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(has_disk=False)
    times_s = iter([0.0, 3.0, 3.0, 5.0, 5.0, 9.0])
    offload = Offload(rig.host, rig.copier, None, clock=lambda: next(times_s))
    before = [rig.block(i) for i in range(NUM_BLOCKS)]
    assert offload.measure_bytes_per_s(NUM_BLOCKS) == 2 * 7 * rig.block_bytes / 2.0
    assert [rig.block(i) for i in range(NUM_BLOCKS)] == before
    offload.close()
