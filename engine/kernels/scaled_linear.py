"""Linear layers whose weights are 8-bit floats (e4m3) with one scale for each row."""

import torch
import triton
import triton.language as tl

SCALED_MULTIPLE = 16
"""What both sizes of a weight must be a multiple of, for cuBLAS."""
LARGEST = tl.constexpr(448.0)
"""The largest number of e4m3."""


@triton.jit
def _rounded(x):
    """To the nearest number of e4m3, the even one of two, so that the conversion is exact: the interpreter's is not."""
    bits = x.to(tl.int32, bitcast=True)
    of_normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    # Below the smallest normal number the step is 2**-9, and this sum's last place has that size.
    of_subnormal = (x + 24576.0) - 24576.0
    return tl.where(tl.abs(x) < 0.015625, of_subnormal, of_normal)


@triton.jit
def _quantise_rows_kernel(
    out_ptr, scale_ptr, x_ptr, x_stride, size, SIZE: tl.constexpr, TILE: tl.constexpr, OUT_DTYPE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    greatest = tl.zeros([TILE], tl.float32)
    for at in tl.static_range(0, SIZE, TILE):
        columns = at + tl.arange(0, TILE)
        x = tl.load(x_ptr + row * x_stride + columns, mask=columns < size, other=0.0).to(tl.float32)
        greatest = tl.maximum(greatest, tl.abs(x))
    scale = tl.maximum(tl.div_rn(tl.max(greatest, axis=0), LARGEST), 1e-30)
    tl.store(scale_ptr + row, scale)
    for at in tl.static_range(0, SIZE, TILE):
        columns = at + tl.arange(0, TILE)
        x = tl.load(x_ptr + row * x_stride + columns, mask=columns < size, other=0.0).to(tl.float32)
        # The division may round to a little more than the largest, which has no neighbour but NaN.
        x = tl.minimum(tl.maximum(tl.div_rn(x, scale), -LARGEST), LARGEST)  # a plain / is 2 ulp off on a GPU
        tl.store(out_ptr + row * size + columns, _rounded(x).to(OUT_DTYPE), mask=columns < size)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as 8-bit floats: (numbers, scales) with numbers * scales about x.

    x: [num_rows, size], rows in one piece, finite. Returns [num_rows, size] float8_e4m3fn, and [num_rows, 1] float32:
    the largest of a row over 448. Each number is within 2**-4 of x, relatively, or within 2**-10 of the scale.
    Reads a row twice, the second time from the cache. Raises ValueError when the rows are not in one piece.
    """
    num_rows, size = x.shape
    if x.stride(1) != 1:
        raise ValueError("the elements of a row must lie side by side")
    out = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    if num_rows:
        tile = min(4096, triton.next_power_of_2(size))
        _quantise_rows_kernel[(num_rows,)](
            out,
            scale,
            x,
            x.stride(0),
            size,
            SIZE=triton.cdiv(size, tile) * tile,
            TILE=tile,
            OUT_DTYPE=tl.float8e4nv,
            num_warps=min(max(tile // 512, 1), 8),
        )
    return out, scale


@triton.jit
def _narrow_kernel(out_ptr, x_ptr, x_stride, size, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + row * x_stride + columns, mask=columns < size, other=0.0).to(tl.float32)
    x = tl.minimum(tl.maximum(x, -65504.0), 65504.0)
    tl.store(out_ptr + row * size + columns, x.to(tl.float16), mask=columns < size)


def narrow_rows(x: torch.Tensor) -> torch.Tensor:
    """[num_rows, size], rows in one piece → the same in float16, cut off at the ends of its range.

    e4m3 becomes float16 in one instruction, and bfloat16 only in several.
    """
    out = torch.empty(x.shape, dtype=torch.float16, device=x.device)
    _narrow_kernel[len(x), triton.cdiv(x.shape[1], 1024)](out, x, x.stride(0), x.shape[1], TILE=1024)
    return out


def scaled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x @ (weight * weight_scale).T + bias for many rows, with x quantised row by row, by cuBLAS.

    x: [num_rows, size], rows in one piece; weight: [out_features, size] float8_e4m3fn, contiguous, both sizes multiples
    of 16; weight_scale: [out_features] float32; bias: [out_features]. num_rows at least 1.
    Returns [num_rows, out_features] in out_dtype (x's, if None), rounded to bfloat16 before. Needs compute capability
    8.9. Raises ValueError for other sizes.
    """
    if weight.shape[0] % SCALED_MULTIPLE or weight.shape[1] % SCALED_MULTIPLE:
        raise ValueError(f"both sizes of weight must be multiples of {SCALED_MULTIPLE}, got {list(weight.shape)}")
    numbers, scale = quantise_rows(x)
    out = torch._scaled_mm(
        numbers, weight.t(), scale_a=scale, scale_b=weight_scale[None, :], out_dtype=torch.bfloat16
    ).to(out_dtype or x.dtype)
    return out if bias is None else out.add_(bias)
