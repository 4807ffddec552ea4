"""Who ends engines is found out, wherever it does so, and who is only there when they end is not failed.

Engines here are counted in steps and have no device, but the streams and the quarantine are the real ones.
"""

import asyncio
import functools
import random
from collections.abc import Callable, Iterator
from itertools import count, repeat
from typing import Any

import pytest

from engine.quarantine import Quarantine
from engine.sequence import Request, Sequence, SequenceState
from gateway.engine_client import EngineClient
from gateway.stream_state import StreamState
from gateway.streams import Stream, new_stream_id
from gateway.suspicion import MAX_ENGINE_DEATHS, MAX_FURTHER_DEATHS, MAX_OTHER_DEATHS, Suspicion
from streamkv.protocol import Finished
from streamkv.sampling import SamplingParams
from tests.support.running_gateway import small_tokenizer
from tests.support.scripted_engine import free_endpoint
from tests.support.told_stream import Told

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "best_of": {"best_of": 3},
    "beams": {"beam_width": 3, "temperature": 0.0},
}
NEVER = 10**9


class Client:
    """A request, its stream at the gateway, and what the present engine has of it."""

    def __init__(self, engine: EngineClient, kind: str, length: int, prefill: int, poison: int = NEVER) -> None:
        """In steps; poison: the engine ends when it computes the token after so many, in place of 0 the prompt."""
        sampling = SamplingParams(1, length, **KINDS[kind])
        self.outlet = Told()
        self.length, self.prefill, self.poison = length, prefill, poison
        self.num_ends_without_token = 0
        """Those at which it was computed, of a plain one."""
        self.num_poisoned_ends = 0
        self.stream = Stream(
            engine,
            small_tokenizer(),
            self.outlet,
            stream_id=new_stream_id(),
            arrived=0.0,
            on_end=lambda _: None,
        )
        self.stream.begin(StreamState(sampling, "m"), [5, 6, 7])

    def submit(self, quarantine: Quarantine) -> None:
        """To a new engine. Its stream ends where the gateway gives it up."""
        submit = self.stream.submission(1)
        if submit is None:
            return
        self.request = Request(1, b"g", submit.stream_id, [5], submit.sampling, 0.0, cleared_past=submit.ranked_tokens)
        prior = len(submit.prior_token_ids[0]) // 4 if submit.prior_token_ids else 0
        self.sequence = Sequence(1, self.request, 0, [5] + [9] * prior, 1, NEVER)
        self.request.sequences = [self.sequence]
        self.num_prefilled = 0
        quarantine.take(self.request, submit.runs_alone)

    @property
    def ends_engine(self) -> bool:
        return self.sequence.num_output == self.poison

    def compute(self) -> None:
        self.num_prefilled += 1
        if self.num_prefilled <= self.prefill:
            return
        self.sequence.token_ids.append(9)
        self.request.first_token_s = 1.0
        if not self.request.sampling.ranks_choices:
            self.stream.push_token(9)
            self.num_ends_without_token = 0
        if self.sequence.num_output == self.length:
            self.sequence.state = SequenceState.FINISHED
            self.stream.finish(Finished(1, 0, "length"))
            self.stream.flush()

    def was_computed_at_an_end(self, num_unseen: int) -> None:
        """num_unseen: tokens that the record was behind."""
        self.num_ends_without_token += 1
        self.stream.suspected(max(0, self.request.num_ranked_tokens - num_unseen))

    @property
    def is_failed(self) -> bool:
        return self.stream.is_done and self.stream.failure is not None


@pytest.fixture
def engine() -> EngineClient:
    """One that is not there."""
    with free_endpoint() as endpoint:
        client = EngineClient(endpoint, heartbeat_s=1.0, engine_timeout_s=10.0)
    client.close()
    return client


def serve(clients: list[Client], lives: Iterator[float], num_unseen: Callable[[], int] = lambda: 0) -> None:
    """Engine after engine until all streams have ended. lives: after how many steps each is killed."""
    while live := [client for client in clients if not client.stream.is_done]:
        quarantine = Quarantine()
        for client in live:
            client.submit(quarantine)
        _run(live, quarantine, next(lives), num_unseen)


