"""The linear layer, and how its product is computed on this machine.

A `Linear` is filled tensor by tensor and then finished with a `LinearMethod`, which turns its weight into a `Product`:
the form that is fastest here. Another device brings another method. Measured on a Zen 3 with 2 threads (AVX2, no
avx512_bf16), all products of a 135 M parameter model, ms for 1 / 8 / 32 / 128 tokens:

    float32, as it comes          41 / 89 / 109 / 372      bfloat16, as it comes    16 / 116 / 510 / 1870
    float32, packed by oneDNN     26 / 36 / 82 / 265       bfloat16, packed         needs AVX-512

So bfloat16 weights without the instructions for them are read as they are for one token, which is bound by the memory's
bandwidth, and as packed float32 for more, which is bound by arithmetic.
"""

import time
from collections.abc import Callable
from typing import Final, Protocol

import torch
import torch.nn.functional as F

from engine.memory import available_memory_bytes

Product = Callable[[torch.Tensor], torch.Tensor]
"""[num_tokens, in_features] → [num_tokens, out_features], bias added, in the activations' dtype."""

_PACK_ROWS: Final = 32
"""oneDNN lays weights out for a number of tokens; the layout for 32 was the best or near it for 1 to 256."""
_MEASURED_TURNS: Final = 12
_PACKED_SHARE: Final = 0.7
"""Of the free memory, how much a second, packed copy of narrow weights may take."""


class LinearMethod(Protocol):
    """How products are computed: chosen once for a model, by what the machine can do."""

    name: str
    """For the log."""
    activation_dtype: torch.dtype
    """Dtype of what flows between the layers, products included."""

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        """weight: [out_features, in_features], bias: [out_features], in the model's dtype. May keep them or not."""
        ...


class Linear:
    """y = x @ weight.T + bias. Unusable until `finish`."""

    def __init__(self, in_features: int, out_features: int, has_bias: bool, dtype: torch.dtype) -> None:
        self.in_features = in_features
        self.out_features = out_features
        self.has_bias = has_bias
        self.dtype = dtype
        self.weight: torch.Tensor | None = None
        """[out_features, in_features] between `allocate` and `finish`."""
        self.bias: torch.Tensor | None = None

    def allocate(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Make room for weight and bias, late, so that only one layer's wait for their final form at a time."""
        self.weight = torch.empty(self.out_features, self.in_features, dtype=self.dtype, device=device)
        if self.has_bias:
            self.bias = torch.empty(self.out_features, dtype=self.dtype, device=device)
        return self.weight

    def finish(self, method: LinearMethod) -> None:
        """Take the filled weights into the form that `method` computes with; the plain ones go if it needs them not."""
        assert self.weight is not None
        self.forward: Product = method.make(self.weight, self.bias)
        self.weight = self.bias = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, in_features], contiguous, in the activations' dtype; num_tokens at least 1."""
        return self.forward(x)


class PlainMethod:
    """PyTorch's own product on the weights as they come: any device, any dtype."""

    name = "plain"

    def __init__(self, dtype: torch.dtype) -> None:
        self.activation_dtype = dtype

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        def product(x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, weight, bias)

        return product


class PackedMethod:
    """oneDNN on weights laid out for it once. float32 anywhere, bfloat16 where the CPU has instructions for it."""

    def __init__(self, dtype: torch.dtype) -> None:
        """dtype: what the products are computed in; the weights are converted to it. Activations are float32."""
        self.name = f"packed {dtype}".replace("torch.", "")
        self.dtype = dtype
        self.activation_dtype = torch.float32

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        linear = torch.ops.mkldnn._linear_pointwise
        dtype = self.dtype
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), _PACK_ROWS)
        bias = None if bias is None else bias.to(dtype)
        if dtype == torch.float32:

            def product(x: torch.Tensor) -> torch.Tensor:
                return linear(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]

        else:

            def product(x: torch.Tensor) -> torch.Tensor:
                return linear(x.to(dtype), packed, bias, "none", [], "").float()  # type: ignore[no-any-return]

        return product


