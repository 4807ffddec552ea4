"""Attention of short queries over the paged KV cache: decodes, and chunks of a few tokens.

A program reads one part of a sequence's context for one KV head; the heads of a group and the query's tokens are packed
into the rows of one matrix tile. The last part of a sequence to arrive sums up all of them. `attention_plan` says which
program has which part.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.attention_plan import AttentionPlan, padded_dim

LOG2_E = 1.4426950408889634
NO_SCORE = tl.constexpr(-1.0e30)
"""Where a running maximum starts. Finite, so that a row that sees nothing has differences without NaN."""


@triton.jit
def tile_slots(table_ptr, at, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
    """The slots of positions at .. at + TILE - 1, for a tile larger than a block. Those from `end` on are block 0's."""
    positions = at + tl.arange(0, TILE)
    if MASKED:
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=positions < end, other=0)
    else:
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE)
    return blocks * BLOCK_SIZE + positions % BLOCK_SIZE


@triton.jit
def scaled_scores(scores, scale_log2, soft_cap, SOFT_CAP: tl.constexpr):
    """Scores in units of ln 2."""
    if SOFT_CAP:
        # soft_cap * tanh(x / soft_cap), from the one exponential that all targets have.
        turned = tl.exp2(scores * scale_log2 * (-2.0 * 1.4426950408889634 / soft_cap))
        return (2.0 / (1.0 + turned) - 1.0) * (soft_cap * 1.4426950408889634)
    return scores * scale_log2


@triton.jit
def narrowed(query):
    """The query of a float8 cache, whose numbers become float16 in one instruction, and bfloat16 only in several."""
    return tl.minimum(tl.maximum(query.to(tl.float32), -65504.0), 65504.0).to(tl.float16)


