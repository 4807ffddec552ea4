"""Logits → the next token of each row, as engine/execution/sampler.py defines it: no host sync, no sort.

A program looks at some tiles of a row and leaves their maxima and sums; the last to arrive has them all, and a greedy
row or one without filters gets its token from them, with one more look at the tile that wins the draw. What has
filters goes on in sampling_filters.py. Nothing of a row depends on another row, nor on how many there are: tiles are of
one size, sums are taken in a fixed order.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.sampling_filters import filter_rows
from engine.kernels.sampling_rows import (
    NUM_SETTINGS,
    TILE,
    SamplingScratch,
    cut_where,
    has_filters_of,
    key_of,
    load_logits,
    min_p_of,
    number_of,
    scale_of,
    settings_at,
    token_at,
    top_k_of,
    top_p_of,
)

FEW_ROWS = 16
"""Up to here a program has one tile, so that one row is spread over the device; beyond it has several."""
_TILES_OF_MANY = 4


@triton.jit
def _lowest_kept(maxima, top, total, settings_ptr, scale, vocab_size, num_tiles):
    """A logit that no token is under that the filters keep and that has a chance to be drawn.

    min_p says so itself; of top_k it is the k-th largest of the tiles' maxima; what top_p drops under it is less than
    1 - top_p of all, however many there are. All with some slack for rounding.
    """
    top_k = top_k_of(settings_ptr)
    top_p = top_p_of(settings_ptr)
    min_p = min_p_of(settings_ptr)
    slack = 1e-5 * tl.abs(top)
    # A weight of 2**-40 is nothing beside the likeliest token's.
    octaves = tl.zeros([], tl.float32) - 40.0
    if min_p > 0.0:
        octaves = tl.maximum(octaves, tl.log2(min_p) - 2e-3)
    elif top_k == 0:
        share = (1.0 - top_p) * total / vocab_size
        if share > 0.0:
            octaves = tl.maximum(octaves, tl.log2(share.to(tl.float32)) - 2e-3)
    lowest = top + octaves / scale - slack
    if top_k > 0:
        has_number = maxima > -float("inf")
        if tl.sum(has_number.to(tl.int32), axis=0) >= top_k:
            kth, _ = cut_where(key_of(maxima), has_number.to(tl.int32), has_number, top_k)
            lowest = tl.maximum(lowest, number_of(kth))
    return lowest


@triton.jit
def _sample_kernel(
    logits_ptr,
    seq_slots_ptr,
    positions_ptr,
    settings_ptr,
    token_ids_ptr,
    last_tokens_ptr,
    maxima_ptr,
    sums_ptr,
    firsts_ptr,
    arrivals_ptr,
    bounds_ptr,
    list_sizes_ptr,
    logits_stride,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    TILES_PAD: tl.constexpr,
    TILES_OF_PROGRAM: tl.constexpr,
):
    row = tl.program_id(1)
    seq_slot = tl.load(seq_slots_ptr + row)
    if seq_slot < 0:
        return
    settings_ptr = settings_at(settings_ptr, seq_slot)
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    scale = scale_of(settings_ptr)
    tiles_at = row * num_tiles
    first_tile = tl.program_id(0) * TILES_OF_PROGRAM
    for tile in range(first_tile, tl.minimum(first_tile + TILES_OF_PROGRAM, num_tiles)):
        ids = tile * TILE + tl.arange(0, TILE)
        logits = load_logits(row_ptr, ids, vocab_size)
        highest = tl.max(logits, axis=0)
        tl.store(maxima_ptr + tiles_at + tile, highest)
        if scale == 0.0:
            first = tl.min(tl.where(logits == highest, ids, vocab_size), axis=0)
            tl.store(firsts_ptr + tiles_at + tile, first)
        else:
            # Where all is banned the difference would be no number.
            weights = tl.exp2((logits - tl.where(highest > -float("inf"), highest, 0.0)) * scale)
            tl.store(sums_ptr + tiles_at + tile, tl.sum(weights, axis=0))
    # All threads' stores come before the one thread's release.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel")
    if arrived == tl.num_programs(0) - 1:
        tl.store(arrivals_ptr + row, 0)
        tiles = tl.arange(0, TILES_PAD)
        is_tile = tiles < num_tiles
        # Past the first-level cache, which does not see what other processors wrote.
        maxima = tl.load(maxima_ptr + tiles_at + tiles, mask=is_tile, other=-float("inf"), cache_modifier=".cg")
        top = tl.max(maxima, axis=0)
        token_id = tl.full([], -1, tl.int32)
        is_done = True
        if (top > -float("inf")) & (top < float("inf")):
            if scale == 0.0:
                best = tl.min(tl.where(maxima == top, tiles, num_tiles - 1), axis=0)
                token_id = tl.load(firsts_ptr + tiles_at + best, cache_modifier=".cg")
            else:
                sums = tl.load(sums_ptr + tiles_at + tiles, mask=is_tile, other=0.0, cache_modifier=".cg")
                masses = (sums * tl.exp2((maxima - top) * scale)).to(tl.float64)
                if has_filters_of(settings_ptr):
                    is_done = False
                    total = tl.sum(masses, axis=0)
                    lowest = _lowest_kept(maxima, top, total, settings_ptr, scale, vocab_size, num_tiles)
                    tl.store(bounds_ptr + 3 * row, top.to(tl.float64))
                    tl.store(bounds_ptr + 3 * row + 1, lowest.to(tl.float64))
                    tl.store(bounds_ptr + 3 * row + 2, total)
                else:
                    position = tl.load(positions_ptr + row)
                    kth = -float("inf")
                    token_id = token_at(
                        row_ptr, tiles, masses, settings_ptr, position, top, scale, kth, 0.0, vocab_size, TILE
                    )
        if is_done:
            tl.store(list_sizes_ptr + row, -1)
            tl.store(token_ids_ptr + row, token_id)
            tl.store(last_tokens_ptr + seq_slot, tl.maximum(token_id, 0))
        else:
            tl.store(list_sizes_ptr + row, 0)


def sample_tokens(
    logits: torch.Tensor,
    seq_slots: torch.Tensor,
    positions: torch.Tensor,
    settings: torch.Tensor,
    token_ids: torch.Tensor,
    last_tokens: torch.Tensor,
    scratch: SamplingScratch,
    *,
    filters: bool = True,
) -> None:
    """Choose the next token of each row.

    logits: [n, vocab_size] float32, rows in one piece; only read. n may be 0.
    seq_slots: [n] int32, where a row's settings stand; under 0 for a row that is padding, of which nothing is read or
        written. positions: [n] int32, the index in its sequence of the token to be sampled.
    settings: [num_slots, NUM_SETTINGS] int64, as sampling_rows says.
    token_ids: [n] int32, written: -1 where the highest logit is no finite number.
    last_tokens: [num_slots] int32, written where seq_slots says, 0 in place of -1.
    filters: whether a row may have one; without, it is one launch in place of four.
    Reads the logits once, rows with filters twice, and is bound by that; the grids depend on the shapes alone. Raises
    ValueError for tensors that do not fit together.
    """
    num_rows, vocab_size = logits.shape
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"logits must be float32 in whole rows, got {logits.dtype} with strides {logits.stride()}")
    if num_rows > len(scratch.arrivals) or triton.cdiv(vocab_size, TILE) != scratch.num_tiles:
        raise ValueError(f"logits of shape {list(logits.shape)} do not fit the scratch's {list(scratch.maxima.shape)}")
    if settings.shape[1] != NUM_SETTINGS or not settings.is_contiguous():
        raise ValueError(f"settings must be [num_slots, {NUM_SETTINGS}] in one piece, got {list(settings.shape)}")
    if not num_rows:
        return
    tiles_of_program = 1 if num_rows <= FEW_ROWS else _TILES_OF_MANY
    _sample_kernel[triton.cdiv(scratch.num_tiles, tiles_of_program), num_rows](
        logits,
        seq_slots,
        positions,
        settings,
        token_ids,
        last_tokens,
        scratch.maxima,
        scratch.sums,
        scratch.firsts,
        scratch.arrivals,
        scratch.bounds,
        scratch.list_sizes,
        logits.stride(0),
        vocab_size,
        scratch.num_tiles,
        TILE=TILE,
        TILES_PAD=triton.next_power_of_2(scratch.num_tiles),
        TILES_OF_PROGRAM=tiles_of_program,
        num_warps=4,
    )
    if filters:
        filter_rows(logits, seq_slots, positions, settings, token_ids, last_tokens, scratch)
