"""Log probabilities over a real socket: the real loop, scheduler and publisher, a scripted device that tells what each
token's are."""

from collections.abc import Iterator

import pytest

from engine.kept_logprobs import KeptLogprobs
from streamkv.protocol import Abort, Attach, Pause, Ready, Rejected, Resume, TokenLogprobs, pack_ids
from streamkv.sampling import SamplingParams
from tests.support.scripted_engine import RunningEngine, serving
from tests.support.scripted_executor import ScriptedExecutor
from tests.support.wire_gateway import Received, WireGateway, submission

PROMPT = list(range(10, 40))


@pytest.fixture(params=[1, 2])
def engine(request: pytest.FixtureRequest) -> Iterator[RunningEngine]:
    """Chunks of eight tokens, and so few blocks that two sequences of 50 tokens are too many."""
    executor = ScriptedExecutor(num_blocks=12, block_size=8, max_in_flight=request.param, max_num_batched_tokens=8)
    with serving(executor, max_num_seqs=4) as running:
        yield running


@pytest.fixture
def gateway(engine: RunningEngine) -> Iterator[WireGateway]:
    with WireGateway(engine.endpoint) as connected:
        connected.wait_for(Ready)
        yield connected


def asking(num_tokens: int = 16, **more: int | float) -> SamplingParams:
    return SamplingParams(seed=7, max_tokens=num_tokens, temperature=more.pop("temperature", 0.0), **more)  # type: ignore[arg-type]


def joined(values: list[TokenLogprobs]) -> TokenLogprobs:
    kept = KeptLogprobs()
    for part in values:
        kept.append(part)
    return kept.values_from(0)


def right(engine: RunningEngine, tokens: list[int], num_top: int, start: int = len(PROMPT)) -> TokenLogprobs:
    assert isinstance(engine.executor, ScriptedExecutor)
    return engine.executor.model.logprobs(tokens, start, num_top)


def check_prompt(engine: RunningEngine, received: Received, num_top: int, prompt: list[int] = PROMPT) -> None:
    """Every token of it but the first, once and in order."""
    position = 1
    for part in received.prompt_logprobs:
        assert part.start == position
        position += part.values.num_tokens
    assert joined([part.values for part in received.prompt_logprobs]) == right(engine, prompt[1:], num_top, 1)


@pytest.mark.parametrize("num_top", [0, 3])
def test_every_token_comes_with_its_own_and_others_have_none(
    engine: RunningEngine, gateway: WireGateway, num_top: int
) -> None:
    gateway.send(submission(1, PROMPT, sampling=asking(n=2, temperature=1.0, logprobs=num_top)))
    gateway.send(submission(2, PROMPT))
    received, other = gateway.wait_end(1, num_choices=2), gateway.wait_end(2)
    for choice in range(2):
        assert joined(received.logprobs[choice]) == right(engine, received.tokens[choice], num_top)
    assert received.tokens[0] != received.tokens[1]
    assert not other.logprobs and not other.prompt_logprobs


def test_they_outlive_a_preemption(engine: RunningEngine, gateway: WireGateway) -> None:
    for request_id in range(3):
        sampling = asking(40, logprobs=2, prompt_logprobs=1, frequency_penalty=0.5)
        gateway.send(submission(request_id, PROMPT[request_id:], sampling=sampling))
    ends = [gateway.wait_end(request_id) for request_id in range(3)]
    assert sum(end.finished[0].num_preemptions for end in ends) > 0
    for request_id, received in enumerate(ends):
        prompt = PROMPT[request_id:]
        assert joined(received.logprobs[0]) == right(engine, received.tokens[0], 2, len(prompt))
        check_prompt(engine, received, 1, prompt)


