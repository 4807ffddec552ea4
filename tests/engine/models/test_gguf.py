"""GGUF files into the decoder, and files that are not what they should be."""

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from transformers import PreTrainedModel

from engine.models.gguf import GgufSource
from engine.models.load import load_model, read_config, resolve_dtype
from streamkv.errors import ModelError
from streamkv.model_files import ModelFiles, resolve
from tests.support.tiny_models import PagedSequences, make_tiny_model

TYPES = gguf.GGMLQuantizationType
PARTS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}
PROMPT = [5, 80, 3, 159, 0, 17, 17, 42, 9]


def silent(stage: str, percent: float) -> None:
    pass


def gguf_name(name: str) -> str:
    name, _, kind = name.rpartition(".")
    if name in PARTS:
        return f"{PARTS[name]}.{kind}"
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{PARTS[part]}.{kind}"


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of q and k: dimension d of a head comes before d + head_dim / 2."""
    half = rows.shape[0] // num_heads // 2
    heads = rows.reshape(num_heads, 2 * half, -1)
    order = [d + part * half for d in range(half) for part in range(2)]
    return heads[:, order].reshape(rows.shape)


def write_gguf(model: PreTrainedModel, architecture: str, path: Path, matrix_type: TYPES = TYPES.F32) -> None:
    """The model as llama.cpp's converter lays it out, with its matrices in `matrix_type`."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    writer.add_token_list([f"token{i}" for i in range(5000)])
    writer.add_eos_token_id(7)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        for part, num_heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if architecture == "llama" and part in name:
                values = interleave(values, num_heads)
        tensor_type = matrix_type if values.ndim == 2 else TYPES.F32
        data = values if tensor_type == TYPES.F32 else quantize(values, tensor_type)
        writer.add_tensor(gguf_name(name), data, raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits_of(files: ModelFiles) -> torch.Tensor:
    model, config = load_model(files, torch.float32, silent)
    sequence = PagedSequences(config, 1)
    return model(sequence.batch({0: PROMPT}), sequence.caches)


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("llama", "llama"),
        ("llama-tied", "llama"),
        ("llama-biased", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
        ("phi3", "phi3"),
    ],
)
def test_a_gguf_gives_the_logits_of_the_model_it_was_made_from(name: str, architecture: str, tmp_path: Path) -> None:
    reference = make_tiny_model(name, tmp_path / "folder")
    path = tmp_path / "tiny.gguf"
    write_gguf(reference, architecture, path)
    files = resolve(str(path), silent)
    assert torch.equal(logits_of(files), logits_of(resolve(str(tmp_path / "folder"), silent)))
    config = read_config(files)
    assert config.rms_norm_eps == reference.config.rms_norm_eps
    assert config.eos_token_ids == (7,)
    assert resolve_dtype("auto", config) == torch.float32


@pytest.mark.parametrize("matrix_type", [TYPES.F16, TYPES.BF16, TYPES.Q8_0, TYPES.Q4_0, TYPES.Q4_1])
def test_stored_numbers_arrive_as_the_gguf_package_reads_them(matrix_type: TYPES, tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "folder")
    path = tmp_path / "tiny.gguf"
    write_gguf(model, "llama", path, matrix_type)
    source = GgufSource(path)
    weights = model.state_dict()
    for name in (
        "model.embed_tokens.weight",
        "model.layers.2.mlp.down_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
    ):
        values = weights[name].numpy()
        expected = torch.from_numpy(dequantize(quantize(values, matrix_type), matrix_type))
        for dtype in (torch.float32, torch.bfloat16):
            target = torch.empty(values.shape, dtype=dtype)
            source.copy_into(gguf_name(name), target, 0)
            assert torch.equal(target, expected.to(dtype))
    name = "model.layers.1.self_attn.k_proj.weight"
    target = torch.empty(weights[name].shape)
    source.copy_into(gguf_name(name), target, 2)
    # Blocks lie within a row, so reordering the rows does not change what a row was rounded to.
    assert torch.equal(target, torch.from_numpy(dequantize(quantize(weights[name].numpy(), matrix_type), matrix_type)))
    auto = resolve_dtype("auto", source.config())
    assert auto == (torch.float16 if matrix_type == TYPES.F16 else torch.bfloat16)


