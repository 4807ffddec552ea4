"""How many blocks fit, what is said when they do not, and block copies."""

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.execution.kv_cache import (
    GIB,
    KvCache,
    bytes_per_block,
    resolve_cache_dtype,
    rounded_up,
    size_host,
    size_pool,
)
from engine.execution.offload import CpuBlockCopier, allocate_host_memory
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


@given(st.floats(1e-9, 1e6))
def test_a_number_that_is_told_is_enough_and_at_most_a_hundredth_too_much(number: float) -> None:
    assert number <= float(rounded_up(number)) <= number * 1.0101


@given(st.integers(2, 8192), st.floats(0.001, 0.3))
def test_the_memory_that_an_error_names_is_enough(length: int, gib: float) -> None:
    def sized(gib: float) -> int:
        return size_pool(EngineConfig(max_model_len=length, kv_cache_memory_gib=gib), model(), None).max_model_len

    try:
        assert sized(gib) == length
    except ConfigError as error:
        named = re.search(r"(?:raise kv_cache_memory_gib to|GiB of KV memory hold no .*, ([\d.]+) one of)", str(error))
        assert named is not None
        assert sized(float(named[1] or str(error).rpartition(" ")[2])) == length


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


def test_the_caches_type_is_that_of_the_weights_on_a_gpu_and_float32_on_a_cpu() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert resolve_cache_dtype("auto", torch.bfloat16, cpu) == torch.float32
    assert resolve_cache_dtype("auto", torch.bfloat16, gpu) == torch.bfloat16
    assert resolve_cache_dtype("fp8", torch.bfloat16, gpu) == torch.float8_e4m3fn
    with pytest.raises(ConfigError, match="kv_cache_dtype: fp8 needs a GPU"):
        resolve_cache_dtype("fp8", torch.bfloat16, cpu)


def test_scales_go_with_a_float8_cache_one_for_each_layer_and_kv_head(device: torch.device) -> None:
    cache = KvCache(model(num_layers=2), 5, 16, torch.float8_e4m3fn, device)
    for scales in (cache.key_scales, cache.value_scales):
        assert scales is not None and scales.dtype == torch.float32 and scales.device.type == device.type
        assert scales.tolist() == [[1.0] * 3] * 2
    assert cache.key_scales is not cache.value_scales
    plain = KvCache(model(num_layers=2), 5, 16, torch.bfloat16, device)
    assert plain.key_scales is None and plain.value_scales is None


@pytest.mark.parametrize("num_blocks", [2, 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_keys_values_and_scales_of_every_layer_begin_where_kernels_read_wide(
    dtype: torch.dtype, num_blocks: int, device: torch.device
) -> None:
    """So the kernels that were compiled for a throw-away pool are those of every layer of the real one."""
    narrow = replace(model(num_layers=3), num_heads=3, num_kv_heads=1, head_dim=20)
    cache = KvCache(narrow, num_blocks, 1, dtype, device)
    assert cache.storage.shape == (3, 2, num_blocks, 1, 1, 20)
    for keys, values in cache.layers:
        assert keys.data_ptr() % 16 == values.data_ptr() % 16 == 0
        assert keys.is_contiguous() and values.is_contiguous(), "as the kernels want them"
    for scales in (cache.key_scales, cache.value_scales):
        if scales is not None:
            assert scales.tolist() == [[1.0]] * 3
            assert all(row.data_ptr() % 16 == 0 for row in scales)


def test_blocks_of_an_odd_size_go_to_host_memory_and_back() -> None:
    narrow = replace(model(num_layers=3), num_heads=3, num_kv_heads=1, head_dim=5)
    cache = KvCache(narrow, 5, 1)
    cache.storage.copy_(torch.randn(cache.storage.shape))
    before = cache.storage.clone()
    host = allocate_host_memory(2, bytes_per_block(narrow, 1))
    copier = CpuBlockCopier(cache.storage, host)
    copier.to_host([3, 2], [1, 2])
    copier.to_device([1], [4])
    assert torch.equal(cache.storage[:, :, 4], before[:, :, 3]) and torch.equal(
        cache.storage[:, :, :4], before[:, :, :4]
    )
    assert host[2].tobytes() == before[:, :, 2].numpy().tobytes()


CACHE_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_a_cache_of_any_type_begins_with_zeros_in_one_piece(dtype: torch.dtype, device: torch.device) -> None:
    cache = KvCache(model(num_layers=3), 7, 5, dtype, device)
    assert cache.storage.shape == (3, 2, 7, 5, 3, 64) and cache.storage.is_contiguous()
    assert cache.storage.nbytes == 7 * bytes_per_block(model(num_layers=3), 5, dtype)
    assert cache.storage.data_ptr() % 64 == 0
    assert not cache.storage.view(torch.uint8).any()
    assert cache.planes.shape == (6, 7, 5, 3, 64)
    assert cache.planes.data_ptr() == cache.storage.data_ptr()
    assert cache.layers[2][1].data_ptr() == cache.planes[5].data_ptr()


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_copies_move_whole_blocks_in_every_layer_and_nothing_else(dtype: torch.dtype, device: torch.device) -> None:
    cache = KvCache(model(num_layers=3), 6, 4, dtype, device)
    numbers = cache.storage.view(torch.uint8)
    numbers.copy_(torch.randint(0, 256, numbers.shape, dtype=torch.uint8))
    before = numbers.clone()
    cache.copy_blocks([(1, 4), (1, 5), (3, 2)])
    for block, source in enumerate([0, 1, 3, 3, 1, 1]):
        assert torch.equal(numbers[:, :, block], before[:, :, source])
    cache.copy_blocks([])


def test_a_devices_copies_do_as_the_cpus_step_after_step(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beyond the room that they begin with, and when their buffers come round again."""
    block_copies = pytest.importorskip("engine.execution.block_copies")
    monkeypatch.setattr(block_copies, "_FIRST_CAPACITY", 4)
    num_blocks = 50
    cache = KvCache(model(num_layers=1), num_blocks, 1, torch.bfloat16, device)
    cache.storage.copy_(torch.randn(cache.storage.shape))
    expected = cache.storage.cpu()
    copies = block_copies.DeviceBlockCopies(cache.planes)
    generator = torch.Generator().manual_seed(0)
    for count in (1, 3, 2, 7, 1, 5, 20, 0, 21, 2):
        order = torch.randperm(num_blocks - 1, generator=generator)[: 2 * count] + 1
        pairs = [(int(source), int(target)) for source, target in order.view(-1, 2)]
        copies.run(pairs)
        for source, target in pairs:
            expected[:, :, target] = expected[:, :, source]
    assert torch.equal(cache.storage.cpu(), expected)
