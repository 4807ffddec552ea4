"""y = x @ weight.T for few rows, with what stands before and behind it: bound by the one reading of the weights.

Two kernels. The vector kernel multiplies in ordinary arithmetic: every warp reads whole lines of some weight rows and
keeps sums of its own. The matrix kernel gives a tile of the weights to the matrix unit as its wide operand and x as the
narrow one; its programs may share the columns of a tile, and the last to arrive sums up the parts in their order.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
import triton.language as tl

MAX_ROWS = 64
"""More rows are no longer few: a matrix product of another shape is faster."""
IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
_GATES = ("silu", "gelu", "gelu_tanh")


@triton.jit
def activated(gate, KIND: tl.constexpr):
    """The activation of a gate, in float32."""
    if KIND == "silu":
        return gate / (1.0 + tl.exp2(gate * -1.4426950408889634))
    elif KIND == "gelu_tanh":
        # gate / 2 * (1 + tanh(z)) is gate * sigmoid(2 z)
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate / (1.0 + tl.exp2(z * (-2.0 * 1.4426950408889634)))
    else:
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))


@triton.jit
def _weight_rows(tile, num_out, TILE_N: tl.constexpr, IS_GATED: tl.constexpr):
    """The rows of the weights that a program has: with gates, a gate and the row that it gates side by side."""
    rows = tile * TILE_N + tl.arange(0, TILE_N)
    if IS_GATED:
        return rows % 2 * num_out + rows // 2
    return rows


@triton.jit
def _fetch(weight_ptr, tile, num_out, first, size, IS_GATED: tl.constexpr, TILE_N: tl.constexpr, AHEAD: tl.constexpr):
    """Bring the weights of columns first .. first + AHEAD - 1, or of the last ones, into the second-level cache."""
    # A line has 128 bytes. (The bulk form takes more at once, but goes through the lanes of a warp one by one.)
    LINE: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth
    IN_ROW: tl.constexpr = AHEAD // LINE
    lines = tl.arange(0, TILE_N * IN_ROW)
    rows = tile * TILE_N + lines // IN_ROW
    if IS_GATED:
        rows = tl.minimum(rows, 2 * num_out - 1)
        rows = rows % 2 * num_out + rows // 2
    else:
        rows = tl.minimum(rows, num_out - 1)
    columns = tl.minimum(first, size - AHEAD) + lines % IN_ROW * LINE
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [weight_ptr + rows.to(tl.int64) * size + columns],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _load(ptrs, exists, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=exists, other=0.0)


@triton.jit
def _load_weights(ptrs, exists, WHOLE: tl.constexpr):
    """Read once: they shall not drive out of the cache what is read again."""
    if WHOLE:
        return tl.load(ptrs, eviction_policy="evict_first")
    else:
        return tl.load(ptrs, mask=exists, other=0.0, eviction_policy="evict_first")


@triton.jit
def _add_row(
    sums, squares, w, norm, x_ptrs, exists,
    HAS_NORM: tl.constexpr, WHOLE_K: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The products of one row of x with a tile of the weights, added to [TILE_N, TILE_K / VECTOR] sums."""
    x = _load(x_ptrs, exists, WHOLE_K).to(tl.float32)
    if HAS_NORM:
        squares += tl.sum(tl.reshape(x * x, [TILE_K // VECTOR, VECTOR]), axis=1)
        x *= norm
    # A thread adds up the columns that it read at once.
    sums += tl.sum(tl.reshape(w * x[None, :], [TILE_N, TILE_K // VECTOR, VECTOR]), axis=2)
    return sums, squares


@triton.jit
def _store_row(
    sums, square_sum, residual, scale, bias, out_ptrs, is_out, size, eps, HAS_NORM: tl.constexpr, GATE: tl.constexpr,
    TILE_N: tl.constexpr,
):  # fmt: skip
    """sums: [TILE_N] of one row of x → its part of the output."""
    if HAS_NORM:
        sums *= tl.rsqrt(square_sum / size + eps)
    if scale is not None:
        sums *= scale
    if bias is not None:
        sums += bias
    if GATE != "":
        gate, up = tl.split(tl.reshape(sums, [TILE_N // 2, 2]))
        sums = activated(gate, GATE) * up
    if residual is not None:
        sums += residual
    tl.store(out_ptrs, sums.to(out_ptrs.dtype.element_ty), mask=is_out)


@triton.jit
def _add_columns(
    sums0, sums1, sums2, sums3, squares0, squares1, squares2, squares3, w, norm, at, size, x_ptr, x_stride, num_rows,
    HAS_NORM: tl.constexpr, ROWS: tl.constexpr, WHOLE_K: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Add the products with columns at .. at + TILE_K - 1 of all rows of x."""
    columns = at + tl.arange(0, TILE_K)
    exists = columns < size
    w = w.to(tl.float32)
    if HAS_NORM:
        norm = norm.to(tl.float32)
    x_ptrs = x_ptr + columns
    sums0, squares0 = _add_row(sums0, squares0, w, norm, x_ptrs, exists, HAS_NORM, WHOLE_K, TILE_N, TILE_K, VECTOR)
    if ROWS > 1:
        x_ptrs = x_ptr + tl.minimum(1, num_rows - 1).to(tl.int64) * x_stride + columns
        sums1, squares1 = _add_row(sums1, squares1, w, norm, x_ptrs, exists, HAS_NORM, WHOLE_K, TILE_N, TILE_K, VECTOR)
    if ROWS > 2:
        x_ptrs = x_ptr + tl.minimum(2, num_rows - 1).to(tl.int64) * x_stride + columns
        sums2, squares2 = _add_row(sums2, squares2, w, norm, x_ptrs, exists, HAS_NORM, WHOLE_K, TILE_N, TILE_K, VECTOR)
        x_ptrs = x_ptr + tl.minimum(3, num_rows - 1).to(tl.int64) * x_stride + columns
        sums3, squares3 = _add_row(sums3, squares3, w, norm, x_ptrs, exists, HAS_NORM, WHOLE_K, TILE_N, TILE_K, VECTOR)
    return sums0, sums1, sums2, sums3, squares0, squares1, squares2, squares3


@triton.jit(do_not_specialize=["num_rows", "num_early"])
def _vector_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    x_stride,
    out_stride,
    residual_stride,
    num_rows,
    num_out,
    size,
    eps,
    num_early,
    GATE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    VECTOR: tl.constexpr,
    WHOLE_N: tl.constexpr,
    WHOLE_K: tl.constexpr,
    IS_ONE_TURN: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    SIGNALS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    if SIGNALS:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    weight_rows = _weight_rows(tile, num_out, TILE_N, GATE != "")
    if not WHOLE_N:
        # What lies behind the end is read from the last row, and never stored.
        weight_rows = tl.minimum(weight_rows, (2 * num_out if GATE != "" else num_out) - 1)
    columns = tl.arange(0, TILE_K)
    weight_ptrs = weight_ptr + weight_rows.to(tl.int64)[:, None] * size + columns[None, :]
    sums0 = tl.zeros([TILE_N, TILE_K // VECTOR], tl.float32)
    sums1 = sums0
    sums2 = sums0
    sums3 = sums0
    squares0 = tl.zeros([TILE_K // VECTOR], tl.float32)
    squares1 = squares0
    squares2 = squares0
    squares3 = squares0
    HAS_NORM: tl.constexpr = norm_ptr is not None
    w = _load_weights(weight_ptrs, (columns < size)[None, :], WHOLE_K)
    norm = None
    if HAS_NORM:
        norm = _load(norm_ptr + columns, columns < size, WHOLE_K)
    # What the end needs is asked for at the beginning: nothing hides its way at the end.
    scale = None
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + weight_rows)
    bias = None
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + weight_rows).to(tl.float32)
    if IS_DEPENDENT:
        # x is not there yet, but weights are. Who begins after the kernel in front has ended need not fetch them.
        if AHEAD > 0:  # noqa: SIM102 (known when it is compiled, the other is not)
            if tile < num_early:
                _fetch(weight_ptr, tile, num_out, TILE_K, size, GATE != "", TILE_N, AHEAD)
        tl.extra.cuda.gdc_wait()
    TILE_OUT: tl.constexpr = TILE_N // 2 if GATE != "" else TILE_N
    out_columns = tile * TILE_OUT + tl.arange(0, TILE_OUT)
    is_out = out_columns < num_out
    out_ptrs = out_ptr + out_columns
    residual0 = None
    residual1 = None
    residual2 = None
    residual3 = None
    if residual_ptr is not None:
        residual_ptrs = residual_ptr + out_columns
        residual0 = tl.load(residual_ptrs, mask=is_out, other=0.0).to(tl.float32)
        if ROWS > 1:
            residual1 = tl.load(residual_ptrs + residual_stride, mask=is_out & (num_rows > 1), other=0.0).to(tl.float32)
        if ROWS > 2:
            residual_ptrs += 2 * residual_stride
            residual2 = tl.load(residual_ptrs, mask=is_out & (num_rows > 2), other=0.0).to(tl.float32)
            residual3 = tl.load(residual_ptrs + residual_stride, mask=is_out & (num_rows > 3), other=0.0).to(tl.float32)
    sums0, sums1, sums2, sums3, squares0, squares1, squares2, squares3 = _add_columns(
        sums0, sums1, sums2, sums3, squares0, squares1, squares2, squares3, w, norm, 0, size, x_ptr, x_stride, num_rows,
        HAS_NORM, ROWS, WHOLE_K, TILE_N, TILE_K, VECTOR,
    )  # fmt: skip
    if not IS_ONE_TURN:
        for at in range(TILE_K, size, TILE_K):
            exists = at + columns < size
            w = _load_weights(weight_ptrs + at, exists[None, :], WHOLE_K)
            if HAS_NORM:
                norm = _load(norm_ptr + at + columns, exists, WHOLE_K)
            sums0, sums1, sums2, sums3, squares0, squares1, squares2, squares3 = _add_columns(
                sums0, sums1, sums2, sums3, squares0, squares1, squares2, squares3, w, norm, at, size, x_ptr, x_stride,
                num_rows, HAS_NORM, ROWS, WHOLE_K, TILE_N, TILE_K, VECTOR,
            )  # fmt: skip
    _store_row(
        tl.sum(sums0, axis=1), tl.sum(squares0), residual0, scale, bias, out_ptrs, is_out, size, eps, HAS_NORM, GATE,
        TILE_N,
    )  # fmt: skip
    if ROWS > 1:
        _store_row(
            tl.sum(sums1, axis=1), tl.sum(squares1), residual1, scale, bias, out_ptrs + out_stride,
            is_out & (num_rows > 1), size, eps, HAS_NORM, GATE, TILE_N,
        )  # fmt: skip
    if ROWS > 2:
        _store_row(
            tl.sum(sums2, axis=1), tl.sum(squares2), residual2, scale, bias, out_ptrs + 2 * out_stride,
            is_out & (num_rows > 2), size, eps, HAS_NORM, GATE, TILE_N,
        )  # fmt: skip
        _store_row(
            tl.sum(sums3, axis=1), tl.sum(squares3), residual3, scale, bias, out_ptrs + 3 * out_stride,
            is_out & (num_rows > 3), size, eps, HAS_NORM, GATE, TILE_N,
        )  # fmt: skip


@triton.jit
def _store_tile(
    sums, square_sums, tile, out_ptr, scale_ptr, bias_ptr, residual_ptr, out_stride, residual_stride, num_rows, num_out,
    size, eps, HAS_NORM: tl.constexpr, GATE: tl.constexpr, ROWS: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """sums: [TILE_N, ROWS], square_sums: [ROWS] → a tile of the output."""
    weight_rows = _weight_rows(tile, num_out, TILE_N, GATE != "")
    rows = tl.arange(0, ROWS)
    if GATE == "":
        is_out = weight_rows < num_out
    else:
        is_out = tile * TILE_N + tl.arange(0, TILE_N) < 2 * num_out
    if HAS_NORM:
        sums *= tl.rsqrt(square_sums / size + eps)[None, :]
    if scale_ptr is not None:
        sums *= tl.load(scale_ptr + weight_rows, mask=is_out, other=0.0)[:, None]
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + weight_rows, mask=is_out, other=0.0).to(tl.float32)[:, None]
    if GATE == "":
        columns = weight_rows
        out = tl.trans(sums)
    else:
        gate, up = tl.split(tl.permute(tl.reshape(sums, [TILE_N // 2, 2, ROWS]), (2, 0, 1)))
        out = activated(gate, GATE) * up
        columns = tile * (TILE_N // 2) + tl.arange(0, TILE_N // 2)
    mask = (rows < num_rows)[:, None] & (columns < num_out)[None, :]
    if residual_ptr is not None:
        residual_ptrs = residual_ptr + rows.to(tl.int64)[:, None] * residual_stride + columns[None, :]
        out += tl.load(residual_ptrs, mask=mask, other=0.0)
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_early"])
def _matrix_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    partial_ptr,
    arrivals_ptr,
    x_stride,
    out_stride,
    residual_stride,
    num_rows,
    num_out,
    size,
    eps,
    num_early,
    GATE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE_N: tl.constexpr,
    WHOLE_K: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    SIGNALS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    if SIGNALS:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    part = tl.program_id(1)
    num_tiles_k = tl.cdiv(size, TILE_K)
    first = part * num_tiles_k // PARTS * TILE_K
    end = (part + 1) * num_tiles_k // PARTS * TILE_K
    if IS_DEPENDENT:
        if AHEAD > 0:  # noqa: SIM102 (known when it is compiled, the other is not)
            if tile < num_early:
                _fetch(weight_ptr, tile, num_out, first, size, GATE != "", TILE_N, AHEAD)
        tl.extra.cuda.gdc_wait()
    weight_rows = _weight_rows(tile, num_out, TILE_N, GATE != "")
    if not WHOLE_N:
        weight_rows = tl.minimum(weight_rows, (2 * num_out if GATE != "" else num_out) - 1)
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, TILE_K)
    weight_ptrs = weight_ptr + weight_rows.to(tl.int64)[:, None] * size + columns[None, :]
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride + columns[None, :]
    is_row = (rows < num_rows)[:, None]
    sums = tl.zeros([TILE_N, ROWS], tl.float32)
    square_sums = tl.zeros([ROWS], tl.float32)
    for at in tl.range(first, end, TILE_K, num_stages=STAGES):
        exists = at + columns < size
        w = _load_weights(weight_ptrs + at, exists[None, :], WHOLE_K)
        x = _load(x_ptrs + at, is_row if WHOLE_K else is_row & exists[None, :], False)
        if norm_ptr is not None:
            norm = _load(norm_ptr + columns + at, exists, WHOLE_K)
            wide = x.to(tl.float32)
            square_sums += tl.sum(wide * wide, axis=1)
            x = (wide * norm.to(tl.float32)[None, :]).to(x.dtype)
        sums = tl.dot(w.to(DOT_DTYPE), tl.trans(x.to(DOT_DTYPE)), sums, input_precision=PRECISION)
    if PARTS == 1:
        _store_tile(
            sums, square_sums, tile, out_ptr, scale_ptr, bias_ptr, residual_ptr, out_stride, residual_stride, num_rows,
            num_out, size, eps, norm_ptr is not None, GATE, ROWS, TILE_N,
        )  # fmt: skip
    else:
        in_tile = tl.arange(0, TILE_N)[:, None] * ROWS + rows[None, :]
        PART_SIZE: tl.constexpr = (TILE_N + 1) * ROWS
        part_ptr = partial_ptr + (tile * PARTS + part) * PART_SIZE
        tl.store(part_ptr + in_tile, sums)
        if norm_ptr is not None:
            tl.store(part_ptr + TILE_N * ROWS + rows, square_sums)
        # All threads' stores come before the one thread's release.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel")
        if arrived == PARTS - 1:
            tl.store(arrivals_ptr + tile, 0)
            sums = tl.zeros([TILE_N, ROWS], tl.float32)
            square_sums = tl.zeros([ROWS], tl.float32)
            for i in tl.static_range(PARTS):
                part_ptr = partial_ptr + (tile * PARTS + i) * PART_SIZE
                # Past the first-level cache, which does not see what other processors wrote.
                sums += tl.load(part_ptr + in_tile, cache_modifier=".cg")
                if norm_ptr is not None:
                    square_sums += tl.load(part_ptr + TILE_N * ROWS + rows, cache_modifier=".cg")
            _store_tile(
                sums, square_sums, tile, out_ptr, scale_ptr, bias_ptr, residual_ptr, out_stride, residual_stride,
                num_rows, num_out, size, eps, norm_ptr is not None, GATE, ROWS, TILE_N,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SkinnyTiles:
    """How the work on one product is cut."""

    is_matrix: bool
    """The matrix kernel; False: the vector kernel."""
    tile_n: int
    """Weight rows of a program."""
    tile_k: int
    num_warps: int
    num_stages: int = 1
    """Tiles under way to a program, with the one in use; of the matrix kernel alone."""
    num_parts: int = 1
    """Programs that share the columns of a tile; of the matrix kernel alone."""
    ahead: int = 0
    """Columns that a dependent launch brings into the cache before it waits; a power of two from 128 on, or none."""


@dataclass(frozen=True, slots=True)
class SplitScratch:
    """Room for sums in parts. One for each stream: it belongs to the launch that runs."""

    partial: torch.Tensor
    """[n] float32."""
    arrivals: torch.Tensor
    """[n] int32: the parts of a tile that are there. Zero between launches."""


def make_split_scratch(device: torch.device) -> SplitScratch:
    """Room for any product that is cut into parts; 17 MB."""
    return SplitScratch(
        torch.empty(2**22, dtype=torch.float32, device=device), torch.zeros(2**14, dtype=torch.int32, device=device)
    )


def max_skinny_rows(activation_dtype: torch.dtype) -> int:
    """For how many rows this kernel is the one to take: measured, at 64 it still equals cuBLAS, or wins."""
    return 4 if activation_dtype == torch.float32 else MAX_ROWS


def takes_norm(num_rows: int, num_weight_rows: int, size: int, dtype: torch.dtype) -> bool:
    """Whether the norm belongs into this launch: the matrix kernel takes x as it comes, and loses more than the launch
    of another kernel takes when it does not."""
    return not choose_skinny_tiles(num_rows, num_weight_rows, size, dtype).is_matrix


@lru_cache
def choose_skinny_tiles(num_rows: int, num_weight_rows: int, size: int, dtype: torch.dtype) -> SkinnyTiles:
    """num_weight_rows, size, dtype: of the weights. Measured on an H200."""
    numel = num_weight_rows * size
    if IS_INTERPRETED:  # where a program takes its time, whatever its size
        tile_n, tile_k = (min(256, triton.next_power_of_2(length)) for length in (num_weight_rows, size))
        return SkinnyTiles(num_rows > 4, tile_n, tile_k, 4, 2)
    if num_rows <= 2 or dtype == torch.float32 or (num_rows <= 4 and numel <= 2**23):
        return _choose_vector_tiles(num_rows, num_weight_rows, size, dtype)
    if num_weight_rows >= 2**14:
        return SkinnyTiles(True, 128, 128, 8, 4)
    num_tiles = triton.cdiv(num_weight_rows, 64)
    if num_tiles < 32:
        return SkinnyTiles(True, 64, 128, 4, 4, max(1, min(size // 256, 4)))
    return SkinnyTiles(True, 64, 128, 4, 6, 2 if size >= 8192 and num_tiles <= 96 else 1)


def within_shared_memory(tiles: SkinnyTiles, num_rows: int, itemsize: int, shared_bytes: int) -> SkinnyTiles:
    """The matrix kernel's tiles with as many under way as a card with shared_bytes for a program has room for."""
    rows = max(16, triton.next_power_of_2(num_rows))
    tile_bytes = (tiles.tile_n + rows) * tiles.tile_k * itemsize
    most = (shared_bytes - 4096) // tile_bytes + 1  # the one in use is not counted
    return tiles if tiles.num_stages <= most else replace(tiles, num_stages=max(2, most))


@lru_cache
def _shared_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def _choose_vector_tiles(num_rows: int, num_weight_rows: int, size: int, dtype: torch.dtype) -> SkinnyTiles:
    # Many programs with few rows each: what waits for the memory is many warps, not deep loops.
    if dtype.itemsize == 1:
        tile_n, num_warps, num_reads = 4, 4 if num_rows == 1 else 2, 1
    elif num_rows == 1:
        if size <= 1024:
            tile_n, num_warps, num_reads = (4, 4, 1) if num_weight_rows >= 2**16 else (2, 1, 4)
        elif size < 4096:
            tile_n, num_warps, num_reads = 4, 4, 2
        else:
            tile_n, num_warps, num_reads = 2, 4, 1
    elif num_weight_rows >= 6 * size:
        tile_n, num_warps, num_reads = 4, 1, 1
    else:
        tile_n, num_warps, num_reads = 4, 2 if num_weight_rows > size else 4, 1
    vector = 16 // dtype.itemsize
    while num_reads * num_warps > 1 and num_warps * num_reads * 32 * vector >= 2 * size:
        num_reads, num_warps = (num_reads // 2, num_warps) if num_reads > 1 else (1, num_warps // 2)
    return SkinnyTiles(False, tile_n, num_warps * num_reads * 32 * vector, num_warps)


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: str | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scratch: SplitScratch | None = None,
    is_dependent: bool = False,
    tiles: SkinnyTiles | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias, for 1 to 64 rows, in one launch; sums are float32 and rounded once.

    x: [num_rows, size]; weight: [out_features, size], contiguous, of x's dtype or float8_e4m3fn; bias: [out_features].
    weight_scale: [out_features] float32; row i of the weights stands for weight_scale[i] times as much.
    norm_weight: [size]; x is first normalised: x / sqrt(mean(x ** 2) + eps) * norm_weight.
    gated: "silu", "gelu" or "gelu_tanh": act(first half of the columns) * second half, [num_rows, out_features / 2].
    residual: [num_rows, out_features], to which the product is added in place; it is returned. Not with `gated`.
    Returns `out` or a new tensor of out_dtype (x's, if None). Rows of x, out and residual lie in one piece each.
    scratch: without it no product is cut into parts.
    is_dependent: the launch need not wait for the end of the kernel in front; that which it writes is waited for, while
        weights are fetched already. Needs compute capability 9.0; ignored in the interpreter.
    tiles: instead of those chosen here. Bound by the reading of the weights.
    Raises ValueError for shapes or dtypes that do not fit together.
    """
    num_rows, size = x.shape
    num_weight_rows = weight.shape[0]
    num_out = num_weight_rows // 2 if gated else num_weight_rows
    if residual is not None:
        out = residual
    elif out is None:
        out = torch.empty((num_rows, num_out), dtype=out_dtype or x.dtype, device=x.device)
    _check(x, weight, gated, residual, out, num_out)
    if tiles is None:
        tiles = choose_skinny_tiles(num_rows, num_weight_rows, size, weight.dtype)
    if tiles.is_matrix and x.is_cuda:
        tiles = within_shared_memory(tiles, num_rows, x.itemsize, _shared_bytes(x.device))
    signals = can_depend(x.device)
    ahead = tiles.ahead if size >= tiles.ahead + (0 if tiles.is_matrix else tiles.tile_k) else 0
    num_early = _num_processors(x.device) * 64 // tiles.num_warps if ahead else 0
    pointers = (out, x, weight, weight_scale, bias, norm_weight, residual)
    strides = (x.stride(0), out.stride(0), residual.stride(0) if residual is not None else 0)
    num_tiles = triton.cdiv(num_weight_rows, tiles.tile_n)
    whole = (num_weight_rows % tiles.tile_n == 0, size % tiles.tile_k == 0)
    if not tiles.is_matrix:
        _vector_kernel[(num_tiles,)](
            *pointers,
            *strides,
            num_rows,
            num_out,
            size,
            eps,
            num_early,
            GATE=gated or "",
            ROWS=triton.next_power_of_2(num_rows),
            TILE_N=tiles.tile_n,
            TILE_K=tiles.tile_k,
            VECTOR=16 // weight.itemsize,
            WHOLE_N=whole[0],
            WHOLE_K=whole[1],
            IS_ONE_TURN=size <= tiles.tile_k,
            IS_DEPENDENT=is_dependent and signals,
            SIGNALS=signals,
            AHEAD=ahead,
            num_warps=tiles.num_warps,
            launch_pdl=is_dependent and signals,
        )
        return out
    rows = max(16 if weight.itemsize < 4 else 4, triton.next_power_of_2(num_rows))
    num_parts = tiles.num_parts
    if scratch is None or num_tiles * num_parts * (tiles.tile_n + 1) * rows > len(scratch.partial):
        num_parts = 1
    _matrix_kernel[num_tiles, num_parts](
        *pointers,
        scratch.partial if scratch is not None and num_parts > 1 else None,
        scratch.arrivals if scratch is not None and num_parts > 1 else None,
        *strides,
        num_rows,
        num_out,
        size,
        eps,
        num_early,
        GATE=gated or "",
        ROWS=rows,
        TILE_N=tiles.tile_n,
        TILE_K=tiles.tile_k,
        STAGES=tiles.num_stages,
        PARTS=num_parts,
        WHOLE_N=whole[0],
        WHOLE_K=whole[1],
        DOT_DTYPE=dot_dtype(x.dtype),
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        IS_DEPENDENT=is_dependent and signals,
        SIGNALS=signals,
        AHEAD=ahead,
        num_warps=tiles.num_warps,
        launch_pdl=is_dependent and signals,
    )
    return out


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """Of the operands of a product; the interpreter multiplies the bits of bfloat16."""
    if dtype == torch.float16:
        return tl.float16
    return tl.float32 if IS_INTERPRETED or dtype == torch.float32 else tl.bfloat16


@lru_cache
def can_depend(device: torch.device) -> bool:
    """Whether a kernel can begin while the one in front runs, that is, whether `is_dependent` has an effect."""
    if IS_INTERPRETED or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    gated: str | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    num_out: int,
) -> None:
    num_rows, size = x.shape
    if not 1 <= num_rows <= MAX_ROWS:
        raise ValueError(f"x must have 1 to {MAX_ROWS} rows, got {num_rows}")
    if weight.shape[1] != size or not weight.is_contiguous():
        raise ValueError(
            f"weight must be contiguous with {size} columns as x has, got {list(weight.shape)}, {weight.stride()}"
        )
    if weight.dtype not in (x.dtype, torch.float8_e4m3fn):
        raise ValueError(f"weight must have the dtype of x ({x.dtype}) or be float8_e4m3fn, got {weight.dtype}")
    if gated is not None and (gated not in _GATES or residual is not None or weight.shape[0] % 2):
        raise ValueError(
            f"gated must be one of {', '.join(_GATES)}, with an even number of weight rows and no residual; "
            f"got {gated}, {weight.shape[0]} rows, {'no' if residual is None else 'a'} residual"
        )
    if out.shape != (num_rows, num_out):
        raise ValueError(f"the result is {[num_rows, num_out]}, got room for {list(out.shape)}")
    if x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("the elements of a row must lie side by side")
