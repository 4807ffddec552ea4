"""What the generic decoder must know of a model, and how config.json and GGUF metadata say it.

A new family of this kind is one entry in _HUB_FAMILIES, and one in _GGUF_FAMILIES.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from streamkv.errors import ModelError

_MAX_SIZE: Final = 1 << 24
"""No dimension of a real model comes near; larger ones are damaged files."""
_MAX_LAYERS: Final = 4096


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: frequencies, and how they are stretched for longer contexts."""

    theta: float
    rotary_dim: int
    """The first so many of head_dim are rotated. Even."""
    kind: str = "default"
    """default, linear, llama3 or yarn."""
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: round the borders of its ramp to whole dimensions."""
    attention_factor: float = 1.0
    """yarn: cos and sin are multiplied by this."""
    frequency_divisors: tuple[float, ...] = ()
    """[rotary_dim / 2], from a GGUF's rope_freqs: divides the frequencies, after `kind`; empty: none."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama kind. Sizes are numbers of elements."""

    architecture: str
    """As the file names it: LlamaForCausalLM, or a GGUF's qwen2."""
    vocab_size: int
    """Rows of the embedding and width of the logits."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    """The attention's output projection has a bias."""
    mlp_bias: bool
    qk_norm: bool
    """Queries and keys are normalised per head before they are rotated (Qwen3, Gemma 3)."""
    sliding_windows: tuple[int | None, ...]
    """Per layer: how many positions a query sees, itself included; None: all before it."""
    eos_token_ids: tuple[int, ...]
    hidden_act: str = "silu"
    """Of the MLP's gate: silu, gelu (by the error function) or gelu_tanh (its approximation)."""
    embedding_scale: float = 1.0
    """What the embedding gives is multiplied by this, rounded to the weights' dtype (Gemma)."""
    norm_offset: float = 0.0
    """Added to the weights of all norms when they are loaded: the file holds them less 1 (Gemma)."""
    query_pre_attn_scalar: float | None = None
    """Scores are divided by its square root (Gemma 2, 3); None: by that of head_dim."""
    attention_soft_cap: float = 0.0
    """Scores become cap * tanh(score / cap) before the softmax (Gemma 2); 0: they do not."""
    final_soft_cap: float = 0.0
    """The same for logits."""
    has_output_norms: bool = False
    """What attention and MLP give is normalised before it is added to the residual stream (Gemma 2, 3)."""
    local_rope: RopeConfig | None = None
    """Of the layers with a sliding window (Gemma 3); None: `rope` holds for all."""
    fused_files: bool = False
    """The file holds q, k, v as one tensor and gate, up as another (Phi-3)."""
    file_dtype: str = ""
    """float32, float16, bfloat16 or quantized: how the file holds the weights."""
    initializer_range: float = 0.02
    """Standard deviation of dummy weights."""
    transformers_id: str = ""
    """Of a model that transformers computes: its version and a digest of config.json; what only the generic decoder
    needs has no meaning then. Empty: the generic decoder computes it."""
    num_counted: int = 0
    """Weights of a model that transformers computes."""

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by."""
        scalar = self.head_dim if self.query_pre_attn_scalar is None else self.query_pre_attn_scalar
        return float(scalar**-0.5)

    @property
    def num_parameters(self) -> int:
        """Weights of the model; tied embeddings count once."""
        if self.transformers_id:
            return self.num_counted
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * query + 2 * kv) + self.qkv_bias * (query + 2 * kv)
        attention += self.output_bias * self.hidden_size + self.qk_norm * 2 * self.head_dim
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        norms = (4 if self.has_output_norms else 2) * self.hidden_size
        return self.num_layers * (attention + mlp + norms) + embeddings + self.hidden_size


class _Settings:
    """A mapping from outside, read field by field; what is missing or of a wrong kind is a ModelError that names it."""

    def __init__(self, values: Mapping[str, object], source: str) -> None:
        self.values = values
        self.source = source

    def fail(self, key: str, rule: str) -> ModelError:
        return ModelError(f"{self.source}: {key} {rule}, got {self.values.get(key)!r:.80}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def size(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_SIZE:
            raise self.fail(key, f"must be a whole number from 1 to {_MAX_SIZE}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self.fail(key, "must be a number over 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, "must be true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.fail(key, "must be a text")
        return value

    def table(self, key: str) -> "_Settings":
        value = self.values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.fail(key, "must be an object")
        return _Settings(value, f"{self.source}: {key}")


# config.json


@dataclass(frozen=True, slots=True)
class _HubFamily:
    """Where the config.json of a family departs from Llama's."""

    qkv_bias: Callable[[_Settings], bool]
    output_bias: Callable[[_Settings], bool]
    windows: Callable[[_Settings, int], tuple[int | None, ...]]
    has_mlp_bias: bool = False
    qk_norm: bool = False
    fused_files: bool = False
    gemma: int = 0
    """Generation of Gemma; 0: another family."""


