"""RMSNorm, alone or after the addition of a residual."""

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm_kernel(
    out_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    x_stride,
    residual_stride,
    out_stride,
    size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE)
    exists = columns < size
    weight = tl.load(weight_ptr + columns, mask=exists, other=0.0)
    x = tl.load(x_ptr + row * x_stride + columns, mask=exists, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=exists, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * residual_stride + columns, x, mask=exists)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    normalised = (wide * scale).to(x_ptr.dtype.element_ty)
    out = (normalised.to(tl.float32) * weight.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + columns, out, mask=exists)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension; with a residual, residual += x first, and its sum is normalised.

    Rounds as transformers' Llama does: normalise in float32, round to x's dtype, multiply by the weight.
    x: [num_rows, size], rows in one piece; weight: [size]; residual: like x, changed in place.
    Returns [num_rows, size]: `out` (which may be x) or a new tensor. Reads and writes each row once, bound by that.
    Raises ValueError when the rows are not in one piece.
    """
    num_rows, size = x.shape
    if out is None:
        out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    if x.stride(1) != 1 or out.stride(1) != 1 or (residual is not None and residual.stride(1) != 1):
        raise ValueError("the elements of a row must lie side by side")
    if not num_rows:
        return out
    padded = triton.next_power_of_2(size)
    _rms_norm_kernel[(num_rows,)](
        out,
        x,
        residual,
        weight,
        x.stride(0),
        residual.stride(0) if residual is not None else 0,
        out.stride(0),
        size,
        eps,
        HAS_RESIDUAL=residual is not None,
        SIZE=padded,
        num_warps=min(max(padded // 512, 1), 16),
    )
    return out
