"""Blocks between a GPU's pool and host memory: bit by bit, behind the steps before, beside the steps after."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("triton")

from engine.execution import gpu_copier
from engine.execution.gpu_copier import GpuBlockCopier
from engine.execution.offload import CpuBlockCopier, Offload, allocate_host_memory
from engine.execution.pinned_memory import PinnedMemory
from engine.transfer import Transfer, TransferKind, TransferResult

NUM_BLOCKS = 9
NUM_HOST_BLOCKS = 7
WAIT_S = 30.0
DOWN, UP = TransferKind.DEVICE_TO_HOST, TransferKind.HOST_TO_DEVICE


class Rig:
    """An offload between a pool of random bytes and host memory."""

    def __init__(self, storage: torch.Tensor, num_host_blocks: int = NUM_HOST_BLOCKS, piece_bytes: int = 1) -> None:
        device = storage.device
        is_gpu = device.type == "cuda"
        self.bytes = storage.view(torch.uint8)
        block_bytes = self.bytes[:, :, 0].numel()
        self.memory = PinnedMemory(num_host_blocks, block_bytes, piece_bytes=piece_bytes)
        self.memory.start_pinning()
        self.memory.wait(lambda stage, percent: None)
        self.host = self.memory.rows
        self.steps = torch.cuda.Stream(device) if is_gpu else None
        self.copier = GpuBlockCopier(storage, self.memory, self.steps)
        self.offload = Offload(self.host, self.copier, None)
        self.num_started = 0

    def start(self, kind: TransferKind, block_ids: list[int], host_ids: list[int]) -> threading.Event:
        done = threading.Event()
        self.num_started += 1
        self.offload.start(Transfer(self.num_started, kind, block_ids, host_ids), done.set)
        return done

    def run(self, kind: TransferKind, block_ids: list[int], host_ids: list[int]) -> TransferResult:
        assert self.start(kind, block_ids, host_ids).wait(WAIT_S)
        (result,) = self.offload.take_finished()
        assert result.transfer_id == self.num_started and result.elapsed_s >= 0
        return result

    def block(self, block_id: int) -> bytes:
        """A block's bytes as they lie in the pool, layer by layer, keys before values."""
        return bytes(self.bytes[:, :, block_id].flatten().cpu().numpy())

    def close(self) -> None:
        self.offload.close()
        self.memory.close()


@pytest.fixture
def make_rig(device: torch.device) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(
        dtype: torch.dtype = torch.bfloat16,
        shape: tuple[int, ...] = (3, 2, NUM_BLOCKS, 4, 2, 8),
        num_host_blocks: int = NUM_HOST_BLOCKS,
    ) -> Rig:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        storage = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).to(device).view(dtype).reshape(shape)
        rigs.append(Rig(storage, num_host_blocks))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(3, 2, NUM_BLOCKS, 4, 2, 8), (1, 2, NUM_BLOCKS, 5, 3, 24)])
