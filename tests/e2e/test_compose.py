"""`docker compose up` from the repository's root: both images, their wiring, and a stream that outlives its engine.

Needs a Docker engine; without one these tests are skipped, and say so.
"""

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

ROOT = Path(__file__).parents[2]
FIRST_PORT = 18480
QUESTION = {"prompt": "The capital of France is", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
OVERRIDE = """
services:
  engine:
    environment:
      STREAMKV_DTYPE: float32
      STREAMKV_KV_CACHE_MEMORY_GIB: "0.5"
"""

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]


def has_docker() -> bool:
    try:
        return subprocess.run(["docker", "info"], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


class Composed:
    """The running services."""

    def __init__(self, override: Path) -> None:
        self._files = ["--project-name", "streamkv-test", "-f", str(ROOT / "compose.yaml"), "-f", str(override)]

    def run(self, *words: str, check: bool = True) -> str:
        environment = {**os.environ, "STREAMKV_PORT": f"{FIRST_PORT}-{FIRST_PORT + 9}"}
        done = subprocess.run(
            ["docker", "compose", *self._files, *words], env=environment, capture_output=True, text=True, cwd=ROOT
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout[-3000:]}{done.stderr[-6000:]}"
        return done.stdout

    def url(self, index: int = 1) -> str:
        """Of a gateway."""
        return "http://" + self.run("port", "--index", str(index), "gateway", "8000").strip()

    def engine_pid(self) -> int:
        """The host's number of the engine's process, the child of the container's first."""
        container = self.run("ps", "--quiet", "engine").strip()
        first = subprocess.run(
            ["docker", "inspect", "--format", "{{.State.Pid}}", container], capture_output=True, text=True, check=True
        ).stdout.strip()
        return int(Path(f"/proc/{first}/task/{first}/children").read_text().split()[0])

    def inside(self, service: str, code: str) -> str:
        return self.run("exec", "-T", service, "python3", "-c", code, check=False).strip()


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    if not has_docker():
        pytest.skip("no Docker engine answers here")
    override = tmp_path_factory.mktemp("compose") / "override.yaml"
    override.write_text(OVERRIDE)
    running = Composed(override)
    try:
        running.run("up", "--build", "--detach", "--wait", "--wait-timeout", "900", "--scale", "gateway=2")
        yield running
    finally:
        print(running.run("logs", "--tail", "60", check=False))
        running.run("down", "--volumes", "--timeout", "60", check=False)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


async def over_sse(session: aiohttp.ClientSession, url: str, started: asyncio.Event | None = None) -> str:
    text = ""
    async with session.post(url + "/v1/completions", json={**QUESTION, "stream": True}) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                text += event["choices"][0]["text"]
                if text and started is not None:
                    started.set()
    return text


async def receive(connection: aiohttp.ClientWebSocketResponse) -> dict[str, Any]:
    event: dict[str, Any] = json.loads((await connection.receive(timeout=240)).data)
    assert event["type"] != "error", event
    return event


async def rest_of(connection: aiohttp.ClientWebSocketResponse) -> str:
    text = ""
    while (event := await receive(connection))["type"] != "done":
        text += event.get("text", "")
    return text


async def test_it_serves_over_sse_and_websocket(composed: Composed, session: aiohttp.ClientSession) -> None:
    answers = [await over_sse(session, composed.url(index)) for index in (1, 2)]
    async with session.ws_connect(composed.url() + "/v1/stream") as connection:
        await connection.send_json({"type": "generate", "id": "a", **QUESTION})
        answers.append(await rest_of(connection))
    assert len(set(answers)) == 1 and "Paris" in answers[0]


async def test_a_killed_engine_is_started_again_in_its_container_and_streams_go_on(
    composed: Composed, session: aiohttp.ClientSession
) -> None:
    whole = await over_sse(session, composed.url())
    started = asyncio.Event()
    interrupted = asyncio.create_task(over_sse(session, composed.url(), started))
    await asyncio.wait_for(started.wait(), 120)
    pid = composed.engine_pid()
    os.kill(pid, signal.SIGKILL)
    assert await asyncio.wait_for(interrupted, 400) == whole
    assert composed.engine_pid() != pid


async def test_a_gateway_attaches_another_gateways_stream(composed: Composed, session: aiohttp.ClientSession) -> None:
    whole = await over_sse(session, composed.url())
    async with session.ws_connect(composed.url(1) + "/v1/stream") as connection:
        await connection.send_json({"type": "generate", "id": "a", "attach_grace_s": 120, **QUESTION})
        begun = await receive(connection)
        first = await receive(connection)
    async with session.ws_connect(composed.url(2) + "/v1/stream") as connection:
        attach = {"type": "attach", "id": "b", "stream_id": begun["stream_id"], "from_token": first["num_tokens"]}
        await connection.send_json(attach)
        assert first["text"] + await rest_of(connection) == whole


def test_the_containers_are_hardened_and_the_gateway_has_no_torch(composed: Composed) -> None:
    look = "import os; print(os.getuid(), os.access('/opt', os.W_OK), os.access('/etc/passwd', os.W_OK))"
    for service in ("engine", "gateway"):
        assert composed.inside(service, look) == "10001 False False"
        capabilities = composed.inside(service, "print(open('/proc/self/status').read())")
        assert "CapEff:\t0000000000000000" in capabilities and "NoNewPrivs:\t1" in capabilities
    has = "import importlib.util; print(*(importlib.util.find_spec(name) is not None for name in ('torch', 'engine')))"
    assert composed.inside("gateway", has) == "False False"
    assert composed.inside("engine", has) == "True True"


def test_a_stop_ends_both_with_status_0(composed: Composed) -> None:
    composed.run("stop", "--timeout", "60")
    time.sleep(0.5)
    states = [json.loads(line) for line in composed.run("ps", "--all", "--format", "json").splitlines()]
    assert [(state["Service"], state["ExitCode"]) for state in sorted(states, key=lambda each: each["Name"])] == [
        ("engine", 0),
        ("gateway", 0),
        ("gateway", 0),
    ]
