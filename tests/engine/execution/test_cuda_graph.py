"""Sizes that steps are padded to, and what runs for a part that was not captured."""

import contextlib
import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch

from engine.execution.cuda_graph import (
    StepGraphs,
    bucket,
    sequence_buckets,
    token_buckets,
    whole_time_s,
    without_slower,
)


@pytest.mark.parametrize("largest", [1, 2, 3, 8, 9, 63, 64, 65, 256, 300, 512, 513, 1000, 4096, 8192, 10_000])
@pytest.mark.parametrize("make", [sequence_buckets, token_buckets])
def test_every_size_has_a_bucket_and_the_last_is_the_largest(make: Callable[[int], list[int]], largest: int) -> None:
    buckets = make(largest)
    assert buckets == sorted(set(buckets)) and buckets[-1] == largest
    for size in range(1, largest + 1):
        chosen = bucket(buckets, size)
        assert size <= chosen
        assert all(other < size for other in buckets if other < chosen)


def test_padding_is_little_where_a_row_costs_time() -> None:
    for buckets, start, most in ((sequence_buckets(1024), 64, 0.125), (token_buckets(8192), 256, 0.25)):
        for size in range(start, buckets[-1] + 1):
            assert bucket(buckets, size) - size <= most * size


def test_sizes_that_a_larger_one_beats_are_left_out() -> None:
    times_s = {64: 4.6, 128: 5.2, 416: 10.5, 448: 13.9, 480: 10.3, 512: 10.4, 576: 12.9}
    assert without_slower(times_s) == [64, 128, 512, 576]
    assert without_slower({}) == []
    assert without_slower({7: 1.0}) == [7]


@pytest.mark.parametrize(("once_s", "layer_s"), [(0.0, 1.0), (7.0, 0.5), (0.25, 3.0)])
@pytest.mark.parametrize(("num_few", "num_more", "num_layers"), [(1, 4, 32), (1, 4, 4), (2, 3, 80), (1, 1, 1)])
def test_the_time_of_all_layers_follows_from_that_of_few(
    once_s: float, layer_s: float, num_few: int, num_more: int, num_layers: int
) -> None:
    few_s, more_s = once_s + num_few * layer_s, once_s + num_more * layer_s
    expected_s = once_s + num_layers * layer_s
    assert whole_time_s(few_s, more_s, num_few, num_more, num_layers) == pytest.approx(expected_s)


class MadeUpGraph:
    """Of a device with a clock: what it does takes its time when it is launched, the first time longer."""

    now_us = 0.0
    costs_us: dict[str, float] = {}
    num_replays: dict[str, int] = {}

    def __init__(self) -> None:
        self.name = ""

    def capture_begin(self, **_: object) -> None:
        pass

    def capture_end(self) -> None:
        self.name = list(self.num_replays)[-1]

    def pool(self) -> tuple[int, int]:
        return 0, 1

    def replay(self) -> None:
        count = self.num_replays[self.name]
        MadeUpGraph.now_us += self.costs_us[self.name] + (0 if count else 100)
        self.num_replays[self.name] = count + 1


class MadeUpEvent:
    """Takes three microseconds of the device's time."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        MadeUpGraph.now_us += 3
        self.at_us = MadeUpGraph.now_us

    def elapsed_time(self, later: "MadeUpEvent") -> float:
        return (later.at_us - self.at_us) / 1000

    def synchronize(self) -> None:
        pass


def test_short_parts_are_timed_many_at_once_and_long_ones_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MadeUpGraph, "costs_us", {"short": 20.0, "long": 5000.0})
    monkeypatch.setattr(MadeUpGraph, "num_replays", {})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", MadeUpGraph)
    monkeypatch.setattr(torch.cuda, "Event", MadeUpEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())

    def launch(name: str) -> None:
        MadeUpGraph.num_replays[name] = 0

    graphs = StepGraphs()
    graphs.capture([((name, 4), partial(launch, name)) for name in ("short", "long")], None)  # type: ignore[arg-type]
    times_s = graphs.time_s(None)  # type: ignore[arg-type]
    assert times_s == {("short", 4): pytest.approx(20e-6, rel=0.05), ("long", 4): pytest.approx(5e-3, rel=0.001)}
    assert MadeUpGraph.num_replays["long"] == 3 and 5 <= MadeUpGraph.num_replays["short"] <= 50


def test_what_was_not_captured_is_launched() -> None:
    ran: list[str] = []
    graphs = StepGraphs()
    graphs.run(("body", 16), lambda: ran.append("body"))
    assert ran == ["body"] and len(graphs) == 0


@pytest.mark.parametrize("ends_badly", [False, True])
def test_a_capture_that_fails_tells_why_and_not_that_it_was_broken_off(
    ends_badly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []

    class Graph:
        """A capture in which something failed cannot be ended well, and CUDA says so."""

        def capture_begin(self, **_: object) -> None:
            pass

        def capture_end(self) -> None:
            ended.append(True)
            if ends_badly:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def launch() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    graphs = StepGraphs()
    with pytest.raises(torch.OutOfMemoryError):
        graphs.capture([(("body", 4), launch)], None)  # type: ignore[arg-type]
    assert ended == [True] and len(graphs) == 0 and gc.isenabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_a_captured_part_reads_its_inputs_anew() -> None:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    x, y = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")

    def launch() -> None:
        torch.add(x, 1.0, out=y)

    graphs = StepGraphs()
    with torch.cuda.stream(stream):
        launch()
        graphs.capture([(("body", 4), launch)], stream)
        x.fill_(6.0)
        graphs.run(("body", 4), launch)
        stream.synchronize()
    assert y.tolist() == [7.0] * 4