def _attention_bias(settings: _Settings) -> bool:
    return settings.flag("attention_bias", False)


def _no(settings: _Settings) -> bool:
    return False


def _yes(settings: _Settings) -> bool:
    return True


def _no_window(settings: _Settings, num_layers: int) -> tuple[int | None, ...]:
    return (None,) * num_layers


def _window_everywhere(settings: _Settings, num_layers: int) -> tuple[int | None, ...]:
    window = settings.size("sliding_window") if settings.has("sliding_window") else None
    return (window,) * num_layers


def _window_by_layer(settings: _Settings, num_layers: int) -> tuple[int | None, ...]:
    """Qwen: switched by use_sliding_window; the first max_window_layers layers see everything, or layer_types says."""
    if not settings.flag("use_sliding_window", False) or not settings.has("sliding_window"):
        return (None,) * num_layers
    window = settings.size("sliding_window")
    layer_types = settings.values.get("layer_types")
    if layer_types is None:
        first = settings.values.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise settings.fail("max_window_layers", "must be a whole number, 0 or more")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return _windows_of(layer_types, window, settings, num_layers)


def _windows_of(
    layer_types: object, window: int | None, settings: _Settings, num_layers: int
) -> tuple[int | None, ...]:
    known = {"sliding_attention": window, "full_attention": None}
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise settings.fail("layer_types", f"must name all {num_layers} layers")
    if not all(isinstance(layer_type, str) and layer_type in known for layer_type in layer_types):
        raise settings.fail("layer_types", "may hold full_attention and sliding_attention only")
    return tuple(known[layer_type] for layer_type in layer_types)


def _window_but_for_each_second(settings: _Settings, num_layers: int) -> tuple[int | None, ...]:
    return _window_in_turns(settings, num_layers, 2)


def _window_but_for_each_sixth(settings: _Settings, num_layers: int) -> tuple[int | None, ...]:
    return _window_in_turns(settings, num_layers, settings.size("sliding_window_pattern", 6))


def _window_in_turns(settings: _Settings, num_layers: int, period: int) -> tuple[int | None, ...]:
    """Gemma: as layer_types says; without it, the last layer of each `period` sees everything."""
    window = settings.size("sliding_window", 4096)
    layer_types = settings.values.get("layer_types")
    if layer_types is not None:
        return _windows_of(layer_types, window, settings, num_layers)
    return tuple(window if (layer + 1) % period else None for layer in range(num_layers))


