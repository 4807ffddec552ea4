"""Times linear layers on one GPU, beside cuBLAS in the same run: `python tests/bench/linear.py --out rows.json`.

First what is computed is checked. A figure is the median of replays of a CUDA graph with one call for each of several
sets of weights, together larger than the second-level cache, divided by the number of calls.
"""

import argparse
import itertools
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from triton.runtime.errors import OutOfResources

from engine.kernels.fixed_linear import fixed_linear
from engine.kernels.rms_norm import rms_norm
from engine.kernels.scaled_linear import quantise_rows, scaled_linear
from engine.kernels.skinny_linear import (
    SkinnyTiles,
    SplitScratch,
    choose_skinny_tiles,
    make_split_scratch,
    skinny_linear,
    takes_norm,
)

READ_CEILING = 4330.0
"""GB/s of a sum over 4 GiB on this card."""
DEVICE = torch.device("cuda")
DTYPES = {1: torch.float8_e4m3fn, 2: torch.bfloat16}
BYTES_TOGETHER = 250e6
SHAPES = {
    "8b qkv": (6144, 4096),
    "8b o": (4096, 4096),
    "8b gate_up": (28672, 4096),
    "8b down": (4096, 14336),
    "8b head": (128256, 4096),
    "0.6b qkv": (4096, 1024),
    "0.6b o": (1024, 2048),
    "0.6b gate_up": (6144, 1024),
    "0.6b down": (1024, 3072),
    "0.6b head": (151936, 1024),
}
VECTORS = [
    (1, 4, 4), (1, 8, 2), (2, 1, 4), (2, 2, 2), (2, 4, 1), (2, 4, 2), (2, 8, 1), (4, 1, 1), (4, 2, 1), (4, 2, 2),
    (4, 4, 1), (4, 4, 2), (8, 2, 1),
]  # fmt: skip
"""(tile_n, num_warps, what each thread reads of a row in one turn, in pieces of 16 bytes)"""
MATRICES = [(64, 128, 4, 4), (64, 128, 4, 6), (64, 256, 4, 4), (128, 128, 8, 4), (32, 256, 2, 4)]
"""(tile_n, tile_k, num_warps, num_stages)"""
CHAINS = {
    "plain": (False, 0, False),
    "norms apart": (False, 0, True),
    "dependent": (True, 0, False),
    "512 ahead": (True, 512, False),
    "1024 ahead": (True, 1024, False),
    "2048 ahead": (True, 2048, False),
}
"""(dependent launches, columns fetched ahead, norms apart)"""
wrong: list[str] = []
rows_out: list[dict[str, object]] = []


def row(*cells: object) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def draw_rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)


def graph_us(calls: list[Callable[[], object]], num_replays: int = 9) -> float:
    """Microseconds a call."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
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


class Weights:
    """Random numbers from which the weights of all shapes are cut."""

    def __init__(self) -> None:
        self.pool = torch.empty(1_400_000_000, dtype=torch.bfloat16, device=DEVICE).normal_(std=0.02)

    def sets(self, shape: tuple[int, int]) -> list[torch.Tensor]:
        numel = shape[0] * shape[1]
        count = max(2, min(24, -(-int(BYTES_TOGETHER) // (2 * numel))))
        return [self.pool[i * numel : (i + 1) * numel].view(shape) for i in range(count)]


APART = ", norm apart"


def shape_of(name: str) -> tuple[int, int]:
    return SHAPES[name.removesuffix(APART)]


def form_of(name: str, num_rows: int, itemsize: int = 2) -> dict[str, object]:
    """What stands before and behind a layer's product in its launch."""
    form: dict[str, object] = {}
    if name.endswith(("qkv", "gate_up", "head")) and takes_norm(num_rows, *shape_of(name), DTYPES[itemsize]):
        form |= {"norm_weight": torch.ones(SHAPES[name][1], dtype=torch.bfloat16, device=DEVICE), "eps": 1e-5}
    if "gate_up" in name:
        form["gated"] = "silu"
    if "head" in name:
        form["out_dtype"] = torch.float32
    if name.endswith((" o", "down")):
        form["residual"] = True
    return form


