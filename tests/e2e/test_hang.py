"""An engine that hangs is killed and started again, and its streams go on."""

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest

from tests.support.served import SHORT, chat, over_sse, over_websocket, start, wait_ready


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_a_stopped_engine_does_not_show_in_the_streams(tmp_path: Path) -> None:
    """SIGSTOP: the process lives, holds its socket and its memory, and does nothing."""
    running = start(tmp_path, "--dtype=float32", "--kv-cache-memory-gib=0.3", "--engine-timeout-s=8")
    try:
        await asyncio.to_thread(wait_ready, running, 180)
        engine_pid = running.engine_pid
        async with aiohttp.ClientSession() as session:
            bodies = [chat(case, ignore_eos=True, skip_special_tokens=False) for case in SHORT[:2]]
            requests = [
                asyncio.create_task(over_sse(session, running.url, bodies[0])),
                asyncio.create_task(over_websocket(session, running.url, bodies[1])),
            ]
            await asyncio.sleep(0.3)
            os.kill(engine_pid, signal.SIGSTOP)
            answers = await asyncio.wait_for(asyncio.gather(*requests), 200)
            assert answers == [(case["text_all"], ["length"]) for case in SHORT[:2]]
            async with session.get(running.url + "/health") as response:
                assert response.status == 200
        assert running.engine_pid != engine_pid
        assert b"engine hangs; killed" in running.log.read_bytes()
        running.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(running.process.wait, 60) == 0, running.log.read_text()
    finally:
        running.process.kill()
        running.process.wait()
