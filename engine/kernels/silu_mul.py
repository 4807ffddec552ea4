"""The middle of a gated MLP: activation(gate) * up."""

import torch
import triton
import triton.language as tl

_TILE = 1024


@triton.jit
def _gated_kernel(out_ptr, gate_up_ptr, gate_up_stride, out_stride, size, KIND: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    exists = columns < size
    gate = tl.load(gate_up_ptr + row * gate_up_stride + columns, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * gate_up_stride + size + columns, mask=exists, other=0.0).to(tl.float32)
    if KIND == "silu":
        active = gate / (1.0 + tl.exp2(gate * -1.4426950408889634))
    elif KIND == "gelu_tanh":
        # gate / 2 * (1 + tanh(z)) is gate * sigmoid(2 z)
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate / (1.0 + tl.exp2(z * (-2.0 * 1.4426950408889634)))
    else:
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    active = active.to(gate_up_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * out_stride + columns, (active * up).to(out_ptr.dtype.element_ty), mask=exists)


def silu_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up.

    gate_up: [num_rows, 2 * size], gate's columns first. Returns [num_rows, size]: `out` or a new tensor.
    Computed in float32; the activation is rounded to gate_up's dtype before the product, as an unfused layer does.
    Moves three numbers an output and is bound by that. Raises ValueError when the rows are not in one piece.
    """
    return _gated(gate_up, "silu", out)


def gelu_mul(gate_up: torch.Tensor, *, tanh: bool, out: torch.Tensor | None = None) -> torch.Tensor:
    """gelu(gate) * up, with the error function or its approximation by tanh; else like silu_mul."""
    return _gated(gate_up, "gelu_tanh" if tanh else "gelu", out)


def _gated(gate_up: torch.Tensor, kind: str, out: torch.Tensor | None) -> torch.Tensor:
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if gate_up.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("the elements of a row must lie side by side")
    if num_rows:
        _gated_kernel[num_rows, triton.cdiv(size, _TILE)](
            out, gate_up, gate_up.stride(0), out.stride(0), size, KIND=kind, TILE=_TILE, num_warps=4
        )
    return out
