"""How many blocks fit on a card: by numbers alone, and what is said when it is less than asked for."""

import logging
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.execution.gpu_memory import (
    CardBytes,
    GpuMemory,
    card_bytes,
    measured_memory,
    peak_bytes,
    size_gpu_pool,
)
from engine.execution.kv_cache import GIB, bytes_per_block
from engine.models.config import ModelConfig, RopeConfig
from streamkv.config import EngineConfig
from streamkv.errors import ConfigError

MIB = 2**20


def model(max_positions: int = 131072) -> ModelConfig:
    """The KV shape of Llama-3.1-8B: 128 KiB a token in bfloat16."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=max_positions,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=5e5, rotary_dim=128),
        tie_word_embeddings=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_windows=(None,) * 32,
        eos_token_ids=(2,),
    )


BLOCK_BYTES = bytes_per_block(model(), 16, torch.bfloat16)


def card(total: float = 140, free: float = 123, own: float = 16, step: float = 1, graphs: float = 1) -> GpuMemory:
    """In GiB. What is missing, one here, is the driver's and that of other processes."""
    return GpuMemory(*(int(gib * GIB) for gib in (total, free, own, step, graphs)))


def gib_of(config: EngineConfig, memory: GpuMemory) -> float:
    return size_gpu_pool(config, model(), BLOCK_BYTES, memory).num_blocks * BLOCK_BYTES / GIB


def test_the_pool_takes_what_weights_steps_and_graphs_leave_of_the_share(caplog: pytest.LogCaptureFixture) -> None:
    assert BLOCK_BYTES == 2 * MIB
    with caplog.at_level(logging.WARNING):
        assert gib_of(EngineConfig(), card()) == pytest.approx(0.9 * 140 - 16 - 1 - 1, abs=BLOCK_BYTES / GIB)
        assert gib_of(EngineConfig(gpu_memory_utilization=0.5), card()) == pytest.approx(70 - 18, abs=BLOCK_BYTES / GIB)
        assert gib_of(EngineConfig(), card(step=5, graphs=3)) == pytest.approx(126 - 24, abs=BLOCK_BYTES / GIB)
    assert caplog.text == ""


def test_where_another_process_leaves_less_less_is_taken_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        taken = gib_of(EngineConfig(), card(free=60))
    assert taken == pytest.approx(60 - 2 - 1.4, abs=BLOCK_BYTES / GIB)
    (record,) = caplog.records
    assert "the GPU has no more free" in record.getMessage()
    told = vars(record)["fields"]
    assert told["asked_gib"] == pytest.approx(108) and told["taken_gib"] == pytest.approx(56.6)
    assert told["others_gib"] == pytest.approx(64)


def test_what_another_process_has_does_not_count_against_the_share() -> None:
    """Two engines, each with less than half of a card, fit on it."""
    half = EngineConfig(gpu_memory_utilization=0.45)
    assert gib_of(half, card(free=140 - 63 - 16)) == gib_of(half, card(free=124))


def measured(
    before: float, now: float, reserved: float, total: float = 140, step: float = 1, graphs: float = 1, late: float = 0
) -> GpuMemory:
    """In GiB: what was free when the process began and is now, and what PyTorch has."""
    sizes = [int(gib * GIB) for gib in (reserved, step, graphs, late)]
    return measured_memory(*(CardBytes(int(total * GIB), int(free * GIB)) for free in (before, now)), *sizes)


def test_the_drivers_context_counts_as_the_engines() -> None:
    """Of a card that nobody else uses no more is taken than is asked for, weights, context and all."""
    memory = measured(before=139.5, now=123, reserved=16)
    assert memory.own_bytes == int(17 * GIB)
    share = EngineConfig(gpu_memory_utilization=0.5)
    pool_gib = gib_of(share, memory)
    assert pool_gib == pytest.approx(70 - 17 - 2, abs=BLOCK_BYTES / GIB)
    assert pool_gib + 17 + 2 <= 70


