from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from engine.kernels.skinny_linear import (
    MAX_ROWS,
    SkinnyTiles,
    SplitScratch,
    choose_skinny_tiles,
    make_split_scratch,
    max_skinny_rows,
    skinny_linear,
    takes_norm,
    within_shared_memory,
)

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # NumPy's, in the interpreter

EPS = 1e-5
VECTOR = SkinnyTiles(False, 32, 64, 2)
LONG_VECTOR = SkinnyTiles(False, 16, 128, 1)
MATRIX = SkinnyTiles(True, 32, 64, 4, 3)
PARTS = SkinnyTiles(True, 32, 32, 4, 3, num_parts=3)

# Of ‖ours - reference‖ / ‖reference‖: x times the norm and the result are rounded once each, a gated product has the
# errors of two; the interpreter cuts to bfloat16 where the GPU rounds.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1.3e-2}


@dataclass(frozen=True)
class Case:
    num_rows: int
    tiles: SkinnyTiles | None
    dtype: torch.dtype = torch.bfloat16
    shape: tuple[int, int] = (40, 88)
    has_norm: bool = False
    has_bias: bool = False
    gated: str | None = None
    has_residual: bool = False
    out_dtype: torch.dtype | None = None


CASES = {
    "one-row": Case(1, VECTOR),
    "one-row-normed": Case(1, VECTOR, has_norm=True, has_bias=True),
    "one-row-gated": Case(1, LONG_VECTOR, has_norm=True, gated="silu"),
    "one-row-float32": Case(1, VECTOR, torch.float32, has_norm=True, gated="gelu", has_bias=True),
    "two-rows-residual": Case(2, VECTOR, torch.float16, has_residual=True),
    "three-rows": Case(3, LONG_VECTOR, torch.float16, has_norm=True, has_bias=True, has_residual=True),
    "four-rows-gated": Case(4, VECTOR, torch.float32, (64, 128), has_norm=True, gated="gelu_tanh"),
    "matrix": Case(5, MATRIX),
    "matrix-normed": Case(7, MATRIX, has_norm=True, has_bias=True, has_residual=True),
    "matrix-gated": Case(3, MATRIX, torch.float16, has_norm=True, has_bias=True, gated="silu"),
    "matrix-gelu": Case(17, MATRIX, torch.float32, has_norm=True, gated="gelu"),
    "matrix-whole": Case(16, MATRIX, torch.float32, (64, 128), has_residual=True),
    "parts": Case(9, PARTS, torch.float16, has_norm=True, has_residual=True),
    "parts-gated": Case(2, PARTS, torch.float32, has_norm=True, has_bias=True, gated="gelu_tanh"),
    "parts-whole": Case(40, PARTS, torch.bfloat16, (64, 96), has_norm=True),
    "logits": Case(2, VECTOR, has_norm=True, out_dtype=torch.float32),
    "logits-matrix": Case(6, MATRIX, out_dtype=torch.float32),
    "as-chosen-one": Case(1, None, has_norm=True, gated="silu"),
    "as-chosen-six": Case(6, None, has_residual=True),
}


@pytest.fixture(scope="module")
def scratch(device: torch.device) -> SplitScratch:
    return make_split_scratch(device)


