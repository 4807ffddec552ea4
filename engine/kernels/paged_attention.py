"""Attention over the paged KV cache for mixed batches.

Online softmax over tiles of keys (Milakov and Gimelshein, arXiv 1805.02867; Dao, arXiv 2307.08691), the heads of a group
packed with the query tokens into the rows of one matrix tile: row r is head r % group_size of token r // group_size.
Scores are kept in units of ln 2, so that weights come from exp2. Two kernels share the work by the length of a query:

- short ones (a decode): a program reads one part of a sequence's context, and the last of a sequence to arrive
  sums up its parts;
- long ones (a chunk of a prompt): a program has a tile of the query and walks over all of its context. What is new in
  the step can be read from the packed keys and values instead of through the block table.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels.attention_plan import QUERY_ROWS, AttentionPlan
from engine.kernels.hopper_attention import hopper_long_attention

_LOG2_E = 1.4426950408889634
_NO_SCORE = tl.constexpr(-1.0e30)
"""Where the running maximum starts. Finite, so that a row that sees nothing has differences without NaN."""


@triton.jit
def _tile_slots(table_ptr, at, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr):
    """The slots of positions at .. at + TILE - 1, for a tile larger than a block. Those from `end` on are block 0's."""
    positions = at + tl.arange(0, TILE)
    if MASKED:
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=positions < end, other=0)
    else:
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE)
    return blocks * BLOCK_SIZE + positions % BLOCK_SIZE


