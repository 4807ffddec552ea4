"""Times the GPU kernels: python tests/bench/kernels.py [decode] [blocks] [prefill] [small] (all without a name).

Each figure is the median of 20 replays of a CUDA graph that has one call for each of several disjoint sets of tensors,
together larger than twice the second-level cache, divided by the number of calls: what a call costs in the middle of a
step, reading from memory. Attention is that of 32 query and 8 KV heads of 128 in bfloat16, with blocks in random order.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
import triton

from engine.kernels.attention_plan import AttentionPlan, make_attention_plan, plan_attention
from engine.kernels.copy_blocks import copy_blocks
from engine.kernels.long_attention import long_attention
from engine.kernels.paged_attention import paged_attention
from engine.kernels.rms_norm import rms_norm
from engine.kernels.rope_kv_write import rope_kv_write
from engine.kernels.silu_mul import silu_mul

NUM_HEADS, NUM_KV_HEADS = 32, 8
DEVICE = torch.device("cuda")
BYTES_TOGETHER = 700e6


def graph_us(calls: list[Callable[[], object]], num_replays: int = 20) -> float:
    """Microseconds a call."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(num_replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def num_sets(num_bytes: float) -> int:
    return max(2, min(64, -(-int(BYTES_TOGETHER) // int(num_bytes))))


def row(*cells: object) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def read_ceiling() -> float:
    """GB/s of a sum over 4 GiB."""
    numbers = torch.ones(2**30, device=DEVICE)
    return numbers.nbytes / graph_us([numbers.sum], 10) / 1e3


def decode_us(
    batch: int,
    contexts: int | list[int],
    block_size: int = 16,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    is_deterministic: bool = False,
) -> tuple[float, float]:
    """(microseconds, bytes of keys and values) of one decode step's attention."""
    cache_dtype = cache_dtype or dtype
    if isinstance(contexts, int):
        contexts = [contexts] * batch
    num_bytes = 2 * sum(contexts) * NUM_KV_HEADS * head_dim * cache_dtype.itemsize
    blocks = -(-max(contexts) // block_size)
    num_blocks = sum(-(-context // block_size) for context in contexts)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)
    plan = make_attention_plan(
        NUM_HEADS, NUM_KV_HEADS, head_dim, None, batch, batch, dtype, cache_dtype, DEVICE, is_deterministic
    )
    plan_attention(plan, starts, lengths)
    scale = torch.ones(NUM_KV_HEADS, device=DEVICE) if cache_dtype == torch.float8_e4m3fn else None
    calls = []
    for _ in range(num_sets(num_bytes)):
        shape = (num_blocks + 1, block_size, NUM_KV_HEADS, head_dim)
        keys, values = (torch.randn(shape, dtype=dtype, device=DEVICE).to(cache_dtype) for _ in range(2))
        order = (torch.randperm(num_blocks) + 1).int()
        tables = torch.zeros(batch, blocks, dtype=torch.int32)
        for i, own in enumerate(order.split([-(-context // block_size) for context in contexts])):
            tables[i, : len(own)] = own
        tables = tables.to(DEVICE)
        query = torch.randn(batch, NUM_HEADS, head_dim, dtype=dtype, device=DEVICE)
        out = torch.empty_like(query)

        def call(
            query: torch.Tensor = query,
            keys: torch.Tensor = keys,
            values: torch.Tensor = values,
            tables: torch.Tensor = tables,
            out: torch.Tensor = out,
        ) -> None:
            paged_attention(
                query, None, None, keys, values, tables, plan, batch, head_dim**-0.5,
                key_scale=scale, value_scale=scale, has_short=not is_deterministic, has_long=is_deterministic, out=out,
            )  # fmt: skip

        calls.append(call)
    return graph_us(calls), num_bytes


def prefill_us(
    batch: int, length: int, block_size: int, is_packed: bool, is_portable: bool = False, head_dim: int = 128
) -> float:
    """Microseconds of the attention of whole prompts."""
    num_tokens, blocks = batch * length, -(-length // block_size)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * length
    lengths = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
    plan = make_attention_plan(
        NUM_HEADS, NUM_KV_HEADS, head_dim, None, batch, num_tokens, torch.bfloat16, torch.bfloat16, DEVICE
    )
    plan_attention(plan, starts, lengths)
    calls = []
    for _ in range(num_sets(num_tokens * NUM_HEADS * head_dim * 5)):
        new = [
            torch.randn(num_tokens, heads, head_dim, dtype=torch.bfloat16, device=DEVICE)
            for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
        ]
        order = torch.randperm(batch * blocks, device=DEVICE) + 1
        caches = []
        for packed in new[1:]:
            cache = torch.zeros(
                batch * blocks + 1, block_size, NUM_KV_HEADS, head_dim, dtype=packed.dtype, device=DEVICE
            )
            cache[order] = packed.view(batch * blocks, block_size, NUM_KV_HEADS, head_dim)
            caches.append(cache)
        out = torch.empty_like(new[0])
        tables = order.int().view(batch, blocks)

        def call(
            new: list[torch.Tensor] = new,
            caches: list[torch.Tensor] = caches,
            tables: torch.Tensor = tables,
            out: torch.Tensor = out,
        ) -> None:
            key, value = new[1:] if is_packed else (None, None)
            if is_portable:
                portable(plan, out, new[0], key, value, caches, tables, batch)
            else:
                paged_attention(
                    new[0], key, value, *caches, tables, plan, batch, head_dim**-0.5, has_short=False, out=out
                )

        calls.append(call)
    return graph_us(calls, 10)


def portable(
    plan: AttentionPlan,
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    caches: list[torch.Tensor],
    tables: torch.Tensor,
    num_seqs: int,
) -> None:
    """The long kernel of GPUs other than Hopper."""
    num_items = triton.cdiv(len(query), plan.long_tokens) + num_seqs
    scale = query.shape[2] ** -0.5
    long_attention(out, query, key, value, *caches, tables, num_items, plan, scale, 0.0, None, None)


def bench_decode(ceiling: float) -> None:
    row("decode: batch", "context", "KV MB", "µs", "GB/s", "of the read ceiling")
    for batch, context in (
        (1, 1024),
        (1, 8192),
        (4, 4096),
        (16, 1024),
        (16, 4096),
        (32, 2048),
        (64, 2048),
        (256, 512),
        (256, 1024),
    ):
        us, num_bytes = decode_us(batch, context)
        row(
            batch,
            context,
            f"{num_bytes / 1e6:.1f}",
            f"{us:.1f}",
            f"{num_bytes / us / 1e3:.0f}",
            f"{num_bytes / us / 1e3 / ceiling:.0%}",
        )
    ragged = {
        "64 of 128 .. 16384": [int(128 * 128 ** (i / 63)) for i in range(64)],
        "256 of 64 .. 4096": [int(64 * 64 ** (i / 255)) for i in range(256)],
        "1 of 32768, 15 of 512": [32768] + [512] * 15,
    }
    for name, contexts in ragged.items():
        us, num_bytes = decode_us(len(contexts), contexts)
        speed = num_bytes / us / 1e3
        row(name, "", f"{num_bytes / 1e6:.1f}", f"{us:.1f}", f"{speed:.0f}", f"{speed / ceiling:.0%}")
    row("decode of other kinds, (16, 4096) and (256, 1024)", "µs", "GB/s", "µs", "GB/s")
    kinds: dict[str, dict[str, object]] = {
        "float8 cache": {"cache_dtype": torch.float8_e4m3fn},
        "head size 64": {"head_dim": 64},
        "head size 80": {"head_dim": 80},
        "head size 96": {"head_dim": 96},
        "head size 256": {"head_dim": 256},
        "float16": {"dtype": torch.float16},
        "deterministic": {"is_deterministic": True},
    }
    for name, kind in kinds.items():
        cells = []
        for batch, context in ((16, 4096), (256, 1024)):
            us, num_bytes = decode_us(batch, context, **kind)
            cells += [f"{us:.1f}", f"{num_bytes / us / 1e3:.0f}"]
        row(name, *cells)


def bench_blocks() -> None:
    row("block size", "decode (64, 2048) µs", "GB/s", "decode (1, 8192) µs", "prefill 1 x 8192, paged, µs", "TFLOP/s")
    for block_size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        many, num_bytes = decode_us(64, 2048, block_size)
        one, _ = decode_us(1, 8192, block_size)
        prefill = prefill_us(1, 8192, block_size, is_packed=False)
        row(
            block_size,
            f"{many:.1f}",
            f"{num_bytes / many / 1e3:.0f}",
            f"{one:.1f}",
            f"{prefill:.0f}",
            f"{tflops(1, 8192, prefill):.0f}",
        )


def tflops(batch: int, length: int, us: float, head_dim: int = 128) -> float:
    return 2 * length**2 * NUM_HEADS * head_dim * batch / us / 1e6


def bench_prefill() -> None:
    row(
        "prefill: batch x length",
        "new tokens packed µs",
        "TFLOP/s",
        "all through blocks of 16 µs",
        "TFLOP/s",
        "blocks of 64 µs",
        "TFLOP/s",
    )
    for batch, length in ((1, 512), (1, 2048), (1, 8192), (16, 512)):
        times = [
            prefill_us(batch, length, 16, True),
            prefill_us(batch, length, 16, False),
            prefill_us(batch, length, 64, False),
        ]
        row(
            f"{batch} x {length}", *(cell for us in times for cell in (f"{us:.1f}", f"{tflops(batch, length, us):.0f}"))
        )
    for name, is_packed in (("packed", True), ("blocks of 16", False)):
        us = prefill_us(1, 8192, 16, is_packed, is_portable=True)
        row(f"portable kernel, 1 x 8192, {name}", f"{us:.0f}", f"{tflops(1, 8192, us):.0f}")
    for head_dim in (64, 256):
        us = prefill_us(1, 8192, 16, True, head_dim=head_dim)
        row(f"head size {head_dim}, 1 x 8192, packed", f"{us:.0f}", f"{tflops(1, 8192, us, head_dim):.0f}")


def bench_small() -> None:
    row("kernel", "rows", "µs", "GB/s")

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE)

    def time(name: str, num_rows: int, num_bytes: int, make: Callable[[], Callable[[], object]]) -> None:
        us = graph_us([make() for _ in range(num_sets(num_bytes))])
        row(name, num_rows, f"{us:.2f}", f"{num_bytes / us / 1e3:.0f}")

    weight = numbers(4096)
    turns = torch.randn(8192, 128, device=DEVICE)
    plan_inputs = {n: torch.arange(n + 1, dtype=torch.int32, device=DEVICE) for n in (1, 256)}
    for n in (1, 16, 256, 8192):

        def make_norm(n: int = n) -> Callable[[], object]:
            x, residual, out = numbers(n, 4096), numbers(n, 4096), numbers(n, 4096)
            return lambda: rms_norm(x, weight, 1e-5, residual=residual, out=out)

        def make_gate(n: int = n) -> Callable[[], object]:
            gate_up, out = numbers(n, 28672), numbers(n, 14336)
            return lambda: silu_mul(gate_up, out=out)

        def make_rope(n: int = n) -> Callable[[], object]:
            heads = numbers(n, NUM_HEADS + 2 * NUM_KV_HEADS, 128)
            query, key, value = heads.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
            caches = [numbers(n // 16 + 2, 16, NUM_KV_HEADS, 128) for _ in range(2)]
            positions, slots = torch.arange(n, device=DEVICE) % 8192, torch.randperm(n, device=DEVICE) + 16
            return lambda: rope_kv_write(query, key, value, turns, positions, slots, *caches, pairs_side_by_side=False)

        time("add + RMSNorm, 4096 wide", n, 4 * n * 4096 * 2, make_norm)
        time("SiLU * mul, 14336 wide", n, 3 * n * 14336 * 2, make_gate)
        time("RoPE + KV write", n, n * 128 * 2 * (2 * (NUM_HEADS + NUM_KV_HEADS) + 3 * NUM_KV_HEADS), make_rope)
    cache = numbers(64, 1024, 16, NUM_KV_HEADS, 128)
    for n in (1, 16, 256):
        pairs = torch.randperm(1024, device=DEVICE)[: 2 * n].int().view(n, 2)
        time(
            "copy of blocks in 32 layers",
            n,
            2 * n * cache[:, 0].nbytes,
            lambda pairs=pairs: lambda: copy_blocks(cache, cache, pairs),
        )
    for n, starts in plan_inputs.items():
        plan = make_attention_plan(NUM_HEADS, NUM_KV_HEADS, 128, None, n, n, torch.bfloat16, torch.bfloat16, DEVICE)
        lengths = torch.full((n,), 1000, dtype=torch.int32, device=DEVICE)
        us = graph_us([lambda plan=plan, starts=starts, lengths=lengths: plan_attention(plan, starts, lengths)] * 20)
        row("attention plan, once a step", n, f"{us:.2f}", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["decode", "blocks", "prefill", "small"])
    parts = parser.parse_args().parts or ["decode", "blocks", "prefill", "small"]
    ceiling = read_ceiling()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}; "
        f"reads {ceiling:.0f} GB/s"
    )
    if "decode" in parts:
        bench_decode(ceiling)
    if "blocks" in parts:
        bench_blocks()
    if "prefill" in parts:
        bench_prefill()
    if "small" in parts:
        bench_small()


if __name__ == "__main__":
    main()