def _run(live: list[Client], quarantine: Quarantine, num_steps: float, num_unseen: Callable[[], int]) -> None:
    for step in count():
        live = [client for client in live if not client.stream.is_done]
        while quarantine and quarantine.turn() is not None:
            pass
        running = [client for client in live if not quarantine.excludes(client.request)]
        poisons = [client for client in running if client.ends_engine]
        if not running:
            return
        if poisons or step >= num_steps:
            for client in poisons:
                client.num_poisoned_ends += 1
            for client in running:
                client.was_computed_at_an_end(num_unseen())
            return
        for client in running:
            client.compute()


def exponential(rng: random.Random, mean: float, num_kills: int) -> Iterator[float]:
    yield from [rng.expovariate(1 / mean) for _ in range(num_kills)]
    yield from repeat(NEVER)


# of everybody, with the real streams


def check_random_kills(engine: EngineClient, seed: int, mean: float) -> None:
    rng = random.Random(seed)
    clients = [Client(engine, kind, rng.choice((20, 60, 200, 500)), rng.randrange(3)) for kind in [*KINDS] * 2]
    serve(clients, exponential(rng, mean, 20))
    assert not any(client.is_failed for client in clients)
    assert all(client.outlet.num_closed == 1 for client in clients)


@pytest.mark.parametrize("mean", [40.0, 100.0, 400.0])
async def test_twenty_ends_at_random_fail_nobody(engine: EngineClient, mean: float) -> None:
    for seed in range(5):
        check_random_kills(engine, seed, mean)


@pytest.mark.long
@pytest.mark.parametrize("mean", [40.0, 100.0, 400.0])
async def test_twenty_ends_at_random_fail_nobody_however_they_fall(engine: EngineClient, mean: float) -> None:
    for seed in range(100, 160):
        check_random_kills(engine, seed, mean)
        await asyncio.sleep(0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [0, 1, 2, 3, 30, 150])
async def test_poison_at_any_place_is_failed_at_the_third_end_and_nobody_with_it(
    engine: EngineClient, kind: str, place: int
) -> None:
    company = [Client(engine, other, 200, 2) for other in [*KINDS] * 2]
    poison = Client(engine, kind, 200, 2, poison=place)
    serve([*company[:3], poison, *company[3:]], repeat(NEVER))
    assert poison.is_failed and poison.num_poisoned_ends == MAX_ENGINE_DEATHS
    assert not any(client.is_failed for client in company)


@pytest.mark.parametrize("kind", ["best_of", "beams"])
async def test_poison_whose_record_is_now_and_then_a_token_behind_is_failed_alone(
    engine: EngineClient, kind: str
) -> None:
    for seed in range(10):
        rng = random.Random(seed)
        company = [Client(engine, other, 120, 2) for other in KINDS]
        poison = Client(engine, kind, 120, 2, poison=rng.randrange(2, 100))
        serve([*company, poison], repeat(NEVER), functools.partial(rng.randrange, 2))
        assert poison.is_failed and poison.num_poisoned_ends <= MAX_ENGINE_DEATHS + 2
        assert not any(client.is_failed for client in company)


@pytest.mark.parametrize("kind", ["best_of", "beams"])
async def test_poison_among_ends_at_random_is_failed_alone(engine: EngineClient, kind: str) -> None:
    for seed in range(10):
        rng = random.Random(seed)
        company = [Client(engine, other, 150, 2) for other in KINDS]
        poison = Client(engine, kind, 150, 2, poison=rng.randrange(60))
        serve([*company, poison], exponential(rng, 100, 200))
        assert poison.is_failed and poison.num_poisoned_ends <= 2 * (MAX_ENGINE_DEATHS + MAX_FURTHER_DEATHS)
        assert not any(client.is_failed for client in company)


