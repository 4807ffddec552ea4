"""y = x @ weight.T with the same bits for a row whatever rows stand beside it.

Every sum is taken in an order that depends on the weights' shape alone: the columns are cut into a number of parts; one
part is a chain of products of one kind of instruction, and the parts are added up in their order. With many rows one
program goes through all parts, with few each part has a program and the last to arrive adds them up: the same sums.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.skinny_linear import IS_INTERPRETED, SplitScratch, dot_dtype

_TILE_N = 128
_PROGRAMS = 264
"""How many parts few rows may have in all: a constant, so that another card gives the same parts."""
_MIN_PART = 1024
_UNIT = tl.constexpr(128)
"""Parts and tiles end at its multiples, whatever their own size."""
_FEW_ROWS = 64


@triton.jit
def _store_tile(
    total, row_tile, tile, out_ptr, scale_ptr, bias_ptr, out_stride, num_rows, num_out, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):  # fmt: skip
    rows = row_tile * TILE_M + tl.arange(0, TILE_M)
    columns = tile * TILE_N + tl.arange(0, TILE_N)
    if scale_ptr is not None:
        total *= tl.load(scale_ptr + columns, mask=columns < num_out, other=0.0)[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns, mask=columns < num_out, other=0.0).to(tl.float32)[None, :]
    mask = (rows < num_rows)[:, None] & (columns < num_out)[None, :]
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _part_sums(
    x_ptrs, is_row, weight_ptrs, part, size, PARTS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TILE_K: tl.constexpr, STAGES: tl.constexpr, WHOLE_K: tl.constexpr, USES_DOT: tl.constexpr,
    DOT_DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, TILE_K)
    num_units = tl.cdiv(size, _UNIT)
    first = part * num_units // PARTS * _UNIT
    end = (part + 1) * num_units // PARTS * _UNIT
    sums = tl.zeros([TILE_M, TILE_N], tl.float32)
    for at in tl.range(first, end, TILE_K, num_stages=STAGES):
        if WHOLE_K:
            x = tl.load(x_ptrs + at, mask=is_row, other=0.0)
            w = tl.load(weight_ptrs + at)
        else:
            exists = (at + columns < size)[None, :]
            x = tl.load(x_ptrs + at, mask=is_row & exists, other=0.0)
            w = tl.load(weight_ptrs + at, mask=exists, other=0.0)
        if USES_DOT:
            sums = tl.dot(x.to(DOT_DTYPE), tl.trans(w.to(DOT_DTYPE)), sums, input_precision=PRECISION)
        else:
            sums += tl.sum(x.to(tl.float32)[:, None, :] * w.to(tl.float32)[None, :, :], axis=2)
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def _fixed_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    partial_ptr,
    arrivals_ptr,
    x_stride,
    out_stride,
    num_rows,
    num_out,
    size,
    PARTS: tl.constexpr,
    IS_SHARED: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE_K: tl.constexpr,
    USES_DOT: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Programs that run at the same time read the rows of x and of the weights that few tiles have in common.
    num_row_tiles = tl.cdiv(num_rows, TILE_M)
    in_group = GROUP * tl.cdiv(num_out, TILE_N)
    first_row_tile = tl.program_id(0) // in_group * GROUP
    group_rows = tl.minimum(num_row_tiles - first_row_tile, GROUP)
    row_tile = first_row_tile + tl.program_id(0) % in_group % group_rows
    tile = tl.program_id(0) % in_group // group_rows

    columns = tl.arange(0, TILE_K)
    rows = row_tile * TILE_M + tl.arange(0, TILE_M)
    is_row = (rows < num_rows)[:, None]
    weight_rows = tl.minimum(tile * TILE_N + tl.arange(0, TILE_N), num_out - 1)
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride + columns[None, :]
    weight_ptrs = weight_ptr + weight_rows.to(tl.int64)[:, None] * size + columns[None, :]
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    if not IS_SHARED:
        for part in range(PARTS):
            total += _part_sums(
                x_ptrs,
                is_row,
                weight_ptrs,
                part,
                size,
                PARTS,
                TILE_M,
                TILE_N,
                TILE_K,
                STAGES,
                WHOLE_K,
                USES_DOT,
                DOT_DTYPE,
                PRECISION,
            )
        _store_tile(total, row_tile, tile, out_ptr, scale_ptr, bias_ptr, out_stride, num_rows, num_out, TILE_M, TILE_N)
    else:
        part = tl.program_id(1)
        sums = _part_sums(
            x_ptrs,
            is_row,
            weight_ptrs,
            part,
            size,
            PARTS,
            TILE_M,
            TILE_N,
            TILE_K,
            STAGES,
            WHOLE_K,
            USES_DOT,
            DOT_DTYPE,
            PRECISION,
        )
        in_part = tl.arange(0, TILE_M)[:, None] * TILE_N + tl.arange(0, TILE_N)[None, :]
        place = tl.program_id(0) * PARTS
        tl.store(partial_ptr + (place + part) * (TILE_M * TILE_N) + in_part, sums)
        # All threads' stores come before the one thread's release.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + tl.program_id(0), 1, sem="acq_rel")
        if arrived == PARTS - 1:
            tl.store(arrivals_ptr + tl.program_id(0), 0)
            for i in range(PARTS):
                # Past the first-level cache, which does not see what other processors wrote.
                total += tl.load(partial_ptr + (place + i) * (TILE_M * TILE_N) + in_part, cache_modifier=".cg")
            _store_tile(
                total, row_tile, tile, out_ptr, scale_ptr, bias_ptr, out_stride, num_rows, num_out, TILE_M, TILE_N
            )


def fixed_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    weight_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scratch: SplitScratch | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias, for any number of rows; a row's bits depend on that row and the weights alone.

    x: [num_rows, size], rows in one piece; weight: [out_features, size], contiguous, of x's dtype or float8_e4m3fn;
    bias: [out_features]; weight_scale: [out_features] float32, a factor for each row of the weights.
    scratch: for few rows; without it one program goes through all parts: the same bits, more slowly.
    Returns [num_rows, out_features] in out_dtype (x's, if None). Raises ValueError for shapes that do not fit together.
    """
    num_rows, size = x.shape
    num_out = weight.shape[0]
    if weight.shape[1] != size or not weight.is_contiguous():
        raise ValueError(
            f"weight must be contiguous with {size} columns as x has, got {list(weight.shape)}, {weight.stride()}"
        )
    if x.stride(1) != 1:
        raise ValueError("the elements of a row must lie side by side")
    out = torch.empty((num_rows, num_out), dtype=out_dtype or x.dtype, device=x.device)
    if not num_rows:
        return out
    num_parts = _num_parts(num_out, size)
    if IS_INTERPRETED:
        tile_m, tile_n, tile_k, num_stages, num_warps = min(16, triton.next_power_of_2(num_rows)), 256, 128, 1, 4
    elif x.dtype == torch.float32:
        # Ordinary arithmetic: each number is one chain over the columns, whatever the tile.
        tile_m, tile_n, tile_k, num_stages, num_warps = (16 if num_rows <= 16 else 64), 64, 32, 2, 4
    elif num_rows <= _FEW_ROWS:
        tile_m, tile_n, tile_k, num_stages, num_warps = 64, _TILE_N, 64, 4, 4
    else:
        # Two groups of warps with 64 rows each: their instruction is that of few rows.
        tile_m, tile_n, tile_k, num_stages, num_warps = 128, _TILE_N, 64, 4, 8
    num_tiles = triton.cdiv(num_rows, tile_m) * triton.cdiv(num_out, tile_n)
    is_shared = (
        scratch is not None
        and num_parts > 1
        and num_rows <= _FEW_ROWS
        and num_tiles * num_parts * tile_m * tile_n <= len(scratch.partial)
    )
    _fixed_kernel[num_tiles, num_parts if is_shared else 1](
        out,
        x,
        weight,
        weight_scale,
        bias,
        scratch.partial if scratch is not None and is_shared else None,
        scratch.arrivals if scratch is not None and is_shared else None,
        x.stride(0),
        out.stride(0),
        num_rows,
        num_out,
        size,
        PARTS=num_parts,
        IS_SHARED=is_shared,
        TILE_M=tile_m,
        TILE_N=tile_n,
        TILE_K=tile_k,
        STAGES=num_stages,
        GROUP=8,
        WHOLE_K=size % _UNIT.value == 0,
        # NumPy's order in a product depends on the row's place in it.
        USES_DOT=not IS_INTERPRETED,
        DOT_DTYPE=dot_dtype(x.dtype),
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=num_warps,
    )
    return out


def _num_parts(num_out: int, size: int) -> int:
    """Of the weights' shape alone."""
    return max(1, min(size // _MIN_PART, _PROGRAMS // -(-num_out // _TILE_N), 8))