@triton.jit
def _scaled(scores, scale_log2, soft_cap, SOFT_CAP: tl.constexpr):
    """Scores in units of ln 2."""
    if SOFT_CAP:
        # soft_cap * tanh(x / soft_cap), from the one exponential that all targets have.
        turned = tl.exp2(scores * scale_log2 * (-2.0 * 1.4426950408889634 / soft_cap))
        return (2.0 / (1.0 + turned) - 1.0) * (soft_cap * 1.4426950408889634)
    return scores * scale_log2


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
    for token in range(0, query_len):
        greatest = tl.full([GROUP_PAD], _NO_SCORE, tl.float32)
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
            maxima = tl.load(stat_ptrs, mask=is_stat, other=_NO_SCORE, cache_modifier=".cg")
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
    query_position = seq_len - query_len + token
    value_scale = 1.0
    if HAS_SCALES:
        scale_log2 *= tl.load(key_scale_ptr + kv_head)
        value_scale = tl.load(value_scale_ptr + kv_head)

    table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
    greatest = tl.full([ROWS], _NO_SCORE, tl.float32)
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
            slots = _tile_slots(table_ptr, at, end, BLOCK_SIZE, TILE, True)
        offsets = slots.to(tl.int64)[:, None] * SLOT_STRIDE + in_head[None, :]
        is_read = (positions < end)[:, None]
        if DIM != HEAD_DIM:
            is_read = is_read & (dims < HEAD_DIM)[None, :]
        key = tl.load(key_cache_ptr + offsets, mask=is_read, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        scores = _scaled(scores, scale_log2, soft_cap, SOFT_CAP)
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


@triton.jit
def _walk(
    state,
    query,
    query_position,
    key_ptr,
    value_ptr,
    key_desc,
    value_desc,
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
    DESCRIPTORS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take the keys and values of positions first .. end - 1, in tiles, into the state (sum, weights, maxima).

    PAGED: key_ptr and value_ptr are the caches, positions count from the sequence's start. Otherwise they are the packed
    keys and values of the step; positions, query_position too, count from the first new token, which is row packed_start.
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
        if DESCRIPTORS and not PAGED:
            key = key_desc.load([packed_start + at, kv_head * HEAD_DIM])
        else:
            if PAGED:
                if BLOCK_SIZE % TILE == 0:
                    slots = block * BLOCK_SIZE + at % BLOCK_SIZE + tl.arange(0, TILE)
                    block = tl.load(table_ptr + (at + TILE) // BLOCK_SIZE, mask=at + TILE < end, other=0)
                else:
                    slots = _tile_slots(table_ptr, at, seq_end, BLOCK_SIZE, TILE, MASKED)
                offsets = slots.to(tl.int64)[:, None] * SLOT_STRIDE + in_head[None, :]
            else:
                offsets = (packed_start + positions).to(tl.int64)[:, None] * packed_stride + in_head[None, :]
            if MASKED or DIM != HEAD_DIM:
                key = tl.load(key_ptr + offsets, mask=is_read, other=0.0).to(query.dtype)
            else:
                key = tl.load(key_ptr + offsets).to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if SOFT_CAP:
            scores = _scaled(scores, scale_log2, soft_cap, True)
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
        if DESCRIPTORS and not PAGED:
            value = value_desc.load([packed_start + at, kv_head * HEAD_DIM])
        elif MASKED or DIM != HEAD_DIM:
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
    key_desc,
    value_desc,
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
    DESCRIPTORS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
):
    if HEADS_FIRST:
        kv_head = tl.program_id(0)
        item = tl.program_id(1)
    else:
        item = tl.program_id(0)
        kv_head = tl.program_id(1)
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
    greatest = tl.full([ROWS], _NO_SCORE, tl.float32)
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
    # fmt: off
    if WINDOW == 0:
        state = _walk(
            state, query, history + token, key_cache_ptr, value_cache_ptr, key_desc, value_desc, table_ptr, 0, kv_head,
            paged_first, full_end, seq_len, cache_scale_log2, soft_cap, packed_stride, HEAD_DIM, DIM, SLOT_STRIDE,
            BLOCK_SIZE, WINDOW, SOFT_CAP, PRECISION, TILE, STAGES, True, DESCRIPTORS, False,
        )
    state = _walk(
        state, query, history + token, key_cache_ptr, value_cache_ptr, key_desc, value_desc, table_ptr, 0, kv_head,
        full_end, paged_end, paged_end, cache_scale_log2, soft_cap, packed_stride, HEAD_DIM, DIM, SLOT_STRIDE,
        BLOCK_SIZE, WINDOW, SOFT_CAP, PRECISION, TILE, STAGES, True, DESCRIPTORS, True,
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
                state, query, token, key_ptr, value_ptr, key_desc, value_desc, table_ptr, query_start, kv_head,
                new_first, full_end, query_len, scale_log2, soft_cap, packed_stride, HEAD_DIM, DIM, SLOT_STRIDE,
                BLOCK_SIZE, WINDOW, SOFT_CAP, PRECISION, TILE, STAGES, False, DESCRIPTORS, False,
            )
        state = _walk(
            state, query, token, key_ptr, value_ptr, key_desc, value_desc, table_ptr, query_start, kv_head,
            full_end, end_token, query_len, scale_log2, soft_cap, packed_stride, HEAD_DIM, DIM, SLOT_STRIDE,
            BLOCK_SIZE, WINDOW, SOFT_CAP, PRECISION, TILE, STAGES, False, False, True,
        )
        # fmt: on
    weighted, weight_sum, greatest = state
    out_offsets = (query_start + token).to(tl.int64)[:, None] * out_stride
    out_offsets += (query_head * HEAD_DIM)[:, None] + dims[None, :]
    out = weighted / tl.where(is_row, weight_sum, 1.0)[:, None]
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a kernel is built: keys in a tile, warps of a program, depth of the software pipeline."""

    tile: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


HEADS_FIRST = False
HOPPER = True
HOPPER_KW = {}
SUM_REGS = 64

_SHORT_TILES: dict[tuple[int, int], tuple[Tiles, ...]] = {}
_LONG_TILES: dict[tuple[int, int], tuple[Tiles, ...]] = {}


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    *,
    soft_cap: float = 0.0,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    has_short: bool = True,
    has_long: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of packed queries over each sequence's blocks, which hold the step's own keys and values already.

    query: [num_tokens, num_heads, head_dim] float32, float16 or bfloat16; each token's part in one piece.
    key, value: [num_tokens, num_kv_heads, head_dim], what the step has written into the cache, read from here instead
        for queries that are not short; None: everything is read from the cache.
    key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous, in the query's dtype or float8_e4m3fn.
        Block 0 may be read where a table has no block, and its values are not used.
    block_tables: [num_seqs, most blocks] int32; query_start_loc: [num_seqs + 1] int32; seq_lens: [num_seqs] int32.
    plan: filled by plan_attention for the same query_start_loc and seq_lens.
    soft_cap: scores become soft_cap * tanh(score / soft_cap); 0: they do not.
    key_scale, value_scale: [num_kv_heads] float32, what a float8 cache's values are to be multiplied by.
    has_short, has_long: false where the caller knows that the step has no query of at most / of more than plan.short_tokens
        tokens; its kernel is not launched then.
    Returns [num_tokens, num_heads, head_dim] in the query's dtype: `out`, or a new tensor. Rows of no sequence are not written.
    Launches one or two kernels, whose grids depend on the sizes of the tensors alone. Not for two streams at once.
    Raises ValueError for shapes and dtypes that do not fit together.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_blocks, block_size, num_kv_heads, cache_dim = key_cache.shape
    if (num_heads, num_kv_heads, head_dim) != (plan.num_heads, plan.num_kv_heads, plan.head_dim) or cache_dim != head_dim:
        raise ValueError(f"query {list(query.shape)} and cache {list(key_cache.shape)} are not those of the plan")
    if not (key_cache.is_contiguous() and value_cache.is_contiguous() and key_cache.shape == value_cache.shape):
        raise ValueError("key_cache and value_cache must be contiguous and of one shape")
    is_scaled = key_cache.dtype == torch.float8_e4m3fn
    if not is_scaled and key_cache.dtype != query.dtype:
        raise ValueError(f"the cache is {key_cache.dtype}, but the query is {query.dtype}")
    if is_scaled and (key_scale is None or value_scale is None):
        raise ValueError("a float8 cache needs key_scale and value_scale")
    if query.stride()[1:] != (head_dim, 1):
        raise ValueError(f"the heads of a query token must lie side by side, got strides {query.stride()}")
    if (key is None) != (value is None):
        raise ValueError("key and value come together or not at all")
    packed_stride = 0
    if key is not None and value is not None:
        if key.stride() != value.stride() or key.stride()[1:] != (head_dim, 1):
            raise ValueError(f"key and value must have equal strides, heads side by side, got {key.stride()}")
        packed_stride = key.stride(0)
    if out is None:
        out = torch.empty((num_tokens, num_heads, head_dim), dtype=query.dtype, device=query.device)
    num_seqs = len(seq_lens)
    dim = max(16, triton.next_power_of_2(head_dim))
    precision = "ieee" if query.dtype == torch.float32 else "tf32"
    group_size = plan.group_size
    if has_short:
        tiles = _tiles_for(_SHORT_TILES, query, dim)
        group_pad = triton.next_power_of_2(group_size)
        _short_kernel[num_kv_heads, num_seqs + plan.num_programs](
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
            scale if soft_cap else scale * _LOG2_E,
            soft_cap,
            query.stride(0),
            out.stride(0),
            block_tables.stride(0),
            NUM_KV_HEADS=num_kv_heads,
            GROUP=group_size,
            GROUP_PAD=group_pad,
            HEAD_DIM=head_dim,
            DIM=dim,
            SLOT_STRIDE=num_kv_heads * head_dim,
            BLOCK_SIZE=block_size,
            WINDOW=plan.sliding_window,
            SOFT_CAP=soft_cap != 0.0,
            HAS_SCALES=is_scaled,
            PRECISION=precision,
            ROWS=plan.short_rows,
            PARTIAL_ROWS=plan.partial.shape[2],
            TILE=tiles.tile,
            STAGES=tiles.num_stages,
            SUM_PARTS=max(1, tiles.num_warps * 32 * SUM_REGS // (group_pad * dim)),
            num_warps=tiles.num_warps,
            maxnreg=tiles.max_registers,
        )
    num_items = min(len(plan.query_tiles), triton.cdiv(num_tokens, plan.long_tokens) + num_seqs)
    if has_long and HOPPER and query.is_cuda:
        hopper_long_attention(out, query, key, value, key_cache, value_cache, block_tables, plan, scale if soft_cap else scale * _LOG2_E, soft_cap, num_items, **HOPPER_KW)
    elif has_long:
        tiles = _tiles_for(_LONG_TILES, query, dim)
        key_desc, value_desc = None, None
        if key is not None and value is not None and _takes_descriptors(key, dim):
            shape, strides = [num_tokens, num_kv_heads * head_dim], [packed_stride, 1]
            key_desc = TensorDescriptor(key, shape, strides, [tiles.tile, dim])
            value_desc = TensorDescriptor(value, shape, strides, [tiles.tile, dim])
        _long_kernel[(num_kv_heads, num_items) if HEADS_FIRST else (num_items, num_kv_heads)](
            out,
            query,
            key,
            value,
            key_desc,
            value_desc,
            key_cache,
            value_cache,
            block_tables,
            plan.query_tiles,
            plan.num_query_tiles,
            key_scale,
            value_scale,
            scale if soft_cap else scale * _LOG2_E,
            soft_cap,
            query.stride(0),
            packed_stride,
            out.stride(0),
            block_tables.stride(0),
            GROUP=group_size,
            HEAD_DIM=head_dim,
            DIM=dim,
            SLOT_STRIDE=num_kv_heads * head_dim,
            BLOCK_SIZE=block_size,
            WINDOW=plan.sliding_window,
            SOFT_CAP=soft_cap != 0.0,
            HAS_SCALES=is_scaled,
            PRECISION=precision,
            NEW_IS_PACKED=key is not None,
            DESCRIPTORS=key_desc is not None,
            ROWS=QUERY_ROWS,
            TILE=tiles.tile,
            STAGES=tiles.num_stages,
            HEADS_FIRST=HEADS_FIRST,
            num_warps=tiles.num_warps,
            maxnreg=tiles.max_registers,
        )
    return out


def _takes_descriptors(packed: torch.Tensor, dim: int) -> bool:
    """Whether the copy engine of the device can fetch tiles of packed keys or values: 16-byte steps, whole heads."""
    if packed.device.type != "cuda" or torch.cuda.get_device_capability(packed.device)[0] < 9:
        return False
    step = packed.stride(0) * packed.itemsize
    return packed.shape[2] == dim and packed.itemsize == 2 and step % 16 == 0 and packed.data_ptr() % 16 == 0


def _tiles_for(table: dict[tuple[int, int], tuple[Tiles, ...]], query: torch.Tensor, dim: int) -> Tiles:
    return table.get((query.dtype.itemsize, dim), (Tiles(64, 4, 2),))[0]
