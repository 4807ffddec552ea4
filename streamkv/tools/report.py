"""What a benchmark's records say: figures, a table, and a plot of latency over time.

TTFT     request sent → first event with output
ITL      gap between two successive reads with output; a server that packs several tokens into an event shows fewer
         and larger gaps, so compare TPOT too
TPOT     (last output − first output) / (output tokens − 1), mean over requests
goodput  requests per second that met the limits on TTFT and on TPOT
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from streamkv.tools.workloads import STALL_PROMPTS

PLOT_BINS = 60


class Record(msgspec.Struct):
    """One request's fate. Times are of one monotonic clock, seconds."""

    index: int
    wanted_tokens: int
    prompt_tokens: int
    injected: bool = False
    start_s: float = 0.0
    end_s: float = 0.0
    output_times_s: list[float] = []
    """One for each read that carried output."""
    output_tokens: int = 0
    counted_by_server: bool = False
    """False: the server sent no usage, so output_tokens is the number of events with output."""
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.output_times_s[0] - self.start_s

    @property
    def tpot_s(self) -> float:
        return (self.output_times_s[-1] - self.output_times_s[0]) / max(1, self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.output_times_s)]


class Spread(msgspec.Struct):
    """Percentiles, milliseconds. NaN does not exist in JSON: no values, no Spread."""

    p50: float
    p90: float
    p99: float
    max: float
    mean: float


class Stall(msgspec.Struct):
    """What the streams of `stall` noticed of the long prompts, milliseconds."""

    stream_gap_ms: Spread | None
    stream_gap_before_ms: Spread | None
    """Until the first long prompt was sent."""
    stream_worst_gap_each_ms: Spread | None
    injected_ttft_ms: list[float]
    injected_while_streams_ran: int


class Goodput(msgspec.Struct):
    """Requests within both limits."""

    slo_ttft_s: float
    slo_tpot_s: float
    met: int
    requests_per_s: float


class Summary(msgspec.Struct):
    """All figures of one run."""

    workload: str
    ok: int
    failed: int
    unexpected_length: int
    """Good requests whose output has not the length that was asked for."""
    without_usage: int
    wall_s: float
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Spread | None
    itl_ms: Spread | None
    tpot_ms_mean: float | None
    e2e_ms: Spread | None
    goodput: Goodput
    client_cpu_percent: float
    """Of one core, over all client processes; near 100 for one of them: the client is what is measured."""
    errors: dict[str, int]
    """Failed requests by reason."""
    stall: Stall | None = None
    options: dict[str, object] = {}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of values in ascending order, at least one; linear between neighbours."""
    place = (len(ordered) - 1) * percent / 100
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(seconds: Iterable[float]) -> Spread | None:
    """Percentiles of durations, in milliseconds; None without any."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    p50, p90, p99 = (round(percentile(ordered, percent) * 1e3, 3) for percent in (50, 90, 99))
    return Spread(p50, p90, p99, round(ordered[-1] * 1e3, 3), round(sum(ordered) / len(ordered) * 1e3, 3))


def summarise(
    workload: str, records: Sequence[Record], slo_ttft_s: float, slo_tpot_s: float, client_cpu_s: float
) -> Summary:
    """All figures of at least one record."""
    good = [record for record in records if not record.error]
    timed = [record for record in good if record.output_times_s]
    wall_s = max(record.end_s for record in records) - min(record.start_s for record in records)
    wall_s = max(wall_s, 1e-9)
    met = sum(1 for record in timed if record.ttft_s <= slo_ttft_s and record.tpot_s <= slo_tpot_s)
    num_prompt = sum(record.prompt_tokens for record in good)
    num_output = sum(record.output_tokens for record in good)
    tpot = spread(record.tpot_s for record in timed)
    return Summary(
        workload=workload,
        ok=len(good),
        failed=len(records) - len(good),
        unexpected_length=sum(1 for record in good if record.output_tokens != record.wanted_tokens),
        without_usage=sum(1 for record in good if not record.counted_by_server),
        wall_s=round(wall_s, 3),
        prompt_tokens=num_prompt,
        output_tokens=num_output,
        requests_per_s=round(len(good) / wall_s, 3),
        output_tokens_per_s=round(num_output / wall_s, 1),
        total_tokens_per_s=round((num_prompt + num_output) / wall_s, 1),
        ttft_ms=spread(record.ttft_s for record in timed),
        itl_ms=spread(gap for record in timed for gap in record.gaps_s),
        tpot_ms_mean=tpot.mean if tpot else None,
        e2e_ms=spread(record.end_s - record.start_s for record in good),
        goodput=Goodput(slo_ttft_s, slo_tpot_s, met, round(met / wall_s, 3)),
        client_cpu_percent=round(100 * client_cpu_s / wall_s, 1),
        errors=dict(Counter(record.error for record in records if record.error).most_common()),
        stall=_stall(timed) if any(record.injected for record in records) else None,
    )


def _stall(timed: Sequence[Record]) -> Stall:
    streams = [record for record in timed if not record.injected]
    injected = [record for record in timed if record.injected]
    first_s = min((record.start_s for record in injected), default=math.inf)
    last_s = max((record.end_s for record in streams), default=-math.inf)
    return Stall(
        stream_gap_ms=spread(gap for record in streams for gap in record.gaps_s),
        stream_gap_before_ms=spread(
            later - earlier
            for record in streams
            for earlier, later in pairwise(record.output_times_s)
            if later <= first_s
        ),
        stream_worst_gap_each_ms=spread(max(record.gaps_s) for record in streams if record.gaps_s),
        injected_ttft_ms=[round(record.ttft_s * 1e3, 1) for record in injected],
        injected_while_streams_ran=sum(1 for record in injected if record.start_s < last_s),
    )


