"""How the products of a linear layer are computed on a GPU.

A decode reads all weights for a few rows, and is bound by that: one kernel then does the norm in front of the product
and the gate or the sum behind it, too (`skinny_linear`). For more rows cuBLAS is faster, between kernels of their own.
"""

from typing import Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F

from engine.kernels.fixed_linear import fixed_linear
from engine.kernels.rms_norm import rms_norm
from engine.kernels.scaled_linear import SCALED_MULTIPLE, narrow_rows, quantise_rows, scaled_linear
from engine.kernels.skinny_linear import SplitScratch, make_split_scratch, max_skinny_rows, skinny_linear, takes_norm
from streamkv.errors import ConfigError


@runtime_checkable
class GpuProduct(Protocol):
    """The weights of one layer in the form that is read fastest."""

    in_features: int
    out_features: int
    max_fused_rows: int
    """`fused` takes up to so many rows; 0: it takes none."""

    def __call__(
        self, x: torch.Tensor, out_dtype: torch.dtype | None = None, *, is_dependent: bool = False
    ) -> torch.Tensor:
        """[num_rows, in_features] → [num_rows, out_features] in out_dtype (x's, if None), bias added.

        num_rows may be 0. is_dependent: see `skinny_linear`; without effect where another kernel is chosen.
        """
        ...

    def fused(
        self,
        x: torch.Tensor,
        *,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        gated: str | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        is_dependent: bool = False,
    ) -> torch.Tensor:
        """The product with what stands before and behind it, in one launch or two: `skinny_linear` says what.

        1 to max_fused_rows rows.
        """
        ...


