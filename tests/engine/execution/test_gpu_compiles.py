"""What an engine launches on a GPU compiles for one: the interpreter takes tiles that a GPU's compiler refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from transformers import GPT2Config, LlamaConfig, PretrainedConfig

from tests.support.tiny_models import CONFIGS

ROOT = Path(__file__).parents[3]
SETTINGS = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "block_size": 4,
    "max_num_seqs": 5,
    "max_num_batched_tokens": 100,
    "max_model_len": 64,
    "kv_cache_memory_gib": 0.02,
}


def llama(**sizes: int) -> PretrainedConfig:
    return LlamaConfig(**{**CONFIGS["llama"].to_dict(), "architectures": ["LlamaForCausalLM"], **sizes})


def case(name: str, config: PretrainedConfig, *, is_long: bool = True, **settings: object) -> object:
    return pytest.param(config, settings, id=name, marks=[pytest.mark.long] if is_long else [])


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of compiled kernels. A new one, or what was compiled once would not be tried again."""
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        case("narrow-heads", llama(head_dim=6, vocab_size=321), is_long=False),
        case("narrow-heads-float32", llama(head_dim=8), dtype="float32"),
        case("narrow-layers", llama(hidden_size=12, intermediate_size=20, head_dim=2), dtype="float32"),
        case("narrow-layers-float8", llama(hidden_size=12, head_dim=6), quantization="fp8", kv_cache_dtype="fp8"),
        case("narrow-layers-fixed-bits", llama(hidden_size=12, head_dim=6), deterministic=True),
        case("wide-heads", llama(head_dim=256), kv_cache_dtype="fp8", quantization="fp8"),
        case("wide-heads-float32", llama(head_dim=256), dtype="float32", deterministic=True),
        case("heads-between-powers-of-two", llama(head_dim=80), dtype="float16", block_size=16),
        case("large-groups", llama(num_attention_heads=128, num_key_value_heads=1, hidden_size=2048, head_dim=16)),
        case("odd-groups", llama(num_attention_heads=7, num_key_value_heads=1, hidden_size=112, head_dim=16)),
        case("large-blocks", llama(), block_size=256, max_model_len=256),
        case("blocks-of-one", llama(), block_size=1),
        case("one-layer", llama(num_hidden_layers=1, vocab_size=4000), is_long=False),
        case("many-sequences", llama(), max_num_seqs=100),
        case("windows-and-soft-caps", CONFIGS["gemma2"]),
        case("partly-rotated", CONFIGS["phi3-partly-rotated"]),
        case("norms-of-heads", CONFIGS["qwen3"]),
        case("by-transformers", GPT2Config(n_embd=64, n_head=4, n_layer=2, vocab_size=160, n_positions=128)),
    ],
)
def test_every_kernel_compiles(
    config: PretrainedConfig, settings: dict[str, object], tmp_path: Path, cache: Path
) -> None:
    facts = config.to_dict()
    names = {
        "gpt2": "GPT2LMHeadModel",
        "gemma2": "Gemma2ForCausalLM",
        "phi3": "Phi3ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
    }
    facts["architectures"] = facts.get("architectures") or [names[facts["model_type"]]]
    (tmp_path / "config.json").write_text(json.dumps(facts))
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.support.hopper_compiler",
            json.dumps({"model": str(tmp_path), **SETTINGS, **settings}),
        ],
        env={**environ, "TRITON_CACHE_DIR": str(cache)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) > 100
