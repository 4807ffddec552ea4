"""Files → a decoder that is ready to compute."""

import torch

from engine.layers.linear import LinearMethod, choose_cpu_method
from engine.models.config import ModelConfig, read_hub_config
from engine.models.decoder import Decoder
from engine.models.gguf import GgufSource
from engine.models.weights import GGUF_NAMES, HUB_NAMES, SafetensorsSource, fill_decoder
from streamkv.errors import ModelError
from streamkv.model_files import ModelFiles, ReportProgress

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    files: ModelFiles, dtype: torch.dtype | None, report: ReportProgress, method: LinearMethod | None = None
) -> tuple[Decoder, ModelConfig]:
    """Read the model, tensor by tensor, into the form that computes fastest here.

    dtype: of the weights; None takes what `resolve_dtype` makes of "auto". method: how products are computed; None
    chooses for this CPU. Reports ("loading weights", percent) for every tensor. Raises ModelError.
    """
    source: GgufSource | SafetensorsSource
    if files.kind == "gguf":
        source = GgufSource(files.path)
        config, names = source.config(), GGUF_NAMES
    else:
        source = SafetensorsSource(files.weight_paths)
        config, names = read_hub_config(files.path, source.dtype), HUB_NAMES
    dtype = dtype or resolve_dtype("auto", config)
    method = method or choose_cpu_method(dtype, config.num_parameters)
    model = Decoder(config, dtype, method.activation_dtype)
    fill_decoder(model, source, names, method, report)
    return model, config


def read_config(files: ModelFiles) -> ModelConfig:
    """The configuration alone, without loading a weight. Raises ModelError."""
    if files.kind == "gguf":
        return GgufSource(files.path).config()
    return read_hub_config(files.path, SafetensorsSource(files.weight_paths).dtype)


def resolve_dtype(name: str, config: ModelConfig) -> torch.dtype:
    """What `--dtype` means for this model on a CPU. Raises ModelError for an unknown name.

    auto: as the file holds its weights, so that none is rounded for speed; quantised ones become bfloat16, which is
    no coarser than they are and the fastest.
    """
    if name == "auto":
        name = "bfloat16" if config.file_dtype == "quantized" else config.file_dtype
    if name not in _DTYPES:
        raise ModelError(f"dtype {name!r} is unknown; auto, {', '.join(_DTYPES)} are")
    return _DTYPES[name]
