"""Which tensor of a file fills which part of the decoder, and safetensors files as a source of tensors.

Tensors go one at a time from the file into the (often fused) weight they are a part of, and a weight takes its final
form as soon as it is full: beside the finished model there is one weight and one tensor in memory, no second model.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

import torch
from safetensors import SafetensorError, safe_open

from engine.layers.embedding import Embedding
from engine.layers.linear import Linear, LinearMethod
from engine.layers.norm import RMSNorm
from engine.layers.rotary import pair_order
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, DecoderLayer
from streamkv.errors import ModelError
from streamkv.model_files import ReportProgress

_DTYPES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class TensorSource(Protocol):
    """Files with named tensors."""

    description: str
    """For errors: where the tensors come from."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """All tensors by name."""
        ...

    def copy_into(self, name: str, target: torch.Tensor, num_heads: int) -> None:
        """Convert one tensor to the target's dtype and put it there. The shapes are equal.

        num_heads: over 0 for the rows of queries and keys, whose order in the file may be another. Raises ModelError.
        """
        ...


@dataclass(frozen=True, slots=True)
class TensorNames:
    """How a kind of file names the parts of a decoder; those of a layer come after `layer` with its number put in."""

    embedding: str
    norm: str
    head: str
    layer: str
    input_norm: str
    query: str
    key: str
    value: str
    qkv: str
    query_norm: str
    key_norm: str
    output: str
    attention_output_norm: str
    mlp_norm: str
    gate: str
    up: str
    gate_up: str
    down: str
    mlp_output_norm: str
    ignored_suffixes: tuple[str, ...]
    """Tensors that may be in the file and say nothing that the config does not."""


_HUB_NAMES: Final = TensorNames(
    embedding="model.embed_tokens",
    norm="model.norm",
    head="lm_head",
    layer="model.layers.{}.",
    input_norm="input_layernorm",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    qkv="self_attn.qkv_proj",
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
    output="self_attn.o_proj",
    attention_output_norm="",
    mlp_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    gate_up="mlp.gate_up_proj",
    down="mlp.down_proj",
    mlp_output_norm="",
    ignored_suffixes=(".rotary_emb.inv_freq",),
)
_HUB_OUTPUT_NORMED: Final = replace(
    _HUB_NAMES,
    attention_output_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
)

GGUF_NAMES: Final = TensorNames(
    embedding="token_embd",
    norm="output_norm",
    head="output",
    layer="blk.{}.",
    input_norm="attn_norm",
    query="attn_q",
    key="attn_k",
    value="attn_v",
    qkv="attn_qkv",
    query_norm="attn_q_norm",
    key_norm="attn_k_norm",
    output="attn_output",
    attention_output_norm="post_attention_norm",
    mlp_norm="ffn_norm",
    gate="ffn_gate",
    up="ffn_up",
    gate_up="ffn_up",
    down="ffn_down",
    mlp_output_norm="post_ffw_norm",
    ignored_suffixes=("rope_freqs.weight",),
)


def hub_names(config: ModelConfig) -> TensorNames:
    """How the files of a Hugging Face folder name the parts of this model."""
    return _HUB_OUTPUT_NORMED if config.has_output_norms else _HUB_NAMES


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows `start` .. of a weight, filled by tensors `name`.weight and, with a bias, `name`.bias."""

    name: str
    start: int
    num_rows: int
    num_heads: int = 0


@dataclass(frozen=True, slots=True)
class _Fill:
    """A part of the decoder and what fills it."""

    owner: Linear | RMSNorm | Embedding
    pieces: tuple[_Piece, ...]
    order: torch.Tensor | None = None
    """Once full, which of its rows comes at each place; None: they stay."""


def expected_shapes(model: Decoder, names: TensorNames) -> dict[str, tuple[int, ...]]:
    """Every tensor that `fill_decoder` asks of a source for this model, by its name there."""
    return {tensor: shape for fill in _fills(model, names) for tensor, shape in _expected(fill)}


