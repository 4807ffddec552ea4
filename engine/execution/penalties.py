"""What a request changes of its logits before its token is chosen: biases, then penalties, in place.

With c = how many times the choice has generated a token, a continuation's tokens before this engine included:
    bias        logit + logit_bias[token]
    repetition  logit / r where it is over 0, else logit * r, for tokens of prompt or output
    frequency   logit - f * c
    presence    logit - p where c > 0
A step touches the biased tokens and those that the sequence has, not the vocabulary.
"""

import torch

from engine.plan import NewSequence
from streamkv.sampling import SamplingParams

_FIRST_PLACES = 64


class LogitChanges:
    """Biases and penalties of one sequence, kept from its first step to its end. Whoever samples appends the tokens."""

    def __init__(self, facts: NewSequence) -> None:
        """facts.token_ids must be there if the sampling has penalties."""
        self._sampling = facts.sampling
        self._biased_ids = torch.tensor(list(facts.sampling.logit_bias), dtype=torch.int64)
        self._biases = torch.tensor(list(facts.sampling.logit_bias.values()), dtype=torch.float32)
        self._tokens = TokenCounts(facts.token_ids, facts.num_prompt) if facts.sampling.has_penalties else None

    def apply(self, logits: torch.Tensor) -> None:
        """logits: [vocab_size] float32, changed in place. O(tokens biased + different tokens of the sequence)."""
        if len(self._biased_ids):
            logits.index_add_(0, self._biased_ids, self._biases)
        if self._tokens is not None and len(self._tokens):
            _penalise(logits, self._tokens.ids, self._tokens.counts, self._sampling)

    def append(self, token_id: int) -> None:
        """The sequence has generated this token."""
        if self._tokens is not None:
            self._tokens.append(token_id)


class TokenCounts:
    """The different tokens of a sequence, and how often each was generated. Appending is O(1)."""

    def __init__(self, token_ids: list[int], num_prompt: int) -> None:
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(token_ids[:num_prompt]))}
        num_places = max(_FIRST_PLACES, 2 * len(self._places))
        self._ids = torch.zeros(num_places, dtype=torch.int64)
        self._counts = torch.zeros(num_places)
        self._ids[: len(self._places)] = torch.tensor(list(self._places), dtype=torch.int64)
        for token_id in token_ids[num_prompt:]:
            self.append(token_id)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def ids(self) -> torch.Tensor:
        """[len] int64."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> torch.Tensor:
        """[len] float32: 0 for a token of the prompt alone."""
        return self._counts[: len(self._places)]

    def append(self, token_id: int) -> None:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids = torch.cat((self._ids, torch.zeros_like(self._ids)))
            self._counts = torch.cat((self._counts, torch.zeros_like(self._counts)))
        self._ids[place] = token_id
        self._counts[place] += 1.0


def _penalise(logits: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor, sampling: SamplingParams) -> None:
    values = logits[ids]
    repetition = sampling.repetition_penalty
    if repetition != 1.0:
        values = torch.where(values > 0, values / repetition, values * repetition)
    if sampling.frequency_penalty:
        values -= sampling.frequency_penalty * counts
    if sampling.presence_penalty:
        values -= sampling.presence_penalty * (counts > 0)
    logits[ids] = values
