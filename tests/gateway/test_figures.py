"""Figures of several gateways add up."""

from collections import Counter

from gateway.figures import Figures
from gateway.metrics import GatewayMetrics


def figures(seed: int) -> Figures:
    metrics = GatewayMetrics(
        outcomes=Counter(stop=seed, length=2),
        num_prompt_tokens=10 * seed,
        key_refused=Counter({("alice", "tokens"): seed, ("", "requests"): 1}),
    )
    metrics.ttft.observe(0.02 * seed)
    gauges = {"gateway_live_streams": float(seed), "gateway_uptime_seconds": 100.0 + seed, "engine_ready": 1.0}
    return Figures(
        metrics, gauges, {"gateway_wire_tokens_total": 7.0, "engine_restarts_total": 2.0}, {"draining": seed}
    )


def test_what_is_counted_is_added_and_what_each_sees_is_not() -> None:
    first = figures(1)
    total = first.add(figures(3).pack()).add(figures(5).pack())
    metrics = total.metrics
    assert metrics.outcomes == {"stop": 9, "length": 6} and metrics.num_prompt_tokens == 90
    assert metrics.key_refused == {("alice", "tokens"): 9, ("", "requests"): 3}
    histogram = metrics.ttft.snapshot()
    assert sum(histogram.counts) == 3 and abs(histogram.total - 0.18) < 1e-9
    assert total.gauges == {"gateway_live_streams": 9.0, "gateway_uptime_seconds": 105.0, "engine_ready": 1.0}
    assert total.counters == {"gateway_wire_tokens_total": 21.0, "engine_restarts_total": 2.0}
    assert total.shed == {"draining": 9}
    assert first.metrics.outcomes == {"stop": 1, "length": 2}, "the parts stay as they are"


def test_every_figure_of_a_gateway_survives_the_way_to_another() -> None:
    packed = figures(4).pack()
    assert (
        Figures(GatewayMetrics(), dict.fromkeys(figures(4).gauges, 0.0), dict.fromkeys(figures(4).counters, 0.0))
        .add(packed)
        .pack()
        == packed
    )