def fill_decoder(
    model: Decoder,
    source: TensorSource,
    names: TensorNames,
    method: LinearMethod,
    report: ReportProgress,
    device: torch.device | str = "cpu",
    head_method: LinearMethod | None = None,
) -> None:
    """Put every tensor of `source` into its place in `model`, on `device`, and finish its products with `method`, that
    of the head with `head_method` where it is given.

    All names and shapes are checked before the first is read. Raises ModelError for a tensor that is missing, surplus
    or of the wrong shape, and names it.
    """
    config = model.config
    fills = list(_fills(model, names))
    expected = expected_shapes(model, names)
    ignored = {f"{names.head}.weight"} if config.tie_word_embeddings else set()
    _check_names(source, expected, ignored, names.ignored_suffixes)
    total = sum(math.prod(shape) for shape in expected.values())
    done = 0
    report("loading weights", 0.0)
    for fill in fills:
        owner = fill.owner
        weight = owner.allocate(device)
        for piece in fill.pieces:
            rows = slice(piece.start, piece.start + piece.num_rows)
            source.copy_into(f"{piece.name}.weight", weight[rows], piece.num_heads)
            if isinstance(owner, Linear) and owner.bias is not None:
                source.copy_into(f"{piece.name}.bias", owner.bias[rows], piece.num_heads)
            done += math.prod(expected[f"{piece.name}.weight"])
            report("loading weights", 100.0 * done / total)
        if fill.order is not None:
            order = fill.order.to(device)
            weight.copy_(weight.index_select(0, order))
            if isinstance(owner, Linear) and owner.bias is not None:
                owner.bias.copy_(owner.bias.index_select(0, order))
        if isinstance(owner, Linear):
            owner.finish(head_method if head_method is not None and owner is model.head else method)
        elif isinstance(owner, RMSNorm) and owner.offset:
            weight += owner.offset
    if config.tie_word_embeddings:
        model.head.weight = model.embedding.weight
        model.head.finish(head_method or method)
    report("loading weights", 100.0)


def _fills(model: Decoder, names: TensorNames) -> Iterator[_Fill]:
    config = model.config
    yield _Fill(model.embedding, (_Piece(names.embedding, 0, config.vocab_size),))
    for i, layer in enumerate(model.layers):
        yield from _layer_fills(layer, config, names, names.layer.format(i))
    yield _Fill(model.norm, (_Piece(names.norm, 0, config.hidden_size),))
    if not config.tie_word_embeddings:
        yield _Fill(model.head, (_Piece(names.head, 0, config.vocab_size),))


def _layer_fills(layer: DecoderLayer, config: ModelConfig, names: TensorNames, prefix: str) -> Iterator[_Fill]:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    num_query, num_kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
    # Rotated heads have their pairs side by side (see RotaryTable); values stay as they are.
    order = pair_order(config.num_heads + config.num_kv_heads, head_dim, config.rope.rotary_dim)
    order = torch.cat((order, torch.arange(num_query + num_kv, num_query + 2 * num_kv)))
    yield _Fill(layer.input_norm, (_Piece(prefix + names.input_norm, 0, hidden),))
    if config.fused_files:
        yield _Fill(layer.qkv, (_Piece(prefix + names.qkv, 0, num_query + 2 * num_kv),), order)
    else:
        query = _Piece(prefix + names.query, 0, num_query, config.num_heads)
        key = _Piece(prefix + names.key, num_query, num_kv, config.num_kv_heads)
        value = _Piece(prefix + names.value, num_query + num_kv, num_kv)
        yield _Fill(layer.qkv, (query, key, value), order)
    if layer.query_norm is not None and layer.key_norm is not None:
        within = pair_order(1, head_dim, config.rope.rotary_dim)
        yield _Fill(layer.query_norm, (_Piece(prefix + names.query_norm, 0, head_dim),), within)
        yield _Fill(layer.key_norm, (_Piece(prefix + names.key_norm, 0, head_dim),), within)
    yield _Fill(layer.output, (_Piece(prefix + names.output, 0, hidden),))
    if layer.attention_output_norm is not None and layer.mlp_output_norm is not None:
        yield _Fill(layer.attention_output_norm, (_Piece(prefix + names.attention_output_norm, 0, hidden),))
        yield _Fill(layer.mlp_output_norm, (_Piece(prefix + names.mlp_output_norm, 0, hidden),))
    yield _Fill(layer.mlp_norm, (_Piece(prefix + names.mlp_norm, 0, hidden),))
    if config.fused_files:
        yield _Fill(layer.mlp.gate_up, (_Piece(prefix + names.gate_up, 0, 2 * inner),))
    else:
        gate, up = _Piece(prefix + names.gate, 0, inner), _Piece(prefix + names.up, inner, inner)
        yield _Fill(layer.mlp.gate_up, (gate, up))
    yield _Fill(layer.mlp.down, (_Piece(prefix + names.down, 0, hidden),))


