"""RMSNorm."""

import torch
import torch.nn.functional as F


class RMSNorm:
    """x / rms(x) * weight over the last dimension, with the rounding order of transformers' Llama: normalise in
    float32, round to x's dtype, multiply by the weight."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        """dtype: of the activations; the weight is kept in it."""
        self.eps = eps
        self.shape = (size,)
        self.dtype = dtype
        self.weight: torch.Tensor | None = None
        """[size], from `allocate` on."""

    def allocate(self) -> torch.Tensor:
        """Make room for the weight, to be filled by the caller."""
        self.weight = torch.empty(self.shape, dtype=self.dtype)
        return self.weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size] → the same shape and dtype, newly allocated."""
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.shape, self.weight, self.eps)
        assert self.weight is not None
        return F.rms_norm(x, self.shape, None, self.eps) * self.weight
