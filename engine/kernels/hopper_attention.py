"""Attention of long queries on Hopper: what `long_attention` does, with its warps specialised.

Four warps bring tiles of keys and values into shared memory and eight multiply, in two groups of 64 rows. A group has
the product with the keys of the next tile under way while it works out the weights of this one, and the two groups take
turns by themselves: so the matrix unit does not wait for the exponentials (Shah et al., arXiv 2407.08608).

Tiles of the context are gathered row by row through the block table; whole tiles of the packed keys and values, which
lie in one piece, come by the copy engine. Both kinds pass through the same buffers and barriers.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engine.kernels.attention_plan import QUERY_ROWS, AttentionPlan
from engine.kernels.short_attention import LOG2_E


@gluon.jit
def _load_tiles(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_desc,
    value_desc,
    table_ptr,
    keys,
    values,
    key_full,
    key_empty,
    value_full,
    value_empty,
    kv_head,
    packed_start,
    paged_first,
    num_paged,
    packed_first,
    num_packed,
    paged_end,
    query_len,
    packed_stride,
    HEAD_DIM: gl.constexpr,
    SLOT_STRIDE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    NEW_IS_PACKED: gl.constexpr,
):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, TILE, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))
    in_head = kv_head * HEAD_DIM + dims
    positions = paged_first + rows
    blocks = gl.load(table_ptr + positions // BLOCK_SIZE, mask=positions < paged_end, other=0)
    for tile in range(num_paged):
        buffer = tile % STAGES
        phase = (tile // STAGES & 1) ^ 1
        slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        offsets = slots.to(gl.int64)[:, None] * SLOT_STRIDE + in_head[None, :]
        is_read = (positions < paged_end)[:, None] & (dims >= 0)[None, :]
        positions += TILE
        # Looked up one tile ahead, while this one's buffer is still in use.
        blocks = gl.load(table_ptr + positions // BLOCK_SIZE, mask=positions < paged_end, other=0)
        mbarrier.wait(key_empty.index(buffer), phase)
        async_copy.async_copy_global_to_shared(keys.index(buffer), key_cache_ptr + offsets, mask=is_read)
        async_copy.mbarrier_arrive(key_full.index(buffer), increment_count=False)
        mbarrier.wait(value_empty.index(buffer), phase)
        async_copy.async_copy_global_to_shared(values.index(buffer), value_cache_ptr + offsets, mask=is_read)
        async_copy.mbarrier_arrive(value_full.index(buffer), increment_count=False)
    if NEW_IS_PACKED:
        # The copy engine would fetch what stands behind the sequence, too. A weight of zero does not silence NaN.
        num_whole = gl.minimum(num_packed, (query_len - packed_first) // TILE)
        for i in range(num_whole):
            tile = num_paged + i
            buffer = tile % STAGES
            phase = (tile // STAGES & 1) ^ 1
            row = packed_start + packed_first + i * TILE
            # One arrival stands for those of all 128 threads, which a gathered tile has.
            mbarrier.wait(key_empty.index(buffer), phase)
            mbarrier.expect(key_full.index(buffer), TILE * HEAD_DIM * 2)
            tma.async_copy_global_to_shared(
                key_desc, [row, kv_head * HEAD_DIM], key_full.index(buffer), keys.index(buffer)
            )
            mbarrier.arrive(key_full.index(buffer), count=127)
            mbarrier.wait(value_empty.index(buffer), phase)
            mbarrier.expect(value_full.index(buffer), TILE * HEAD_DIM * 2)
            tma.async_copy_global_to_shared(
                value_desc, [row, kv_head * HEAD_DIM], value_full.index(buffer), values.index(buffer)
            )
            mbarrier.arrive(value_full.index(buffer), count=127)
        if num_whole < num_packed:
            tile = num_paged + num_whole
            buffer = tile % STAGES
            phase = (tile // STAGES & 1) ^ 1
            new_tokens = packed_first + num_whole * TILE + rows
            offsets = (packed_start + new_tokens).to(gl.int64)[:, None] * packed_stride + in_head[None, :]
            is_read = (new_tokens < query_len)[:, None] & (dims >= 0)[None, :]
            mbarrier.wait(key_empty.index(buffer), phase)
            async_copy.async_copy_global_to_shared(keys.index(buffer), key_ptr + offsets, mask=is_read)
            async_copy.mbarrier_arrive(key_full.index(buffer), increment_count=False)
            mbarrier.wait(value_empty.index(buffer), phase)
            async_copy.async_copy_global_to_shared(values.index(buffer), value_ptr + offsets, mask=is_read)
            async_copy.mbarrier_arrive(value_full.index(buffer), increment_count=False)


@gluon.jit
def _masked(
    scores,
    tile,
    num_paged,
    paged_first,
    packed_first,
    history,
    first_token,
    token,
    TILE: gl.constexpr,
    WINDOW: gl.constexpr,
    NEW_IS_PACKED: gl.constexpr,
    ROWS: gl.constexpr,
    layout: gl.constexpr,
):
    """Hide what a row may not see, in a tile that has any of it."""
    if NEW_IS_PACKED:
        is_paged = tile < num_paged
        first = gl.where(is_paged, paged_first + tile * TILE, packed_first + (tile - num_paged) * TILE)
        shift = gl.where(is_paged, history, 0)
        # Of the context every row sees all, and nothing behind it.
        seen_by_all = gl.where(is_paged, history - 1, first_token)
    else:
        first = paged_first + tile * TILE
        shift = history
        seen_by_all = history + first_token
    partly = first + TILE - 1 > seen_by_all
    if WINDOW > 0:
        partly = partly | (first <= shift + first_token + ROWS - WINDOW)
    if partly:
        columns = first + gl.arange(0, TILE, layout=gl.SliceLayout(0, layout))
        last = shift + token
        if NEW_IS_PACKED:
            last = gl.minimum(last, gl.where(is_paged, history - 1, 0x7FFFFFFF))
        is_seen = columns[None, :] <= last[:, None]
        if WINDOW > 0:
            is_seen = is_seen & (columns[None, :] > (shift + token - WINDOW)[:, None])
        scores = gl.where(is_seen, scores, -float("inf"))
    return scores


@gluon.jit
def _multiply(
    out_ptr,
    query_ptr,
    queries,
    keys,
    values,
    key_full,
    key_empty,
    value_full,
    value_empty,
    kv_head,
    query_start,
    query_len,
    history,
    first_token,
    paged_first,
    num_paged,
    packed_first,
    num_tiles,
    scale_log2,
    soft_cap,
    query_stride,
    out_stride,
    WHICH: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    NEW_IS_PACKED: gl.constexpr,
    ROWS: gl.constexpr,
):
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    memory_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])

    # The query's tile, as all of it is read: rows of tokens and heads, coalesced.
    rows = WHICH * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, memory_layout))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, memory_layout))
    memory_token = first_token + rows // GROUP
    is_row = (memory_token < query_len) & (rows < 2 * ROWS // GROUP * GROUP)
    in_token = (kv_head * GROUP + rows % GROUP) * HEAD_DIM
    offsets = (query_start + memory_token).to(gl.int64) * query_stride + in_token
    mask = is_row[:, None] & (dims >= 0)[None, :]
    tile_of_query = gl.load(query_ptr + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
    query = queries.index(WHICH)
    query.store(tile_of_query)
    fence_async_shared()

    token = first_token + (WHICH * ROWS + gl.arange(0, ROWS, layout=row_layout)) // GROUP
    my_first_token = first_token + WHICH * ROWS // GROUP
    greatest = gl.full([ROWS], -1.0e30, gl.float32, layout=row_layout)
    weight_sum = gl.zeros([ROWS], gl.float32, layout=row_layout)
    weighted = gl.zeros([ROWS, HEAD_DIM], gl.float32, layout=out_layout)
    no_scores = gl.zeros([ROWS, TILE], gl.float32, layout=score_layout)

    mbarrier.wait(key_full.index(0), 0)
    fence_async_shared()
    pending = warpgroup_mma(query, keys.index(0).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[pending])
    mbarrier.arrive(key_empty.index(0), count=1)
    factor = scale_log2
    if SOFT_CAP:
        scores = _capped(scores, scale_log2, soft_cap)
        factor = 1.0
    scores = _masked(
        scores, 0, num_paged, paged_first, packed_first, history, my_first_token, token,
        TILE, WINDOW, NEW_IS_PACKED, ROWS, score_layout,
    )  # fmt: skip
    greatest = gl.maximum(greatest, gl.max(scores, axis=1) * factor)
    weights = gl.exp2(scores * factor - greatest[:, None])
    weight_sum = gl.sum(weights, axis=1)
    operand = gl.convert_layout(weights.to(query_ptr.dtype.element_ty), weight_layout)
    mbarrier.wait(key_full.index(1 % STAGES), 1 // STAGES & 1, pred=num_tiles > 1)
    for tile in range(1, num_tiles):
        buffer = tile % STAGES
        before = (tile - 1) % STAGES
        fence_async_shared()
        pending = warpgroup_mma(query, keys.index(buffer).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        mbarrier.wait(value_full.index(before), (tile - 1) // STAGES & 1)
        fence_async_shared()
        summing = warpgroup_mma(operand, values.index(before), weighted, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[pending])
        mbarrier.arrive(key_empty.index(buffer), count=1)
        if SOFT_CAP:
            scores = _capped(scores, scale_log2, soft_cap)
        scores = _masked(
            scores, tile, num_paged, paged_first, packed_first, history, my_first_token, token,
            TILE, WINDOW, NEW_IS_PACKED, ROWS, score_layout,
        )  # fmt: skip
        new_greatest = gl.maximum(greatest, gl.max(scores, axis=1) * factor)
        weights = gl.exp2(scores * factor - new_greatest[:, None])
        shrink = gl.exp2(greatest - new_greatest)
        weight_sum = weight_sum * shrink + gl.sum(weights, axis=1)
        greatest = new_greatest
        # The wait for the next keys is a border that the exponentials stay in front of, and their names in the other
        # wait keep them there: so they run while the matrix unit adds up the values.
        after = tile + 1
        mbarrier.wait(key_full.index(after % STAGES), after // STAGES & 1, pred=after < num_tiles)
        weighted, weights, shrink, weight_sum = warpgroup_mma_wait(0, deps=[summing, weights, shrink, weight_sum])
        mbarrier.arrive(value_empty.index(before), count=1)
        operand = gl.convert_layout(weights.to(query_ptr.dtype.element_ty), weight_layout)
        weighted = weighted * gl.convert_layout(shrink, gl.SliceLayout(1, out_layout))[:, None]
    last = num_tiles - 1
    mbarrier.wait(value_full.index(last % STAGES), last // STAGES & 1)
    fence_async_shared()
    summing = warpgroup_mma(operand, values.index(last % STAGES), weighted, is_async=True)
    weighted = warpgroup_mma_wait(0, deps=[summing])

    # Through the query's place in shared memory, so that the rows are written in whole lines.
    weight_sum = gl.where(weight_sum > 0.0, weight_sum, 1.0)
    out = weighted * gl.convert_layout(1.0 / weight_sum, gl.SliceLayout(1, out_layout))[:, None]
    query.store(out.to(out_ptr.dtype.element_ty))
    out_offsets = (query_start + memory_token).to(gl.int64) * out_stride + in_token
    gl.store(out_ptr + out_offsets[:, None] + dims[None, :], query.load(memory_layout), mask=mask)


@gluon.jit
def _capped(scores, scale_log2, soft_cap):
    turned = gl.exp2(scores * scale_log2 * (-2.0 * 1.4426950408889634 / soft_cap))
    return (2.0 / (1.0 + turned) - 1.0) * (soft_cap * 1.4426950408889634)


@gluon.jit
def _hopper_kernel(
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
    scale_log2,
    soft_cap,
    query_stride,
    packed_stride,
    out_stride,
    table_stride,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    SLOT_STRIDE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    NEW_IS_PACKED: gl.constexpr,
    ROWS: gl.constexpr,
    TILE: gl.constexpr,
    STAGES: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr,
):
    kv_head = gl.program_id(0)
    item = gl.program_id(1)
    if item < gl.load(num_query_tiles_ptr):
        seq = gl.load(query_tiles_ptr + 8 * item)
        first_token = gl.load(query_tiles_ptr + 8 * item + 1)
        query_start = gl.load(query_tiles_ptr + 8 * item + 2)
        query_len = gl.load(query_tiles_ptr + 8 * item + 3)
        seq_len = gl.load(query_tiles_ptr + 8 * item + 4)
        history = seq_len - query_len
        end_token = gl.minimum(first_token + 2 * ROWS // GROUP, query_len)
        paged_first = 0
        packed_first = 0
        if WINDOW > 0:
            paged_first = gl.maximum(history + first_token - WINDOW + 1, 0) // TILE * TILE
            packed_first = gl.maximum(first_token - WINDOW + 1, 0) // TILE * TILE
        paged_end = history + end_token
        num_packed = 0
        if NEW_IS_PACKED:
            paged_end = history
            num_packed = (end_token - packed_first + TILE - 1) // TILE
        num_paged = gl.maximum(paged_end - paged_first + TILE - 1, 0) // TILE
        table_ptr = block_tables_ptr + seq.to(gl.int64) * table_stride

        dtype: gl.constexpr = query_ptr.dtype.element_ty
        tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, HEAD_DIM], dtype)
        query_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
        queries = gl.allocate_shared_memory(dtype, [2, ROWS, HEAD_DIM], query_layout)
        keys = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], tile_layout)
        values = gl.allocate_shared_memory(dtype, [STAGES, TILE, HEAD_DIM], tile_layout)
        key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        key_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        value_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        value_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(key_full.index(stage), count=128)
            mbarrier.init(key_empty.index(stage), count=2)
            mbarrier.init(value_full.index(stage), count=128)
            mbarrier.init(value_empty.index(stage), count=2)
        fence_async_shared()
        # fmt: off
        gl.warp_specialize(
            [
                (_multiply, (
                    out_ptr, query_ptr, queries, keys, values, key_full, key_empty, value_full, value_empty, kv_head,
                    query_start, query_len, history, first_token, paged_first, num_paged, packed_first,
                    num_paged + num_packed, scale_log2, soft_cap, query_stride, out_stride,
                    0, GROUP, HEAD_DIM, TILE, STAGES, WINDOW, SOFT_CAP, NEW_IS_PACKED, ROWS,
                )),
                (_multiply, (
                    out_ptr, query_ptr, queries, keys, values, key_full, key_empty, value_full, value_empty, kv_head,
                    query_start, query_len, history, first_token, paged_first, num_paged, packed_first,
                    num_paged + num_packed, scale_log2, soft_cap, query_stride, out_stride,
                    1, GROUP, HEAD_DIM, TILE, STAGES, WINDOW, SOFT_CAP, NEW_IS_PACKED, ROWS,
                )),
                (_load_tiles, (
                    key_ptr, value_ptr, key_cache_ptr, value_cache_ptr, key_desc, value_desc, table_ptr, keys, values,
                    key_full, key_empty, value_full, value_empty, kv_head, query_start, paged_first, num_paged,
                    packed_first, num_packed, paged_end, query_len, packed_stride, HEAD_DIM, SLOT_STRIDE, BLOCK_SIZE,
                    TILE, STAGES, NEW_IS_PACKED,
                )),
            ],
            [4, 4],
            [MULTIPLY_REGISTERS, LOAD_REGISTERS],
        )
        # fmt: on


def takes_hopper_attention(
    query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None, key_cache: torch.Tensor
) -> bool:
    """Whether `hopper_attention` does this: the device, dtypes, head size, and what the copy engine can address."""
    if query.device.type != "cuda" or torch.cuda.get_device_capability(query.device)[0] != 9:
        return False
    if query.dtype not in (torch.float16, torch.bfloat16) or key_cache.dtype != query.dtype:
        return False
    if query.shape[2] not in (64, 128, 256):
        return False
    packed = [] if key is None or value is None else [key, value]
    return all(new.data_ptr() % 16 == 0 and new.stride(0) % 8 == 0 for new in packed)


def hopper_attention(
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
) -> None:
    """As `long_attention`, for what `takes_hopper_attention`."""
    block_size, num_kv_heads, head_dim = key_cache.shape[1:]
    tile = 64 if head_dim == 256 else 128
    key_desc, value_desc = None, None
    if key is not None and value is not None:
        dtype = gl.bfloat16 if query.dtype == torch.bfloat16 else gl.float16
        layout = gl.NVMMASharedLayout.get_default_for([tile, head_dim], dtype)
        shape, strides = [key.shape[0], num_kv_heads * head_dim], [key.stride(0), 1]
        key_desc = TensorDescriptor(key, shape, strides, [tile, head_dim], layout)
        value_desc = TensorDescriptor(value, shape, strides, [tile, head_dim], layout)
    _hopper_kernel[num_kv_heads, num_items](
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
        scale if soft_cap else scale * LOG2_E,
        soft_cap,
        query.stride(0),
        key.stride(0) if key is not None else 0,
        out.stride(0),
        block_tables.stride(0),
        GROUP=plan.group_size,
        HEAD_DIM=head_dim,
        SLOT_STRIDE=num_kv_heads * head_dim,
        BLOCK_SIZE=block_size,
        WINDOW=plan.sliding_window,
        SOFT_CAP=soft_cap != 0.0,
        NEW_IS_PACKED=key is not None,
        ROWS=QUERY_ROWS // 2,
        TILE=tile,
        # Gathered tiles come less evenly. For 256 dimensions there is no room for more than two.
        STAGES=3 if key is None and head_dim != 256 else 2,
        LOAD_REGISTERS=40,
        MULTIPLY_REGISTERS=232,
        num_warps=4,
    )
