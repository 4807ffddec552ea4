"""Models of transformers with their attention in our kernels agree with transformers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Cohere2Config, GPT2Config, PretrainedConfig

pytest.importorskip("triton")

from engine.batch import DeviceBatch
from engine.models.gpu_transformers_model import GpuTransformersModel
from engine.models.load import load_model
from engine.models.transformers_model import TransformersModel
from streamkv.errors import ModelError
from streamkv.model_files import resolve
from tests.support.tiny_models import VOCAB_SIZE, PagedSequences

RELATIVE = 1e-4
"""Of the largest logit: float32 with the sums in another order."""
CONFIGS: dict[str, PretrainedConfig] = {
    "gpt2": GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    "cohere2": Cohere2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
    ),
}


def load(folder: Path, device: torch.device) -> TransformersModel:
    files = resolve(str(folder), lambda stage, percent: None)
    model, _ = load_model(files, torch.float32, lambda stage, percent: None, device=device)
    assert isinstance(model, TransformersModel)
    return model


@pytest.mark.parametrize("name", ["gpt2", pytest.param("cohere2", marks=pytest.mark.long)])
def test_logits_equal_transformers_in_chunks_and_mixed_steps(name: str, tmp_path: Path, device: torch.device) -> None:
    torch.manual_seed(3)
    reference = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager").eval()
    reference.save_pretrained(tmp_path)
    model = load(tmp_path, device)
    config = model.config
    gpu_model = GpuTransformersModel(model, 64, 2, 64, torch.float32, device)
    sequences = PagedSequences(config, 2)
    sequences.caches = [(keys.to(device), values.to(device)) for keys, values in sequences.caches]
    tables = torch.tensor(sequences.tables, dtype=torch.int32, device=device)
    ids = torch.randint(3, VOCAB_SIZE, (2, 24), generator=torch.Generator().manual_seed(2)).tolist()
    attended = torch.zeros(64, config.num_heads * config.head_dim, device=device)
    residual = torch.zeros(64, config.hidden_size, device=device)
    with torch.inference_mode():
        expected = reference(torch.tensor(ids), use_cache=False).logits
        done = [0, 0]
        for sizes in ((9, 3), (1, 6), (1, 1)):
            chunks = {i: ids[i][done[i] : done[i] + size] for i, size in enumerate(sizes)}
            done = [start + size for start, size in zip(done, sizes, strict=True)]
            packed = sequences.batch(chunks)
            order = [sequences.tables.index(table) for table in packed.block_tables]

            def ints(values: object) -> torch.Tensor:
                return torch.as_tensor(values, dtype=torch.int32).to(device)

            batch = DeviceBatch(
                token_ids=ints(packed.token_ids),
                positions=ints(packed.positions),
                slots=ints(packed.slots),
                query_start_loc=ints(packed.query_start_loc),
                seq_lens=ints(packed.seq_lens),
                seq_slots=ints(order),
                block_tables=tables,
                has_long=max(sizes) > 1,
            )
            num_tokens = sum(sizes)
            gpu_model.body(batch, sequences.caches, None, attended[:num_tokens], residual[:num_tokens])
            logits = torch.empty(2, VOCAB_SIZE, device=device)
            gpu_model.head(attended[:2], residual[packed.sample_rows.to(device)], logits)
            for i in range(2):
                found, wanted = logits[i].cpu(), expected[i, done[i] - 1]
                assert (found - wanted).abs().max() <= RELATIVE * wanted.abs().max()


def test_fixed_bits_are_refused(tmp_path: Path, device: torch.device) -> None:
    AutoModelForCausalLM.from_config(CONFIGS["gpt2"]).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="--deterministic"):
        GpuTransformersModel(load(tmp_path, device), 64, 2, 64, torch.float32, device, is_deterministic=True)
