"""How many blocks fit, what is said when they do not, and block copies."""

import logging
from pathlib import Path

import pytest
import torch

from engine.execution.kv_cache import GIB, KvCache, bytes_per_block, size_host, size_pool
from engine.memory import available_memory_bytes
from engine.models.config import ModelConfig, RopeConfig
from streamkv.config import EngineConfig
from streamkv.errors import ConfigError


def model(max_positions: int = 8192, num_layers: int = 30) -> ModelConfig:
    """The KV shape of SmolLM2-135M."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=num_layers,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=max_positions,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=1e5, rotary_dim=64),
        tie_word_embeddings=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_windows=(None,) * num_layers,
        eos_token_ids=(2,),
    )


def test_a_block_takes_keys_and_values_of_all_layers() -> None:
    # 2 tensors, 30 layers, 16 tokens, 3 heads, 64 numbers of 4 bytes.
    assert bytes_per_block(model(), 16) == 2 * 30 * 16 * 3 * 64 * 4
    cache = KvCache(model(num_layers=2), num_blocks=5, block_size=16)
    held = sum(tensor.nbytes for pair in cache.layers for tensor in pair)
    assert held == 5 * bytes_per_block(model(num_layers=2), 16)


def test_the_default_holds_a_full_sequence_of_the_default_model() -> None:
    size = size_pool(EngineConfig(), model(), 16 * GIB)
    assert size.max_model_len == 8192
    assert size.num_blocks == GIB // bytes_per_block(model(), 16) == 1456


def test_a_pool_larger_than_all_sequences_together_is_not_allocated() -> None:
    size = size_pool(EngineConfig(max_num_seqs=2, max_model_len=100), model(), None)
    assert size.num_blocks == 2 * 7 + 1


def test_a_limit_from_the_model_is_lowered_to_what_fits_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        size = size_pool(EngineConfig(kv_cache_memory_gib=0.1), model(), None)
    assert size.max_model_len == (size.num_blocks - 1) * 16 < 8192
    assert "shorter than the model allows" in caplog.text


def test_a_limit_from_the_user_that_does_not_fit_is_an_error_and_the_length_it_names_fits() -> None:
    with pytest.raises(ConfigError, match="max_model_len") as raised:
        size_pool(EngineConfig(kv_cache_memory_gib=0.1, max_model_len=4000), model(), None)
    fitting = (int(0.1 * GIB) // bytes_per_block(model(), 16) - 1) * 16
    assert f"{fitting} do" in str(raised.value)
    config = EngineConfig(kv_cache_memory_gib=0.1, max_model_len=fitting)
    assert size_pool(config, model(), None).max_model_len == fitting


def test_a_limit_over_the_models_positions_is_an_error() -> None:
    with pytest.raises(ConfigError, match="8192 positions"):
        size_pool(EngineConfig(max_model_len=8193), model(), None)


def test_a_wish_over_the_systems_memory_is_cut_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        size = size_pool(EngineConfig(kv_cache_memory_gib=100.0), model(), 2 * GIB)
    assert size.num_blocks * bytes_per_block(model(), 16) <= 2 * GIB
    assert "less KV memory than asked for" in caplog.text


def test_the_control_groups_limit_cuts_the_pool_on_a_big_host(tmp_path: Path) -> None:
    for name, text in {
        "proc/meminfo": f"MemAvailable: {512 * GIB // 1024} kB\n",
        "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{GIB}\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    size = size_pool(EngineConfig(kv_cache_memory_gib=4.0), model(), available_memory_bytes(tmp_path))
    assert 0.8 * GIB < size.num_blocks * bytes_per_block(model(), 16) < GIB


def test_memory_for_no_sequence_at_all_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_memory_gib.*hold no sequence"):
        size_pool(EngineConfig(kv_cache_memory_gib=0.0005), model(), None)


BLOCK_BYTES = 2**20


def test_host_memory_holds_what_the_setting_buys_and_none_by_default() -> None:
    assert size_host(EngineConfig(), BLOCK_BYTES, GIB, 16 * GIB) == 0
    # One row is never used.
    assert size_host(EngineConfig(host_kv_memory_gib=2.0), BLOCK_BYTES, GIB, 16 * GIB) == 2047
    assert size_host(EngineConfig(host_kv_memory_gib=2.0), BLOCK_BYTES, GIB, None) == 2047


def test_host_memory_is_cut_to_what_is_left_beside_the_pool_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        num_blocks = size_host(EngineConfig(host_kv_memory_gib=50.0), BLOCK_BYTES, 4 * GIB, 10 * GIB)
    assert (num_blocks + 1) * BLOCK_BYTES == 5 * GIB
    assert "less host memory for KV blocks than asked for" in caplog.text


def test_host_memory_for_no_block_is_an_error_and_the_size_it_names_holds_one() -> None:
    with pytest.raises(ConfigError, match=r"host_kv_memory_gib: .* hold no block; 0.00195 hold one"):
        size_host(EngineConfig(host_kv_memory_gib=0.0015), BLOCK_BYTES, 0, None)
    assert size_host(EngineConfig(host_kv_memory_gib=2 / 1024), BLOCK_BYTES, 0, None) == 1
    with pytest.raises(ConfigError, match=r"host_kv_memory_gib: 0 GiB, which is all that the machine has beside"):
        size_host(EngineConfig(host_kv_memory_gib=1.0), BLOCK_BYTES, 9 * GIB, 10 * GIB)


def test_copies_move_whole_blocks_in_every_layer_and_nothing_else() -> None:
    cache = KvCache(model(num_layers=3), num_blocks=6, block_size=4)
    for layer in cache.layers:
        for tensor in layer:
            tensor.copy_(torch.randn(tensor.shape))
    before = [(keys.clone(), values.clone()) for keys, values in cache.layers]
    cache.copy_blocks([(1, 4), (1, 5), (3, 2)])
    for layer, old_layer in zip(cache.layers, before, strict=True):
        for tensor, old in zip(layer, old_layer, strict=True):
            for block, source in enumerate([0, 1, 3, 3, 1, 1]):
                assert torch.equal(tensor[block], old[source])
    cache.copy_blocks([])
