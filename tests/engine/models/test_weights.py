"""Safetensors files into the decoder: every tensor in its place, or a refusal that names it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.layers.linear import PlainMethod, Product
from engine.models.load import load_model, read_config, resolve_dtype
from streamkv.errors import ModelError
from streamkv.model_files import resolve
from tests.support.tiny_models import CONFIGS, PagedSequences, make_tiny_model

Change = Callable[[dict[str, torch.Tensor]], object]


def silent(stage: str, percent: float) -> None:
    pass


def load_changed(folder: Path, change: Change) -> None:
    make_tiny_model("llama", folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    load_model(resolve(str(folder), silent), torch.float32, silent)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight"),
        (lambda tensors: tensors.pop("lm_head.weight"), "lm_head.weight"),
        (lambda tensors: tensors.update({"model.layers.3.extra": torch.zeros(2)}), "model.layers.3.extra"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}), "model.norm.weight"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, 1)}), "model.norm.weight"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}),
            "model.norm.weight is I32",
        ),
        (lambda tensors: tensors.clear(), "no tensors"),
    ],
)
def test_a_missing_surplus_or_misshapen_tensor_is_named(change: Change, named: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        load_changed(tmp_path, change)
    assert named in str(error.value)


def test_tensors_that_say_nothing_new_are_passed_over(tmp_path: Path) -> None:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    load_changed(tmp_path, lambda tensors: tensors.update(buffer))


def test_a_tied_head_in_the_file_is_passed_over(tmp_path: Path) -> None:
    make_tiny_model("llama-tied", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = torch.zeros_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, tmp_path / "model.safetensors")
    model, config = load_model(resolve(str(tmp_path), silent), torch.float32, silent)
    sequence = PagedSequences(config, 1)
    assert model(sequence.batch({0: [1, 2]}), sequence.caches).abs().sum() > 0


@pytest.mark.parametrize("num_bytes", [0, 4, 8, 100, 5000, -1])
def test_a_truncated_file_is_refused(num_bytes: int, tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_model(resolve(str(tmp_path), silent), torch.float32, silent)


@pytest.mark.parametrize("content", [b"\xff" * 64, (2**40).to_bytes(8, "little") + b"{}", b"PK\x03\x04" + bytes(60)])
def test_a_file_of_another_kind_is_refused(content: bytes, tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_model(resolve(str(tmp_path), silent), torch.float32, silent)


def test_a_model_in_several_files_loads_the_same(tmp_path: Path) -> None:
    reference = make_tiny_model("qwen3", tmp_path / "one")
    reference.save_pretrained(tmp_path / "several", max_shard_size="60KB")
    files = resolve(str(tmp_path / "several"), silent)
    assert len(files.weight_paths) > 2
    logits = []
    for folder in ("one", "several"):
        model, config = load_model(resolve(str(tmp_path / folder), silent), torch.float32, silent)
        sequence = PagedSequences(config, 1)
        logits.append(model(sequence.batch({0: [3, 1, 2]}), sequence.caches))
    assert torch.equal(*logits)


def test_progress_grows_from_0_to_100(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    percents = []

    def report(stage: str, percent: float) -> None:
        assert stage == "loading weights"
        percents.append(percent)

    load_model(resolve(str(tmp_path), silent), torch.float32, report)
    assert percents == sorted(percents)
    assert (percents[0], percents[-1]) == (0.0, 100.0)
    assert len(percents) > 25


@pytest.mark.parametrize("name", CONFIGS)
def test_the_number_of_parameters_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    reference = make_tiny_model(name, tmp_path)
    config = read_config(resolve(str(tmp_path), silent))
    assert config.num_parameters == sum(parameter.numel() for parameter in reference.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_auto_keeps_the_dtype_of_the_file(dtype: torch.dtype, tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path, dtype)
    config = read_config(resolve(str(tmp_path), silent))
    assert resolve_dtype("auto", config) == dtype
    assert resolve_dtype("float32", config) == torch.float32
    with pytest.raises(ModelError, match="int8"):
        resolve_dtype("int8", config)


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_the_head_can_be_computed_in_another_way_than_the_layers(name: str, tmp_path: Path) -> None:
    class Doubled(PlainMethod):
        def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
            return super().make(2 * weight, bias)

    make_tiny_model(name, tmp_path)
    logits = []
    for head_method in (None, Doubled(torch.float32)):
        model, config = load_model(
            resolve(str(tmp_path), silent), torch.float32, silent, PlainMethod(torch.float32), "cpu", head_method
        )
        sequence = PagedSequences(config, 1)
        logits.append(model(sequence.batch({0: [3, 1, 2]}), sequence.caches))
    assert torch.equal(2 * logits[0], logits[1])