def draw(*shape: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def check(case: Case, device: torch.device, scratch: SplitScratch, is_dependent: bool = False) -> None:
    (num_weight_rows, size), dtype = case.shape, case.dtype
    x = draw(case.num_rows, size, dtype=dtype, device=device, seed=0)
    weight = draw(num_weight_rows, size, dtype=dtype, device=device, seed=1)
    norm = draw(size, dtype=dtype, device=device, seed=2) if case.has_norm else None
    bias = draw(num_weight_rows, dtype=dtype, device=device, seed=3) if case.has_bias else None
    expected = x.double()
    if norm is not None:
        expected = expected / (expected.square().mean(1, keepdim=True) + EPS).sqrt() * norm.double()
    expected = F.linear(expected, weight.double(), None if bias is None else bias.double())
    if case.gated:
        gate, up = expected.chunk(2, dim=1)
        expected = (F.silu(gate) if case.gated == "silu" else F.gelu(gate, approximate=case.gated[5:] or "none")) * up
    residual = None
    if case.has_residual:
        residual = draw(case.num_rows, num_weight_rows, dtype=dtype, device=device, seed=4)
        expected += residual.double()
    out = skinny_linear(
        x, weight, bias=bias, norm_weight=norm, eps=EPS, gated=case.gated, residual=residual, out_dtype=case.out_dtype,
        scratch=scratch, tiles=case.tiles, is_dependent=is_dependent,
    )  # fmt: skip
    assert out.dtype == (case.out_dtype or dtype)
    if residual is not None:
        assert out.data_ptr() == residual.data_ptr()
    error = float((out.double() - expected).norm() / expected.norm())
    assert error < TOLERANCE[dtype], f"{error}"
    assert not scratch.arrivals.any()


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference(name: str, device: torch.device, scratch: SplitScratch) -> None:
    check(CASES[name], device, scratch)


def test_reads_and_writes_rows_of_wider_matrices(device: torch.device, scratch: SplitScratch) -> None:
    weight = draw(24, 64, dtype=torch.float32, device=device, seed=1)
    for tiles in (VECTOR, PARTS):
        wide = draw(3, 100, dtype=torch.float32, device=device, seed=0)
        out = torch.full((3, 40), 9.0, device=device)
        x = wide[:, 20:84]
        assert (
            skinny_linear(x, weight, out=out[:, 4:28], scratch=scratch, tiles=tiles).data_ptr() == out[:, 4:].data_ptr()
        )
        torch.testing.assert_close(out[:, 4:28].double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-5)
        assert (out[:, :4] == 9).all()
        assert (out[:, 28:] == 9).all()


def test_weights_of_8_bits_are_scaled_row_by_row(device: torch.device) -> None:
    x = draw(4, 80, dtype=torch.bfloat16, device=device, seed=0)
    weight = draw(40, 80, dtype=torch.float32, device=device, seed=1).to(torch.float8_e4m3fn)
    scale = draw(40, dtype=torch.float32, device=device, seed=2).abs()
    expected = x.double() @ (weight.double() * scale.double()[:, None]).t()
    for tiles in (VECTOR, MATRIX):
        out = skinny_linear(x, weight, weight_scale=scale, tiles=tiles)
        assert (out.double() - expected).norm() / expected.norm() < TOLERANCE[torch.bfloat16]


def test_without_room_for_parts_there_are_none(device: torch.device) -> None:
    x = draw(5, 96, dtype=torch.float32, device=device, seed=0)
    weight = draw(32, 96, dtype=torch.float32, device=device, seed=1)
    torch.testing.assert_close(skinny_linear(x, weight, tiles=PARTS), x @ weight.t(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"x": torch.ones(65, 16)}, "1 to 64 rows"),
        ({"x": torch.ones(0, 16)}, "1 to 64 rows"),
        ({"x": torch.ones(2, 8)}, "8 columns"),
        ({"weight": torch.ones(16, 24).t()}, "contiguous"),
        ({"x": torch.ones(16, 2).t()}, "side by side"),
        ({"weight": torch.ones(24, 16).half()}, "dtype of x"),
        ({"gated": "relu"}, "one of silu"),
        ({"gated": "silu", "residual": torch.ones(2, 12)}, "no residual"),
        ({"weight": torch.ones(25, 16), "gated": "silu"}, "even number"),
        ({"residual": torch.ones(2, 12)}, r"the result is \[2, 24\]"),
        ({"out": torch.ones(3, 24)}, r"the result is \[2, 24\]"),
    ],
)
def test_refuses_what_does_not_fit(change: dict[str, object], complaint: str, device: torch.device) -> None:
    arguments: dict[str, object] = {"x": torch.ones(2, 16), "weight": torch.ones(24, 16)} | change
    moved = {name: value.to(device) if torch.is_tensor(value) else value for name, value in arguments.items()}
    with pytest.raises(ValueError, match=complaint):
        skinny_linear(**moved)


def test_tiles_of_all_shapes_cover_them() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        for num_weight_rows, size in ((6144, 4096), (960, 576), (151936, 1024), (24, 16), (28672, 8192)):
            for num_rows in (1, 2, 3, 4) if dtype == torch.float32 else (1, 2, 3, 4, 5, 16, 33, 64):
                tiles = choose_skinny_tiles(num_rows, num_weight_rows, size, dtype)
                assert tiles.is_matrix or num_rows <= 4
                assert takes_norm(num_rows, num_weight_rows, size, dtype) != tiles.is_matrix
                assert tiles.num_parts == 1 or tiles.is_matrix
                assert 1 <= tiles.num_parts <= max(1, size // tiles.tile_k)
    assert max_skinny_rows(torch.float32) <= 4 <= max_skinny_rows(torch.bfloat16) <= MAX_ROWS


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 3, 16])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (28672, 4096), (1024, 3072), (4096, 1024)])
def test_real_shapes_and_dependent_launches(
    shape: tuple[int, int], num_rows: int, device: torch.device, scratch: SplitScratch
) -> None:
    fetching = replace(choose_skinny_tiles(num_rows, *shape, torch.bfloat16), ahead=512)
    for tiles, is_dependent in ((None, False), (None, True), (fetching, True)):
        check(Case(num_rows, tiles, shape=shape, has_norm=True, gated="silu"), device, scratch, is_dependent)
        check(Case(num_rows, tiles, shape=shape, has_residual=True), device, scratch, is_dependent)


@pytest.mark.parametrize(("shared_bytes", "num_rows", "wanted"), [(232_448, 64, 6), (101_376, 16, 5), (101_376, 64, 3)])
def test_so_many_tiles_are_under_way_as_the_card_has_room_for(shared_bytes: int, num_rows: int, wanted: int) -> None:
    tiles = SkinnyTiles(True, 64, 128, 4, 6)
    assert within_shared_memory(tiles, num_rows, 2, shared_bytes).num_stages == wanted