def test_what_others_have_is_not_taken_for_the_drivers_context() -> None:
    """CUDA tells no process what was free before it had a context."""
    alone, second = measured(139.5, 123, 16), measured(139.5 - 63, 123 - 63, 16)
    assert 16.5 * GIB <= second.own_bytes <= 17.5 * GIB
    half = EngineConfig(gpu_memory_utilization=0.45)
    assert gib_of(half, alone) - 0.5 <= gib_of(half, second) <= gib_of(half, alone)


def test_a_process_that_ended_meanwhile_makes_no_room_of_its_own() -> None:
    same, more = measured(139.5, 123.5, 16), measured(100, 123.5, 16)
    assert more.own_bytes >= same.own_bytes, "what PyTorch has is the engine's, whatever was free before"
    assert gib_of(EngineConfig(), more) <= gib_of(EngineConfig(), same)


def test_what_is_allocated_behind_the_pool_comes_off_before_it() -> None:
    none, some = measured(139.5, 123.5, 16), measured(139.5, 123.5, 16, late=3)
    for share in (0.5, 1.0):  # bound by the share, by what is free
        config = EngineConfig(gpu_memory_utilization=share)
        assert gib_of(config, none) - gib_of(config, some) == pytest.approx(3, abs=BLOCK_BYTES / GIB)


def test_the_setting_of_a_cpu_changes_nothing_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert gib_of(EngineConfig(kv_cache_memory_gib=3.0), card()) == gib_of(EngineConfig(), card())
    assert "kv_cache_memory_gib is for a CPU" in caplog.text


def test_all_of_a_card_still_leaves_a_hundredth_free() -> None:
    assert gib_of(EngineConfig(gpu_memory_utilization=1.0), card()) <= 123 - 2 - 1.4


