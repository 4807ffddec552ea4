"""A model without weights: every token is a pure function of all tokens before it, read as attention would read them.

What a slot holds stands for its keys and values. As in a real model it depends on its own token and on all before it;
the next token depends on everything that is read back through the block table. So a wrong block, slot or copy shows,
also where it holds the right token behind the wrong beginning.
"""

import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from engine.plan import NewSequence
from streamkv.protocol import TokenLogprobs, pack_floats, pack_ids
from streamkv.sampling import SamplingParams

VALUE_BYTES: Final = 8
NOTHING: Final = 0
"""In a slot that was never written."""
_START: Final = 0x5851F42D4C957F2D
_POSITION_BITS: Final = 20
_POSITION_MASK: Final = (1 << _POSITION_BITS) - 1
_MASK: Final = (1 << 64) - 1

EosRule = Callable[[int, int], bool]
"""(64 bits drawn for this token, tokens generated before it) → whether the token is end-of-sequence."""


def end_after(num_output: int) -> EosRule:
    """The sequence says end-of-sequence after this many other tokens."""
    return lambda draw, num_before: num_before >= num_output


def end_one_in(odds: int) -> EosRule:
    """Each token is end-of-sequence with a chance of one in `odds`."""
    return lambda draw, num_before: (draw >> 17) % odds == 0


def _mix(state: int, word: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014) over two words."""
    state = (state ^ (word + 1) * 0x9E3779B97F4A7C15) & _MASK
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
    return state ^ state >> 31


def logprob(token_id: int, position: int) -> float:
    """Of the token at this index of its sequence, prompt included: -63/64 .. 0, in 64ths."""
    return -((5 * token_id + 3 * position) % 64) / 64


def start_of(namespace: tuple[str, str]) -> int:
    """What stands before the first value. Sequences that may share nothing have nothing in common, so that a block
    shared between tenants shows as any other wrong one does."""
    return _mix(_START, zlib.crc32(repr(namespace).encode())) & ~_POSITION_MASK | 1 << 63


def value_after(before: int, token_id: int) -> int:
    """The value of a token's slot, from that of the slot before it, or from start_of.

    Its low bits count positions from 1, so that no value is NOTHING and one in a wrong place shows.
    """
    state = (before ^ (token_id + 1) * 0x9E3779B97F4A7C15) & _MASK
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    return (state ^ state >> 27) & ~_POSITION_MASK | (before + 1) & _POSITION_MASK


def num_tokens_before(value: int) -> int:
    """The position of the token whose value this is; -1 for NOTHING."""
    return (value & _POSITION_MASK) - 1


def values_behind(before: int, token_ids: Iterable[int]) -> "array[int]":
    """The values of tokens that follow a slot with this value, or a start_of."""
    values = array("Q")
    for token_id in token_ids:
        before = value_after(before, token_id)
        values.append(before)
    return values


def values_of(token_ids: Iterable[int], namespace: tuple[str, str] = ("", "")) -> "array[int]":
    """The values of a sequence's slots, from its first token on."""
    return values_behind(start_of(namespace), token_ids)


