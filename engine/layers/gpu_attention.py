"""Attention over the paged KV cache, on a GPU: one plan a step for each kind of layer, shared by its layers."""

from dataclasses import dataclass

import torch

from engine.batch import DeviceBatch
from engine.kernels.attention_plan import AttentionPlan, make_attention_plan, plan_attention
from engine.kernels.paged_attention import paged_attention


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """What layers that share a plan have in common."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None


class PagedAttention:
    """Attends for all layers of a model. `begin` once a step, then `attend` layer after layer."""

    def __init__(
        self,
        kinds: set[AttentionKind],
        max_num_seqs: int,
        max_num_tokens: int,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        device: torch.device,
        is_deterministic: bool,
    ) -> None:
        """Buffers for steps of at most max_num_seqs sequences and max_num_tokens tokens. Raises ValueError for heads
        that the kernels do not do."""
        self.is_deterministic = is_deterministic
        self._plans: dict[AttentionKind, AttentionPlan] = {
            kind: make_attention_plan(
                kind.num_heads,
                kind.num_kv_heads,
                kind.head_dim,
                kind.sliding_window,
                max_num_seqs,
                max_num_tokens,
                dtype,
                cache_dtype,
                device,
                is_deterministic,
            )
            for kind in kinds
        }

    def begin(self, batch: DeviceBatch) -> None:
        """Which program works on what, for each kind. A few microseconds each, no host sync."""
        for plan in self._plans.values():
            plan_attention(plan, batch.query_start_loc, batch.seq_lens, batch.seq_slots)

    def attend(
        self,
        kind: AttentionKind,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        batch: DeviceBatch,
        scale: float,
        *,
        soft_cap: float = 0.0,
        scales: tuple[torch.Tensor, torch.Tensor] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim], already in the
        cache; cache: keys and values, each [num_blocks, block_size, num_kv_heads, head_dim]; scales: of a float8 cache,
        each [num_kv_heads]. Returns [num_tokens, num_heads, head_dim].
        """
        # All from the cache: what a token gets may not depend on whether its neighbours came in the same chunk.
        is_packed = batch.has_long and not self.is_deterministic
        return paged_attention(
            query,
            key if is_packed else None,
            value if is_packed else None,
            *cache,
            batch.block_tables,
            self._plans[kind],
            len(batch.seq_slots),
            scale,
            soft_cap=soft_cap,
            key_scale=scales[0] if scales is not None else None,
            value_scale=scales[1] if scales is not None else None,
            has_short=not self.is_deterministic,
            has_long=batch.has_long or self.is_deterministic,
            out=out,
        )
