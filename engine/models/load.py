"""Files → a model that is ready to compute."""

from typing import TYPE_CHECKING, Final, Protocol

import torch

from engine.batch import ForwardBatch
from engine.layers.linear import LinearMethod, PlainMethod, choose_cpu_method
from engine.models.config import ModelConfig, is_generic, read_hub_config
from engine.models.decoder import Decoder, KVCache
from engine.models.dummy import DummySource
from engine.models.gguf import GgufSource
from engine.models.room import room_for_weights
from engine.models.weights import (
    GGUF_NAMES,
    SafetensorsSource,
    TensorSource,
    expected_shapes,
    fill_decoder,
    hub_names,
    most_common_dtype,
)
from streamkv.errors import ModelError
from streamkv.model_files import ModelFiles, ReportProgress

if TYPE_CHECKING:
    from engine.models.transformers_model import TransformersModel

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CausalModel(Protocol):
    """A loaded model on a CPU, whoever computes it: see Decoder."""

    config: ModelConfig

    def hidden(self, batch: ForwardBatch, kv_caches: list[KVCache], rows: torch.Tensor) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


def load_model(
    files: ModelFiles,
    dtype: torch.dtype | None,
    report: ReportProgress,
    method: LinearMethod | None = None,
    device: torch.device | str = "cpu",
    head_method: LinearMethod | None = None,
) -> tuple["Decoder | TransformersModel", ModelConfig]:
    """Read the model, tensor by tensor, into the form that computes fastest on `device`.

    Of a family that the generic decoder does not know, transformers computes it, and `method` has no part in it.
    Files without weights (`resolve` was told that they are not wanted) give random ones. dtype: of the weights; None
    takes what `resolve_dtype` makes of "auto". method: how products are computed; None chooses for this CPU, and on
    another device takes PyTorch's own. head_method: the same for the product that gives the logits, where it is to be
    another: 8-bit weights cost more there than in all layers together. Beside the model there is one tensor in the
    host's memory; to a GPU it goes by a plain copy from the mapped file, some GB a second, about what the disk gives.
    Reports ("loading weights", percent) for every tensor. Raises ModelError, or ConfigError for weights that do not
    fit on the device.
    """
    device = torch.device(device)
    config, source = _open(files)
    dtype = dtype or resolve_dtype("auto", config)
    is_quantised = method is not None and method.name.startswith("float8")
    with room_for_weights(config, dtype, device, is_quantised):
        if config.transformers_id:
            from engine.models.transformers_model import load_transformers_model  # seconds, which others need not wait

            return load_transformers_model(files, config, dtype, report, device), config
        names = GGUF_NAMES if files.kind == "gguf" else hub_names(config)
        if method is None:
            method = choose_cpu_method(dtype, config.num_parameters) if device.type == "cpu" else PlainMethod(dtype)
        model = Decoder(config, dtype, method.activation_dtype)
        if source is None:
            std, norm_weight = config.initializer_range, 1.0 - config.norm_offset
            source = DummySource(expected_shapes(model, names), std, norm_weight, device)
        fill_decoder(model, source, names, method, report, device, head_method)
        return model, config


def read_config(files: ModelFiles) -> ModelConfig:
    """The configuration alone, without loading a weight. Raises ModelError."""
    return _open(files)[0]


def _open(files: ModelFiles) -> tuple[ModelConfig, TensorSource | None]:
    """→ the configuration and the generic decoder's weights; None: they are not wanted, or not it computes them."""
    if files.kind == "gguf":
        gguf = GgufSource(files.path)
        return gguf.config(), gguf if files.weight_paths else None
    if not is_generic(files.path):
        from engine.models.transformers_model import read_transformers_config

        return read_transformers_config(files, most_common_dtype(files.weight_paths)), None
    if not files.weight_paths:
        return read_hub_config(files.path, None), None
    source = SafetensorsSource(files.weight_paths)
    return read_hub_config(files.path, source.dtype), source


def resolve_dtype(name: str, config: ModelConfig) -> torch.dtype:
    """What `--dtype` means for this model. Raises ModelError for an unknown name.

    auto: as the file holds its weights, so that none is rounded for speed; quantised ones become bfloat16, which is
    no coarser than they are and the fastest. Without a file's weights: as config.json says.
    """
    if name == "auto":
        name = "bfloat16" if config.file_dtype == "quantized" else config.file_dtype
    if name not in _DTYPES:
        raise ModelError(f"dtype {name!r} is unknown; auto, {', '.join(_DTYPES)} are")
    return _DTYPES[name]
