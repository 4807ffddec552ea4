"""The executor on a CPU: one worker thread computes one step at a time."""

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch

from engine.execution.beside_steps import BesideSteps
from engine.execution.inputs import PromptChunk, SequenceRecords, make_batch, remember_tokens
from engine.execution.kv_cache import CACHE_DTYPE, KvCache, bytes_per_block, size_host, size_pool
from engine.execution.logprobs import logprobs_of
from engine.execution.offload import DISK_KINDS, CpuBlockCopier, allocate_host_memory
from engine.execution.sampler import sample_step
from engine.execution.warm_up import WarmUp
from engine.executor import DeviceLimits, Launch, ReportProgress
from engine.kept_logprobs import KeptLogprobs
from engine.memory import available_memory_bytes
from engine.models.fingerprint import placing
from engine.models.load import CausalModel, load_model, read_config, resolve_dtype
from engine.plan import StepPlan, StepTokens
from engine.transfer import Transfer, TransferResult
from streamkv import model_files
from streamkv.config import EngineConfig
from streamkv.protocol import ModelFacts
from streamkv.sampling import Grammar

_LONGEST_STEP_S = 0.7
"""What a full step should take when the token budget is ours to choose: streams that run beside it wait so long for
their next token. Attention over long contexts comes on top, so it stays under a second."""
_BUDGET_UNIT = 32
_SMALLEST_BUDGET = 128
_LARGEST_BUDGET = 8192
_LOGITS_BYTES = 64 * 1024 * 1024
"""Of a prompt's logits that are there at once: of all of a long one they would be gigabytes."""


class CpuLaunch:
    """A step on its way through the worker thread."""

    def __init__(self, plan: StepPlan, on_done: Callable[[], None]) -> None:
        self.plan = plan
        self._on_done = on_done
        self._done = threading.Event()
        self._tokens: StepTokens | None = None
        self._error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def run(self, step: Callable[[StepPlan], StepTokens]) -> None:
        """On the worker thread: compute the step; what it raises is kept for `result`."""
        try:
            self._tokens = step(self.plan)
        except BaseException as error:
            self._error = error
        self._done.set()
        self._on_done()

    def result(self) -> StepTokens:
        self._done.wait()
        if self._error is not None:
            raise self._error
        assert self._tokens is not None
        return self._tokens


