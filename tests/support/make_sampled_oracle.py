"""Sampled answers of the reference model, from transformers' logits and a sampler of its own, drawn as
engine/execution/sampler.py says: in float64, with a full sort, one token at a time.

usage: python -m tests.support.make_sampled_oracle > tests/data/smol135m-sampled.json
"""

import json
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.support.oracle import SHORT
from tests.support.reference_model import reference_folder

_KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 50},
    {"temperature": 1.0, "min_p": 0.05, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"temperature": 0.9, "top_p": 0.95, "top_k": 400, "repetition_penalty": 1.2, "logit_bias": {"28": -3.0}},
]
_NUM_CHOICES = 2
_NUM_TOKENS = 48
NEAR_TIE = 1e-3
"""Logits are moved by up to this in trials, in which no draw may change. Rounding moves them by 1e-4 at most."""
_NUM_TRIALS = 24
_TILE = 1024

Array = np.ndarray[Any, np.dtype[Any]]


def _philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(c0 * 0xD2511F53, 2**32)
        high1, low1 = divmod(c2 * 0xCD9E8D57, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def _times(seed: int, choice: int, position: int, purpose: int, count: int) -> Array:
    """[count] of a race's times."""
    words = [
        word
        for n in range(-(-count // 4))
        for word in _philox((position, choice, purpose, n), (seed % 2**32, seed >> 32))
    ]
    times: Array = -np.log((np.array(words[:count], dtype=np.float64) + 0.5) / 2**32)
    return times


def _kept(logits: Array, settings: dict[str, Any]) -> Array:
    """[..., vocab_size] of logits → the weights that the filters keep, 0 of the others."""
    weights = np.exp((logits - logits.max(-1, keepdims=True)) / settings["temperature"])
    weights[weights < settings.get("min_p", 0.0)] = 0.0
    if top_k := settings.get("top_k", 0):
        weights[logits < np.sort(logits, -1)[..., -top_k, None]] = 0.0
    if (top_p := settings.get("top_p", 1.0)) < 1.0:
        descending = -np.sort(-weights, -1)
        reached = descending.cumsum(-1)
        last = (reached >= top_p * reached[..., -1:]).argmax(-1)
        weights[weights < np.take_along_axis(descending, last[..., None], -1)] = 0.0
    return weights


def _drawn(weights: Array, tile_times: Array, token_times: Array) -> Array:
    """[n, vocab_size] → [n] tokens."""
    tiles = np.zeros((len(weights), len(tile_times) * _TILE))
    tiles[:, : weights.shape[1]] = weights
    tiles = tiles.reshape(len(weights), -1, _TILE)
    with np.errstate(divide="ignore"):
        winners = (tile_times / tiles.sum(-1)).argmin(-1)
        places = (token_times / tiles[np.arange(len(weights)), winners]).argmin(-1)
    tokens: Array = winners * _TILE + places
    return tokens


def _changed(logits: Array, prompt: list[int], output: list[int], settings: dict[str, Any]) -> Array:
    """After biases and penalties."""
    logits = logits.astype(np.float64)
    for token_id, bias in settings.get("logit_bias", {}).items():
        logits[int(token_id)] += bias
    present = sorted({*prompt, *output})
    penalty = settings.get("repetition_penalty", 1.0)
    logits[present] = np.where(logits[present] > 0, logits[present] / penalty, logits[present] * penalty)
    counts = np.bincount(output, minlength=len(logits))
    logits -= settings.get("frequency_penalty", 0.0) * counts
    logits -= settings.get("presence_penalty", 0.0) * (counts > 0)
    return logits


@torch.no_grad()
def _answer(
    model: LlamaForCausalLM, prompt: list[int], seed: int, choice: int, settings: dict[str, Any]
) -> list[int] | None:
    """None if one of its draws was nearly another."""
    output: list[int] = []
    noise = np.random.default_rng(seed)
    fed, cache = prompt, None
    while len(output) < _NUM_TOKENS:
        made = model(torch.tensor([fed]), past_key_values=cache, use_cache=True)
        cache = made.past_key_values
        logits = _changed(made.logits[0, -1].numpy(), prompt, output, settings)
        position = len(prompt) + len(output)
        tile_times = _times(seed, choice, position, 1, -(-len(logits) // _TILE))
        token_times = _times(seed, choice, position, 0, _TILE)
        moved = logits + noise.uniform(-NEAR_TIE, NEAR_TIE, (_NUM_TRIALS, len(logits)))
        tried = _drawn(_kept(np.concatenate((logits[None], moved)), settings), tile_times, token_times)
        if (tried != tried[0]).any():
            return None
        output.append(int(tried[0]))
        fed = output[-1:]
    return output


def _make() -> dict[str, Any]:
    torch.set_num_threads(1)
    model = LlamaForCausalLM.from_pretrained(reference_folder(), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(reference_folder())
    cases = []
    for number in range(2 * len(SHORT)):
        greedy, settings = SHORT[number % len(SHORT)], _KINDS[number % len(_KINDS)]
        seed, answers = 2**32 * number, list[list[int] | None]([None])
        while None in answers:
            seed += 1
            answers = [_answer(model, greedy.prompt, seed, choice, settings) for choice in range(_NUM_CHOICES)]
        texts = [tokenizer.decode(answer) for answer in answers]
        cases.append({"name": greedy.name, "seed": seed, "settings": settings, "token_ids": answers, "texts": texts})
    return {
        "how": "python -m tests.support.make_sampled_oracle: transformers, float32, one token at a time; goes on past "
        f"the end of sequence. No draw changed in {_NUM_TRIALS} trials that moved each logit by up to {NEAR_TIE}.",
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
        "cases": cases,
    }


if __name__ == "__main__":
    print(json.dumps(_make(), indent=None, separators=(",", ":")))
