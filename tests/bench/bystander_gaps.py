"""What four streams notice of 50 clients that do not read, and of 5,000 requests at once:

    python -m tests.bench.bystander_gaps [--stalled 50] [--flood 5000] [--turns 2]

A scripted engine (20 ms a step, a queue of 64) and a gateway, each a process of its own; the gaps are those between two
reads of the four in this process. The flood comes from a third one. Rows of the same turn were measured one after the
other; compare within a turn, since the machine is not ours alone.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from engine.loop import EngineLoop
from streamkv import log
from streamkv.config import EngineConfig
from tests.support.raw_clients import RawClient
from tests.support.running_gateway import VOCAB_SIZE
from tests.support.scripted_engine import TEST_CONFIG, free_endpoint
from tests.support.scripted_executor import ScriptedExecutor
from tests.support.small_tokenizers import CHATML, train_byte_level, write_folder

STEP_S = 0.02
NUM_MEASURED = 4
NUM_TOKENS = 400
READY_WITHIN_S = 60.0
STALL_WITHIN_S = 120.0
PATH = "/v1/completions"


def body(number: int, num_tokens: int) -> dict[str, Any]:
    prompt = [30 + number % 300, 30 + number // 300, *range(40, 60)]
    return {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}


def run_engine(endpoint: str) -> int:
    log.configure("error", "engine")
    settings = {**TEST_CONFIG, "endpoint": endpoint, "max_queue": 64, "max_num_seqs": 128}
    executor = ScriptedExecutor(vocab_size=VOCAB_SIZE, num_blocks=16384, step_s=STEP_S)
    return EngineLoop(msgspec.convert(settings, EngineConfig), executor).run()


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """The URL of a gateway that takes requests."""
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(free_endpoint())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
        write_folder(folder, train_byte_level(), CHATML, eos_token="<|im_end|>")
        (folder / "config.json").write_text("{}")  # of weights there is no need
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        flags = [f"--endpoint={endpoint}", f"--model={folder}", f"--port={port}", "--log-level=error"]
        for command in (
            [sys.executable, "-m", __spec__.name, "--engine", endpoint],
            [sys.executable, "-m", "streamkv", "gateway", *flags, "--max-stream-buffer-bytes=4096"],
        ):
            process = subprocess.Popen(command)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        yield f"http://127.0.0.1:{port}"


async def gaps_of(session: aiohttp.ClientSession, url: str, number: int) -> list[float]:
    """Seconds between two reads of one stream, from the first event on."""
    times = []
    async with session.post(url + PATH, json=body(number, NUM_TOKENS)) as response:
        assert response.status == 200, await response.text()
        while await response.content.readany():
            times.append(time.perf_counter())
    return [later - earlier for earlier, later in itertools.pairwise(times)]


async def stall(url: str, number: int) -> RawClient:
    client = await RawClient.connect(url, 4096)
    await client.post(PATH, body(1000 + number, 1900))
    return client


async def flood(url: str, num_requests: int) -> None:
    """So many at once; prints what came of them."""
    outcomes: Counter[int] = Counter()

    async def ask(session: aiohttp.ClientSession, number: int) -> None:
        async with session.post(url + PATH, json=body(2000 + number, 10)) as response:
            await response.read()
            outcomes[response.status] += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(ask(session, number) for number in range(num_requests)))
    print(json.dumps(outcomes))


async def figure(session: aiohttp.ClientSession, url: str, name: str) -> float:
    async with session.get(url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(f"streamkv_{name} ")), 0.0)


async def measure(url: str, scene: str, num_others: int) -> str:
    """A row of the table."""
    note = ""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        if scene == "stalled":
            clients = [await stall(url, number) for number in range(num_others)]
            until_s = time.monotonic() + STALL_WITHIN_S
            while (paused := await figure(session, url, "num_paused_requests")) < num_others:
                if time.monotonic() > until_s:
                    raise SystemExit(f"of {num_others} who do not read {paused:.0f} stand aside")
                await asyncio.sleep(0.5)
        live = [asyncio.create_task(gaps_of(session, url, number)) for number in range(NUM_MEASURED)]
        if scene == "flood":
            await asyncio.sleep(1)
            flooding = await asyncio.create_subprocess_exec(
                sys.executable, "-m", __spec__.name, "--flood-at", url, "--flood", str(num_others),
                stdout=subprocess.PIPE,
            )  # fmt: skip
            said, _ = await flooding.communicate()
            counts = {int(status): count for status, count in json.loads(said).items()}
            note = ", ".join(f"{count} of status {status}" for status, count in sorted(counts.items()))
            note += ", over before the four" if not any(task.done() for task in live) else ", and after the four"
        gaps = sorted(gap for each in await asyncio.gather(*live) for gap in each)
        if scene == "stalled":
            note = f"{paused:.0f} stand aside"
            for client in clients:
                client.reset()
    p50, p99 = (gaps[int(share * (len(gaps) - 1))] * 1000 for share in (0.5, 0.99))
    return f"| {scene} | {p50:.1f} | {p99:.1f} | {gaps[-1] * 1000:.1f} | {note} |"


async def wait_ready(url: str) -> None:
    until_s = time.monotonic() + READY_WITHIN_S
    async with aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url + "/ready") as response:
                    if response.status == 200:
                        return
            if time.monotonic() > until_s:
                raise SystemExit("the gateway did not become ready")
            await asyncio.sleep(0.1)


async def run(url: str, num_stalled: int, num_flooding: int, num_turns: int) -> None:
    await wait_ready(url)
    print("| beside | p50 ms | p99 ms | largest ms | |\n|---|---|---|---|---|")
    for _ in range(num_turns):
        for scene, num_others in (("nobody", 0), ("stalled", num_stalled), ("flood", num_flooding)):
            print(await measure(url, scene, num_others), flush=True)
            await asyncio.sleep(1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bystander_gaps", description=__doc__)
    parser.add_argument("--stalled", type=int, default=50)
    parser.add_argument("--flood", type=int, default=5000)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--engine", default="", help=argparse.SUPPRESS)
    parser.add_argument("--flood-at", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        os._exit(run_engine(options.engine))
    if options.flood_at:
        asyncio.run(flood(options.flood_at, options.flood))
        return 0
    with serving() as url:
        asyncio.run(run(url, options.stalled, options.flood, options.turns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
