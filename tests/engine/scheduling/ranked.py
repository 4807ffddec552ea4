"""Whether a request that ranks its choices returned the right ones: against a search without blocks or steps."""

from collections.abc import Sequence as Ids

from engine.plan import NewSequence
from engine.scheduling.beam_search import BeamSearch, Hypothesis
from engine.sequence import Request
from streamkv.sampling import SamplingParams
from tests.engine.scheduling.driver import Driver
from tests.support.scripted_executor import ScriptedExecutor

Choice = tuple[list[int], str, str]
"""(tokens, finish_reason, cause)."""


def check_ranked(driver: Driver, request: Request, may_outgrow: bool = False) -> None:
    """It ended once, with all tokens of each choice at once, or with an abort and none.

    may_outgrow: memory may have ended its beam search before its time.
    """
    sampling = request.sampling
    assert [sequence.choice for sequence in request.sequences] == list(range(sampling.n))
    ends = [driver.ends[sequence] for sequence in request.sequences]
    assert {sequence for sequence in driver.tokens if sequence.request is request} == set(request.sequences)
    for end in ends:
        assert end.token_ids == driver.output_of(end.sequence) == end.sequence.token_ids[end.sequence.num_prompt :]
        assert end.stop_token_id == (end.token_ids[-1] if end.finish_reason == "stop" else -1)
    got = [(end.token_ids, end.finish_reason, end.cause) for end in ends]
    if got[0][1] == "abort":
        assert got == [([], "abort", got[0][2])] * sampling.n
    elif not sampling.beam_width:
        assert got == best_of(driver.executor, request.prompt_token_ids, sampling)
    elif got != beams(driver.executor, request.prompt_token_ids, sampling):
        lengths = range(1, sampling.max_tokens)
        assert may_outgrow
        assert any(
            got == beams(driver.executor, request.prompt_token_ids, sampling, cut_at=length) for length in lengths
        )


def best_of(executor: ScriptedExecutor, prompt: Ids[int], sampling: SamplingParams) -> list[Choice]:
    endings = [
        executor.model.generate(prompt, sampling, choice, executor.max_len) for choice in range(sampling.best_of)
    ]
    endings.sort(key=lambda ending: ending.total / len(ending.token_ids), reverse=True)
    return [(ending.token_ids, ending.finish_reason, ending.cause) for ending in endings[: sampling.n]]


def beams(executor: ScriptedExecutor, prompt: Ids[int], sampling: SamplingParams, cut_at: int = 0) -> list[Choice]:
    """What a search returns, with no blocks or steps. cut_at: end it when the beams have so many generated tokens."""
    eos = () if sampling.ignore_eos else executor.eos_token_ids
    facts = NewSequence(0, 0, sampling, len(prompt), eos)
    max_len = min(executor.max_len, len(prompt) + sampling.max_tokens)

    def choice(hypothesis: Hypothesis) -> Choice:
        tokens = hypothesis.token_ids
        if not hypothesis.is_stopped:
            return tokens, "length", ""
        return tokens, "stop", "eos" if tokens[-1] in eos else "stop_id"

    stops = frozenset({*eos, *sampling.stop_token_ids})
    search = BeamSearch(sampling.beam_width, sampling.length_penalty, stops, max_len - len(prompt))
    outputs: list[list[int]] = [[]]
    while outputs:
        if cut_at and len(outputs[0]) == cut_at:
            search.cut(outputs.__getitem__)
            break
        candidates = [executor.likeliest([*prompt, *output], facts) for output in outputs]
        live = search.step(len(outputs[0]) + 1, outputs.__getitem__, candidates)
        outputs = [[*outputs[continuation.beam], continuation.token_id] for continuation in live]
    return [choice(hypothesis) for hypothesis in search.kept[: sampling.n]]
