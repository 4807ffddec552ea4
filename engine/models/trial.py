"""A few steps with a new model, which show how it attends and that our way of computing it holds.

What a sequence gets may depend neither on how its prompt is cut nor on what stands beside it in a step. A model that
keeps a state of its own, or that mixes the tokens of a row outside of attention, fails here, and not in an answer.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch

from engine.models.attention_dispatch import Attend, LayerAttention
from engine.models.config import ModelConfig
from streamkv.errors import ModelError

_PROMPTS: Final = ((5, 9, 3, 7, 1, 8), (4, 2, 6))
_STEPS: Final = ((3, 1), (2, 1), (1, 1))
"""Tokens of each prompt in each step."""
_LARGEST_ERROR: Final = {torch.float32: 1e-3}
_LARGEST_NARROW_ERROR: Final = 0.25
"""Relative to the length of the logits. Narrow numbers differ by some hundredths, and more where a router of experts
decides otherwise; a lost context is another vector."""

Run = Callable[[torch.Tensor, torch.Tensor, Attend], torch.Tensor]
"""(token ids [n], positions [n], attend) → hidden states [n, hidden_size]."""


class _Past:
    """Keys and values of each sequence and layer, and a step's attention over them."""

    def __init__(self, num_seqs: int) -> None:
        self._parts: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = [{} for _ in range(num_seqs)]
        self.kinds: dict[int, LayerAttention] = {}
        self._sizes: Sequence[int] = ()

    def begin(self, sizes: Sequence[int]) -> None:
        """sizes: tokens of each sequence in the step, one after the other."""
        self._sizes = sizes

    def attend(
        self, layer: int, kind: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        self.kinds[layer] = kind
        out = []
        end = 0
        for past, size in zip(self._parts, self._sizes, strict=True):
            rows, end = slice(end, end + size), end + size
            keys, values = key[rows], value[rows]
            if layer in past:
                keys, values = torch.cat((past[layer][0], keys)), torch.cat((past[layer][1], values))
            past[layer] = keys, values
            out.append(_attention(kind, query[rows], keys, values))
        return torch.cat(out)


def _attention(kind: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The last len(query) positions of one sequence, in float32."""
    group_size = query.shape[1] // key.shape[1]
    keys, values = (part.float().repeat_interleave(group_size, dim=1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * kind.scale
    if kind.soft_cap:
        scores = kind.soft_cap * torch.tanh(scores / kind.soft_cap)
    places = torch.arange(len(key), device=key.device)
    distance = places[len(key) - len(query) :, None] - places
    is_hidden = distance < 0
    if kind.sliding_window is not None:
        is_hidden |= distance >= kind.sliding_window
    weights = scores.masked_fill(is_hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)


def try_out(
    run: Run, logits: Callable[[torch.Tensor], torch.Tensor], config: ModelConfig, weight: torch.Tensor
) -> list[LayerAttention]:
    """→ how each layer attends. weight: any of the model's, for dtype and device. Takes five steps of a few tokens.

    Raises ModelError for a model that cannot be computed like this.
    """
    prompts = [[token_id % config.vocab_size for token_id in prompt] for prompt in _PROMPTS]
    whole = []
    for prompt in prompts:
        past = _Past(1)
        past.begin([len(prompt)])
        whole.append(logits(run(*_packed([(prompt, 0)], weight.device), past.attend)[-1:]))
    past = _Past(len(prompts))
    done = [0] * len(prompts)
    for sizes in _STEPS:
        past.begin(sizes)
        chunks = [
            (prompt[start : start + size], start) for prompt, start, size in zip(prompts, done, sizes, strict=True)
        ]
        done = [start + size for start, size in zip(done, sizes, strict=True)]
        hidden = run(*_packed(chunks, weight.device), past.attend)
    ends = torch.tensor(_STEPS[-1], device=weight.device).cumsum(0) - 1
    expected, found = torch.cat(whole), logits(hidden.index_select(0, ends))
    error = float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())
    if not error <= _LARGEST_ERROR.get(weight.dtype, _LARGEST_NARROW_ERROR):
        raise ModelError(
            f"{config.architecture} gives other logits for a prompt in pieces and beside another (they differ by "
            f"{error:.2g}), so it keeps more of a sequence than keys and values; it is not supported"
        )
    return [past.kinds[layer] for layer in range(config.num_layers)]


def _packed(chunks: Sequence[tuple[list[int], int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, position of the first) of each sequence → token ids and positions of the step."""
    token_ids = [token_id for ids, _ in chunks for token_id in ids]
    positions = [start + i for ids, start in chunks for i in range(len(ids))]
    return torch.tensor(token_ids, device=device), torch.tensor(positions, device=device)
