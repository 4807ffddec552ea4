"""The gateway behind a real nginx, with the lines of docs/proxies.md and with nothing but its defaults."""

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway import keys
from gateway.routes import websocket
from streamkv.client import Client
from tests.support.running_gateway import (
    VOCAB_SIZE,
    RunningGateway,
    eventually,
    eventually_async,
    running_gateway,
    small_tokenizer,
)
from tests.support.scripted_engine import serving
from tests.support.scripted_executor import ScriptedExecutor

NGINX = shutil.which("nginx") or "/usr/sbin/nginx"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not os.access(NGINX, os.X_OK), reason="nginx is not installed (Debian package nginx)"),
]
DOCUMENTED = re.findall(
    r"```nginx\n(.*?)```", (Path(__file__).parents[2] / "docs" / "proxies.md").read_text(encoding="utf-8"), re.DOTALL
)[0]
DEFAULTS = "server { listen 8080; location / { proxy_pass http://127.0.0.1:8000; } }"
PROMPT = list(range(30, 50))
BODY = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "stream": True}
TEXT = "/v1/completions"


class Gate:
    """An engine's `sleep`: each step waits until it is let through."""

    def __init__(self) -> None:
        self._steps = threading.Semaphore(0)
        self._is_open = False

    def wait(self, _seconds: float) -> None:
        if not self._is_open:
            self._steps.acquire()

    def let(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._steps.release()

    def open(self) -> None:
        self._is_open = True
        self._steps.release(1000)


def text_of(num_tokens: int) -> str:
    return small_tokenizer().decode(ScriptedExecutor(vocab_size=VOCAB_SIZE).expected_tokens(PROMPT, num_tokens))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class Nginx:
    """One as a child of the test."""

    def __init__(self, folder: Path, server: str, gateway_url: str, extra: str = "") -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        server = server.replace("listen 8080", f"listen 127.0.0.1:{self.port}")
        server = server.replace("127.0.0.1:8000", gateway_url.removeprefix("http://"))
        assert str(self.port) in server and gateway_url.removeprefix("http://") in server
        temp = " ".join(
            f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        self._folder = folder
        user = "user root;" if os.geteuid() == 0 else ""
        (folder / "nginx.conf").write_text(
            f"daemon off; {user} pid {folder}/nginx.pid; error_log {folder}/error.log; worker_processes 1;\n"
            f"events {{}}\nhttp {{ access_log off; {temp}\n{extra}\n{server}\n}}\n"
        )
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        self._process = await asyncio.to_thread(self._run)

        async def answers() -> bool:
            assert self._process is not None and self._process.poll() is None, (self._folder / "error.log").read_text()
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                return False
            writer.close()
            return True

        await eventually_async(answers, 20.0)

    def _run(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([NGINX, "-p", self._folder, "-c", self._folder / "nginx.conf"])

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


@contextmanager
def gated_engine() -> Iterator[tuple[str, Gate]]:
    gate = Gate()
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE, step_s=1.0, sleep=gate.wait)) as engine:
        try:
            yield engine.endpoint, gate
        finally:
            gate.open()


@asynccontextmanager
async def proxied(
    folder: Path, server: str, extra: str = "", **settings: Any
) -> AsyncIterator[tuple[RunningGateway, Gate, Nginx]]:
    with gated_engine() as (endpoint, gate):
        async with running_gateway(endpoint, **settings) as gateway:
            nginx = Nginx(folder, server, gateway.url, extra)
            try:
                await nginx.start()
                yield gateway, gate, nginx
            finally:
                gate.open()
                nginx.stop()


async def text_of_event(response: aiohttp.ClientResponse) -> str:
    """The text of the next event that has any data."""
    while True:
        block = await asyncio.wait_for(response.content.readuntil(b"\n\n"), 30)
        for line in block.split(b"\n"):
            if line.startswith(b"data: {"):
                return "".join(choice["text"] for choice in json.loads(line[6:])["choices"])


@pytest.mark.parametrize("server", [DEFAULTS, DOCUMENTED], ids=["defaults", "documented"])
async def test_events_come_one_by_one(tmp_path: Path, server: str) -> None:
    """Each one has arrived before the engine may compute the next."""
    async with proxied(tmp_path, server) as (gateway, gate, nginx):
        gate.let(1)
        body = {**BODY, "return_token_ids": True}  # each token has an event, also where it has no text yet
        async with gateway.session.post(nginx.url + TEXT, json=body) as response:
            assert response.status == 200 and response.headers["Content-Type"].startswith("text/event-stream")
            text = await text_of_event(response) + await text_of_event(response)  # with the prompt's ids, and the first
            for number in range(2, 12):
                assert gateway.app[keys.GENERATION].num_live == 1
                assert len(text) <= len(text_of(number))
                gate.let(1)
                text += await text_of_event(response)
            gate.open()
            rest = (await response.read()).decode()
    for line in rest.split("\n"):
        if line.startswith("data: {"):
            text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
    assert text == text_of(12) and rest.endswith("data: [DONE]\n\n")


async def test_a_whole_answer_and_a_refusal_come_through(tmp_path: Path) -> None:
    async with proxied(tmp_path, DOCUMENTED) as (gateway, gate, nginx):
        gate.open()
        async with gateway.session.post(nginx.url + TEXT, json={**BODY, "stream": False}) as response:
            assert (await response.json())["choices"][0]["text"] == text_of(12)
        async with gateway.session.post(nginx.url + TEXT, json={**BODY, "temperature": 9}) as response:
            assert response.status == 400 and (await response.json())["error"]["param"] == "temperature"


async def test_a_websocket_comes_through_with_the_documented_lines(tmp_path: Path) -> None:
    async with proxied(tmp_path, DOCUMENTED) as (gateway, gate, nginx):
        origin = {"Origin": nginx.url}  # as a browser's page from there sends it
        async with gateway.session.ws_connect(nginx.url + "/v1/stream", headers=origin) as connection:
            gate.let(1)
            await connection.send_json({"type": "generate", "id": "a", **BODY})
            assert (await connection.receive_json(timeout=30))["type"] == "started"
            text = (await connection.receive_json(timeout=30))["text"]
            assert gateway.app[keys.GENERATION].num_live == 1
            gate.open()
            while (event := await connection.receive_json(timeout=30))["type"] != "done":
                text += event["text"] if event["type"] == "delta" else ""
    assert text == text_of(12)


async def test_without_those_lines_a_websocket_does_not(tmp_path: Path) -> None:
    async with proxied(tmp_path, DEFAULTS) as (gateway, _, nginx):
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await gateway.session.ws_connect(nginx.url + "/v1/stream")


@pytest.mark.parametrize("is_before_the_first_token", [True, False])
async def test_a_long_silence_outlasts_the_read_timeout(tmp_path: Path, is_before_the_first_token: bool) -> None:
    async with proxied(tmp_path, DOCUMENTED, "proxy_read_timeout 1s;", keepalive_s=0.3) as (gateway, gate, nginx):
        gate.let(0 if is_before_the_first_token else 3)
        async with gateway.session.post(nginx.url + TEXT, json=BODY) as response:
            raw = b""
            while raw.count(b": keep-alive\n") < 12:
                raw += await asyncio.wait_for(response.content.readany(), 30)
            gate.open()
            raw += await response.read()
    assert raw.endswith(b"data: [DONE]\n\n")


async def test_without_comments_the_same_silence_ends_it(tmp_path: Path) -> None:
    """So the comments are what the test before this one is about."""
    async with proxied(tmp_path, DOCUMENTED, "proxy_read_timeout 1s;", keepalive_s=60) as (gateway, gate, nginx):
        async with gateway.session.post(nginx.url + TEXT, json=BODY) as response:
            assert response.status == 504
        gate.open()


async def test_a_silent_websocket_outlasts_the_read_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "_PING_S", 0.3)
    async with (
        proxied(tmp_path, DOCUMENTED, "proxy_read_timeout 1s;") as (gateway, gate, nginx),
        gateway.session.ws_connect(nginx.url + "/v1/stream", autoping=False) as connection,
    ):
        await connection.send_json({"type": "generate", "id": "a", **BODY})
        num_pings = 0
        while True:
            message = await connection.receive(timeout=30)
            if message.type is aiohttp.WSMsgType.PING:
                num_pings += 1
                await connection.pong(message.data)
                if num_pings == 10:
                    gate.open()
            else:
                assert message.type is aiohttp.WSMsgType.TEXT, message
                if json.loads(message.data)["type"] == "done":
                    break
    assert num_pings >= 10


