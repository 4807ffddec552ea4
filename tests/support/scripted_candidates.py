"""What the scripted executor says of a next token's probability: a hash of all earlier tokens."""

import zlib
from array import array
from collections.abc import Callable, Sequence
from itertools import count, islice
from math import gcd

from engine.plan import NewSequence
from engine.scheduling.beam_search import BeamSearch, Hypothesis
from streamkv.sampling import SamplingParams

Candidates = list[tuple[int, float]]


def likeliest(
    tokens: Sequence[int], positions: Sequence[int], facts: NewSequence, vocab_size: int, ends: bool
) -> Candidates:
    """The facts.num_candidates likeliest next tokens, all different, with log probabilities in 64ths: sums are exact.

    ends: whether an end-of-sequence id, if there is one, is among the first.
    """
    digest = zlib.crc32(array("i", positions).tobytes(), zlib.crc32(array("i", tokens).tobytes(), 99))
    is_banned = len(tokens) - facts.num_prompt < facts.sampling.min_tokens
    left_out = {*facts.eos_token_ids, *(facts.sampling.stop_token_ids if is_banned else ())}
    stride = next(stride for stride in count(7 + digest % 31) if gcd(stride, vocab_size) == 1)
    spread = ((digest // 3 + number * stride) % vocab_size for number in range(vocab_size))
    ids = list(islice((token_id for token_id in spread if token_id not in left_out), facts.num_candidates))
    if ends and facts.eos_token_ids and not is_banned:
        ids.insert(digest % 4, facts.eos_token_ids[0])
    first, gap = digest % 16, 1 + digest // 16 % 8
    return [(token_id, -(first + gap * number) / 64) for number, token_id in enumerate(ids[: facts.num_candidates])]


def logprob(tokens: Sequence[int], token_id: int) -> float:
    """Of a sampled token, in 64ths."""
    return -(zlib.crc32(array("i", [*tokens, token_id]).tobytes(), 5) % 97) / 64


def beam_search(
    model: Callable[[list[int]], Candidates],
    prompt: Sequence[int],
    sampling: SamplingParams,
    stop_ids: frozenset[int],
    max_len: int,
    cut_at: int = 0,
) -> list[Hypothesis]:
    """What a search keeps that begins with this prompt, with no blocks or steps. cut_at: end it when the beams have so
    many generated tokens; 0: let it end."""
    search = BeamSearch(sampling.beam_width, sampling.length_penalty, stop_ids, max_len - len(prompt))
    outputs: list[list[int]] = [[]]
    while outputs:
        if cut_at and len(outputs[0]) == cut_at:
            search.cut(outputs.__getitem__)
            break
        candidates = [model([*prompt, *output]) for output in outputs]
        live = search.step(len(outputs[0]) + 1, outputs.__getitem__, candidates)
        outputs = [[*outputs[continuation.beam], continuation.token_id] for continuation in live]
    return search.kept
