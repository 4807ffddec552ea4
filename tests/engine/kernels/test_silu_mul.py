from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from engine.kernels.silu_mul import gelu_mul, silu_mul

KINDS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "silu": (silu_mul, F.silu),
    "gelu": (lambda x: gelu_mul(x, tanh=False), F.gelu),
    "gelu_tanh": (lambda x: gelu_mul(x, tanh=True), lambda gate: F.gelu(gate, approximate="tanh")),
}
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # NumPy's, in the interpreter

# Two roundings to the dtype, cuts in the interpreter's bfloat16; in float32 the exponential's error.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_rows", "size"), [(0, 8), (1, 24), (2, 1100)])
def test_multiplies_the_activated_gate(
    kind: str, dtype: torch.dtype, num_rows: int, size: int, device: torch.device
) -> None:
    ours, activation = KINDS[kind]
    gate_up = (4 * torch.randn(num_rows, 2 * size, generator=torch.Generator().manual_seed(0))).to(dtype).to(device)
    gate, up = gate_up.double().chunk(2, dim=1)
    out = ours(gate_up)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), activation(gate) * up, rtol=TOLERANCE[dtype], atol=2e-6)


def test_large_gates_neither_overflow_nor_vanish(device: torch.device) -> None:
    gate = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4])
    gate_up = torch.cat((gate, torch.full((5,), 2.0)))[None].to(device)
    for kind in KINDS.values():
        torch.testing.assert_close(kind[0](gate_up)[0].cpu(), torch.tensor([0.0, 0.0, 0.0, 200.0, 2e4]))


def test_writes_to_a_given_tensor(device: torch.device) -> None:
    gate_up = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).to(device)
    out = torch.full((2, 40), 9.0, device=device)
    assert silu_mul(gate_up, out=out[:, 4:36]).data_ptr() == out[:, 4:].data_ptr()
    torch.testing.assert_close(out[:, 4:36], silu_mul(gate_up))
    assert (out[:, :4] == 9).all()
    assert (out[:, 36:] == 9).all()
