"""Far more requests at once than may wait: each is served or refused, never both, and who was served before goes on."""

import asyncio
import resource
from dataclasses import dataclass
from hashlib import sha256

import aiohttp
import pytest

from gateway import keys
from gateway.auth import ApiKeys, Caller
from gateway.limits import Allowance
from tests.support.raw_clients import resident_bytes
from tests.support.running_gateway import (
    VOCAB_SIZE,
    Events,
    RunningGateway,
    eventually,
    eventually_async,
    running_gateway,
    small_tokenizer,
)
from tests.support.scripted_engine import serving
from tests.support.scripted_executor import ScriptedExecutor

TEXT = "/v1/completions"
MIB = 1024 * 1024
MAX_QUEUE = 32
MAX_RUNNING = 16
NUM_LIVE = 4


def executor(step_s: float = 0.0) -> ScriptedExecutor:
    return ScriptedExecutor(vocab_size=VOCAB_SIZE, num_blocks=4096, step_s=step_s)


def prompt(number: int) -> list[int]:
    return [30 + number % 300, 30 + number // 300, *range(40, 60)]


def body(number: int, num_tokens: int, is_streamed: bool) -> dict[str, object]:
    return {"prompt": prompt(number), "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
            "stream": is_streamed}  # fmt: skip


def text_of(number: int, num_tokens: int) -> str:
    return small_tokenizer().decode(executor().expected_tokens(prompt(number), num_tokens))


@dataclass
class Answer:
    status: int
    text: str
    retry_after: str
    code: str


async def ask(
    session: aiohttp.ClientSession, gateway: RunningGateway, number: int, num_tokens: int, key: str = ""
) -> Answer:
    is_streamed = number % 2 == 0
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    asked = body(number, num_tokens, is_streamed)
    async with session.post(gateway.url + TEXT, json=asked, headers=headers) as response:
        raw = await response.read()
        retry_after = response.headers.get("Retry-After", "")
        if response.status != 200:
            assert b"choices" not in raw, "refused, and served"
            return Answer(response.status, "", retry_after, (await response.json())["error"]["code"])
        if not is_streamed:
            (choice,) = (await response.json())["choices"]
            assert choice["finish_reason"] == "length"
            return Answer(200, choice["text"], retry_after, "")
        events = Events(200, {}, raw)
        if b'"error"' in raw:  # its turn came so late that a keep-alive had gone out: there is no status to give
            assert events.text() == "" and events.data[-1] == "[DONE]", "refused, and served"
            (error,) = [event["error"] for event in events.objects if "error" in event]
            return Answer(503, "", str(error["retry_after_s"]), error["code"])
        assert events.reasons() == {0: ["length"]} and events.data[-1] == "[DONE]"
        return Answer(200, events.text(), retry_after, "")


async def overload(num_requests: int, memory_bytes: int) -> None:
    with serving(executor(0.003), max_queue=MAX_QUEUE, max_num_seqs=MAX_RUNNING) as engine:
        async with (
            running_gateway(engine.endpoint) as gateway,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        ):
            live = [asyncio.create_task(gateway.events(TEXT, body(number, 400, True))) for number in range(NUM_LIVE)]
            await eventually(lambda: gateway.app[keys.ENGINE].num_tokens > NUM_LIVE)
            memory_before = resident_bytes()
            answers = await asyncio.gather(*(ask(session, gateway, number, 10) for number in range(num_requests)))
            grown_bytes = resident_bytes() - memory_before
            served = [number for number, answer in enumerate(answers) if answer.status == 200]
            refused = [answer for answer in answers if answer.status != 200]
            assert all(answers[number].text == text_of(number, 10) for number in served)
            assert len(served) >= MAX_QUEUE and len(refused) > num_requests // 4
            assert {(answer.status, answer.code) for answer in refused} == {(503, "overloaded")}
            assert all(1 <= int(answer.retry_after) <= 120 for answer in refused), "an hour, or nothing, was named"
            for number, events in enumerate(await asyncio.gather(*live)):
                assert events.text() == text_of(number, 400), "who was served before the flood had to suffer"

            async def is_idle() -> bool:
                figures = await gateway.metrics()
                return figures["num_live_streams"] == figures["num_allocated_blocks"] == 0

            await eventually_async(is_idle)
            figures = await gateway.metrics()
            assert figures['requests_ended_total{reason="length"}'] == len(served) + NUM_LIVE
            assert figures['requests_rejected_total{code="overloaded"}'] == len(refused)
            assert figures["requests_received_total"] == num_requests + NUM_LIVE
            assert grown_bytes < memory_bytes


@pytest.mark.timeout(180)
async def test_five_hundred_at_once_are_each_served_or_refused() -> None:
    await overload(500, 96 * MIB)


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_five_thousand_at_once_are_each_served_or_refused() -> None:
    """Both ends of 5,000 connections are in this process."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 12_000:
        pytest.skip("needs 12,000 open files")
    await overload(5000, 600 * MIB)


async def test_a_callers_share_is_refused_by_429_and_others_are_served() -> None:
    callers = {"greedy": Caller("greedy", allowance=Allowance(max_concurrent=3)), "modest": Caller("modest")}
    api_keys = ApiKeys({sha256(f"{name}-key".encode()).digest(): caller for name, caller in callers.items()})
    with serving(executor(0.02)) as engine:
        async with running_gateway(engine.endpoint, api_keys=api_keys, is_ready=False) as gateway:
            await gateway.wait_ready()
            asking = [ask(gateway.session, gateway, number, 10, "greedy-key") for number in range(40)]
            greedy, modest = await asyncio.gather(
                asyncio.gather(*asking), ask(gateway.session, gateway, 41, 10, "modest-key")
            )
    assert modest.status == 200 and modest.text == text_of(41, 10)
    statuses = [answer.status for answer in greedy]
    assert set(statuses) == {200, 429} and statuses.count(200) >= 3
    assert all(int(answer.retry_after) >= 1 for answer in greedy if answer.status == 429)
