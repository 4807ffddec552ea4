"""Parts of a step as CUDA graphs: one launch in place of hundreds. Sizes go up in steps, and what is less is padded."""

import bisect
import gc
from collections.abc import Callable, Iterable

import torch

GraphKey = tuple[str, int]
"""(which part, its size)."""


def sequence_buckets(max_num_seqs: int) -> list[int]:
    """Sizes of what goes by the number of sequences, ascending; the last is max_num_seqs.

    From 64 on at most an eighth is padding; below, a step's cost hardly depends on it.
    """
    return _up_to(max_num_seqs, [1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, 513, 32)], 64)


def token_buckets(max_num_tokens: int) -> list[int]:
    """Sizes of what goes by the number of tokens: closer together where a token costs time of its own."""
    sizes = [16, 32, *range(64, 513, 64), *range(640, 1025, 128), *range(1280, 4097, 256)]
    return _up_to(max_num_tokens, sizes, 512)


def _up_to(largest: int, sizes: list[int], further: int) -> list[int]:
    sizes = [*sizes, *range(sizes[-1] + further, largest, further)]
    return [*(size for size in sizes if size < largest), largest]


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
        middle of a capture. The largest part should come first: its memory is what the others use."""
        # A collection in the middle of a capture could free what the graph has recorded.
        gc.collect()
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
            finally:
                graph.capture_end()
        self._pool = self._pool or graph.pool()
        return graph

    def clear(self) -> None:
        self._graphs.clear()
        self._pool = None
