import pytest
import torch

from engine.kernels.fixed_linear import fixed_linear
from engine.kernels.skinny_linear import SplitScratch, make_split_scratch

# Of ‖ours - reference‖ / ‖reference‖: the result is rounded once; the interpreter cuts to bfloat16.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


@pytest.fixture(scope="module")
def scratch(device: torch.device) -> SplitScratch:
    return make_split_scratch(device)


def draw(*shape: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_agrees_with_the_reference(dtype: torch.dtype, device: torch.device, scratch: SplitScratch) -> None:
    for num_rows, shape in ((0, (40, 24)), (3, (70, 1100))):
        x = draw(num_rows, shape[1] + 8, dtype=dtype, device=device, seed=0)[:, :-8]
        weight = draw(*shape, dtype=dtype, device=device, seed=1)
        bias = draw(shape[0], dtype=dtype, device=device, seed=2)
        expected = x.double() @ weight.double().t() + bias.double()
        out = fixed_linear(x, weight, bias=bias, scratch=scratch)
        assert out.dtype == dtype
        assert num_rows == 0 or (out.double() - expected).norm() / expected.norm() < TOLERANCE[dtype]
    assert fixed_linear(x, weight, out_dtype=torch.float32).dtype == torch.float32
    assert not scratch.arrivals.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_beside_any_others(
    dtype: torch.dtype, device: torch.device, scratch: SplitScratch
) -> None:
    # 1,100 columns are two parts, which few rows share among programs and more do not.
    x = draw(66, 1100, dtype=dtype, device=device, seed=0)
    weight = draw(40, 1100, dtype=dtype, device=device, seed=1)
    whole = fixed_linear(x, weight, scratch=scratch)
    for first, end in ((0, 1), (5, 9), (65, 66)):
        assert torch.equal(fixed_linear(x[first:end], weight, scratch=scratch), whole[first:end])
    assert torch.equal(fixed_linear(x[5:7], weight), whole[5:7])
    assert not scratch.arrivals.any()


def test_weights_of_8_bits_are_scaled_row_by_row(device: torch.device) -> None:
    x = draw(2, 144, dtype=torch.bfloat16, device=device, seed=0)
    weight = draw(40, 144, dtype=torch.float32, device=device, seed=1).to(torch.float8_e4m3fn)
    scale = draw(40, dtype=torch.float32, device=device, seed=2).abs()
    expected = x.double() @ (weight.double() * scale.double()[:, None]).t()
    out = fixed_linear(x, weight, weight_scale=scale)
    assert (out.double() - expected).norm() / expected.norm() < TOLERANCE[torch.bfloat16]


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    x = torch.ones(4, 8, device=device)
    with pytest.raises(ValueError, match="8 columns"):
        fixed_linear(x, torch.ones(4, 16, device=device))
    with pytest.raises(ValueError, match="contiguous"):
        fixed_linear(x, torch.ones(8, 4, device=device).t())
    with pytest.raises(ValueError, match="side by side"):
        fixed_linear(x.t(), torch.ones(8, 4, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (1024, 3072), (1000, 1040)])
def test_real_shapes_keep_their_bits(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, scratch: SplitScratch
) -> None:
    x = draw(600, shape[1], dtype=dtype, device=device, seed=0)
    weight = draw(*shape, dtype=dtype, device=device, seed=1)
    whole = fixed_linear(x, weight, scratch=scratch)
    expected = x.double() @ weight.double().t()
    assert (whole.double() - expected).norm() / expected.norm() < TOLERANCE[dtype]
    for first, end in ((0, 1), (3, 20), (77, 141), (130, 300), (1, 600)):
        assert torch.equal(fixed_linear(x[first:end], weight, scratch=scratch), whole[first:end])
        assert torch.equal(fixed_linear(x[first:end], weight), whole[first:end])
