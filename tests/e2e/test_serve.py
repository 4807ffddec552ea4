"""The product as a user runs it: `streamkv serve` with the real model, its two processes, real sockets."""

import asyncio
import fcntl
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.oracle import SampledCase, read_sampled_cases
from tests.support.served import SHORT, Served, chat, is_gone, over_sse, over_websocket, start, wait_ready

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    running = start(tmp_path_factory.mktemp("serve"), "--dtype=float32", "--kv-cache-memory-gib=0.5")
    try:
        wait_ready(running)
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


async def test_streamed_chats_are_the_oracles_text(served: Served, session: aiohttp.ClientSession) -> None:
    cases = SHORT[:1] + SHORT[-2:]
    bodies = [chat(case, ignore_eos=True, skip_special_tokens=False) for case in cases]
    by_sse = asyncio.gather(*(over_sse(session, served.url, body) for body in bodies))
    by_socket = asyncio.gather(*(over_websocket(session, served.url, body) for body in bodies))
    assert await by_sse == [(case["text_all"], ["length"]) for case in cases]
    assert await by_socket == await by_sse


async def test_all_at_once_give_the_oracles_tokens(served: Served, session: aiohttp.ClientSession) -> None:
    async def tokens(case: dict[str, Any]) -> tuple[list[int], list[int]]:
        body = chat(case, ignore_eos=True, return_token_ids=True)
        async with session.post(served.url + "/v1/chat/completions", json=body) as response:
            answer = await response.json()
            return answer["prompt_token_ids"], answer["choices"][0]["token_ids"]

    cases = SHORT[1:6]
    answers = await asyncio.gather(*(tokens(case) for case in cases))
    assert answers == [(case["prompt_token_ids"], case["token_ids"]) for case in cases]


async def test_end_of_sequence_ends_the_answer(served: Served, session: aiohttp.ClientSession) -> None:
    case = next(case for case in SHORT if case["eos_index"] is not None)
    assert await over_sse(session, served.url, chat(case)) == (case["text_until_eos"], ["stop"])


async def test_a_killed_engine_does_not_show_in_the_streams(served: Served, session: aiohttp.ClientSession) -> None:
    """Greedy ones and sampled ones, with penalties and two choices, too."""
    shown = {"ignore_eos": True, "skip_special_tokens": False}
    sampled = read_sampled_cases()[3:5]
    prompts = {case["name"]: case for case in SHORT}

    async def choices(case: SampledCase) -> list[list[int]]:
        body = chat(prompts[case.name], n=2, seed=case.seed, return_token_ids=True, **case.settings, **shown)
        async with session.post(served.url + "/v1/chat/completions", json=body) as response:
            return [choice["token_ids"] for choice in (await response.json())["choices"]]

    bodies = [chat(case, **shown) for case in SHORT[:3]]
    requests = [
        asyncio.create_task(over_sse(session, served.url, bodies[0])),
        asyncio.create_task(over_websocket(session, served.url, bodies[1])),
        asyncio.create_task(over_sse(session, served.url, bodies[2])),
        *(asyncio.create_task(choices(case)) for case in sampled),
    ]
    engine_pid = served.engine_pid
    until_s = time.monotonic() + 20

    async def has_tokens() -> bool:
        async with session.get(served.url + "/metrics") as response:
            text = await response.text()
        lines = [line for line in text.splitlines() if line.startswith("streamkv_gateway_live_streams ")]
        return float(lines[0].split()[1]) == len(requests)

    while not await has_tokens():
        assert time.monotonic() < until_s
    await asyncio.sleep(0.15)
    assert not any(request.done() for request in requests), "nothing was left to interrupt"
    os.kill(engine_pid, signal.SIGKILL)
    answers = await asyncio.wait_for(asyncio.gather(*requests), 90)
    assert answers == [
        *((case["text_all"], ["length"]) for case in SHORT[:3]),
        *(case.token_ids for case in sampled),
    ]
    assert served.engine_pid != engine_pid


