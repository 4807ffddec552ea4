"""Which way a loaded model is computed on a GPU, and which models our kernels cannot compute."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, Protocol

import torch

from engine.batch import DeviceBatch
from engine.kernels.attention_plan import QUERY_ROWS
from engine.kernels.sampling_rows import MAX_VOCAB_SIZE
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, KVCache
from engine.models.gpu_decoder import GpuDecoder
from engine.models.gpu_transformers_model import GpuTransformersModel
from engine.models.kv_scales import measure_kv_scales, num_scale_tokens
from streamkv.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from engine.models.transformers_model import TransformersModel

_MAX_TILE: Final = 2**20
"""Numbers in the largest tensor that a program of Triton takes."""
_MAX_HEAD_DIM: Final = _MAX_TILE // QUERY_ROWS
_MAX_ROWS_OF_GRID: Final = 2**16 - 1
"""Of programs, in CUDA's second dimension: where sequences and tiles of queries stand."""
_MAX_NUM_SEQS: Final = 2**15
"""Beside them there is room in a grid for the programs among which contexts are divided."""


class GpuModel(Protocol):
    """A model on a GPU, in the two parts that GpuDecoder explains."""

    config: ModelConfig
    dtype: torch.dtype
    is_capturable: bool
    """Whether its steps can be CUDA graphs."""

    def shallow(self) -> AbstractContextManager[None]: ...

    def first_layers(self, num_layers: int) -> AbstractContextManager[None]: ...

    def body(
        self,
        batch: DeviceBatch,
        caches: Sequence[KVCache],
        scales: Sequence[KVCache] | None,
        attended: torch.Tensor,
        residual: torch.Tensor,
    ) -> None: ...

    def head(self, attended: torch.Tensor, residual: torch.Tensor, logits: torch.Tensor) -> None: ...


def check_kernels_fit(config: ModelConfig, source: str) -> None:
    """All that a model's configuration may have and our kernels cannot compute: asked before its weights are read.

    source: what the configuration is from. Raises ModelError that names the field and its rule.
    """

    def check(is_right: bool, field: str, rule: str, value: int) -> None:
        if not is_right:
            raise ModelError(f"{source}: on a GPU {field} must be {rule}, got {value}; device cpu has no such limit")

    most_heads = QUERY_ROWS * config.num_kv_heads
    rule = f"at most {most_heads}, {QUERY_ROWS} for each of its {config.num_kv_heads} KV heads"
    check(config.num_heads <= most_heads, "num_heads", rule, config.num_heads)
    check(2 <= config.head_dim <= _MAX_HEAD_DIM, "head_dim", f"between 2 and {_MAX_HEAD_DIM}", config.head_dim)
    check(config.hidden_size <= _MAX_TILE, "hidden_size", f"at most {_MAX_TILE}", config.hidden_size)
    check(config.vocab_size <= MAX_VOCAB_SIZE, "vocab_size", f"at most {MAX_VOCAB_SIZE}", config.vocab_size)


def make_gpu_model(
    model: "Decoder | TransformersModel",
    max_model_len: int,
    max_num_seqs: int,
    max_num_tokens: int,
    cache_dtype: torch.dtype,
    device: torch.device,
    is_deterministic: bool = False,
) -> GpuModel:
    """For steps of at most max_num_tokens tokens of at most max_num_seqs sequences; see the two classes for more.
    Raises ConfigError for steps that are too large for a launch."""
    _check_steps_fit(model.config, max_num_seqs, max_num_tokens)
    sizes = max_model_len, max_num_seqs, max_num_tokens
    if isinstance(model, Decoder):
        return GpuDecoder(model, *sizes, cache_dtype, device, is_deterministic)
    return GpuTransformersModel(model, *sizes, cache_dtype, device, is_deterministic)


def _check_steps_fit(config: ModelConfig, max_num_seqs: int, max_num_tokens: int) -> None:
    if max_num_seqs > _MAX_NUM_SEQS:
        raise ConfigError("max_num_seqs", f"must be at most {_MAX_NUM_SEQS} on a GPU, got {max_num_seqs}")
    most_tokens = (_MAX_ROWS_OF_GRID - max_num_seqs) * (QUERY_ROWS // config.group_size)
    if max_num_tokens > most_tokens:
        raise ConfigError(
            "max_num_batched_tokens",
            f"a step of this model on a GPU may have at most {most_tokens} tokens, got {max_num_tokens}; lower it, and "
            "leave enable_chunked_prefill on",
        )


def find_kv_scales(
    model: "Decoder | TransformersModel", dtype: torch.dtype, device: torch.device, is_deterministic: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """→ scales of a float8 cache's keys and values, as measure_kv_scales gives them. dtype: of the activations."""
    num_tokens = num_scale_tokens(model.config)
    unscaled = make_gpu_model(model, num_tokens, 1, num_tokens, dtype, device, is_deterministic)
    return measure_kv_scales(unscaled.body, model.config, dtype, device, num_tokens)
