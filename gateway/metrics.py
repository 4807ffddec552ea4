"""The gateway's figures, and all figures as Prometheus text.

Observed once per request or per scrape, never per token.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from streamkv.protocol import Histogram, Stats

PREFIX = "streamkv_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)


class Distribution:
    """A histogram that is filled here: counts[i] values were ≤ bounds[i] and over the bound before."""

    def __init__(self, bounds: tuple[float, ...] = _SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> Histogram:
        return Histogram(list(self._bounds), list(self._counts), self._total)


@dataclass(slots=True)
class GatewayMetrics:
    """What the gateway counts by itself."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """Requests that reached the engine, by how they ended: stop, length, abort, error."""
    refused: Counter[str] = field(default_factory=Counter)
    """Answers with an error status, by status."""
    aborts: Counter[str] = field(default_factory=Counter)
    """Ends before their time, by cause."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_streams_begun: int = 0
    num_slow_reader_pauses: int = 0
    num_attached: int = 0
    ttft: Distribution = field(default_factory=Distribution)
    tpot: Distribution = field(default_factory=Distribution)
    e2e: Distribution = field(default_factory=Distribution)


def render(
    metrics: GatewayMetrics,
    *,
    gauges: Mapping[str, float],
    counters: Mapping[str, float],
    engine: Stats | None,
) -> bytes:
    """Prometheus text. gauges, counters: the gateway's figures of this moment, by name without prefix."""
    lines: list[str] = []
    for name, value in gauges.items():
        _simple(lines, name, "gauge", value)
    for name, value in counters.items():
        _simple(lines, name, "counter", value)
    _simple(lines, "gateway_streams_total", "counter", metrics.num_streams_begun)
    _simple(lines, "gateway_prompt_tokens_total", "counter", metrics.num_prompt_tokens)
    _simple(lines, "gateway_output_tokens_total", "counter", metrics.num_output_tokens)
    _simple(lines, "gateway_slow_reader_pauses_total", "counter", metrics.num_slow_reader_pauses)
    _simple(lines, "gateway_attached_streams_total", "counter", metrics.num_attached)
    _labelled(lines, "gateway_requests_total", "outcome", metrics.outcomes)
    _labelled(lines, "gateway_refused_total", "status", metrics.refused)
    _labelled(lines, "gateway_aborts_total", "cause", metrics.aborts)
    _histogram(lines, "time_to_first_token_seconds", metrics.ttft.snapshot())
    _histogram(lines, "time_per_output_token_seconds", metrics.tpot.snapshot())
    _histogram(lines, "e2e_request_latency_seconds", metrics.e2e.snapshot())
    if engine is not None:
        for name, value in engine.gauges.items():
            _simple(lines, name, "gauge", value)
        _engine_counters(lines, engine.counters)
        for name, histogram in engine.histograms.items():
            _histogram(lines, name, histogram)
    lines.append("")
    return "\n".join(lines).encode()


def _simple(lines: list[str], name: str, kind: str, value: float) -> None:
    lines.append(f"# TYPE {PREFIX}{name} {kind}")
    lines.append(f"{PREFIX}{name} {_number(value)}")


def _labelled(lines: list[str], name: str, label: str, values: Mapping[str, float]) -> None:
    lines.append(f"# TYPE {PREFIX}{name} counter")
    lines += (f'{PREFIX}{name}{{{label}="{_escaped(key)}"}} {_number(value)}' for key, value in sorted(values.items()))


def _engine_counters(lines: list[str], counters: Mapping[str, float]) -> None:
    """Names may carry labels, as `aborts_total{cause="cancelled"}`; those of one family stand together."""
    families: dict[str, list[tuple[str, float]]] = {}
    for name, value in counters.items():
        families.setdefault(name.partition("{")[0], []).append((name, value))
    for family, members in families.items():
        lines.append(f"# TYPE {PREFIX}{family} counter")
        lines += (f"{PREFIX}{name} {_number(value)}" for name, value in members)


def _histogram(lines: list[str], name: str, histogram: Histogram) -> None:
    lines.append(f"# TYPE {PREFIX}{name} histogram")
    total = 0
    bounds: Iterable[str] = [*(_number(bound) for bound in histogram.bounds), "+Inf"]
    for bound, count in zip(bounds, histogram.counts, strict=True):
        total += count
        lines.append(f'{PREFIX}{name}_bucket{{le="{bound}"}} {total}')
    lines.append(f"{PREFIX}{name}_sum {_number(histogram.total)}")
    lines.append(f"{PREFIX}{name}_count {total}")


def _number(value: float) -> str:
    return repr(float(value)) if value != int(value) else str(int(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
