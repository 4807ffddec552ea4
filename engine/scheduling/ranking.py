"""Requests whose choices are ranked: nothing of them is handed out before all have ended, then the best, first to last.

What they generate with are no choices yet. At the end the request gets new sequences, which are its choices.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import msgspec

from engine.kept_logprobs import KeptLogprobs
from engine.plan import StepTokens
from engine.scheduling.usage import Counts
from engine.sequence import Request, Sequence, SequenceOutput, SequenceState
from streamkv.protocol import TokenLogprobs, unpack_floats


class Choice(msgspec.Struct, frozen=True, gc=False):
    """What is returned of one."""

    token_ids: list[int]
    finish_reason: str
    cause: str = ""
    stop_token_id: int = -1
    num_preemptions: int = 0
    logprobs: TokenLogprobs | None = None


def conclude(request: Request, choices: list[Choice], num_generated: int, counts: Counts) -> list[SequenceOutput]:
    """Give a request, of which nothing goes on any more, its choices, best first: one output each, with all tokens.

    num_generated: tokens of all sequences; those that are not returned are counted.
    """
    first = request.sequences[0]
    request.sequences = [
        Sequence(
            sequence_id=request.first_sequence_id,
            request=request,
            choice=number,
            token_ids=[*request.prompt_token_ids, *choice.token_ids],
            num_prompt=first.num_prompt,
            max_len=first.num_prompt + len(choice.token_ids),
            state=SequenceState.FINISHED,
            num_cached_tokens=first.num_cached_tokens,
            num_preemptions=choice.num_preemptions,
            finish_reason=choice.finish_reason,
            finish_cause=choice.cause,
        )
        for number, choice in enumerate(choices)
    ]
    counts.num_unreturned_tokens += max(0, num_generated - sum([len(choice.token_ids) for choice in choices]))
    return [
        SequenceOutput(
            sequence, choice.token_ids, choice.finish_reason, choice.cause, choice.stop_token_id, choice.logprobs
        )
        for sequence, choice in zip(request.sequences, choices, strict=True)
    ]


def aborted(request: Request, cause: str) -> list[Choice]:
    """What is returned of a request that was ended before its time: nothing of each choice."""
    return [Choice([], "abort", cause)] * request.sampling.n


@dataclass(slots=True, eq=False)
class _Sampled:
    """A request that generates more choices than it returns."""

    totals: dict[Sequence, float]
    """Sum of the log probabilities of its tokens so far."""
    ends: dict[Sequence, SequenceOutput] = field(default_factory=dict)
    logprobs: dict[Sequence, KeptLogprobs] = field(default_factory=dict)
    """Where the request asks for them."""


class BestOf:
    """Requests with best_of over n: ordinary sequences, of which those n are returned whose tokens have the highest
    mean log probability; on a tie the lower number. One that failed comes last."""

    def __init__(self, finish: Callable[[Sequence], None], counts: Counts) -> None:
        """finish: takes a sequence out of wherever it is."""
        self._finish = finish
        self._counts = counts
        self._live: dict[Request, _Sampled] = {}

    def __len__(self) -> int:
        """Requests."""
        return len(self._live)

    def add(self, request: Request) -> None:
        """A request whose sequences wait."""
        self._live[request] = _Sampled(dict.fromkeys(request.sequences, 0.0))

    def hold_back(self, outputs: list[SequenceOutput], tokens: StepTokens) -> list[SequenceOutput]:
        """What a step means for others, and for those of ours of which it has ended the last sequence."""
        kept: list[SequenceOutput] = []
        for output in outputs:
            sampled = self._live.get(output.sequence.request)
            if sampled is None:
                kept.append(output)
                continue
            sequence = output.sequence
            if output.token_ids:
                sampled.totals[sequence] += unpack_floats(tokens.logprobs[sequence.sequence_id].chosen)[0]
            if output.logprobs is not None:
                sampled.logprobs.setdefault(sequence, KeptLogprobs()).append(output.logprobs)
            if output.finish_reason:
                sampled.ends[sequence] = output
                if len(sampled.ends) == len(sampled.totals):
                    kept += self._rank(sequence.request, sampled)
        return kept

    def abort(self, request: Request, cause: str) -> list[SequenceOutput]:
        """End a request, with what it has; nothing if it has ended."""
        if self._live.pop(request, None) is None:
            return []
        for sequence in request.sequences:
            if sequence.state is not SequenceState.FINISHED:
                self._finish(sequence)
        return conclude(request, aborted(request, cause), _num_output(request), self._counts)

    def _rank(self, request: Request, sampled: _Sampled) -> list[SequenceOutput]:
        del self._live[request]

        def order(sequence: Sequence) -> tuple[float, int]:
            if sampled.ends[sequence].finish_reason == "error":
                return inf, sequence.choice
            return -sampled.totals[sequence] / sequence.num_output, sequence.choice

        best = sorted(sampled.totals, key=order)[: request.sampling.n]
        choices = [
            Choice(
                sequence.token_ids[sequence.num_prompt :],
                end.finish_reason,
                end.cause,
                end.stop_token_id,
                sequence.num_preemptions,
                sampled.logprobs[sequence].values_from(0) if sequence in sampled.logprobs else None,
            )
            for sequence in best
            for end in [sampled.ends[sequence]]
        ]
        return conclude(request, choices, _num_output(request), self._counts)


def _num_output(request: Request) -> int:
    return sum([sequence.num_output for sequence in request.sequences])
