"""The decoder of the Llama family on a GPU: the weights of a Decoder, computed by our kernels in as few launches as go.

A step has two parts, so that each can be a CUDA graph of its own: the body goes by the number of tokens, up to the last
layer's attention; the head goes by the number of sequences, from there to the logits of each sequence's last token.

For few rows a layer is six launches: norm + qkv, rotation + cache write, attention, output + addition, norm + gate and
up + activation, down + addition. For many the library's products are faster, and norms and activation stand between.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from engine.batch import DeviceBatch
from engine.kernels.rms_norm import rms_norm
from engine.kernels.rope_kv_write import rope_kv_write
from engine.kernels.silu_mul import gelu_mul, silu_mul
from engine.kernels.skinny_linear import can_depend
from engine.layers.gpu_attention import AttentionKind, PagedAttention
from engine.layers.gpu_linear import GpuProduct
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.layers.rotary import RotaryTable
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, DecoderLayer

_MAX_DEPENDENT_ROWS: Final = 2
"""Up to so many rows a product may begin while the kernel in front of it ends: measured, more gain nothing."""
_MOST_DEPENDENT_WEIGHTS: Final = 8 * 2**20
"""Of one matrix. Larger ones are bound by the memory from end to end."""

KVCache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, each [num_blocks, block_size, num_kv_heads, head_dim]; or the scales of float8 ones,
each [num_kv_heads]."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """What the kernels take of a DecoderLayer."""

    kind: AttentionKind
    turns: torch.Tensor
    """[max_model_len, rotary_dim] float32."""
    input_norm: torch.Tensor
    qkv: GpuProduct
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: GpuProduct
    output_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: GpuProduct
    down: GpuProduct
    mlp_output_norm: torch.Tensor | None


class GpuDecoder:
    """Computes steps of at most max_num_tokens tokens of at most max_num_seqs sequences."""

    is_capturable = True

    def __init__(
        self,
        model: Decoder,
        max_model_len: int,
        max_num_seqs: int,
        max_num_tokens: int,
        cache_dtype: torch.dtype,
        device: torch.device,
        is_deterministic: bool = False,
    ) -> None:
        """model: with its weights on `device`, their products made for it. max_model_len: positions that may come."""
        config = model.config
        self.config = config
        self.device = device
        self.dtype = model.embedding.activation_dtype
        self._eps = config.rms_norm_eps
        turns = _turns(model.rotary, max_model_len).to(device)
        local_turns = turns if model.local_rotary is None else _turns(model.local_rotary, max_model_len).to(device)
        kinds = [
            AttentionKind(config.num_heads, config.num_kv_heads, config.head_dim, window)
            for window in config.sliding_windows
        ]
        self._layers = [
            _layer(layer, kind, turns if kind.sliding_window is None else local_turns)
            for layer, kind in zip(model.layers, kinds, strict=True)
        ]
        self._attention = PagedAttention(
            set(kinds), max_num_seqs, max_num_tokens, self.dtype, cache_dtype, device, is_deterministic
        )
        assert model.embedding.weight is not None
        self._embedding = model.embedding.weight
        self._embedding_scale = model.embedding.scale
        self._norm = _weight(model.norm)
        self._head = _product(model.head)
        products = [p for layer in self._layers for p in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        self._max_dependent_rows = _MAX_DEPENDENT_ROWS if can_depend(device) and _is_small(config) else 0
        # What a norm stands behind cannot be added to the residual by the product itself.
        self._max_fused_rows = 0 if config.has_output_norms else min(product.max_fused_rows for product in products)

    def shallow(self) -> AbstractContextManager[None]:
        """In its block a step goes through one layer of each kind alone, which is enough to launch every kernel. What
        it computes is worthless."""
        layers = list({layer.kind: layer for layer in self._layers}.values()) + self._layers[-1:]
        # Each has the cache of one of the model's, of which there may be fewer.
        return self._only(layers if len(layers) < len(self._layers) else self._layers)

    def first_layers(self, num_layers: int) -> AbstractContextManager[None]:
        """In its block a step goes through so many layers, 1 to all, each with weights of its own. What it computes is
        worthless."""
        return self._only(self._layers[:num_layers])

    @contextmanager
    def _only(self, layers: list[_Layer]) -> Iterator[None]:
        all_layers, self._layers = self._layers, layers
        try:
            yield
        finally:
            self._layers = all_layers

    def body(
        self,
        batch: DeviceBatch,
        caches: Sequence[KVCache],
        scales: Sequence[KVCache] | None,
        attended: torch.Tensor,
        residual: torch.Tensor,
    ) -> None:
        """Write every token's keys and values, and what the head goes on with.

        caches: one per layer, changed in place; scales: of float8 ones, one per layer.
        attended: [num_tokens, num_heads * head_dim], residual: [num_tokens, hidden_size], both written.
        """
        self._attention.begin(batch)
        torch.index_select(self._embedding, 0, batch.token_ids, out=residual)
        if self._embedding_scale != 1.0:
            residual.mul_(self._embedding_scale)
        delta: torch.Tensor | None = None
        last = len(self._layers) - 1
        for i, layer in enumerate(self._layers):
            out = attended if i == last else torch.empty_like(attended)
            self._attend(layer, delta, residual, batch, caches[i], scales[i] if scales is not None else None, out)
            if i < last:
                delta = self._finish(layer, out, residual)

    def head(self, attended: torch.Tensor, residual: torch.Tensor, logits: torch.Tensor) -> None:
        """attended: [num_rows, num_heads * head_dim]; residual: [num_rows, hidden_size], changed; both of the rows
        whose next tokens are wanted. logits: [num_rows, vocab_size] float32, written."""
        delta = self._finish(self._layers[-1], attended, residual)
        if delta is None and len(residual) <= self._head.max_fused_rows:
            self._head.fused(residual, norm_weight=self._norm, eps=self._eps, out=logits, out_dtype=torch.float32)
        else:
            logits.copy_(self._head(self._normed(delta, residual, self._norm), torch.float32))
        if self.config.final_soft_cap:
            logits.div_(self.config.final_soft_cap).tanh_().mul_(self.config.final_soft_cap)

    def _attend(
        self,
        layer: _Layer,
        delta: torch.Tensor | None,
        residual: torch.Tensor,
        batch: DeviceBatch,
        cache: KVCache,
        scales: KVCache | None,
        out: torch.Tensor,
    ) -> None:
        """delta: what is still to be added to residual; None: nothing. out: [num_tokens, num_heads * head_dim]."""
        kind, num_tokens = layer.kind, len(residual)
        if num_tokens <= self._max_fused_rows:
            heads = layer.qkv.fused(
                residual,
                norm_weight=layer.input_norm,
                eps=self._eps,
                is_dependent=num_tokens <= self._max_dependent_rows,
            )
        else:
            heads = layer.qkv(self._normed(delta, residual, layer.input_norm))
        query, key, value = heads.view(num_tokens, -1, kind.head_dim).split_with_sizes(
            [kind.num_heads, kind.num_kv_heads, kind.num_kv_heads], dim=1
        )
        key_scale, value_scale = scales if scales is not None else (None, None)
        rope_kv_write(
            query,
            key,
            value,
            layer.turns,
            batch.positions,
            batch.slots,
            *cache,
            pairs_side_by_side=True,
            query_norm=layer.query_norm,
            key_norm=layer.key_norm,
            eps=self._eps,
            key_scale=key_scale,
            value_scale=value_scale,
        )
        self._attention.attend(
            kind,
            query,
            key,
            value,
            cache,
            batch,
            self.config.attention_scale,
            soft_cap=self.config.attention_soft_cap,
            scales=scales,
            out=out.view(query.shape),
        )

    def _finish(self, layer: _Layer, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor | None:
        """The layer from behind its attention. residual: [num_rows, hidden_size], changed in place. → what is still
        to be added to it; None: nothing."""
        act = self.config.hidden_act
        if len(residual) <= self._max_fused_rows:
            is_dependent = len(residual) <= self._max_dependent_rows
            layer.output.fused(attended, residual=residual, is_dependent=is_dependent)
            gated = layer.gate_up.fused(
                residual, norm_weight=layer.mlp_norm, eps=self._eps, gated=act, is_dependent=is_dependent
            )
            layer.down.fused(gated, residual=residual, is_dependent=is_dependent)
            return None
        delta = layer.output(attended)
        if layer.output_norm is not None:
            rms_norm(delta, layer.output_norm, self._eps, out=delta)
        gate_up = layer.gate_up(self._normed(delta, residual, layer.mlp_norm))
        delta = layer.down(silu_mul(gate_up) if act == "silu" else gelu_mul(gate_up, tanh=act == "gelu_tanh"))
        if layer.mlp_output_norm is not None:
            rms_norm(delta, layer.mlp_output_norm, self._eps, out=delta)
        return delta

    def _normed(self, delta: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if delta is None:
            return rms_norm(residual, weight, self._eps)
        return rms_norm(delta, weight, self._eps, residual=residual, out=delta)


def _is_small(config: ModelConfig) -> bool:
    """Whether its products take but a few microseconds, so that their beginnings and ends count."""
    return config.hidden_size * config.intermediate_size <= _MOST_DEPENDENT_WEIGHTS


def _layer(layer: DecoderLayer, kind: AttentionKind, turns: torch.Tensor) -> _Layer:
    return _Layer(
        kind=kind,
        turns=turns,
        input_norm=_weight(layer.input_norm),
        qkv=_product(layer.qkv),
        query_norm=_optional_weight(layer.query_norm),
        key_norm=_optional_weight(layer.key_norm),
        output=_product(layer.output),
        output_norm=_optional_weight(layer.attention_output_norm),
        mlp_norm=_weight(layer.mlp_norm),
        gate_up=_product(layer.mlp.gate_up),
        down=_product(layer.mlp.down),
        mlp_output_norm=_optional_weight(layer.mlp_output_norm),
    )


def _weight(norm: RMSNorm) -> torch.Tensor:
    assert norm.weight is not None
    return norm.weight


def _optional_weight(norm: RMSNorm | None) -> torch.Tensor | None:
    return None if norm is None else _weight(norm)


def _product(linear: Linear) -> GpuProduct:
    product = linear.forward
    assert isinstance(product, GpuProduct)
    return product


def _turns(rotary: RotaryTable, max_model_len: int) -> torch.Tensor:
    """[max_model_len, rotary_dim] float32: cosines, then sines. Computed on the host, as a CPU's are."""
    angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * rotary.frequencies.cpu()
    return torch.cat((angles.cos(), angles.sin()), dim=1) * rotary.scale
