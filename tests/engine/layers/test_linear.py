"""Every way to compute a product gives the product."""

import pytest
import torch
import torch.nn.functional as F

from engine.layers import linear
from engine.layers.linear import (
    Linear,
    LinearMethod,
    PackedMethod,
    PlainMethod,
    SplitMethod,
    UpcastMethod,
    choose_cpu_method,
)

NUM_TOKENS = [1, 2, 3, 7, 33, 128]


def finished(weight: torch.Tensor, bias: torch.Tensor | None, method: LinearMethod) -> Linear:
    layer = Linear(weight.shape[1], weight.shape[0], bias is not None, weight.dtype)
    layer.allocate().copy_(weight)
    if bias is not None and layer.bias is not None:
        layer.bias.copy_(bias)
    layer.finish(method)
    assert layer.weight is None
    return layer


def random_layer(dtype: torch.dtype, has_bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(70, 48, generator=generator).to(dtype)
    return weight, torch.randn(70, generator=generator).to(dtype) if has_bias else None


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_float32_is_float32_for_any_number_of_tokens(num_tokens: int, has_bias: bool) -> None:
    weight, bias = random_layer(torch.float32, has_bias)
    x = torch.randn(num_tokens, 48, generator=torch.Generator().manual_seed(num_tokens))
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    for method in (PlainMethod(torch.float32), choose_cpu_method(torch.float32, 1000)):
        y = finished(weight, bias, method)(x)
        assert y.dtype == torch.float32
        # 48 products of size about 1: far below what a detour over bfloat16 (2 ** -9) or tf32 (2 ** -11) would cost.
        assert (y - expected).abs().max() < 1e-5


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_give_products_at_least_as_exact_as_their_dtype(
    dtype: torch.dtype, num_tokens: int, has_bias: bool
) -> None:
    weight, bias = random_layer(dtype, has_bias)
    x = torch.randn(num_tokens, 48, generator=torch.Generator().manual_seed(num_tokens))
    expected = F.linear(x, weight.float(), None if bias is None else bias.float())
    # Rounding the input and the output once each, with a margin of 2.
    allowed = 4 * torch.finfo(dtype).eps * F.linear(x.abs(), weight.float().abs()).max()
    for method in (SplitMethod(dtype, 2), UpcastMethod(2), PackedMethod(torch.float32), choose_cpu_method(dtype, 1000)):
        y = finished(weight, bias, method)(x)
        assert y.dtype == method.activation_dtype == torch.float32
        assert (y - expected).abs().max() < allowed


def test_float16_never_rounds_activations_to_its_small_range() -> None:
    weight = torch.full((8, 8), 0.5, dtype=torch.float16)
    layer = finished(weight, None, choose_cpu_method(torch.float16, 1000))
    for num_tokens in (1, 8):
        assert torch.equal(layer(torch.full((num_tokens, 8), 1e6)), torch.full((num_tokens, 8), 4e6))


def test_narrow_weights_are_not_packed_a_second_time_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "available_memory_bytes", lambda: 10_000)
    assert isinstance(choose_cpu_method(torch.float16, 1_000_000), UpcastMethod)
    assert not isinstance(choose_cpu_method(torch.float16, 1_000), UpcastMethod)


@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="needs a CPU with bfloat16 instructions")
def test_bfloat16_is_packed_as_it_is_where_the_cpu_can_multiply_it() -> None:
    method = choose_cpu_method(torch.bfloat16, 1000)
    assert isinstance(method, PackedMethod)
    assert method.dtype == torch.bfloat16
