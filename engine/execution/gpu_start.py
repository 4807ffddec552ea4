"""Makes a GPU ready for steps, before the first: kernels compiled, the KV pool sized, sizes chosen, graphs captured."""

import gc
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Final

import torch

from engine.execution.cuda_graph import StepGraphs, whole_time_s, without_slower
from engine.execution.gpu_memory import CardBytes, card_bytes, measured_memory, peak_bytes, size_gpu_pool
from engine.execution.kv_cache import KvCache, PoolSize, size_pool
from engine.execution.largest_steps import fullest_rows, longest_prompt, masks_of_all
from engine.execution.sampler import SampledRow
from engine.execution.step_parts import Part, StepParts
from engine.execution.token_masks import TokenMasks
from engine.executor import ReportProgress
from engine.kernels.compiling import compiling_together
from engine.memory import available_memory_bytes
from engine.plan import StepPlan
from streamkv.config import EngineConfig
from streamkv.log import fields

_GRAPH_BYTES: Final = 4 * 2**20
"""What a graph takes beside the memory that it computes in: its launches, and their arguments."""
_MIN_TIMED_ROWS: Final = 64
_MAX_TIMED_ROWS: Final = 2048
"""Between them some sizes are slower than larger ones. Larger steps take long to time, and are rare."""
_FEW_LAYERS: Final = 1
_MORE_LAYERS: Final = 4
"""With how many a size is timed: together a seventh of what all layers of a large model take. More would tell small
models' layers from what stands around them better."""
_MANY_ROWS: Final = 256
"""From here on parts have the same kernels, but for the largest, whose size need not be round."""

BeginMasks = Callable[[list[SampledRow]], "Future[TokenMasks] | None"]
"""As SequenceGrammars.begin_masks."""
RunPlan = Callable[[StepPlan, BeginMasks], None]
"""Computes a step, whole, and forgets its sequences."""

logger = logging.getLogger(__name__)


