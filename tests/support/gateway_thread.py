"""A gateway over a scripted engine on a thread of its own, for clients that block."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from engine.executor import Executor
from gateway.auth import ApiKeys
from gateway.tokenizer import Tokenizer
from tests.support.running_gateway import RunningGateway, running_gateway, small_tokenizer
from tests.support.scripted_engine import serving

_START_TIMEOUT_S = 30.0


@contextlib.contextmanager
def gateway_thread(
    executor: Executor,
    load_tokenizer: Callable[[], Tokenizer] = small_tokenizer,
    *,
    api_keys: ApiKeys | None = None,
    **settings: Any,
) -> Iterator[RunningGateway]:
    """It takes work already. `settings`: of GatewayConfig. Only its url is of use on other threads."""
    started, stopping = threading.Event(), asyncio.Event()
    found: list[RunningGateway] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve(endpoint: str) -> None:
        async with running_gateway(endpoint, load_tokenizer, api_keys=api_keys, **settings) as gateway:
            found.append(gateway)
            loops.append(asyncio.get_running_loop())
            started.set()
            await stopping.wait()

    with serving(executor) as engine:
        thread = threading.Thread(target=asyncio.run, args=(serve(engine.endpoint),), daemon=True)
        thread.start()
        assert started.wait(_START_TIMEOUT_S), "the gateway did not start"
        try:
            yield found[0]
        finally:
            loops[0].call_soon_threadsafe(stopping.set)
            thread.join(_START_TIMEOUT_S)
