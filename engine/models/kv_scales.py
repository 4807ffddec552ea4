"""Scales of a float8 KV cache, chosen when the model is loaded.

e4m3 has three bits behind the point from 2**-6 to 448 and loses them below. A head's keys and values are divided so
that the largest that a short forward shows comes to half of 448: what is twice as large is not cut yet, and what is a
14,000th of it still has all its bits. So much room that drawn tokens do as well as a text. On SmolLM2-135M perplexity
rises by 0.12 % (24,576 tokens of text, tests/bench/quality.py).
"""

from collections.abc import Sequence
from typing import Final, Protocol

import torch

from engine.batch import DeviceBatch
from engine.models.config import ModelConfig

NUM_TOKENS: Final = 512
"""Of the forward, where the model has so many positions."""
_BLOCK_SIZE: Final = 16
_LARGEST: Final = 448.0
"""Of e4m3."""
_HEADROOM: Final = 2.0
_SMALLEST: Final = 1e-6
"""A scale of a head that has shown nothing but zeros."""
_SEED: Final = 0x5EED

KVCache = tuple[torch.Tensor, torch.Tensor]


class StepBody(Protocol):
    """The part of a GPU's model that writes keys and values: GpuDecoder.body."""

    def __call__(
        self,
        batch: DeviceBatch,
        caches: Sequence[KVCache],
        scales: Sequence[KVCache] | None,
        attended: torch.Tensor,
        residual: torch.Tensor,
    ) -> None: ...


def num_scale_tokens(config: ModelConfig) -> int:
    """Of the forward. A model may have a table of fewer positions, and no row in it for more."""
    return min(NUM_TOKENS, config.max_position_embeddings)


def measure_kv_scales(
    body: StepBody, config: ModelConfig, dtype: torch.dtype, device: torch.device, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """→ scales of keys and of values, each [num_layers, num_kv_heads] float32.

    body: of a model made for one sequence of num_tokens tokens and a cache in `dtype`, that of its activations. One
    forward on a small cache of its own, which is let go.
    """
    num_blocks = 1 + -(-num_tokens // _BLOCK_SIZE)
    shape = (config.num_layers, 2, num_blocks, _BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    storage = torch.zeros(shape, dtype=dtype, device=device)
    body(
        _batch(config.vocab_size, num_tokens, num_blocks, device),
        [(layer[0], layer[1]) for layer in storage],
        None,
        torch.zeros(num_tokens, config.num_heads * config.head_dim, dtype=dtype, device=device),
        torch.zeros(num_tokens, config.hidden_size, dtype=dtype, device=device),
    )
    # Block 0 has nothing of the sequence, and is zero as it was.
    largest = storage.abs().amax(dim=(2, 3, 5)).float()
    scales = (largest * (_HEADROOM / _LARGEST)).clamp_(min=_SMALLEST)
    return scales[:, 0].contiguous(), scales[:, 1].contiguous()


def _batch(vocab_size: int, num_tokens: int, num_blocks: int, device: torch.device) -> DeviceBatch:
    """One sequence, from its first token on, in blocks 1, 2 …"""

    def numbers(values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.int32).to(device)

    token_ids = torch.randint(vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(_SEED))
    positions = torch.arange(num_tokens)
    return DeviceBatch(
        token_ids=numbers(token_ids),
        positions=numbers(positions),
        slots=numbers(positions + _BLOCK_SIZE),
        query_start_loc=numbers(torch.tensor([0, num_tokens])),
        seq_lens=numbers(torch.tensor([num_tokens])),
        seq_slots=numbers(torch.tensor([0])),
        block_tables=numbers(torch.arange(1, num_blocks))[None].contiguous(),
        has_long=num_tokens > 1,
    )
