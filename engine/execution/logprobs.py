"""Logits → log probabilities of given tokens, and of the likeliest ones: of the softmax over the whole vocabulary."""

from dataclasses import dataclass

import torch

from streamkv.protocol import TokenLogprobs

LOWEST = torch.finfo(torch.float32).min
"""In place of what is no finite number, which no JSON can tell."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of some rows of logits."""

    chosen: torch.Tensor
    """[n] float32: of the token that was asked for."""
    top_ids: torch.Tensor
    """[n, k] int64: the likeliest first, the lowest id on a tie."""
    top: torch.Tensor
    """[n, k] float32."""

    def pack(self, num_top: int) -> TokenLogprobs:
        """All rows in one, with `num_top` places each, or k if that is less."""
        return TokenLogprobs(
            _bytes_of(self.chosen, "<f4"),
            _bytes_of(self.top_ids[:, :num_top], "<i4"),
            _bytes_of(self.top[:, :num_top], "<f4"),
        )

    def rows(self, num_tops: list[int]) -> list[TokenLogprobs]:
        """One for each row, with its own number of places, or k if that is less."""
        num_places = self.top_ids.shape[1]
        packed = self.pack(num_places)
        values: list[TokenLogprobs] = []
        for row, num_top in enumerate(num_tops):
            start = 4 * num_places * row
            end = start + 4 * min(num_top, num_places)
            chosen = packed.chosen[4 * row : 4 * row + 4]
            values.append(TokenLogprobs(chosen, packed.top_ids[start:end], packed.top_logprobs[start:end]))
        return values

    def row(self, index: int, num_top: int) -> TokenLogprobs:
        return Logprobs(
            self.chosen[index : index + 1], self.top_ids[index : index + 1], self.top[index : index + 1]
        ).pack(num_top)


def logprobs_of(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> Logprobs:
    """logits: [n, vocab_size] float32; token_ids: [n] int64. One pass over the logits, two more for the likeliest."""
    log_sums = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, token_ids.unsqueeze(1)) - log_sums
    ids = likeliest_ids(logits, num_top)
    return Logprobs(_finite(chosen.squeeze(1)), ids, _finite(logits.gather(1, ids) - log_sums))


def likeliest_ids(logits: torch.Tensor, num: int) -> torch.Tensor:
    """[n, vocab_size] → [n, num] int64, or [n, vocab_size] if that is less: the ids of the highest logits, highest
    first, the lowest ids on a tie."""
    num = min(num, logits.shape[1])
    if not num or not len(logits):
        return torch.empty(len(logits), num, dtype=torch.int64)
    values, ids = logits.topk(num)
    # Of those that tie at the end, topk may have taken any.
    tied = ((logits >= values[:, -1:]).sum(-1) != num).nonzero().view(-1).tolist()
    ids, order = ids.sort(-1)
    ids = ids.gather(1, values.gather(1, order).argsort(dim=-1, descending=True, stable=True))
    for row in tied:
        reached = (logits[row] >= values[row, -1]).nonzero().view(-1)  # ascending
        if len(reached):
            ids[row] = reached[logits[row, reached].argsort(dim=-1, descending=True, stable=True)[:num]]
    return ids


def _finite(values: torch.Tensor) -> torch.Tensor:
    return values.nan_to_num(nan=LOWEST, neginf=LOWEST, posinf=LOWEST)


def _bytes_of(values: torch.Tensor, dtype: str) -> bytes:
    return values.contiguous().numpy().astype(dtype).tobytes()
