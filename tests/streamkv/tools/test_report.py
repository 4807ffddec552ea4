"""A benchmark's figures, from records whose figures are known."""

import math
from pathlib import Path

import pytest

from streamkv.tools.report import Record, percentile, plot, spread, summarise, table, timeline


def record(index: int, start_s: float, times_s: list[float], tokens: int, **changes: object) -> Record:
    made = Record(index, wanted_tokens=tokens, prompt_tokens=10, start_s=start_s, end_s=(times_s or [start_s])[-1])
    made.output_times_s, made.output_tokens, made.counted_by_server = times_s, tokens, True
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_percentiles_are_linear_between_neighbours() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([1.0], 99) == 1.0
    assert percentile([0.0, 10.0], 90) == pytest.approx(9.0)
    assert spread([]) is None


def test_figures_of_a_run() -> None:
    records = [
        record(0, 100.0, [100.1, 100.2, 100.4], 3),
        record(1, 100.0, [100.5, 101.5], 5),
        record(2, 101.0, [], 0, error="HTTP 503: full", end_s=102.0),
        record(3, 101.0, [], 0, error="HTTP 503: full", end_s=101.0),
    ]
    records[1].wanted_tokens = 6
    summary = summarise("w", records, slo_ttft_s=0.2, slo_tpot_s=1.0, client_cpu_s=0.5)
    assert (summary.ok, summary.failed, summary.unexpected_length) == (2, 2, 1)
    assert summary.errors == {"HTTP 503: full": 2}
    assert summary.wall_s == 2.0 and summary.output_tokens == 8 and summary.output_tokens_per_s == 4.0
    assert summary.prompt_tokens == 20 and summary.total_tokens_per_s == 14.0
    assert summary.ttft_ms and (summary.ttft_ms.p50, summary.ttft_ms.max) == (300.0, 500.0)
    assert summary.itl_ms and (summary.itl_ms.p50, summary.itl_ms.max) == (200.0, 1000.0)
    assert summary.tpot_ms_mean == pytest.approx((150 + 250) / 2)
    assert (summary.goodput.met, summary.goodput.requests_per_s) == (1, 0.5)
    assert summary.client_cpu_percent == 25.0
    shown = table(summary)
    assert "2 ok, 2 failed, 1 of unexpected length" in shown and "2 x HTTP 503: full" in shown


def test_a_run_in_which_all_failed_has_figures_too() -> None:
    summary = summarise("w", [record(0, 1.0, [], 0, error="x", end_s=1.0)], 1.0, 1.0, 0.0)
    assert (summary.ok, summary.failed, summary.ttft_ms, summary.tpot_ms_mean) == (0, 1, None, None)
    assert "1 x x" in table(summary)


def test_answers_without_usage_are_said() -> None:
    summary = summarise("w", [record(0, 1.0, [2.0], 1, counted_by_server=False)], 1.0, 1.0, 0.0)
    assert summary.without_usage == 1 and "1 answers without usage" in table(summary)


def test_stall_compares_gaps_before_and_after_the_first_long_prompt() -> None:
    stream = record(0, 0.0, [1.0, 1.1, 1.2, 3.2, 3.3], 5)
    late = record(1, 1.5, [4.0], 8, injected=True)
    stall = summarise("stall", [stream, late], 1.0, 1.0, 0.0).stall
    assert stall and stall.stream_gap_ms and stall.stream_gap_before_ms
    assert (stall.stream_gap_ms.max, stall.stream_gap_before_ms.max) == (2000.0, 100.0)
    assert (stall.injected_ttft_ms, stall.injected_while_streams_ran) == ([2500.0], 1)


def test_a_timeline_puts_tokens_and_gaps_where_they_were() -> None:
    line = timeline([record(0, 0.0, [1.0, 2.0, 10.0], 6), record(1, 0.0, [], 0, error="x")], num_bins=10)
    assert line.tokens_per_s == [0, 2, 2, 0, 0, 0, 0, 0, 0, 2]  # two tokens a read, the end in the last bin
    assert [math.isnan(value) for value in line.itl_ms[50]] == [True] * 2 + [False] + [True] * 6 + [False]
    assert (line.itl_ms[50][2], line.itl_ms[99][9]) == (1000.0, 8000.0)
    assert (line.sent_s, line.ttft_ms) == ([0.0], [1000.0])


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot("two requests", [record(0, 0.0, [1.0, 2.0], 2), record(1, 0.5, [1.5, 2.5], 2)], tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