def test_idle_processes_use_no_cpu(served: Served) -> None:
    def cpu_s(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    pids = (served.process.pid, served.engine_pid)
    time.sleep(0.5)
    before = [cpu_s(pid) for pid in pids]
    time.sleep(3.0)
    used = [cpu_s(pid) - was for pid, was in zip(pids, before, strict=True)]
    assert max(used) < 0.06, f"gateway and engine used {used} s of CPU in 3 s of idling"


async def test_ctrl_c_ends_both_and_says_goodbye_to_live_streams(
    served: Served, session: aiohttp.ClientSession
) -> None:
    engine_pid = served.engine_pid
    live = asyncio.create_task(
        over_sse(session, served.url, chat(SHORT[0], ignore_eos=True, skip_special_tokens=False))
    )
    await asyncio.sleep(0.1)
    served.process.send_signal(signal.SIGINT)
    assert await live == (SHORT[0]["text_all"], ["length"]), "a live stream was not let finish"
    code = await asyncio.to_thread(served.process.wait, 20)
    assert code == 0, served.log.read_text()
    assert is_gone(engine_pid)
    assert b"Traceback" not in served.log.read_bytes(), served.log.read_text()


async def test_a_restarted_server_finds_its_prompts_on_disk(tmp_path: Path, session: aiohttp.ClientSession) -> None:
    case = SHORT[0]
    cached: list[int] = []
    flags = ("--dtype=float32", "--kv-cache-memory-gib=0.2", "--max-num-batched-tokens=64", "--host-kv-memory-gib=0.1")
    for _ in range(2):
        running = start(tmp_path, *flags, f"--disk-kv-path={tmp_path / 'kv'}", "--preemption-mode=swap")
        try:
            await asyncio.to_thread(wait_ready, running)
            async with session.post(running.url + "/v1/chat/completions", json=chat(case, max_tokens=8)) as response:
                answer = await response.json()
            assert case["text_all"].startswith(answer["choices"][0]["message"]["content"])
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            running.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(running.process.wait, 20) == 0, running.log.read_text()
        finally:
            running.process.kill()
            running.process.wait()
    num_prompt = len(case["prompt_token_ids"])
    assert cached == [0, num_prompt - 1], running.log.read_text()


async def test_a_stream_that_nobody_reads_does_not_hold_up_the_end(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    """The engine is asked last, and would go on for it until it is killed, and its cache would be lost."""
    kept = tmp_path / "kv"
    flags = ("--host-kv-memory-gib=0.1", f"--disk-kv-path={kept}", "--shutdown-grace-s=0.5")
    running = start(tmp_path, *flags)
    try:
        await asyncio.to_thread(wait_ready, running)
        body = chat(SHORT[0], max_tokens=4000, ignore_eos=True, stream=True, attach_grace_s=60)
        async with session.post(running.url + "/v1/chat/completions", json=body) as response:
            await response.content.readline()
            response.close()
        running.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(running.process.wait, 30) == 0, running.log.read_text()
    finally:
        running.process.kill()
        running.process.wait()
    assert b"killed" not in running.log.read_bytes(), running.log.read_text()
    assert sum(path.is_file() and path.stat().st_size > 10_000 for path in kept.rglob("*")), "nothing was written"


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    running = start(tmp_path)
    try:
        while b"engine started" not in running.log.read_bytes():
            assert running.process.poll() is None
            time.sleep(0.05)
        engine_pid = running.engine_pid
        running.process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(10) == 0
        assert is_gone(engine_pid)
    finally:
        running.process.kill()
        running.process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_server_that_is_asked_to_end_while_it_starts_ends_with_0_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    # The tests themselves may run under nohup, which a server heeds.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    running = start(tmp_path)
    signal.signal(signal.SIGHUP, before)
    try:
        children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children")
        while not children.read_text():  # the engine is the first, before the front end is loaded
            assert running.process.poll() is None
            time.sleep(0.01)
        engine_pid = int(children.read_text())
        running.process.send_signal(number)
        assert running.process.wait(20) == 0, running.log.read_text()
        assert is_gone(engine_pid)
    finally:
        running.process.kill()
        running.process.wait()


def test_an_endpoint_that_another_engine_has_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """Its gateway would announce the other's engine, and start its own in vain for ever."""
    path = tmp_path / "engine.sock"
    with Path(f"{path}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        running = start(tmp_path, f"--endpoint=ipc://{path}")
        assert running.process.wait(30) == 2
    told = running.log.read_text()
    assert "endpoint: another engine runs on" in told and "Ready: " not in told


def test_a_wrong_setting_ends_with_2_before_anything_starts(tmp_path: Path) -> None:
    running = start(tmp_path, "--port=99999")
    assert running.process.wait(30) == 2
    assert "port" in running.log.read_text()


def test_a_model_that_is_not_there_ends_with_an_error(tmp_path: Path) -> None:
    running = start(tmp_path, f"--model={tmp_path / 'nothing.gguf'}")
    try:
        assert running.process.wait(60) != 0
        assert "nothing.gguf" in running.log.read_text()
    finally:
        running.process.kill()
        running.process.wait()


def test_a_taken_port_ends_with_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        running = start(tmp_path, f"--port={holder.getsockname()[1]}")
        try:
            assert running.process.wait(30) == 1
            assert "cannot listen" in running.log.read_text()
        finally:
            running.process.kill()
            running.process.wait()
