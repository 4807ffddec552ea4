"""A gateway whose model calls tools as Hermes does, and says what a test wants."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.support.running_gateway import RunningGateway, running_gateway
from tests.support.scripted_engine import serving
from tests.support.speaking_executor import SpeakingExecutor
from tests.support.tool_models import tool_model


@asynccontextmanager
async def saying(text: str, **settings: Any) -> AsyncIterator[RunningGateway]:
    """settings: of GatewayConfig."""
    tokenizer = tool_model("hermes")
    with serving(SpeakingExecutor(tokenizer, text)) as engine:
        async with running_gateway(engine.endpoint, lambda: tokenizer, **settings) as running:
            yield running
