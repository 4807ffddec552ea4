"""Clients that go, in every phase and in every way: what they had is free, and every request is counted once."""

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway import app as gateway_app
from gateway import keys
from gateway.streams import Stream
from tests.support.raw_clients import RawClient, resident_bytes
from tests.support.running_gateway import VOCAB_SIZE, RunningGateway, eventually, eventually_async, running_gateway
from tests.support.scripted_engine import serving
from tests.support.scripted_executor import ScriptedExecutor

TEXT = "/v1/completions"
PROMPT = list(range(30, 50))
LONG_PROMPT = [30 + number % 300 for number in range(1500)]
NUM_BLOCKS = 1024
MIB = 1024 * 1024
WAYS: dict[str, Callable[[RawClient], None]] = {
    "fin": RawClient.finish,
    "rst": RawClient.reset,
    "close": RawClient.close,
}
SILENT: dict[str, Callable[[RawClient], None]] = {"silence": RawClient.fall_silent}


@asynccontextmanager
async def gateway_in(phase: str) -> AsyncIterator[RunningGateway]:
    """One whose engine keeps requests in this phase for a while."""
    executor = ScriptedExecutor(vocab_size=VOCAB_SIZE, num_blocks=NUM_BLOCKS, step_s=0.01)
    settings: dict[str, Any] = {}
    if phase == "queued":
        settings["max_num_seqs"] = 1
    elif phase == "prefilling":
        executor = ScriptedExecutor(
            vocab_size=VOCAB_SIZE, num_blocks=NUM_BLOCKS, step_s=0.05, max_num_batched_tokens=64, max_model_len=2048
        )
        settings |= {"max_num_batched_tokens": 64, "max_prefill_tokens": 16}
    elif phase == "paused":
        executor = ScriptedExecutor(vocab_size=VOCAB_SIZE, num_blocks=NUM_BLOCKS)
    with serving(executor, **settings) as engine:
        async with running_gateway(engine.endpoint, max_stream_buffer_bytes=2048, keepalive_timeout_s=2.0) as gateway:
            yield gateway


def body(phase: str, is_streamed: bool) -> dict[str, Any]:
    prompt = LONG_PROMPT if phase == "prefilling" else PROMPT
    return {"prompt": prompt, "max_tokens": 400 if phase == "prefilling" else 1800, "temperature": 0,
            "ignore_eos": True, "stream": is_streamed}  # fmt: skip


async def is_in(gateway: RunningGateway, phase: str) -> bool:
    figures = await gateway.metrics()
    if phase == "queued":
        return figures["num_running_requests"] == figures["num_waiting_requests"] == 1
    if phase == "paused":
        return figures["num_paused_requests"] == 1
    if phase == "prefilling":
        return figures["prefill_tokens_total"] > 0
    return gateway.app[keys.ENGINE].num_tokens > 2


async def check_idle(gateway: RunningGateway, num_sent: int) -> dict[str, float]:
    """Everything is as before, and every request is in one count of each side."""

    async def is_idle() -> bool:
        figures = await gateway.metrics()
        return figures["num_live_streams"] == figures["num_allocated_blocks"] == 0

    await eventually(lambda: gateway.app[keys.GENERATION].num_live == 0)
    await eventually_async(is_idle)
    figures = await gateway.metrics()
    for state in ("running", "waiting", "paused"):
        assert figures[f"num_{state}_requests"] == figures[f"num_{state}_sequences"] == 0, state
    assert figures["num_free_blocks"] + figures["num_cached_blocks"] == NUM_BLOCKS - 1, (
        "but for block 0, which nobody has"
    )
    assert figures["gateway_live_streams"] == figures["gateway_waiting_for_engine"] == 0

    def total(name: str) -> float:
        return sum(value for sample, value in figures.items() if sample.startswith(name + "{"))

    assert total("gateway_requests_total") == figures["gateway_streams_total"] == num_sent
    assert total("requests_ended_total") == figures["requests_received_total"] == num_sent
    num_aborted = figures.get('gateway_requests_total{outcome="abort"}', 0)
    assert total("gateway_aborts_total") == total("aborts_total") == total("aborts_by_phase_total") == num_aborted
    return figures


