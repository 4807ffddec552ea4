"""How models of transformers ask for their attention, and who computes it for them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from engine.models.config import ModelConfig
from streamkv.errors import ModelError

_HARMLESS_TENSORS: Final = frozenset({"position_ids", "cache_position"})
"""Of what models hand to attention, those that say nothing that the batch does not."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How one layer wants its scores."""

    scale: float
    sliding_window: int | None
    soft_cap: float


Attend = Callable[[int, LayerAttention, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, its kind, query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim]) →
[num_tokens, num_heads, head_dim]. Writes key and value to the cache first."""


class AttentionDispatch:
    """What transformers calls for each layer's attention: hands the call on to whoever computes the current step."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._attend: Attend | None = None
        self._num_calls = 0

    def begin(self, attend: Attend) -> None:
        self._attend = attend
        self._num_calls = 0

    def end(self) -> None:
        """Raises ModelError when not every layer has asked for its attention, once."""
        self._attend = None
        if self._num_calls != self._config.num_layers:
            raise ModelError(
                f"{self._config.architecture} asks for attention {self._num_calls} times in "
                f"{self._config.num_layers} layers; only models whose every layer attends, through transformers' "
                "attention interface, are supported"
            )

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **settings: object,
    ) -> tuple[torch.Tensor, None]:
        """query: [1, num_heads, num_tokens, head_dim], key and value alike → [1, num_tokens, num_heads, value_dim]."""
        assert self._attend is not None, "outside a step"
        kind = self._kind(module, query, attention_mask, settings)
        config, value_dim = self._config, value.shape[3]
        found = (key.shape[1], key.shape[3])
        if found != (config.num_kv_heads, config.head_dim) or value_dim > config.head_dim:
            raise ModelError(
                f"{config.architecture}: keys have {found[0]} heads of {found[1]} and values of {value_dim}, where its "
                f"configuration speaks of {config.num_kv_heads} of {config.head_dim}; such layers are not supported"
            )
        if value_dim < config.head_dim:
            value = torch.nn.functional.pad(value, (0, config.head_dim - value_dim))
        rows = [part[0].transpose(0, 1).contiguous() for part in (query, key, value)]
        layer, self._num_calls = self._num_calls, self._num_calls + 1
        attended = self._attend(layer, kind, *rows)
        return attended[None, :, :, :value_dim], None

    def _kind(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        attention_mask: torch.Tensor | None,
        settings: dict[str, object],
    ) -> LayerAttention:
        """Refuses what the paged attention cannot do."""
        odd = [name for name, value in settings.items() if isinstance(value, torch.Tensor)]
        odd = [name for name in odd if name not in _HARMLESS_TENSORS]
        odd += ["attention_mask"] * (attention_mask is not None)
        sees_all = settings.get("is_causal") is False or (hasattr(module, "is_causal") and not module.is_causal)
        odd += ["is_causal"] * sees_all
        if odd or query.shape[0] != 1:
            raise ModelError(
                f"{self._config.architecture}: its attention is not plainly causal ({', '.join(odd) or 'batched'}): "
                "biases of positions, sinks and attention to other inputs are not supported"
            )
        scale, window, cap = (settings.get(name) for name in ("scaling", "sliding_window", "softcap"))
        return LayerAttention(
            float(scale) if isinstance(scale, (int, float)) else query.shape[3] ** -0.5,
            window if isinstance(window, int) else None,
            float(cap) if isinstance(cap, (int, float)) else 0.0,
        )