class CpuRunner:
    """Computes steps with PyTorch's CPU operators. Implements engine.executor.Executor.

    The worker thread alone touches PyTorch, from loading on, and sleeps while there is no step. One thread, because
    libgomp keeps a team of threads for each that calls it and, once the teams outnumber the cores, lets them wait
    asleep: every parallel operator then pays for waking them.
    """

    max_in_flight = 1

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._model: CausalModel | None = None
        self._cache: KvCache | None = None
        self._beside: BesideSteps | None = None
        self._records = SequenceRecords()
        self._num_threads = config.threads or default_num_threads()

    def load(self, report: ReportProgress) -> tuple[ModelFacts, DeviceLimits]:
        """As Executor.load. Raises ModelError, or ConfigError for a limit that does not fit this machine."""
        self._worker = threading.Thread(target=self._work, name="cpu-runner", daemon=True)
        self._worker.start()
        loaded: Future[tuple[ModelFacts, DeviceLimits]] = Future()

        def load() -> None:
            try:
                loaded.set_result(self._load(report))
            except BaseException as error:
                loaded.set_exception(error)

        self._queue.put(load)
        return loaded.result()

    def _load(self, report: ReportProgress) -> tuple[ModelFacts, DeviceLimits]:
        config = self._config
        beside = self._beside = BesideSteps(config)
        files = model_files.resolve(config.model, report, with_weights=config.load_format != "dummy")
        model_config = read_config(files)
        dtype = resolve_dtype(config.dtype, model_config)
        self._model, _ = load_model(files, dtype, report)
        beside.begin_grammars(files, model_config, max(1, self._num_threads // 2))
        available_bytes = available_memory_bytes()
        pool = size_pool(config, model_config, available_bytes)
        self._cache = KvCache(model_config, pool.num_blocks, config.block_size)
        block_bytes = bytes_per_block(model_config, config.block_size)
        num_host_blocks = size_host(config, block_bytes, pool.num_blocks * block_bytes, available_bytes)
        words = placing(dtype, CACHE_DTYPE, config.block_size, block_bytes)
        num_disk_blocks, stored = beside.open_disk(files, model_config, words, block_bytes, self._num_threads, report)
        warm_up = WarmUp(
            self._step, config.block_size, pool.max_model_len, config.max_num_seqs, config.max_num_batched_tokens
        )
        warm_up.run(partial(report, "warming up"))
        host_bytes_per_s = 0.0
        if num_host_blocks:
            host = allocate_host_memory(num_host_blocks, block_bytes)
            copier = CpuBlockCopier(self._cache.storage, host)
            host_bytes_per_s = beside.begin_offload(host, copier, pool.num_blocks)
        facts = ModelFacts(
            name=config.served_model_name or files.name,
            vocab_size=model_config.vocab_size,
            max_model_len=pool.max_model_len,
            eos_token_ids=list(model_config.eos_token_ids),
            dtype=str(dtype).removeprefix("torch."),
            device="cpu",
            num_parameters=model_config.num_parameters,
        )
        limits = DeviceLimits(
            num_blocks=pool.num_blocks,
            block_size=config.block_size,
            max_model_len=pool.max_model_len,
            max_num_batched_tokens=self._token_budget(warm_up.tokens_per_s, pool.max_model_len),
            block_bytes=block_bytes,
            num_host_blocks=num_host_blocks,
            num_disk_blocks=num_disk_blocks,
            stored=stored,
            step_samples=warm_up.samples,
            host_bytes_per_s=host_bytes_per_s,
        )
        return facts, limits

    def launch(self, plan: StepPlan, on_done: Callable[[], None]) -> Launch:
        """As Executor.launch. The caller collects each launch before the next."""
        assert self._worker is not None, "load comes first"
        launch = CpuLaunch(plan, on_done)
        self._queue.put(partial(launch.run, self._step))
        return launch

    def collect(self, launch: Launch) -> StepTokens:
        """As Executor.collect."""
        assert isinstance(launch, CpuLaunch)
        return launch.result()

    def start_transfer(self, transfer: Transfer, on_done: Callable[[], None]) -> None:
        """As Executor.start_transfer. The worker hands over what waits for the steps before it."""
        assert self._beside is not None, "load comes first"
        if transfer.kind in DISK_KINDS:
            self._beside.start_transfer(transfer, on_done)
        else:
            self._queue.put(partial(self._beside.start_transfer, transfer, on_done))

    def finished_transfers(self) -> list[TransferResult]:
        """As Executor.finished_transfers."""
        return [] if self._beside is None else self._beside.finished_transfers()

    def compile_grammar(self, grammar: Grammar, on_done: Callable[[], None]) -> Future[object]:
        """As Executor.compile_grammar."""
        assert self._beside is not None, "load comes first"
        return self._beside.compile_grammar(grammar, on_done)

    def close(self) -> None:
        """As Executor.close. Waits for the step that is being computed and for the block that is being copied."""
        if self._worker is not None:
            self._queue.put(None)
            self._worker.join()
            self._worker = None
        if self._beside is not None:
            self._beside.close()
            self._beside = None
        self._model = None
        self._cache = None

    def _work(self) -> None:
        torch.set_num_threads(self._num_threads)
        with torch.inference_mode():
            while (work := self._queue.get()) is not None:
                work()

    def _step(self, plan: StepPlan) -> StepTokens:
        assert self._model is not None and self._cache is not None and self._beside is not None
        grammars = self._beside.grammars
        self._records.apply(plan)
        grammars.apply(plan)
        self._cache.copy_blocks(plan.block_copies)
        if not plan.scheduled:
            return StepTokens([])
        prompt_chunks = self._records.prompt_chunks(plan)
        batch = make_batch(plan, self._records, self._config.block_size, prompt_chunks)
        rows = self._records.sampled_rows(plan)
        masks = grammars.begin_masks(rows)
        hidden = self._model.hidden(batch, self._cache.layers, batch.output_rows)
        logits = self._model.logits(hidden[: len(rows)])
        tokens = sample_step(logits, rows, masks.result() if masks is not None else None)
        remember_tokens(rows, tokens.token_ids)
        grammars.remember(rows, tokens.token_ids)
        if prompt_chunks:
            self._tell_prompts(tokens, prompt_chunks, hidden[len(rows) :])
        return tokens

    def _tell_prompts(self, tokens: StepTokens, chunks: list[PromptChunk], hidden: torch.Tensor) -> None:
        """hidden: of the rows before the chunks' tokens, chunk after chunk."""
        assert self._model is not None
        num_rows = max(1, _LOGITS_BYTES // (4 * self._model.config.vocab_size))
        for chunk in chunks:
            num_top, kept = chunk.facts.sampling.prompt_logprobs, KeptLogprobs()
            for start in range(chunk.start, chunk.end, num_rows):
                token_ids = chunk.facts.token_ids[start : min(start + num_rows, chunk.end)]
                logits, hidden = self._model.logits(hidden[: len(token_ids)]), hidden[len(token_ids) :]
                kept.append(logprobs_of(logits, torch.tensor(token_ids), num_top).pack(num_top))
            tokens.prompt_logprobs[chunk.facts.sequence_id] = chunk.start, kept.values_from(0)

    def _token_budget(self, tokens_per_s: float, max_model_len: int) -> int:
        """max_num_batched_tokens: the user's, or what this CPU computes in a step that is short enough."""
        config = self._config
        if config.max_num_batched_tokens:
            return config.max_num_batched_tokens
        if not config.enable_chunked_prefill:
            # A prompt must go through in one step, however long that takes.
            return max_model_len
        budget = int(tokens_per_s * _LONGEST_STEP_S) // _BUDGET_UNIT * _BUDGET_UNIT
        return min(max(budget, _SMALLEST_BUDGET), _LARGEST_BUDGET)


def default_num_threads(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """One per core that this process may use: by its affinity, by its control group's quota, and by PyTorch's own
    count, which leaves out the second threads of a core."""
    num_threads = min(torch.get_num_threads(), len(os.sched_getaffinity(0)))
    try:
        quota, period = cpu_max.read_text().split()
        num_threads = min(num_threads, int(quota) // int(period))
    except (OSError, ValueError):  # no such file, or a quota that reads `max`
        pass
    return max(num_threads, 1)
