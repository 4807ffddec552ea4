import pytest
import torch

from engine.kernels.scaled_linear import narrow_rows, quantise_rows, scaled_linear


def draw(*shape: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "size"), [(0, 16), (1, 24), (3, 5000)])
def test_rows_become_the_nearest_numbers_of_8_bits(
    num_rows: int, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    x = draw(num_rows, size + 8, dtype=dtype, device=device, seed=0)[:, :size]
    numbers, scale = quantise_rows(x)
    assert (numbers.dtype, numbers.shape) == (torch.float8_e4m3fn, x.shape)
    torch.testing.assert_close(scale, x.float().abs().amax(1, keepdim=True) / 448 if num_rows else scale)
    # Halves between two numbers may go either way, by the last bit of the division.
    nearest = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert int((numbers.float() != nearest.float()).sum()) <= num_rows
    error = (numbers.double() * scale - x.double()).abs()
    assert bool((error <= torch.maximum(x.double().abs() * 2**-4, scale * 2**-10) * 1.001).all())


def test_a_row_of_zeros_stays_one(device: torch.device) -> None:
    numbers, scale = quantise_rows(torch.zeros(2, 16, device=device))
    assert not numbers.float().any()
    assert bool((scale > 0).all())


def test_narrow_rows_keep_within_the_range(device: torch.device) -> None:
    x = torch.tensor([[0.1, -3.0, 1e30, -1e30, 65504.0, 1.0]], device=device).bfloat16()[:, :5]
    narrow = narrow_rows(x)
    assert narrow.dtype == torch.float16
    assert torch.equal(narrow.float(), x.float().clamp(-65504, 65504).half().float())


def test_refuses_rows_with_gaps(device: torch.device) -> None:
    with pytest.raises(ValueError, match="side by side"):
        quantise_rows(torch.ones(4, 8, device=device).t())


def test_products_of_quantised_rows(device: torch.device) -> None:
    x = draw(7, 64, dtype=torch.bfloat16, device=device, seed=0)
    weight, scale = quantise_rows(draw(48, 64, dtype=torch.bfloat16, device=device, seed=1))
    bias = draw(48, dtype=torch.bfloat16, device=device, seed=2)
    numbers, row_scale = quantise_rows(x)
    exact = (numbers.double() * row_scale) @ (weight.double() * scale).t() + bias.double()
    out = scaled_linear(x, weight, scale.flatten(), bias=bias)
    # The result is rounded before and after the bias.
    assert out.dtype == torch.bfloat16
    assert (out.double() - exact).norm() / exact.norm() < 6e-3
    assert scaled_linear(x, weight, scale.flatten(), out_dtype=torch.float32).dtype == torch.float32
    # Each number of x is off by at most 2**-4, on average by far less.
    meant = x.double() @ (weight.double() * scale).t() + bias.double()
    assert (out.double() - meant).norm() / meant.norm() < 4e-2


def test_refuses_sizes_that_the_library_does_not_take(device: torch.device) -> None:
    with pytest.raises(ValueError, match="multiples of 16"):
        scaled_linear(torch.ones(2, 24), torch.ones(16, 24).to(torch.float8_e4m3fn), torch.ones(16))