@triton.jit
def _sum_parts(
    out_ptr,
    partial_ptr,
    stats_ptr,
    first_part,
    num_parts,
    kv_head,
    query_start,
    query_len,
    value_scale,
    out_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PARTIAL_ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """What one sequence and KV head gets from all of its parts, PARTS of them at a time."""
    dims = tl.arange(0, DIM)
    heads = tl.arange(0, GROUP_PAD)
    is_head = heads < GROUP
    for token in range(query_len):
        greatest = tl.full([GROUP_PAD], NO_SCORE, tl.float32)
        weight_sum = tl.zeros([GROUP_PAD], tl.float32)
        weighted = tl.zeros([GROUP_PAD, DIM], tl.float32)
        for at in range(0, num_parts, PARTS):
            others = at + tl.arange(0, PARTS)
            is_stat = (others < num_parts)[:, None] & is_head[None, :]
            parts = (first_part + others).to(tl.int64) * NUM_KV_HEADS + kv_head
            stat_ptrs = stats_ptr + (parts * (2 * PARTIAL_ROWS) + token * GROUP)[:, None] + heads[None, :]
            value_rows = (parts * PARTIAL_ROWS + token * GROUP)[:, None] + heads[None, :]
            # Past the first-level cache, which does not see what other processors wrote.
            values = tl.load(
                partial_ptr + value_rows[:, :, None] * HEAD_DIM + dims[None, None, :],
                mask=is_stat[:, :, None] & (dims < HEAD_DIM)[None, None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            maxima = tl.load(stat_ptrs, mask=is_stat, other=NO_SCORE, cache_modifier=".cg")
            sums = tl.load(stat_ptrs + PARTIAL_ROWS, mask=is_stat, other=0.0, cache_modifier=".cg")
            new_greatest = tl.maximum(greatest, tl.max(maxima, axis=0))
            shares = tl.exp2(maxima - new_greatest[None, :])
            shrink = tl.exp2(greatest - new_greatest)
            weight_sum = weight_sum * shrink + tl.sum(sums * shares, axis=0)
            weighted = weighted * shrink[:, None] + tl.sum(values * shares[:, :, None], axis=0)
            greatest = new_greatest
        out = weighted * (value_scale / tl.where(is_head, weight_sum, 1.0))[:, None]
        out_offsets = (query_start + token).to(tl.int64) * out_stride
        out_offsets += ((kv_head * GROUP + heads) * HEAD_DIM)[:, None] + dims[None, :]
        mask = is_head[:, None] & (dims < HEAD_DIM)[None, :]
        tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _short_kernel(
    out_ptr,
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    block_tables_ptr,
    parts_ptr,
    partial_ptr,
    stats_ptr,
    arrivals_ptr,
    key_scale_ptr,
    value_scale_ptr,
    scale_log2,
    soft_cap,
    query_stride,
    out_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    PARTIAL_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    SUM_PARTS: tl.constexpr,
):
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    num_parts = tl.load(parts_ptr + 8 * item + 2)
    if num_parts == 0:
        return
    seq = tl.load(parts_ptr + 8 * item)
    part = tl.load(parts_ptr + 8 * item + 1)
    first = tl.load(parts_ptr + 8 * item + 3)
    end = tl.load(parts_ptr + 8 * item + 4)
    query_start = tl.load(parts_ptr + 8 * item + 5)
    query_len = tl.load(parts_ptr + 8 * item + 6)
    seq_len = tl.load(parts_ptr + 8 * item + 7)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    in_head = kv_head * HEAD_DIM + dims
    query_head = kv_head * GROUP + rows % GROUP
    token = rows // GROUP
    is_row = token < query_len
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    query_offsets = (query_start + token).to(tl.int64)[:, None] * query_stride
    query_offsets += (query_head * HEAD_DIM)[:, None] + dims[None, :]
    query = tl.load(query_ptr + query_offsets, mask=mask, other=0.0)
    if HAS_SCALES:
        query = narrowed(query)
    query_position = seq_len - query_len + token
    value_scale = 1.0
    if HAS_SCALES:
        scale_log2 *= tl.load(key_scale_ptr + kv_head)
        value_scale = tl.load(value_scale_ptr + kv_head)

    table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
    greatest = tl.full([ROWS], NO_SCORE, tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, DIM], tl.float32)
    if BLOCK_SIZE % TILE == 0:
        # One block for all of a tile: its number is read one tile ahead, for a scalar is not pipelined by itself.
        block = tl.load(table_ptr + first // BLOCK_SIZE)
    for at in tl.range(first, end, TILE, num_stages=STAGES):
        positions = at + tl.arange(0, TILE)
        if BLOCK_SIZE % TILE == 0:
            slots = block * BLOCK_SIZE + at % BLOCK_SIZE + tl.arange(0, TILE)
            block = tl.load(table_ptr + (at + TILE) // BLOCK_SIZE, mask=at + TILE < end, other=0)
        else:
            slots = tile_slots(table_ptr, at, end, BLOCK_SIZE, TILE, True)
        offsets = slots.to(tl.int64)[:, None] * SLOT_STRIDE + in_head[None, :]
        is_read = (positions < end)[:, None]
        if DIM != HEAD_DIM:
            is_read = is_read & (dims < HEAD_DIM)[None, :]
        key = tl.load(key_cache_ptr + offsets, mask=is_read, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        scores = scaled_scores(scores, scale_log2, soft_cap, SOFT_CAP)
        is_seen = (positions[None, :] <= query_position[:, None]) & (positions < end)[None, :]
        if WINDOW > 0:
            is_seen = is_seen & (positions[None, :] > query_position[:, None] - WINDOW)
        scores = tl.where(is_seen, scores, -float("inf"))
        new_greatest = tl.maximum(greatest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_greatest[:, None])
        shrink = tl.exp2(greatest - new_greatest)
        weight_sum = weight_sum * shrink + tl.sum(weights, axis=1)
        # A block's unwritten rest may hold NaN, which a weight of zero would not silence: it is not read.
        value = tl.load(value_cache_ptr + offsets, mask=is_read, other=0.0).to(query.dtype)
        weighted = weighted * shrink[:, None]
        weighted = tl.dot(weights.to(query.dtype), value, weighted, input_precision=PRECISION)
        greatest = new_greatest

    if num_parts == 1:
        out_offsets = (query_start + token).to(tl.int64)[:, None] * out_stride
        out_offsets += (query_head * HEAD_DIM)[:, None] + dims[None, :]
        out = weighted * (value_scale / weight_sum)[:, None]
        tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        place = item * NUM_KV_HEADS + kv_head
        part_offsets = (place * PARTIAL_ROWS + rows)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(partial_ptr + part_offsets, weighted, mask=mask)
        tl.store(stats_ptr + place * (2 * PARTIAL_ROWS) + rows, greatest, mask=is_row)
        tl.store(stats_ptr + place * (2 * PARTIAL_ROWS) + PARTIAL_ROWS + rows, weight_sum, mask=is_row)
        # All threads' stores come before the one thread's release.
        tl.debug_barrier()
        arrival_ptr = arrivals_ptr + seq * NUM_KV_HEADS + kv_head
        arrived = tl.atomic_add(arrival_ptr, 1, sem="acq_rel")
        if arrived == num_parts - 1:
            tl.store(arrival_ptr, 0)
            _sum_parts(
                out_ptr,
                partial_ptr,
                stats_ptr,
                item - part,
                num_parts,
                kv_head,
                query_start,
                query_len,
                value_scale,
                out_stride,
                NUM_KV_HEADS,
                GROUP,
                GROUP_PAD,
                HEAD_DIM,
                DIM,
                PARTIAL_ROWS,
                SUM_PARTS,
            )


def short_attention(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    num_seqs: int,
    plan: AttentionPlan,
    scale: float,
    soft_cap: float,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
) -> None:
    """Write the rows of queries of at most plan.short_tokens tokens. `paged_attention` has the rest, and checks."""
    block_size, num_kv_heads, head_dim = key_cache.shape[1:]
    tiles = plan.short_tiles(num_seqs)
    dim = padded_dim(head_dim)
    group_pad = triton.next_power_of_2(plan.group_size)
    _short_kernel[num_kv_heads, num_seqs + tiles.num_programs](
        out,
        query,
        key_cache,
        value_cache,
        block_tables,
        plan.parts,
        plan.partial,
        plan.partial_stats,
        plan.arrivals,
        key_scale,
        value_scale,
        scale if soft_cap else scale * LOG2_E,
        soft_cap,
        query.stride(0),
        out.stride(0),
        block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=plan.group_size,
        GROUP_PAD=group_pad,
        HEAD_DIM=head_dim,
        DIM=dim,
        SLOT_STRIDE=num_kv_heads * head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=plan.sliding_window,
        SOFT_CAP=soft_cap != 0.0,
        HAS_SCALES=key_scale is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        ROWS=plan.short_rows,
        PARTIAL_ROWS=plan.partial.shape[2],
        TILE=tiles.tile,
        # Reading through the table is one load behind another: the pipeline is twice as long.
        STAGES=tiles.num_buffers + 1 if block_size % tiles.tile == 0 else 2 * tiles.num_buffers + 1,
        SUM_PARTS=max(1, tiles.num_warps * 32 * 64 // (group_pad * dim)),
        num_warps=tiles.num_warps,
    )
