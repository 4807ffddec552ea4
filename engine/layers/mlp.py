"""The gated MLP of the Llama family."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F

from engine.layers.linear import Linear

_ACTIVATIONS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class GatedMLP:
    """down(activation(gate(x)) * up(x)), with gate and up as one matrix: gate's rows first."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, has_bias: bool, dtype: torch.dtype, activation: str = "silu"
    ) -> None:
        """activation: silu, gelu or gelu_tanh."""
        self._activation = _ACTIVATIONS[activation]
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, has_bias, dtype)
        self.down = Linear(intermediate_size, hidden_size, has_bias, dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, hidden_size] → the same shape."""
        gate, up = self.gate_up(x).chunk(2, dim=1)
        return self.down(self._activation(gate).mul_(up))