def test_the_prompts_come_once_for_all_choices_although_all_of_it_is_cached(
    engine: RunningEngine, gateway: WireGateway
) -> None:
    gateway.send(submission(1, PROMPT, 2))
    gateway.wait_end(1)
    gateway.send(submission(2, PROMPT, sampling=asking(4, n=3, prompt_logprobs=2)))
    received = gateway.wait_end(2, num_choices=3)
    check_prompt(engine, received, 2)
    assert [end.num_cached_tokens for end in received.finished.values()] == [0, 0, 0]
    gateway.send(submission(3, PROMPT, 2))
    assert gateway.wait_end(3).finished[0].num_cached_tokens > 0, "what it computed can be shared"


def test_another_choice_tells_of_the_prompt_when_the_first_is_aborted(
    engine: RunningEngine, gateway: WireGateway
) -> None:
    assert isinstance(engine.executor, ScriptedExecutor)
    engine.executor.block_at_step = {1: 0.3}
    gateway.send(submission(1, PROMPT, sampling=asking(4, n=2, prompt_logprobs=0)))
    while not gateway.requests[1].prompt_logprobs:
        gateway.pump()
    gateway.send(Abort(1, "cancelled", choice=0))
    received = gateway.wait_end(1, num_choices=2)
    assert (received.finished[0].finish_reason, received.finished[1].finish_reason) == ("abort", "length")
    check_prompt(engine, received, 0)


def test_a_prompt_of_one_token_has_nothing_to_tell(engine: RunningEngine, gateway: WireGateway) -> None:
    gateway.send(submission(1, [5], sampling=asking(2, prompt_logprobs=1)))
    assert gateway.wait_end(1).prompt_logprobs == []


def test_ranked_choices_bring_theirs_at_the_end(engine: RunningEngine, gateway: WireGateway) -> None:
    sampling = asking(6, n=2, best_of=4, temperature=1.0, logprobs=1, prompt_logprobs=1)
    gateway.send(submission(1, PROMPT, sampling=sampling))
    received = gateway.wait_end(1, num_choices=2)
    for choice in range(2):
        assert len(received.logprobs[choice]) == 1
        assert joined(received.logprobs[choice]) == right(engine, received.tokens[choice], 1)
    check_prompt(engine, received, 1)


def test_beams_tell_of_their_prompt(engine: RunningEngine, gateway: WireGateway) -> None:
    gateway.send(submission(1, PROMPT, sampling=asking(4, n=2, beam_width=2, prompt_logprobs=1)))
    check_prompt(engine, gateway.wait_end(1, num_choices=2), 1)


@pytest.mark.parametrize("has_ended", [False, True])
def test_attach_gives_them_back(engine: RunningEngine, gateway: WireGateway, has_ended: bool) -> None:
    submit = submission(1, PROMPT, sampling=asking(20, logprobs=2, prompt_logprobs=1), attach_grace_s=30.0)
    gateway.send(submit)
    gateway.wait_tokens(1, 5)
    if has_ended:
        gateway.wait_end(1)
    with WireGateway(engine.endpoint) as other:
        other.wait_for(Ready)
        other.send(Attach(9, submit.stream_id, from_token=3))
        received = other.wait_end(9)
        attached = received.attached
        assert attached is not None and attached.prompt_logprobs == right(engine, PROMPT[1:], 1, 1)
        tokens = gateway.requests[1].tokens[0][:3] + received.tokens[0]
        assert len(tokens) == 20
        assert joined([*attached.logprobs, *received.logprobs[0]]) == right(engine, tokens[3:], 2, len(PROMPT) + 3)


def test_attach_while_the_prompt_is_computed_leaves_out_no_part(engine: RunningEngine, gateway: WireGateway) -> None:
    assert isinstance(engine.executor, ScriptedExecutor)
    engine.executor.block_at_step = {2: 0.3}
    submit = submission(1, PROMPT, sampling=asking(2, prompt_logprobs=2), attach_grace_s=30.0)
    gateway.send(submit)
    while not gateway.requests[1].prompt_logprobs:
        gateway.pump()
    gateway.send(Attach(9, submit.stream_id))
    received = gateway.wait_end(9)
    assert received.attached is not None and received.attached.prompt_logprobs is not None
    assert received.attached.logprobs == []
    early, late = received.attached.prompt_logprobs, received.prompt_logprobs
    assert 0 < early.num_tokens < len(PROMPT) - 1
    assert late[0].start == 1 + early.num_tokens
    assert joined([early, *(part.values for part in late)]) == right(engine, PROMPT[1:], 2, 1)


