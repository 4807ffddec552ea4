"""A new engine in the place of the old one, asked for: no stream ends, no crash is counted."""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from gateway import keys, supervised_engine, supervisor
from gateway.supervisor import RESTART_SIGNAL, Supervisor
from streamkv.process import HAND_OVER_SIGNAL
from tests.support.running_gateway import VOCAB_SIZE, RunningGateway, eventually, running_gateway, small_tokenizer
from tests.support.scripted_engine import free_endpoint, serving
from tests.support.scripted_executor import ScriptedExecutor

PROMPT = list(range(30, 50))
MAKES_ROOM = """
import pathlib, signal, sys, time
def make_room(number, frame):
    with open(sys.argv[1], "a") as lives:
        lives.write("made room\\n")
    sys.exit(0)
signal.signal(signal.SIGRTMIN, make_room)
with open(sys.argv[1], "a") as lives:
    lives.write("began\\n")
time.sleep(60)
"""


def executor(**options: float) -> ScriptedExecutor:
    return ScriptedExecutor(vocab_size=VOCAB_SIZE, **options)  # type: ignore[arg-type]  # seconds


def body(num_tokens: int, **more: object) -> dict[str, object]:
    return {"prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, **more}


def text_of(num_tokens: int) -> str:
    return small_tokenizer().decode(executor().expected_tokens(PROMPT, num_tokens))


async def whole(gateway: RunningGateway, num_tokens: int) -> str:
    status, answer = await gateway.post("/v1/completions", body(num_tokens))
    assert status == 200, answer
    text: str = answer["choices"][0]["text"]
    return text


async def streamed(gateway: RunningGateway, num_tokens: int) -> str:
    events = await gateway.events("/v1/completions", body(num_tokens))
    assert events.reasons() == {0: ["length"]} and events.data.count("[DONE]") == 1
    return events.text()


async def test_streams_live_and_new_go_on_in_the_next_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.loop._FLUSH_LIMIT_S", 0.3)
    with_disk = {
        "preemption_mode": "swap",
        "host_kv_memory_gib": 1.0,
        "disk_kv_path": "there",
        "disk_kv_size_gib": 1.0,
    }
    slow = executor(step_s=0.004, num_host_blocks=100, num_disk_blocks=100, holds_transfers=True)
    with free_endpoint() as endpoint, serving(slow, endpoint, **with_disk) as first:
        async with running_gateway(endpoint) as gateway:
            # To be taken up again just when the engine makes room and listens to nobody any more
            cut = await gateway.session.post(
                gateway.url + "/v1/completions", json=body(150, stream=True, attach_grace_s=20)
            )
            had = await cut.content.readuntil(b"\n\n")
            live = [asyncio.create_task(make(gateway, 150)) for make in (whole, streamed, whole, streamed)]
            await eventually(lambda: gateway.app[keys.ENGINE].num_live == 5)
            first.loop.hand_over()
            await asyncio.sleep(0.1)
            cut.close()
            name = cut.headers["X-Stream-Id"]
            again = asyncio.create_task(rest_of(gateway, name, had))
            late = [asyncio.create_task(make(gateway, 30)) for make in (whole, streamed)]
            await asyncio.to_thread(first.join)
            with serving(executor(), endpoint):
                assert await asyncio.gather(*live) == [text_of(150)] * 4
                assert await asyncio.gather(*late) == [text_of(30)] * 2
                assert await again == text_of(150)
            figures = gateway.app[keys.METRICS]
            assert figures.outcomes["error"] == 0 and not gateway.app[keys.ADMISSION].shed


async def rest_of(gateway: RunningGateway, name: str, had: bytes) -> str:
    event_id = had.split(b"id: ")[1].split(b"\n")[0].decode()
    async with gateway.session.get(f"{gateway.url}/v1/streams/{name}", headers={"Last-Event-ID": event_id}) as response:
        assert response.status == 200, await response.text()
        raw = had + await response.read()
    events = [json.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b"data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])


async def test_a_child_is_asked_to_make_room_and_started_anew_without_back_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 60.0)
    lives = tmp_path / "lives"
    watched = Supervisor([sys.executable, "-c", MAKES_ROOM, str(lives)])
    running = asyncio.create_task(watched.run())
    try:
        for number in range(1, supervisor.MAX_FAILED_STARTS + 3):
            await eventually(lambda number=number: lives.exists() and lives.read_text().count("began") == number)  # type: ignore[misc]
            watched.restart()
            watched.restart()  # one is enough
        await eventually(lambda: lives.read_text().count("began") == supervisor.MAX_FAILED_STARTS + 3)
        assert lives.read_text().splitlines()[:2] == ["began", "made room"]
        assert not running.done() and watched.num_hangs == 0
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_what_is_asked_of_an_early_child_before_it_is_looked_after_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 60.0)
    lives = tmp_path / "lives"
    watched = Supervisor([sys.executable, "-c", MAKES_ROOM, str(lives)])
    watched.start_early()
    await eventually(lambda: lives.exists() and lives.read_text() == "began\n")
    watched.restart()
    running = asyncio.create_task(watched.run())
    try:
        await eventually(lambda: lives.read_text() == "began\nmade room\nbegan\n")
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_a_containers_first_process_gives_it_a_new_engine_and_ends_with_0(tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    running = asyncio.create_task(
        supervised_engine._run(Supervisor([sys.executable, "-c", MAKES_ROOM, str(lives)], stop_grace_s=5))
    )
    await eventually(lambda: lives.exists() and lives.read_text() == "began\n")
    os.kill(os.getpid(), RESTART_SIGNAL)
    await eventually(lambda: lives.read_text() == "began\nmade room\nbegan\n")
    assert not running.done()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 30) == 0


async def test_a_child_that_does_not_make_room_is_killed() -> None:
    deaf = "import signal, time; signal.signal(signal.SIGRTMIN, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    watched = Supervisor([sys.executable, "-c", deaf], stop_grace_s=0.5)
    watched.restart()  # there is none yet
    running = asyncio.create_task(watched.run())
    try:
        await eventually(lambda: watched.pid is not None)
        pid = watched.pid
        assert pid is not None
        until_s = time.monotonic() + 20
        while not _ignores(pid, HAND_OVER_SIGNAL):
            assert time.monotonic() < until_s
            await asyncio.sleep(0.02)
        watched.restart()
        await eventually(lambda: watched.pid not in (None, pid))
        assert watched.num_restarts == 1
    finally:
        running.cancel()
        await asyncio.wait([running])


def _ignores(pid: int, number: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = [line.split()[1] for line in lines if line.startswith("SigIgn:")]
    return bool(int(mask, 16) >> (number - 1) & 1)
