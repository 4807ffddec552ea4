"""Models that the generic decoder does not know agree with transformers, on the same paged cache."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    GPT2Config,
    GPTNeoXConfig,
    Olmo2Config,
    PretrainedConfig,
    PreTrainedModel,
)

from engine.models.attention_dispatch import Attend, LayerAttention
from engine.models.load import load_model, read_config
from engine.models.transformers_model import TransformersModel
from engine.models.trial import try_out
from streamkv.errors import ModelError
from streamkv.model_files import resolve
from tests.support.tiny_models import VOCAB_SIZE, PagedSequences

RELATIVE = 1e-4
"""Of the largest logit: float32 with the sums in another order."""
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "gpt2": GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=64,
        n_layer=3,
        n_head=4,
        n_positions=256,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "gpt-neox": GPTNeoXConfig(**_SIZES, rotary_pct=0.25),
    "olmo2": Olmo2Config(**_SIZES, num_key_value_heads=2),
    "cohere2": Cohere2Config(**_SIZES, num_key_value_heads=2, logit_scale=0.5, sliding_window=7),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def silent(stage: str, percent: float) -> None:
    pass


def make(name: str, folder: Path) -> PreTrainedModel:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager").eval()
    model.save_pretrained(folder)
    return model


def load(folder: Path, with_weights: bool = True) -> TransformersModel:
    model, _ = load_model(resolve(str(folder), silent, with_weights), torch.float32, silent)
    assert isinstance(model, TransformersModel)
    return model


def prompts(num: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, VOCAB_SIZE, (num, length), generator=generator).tolist()


def expected_logits(reference: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([ids]), use_cache=False).logits[0].float()


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == torch.float32
    assert (actual - expected).abs().max() <= RELATIVE * expected.abs().max()


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_transformers_in_pieces_and_in_mixed_steps(name: str, tmp_path: Path) -> None:
    reference = make(name, tmp_path)
    model = load(tmp_path)
    ids = prompts(3, 30)
    expected = [expected_logits(reference, sequence_ids) for sequence_ids in ids]
    sequences = PagedSequences(model.config, 3)
    with torch.inference_mode():
        model(sequences.batch({0: ids[0][:9], 1: ids[1][:20]}), sequences.caches)
        logits = model(sequences.batch({2: ids[2][:13], 0: ids[0][9:10], 1: ids[1][20:29]}), sequences.caches)
        for row, (i, position) in zip(logits, [(2, 12), (0, 9), (1, 28)], strict=True):
            assert_close(row, expected[i][position])
        logits = model(sequences.batch({0: ids[0][10:11], 1: ids[1][29:], 2: ids[2][13:]}), sequences.caches)
        for row, (i, position) in zip(logits, [(0, 10), (1, 29), (2, 29)], strict=True):
            assert_close(row, expected[i][position])
        assert model(sequences.batch({0: ids[0][11:13]}, sampled=set()), sequences.caches).shape == (0, VOCAB_SIZE)
        logits = model(sequences.batch({0: ids[0][13:14]}), sequences.caches)
        assert_close(logits, expected[0][13:14])


def test_the_configuration_tells_what_the_engine_must_know(tmp_path: Path) -> None:
    reference = make("gpt2", tmp_path)
    config = read_config(resolve(str(tmp_path), silent))
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (3, 4, 4, 16)
    assert (config.max_position_embeddings, config.eos_token_ids, config.file_dtype) == (256, (2,), "float32")
    assert config.num_parameters == sum(parameter.numel() for parameter in reference.parameters())
    before = config.transformers_id
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "layer_norm_epsilon": 0.1}))
    assert read_config(resolve(str(tmp_path), silent)).transformers_id != before


def refusal(folder: Path, **config: Any) -> str:
    (folder / "config.json").write_text(json.dumps({**_SIZES, "num_hidden_layers": 2, **config}))
    with pytest.raises(ModelError) as error:
        load(folder, with_weights=False)
    return str(error.value)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "d_kv": 16}, "encoder-decoders"),
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "no causal language model"),
        ({"architectures": ["BertLMHeadModel"], "model_type": "bert"}, "not plainly causal (is_causal)"),
        ({"architectures": ["NewForCausalLM"], "model_type": "never-seen"}, "does not know this model"),
        (
            {
                "architectures": ["NewForCausalLM"],
                "model_type": "never-seen",
                "auto_map": {"AutoConfig": "configuration_new.NewConfig"},
            },
            "does not know this model",
        ),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "not plain attention"),
        ({"architectures": ["JambaForCausalLM"], "model_type": "jamba"}, "not plain attention"),
        ({"architectures": ["BloomForCausalLM"], "model_type": "bloom", "n_layer": 2, "n_head": 4}, "no position_ids"),
        ({"architectures": ["FalconForCausalLM"], "model_type": "falcon", "alibi": True}, "its attention by itself"),
        (
            {
                "architectures": ["GptOssForCausalLM"],
                "model_type": "gpt_oss",
                "num_local_experts": 2,
                "num_key_value_heads": 4,
                "head_dim": 16,
            },
            "s_aux",
        ),
        (
            {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "num_key_value_heads": 2},
            "keys have 4 heads of 16",
        ),
        (
            {
                "architectures": ["GPTNeoXForCausalLM"],
                "model_type": "gpt_neox",
                "quantization_config": {"quant_method": "gptq"},
            },
            "gptq",
        ),
    ],
)
def test_what_the_paged_cache_cannot_hold_is_refused_with_the_reason(
    config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    assert reason in refusal(tmp_path, **config)


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "configuration_new.py").write_text("raise SystemExit('run')")
    config = {"model_type": "never-seen", "auto_map": {"AutoConfig": "configuration_new.NewConfig"}}
    assert "does not know this model" in refusal(tmp_path, architectures=["NewForCausalLM"], **config)


def test_weights_that_are_missing_are_named(tmp_path: Path) -> None:
    make("olmo2", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)


class _Leaking:
    """A model that adds what it saw in earlier steps, and what stands before a token in the same step."""

    def __init__(self) -> None:
        self.state = torch.zeros(4)

    def run(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        hidden = torch.nn.functional.one_hot(token_ids % 4, 4).float()
        attend(0, LayerAttention(1.0, None, 0.0), hidden[:, None], hidden[:, None], hidden[:, None])
        self.state = self.state + hidden.sum(dim=0)
        return hidden + self.state


def test_a_model_that_keeps_a_state_of_its_own_fails_its_trial(tmp_path: Path) -> None:
    make("gpt2", tmp_path)
    config = replace(read_config(resolve(str(tmp_path), silent)), num_layers=1)
    with pytest.raises(ModelError, match="keeps more of a sequence"):
        try_out(_Leaking().run, lambda hidden: hidden, config, torch.zeros(1))
