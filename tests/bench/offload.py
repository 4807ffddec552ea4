"""Times KV blocks between a GPU and pinned host memory: python tests/bench/offload.py [--host-gib 16]

Checks first that blocks come back as they went. The shape is that of an 8B model: 32 layers, 8 KV heads of 128,
bfloat16, blocks of 16 tokens in 2 MiB. GB are 10^9 bytes. `beside` is a stream that replays a CUDA graph without a
pause while blocks are copied: of matrix products, of reads of memory, or of hundreds of small kernels; its slow-down is
that of a replay's median.
"""

import argparse
import random
import statistics
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import torch

from engine.execution.block_copies import DeviceBlockCopies
from engine.execution.gpu_copier import GpuBlockCopier
from engine.execution.pinned_memory import PinnedMemory

NUM_LAYERS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM = 32, 16, 8, 128
BLOCK_BYTES = 2 * NUM_LAYERS * BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM * 2
NUM_BLOCKS = 4000
DEVICE = torch.device("cuda")


def row(*cells: object) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def ignore(stage: str, percent: float) -> None:
    pass


def make_storage() -> torch.Tensor:
    shape = (NUM_LAYERS, 2, NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)


def check(storage: torch.Tensor, copier: GpuBlockCopier, num_rows: int) -> None:
    order = random.Random(0)
    for count in (1, 7, 300):
        blocks = order.sample(range(1, NUM_BLOCKS), count)
        rows = order.sample(range(1, num_rows), count)
        others = order.sample(sorted({*range(1, NUM_BLOCKS)} - {*blocks}), count)
        before = storage[:, :, blocks].clone()
        copier.to_host(blocks, rows)
        copier.to_device(rows, others)
        if not torch.equal(storage[:, :, others], before):
            raise SystemExit(f"{count} blocks did not come back as they went")
    print("checked: blocks come back bit by bit", flush=True)


def launch_us(num_launches: int, until: Callable[[], bool] = lambda: True) -> list[float]:
    """Microseconds of small kernels, each launched and waited for: so many at least."""
    number = torch.zeros(1, device=DEVICE)
    times: list[float] = []
    while len(times) < num_launches or not until():
        start_s = time.perf_counter()
        number += 1
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start_s) * 1e6)
    return times


