"""Any causal language model of transformers, with its attention over our paged cache: slower than the generic decoder,
and right.

transformers computes all but attention, which it asks a function for that is registered under a name of the model's
own. A step's tokens are one row of a batch, with a position each; what a sequence sees is the function's to know.
"""

import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.batch import ForwardBatch
from engine.layers.attention import Attention
from engine.models.attention_dispatch import Attend, AttentionDispatch, LayerAttention
from engine.models.config import ModelConfig, RopeConfig, read_eos_ids, refuse_quantized
from engine.models.decoder import KVCache
from engine.models.room import is_out_of_memory
from engine.models.trial import try_out
from streamkv.errors import ModelError
from streamkv.model_files import ModelFiles, ReportProgress

_SEED: Final = 0x5EED
_KNOWN_LAYERS: Final = frozenset({"full_attention", "sliding_attention", "attention"})


class TransformersModel:
    """A model of transformers, computed a step at a time, with the calling interface of the generic Decoder.

    Not thread-safe: a step at a time.
    """

    def __init__(self, config: ModelConfig, module: Any, dispatch: AttentionDispatch) -> None:
        """module: the causal language model with its weights, dispatching its attention to `dispatch`."""
        self.config = config
        self.module = module.eval().requires_grad_(False)
        self._dispatch = dispatch
        self._decoder = module.get_decoder()
        self._compute = self._decoder.forward
        self._output_kind: Callable[..., object]
        """What the decoder returns, as `run` has found it."""
        self._given: torch.Tensor | None = None
        """The hidden states that the decoder is to give back at once, so that its head can be computed alone."""
        if "position_ids" not in inspect.signature(self._compute).parameters:
            raise ModelError(f"{config.architecture} takes no position_ids, so its tokens cannot be packed")
        self._decoder.forward = self._forward_or_given
        self._attentions: dict[LayerAttention, Attention] = {}
        weight = next(module.parameters())
        self.dtype: torch.dtype = weight.dtype
        with torch.inference_mode():
            self.layers = try_out(self.run, self.logits, config, weight)
        """How each layer attends, as its first steps showed."""

    def run(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """token_ids, positions: [num_tokens] → what `logits` takes: [num_tokens, hidden_size]. Raises ModelError for
        attention that cannot be computed as the model wants it."""
        self._dispatch.begin(attend)
        out = self._decoder(input_ids=token_ids[None].long(), position_ids=positions[None].long(), use_cache=False)
        self._dispatch.end()
        self._output_kind = type(out)
        return out.last_hidden_state[0]  # type: ignore[no-any-return]

    def hidden(self, batch: ForwardBatch, kv_caches: list[KVCache], rows: torch.Tensor) -> torch.Tensor:
        """As Decoder.hidden, on a CPU."""

        def attend(
            layer: int, kind: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
        ) -> torch.Tensor:
            attended = self._attention(kind)(query, key, value, batch, kv_caches[layer])
            return attended.view(query.shape)

        return self.run(batch.token_ids, batch.positions, attend).index_select(0, rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] → [n, vocab_size] float32."""
        if not len(hidden):
            return torch.empty(0, self.config.vocab_size, device=hidden.device)
        self._given = hidden[None]
        try:
            ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
            out = self.module(input_ids=ids, position_ids=ids, use_cache=False)
        finally:
            is_taken, self._given = self._given is None, None
        if not is_taken:
            raise ModelError(f"{self.config.architecture} has no decoder apart from its head")
        return out.logits[0].float()  # type: ignore[no-any-return]

    def forward(self, batch: ForwardBatch, kv_caches: list[KVCache]) -> torch.Tensor:
        """As Decoder.forward."""
        return self.logits(self.hidden(batch, kv_caches, batch.sample_rows))

    __call__ = forward

    def _forward_or_given(self, *args: object, **settings: object) -> object:
        given, self._given = self._given, None
        return self._compute(*args, **settings) if given is None else self._output_kind(last_hidden_state=given)

    def _attention(self, kind: LayerAttention) -> Attention:
        found = self._attentions.get(kind)
        if found is None:
            config = self.config
            found = self._attentions[kind] = Attention(
                config.num_heads, config.num_kv_heads, config.head_dim, kind.scale, kind.sliding_window, kind.soft_cap
            )
        return found


def read_transformers_config(files: ModelFiles, file_dtype: str | None) -> ModelConfig:
    """What the engine must know of a folder's model that the generic decoder does not know.

    file_dtype: how the weight files hold the weights; None: as config.json says. What only the generic decoder needs is
    left empty. Raises ModelError for what is no causal language model of transformers, or one that keeps more of a
    sequence than keys and values. Code that comes with a model is never run.
    """
    path = files.path / "config.json"
    refuse_quantized(path)
    found = _read(files)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(found.model_type)
    architectures = found.architectures or []
    if name is None or name not in architectures or found.is_encoder_decoder:
        raise ModelError(
            f"{path}: {', '.join(architectures) or found.model_type!r} is no causal language model that transformers "
            f"{transformers.__version__} knows by itself; encoder-decoders, models of images or sound and models that "
            "bring their own code are not supported"
        )
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(found, trust_remote_code=False)
    _refuse_stateful(path, found, module)
    num_heads = _size(path, found, "num_attention_heads")
    num_layers = _size(path, found, "num_hidden_layers")
    num_kv_heads, head_dim = _kv_shape(path, found, num_heads)
    if num_heads % num_kv_heads or not head_dim:
        raise ModelError(
            f"{path}: {num_heads} query heads do not share {num_kv_heads} KV heads of {head_dim} dimensions evenly"
        )
    vocab_size = _size(path, found, "vocab_size")
    return ModelConfig(
        architecture=name,
        vocab_size=vocab_size,
        hidden_size=_size(path, found, "hidden_size"),
        intermediate_size=0,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_size(path, found, "max_position_embeddings"),
        rms_norm_eps=0.0,
        rope=RopeConfig(theta=1.0, rotary_dim=0),
        tie_word_embeddings=bool(found.tie_word_embeddings),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_windows=(None,) * num_layers,
        eos_token_ids=read_eos_ids(files.path, vocab_size),
        file_dtype=file_dtype or str(found.dtype or torch.bfloat16).removeprefix("torch."),
        transformers_id=f"{transformers.__version__} {hashlib.sha256(path.read_bytes()).hexdigest()}",
        num_counted=sum(parameter.numel() for parameter in module.parameters()),
    )


def load_transformers_model(
    files: ModelFiles, config: ModelConfig, dtype: torch.dtype, report: ReportProgress, device: torch.device
) -> TransformersModel:
    """The model on `device`, tried out. Its weights go through the host's memory in one piece. Raises ModelError."""
    report("loading weights", 0.0)
    dispatch = AttentionDispatch(config)
    name = f"streamkv-{id(dispatch):x}"
    AttentionInterface.register(name, dispatch)
    settings: dict[str, Any] = {"dtype": dtype, "attn_implementation": name, "trust_remote_code": False}
    transformers.utils.logging.disable_progress_bar()
    try:
        if files.weight_paths:
            module, info = AutoModelForCausalLM.from_pretrained(
                files.path, use_safetensors=True, local_files_only=True, output_loading_info=True, **settings
            )
            wrong = {kind: sorted(map(str, info[kind])) for kind in ("missing_keys", "mismatched_keys") if info[kind]}
            if wrong:
                raise ModelError(f"{files.path}: its weights do not fit its configuration: {wrong!s:.300}")
            module = module.to(device)
        else:
            cuda = [device] if device.type == "cuda" else []
            with torch.random.fork_rng(cuda), torch.device(device):
                torch.manual_seed(_SEED)
                module = AutoModelForCausalLM.from_config(_read(files), **settings)
    except KeyError as error:
        if name not in str(error):
            raise
        raise ModelError(f"{config.architecture} computes its attention by itself, and is not supported") from error
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(f"{files.path}: transformers cannot load {config.architecture}: {error!s:.500}") from error
    model = TransformersModel(config, module, dispatch)
    report("loading weights", 100.0)
    return model


def _read(files: ModelFiles) -> Any:
    try:
        return AutoConfig.from_pretrained(files.path, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(
            f"{files.path / 'config.json'}: transformers {transformers.__version__} does not know this model: "
            f"{error!s:.300}"
        ) from error


def _refuse_stateful(path: Path, found: Any, module: Any) -> None:
    layer_types = set(found.layer_types or ()) if hasattr(found, "layer_types") else set()
    if module._is_stateful or not layer_types <= _KNOWN_LAYERS:
        odd = ", ".join(sorted(map(str, layer_types - _KNOWN_LAYERS))) or "recurrent"
        raise ModelError(
            f"{path}: {type(module).__name__} has layers that are not plain attention ({odd}); what they keep of a "
            "sequence does not fit into KV blocks"
        )
    rope = found.rope_parameters if hasattr(found, "rope_parameters") else None
    kinds = {rope.get("rope_type")} if isinstance(rope, dict) else set()
    if "longrope" in kinds:
        raise ModelError(f"{path}: rope_type longrope depends on the longest sequence of a batch, and is not supported")


def _kv_shape(path: Path, found: Any, num_heads: int) -> tuple[int, int]:
    """→ heads of keys and values, and their width; with latent attention those that it is unfolded to."""
    if hasattr(found, "qk_nope_head_dim") and hasattr(found, "qk_rope_head_dim"):
        return num_heads, int(found.qk_nope_head_dim) + int(found.qk_rope_head_dim)
    num_kv_heads = num_heads
    if hasattr(found, "num_key_value_heads") and found.num_key_value_heads:
        num_kv_heads = _size(path, found, "num_key_value_heads")
    if hasattr(found, "multi_query") and found.multi_query:
        num_kv_heads = 1
    if hasattr(found, "head_dim") and found.head_dim:
        return num_kv_heads, _size(path, found, "head_dim")
    return num_kv_heads, _size(path, found, "hidden_size") // num_heads


def _size(path: Path, found: Any, name: str) -> int:
    value = getattr(found, name, None)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{path}: {name} must be a whole number from 1, got {value!r:.40}")
    return value