async def abort_one(phase: str, leave: Callable[[RawClient], None], is_streamed: bool) -> None:
    async with gateway_in(phase) as gateway:
        hog: RawClient | None = None
        if phase == "queued":
            hog = await RawClient.connect(gateway.url)
            await hog.post(TEXT, body(phase, True))
            await eventually(lambda: gateway.app[keys.ENGINE].num_tokens > 0)
        client = await RawClient.connect(gateway.url, 4096)
        await client.post(TEXT, body(phase, is_streamed))
        await eventually_async(lambda: is_in(gateway, phase))
        leave(client)
        await eventually(lambda: gateway.app[keys.METRICS].aborts["disconnected"] == 1)
        if hog is not None:
            assert (await gateway.metrics())["num_running_requests"] == 1, "another request was ended with it"
            hog.close()
        figures = await check_idle(gateway, 1 if hog is None else 2)
        assert figures['aborts_total{cause="disconnected"}'] == (1 if hog is None else 2)
        told = {"queued": "queued", "prefilling": "prefill"}.get(phase, "decode")
        assert any(f'phase="{told}"' in sample for sample in figures if sample.startswith("aborts_by_phase_total"))
        client.close()


QUICK = [("queued", "rst", False), ("prefilling", "fin", True), ("decoding", "close", False), ("paused", "rst", True)]
ALL = [
    (phase, way, is_streamed)
    for phase in ("queued", "prefilling", "decoding", "paused")
    for way in (*WAYS, *SILENT)
    for is_streamed in (True, False)
    if (phase, way, is_streamed) not in QUICK and (is_streamed or phase != "paused")
]


@pytest.mark.parametrize(("phase", "way", "is_streamed"), QUICK)
async def test_a_client_that_goes_leaves_nothing_behind(
    phase: str, way: str, is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_app, "SEND_BUFFER_BYTES", 4096)
    await abort_one(phase, WAYS[way], is_streamed)


@pytest.mark.long
@pytest.mark.parametrize(("phase", "way", "is_streamed"), ALL)
async def test_a_client_that_goes_leaves_nothing_behind_in_any_way(
    phase: str, way: str, is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if phase == "prefilling" and way == "silence":
        pytest.skip("the prompt is computed before the silence is long enough")
    monkeypatch.setattr(gateway_app, "SEND_BUFFER_BYTES", 4096)
    await abort_one(phase, (WAYS | SILENT)[way], is_streamed)


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_a_thousand_aborts_leave_pool_gauges_and_memory_as_before() -> None:
    rng = random.Random(6)
    executor = ScriptedExecutor(vocab_size=VOCAB_SIZE, num_blocks=NUM_BLOCKS, step_s=0.002)
    with serving(executor, max_num_seqs=16) as engine:
        async with running_gateway(engine.endpoint) as gateway:

            async def abort_one_of_many() -> None:
                client = await RawClient.connect(gateway.url)
                prompt = [rng.randrange(30, 400) for _ in range(rng.randrange(1, 200))]
                more = {"prompt": prompt, "max_tokens": 1500, "stream": rng.random() < 0.5, "n": rng.choice((1, 1, 2))}
                await client.post(TEXT, {**body("decoding", True), **more})
                await asyncio.sleep(rng.uniform(0, 0.3))
                rng.choice(list(WAYS.values()))(client)
                await asyncio.sleep(0.05)
                client.close()

            async def abort_many(num_aborts: int) -> None:
                for _ in range(num_aborts // 40):
                    await asyncio.gather(*(abort_one_of_many() for _ in range(40)))

            async def all_are_through() -> bool:
                figures = await gateway.metrics()
                return figures["num_live_streams"] == 0 and gateway.app[keys.GENERATION].num_live == 0

            await abort_many(400)  # caches of ours, of Python and of the allocator are filled by then
            await eventually_async(all_are_through)
            gc.collect()
            memory_before = resident_bytes()
            await abort_many(1000)
            await eventually_async(all_are_through)
            num_begun = gateway.app[keys.METRICS].num_streams_begun
            assert num_begun > 1000, "hardly any request came so far as to be aborted"
            await check_idle(gateway, num_begun)
            gc.collect()
            assert resident_bytes() - memory_before < 16 * MIB
            # By type: isinstance asks each object for its class, and some lazy ones load a library for that.
            assert not any(type(each) is Stream for each in gc.get_objects())
