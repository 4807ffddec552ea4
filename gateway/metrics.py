"""The gateway's figures, and all figures as Prometheus text.

Observed once per request or per scrape, never per token.
"""

import asyncio
import math
import os
import resource
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gateway.limits import CONCURRENCY, REQUESTS, TOKENS
from streamkv.protocol import Histogram, Stats

PREFIX = "streamkv_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

HELP: Final[Mapping[str, str]] = {
    # The gateway's own
    "engine_ready": "1 while the engine takes work, else 0",
    "e2e_request_latency_seconds": "From a request's arrival to its end",
    "gateway_aborts_total": "Requests that ended by abort, by cause",
    "gateway_cpu_seconds_total": "Processor time of the gateway's process",
    "gateway_loop_lag_seconds": "Longest time that the event loop was late by in the last ten seconds",
    "gateway_max_open_files": "Files and sockets that the gateway's process may have open; 0: not known",
    "gateway_open_files": "Files and sockets that the gateway's process has open; 0: not known",
    "gateway_resident_memory_bytes": "Memory of the gateway's process; 0: not known",
    "gateway_start_time_seconds": "When the gateway was started, Unix time",
    "gateway_attached_streams_total": "Streams that a client took up again",
    "gateway_engine_losses_total": "Times that an engine which took work was lost",
    "gateway_live_streams": "Streams that have not ended",
    "gateway_output_tokens_total": "Tokens of choices that were returned, without what came behind a stop string",
    "gateway_prompt_tokens_total": "Tokens of the prompts that went to the engine",
    "gateway_refused_total": "Answers with an error status, by status",
    "gateway_requests_total": "Requests that reached the engine, by how they ended",
    "gateway_resubmitted_total": "Streams that were sent to an engine again after theirs was lost",
    "gateway_shed_total": "Requests that were turned away to protect the server or other callers, by reason",
    "gateway_slow_reader_pauses_total": "Times that generation was paused for a client that did not read",
    "gateway_streams_total": "Streams that were begun or taken up",
    "gateway_uptime_seconds": "Since the gateway's start",
    "gateway_waiting_for_engine": "Requests that wait for the engine to be ready",
    "gateway_websockets": "Open WebSockets",
    "gateway_wire_bytes_total": "Bytes of step outputs that came from the engine",
    "gateway_wire_tokens_total": "Tokens that came from the engine",
    "engine_restarts_total": "Times that an engine took work after another one had",
    "key_live_streams": "Streams that have not ended, by API key",
    "key_output_tokens_total": "Tokens that were generated for an API key",
    "key_prompt_tokens_total": "Tokens of the prompts of an API key that went to the engine",
    "key_refused_total": "Requests of an API key that were refused, by the limit that was reached",
    "key_requests_total": "Requests of an API key that were let in",
    "time_per_output_token_seconds": "Mean time per token after a request's first",
    "time_to_first_token_seconds": "From a request's arrival at the gateway to its first token",
    # Requests and steps in the engine
    "aborts_total": "Requests that were ended before their time, by cause",
    "aborts_by_phase_total": "The same, by cause and by how far they had come: queued, prefill or decode",
    "avg_decode_latency_ms": "Mean time of the newest steps that held decodes only",
    "avg_e2e_latency_ms": "Mean time of the newest requests from arrival to end",
    "avg_prefill_latency_ms": "Mean time of the newest requests from their first step to their first token",
    "batch_size": "Sequences in the step that runs",
    "engine_decode_step_seconds": "Steps that held decodes only, from launch to collection",
    "engine_e2e_seconds": "From a request's arrival at the engine to its end",
    "engine_prefill_seconds": "From a request's first step to its first token",
    "engine_queue_seconds": "From a request's arrival at the engine to its first step",
    "engine_time_to_first_token_seconds": "From a request's arrival at the engine to its first token",
    "gateways_lost_total": "Gateways that fell silent for too long",
    "generated_tokens_total": "Tokens that were generated",
    "kept_stream_bytes": "Memory for ended streams that can still be attached to",
    "kept_streams_dropped_total": "Ended streams that lack of memory cost their grace period",
    "latency_model_error": "Mean of |predicted - measured| / measured over the newest steps",
    "num_detached_streams": "Live streams without a gateway",
    "num_gateways": "Gateways that the engine hears, and its supervisor",
    "num_kept_streams": "Ended streams that can still be attached to",
    "num_live_streams": "Streams in the engine that have not ended",
    "num_paused_requests": "Requests that stand aside for a slow reader",
    "num_paused_sequences": "Sequences that stand aside for a slow reader",
    "num_running_requests": "Requests of which a choice runs",
    "num_running_sequences": "Sequences that run",
    "num_waiting_requests": "Requests that wait to run",
    "num_waiting_sequences": "Sequences that wait to run",
    "pauses_total": "Times that a request was set aside",
    "prefill_tokens_total": "Prompt tokens that were computed, those computed again included",
    "prompt_tokens_total": "Tokens of the prompts that the engine took in",
    "recomputed_tokens_total": "Tokens that were computed again after a preemption",
    "requests_ended_total": "Requests by how they ended",
    "requests_received_total": "Requests that gateways sent",
    "requests_rejected_total": "Requests that the engine did not take, by code",
    "seconds_since_last_step": "Since a step finished while there is work",
    "steps_total": "Steps that were computed",
    "streams_attached_total": "Streams that a gateway took up again",
    "tokens_per_second": "Tokens generated per second over the last ten seconds",
    "unacked_bytes": "Output that gateways have not acknowledged",
    "unacked_pauses_total": "Times that a gateway's requests were set aside for what it had not acknowledged",
    "unreturned_tokens_total": "Tokens of choices that were made and, by best_of or beam search, not returned",
    "wasted_tokens_total": "Tokens that were computed for sequences that had ended",
    "wire_errors_total": "Messages from gateways that were dropped, by code",
    # KV memory
    "copy_on_write_copies_total": "Blocks that were copied because they were to be written and were shared",
    "damaged_disk_blocks_total": "Blocks that the disk was to give and could not; they were computed",
    "disk_hit_tokens_total": "Tokens that came from disk instead of being computed",
    "host_hit_tokens_total": "Tokens that came from host memory instead of being computed",
    "kv_cache_usage": "Owned blocks over all blocks, 0 to 1",
    "kv_slot_utilization": "Computed tokens over the slots of owned blocks, 0 to 1",
    "num_allocated_blocks": "Blocks that sequences own",
    "num_cached_blocks": "Blocks in the prefix cache that nobody owns",
    "num_disk_blocks": "Blocks that the disk may hold",
    "num_free_blocks": "Blocks that hold nothing",
    "num_host_blocks": "Blocks that host memory below the device may hold",
    "num_in_transfer_blocks": "Blocks that a running copy to or from host memory keeps",
    "num_running_transfers": "Copies of blocks between device, host memory and disk that run",
    "num_used_disk_blocks": "Blocks on disk",
    "num_used_host_blocks": "Blocks in host memory below the device",
    "offload_bytes_total": "Bytes of blocks that were copied, by direction",
    "preemptions_total": "Times that a sequence lost its blocks, by how it comes back",
    "prefix_cache_evictions_total": "Blocks that were dropped from the prefix cache",
    "prefix_hit_tokens_total": "Prompt tokens that were found in the prefix cache",
    "prefix_query_tokens_total": "Prompt tokens that were looked for in the prefix cache",
    "transfers_total": "Copies of blocks between device, host memory and disk, by direction",
}
"""By name without prefix. What the engine sends under a name that is not here is shown without words."""

