import pytest
import torch

from engine.kernels.rms_norm import rms_norm

EPS = 1e-5


def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def draw(*shape: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


# Two roundings to the dtype, of half a unit in the last place each, except that the interpreter cuts to bfloat16 where
# the GPU rounds; float32 has the order of the sum.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1.5e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_rows", "size"), [(0, 64), (1, 24), (3, 64), (5, 960), (2, 4096)])
def test_normalises_each_row(num_rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    x = draw(num_rows, size, dtype=dtype, device=device, seed=0)
    weight = draw(size, dtype=dtype, device=device, seed=1)
    normalised = rms_norm(x, weight, EPS)
    assert normalised.dtype == dtype
    torch.testing.assert_close(normalised.double(), reference(x, weight), rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_residual_takes_the_sum_that_is_normalised(
    dtype: torch.dtype, device: torch.device, is_interpreted: bool
) -> None:
    x = draw(7, 320, dtype=dtype, device=device, seed=0)
    residual = draw(7, 320, dtype=dtype, device=device, seed=1)
    weight = draw(320, dtype=dtype, device=device, seed=2)
    total = x + residual
    normalised = rms_norm(x, weight, EPS, residual=residual)
    cut = 2**-7 if is_interpreted and dtype == torch.bfloat16 else 0
    torch.testing.assert_close(residual, total, rtol=cut, atol=0)
    torch.testing.assert_close(normalised.double(), reference(residual, weight), rtol=TOLERANCE[dtype], atol=1e-6)


def test_rounds_as_transformers_llama_does(device: torch.device) -> None:
    x = draw(4, 256, dtype=torch.float16, device=device, seed=0)
    weight = draw(256, dtype=torch.float16, device=device, seed=1)
    wide = x.float()
    normalised = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).half()
    difference = rms_norm(x, weight, EPS) - weight * normalised
    # The sum's order may turn one rounding; all others must agree to the bit.
    assert (difference != 0).sum() <= 4


def test_reads_rows_of_a_wider_matrix_and_writes_in_place(device: torch.device) -> None:
    wide = draw(6, 100, dtype=torch.float32, device=device, seed=0)
    weight = draw(48, dtype=torch.float32, device=device, seed=1)
    before = wide.clone()
    part = wide[:, 20:68]
    rms_norm(part, weight, EPS, out=part)
    torch.testing.assert_close(part.double(), reference(before[:, 20:68], weight), rtol=1e-5, atol=1e-6)
    assert torch.equal(wide[:, :20], before[:, :20])
    assert torch.equal(wide[:, 68:], before[:, 68:])


def test_refuses_rows_with_gaps(device: torch.device) -> None:
    x = draw(4, 8, dtype=torch.float32, device=device, seed=0)
    with pytest.raises(ValueError, match="side by side"):
        rms_norm(x.t(), torch.ones(4, device=device), EPS)