def test_blocks_go_down_and_come_back_bit_by_bit(
    make_rig: Callable[..., Rig], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """NaNs and all: the pool holds random bytes."""
    rig = make_rig(dtype, shape)
    before = [rig.block(i) for i in range(NUM_BLOCKS)]
    blocks, rows = [7, 2, 3, 4, 8], [1, 4, 5, 6, 2]
    assert rig.run(DOWN, blocks, rows).num_bytes == 5 * len(before[0])
    for block_id, row in zip(blocks, rows, strict=True):
        assert rig.host[row].tobytes() == before[block_id], "one block is one piece"
    assert not rig.host[[0, 3, 7]].any()
    back = [1, 5, 6, 2, 4]
    assert rig.run(UP, back, [2, 1, 4, 6, 5]).num_bytes == 5 * len(before[0])
    moved = dict(zip(back, [8, 7, 2, 4, 3], strict=True))
    assert [rig.block(i) for i in range(NUM_BLOCKS)] == [before[moved.get(i, i)] for i in range(NUM_BLOCKS)]


@pytest.mark.parametrize("num_staged", [1, 3, 1000])
def test_every_order_of_ids_moves_what_it_names_and_nothing_else(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, num_staged: int
) -> None:
    """Whatever fits into a staging buffer and wherever the pieces of host memory end."""
    num_blocks, num_rows = 24, 20
    block_bytes = 2 * 2 * 4 * 64 * 2
    monkeypatch.setattr(gpu_copier, "_STAGING_BYTES", num_staged * block_bytes)
    rig = make_rig(shape=(2, 2, num_blocks, 4, 2, 32), num_host_blocks=num_rows)
    assert rig.memory.num_pieces > 3
    generator = torch.Generator().manual_seed(3)
    on_host = [rig.host[row].tobytes() for row in range(num_rows + 1)]
    on_device = [rig.block(i) for i in range(num_blocks)]
    for turn in range(12):
        count = int(torch.randint(0, num_rows + 1, (), generator=generator))
        blocks = (torch.randperm(num_blocks - 1, generator=generator)[:count] + 1).tolist()
        rows = (torch.randperm(num_rows, generator=generator)[:count] + 1).tolist()
        if turn % 3 == 0:
            blocks, rows = sorted(blocks), sorted(rows)
        rig.run(DOWN if turn % 2 == 0 else UP, blocks, rows)
        for block_id, row in zip(blocks, rows, strict=True):
            if turn % 2 == 0:
                on_host[row] = on_device[block_id]
            else:
                on_device[block_id] = on_host[row]
        assert [rig.host[row].tobytes() for row in range(num_rows + 1)] == on_host
        assert [rig.block(i) for i in range(num_blocks)] == on_device


def test_host_memory_looks_as_that_of_a_cpus_copier(make_rig: Callable[..., Rig]) -> None:
    """So what stands on a disk is the same."""
    rig = make_rig(torch.float32)
    rig.run(DOWN, [3, 1, 8], [1, 2, 5])
    storage = rig.bytes.view(torch.float32).cpu()
    host = allocate_host_memory(NUM_HOST_BLOCKS, rig.host.shape[1])
    CpuBlockCopier(storage, host).to_host([3, 1, 8], [1, 2, 5])
    assert (host == rig.host).all()


@pytest.mark.parametrize(
    ("blocks", "rows"), [([NUM_BLOCKS], [1]), ([1], [NUM_HOST_BLOCKS + 1]), ([0], [1]), ([1], [0]), ([1, 2], [1])]
)
def test_ids_that_are_no_blocks_are_an_error_and_move_nothing(
    make_rig: Callable[..., Rig], blocks: list[int], rows: list[int]
) -> None:
    rig = make_rig()
    assert rig.start(DOWN, blocks, rows).wait(WAIT_S)
    with pytest.raises(ValueError, match="ids are 1 to"):
        rig.offload.take_finished()
    assert not rig.host.any()


@pytest.mark.parametrize("num_staged", [1, 3, 1000])
def test_its_buffers_take_no_more_than_is_kept_for_them(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, num_staged: int
) -> None:
    block_bytes = 2 * 2 * 4 * 64 * 2
    monkeypatch.setattr(gpu_copier, "_STAGING_BYTES", num_staged * block_bytes)
    rig = make_rig(shape=(2, 2, 24, 4, 2, 32), num_host_blocks=20)
    taken_bytes = sum(lane.rows.nbytes for lane in rig.copier._lanes)
    assert taken_bytes == 2 * min(num_staged, 20) * block_bytes
    assert taken_bytes <= gpu_copier.staging_bytes(block_bytes, 20)
    gib = 2**30
    assert gpu_copier.staging_bytes(gib, 20) >= 2 * gib, "a lane has one block, however large"


def test_rows_of_another_size_are_refused(device: torch.device) -> None:
    storage = torch.zeros(3, 2, 4, 4, 2, 8, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="blocks have 768 bytes, rows of host memory 64"):
        GpuBlockCopier(storage, PinnedMemory(4, 64), None)


def test_its_speed_is_measured(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    before = [rig.block(i) for i in range(NUM_BLOCKS)]
    assert rig.offload.measure_bytes_per_s(NUM_BLOCKS) > 0
    assert [rig.block(i) for i in range(NUM_BLOCKS)] == before


@pytest.mark.gpu
def test_a_copy_waits_for_the_steps_before_it_and_its_start_for_nothing(make_rig: Callable[..., Rig]) -> None:
    """Down: it carries what a step wrote that was launched before it. Up: a step that was launched before it still
    reads what stood there. The steps take a tenth of a second, and the starts return while they run."""
    rig = make_rig(shape=(3, 2, NUM_BLOCKS, 16, 8, 128))
    assert rig.steps is not None
    rig.run(UP, [1], [1])  # compiles the kernel; what is loaded at its first launch waits for the device, too
    with torch.cuda.stream(rig.steps):
        rig.bytes[:, :, 2] = 0
        rig.bytes[:, :, 5].clone()
        torch.cuda._sleep(1)
    torch.cuda.synchronize()
    cycles = int(1e8)
    with torch.cuda.stream(rig.steps):
        torch.cuda._sleep(cycles)
        rig.bytes[:, :, 2] = 77
    down = rig.start(DOWN, [2], [3])
    rig.host[4] = 99
    with torch.cuda.stream(rig.steps):
        torch.cuda._sleep(cycles)
        read = rig.bytes[:, :, 5].clone()
    up = rig.start(UP, [5], [4])
    assert not rig.steps.query(), "the starts have not waited for the steps"
    assert down.wait(WAIT_S) and up.wait(WAIT_S)
    assert (rig.host[3] == 77).all()
    assert rig.block(5) == bytes([99]) * rig.host.shape[1]
    assert not (read == 99).all()
    results = rig.offload.take_finished()
    assert [result.transfer_id for result in results] == [2, 3]
    assert all(result.elapsed_s < 0.05 for result in results), "without waiting for steps"


@pytest.mark.gpu
def test_a_step_after_a_finished_copy_reads_what_it_brought(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(shape=(3, 2, NUM_BLOCKS, 16, 8, 128))
    assert rig.steps is not None
    for turn in range(20):
        rig.host[1:] = turn
        rig.run(UP, [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7])
        with torch.cuda.stream(rig.steps):
            is_there = (rig.bytes[:, :, 1:8] == turn).all()
        assert bool(is_there)


@pytest.mark.gpu
def test_a_graph_can_be_captured_while_blocks_are_copied(make_rig: Callable[..., Rig], device: torch.device) -> None:
    rig = make_rig(shape=(3, 2, NUM_BLOCKS, 16, 8, 128))
    rig.run(DOWN, [1], [1])
    number = torch.zeros(1, device=device)
    torch.cuda.synchronize()
    is_over = threading.Event()
    faults: list[Exception] = []

    def copy() -> None:
        try:
            while not is_over.is_set():
                rig.copier.to_host([1, 3], [2, 5])
                rig.copier.to_device([2, 5], [1, 3])
        except Exception as error:
            faults.append(error)

    copying = threading.Thread(target=copy)
    copying.start()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=rig.steps, capture_error_mode="thread_local"):
        for _ in range(500):
            number += 1
    is_over.set()
    copying.join(WAIT_S)
    assert not faults
    graph.replay()
    torch.cuda.synchronize()
    assert number.item() == 500
