from dataclasses import dataclass, replace

import pytest
import torch

from engine.kernels.rope_kv_write import rope_kv_write

BLOCK_SIZE = 4
NUM_BLOCKS = 9
EPS = 1e-6


@dataclass
class Step:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    turns: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor


def make_step(
    dtype: torch.dtype,
    device: torch.device,
    num_tokens: int = 7,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    rotary_dim: int = 64,
    cache_dtype: torch.dtype | None = None,
) -> Step:
    generator = torch.Generator().manual_seed(0)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    heads = torch.randn(num_tokens, width, generator=generator).to(dtype).to(device).view(num_tokens, -1, head_dim)
    angles = torch.arange(40)[:, None] * 10000 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    turns = 1.25 * torch.cat((angles.cos(), angles.sin()), dim=1)  # an amplitude, as yarn has
    cache_shape = (NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim)
    return Step(
        query=heads[:, :num_heads],
        key=heads[:, num_heads : num_heads + num_kv_heads],
        value=heads[:, num_heads + num_kv_heads :],
        turns=turns.float().to(device),
        positions=torch.randint(0, 40, (num_tokens,), generator=generator).to(device),
        slots=torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=generator)[:num_tokens].to(device),
        key_cache=torch.full(cache_shape, 3.0, device=device).to(cache_dtype or dtype),
        value_cache=torch.full(cache_shape, 3.0, device=device).to(cache_dtype or dtype),
    )


def turned(x: torch.Tensor, step: Step, pairs_side_by_side: bool, norm: torch.Tensor | None = None) -> torch.Tensor:
    """x: [num_tokens, heads, head_dim] → float64, one pair of dimensions at a time."""
    x = x.double()
    if norm is not None:
        x = x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
    half = step.turns.shape[1] // 2
    out = x.clone()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if pairs_side_by_side else (i, i + half)
        cos, sin = step.turns.double()[step.positions][:, [i, half + i]].unbind(1)
        out[..., a] = x[..., a] * cos[:, None] - x[..., b] * sin[:, None]
        out[..., b] = x[..., b] * cos[:, None] + x[..., a] * sin[:, None]
    return out


# One rounding, or three with a norm; the sums are of numbers up to 5.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 6e-3, torch.bfloat16: 5e-2}


@pytest.mark.parametrize(
    ("dtype", "pairs_side_by_side", "head_dim", "rotary_dim", "has_norm"),
    [
        (torch.float32, False, 64, 64, False),
        (torch.float32, True, 80, 80, True),
        (torch.float16, True, 64, 64, False),
        (torch.float16, False, 96, 24, True),
        (torch.bfloat16, False, 64, 64, True),
        (torch.bfloat16, True, 96, 24, False),
    ],
)
def test_turns_in_place_and_writes_the_cache(
    dtype: torch.dtype,
    pairs_side_by_side: bool,
    head_dim: int,
    rotary_dim: int,
    has_norm: bool,
    device: torch.device,
) -> None:
    step = make_step(dtype, device, head_dim=head_dim, rotary_dim=rotary_dim)
    generator = torch.Generator().manual_seed(1)
    norms = [(1 + 0.1 * torch.randn(head_dim, generator=generator)).to(dtype).to(device) for _ in range(2)]
    query_norm, key_norm = norms if has_norm else (None, None)
    query = turned(step.query, step, pairs_side_by_side, query_norm)
    key = turned(step.key, step, pairs_side_by_side, key_norm)
    value = step.value.clone()
    rope_kv_write(
        step.query, step.key, step.value, step.turns, step.positions, step.slots, step.key_cache, step.value_cache,
        pairs_side_by_side=pairs_side_by_side, query_norm=query_norm, key_norm=key_norm, eps=EPS,
    )  # fmt: skip
    tolerance = TOLERANCE[dtype] * (2 if has_norm else 1)
    torch.testing.assert_close(step.query.double(), query, rtol=0, atol=tolerance)
    torch.testing.assert_close(step.key.double(), key, rtol=0, atol=tolerance)
    assert torch.equal(step.value, value)
    keys, values = step.key_cache.flatten(0, 1), step.value_cache.flatten(0, 1)
    assert torch.equal(keys[step.slots], step.key)
    assert torch.equal(values[step.slots], value)
    untouched = torch.ones(len(keys), dtype=torch.bool)
    untouched[step.slots.cpu()] = False
    assert (keys[untouched.to(device)] == 3).all()
    assert (values[untouched.to(device)] == 3).all()


