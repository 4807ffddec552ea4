"""The model that tests/data's greedy reference was made with: the built-in GGUF's values rounded to bfloat16.

usage: python -m tests.support.reference_model FOLDER
"""

import fcntl
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.layers.linear import PlainMethod, Product
from engine.layers.rotary import pair_order
from engine.models.config import ModelConfig
from engine.models.load import load_model
from streamkv.gguf_vocabulary import read_gguf_vocabulary, write_tokenizer_folder
from streamkv.model_files import ModelFiles, cache_folder, resolve

_CACHED_NAME = "smollm2-135m-instruct-bfloat16"


def reference_folder() -> Path:
    """The reference model's folder below STREAMKV_CACHE, made (a few seconds) if it is not there.

    Fetches the built-in model if need be. Safe for several processes at once.
    """
    files = resolve("default", lambda stage, percent: None)
    folder = cache_folder() / _CACHED_NAME
    if folder.is_dir():
        return folder
    with (cache_folder() / f".{_CACHED_NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=cache_folder(), prefix=".reference-") as scratch:
                made = Path(scratch) / "model"
                write_reference_model(files, made)
                made.rename(folder)
    return folder


def write_reference_model(files: ModelFiles, folder: Path) -> None:
    """Weights, configuration and tokenizer of a Llama GGUF as a Hugging Face folder in bfloat16."""
    folder.mkdir(parents=True)
    keep = _KeepWeights()
    model, config = load_model(files, torch.bfloat16, lambda stage, percent: None, keep)
    tensors = {"model.embed_tokens.weight": model.embedding.weight, "model.norm.weight": model.norm.weight}
    num_query, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    products = iter(keep.weights)
    order = pair_order(config.num_heads + config.num_kv_heads, config.head_dim, config.rope.rotary_dim)
    for i, layer in enumerate(model.layers):
        prefix = f"model.layers.{i}."
        rotated, value = next(products).split((num_query + num_kv, num_kv))
        query, key = torch.empty_like(rotated).index_copy_(0, order, rotated).split((num_query, num_kv))
        tensors[prefix + "self_attn.q_proj.weight"] = query
        tensors[prefix + "self_attn.k_proj.weight"] = key
        tensors[prefix + "self_attn.v_proj.weight"] = value
        tensors[prefix + "self_attn.o_proj.weight"] = next(products)
        gate, up = next(products).split(config.intermediate_size)
        tensors[prefix + "mlp.gate_proj.weight"] = gate
        tensors[prefix + "mlp.up_proj.weight"] = up
        tensors[prefix + "mlp.down_proj.weight"] = next(products)
        tensors[prefix + "input_layernorm.weight"] = layer.input_norm.weight
        tensors[prefix + "post_attention_layernorm.weight"] = layer.mlp_norm.weight
    # Slices of a fused weight are whole rows, so they are contiguous; the copies part them from it.
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    (folder / "config.json").write_text(json.dumps(_hub_config(config), indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(config.eos_token_ids)}))
    write_tokenizer_folder(read_gguf_vocabulary(files.tokenizer_path), folder)


def _hub_config(config: ModelConfig) -> dict[str, object]:
    assert config.tie_word_embeddings
    assert config.rope.kind == "default"
    assert not (config.qkv_bias or config.output_bias or config.mlp_bias or config.qk_norm)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "dtype": "bfloat16",
        "eos_token_id": config.eos_token_ids[0],
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "mlp_bias": False,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope.theta, "rope_type": "default"},
        "tie_word_embeddings": True,
        "vocab_size": config.vocab_size,
    }


class _KeepWeights(PlainMethod):
    """Leaves the weights as they were loaded, and remembers them in order: layer by layer, then the head."""

    def __init__(self) -> None:
        super().__init__(torch.bfloat16)
        self.weights: list[torch.Tensor] = []

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        assert bias is None
        self.weights.append(weight)
        return super().make(weight, bias)


if __name__ == "__main__":
    shutil.copytree(reference_folder(), sys.argv[1])
