"""The one decoder of the Llama family: Llama, Mistral, Qwen2, Qwen3, Phi-3, Gemma and whoever else a ModelConfig
describes."""

import torch

from engine.batch import ForwardBatch
from engine.layers.attention import Attention
from engine.layers.embedding import Embedding
from engine.layers.linear import Linear
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from engine.layers.rotary import RotaryTable, Rotation, default_frequencies, llama3_frequencies, yarn_frequencies
from engine.models.config import ModelConfig, RopeConfig

KVCache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, each [num_blocks, block_size, num_kv_heads, head_dim]."""


class DecoderLayer:
    """Attention and MLP, each after a norm and added to the residual stream, perhaps after another norm."""

    def __init__(
        self, config: ModelConfig, sliding_window: int | None, dtype: torch.dtype, activation_dtype: torch.dtype
    ) -> None:
        hidden_size, head_dim = config.hidden_size, config.head_dim
        self.head_counts = [config.num_heads, config.num_kv_heads]
        self.rotated_and_value_counts = [config.num_heads + config.num_kv_heads, config.num_kv_heads]
        self.head_dim = head_dim
        num_qkv_rows = (config.num_heads + 2 * config.num_kv_heads) * head_dim
        self.input_norm = _norm(config, hidden_size, activation_dtype)
        self.qkv = Linear(hidden_size, num_qkv_rows, config.qkv_bias, dtype)
        self.query_norm = _norm(config, head_dim, activation_dtype) if config.qk_norm else None
        self.key_norm = _norm(config, head_dim, activation_dtype) if config.qk_norm else None
        self.attention = Attention(
            config.num_heads,
            config.num_kv_heads,
            head_dim,
            config.attention_scale,
            sliding_window,
            config.attention_soft_cap,
        )
        self.output = Linear(config.num_heads * head_dim, hidden_size, config.output_bias, dtype)
        self.attention_output_norm = _norm(config, hidden_size, activation_dtype) if config.has_output_norms else None
        self.mlp_norm = _norm(config, hidden_size, activation_dtype)
        self.mlp = GatedMLP(hidden_size, config.intermediate_size, config.mlp_bias, dtype, config.hidden_act)
        self.mlp_output_norm = _norm(config, hidden_size, activation_dtype) if config.has_output_norms else None

    def __call__(
        self,
        hidden: torch.Tensor,
        rotation: Rotation,
        batch: ForwardBatch,
        cache: KVCache,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden: [num_tokens, hidden_size], changed in place unless `rows` is given → the same shape.

        rows: go on with these rows alone once keys and values are written: [len(rows), hidden_size] comes back.
        """
        heads = self.qkv(self.input_norm(hidden)).view(hidden.shape[0], -1, self.head_dim)
        rotated, value = heads.split_with_sizes(self.rotated_and_value_counts, dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = rotated.split_with_sizes(self.head_counts, dim=1)
            rotated = torch.cat((self.query_norm(query), self.key_norm(key)), dim=1)
        rotated = rotation(rotated)
        query, key = rotated.split_with_sizes(self.head_counts, dim=1)
        attended = self.attention(query, key, value, batch, cache)
        if rows is not None:
            attended, hidden = attended.index_select(0, rows), hidden.index_select(0, rows)
        if self.attention_output_norm is None or self.mlp_output_norm is None:
            hidden += self.output(attended)
            hidden += self.mlp(self.mlp_norm(hidden))
        else:
            hidden += self.attention_output_norm(self.output(attended))
            hidden += self.mlp_output_norm(self.mlp(self.mlp_norm(hidden)))
        return hidden


class Decoder:
    """Packed tokens in, logits of the asked-for rows out. Weights are put in by engine.models.load."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, activation_dtype: torch.dtype) -> None:
        """dtype: of the weights, before their products take them over. activation_dtype: of all between the layers."""
        self.config = config
        self.embedding = Embedding(
            config.vocab_size, config.hidden_size, dtype, activation_dtype, config.embedding_scale
        )
        self.layers = [DecoderLayer(config, window, dtype, activation_dtype) for window in config.sliding_windows]
        self.norm = _norm(config, config.hidden_size, activation_dtype)
        self.head = Linear(config.hidden_size, config.vocab_size, False, dtype)
        self.rotary = _rotary_table(config.rope)
        self.local_rotary = None if config.local_rope is None else _rotary_table(config.local_rope)
        """Of the layers with a sliding window, where they have their own."""

    def forward(self, batch: ForwardBatch, kv_caches: list[KVCache]) -> torch.Tensor:
        """One step: write every token's keys and values, return the logits of batch.sample_rows.

        kv_caches: one per layer, changed in place. Returns [num_samples, vocab_size] float32; with no sample rows the
        last layer stops once its keys and values are written.
        """
        return self.logits(self.hidden(batch, kv_caches, batch.sample_rows))

    def hidden(self, batch: ForwardBatch, kv_caches: list[KVCache], rows: torch.Tensor) -> torch.Tensor:
        """As `forward`, and what `logits` takes of these rows comes back: [len(rows), hidden_size]."""
        hidden = self.embedding(batch.token_ids)
        rotations = self._rotations(batch)
        for layer, rotation, cache in zip(self.layers[:-1], rotations[:-1], kv_caches[:-1], strict=True):
            hidden = layer(hidden, rotation, batch, cache)
        if not len(rows):
            # The products take at least one row; what row 0 comes to is dropped.
            return self.layers[-1](hidden, rotations[-1], batch, kv_caches[-1], torch.zeros(1, dtype=torch.int64))[:0]
        return self.layers[-1](hidden, rotations[-1], batch, kv_caches[-1], rows)

    def _rotations(self, batch: ForwardBatch) -> list[Rotation]:
        """One per layer."""
        num_positions = max(batch.seq_lens)
        rotation = self.rotary.at(batch.positions, num_positions)
        if self.local_rotary is None:
            return [rotation] * len(self.layers)
        local = self.local_rotary.at(batch.positions, num_positions)
        return [rotation if window is None else local for window in self.config.sliding_windows]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] → [n, vocab_size] float32."""
        if not len(hidden):
            return torch.empty(0, self.config.vocab_size)
        logits = self.head(self.norm(hidden)).float()
        cap = self.config.final_soft_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    __call__ = forward


def _norm(config: ModelConfig, size: int, activation_dtype: torch.dtype) -> RMSNorm:
    return RMSNorm(size, config.rms_norm_eps, activation_dtype, config.norm_offset)


def _rotary_table(rope: RopeConfig) -> RotaryTable:
    frequencies = default_frequencies(rope.theta, rope.rotary_dim)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = llama3_frequencies(
            frequencies, rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_max_positions
        )
    elif rope.kind == "yarn":
        frequencies = yarn_frequencies(
            rope.theta,
            rope.rotary_dim,
            rope.factor,
            rope.original_max_positions,
            rope.beta_fast,
            rope.beta_slow,
            rope.truncate,
        )
    if rope.frequency_divisors:
        frequencies = frequencies / torch.tensor(rope.frequency_divisors)
    return RotaryTable(frequencies, rope.attention_factor)
