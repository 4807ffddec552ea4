"""Whatever the device does to its engine, that one ends or is ended, and another takes its place: no stream notices."""

import asyncio
import contextlib
import sys
import time
from pathlib import Path

import pytest

from gateway import keys
from gateway.engine_watch import EngineWatch
from gateway.supervisor import Supervisor
from tests.support.faulty_engine import KINDS
from tests.support.running_gateway import VOCAB_SIZE, RunningGateway, running_gateway, small_tokenizer
from tests.support.scripted_engine import free_endpoint
from tests.support.scripted_executor import ScriptedExecutor

PROMPT = list(range(30, 50))
NUM_TOKENS = 120


async def text_over_sse(gateway: RunningGateway) -> str:
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    events = await gateway.events("/v1/completions", body)
    assert events.status == 200 and events.reasons() == {0: ["length"]} and events.data.count("[DONE]") == 1
    return events.text()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kinds", [("collect", "abort"), pytest.param(KINDS, marks=pytest.mark.long)], ids=len)
async def test_streams_outlive_every_fault_of_a_device(
    kinds: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that raises, and all after it; one that never returns; an abort of the process; no memory; SIGKILL, as the
    kernel does it when there is no memory. Real processes under the real supervisor."""
    monkeypatch.setattr("gateway.engine_watch.SHORTEST_HANG_S", 1.0)
    monkeypatch.setattr("gateway.engine_watch.UNPREDICTED_HANG_S", 1.0)
    monkeypatch.setattr("gateway.supervisor.MAX_BACKOFF_S", 0.25)
    faults = tmp_path / "faults"
    faults.write_text("\n".join(kinds))
    expected = small_tokenizer().decode(ScriptedExecutor(vocab_size=VOCAB_SIZE).expected_tokens(PROMPT, NUM_TOKENS))
    with free_endpoint() as endpoint:
        command = [sys.executable, "-m", "tests.support.faulty_engine", endpoint, str(faults), str(VOCAB_SIZE)]
        supervisor = Supervisor(command, watch=EngineWatch(endpoint, None, heartbeat_s=0.1, silence_s=30.0))
        running = asyncio.create_task(supervisor.run())
        try:
            async with running_gateway(endpoint, startup_wait_s=60.0) as gateway:
                streams = [asyncio.create_task(text_over_sse(gateway)) for _ in range(4)]
                until_s, ready = time.monotonic() + 200, set()
                while not all(stream.done() for stream in streams):
                    assert time.monotonic() < until_s and not running.done()
                    assert (await gateway.get("/health"))[0] == 200
                    ready.add((await gateway.get("/ready"))[0])
                    await asyncio.sleep(0.1)
                assert ready == {200, 503}
                assert await asyncio.gather(*streams) == [expected] * 4
                assert (supervisor.num_restarts, supervisor.num_hangs) == (len(kinds), kinds.count("hang"))
                assert gateway.app[keys.METRICS].outcomes["error"] == 0
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
