"""The loop and the tiers below the device: copies start and finish beside the steps, wake the loop, and end with it."""

import threading
import time
from collections.abc import Iterator

import pytest

from engine.loop import EXIT_ASKED, EXIT_FAULT
from engine.simulation.device import SimulatedDisk
from engine.transfer import TransferKind
from streamkv.protocol import Drain, GetStats, Ready, Stats
from tests.support.scripted_engine import RunningEngine, serving
from tests.support.scripted_executor import ScriptedExecutor
from tests.support.wire_gateway import WireGateway, submission

PROMPT = list(range(10, 50))
SWAP = {"host_kv_memory_gib": 1.0, "preemption_mode": "swap"}
"""How much it is decides the executor."""


def figures(gateway: WireGateway) -> Stats:
    gateway.send(GetStats(1))
    return gateway.wait_for(Stats)


def check_states(stats: Stats, executor: ScriptedExecutor) -> None:
    """Each block is in one state."""
    states = ("num_free_blocks", "num_cached_blocks", "num_allocated_blocks", "num_in_transfer_blocks")
    assert sum(stats.gauges[name] for name in states) == executor.num_blocks - 1


def wait_for_transfers(gateway: WireGateway) -> Stats:
    """The figures once no copy runs."""
    until_s = time.monotonic() + 5.0
    while (stats := figures(gateway)).gauges["num_running_transfers"]:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    return stats


@pytest.fixture
def pressed() -> Iterator[tuple[RunningEngine, WireGateway, ScriptedExecutor]]:
    """An engine whose memory holds two of the sequences that the tests send."""
    executor = ScriptedExecutor(
        num_blocks=12, block_size=4, max_in_flight=2, num_host_blocks=40, num_disk_blocks=80, transfer_s=0.005
    )
    with serving(executor, max_num_seqs=8, **SWAP) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        yield engine, gateway, executor


def test_swapped_streams_go_on_with_the_same_tokens_and_are_counted(
    pressed: tuple[RunningEngine, WireGateway, ScriptedExecutor],
) -> None:
    _, gateway, executor = pressed
    for request_id in range(6):
        gateway.send(submission(request_id, PROMPT[request_id : request_id + 9], max_tokens=20))
    check_states(figures(gateway), executor)
    received = [gateway.wait_end(request_id) for request_id in range(6)]
    for request_id, one in enumerate(received):
        assert one.tokens[0] == executor.expected_tokens(PROMPT[request_id : request_id + 9], 20)
    stats = wait_for_transfers(gateway)
    check_states(stats, executor)
    counters = stats.counters
    assert counters['preemptions_total{kind="swap"}'] == sum(one.finished[0].num_preemptions for one in received) > 0
    assert counters['preemptions_total{kind="recompute"}'] == 0
    assert counters["host_hit_tokens_total"] > 0
    for direction in ("device_to_host", "host_to_device"):
        assert counters[f'transfers_total{{direction="{direction}"}}'] > 0
        assert counters[f'offload_bytes_total{{direction="{direction}"}}'] > 0
    assert 0 < stats.gauges["num_used_host_blocks"] <= stats.gauges["num_host_blocks"] == 40
    assert stats.gauges["num_used_disk_blocks"] <= stats.gauges["num_disk_blocks"] == 80


def test_with_nothing_but_a_copy_under_way_the_loop_sleeps_until_it_is_done() -> None:
    executor = ScriptedExecutor(num_blocks=40, block_size=4, num_host_blocks=80)
    with serving(executor, heartbeat_s=10.0, **SWAP) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        gateway.send(submission(1, PROMPT, max_tokens=1))
        gateway.wait_end(1)
        for request_id in range(2, 42):
            gateway.send(submission(request_id, [100 + request_id] * 4, max_tokens=1))
            gateway.wait_end(request_id)
        wait_for_transfers(gateway)
        executor.transfer_s = 0.3
        num_turns = 0
        plan = engine.loop._scheduler.plan

        def counted() -> object:
            nonlocal num_turns
            num_turns += 1
            return plan()

        engine.loop._scheduler.plan = counted  # type: ignore[method-assign,assignment]
        started_s = time.monotonic()
        gateway.send(submission(100, PROMPT, max_tokens=1))
        assert gateway.wait_end(100).tokens[0] == executor.expected_tokens(PROMPT, 1)
        assert 0.3 <= time.monotonic() - started_s < 2.0, "woken by the end of the copy, not by the heartbeat"
        assert num_turns < 20
        assert any(transfer.kind is TransferKind.HOST_TO_DEVICE for transfer in executor.started)


