"""RMSNorm, in the rounding order of transformers."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from engine.layers.norm import RMSNorm


@pytest.mark.parametrize("shape", [(1, 72), (5, 72), (4, 3, 72)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_equals_transformers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(shape, generator=generator)).to(dtype)
    reference = LlamaRMSNorm(72, eps=1e-5).to(dtype)
    norm = RMSNorm(72, 1e-5, dtype)
    weight = (1 + torch.randn(72, generator=generator)).to(dtype)
    norm.allocate().copy_(weight)
    reference.weight.data.copy_(weight)
    with torch.no_grad():
        expected = reference(x)
    assert norm(x).dtype == dtype
    if dtype == torch.bfloat16:
        # Equal but where the float32 value lies on the border of two roundings.
        assert (norm(x) != expected).float().mean() < 0.01
    torch.testing.assert_close(norm(x), expected, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
