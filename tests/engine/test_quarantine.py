"""Who may be what ends the engine runs alone until its first token, and nobody is lost over it."""

import threading
from collections.abc import Callable

import msgspec
import pytest

from engine.plan import StepPlan
from engine.quarantine import Quarantine
from engine.sequence import Request, Sequence, SequenceState
from streamkv.protocol import Abort, Pause, Ready, Resume, Submit, pack_ids
from streamkv.sampling import SamplingParams
from tests.support.scripted_engine import serving
from tests.support.scripted_executor import ScriptedExecutor, ScriptedLaunch
from tests.support.wire_gateway import WireGateway, submission

PROMPT = [30, 5, 6, 7]


class Watched(ScriptedExecutor):
    """Notes which sequences each step had."""

    def __init__(self, max_in_flight: int = 1) -> None:
        super().__init__(step_s=0.004, max_in_flight=max_in_flight)
        self.seen: list[list[int]] = []
        self.names: dict[int, int] = {}
        """sequence id → its request's seed, which names it in these tests."""

    def launch(self, plan: StepPlan, on_done: Callable[[], None]) -> ScriptedLaunch:
        self.names |= {facts.sequence_id: facts.sampling.seed for facts in plan.new_sequences}
        self.seen.append([self.names[entry.sequence_id] for entry in plan.scheduled])
        return super().launch(plan, on_done)

    def steps_with(self, name: int) -> list[list[int]]:
        return [step for step in self.seen if name in step]


def named(name: int, max_tokens: int, runs_alone: bool = False, n: int = 1) -> Submit:
    """A request that has its name as its id, as its seed and as the first of its tokens."""
    sampling = SamplingParams(seed=name, max_tokens=max_tokens, n=n, temperature=0.0)
    return msgspec.structs.replace(submission(name, [name, 5, 6, 7], sampling=sampling), runs_alone=runs_alone)


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_suspect_shares_no_step_before_its_first_token_and_everybody_gets_theirs(max_in_flight: int) -> None:
    executor = Watched(max_in_flight)
    with serving(executor) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        for name in (10, 11):
            gateway.send(named(name, 60))
        gateway.wait_tokens(11, 3)
        gateway.send(named(20, 8, runs_alone=True))
        gateway.send(named(21, 8, runs_alone=True, n=2))
        gateway.send(named(12, 8))
        for name, num_choices in ((10, 1), (11, 1), (12, 1), (20, 1), (21, 2)):
            received = gateway.wait_end(name, num_choices)
            for choice in range(num_choices):
                wanted = executor.expected_tokens([name, 5, 6, 7], 60 if name < 12 else 8)
                assert received.tokens[choice] == wanted
    for suspect in (20, 21):
        first = executor.steps_with(suspect)[0]
        assert set(first) == {suspect}, "alone in the step that may end the engine"
    assert executor.seen.index(executor.steps_with(20)[0]) < executor.seen.index(executor.steps_with(21)[0])
    assert executor.seen.index(executor.steps_with(21)[0]) < executor.seen.index(executor.steps_with(12)[0])
    assert any(len(set(step)) > 2 for step in executor.steps_with(20)), "and among the others afterwards"


def test_the_others_go_on_when_a_suspect_goes_or_stands_aside() -> None:
    executor = Watched()
    with serving(executor) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        gateway.send(named(10, 200))
        gateway.wait_tokens(10, 3)
        gateway.send(named(20, 8, runs_alone=True))
        gateway.send(Pause(20))
        gateway.send(named(21, 8, runs_alone=True))
        gateway.send(Abort(21))
        gateway.send(named(11, 8))
        assert gateway.wait_end(21).finished[0].finish_reason == "abort"
        assert gateway.wait_end(11).finished[0].finish_reason == "length"
        gateway.send(Resume(20))
        assert gateway.wait_end(20).tokens[0] == executor.expected_tokens([20, 5, 6, 7], 8)
        assert gateway.wait_end(10).tokens[0] == executor.expected_tokens([10, 5, 6, 7], 200)


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_suspect_that_stood_aside_for_its_reader_still_has_to_run_alone(max_in_flight: int) -> None:
    executor = Watched(max_in_flight)
    with serving(executor) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        gateway.send(named(10, 300))
        gateway.wait_tokens(10, 3)
        executor.block_at_step = {executor.num_steps + 5: 0.3}  # the two below come in within one step
        gateway.wait_tokens(10, 5)
        gateway.send(named(20, 8, runs_alone=True))
        gateway.send(Pause(20))
        gateway.wait_tokens(10, 40)
        assert not executor.steps_with(20), "it stands aside, and the other goes on"
        gateway.send(Resume(20))
        assert gateway.wait_end(20).tokens[0] == executor.expected_tokens([20, 5, 6, 7], 8)
        gateway.send(Abort(10))
        gateway.wait_end(10)
    assert set(executor.steps_with(20)[0]) == {20}


