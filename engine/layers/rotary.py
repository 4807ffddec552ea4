"""Rotary position embedding."""

import math
from typing import Final

import torch

_FIRST_POSITIONS: Final = 4096


class RotaryTable:
    """The rotations of the positions, in float32, computed once; the table grows when a longer sequence comes.

    Rotation turns pairs of dimensions, (a, b) → (a cos - b sin, b cos + a sin): a product of complex numbers, which is
    one operator where the real formula takes five. For that a pair must lie side by side, so the rows of the query
    and key weights are put in the order of `pair_order` when they are loaded, as llama.cpp does. Scores are sums over
    all dimensions, so they do not depend on it.
    """

    def __init__(self, frequencies: torch.Tensor, scale: float = 1.0) -> None:
        """frequencies: [rotary_dim / 2] float32, radians per position. scale: multiplies cos and sin (yarn)."""
        self.frequencies = frequencies
        self.scale = scale
        self._grow(_FIRST_POSITIONS)

    def _grow(self, num_positions: int) -> None:
        """Takes 4 * num_positions * rotary_dim bytes."""
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * self.frequencies
        self.turns = torch.complex(angles.cos() * self.scale, angles.sin() * self.scale)[:, None]
        """[num_positions, 1, rotary_dim / 2] complex64."""

    def at(self, positions: torch.Tensor, num_positions: int) -> "Rotation":
        """positions: [num_tokens] int64, each under num_positions."""
        if num_positions > len(self.turns):
            self._grow(1 << (num_positions - 1).bit_length())
        return Rotation(self.turns.index_select(0, positions))


class Rotation:
    """The rotation of one step's tokens; all layers share it."""

    def __init__(self, turns: torch.Tensor) -> None:
        """turns: [num_tokens, 1, rotary_dim / 2] complex64."""
        self.turns = turns
        self.rotary_dim = 2 * turns.shape[-1]

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        """heads: [num_tokens, num_heads, head_dim], pairs side by side → rotated, the same shape and dtype, new.

        Computed in float32. Dimensions from rotary_dim on pass through. head_dim's elements must lie side by side.
        """
        num_tokens, num_heads, head_dim = heads.shape
        if self.rotary_dim < head_dim:
            rotated = self(heads[..., : self.rotary_dim])
            return torch.cat((rotated, heads[..., self.rotary_dim :]), dim=-1)
        pairs = torch.view_as_complex(heads.float().view(num_tokens, num_heads, -1, 2))
        return torch.view_as_real(pairs * self.turns).view(num_tokens, num_heads, head_dim).to(heads.dtype)


def pair_order(num_heads: int, head_dim: int, rotary_dim: int) -> torch.Tensor:
    """Which row of a weight comes at each place, so that pairs lie side by side: [num_heads * head_dim] int64.

    The rows come in the order of Hugging Face files, where dimension d of a head pairs with d + rotary_dim / 2.
    """
    within = torch.arange(head_dim)
    within[:rotary_dim] = torch.arange(rotary_dim).view(2, -1).t().reshape(-1)
    return (torch.arange(num_heads)[:, None] * head_dim + within).view(-1)


def default_frequencies(theta: float, rotary_dim: int) -> torch.Tensor:
    """theta ** (-2 i / rotary_dim): [rotary_dim / 2] float32."""
    return 1.0 / (theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim))


def llama3_frequencies(
    frequencies: torch.Tensor,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_positions: int,
) -> torch.Tensor:
    """Llama 3.1's stretching: long wavelengths are divided by `factor`, short ones kept, those between blended.

    A wavelength is long from original_max_positions / low_freq_factor on, short up to / high_freq_factor.
    """
    wavelengths = 2 * math.pi / frequencies
    long, short = original_max_positions / low_freq_factor, original_max_positions / high_freq_factor
    blend = (original_max_positions / wavelengths - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    stretched = torch.where(wavelengths > long, frequencies / factor, frequencies)
    return torch.where((wavelengths >= short) & (wavelengths <= long), blended, stretched)


def yarn_frequencies(
    theta: float,
    rotary_dim: int,
    factor: float,
    original_max_positions: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> torch.Tensor:
    """YaRN (arXiv 2309.00071): dimensions that turn more than beta_fast times in the original context are kept, those
    that turn less than beta_slow times are divided by `factor`, and a linear ramp over the dimensions lies between."""

    def dimension_of(num_turns: float) -> float:
        return rotary_dim * math.log(original_max_positions / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(beta_fast), dimension_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    span = high - low if high != low else 0.001
    kept = 1 - ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    frequencies = default_frequencies(theta, rotary_dim)
    return frequencies / factor * (1 - kept) + frequencies * kept
