"""Which models our kernels compute, what is said of the others, and scales for models of few positions."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from transformers import AutoModelForCausalLM, Cohere2Config, GPT2Config

pytest.importorskip("triton")

from engine.execution.gpu_runner import GpuRunner
from engine.models.config import ModelConfig
from engine.models.gpu_model import check_kernels_fit, find_kv_scales, make_gpu_model
from engine.models.load import load_model, read_config
from streamkv.config import EngineConfig
from streamkv.errors import ConfigError, ModelError
from streamkv.model_files import resolve
from tests.support.tiny_models import VOCAB_SIZE, write_small_llama


def silent(stage: str, percent: float) -> None:
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_llama(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def config(folder: Path) -> ModelConfig:
    return read_config(resolve(str(folder), silent))


@pytest.mark.parametrize(
    ("fitting", "field", "beyond", "rule"),
    [
        ({"num_heads": 256, "num_kv_heads": 2}, "num_heads", 258, "at most 256, 128 for each of its 2 KV heads"),
        ({"head_dim": 8192}, "head_dim", 8194, "between 2 and 8192"),
        ({"hidden_size": 2**20}, "hidden_size", 2**20 + 1, "at most 1048576"),
        ({"vocab_size": 2**20}, "vocab_size", 2**20 + 1, "at most 1048576"),
    ],
)
def test_a_model_beyond_what_the_kernels_do_is_told_its_field_and_rule(
    config: ModelConfig, fitting: dict[str, int], field: str, beyond: int, rule: str
) -> None:
    check_kernels_fit(replace(config, **fitting), "m")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=rf"m: on a GPU {field} must be {rule}, got {beyond}; device cpu has no such"):
        check_kernels_fit(replace(config, **{**fitting, field: beyond}), "m")  # type: ignore[arg-type]


def test_heads_that_do_not_share_evenly_are_no_model_on_any_device(tmp_path: Path) -> None:
    """Of the generic decoder's families that is test_config.py's."""
    uneven = Cohere2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=3,
        architectures=["Cohere2ForCausalLM"],
    )
    uneven.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(save({"weight": torch.zeros(1)}))
    with pytest.raises(ModelError, match="4 query heads do not share 3 KV heads of 16 dimensions evenly"):
        read_config(resolve(str(tmp_path), silent))


def test_an_engine_asks_before_it_reads_weights(folder: Path, tmp_path: Path, device: torch.device) -> None:
    values = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "vocab_size": 2**20 + 1}))
    for name in folder.glob("tokenizer*"):
        (tmp_path / name.name).write_bytes(name.read_bytes())
    stages: list[str] = []
    runner = GpuRunner(EngineConfig(model=str(tmp_path), load_format="dummy"), device)
    try:
        with pytest.raises(ModelError, match=rf"^{tmp_path}: on a GPU vocab_size must be at most 1048576, got 1048577"):
            runner.load(lambda stage, percent: stages.append(stage))
    finally:
        runner.close()
    assert "loading weights" not in stages


def test_steps_that_are_too_large_for_a_launch_name_their_setting(folder: Path, device: torch.device) -> None:
    """Groups of two heads have 64 tokens in a tile; tiles and sequences together are at most 65535."""
    model, config = load_model(resolve(str(folder), silent), torch.float32, silent, device=device)
    assert config.group_size == 2
    for max_num_seqs, max_num_tokens, wanted in (
        (2**15 + 1, 2**16, "max_num_seqs: must be at most 32768 on a GPU, got 32769"),
        (5, 65530 * 64 + 1, "max_num_batched_tokens: .* at most 4193920 tokens, got 4193921"),
    ):
        with pytest.raises(ConfigError, match=wanted):
            make_gpu_model(model, 16, max_num_seqs, max_num_tokens, torch.float32, device)  # type: ignore[arg-type]


def test_a_model_of_few_positions_shows_its_scales_within_them(tmp_path: Path, device: torch.device) -> None:
    torch.manual_seed(1)
    few = GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=1, n_head=2, n_positions=20, eos_token_id=2)
    AutoModelForCausalLM.from_config(few).save_pretrained(tmp_path)
    model, config = load_model(resolve(str(tmp_path), silent), torch.float32, silent, device=device)
    assert config.max_position_embeddings == 20
    with torch.inference_mode():
        for scales in find_kv_scales(model, torch.float32, device):  # type: ignore[arg-type]
            assert scales.shape == (1, 2) and bool((scales > 1e-5).all())