def pinning(host_gib: float) -> PinnedMemory:
    launch_us(100)
    alone = launch_us(3000)
    memory = PinnedMemory(int(host_gib * 2**30) // BLOCK_BYTES - 1, BLOCK_BYTES)
    start_s = time.perf_counter()
    memory.start_pinning()
    end_s = start_s + 100
    beside = launch_us(1, lambda: memory.num_pinned_pieces == memory.num_pieces or time.perf_counter() > end_s)
    memory.wait(ignore)
    seconds = time.perf_counter() - start_s
    if memory.num_pinned_pieces != memory.num_pieces:
        raise SystemExit(f"{memory.num_pinned_pieces} of {memory.num_pieces} pieces could be pinned")
    row("pinning", "GiB", "s", "GiB/s", "launch us p50/max alone", "launch us p50/p99/max beside")
    ordered = sorted(beside)
    row(
        "", host_gib, f"{seconds:.2f}", f"{host_gib / seconds:.1f}",
        f"{statistics.median(alone):.0f}/{max(alone):.0f}",
        f"{statistics.median(beside):.0f}/{ordered[len(ordered) * 99 // 100]:.0f}/{ordered[-1]:.0f}",
    )  # fmt: skip
    return memory


def gb_per_s(copy: Callable[[], None], num_blocks: int, least_s: float = 0.3) -> float:
    """Of the fastest call."""
    times: list[float] = []
    while sum(times) < least_s or len(times) < 3:
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        copy()
        times.append(time.perf_counter() - start_s)
    return num_blocks * BLOCK_BYTES / min(times) / 1e9


def alone(copier: GpuBlockCopier, num_rows: int, name: str) -> None:
    order = random.Random(1)
    row(f"copies alone, {name}", "blocks", "rows", "down GB/s", "up GB/s")
    for count in (1, 8, 64, 512):
        blocks = order.sample(range(1, NUM_BLOCKS), count)
        for rows, words in (
            (list(range(1, count + 1)), "in a row"),
            (order.sample(range(1, num_rows), count), "scattered"),
        ):
            down = gb_per_s(lambda blocks=blocks, rows=rows: copier.to_host(blocks, rows), count)
            up = gb_per_s(lambda blocks=blocks, rows=rows: copier.to_device(rows, blocks), count)
            row("", count, words, f"{down:.1f}", f"{up:.1f}")


def products() -> Callable[[], object]:
    left = torch.randn(1024, 4096, dtype=torch.bfloat16, device=DEVICE)
    right = torch.randn(4096, 28672, dtype=torch.bfloat16, device=DEVICE)
    out = torch.empty(1024, 28672, dtype=torch.bfloat16, device=DEVICE)
    return lambda: [torch.matmul(left, right, out=out) for _ in range(20)]


def reads() -> Callable[[], object]:
    numbers = torch.ones(2**28, device=DEVICE)
    return lambda: [numbers.sum() for _ in range(12)]


def small_kernels() -> Callable[[], object]:
    number = torch.zeros(2**16, device=DEVICE)
    return lambda: [number.add_(1) for _ in range(600)]


def capture(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph


def replay_ms(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, seconds: float) -> tuple[float, float]:
    """(median, largest) milliseconds of a replay on a stream that never runs dry."""
    events = [torch.cuda.Event(enable_timing=True)]
    end_s = time.perf_counter() + seconds
    with torch.cuda.stream(stream):
        events[0].record()
        while time.perf_counter() < end_s:
            graph.replay()
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()
            if len(events) > 3:
                events[-3].synchronize()
    torch.cuda.synchronize()
    times = [first.elapsed_time(second) for first, second in pairwise(events)][2:]
    return statistics.median(times), max(times)


def beside(copier: GpuBlockCopier, num_rows: int) -> None:
    stream = torch.cuda.Stream(DEVICE)
    order = random.Random(2)
    blocks, rows = order.sample(range(1, NUM_BLOCKS), 256), order.sample(range(1, num_rows), 256)
    row("copies beside", "way", "GB/s", "replay ms alone p50/max", "beside p50/max", "slower by")
    for name, work in (("products", products()), ("reads", reads()), ("small kernels", small_kernels())):
        graph = capture(work)
        replay_ms(graph, stream, 0.3)
        quiet, quiet_most = replay_ms(graph, stream, 1.0)
        for way in ("down", "up"):
            is_over = threading.Event()
            moved = [0]

            def copy(way: str = way, is_over: threading.Event = is_over, moved: list[int] = moved) -> None:
                while not is_over.is_set():
                    if way == "down":
                        copier.to_host(blocks, rows)
                    else:
                        copier.to_device(rows, blocks)
                    moved[0] += len(blocks) * BLOCK_BYTES

            copying = threading.Thread(target=copy)
            start_s = time.perf_counter()
            copying.start()
            busy, busy_most = replay_ms(graph, stream, 1.5)
            is_over.set()
            copying.join()
            seconds = time.perf_counter() - start_s
            row(
                name, way, f"{moved[0] / seconds / 1e9:.1f}", f"{quiet:.3f}/{quiet_most:.3f}",
                f"{busy:.3f}/{busy_most:.3f}", f"{100 * (busy / quiet - 1):.1f} %",
            )  # fmt: skip


def copy_on_write(storage: torch.Tensor) -> None:
    copies = DeviceBlockCopies(storage.flatten(0, 1))
    row("copy-on-write", "blocks", "host us", "device us", "GB/s read and written")
    for count in (1, 16, 256):
        order = random.Random(3).sample(range(1, NUM_BLOCKS), 2 * count)
        pairs = list(zip(order[:count], order[count:], strict=True))
        host_us, device_us = [], []
        for _ in range(30):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            torch.cuda._sleep(2_000_000)  # so that the host is ahead, as in a step
            start.record()
            start_s = time.perf_counter()
            copies.run(pairs)
            host_us.append((time.perf_counter() - start_s) * 1e6)
            end.record()
            end.synchronize()
            device_us.append(start.elapsed_time(end) * 1e3)
        device = statistics.median(device_us)
        rate = 2 * count * BLOCK_BYTES / device / 1e3
        row("", count, f"{statistics.median(host_us):.0f}", f"{device:.1f}", f"{rate:.0f}")


def zeros() -> None:
    num_bytes = int(torch.cuda.mem_get_info()[0] * 0.8)
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    pool = torch.zeros(num_bytes, dtype=torch.uint8, device=DEVICE)
    torch.cuda.synchronize()
    row("zeros for the pool", f"{num_bytes / 1e9:.0f} GB", f"{(time.perf_counter() - start_s) * 1e3:.0f} ms")
    del pool
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host-gib", type=float, default=16.0)
    memory = pinning(parser.parse_args().host_gib)
    num_rows = len(memory.rows)
    storage = make_storage()
    copier = GpuBlockCopier(storage, memory, torch.cuda.current_stream())
    check(storage, copier, num_rows)
    alone(copier, num_rows, "pinned")
    loose = PinnedMemory(2000, BLOCK_BYTES)  # pinning is not started
    alone(GpuBlockCopier(storage, loose, torch.cuda.current_stream()), 2001, "not pinned")
    beside(copier, num_rows)
    copy_on_write(storage)
    memory.close()
    zeros()


if __name__ == "__main__":
    main()
