"""One run: an engine with the real model, two gateways, many clients, and faults until the time is over; then the
count."""

import asyncio
import contextlib
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from tests.chaos.clients import Client
from tests.chaos.faults import Nonsense, ServerFaults
from tests.chaos.report import Report
from tests.chaos.servers import Gateway, Servers

START_LIMIT_S = 240.0
FINISH_LIMIT_S = 420.0
"""For the streams that live when the faults are over; an engine may have to start first."""
IDLE_LIMIT_S = 200.0
"""Until nothing is left of streams that were abandoned, whose grace period runs on."""
IDLE_GAUGES = (
    "num_live_streams", "num_detached_streams", "num_running_requests", "num_waiting_requests", "num_paused_requests",
    "num_running_sequences", "num_waiting_sequences", "num_paused_sequences", "num_in_transfer_blocks",
    "gateway_live_streams", "gateway_waiting_for_engine", "gateway_websockets",
)  # fmt: skip
TOLD = ("engine_restarts_total", "gateway_resubmitted_total", "gateway_attached_streams_total",
        "gateway_slow_reader_pauses_total", "gateway_refused_total")  # fmt: skip


async def run(seed: int, seconds: float, num_streams: int) -> Report:
    """A whole run on servers of its own, in a folder that goes away."""
    report = Report(seed, num_streams)
    folder = Path(tempfile.mkdtemp(prefix="skv-chaos-", dir="/tmp"))
    engine_flags = [
        "--dtype=float32", "--kv-cache-memory-gib=0.5", "--host-kv-memory-gib=0.25", "--preemption-mode=swap",
        f"--disk-kv-path={folder / 'kv'}", "--disk-kv-size-gib=0.5", "--max-num-seqs=128", "--threads=1",
        "--gateway-timeout-s=20", "--log-level=warning",
    ]  # fmt: skip
    gateway_flags = [
        "--engine-timeout-s=10", "--startup-wait-s=240", "--request-timeout-s=900", "--max-stream-buffer-bytes=4096",
        "--log-level=warning",
    ]  # fmt: skip
    servers = await asyncio.to_thread(Servers, folder, engine_flags, gateway_flags)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=None)
    connector = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_with_small_buffer)
    try:
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2048) as session:
            await servers.wait_ready(session, START_LIMIT_S)
            begun = time.monotonic()
            await _disturb(servers, session, seconds, report)
            report.seconds = time.monotonic() - begun
        for fault in await asyncio.to_thread(servers.stop):
            report.violate(fault)
        return report
    finally:
        servers.kill_all()
        shutil.rmtree(folder, ignore_errors=True)


async def _disturb(servers: Servers, session: aiohttp.ClientSession, seconds: float, report: Report) -> None:
    async def figures(gateway: Gateway) -> dict[str, float]:
        async with session.get(gateway.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        pairs = [line.rpartition(" ") for line in lines if line and not line.startswith("#")]
        return {name.removeprefix("streamkv_"): float(value) for name, _, value in pairs}

    at_start = await figures(servers.gateways[0])
    is_over, faults_over = asyncio.Event(), asyncio.Event()
    clients = [
        asyncio.create_task(Client(servers, session, f"client {number}", report).run(is_over))
        for number in range(report.num_streams)
    ]
    faults = [
        asyncio.create_task(ServerFaults(servers, session, report).run(faults_over)),
        asyncio.create_task(Nonsense(servers, session, report).run(faults_over)),
        *(asyncio.create_task(_stay_healthy(each, session, faults_over, report)) for each in servers.gateways),
    ]
    await asyncio.wait([*clients, *faults], timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    is_over.set()
    faults_over.set()
    _, unfinished = await asyncio.wait([*clients, *faults], timeout=FINISH_LIMIT_S)
    for task in unfinished:
        report.violate(f"a stream did not end in {FINISH_LIMIT_S:.0f} s")
        task.cancel()
    for result in await asyncio.gather(*clients, *faults, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            report.violate(f"the test itself failed: {result!r}")
    until_s = time.monotonic() + IDLE_LIMIT_S
    while True:
        each = [await figures(gateway) for gateway in servers.gateways]
        report.busy_gauges = {
            f"{name} at {gateway.url}": now.get(name, 1.0)
            for gateway, now in zip(servers.gateways, each, strict=True)
            for name in IDLE_GAUGES
            if now.get(name, 1.0) != 0
        }
        report.leaked_blocks = each[0].get("num_allocated_blocks", float("nan"))
        if (not report.busy_gauges and report.leaked_blocks == 0) or time.monotonic() > until_s:
            break
        await asyncio.sleep(1)
    pool = [sum(of.get(f"num_{kind}_blocks", 0) for kind in ("free", "cached")) for of in (at_start, each[0])]
    report.leaked_blocks = max(report.leaked_blocks, pool[0] - pool[1])
    for name in sorted(set().union(*each)):
        if name.startswith(TOLD):
            report.engine[name] = sum(now.get(name, 0.0) for now in each)


def _with_small_buffer(address: Any) -> socket.socket:
    """A client that stalls is to be noticed by the server, not to be hidden by megabytes in its kernel."""
    connection = socket.socket(*address[:3])
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    return connection


async def _stay_healthy(
    gateway: Gateway, session: aiohttp.ClientSession, is_over: asyncio.Event, report: Report
) -> None:
    """A gateway lives whatever becomes of its engine, unless it is killed itself."""
    while not is_over.is_set():
        num_kills, was_down = gateway.num_kills, gateway.is_down
        try:
            async with session.get(gateway.url + "/health") as response:
                if response.status != 200:
                    report.violate(f"/health said {response.status}")
        except (aiohttp.ClientError, OSError) as error:
            if not was_down and gateway.num_kills == num_kills:
                report.violate(f"/health was not answered: {error}")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(is_over.wait(), 2)
