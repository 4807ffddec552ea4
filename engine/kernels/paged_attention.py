"""Attention over the paged KV cache for mixed batches: any number of query tokens a sequence.

Online softmax over tiles of keys (Milakov and Gimelshein, arXiv 1805.02867; Dao, arXiv 2307.08691), the heads of a
group packed with the query tokens into the rows of one matrix tile: row r is head r % group_size of token
r // group_size. Scores are kept in units of ln 2, so that weights come from exp2. Short and long queries have kernels
of their own.
"""

import torch
import triton

from engine.kernels.attention_plan import AttentionPlan
from engine.kernels.long_attention import long_attention
from engine.kernels.short_attention import short_attention

_HAS_GLUON = triton.__version__.startswith(("3.6.", "3.7.", "3.8."))
"""Triton's lower-level language is experimental and changes: these versions compile the Hopper kernel."""
if _HAS_GLUON:
    from engine.kernels.hopper_attention import hopper_attention, takes_hopper_attention


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    plan: AttentionPlan,
    num_seqs: int,
    scale: float,
    *,
    soft_cap: float = 0.0,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    has_short: bool = True,
    has_long: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of packed queries over each sequence's blocks, which hold the step's own keys and values by now.

    query: [num_tokens, num_heads, head_dim] float32, float16 or bfloat16; the heads of a token side by side.
    key, value: [num_tokens, num_kv_heads, head_dim], what the step has written to the cache: read from here instead for
        queries that are not short, which is faster. None: everything is read from the cache.
    key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], contiguous, in the query's dtype or
        float8_e4m3fn. Positions that no query sees are not read, whatever stands there.
    block_tables: [num_seqs, most blocks] int32.
    plan, num_seqs: as plan_attention was called for this step; its query_start_loc says whose the rows are.
    soft_cap: scores become soft_cap * tanh(score / soft_cap); 0: they do not.
    key_scale, value_scale: [num_kv_heads] float32, what a float8 cache's values are multiplied by.
    has_short, has_long: false where the caller knows that the step has no query of at most, or of more than,
        plan.short_tokens tokens; its kernel is not launched then.
    Returns [num_tokens, num_heads, head_dim] in the query's dtype: `out`, or a new tensor. Rows of no sequence are not
    written. Launches one or two kernels, whose grids depend on the sizes of the tensors alone: fit for a CUDA graph.
    Steps that share a plan must not run at the same time. Raises ValueError for what does not fit together.
    """
    num_tokens, num_heads, head_dim = query.shape
    cache_shape = key_cache.shape
    if (num_heads, *cache_shape[2:]) != (plan.num_heads, plan.num_kv_heads, head_dim) or head_dim != plan.head_dim:
        raise ValueError(f"query {list(query.shape)} and cache {list(cache_shape)} are not those of the plan")
    if not (key_cache.is_contiguous() and value_cache.is_contiguous() and cache_shape == value_cache.shape):
        raise ValueError("key_cache and value_cache must be contiguous and of one shape")
    is_scaled = key_cache.dtype == torch.float8_e4m3fn
    if key_cache.dtype != value_cache.dtype or not (is_scaled or key_cache.dtype == query.dtype):
        raise ValueError(f"the caches are {key_cache.dtype} and {value_cache.dtype}, but the query is {query.dtype}")
    if (key_scale is not None, value_scale is not None) != (is_scaled, is_scaled):
        raise ValueError("key_scale and value_scale go with a float8 cache, and it with them")
    if query.stride()[1:] != (head_dim, 1):
        raise ValueError(f"the heads of a query token must lie side by side, got strides {query.stride()}")
    if (key is None) != (value is None):
        raise ValueError("key and value come together or not at all")
    if key is not None and value is not None and (key.stride() != value.stride() or key.stride()[1:] != (head_dim, 1)):
        raise ValueError(f"key and value must have equal strides, with heads side by side, got {key.stride()}")
    if out is None:
        out = torch.empty((num_tokens, num_heads, head_dim), dtype=query.dtype, device=query.device)
    elif out.stride()[1:] != (head_dim, 1):
        raise ValueError(f"the heads of a row of out must lie side by side, got strides {out.stride()}")
    if has_short:
        short_attention(
            out, query, key_cache, value_cache, block_tables, num_seqs, plan, scale, soft_cap, key_scale, value_scale
        )
    if has_long:
        num_items = min(len(plan.query_tiles), triton.cdiv(num_tokens, plan.long_tokens) + num_seqs)
        if _HAS_GLUON and takes_hopper_attention(query, key, value, key_cache):
            hopper_attention(
                out, query, key, value, key_cache, value_cache, block_tables, num_items, plan, scale, soft_cap
            )
        else:
            long_attention(
                out, query, key, value, key_cache, value_cache, block_tables, num_items, plan, scale, soft_cap,
                key_scale, value_scale,
            )  # fmt: skip
    return out
