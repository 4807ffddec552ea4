"""`streamkv serve` as a user runs it, with the real model, and clients that read from it."""

import json
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.reference_model import reference_folder

CASES = json.loads((Path(__file__).parents[1] / "data" / "smol135m-greedy.json").read_text())["cases"]
SHORT = [case for case in CASES if len(case["prompt_token_ids"]) < 150]


@dataclass
class Served:
    """A running `streamkv serve`."""

    process: "subprocess.Popen[bytes]"
    url: str
    log: Path

    @property
    def engine_pid(self) -> int:
        """The child that is the engine."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (engine,) = [pid for pid in children if b"engine" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
        return int(engine)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def start(folder: Path, *flags: str) -> Served:
    port = free_port()
    log = folder / "log"
    command = [sys.executable, "-m", "streamkv", "serve", f"--port={port}", f"--model={reference_folder()}", *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    return Served(process, f"http://127.0.0.1:{port}", log)


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def wait_ready(served: Served, timeout_s: float = 90.0) -> None:
    until_s = time.monotonic() + timeout_s
    while b"Ready: " not in served.log.read_bytes():
        assert served.process.poll() is None and time.monotonic() < until_s, served.log.read_text()
        time.sleep(0.1)


def chat(case: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": case["messages"], "max_tokens": 48, "temperature": 0, **more}


async def over_sse(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[str, list[str]]:
    """Text and finish reasons of a streamed chat."""
    text, reasons = "", []
    async with session.post(url + "/v1/chat/completions", json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    text += choice["delta"].get("content", "")
                    reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    return text, reasons


async def over_websocket(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[str, list[str]]:
    """The same over the WebSocket."""
    text, reasons = "", []
    async with session.ws_connect(url + "/v1/stream") as connection:
        await connection.send_json({"type": "generate", "id": "a", **body})
        async for message in connection:
            event = json.loads(message.data)
            assert event["type"] != "error", event
            text += event["text"] if event["type"] == "delta" else ""
            reasons += [event["finish_reason"]] if event["type"] == "finished" else []
            if event["type"] == "done":
                break
    return text, reasons
