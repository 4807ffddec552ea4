"""What the executor of a GPU does before it serves, so that no later step lacks memory or waits for a compiler: by what
it launches; on a GPU also by what is taken and compiled. And how it ends."""

import ast
import dataclasses
import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton

from engine.execution import gpu_runner, gpu_start
from engine.execution.cuda_graph import GraphKey
from engine.execution.gpu_copier import staging_bytes
from engine.execution.gpu_memory import CardBytes, GpuMemory
from engine.execution.gpu_runner import GpuRunner
from engine.execution.gpu_start import GpuStart
from engine.execution.kv_cache import GIB, KvCache, PoolSize
from engine.execution.step_parts import Part
from engine.execution.warm_up import WarmUp
from engine.kernels import likeliest as likeliest_module
from engine.models.gpu_decoder import GpuDecoder
from engine.plan import StepPlan
from streamkv.config import EngineConfig
from streamkv.sampling import SamplingParams
from tests.support.driven_engine import OverlappedEngine
from tests.support.tiny_models import write_small_llama

MAX_NUM_SEQS = 5
MAX_NUM_TOKENS = 100
MAX_MODEL_LEN = 64
BLOCK_SIZE = 4
EMPTY_CARD = CardBytes(140 * GIB, 139 * GIB + GIB // 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_llama(tmp_path_factory.mktemp("small"))


class ColdStart(WarmUp):
    """No step is run before the first."""

    def run(self, report: Callable[[float], None]) -> None:
        report(100.0)


@pytest.fixture
def load(folder: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., GpuRunner]]:
    """A runner, loaded. Where there is no GPU no kernel has run by then."""
    runners: list[GpuRunner] = []

    def make(**settings: object) -> GpuRunner:
        config = EngineConfig(
            model=str(folder),
            dtype="float32",
            block_size=BLOCK_SIZE,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            kv_cache_memory_gib=0.01,
            gpu_memory_utilization=0.3,
            **settings,  # type: ignore[arg-type]
        )
        runners.append(GpuRunner(config, device))
        with pytest.MonkeyPatch.context() as patch:
            if device.type == "cpu":  # the warm-up alone would take minutes
                patch.setattr(gpu_runner, "WarmUp", ColdStart)
            runners[-1].load(lambda stage, percent: None)
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


