"""An engine that makes room for a next one: nobody is told an end, and what was computed is found again on disk."""

import time

import pytest

from engine.loop import EXIT_ASKED
from engine.simulation.device import SimulatedDisk
from streamkv.protocol import Finished, GetStats, Loading, Ready, Rejected, Stats, pack_ids
from tests.support.scripted_engine import free_endpoint, serving
from tests.support.scripted_executor import ScriptedExecutor
from tests.support.wire_gateway import WireGateway, submission

PROMPT = list(range(10, 40))
WITH_DISK = {
    "preemption_mode": "swap",
    "host_kv_memory_gib": 1.0,
    "disk_kv_path": "there",
    "disk_kv_size_gib": 1.0,
}


def executor(disk: SimulatedDisk, **options: object) -> ScriptedExecutor:
    return ScriptedExecutor(
        num_blocks=100, block_size=4, num_host_blocks=100, num_disk_blocks=200, disk=disk, step_s=0.003, **options
    )  # type: ignore[arg-type]  # options of one call


def test_live_streams_are_told_no_end_and_the_next_engine_finds_them_on_disk() -> None:
    disk = SimulatedDisk()
    with free_endpoint() as endpoint:
        with serving(executor(disk), endpoint, **WITH_DISK) as engine, WireGateway(endpoint) as gateway:
            gateway.wait_for(Ready)
            gateway.send(submission(1, PROMPT, 200))
            gateway.wait_tokens(1, 20)
            gateway.send(submission(2, PROMPT[::-1], 200))
            gateway.wait_tokens(2, 4)
            engine.loop.hand_over()
            assert engine.join(10.0) == EXIT_ASKED
            gateway.pump_for(0.2)
            first = {number: list(gateway.requests[number].tokens[0]) for number in (1, 2)}
            assert not gateway.requests[1].finished and not gateway.requests[2].finished
        next_one = executor(disk)
        with serving(next_one, endpoint, **WITH_DISK), WireGateway(endpoint) as gateway:
            assert gateway.wait_for(Ready).suspects == [], "an asked-for end has no suspects"
            for number, prompt in ((1, PROMPT), (2, PROMPT[::-1])):
                gateway.send(submission(number, prompt, 200, prior_token_ids=[pack_ids(first[number])]))
            for number, prompt in ((1, PROMPT), (2, PROMPT[::-1])):
                rest = gateway.wait_end(number).tokens[0]
                assert first[number] + rest == next_one.expected_tokens(prompt, 200)
            gateway.send(GetStats(1))
            found = gateway.wait_for(Stats).counters["disk_hit_tokens_total"]
    num_known = 2 * len(PROMPT) + len(first[1]) + len(first[2])
    assert found >= num_known - 2 * (4 + 2), "not all whole blocks but those of the last two steps were there"


def test_what_comes_meanwhile_is_left_to_the_next_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flush takes its time here; a Submit that comes then gets no answer at all, least of all a refusal."""
    monkeypatch.setattr("engine.loop._FLUSH_LIMIT_S", 0.5)
    with (
        serving(executor(SimulatedDisk(), holds_transfers=True), **WITH_DISK) as engine,
        WireGateway(engine.endpoint) as gateway,
    ):
        gateway.wait_for(Ready)
        gateway.send(submission(1, PROMPT, 200))
        gateway.wait_tokens(1, 4)
        engine.loop.hand_over()
        time.sleep(0.1)
        gateway.send(submission(2, PROMPT, 5))
        gateway.pump_for(0.2)
        assert engine.join(5.0) == EXIT_ASKED
        assert not gateway.requests[2].finished and not any(isinstance(each, Rejected) for each in gateway.messages)


def test_it_takes_in_the_step_that_is_on_its_way() -> None:
    script = ScriptedExecutor(block_at_step={3: 0.3})
    with serving(script) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        gateway.send(submission(1, PROMPT, 50))
        gateway.wait_tokens(1, 3)
        engine.loop.hand_over()
        assert engine.join(5.0) == EXIT_ASKED
        gateway.pump_for(0.1)
        assert gateway.requests[1].tokens[0] == script.expected_tokens(PROMPT, 4)


def test_an_engine_that_loads_or_is_idle_makes_room_at_once() -> None:
    with serving(ScriptedExecutor(load_s=3.0)) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Loading)
        engine.loop.hand_over()
        assert engine.join(1.5) == EXIT_ASKED
    with serving() as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        engine.loop.hand_over()
        assert engine.join(1.5) == EXIT_ASKED


def test_a_drain_still_ends_live_streams_with_a_word() -> None:
    with serving(ScriptedExecutor(step_s=0.003)) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        gateway.send(submission(1, PROMPT, 1900))
        gateway.wait_tokens(1, 2)
        engine.loop.drain(0.1)
        assert gateway.wait_end(1).finished[0] == Finished(1, 0, "abort", "drain")
        assert engine.join(3.0) == EXIT_ASKED
