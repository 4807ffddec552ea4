"""Attention over the paged KV cache, on a CPU.

Sequences with one query token (decodes) are read in place, with no copy of their blocks and no padding to the longest:
the scores are a sampled matrix product, whose sparse rows name the slots of each sequence, and the weighted sum of the
values is an embedding bag over the same slots. A chunk of several query tokens goes through PyTorch's fused attention,
one sequence at a time; only what an earlier step wrote is gathered for it.
"""

import warnings
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from engine.batch import ForwardBatch

_BAG_SUM = 0


@dataclass(slots=True)
class _DecodeRows:
    """Where the decodes of one step find their keys: row `i * num_heads + h` is head h of sequence i.

    The buffers are shared by all layers, which run one after the other.
    """

    scores: torch.Tensor
    """Sparse CSR [num_decodes * num_heads, num_blocks * block_size * num_kv_heads] float32, written by every layer."""
    row_starts: torch.Tensor
    """[num_decodes * num_heads + 1]: each row's part of the values of `scores` and of `weights`."""
    kv_rows: torch.Tensor
    """[nnz]: the visible positions of each row, as rows of the cache seen as [-1, head_dim]."""
    weights: torch.Tensor
    """[nnz] float32: softmax of the scores."""
    per_sequence: list[tuple[torch.Tensor, torch.Tensor]]
    """Views of the values of `scores` and of `weights`, each [num_heads, visible positions]."""


@dataclass(slots=True)
class _Chunk:
    """One sequence with more than one query token."""

    query_start: int
    query_end: int
    history_slots: torch.Tensor | None
    """[num_history] int64: the visible positions before this chunk; None: there are none."""
    mask: torch.Tensor | None
    """[num_queries, num_history + num_queries] float32, added to the scores: 0 or -inf. None: plainly causal."""


@dataclass(slots=True)
class _StepIndex:
    """All that attention needs of a batch and that does not change from layer to layer."""

    decodes: _DecodeRows | None
    chunks: list[_Chunk]


