"""Weights that do not fit are told with sizes, and with what can be done about them."""

from pathlib import Path
from typing import NoReturn

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from engine.layers.linear import PlainMethod
from engine.models import load
from engine.models.load import load_model
from streamkv.errors import ConfigError
from streamkv.model_files import resolve
from tests.support.tiny_models import VOCAB_SIZE, write_small_llama

GIB = 2**30


class EightBits(PlainMethod):
    name = "float8_e4m3fn on cuda"


def silent(stage: str, percent: float) -> None:
    pass


@pytest.fixture
def full_card(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """On which a layer is one too many."""

    def fill(*_: object) -> NoReturn:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 112.00 MiB.")

    monkeypatch.setattr(load, "fill_decoder", fill)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB // 16, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 23 * GIB)
    return torch.device("cuda")


@pytest.mark.parametrize(
    ("dtype", "is_quantised", "wanted"),
    [
        (
            torch.bfloat16,
            False,
            r"GiB in bfloat16, do not fit .*; use quantization fp8, which takes about half, a smal",
        ),
        (
            torch.bfloat16,
            True,
            r"GiB in bfloat16, about half of that in fp8, do not fit .*; use a smaller model, or en",
        ),
        (torch.float32, False, r"GiB in float32, .*; use quantization fp8, .*, dtype bfloat16, which takes half, a sm"),
    ],
)
def test_weights_that_a_card_cannot_hold_name_what_would(
    dtype: torch.dtype, is_quantised: bool, wanted: str, tmp_path: Path, full_card: torch.device
) -> None:
    files = resolve(str(write_small_llama(tmp_path)), silent)
    method = EightBits(dtype) if is_quantised else PlainMethod(dtype)
    with pytest.raises(ConfigError, match=wanted) as raised:
        load_model(files, dtype, silent, method, full_card)
    assert raised.value.field == "model" and isinstance(raised.value.__cause__, torch.OutOfMemoryError)
    assert "on this GPU: of its 24 GiB this engine had taken 23, and 0.0625 were free" in raised.value.message


def test_the_same_of_a_model_that_transformers_computes(
    tmp_path: Path, full_card: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=1, n_head=2, n_positions=20, eos_token_id=2)
    AutoModelForCausalLM.from_config(tiny).save_pretrained(tmp_path)

    def move(self: torch.nn.Module, *_: object, **__: object) -> NoReturn:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    files = resolve(str(tmp_path), silent)
    monkeypatch.setattr(torch.nn.Module, "to", move)
    with pytest.raises(ConfigError, match=r"model: its weights, .*this engine had taken 23.*; use a smaller model, or"):
        load_model(files, torch.bfloat16, silent, device=full_card)


def test_weights_that_the_machine_cannot_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "fill_decoder", lambda *_: torch.empty(2**60, dtype=torch.uint8))
    files = resolve(str(write_small_llama(tmp_path)), silent)
    with pytest.raises(ConfigError, match=r"model: .* into this machine's memory, which has .* GiB left; use a"):
        load_model(files, torch.float32, silent)


def test_other_faults_of_loading_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object) -> NoReturn:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(load, "fill_decoder", fill)
    files = resolve(str(write_small_llama(tmp_path)), silent)
    with pytest.raises(RuntimeError, match="device-side"):
        load_model(files, torch.float32, silent)
