"""Random weights instead of a model's own, for benchmarks of shapes that are too large to ship."""

from collections.abc import Mapping
from typing import Final

import torch

_SEED: Final = 0x5EED
"""The same weights at every start on the same kind of device, so that kept KV blocks still fit them."""


class DummySource:
    """Fulfils weights.TensorSource for any shapes. Norm weights are one value, biases 0, all else is normal.

    The numbers are drawn where they are needed: on a GPU some 15 GB of bfloat16 take well under a second, on a CPU
    some 10 ns a weight.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], std: float, norm_weight: float, device: torch.device | str
    ) -> None:
        """std: of the weights, whose mean is 0. norm_weight: each number of the weights of norms. device: that of the
        tensors to fill."""
        self.description = "dummy weights"
        self.shapes = shapes
        self._std = std
        self._norm_weight = norm_weight
        self._generator = torch.Generator(device).manual_seed(_SEED)

    def copy_into(self, name: str, target: torch.Tensor, num_heads: int) -> None:
        if target.dim() > 1:
            target.normal_(0.0, self._std, generator=self._generator)
        else:
            target.fill_(0.0 if name.endswith(".bias") else self._norm_weight)