def test_a_suspect_whose_gateway_is_lost_holds_nobody() -> None:
    executor = Watched()
    executor.block_at_step = {0: 1.5}
    with serving(executor, gateway_timeout_s=0.5) as engine, WireGateway(engine.endpoint, heartbeat_s=0.1) as gateway:
        gateway.wait_for(Ready)
        with WireGateway(engine.endpoint) as leaving:
            leaving.wait_for(Ready)
            leaving.send(named(20, 8, runs_alone=True))
            gateway.send(named(10, 8))
            threading.Event().wait(0.1)
        assert gateway.wait_end(10).tokens[0] == executor.expected_tokens([10, 5, 6, 7], 8)


def test_a_continuation_that_is_cached_but_for_its_last_token_holds_the_others_no_longer() -> None:
    executor = Watched()
    with serving(executor) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        gateway.send(named(20, 40))
        tokens = gateway.wait_end(20).tokens[0]
        again = named(20, 300, runs_alone=True)
        gateway.send(msgspec.structs.replace(again, request_id=21, prior_token_ids=[pack_ids(tokens[:30])]))
        gateway.send(named(10, 8))
        assert gateway.wait_end(10).tokens[0] == executor.expected_tokens([10, 5, 6, 7], 8)
        assert 21 not in gateway.requests or not gateway.requests[21].finished
        assert gateway.wait_end(21).tokens[0] == executor.expected_tokens([20, 5, 6, 7], 300)[30:]


def a_request(cleared_past: int = 0) -> Request:
    request = Request(1, b"g", bytes(16), PROMPT, SamplingParams(seed=1, max_tokens=9), 0.0, cleared_past=cleared_past)
    request.sequences = [Sequence(1, request, 0, list(PROMPT), len(PROMPT), 99)]
    return request


def end(request: Request) -> None:
    for sequence in request.sequences:
        sequence.state = SequenceState.FINISHED


def test_a_suspect_that_ended_while_it_stood_aside_is_kept_by_nobody_and_has_no_further_turn() -> None:
    quarantine = Quarantine()
    suspect, other = a_request(), a_request()
    assert quarantine.take(suspect, runs_alone=True)
    quarantine.take(other, runs_alone=False)
    suspect.is_paused = True
    assert quarantine.turn() == [other]
    end(suspect)
    kept = [request for collection in vars(quarantine).values() for request in collection]
    assert kept == []
    assert not quarantine.take_back(suspect) and not quarantine


def test_a_suspect_is_taken_back_once_and_not_when_it_was_cleared() -> None:
    quarantine = Quarantine()
    suspect = a_request()
    quarantine.take(suspect, runs_alone=True)
    assert not quarantine.take_back(suspect), "it has its turn"
    suspect.is_paused = True
    assert quarantine.turn() == []
    assert quarantine.take_back(suspect) and not quarantine.take_back(suspect)
    suspect.is_paused, suspect.first_token_s = False, 1.0
    assert quarantine.turn() == [] and not quarantine.take_back(suspect)


RANKED = [SamplingParams(seed=30, max_tokens=40, n=2, temperature=0.0, beam_width=3),
          SamplingParams(seed=30, max_tokens=40, n=2, temperature=1.0, best_of=4)]  # fmt: skip


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("sampling", RANKED, ids=["beams", "best_of"])
def test_ranked_choices_stand_aside_for_a_suspect_and_are_what_they_would_have_been(
    sampling: SamplingParams, max_in_flight: int
) -> None:
    executor = Watched(max_in_flight)
    with serving(executor) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        gateway.send(submission(30, PROMPT, sampling=sampling))
        undisturbed = gateway.wait_end(30, 2).tokens
        gateway.send(submission(31, PROMPT, sampling=sampling))
        gateway.send(Pause(31))  # of its reader, who has nothing to read before its end
        gateway.send(named(10, 60))
        gateway.wait_tokens(10, 6)
        gateway.send(named(20, 8, runs_alone=True))
        assert gateway.wait_end(20).tokens[0] == executor.expected_tokens([20, 5, 6, 7], 8)
        assert gateway.wait_end(31, 2).tokens == undisturbed
        assert gateway.wait_end(10).tokens[0] == executor.expected_tokens([10, 5, 6, 7], 60)
    assert set(executor.steps_with(20)[0]) == {20}


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("sampling", RANKED, ids=["beams", "best_of"])
def test_ranked_suspects_run_alone_until_they_have_come_further_than_before(
    sampling: SamplingParams, max_in_flight: int
) -> None:
    executor = Watched(max_in_flight)
    with serving(executor) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        gateway.send(named(10, 80))
        gateway.wait_tokens(10, 3)
        gateway.send(submission(30, PROMPT, sampling=sampling, runs_alone=True, ranked_tokens=12))
        assert len(gateway.wait_end(30, 2).tokens) == 2
        gateway.wait_end(10)
    steps = executor.steps_with(30)
    num_alone = next(place for place, step in enumerate(steps) if 10 in step)
    assert 12 < num_alone <= 12 + 1 + max_in_flight, "a step for each token, and those that were on their way"