def test_a_tensor_larger_than_a_chunk_arrives_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model("llama", tmp_path / "folder")
    path = tmp_path / "tiny.gguf"
    write_gguf(model, "llama", path)
    whole = logits_of(resolve(str(path), silent))
    monkeypatch.setattr("engine.models.gguf._CHUNK_ELEMENTS", 700)
    assert torch.equal(logits_of(resolve(str(path), silent)), whole)


def test_rope_freqs_divide_the_frequencies(tmp_path: Path) -> None:
    # The converter writes llama3's stretching as a tensor: frequency before over frequency after.
    from engine.layers.rotary import default_frequencies, llama3_frequencies

    reference = make_tiny_model("llama-llama3-rope", tmp_path / "folder")
    plain = default_frequencies(10000.0, 16)
    factors = (plain / llama3_frequencies(plain, 8.0, 1.0, 4.0, 64)).numpy()
    original = reference.state_dict

    def with_factors() -> dict[str, torch.Tensor]:
        return {**original(), "rope_freqs.weight": torch.from_numpy(factors)}

    reference.state_dict = with_factors
    PARTS["rope_freqs"] = "rope_freqs"
    path = tmp_path / "tiny.gguf"
    write_gguf(reference, "llama", path)
    torch.testing.assert_close(
        logits_of(resolve(str(path), silent)), logits_of(resolve(str(tmp_path / "folder"), silent)), rtol=0, atol=1e-4
    )


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("tiny")
    write_gguf(make_tiny_model("llama", folder / "folder"), "llama", folder / "tiny.gguf", TYPES.Q4_1)
    return (folder / "tiny.gguf").read_bytes()


def attempt(content: bytes, path: Path) -> str:
    """Load the file; "" when that went well, else what the ModelError says. Any other exception is a failed test."""
    path.write_bytes(content)
    try:
        load_model(ModelFiles("gguf", path, "tiny", path, (path,)), torch.float32, silent)
    except ModelError as error:
        return str(error)
    return ""


def test_a_file_that_ends_early_is_refused_wherever_it_ends(tiny_gguf: bytes, tmp_path: Path) -> None:
    assert attempt(tiny_gguf, tmp_path / "a.gguf") == ""
    header = len(tiny_gguf) // 2
    for num_bytes in [*range(64), *range(64, header, header // 60), len(tiny_gguf) - 33]:
        assert attempt(tiny_gguf[:num_bytes], tmp_path / "a.gguf"), num_bytes


def test_flipped_bytes_are_refused_or_harmless_never_a_crash(tiny_gguf: bytes, tmp_path: Path) -> None:
    rng = random.Random(5)
    tokens = tiny_gguf.index(b"token4999")
    refused = 0
    for _ in range(150):
        damaged = bytearray(tiny_gguf)
        # The head and the tensors' table; what lies between are 5,000 token texts.
        at = rng.choice([rng.randrange(0, 600), rng.randrange(tokens, tokens + 1500)])
        damaged[at] = rng.randrange(256)
        refused += bool(attempt(bytes(damaged), tmp_path / "a.gguf"))
    assert refused > 30


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"GGML" + bytes(100), "GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "header"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "header"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62) + b"key", "header"),
        # A list of 2**60 numbers, of 2**60 texts, and a list of lists.
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**60), "header"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**60), "metadata"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "list"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 99), "type"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "token_embd.weight"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 2**40, 0, 0), "ends before its tensor 't'"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 2**31), "dimensions"),
    ],
)
def test_lengths_and_types_that_cannot_be_are_refused_at_once(content: bytes, named: str, tmp_path: Path) -> None:
    assert named in attempt(content, tmp_path / "a.gguf")