async def test_who_hangs_up_at_the_proxy_hangs_up_at_the_gateway(tmp_path: Path) -> None:
    async with proxied(tmp_path, DOCUMENTED) as (gateway, gate, nginx):
        gate.let(2)
        async with gateway.session.post(nginx.url + TEXT, json={**BODY, "max_tokens": 1000}) as response:
            await text_of_event(response)
            response.close()
        await eventually(lambda: gateway.app[keys.GENERATION].num_live == 0, 30.0)
        async with gateway.session.ws_connect(nginx.url + "/v1/stream") as connection:
            await connection.send_json({"type": "generate", "id": "a", **BODY})
            await connection.receive_json(timeout=30)
        await eventually(lambda: gateway.app[keys.GENERATION].num_live == 0, 30.0)
        gate.open()

        async def is_idle() -> bool:
            return (await gateway.metrics())["num_allocated_blocks"] == 0

        await eventually_async(is_idle, 30.0)


async def test_a_restart_of_the_proxy_is_only_a_pause(tmp_path: Path) -> None:
    async with proxied(tmp_path, DOCUMENTED) as (gateway, gate, nginx), Client(nginx.url) as client:

        async def read() -> str:
            return "".join([delta.text async for delta in client.stream({**BODY, "max_tokens": 60})])

        reading = asyncio.create_task(read())
        gate.let(20)
        await eventually(lambda: gateway.app[keys.ENGINE].num_tokens >= 20, 30.0)
        nginx.stop()
        gate.let(20)
        await eventually(lambda: gateway.app[keys.ENGINE].num_tokens >= 40, 30.0)
        await nginx.start()
        gate.open()
        assert await asyncio.wait_for(reading, 30) == text_of(60)
