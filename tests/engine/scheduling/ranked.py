"""Whether a request that ranks its choices returned the right ones: against a search without blocks or steps."""

from array import array
from collections.abc import Sequence as Ids

from engine.plan import NewSequence
from engine.scheduling.beam_search import Hypothesis
from engine.sequence import Request
from streamkv.sampling import SamplingParams
from tests.engine.scheduling.driver import Driver
from tests.support import scripted_candidates
from tests.support.scripted_candidates import Candidates
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
        longest = max(len(tokens) for tokens, _, _ in got)
        assert may_outgrow
        assert got == beams(driver.executor, request.prompt_token_ids, sampling, cut_at=longest)


def best_of(executor: ScriptedExecutor, prompt: Ids[int], sampling: SamplingParams) -> list[Choice]:
    def mean(choice: Choice) -> float:
        logprobs = [
            scripted_candidates.logprob([*prompt, *choice[0][:place]], token) for place, token in enumerate(choice[0])
        ]
        return sum(logprobs) / len(logprobs)

    everything = [executor.expected_output(prompt, sampling, choice) for choice in range(sampling.best_of)]
    return sorted(everything, key=mean, reverse=True)[: sampling.n]


def beams(executor: ScriptedExecutor, prompt: Ids[int], sampling: SamplingParams, cut_at: int = 0) -> list[Choice]:
    eos = () if sampling.ignore_eos else executor.eos_token_ids
    facts = NewSequence(0, 0, sampling, len(prompt), eos)
    capacity = (executor.num_blocks - 1) * executor.block_size
    max_len = min(executor.max_model_len, capacity, len(prompt) + sampling.max_tokens)

    def model(tokens: list[int]) -> Candidates:
        return executor.likeliest(array("i", tokens), array("i", range(len(tokens))), facts)

    def choice(hypothesis: Hypothesis) -> Choice:
        tokens = hypothesis.token_ids
        if not hypothesis.is_stopped:
            return tokens, "length", ""
        return tokens, "stop", "eos" if tokens[-1] in eos else "stop_id"

    stops = frozenset({*eos, *sampling.stop_token_ids})
    kept = scripted_candidates.beam_search(model, prompt, sampling, stops, max_len, cut_at)
    return [choice(hypothesis) for hypothesis in kept[: sampling.n]]
