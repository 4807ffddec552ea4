"""The executor on a GPU: the host plans and launches one step while the device runs the one before."""

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch

from engine.execution.beside_steps import BesideSteps
from engine.execution.cuda_graph import StepGraphs
from engine.execution.device_sampler import DeviceSampler, PendingPromptLogprobs, PendingRows
from engine.execution.gpu_copier import GpuBlockCopier, staging_bytes
from engine.execution.gpu_inputs import DeviceBooks, SequenceRecord
from engine.execution.gpu_memory import card_bytes
from engine.execution.gpu_start import BeginMasks, GpuStart
from engine.execution.inputs import PromptChunk
from engine.execution.kv_cache import KvCache, bytes_per_block, resolve_cache_dtype, size_host, wanted_length
from engine.execution.largest_steps import end_of
from engine.execution.offload import BlockCopier, CpuBlockCopier
from engine.execution.pinned_memory import PinnedMemory
from engine.execution.sampler import SampledRow
from engine.execution.sequence_grammars import SequenceGrammars
from engine.execution.start_faults import StartFaults
from engine.execution.step_parts import StepParts
from engine.execution.warm_up import GPU_WORKLOAD, WarmUp
from engine.executor import DeviceLimits, Launch, ReportProgress
from engine.kept_logprobs import KeptLogprobs
from engine.layers.gpu_linear import choose_gpu_method
from engine.memory import available_memory_bytes
from engine.models.config import ModelConfig
from engine.models.fingerprint import placing
from engine.models.gpu_model import GpuModel, check_kernels_fit, find_kv_scales, make_gpu_model
from engine.models.load import load_model, read_config, resolve_dtype
from engine.plan import NewSequence, StepPlan, StepTokens
from engine.transfer import Transfer, TransferResult
from streamkv import model_files
from streamkv.config import EngineConfig
from streamkv.errors import ConfigError
from streamkv.log import fields
from streamkv.protocol import ModelFacts
from streamkv.sampling import Grammar

