"""What a client must get, computed from its request alone: no block, no step, no other request."""

from collections.abc import Iterator
from math import inf, pow

from engine.simulation.scenario import ClientRequest, EngineSetup
from engine.simulation.simulated_model import Context, Ending, SimulatedModel

FAILURE = "no number"
"""The cause when a token cannot be sampled."""


def right_endings(wish: ClientRequest, setup: EngineSetup) -> list[list[Ending]]:
    """What each choice generates if nobody interferes; choices that are ranked stand best first. All but one entry are
    for beams that the pool may be too small for: their search may be cut short at any length at which it is."""
    if wish.sampling.beam_width:
        return list(_beam_endings(wish, setup))
    sampling = wish.sampling
    endings = [_with_failure(wish, choice, setup) for choice in range(sampling.num_sequences)]
    if sampling.ranks_choices:
        endings.sort(key=lambda e: inf if e.finish_reason == "error" else -e.total / len(e.token_ids))
        del endings[sampling.n :]
    return [endings]


def _with_failure(wish: ClientRequest, choice: int, setup: EngineSetup) -> Ending:
    ending = setup.model.generate(wish.prompt, wish.sampling, choice, setup.max_len, namespace=wish.namespace)
    after = wish.fails_at.get(choice, len(ending.token_ids))
    if after < len(ending.token_ids):
        return Ending(ending.token_ids[:after], "error", FAILURE)
    return ending


class _Beam:
    def __init__(self, context: Context, output: list[int], total: float) -> None:
        self.context = context
        self.output = output
        self.total = total


class _Kept:
    def __init__(self, output: list[int], total: float, is_stopped: bool, length_penalty: float) -> None:
        self.output = output
        self.is_stopped = is_stopped
        self.score = total / pow(len(output), length_penalty)


def _beam_endings(wish: ClientRequest, setup: EngineSetup) -> Iterator[list[Ending]]:
    """transformers' beam search with early_stopping=False, over lists of tokens; the whole search comes last."""
    model, sampling = setup.model, wish.sampling
    width, penalty = sampling.beam_width, sampling.length_penalty
    facts = model.facts(wish.prompt, sampling, 0)
    stop_ids = {*facts.eos_token_ids, *sampling.stop_token_ids}
    max_output = min(setup.max_len - len(wish.prompt), sampling.max_tokens)
    beams = [_Beam(Context(wish.prompt, wish.namespace), [], 0.0)]
    kept: list[_Kept] = []
    for length in range(1, max_output + 1):
        if wish.fails_at.get(0, inf) < length:
            yield [Ending([], "error", FAILURE)] * sampling.n
            return
        position = len(wish.prompt) + length - 1
        continuations = [
            (beam.total + logprob, token_id, number)
            for number, beam in enumerate(beams)
            for token_id, logprob in model.rank(beam.context.digest, facts, position)
        ]
        continuations.sort(key=lambda c: (-c[0], c[1], c[2]))
        is_over = length == max_output
        live: list[tuple[float, int, int]] = []
        for place, (total, token_id, number) in enumerate(continuations):
            is_stopped = token_id in stop_ids
            if (is_stopped or is_over) and place < width:
                kept.append(_Kept([*beams[number].output, token_id], total, is_stopped, penalty))
            elif not is_stopped and not is_over and len(live) < width:
                live.append((total, token_id, number))
        kept.sort(key=lambda hypothesis: -hypothesis.score)
        del kept[width:]
        if is_over or not live or (len(kept) == width and live[0][0] / pow(length, penalty) <= kept[-1].score):
            break
        beams = [
            _Beam(beams[number].context.extended(token_id), [*beams[number].output, token_id], total)
            for total, token_id, number in live
        ]
        if _may_outgrow(len(beams), len(wish.prompt) + length, setup):
            cut = kept + [_Kept(beam.output, beam.total, False, penalty) for beam in beams]
            cut.sort(key=lambda hypothesis: -hypothesis.score)
            yield _endings(cut[:width], wish, model)
    yield _endings(kept, wish, model)


def _may_outgrow(num_beams: int, num_tokens: int, setup: EngineSetup) -> bool:
    """Whether so many beams, with nothing in common, and a block for each to copy to, are more than the pool."""
    return num_beams * (num_tokens // setup.block_size + 2) > setup.num_blocks - 1


def _endings(kept: list[_Kept], wish: ClientRequest, model: SimulatedModel) -> list[Ending]:
    endings = []
    for hypothesis in kept[: wish.sampling.n]:
        last = hypothesis.output[-1]
        if not hypothesis.is_stopped:
            endings.append(Ending(hypothesis.output, "length"))
        elif last in model.eos_token_ids and not wish.sampling.ignore_eos:
            endings.append(Ending(hypothesis.output, "stop", "eos", last))
        else:
            endings.append(Ending(hypothesis.output, "stop", "stop_id", last))
    return endings