def _expected(fill: _Fill) -> Iterator[tuple[str, tuple[int, ...]]]:
    owner = fill.owner
    for piece in fill.pieces:
        match owner:
            case Linear():
                yield f"{piece.name}.weight", (piece.num_rows, owner.in_features)
                if owner.has_bias:
                    yield f"{piece.name}.bias", (piece.num_rows,)
            case Embedding():
                yield f"{piece.name}.weight", (piece.num_rows, owner.size)
            case RMSNorm():
                yield f"{piece.name}.weight", (piece.num_rows,)


def _check_names(
    source: TensorSource,
    expected: Mapping[str, tuple[int, ...]],
    ignored: set[str],
    ignored_suffixes: tuple[str, ...],
) -> None:
    missing = [name for name in expected if name not in source.shapes]
    if missing:
        raise ModelError(f"{source.description} lacks {_some(missing)}, which its configuration asks for")
    surplus = [
        name
        for name in source.shapes
        if name not in expected and name not in ignored and not name.endswith(ignored_suffixes)
    ]
    if surplus:
        raise ModelError(f"{source.description} has {_some(surplus)}, which its configuration has no place for")
    for name, shape in expected.items():
        if source.shapes[name] != shape:
            raise ModelError(
                f"{source.description}: tensor {name} has shape {list(source.shapes[name])}, "
                f"but by the configuration it should be {list(shape)}"
            )


def _some(names: list[str]) -> str:
    if len(names) == 1:
        return f"tensor {names[0]}"
    return f"{len(names)} tensors ({', '.join(names[:3])}{' …' if len(names) > 3 else ''})"


def most_common_dtype(paths: Iterable[Path]) -> str | None:
    """float32, float16 or bfloat16: that of most numbers in .safetensors files, from their headers, whatever else they
    hold; None: of no files. Raises ModelError."""
    num_elements: Counter[str] = Counter()
    path: Path | None = None
    try:
        for path in paths:
            file = safe_open(path, framework="pt")
            for name in file.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118
                header = file.get_slice(name)  # type: ignore[no-untyped-call]
                if header.get_dtype() in _DTYPES:
                    num_elements[_DTYPES[header.get_dtype()]] += math.prod(header.get_shape())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is no intact safetensors file: {error}") from error
    if path is not None and not num_elements:
        raise ModelError(f"{path} holds no weights in {', '.join(_DTYPES)}")
    return num_elements.most_common(1)[0][0] if num_elements else None


class SafetensorsSource:
    """The tensors of one or several .safetensors files. Only their headers are read until a tensor is asked for."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Raises ModelError for a file that is no safetensors file, an unsupported dtype, a name used twice."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, safe_open] = {}
        num_elements: Counter[str] = Counter()
        paths = list(paths)
        self.description = str(paths[0] if len(paths) == 1 else paths[0].parent)
        for path in paths:
            try:
                file = safe_open(path, framework="pt")
                for name in file.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118
                    header = file.get_slice(name)  # type: ignore[no-untyped-call]
                    if name in self.shapes:
                        raise ModelError(f"{path}: tensor {name} is in another file, too")
                    if header.get_dtype() not in _DTYPES:
                        raise ModelError(
                            f"{path}: tensor {name} is {header.get_dtype()}, which is not supported; "
                            f"{', '.join(_DTYPES)} are"
                        )
                    self.shapes[name] = tuple(header.get_shape())
                    self._files[name] = file
                    num_elements[_DTYPES[header.get_dtype()]] += math.prod(self.shapes[name])
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is no intact safetensors file: {error}") from error
        if not num_elements:
            raise ModelError(f"{self.description} holds no tensors")
        self.dtype = num_elements.most_common(1)[0][0]
        """float32, float16 or bfloat16: that of most weights."""

    def copy_into(self, name: str, target: torch.Tensor, num_heads: int) -> None:
        try:
            target.copy_(self._files[name].get_tensor(name))  # type: ignore[no-untyped-call]
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self.description}: tensor {name} cannot be read: {error}") from error
