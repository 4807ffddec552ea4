"""Parts of a step as CUDA graphs: one launch in place of hundreds. Sizes go up in steps, and what is less is padded."""

import bisect
import gc
import itertools
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

import torch

_WORTH_A_BUCKET: Final = 0.99
_TIMED_RUNS: Final = 2
"""Behind the first."""
_TIMED_S: Final = 0.0005
"""Of replays in a row at least, so that a few microseconds between two events do not count."""
_MOST_REPLAYS: Final = 20

GraphKey = tuple[str, int]
"""(which part, its size)."""


def sequence_buckets(max_num_seqs: int) -> list[int]:
    """Sizes of what goes by the number of sequences, ascending; the last is max_num_seqs.

    From 64 on at most an eighth is padding; below, a step's cost hardly depends on it.
    """
    return _up_to(max_num_seqs, [1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, 513, 32)], 64)


def token_buckets(max_num_tokens: int) -> list[int]:
    """Sizes of what goes by the number of tokens: closer together where a token costs time of its own."""
    sizes = [16, 32, 64, 96, *range(128, 1025, 32), *range(1088, 2049, 64), *range(2304, 4097, 256)]
    return _up_to(max_num_tokens, sizes, 512)


def _up_to(largest: int, sizes: list[int], further: int) -> list[int]:
    sizes = [*sizes, *range(sizes[-1] + further, largest, further)]
    return [*(size for size in sizes if size < largest), largest]


def without_slower(times_s: dict[int, float]) -> list[int]:
    """Sizes, ascending, without those that a larger one beats. times_s: by size.

    What a library chooses for a size may be much slower than what it chooses for the next: 14 ms for a step of 448
    tokens, 10 ms for one of 480.
    """
    kept: list[int] = []
    fastest_s = float("inf")
    for size in sorted(times_s, reverse=True):
        if times_s[size] < _WORTH_A_BUCKET * fastest_s:
            kept.append(size)
            fastest_s = min(fastest_s, times_s[size])
    return kept[::-1]


def whole_time_s(few_s: float, more_s: float, num_few: int, num_more: int, num_layers: int) -> float:
    """Of a part with all its layers, by its times with few and with more of them: layers have products of the same
    shapes, and what stands around them (the head, the launch of the graph) is there once."""
    if num_few == num_more:
        return few_s
    return few_s + (more_s - few_s) * (num_layers - num_few) / (num_more - num_few)


def bucket(buckets: list[int], size: int) -> int:
    """The smallest that holds `size`, which is at most the last."""
    return buckets[bisect.bisect_left(buckets, size)]


class StepGraphs:
    """Runs parts of steps: those that were captured by replay, others by launching each kernel. Belongs to a stream."""

    def __init__(self) -> None:
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._pool: tuple[int, int] | None = None
        """Memory that all graphs share: they run one after the other."""

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: GraphKey, launch: Callable[[], None]) -> None:
        """launch: what the part does, on the current stream, with nothing that the host would have to know."""
        graph = self._graphs.get(key)
        if graph is None:
            launch()
        else:
            graph.replay()

    def capture(self, parts: Iterable[tuple[GraphKey, Callable[[], None]]], stream: torch.cuda.Stream) -> None:
        """Record each part, whose kernels have run before: what is loaded or made at a first launch cannot be in the
        middle of a capture. The largest part should come first: its memory is what the others use. Raises what a
        launch raises."""
        # A collection in the middle of a capture could free what the graph has recorded.
        gc.disable()
        try:
            for key, launch in parts:
                self._graphs[key] = self._record(launch, stream)
        finally:
            gc.enable()

    def _record(self, launch: Callable[[], None], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        # Not torch.cuda.graph, which empties the allocator's cache and waits for the device each time.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            # Other threads copy blocks or pin memory meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # type: ignore[arg-type]
            try:
                launch()
            except BaseException:
                # The capture has to be ended, and may say no more than that it is of no use: the cause is the first.
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        self._pool = self._pool or graph.pool()
        return graph

    def time_s(self, stream: torch.cuda.Stream) -> dict[GraphKey, float]:
        """How long each captured part takes at best, one after the other. stream: the current one."""
        return {key: _best_s(graph, stream) for key, graph in self._graphs.items()}

    def clear(self) -> None:
        self._graphs.clear()
        self._pool = None


def _best_s(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    # The first run brings the graph to the device. One that lasts long enough counts all the same, if it is the best.
    (first_s,) = _runs_s(graph, stream, 1, 1)
    num_replays = max(1, min(_MOST_REPLAYS, round(_TIMED_S / first_s)))
    return min(first_s, *_runs_s(graph, stream, _TIMED_RUNS, num_replays))


def _runs_s(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, num_runs: int, num_replays: int) -> list[float]:
    """Seconds of a replay, for each run of so many. Waits for the last."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(num_runs + 1)]  # type: ignore[no-untyped-call]
    marks[0].record(stream)
    for mark in marks[1:]:
        for _ in range(num_replays):
            graph.replay()
        mark.record(stream)
    marks[-1].synchronize()
    return [before.elapsed_time(mark) / 1000 / num_replays for before, mark in itertools.pairwise(marks)]
