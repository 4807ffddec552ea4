"""A model of transformers on a GPU: its attention through our kernels, all else as transformers computes it.

It has the parts of GpuDecoder, so that the executor need not care. Each of its operators is launched by itself.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from engine.batch import DeviceBatch
from engine.kernels.rope_kv_write import rope_kv_write
from engine.layers.gpu_attention import AttentionKind, PagedAttention
from engine.models.attention_dispatch import LayerAttention
from streamkv.errors import ModelError

if TYPE_CHECKING:
    from engine.models.transformers_model import TransformersModel

KVCache = tuple[torch.Tensor, torch.Tensor]


class GpuTransformersModel:
    """Computes steps of at most max_num_tokens tokens of at most max_num_seqs sequences."""

    is_capturable = False
    """What transformers does may wait for the device."""

    def __init__(
        self,
        model: "TransformersModel",
        max_model_len: int,
        max_num_seqs: int,
        max_num_tokens: int,
        cache_dtype: torch.dtype,
        device: torch.device,
        is_deterministic: bool = False,
    ) -> None:
        """model: on `device`. Raises ModelError for what only the generic decoder can, ValueError for heads that the
        kernels do not do."""
        config = model.config
        if is_deterministic:
            raise ModelError(f"--deterministic: {config.architecture} is computed by transformers, whose bits vary")
        self.config = config
        self.device = device
        self.dtype = model.dtype
        self._model = model
        self._kinds = [
            AttentionKind(config.num_heads, config.num_kv_heads, config.head_dim, layer.sliding_window)
            for layer in model.layers
        ]
        self._attention = PagedAttention(
            set(self._kinds), max_num_seqs, max_num_tokens, self.dtype, cache_dtype, device, False
        )
        # The kernel that writes to the cache turns keys as well; the model has done that: a turn by nothing.
        self._turns = torch.tensor([1.0, 0.0], device=device).repeat(max_model_len, 1)

    def shallow(self) -> AbstractContextManager[None]:
        """As GpuDecoder.shallow, with all layers: a step of these is not captured, so few are run."""
        return nullcontext()

    def first_layers(self, num_layers: int) -> AbstractContextManager[None]:
        """As GpuDecoder.first_layers, with all layers."""
        return nullcontext()

    def body(
        self,
        batch: DeviceBatch,
        caches: Sequence[KVCache],
        scales: Sequence[KVCache] | None,
        attended: torch.Tensor,
        residual: torch.Tensor,
    ) -> None:
        """As GpuDecoder.body: writes every token's keys and values, and to `residual` what the head takes.
        attended: [num_tokens, num_heads * head_dim], not touched."""
        self._attention.begin(batch)

        def attend(
            layer: int, kind: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            key_scale, value_scale = scales[layer] if scales is not None else (None, None)
            rope_kv_write(
                query,
                key,
                value,
                self._turns,
                batch.positions,
                batch.slots,
                *caches[layer],
                pairs_side_by_side=True,
                key_scale=key_scale,
                value_scale=value_scale,
            )
            return self._attention.attend(
                self._kinds[layer],
                query,
                key,
                value,
                caches[layer],
                batch,
                kind.scale,
                soft_cap=kind.soft_cap,
                scales=None if scales is None else scales[layer],
            )

        residual.copy_(self._model.run(batch.token_ids, batch.positions, attend))

    def head(self, attended: torch.Tensor, residual: torch.Tensor, logits: torch.Tensor) -> None:
        """As GpuDecoder.head: residual: [num_rows, hidden_size] → logits: [num_rows, vocab_size] float32, written."""
        logits.copy_(self._model.logits(residual))
