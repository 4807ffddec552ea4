"""RMSNorm."""

import torch
import torch.nn.functional as F


class RMSNorm:
    """x / rms(x) * weight over the last dimension, with the rounding order of transformers' Llama: normalise in
    float32, round to x's dtype, multiply by the weight."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, offset: float = 0.0) -> None:
        """dtype: of the activations; the weight is kept in it. offset: what the file's weights want added (Gemma's are
        those less 1); the sums are kept in float32, since a narrow one would lose most of what was added to."""
        self.eps = eps
        self.shape = (size,)
        self.dtype = torch.float32 if offset else dtype
        self.offset = offset
        self.weight: torch.Tensor | None = None
        """[size], from `allocate` on."""

    def allocate(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Make room for the weight, to be filled by the caller, the offset included."""
        self._eps = torch.tensor([self.eps], device=device)
        self._mean = torch.full((*self.shape, 1), 1.0 / self.shape[0], device=device)
        self.weight = torch.empty(self.shape, dtype=self.dtype, device=device)
        return self.weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size] → the same shape and dtype, newly allocated."""
        assert self.weight is not None
        if x.dtype != torch.float32 or x.dim() != 2:
            return (F.rms_norm(x, self.shape, None, self.eps) * self.weight).to(x.dtype)
        # The mean of the squares as a matrix product: F.rms_norm on a CPU is made of small operators, and for one
        # token, where their number is all that counts, takes more than twice as long.
        scale = torch.addmm(self._eps, x * x, self._mean).rsqrt_()
        return (x * scale).mul_(self.weight)
