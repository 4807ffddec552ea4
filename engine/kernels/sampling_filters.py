"""top_k, top_p and min_p: the choice among the tokens that they keep, each a threshold whose ties are kept.

First every row lists the tokens that its bound cannot rule out. Then one program for each row halves its way to the
thresholds, and lets what they keep race for the token: over the list, or where a flat distribution leaves more than
that holds, over the row, eight thresholds at a time, until what lies between two fits the list. Sums are of whole
numbers, weights times 2**39, or of float32 in a fixed order.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.sampling_rows import (
    LIST_SIZE,
    TILE,
    WEIGHT_ONE,
    SamplingScratch,
    cut_where,
    first_tile,
    first_token,
    key_of,
    listed_as,
    listed_id,
    listed_logit,
    load_logits,
    min_p_of,
    number_of,
    scale_of,
    settings_at,
    token_at,
    top_k_of,
    top_p_of,
    whole_of,
)

_TILES_OF_PROGRAM = 2
_SHORT_LIST_SIZE = 512
"""Most lists end here, and a search in them costs half."""
_ROW_TILE = 4096
"""Logits that are looked at together where one program goes through a row."""


@triton.jit
def _list_kernel(
    logits_ptr,
    seq_slots_ptr,
    maxima_ptr,
    bounds_ptr,
    list_sizes_ptr,
    lists_ptr,
    logits_stride,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    TILES_OF_PROGRAM: tl.constexpr,
    LIST_SIZE: tl.constexpr,
):
    row = tl.program_id(1)
    if tl.load(seq_slots_ptr + row) < 0:
        return
    if tl.load(list_sizes_ptr + row) < 0:
        return
    lowest = tl.load(bounds_ptr + 3 * row + 1).to(tl.float32)
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    first_tile = tl.program_id(0) * TILES_OF_PROGRAM
    for tile in range(first_tile, tl.minimum(first_tile + TILES_OF_PROGRAM, num_tiles)):
        if tl.load(maxima_ptr + row * num_tiles + tile) >= lowest:
            ids = tile * TILE + tl.arange(0, TILE)
            logits = load_logits(row_ptr, ids, vocab_size)
            is_listed = (logits >= lowest).to(tl.int32)
            # All threads get the one result; each reading the size for itself would part their ways.
            place = tl.atomic_add(list_sizes_ptr + row, tl.sum(is_listed, axis=0), sem="relaxed")
            if place < LIST_SIZE:
                places = place + tl.cumsum(is_listed, axis=0) - 1
                is_stored = (is_listed != 0) & (places < LIST_SIZE)
                tl.store(lists_ptr + row * LIST_SIZE + places, listed_as(ids, logits), mask=is_stored)


@triton.jit
def _among_list(
    ids,
    logits,
    exists,
    masses_ptr,
    settings_ptr,
    position,
    top,
    scale,
    total,
    num_tiles,
    TILE: tl.constexpr,
    TILES_PAD: tl.constexpr,
):
    """The token, where the list has all that can be kept. masses_ptr: of the row, overwritten."""
    top_k = top_k_of(settings_ptr)
    top_p = top_p_of(settings_ptr)
    min_p = min_p_of(settings_ptr)
    keys = key_of(logits)
    weights = tl.exp2((logits - top) * scale)
    kept = exists & (weights >= min_p)
    if (top_k > 0) & (tl.sum(exists.to(tl.int32), axis=0) > top_k):
        kth, _ = cut_where(keys, exists.to(tl.int32), exists, top_k)
        kept = kept & (logits >= number_of(kth))
    masses = tl.where(kept, whole_of(weights), 0)
    if top_p < 1.0:
        # What is under the list's bound is kept by the filters before only if there are none.
        mass = tl.sum(masses, axis=0).to(tl.float64)
        if (top_k == 0) & (min_p == 0.0):
            mass = total * WEIGHT_ONE
        wanted = tl.ceil(mass * top_p).to(tl.int64)
        bits = weights.to(tl.int32, bitcast=True)
        threshold, _ = cut_where(bits, masses, kept, wanted)
        kept = kept & (bits >= threshold)
        masses = tl.where(kept, masses, 0)
    tiles = tl.arange(0, TILES_PAD)
    is_tile = tiles < num_tiles
    tl.store(masses_ptr + tiles, tl.zeros([TILES_PAD], tl.int64), mask=is_tile)
    tl.debug_barrier()
    # In any order: they are whole numbers.
    tl.atomic_add(masses_ptr + ids // TILE, masses, mask=kept, sem="relaxed")
    tl.debug_barrier()
    # Past the first-level cache, which does not see what atomics wrote.
    tile_masses = tl.load(masses_ptr + tiles, mask=is_tile, other=0, cache_modifier=".cg").to(tl.float64)
    tile = first_tile(settings_ptr, position, tiles, tile_masses)
    return first_token(settings_ptr, position, ids, tl.where(ids // TILE == tile, masses, 0).to(tl.float64))


@triton.jit
def _among_listed(
    list_ptr,
    list_size,
    masses_ptr,
    settings_ptr,
    position,
    top,
    scale,
    total,
    num_tiles,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TILES_PAD: tl.constexpr,
):
    """As _among_list, of a list that has at most SIZE."""
    places = tl.arange(0, SIZE)
    exists = places < list_size
    listed = tl.load(list_ptr + places, mask=exists, other=0)
    return _among_list(
        listed_id(listed),
        listed_logit(listed),
        exists,
        masses_ptr,
        settings_ptr,
        position,
        top,
        scale,
        total,
        num_tiles,
        TILE,
        TILES_PAD,
    )


@triton.jit
def _value_of(logits, top, scale, kth, min_p, is_of_weights):
    """What a token counts: 1, or its weight if the filters so far keep it."""
    weights = tl.exp2((logits - top) * scale)
    kept = tl.where((logits >= kth) & (weights >= min_p), weights, 0.0)
    return tl.where(is_of_weights, kept, 1.0)


@triton.jit
def _between(low, high, step, is_by_key):
    """The logit that is so many ninths of the way between two keys: in equal steps of the logit, which suit most
    distributions, or of its bits, which get to an end with all of them."""
    if is_by_key:
        key = low + (high - low) * step // 9
    else:
        low_logit = number_of(low.to(tl.int32))
        high_logit = number_of((high - 1).to(tl.int32))
        key = key_of(low_logit + (high_logit - low_logit) * (step / 9.0)).to(tl.int64)
        key = tl.minimum(tl.maximum(key, low + 1), high - 1)
    return number_of(key.to(tl.int32))


@triton.jit
def _halved(low, high, sum_low, sum_high, logit, counts, wanted):
    """What is known once the tokens from a logit on are counted, by lanes."""
    reached = tl.sum(counts.to(tl.float64), axis=0)
    key = key_of(logit).to(tl.int64)
    if reached >= wanted:
        low = tl.maximum(low, key)
        sum_low = tl.minimum(sum_low, reached)
    else:
        high = tl.minimum(high, key)
        sum_high = tl.maximum(sum_high, reached)
    return low, high, sum_low, sum_high


@triton.jit
def _reach_row(
    row_ptr,
    list_ptr,
    top,
    scale,
    kth,
    min_p,
    lowest,
    wanted,
    sum_low,
    is_of_weights,
    vocab_size,
    ROW_TILE: tl.constexpr,
    LIST_SIZE: tl.constexpr,
):
    """The highest logit such that what the tokens from it on count reaches `wanted`, or else `lowest`, from which on
    they count `sum_low` or less."""
    places = tl.arange(0, ROW_TILE)
    low = key_of(lowest).to(tl.int64)
    high = key_of(top).to(tl.int64) + 1
    sum_high = tl.zeros([], tl.float64)
    # Between two logits there are no more tokens than this, for none counts less than one at the lower.
    num_between = tl.zeros([], tl.float64) + vocab_size
    turn = 0
    while (high - low > 1) & (num_between > LIST_SIZE - 8):
        is_by_key = turn % 4 == 3
        turn += 1
        logit1 = _between(low, high, 1, is_by_key)
        logit2 = _between(low, high, 2, is_by_key)
        logit3 = _between(low, high, 3, is_by_key)
        logit4 = _between(low, high, 4, is_by_key)
        logit5 = _between(low, high, 5, is_by_key)
        logit6 = _between(low, high, 6, is_by_key)
        logit7 = _between(low, high, 7, is_by_key)
        logit8 = _between(low, high, 8, is_by_key)
        # Lane by lane, so that nothing is exchanged before the end.
        counts1 = tl.zeros([ROW_TILE], tl.float32)
        counts2 = tl.zeros([ROW_TILE], tl.float32)
        counts3 = tl.zeros([ROW_TILE], tl.float32)
        counts4 = tl.zeros([ROW_TILE], tl.float32)
        counts5 = tl.zeros([ROW_TILE], tl.float32)
        counts6 = tl.zeros([ROW_TILE], tl.float32)
        counts7 = tl.zeros([ROW_TILE], tl.float32)
        counts8 = tl.zeros([ROW_TILE], tl.float32)
        following = load_logits(row_ptr, places, vocab_size)
        for at in range(0, vocab_size, ROW_TILE):
            logits = following
            following = load_logits(row_ptr, at + ROW_TILE + places, vocab_size)
            values = _value_of(logits, top, scale, kth, min_p, is_of_weights)
            counts1 += tl.where(logits >= logit1, values, 0.0)
            counts2 += tl.where(logits >= logit2, values, 0.0)
            counts3 += tl.where(logits >= logit3, values, 0.0)
            counts4 += tl.where(logits >= logit4, values, 0.0)
            counts5 += tl.where(logits >= logit5, values, 0.0)
            counts6 += tl.where(logits >= logit6, values, 0.0)
            counts7 += tl.where(logits >= logit7, values, 0.0)
            counts8 += tl.where(logits >= logit8, values, 0.0)
        low, high, sum_low, sum_high = _halved(low, high, sum_low, sum_high, logit1, counts1, wanted)
        low, high, sum_low, sum_high = _halved(low, high, sum_low, sum_high, logit2, counts2, wanted)
        low, high, sum_low, sum_high = _halved(low, high, sum_low, sum_high, logit3, counts3, wanted)
        low, high, sum_low, sum_high = _halved(low, high, sum_low, sum_high, logit4, counts4, wanted)
        low, high, sum_low, sum_high = _halved(low, high, sum_low, sum_high, logit5, counts5, wanted)
        low, high, sum_low, sum_high = _halved(low, high, sum_low, sum_high, logit6, counts6, wanted)
        low, high, sum_low, sum_high = _halved(low, high, sum_low, sum_high, logit7, counts7, wanted)
        low, high, sum_low, sum_high = _halved(low, high, sum_low, sum_high, logit8, counts8, wanted)
        least = tl.where(is_of_weights, tl.exp2((number_of(low.to(tl.int32)) - top) * scale), 1.0)
        num_between = (sum_low - sum_high) / tl.maximum(least, 1e-30)
    if high - low > 1:
        low_logit = number_of(low.to(tl.int32))
        high_logit = number_of(high.to(tl.int32))
        num_listed = 0
        following = load_logits(row_ptr, places, vocab_size)
        for at in range(0, vocab_size, ROW_TILE):
            logits = following
            following = load_logits(row_ptr, at + ROW_TILE + places, vocab_size)
            values = _value_of(logits, top, scale, kth, min_p, is_of_weights)
            is_listed = ((logits >= low_logit) & (logits < high_logit) & (values > 0.0)).to(tl.int32)
            num_here = tl.sum(is_listed, axis=0)
            if num_here > 0:
                stored_at = num_listed + tl.cumsum(is_listed, axis=0) - 1
                is_stored = (is_listed != 0) & (stored_at < LIST_SIZE)
                tl.store(list_ptr + stored_at, listed_as(at + places, logits), mask=is_stored)
                num_listed += num_here
        tl.debug_barrier()
        if num_listed > 0:
            list_places = tl.arange(0, LIST_SIZE)
            exists = list_places < num_listed
            logits = listed_logit(tl.load(list_ptr + list_places, mask=exists, other=0))
            values = tl.where(exists, _value_of(logits, top, scale, kth, min_p, is_of_weights), 0.0)
            rest = tl.ceil((wanted - sum_high) * WEIGHT_ONE).to(tl.int64)
            cut, _ = cut_where(key_of(logits), whole_of(values), exists, rest)
            low = cut.to(tl.int64)
    return number_of(low.to(tl.int32))


@triton.jit
def _among_row(
    row_ptr,
    sums_ptr,
    list_ptr,
    settings_ptr,
    position,
    top,
    lowest,
    total,
    scale,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    TILES_PAD: tl.constexpr,
    ROW_TILE: tl.constexpr,
    LIST_SIZE: tl.constexpr,
):
    """The token, where the list is too short for what can be kept. Overwrites the row's list and sums."""
    top_k = top_k_of(settings_ptr)
    top_p = top_p_of(settings_ptr)
    min_p = min_p_of(settings_ptr)
    places = tl.arange(0, ROW_TILE)
    kth = tl.zeros([], tl.float32) - float("inf")
    threshold = min_p
    for kind in range(2):
        is_top_p = kind == 1
        wanted = top_k.to(tl.float64)
        sum_low = tl.zeros([], tl.float64) + vocab_size
        if is_top_p:
            if (top_p < 1.0) & ((top_k > 0) | (min_p > 0.0)):
                total = tl.zeros([], tl.float64)
                following = load_logits(row_ptr, places, vocab_size)
                for at in range(0, vocab_size, ROW_TILE):
                    logits = following
                    following = load_logits(row_ptr, at + ROW_TILE + places, vocab_size)
                    total += tl.sum(_value_of(logits, top, scale, kth, min_p, True), axis=0).to(tl.float64)
            wanted = total * top_p
            sum_low = total
        if (is_top_p & (top_p < 1.0)) | ((kind == 0) & (top_k > 0)):
            reached = _reach_row(
                row_ptr,
                list_ptr,
                top,
                scale,
                kth,
                min_p,
                lowest,
                wanted,
                sum_low,
                is_top_p,
                vocab_size,
                ROW_TILE,
                LIST_SIZE,
            )
            if is_top_p:
                threshold = tl.maximum(threshold, tl.exp2((reached - top) * scale))
            else:
                kth = reached
    following = load_logits(row_ptr, places, vocab_size)
    for at in range(0, vocab_size, ROW_TILE):
        logits = following
        following = load_logits(row_ptr, at + ROW_TILE + places, vocab_size)
        values = _value_of(logits, top, scale, kth, threshold, True)
        tiles = at // TILE + tl.arange(0, ROW_TILE // TILE)
        tl.store(sums_ptr + tiles, tl.sum(tl.reshape(values, [ROW_TILE // TILE, TILE]), axis=1), mask=tiles < num_tiles)
    tl.debug_barrier()
    tiles = tl.arange(0, TILES_PAD)
    masses = tl.load(sums_ptr + tiles, mask=tiles < num_tiles, other=0.0).to(tl.float64)
    return token_at(row_ptr, tiles, masses, settings_ptr, position, top, scale, kth, threshold, vocab_size, TILE)


@triton.jit
def _choose_kernel(
    logits_ptr,
    seq_slots_ptr,
    positions_ptr,
    settings_ptr,
    token_ids_ptr,
    last_tokens_ptr,
    sums_ptr,
    bounds_ptr,
    list_sizes_ptr,
    lists_ptr,
    masses_ptr,
    logits_stride,
    vocab_size,
    num_tiles,
    IS_LISTED: tl.constexpr,
    TILE: tl.constexpr,
    TILES_PAD: tl.constexpr,
    ROW_TILE: tl.constexpr,
    SHORT_LIST_SIZE: tl.constexpr,
    LIST_SIZE: tl.constexpr,
):
    """One launch is for the rows that the list holds, another for the others."""
    row = tl.program_id(0)
    seq_slot = tl.load(seq_slots_ptr + row)
    if seq_slot < 0:
        return
    list_size = tl.load(list_sizes_ptr + row)
    if (list_size < 0) | ((list_size <= LIST_SIZE) != IS_LISTED):
        return
    settings_ptr = settings_at(settings_ptr, seq_slot)
    scale = scale_of(settings_ptr)
    position = tl.load(positions_ptr + row)
    top = tl.load(bounds_ptr + 3 * row).to(tl.float32)
    lowest = tl.load(bounds_ptr + 3 * row + 1).to(tl.float32)
    total = tl.load(bounds_ptr + 3 * row + 2)
    list_ptr = lists_ptr + row * LIST_SIZE
    masses_ptr += row * num_tiles
    if IS_LISTED:
        if list_size <= SHORT_LIST_SIZE:
            token_id = _among_listed(
                list_ptr,
                list_size,
                masses_ptr,
                settings_ptr,
                position,
                top,
                scale,
                total,
                num_tiles,
                SHORT_LIST_SIZE,
                TILE,
                TILES_PAD,
            )
        else:
            token_id = _among_listed(
                list_ptr,
                list_size,
                masses_ptr,
                settings_ptr,
                position,
                top,
                scale,
                total,
                num_tiles,
                LIST_SIZE,
                TILE,
                TILES_PAD,
            )
    else:
        token_id = _among_row(
            logits_ptr + row.to(tl.int64) * logits_stride,
            sums_ptr + row * num_tiles,
            list_ptr,
            settings_ptr,
            position,
            top,
            lowest,
            total,
            scale,
            vocab_size,
            num_tiles,
            TILE,
            TILES_PAD,
            ROW_TILE,
            LIST_SIZE,
        )
    tl.store(token_ids_ptr + row, token_id)
    tl.store(last_tokens_ptr + seq_slot, token_id)


def filter_rows(
    logits: torch.Tensor,
    seq_slots: torch.Tensor,
    positions: torch.Tensor,
    settings: torch.Tensor,
    token_ids: torch.Tensor,
    last_tokens: torch.Tensor,
    scratch: SamplingScratch,
) -> None:
    """Choose the tokens of the rows that `sample_tokens`, which checks, has left in the scratch. Others cost nothing.

    Reads the logits once where the list holds, else some ten times, by one program for each row.
    """
    num_rows, vocab_size = logits.shape
    _list_kernel[triton.cdiv(scratch.num_tiles, _TILES_OF_PROGRAM), num_rows](
        logits,
        seq_slots,
        scratch.maxima,
        scratch.bounds,
        scratch.list_sizes,
        scratch.lists,
        logits.stride(0),
        vocab_size,
        scratch.num_tiles,
        TILE=TILE,
        TILES_OF_PROGRAM=_TILES_OF_PROGRAM,
        LIST_SIZE=LIST_SIZE,
        num_warps=4,
    )
    for is_listed in (True, False):
        _choose_kernel[(num_rows,)](
            logits,
            seq_slots,
            positions,
            settings,
            token_ids,
            last_tokens,
            scratch.sums,
            scratch.bounds,
            scratch.list_sizes,
            scratch.lists,
            scratch.masses,
            logits.stride(0),
            vocab_size,
            scratch.num_tiles,
            IS_LISTED=is_listed,
            TILE=TILE,
            TILES_PAD=triton.next_power_of_2(scratch.num_tiles),
            ROW_TILE=_ROW_TILE,
            SHORT_LIST_SIZE=_SHORT_LIST_SIZE,
            LIST_SIZE=LIST_SIZE,
            num_warps=4 if is_listed else 16,
        )
