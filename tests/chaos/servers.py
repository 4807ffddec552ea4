"""One engine under its supervisor, and two gateways in front of it, each a process of its own that can be killed."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from tests.support.reference_model import reference_folder
from tests.support.served import Served, free_port

STOP_LIMIT_S = 120.0
NUM_GATEWAYS = 2


@dataclass
class Gateway:
    """One that clients reach at `url`, whichever process serves there at the moment."""

    url: str
    command: list[str]
    log: Path
    process: "subprocess.Popen[bytes]"
    num_kills: int = 0
    is_down: bool = False
    """It was killed, and the one that takes its place does not answer yet."""
    streams: set[object] = field(default_factory=set)
    """Clients that have a stream here which they could take up elsewhere."""


class Servers:
    """The processes of one run. `away` are clients whose gateway was killed and who have not come back anywhere."""

    def __init__(self, folder: Path, engine_flags: list[str], gateway_flags: list[str]) -> None:
        self.endpoint = f"ipc://{folder}/engine.sock"
        self._logs: list[Path] = []
        log = self._log(folder / "engine.log")
        supervised = [*_streamkv("engine"), "--supervise", f"--endpoint={self.endpoint}", *engine_flags]
        self.engine = Served(_start(supervised, log), "", log)
        self.gateways: list[Gateway] = []
        for number in range(NUM_GATEWAYS):
            port, log = free_port(), self._log(folder / f"gateway{number}.log")
            command = [*_streamkv("gateway"), f"--port={port}", f"--endpoint={self.endpoint}", *gateway_flags]
            self.gateways.append(Gateway(f"http://127.0.0.1:{port}", command, log, _start(command, log)))
        self.away: set[object] = set()

    def _log(self, path: Path) -> Path:
        self._logs.append(path)
        return path

    async def wait_ready(self, session: aiohttp.ClientSession, limit_s: float) -> None:
        for gateway in self.gateways:
            await self._wait_for(gateway, session, "/ready", limit_s)

    async def _wait_for(self, gateway: Gateway, session: aiohttp.ClientSession, path: str, limit_s: float) -> None:
        until_s = time.monotonic() + limit_s
        while True:
            try:
                async with session.get(gateway.url + path) as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            assert gateway.process.poll() is None and time.monotonic() < until_s, self.told()
            await asyncio.sleep(0.2)

    async def kill(self, gateway: Gateway, session: aiohttp.ClientSession, pause_s: float, limit_s: float) -> None:
        """End a gateway without a word, and start another one in its place after a while."""
        gateway.num_kills += 1
        gateway.is_down = True
        self.away |= gateway.streams
        gateway.process.kill()
        await asyncio.to_thread(gateway.process.wait)
        await asyncio.sleep(pause_s)
        gateway.process = _start(gateway.command, gateway.log)
        await self._wait_for(gateway, session, "/health", limit_s)
        gateway.is_down = False

    def moved(self, client: object, to: Gateway | None) -> None:
        """A client's stream is at a gateway now; None: it is over, or was never to be taken up again."""
        self.away.discard(client)
        for gateway in self.gateways:
            gateway.streams.discard(client)
        if to is not None:
            to.streams.add(client)

    def stop(self) -> list[str]:
        """Ask all to end, gateways first. Returns what was not as it should be."""
        faults = []
        for name, process in self._processes():
            process.send_signal(signal.SIGTERM)
            code = process.wait(STOP_LIMIT_S)
            if code != 0:
                faults.append(f"{name} ended with {code}")
        if "Traceback" in self.told():
            faults.append("a log has a traceback")
        return [f"{fault}; the logs:\n{self.told()}" for fault in faults]

    def _processes(self) -> "list[tuple[str, subprocess.Popen[bytes]]]":
        gateways = [(gateway.url, gateway.process) for gateway in self.gateways]
        return [*gateways, ("the engine's supervisor", self.engine.process)]

    def kill_all(self) -> None:
        for _, process in self._processes():
            process.kill()
            process.wait()

    def told(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-5000:]}" for path in self._logs)


def _streamkv(command: str) -> list[str]:
    return [sys.executable, "-m", "streamkv", command, f"--model={reference_folder()}"]


def _start(command: list[str], log: Path) -> "subprocess.Popen[bytes]":
    with log.open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=os.environ)
