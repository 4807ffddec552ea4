"""Scales of a float8 cache follow the keys and values that the model really writes."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from engine.batch import DeviceBatch
from engine.layers.gpu_linear import choose_gpu_method
from engine.models.decoder import Decoder, KVCache
from engine.models.gpu_decoder import GpuDecoder
from engine.models.kv_scales import measure_kv_scales
from engine.models.load import load_model
from streamkv.model_files import resolve
from tests.support.tiny_models import PagedSequences, make_tiny_model


def silent(stage: str, percent: float) -> None:
    pass


def test_a_heads_largest_key_and_value_come_to_half_of_what_float8_holds(tmp_path: Path, device: torch.device) -> None:
    make_tiny_model("qwen3", tmp_path)
    files = resolve(str(tmp_path), silent)
    model, config = load_model(
        files, torch.float32, silent, choose_gpu_method(torch.float32, device, "none", False), device
    )
    assert isinstance(model, Decoder)
    body = GpuDecoder(model, 9, 1, 9, torch.float32, device).body
    seen: list[DeviceBatch] = []

    def watched(
        batch: DeviceBatch,
        caches: Sequence[KVCache],
        scales: Sequence[KVCache] | None,
        attended: torch.Tensor,
        residual: torch.Tensor,
    ) -> None:
        seen.append(batch)
        body(batch, caches, scales, attended, residual)

    measured = measure_kv_scales(watched, config, torch.float32, device, num_tokens=9)
    cpu_model, _ = load_model(files, torch.float32, silent)
    assert isinstance(cpu_model, Decoder)
    sequence = PagedSequences(config, 1)
    sequence.caches = [(torch.zeros_like(keys), torch.zeros_like(values)) for keys, values in sequence.caches]
    ids = seen[0].token_ids.tolist()
    assert len(set(ids)) > 5
    cpu_model(sequence.batch({0: ids}), sequence.caches)
    for part, scales in enumerate(measured):
        assert scales.shape == (config.num_layers, config.num_kv_heads)
        largest = torch.stack([cache[part].abs().amax(dim=(0, 1, 3)) for cache in sequence.caches])
        assert torch.allclose(scales.cpu() * 224, largest, rtol=1e-4)


def test_a_head_of_zeros_has_a_scale_that_can_be_divided_by(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    config = load_model(resolve(str(tmp_path), silent), torch.float32, silent)[1]

    def body(
        batch: DeviceBatch,
        caches: Sequence[KVCache],
        scales: Sequence[KVCache] | None,
        attended: torch.Tensor,
        residual: torch.Tensor,
    ) -> None:
        caches[1][0].view(-1, config.num_kv_heads, config.head_dim)[batch.slots.long(), 1, 3] = -7.0

    key_scales, value_scales = measure_kv_scales(body, config, torch.bfloat16, torch.device("cpu"), num_tokens=5)
    assert key_scales[1, 1] == pytest.approx(7 / 224)
    assert 0 < key_scales[0].max() < 1e-5 and 0 < value_scales.max() < 1e-5
