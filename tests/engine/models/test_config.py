"""config.json and GGUF metadata → ModelConfig, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.models.config import ModelConfig, read_gguf_config, read_hub_config
from streamkv.errors import ModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": 160,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
GGUF: dict[str, object] = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.block_count": 4,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 256,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.eos_token_id": 2,
}


def read(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_hub_config(folder, "float32")


def test_sizes_that_a_config_leaves_out_follow_from_the_others(tmp_path: Path) -> None:
    config = read(tmp_path, num_key_value_heads=None)
    assert (config.head_dim, config.num_kv_heads, config.group_size) == (16, 4, 1)
    assert config.rope.theta == 10000.0
    assert config.tie_word_embeddings is False
    assert config.eos_token_ids == (2,)


def test_end_of_sequence_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    assert read(tmp_path, {"eos_token_id": [7, 3, 7]}).eos_token_ids == (7, 3)
    assert read(tmp_path, {"temperature": 1.0}).eos_token_ids == (2,)
    # An id outside the vocabulary can never be sampled.
    assert read(tmp_path, {"eos_token_id": [7, 160]}).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").unlink()
    assert read(tmp_path, eos_token_id=None).eos_token_ids == ()


def test_sliding_layers_follow_each_familys_rule(tmp_path: Path) -> None:
    assert read(tmp_path, sliding_window=9).sliding_windows == (None,) * 4
    assert read(tmp_path, architectures=["MistralForCausalLM"], sliding_window=9).sliding_windows == (9,) * 4
    assert read(tmp_path, architectures=["MistralForCausalLM"], sliding_window=None).sliding_windows == (None,) * 4
    qwen: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9, "max_window_layers": 3}
    assert read(tmp_path, **qwen).sliding_windows == (None,) * 4
    assert read(tmp_path, **qwen, use_sliding_window=True).sliding_windows == (None, None, None, 9)
    types = ["sliding_attention", "full_attention"] * 2
    assert read(tmp_path, **qwen, use_sliding_window=True, layer_types=types).sliding_windows == (9, None) * 2


def test_biases_and_norms_follow_each_familys_rule(tmp_path: Path) -> None:
    def parts(**changes: Any) -> tuple[bool, bool, bool, bool]:
        config = read(tmp_path, **changes)
        return config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm

    assert parts() == (False, False, False, False)
    assert parts(attention_bias=True, mlp_bias=True) == (True, True, True, False)
    assert parts(architectures=["Qwen2ForCausalLM"]) == (True, False, False, False)
    assert parts(architectures=["Qwen3ForCausalLM"]) == (False, False, False, True)
    assert parts(architectures=["MistralForCausalLM"], attention_bias=True) == (False, False, False, False)


def test_rope_of_transformers_4_and_5_read_the_same(tmp_path: Path) -> None:
    stretch = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = read(tmp_path, rope_theta=5e5, rope_scaling={"rope_type": "llama3", **stretch})
    new = read(tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **stretch})
    assert old == new
    assert new.rope.theta == 5e5
    assert read(tmp_path, rope_scaling={"type": "linear", "factor": 2.0}).rope.kind == "linear"
    # Beyond max_position_embeddings, where it would differ, no sequence goes.
    assert read(tmp_path, rope_scaling={"type": "dynamic", "factor": 2.0}) == read(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM"),
        ({"architectures": None}, "architecture None"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"hidden_act": "relu"}, "relu"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"head_dim": 15}, "15"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 9, "layer_types": []},
            "layer_types",
        ),
    ],
)
def test_what_is_not_supported_or_makes_no_sense_is_refused_by_name(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as error:
        read(tmp_path, **changes)
    assert named in str(error.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_a_config_that_is_no_object_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_hub_config(tmp_path, "float32")


def read_gguf(tensor_names: set[str], **changes: object) -> ModelConfig:
    metadata = {**GGUF, **{key.replace("__", "."): value for key, value in changes.items()}}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return read_gguf_config(metadata, tensor_names, 160, (), "quantized", "model.gguf")


def test_a_gguf_says_by_its_tensors_what_it_has_no_keys_for() -> None:
    plain = read_gguf({"output.weight"})
    assert not (plain.tie_word_embeddings or plain.qkv_bias or plain.output_bias or plain.mlp_bias or plain.qk_norm)
    names = {"blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_down.bias", "blk.0.attn_q_norm.weight"}
    full = read_gguf(names)
    assert full.tie_word_embeddings
    assert full.qkv_bias
    assert full.output_bias
    assert full.mlp_bias
    assert full.qk_norm


def test_a_gguf_and_a_folder_of_the_same_model_read_the_same(tmp_path: Path) -> None:
    folder = read(tmp_path)
    gguf = read_gguf({"output.weight"})
    for field in ("hidden_size", "num_layers", "num_kv_heads", "head_dim", "rms_norm_eps", "rope", "eos_token_ids"):
        assert getattr(folder, field) == getattr(gguf, field), field
    assert folder.num_parameters == gguf.num_parameters


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general__architecture": "mamba"}, "llama, qwen2, qwen3"),
        ({"general__architecture": None}, "architecture ''"),
        ({"llama__expert_count": 8}, "experts"),
        ({"split__count": 2}, "split"),
        ({"llama__block_count": None}, "llama.block_count"),
        ({"llama__attention__head_count_kv": [2, 2, 1, 1]}, "head_count_kv"),
        ({"llama__rope__scaling__type": "longrope"}, "longrope"),
        ({"llama__attention__value_length": 8}, "value_length"),
        ({"tokenizer__ggml__eos_token_id": 1.5}, "eos_token_id"),
    ],
)
def test_a_gguf_that_is_not_supported_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError) as error:
        read_gguf({"output.weight"}, **changes)
    assert named in str(error.value)


def test_gemma_of_transformers_4_and_5_reads_the_same(tmp_path: Path) -> None:
    both: dict[str, Any] = {"architectures": ["Gemma3ForCausalLM"], "head_dim": 16, "sliding_window": 9}
    both |= {"num_hidden_layers": 7, "query_pre_attn_scalar": 25, "hidden_activation": "gelu_pytorch_tanh"}
    old = read(
        tmp_path,
        **both,
        rope_theta=2e6,
        rope_local_base_freq=2e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=3,
        hidden_act="gelu",
    )
    new = read(
        tmp_path,
        **both,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
        layer_types=[*["sliding_attention", "sliding_attention", "full_attention"] * 2, "sliding_attention"],
    )
    assert old == new
    assert new.sliding_windows == (9, 9, None, 9, 9, None, 9)
    assert (new.rope.kind, new.rope.theta, new.rope.factor) == ("linear", 2e6, 8.0)
    assert new.local_rope is not None and (new.local_rope.kind, new.local_rope.theta) == ("default", 2e4)
    assert (new.attention_scale, new.embedding_scale, new.norm_offset) == (0.2, 8.0, 1.0)
    assert new.qk_norm and new.has_output_norms and new.tie_word_embeddings
    assert (new.attention_soft_cap, new.final_soft_cap) == (0.0, 0.0)


def test_each_gemma_has_its_own_defaults(tmp_path: Path) -> None:
    first = read(tmp_path, architectures=["GemmaForCausalLM"], hidden_act="gelu", head_dim=None)
    assert (first.hidden_act, first.head_dim, first.has_output_norms) == ("gelu_tanh", 256, False)
    assert first.attention_scale == 1 / 16
    second = read(tmp_path, architectures=["Gemma2ForCausalLM"], head_dim=16, sliding_window=9)
    assert second.sliding_windows == (9, None, 9, None)
    assert (second.attention_soft_cap, second.final_soft_cap, second.attention_scale) == (50.0, 30.0, 1 / 16)
    assert second.hidden_act == "gelu_tanh"
    uncapped = read(
        tmp_path, architectures=["Gemma2ForCausalLM"], head_dim=16, final_logit_softcapping=None, sliding_window=9
    )
    assert uncapped.final_soft_cap == 0.0
    with pytest.raises(ModelError, match="use_bidirectional_attention"):
        read(tmp_path, architectures=["Gemma2ForCausalLM"], use_bidirectional_attention=True)
