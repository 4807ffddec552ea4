"""Which way a loaded model is computed on a GPU."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch

from engine.batch import DeviceBatch
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, KVCache
from engine.models.gpu_decoder import GpuDecoder
from engine.models.gpu_transformers_model import GpuTransformersModel

if TYPE_CHECKING:
    from engine.models.transformers_model import TransformersModel


class GpuModel(Protocol):
    """A model on a GPU, in the two parts that GpuDecoder explains."""

    config: ModelConfig
    dtype: torch.dtype
    is_capturable: bool
    """Whether its steps can be CUDA graphs."""

    def shallow(self) -> AbstractContextManager[None]: ...

    def body(
        self,
        batch: DeviceBatch,
        caches: Sequence[KVCache],
        scales: Sequence[KVCache] | None,
        attended: torch.Tensor,
        residual: torch.Tensor,
    ) -> None: ...

    def head(self, attended: torch.Tensor, residual: torch.Tensor, logits: torch.Tensor) -> None: ...


def make_gpu_model(
    model: "Decoder | TransformersModel",
    max_model_len: int,
    max_num_seqs: int,
    max_num_tokens: int,
    cache_dtype: torch.dtype,
    device: torch.device,
    is_deterministic: bool = False,
) -> GpuModel:
    """For steps of at most max_num_tokens tokens of at most max_num_seqs sequences; see the two classes for more."""
    sizes = max_model_len, max_num_seqs, max_num_tokens
    if isinstance(model, Decoder):
        return GpuDecoder(model, *sizes, cache_dtype, device, is_deterministic)
    return GpuTransformersModel(model, *sizes, cache_dtype, device, is_deterministic)