class Watched:
    """What a runner launches, in place of doing so."""

    def __init__(self, runner: GpuRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parts: list[tuple[str, int]] = []
        self.plans: list[StepPlan] = []
        self.prompt_sizes: list[int] = []

        def sampling(num_seqs: int, *, has_filters: bool) -> None:
            self.parts.append(("filter and sample" if has_filters else "sample", num_seqs))

        def begin(plan: StepPlan, *_: object) -> SimpleNamespace:
            self.plans.append(plan)
            runner._learn(plan)
            runner._books.stage(plan)
            return SimpleNamespace(wait=lambda: None)

        parts = runner._parts
        monkeypatch.setattr(parts, "launch_body", lambda size: self.parts.append(("body", size)))
        monkeypatch.setattr(parts, "launch_head", lambda size: self.parts.append(("head", size)))
        monkeypatch.setattr(parts, "launch_decode", lambda size: self.parts.append(("decode", size)))
        monkeypatch.setattr(parts, "launch_sampling", sampling)
        monkeypatch.setattr(parts, "prompt_logits", lambda rows: self.prompt_sizes.append(rows.stop))
        monkeypatch.setattr(runner, "_begin", begin)
        monkeypatch.setattr(runner._sampler, "compile", lambda: None)


class Sizing:
    """The sizing of a pool as on a card, whose memory is made up."""

    def __init__(self, runner: GpuRunner, monkeypatch: pytest.MonkeyPatch, card: "MadeUpCard | None" = None) -> None:
        """card: that graphs are captured on; None: there are none."""
        self.watched = Watched(runner, monkeypatch)
        self.memory: GpuMemory | None = None
        self.compiled: list[tuple[str, int]] = []
        self.measured_parts: list[tuple[str, int]] = []
        self.measured_plans: list[StepPlan] = []
        self.lasting: list[torch.Tensor | None] = []
        """Tables, as they were when the measuring began."""
        model = runner._parts.model
        self.start = GpuStart(runner._config, runner._parts, card, MAX_MODEL_LEN, runner._compute)  # type: ignore[arg-type]
        compile_parts = self.start.compile

        def compiled(parts: list[Part], report: Callable[[float], None]) -> None:
            self.compiled = [key for key, _ in parts]
            if card is not None:
                card.events.append("compile")
            compile_parts(parts, report)

        def peak(run: Callable[[], object], device: torch.device) -> int:
            if card is not None:
                card.events.append("peak")
            changes = runner._sampler._changes
            self.lasting = [changes._counts, changes._biases, changes._bias_ids, changes._ban_ids]
            self.watched.parts.clear()
            self.watched.plans.clear()
            run()
            self.measured_parts, self.measured_plans = list(self.watched.parts), list(self.watched.plans)
            return 3 * GIB

        def size(config: EngineConfig, model: object, block_bytes: int, memory: GpuMemory) -> PoolSize:
            self.memory = memory
            return PoolSize(9, MAX_MODEL_LEN)

        def make_cache(num_blocks: int) -> KvCache:
            return KvCache(model.config, num_blocks, BLOCK_SIZE, torch.float32, runner._device)

        monkeypatch.setattr(self.start, "compile", compiled)
        monkeypatch.setattr(gpu_start, "peak_bytes", peak)
        monkeypatch.setattr(gpu_start, "size_gpu_pool", size)
        monkeypatch.setattr(gpu_start, "card_bytes", lambda device: CardBytes(140 * GIB, 120 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
        with runner._on_device():
            self.size = self.start.size_pool(1024, EMPTY_CARD, 2 * GIB, make_cache, _silent)


def start_of(runner: GpuRunner) -> GpuStart:
    return GpuStart(runner._config, runner._parts, runner._stream, MAX_MODEL_LEN, runner._compute)


def _silent(stage: str, percent: float) -> None:
    pass


KINDS = ("body", "head", "sample", "filter and sample", "decode")
LARGEST = [(kind, MAX_NUM_TOKENS if kind == "body" else MAX_NUM_SEQS) for kind in KINDS]


def test_memory_is_measured_with_the_largest_of_each_kind_and_with_all_that_requests_may_ask_for(
    load: Callable[..., GpuRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(enforce_eager=True)
    sizing = Sizing(runner, monkeypatch)
    assert sizing.measured_parts == LARGEST
    told, full = sizing.measured_plans
    assert told.scheduled[0].num_tokens == MAX_MODEL_LEN - 1 and told.new_sequences[0].tells_prompt
    assert len(full.scheduled) == MAX_NUM_SEQS
    memory = sizing.memory
    assert memory is not None
    assert memory.needed_bytes == (3 + 2) * GIB, "eager, too: the steps, and what is allocated late"
    assert memory.own_bytes == 20 * GIB, "what went while it loaded, and the context"
    assert not runner._books.records and not runner._special and not runner._sampler.has_filters


def test_what_lasts_is_made_before_the_peak_is_measured(
    load: Callable[..., GpuRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a table would count twice: as what a step takes, and as what the engine has."""
    runner = load(enforce_eager=True)
    for table in Sizing(runner, monkeypatch).lasting:
        assert table is not None and len(table) >= MAX_NUM_SEQS


def test_without_graphs_every_size_that_steps_can_have_is_compiled_too(
    load: Callable[..., GpuRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(enforce_eager=True)
    sizing = Sizing(runner, monkeypatch)
    sizes = {kind: {size for name, size in sizing.compiled if name == kind} for kind in KINDS}
    assert sizes["body"] == set(runner._parts.token_sizes) and len(sizes["body"]) > 2
    assert all(sizes[kind] == set(runner._parts.sequence_sizes) for kind in KINDS[1:])
    assert set(sizing.watched.prompt_sizes) == {1, 2, 4, 8, 16, 32, 64, MAX_NUM_TOKENS}, "rows whose logits are told"


def test_of_a_model_that_always_takes_all_layers_the_least_and_the_largest_are(
    load: Callable[..., GpuRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load()
    monkeypatch.setattr(runner._parts.model, "is_capturable", False)
    compiled = Sizing(runner, monkeypatch).compiled
    assert set(compiled) == {*LARGEST, ("body", 16), *((kind, 1) for kind in KINDS[1:])}


class MadeUpCard:
    """Notes what is captured and measured, in order. A part takes as long as it has rows, through each layer; but a
    body of 128 rows takes as long as one of 200, and a decode of 72 rows has a head that takes 40 more."""

    def __init__(self, runner: GpuRunner, monkeypatch: pytest.MonkeyPatch, num_layers: int) -> None:
        parts, model = runner._parts, runner._parts.model
        assert isinstance(model, GpuDecoder)
        parts.token_sizes = [16, 96, 128, 160, 192, 3000]
        parts.decode_sizes = parts.sequence_sizes = [64, 72, 80, 88]
        model._layers = model._layers[:1] * num_layers
        monkeypatch.setattr(model, "config", dataclasses.replace(model.config, num_layers=num_layers))
        self.events: list[tuple[str, int, list[GraphKey]] | str] = []
        """Captures with the number of layers; else what happens."""
        card = self

        class Graphs:
            def __init__(self) -> None:
                self.times_s: dict[GraphKey, float] = {}

            def capture(self, parts: Iterable[Part], stream: object) -> None:
                keys = [key for key, _ in parts]
                num_layers = len(model._layers)
                self.times_s = {key: card.time_s(*key, num_layers) for key in keys}
                card.events.append(("capture", num_layers, keys))

            def time_s(self, stream: object) -> dict[GraphKey, float]:
                return self.times_s

            def clear(self) -> None:
                card.events.append("clear")

        monkeypatch.setattr(gpu_start, "StepGraphs", Graphs)
        parts.graphs = Graphs()  # type: ignore[assignment]

    def time_s(self, kind: str, num_rows: int, num_layers: int) -> float:
        once = 40 if (kind, num_rows) == ("decode", 72) else 0
        return once + num_layers * (200 if (kind, num_rows) == ("body", 128) else num_rows)


@pytest.mark.parametrize(("num_layers", "kept"), [(8, [64, 72, 80, 88]), (5, [64, 80, 88]), (1, [64, 80, 88])])
def test_sizes_that_a_larger_one_beats_through_all_layers_are_never_captured(
    load: Callable[..., GpuRunner], monkeypatch: pytest.MonkeyPatch, num_layers: int, kept: list[int]
) -> None:
    """What a slow head costs is little beside many layers. Timed are no more than four."""
    runner = load()
    card = MadeUpCard(runner, monkeypatch, num_layers)
    sizing = Sizing(runner, monkeypatch, card)
    parts = runner._parts
    assert parts.token_sizes == [16, 96, 160, 192, 3000] and parts.decode_sizes == kept
    assert parts.sequence_sizes == [64, 72, 80, 88], "of heads and sampling, which are not timed"

    bodies, decodes = ([(kind, size) for size in sizes] for kind, sizes in (
        ("body", (192, 160, 128, 96)), ("decode", (88, 80, 72)),
    ))  # fmt: skip
    largest = [("body", 3000), ("head", 88), ("sample", 88), ("filter and sample", 88), ("decode", 88)]
    few, more = (("capture", depth, bodies + decodes) for depth in (1, min(4, num_layers)))
    assert card.events[:5] == ["compile", few, "clear", more, "clear"], "nothing is left of what was only timed"
    assert {("body", 128), ("decode", 72)} <= set(sizing.compiled), "nothing may be in the middle of a capture"
    assert card.events[5:] == ["peak", "peak", ("capture", num_layers, largest), "clear"]
    num_graphs = 5 + 3 * 4 + len(kept)
    assert sizing.memory is not None and sizing.memory.graph_bytes == 3 * GIB + num_graphs * 4 * 2**20

    card.events.clear()
    percents: list[float] = []
    sizing.start.capture(percents.append)
    (captured,) = card.events
    assert captured == ("capture", num_layers, [key for key, _ in parts.all()]) and len(captured[2]) == num_graphs
    assert not {("body", 128), *(("decode", size) for size in {72} - set(kept))} & set(captured[2])
    assert percents == sorted(percents) and percents[-1] == 100.0


@pytest.mark.parametrize("windows", [(None,), (8, None), (None,) * 5, (8, 8, None, 8), (8, 8, 8, None)])
def test_what_is_only_compiled_goes_through_each_kind_of_layer_and_no_more_than_there_are(
    load: Callable[..., GpuRunner], windows: tuple[int | None, ...]
) -> None:
    model = load()._parts.model
    assert isinstance(model, GpuDecoder)
    layer = model._layers[0]
    kinds = [dataclasses.replace(layer.kind, sliding_window=window) for window in windows]
    model._layers = [dataclasses.replace(layer, kind=kind) for kind in kinds]
    with model.shallow():
        gone_through = [layer.kind for layer in model._layers]
    assert set(gone_through) == set(kinds) and gone_through[-1] == kinds[-1]
    assert min(2, len(kinds)) <= len(gone_through) <= min(3, len(kinds)), "each has a cache of its own"


def test_a_part_with_few_layers_goes_through_no_other(load: Callable[..., GpuRunner]) -> None:
    """A row that is padding writes to block 0 of each layer that it goes through."""
    parts = load()._parts
    keys_of_layers = parts.cache.storage[:, 0, 0]

    def changed() -> list[bool]:
        return [bool((keys != 7.0).any()) for keys in keys_of_layers]

    with torch.inference_mode():
        keys_of_layers.fill_(7.0)
        with parts.model.first_layers(1):
            parts.launch_decode(1)
        assert changed() == [True, False]
        parts.launch_decode(1)
        assert changed() == [True, True], "then it has them all again"


def test_every_size_stays_where_there_are_no_graphs(
    load: Callable[..., GpuRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(enforce_eager=True)
    card = MadeUpCard(runner, monkeypatch, 8)
    sizing = Sizing(runner, monkeypatch, card)
    sizing.start.capture(lambda percent: None)
    assert card.events == ["compile", "peak"] and 128 in runner._parts.token_sizes and 72 in runner._parts.decode_sizes


def test_room_is_kept_for_the_copiers_buffers(load: Callable[..., GpuRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    size_pool = GpuStart.size_pool

    def sized(self: GpuStart, block_bytes: int, before: CardBytes | None, late_bytes: int, *more: object) -> PoolSize:
        asked.append(late_bytes)
        return size_pool(self, block_bytes, before, late_bytes, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(GpuStart, "size_pool", sized)
    load()
    runner = load(host_kv_memory_gib=0.01)
    assert runner._host is not None
    block_bytes = runner._host.rows.shape[1]
    assert asked == [0, staging_bytes(block_bytes, len(runner._host.rows) - 1)]


def test_copies_within_the_real_pool_are_compiled_before_it_serves(
    load: Callable[..., GpuRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strides over 2**31 take another kernel than those of a throw-away pool."""
    copied: list[KvCache] = []
    copy_blocks = KvCache.copy_blocks

    def noted(self: KvCache, pairs: list[tuple[int, int]]) -> None:
        copied.extend([self] * len(pairs))
        copy_blocks(self, pairs)

    monkeypatch.setattr(KvCache, "copy_blocks", noted)
    runner = load()
    assert runner._parts.cache in copied


def test_how_many_are_told_makes_no_other_kernel() -> None:
    """1 and multiples of 16 would have kernels of their own, compiled when the first request asks for so many."""
    tree = ast.parse(inspect.getsource(likeliest_module))
    (kernel,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "_likeliest_kernel"]
    (decorator,) = kernel.decorator_list
    assert isinstance(decorator, ast.Call)
    assert {word.arg: ast.literal_eval(word.value) for word in decorator.keywords} == {"do_not_specialize": ["num"]}


def test_a_step_that_never_ends_does_not_keep_the_engine_from_ending(
    load: Callable[..., GpuRunner], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = load()
    monkeypatch.setattr(gpu_runner, "_END_LIMIT_S", 0.05)
    is_over = threading.Event()
    runner._launched.put(SimpleNamespace(wait=is_over.wait, on_done=lambda: None))  # type: ignore[arg-type]
    try:
        with caplog.at_level(logging.WARNING):
            runner.close()
        assert "a step does not end" in caplog.text
    finally:
        is_over.set()
    monkeypatch.setattr(gpu_runner, "_END_LIMIT_S", 60.0)
    runner.close()
    assert runner._watcher is None


@pytest.mark.parametrize("has_ended", [True, False])
def test_host_memory_stays_pinned_under_a_copy_that_never_ends(
    load: Callable[..., GpuRunner], monkeypatch: pytest.MonkeyPatch, has_ended: bool
) -> None:
    runner = load(host_kv_memory_gib=0.01)
    host, beside = runner._host, runner._beside
    assert host is not None and beside is not None
    closed: list[bool] = []
    monkeypatch.setattr(host, "close", lambda: closed.append(True))
    close = beside.close
    monkeypatch.setattr(beside, "close", lambda: close() and has_ended)
    runner.close()
    assert closed == [True] * has_ended


@pytest.mark.long
def test_the_largest_steps_run_and_leave_nothing_behind(load: Callable[..., GpuRunner]) -> None:
    runner = load()
    with runner._on_device():
        start_of(runner).compute_largest([])
    assert not runner._books.records and not runner._special and not runner._sampler.has_filters
    assert runner._books.part("sample_slots", MAX_NUM_SEQS).tolist() == [-1] * MAX_NUM_SEQS
    assert len(runner._books._free_slots) == MAX_NUM_SEQS


# On a GPU

MODES = pytest.mark.parametrize("enforce_eager", [False, True])


def serve_all_kinds(runner: GpuRunner) -> None:
    """Prompts and rows of many sizes, with all that a request may ask for."""
    engine = OverlappedEngine(runner, BLOCK_SIZE, 80)

    def add(length: int, **sampling: object) -> None:
        settings = {"temperature": 0.0, "seed": 1, "max_tokens": 3, **sampling}
        params = SamplingParams(**settings)  # type: ignore[arg-type]
        engine.add([3 + (7 * length + i) % 300 for i in range(length)], 0, params.n, params)
        if length > MAX_NUM_TOKENS // MAX_NUM_SEQS:  # else some run in one step
            engine.pump()

    for length in (1, 2, 3, 5, 9, 17, 33, 50):
        add(length, logprobs=length % 21)
        add(length, prompt_logprobs=length % 3)
        add(length, logprobs=1, repetition_penalty=1.5, logit_bias={5: 2.0})
        add(length, temperature=1.0, top_k=5, top_p=0.9, min_tokens=2)
        engine.pump()
        add(length, temperature=1.0, n=3, prompt_logprobs=1)
        engine.pump()
    with runner._on_device():
        start_of(runner).compute_largest([])
        runner._parts.cache.copy_blocks([(1, 2), (3, 4)])


@pytest.mark.gpu
@MODES
def test_no_step_takes_more_than_was_measured(
    load: Callable[..., GpuRunner], device: torch.device, caplog: pytest.LogCaptureFixture, enforce_eager: bool
) -> None:
    with caplog.at_level(logging.INFO):
        runner = load(enforce_eager=enforce_eager)
    (told,) = [vars(record)["fields"] for record in caplog.records if "sized beside" in record.getMessage()]
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    serve_all_kinds(runner)
    torch.cuda.synchronize(device)
    assert torch.cuda.max_memory_reserved(device) - before_bytes <= told["step_gib"] * GIB + 2**21


@pytest.mark.gpu
@MODES
def test_nothing_is_compiled_once_it_serves(
    load: Callable[..., GpuRunner], monkeypatch: pytest.MonkeyPatch, enforce_eager: bool
) -> None:
    runner = load(enforce_eager=enforce_eager)
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **what: compiled.append(what["repr"]))
    serve_all_kinds(runner)
    assert not compiled
