"""/metrics: every promised name is there with its words, and the dashboard asks for nothing else."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from gateway.limits import Allowance
from gateway.metrics import HELP, GatewayMetrics, LoopLag, process_figures, render
from tests.support.api_keys import ALICE, BOB, bearer, keys_with
from tests.support.running_gateway import VOCAB_SIZE, RunningGateway, eventually, eventually_async, running_gateway
from tests.support.scripted_engine import free_endpoint, serving
from tests.support.scripted_executor import ScriptedExecutor

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "docker" / "grafana" / "dashboards" / "streamkv.json"
TEXT = "/v1/completions"


def words(text: str) -> list[str]:
    return text.split()


GAUGES = words(
    """
    kv_cache_usage num_free_blocks num_allocated_blocks num_running_requests num_waiting_requests batch_size
    tokens_per_second avg_prefill_latency_ms avg_decode_latency_ms avg_e2e_latency_ms seconds_since_last_step
    latency_model_error num_cached_blocks num_in_transfer_blocks num_paused_requests kv_slot_utilization engine_ready
    gateway_live_streams gateway_websockets gateway_resident_memory_bytes gateway_open_files gateway_max_open_files
    gateway_loop_lag_seconds gateway_start_time_seconds gateway_uptime_seconds key_live_streams
    """
)
COUNTERS = words(
    """
    prefix_hit_tokens prefix_query_tokens prefix_cache_evictions preemptions copy_on_write_copies offload_bytes aborts
    aborts_by_phase requests_received requests_rejected requests_ended generated_tokens prompt_tokens steps
    gateway_requests gateway_refused gateway_shed gateway_aborts engine_restarts gateway_engine_losses
    gateway_attached_streams gateway_slow_reader_pauses gateway_resubmitted gateway_cpu_seconds gateways_lost
    key_requests key_prompt_tokens key_output_tokens key_refused
    """
)
HISTOGRAMS = words(
    """
    time_to_first_token_seconds time_per_output_token_seconds e2e_request_latency_seconds engine_queue_seconds
    engine_prefill_seconds engine_decode_step_seconds engine_e2e_seconds engine_time_to_first_token_seconds
    """
)


def families_of(text: str) -> dict[str, Metric]:
    """By name without prefix; a counter's without `_total`."""
    return {family.name.removeprefix("streamkv_"): family for family in text_string_to_metric_families(text)}


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    api_keys = keys_with(alice=Allowance(), bob=Allowance(requests_per_minute=1))
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        async with running_gateway(engine.endpoint, api_keys=api_keys) as running:
            yield running


async def page(gateway: RunningGateway, key: str = ALICE) -> str:
    async with gateway.session.get(gateway.url + "/metrics", headers=bearer(key)) as response:
        assert response.status == 200
        return await response.text()


async def test_every_promised_name_is_there_before_anything_has_happened(gateway: RunningGateway) -> None:
    families = families_of(await page(gateway))
    kinds = {"gauge": GAUGES, "counter": COUNTERS, "histogram": HISTOGRAMS}
    for kind, names in kinds.items():
        for name in names:
            assert name in families, name
            assert families[name].type == kind, name
            assert families[name].documentation, name
    text = await page(gateway)
    for name in HELP:
        assert text.count(f"# HELP streamkv_{name} ") == text.count(f"# TYPE streamkv_{name} ") == 1, name


async def test_without_an_engine_the_names_stand_all_the_same() -> None:
    with free_endpoint() as endpoint:
        async with running_gateway(endpoint, is_ready=False) as gateway:
            _, text = await gateway.get("/metrics")
    families = families_of(text)
    assert {*GAUGES, *COUNTERS, *HISTOGRAMS} <= families.keys()
    assert families["num_free_blocks"].samples == [], "what is not known has no value"


async def test_counters_by_cause_add_up_to_what_was_sent(gateway: RunningGateway) -> None:
    async def drop(**more: Any) -> None:
        request = {"prompt": [5, 6], "max_tokens": 1500, "stream": True, **more}
        async with gateway.session.post(gateway.url + TEXT, json=request, headers=bearer(ALICE)) as response:
            await response.content.readany()

    await asyncio.gather(drop(), drop())
    for _ in range(3):
        await gateway.post(TEXT, {"prompt": [5, 6], "max_tokens": 4}, headers=bearer(ALICE))

    async def are_told() -> bool:
        return (await gateway.metrics(ALICE)).get('aborts_total{cause="disconnected"}') == 2

    await eventually_async(are_told, 30)
    figures = await gateway.metrics(ALICE)
    phases = {name: value for name, value in figures.items() if name.startswith("aborts_by_phase_total")}
    assert sum(phases.values()) == 2
    assert all('cause="disconnected",phase="' in name for name in phases)
    assert figures['gateway_requests_total{outcome="length"}'] == 3
    assert figures['gateway_requests_total{outcome="abort"}'] == 2
    assert figures['gateway_requests_total{outcome="error"}'] == 0


def test_a_label_is_escaped_and_only_known_keys_are_labels() -> None:
    metrics = GatewayMetrics()
    odd = 'a"b\\c\nd'
    metrics.key_requests[odd] = 3
    metrics.key_requests["unknown"] = 9
    metrics.key_refused["unknown", "tokens"] = 9
    metrics.key_live["unknown"] = 1
    text = render(metrics, gauges={}, counters={}, engine=None, key_names={odd}).decode()
    (sample,) = families_of(text)["key_requests"].samples
    assert (sample.labels, sample.value) == ({"key": odd}, 3.0)
    assert "unknown" not in text
    metrics.keep({odd})
    assert metrics.key_requests == {odd: 3} and not metrics.key_refused
    assert metrics.key_live["unknown"] == 1, "it lives"


