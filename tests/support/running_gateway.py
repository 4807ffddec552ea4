"""The real gateway on a port of its own, inside the test's event loop, with a small trained tokenizer."""

import asyncio
import contextlib
import functools
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from gateway.access_log import AccessLog
from gateway.app import Server, make_app
from gateway.auth import ApiKeys
from gateway.tokenizer import Tokenizer
from gateway.tracing import Tracing
from streamkv.config import GatewayConfig
from tests.support.small_tokenizers import CHATML, train_byte_level, write_folder

VOCAB_SIZE = 420
MODEL = "scripted"


@functools.cache
def small_tokenizer() -> Tokenizer:
    """Byte-level, VOCAB_SIZE tokens; special ones at 0, 1, 2 (end of sequence)."""
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.load(write_folder(Path(folder) / "model", train_byte_level(), CHATML, eos_token="<|im_end|>"))


class RunningGateway:
    """An open gateway and a client session for it."""

    def __init__(self, app: web.Application, server: Server, session: aiohttp.ClientSession) -> None:
        self.app = app
        self.server = server
        self.session = session
        self.url = server.url

    async def post(self, path: str, body: object, **options: Any) -> tuple[int, dict[str, Any]]:
        """Status and JSON of an answer. A body that is bytes goes out as it is."""
        data = body if isinstance(body, bytes) else json.dumps(body)
        headers = {"Content-Type": "application/json", **options.pop("headers", {})}
        async with self.session.post(self.url + path, data=data, headers=headers, **options) as response:
            return response.status, json.loads(await response.read())

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.text()

    async def events(self, path: str, body: Mapping[str, object]) -> "Events":
        """A whole stream, read to its end."""
        data = json.dumps({**body, "stream": True})
        headers = {"Content-Type": "application/json"}
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            raw = await response.read()
            return Events(response.status, dict(response.headers), raw)

    async def metrics(self, key: str = "") -> dict[str, float]:
        """Sample → value."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with self.session.get(self.url + "/metrics", headers=headers) as response:
            text = await response.text()
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        return {line.rpartition(" ")[0].removeprefix("streamkv_"): float(line.rpartition(" ")[2]) for line in lines}

    async def wait_ready(self, timeout_s: float = 20.0) -> None:
        await eventually_async(lambda: self._status("/ready", 200), timeout_s)

    async def _status(self, path: str, status: int) -> bool:
        return (await self.get(path))[0] == status


class Events:
    """The events of an SSE answer."""

    def __init__(self, status: int, headers: dict[str, str], raw: bytes) -> None:
        self.status = status
        self.headers = headers
        self.raw = raw
        lines = raw.decode().split("\n")
        self.data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        self.objects: list[dict[str, Any]] = [json.loads(data) for data in self.data if data != "[DONE]"]

    def text(self, index: int = 0) -> str:
        return "".join(self._deltas(index))

    def _deltas(self, index: int) -> list[str]:
        return [
            choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            for event in self.objects
            for choice in event.get("choices", [])
            if choice["index"] == index
        ]

    def deltas(self, index: int = 0) -> list[str]:
        """Texts that are not empty."""
        return [text for text in self._deltas(index) if text]

    def reasons(self) -> dict[int, list[str]]:
        """Every finish reason of every choice."""
        found: dict[int, list[str]] = {}
        for event in self.objects:
            for choice in event.get("choices", []):
                if choice["finish_reason"] is not None:
                    found.setdefault(choice["index"], []).append(choice["finish_reason"])
        return found

    @property
    def usage(self) -> dict[str, Any] | None:
        found = [event["usage"] for event in self.objects if event.get("usage")]
        return found[-1] if found else None


@contextlib.asynccontextmanager
async def running_gateway(
    endpoint: str,
    load_tokenizer: Callable[[], Tokenizer] = small_tokenizer,
    *,
    is_ready: bool = True,
    api_keys: ApiKeys | None = None,
    access_log: AccessLog | None = None,
    tracing: Tracing | None = None,
    **settings: Any,
) -> AsyncIterator[RunningGateway]:
    """A gateway for the engine at `endpoint`; with is_ready it takes work already. `settings`: of GatewayConfig."""
    config = GatewayConfig(**{"port": 0, "heartbeat_s": 0.2, "startup_wait_s": 20.0, **settings})
    app = make_app(config, load_tokenizer, endpoint=endpoint, api_keys=api_keys, access_log=access_log, tracing=tracing)
    server = Server(app)
    await server.start("127.0.0.1", 0)
    connector = aiohttp.TCPConnector(limit=0)
    try:
        async with aiohttp.ClientSession(connector=connector) as session:
            gateway = RunningGateway(app, server, session)
            if is_ready:
                await gateway.wait_ready()
            yield gateway
    finally:
        await server.close()


async def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait until it holds; fails the test when that takes too long."""
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, "the condition did not come true in time"
        await asyncio.sleep(0.01)


async def eventually_async(condition: Callable[[], Any], timeout_s: float = 30.0) -> None:
    """The same for a condition that is awaited."""
    until_s = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < until_s, "the condition did not come true in time"
        await asyncio.sleep(0.02)