class Attention:
    """Causal attention of packed queries over each sequence's blocks, with grouped KV heads and a sliding window.

    Holds no weights. Computes in float32, which is also the cache's dtype: on a CPU the reads of a float32 cache cost
    less than the conversion of a narrower one. What a token gets does not depend on the other sequences of its batch.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        sliding_window: int | None,
        soft_cap: float = 0.0,
    ) -> None:
        """`sliding_window`: a query sees itself and the sliding_window - 1 positions before it; None: all of them.
        soft_cap: scores become soft_cap * tanh(score / soft_cap) before the softmax; 0: they do not.

        Raises ValueError when num_heads is no multiple of num_kv_heads.
        """
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.group_size = num_heads // num_kv_heads
        self.scale = scale
        self.sliding_window = sliding_window
        self.soft_cap = soft_cap

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch: ForwardBatch,
        cache: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Write key and value into the cache at batch.slots, then attend.

        query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim].
        cache: keys and values, each [num_blocks, block_size, num_kv_heads, head_dim] float32, changed in place.
        Returns [num_tokens, num_heads * head_dim] in the query's dtype.
        """
        dtype = query.dtype
        key_cache, value_cache = cache
        query, key, value = query.float(), key.float(), value.float()
        keys = key_cache.view(-1, self.num_kv_heads, self.head_dim)
        values = value_cache.view(-1, self.num_kv_heads, self.head_dim)
        keys.index_copy_(0, batch.slots, key)
        values.index_copy_(0, batch.slots, value)

        index = self._index(batch, key_cache)
        if not index.chunks and index.decodes is not None:
            return self._decode(query, index.decodes, keys, values).to(dtype)
        out = torch.empty(query.shape[0], self.num_heads * self.head_dim)
        if index.decodes is not None:
            out[: batch.num_decodes] = self._decode(query[: batch.num_decodes], index.decodes, keys, values)
        for chunk in index.chunks:
            rows = slice(chunk.query_start, chunk.query_end)
            out[rows] = self._attend_chunk(query[rows], key[rows], value[rows], chunk, keys, values)
        return out.to(dtype)

    __call__ = forward

    def _decode(self, query: torch.Tensor, rows: _DecodeRows, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """query: [num_decodes, num_heads, head_dim] → [num_decodes, num_heads * head_dim]."""
        flat_query = query.reshape(-1, self.head_dim)
        flat_keys = keys.view(-1, self.head_dim)
        torch.sparse.sampled_addmm(rows.scores, flat_query, flat_keys.t(), beta=0.0, alpha=self.scale, out=rows.scores)
        for scores, weights in rows.per_sequence:
            if self.soft_cap:
                scores.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
            torch.softmax(scores, -1, out=weights)
        attended = torch.embedding_bag(
            values.view(-1, self.head_dim), rows.kv_rows, rows.row_starts, False, _BAG_SUM, False, rows.weights, True
        )[0]
        return attended.view(-1, self.num_heads * self.head_dim)

    def _attend_chunk(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        chunk: _Chunk,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """query: [num_queries, num_heads, head_dim] → [num_queries, num_heads * head_dim]."""
        if chunk.history_slots is not None:
            key = torch.cat((keys.index_select(0, chunk.history_slots), key))
            value = torch.cat((values.index_select(0, chunk.history_slots), value))
        if self.soft_cap:
            return self._attend_capped(query, key, value, chunk.mask)
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=self.scale,
            enable_gqa=self.group_size > 1,
        )
        return attended[0].transpose(0, 1).reshape(query.shape[0], -1)

    def _attend_capped(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """As PyTorch's fused attention, which has no soft cap; the heads of one KV head at a time."""
        if mask is None:
            mask = torch.full((len(query), len(key)), float("-inf")).triu_(1)
        out = torch.empty_like(query)
        for kv_head in range(self.num_kv_heads):
            heads = slice(kv_head * self.group_size, (kv_head + 1) * self.group_size)
            scores = query[:, heads].transpose(0, 1) @ (key[:, kv_head].t() * self.scale)
            scores.div_(self.soft_cap).tanh_().mul_(self.soft_cap).add_(mask)
            out[:, heads] = (scores.softmax(-1) @ value[:, kv_head]).transpose(0, 1)
        return out.view(len(query), -1)

    def _index(self, batch: ForwardBatch, key_cache: torch.Tensor) -> _StepIndex:
        """The step's index, made by the first layer that asks for it."""
        name = ("attention", self.num_heads, self.num_kv_heads, self.sliding_window)
        index = batch.prepared.get(name)
        if not isinstance(index, _StepIndex):
            index = batch.prepared[name] = self._make_index(batch, key_cache)
        return index

    def _make_index(self, batch: ForwardBatch, key_cache: torch.Tensor) -> _StepIndex:
        num_blocks, block_size = key_cache.shape[:2]
        decodes = None
        if batch.num_decodes:
            decodes = self._make_decode_rows(batch, block_size, num_blocks * block_size * self.num_kv_heads)
        chunks = [self._make_chunk(batch, i, block_size) for i in range(batch.num_decodes, len(batch.seq_lens))]
        return _StepIndex(decodes, chunks)

    def _first_visible(self, position: int) -> int:
        """The first position that the query at `position` sees."""
        return 0 if self.sliding_window is None else max(0, position - self.sliding_window + 1)

    def _make_decode_rows(self, batch: ForwardBatch, block_size: int, num_kv_rows: int) -> _DecodeRows:
        dtype = torch.int32 if num_kv_rows < 2**31 else torch.int64
        spans = [(self._first_visible(seq_len - 1), seq_len) for seq_len in batch.seq_lens[: batch.num_decodes]]
        nnz = self.num_heads * sum(end - first for first, end in spans)
        row_lens = np.repeat([end - first for first, end in spans], self.num_heads)
        row_starts = torch.from_numpy(np.concatenate(([0], np.cumsum(row_lens)))).to(dtype)
        kv_rows = torch.empty(nnz, dtype=dtype)
        head_offsets = (torch.arange(self.num_heads, dtype=dtype) // self.group_size)[:, None]
        score_values = torch.zeros(nnz)
        weights = torch.empty(nnz)
        per_sequence = []
        at = 0
        for table, (first, end) in zip(batch.block_tables, spans, strict=False):
            shape = (self.num_heads, end - first)
            part = slice(at, at + shape[0] * shape[1])
            slots = _slots(table, first, end, block_size).to(dtype)
            torch.add(slots * self.num_kv_heads, head_offsets, out=kv_rows[part].view(shape))
            per_sequence.append((score_values[part].view(shape), weights[part].view(shape)))
            at = part.stop
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            scores = torch.sparse_csr_tensor(
                row_starts,
                kv_rows,
                score_values,
                size=(len(row_lens), num_kv_rows),
                check_invariants=False,
            )
        return _DecodeRows(scores, row_starts, kv_rows, weights, per_sequence)

    def _make_chunk(self, batch: ForwardBatch, i: int, block_size: int) -> _Chunk:
        query_start, query_end = batch.query_start_loc[i], batch.query_start_loc[i + 1]
        seq_len = batch.seq_lens[i]
        start = seq_len - (query_end - query_start)
        first = self._first_visible(start)
        if start == 0 and self._first_visible(seq_len - 1) == 0:
            return _Chunk(query_start, query_end, None, None)
        history_slots = _slots(batch.block_tables[i], first, start, block_size) if first < start else None
        query_positions = torch.arange(start, seq_len)[:, None]
        key_positions = torch.arange(first, seq_len)[None, :]
        hidden = key_positions > query_positions
        if self.sliding_window is not None:
            hidden |= key_positions <= query_positions - self.sliding_window
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        return _Chunk(query_start, query_end, history_slots, mask)


def _slots(block_table: list[int], first: int, end: int, block_size: int) -> torch.Tensor:
    """The slots of positions first .. end - 1 of one sequence: [end - first] int64."""
    first_block = first // block_size
    blocks = torch.tensor(block_table[first_block : -(-end // block_size)])
    slots = (blocks[:, None] * block_size + torch.arange(block_size)).view(-1)
    return slots[first - first_block * block_size : end - first_block * block_size]
