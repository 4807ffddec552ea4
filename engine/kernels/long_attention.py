"""Attention of long queries over the paged KV cache: chunks of a prompt.

A program has a tile of the query, tokens and heads of a group packed into its rows, and walks over all that it sees.
What is new in the step can be read from the packed keys and values instead of through the block table.
`hopper_attention` does the same faster where it can; this one runs on every GPU, for every dtype and head size.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.attention_plan import QUERY_ROWS, AttentionPlan, padded_dim
from engine.kernels.short_attention import LOG2_E, NO_SCORE, narrowed, scaled_scores, tile_slots


@triton.jit
def _walk(
    state,
    query,
    query_position,
    key_ptr,
    value_ptr,
    table_ptr,
    packed_start,
    kv_head,
    first,
    end,
    seq_end,
    scale_log2,
    soft_cap,
    packed_stride,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PAGED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take the keys and values of positions first .. end - 1, in tiles, into the state (sum, weights, maxima).

    PAGED: key_ptr and value_ptr are the caches, positions count from the sequence's start. Otherwise they are the
    packed keys and values; positions, query_position too, count from the first new token, which is row packed_start.
    """
    weighted, weight_sum, greatest = state
    dims = tl.arange(0, DIM)
    in_head = kv_head * HEAD_DIM + dims
    if PAGED and BLOCK_SIZE % TILE == 0:
        block = tl.load(table_ptr + first // BLOCK_SIZE, mask=first < end, other=0)
    for at in tl.range(first, end, TILE, num_stages=STAGES):
        positions = at + tl.arange(0, TILE)
        is_read = (positions < seq_end)[:, None]
        if DIM != HEAD_DIM:
            is_read = is_read & (dims < HEAD_DIM)[None, :]
        if PAGED:
            if BLOCK_SIZE % TILE == 0:
                slots = block * BLOCK_SIZE + at % BLOCK_SIZE + tl.arange(0, TILE)
                block = tl.load(table_ptr + (at + TILE) // BLOCK_SIZE, mask=at + TILE < end, other=0)
            else:
                slots = tile_slots(table_ptr, at, seq_end, BLOCK_SIZE, TILE, MASKED)
            offsets = slots.to(tl.int64)[:, None] * SLOT_STRIDE + in_head[None, :]
        else:
            offsets = (packed_start + positions).to(tl.int64)[:, None] * packed_stride + in_head[None, :]
        if MASKED or DIM != HEAD_DIM:
            key = tl.load(key_ptr + offsets, mask=is_read, other=0.0).to(query.dtype)
        else:
            key = tl.load(key_ptr + offsets).to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if SOFT_CAP:
            scores = scaled_scores(scores, scale_log2, soft_cap, True)
            factor = 1.0
        else:
            factor = scale_log2
        if MASKED:
            is_seen = (positions[None, :] <= query_position[:, None]) & (positions < seq_end)[None, :]
            if WINDOW > 0:
                is_seen = is_seen & (positions[None, :] > query_position[:, None] - WINDOW)
            scores = tl.where(is_seen, scores, -float("inf"))
        # The scale is positive, so that it can wait for the fused multiply-add.
        new_greatest = tl.maximum(greatest, tl.max(scores, axis=1) * factor)
        weights = tl.exp2(scores * factor - new_greatest[:, None])
        shrink = tl.exp2(greatest - new_greatest)
        weight_sum = weight_sum * shrink + tl.sum(weights, axis=1)
        if MASKED or DIM != HEAD_DIM:
            value = tl.load(value_ptr + offsets, mask=is_read, other=0.0).to(query.dtype)
        else:
            value = tl.load(value_ptr + offsets).to(query.dtype)
        weighted = weighted * shrink[:, None]
        weighted = tl.dot(weights.to(query.dtype), value, weighted, input_precision=PRECISION)
        greatest = new_greatest
    return weighted, weight_sum, greatest


@triton.jit
def _long_kernel(
    out_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_tables_ptr,
    query_tiles_ptr,
    num_query_tiles_ptr,
    key_scale_ptr,
    value_scale_ptr,
    scale_log2,
    soft_cap,
    query_stride,
    packed_stride,
    out_stride,
    table_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
    NEW_IS_PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PAGED_STAGES: tl.constexpr,
):
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    if item >= tl.load(num_query_tiles_ptr):
        return
    seq = tl.load(query_tiles_ptr + 8 * item)
    first_token = tl.load(query_tiles_ptr + 8 * item + 1)
    query_start = tl.load(query_tiles_ptr + 8 * item + 2)
    query_len = tl.load(query_tiles_ptr + 8 * item + 3)
    seq_len = tl.load(query_tiles_ptr + 8 * item + 4)
    history = seq_len - query_len

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    token = first_token + rows // GROUP
    query_head = kv_head * GROUP + rows % GROUP
    is_row = (token < query_len) & (rows < ROWS // GROUP * GROUP)
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    query_offsets = (query_start + token).to(tl.int64)[:, None] * query_stride
    query_offsets += (query_head * HEAD_DIM)[:, None] + dims[None, :]
    query = tl.load(query_ptr + query_offsets, mask=mask, other=0.0)

    table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
    weighted = tl.zeros([ROWS, DIM], tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    greatest = tl.full([ROWS], NO_SCORE, tl.float32)
    state = (weighted, weight_sum, greatest)

    end_token = tl.minimum(first_token + ROWS // GROUP, query_len)
    # Positions below `full_end` are seen by all rows: no mask there, unless a window hides some.
    if NEW_IS_PACKED:
        paged_end = history
        full_end = history // TILE * TILE
    else:
        paged_end = history + end_token
        full_end = (history + first_token + 1) // TILE * TILE
    paged_first = 0
    if WINDOW > 0:
        paged_first = tl.maximum(history + first_token - WINDOW + 1, 0) // TILE * TILE
        full_end = paged_first
    cache_scale_log2 = scale_log2
    if HAS_SCALES:
        cache_scale_log2 *= tl.load(key_scale_ptr + kv_head)
    cache_query = query
    if HAS_SCALES:
        cache_query = narrowed(query)
    # fmt: off
    if WINDOW == 0:
        state = _walk(
            state, cache_query, history + token, key_cache_ptr, value_cache_ptr, table_ptr, 0, kv_head,
            paged_first, full_end, seq_len, cache_scale_log2, soft_cap, packed_stride, HEAD_DIM, DIM, SLOT_STRIDE,
            BLOCK_SIZE, WINDOW, SOFT_CAP, PRECISION, TILE, PAGED_STAGES, True, False,
        )
    state = _walk(
        state, cache_query, history + token, key_cache_ptr, value_cache_ptr, table_ptr, 0, kv_head,
        full_end, paged_end, paged_end, cache_scale_log2, soft_cap, packed_stride, HEAD_DIM, DIM, SLOT_STRIDE,
        BLOCK_SIZE, WINDOW, SOFT_CAP, PRECISION, TILE, PAGED_STAGES, True, True,
    )
    # fmt: on
    if HAS_SCALES:
        weighted, weight_sum, greatest = state
        weighted = weighted * tl.load(value_scale_ptr + kv_head)
        state = (weighted, weight_sum, greatest)
    if NEW_IS_PACKED:
        new_first = 0
        if WINDOW > 0:
            new_first = tl.maximum(first_token - WINDOW + 1, 0) // TILE * TILE
            full_end = new_first
        else:
            full_end = (first_token + 1) // TILE * TILE
        # fmt: off
        if WINDOW == 0:
            state = _walk(
                state, query, token, key_ptr, value_ptr, table_ptr, query_start, kv_head,
                new_first, full_end, query_len, scale_log2, soft_cap, packed_stride, HEAD_DIM, DIM, SLOT_STRIDE,
                BLOCK_SIZE, WINDOW, SOFT_CAP, PRECISION, TILE, STAGES, False, False,
            )
        state = _walk(
            state, query, token, key_ptr, value_ptr, table_ptr, query_start, kv_head,
            full_end, end_token, query_len, scale_log2, soft_cap, packed_stride, HEAD_DIM, DIM, SLOT_STRIDE,
            BLOCK_SIZE, WINDOW, SOFT_CAP, PRECISION, TILE, STAGES, False, True,
        )
        # fmt: on
    weighted, weight_sum, greatest = state
    out_offsets = (query_start + token).to(tl.int64)[:, None] * out_stride
    out_offsets += (query_head * HEAD_DIM)[:, None] + dims[None, :]
    out = weighted / tl.where(is_row, weight_sum, 1.0)[:, None]
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


def long_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    num_items: int,
    plan: AttentionPlan,
    scale: float,
    soft_cap: float,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
) -> None:
    """Write the rows of queries of more than plan.short_tokens tokens. `paged_attention` has the rest, and checks."""
    block_size, num_kv_heads, head_dim = key_cache.shape[1:]
    tiles = plan.long_tiles
    _long_kernel[num_kv_heads, num_items](
        out,
        query,
        key,
        value,
        key_cache,
        value_cache,
        block_tables,
        plan.query_tiles,
        plan.num_query_tiles,
        key_scale,
        value_scale,
        scale if soft_cap else scale * LOG2_E,
        soft_cap,
        query.stride(0),
        key.stride(0) if key is not None else 0,
        out.stride(0),
        block_tables.stride(0),
        GROUP=plan.group_size,
        HEAD_DIM=head_dim,
        DIM=padded_dim(head_dim),
        SLOT_STRIDE=num_kv_heads * head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=plan.sliding_window,
        SOFT_CAP=soft_cap != 0.0,
        HAS_SCALES=key_scale is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        NEW_IS_PACKED=key is not None,
        ROWS=QUERY_ROWS,
        TILE=tiles.tile,
        STAGES=tiles.num_buffers + 1,
        PAGED_STAGES=tiles.num_buffers + 1 if block_size % tiles.tile == 0 else 2 * tiles.num_buffers + 1,
        num_warps=tiles.num_warps,
    )
