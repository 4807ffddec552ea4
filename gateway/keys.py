"""Typed keys of what hangs on the app and on a request, so that routes need not import it."""

from typing import Final

from aiohttp import web

from gateway.admission import Admission
from gateway.auth import ApiKeys, Caller
from gateway.bounded_writer import Outbox
from gateway.cors import Cors
from gateway.dashboard import Dashboard
from gateway.engine_client import EngineClient
from gateway.figures import OtherFigures
from gateway.generation import Generation, TokenizerSource
from gateway.metrics import GatewayMetrics, LoopLag
from gateway.reception import Reception
from gateway.records import Record
from gateway.sse import KeepAlives
from streamkv.config import GatewayConfig


class OpenSockets:
    """The WebSockets that are open, for the figures and for the shutdown."""

    def __init__(self) -> None:
        self.live: set[web.WebSocketResponse] = set()


CONFIG: Final = web.AppKey("config", GatewayConfig)
API_KEYS: Final = web.AppKey("api_keys", ApiKeys)
ENGINE: Final = web.AppKey("engine", EngineClient)
TOKENIZER: Final = web.AppKey("tokenizer", TokenizerSource)
ADMISSION: Final = web.AppKey("admission", Admission)
GENERATION: Final = web.AppKey("generation", Generation)
METRICS: Final = web.AppKey("metrics", GatewayMetrics)
OTHER_FIGURES: Final[web.AppKey[OtherFigures]] = web.AppKey("other_figures")
LOOP_LAG: Final = web.AppKey("loop_lag", LoopLag)
RECEPTION: Final = web.AppKey("reception", Reception)
CORS: Final = web.AppKey("cors", Cors)
OUTBOX: Final = web.AppKey("outbox", Outbox)
KEEP_ALIVES: Final = web.AppKey("keep_alives", KeepAlives)
SOCKETS: Final = web.AppKey("sockets", OpenSockets)
DASHBOARD: Final = web.AppKey("dashboard", Dashboard)
STARTED_AT: Final = web.AppKey("started_at", float)
"""Unix time."""
RECORD: Final = web.RequestKey("record", Record)
"""What is noted of the request."""
CALLER: Final = web.RequestKey("caller", Caller)
"""Whose request it is; not there at a path that is open to all."""
