"""Models that the generic decoder does not know agree with transformers, on the same paged cache."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    GPT2Config,
    GPTNeoXConfig,
    Olmo2Config,
    PretrainedConfig,
    PreTrainedModel,
)

from engine.models.load import load_model, read_config
from engine.models.transformers_model import TransformersModel
from streamkv.errors import ModelError
from streamkv.model_files import resolve
from tests.support.tiny_models import VOCAB_SIZE, PagedSequences, make_tiny_model

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
