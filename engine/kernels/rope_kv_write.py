"""What happens to queries, keys and values between their projection and attention, in one launch."""

import torch
import triton
import triton.language as tl

_HEADS = 4
"""Heads in a program: few, so that one decode alone still spreads over several multiprocessors."""


@triton.jit
def _load_pieces(base_ptr, heads_mask, dims_a, dims_b, is_pair, dims_c, is_tail, HAS_TAIL: tl.constexpr):
    """The two dimensions of each pair, [heads, pairs] each, and those that do not turn, in float32."""
    first = tl.load(base_ptr + dims_a, mask=heads_mask & is_pair, other=0.0).to(tl.float32)
    second = tl.load(base_ptr + dims_b, mask=heads_mask & is_pair, other=0.0).to(tl.float32)
    tail = first
    if HAS_TAIL:
        tail = tl.load(base_ptr + dims_c, mask=heads_mask & is_tail, other=0.0).to(tl.float32)
    return first, second, tail


@triton.jit
def _normalised(
    first, second, tail, weight_ptr, eps, dims_a, dims_b, is_pair, dims_c, is_tail,
    HEAD_DIM: tl.constexpr, HAS_TAIL: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """RMSNorm over each head, rounded as `rms_norm` rounds."""
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    if HAS_TAIL:
        squares += tl.sum(tail * tail, axis=1)
    scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
    weight_a = tl.load(weight_ptr + dims_a, mask=is_pair, other=0.0).to(tl.float32)
    weight_b = tl.load(weight_ptr + dims_b, mask=is_pair, other=0.0).to(tl.float32)
    first = ((first * scale).to(dtype).to(tl.float32) * weight_a).to(dtype).to(tl.float32)
    second = ((second * scale).to(dtype).to(tl.float32) * weight_b).to(dtype).to(tl.float32)
    if HAS_TAIL:
        weight_c = tl.load(weight_ptr + dims_c, mask=is_tail, other=0.0).to(tl.float32)
        tail = ((tail * scale).to(dtype).to(tl.float32) * weight_c).to(dtype).to(tl.float32)
    return first, second, tail


@triton.jit
def _to_cache(x, scale, IS_SCALED: tl.constexpr, dtype: tl.constexpr):
    if IS_SCALED:
        x = tl.minimum(tl.maximum(x / scale, -448.0), 448.0)  # the ends of float8 e4m3, which has no infinity
    return x.to(dtype)


@triton.jit
def _rope_kv_write_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    turns_ptr,
    positions_ptr,
    slots_ptr,
    key_cache_ptr,
    value_cache_ptr,
    query_norm_ptr,
    key_norm_ptr,
    key_scale_ptr,
    value_scale_ptr,
    query_stride,
    key_stride,
    value_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAIRS_SIDE_BY_SIDE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_SCALED: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    TAIL: tl.constexpr,
    DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    HAS_TAIL: tl.constexpr = HEAD_DIM > ROTARY_DIM
    HALF: tl.constexpr = ROTARY_DIM // 2
    QUERY_PARTS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    pairs = tl.arange(0, PAIRS)[None, :]
    is_pair = pairs < HALF
    dims_a = 2 * pairs if PAIRS_SIDE_BY_SIDE else pairs
    dims_b = dims_a + 1 if PAIRS_SIDE_BY_SIDE else pairs + HALF
    tail_dims = ROTARY_DIM + tl.arange(0, TAIL)[None, :]
    is_tail = tail_dims < HEAD_DIM
    turn_ptr = turns_ptr + tl.load(positions_ptr + token).to(tl.int64) * ROTARY_DIM
    cos = tl.load(turn_ptr + pairs, mask=is_pair, other=0.0)
    sin = tl.load(turn_ptr + HALF + pairs, mask=is_pair, other=0.0)
    if part < QUERY_PARTS:
        heads = part * HEADS + tl.arange(0, HEADS)[:, None]
        is_head = heads < NUM_HEADS
        base_ptr = query_ptr + token * query_stride + heads * HEAD_DIM
        first, second, tail = _load_pieces(
            base_ptr, is_head, dims_a, dims_b, is_pair, tail_dims, is_tail, HAS_TAIL
        )  # fmt: skip
        if HAS_NORM:
            first, second, tail = _normalised(
                first, second, tail, query_norm_ptr, eps, dims_a, dims_b, is_pair, tail_dims, is_tail,
                HEAD_DIM, HAS_TAIL, dtype,
            )  # fmt: skip
            if HAS_TAIL:
                tl.store(base_ptr + tail_dims, tail.to(dtype), mask=is_head & is_tail)
        tl.store(base_ptr + dims_a, (first * cos - second * sin).to(dtype), mask=is_head & is_pair)
        tl.store(base_ptr + dims_b, (second * cos + first * sin).to(dtype), mask=is_head & is_pair)
    else:
        heads = (part - QUERY_PARTS) * HEADS + tl.arange(0, HEADS)[:, None]
        is_head = heads < NUM_KV_HEADS
        base_ptr = key_ptr + token * key_stride + heads * HEAD_DIM
        slot = tl.load(slots_ptr + token).to(tl.int64)
        in_cache = slot * (NUM_KV_HEADS * HEAD_DIM) + heads * HEAD_DIM
        cache_dtype: tl.constexpr = key_cache_ptr.dtype.element_ty
        key_scale = 1.0
        value_scale = 1.0
        if IS_SCALED:
            key_scale = tl.load(key_scale_ptr + heads, mask=is_head, other=1.0)
            value_scale = tl.load(value_scale_ptr + heads, mask=is_head, other=1.0)
        first, second, tail = _load_pieces(
            base_ptr, is_head, dims_a, dims_b, is_pair, tail_dims, is_tail, HAS_TAIL
        )  # fmt: skip
        if HAS_NORM:
            first, second, tail = _normalised(
                first, second, tail, key_norm_ptr, eps, dims_a, dims_b, is_pair, tail_dims, is_tail,
                HEAD_DIM, HAS_TAIL, dtype,
            )  # fmt: skip
        if HAS_TAIL:
            tl.store(base_ptr + tail_dims, tail.to(dtype), mask=is_head & is_tail)
            stored = _to_cache(tail, key_scale, IS_SCALED, cache_dtype)
            tl.store(key_cache_ptr + in_cache + tail_dims, stored, mask=is_head & is_tail)
        turned_a = (first * cos - second * sin).to(dtype)
        turned_b = (second * cos + first * sin).to(dtype)
        tl.store(base_ptr + dims_a, turned_a, mask=is_head & is_pair)
        tl.store(base_ptr + dims_b, turned_b, mask=is_head & is_pair)
        stored = _to_cache(turned_a.to(tl.float32), key_scale, IS_SCALED, cache_dtype)
        tl.store(key_cache_ptr + in_cache + dims_a, stored, mask=is_head & is_pair)
        stored = _to_cache(turned_b.to(tl.float32), key_scale, IS_SCALED, cache_dtype)
        tl.store(key_cache_ptr + in_cache + dims_b, stored, mask=is_head & is_pair)
        dims = tl.arange(0, DIM)[None, :]
        in_value = is_head & (dims < HEAD_DIM)
        value = tl.load(value_ptr + token * value_stride + heads * HEAD_DIM + dims, mask=in_value, other=0.0)
        stored = _to_cache(value.to(tl.float32), value_scale, IS_SCALED, cache_dtype)
        tl.store(value_cache_ptr + in_cache + dims, stored, mask=in_value)


def rope_kv_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    turns: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    pairs_side_by_side: bool,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """Normalise (Qwen3) and turn query and key in place, and write key and value to the cache.

    query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim]; heads side by side; a
        token's rows may be parts of one wider matrix.
    turns: [num_positions, rotary_dim] float32: cosines of a position's rotary_dim / 2 angles, then sines; what a kind
        of scaling does to frequencies or amplitude is in it. Dimensions from rotary_dim on do not turn.
    positions, slots: [num_tokens] int32 or int64. Two tokens with one slot: either may win (padding writes to block 0).
    key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous, in the query's dtype or
        float8_e4m3fn; then values are divided by key_scale and value_scale, [num_kv_heads] float32, and cut at 448.
    pairs_side_by_side: dimension 2 i turns with 2 i + 1; else i with i + rotary_dim / 2.
    query_norm, key_norm: [head_dim], RMSNorm over each head before it turns, with `eps`; both or none.
    Computed in float32, rounded to the query's dtype. Bound by memory. Raises ValueError for what does not fit.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    rotary_dim = turns.shape[1]
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.stride()[1:] != (head_dim, 1):
            raise ValueError(f"the heads of a token must lie side by side, got strides {tensor.stride()} of {name}")
    if not (key_cache.is_contiguous() and value_cache.is_contiguous()) or key_cache.shape[2:] != key.shape[1:]:
        raise ValueError(f"the caches must be contiguous and end in {list(key.shape[1:])}, got {list(key_cache.shape)}")
    if rotary_dim % 2 or rotary_dim > head_dim or turns.dtype != torch.float32:
        raise ValueError(
            f"turns must be float32 and even, at most {head_dim} wide, got {turns.dtype} {list(turns.shape)}"
        )
    is_scaled = key_cache.dtype == torch.float8_e4m3fn
    if is_scaled and (key_scale is None or value_scale is None):
        raise ValueError("a float8 cache needs key_scale and value_scale")
    if (query_norm is None) != (key_norm is None):
        raise ValueError("query_norm and key_norm come together or not at all")
    if not num_tokens:
        return
    _rope_kv_write_kernel[num_tokens, triton.cdiv(num_heads, _HEADS) + triton.cdiv(num_kv_heads, _HEADS)](
        query,
        key,
        value,
        turns,
        positions,
        slots,
        key_cache,
        value_cache,
        query_norm,
        key_norm,
        key_scale,
        value_scale,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        PAIRS_SIDE_BY_SIDE=pairs_side_by_side,
        HAS_NORM=query_norm is not None,
        IS_SCALED=is_scaled,
        HEADS=_HEADS,
        PAIRS=triton.next_power_of_2(rotary_dim // 2),
        TAIL=max(1, triton.next_power_of_2(max(1, head_dim - rotary_dim))),
        DIM=triton.next_power_of_2(head_dim),
        num_warps=4 if head_dim >= 128 else 2,
    )
