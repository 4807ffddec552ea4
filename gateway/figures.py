"""What one gateway shows on /metrics, and how the figures of several that share a port become one page."""

import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from gateway.metrics import Distribution, GatewayMetrics

OtherFigures = Callable[[], Awaitable[list[bytes]]]
"""→ the packed figures of the other gateways of this server."""

_LARGEST: Final = frozenset(
    {
        *("engine_ready", "gateway_uptime_seconds", "gateway_start_time_seconds", "gateway_loop_lag_seconds"),
        *("gateway_max_open_files", "engine_restarts_total", "gateway_engine_losses_total"),
    }
)
"""What every gateway sees for itself; all else is added up."""


class _Packed(msgspec.Struct, array_like=True):
    gauges: dict[str, float]
    counters: dict[str, float]
    shed: dict[str, int]
    counts: dict[str, int]
    """Of GatewayMetrics, by field."""
    tallies: dict[str, list[tuple[list[str], int]]]
    """Of each Counter: its keys, which may have several parts, and what was counted."""
    distributions: dict[str, tuple[list[int], float]]


@dataclass(slots=True)
class Figures:
    """All figures of one moment."""

    metrics: GatewayMetrics
    gauges: dict[str, float] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)
    shed: dict[str, int] = field(default_factory=dict)

    def pack(self) -> bytes:
        """msgpack, for `add` in another process."""
        packed = _Packed(self.gauges, self.counters, self.shed, {}, {}, {})
        for name, value in _values(self.metrics):
            if isinstance(value, Counter):
                packed.tallies[name] = [([key] if isinstance(key, str) else list(key), n) for key, n in value.items()]
            elif isinstance(value, Distribution):
                snapshot = value.snapshot()
                packed.distributions[name] = (snapshot.counts, snapshot.total)
            else:
                packed.counts[name] = value
        return msgspec.msgpack.encode(packed)

    def add(self, other: bytes) -> "Figures":
        """These and another gateway's; both stay as they are. Raises msgspec.MsgspecError."""
        packed = msgspec.msgpack.decode(other, type=_Packed)
        total = GatewayMetrics()
        for name, value in _values(self.metrics):
            if isinstance(value, Counter):
                tally = Counter(value)
                for key, count in packed.tallies.get(name, []):
                    tally[key[0] if len(key) == 1 else tuple(key)] += count
                setattr(total, name, tally)
            elif isinstance(value, Distribution):
                counts, seconds = packed.distributions.get(name, ([], 0.0))
                setattr(total, name, value.plus(counts, seconds))
            else:
                setattr(total, name, value + packed.counts.get(name, 0))
        return Figures(
            total,
            _added(self.gauges, packed.gauges),
            _added(self.counters, packed.counters),
            dict(Counter(self.shed) + Counter(packed.shed)),
        )


def _values(metrics: GatewayMetrics) -> list[tuple[str, Any]]:
    return [(each.name, getattr(metrics, each.name)) for each in dataclasses.fields(metrics)]


def _added(ours: dict[str, float], theirs: dict[str, float]) -> dict[str, float]:
    return {
        name: max(value, theirs.get(name, value)) if name in _LARGEST else value + theirs.get(name, 0.0)
        for name, value in ours.items()
    }
