"""`--gateway-workers`: real processes on one port, in front of a scripted engine."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.worker_flags import split_worker_flags
from streamkv.errors import ConfigError
from tests.support.running_gateway import VOCAB_SIZE, eventually_async
from tests.support.scripted_engine import free_endpoint, serving
from tests.support.scripted_executor import ScriptedExecutor
from tests.support.small_tokenizers import CHATML, train_byte_level, write_folder

NUM_WORKERS = 2
BODY = {"prompt": "the quick brown", "max_tokens": 12, "temperature": 0}


@dataclass
class RunningCrew:
    process: asyncio.subprocess.Process
    url: str

    def worker_pids(self) -> list[int]:
        return [
            int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ]


def model_folder(folder: Path) -> Path:
    """As much of a model as a gateway reads."""
    model = folder / "model"
    write_folder(model, train_byte_level(), CHATML, eos_token="<|im_end|>")
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").touch()
    return model


@contextlib.asynccontextmanager
async def running_crew(folder: Path, endpoint: str, *flags: str) -> AsyncIterator[RunningCrew]:
    model = model_folder(folder)
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "gateway", f"--model={model}", "--port=0", f"--endpoint={endpoint}"],
        *[f"--gateway-workers={NUM_WORKERS}", "--heartbeat-s=0.2", *flags],
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        found = re.search(rb"at (http://\S+)", line)
        assert found, f"no announcement: {line!r}"
        yield RunningCrew(process, found[1].decode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


async def complete(url: str, **more: Any) -> tuple[int, dict[str, Any]]:
    """On a connection of its own, so that any worker may get it."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/completions", json={**BODY, **more}) as response,
    ):
        return response.status, await response.json()


async def figures(url: str) -> dict[str, float]:
    async with aiohttp.ClientSession() as session, session.get(url + "/metrics") as response:
        lines = [line for line in (await response.text()).splitlines() if line and not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


async def test_workers_share_the_port_the_engine_the_figures_and_outlive_each_other(tmp_path: Path) -> None:
    executor = ScriptedExecutor(vocab_size=VOCAB_SIZE)
    with serving(executor) as engine:
        async with running_crew(tmp_path, engine.endpoint) as crew:
            answers = await asyncio.gather(*(complete(crew.url) for _ in range(24)))
            assert {status for status, _ in answers} == {200}
            assert len({answer["choices"][0]["text"] for _, answer in answers}) == 1

            async def all_are_counted() -> bool:
                # Whichever worker is asked shows the sum: a scrape must not jump between the workers' own counts.
                return (await figures(crew.url))['streamkv_gateway_requests_total{outcome="length"}'] == 24

            await eventually_async(all_are_counted, 30)
            assert await all_are_counted() and await all_are_counted()

            pids = crew.worker_pids()
            assert len(pids) == NUM_WORKERS
            os.kill(pids[0], signal.SIGKILL)

            async def is_whole_again() -> bool:
                now = crew.worker_pids()
                return len(now) == NUM_WORKERS and pids[0] not in now

            await eventually_async(is_whole_again, 60)
            status, _ = await complete(crew.url)
            assert status == 200
            pids = crew.worker_pids()
            crew.process.terminate()
            assert await asyncio.wait_for(crew.process.wait(), 60) == 0
            assert all(is_gone(pid) for pid in pids)


async def test_limits_hold_and_streams_attach_across_workers(tmp_path: Path) -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE, step_s=0.02)) as engine:
        async with running_crew(tmp_path, engine.endpoint, "--max-concurrent=3") as crew:
            async with contextlib.AsyncExitStack() as stack:
                sockets = []
                for number in range(3):
                    session = await stack.enter_async_context(aiohttp.ClientSession())
                    socket = await stack.enter_async_context(session.ws_connect(crew.url + "/v1/stream"))
                    generate = {"type": "generate", "id": "a", **BODY, "max_tokens": 900, "attach_grace_s": 60}
                    await socket.send_json(generate)
                    begun = json.loads((await socket.receive(timeout=30)).data)
                    assert begun["type"] == "started", (number, begun)
                    sockets.append((socket, begun["stream_id"]))
                refused = await asyncio.gather(*(complete(crew.url) for _ in range(8)))
                assert {status for status, _ in refused} == {429}, "at every worker"

                # Each stream is taken up from new connections until another worker has got it once.
                for socket, stream_id in sockets:
                    async with aiohttp.ClientSession() as session:
                        taker = await session.ws_connect(crew.url + "/v1/stream")
                        await taker.send_json({"type": "attach", "id": "b", "stream_id": stream_id, "from_token": 0})
                        event = json.loads((await taker.receive(timeout=30)).data)
                        assert (event["type"], event["from_token"]) == ("started", 0)
                        await taker.send_json({"type": "cancel", "id": "b"})
                        while event["type"] != "done":
                            event = json.loads((await taker.receive(timeout=30)).data)
                    while event.get("cause") != "attached_elsewhere":
                        event = json.loads((await socket.receive(timeout=30)).data)

            async def is_let_in() -> bool:
                return (await complete(crew.url))[0] == 200

            await eventually_async(is_let_in, 30)


async def test_a_taken_port_ends_with_an_error(tmp_path: Path) -> None:
    with free_endpoint() as endpoint:
        async with running_crew_without_engine(tmp_path, endpoint) as (process, port):
            second = await asyncio.create_subprocess_exec(
                *[sys.executable, "-m", "gateway", f"--port={port}", f"--endpoint={endpoint}", "--gateway-workers=2"],
                stderr=asyncio.subprocess.PIPE,
            )
            _, errors = await asyncio.wait_for(second.communicate(), 60)
            assert second.returncode == 1 and b"cannot listen" in errors
            assert process.returncode is None


async def test_what_no_gateway_can_start_with_ends_the_server(tmp_path: Path) -> None:
    with free_endpoint() as endpoint:
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "gateway", f"--model={model_folder(tmp_path)}", "--port=0", "--gateway-workers=2"],
            *[f"--endpoint={endpoint}", "--chat-template=/nowhere/a.jinja"],
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert (
        process.returncode == 2 and b"chat_template: /nowhere/a.jinja" in errors and b"refused its settings" in errors
    )


@contextlib.asynccontextmanager
async def running_crew_without_engine(
    folder: Path, endpoint: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "gateway", f"--model={model_folder(folder)}", "--port=0", f"--endpoint={endpoint}"],
        "--gateway-workers=2",
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        port = b""
        while b"num_api_keys" not in (line := await asyncio.wait_for(process.stderr.readline(), 60)):  # a worker's line
            found = re.search(rb"url=http://127.0.0.1:(\d+) num_workers=2", line)
            port = found[1] if found else port
        yield process, int(port)
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize("flags", [["--as-worker"], ["--as-worker", "/x"], ["--as-worker", "/x", "y"]])
def test_the_worker_s_marker_is_not_for_people(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match="--gateway-workers"):
        split_worker_flags(["--port=1", *flags])
    assert split_worker_flags(["--port=1"]) == (["--port=1"], None)
    assert split_worker_flags(["--port=1", "--as-worker", "/x", "3"]) == (["--port=1"], ("/x", 3))
