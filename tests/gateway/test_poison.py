"""A request that ends every engine that computes it fails alone; the others only wait."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from engine.plan import StepPlan
from gateway import keys
from streamkv.config import EngineConfig
from tests.support.running_gateway import VOCAB_SIZE, RunningGateway, running_gateway
from tests.support.scripted_engine import TEST_CONFIG, RunningEngine, free_endpoint
from tests.support.scripted_executor import ScriptedExecutor, ScriptedLaunch

POISON = 77
"""The seed that names the request which ends its engine."""


class PoisonedExecutor(ScriptedExecutor):
    """Fails in every step that computes the poison."""

    def __init__(self) -> None:
        super().__init__(vocab_size=VOCAB_SIZE, step_s=0.002)
        self._poisons: set[int] = set()

    def launch(self, plan: StepPlan, on_done: Callable[[], None]) -> ScriptedLaunch:
        self._poisons |= {facts.sequence_id for facts in plan.new_sequences if facts.sampling.seed == POISON}
        if any(entry.sequence_id in self._poisons for entry in plan.scheduled):
            self.fail_at_step = self.num_steps
        return super().launch(plan, on_done)


@contextlib.contextmanager
def restarting_engine(endpoint: str) -> Iterator[list[RunningEngine]]:
    """An engine that is started again whenever it ends, as a supervisor does it. Yields its lives."""
    lives: list[RunningEngine] = []
    is_over = threading.Event()

    def keep_running() -> None:
        while not is_over.is_set():
            config = msgspec.convert({"endpoint": endpoint, **TEST_CONFIG}, EngineConfig)
            lives.append(RunningEngine(config, PoisonedExecutor()))
            lives[-1]._thread.join()

    thread = threading.Thread(target=keep_running, daemon=True)
    thread.start()
    try:
        yield lives
    finally:
        is_over.set()
        lives[-1].stop()
        thread.join(20)


async def text_of(gateway: RunningGateway, seed: int) -> tuple[str, str]:
    """(text, how it ended); with an error before the first token: its code."""
    body = {"prompt": f"the quick {seed}", "max_tokens": 80, "seed": seed, "temperature": 1, "ignore_eos": True}
    events = await gateway.events("/v1/completions", body)
    if events.status != 200:
        return "", json.loads(events.raw)["error"]["code"]
    (reasons,) = events.reasons().values()
    assert events.data.count("[DONE]") == 1 and len(reasons) == 1
    return events.text(), reasons[0]


@pytest.mark.timeout(180)
async def test_a_poisonous_request_fails_alone_and_everybody_elses_tokens_are_right() -> None:
    others = list(range(8))
    with free_endpoint() as endpoint, restarting_engine(endpoint) as lives:
        async with running_gateway(endpoint) as gateway:
            undisturbed = await asyncio.gather(*(text_of(gateway, seed) for seed in others))
            assert len(lives) == 1
            answers = await asyncio.gather(*(text_of(gateway, seed) for seed in [*others[:4], POISON, *others[4:]]))
            assert answers.pop(4) == ("", "engine_error")
            assert answers == undisturbed
            assert gateway.app[keys.ENGINE].num_engine_losses == 3 and len(lives) == 4
            _, text = await gateway.get("/metrics")
            assert "streamkv_engine_restarts_total 3" in text
