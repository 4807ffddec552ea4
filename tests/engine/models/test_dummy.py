"""Random weights: right in size and kind, the same at every start, and asked for without a weight file."""

import json
from pathlib import Path

import pytest
import torch

from engine.execution.runner import CpuRunner
from engine.models.decoder import Decoder
from engine.models.dummy import DummySource
from engine.models.load import load_model, read_config, resolve_dtype
from engine.models.transformers_model import TransformersModel
from streamkv.config import EngineConfig
from streamkv.errors import ModelError
from streamkv.model_files import resolve
from tests.support.small_tokenizers import train_byte_level, write_folder
from tests.support.tiny_models import CONFIGS, VOCAB_SIZE, PagedSequences, make_tiny_model


def silent(stage: str, percent: float) -> None:
    pass


def write_config(name: str, folder: Path, **changes: object) -> Path:
    """A folder with config.json and nothing else."""
    CONFIGS[name].save_pretrained(folder)
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), "architectures": [_ARCHITECTURES[name]], **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


_ARCHITECTURES = {
    "llama-biased": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}


def load(folder: Path, dtype: torch.dtype | None = torch.float32) -> Decoder:
    model, _ = load_model(resolve(str(folder), silent, with_weights=False), dtype, silent)
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize("name", _ARCHITECTURES)
def test_a_config_alone_gives_a_model_that_computes(name: str, tmp_path: Path) -> None:
    write_config(name, tmp_path)
    model = load(tmp_path)
    sequence = PagedSequences(model.config, 1)
    logits = model(sequence.batch({0: [5, 3, 8, 1]}), sequence.caches)
    assert logits.shape == (1, VOCAB_SIZE)
    assert logits.isfinite().all() and logits.std() > 0
    again = load(tmp_path)
    sequence = PagedSequences(model.config, 1)
    assert torch.equal(again(sequence.batch({0: [5, 3, 8, 1]}), sequence.caches), logits)


def test_norms_are_one_and_the_rest_is_as_wide_as_the_config_says(tmp_path: Path) -> None:
    write_config("llama-biased", tmp_path, initializer_range=0.125)
    model = load(tmp_path)
    assert model.norm.weight is not None and model.embedding.weight is not None
    assert (model.norm.weight == 1.0).all()
    assert model.embedding.weight.std() == pytest.approx(0.125, rel=0.05)
    assert abs(float(model.embedding.weight.mean())) < 0.01
    write_config("gemma3", tmp_path)
    gemma = load(tmp_path)
    assert gemma.norm.weight is not None and (gemma.norm.weight == 1.0).all()


def test_biases_are_zero_and_no_two_weights_are_the_same(tmp_path: Path) -> None:
    source = DummySource({}, 0.02, 1.0, "cpu")
    first, second, bias = torch.empty(8, 8), torch.empty(8, 8), torch.empty(8)
    source.copy_into("a.weight", first, 0)
    source.copy_into("b.weight", second, 0)
    source.copy_into("b.bias", bias, 0)
    assert not torch.equal(first, second)
    assert not bias.any()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"dtype": "float16"}, torch.float16),
        ({"dtype": None, "torch_dtype": "float32"}, torch.float32),
        ({"dtype": None}, torch.bfloat16),
    ],
)
def test_the_dtype_is_that_of_the_config(fields: dict[str, object], expected: torch.dtype, tmp_path: Path) -> None:
    write_config("qwen3", tmp_path, **fields)
    config = read_config(resolve(str(tmp_path), silent, with_weights=False))
    assert resolve_dtype("auto", config) == expected


def test_a_config_with_another_dtype_is_refused_by_name(tmp_path: Path) -> None:
    write_config("qwen3", tmp_path, dtype="int8")
    with pytest.raises(ModelError, match="dtype"):
        read_config(resolve(str(tmp_path), silent, with_weights=False))


def test_the_shape_of_a_gguf_comes_from_its_metadata() -> None:
    files = resolve("default", silent, with_weights=False)
    assert files.weight_paths == ()
    config = read_config(files)
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert resolve_dtype("auto", config) == torch.bfloat16


def test_weights_beside_the_config_are_not_read(tmp_path: Path) -> None:
    make_tiny_model("qwen3", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    model = load(tmp_path)
    assert model.norm.weight is not None and (model.norm.weight == 1.0).all()


def test_a_model_of_transformers_gets_random_weights_too(tmp_path: Path) -> None:
    config = {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    logits = []
    for _ in range(2):
        model, _ = load_model(resolve(str(tmp_path), silent, with_weights=False), torch.float32, silent)
        assert isinstance(model, TransformersModel)
        sequence = PagedSequences(model.config, 1)
        with torch.inference_mode():
            logits.append(model(sequence.batch({0: [5, 3, 8, 1]}), sequence.caches))
    assert logits[0].isfinite().all() and logits[0].std() > 0
    assert torch.equal(*logits)


def test_the_executor_takes_a_folder_without_weights_for_a_dummy_only(tmp_path: Path) -> None:
    write_folder(tmp_path, train_byte_level())
    write_config("llama-biased", tmp_path, architectures=["LlamaForCausalLM"], vocab_size=500)
    settings = {"model": str(tmp_path), "kv_cache_memory_gib": 0.01, "threads": 1}
    runner = CpuRunner(EngineConfig(**settings, load_format="dummy"))
    try:
        facts, _ = runner.load(silent)
        assert (facts.vocab_size, facts.max_model_len) == (500, 256)
    finally:
        runner.close()
    refused = CpuRunner(EngineConfig(**settings))
    try:
        with pytest.raises(ModelError, match=r"no \*.safetensors"):
            refused.load(silent)
    finally:
        refused.close()