def test_a_copy_that_fails_for_good_ends_the_engine(
    pressed: tuple[RunningEngine, WireGateway, ScriptedExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, gateway, executor = pressed

    def fail() -> list[object]:
        raise OSError("the device is gone")

    monkeypatch.setattr(executor, "finished_transfers", fail)
    for request_id in range(6):
        gateway.send(submission(request_id, PROMPT[request_id : request_id + 9], max_tokens=20))
    assert engine.join(5.0) == EXIT_FAULT


# The end


def serve_once(disk: SimulatedDisk, prompt: list[int], **options: float) -> tuple[ScriptedExecutor, Stats, list[int]]:
    """An engine that computes one prompt and is drained: (executor, figures before the end, tokens)."""
    executor = ScriptedExecutor(
        num_blocks=40, block_size=4, num_host_blocks=40, num_disk_blocks=80, disk=disk, transfer_s=0.002, **options
    )
    with serving(executor, disk_kv_path="there", **SWAP) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        gateway.send(submission(1, prompt, max_tokens=3))
        tokens = gateway.wait_end(1).tokens[0]
        stats = figures(gateway)
        gateway.send(Drain(5.0))
        assert engine.join(5.0) == EXIT_ASKED
    return executor, stats, tokens


@pytest.mark.parametrize("num_tokens", [31, 32, 33])
def test_an_engine_that_is_drained_leaves_its_cache_to_the_next_one(num_tokens: int) -> None:
    disk = SimulatedDisk()
    prompt = PROMPT[:num_tokens]
    _, _, tokens = serve_once(disk, prompt)
    executor, stats, again = serve_once(disk, prompt)
    assert tokens == again == executor.expected_tokens(prompt, 3)
    assert stats.counters["prefix_hit_tokens_total"] == num_tokens - 1
    assert stats.counters["disk_hit_tokens_total"] == num_tokens - 1


def test_the_end_does_not_wait_for_a_disk_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.loop._FLUSH_LIMIT_S", 0.3)
    disk = SimulatedDisk()
    executor = ScriptedExecutor(
        num_blocks=40, block_size=4, num_host_blocks=40, num_disk_blocks=80, disk=disk, holds_transfers=True
    )
    with serving(executor, disk_kv_path="there", **SWAP) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        gateway.send(submission(1, PROMPT, max_tokens=1))
        gateway.wait_end(1)
        started_s = time.monotonic()
        gateway.send(Drain(5.0))
        assert engine.join(3.0) == EXIT_ASKED
        assert 0.3 <= time.monotonic() - started_s < 1.5
    assert not disk.blocks


def test_a_second_signal_ends_a_flush_at_once() -> None:
    executor = ScriptedExecutor(
        num_blocks=40, block_size=4, num_host_blocks=40, num_disk_blocks=80, holds_transfers=True
    )
    with serving(executor, disk_kv_path="there", **SWAP) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        gateway.send(submission(1, PROMPT, max_tokens=1))
        gateway.wait_end(1)
        engine.loop.drain()
        threading.Timer(0.2, engine.loop.stop).start()
        assert engine.join(1.5) == EXIT_ASKED
    assert any(transfer.kind is TransferKind.DEVICE_TO_HOST for transfer in executor.started)


def test_stop_writes_nothing() -> None:
    disk = SimulatedDisk()
    executor = ScriptedExecutor(num_blocks=40, block_size=4, num_host_blocks=40, num_disk_blocks=80, disk=disk)
    with serving(executor, disk_kv_path="there", **SWAP) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        gateway.send(submission(1, PROMPT, max_tokens=1))
        gateway.wait_end(1)
        engine.loop.stop()
        assert engine.join(1.5) == EXIT_ASKED
    assert not disk.blocks