_HISTOGRAMS: Final = frozenset(
    {
        "e2e_request_latency_seconds",
        "engine_decode_step_seconds",
        "engine_e2e_seconds",
        "engine_prefill_seconds",
        "engine_queue_seconds",
        "engine_time_to_first_token_seconds",
        "time_per_output_token_seconds",
        "time_to_first_token_seconds",
    }
)
_LIMITS: Final = (REQUESTS, TOKENS, CONCURRENCY)
_OUTCOMES: Final = ("stop", "length", "abort", "error")
_SHED: Final = (
    *(f"caller_{limit}" for limit in _LIMITS),
    *("draining", "engine_draining", "engine_not_ready", "queue_full", "too_many_wait"),
)
"""Shown with 0 from the start, so that a first one is seen as an increase."""
_LAG_PERIOD_S: Final = 0.5
_LAG_WINDOW_S: Final = 10.0

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

    def plus(self, counts: Sequence[int], total: float) -> "Distribution":
        """This and what another of the same bounds has counted; none: an empty sequence."""
        added = Distribution(self._bounds)
        added._counts = [a + b for a, b in zip(self._counts, counts, strict=True)] if counts else list(self._counts)
        added._total = self._total + total
        return added


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
    shed: Counter[str] = field(default_factory=Counter)
    """Requests that were turned away, by reason."""
    key_requests: Counter[str] = field(default_factory=Counter)
    """Those that were let in, by the name of their key; empty for the anonymous caller. So are the next ones."""
    key_prompt_tokens: Counter[str] = field(default_factory=Counter)
    key_output_tokens: Counter[str] = field(default_factory=Counter)
    key_live: Counter[str] = field(default_factory=Counter)
    """Streams."""
    key_refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By key and limit."""
    ttft: Distribution = field(default_factory=Distribution)
    tpot: Distribution = field(default_factory=Distribution)
    e2e: Distribution = field(default_factory=Distribution)

    def keep(self, key_names: Collection[str]) -> None:
        """Forget the figures of keys that are not among these."""
        for figures in (self.key_requests, self.key_prompt_tokens, self.key_output_tokens):
            for name in figures.keys() - key_names:
                del figures[name]
        for pair in [pair for pair in self.key_refused if pair[0] not in key_names]:
            del self.key_refused[pair]
        for name in [name for name, num_live in self.key_live.items() if name not in key_names and not num_live]:
            del self.key_live[name]


class LoopLag:
    """How late the event loop is: what stands in its way stands in every stream's."""

    def __init__(self) -> None:
        self._late: deque[float] = deque(maxlen=round(_LAG_WINDOW_S / _LAG_PERIOD_S))
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """On the running loop."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(_LAG_PERIOD_S, self._tick, loop.time() + _LAG_PERIOD_S)

    def _tick(self, due_s: float) -> None:
        self._late.append(max(0.0, asyncio.get_running_loop().time() - due_s))
        self.start()

    @property
    def longest_s(self) -> float:
        """Of the last ten seconds."""
        return max(self._late, default=0.0)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def process_figures() -> tuple[dict[str, float], dict[str, float]]:
    """(gauges, counters) of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            resident_bytes = int(file.read().split()[1]) * resource.getpagesize()
        num_open = len(os.listdir("/proc/self/fd"))
    except OSError:  # not Linux
        resident_bytes = num_open = 0
    max_open = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return {
        "gateway_resident_memory_bytes": resident_bytes,
        "gateway_open_files": num_open,
        "gateway_max_open_files": max_open if max_open != resource.RLIM_INFINITY else 0,
    }, {"gateway_cpu_seconds_total": usage.ru_utime + usage.ru_stime}