def test_a_float8_cache_holds_values_over_their_scales(device: torch.device) -> None:
    step = make_step(torch.float16, device, num_tokens=3, num_kv_heads=3, cache_dtype=torch.float8_e4m3fn)
    key_scale = torch.tensor([0.25, 1.0, 4.0], device=device)
    value_scale = torch.tensor([0.5, 2.0, 1.0], device=device)
    step.positions.zero_()  # nothing turns, so that the numbers stay such as float8 holds
    step.turns.div_(1.25)
    whole = torch.randint(-15, 16, step.key.shape, generator=torch.Generator().manual_seed(1)).to(device)
    step.key.copy_(whole * key_scale[:, None])
    step.value.copy_(whole * value_scale[:, None])
    rope_kv_write(
        step.query, step.key, step.value, step.turns, step.positions, step.slots, step.key_cache, step.value_cache,
        pairs_side_by_side=False, key_scale=key_scale, value_scale=value_scale,
    )  # fmt: skip
    assert torch.equal(step.key_cache.flatten(0, 1)[step.slots].float(), whole.float())
    assert torch.equal(step.value_cache.flatten(0, 1)[step.slots].float(), whole.float())


@pytest.mark.gpu  # the interpreter rounds to float8 in its own way
def test_a_float8_cache_rounds_to_nearest_and_cuts_at_its_end(device: torch.device) -> None:
    step = make_step(torch.float16, device, num_kv_heads=5, cache_dtype=torch.float8_e4m3fn)
    scale = torch.tensor([0.01, 0.5, 1.0, 2.0, 1e-5], device=device)  # the last: all is cut at the largest number
    rope_kv_write(
        step.query, step.key, step.value, step.turns, step.positions, step.slots, step.key_cache, step.value_cache,
        pairs_side_by_side=False, key_scale=scale, value_scale=scale,
    )  # fmt: skip
    for cache, written in ((step.key_cache, step.key), (step.value_cache, step.value)):
        expected = (written.float() / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(cache.flatten(0, 1)[step.slots].float(), expected.float())


def test_many_heads_and_one_token(device: torch.device) -> None:
    step = make_step(torch.float32, device, num_tokens=1, num_heads=33, num_kv_heads=11, head_dim=32, rotary_dim=32)
    expected = turned(step.query, step, False)
    rope_kv_write(
        step.query, step.key, step.value, step.turns, step.positions, step.slots, step.key_cache, step.value_cache,
        pairs_side_by_side=False,
    )  # fmt: skip
    torch.testing.assert_close(step.query.double(), expected, rtol=0, atol=2e-6)


def test_refuses_what_does_not_fit_together(device: torch.device) -> None:
    step = make_step(torch.float32, device)
    for wrong, words in (
        (replace(step, query=step.query.transpose(0, 1).contiguous().transpose(0, 1)), "side by side"),
        (replace(step, turns=step.turns[:, :63]), "turns"),
        (replace(step, key_cache=step.key_cache[:, :, :1]), "caches"),
        (replace(step, key_cache=step.key_cache.to(torch.float8_e4m3fn)), "float8"),
    ):
        with pytest.raises(ValueError, match=words):
            rope_kv_write(
                wrong.query, wrong.key, wrong.value, wrong.turns, wrong.positions, wrong.slots, wrong.key_cache,
                wrong.value_cache, pairs_side_by_side=True,
            )  # fmt: skip
