"""A rolling restart of the engine under load: no stream fails, and the new engine finds its cache on disk."""

import asyncio
import signal
from pathlib import Path

import aiohttp
import pytest

from tests.support.served import SHORT, chat, over_sse, over_websocket, start, wait_ready


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_engines_are_replaced_under_load_and_no_stream_fails(tmp_path: Path) -> None:
    running = start(
        tmp_path, "--dtype=float32", "--kv-cache-memory-gib=0.3", "--host-kv-memory-gib=0.2", "--preemption-mode=swap",
        f"--disk-kv-path={tmp_path / 'kv'}", "--disk-kv-size-gib=0.5", "--startup-wait-s=240", "--engine-timeout-s=30",
    )  # fmt: skip
    try:
        await asyncio.to_thread(wait_ready, running, 240)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            is_over = asyncio.Event()

            async def figure(name: str) -> float:
                async with session.get(running.url + "/metrics") as response:
                    lines = [line for line in (await response.text()).splitlines() if line.startswith(name + " ")]
                return float(lines[0].split()[1]) if lines else 0.0

            async def keep_asking(number: int) -> int:
                """Streams that were right; anything else raises."""
                num_streams = 0
                while not is_over.is_set():
                    case = SHORT[(number + num_streams) % len(SHORT)]
                    body = chat(case, ignore_eos=True, skip_special_tokens=False)
                    read = over_websocket if number % 2 else over_sse
                    assert await read(session, running.url, body) == (case["text_all"], ["length"])
                    num_streams += 1
                return num_streams

            clients = [asyncio.create_task(keep_asking(number)) for number in range(6)]
            for number in range(1, 4):
                engine_pid = running.engine_pid
                num_tokens = await figure("streamkv_gateway_wire_tokens_total")
                while await figure("streamkv_gateway_wire_tokens_total") < num_tokens + 60:
                    assert not any(client.done() for client in clients)
                    await asyncio.sleep(0.1)
                running.process.send_signal(signal.SIGUSR1)
                while await figure("streamkv_engine_restarts_total") < number:
                    assert not any(client.done() for client in clients)
                    await asyncio.sleep(0.2)
                assert running.engine_pid != engine_pid
            while await figure("streamkv_disk_hit_tokens_total") == 0:
                assert not any(client.done() for client in clients)
                await asyncio.sleep(0.2)
            is_over.set()
            assert min(await asyncio.gather(*clients)) >= 1
        log = running.log.read_text()
        assert log.count("is asked to make room") == 3 and "level=error" not in log and "Traceback" not in log, log
        running.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(running.process.wait, 60) == 0, running.log.read_text()
    finally:
        running.process.kill()
        running.process.wait()
