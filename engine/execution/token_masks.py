"""Which tokens the rows of a step may sample, one bit each."""

from dataclasses import dataclass, field
from typing import Final

import torch

WORD_BITS: Final = 32
_BITS_OF_BYTE: Final = ((torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1).bool()


@dataclass(slots=True)
class TokenMasks:
    """Of one step; rows are indices of its sampled rows."""

    rows: list[int]
    """Those that may not sample every token."""
    bits: torch.Tensor
    """[len(rows), words] int32: bit i of word w is token 32 * w + i."""
    ending: set[int] = field(default_factory=set)
    """Rows that can only end: min_tokens does not hold them back."""
    failed: dict[int, str] = field(default_factory=dict)
    """Row → why it gets no token, as the client reads it."""

    def apply(self, logits: torch.Tensor) -> None:
        """logits: [num_rows, vocab_size], changed in place: -inf where a token may not be sampled. Rows that have
        failed stay as they are."""
        banned = ~_BITS_OF_BYTE[self.bits.view(torch.uint8).long()].view(len(self.rows), -1)[:, : logits.shape[1]]
        for place, row in enumerate(self.rows):
            if row not in self.failed:
                logits[row].masked_fill_(banned[place], float("-inf"))
