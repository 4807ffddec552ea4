"""What the dashboard shows, as JSON: the engine block by block, and its state while it cannot be asked.

However many viewers there are, the engine is asked at most once per MIN_PERIOD_S, and the answer is packed once.
"""

import asyncio
import gzip
import time
from dataclasses import dataclass
from typing import Final

from gateway.answers import json_bytes
from gateway.engine_client import EngineClient
from streamkv.protocol import Ready, Snapshot

MIN_PERIOD_S: Final = 0.25
_TIMEOUT_S: Final = 2.0
_GZIP_LEVEL: Final = 1


@dataclass(frozen=True, slots=True)
class DashboardData:
    """One answer for all viewers."""

    body: bytes
    packed: bytes
    """The same, gzip."""


class Dashboard:
    """Asks the engine on behalf of all who watch."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._data: DashboardData | None = None
        self._made_at_s = 0.0
        self._lock = asyncio.Lock()

    async def data(self) -> DashboardData:
        """How things are, at most MIN_PERIOD_S ago. Whoever comes while the engine is asked waits for that answer."""
        async with self._lock:
            now_s = time.monotonic()
            if self._data is None or now_s - self._made_at_s >= MIN_PERIOD_S:
                snapshot = await self._engine.snapshot(_TIMEOUT_S)
                self._data = await asyncio.to_thread(_pack, self._engine_fields(), snapshot)
                self._made_at_s = time.monotonic()
            return self._data

    def _engine_fields(self) -> dict[str, object]:
        engine = self._engine
        fields: dict[str, object] = {
            "state": engine.state.name.lower(),
            "stage": engine.stage,
            "percent": round(engine.percent, 1),
            "num_losses": engine.num_engine_losses,
        }
        return fields | _facts(engine.ready) if engine.ready is not None else fields


def _facts(ready: Ready) -> dict[str, object]:
    """What the engine said of itself when it was last ready."""
    return {
        "epoch": f"{ready.epoch:x}",  # a number of 62 bits would lose some in a browser
        "model": ready.model.name,
        "dtype": ready.model.dtype,
        "device": ready.model.device,
        "num_parameters": ready.model.num_parameters,
        "max_model_len": ready.model.max_model_len,
        "block_size": ready.block_size,
        "num_blocks": ready.num_blocks,
        "max_num_seqs": ready.max_num_seqs,
        "max_num_batched_tokens": ready.max_num_batched_tokens,
    }


def _pack(engine: dict[str, object], snapshot: Snapshot | None) -> DashboardData:
    """bytes become base64. A sequence's and a step's fields stand in the order of the wire's structs."""
    seen: dict[str, object] | None = None
    if snapshot is not None:
        seen = {
            "time_s": snapshot.time_s,
            "block_states": snapshot.block_states,
            "sequences": snapshot.sequences,
            "steps": snapshot.steps,
            "gauges": snapshot.gauges,
            "counters": snapshot.counters,
            "quantiles": snapshot.quantiles,
        }
    body = json_bytes({"engine": engine, "snapshot": seen})
    return DashboardData(body, gzip.compress(body, _GZIP_LEVEL, mtime=0))
