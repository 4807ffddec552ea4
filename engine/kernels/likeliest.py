"""The likeliest tokens of a row and their log probabilities, without a sort.

The tiles' maxima are the heads of as many queues: whoever is highest is taken, and its tile looked at once more for
its next. Each token taken costs one tile, so few are cheap, whatever the logits are.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.sampling_rows import NO_KEY, TILE, key_of, load_logits, number_of


@dataclass(frozen=True, slots=True)
class TileSums:
    """Of some rows of logits."""

    maxima: torch.Tensor
    """[m, num_tiles] float32, +inf where there is a NaN."""
    sums: torch.Tensor
    """[m, num_tiles] float32: of exp(logit - the tile's maximum)."""


@dataclass(frozen=True, slots=True)
class Likeliest:
    """Where a log probability is no finite number, the lowest float32 stands for it."""

    chosen: torch.Tensor
    """[m] float32: log probabilities of the tokens that were asked for."""
    ids: torch.Tensor
    """[m, num] int32: the likeliest first, the lowest id on a tie."""
    logprobs: torch.Tensor
    """[m, num] float32."""


@triton.jit
def _sums_kernel(logits_ptr, rows_ptr, maxima_ptr, sums_ptr, logits_stride, vocab_size, TILE: tl.constexpr):
    place = tl.program_id(1)
    tile = tl.program_id(0)
    row = tl.load(rows_ptr + place).to(tl.int64)
    logits = load_logits(logits_ptr + row * logits_stride, tile * TILE + tl.arange(0, TILE), vocab_size)
    highest = tl.max(logits, axis=0)
    weights = tl.exp2((logits - tl.where(highest > -float("inf"), highest, 0.0)) * 1.4426950408889634)
    at = place * tl.num_programs(0) + tile
    tl.store(maxima_ptr + at, highest)
    tl.store(sums_ptr + at, tl.sum(weights, axis=0))


def tile_sums(logits: torch.Tensor, rows: torch.Tensor) -> TileSums:
    """logits: [n, vocab_size] float32, rows in one piece; rows: [m] int32. One pass over those rows."""
    num_tiles = triton.cdiv(logits.shape[1], TILE)
    maxima = torch.empty(len(rows), num_tiles, dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(maxima)
    if len(rows):
        _sums_kernel[num_tiles, len(rows)](
            logits, rows, maxima, sums, logits.stride(0), logits.shape[1], TILE=TILE, num_warps=4
        )
    return TileSums(maxima, sums)


@triton.jit
def _finite(values):
    """NaN and infinities become the lowest float32."""
    return tl.where(tl.abs(values) < float("inf"), values, -3.4028234663852886e38)


@triton.jit(do_not_specialize=["num"])
def _likeliest_kernel(
    logits_ptr,
    rows_ptr,
    maxima_ptr,
    own_maxima_ptr,
    own_sums_ptr,
    wanted_ids_ptr,
    chosen_ptr,
    ids_ptr,
    logprobs_ptr,
    logits_stride,
    vocab_size,
    num_tiles,
    num,
    TILE: tl.constexpr,
    TILES_PAD: tl.constexpr,
):
    place = tl.program_id(0)
    row_ptr = logits_ptr + tl.load(rows_ptr + place).to(tl.int64) * logits_stride
    tiles = tl.arange(0, TILES_PAD)
    is_tile = tiles < num_tiles
    own_maxima = tl.load(own_maxima_ptr + place * num_tiles + tiles, mask=is_tile, other=-float("inf"))
    own_sums = tl.load(own_sums_ptr + place * num_tiles + tiles, mask=is_tile, other=0.0)
    top = tl.max(own_maxima, axis=0)
    masses = own_sums * tl.exp2((own_maxima - top) * 1.4426950408889634)
    log_sum = top + tl.log(tl.sum(masses.to(tl.float64), axis=0).to(tl.float32))

    wanted_id = tl.maximum(tl.load(wanted_ids_ptr + place), 0)
    tl.store(chosen_ptr + place, _finite(tl.load(row_ptr + wanted_id) - log_sum))

    heads = tl.load(maxima_ptr + place * num_tiles + tiles, mask=is_tile, other=-float("inf"))
    # +0 and -0 are one number; what is no tile is under every number.
    heads = tl.where(is_tile, key_of(tl.where(heads == 0.0, 0.0, heads)), NO_KEY)
    last_key = tl.max(heads, axis=0)
    last_id = tl.full([], -1, tl.int32)
    for i in range(num):
        key = tl.max(heads, axis=0)
        tile = tl.min(tl.where(heads == key, tiles, TILES_PAD), axis=0)
        ids = tile * TILE + tl.arange(0, TILE)
        logits = load_logits(row_ptr, ids, vocab_size)
        keys = key_of(tl.where(logits == 0.0, 0.0, logits))
        # Those before the last one, in this order, are taken.
        is_left = (keys < last_key) | ((keys == last_key) & (ids > last_id))
        keys = tl.where(is_left & (ids < vocab_size), keys, NO_KEY)
        token_id = tl.min(tl.where(keys == key, ids, vocab_size - 1), axis=0)
        heads = tl.where(tiles == tile, tl.max(tl.where(ids == token_id, NO_KEY, keys), axis=0), heads)
        tl.store(ids_ptr + place * num + i, token_id)
        tl.store(logprobs_ptr + place * num + i, _finite(number_of(key) - log_sum))
        last_key = key
        last_id = token_id


def likeliest(
    logits: torch.Tensor,
    rows: torch.Tensor,
    maxima: torch.Tensor,
    own: TileSums,
    wanted_ids: torch.Tensor,
    num: int,
) -> Likeliest:
    """Of each row the `num` likeliest tokens, or all if those are fewer, and the token that is asked for.

    logits: [n, vocab_size] float32, rows in one piece; rows: [m] int32; maxima: [m, num_tiles], those of these rows.
    own: of the model's own logits of these rows, to whose softmax the log probabilities belong; logits may be changed
        ones. wanted_ids: [m] int32; under 0 is read as 0.
    One program for each row, which looks at a tile for each token.
    """
    num = min(num, logits.shape[1])
    num_tiles = maxima.shape[1]
    found = Likeliest(
        torch.empty(len(rows), dtype=torch.float32, device=logits.device),
        torch.empty(len(rows), num, dtype=torch.int32, device=logits.device),
        torch.empty(len(rows), num, dtype=torch.float32, device=logits.device),
    )
    if len(rows):
        _likeliest_kernel[(len(rows),)](
            logits,
            rows,
            maxima,
            own.maxima,
            own.sums,
            wanted_ids,
            found.chosen,
            found.ids,
            found.logprobs,
            logits.stride(0),
            logits.shape[1],
            num_tiles,
            num,
            TILE=TILE,
            TILES_PAD=triton.next_power_of_2(num_tiles),
            num_warps=4,
        )
    return found