def render(
    metrics: GatewayMetrics,
    *,
    gauges: Mapping[str, float],
    counters: Mapping[str, float],
    engine: Stats | None,
    key_names: Collection[str] = (),
    shed: Mapping[str, int] | None = None,
) -> bytes:
    """Prometheus text. gauges, counters: the gateway's figures of this moment, by name without prefix. key_names: the
    API keys that there are, which alone become labels. shed: what others than those who count in `metrics` turned away.

    A family of which nothing is known yet is announced without a sample, so that every name is always there.
    """
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
    _labelled(lines, "gateway_requests_total", "outcome", dict.fromkeys(_OUTCOMES, 0) | metrics.outcomes)
    _labelled(lines, "gateway_refused_total", "status", metrics.refused)
    _labelled(lines, "gateway_aborts_total", "cause", metrics.aborts)
    _labelled(lines, "gateway_shed_total", "reason", {**dict.fromkeys(_SHED, 0), **metrics.shed, **(shed or {})})
    _key_families(lines, metrics, key_names)
    _histogram(lines, "time_to_first_token_seconds", metrics.ttft.snapshot())
    _histogram(lines, "time_per_output_token_seconds", metrics.tpot.snapshot())
    _histogram(lines, "e2e_request_latency_seconds", metrics.e2e.snapshot())
    if engine is not None:
        _families(lines, "gauge", engine.gauges)
        _families(lines, "counter", engine.counters)
        for name, histogram in engine.histograms.items():
            _histogram(lines, name, histogram)
    told = {line.split(" ", 3)[2].removeprefix(PREFIX) for line in lines if line.startswith("# TYPE ")}
    for name in sorted(HELP.keys() - told):
        _head(lines, name, kind_of(name))
    lines.append("")
    return "\n".join(lines).encode()