_HUB_FAMILIES: Final = {
    "LlamaForCausalLM": _HubFamily(_attention_bias, _attention_bias, _no_window, has_mlp_bias=True),
    "MistralForCausalLM": _HubFamily(_no, _no, _window_everywhere),
    "Qwen2ForCausalLM": _HubFamily(_yes, _no, _window_by_layer),
    "Qwen3ForCausalLM": _HubFamily(_attention_bias, _attention_bias, _window_by_layer, qk_norm=True),
    "Phi3ForCausalLM": _HubFamily(_no, _no, _window_everywhere, fused_files=True),
    "GemmaForCausalLM": _HubFamily(_attention_bias, _attention_bias, _no_window, gemma=1),
    "Gemma2ForCausalLM": _HubFamily(_attention_bias, _attention_bias, _window_but_for_each_second, gemma=2),
    "Gemma3ForCausalLM": _HubFamily(
        _attention_bias, _attention_bias, _window_but_for_each_sixth, qk_norm=True, gemma=3
    ),
}
_ACTIVATIONS: Final = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def read_hub_config(folder: Path, file_dtype: str | None) -> ModelConfig:
    """The ModelConfig of a folder with config.json and perhaps generation_config.json, of transformers 4 or 5.

    file_dtype: how the weight files hold the weights; None: as config.json says they do. Raises ModelError.
    """
    path = folder / "config.json"
    settings = _Settings(_read_json(path), str(path))
    architectures = settings.values.get("architectures")
    named = [name for name in architectures if name in _HUB_FAMILIES] if isinstance(architectures, list) else []
    if not named:
        raise ModelError(
            f"{path}: architecture {architectures!r:.120} is not supported; these are: {', '.join(_HUB_FAMILIES)}"
        )
    _refuse_quantized(settings)
    family = _HUB_FAMILIES[named[0]]
    hidden_size = settings.size("hidden_size")
    num_layers = settings.size("num_hidden_layers")
    num_heads = settings.size("num_attention_heads")
    head_dim = settings.size("head_dim", 256 if family.gemma else max(1, hidden_size // num_heads))
    max_positions = settings.size("max_position_embeddings")
    vocab_size = settings.size("vocab_size")
    config = ModelConfig(
        architecture=named[0],
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=settings.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=settings.size("num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=settings.number("rms_norm_eps", 1e-6),
        rope=_hub_rope(settings, head_dim, max_positions),
        tie_word_embeddings=settings.flag("tie_word_embeddings", family.gemma > 0),
        qkv_bias=family.qkv_bias(settings),
        output_bias=family.output_bias(settings),
        mlp_bias=family.has_mlp_bias and settings.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        sliding_windows=family.windows(settings, num_layers),
        eos_token_ids=_hub_eos(folder, settings, vocab_size),
        hidden_act="gelu_tanh" if family.gemma else _hub_activation(settings, "hidden_act", "silu"),
        fused_files=family.fused_files,
        file_dtype=file_dtype or _hub_dtype(settings),
        initializer_range=settings.number("initializer_range", 0.02),
    )
    return _checked(_as_gemma(config, family.gemma, settings) if family.gemma else config, str(path))


def is_generic(folder: Path) -> bool:
    """Whether the model of a folder is of a family that the generic decoder knows. Raises ModelError."""
    architectures = _read_json(folder / "config.json").get("architectures")
    return isinstance(architectures, list) and any(name in _HUB_FAMILIES for name in architectures)


def refuse_quantized(path: Path) -> None:
    """Raises ModelError for a config.json of a model in a quantisation of its own."""
    _refuse_quantized(_Settings(_read_json(path), str(path)))


def _refuse_quantized(settings: _Settings) -> None:
    if settings.has("quantization_config"):
        method = settings.table("quantization_config").values.get("quant_method")
        raise ModelError(
            f"{settings.source}: weights quantized by {method!r:.40} are not supported; take the model in bfloat16 or "
            "float16, or as a .gguf file"
        )


def read_eos_ids(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """Which ids end a generation, as the files of a folder say. Raises ModelError."""
    path = folder / "config.json"
    return _hub_eos(folder, _Settings(_read_json(path), str(path)), vocab_size)


def _as_gemma(config: ModelConfig, generation: int, settings: _Settings) -> ModelConfig:
    """What only Gemma's files have, and its defaults."""
    if settings.flag("use_bidirectional_attention", False):
        raise ModelError(
            f"{settings.source}: use_bidirectional_attention is not supported; tokens are computed in order"
        )
    key = "hidden_activation" if settings.has("hidden_activation") else "hidden_act"
    hidden_act = _hub_activation(settings, key, "gelu_pytorch_tanh")
    config = replace(config, hidden_act=hidden_act, embedding_scale=math.sqrt(config.hidden_size), norm_offset=1.0)
    if generation == 1:
        # The first files say gelu and mean the approximation.
        return replace(config, hidden_act="gelu_tanh" if hidden_act == "gelu" else hidden_act)
    config = replace(
        config,
        query_pre_attn_scalar=settings.number("query_pre_attn_scalar", 256.0),
        attention_soft_cap=_soft_cap(settings, "attn_logit_softcapping", 50.0 if generation == 2 else 0.0),
        final_soft_cap=_soft_cap(settings, "final_logit_softcapping", 30.0 if generation == 2 else 0.0),
        has_output_norms=True,
    )
    if generation == 2:
        return config
    head_dim, max_positions = config.head_dim, config.max_position_embeddings
    if settings.has("rope_parameters"):
        both = settings.table("rope_parameters")
        wide = _rope_of(both.table("full_attention"), 1e6, 1.0, head_dim, max_positions)
        local = _rope_of(both.table("sliding_attention"), 1e4, 1.0, head_dim, max_positions)
        return replace(config, rope=wide, local_rope=local)
    theta = settings.number("rope_theta", 1e6)
    wide = _rope_of(settings.table("rope_scaling"), theta, 1.0, head_dim, max_positions)
    return replace(
        config, rope=wide, local_rope=RopeConfig(settings.number("rope_local_base_freq", 1e4), rotary_dim=head_dim)
    )


def _soft_cap(settings: _Settings, key: str, default: float) -> float:
    """A null says that there is none."""
    return settings.number(key) if settings.has(key) else 0.0 if key in settings.values else default


def _hub_activation(settings: _Settings, key: str, default: str) -> str:
    name = settings.text(key, default)
    if name not in _ACTIVATIONS:
        raise settings.fail(key, f"must be one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _hub_dtype(settings: _Settings) -> str:
    """transformers 5 calls it dtype, 4 torch_dtype; most models that say nothing are bfloat16."""
    key = "dtype" if settings.has("dtype") else "torch_dtype"
    dtype = settings.text(key, "bfloat16").removeprefix("torch.")
    if dtype not in ("float32", "float16", "bfloat16"):
        raise settings.fail(key, "must be float32, float16 or bfloat16")
    return dtype


def _hub_rope(settings: _Settings, head_dim: int, max_positions: int) -> RopeConfig:
    """transformers 5 keeps all in rope_parameters, 4 has rope_theta at the top and rope_scaling for the stretching."""
    rope = settings.table("rope_parameters" if settings.has("rope_parameters") else "rope_scaling")
    theta, partial = settings.number("rope_theta", 10000.0), settings.number("partial_rotary_factor", 1.0)
    return _rope_of(rope, theta, partial, head_dim, max_positions)


def _rope_of(rope: _Settings, theta: float, partial: float, head_dim: int, max_positions: int) -> RopeConfig:
    """theta, partial: what holds where `rope` does not say."""
    theta = rope.number("rope_theta", theta)
    rotary_dim = int(head_dim * rope.number("partial_rotary_factor", partial))
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind in ("default", "dynamic"):
        # Dynamic stretching sets in beyond max_position_embeddings only, which no sequence here passes.
        return RopeConfig(theta, rotary_dim)
    factor = rope.number("factor")
    original = rope.size("original_max_position_embeddings", max_positions)
    if kind == "linear":
        return RopeConfig(theta, rotary_dim, kind, factor)
    if kind == "llama3":
        return RopeConfig(
            theta,
            rotary_dim,
            kind,
            factor,
            original,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    if kind == "yarn":
        return RopeConfig(
            theta,
            rotary_dim,
            kind,
            factor,
            original,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            truncate=rope.flag("truncate", True),
            attention_factor=_yarn_attention_factor(rope, factor),
        )
    raise ModelError(
        f"{rope.source}: rope_type {kind!r:.40} is not supported; default, dynamic, linear, llama3 and yarn are"
    )


def _yarn_attention_factor(rope: _Settings, factor: float) -> float:
    if rope.has("attention_factor"):
        return rope.number("attention_factor")
    if rope.has("mscale") and rope.has("mscale_all_dim"):
        return _yarn_mscale(factor, rope.number("mscale")) / _yarn_mscale(factor, rope.number("mscale_all_dim"))
    return _yarn_mscale(factor, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _hub_eos(folder: Path, settings: _Settings, vocab_size: int) -> tuple[int, ...]:
    """generation_config.json says which ids end a generation; only without it does config.json."""
    path = folder / "generation_config.json"
    if path.is_file():
        generation = _Settings(_read_json(path), str(path))
        if generation.has("eos_token_id"):
            settings = generation
    ids = settings.values.get("eos_token_id")
    if ids is None:
        return ()
    return _known_ids(ids if isinstance(ids, list) else [ids], vocab_size, settings, "eos_token_id")


def _known_ids(ids: list[object], vocab_size: int, settings: _Settings, key: str) -> tuple[int, ...]:
    """The ids that the model can sample, each once."""
    known: list[int] = []
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise settings.fail(key, "must be a token id or a list of them")
        if 0 <= token_id < vocab_size and token_id not in known:
            known.append(token_id)
    return tuple(known)


def _read_json(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold an object, got {type(content).__name__}")
    return content


# GGUF metadata


@dataclass(frozen=True, slots=True)
class _GgufFamily:
    interleaved_rope: bool = False
    """Rows of q and k are ordered for llama.cpp's rotation of neighbouring pairs."""
    fused_files: bool = False


_GGUF_FAMILIES: Final = {
    "llama": _GgufFamily(interleaved_rope=True),
    "qwen2": _GgufFamily(),
    "qwen3": _GgufFamily(),
    "phi3": _GgufFamily(fused_files=True),
}


def has_interleaved_rope(architecture: str) -> bool:
    """Whether the q and k rows of a GGUF of this architecture must be put back in the halves order."""
    return _GGUF_FAMILIES[architecture].interleaved_rope


def read_gguf_config(
    metadata: Mapping[str, object],
    tensor_names: Collection[str],
    vocab_size: int,
    rope_freqs: tuple[float, ...],
    file_dtype: str,
    source: str,
) -> ModelConfig:
    """The ModelConfig of a GGUF.

    metadata: its keys, with plain numbers, texts and lists; vocab_size: rows of its embedding; rope_freqs: values of
    its rope_freqs.weight, or empty; source: its path, for errors. Raises ModelError.
    """
    settings = _Settings(metadata, source)
    architecture = settings.text("general.architecture", "")
    if architecture not in _GGUF_FAMILIES:
        raise ModelError(
            f"{source}: architecture {architecture!r:.80} is not supported; these are: {', '.join(_GGUF_FAMILIES)}"
        )
    if settings.size("split.count", 1) > 1:
        raise ModelError(f"{source}: a GGUF split into several files is not supported; merge it into one")
    if metadata.get(f"{architecture}.expert_count"):
        raise ModelError(f"{source}: mixtures of experts are not supported")
    family = _GGUF_FAMILIES[architecture]
    hidden_size = settings.size(f"{architecture}.embedding_length")
    num_heads = settings.size(f"{architecture}.attention.head_count")
    num_layers = settings.size(f"{architecture}.block_count")
    head_dim = settings.size(f"{architecture}.attention.key_length", max(1, hidden_size // num_heads))
    if settings.size(f"{architecture}.attention.value_length", head_dim) != head_dim:
        raise settings.fail(f"{architecture}.attention.value_length", f"must be the key length, {head_dim}")
    window_key = f"{architecture}.attention.sliding_window"
    window = settings.size(window_key) if metadata.get(window_key) else None
    return _checked(
        ModelConfig(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=settings.size(f"{architecture}.feed_forward_length"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=settings.size(f"{architecture}.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_position_embeddings=settings.size(f"{architecture}.context_length"),
            rms_norm_eps=settings.number(f"{architecture}.attention.layer_norm_rms_epsilon"),
            rope=_gguf_rope(settings, architecture, head_dim, rope_freqs),
            tie_word_embeddings="output.weight" not in tensor_names,
            qkv_bias="blk.0.attn_q.bias" in tensor_names or "blk.0.attn_qkv.bias" in tensor_names,
            output_bias="blk.0.attn_output.bias" in tensor_names,
            mlp_bias="blk.0.ffn_down.bias" in tensor_names,
            qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
            sliding_windows=(window,) * num_layers,
            eos_token_ids=_gguf_eos(settings, vocab_size),
            fused_files=family.fused_files,
            file_dtype=file_dtype,
        ),
        source,
    )


def _gguf_rope(
    settings: _Settings, architecture: str, head_dim: int, frequency_divisors: tuple[float, ...]
) -> RopeConfig:
    theta = settings.number(f"{architecture}.rope.freq_base", 10000.0)
    rotary_dim = settings.size(f"{architecture}.rope.dimension_count", head_dim)
    kind = settings.text(f"{architecture}.rope.scaling.type", "none")
    if frequency_divisors and len(frequency_divisors) != rotary_dim // 2:
        raise ModelError(
            f"{settings.source}: rope_freqs.weight must have {rotary_dim // 2} values, got {len(frequency_divisors)}"
        )
    if kind == "none":
        return RopeConfig(theta, rotary_dim, frequency_divisors=frequency_divisors)
    factor = settings.number(f"{architecture}.rope.scaling.factor", 1.0)
    if kind == "linear":
        return RopeConfig(theta, rotary_dim, kind, factor, frequency_divisors=frequency_divisors)
    if kind == "yarn":
        return RopeConfig(
            theta,
            rotary_dim,
            kind,
            factor,
            settings.size(f"{architecture}.rope.scaling.original_context_length"),
            attention_factor=_yarn_mscale(factor, 1.0),
            frequency_divisors=frequency_divisors,
        )
    raise ModelError(f"{settings.source}: rope scaling {kind!r:.40} is not supported; none, linear and yarn are")


def _gguf_eos(settings: _Settings, vocab_size: int) -> tuple[int, ...]:
    """The end of a text, and of a turn where the file names it apart."""
    keys = [key for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if settings.has(key)]
    return _known_ids([settings.values[key] for key in keys], vocab_size, settings, " / ".join(keys))


def _checked(config: ModelConfig, source: str) -> ModelConfig:
    if config.num_layers > _MAX_LAYERS:
        raise ModelError(f"{source}: {config.num_layers} layers are more than {_MAX_LAYERS}")
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"{source}: {config.num_heads} query heads do not share {config.num_kv_heads} KV heads evenly")
    if config.head_dim % 2:
        raise ModelError(f"{source}: an odd head dimension, {config.head_dim}, is not supported")
    if config.rope.rotary_dim % 2 or not 0 < config.rope.rotary_dim <= config.head_dim:
        raise ModelError(
            f"{source}: {config.rope.rotary_dim} rotated dimensions do not fit a head of {config.head_dim}"
        )
    return config