class SplitMethod:
    """The weights twice: as they come, read for few tokens, and packed in float32 for more. Activations are float32."""

    activation_dtype = torch.float32

    def __init__(self, dtype: torch.dtype, max_plain_tokens: int) -> None:
        """max_plain_tokens: up to so many tokens the plain weights are faster."""
        self.name = f"{dtype} for {max_plain_tokens}, packed float32 for more tokens".replace("torch.", "")
        self.max_plain_tokens = max_plain_tokens
        self.packed = PackedMethod(torch.float32)

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        for_many = self.packed.make(weight, bias)
        max_plain_tokens = self.max_plain_tokens
        dtype = weight.dtype

        def product(x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] > max_plain_tokens:
                return for_many(x)
            return F.linear(x.to(dtype), weight, bias).float()

        return product


class UpcastMethod:
    """Narrow weights, converted to float32 at every use: slow, but the smallest in memory. Activations are float32."""

    name = "narrow weights, converted at every use"
    activation_dtype = torch.float32

    def __init__(self, max_plain_tokens: int) -> None:
        self.max_plain_tokens = max_plain_tokens

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        wide_bias = None if bias is None else bias.float()
        max_plain_tokens = self.max_plain_tokens
        dtype = weight.dtype

        def product(x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] > max_plain_tokens:
                return F.linear(x, weight.float(), wide_bias)
            return F.linear(x.to(dtype), weight, bias).float()

        return product


def choose_cpu_method(dtype: torch.dtype, num_weights: int) -> LinearMethod:
    """The fastest way that computes honestly in `dtype` and fits in memory.

    num_weights: elements of all weights. float32 is float32 throughout; float16 and bfloat16 round the weights, and
    what is computed from them is at least that precise. Takes some 0.2 s of measuring where that must decide.
    """
    can_pack = _has_onednn()
    if dtype == torch.float32:
        return PackedMethod(dtype) if can_pack else PlainMethod(dtype)
    if dtype == torch.bfloat16 and can_pack and torch.cpu._is_avx512_bf16_supported():
        return PackedMethod(dtype)
    # float16's range is too small to round the activations of every model to it, so its products are all float32.
    max_plain_tokens = _measure_max_plain_tokens(dtype) if dtype == torch.bfloat16 else 0
    available_bytes = available_memory_bytes()
    has_room = available_bytes is None or 4 * num_weights <= _PACKED_SHARE * available_bytes
    if not (can_pack and has_room):
        return UpcastMethod(max_plain_tokens)
    return SplitMethod(dtype, max_plain_tokens) if max_plain_tokens else PackedMethod(torch.float32)


def _measure_max_plain_tokens(dtype: torch.dtype) -> int:
    """For how many tokens, 0 to 4, a product with plain weights of `dtype` is faster than one with float32 weights.

    The weights are of a size that no cache holds, as a model's are.
    """
    plain = torch.ones(4096, 4096, dtype=dtype)
    narrow = PlainMethod(dtype).make(plain, None)
    wide = PackedMethod(torch.float32).make(plain, None) if _has_onednn() else UpcastMethod(0).make(plain, None)
    for num_tokens in range(1, 5):
        x = torch.ones(num_tokens, 4096)
        narrow_x = x.to(dtype)
        # In turns, and the best of each: what else the machine is doing should not decide this.
        times = [(_time_s(narrow, narrow_x), _time_s(wide, x)) for _ in range(_MEASURED_TURNS)]
        if min(plain_s for plain_s, _ in times) > min(wide_s for _, wide_s in times):
            return num_tokens - 1
    return 4


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def _time_s(product: Product, x: torch.Tensor) -> float:
    start = time.perf_counter()
    product(x)
    return time.perf_counter() - start