async def test_a_plain_request_is_failed_by_three_ends_without_a_token_between_and_by_nothing_else(
    engine: EngineClient,
) -> None:
    """A prompt of many steps, and engines that live no longer than it takes."""
    num_failed = 0
    for seed in range(40):
        rng = random.Random(seed)
        clients = [Client(engine, "plain", 30, prefill) for prefill in (0, 3, 40)]
        serve(clients, exponential(rng, 40, 20))
        for client in clients:
            assert client.is_failed == (client.num_ends_without_token == MAX_ENGINE_DEATHS)
            num_failed += client.is_failed
    assert num_failed, "some were"


# of one, whose choices are ranked


def is_failed(length: int, deaths: Iterator[int]) -> bool:
    """Ends in a row, each at a place; one beyond its length was too late."""
    suspicion = Suspicion()
    for place in deaths:
        if place >= length:
            return False
        suspicion = suspicion.after_death(place)
        if suspicion.is_guilty:
            return True
    return False


@pytest.mark.parametrize(
    ("draw", "length", "limit"),
    [
        (lambda rng: int(rng.expovariate(1 / 1000)), 2000, 0.0),
        (lambda rng: int(rng.expovariate(1 / 200)), 2000, 0.0005),
        (lambda rng: int(rng.expovariate(1 / 60)), 200, 0.001),
        (lambda rng: int(rng.expovariate(1 / 60)), 20, 0.001),
        (lambda rng: int(rng.expovariate(1 / 10)), 200, 0.02),
        (lambda rng: rng.randrange(30, 80), 200, 0.003),
        (lambda rng: rng.randrange(100, 1000), 2000, 0.0005),
    ],
)
def test_of_ends_at_random_so_many_fall_together_by_chance(
    draw: Callable[[random.Random], int], length: int, limit: float
) -> None:
    """docs/reliability.md has these figures."""
    num_failed = 0
    for seed in range(5000):
        rng = random.Random(seed)
        num_failed += is_failed(length, iter([draw(rng) for _ in range(20)]))
    assert num_failed <= limit * 5000


def test_ends_well_behind_the_furthest_place_fail_nobody_until_there_are_very_many() -> None:
    suspicion = Suspicion().after_death(100)
    for num_others in range(1, MAX_OTHER_DEATHS + 1):
        suspicion = suspicion.after_death(num_others)
        assert not suspicion.is_guilty and not suspicion.runs_alone
    places = random.Random(1)
    lives = []
    while not suspicion.is_guilty:
        lives.append(suspicion.runs_alone)
        suspicion = suspicion.after_death(places.randrange(90))
    assert lives == [False] * (MAX_ENGINE_DEATHS + MAX_FURTHER_DEATHS - 2) + [True], (
        "it ends engines now here, now there"
    )


def test_an_end_while_it_ran_alone_that_was_another_s_gives_the_others_a_life() -> None:
    suspicion = Suspicion().after_death(50).after_death(50)
    assert suspicion.runs_alone
    suspicion = suspicion.after_death(9)
    assert not suspicion.runs_alone
    for _ in range(MAX_FURTHER_DEATHS - 1):
        suspicion = suspicion.after_death(9)
    lives = []
    for place in (50, 50, 50, 9, 50, 50):
        suspicion = suspicion.after_death(place)
        lives.append((suspicion.runs_alone, suspicion.is_guilty))
    assert lives == [(False, False), (False, False), (True, False), (False, False), (True, False), (False, True)], (
        "at the last but one it was in company, whose fault it might have been"
    )


def test_coming_further_begins_the_count_anew() -> None:
    suspicion = Suspicion().after_death(50).after_death(49)
    assert suspicion.runs_alone and suspicion.furthest == 50
    suspicion = suspicion.after_death(51)
    assert not suspicion.runs_alone and (suspicion.num_deaths, suspicion.furthest) == (1, 51)
    assert suspicion.after_death(51).runs_alone, "the record may have been a token behind before"
    assert not suspicion.after_death(80).after_death(80).runs_alone, "what was at 51 was not it, so one more is needed"
