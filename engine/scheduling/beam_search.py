"""Beam search as a rule over numbers: which continuations live on, which are finished, and when it is over.

A hypothesis is a finished continuation: its last token ends it, or it is as long as it may be. Its score is the sum of
its log probabilities over its number of tokens to the power length_penalty, and the `width` best are kept. At each step
the continuations of all beams are put in order by their sums: those among the first `width` that are finished become
hypotheses, and the first `width` that are not live on. The search is over when `width` hypotheses are kept and the best
beam, as if it ended now, does not beat the worst of them; when the longest length is reached; or when nothing lives on.
That is transformers' rule with early_stopping=False.

On a tie the lower token id comes first, then the continuation of the better beam; among hypotheses the earlier one.
"""

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from math import pow

import msgspec


class Continuation(msgspec.Struct, frozen=True, gc=False):
    """A beam and its next token."""

    beam: int
    """Index in the list of beams that the step was given."""
    token_id: int
    total: float
    """Sum of the log probabilities, this token's included."""


class Hypothesis(msgspec.Struct, frozen=True, gc=False):
    """A finished continuation."""

    token_ids: list[int]
    """Generated ones."""
    is_stopped: bool
    """Its last token ended it; otherwise it was as long as it might be."""
    score: float


class BeamSearch:
    """One search."""

    def __init__(self, width: int, length_penalty: float, stop_ids: frozenset[int], max_output: int) -> None:
        """max_output: most generated tokens of a hypothesis. A stop id among the candidates ends its continuation."""
        self._width = width
        self._length_penalty = length_penalty
        self._stop_ids = stop_ids
        self._max_output = max_output
        self.totals = [0.0]
        """Per beam, best first: sum of its log probabilities."""
        self.kept: list[Hypothesis] = []
        """Best first, at most `width`."""
        self.num_chosen = 0
        """Tokens that continued a beam or finished a hypothesis, kept or not."""

    def step(
        self, length: int, output_of: Callable[[int], list[int]], candidates: Sequence[Sequence[tuple[int, float]]]
    ) -> list[Continuation]:
        """The beams of the next step, best first; none: the search is over and `kept` has its result.

        length: of each hypothesis that this step finishes, in generated tokens: one more than the beams have.
        output_of: index of a beam → a copy of its generated tokens.
        candidates: each beam's next tokens with their log probabilities, likeliest first, the lowest id on a tie; its
        `width` likeliest that do not end it and all that are likelier.
        """
        is_last = length >= self._max_output
        live: list[Continuation] = []
        for place, continuation in enumerate(self._in_order(candidates)):
            is_stopped = continuation.token_id in self._stop_ids
            if not is_stopped and not is_last:
                live.append(continuation)
            elif place < self._width:
                output = [*output_of(continuation.beam), continuation.token_id]
                self._keep(output, continuation.total, is_stopped)
                self.num_chosen += 1
            if place + 1 >= self._width and (is_last or len(live) == self._width):
                break
        self.totals = [continuation.total for continuation in live]
        self.num_chosen += len(live)
        return live if live and self._can_improve(length) else []

    def cut(self, output_of: Callable[[int], list[int]]) -> None:
        """End the search here: its beams become hypotheses as they are."""
        for beam, total in enumerate(self.totals):
            self._keep(output_of(beam), total, False)

    def _in_order(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> Iterator[Continuation]:
        return merge(
            *(
                [Continuation(beam, token_id, total + logprob) for token_id, logprob in likeliest]
                for beam, (total, likeliest) in enumerate(zip(self.totals, candidates, strict=True))
            ),
            key=_order,
        )

    def _score(self, total: float, length: int) -> float:
        return total / pow(length, self._length_penalty)

    def _can_improve(self, length: int) -> bool:
        return len(self.kept) < self._width or self._score(self.totals[0], length) > self.kept[-1].score

    def _keep(self, token_ids: list[int], total: float, is_stopped: bool) -> None:
        hypothesis = Hypothesis(token_ids, is_stopped, self._score(total, len(token_ids)))
        insort(self.kept, hypothesis, key=_worse)
        del self.kept[self._width :]


def _order(continuation: Continuation) -> tuple[float, int, int]:
    return -continuation.total, continuation.token_id, continuation.beam


def _worse(hypothesis: Hypothesis) -> float:
    return -hypothesis.score