@dataclass(frozen=True, slots=True)
class Ending:
    """What a choice has generated when it ends by itself."""

    token_ids: list[int]
    finish_reason: str
    cause: str = ""
    stop_token_id: int = -1
    total: float = 0.0
    """Sum of the log probabilities."""


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """Samples. Without an eos_rule no token is end-of-sequence.

    Log probabilities depend on token and position alone, and are in 64ths: sums are exact, and some are equal.
    """

    vocab_size: int = 1000
    eos_token_ids: tuple[int, ...] = (2,)
    eos_rule: EosRule | None = None

    def sample(self, values: bytes, facts: NewSequence) -> tuple[int, float]:
        """(the token behind those whose values were read, its log probability). End-of-sequence and stop ids are not
        sampled before min_tokens."""
        return self.choose(_digest(values), facts, len(values) // VALUE_BYTES)

    def candidates(self, values: bytes, facts: NewSequence) -> list[tuple[int, float]]:
        """The likeliest next tokens of a beam, likeliest first, each with its log probability."""
        return self.rank(_digest(values), facts, len(values) // VALUE_BYTES)

    def choose(self, digest: int, facts: NewSequence, position: int) -> tuple[int, float]:
        """As `sample`, from the digest of the values."""
        sampling = facts.sampling
        draw = digest
        if not sampling.is_greedy:
            draw = _mix(_mix(_mix(digest, sampling.seed), facts.choice), position)
        banned: Sequence[int] = ()
        num_before = position - facts.num_prompt
        if num_before < sampling.min_tokens:
            banned = sampling.stop_token_ids
        elif self.eos_rule is not None and self.eos_rule(draw, num_before):
            return self.eos_token_ids[0], logprob(self.eos_token_ids[0], position)
        token_id = draw % self.vocab_size
        while token_id in self.eos_token_ids or token_id in banned:
            token_id = (token_id + 1) % self.vocab_size
        return token_id, logprob(token_id, position)

    def logprobs(self, token_ids: Sequence[int], start: int, num_top: int) -> TokenLogprobs:
        """What is told of these tokens at positions from `start` on: the likeliest of each place is the token itself,
        and those behind it are the next higher ids, around the vocabulary, each less likely by a 64th."""
        chosen = [logprob(token_id, position) for position, token_id in enumerate(token_ids, start)]
        places = range(min(num_top, self.vocab_size))
        return TokenLogprobs(
            pack_floats(chosen),
            pack_ids((token_id + place) % self.vocab_size for token_id in token_ids for place in places),
            pack_floats(value - place / 64 for value in chosen for place in places),
        )

    def rank(self, digest: int, facts: NewSequence, position: int) -> list[tuple[int, float]]:
        """As `candidates`, from the digest of the values."""
        sampling, num_before = facts.sampling, position - facts.num_prompt
        is_early = num_before < sampling.min_tokens
        seen = {*self.eos_token_ids, *(sampling.stop_token_ids if is_early else ())}
        ids: list[int] = []
        draw = digest
        while len(ids) < facts.num_candidates and len(seen) < self.vocab_size:
            draw = _mix(draw, position)
            token_id = draw % self.vocab_size
            if token_id not in seen:
                seen.add(token_id)
                ids.append(token_id)
        if not is_early and self.eos_rule is not None and self.eos_rule(digest, num_before):
            ids.insert(digest // 128 % 4, self.eos_token_ids[0])
        first, gap = digest % 16, 1 + digest // 16 % 8
        likeliest = enumerate(ids[: facts.num_candidates])
        return [(token_id, -(first + gap * place) / 64) for place, token_id in likeliest]

    def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        choice: int,
        max_len: int,
        num_tokens: int | None = None,
        namespace: tuple[str, str] = ("", ""),
    ) -> Ending:
        """What a choice generates, computed without any block: until it ends, or the first num_tokens of it (then
        without a finish_reason). max_len: most tokens of a sequence, whatever max_tokens says."""
        facts = self.facts(prompt, sampling, choice)
        max_len = min(max_len, len(prompt) + sampling.max_tokens)
        context = Context(prompt, namespace)
        output: list[int] = []
        total = 0.0
        while num_tokens is None or len(output) < num_tokens:
            token_id, logprob = self.choose(context.digest, facts, len(prompt) + len(output))
            output.append(token_id)
            total += logprob
            if len(output) > sampling.min_tokens:
                if token_id in facts.eos_token_ids:
                    return Ending(output, "stop", "eos", token_id, total)
                if token_id in sampling.stop_token_ids:
                    return Ending(output, "stop", "stop_id", token_id, total)
            if len(prompt) + len(output) >= max_len:
                return Ending(output, "length", total=total)
            context.append(token_id)
        return Ending(output, "", total=total)

    def facts(self, prompt: Sequence[int], sampling: SamplingParams, choice: int) -> NewSequence:
        return NewSequence(0, choice, sampling, len(prompt), () if sampling.ignore_eos else self.eos_token_ids)


class Context:
    """A sequence's tokens as the model sees them, without any block."""

    def __init__(self, token_ids: Iterable[int], namespace: tuple[str, str] = ("", "")) -> None:
        values = values_of(token_ids, namespace)
        self._hasher = blake2b(values, digest_size=8)
        self._last = values[-1]

    @property
    def digest(self) -> int:
        return int.from_bytes(self._hasher.digest(), "little")

    def append(self, token_id: int) -> None:
        self._last = value_after(self._last, token_id)
        self._hasher.update(array("Q", (self._last,)))

    def extended(self, token_id: int) -> "Context":
        """Another one, with one token more."""
        other = Context.__new__(Context)
        other._hasher, other._last = self._hasher.copy(), self._last
        other.append(token_id)
        return other


def _digest(values: bytes) -> int:
    return int.from_bytes(blake2b(values, digest_size=8).digest(), "little")
