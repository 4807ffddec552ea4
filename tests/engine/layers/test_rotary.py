"""Rotation of queries and keys, against the definition."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.layers.rotary import RotaryTable, default_frequencies, llama3_frequencies, pair_order, yarn_frequencies


def rotate_by_definition(x: torch.Tensor, position: int, frequencies: torch.Tensor) -> torch.Tensor:
    """x: [head_dim], halves. Each pair (d, d + n) turned by position * frequencies[d], in float64; the rest stays."""
    n = len(frequencies)
    out = x.double().clone()
    angles = position * frequencies.double()
    out[:n] = x[:n] * angles.cos() - x[n : 2 * n] * angles.sin()
    out[n : 2 * n] = x[n : 2 * n] * angles.cos() + x[:n] * angles.sin()
    return out


@pytest.mark.parametrize("rotary_dim", [16, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_turn_by_their_position(rotary_dim: int, dtype: torch.dtype) -> None:
    frequencies = default_frequencies(10000.0, rotary_dim)
    x = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    positions = torch.tensor([0, 5, 1, 63])
    order = pair_order(1, 16, rotary_dim)
    rotated = RotaryTable(frequencies).at(positions, 64)(x[..., order])
    assert rotated.dtype == dtype
    for token, position in enumerate(positions.tolist()):
        for head in range(3):
            expected = rotate_by_definition(x[token, head], position, frequencies)[order]
            # float32 angles up to 63 are off by up to 63 * 2 ** -24; bfloat16 rounds to 2 ** -8 of the result.
            error = (rotated[token, head].double() - expected).abs()
            assert (error <= 2e-5 + (dtype == torch.bfloat16) * 2**-8 * expected.abs()).all()


def test_positions_beyond_the_table_make_it_grow_and_change_nothing_else() -> None:
    frequencies = default_frequencies(10000.0, 16)
    table = RotaryTable(frequencies)
    x = torch.randn(1, 1, 16, generator=torch.Generator().manual_seed(0))
    order = pair_order(1, 16, 16)
    before = table.at(torch.tensor([17]), 18)(x)
    far = table.at(torch.tensor([5000]), 5001)(x[..., order])[0, 0]
    assert torch.equal(table.at(torch.tensor([17]), 18)(x), before)
    # float32 holds an angle of 5,000 to 5,000 * 2 ** -24.
    assert (far.double() - rotate_by_definition(x[0, 0], 5000, frequencies)[order]).abs().max() < 2e-3


def test_stretched_frequencies_equal_transformers() -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    yarn = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
    for rope in (llama3, yarn):
        rope |= {"rope_theta": 500000.0, "original_max_position_embeddings": 8192}
        config = LlamaConfig(head_dim=128, max_position_embeddings=32768, rope_parameters=rope)
        expected, _ = ROPE_INIT_FUNCTIONS[str(rope["rope_type"])](config, torch.device("cpu"))
        if rope is llama3:
            actual = llama3_frequencies(default_frequencies(500000.0, 128), 8.0, 1.0, 4.0, 8192)
        else:
            actual = yarn_frequencies(500000.0, 128, 4.0, 8192, 32.0, 1.0, truncate=True)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