class _SkinnyProduct:
    """Weights that `skinny_linear` reads for few rows; what is done for many is the matter of those below."""

    def __init__(
        self,
        weight: torch.Tensor,
        weight_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        activation_dtype: torch.dtype,
        scratch: SplitScratch,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.weight_scale = weight_scale
        self.bias = bias
        self.scratch = scratch
        self.max_fused_rows = max_skinny_rows(activation_dtype)

    def fused(
        self,
        x: torch.Tensor,
        *,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        gated: str | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        is_dependent: bool = False,
    ) -> torch.Tensor:
        if norm_weight is not None and not takes_norm(len(x), self.out_features, self.in_features, self.weight.dtype):
            x = rms_norm(x, norm_weight, eps)
            norm_weight = None
        return skinny_linear(
            x,
            self.weight,
            bias=self.bias,
            weight_scale=self.weight_scale,
            norm_weight=norm_weight,
            eps=eps,
            gated=gated,
            residual=residual,
            out=out,
            out_dtype=out_dtype,
            scratch=self.scratch,
            is_dependent=is_dependent,
        )

    def _takes_norm(self, num_rows: int) -> bool:
        return takes_norm(num_rows, self.out_features, self.in_features, self.weight.dtype)


class PlainGpuProduct(_SkinnyProduct):
    """Weights as they come: for many rows cuBLAS."""

    def __call__(
        self, x: torch.Tensor, out_dtype: torch.dtype | None = None, *, is_dependent: bool = False
    ) -> torch.Tensor:
        if 0 < x.shape[0] <= self.max_fused_rows:
            return self.fused(x, out_dtype=out_dtype, is_dependent=is_dependent)
        if out_dtype in (None, x.dtype):
            return F.linear(x, self.weight, self.bias)
        if not x.is_cuda or not x.shape[0]:
            return F.linear(x, self.weight, self.bias).to(out_dtype)
        out = torch.mm(x, self.weight.t(), out_dtype=out_dtype)
        return out if self.bias is None else out.add_(self.bias)


class ScaledGpuProduct(_SkinnyProduct):
    """e4m3 weights: few rows stay as wide as they are; many are quantised too, and multiplied by cuBLAS."""

    weight_scale: torch.Tensor

    def fused(
        self,
        x: torch.Tensor,
        *,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        gated: str | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        is_dependent: bool = False,
    ) -> torch.Tensor:
        if x.dtype == torch.bfloat16 and not self._takes_norm(len(x)):
            # The matrix kernel takes float16, which e4m3 becomes at once.
            out_dtype = out_dtype or x.dtype
            if norm_weight is None:
                x = narrow_rows(x)
            else:
                x = rms_norm(x, norm_weight, eps, out=x.new_empty(x.shape, dtype=torch.float16))
                norm_weight = None
        return super().fused(
            x, norm_weight=norm_weight, eps=eps, gated=gated, residual=residual, out=out, out_dtype=out_dtype,
            is_dependent=is_dependent,
        )  # fmt: skip

    def __call__(
        self, x: torch.Tensor, out_dtype: torch.dtype | None = None, *, is_dependent: bool = False
    ) -> torch.Tensor:
        num_rows = x.shape[0]
        if 0 < num_rows <= self.max_fused_rows:
            return self.fused(x, out_dtype=out_dtype, is_dependent=is_dependent)
        if not num_rows:
            return x.new_empty((0, self.out_features), dtype=out_dtype or x.dtype)
        if self.out_features % SCALED_MULTIPLE or self.in_features % SCALED_MULTIPLE:
            step = self.max_fused_rows
            return torch.cat([self.fused(x[at : at + step], out_dtype=out_dtype) for at in range(0, num_rows, step)])
        return scaled_linear(x, self.weight, self.weight_scale, bias=self.bias, out_dtype=out_dtype)


class FixedGpuProduct:
    """The same bits for a row, whatever rows are beside it."""

    max_fused_rows = 0

    def __init__(
        self,
        weight: torch.Tensor,
        weight_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        scratch: SplitScratch,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.weight_scale = weight_scale
        self.bias = bias
        self.scratch = scratch

    def __call__(
        self, x: torch.Tensor, out_dtype: torch.dtype | None = None, *, is_dependent: bool = False
    ) -> torch.Tensor:
        return fixed_linear(
            x, self.weight, bias=self.bias, weight_scale=self.weight_scale, out_dtype=out_dtype, scratch=self.scratch
        )

    def fused(
        self,
        x: torch.Tensor,
        *,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        gated: str | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        is_dependent: bool = False,
    ) -> torch.Tensor:
        raise ValueError("a product with fixed bits has no fused form")


class GpuMethod:
    """Products on one GPU, one after the other on one stream."""

    def __init__(self, dtype: torch.dtype, device: torch.device, is_quantised: bool, is_deterministic: bool) -> None:
        self.activation_dtype = dtype
        self.is_quantised = is_quantised
        self.is_deterministic = is_deterministic
        weights = "float8_e4m3fn" if is_quantised else f"{dtype}".replace("torch.", "")
        self.name = f"{weights} on {device}{', fixed bits' if is_deterministic else ''}"
        self._scratch = make_split_scratch(device)

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> GpuProduct:
        """weight: [out_features, in_features] on the device; kept as it is unless it is quantised."""
        scale: torch.Tensor | None = None
        if self.is_quantised:
            weight, scale = quantise_rows(weight)
            scale = scale.flatten()
        if self.is_deterministic:
            return FixedGpuProduct(weight, scale, bias, self._scratch)
        if scale is None:
            return PlainGpuProduct(weight, None, bias, self.activation_dtype, self._scratch)
        return ScaledGpuProduct(weight, scale, bias, self.activation_dtype, self._scratch)


def choose_gpu_method(
    dtype: torch.dtype,
    device: torch.device,
    quantization: Literal["none", "fp8"] = "none",
    is_deterministic: bool = False,
) -> GpuMethod:
    """dtype: of the model and its activations.

    fp8: weights are held as e4m3 with a scale for each output; the head is usually made by a method without. Raises
    ConfigError where the device has no 8-bit floats, or no bfloat16.
    """
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        has = f"this one has {capability[0]}.{capability[1]}"
        if quantization == "fp8" and capability < (8, 9):
            raise ConfigError("quantization", f"fp8 needs a GPU of compute capability 8.9 or more, {has}; use none")
        if dtype == torch.bfloat16 and capability < (8, 0):
            raise ConfigError("dtype", f"bfloat16 needs a GPU of compute capability 8.0 or more, {has}; use float16")
    return GpuMethod(dtype, device, quantization == "fp8", is_deterministic)