def table(summary: Summary) -> str:
    """The figures for people."""
    goodput = summary.goodput
    rows = [
        ("requests", f"{summary.ok} ok, {summary.failed} failed, {summary.unexpected_length} of unexpected length"),
        ("wall", f"{summary.wall_s:.2f} s   {summary.requests_per_s:.2f} requests/s"),
        (
            "tokens/s",
            f"{summary.output_tokens_per_s:.1f} output   {summary.total_tokens_per_s:.1f} prompt + output",
        ),
        ("TTFT ms", _row(summary.ttft_ms)),
        ("ITL ms", _row(summary.itl_ms)),
        ("TPOT ms", "none" if summary.tpot_ms_mean is None else f"mean {summary.tpot_ms_mean:.2f}"),
        ("e2e ms", _row(summary.e2e_ms)),
        (
            "goodput",
            f"{goodput.requests_per_s:.2f} requests/s: {goodput.met} with TTFT <= {goodput.slo_ttft_s:g} s and "
            f"TPOT <= {goodput.slo_tpot_s:g} s",
        ),
        ("client CPU", f"{summary.client_cpu_percent:.0f} % of one core"),
    ]
    if summary.stall:
        stall = summary.stall
        rows += [
            ("stream gap", f"{_row(stall.stream_gap_ms)} ms   before: {_row(stall.stream_gap_before_ms)}"),
            ("worst each", f"{_row(stall.stream_worst_gap_each_ms)} ms"),
            (
                "injected",
                f"{stall.injected_while_streams_ran} of {STALL_PROMPTS} while streams ran; "
                f"TTFT ms {', '.join(map(str, stall.injected_ttft_ms)) or 'none'}",
            ),
        ]
    if summary.without_usage:
        rows.append(("note", f"{summary.without_usage} answers without usage: their events were counted as tokens"))
    rows += [("failed", f"{count} x {reason}") for reason, count in summary.errors.items()]
    return "\n".join([f"== {summary.workload}", *(f"  {name:<11} {text}" for name, text in rows)])


def _row(values: Spread | None) -> str:
    if values is None:
        return "none"
    return f"p50 {values.p50:.1f}  p90 {values.p90:.1f}  p99 {values.p99:.1f}  max {values.max:.1f}"


class Timeline(msgspec.Struct):
    """A run in equal bins of time, from its start."""

    middle_s: list[float]
    itl_ms: dict[int, list[float]]
    """Percentile → its value in each bin; NaN where no token came."""
    tokens_per_s: list[float]
    sent_s: list[float]
    """When each good request was sent …"""
    ttft_ms: list[float]
    """… and how long its first token took."""


def timeline(records: Sequence[Record], num_bins: int = PLOT_BINS) -> Timeline:
    """Latency and throughput over the run. A read's share of its request's tokens is taken as equal."""
    start_s = min(record.start_s for record in records)
    timed = [record for record in records if not record.error and record.output_times_s]
    end_s = max((record.output_times_s[-1] for record in timed), default=start_s)
    width_s = max(end_s - start_s, 1e-6) / num_bins
    gaps = [array("d") for _ in range(num_bins)]
    tokens = [0.0] * num_bins
    for record in timed:
        per_read = record.output_tokens / len(record.output_times_s)
        places = [min(int((time_s - start_s) / width_s), num_bins - 1) for time_s in record.output_times_s]
        for place in places:
            tokens[place] += per_read
        for place, gap in zip(places[1:], record.gaps_s, strict=True):
            gaps[place].append(gap)
    ordered = [sorted(in_bin) for in_bin in gaps]
    return Timeline(
        middle_s=[(place + 0.5) * width_s for place in range(num_bins)],
        itl_ms={q: [percentile(bin_, q) * 1e3 if bin_ else math.nan for bin_ in ordered] for q in (50, 90, 99)},
        tokens_per_s=[count / width_s for count in tokens],
        sent_s=[record.start_s - start_s for record in timed],
        ttft_ms=[record.ttft_s * 1e3 for record in timed],
    )


def plot(title: str, records: Sequence[Record], path: Path) -> None:
    """Latency over time as a PNG: TTFT of each request, ITL percentiles, output tokens per second.

    Needs matplotlib; raises ImportError without it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    line = timeline(records)
    figure = Figure(figsize=(10, 9), layout="constrained")
    FigureCanvasAgg(figure)
    first, between, throughput = figure.subplots(3, 1, sharex=True)
    first.plot(line.sent_s, line.ttft_ms, ".", color="tab:blue")
    first.set_ylabel("TTFT, ms")
    first.set_title(title)
    for percent, values in line.itl_ms.items():
        between.plot(line.middle_s, values, label=f"p{percent}")
    between.set_ylabel("ITL, ms")
    between.legend(loc="upper right")
    throughput.plot(line.middle_s, line.tokens_per_s, color="tab:green")
    throughput.set_ylabel("output tokens/s")
    throughput.set_xlabel("seconds since the start")
    for axes in (first, between, throughput):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=110)
