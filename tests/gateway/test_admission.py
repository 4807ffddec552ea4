"""The door: who waits for the engine, how many may, and who is told to come again."""

import asyncio

import pytest

from gateway import admission as admission_module
from gateway import keys as app_keys
from tests.support.running_gateway import VOCAB_SIZE, eventually, running_gateway
from tests.support.scripted_engine import free_endpoint, serving
from tests.support.scripted_executor import ScriptedExecutor

BODY = {"prompt": [5, 6], "max_tokens": 2}
TEXT = "/v1/completions"


async def test_only_so_many_wait_for_the_engine_and_those_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "MAX_WAITING", 2)
    with free_endpoint() as endpoint:
        async with running_gateway(endpoint, is_ready=False, startup_wait_s=60.0) as gateway:
            admission = gateway.app[app_keys.ADMISSION]
            waiting = [asyncio.create_task(gateway.post(TEXT, BODY)) for _ in range(2)]
            await eventually(lambda: admission.num_waiting == 2, 30)
            async with gateway.session.post(gateway.url + TEXT, json=BODY) as response:
                assert response.status == 503 and int(response.headers["Retry-After"]) >= 1
                assert (await response.json())["error"]["code"] == "not_ready"
            with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE), endpoint=endpoint):
                assert [status for status, _ in await asyncio.gather(*waiting)] == [200, 200]
                figures = await gateway.metrics()
                assert figures['gateway_shed_total{reason="too_many_wait"}'] == 1
                assert figures['gateway_shed_total{reason="engine_not_ready"}'] == 0
                assert figures["gateway_waiting_for_engine"] == 0


async def test_only_so_many_tokens_wait_for_the_engine_but_one_prompt_always_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission_module, "MAX_WAITING_TOKENS", 8)
    with free_endpoint() as endpoint:
        async with running_gateway(endpoint, is_ready=False, startup_wait_s=60.0) as gateway:
            admission = gateway.app[app_keys.ADMISSION]
            waiting = [asyncio.create_task(gateway.post(TEXT, {**BODY, "prompt": [5] * 20}))]
            await eventually(lambda: admission.num_waiting_tokens == 20)
            assert (await gateway.post(TEXT, BODY))[0] == 503
            waiting[0].cancel()
            await eventually(lambda: admission.num_waiting_tokens == 0)
            waiting = [asyncio.create_task(gateway.post(TEXT, BODY)) for _ in range(4)]
            await eventually(lambda: admission.num_waiting_tokens == 8)
            assert (await gateway.post(TEXT, BODY))[0] == 503 and admission.shed == {"too_many_wait": 2}
            with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE), endpoint=endpoint):
                assert [status for status, _ in await asyncio.gather(*waiting)] == [200] * 4
            assert admission.num_waiting_tokens == 0


async def test_who_waits_in_vain_and_who_goes_leave_no_trace() -> None:
    with free_endpoint() as endpoint:
        async with running_gateway(endpoint, is_ready=False, startup_wait_s=0.05) as gateway:
            assert (await gateway.post(TEXT, BODY))[0] == 503
            assert gateway.app[app_keys.ADMISSION].shed == {"engine_not_ready": 1}
        async with running_gateway(endpoint, is_ready=False, startup_wait_s=60.0) as gateway:
            admission = gateway.app[app_keys.ADMISSION]
            waiting = asyncio.create_task(gateway.post(TEXT, BODY))
            await eventually(lambda: admission.num_waiting == 1, 30)
            waiting.cancel()
            await eventually(lambda: admission.num_waiting == 0, 30)
            assert not admission.shed, "a client that goes was not turned away"


async def test_a_closed_door_is_told_at_once() -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        async with running_gateway(engine.endpoint) as gateway:
            gateway.app[app_keys.ADMISSION].drain()
            status, answer = await gateway.post(TEXT, BODY)
            assert status == 503 and "shutting down" in answer["error"]["message"]
            assert (await gateway.metrics())['gateway_shed_total{reason="draining"}'] == 1