class GpuStart:
    """What is done once with the parts of steps, first `size_pool`, then, when they use the pool, `capture`.

    On a card all of it runs on one stream, the current one.
    """

    def __init__(
        self, config: EngineConfig, parts: StepParts, stream: torch.cuda.Stream | None, longest: int, run_plan: RunPlan
    ) -> None:
        """stream: None where there is no card. longest: tokens of a sequence."""
        self._config = config
        self._parts = parts
        self._stream = stream
        self._longest = longest
        self._run_plan = run_plan

    def size_pool(
        self,
        block_bytes: int,
        before: CardBytes | None,
        late_bytes: int,
        make_cache: Callable[[int], KvCache],
        report: ReportProgress,
    ) -> PoolSize:
        """What the cache may take, beside what a step and the graphs need, measured on a throw-away pool.

        before: of the card, when it was empty; None: there is none. late_bytes: needed for what is allocated behind the
        pool. make_cache: of so many blocks. Raises what size_pool, size_gpu_pool and peak_bytes raise.
        """
        config, parts, device = self._config, self._parts, self._parts.device
        if before is None:
            return size_pool(config, parts.model.config, available_memory_bytes())
        # What loading has left in cycles may hold memory of the card, which would count as the engine's.
        gc.collect()
        parts.use(make_cache(2))
        every = list(parts.all())
        is_capturable = parts.model.is_capturable
        compiled = every if is_capturable else first_of_each_kind(every) + first_of_each_kind(reversed(every))
        report("compiling kernels", 0.0)
        self.compile(compiled, partial(report, "compiling kernels"))
        if self._graph_stream is not None:
            # Before the pool, so that there is room; and nothing of it is left when memory is measured.
            self._choose_sizes(self._graph_stream, partial(report, "choosing sizes"))
        report("measuring memory", 0.0)
        every = list(parts.all())
        largest = first_of_each_kind(every)
        compute_largest = partial(self.compute_largest, largest)
        # The first time what lasts is made: tables of biases, counts and bans, workspaces.
        with parts.model.shallow():
            compute_largest()
        step_bytes = peak_bytes(compute_largest, device)
        graph_bytes = 0
        if self._graph_stream is not None:
            graph_bytes = peak_bytes(partial(parts.graphs.capture, largest, self._graph_stream), device)
            # What they compute in is shared; each has its own list of launches.
            graph_bytes += len(every) * _GRAPH_BYTES
            parts.graphs.clear()
        parts.drop_cache()
        now, reserved_bytes = card_bytes(device), torch.cuda.memory_reserved(device)
        memory = measured_memory(before, now, reserved_bytes, step_bytes, graph_bytes, late_bytes)
        return size_gpu_pool(config, parts.model.config, block_bytes, memory)

    def capture(self, report: Callable[[float], None]) -> None:
        """Everything that steps are made of, where a model and the settings have graphs. Behind `size_pool`."""
        if self._graph_stream is None:
            return
        every = list(self._parts.all())

        def reported() -> Iterator[Part]:
            for number, part in enumerate(every):
                report(100.0 * number / len(every))
                yield part

        self._parts.graphs.capture(reported(), self._graph_stream)
        report(100.0)

    def compile(self, parts: list[Part], report: Callable[[float], None]) -> None:
        """Have every kernel ready that a step may launch: compiled, and on the device.

        parts: every size that a step may have, or, of a model that always goes through all its layers, the least and
        the largest: its own products need no compiling, and our kernels have one form for few rows and one for many.
        """

        def launch_all(sizes: Callable[[int], bool]) -> None:
            for (_, size), launch in parts:
                if sizes(size):
                    launch()
            for num_rows in filter(sizes, self._prompt_sizes()):
                self._parts.prompt_logits(slice(num_rows))
            self._parts.sampler.compile()
            self._parts.cache.copy_blocks([(0, 1)])

        with self._parts.model.shallow():
            with compiling_together(os.cpu_count() or 1, report):
                launch_all(lambda size: size <= _MANY_ROWS or size % (8 * _MANY_ROWS) == 0)
            # Whatever that has left out is compiled now, one by one: nothing may be, in the middle of a capture.
            launch_all(lambda size: True)

    def compute_largest(self, largest: list[Part]) -> None:
        """What needs the most memory, of each kind that a step may be made of, and steps with all that requests may ask
        for; these through one layer of each kind, since layers take their memory one after the other."""
        for _, launch in largest:
            launch()
        vocab_size = self._parts.model.config.vocab_size

        def mask_all(rows: list[SampledRow]) -> Future[TokenMasks] | None:
            if not rows:
                return None
            masks: Future[TokenMasks] = Future()
            masks.set_result(masks_of_all(len(rows), vocab_size))
            return masks

        told = longest_prompt(self._parts.max_num_tokens, self._longest, self._config.block_size)
        with self._parts.model.shallow():
            for plan in (told, fullest_rows(self._parts.max_num_seqs)):
                self._run_plan(plan, mask_all)
        self._parts.books.clear_record()

    @property
    def _graph_stream(self) -> torch.cuda.Stream | None:
        """That graphs are captured on; None: there are none."""
        return None if self._config.enforce_eager or not self._parts.model.is_capturable else self._stream

    def _choose_sizes(self, stream: torch.cuda.Stream, report: Callable[[float], None]) -> None:
        """Leave out sizes that a larger one beats, before anything is captured for them.

        What makes a size slow is the library's choice of a kernel for one of the layers' products, or for the head's,
        and what that costs is its time in all layers. They are all alike, so each size is timed with few layers and
        with some more, and the rest is reckoned: as graphs, since the launches of so few kernels take longer than the
        kernels do.
        """
        report(0.0)
        parts, num_layers = self._parts, self._parts.model.config.num_layers
        timed = [
            part
            for part in parts.all()
            if part[0][0] in ("body", "decode") and _MIN_TIMED_ROWS < part[0][1] <= _MAX_TIMED_ROWS
        ]
        depths = _FEW_LAYERS, min(_MORE_LAYERS, num_layers)
        few_s, more_s = (self._times_s(timed, depth, stream) for depth in depths)
        times_s = {key: whole_time_s(few_s[key], more_s[key], *depths, num_layers) for key, _ in timed}

        def worth_it(kind: str, sizes: list[int]) -> list[int]:
            of_kind = {size: seconds for (name, size), seconds in times_s.items() if name == kind}
            dropped = of_kind.keys() - set(without_slower(of_kind))
            return [size for size in sizes if size not in dropped]

        parts.token_sizes = worth_it("body", parts.token_sizes)
        parts.decode_sizes = worth_it("decode", parts.decode_sizes)
        logger.info(
            "sizes that steps are padded to",
            extra=fields(num_token_sizes=len(parts.token_sizes), num_decode_sizes=len(parts.decode_sizes)),
        )

    def _times_s(self, parts: list[Part], num_layers: int, stream: torch.cuda.Stream) -> dict[tuple[str, int], float]:
        """By part, with so many layers. The graphs are gone when this returns."""
        graphs = StepGraphs()
        with self._parts.model.first_layers(num_layers):
            graphs.capture(parts, stream)
        times_s = graphs.time_s(stream)
        graphs.clear()
        return times_s

    def _prompt_sizes(self) -> list[int]:
        """Numbers of rows that between them have each form of the head's kernels."""
        most = self._parts.most_prompt_rows
        return [*itertools.takewhile(lambda size: size < most, (2**i for i in range(_MANY_ROWS.bit_length()))), most]


def first_of_each_kind(parts: Iterable[Part]) -> list[Part]:
    firsts: dict[str, Part] = {}
    for part in parts:
        firsts.setdefault(part[0][0], part)
    return list(firsts.values())
