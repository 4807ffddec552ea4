"""Typed keys of what hangs on the app, so that routes need not import it."""

from typing import Final

from aiohttp import web

from gateway.admission import Admission
from gateway.engine_client import EngineClient
from gateway.generation import Generation, TokenizerSource
from gateway.metrics import GatewayMetrics
from gateway.sse import KeepAlives
from gateway.streams import Outbox
from streamkv.config import GatewayConfig


class OpenSockets:
    """The WebSockets that are open, for the figures and for the shutdown."""

    def __init__(self) -> None:
        self.live: set[web.WebSocketResponse] = set()


CONFIG: Final = web.AppKey("config", GatewayConfig)
ENGINE: Final = web.AppKey("engine", EngineClient)
TOKENIZER: Final = web.AppKey("tokenizer", TokenizerSource)
ADMISSION: Final = web.AppKey("admission", Admission)
GENERATION: Final = web.AppKey("generation", Generation)
METRICS: Final = web.AppKey("metrics", GatewayMetrics)
OUTBOX: Final = web.AppKey("outbox", Outbox)
KEEP_ALIVES: Final = web.AppKey("keep_alives", KeepAlives)
SOCKETS: Final = web.AppKey("sockets", OpenSockets)
STARTED_AT: Final = web.AppKey("started_at", float)
"""Unix time."""
