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
        self._eps = torch.tensor([self.eps])
        self._mean = torch.full((*self.shape, 1), 1.0 / self.shape[0])
        self.weight = torch.empty(self.shape, dtype=self.dtype)
        return self.weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size] → the same shape and dtype, newly allocated."""
        assert self.weight is not None
        if x.dtype != torch.float32 or x.dim() != 2:
            return F.rms_norm(x, self.shape, None, self.eps) * self.weight
        # The mean of the squares as a matrix product: F.rms_norm on a CPU is made of small operators, and for one
        # token, where their number is all that counts, takes more than twice as long.
        scale = torch.addmm(self._eps, x * x, self._mean).rsqrt_()
        return (x * scale).mul_(self.weight)