def test_a_stream_without_them_attaches_as_ever(engine: RunningEngine, gateway: WireGateway) -> None:
    submit = submission(1, PROMPT, 3, attach_grace_s=30.0)
    gateway.send(submit)
    gateway.wait_end(1)
    gateway.send(Attach(2, submit.stream_id))
    attached = gateway.wait_end(2).attached
    assert attached is not None and (attached.logprobs, attached.prompt_logprobs) == ([], None)


def test_a_continuation_goes_on_with_them_and_keeps_the_prior_ones(engine: RunningEngine, gateway: WireGateway) -> None:
    assert isinstance(engine.executor, ScriptedExecutor)
    sampling = asking(12, logprobs=1, prompt_logprobs=0)
    whole = engine.executor.expected_tokens(PROMPT, 12)
    for cut in (1, 5, 11):
        submit = submission(
            cut,
            PROMPT,
            sampling=sampling,
            attach_grace_s=30.0,
            prior_token_ids=[pack_ids(whole[:cut])],
            prior_logprobs=[right(engine, whole[:cut], 1)],
        )
        gateway.send(submit)
        received = gateway.wait_end(cut)
        assert received.tokens[0] == whole[cut:]
        assert joined(received.logprobs[0]) == right(engine, whole[cut:], 1, len(PROMPT) + cut)
        check_prompt(engine, received, 0)
        gateway.send(Attach(100 + cut, submit.stream_id))
        attached = gateway.wait_end(100 + cut).attached
        assert attached is not None and attached.logprobs == [right(engine, whole, 1)]


@pytest.mark.parametrize(
    ("asked", "prior"),
    [
        (1, []),
        (1, [TokenLogprobs(bytes(8), bytes(8), bytes(4))]),
        (1, [TokenLogprobs(bytes(4), bytes(4), bytes(4))]),
        (2, [TokenLogprobs(bytes(8), bytes(8), bytes(8))]),
        (1, [TokenLogprobs(bytes(8), bytes(8), bytes(8))] * 2),
        (-1, [TokenLogprobs(bytes(8))]),
    ],
)
def test_prior_ones_of_the_wrong_length_are_refused_by_name(
    engine: RunningEngine, gateway: WireGateway, asked: int, prior: list[TokenLogprobs]
) -> None:
    gateway.send(
        submission(1, PROMPT, sampling=asking(logprobs=asked), prior_token_ids=[pack_ids([5, 6])], prior_logprobs=prior)
    )
    refusal = gateway.wait_for(Rejected)
    assert (refusal.code, refusal.field) == ("invalid", "prior_logprobs")


def test_a_bias_of_an_id_over_the_vocabulary_is_refused_by_name(engine: RunningEngine, gateway: WireGateway) -> None:
    gateway.send(submission(1, PROMPT, sampling=SamplingParams(seed=1, max_tokens=2, logit_bias={5: 1.0, 1000: 2.0})))
    refusal = gateway.wait_for(Rejected)
    assert (refusal.code, refusal.field) == ("invalid", "logit_bias")
    gateway.send(submission(2, PROMPT, sampling=SamplingParams(seed=1, max_tokens=2, logit_bias={999: 2.0})))
    gateway.wait_end(2)


def test_a_slow_reader_misses_none(engine: RunningEngine, gateway: WireGateway) -> None:
    gateway.send(submission(1, PROMPT, sampling=asking(30, logprobs=1, prompt_logprobs=1)))
    for _ in range(3):
        gateway.send(Pause(1))
        gateway.pump_for(0.02)
        gateway.send(Resume(1))
        gateway.pump_for(0.01)
    received = gateway.wait_end(1)
    assert joined(received.logprobs[0]) == right(engine, received.tokens[0], 1)
    check_prompt(engine, received, 1)
