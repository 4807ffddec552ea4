"""Tiny random models made with transformers, and steps over them on a paged cache."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from engine.batch import ForwardBatch
from engine.models.config import ModelConfig
from engine.models.decoder import KVCache

VOCAB_SIZE = 160
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
_GEMMA_SIZES = {**_SIZES, "head_dim": 24}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_SIZES),
    "llama-tied": LlamaConfig(**_SIZES, tie_word_embeddings=True, head_dim=24),
    "llama-biased": LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True),
    "llama-llama3-rope": LlamaConfig(**_SIZES, rope_parameters=_LLAMA3_ROPE),
    "llama-yarn": LlamaConfig(**_SIZES, rope_parameters=_YARN_ROPE),
    "llama-linear-rope": LlamaConfig(
        **_SIZES, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
    ),
    "mistral": MistralConfig(**_SIZES, sliding_window=9),
    "mistral-full": MistralConfig(**_SIZES, sliding_window=None, head_dim=32),
    "qwen2": Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "qwen2-sliding": Qwen2Config(**_SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "qwen3": Qwen3Config(**_SIZES, head_dim=32),
    "qwen3-biased": Qwen3Config(**_SIZES, head_dim=16, attention_bias=True),
    "phi3": Phi3Config(**_SIZES, sliding_window=11),
    "phi3-partly-rotated": Phi3Config(
        **_SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "gemma": GemmaConfig(**_GEMMA_SIZES),
    # Caps that these small scores and logits come near to.
    "gemma2": Gemma2Config(
        **_GEMMA_SIZES,
        sliding_window=9,
        query_pre_attn_scalar=40,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3": Gemma3TextConfig(
        **_GEMMA_SIZES, sliding_window=7, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
}


def make_tiny_model(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Save the random model CONFIGS[name] to `folder`, and return it. Norms and biases are random, too."""
    generator = torch.Generator().manual_seed(len(name))
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + (-0.5 if "gemma" in name else 0.5))
            elif parameter_name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model = model.to(dtype)
    model.save_pretrained(folder)
    return model


class PagedSequences:
    """Sequences on a paged cache with scattered blocks, stepped by hand."""

    def __init__(self, config: ModelConfig, num_sequences: int, block_size: int = 4, max_len: int = 64) -> None:
        per_sequence = -(-max_len // block_size)
        num_blocks = 1 + num_sequences * per_sequence
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(1)) + 1
        self.block_size = block_size
        self.tables = order.view(num_sequences, per_sequence).tolist()
        self.lens = [0] * num_sequences
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.caches: list[KVCache] = [
            (torch.full(shape, torch.nan), torch.full(shape, torch.nan)) for _ in range(config.num_layers)
        ]

    def batch(self, chunks: dict[int, list[int]], sampled: set[int] | None = None) -> ForwardBatch:
        """The next step: sequence index → its new token ids. `sampled`: whose last row is wanted; all by default."""
        order = sorted(chunks, key=lambda i: len(chunks[i]) != 1)
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        rows = {}
        for i in order:
            places = range(self.lens[i], self.lens[i] + len(chunks[i]))
            self.lens[i] = places.stop
            token_ids += chunks[i]
            positions += places
            slots += [self.tables[i][p // self.block_size] * self.block_size + p % self.block_size for p in places]
            starts.append(len(token_ids))
            rows[i] = len(token_ids) - 1
        wanted = [rows[i] for i in chunks if sampled is None or i in sampled]
        return ForwardBatch(
            token_ids=torch.tensor(token_ids),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            query_start_loc=starts,
            seq_lens=[self.lens[i] for i in order],
            block_tables=[self.tables[i] for i in order],
            num_decodes=sum(len(chunk) == 1 for chunk in chunks.values()),
            sample_rows=torch.tensor(wanted, dtype=torch.int64),
        )


def write_small_llama(folder: Path) -> Path:
    """A Llama with random weights and 320 tokens, as a folder. Large enough weights that its logits differ."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
