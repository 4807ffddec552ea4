"""A hang is found by its rule, and a healthy engine never counts as one."""

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable

import pytest

from gateway.engine_watch import FIRST_WORD_S, SHORTEST_HANG_S, UNPREDICTED_HANG_S, EngineWatch, Progress
from gateway.supervised_engine import from_here
from gateway.supervisor import ChildFailed, Supervisor
from streamkv.protocol import Heartbeat
from tests.support.running_gateway import eventually
from tests.support.scripted_engine import serving
from tests.support.scripted_executor import ScriptedExecutor
from tests.support.wire_gateway import WireGateway, submission

SILENCE_S = 15.0


def beat(step_age_s: float, expected_step_s: float, has_work: bool = True) -> Heartbeat:
    return Heartbeat(3, 77, has_work, step_age_s, expected_step_s)


@pytest.mark.parametrize(
    ("heartbeat", "is_hung"),
    [
        (beat(SHORTEST_HANG_S, 0.02), False),
        (beat(SHORTEST_HANG_S + 0.1, 0.02), True),
        (beat(11.0, 2.3), False),  # slow, as predicted
        (beat(11.6, 2.3), True),
        (beat(200.0, 41.0), False),
        (beat(UNPREDICTED_HANG_S, 0.0), False),  # a first step, which may compile
        (beat(UNPREDICTED_HANG_S + 0.1, 0.0), True),
        (beat(1000.0, 0.02, has_work=False), False),
    ],
)
def test_work_that_waits_needs_steps_in_five_times_their_time(heartbeat: Heartbeat, is_hung: bool) -> None:
    progress = Progress(100.0, SILENCE_S)
    progress.hear(500.0, heartbeat)
    assert bool(progress.why_hung(500.5)) is is_hung


def test_silence_counts_once_it_has_spoken_and_a_start_has_longer() -> None:
    progress = Progress(100.0, SILENCE_S)
    assert not progress.why_hung(100.0 + FIRST_WORD_S)
    assert "nothing for 181 s" in progress.why_hung(101.0 + FIRST_WORD_S)
    progress.hear(110.0)
    assert not progress.why_hung(110.0 + SILENCE_S)
    assert progress.why_hung(110.1 + SILENCE_S)


def test_a_later_step_takes_the_fault_back() -> None:
    progress = Progress(0.0, SILENCE_S)
    progress.hear(10.0, beat(30.0, 0.1))
    assert progress.why_hung(10.0)
    progress.hear(11.0, beat(0.1, 0.1))
    assert not progress.why_hung(11.0)


def test_time_in_which_the_watch_could_not_listen_counts_for_nobody() -> None:
    progress = Progress(0.0, SILENCE_S)
    progress.hear(10.0, beat(0.1, 0.1))
    progress.overslept(1000.0)
    assert not progress.why_hung(1000.0 + SILENCE_S)
    progress.hear(1001.0, beat(991.0, 0.1))  # the engine's clock went on, too
    assert not progress.why_hung(1000.0 + SHORTEST_HANG_S)
    assert "no step has finished for 11 s" in progress.why_hung(1011.0)
    progress.hear(1012.0)
    assert "said nothing for 16 s" in progress.why_hung(1028.0)


async def until(watch: EngineWatch, on_ready: Callable[[], None]) -> str:
    async with asyncio.timeout(60):
        return await watch.until_hung(on_ready)


async def test_an_engine_that_steps_or_idles_is_not_hung_and_one_that_falls_silent_is() -> None:
    became_ready = asyncio.Event()
    with serving(ScriptedExecutor(step_s=0.01)) as engine, WireGateway(engine.endpoint) as gateway:
        watch = EngineWatch(engine.endpoint, None, heartbeat_s=0.1, silence_s=2.0)
        watching = asyncio.create_task(until(watch, became_ready.set))
        await asyncio.wait_for(became_ready.wait(), 30)
        gateway.send(submission(1, [5, 6], 100))
        await asyncio.to_thread(gateway.wait_end, 1)
        await asyncio.sleep(2.5)
        assert not watching.done()
        engine.stop()
    assert "said nothing" in await watching


async def test_a_watch_that_the_engine_took_for_dead_goes_on_listening() -> None:
    num_greeted = 0

    def greeted() -> None:
        nonlocal num_greeted
        num_greeted += 1

    with serving(gateway_timeout_s=0.2) as engine:
        watching = asyncio.create_task(until(EngineWatch(engine.endpoint, None, heartbeat_s=1.0), greeted))
        await eventually(lambda: num_greeted > 1, 30)
        watching.cancel()


@pytest.mark.parametrize(
    ("bound", "reached_at"),
    [
        ("tcp://*:5555", "tcp://127.0.0.1:5555"),
        ("tcp://0.0.0.0:5555", "tcp://0.0.0.0:5555"),
        ("tcp://10.1.2.3:5555", "tcp://10.1.2.3:5555"),
        ("tcp://127.0.0.1:*", ""),
        ("tcp://127.0.0.1:0", ""),
        ("tcp://eth0:5555", ""),
    ],
)
def test_an_engine_that_cannot_be_reached_is_not_watched(bound: str, reached_at: str) -> None:
    assert from_here(bound) == reached_at


async def test_a_step_that_never_ends_counts_as_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.engine_watch.SHORTEST_HANG_S", 0.5)
    monkeypatch.setattr("gateway.engine_watch.UNPREDICTED_HANG_S", 0.5)
    found = threading.Event()
    executor = ScriptedExecutor(step_s=0.002, block_at_step={20: 60.0}, sleep=found.wait)
    with serving(executor) as engine, WireGateway(engine.endpoint) as gateway:
        watch = EngineWatch(engine.endpoint, None, heartbeat_s=0.1, silence_s=30.0)
        watching = asyncio.create_task(until(watch, lambda: None))
        await asyncio.sleep(0.3)
        gateway.send(submission(1, [5, 6], 100))
        reason = await watching
        assert "no step has finished" in reason
        found.set()
        received = await asyncio.to_thread(gateway.wait_end, 1)
        assert received.tokens[0] == executor.expected_tokens([5, 6], 100), "the watch only watches"


class HangsOnce:
    """A watch that finds a hang in the first life of a child alone."""

    def __init__(self) -> None:
        self.num_lives = 0

    async def until_hung(self, on_ready: Callable[[], None]) -> str:
        self.num_lives += 1
        on_ready()
        await asyncio.sleep(0.05 if self.num_lives == 1 else 3600)
        return "it sleeps"


async def test_a_child_that_hangs_is_killed_and_started_again() -> None:
    stubborn = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"]
    watch = HangsOnce()
    supervisor = Supervisor(stubborn, watch=watch, stop_grace_s=0.2)
    running = asyncio.create_task(supervisor.run())
    try:
        await eventually(lambda: supervisor.pid is not None)
        first = supervisor.pid
        await eventually(lambda: supervisor.pid not in (None, first), 30)
        await eventually(lambda: watch.num_lives == 2, 30)  # a task of its own, which begins a moment later
        assert (supervisor.num_hangs, supervisor.num_restarts, watch.num_lives) == (1, 1, 2)
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError, ChildFailed):
            await running