def _key_families(lines: list[str], metrics: GatewayMetrics, key_names: Collection[str]) -> None:
    names = sorted(key_names)
    for family, figures in (
        ("key_requests_total", metrics.key_requests),
        ("key_prompt_tokens_total", metrics.key_prompt_tokens),
        ("key_output_tokens_total", metrics.key_output_tokens),
    ):
        _labelled(lines, family, "key", {name: figures[name] for name in names})
    _head(lines, "key_live_streams", "gauge")
    lines += (f'{PREFIX}key_live_streams{{key="{_escaped(name)}"}} {_number(metrics.key_live[name])}' for name in names)
    _head(lines, "key_refused_total", "counter")
    for name in names:
        for limit in _LIMITS:
            labels = f'key="{_escaped(name)}",limit="{limit}"'
            lines.append(f"{PREFIX}key_refused_total{{{labels}}} {_number(metrics.key_refused[name, limit])}")


def kind_of(name: str) -> str:
    """Of a family that is announced before it has a sample."""
    if name.endswith("_total"):
        return "counter"
    return "histogram" if name in _HISTOGRAMS else "gauge"


def _head(lines: list[str], name: str, kind: str) -> None:
    """What stands before a family's samples."""
    if text := HELP.get(name):
        lines.append(f"# HELP {PREFIX}{name} {text}")
    lines.append(f"# TYPE {PREFIX}{name} {kind}")


def _simple(lines: list[str], name: str, kind: str, value: float) -> None:
    _head(lines, name, kind)
    lines.append(f"{PREFIX}{name} {_number(value)}")


def _labelled(lines: list[str], name: str, label: str, values: Mapping[str, float]) -> None:
    _head(lines, name, "counter")
    lines += (f'{PREFIX}{name}{{{label}="{_escaped(key)}"}} {_number(value)}' for key, value in sorted(values.items()))


def _families(lines: list[str], kind: str, figures: Mapping[str, float]) -> None:
    """Names may carry labels, as `aborts_total{cause="cancelled"}`; those of one family stand together."""
    families: dict[str, list[tuple[str, float]]] = {}
    for name, value in figures.items():
        families.setdefault(name.partition("{")[0], []).append((name, value))
    for family, members in families.items():
        _head(lines, family, kind)
        lines += (f"{PREFIX}{name} {_number(value)}" for name, value in members)


def _histogram(lines: list[str], name: str, histogram: Histogram) -> None:
    _head(lines, name, "histogram")
    total = 0
    bounds: Iterable[str] = [*(_number(bound) for bound in histogram.bounds), "+Inf"]
    for bound, count in zip(bounds, histogram.counts, strict=True):
        total += count
        lines.append(f'{PREFIX}{name}_bucket{{le="{bound}"}} {total}')
    lines.append(f"{PREFIX}{name}_sum {_number(histogram.total)}")
    lines.append(f"{PREFIX}{name}_count {total}")


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return repr(float(value)) if value != int(value) else str(int(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