def test_no_more_is_taken_than_all_sequences_at_once_can_use(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(max_num_seqs=4, max_model_len=1000)
    with caplog.at_level(logging.WARNING):
        size = size_gpu_pool(config, model(), BLOCK_BYTES, card(free=20))
    assert (size.num_blocks, size.max_model_len) == (4 * 63 + 1, 1000)
    assert caplog.text == "", "nothing that was wanted is missing"


def test_a_limit_from_the_model_is_lowered_to_what_fits_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        size = size_gpu_pool(EngineConfig(), model(), BLOCK_BYTES, card(total=24, free=7, own=16))
    assert 2 < size.max_model_len == (size.num_blocks - 1) * 16 < 131072
    assert "shorter than the model allows" in caplog.text


def test_one_full_sequence_that_does_not_fit_is_an_error_with_the_length_that_would() -> None:
    memory = card(total=24, free=7, own=16)
    with pytest.raises(ConfigError, match=r"max_model_len: 100000 tokens do not fit into .* GiB") as raised:
        size_gpu_pool(EngineConfig(max_model_len=100_000), model(), BLOCK_BYTES, memory)
    named = re.search(r"KV memory; (\d+) do", str(raised.value))
    assert named is not None
    fitting = int(named[1])
    assert size_gpu_pool(EngineConfig(max_model_len=fitting), model(), BLOCK_BYTES, memory).max_model_len == fitting
    with pytest.raises(ConfigError):
        size_gpu_pool(EngineConfig(max_model_len=fitting + 1), model(), BLOCK_BYTES, memory)


def test_a_model_that_leaves_no_room_is_an_error_that_says_what_would_make_some() -> None:
    with pytest.raises(
        ConfigError, match=r"gpu_memory_utilization: 0 GiB .*no sequence.*utilization to 0\.\d+ at least"
    ):
        size_gpu_pool(EngineConfig(gpu_memory_utilization=0.1), model(), BLOCK_BYTES, card())
    with pytest.raises(ConfigError, match=r"no sequence.*make room for [\d.]+ GiB.*kv_cache_dtype fp8"):
        size_gpu_pool(EngineConfig(), model(), BLOCK_BYTES, card(free=1))


def test_a_limit_over_the_models_positions_is_an_error() -> None:
    with pytest.raises(ConfigError, match="131072 positions"):
        size_gpu_pool(EngineConfig(max_model_len=131073), model(), BLOCK_BYTES, card())


@st.composite
def cards(draw: st.DrawFn) -> GpuMemory:
    total = draw(st.integers(GIB, 200 * GIB))
    free = draw(st.integers(0, total))
    own = draw(st.integers(0, total - free))
    return GpuMemory(total, free, own, draw(st.integers(0, 8 * GIB)), draw(st.integers(0, 4 * GIB)))


@given(
    cards(),
    st.floats(0.01, 1.0),
    st.integers(1, 512),
    st.sampled_from([0, 1, 2, 17, 4096, 131072]),
    st.sampled_from([1, 16, 256]),
)
def test_whatever_the_card_no_more_is_taken_than_there_is_and_what_an_error_names_works(
    memory: GpuMemory, share: float, max_num_seqs: int, max_model_len: int, block_size: int
) -> None:
    def sized(share: float = share, length: int = max_model_len, given: GpuMemory = memory) -> tuple[int, int]:
        config = EngineConfig(
            gpu_memory_utilization=share, max_num_seqs=max_num_seqs, max_model_len=length, block_size=block_size
        )
        size = size_gpu_pool(config, model(), block_bytes, given)
        return size.num_blocks, size.max_model_len

    block_bytes = bytes_per_block(model(), block_size, torch.bfloat16)
    try:
        num_blocks, length = sized()
    except ConfigError as error:
        text = str(error)
        if fitting := re.search(r"KV memory; (\d+) do\.", text):
            assert sized(length=int(fitting[1]))[1] == int(fitting[1])
        if way := re.search(r"raise gpu_memory_utilization to ([\d.e-]+)", text):
            assert share < float(way[1]) <= 1
            sized(share=float(way[1]), length=0 if "no sequence" in text else max_model_len)
        else:
            way = re.search(r"make room for ([\d.e-]+) GiB", text)
            assert way is not None
            # On a card with so much more, all of which is free.
            more = int(float(way[1]) * GIB) + 1
            larger = GpuMemory(memory.total_bytes + 2 * more, memory.free_bytes + 2 * more, *_rest(memory))
            sized(share=1.0, length=0 if "no sequence" in text else max_model_len, given=larger)
        return
    pool_bytes = num_blocks * block_bytes
    needed_bytes = memory.step_bytes + memory.graph_bytes
    assert pool_bytes + needed_bytes <= memory.free_bytes
    assert pool_bytes + needed_bytes + memory.own_bytes <= share * memory.total_bytes
    assert min(2, max_model_len or 2) <= length <= (num_blocks - 1) * block_size
    assert length == (max_model_len or min(131072, length))
    assert num_blocks <= max_num_seqs * -(-(max_model_len or 131072) // block_size) + 1


def _rest(memory: GpuMemory) -> tuple[int, int, int]:
    return memory.own_bytes, memory.step_bytes, memory.graph_bytes


@pytest.mark.gpu
def test_the_peak_of_a_step_is_measured_and_given_back(device: torch.device) -> None:
    torch.zeros(1, device=device)  # with the first kernel CUDA loads code, which stays
    before = card_bytes(device)
    peak = peak_bytes(lambda: torch.empty(512 * MIB, dtype=torch.uint8, device=device).zero_(), device)
    assert 512 * MIB <= peak < 600 * MIB
    after = card_bytes(device)
    assert after.total_bytes == before.total_bytes >= after.free_bytes
    assert abs(after.free_bytes - before.free_bytes) < 64 * MIB


@pytest.mark.gpu
def test_a_step_that_does_not_fit_names_the_setting(device: torch.device) -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens: a step of so many tokens does not fit"):
        peak_bytes(lambda: torch.empty(2**42, dtype=torch.uint8, device=device), device)