async def test_an_answer_that_is_read_again_has_no_times_of_its_own() -> None:
    names = ("time_to_first_token_seconds_count", "time_per_output_token_seconds_count")
    body = {"prompt": [30, 31], "max_tokens": 9, "ignore_eos": True, "attach_grace_s": 30}
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        async with running_gateway(engine.endpoint) as gateway:
            answer = await gateway.events(TEXT, body)
            before = await gateway.metrics()
            status, again = await gateway.get(f"/v1/streams/{answer.headers['X-Stream-Id']}")
            after = await gateway.metrics()
    assert status == 200 and again.endswith("data: [DONE]\n\n")
    assert after["gateway_attached_streams_total"] == before["gateway_attached_streams_total"] + 1
    assert [before[name] for name in names] == [after[name] for name in names] == [1, 1]


async def test_a_refusal_is_counted_by_its_reason(gateway: RunningGateway) -> None:
    for _ in range(2):
        await gateway.post(TEXT, {"prompt": [5], "max_tokens": 2}, headers=bearer(BOB))
    await gateway.server.drain(0.01)
    await gateway.post(TEXT, {"prompt": [5]}, headers=bearer(ALICE))
    figures = await gateway.metrics(ALICE)
    assert figures['gateway_shed_total{reason="caller_requests"}'] == 1
    assert figures['gateway_shed_total{reason="draining"}'] == 1
    assert figures['gateway_shed_total{reason="queue_full"}'] == 0
    assert figures['gateway_refused_total{status="429"}'] == figures['gateway_refused_total{status="503"}'] == 1


def test_the_process_tells_of_itself() -> None:
    gauges, counters = process_figures()
    assert 10e6 < gauges["gateway_resident_memory_bytes"] < 100e9
    assert 3 <= gauges["gateway_open_files"] <= gauges["gateway_max_open_files"]
    assert counters["gateway_cpu_seconds_total"] > 0
    assert gauges.keys() | counters.keys() <= HELP.keys()


async def test_a_loop_that_stood_still_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    lag = LoopLag()
    lag.start()
    assert lag.longest_s == 0.0
    real_time = loop.time
    monkeypatch.setattr(loop, "time", lambda: real_time() + 3.0)  # as after three seconds in one call
    await eventually(lambda: lag.longest_s > 0.0, 30)
    lag.close()
    assert 2.0 < lag.longest_s < 4.0


async def test_an_engine_s_restart_is_counted() -> None:
    with free_endpoint() as endpoint, serving(ScriptedExecutor(vocab_size=VOCAB_SIZE), endpoint=endpoint) as engine:
        async with running_gateway(endpoint) as gateway:

            async def is_counted() -> bool:
                return (await gateway.metrics())["engine_restarts_total"] == 1

            assert not await is_counted()
            engine.stop()
            with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE), endpoint=endpoint):
                await eventually_async(is_counted, 30)


def test_the_page_about_metrics_is_current() -> None:
    """Made by `python -m docs.operations`."""
    from docs.operations import page

    assert (ROOT / "docs" / "operations.md").read_text(encoding="utf-8") == page()


# The dashboard


def queries(node: object) -> Iterator[str]:
    """Every query of a dashboard, those of its variables too."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name in ("expr", "query", "definition") and isinstance(value, str):
                yield value
            else:
                yield from queries(value)
    elif isinstance(node, list):
        for value in node:
            yield from queries(value)


async def test_the_dashboard_asks_only_for_what_there_is(gateway: RunningGateway) -> None:
    for request in ({"max_tokens": 4}, {"max_tokens": 40, "stop": "e"}, {"max_tokens": -1}):
        for key in (ALICE, BOB):
            await gateway.post(TEXT, {"prompt": [5, 6], **request}, headers=bearer(key))
    families = families_of(await page(gateway))
    labels: dict[str, set[str]] = {}
    for name, family in families.items():
        endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        found = {label for sample in family.samples for label in sample.labels}
        labels |= {f"streamkv_{name}{ending}": found for ending in endings}
    asked = [query for query in queries(json.loads(DASHBOARD.read_text())) if "streamkv_" in query]
    names = {name for query in asked for name in re.findall(r"streamkv_\w+", query)}
    assert len(asked) > 60 and names - labels.keys() == set()
    assert {f"streamkv_{name}" for name in GAUGES[:12]} <= names
    for query in asked:
        found = set().union(*(labels[name] for name in re.findall(r"streamkv_\w+", query)))
        if not found:
            continue  # a family that has had no sample: its labels are not known
        for group in re.findall(r"by \(([^)]*)\)", query):
            assert set(re.split(r",\s*", group)) <= found | {"instance"}, query


def test_the_dashboard_is_whole() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["targets"], panel["title"]
        for target in panel.get("targets", []):
            assert target["expr"].count("(") == target["expr"].count(")")
            assert target["datasource"]["uid"] == "${datasource}"


def test_the_files_around_it_name_each_other() -> None:
    """Read as text: nothing here depends on a YAML library."""
    prometheus = (ROOT / "docker/prometheus/prometheus.yml").read_text()
    assert "metrics_path: /metrics" in prometheus and "names: [gateway]" in prometheus and "port: 8000" in prometheus
    provider = (ROOT / "docker/grafana/provisioning/dashboards/streamkv.yml").read_text()
    assert "path: /var/lib/grafana/dashboards" in provider
    source = (ROOT / "docker/grafana/provisioning/datasources/prometheus.yml").read_text()
    assert "url: http://prometheus:9090" in source and "type: prometheus" in source
