"""The engine's figures for /metrics: what happened, counted; how long it took, in histograms and recent means.

Names stand without the `streamkv_` prefix. A counter that is split by a label has it in its name, as Prometheus
writes it: `requests_ended_total{reason="stop"}`. Nothing here costs more than an addition per token.
"""

import re
from bisect import bisect_left
from collections import Counter, deque
from typing import Final

from engine.sequence import Request, SequenceOutput
from streamkv.protocol import Histogram, StepRecord

LATENCY_BOUNDS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 600.0),
)

_RATE_WINDOW_S: Final = 10
_RECENT_VALUES: Final = 256
_RECENT_STEPS: Final = 512
_MAX_CAUSES: Final = 32
_CAUSE: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")


class Tally:
    """A histogram that grows, and the mean of its newest values."""

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BOUNDS_S) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._recent: deque[float] = deque(maxlen=_RECENT_VALUES)

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value
        self._recent.append(value)

    @property
    def recent_mean(self) -> float:
        """Of the last 256 values; 0 before the first."""
        return sum(self._recent) / len(self._recent) if self._recent else 0.0

    def quantiles(self) -> list[float]:
        """Of the last 256 values: those at 50, 90 and 99 %; empty before the first."""
        ordered = sorted(self._recent)
        if not ordered:
            return []
        return [ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 90, 99)]

    def histogram(self) -> Histogram:
        return Histogram(list(self._bounds), list(self._counts), self._total)


class Rate:
    """Events per second over the last ten seconds."""

    def __init__(self) -> None:
        self._buckets: deque[tuple[int, int]] = deque()
        """(second, events in it), oldest first."""

    def add(self, now_s: float, count: int) -> None:
        second = int(now_s)
        if self._buckets and self._buckets[-1][0] == second:
            count += self._buckets.pop()[1]
        self._buckets.append((second, count))
        self._drop_old(now_s)

    def per_second(self, now_s: float) -> float:
        self._drop_old(now_s)
        if not self._buckets:
            return 0.0
        # A window that has only begun is measured over what has passed of it, and over no less than a second.
        return sum(count for _, count in self._buckets) / max(1.0, now_s - self._buckets[0][0])

    def _drop_old(self, now_s: float) -> None:
        while self._buckets and self._buckets[0][0] <= now_s - _RATE_WINDOW_S:
            self._buckets.popleft()


class EngineStats:
    """Everything that is counted over the engine's life. Gauges are asked of their owners when Stats is built."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.generated = Rate()
        self.queue = Tally()
        """Seconds from arrival to the first step, per request."""
        self.prefill = Tally()
        """Seconds from the first step to the first token, per request."""
        self.first_token = Tally()
        """Seconds from arrival to the first token, per request."""
        self.e2e = Tally()
        """Seconds from arrival to the end, per request."""
        self.output_tokens = Tally(())
        """Tokens generated per choice of a request that has ended; for their mean."""
        self.decode_step = Tally()
        """Seconds of a step with decodes only, launch to collect."""
        self.batch_size = 0
        """Sequences in the newest step."""
        self.steps: deque[StepRecord] = deque(maxlen=_RECENT_STEPS)
        self._causes: set[str] = set()

    def count_outputs(self, outputs: list[SequenceOutput], now_s: float) -> None:
        """Count the tokens and ends that are about to be published."""
        num_tokens = 0
        last: dict[Request, SequenceOutput] = {}
        for output in outputs:
            num_tokens += len(output.token_ids)
            if output.finish_reason and output.sequence.request.is_finished:
                last[output.sequence.request] = output
        for output in last.values():
            self._count_end(output, now_s)
        self.counters["generated_tokens_total"] += num_tokens
        self.generated.add(now_s, num_tokens)

    def _count_end(self, output: SequenceOutput, now_s: float) -> None:
        """A request has ended. Of several choices the reason of the last one counts."""
        request = output.sequence.request
        self.counters[f'requests_ended_total{{reason="{output.finish_reason}"}}'] += 1
        if output.finish_reason == "abort":
            self._count_cause(output.cause, request)
        self.e2e.add(now_s - request.arrival_s)
        self.output_tokens.add(sum(sequence.num_output for sequence in request.sequences) / len(request.sequences))
        if request.first_scheduled_s:
            self.queue.add(request.first_scheduled_s - request.arrival_s)
        if request.first_token_s:
            self.prefill.add(request.first_token_s - request.first_scheduled_s)
            self.first_token.add(request.first_token_s - request.arrival_s)

    def _count_cause(self, cause: str, request: Request) -> None:
        """Count an abort, and how far it had come: queued, prefill or decode. Causes come from outside: odd or ever new
        ones count as `other`."""
        if cause not in self._causes:
            if len(self._causes) < _MAX_CAUSES and _CAUSE.fullmatch(cause):
                self._causes.add(cause)
            else:
                cause = "other"
        phase = "decode" if request.first_token_s else "prefill" if request.first_scheduled_s else "queued"
        self.counters[f'aborts_total{{cause="{cause}"}}'] += 1
        self.counters[f'aborts_by_phase_total{{cause="{cause}",phase="{phase}"}}'] += 1

    def histograms(self) -> dict[str, Histogram]:
        return {
            "engine_queue_seconds": self.queue.histogram(),
            "engine_prefill_seconds": self.prefill.histogram(),
            "engine_time_to_first_token_seconds": self.first_token.histogram(),
            "engine_e2e_seconds": self.e2e.histogram(),
            "engine_decode_step_seconds": self.decode_step.histogram(),
        }