def candidates(num_rows: int, shape: tuple[int, int], itemsize: int) -> list[SkinnyTiles]:
    found: list[SkinnyTiles] = []
    if takes_norm(num_rows, *shape, DTYPES[itemsize]):
        for tile_n, num_warps, num_reads in VECTORS:
            tile_k = num_warps * num_reads * 32 * (16 // itemsize)
            is_gated = shape in (SHAPES["8b gate_up"], SHAPES["0.6b gate_up"])
            if (
                tile_k < 2 * shape[1]
                and tile_n * num_reads * num_rows <= 16
                and not (num_rows > 1 and tile_n == 1)
                and not (is_gated and tile_n == 1)
            ):
                found.append(SkinnyTiles(False, tile_n, tile_k, num_warps))
        return found
    for tile_n, tile_k, num_warps, num_stages in MATRICES:
        num_tiles = triton.cdiv(shape[0], tile_n)
        for num_parts in (1, 2, 4, 8):
            programs = num_tiles * num_parts
            is_useful = num_parts == 1 or programs <= 132 * 2
            if is_useful and shape[1] // num_parts >= tile_k and not (programs < 64 and num_parts < 4):
                found.append(SkinnyTiles(True, tile_n, tile_k, num_warps, num_stages, num_parts))
    return found


Task = tuple[int, str, SkinnyTiles, int, bool]
"""(rows, name of the shape, tiles, itemsize of the weights, dependent launch)"""


def compile_one(task: Task) -> float:
    """Fill the cache of compiled kernels; in a process of its own."""
    num_rows, name, tiles, itemsize, is_dependent = task
    start = time.perf_counter()
    weight = torch.empty(shape_of(name), dtype=torch.bfloat16, device=DEVICE)[: 4 * tiles.tile_n]
    scale = None
    if itemsize == 1:
        weight, scale = weight.to(torch.float8_e4m3fn), torch.ones(len(weight), device=DEVICE)
    form = form_of(name, num_rows, itemsize) | {"is_dependent": is_dependent}
    try:
        time_skinny([weight], num_rows, tiles, make_split_scratch(DEVICE), scale, 1, **form)
    except OutOfResources:
        return -1.0
    return time.perf_counter() - start


def compile_all(pool: ProcessPoolExecutor, work: list[tuple[int, int, list[str]]], chain_rows: list[int]) -> None:
    tasks: dict[object, Task] = {}

    def add(num_rows: int, name: str, tiles: SkinnyTiles, itemsize: int, is_dependent: bool) -> None:
        size = shape_of(name)[1]
        rows = max(16, num_rows) if tiles.is_matrix else num_rows
        form = tuple(form_of(name, num_rows, itemsize))
        kind = (rows, tiles, itemsize, size % tiles.tile_k == 0, form, size <= tiles.tile_k, is_dependent)
        tasks.setdefault(kind, (num_rows, name, tiles, itemsize, is_dependent))

    for num_rows, itemsize, names in work:
        for name in names:
            for tiles in candidates(num_rows, shape_of(name), itemsize):
                add(num_rows, name, tiles, itemsize, False)
    parts = ("qkv", "o", "gate_up", "down")
    for num_rows, name in itertools.product(
        chain_rows, (f"{model} {part}" for model in ("8b", "0.6b") for part in parts)
    ):
        tiles = choose_skinny_tiles(num_rows, *SHAPES[name], torch.bfloat16)
        for is_dependent, ahead, is_apart in CHAINS.values():
            add(num_rows, name + APART * is_apart, replace(tiles, ahead=ahead), 2, is_dependent)
    start = time.perf_counter()
    times = list(pool.map(compile_one, tasks.values(), chunksize=4))
    row("compiled", len(times), f"{time.perf_counter() - start:.1f} s", f"{sum(times):.0f} s in all")


def check(scratch: SplitScratch) -> None:
    """Every form against float64."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)

    worst: dict[str, float] = {}

    def compare(name: str, out: torch.Tensor, expected: torch.Tensor, allowed: float) -> None:
        error = float((out.double() - expected).norm() / expected.norm())
        worst[name] = max(worst.get(name, 0.0), error)
        if not error < allowed:
            wrong.append(f"{name}: {error:.1e} of {list(out.shape)}, allowed {allowed:.1e}")

    def compare_bits(name: str, out: torch.Tensor, expected: torch.Tensor) -> None:
        if not torch.equal(out, expected):
            wrong.append(f"{name}: {int((out != expected).sum())} of {out.numel()} differ")

    kinds = [SkinnyTiles(False, 8, 1024, 4), SkinnyTiles(False, 2, 512, 2), SkinnyTiles(False, 4, 256, 1, 1, 1, 512),
             SkinnyTiles(True, 64, 128, 4, 4),
             SkinnyTiles(True, 64, 256, 4, 3, 4), SkinnyTiles(True, 16, 256, 1, 4, 2)]  # fmt: skip
    for shape, num_rows, is_dependent in (((1024, 3072), 1, True), ((1000, 1040), 3, False), ((4096, 1024), 16, True)):
        x, weight = draw(num_rows, shape[1]), draw(*shape) / shape[1] ** 0.5
        norm, bias, residual = draw(shape[1]).abs(), draw(shape[0]), draw(num_rows, shape[0])
        normed = x.double() * (x.double().square().mean(1, keepdim=True) + 1e-5).rsqrt() * norm.double()
        product = normed @ weight.double().t() + bias.double()
        gate, up = product.chunk(2, dim=1)
        for tiles in kinds:
            if not tiles.is_matrix and num_rows > 4:
                continue
            common = {"bias": bias, "norm_weight": norm, "eps": 1e-5, "scratch": scratch, "tiles": tiles}
            for _ in range(2):
                out = torch.full((num_rows, shape[0]), torch.nan, device=DEVICE)
                skinny_linear(x, weight, out=out, is_dependent=is_dependent, **common)
                compare("skinny", out, product, 3e-3)
            out = skinny_linear(x, weight, gated="silu", is_dependent=is_dependent, **common)
            compare("gated", out, F.silu(gate) * up, 5e-3)
            out = skinny_linear(x, weight, residual=residual.clone(), **common)
            compare("residual", out, product + residual.double(), 5e-3)
    x, weight = draw(700, 4096), draw(4096, 4096) / 64
    expected = x.double() @ weight.double().t()
    numbers, scale = quantise_rows(weight)
    compare("weights float8", numbers.double() * scale, weight.double(), 4e-2)
    exact = x.double() @ (numbers.double() * scale).t()
    for num_rows, tiles in itertools.product((1, 4, 16), kinds):
        if tiles.is_matrix or num_rows <= 4:
            out = skinny_linear(x[:num_rows], numbers, weight_scale=scale.flatten(), scratch=scratch, tiles=tiles)
            compare("skinny, weights float8", out, exact[:num_rows], 5e-3)
    compare("all float8", scaled_linear(x, numbers, scale.flatten()), exact, 5e-2)
    whole = fixed_linear(x, weight, scratch=scratch)
    compare("fixed", whole, expected, 3e-3)
    for first, end in ((0, 1), (3, 20), (77, 141), (130, 300)):
        for room in (scratch, None):
            name = f"fixed, rows {first} to {end}, {'one program' if room is None else 'parts'}"
            compare_bits(name, fixed_linear(x[first:end], weight, scratch=room), whole[first:end])
    wide = fixed_linear(x.float(), weight.float(), scratch=scratch)
    compare("fixed, float32", wide, expected, 1e-6)
    compare_bits("fixed, float32", fixed_linear(x[5:6].float(), weight.float(), scratch=scratch), wide[5:6])
    row("checked: largest error", *(f"{name} {error:.1e}" for name, error in worst.items()))


def time_skinny(
    weights: list[torch.Tensor],
    num_rows: int,
    tiles: SkinnyTiles | None,
    scratch: SplitScratch,
    scale: torch.Tensor | None = None,
    num_replays: int = 9,
    **form: object,
) -> float:
    # Weights of 8 bits take rows of the matrix kernel as float16.
    is_wide = weights[0].itemsize > 1 or num_rows <= 2
    x = torch.randn(num_rows, weights[0].shape[1], dtype=torch.bfloat16 if is_wide else torch.float16, device=DEVICE)
    num_out = weights[0].shape[0] // (2 if form.get("gated") else 1)
    out = torch.empty(num_rows, num_out, dtype=form.get("out_dtype") or torch.bfloat16, device=DEVICE)
    if form.get("residual"):
        form["residual"] = out
    calls = [
        lambda weight=weight: skinny_linear(
            x, weight, weight_scale=scale, out=out, scratch=scratch, tiles=tiles, **form
        )
        for weight in weights
    ]
    return graph_us(calls, num_replays)


def note(kind: str, name: str, num_rows: int, us: float, num_bytes: int, tiles: SkinnyTiles | None = None) -> None:
    cut = (
        [tiles.is_matrix, tiles.tile_n, tiles.tile_k, tiles.num_warps, tiles.num_stages, tiles.num_parts]
        if tiles
        else []
    )
    rows_out.append(
        {"kind": kind, "shape": name, "rows": num_rows, "us": us, "gb_s": num_bytes / us / 1e3, "tiles": cut}
    )


def cut_name(tiles: SkinnyTiles) -> str:
    kind = "matrix" if tiles.is_matrix else "vector"
    return f"{kind} {tiles.tile_n}x{tiles.tile_k} w{tiles.num_warps} s{tiles.num_stages} p{tiles.num_parts}"


def sweep(
    weights: Weights, scratch: SplitScratch, num_rows: int, itemsize: int, names: list[str], until: float
) -> None:
    for name in names:
        if time.perf_counter() > until:
            row("out of time", name, num_rows)
            return
        shape, form = shape_of(name), form_of(name, num_rows, itemsize)
        sets = weights.sets(shape)
        x = torch.randn(num_rows, shape[1], dtype=torch.bfloat16, device=DEVICE)
        kind = "skinny" if itemsize == 2 else "float8"
        cublas = graph_us([lambda weight=weight, x=x: F.linear(x, weight) for weight in sets])
        note("cublas", name, num_rows, cublas, sets[0].nbytes)
        scale = None
        if itemsize == 1:
            sets = [weight for part in sets for weight in part.view(torch.float8_e4m3fn).view(2, *shape)]
            scale = torch.full((shape[0],), 1e-2, device=DEVICE)
        results = []
        for tiles in candidates(num_rows, shape, itemsize):
            try:
                us = time_skinny(sets, num_rows, tiles, scratch, scale, 5, **form)
            except OutOfResources:
                continue
            note(kind, name, num_rows, us, sets[0].nbytes, tiles)
            results.append((us, tiles))
        results.sort(key=lambda result: result[0])
        best = time_skinny(sets, num_rows, results[0][1], scratch, scale, 15, **form)
        chosen = time_skinny(sets, num_rows, None, scratch, scale, 15, **form)
        speed = sets[0].nbytes / best / 1e3
        note(f"{kind} chosen", name, num_rows, chosen, sets[0].nbytes,
             choose_skinny_tiles(num_rows, *shape, sets[0].dtype))  # fmt: skip
        row(kind, name, num_rows, f"{best:.2f}", f"{speed:.0f}", f"{speed / READ_CEILING:.0%}", f"cuBLAS {cublas:.2f}",
            f"chosen {chosen:.2f}", cut_name(results[0][1]),
            *(f"{us:.2f} {cut_name(tiles)}" for us, tiles in results[1:4]))  # fmt: skip


def bench_chain(weights: Weights, scratch: SplitScratch, nums_rows: list[int]) -> None:
    """The four linears of some layers, one behind the other, as a decode has them, in the tiles that are chosen."""
    x = draw_rows(1, 4096)
    row("rms_norm of one row, µs", f"{graph_us([lambda: rms_norm(x, x[0], 1e-5)] * 20):.2f}")
    row("chain: four linears a layer, µs a layer", "rows", *CHAINS, "cuBLAS, no norms", "floor")
    for model, hidden, width, attended, num_layers in (("8b", 4096, 14336, 4096, 6), ("0.6b", 1024, 3072, 2048, 28)):
        shapes = [SHAPES[f"{model} {part}"] for part in ("qkv", "o", "gate_up", "down")]
        layers = []
        at = 0
        for _ in range(num_layers):
            layer = []
            for out_features, size in shapes:
                layer.append(weights.pool[at : at + out_features * size].view(out_features, size))
                at += out_features * size
            layers.append(layer)
        norm = torch.ones(hidden, dtype=torch.bfloat16, device=DEVICE)
        for num_rows in nums_rows:
            start = draw_rows(num_rows, hidden)
            residual = start.clone()
            times: dict[str, float] = {}
            outs = {}
            for kind, (is_dependent, ahead, is_apart) in CHAINS.items():

                def linear(x: torch.Tensor, weight: torch.Tensor, **form: object) -> torch.Tensor:
                    tiles = choose_skinny_tiles(len(x), *weight.shape, torch.bfloat16)
                    if "norm_weight" in form and (is_apart or tiles.is_matrix):  # noqa: B023
                        x = rms_norm(x, form.pop("norm_weight"), form.pop("eps"))
                    form["is_dependent"] = is_dependent  # noqa: B023
                    return skinny_linear(x, weight, scratch=scratch, tiles=replace(tiles, ahead=ahead), **form)  # noqa: B023

                def run(linear: Callable[..., torch.Tensor] = linear) -> None:
                    residual.copy_(start)  # noqa: B023
                    for qkv, output, gate_up, down in layers:  # noqa: B023
                        heads = linear(residual, qkv, norm_weight=norm, eps=1e-5)  # noqa: B023
                        linear(heads[:, :attended], output, residual=residual)  # noqa: B023
                        gated = linear(residual, gate_up, norm_weight=norm, eps=1e-5, gated="silu")  # noqa: B023
                        linear(gated, down, residual=residual)  # noqa: B023

                times[kind] = graph_us([run], 15) / num_layers
                outs[kind] = residual.clone()
            wrong.extend(
                f"chain {model}, {num_rows} rows: {kind} gives other bits"
                for kind, (is_dependent, _, _) in CHAINS.items()
                if is_dependent and not torch.equal(outs[kind], outs["plain"])
            )

            def library() -> None:
                x = start  # noqa: B023
                for qkv, output, gate_up, down in layers:  # noqa: B023
                    heads = F.linear(x, qkv)
                    x = F.linear(heads[:, :attended], output)  # noqa: B023
                    x = F.linear(F.linear(x, gate_up)[:, :width], down)  # noqa: B023

            times["cublas"] = graph_us([library], 15) / num_layers
            num_bytes = sum(weight.nbytes for weight in layers[0])
            for kind, us in times.items():
                note(f"chain {kind}", model, num_rows, us, num_bytes)
            row(model, num_rows, *(f"{us:.1f}" for us in times.values()), f"{num_bytes / READ_CEILING / 1e3:.1f}")


def bench_many(weights: Weights, scratch: SplitScratch) -> None:
    row(
        "many rows: shape", "rows", "cuBLAS µs", "fixed µs", "float8, with the rows' quantisation µs", "quantisation µs"
    )
    for name in ("8b qkv", "8b o", "8b gate_up", "8b down"):
        shape = SHAPES[name]
        sets = weights.sets(shape)[:8]
        quantised = [weight for part in sets[:4] for weight in part.view(torch.float8_e4m3fn).view(2, *shape)]
        scale = torch.full((shape[0],), 1e-2, device=DEVICE)
        for num_rows in (1, 16, 64, 256, 2048):
            x = torch.randn(num_rows, shape[1], dtype=torch.bfloat16, device=DEVICE)
            times = {
                "cublas": graph_us([lambda w=w, x=x: F.linear(x, w) for w in sets], 5),
                "fixed": graph_us([lambda w=w, x=x: fixed_linear(x, w, scratch=scratch) for w in sets], 5),
            }
            if num_rows >= 16:
                times["scaled"] = graph_us(
                    [lambda w=w, x=x, scale=scale: scaled_linear(x, w, scale) for w in quantised], 5
                )
                times["quantise"] = graph_us([lambda x=x: quantise_rows(x)] * 8, 5)
            for kind, us in times.items():
                note(kind, name, num_rows, us, sets[0].nbytes)
            row(name, num_rows, *(f"{us:.1f}" for us in times.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("linear.json"))
    parser.add_argument("--budget-s", type=float, default=140.0)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--few", action="store_true", help="only one, two and four rows, in bfloat16")
    args = parser.parse_args()
    begin = time.perf_counter()
    until = begin + args.budget_s - 25.0
    names_8b = [name for name in SHAPES if name.startswith("8b")]
    names_06b = [name for name in SHAPES if name.startswith("0.6b")]
    apart = [f"{model} {part}{APART}" for model in ("8b", "0.6b") for part in ("qkv", "gate_up")]
    work = [(1, 2, [*names_8b, *names_06b]), (4, 2, names_06b[:4]), (2, 2, [*names_8b, *names_06b])]
    if not args.few:
        work += [(1, 2, apart), (16, 2, names_8b), (1, 1, names_8b), (2, 1, names_8b), (16, 1, names_8b),
                 (64, 2, names_8b), (64, 1, names_8b), (16, 2, names_06b)]  # fmt: skip
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, mp_context=context) as pool:
        scratch = make_split_scratch(DEVICE)
        weights = Weights()
        check(scratch)
        chain_rows = [1, 2, 4] if args.few else [1, 2, 4, 16, 64]
        compile_all(pool, work, chain_rows)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    bench_chain(weights, scratch, chain_rows)
    row("kind", "shape", "rows", "µs", "GB/s", "of the read ceiling")
    for num_rows, itemsize, names in work:
        sweep(weights, scratch, num_rows, itemsize, names, until)
    if not args.few:
        bench_many(weights, scratch)
    args.out.write_text(json.dumps(rows_out))
    for line in wrong:
        row("WRONG", line)
    row("took", f"{time.perf_counter() - begin:.0f} s", "rows written", len(rows_out))


if __name__ == "__main__":
    main()
    raise SystemExit(1 if wrong else 0)
