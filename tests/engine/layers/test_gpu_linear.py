"""Every form of a product on a GPU gives the product; few rows and many, plain, narrowed and with fixed bits."""

from typing import Literal

import pytest
import torch
import torch.nn.functional as F

from engine.kernels.scaled_linear import quantise_rows
from engine.layers.gpu_linear import GpuProduct, choose_gpu_method
from engine.layers.linear import Linear
from streamkv.errors import ConfigError


def product(
    dtype: torch.dtype, device: torch.device, shape: tuple[int, int] = (48, 64), has_bias: bool = True, **kind: object
) -> tuple[torch.Tensor, torch.Tensor | None, GpuProduct]:
    generator = torch.Generator().manual_seed(3)
    layer = Linear(shape[1], shape[0], has_bias, dtype)
    weight = layer.allocate(device).copy_(torch.randn(shape, generator=generator))
    if layer.bias is not None:
        layer.bias.copy_(torch.randn(shape[0], generator=generator))
    bias = layer.bias
    layer.finish(choose_gpu_method(dtype, device, **kind))
    assert isinstance(layer.forward, GpuProduct)
    return weight.double(), None if bias is None else bias.double(), layer.forward


def rows(num_rows: int, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(num_rows)).to(dtype).to(device)


# Of ‖ours - reference‖ / ‖reference‖: the result is rounded once; the interpreter cuts to bfloat16.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_any_number_of_rows(dtype: torch.dtype, is_deterministic: bool, device: torch.device) -> None:
    weight, bias, ours = product(dtype, device, is_deterministic=is_deterministic)
    for num_rows in (1, ours.max_fused_rows + 1):
        x = rows(num_rows, 64, dtype, device)
        expected = F.linear(x.double(), weight, bias)
        for out_dtype in (None, torch.float32):
            out = ours(x, out_dtype)
            assert out.dtype == (out_dtype or dtype)
            assert (out.double() - expected).norm() / expected.norm() < TOLERANCE[dtype]
    assert ours(x[:0]).shape == (0, 48)
    assert ours(x[:0], torch.float32).dtype == torch.float32


def test_few_rows_have_a_fused_form(device: torch.device) -> None:
    weight, _, ours = product(torch.float32, device, has_bias=False)
    x = rows(2, 64, torch.float32, device)
    assert ours.max_fused_rows >= 2
    norm = rows(1, 64, torch.float32, device)[0]
    normed = F.rms_norm(x, (64,), norm, 1e-5).double()
    gate, up = F.linear(normed, weight).chunk(2, dim=1)
    out = ours.fused(x, norm_weight=norm, eps=1e-5, gated="silu")
    torch.testing.assert_close(out.double(), F.silu(gate) * up, rtol=1e-5, atol=1e-5)
    residual = rows(2, 48, torch.float32, device)
    expected = residual.double() + F.linear(x.double(), weight)
    assert ours.fused(x, residual=residual).data_ptr() == residual.data_ptr()
    torch.testing.assert_close(residual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("quantization", ["none", "fp8"])
@pytest.mark.parametrize("num_rows", [1, 6])
def test_a_norm_in_front_whatever_the_kernel(num_rows: int, quantization: str, device: torch.device) -> None:
    weight, _, ours = product(torch.bfloat16, device, (16, 64), quantization=quantization, has_bias=False)
    if quantization == "fp8":
        numbers, scale = quantise_rows(weight.bfloat16())
        weight = numbers.double() * scale
    x = 300 * rows(num_rows, 64, torch.bfloat16, device)
    norm = rows(1, 64, torch.bfloat16, device)[0]
    expected = F.linear(F.rms_norm(x.double(), (64,), norm.double(), 1e-5), weight)
    out = ours.fused(x, norm_weight=norm, eps=1e-5)
    assert out.dtype == torch.bfloat16
    # x is rounded after its norm and after its weight.
    assert (out.double() - expected).norm() / expected.norm() < 2e-2


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_weights_of_8_bits(is_deterministic: bool, device: torch.device) -> None:
    weight, _, ours = product(
        torch.bfloat16, device, (16, 64), quantization="fp8", is_deterministic=is_deterministic, has_bias=False
    )
    numbers, scale = quantise_rows(weight.bfloat16())
    for num_rows in (1, 5, 70):
        x = rows(num_rows, 64, torch.bfloat16, device)
        expected = x.double() @ (numbers.double() * scale).t()
        is_narrowed = not is_deterministic and num_rows > ours.max_fused_rows
        # A row that is narrowed, too, is off by less than 2**-5 in the mean.
        assert (ours(x).double() - expected).norm() / expected.norm() < (4e-2 if is_narrowed else 6e-3)
    assert ours(x[:0]).shape == (0, 16)


def test_weights_of_8_bits_of_odd_sizes_are_not_narrowed_with_their_rows(device: torch.device) -> None:
    weight, _, ours = product(torch.float16, device, (10, 40), quantization="fp8", has_bias=False)
    numbers, scale = quantise_rows(weight.half())
    x = rows(ours.max_fused_rows + 2, 40, torch.float16, device)
    expected = x.double() @ (numbers.double() * scale).t()
    assert (ours(x).double() - expected).norm() / expected.norm() < 1e-3


def test_fixed_bits_do_not_depend_on_the_rows(device: torch.device) -> None:
    _, _, ours = product(torch.float32, device, is_deterministic=True)
    x = rows(20, 64, torch.float32, device)
    assert torch.equal(ours(x[7:8]), ours(x)[7:8])
    assert ours.max_fused_rows == 0
    with pytest.raises(ValueError, match="no fused form"):
        ours.fused(x[:1])


def test_methods_say_what_they_are(device: torch.device) -> None:
    method = choose_gpu_method(torch.bfloat16, device, "fp8", is_deterministic=True)
    assert method.activation_dtype == torch.bfloat16
    assert method.name == f"float8_e4m3fn on {device}, fixed bits"


@pytest.mark.parametrize(
    ("capability", "dtype", "quantization", "wanted"),
    [
        ((8, 6), torch.float16, "fp8", "quantization: fp8 needs .* 8.9 or more, this one has 8.6; use none"),
        ((7, 5), torch.bfloat16, "none", "dtype: bfloat16 needs .* 8.0 or more, this one has 7.5; use float16"),
    ],
)
def test_numbers_that_a_gpu_does_not_have_name_their_setting(
    capability: tuple[int, int],
    dtype: torch.dtype,
    quantization: Literal["none", "fp8"],
    wanted: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(ConfigError, match=wanted):
        choose_gpu_method(dtype, torch.device("cuda"), quantization)
