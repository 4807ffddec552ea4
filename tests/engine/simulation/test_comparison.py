"""Two ways to use the same memory, on the same device."""

import random
from math import isnan

import pytest

from engine.simulation.__main__ import main
from engine.simulation.comparison import H200_LLAMA_8B, Arrival, compare, mixed_arrivals, table
from streamkv import lengths
from streamkv.tools.workloads import Builder, Shape


def test_the_requests_are_those_that_the_bench_sends():
    sent = Builder("mixed", Shape(seed=3)).build().requests[:50]
    played = mixed_arrivals(50, 0.0, 3)
    assert [(r.prompt, r.output_tokens) for r in sent] == [(a.prompt, a.output_tokens) for a in played]


def test_paged_memory_is_used_and_contiguous_memory_is_not():
    """The issue's aims: at least 96 % where the pool is 80 % full, three times the throughput of static batching."""
    arrivals = mixed_arrivals(96, 0.0, 0)
    paged, static, exact = compare(arrivals, ("paged", "static", "exact"), 16_384, 256)
    assert paged.mean_use >= 0.96 and paged.least_use >= 0.95
    assert static.mean_use < 0.4
    assert paged.output_tokens_per_s > 3 * static.output_tokens_per_s > 0
    assert paged.output_tokens_per_s > exact.output_tokens_per_s > static.output_tokens_per_s
    assert paged.largest_batch >= 2 * static.largest_batch == 2 * (16_384 // 3072)
    assert paged.latency_p99_s < static.latency_p99_s
    assert "paged, the real scheduler" in table([paged])


def test_static_batches_take_what_their_longest_member_takes():
    """Two batches of two by hand: prompts in one step, then as many decodes as the longest output has left."""
    cost = H200_LLAMA_8B
    arrivals = [Arrival([1] * 100, n, 0.0) for n in (3, 1, 2, 2)]
    (figures,) = compare(arrivals, ("static",), 2 * 3072, 8)
    prefill_s = cost.base_s + 200 * cost.token_s + 2 * 5050 * cost.pair_s  # over the time to read the weights
    decode_s = cost.base_s + cost.weights_s
    kv_s = cost.kv_token_s
    first_s = prefill_s + 2 * decode_s + (101 + 102) * kv_s
    second_s = prefill_s + decode_s + 202 * kv_s
    assert figures.elapsed_s == pytest.approx(first_s + second_s, rel=1e-9)
    assert figures.largest_batch == 2
    assert isnan(figures.mean_use) or figures.mean_use < 0.05


def test_arrivals_wait_for_the_batch_before_them():
    arrivals = [Arrival([1] * 16, 50, 0.0), Arrival([1] * 16, 1, 1e-6)]
    paged, static = compare(arrivals, ("paged", "static"), 2 * 3072, 8)
    assert static.latency_p50_s > 0.2 and paged.elapsed_s < static.elapsed_s


def test_the_table_is_printed(capsys):
    assert main(["--workload", "mixed", "--requests", "8", "--kv-gib", "0.5"]) == 0
    assert capsys.readouterr().out.count("\n") == 5
    with pytest.raises(SystemExit):
        main(["--workload", "mixed", "--kv-gib", "0.1"])


def test_lengths_stay_within_their_limits():
    dice = random.Random(0)
    drawn = [lengths.mixed(dice) for _ in range(2000)]
    for values, (median, _, low, high) in zip(
        zip(*drawn, strict=True), (lengths.MIXED_PROMPTS, lengths.MIXED_OUTPUTS), strict=True
    ):
        assert low <= min(values) and max(values) <= high
        assert sorted(values)[1000] == pytest.approx(median, rel=0.1)