_MAX_NUM_BATCHED_TOKENS: Final = 8192
_HASH_THREADS: Final = 8
_NUM_RESULTS: Final = 3
"""More than steps under way: the ids of a step lie on the host until it is collected."""
_END_LIMIT_S: Final = 10.0
"""How long `close` waits for the steps under way: a kernel that hangs would keep the process for ever."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class GpuLaunch:
    """A step on its way through the device."""

    plan: StepPlan
    on_done: Callable[[], None]
    token_ids: torch.Tensor
    """[n] int32 on the host, one for each entry, or for each that samples if there are `rows`; true once it's over."""
    event: torch.cuda.Event | None = None
    """Behind all of the step, the copies of its results included; None where there is no GPU to wait for."""
    rows: list[SampledRow] = field(default_factory=list)
    """Those that sample, where the host has to know more of them than their ids."""
    pending: PendingRows | None = None
    prompts: list[tuple[PromptChunk, list[PendingPromptLogprobs]]] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Raises what the device has to say of a step that failed."""
        if self.event is not None:
            self.event.synchronize()


class GpuRunner:
    """Computes steps with our kernels. Implements engine.executor.Executor.

    Everything of a step goes on one stream, in order; nothing in `launch` waits for the device. Where there is no GPU
    (the tests, with Triton's interpreter) a step is over when `launch` returns.
    """

    max_in_flight = 2

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._graphs = StepGraphs()
        self._max_num_seqs = config.max_num_seqs
        self._launched: queue.SimpleQueue[GpuLaunch | None] = queue.SimpleQueue()
        self._watcher: threading.Thread | None = None
        self._turn = 0
        self._beside: BesideSteps | None = None
        self._host: PinnedMemory | None = None
        self._parts: StepParts
        self._books: DeviceBooks
        self._sampler: DeviceSampler
        self._results: list[torch.Tensor]
        """Sampled ids on their way to the host, in turn."""
        self._special: set[int] = set()
        """Sequences of which the host tells, or must know, more than their parameters and tokens."""

    # Loading

    def load(self, report: ReportProgress) -> tuple[ModelFacts, DeviceLimits]:
        """As Executor.load. Raises ModelError, or ConfigError for a limit that does not fit this machine, or for what
        it lacks."""
        faults = StartFaults(self._device)
        with self._on_device(), faults:
            return self._load(report, faults)

    def _load(self, report: ReportProgress, faults: StartFaults) -> tuple[ModelFacts, DeviceLimits]:
        config, device = self._config, self._device
        beside = self._beside = BesideSteps(config)
        before = card_bytes(device) if self._is_cuda else None
        files = model_files.resolve(config.model, report, with_weights=config.load_format != "dummy")
        model_config = read_config(files)
        check_kernels_fit(model_config, str(files.path))
        dtype = resolve_dtype(config.dtype, model_config)
        if model_config.transformers_id and config.quantization != "none":
            raise ConfigError("quantization", f"{model_config.architecture} is computed by transformers; use none")
        longest = wanted_length(config, model_config)
        cache_dtype = resolve_cache_dtype(config.kv_cache_dtype, dtype, device)
        block_bytes = bytes_per_block(model_config, config.block_size, cache_dtype)
        num_host_blocks = size_host(config, block_bytes, 0, available_memory_bytes())
        if num_host_blocks:
            self._host = PinnedMemory(num_host_blocks, block_bytes)
            self._host.start_pinning()
        method = choose_gpu_method(dtype, device, config.quantization, config.deterministic)
        head_method = choose_gpu_method(dtype, device, "none", config.deterministic)
        model, _ = load_model(files, dtype, report, method, device, head_method)
        beside.begin_grammars(files, model_config)
        budget = self._token_budget(model_config)
        # Without chunks a prompt that is over the budget has a step of its own.
        max_num_tokens = budget if config.enable_chunked_prefill else max(budget, longest)
        self._max_num_seqs = min(config.max_num_seqs, budget)  # more never run at once
        report("allocating buffers", 0.0)
        gpu_model = make_gpu_model(
            model, longest, self._max_num_seqs, max_num_tokens, cache_dtype, device, config.deterministic
        )
        scales = None
        if cache_dtype == torch.float8_e4m3fn:
            scales = find_kv_scales(model, dtype, device, config.deterministic)
        self._allocate(gpu_model, max_num_tokens, -(-longest // config.block_size))
        parts = self._parts
        start = GpuStart(config, parts, self._stream, longest, self._compute)
        make_cache = partial(_make_cache, model_config, config.block_size, cache_dtype, device, scales)
        late_bytes = staging_bytes(block_bytes, num_host_blocks) if num_host_blocks else 0
        pool = start.size_pool(block_bytes, before, late_bytes, make_cache, report)
        faults.has_pool = True
        report("allocating KV blocks", 0.0)
        parts.use(make_cache(pool.num_blocks))
        # Its kernel has a form for strides over 2**31, which those of the throw-away pool never are.
        parts.cache.copy_blocks([(0, 1)])
        start.capture(partial(report, "capturing graphs"))
        words = self._placing(dtype, cache_dtype, block_bytes, parts.cache)
        num_disk_blocks, stored = beside.open_disk(files, model_config, words, block_bytes, _HASH_THREADS, report)
        host_bytes_per_s = self._begin_offload(beside, parts.cache, report)
        self._watcher = threading.Thread(target=self._watch, name="gpu-watch", daemon=True)
        self._watcher.start()
        warm_up = WarmUp(
            self._step,
            config.block_size,
            pool.max_model_len,
            self._max_num_seqs,
            max_num_tokens,
            workload=GPU_WORKLOAD,
            num_blocks=pool.num_blocks,
        )
        warm_up.run(partial(report, "warming up"))
        facts = ModelFacts(
            name=config.served_model_name or files.name,
            vocab_size=model_config.vocab_size,
            max_model_len=pool.max_model_len,
            eos_token_ids=list(model_config.eos_token_ids),
            dtype=str(dtype).removeprefix("torch."),
            device=device.type,
            num_parameters=model_config.num_parameters,
        )
        limits = DeviceLimits(
            num_blocks=pool.num_blocks,
            block_size=config.block_size,
            max_model_len=pool.max_model_len,
            max_num_batched_tokens=budget,
            block_bytes=block_bytes,
            num_host_blocks=num_host_blocks,
            num_disk_blocks=num_disk_blocks,
            stored=stored,
            step_samples=warm_up.samples,
            host_bytes_per_s=host_bytes_per_s,
            token_buckets=parts.token_sizes,
        )
        return facts, limits

    def _token_budget(self, model: ModelConfig) -> int:
        config = self._config
        if config.max_num_batched_tokens:
            return config.max_num_batched_tokens
        if not config.enable_chunked_prefill:
            # A prompt must go through in one step, however long that takes.
            return max(_MAX_NUM_BATCHED_TOKENS, config.max_model_len or model.max_position_embeddings)
        return max(_MAX_NUM_BATCHED_TOKENS, self._max_num_seqs)

    def _allocate(self, model: GpuModel, max_num_tokens: int, max_num_blocks: int) -> None:
        """All that lasts beside weights and cache. max_num_blocks: of a sequence."""
        device, max_num_seqs = self._device, self._max_num_seqs
        self._sampler = DeviceSampler(max_num_seqs, model.config.vocab_size, device)
        self._books = DeviceBooks(
            max_num_seqs, max_num_tokens, max_num_blocks, self._config.block_size, device, self._give_slot
        )
        self._results = [
            torch.zeros(max_num_seqs, dtype=torch.int32, pin_memory=self._is_cuda) for _ in range(_NUM_RESULTS)
        ]
        self._parts = StepParts(model, self._books, self._sampler, self._graphs, max_num_seqs, max_num_tokens, device)

    def _compute(self, plan: StepPlan, begin_masks: BeginMasks) -> None:
        """A whole step of the start, whose sequences are then forgotten."""
        self._begin(plan, lambda: None, begin_masks).wait()
        self._learn(end_of(plan))

    def _placing(
        self, dtype: torch.dtype, cache_dtype: torch.dtype, block_bytes: int, cache: KvCache
    ) -> tuple[str, ...]:
        """What kept blocks are bound to, beside the model."""
        config = self._config
        return placing(
            dtype,
            cache_dtype,
            config.block_size,
            block_bytes,
            torch.cuda.get_device_name(self._device) if self._is_cuda else "cpu",
            config.quantization,
            config.deterministic,
            (cache.key_scales, cache.value_scales),
        )

    def _begin_offload(self, beside: BesideSteps, cache: KvCache, report: ReportProgress) -> float:
        """Make ready for transfers → the speed of copies between pool and host memory; 0 without a host tier."""
        if self._host is None:
            return 0.0
        self._host.wait(report)
        copier: BlockCopier
        if self._stream is None:  # the interpreter runs one kernel at a time, and a step's may be under way
            copier = CpuBlockCopier(cache.storage, self._host.rows)
        else:
            copier = GpuBlockCopier(cache.storage, self._host, self._stream)
        return beside.begin_offload(self._host.rows, copier, cache.num_blocks)

    # One step

    def launch(self, plan: StepPlan, on_done: Callable[[], None]) -> Launch:
        """As Executor.launch. Costs the host some microseconds a sequence."""
        with self._on_device():
            launch = self._begin(plan, on_done, self._grammars.begin_masks)
        self._launched.put(launch)
        return launch

    def _begin(self, plan: StepPlan, on_done: Callable[[], None], begin_masks: BeginMasks) -> GpuLaunch:
        self._learn(plan)
        staged = self._books.stage(plan)
        self._sampler.upload()
        self._parts.cache.copy_blocks(plan.block_copies)
        is_special = bool(self._special) and any(entry.sequence_id in self._special for entry in plan.scheduled)
        chunks = self._books.prompt_chunks(plan) if is_special else []
        self._parts.forward(staged, is_whole=bool(chunks))
        self._turn = (self._turn + 1) % _NUM_RESULTS
        launch = GpuLaunch(plan, on_done, self._results[self._turn])
        launch.prompts = [(chunk, self._begin_prompt(row, chunk)) for row, chunk in chunks]
        if is_special:
            self._sample_special(launch, begin_masks)
        else:
            self._sample(launch)
        if self._stream is not None:
            launch.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            launch.event.record(self._stream)
        return launch

    def collect(self, launch: Launch) -> StepTokens:
        """As Executor.collect."""
        assert isinstance(launch, GpuLaunch)
        launch.wait()
        plan, token_ids = launch.plan, launch.token_ids.tolist()
        if launch.pending is not None:
            tokens = launch.pending.finish(token_ids)
            self._grammars.remember(launch.rows, tokens.token_ids)
            self._books.remember(launch.rows, tokens.token_ids)
        else:
            token_ids = [token_id for token_id, entry in zip(token_ids, plan.scheduled, strict=True) if entry.samples]
            if min(token_ids, default=0) >= 0:
                return StepTokens(token_ids)
            tokens = self._sampler.plain_tokens(self._books.sampled_rows(plan), token_ids)
        for chunk, pending in launch.prompts:
            kept = KeptLogprobs()
            for piece in pending:
                kept.append(piece.finish())
            tokens.prompt_logprobs[chunk.facts.sequence_id] = chunk.start, kept.values_from(0)
        return tokens

    def _learn(self, plan: StepPlan) -> None:
        for seq_slot in self._books.apply(plan):
            self._sampler.remove(seq_slot)
        self._grammars.apply(plan)
        self._special.difference_update(plan.finished_sequence_ids)
        self._special.update(facts.sequence_id for facts in plan.new_sequences if _is_special(facts))

    def _give_slot(self, seq_slot: int, record: SequenceRecord) -> None:
        self._sampler.add(seq_slot, record.facts, record.output_ids)

    def _sample(self, launch: GpuLaunch) -> None:
        num_seqs = len(launch.plan.scheduled)
        self._parts.sample(num_seqs)
        launch.token_ids = launch.token_ids[:num_seqs]
        launch.token_ids.copy_(self._parts.token_ids[:num_seqs], non_blocking=True)

    def _sample_special(self, launch: GpuLaunch, begin_masks: BeginMasks) -> None:
        """Where some row takes more than plain sampling. Waits for masks, which are filled while the device works."""
        num_seqs = len(launch.plan.scheduled)
        launch.rows = self._books.sampled_rows(launch.plan)
        masks = begin_masks(launch.rows)
        places = [row for row, entry in enumerate(launch.plan.scheduled) if entry.samples]
        logits = self._parts.logits[:num_seqs]
        seq_slots, positions = self._books.part("sample_slots", num_seqs), self._books.part("seq_lens", num_seqs)
        num_rows = len(places)
        if num_rows < num_seqs:
            rows = _to_device(places, self._device)
            logits, seq_slots, positions = (values.index_select(0, rows) for values in (logits, seq_slots, positions))
        token_ids = self._parts.token_ids[:num_rows]
        launch.pending = self._sampler.sample_more(
            logits,
            launch.rows,
            seq_slots,
            positions,
            token_ids,
            self._books.last_tokens,
            masks.result() if masks is not None else None,
        )
        launch.token_ids = launch.token_ids[:num_rows]
        launch.token_ids.copy_(token_ids, non_blocking=True)

    def _begin_prompt(self, first_row: int, chunk: PromptChunk) -> list[PendingPromptLogprobs]:
        """Begin to work out what a step tells of a prompt, some rows at a time. first_row: that of the token before
        the chunk's first one."""
        num_rows = self._parts.most_prompt_rows
        num_top = chunk.facts.sampling.prompt_logprobs
        begun = []
        for start in range(chunk.start, chunk.end, num_rows):
            token_ids = chunk.facts.token_ids[start : min(start + num_rows, chunk.end)]
            rows = slice(first_row + start - chunk.start, first_row + start - chunk.start + len(token_ids))
            begun.append(self._sampler.begin_prompt_logprobs(self._parts.prompt_logits(rows), token_ids, num_top))
        return begun

    def _step(self, plan: StepPlan) -> StepTokens:
        """Of the warm-up: a plan without anything scheduled only forgets."""
        if plan.scheduled:
            return self.collect(self.launch(plan, lambda: None))
        self._learn(plan)
        return StepTokens([])

    def _watch(self) -> None:
        """On a thread of its own: tell of each step when it is over."""
        while (launch := self._launched.get()) is not None:
            try:
                launch.wait()
            except RuntimeError:  # collect raises it, too
                logger.debug("a step has failed", exc_info=True)
            launch.on_done()

    # Beside the steps

    @property
    def _grammars(self) -> SequenceGrammars:
        assert self._beside is not None, "load comes first"
        return self._beside.grammars

    def start_transfer(self, transfer: Transfer, on_done: Callable[[], None]) -> None:
        """As Executor.start_transfer."""
        assert self._beside is not None, "load comes first"
        self._beside.start_transfer(transfer, on_done)

    def finished_transfers(self) -> list[TransferResult]:
        """As Executor.finished_transfers."""
        return [] if self._beside is None else self._beside.finished_transfers()

    def compile_grammar(self, grammar: Grammar, on_done: Callable[[], None]) -> Future[object]:
        """As Executor.compile_grammar."""
        assert self._beside is not None, "load comes first"
        return self._beside.compile_grammar(grammar, on_done)

    def close(self) -> None:
        """As Executor.close. Waits for the steps under way and for the block that is being copied. Where the steps do
        not come to an end, the device and what waits for it are left to the end of the process."""
        if self._watcher is not None:
            self._launched.put(None)
            self._watcher.join(_END_LIMIT_S)
            if self._watcher.is_alive():
                logger.warning("a step does not end: the device is left as it is", extra=fields(limit_s=_END_LIMIT_S))
                return
            self._watcher = None
        has_ended = self._beside is None or self._beside.close()
        self._beside = None
        if self._host is not None and has_ended:
            self._host.close()
        self._host = None
        self._graphs.clear()

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            yield


def _make_cache(
    model: ModelConfig,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    num_blocks: int,
) -> KvCache:
    """scales: of a float8 cache's keys and values, as measure_kv_scales gives them."""
    cache = KvCache(model, num_blocks, block_size, dtype, device)
    if scales is not None and cache.key_scales is not None and cache.value_scales is not None:
        cache.key_scales.copy_(scales[0])
        cache.value_scales.copy_(scales[1])
    return cache


def _is_special(facts: NewSequence) -> bool:
    """Whether its rows take more than its parameters, which the device knows: see DeviceSampler.sample_more."""
    sampling = facts.sampling
    return bool(
        facts.tells_prompt
        or sampling.changes_logits
        or sampling.grammar is not None
        or sampling.min_tokens
        or sampling.logprobs >= 0
        or sampling.best_of > sampling.n
        or sampling.beam_width
    )


def _to_device(values: list[int], device: torch.device) -> torch.Tensor:
    """[n] int32, without a stop: from memory that the allocator keeps until the copy is over."""
    host = torch.tensor(values, dtype=torch.int32)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
