"""The executor on a CPU: one worker thread computes one step at a time."""

import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch

from engine.execution.inputs import SequenceRecords, make_batch
from engine.execution.kv_cache import KvCache, size_pool
from engine.execution.sampler import NO_TOKEN, UNUSABLE_LOGITS, sample
from engine.executor import DeviceLimits, Launch, ReportProgress
from engine.memory import available_memory_bytes
from engine.models.decoder import Decoder
from engine.models.load import load_model, read_config, resolve_dtype
from engine.plan import NewSequence, ScheduledSequence, StepPlan, StepTokens
from streamkv import model_files
from streamkv.config import EngineConfig
from streamkv.protocol import ModelFacts
from streamkv.sampling import SamplingParams

_WARM_UP_TOKENS = 256
_MOST_RUNS = 5
_LONGEST_REPEATS_S = 0.5
"""Of the start, what runs of the warm-up prompt beyond the second may take."""
_LONGEST_STEP_S = 0.7
"""What a full step should take when the token budget is ours to choose: streams that run beside it wait so long for
their next token. Attention over long contexts comes on top, so it stays under a second."""
_BUDGET_UNIT = 32
_SMALLEST_BUDGET = 128
_LARGEST_BUDGET = 8192


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
        self._model: Decoder | None = None
        self._cache: KvCache | None = None
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
        files = model_files.resolve(config.model, report)
        model_config = read_config(files)
        dtype = resolve_dtype(config.dtype, model_config)
        self._model, _ = load_model(files, dtype, report)
        pool = size_pool(config, model_config, available_memory_bytes())
        self._cache = KvCache(model_config, pool.num_blocks, config.block_size)
        report("warming up", 0.0)
        chunk = min(_WARM_UP_TOKENS, pool.max_model_len - 1, config.max_num_batched_tokens or _WARM_UP_TOKENS)
        tokens_per_s = self._warm_up(chunk, report)
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
            max_num_batched_tokens=self._token_budget(tokens_per_s, pool.max_model_len),
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

    def close(self) -> None:
        """As Executor.close. Waits for the step that is being computed."""
        if self._worker is not None:
            self._queue.put(None)
            self._worker.join()
            self._worker = None
        self._model = None
        self._cache = None

    def _work(self) -> None:
        torch.set_num_threads(self._num_threads)
        with torch.inference_mode():
            while (work := self._queue.get()) is not None:
                work()

    def _step(self, plan: StepPlan) -> StepTokens:
        assert self._model is not None and self._cache is not None
        self._records.apply(plan)
        self._cache.copy_blocks(plan.block_copies)
        if not plan.scheduled:
            return StepTokens([])
        batch = make_batch(plan, self._records, self._config.block_size)
        logits = self._model.forward(batch, self._cache.layers)
        rows = self._records.sampled_rows(plan)
        token_ids = sample(logits, rows)
        failed = {
            row.sequence.sequence_id: UNUSABLE_LOGITS
            for row, token_id in zip(rows, token_ids, strict=True)
            if token_id == NO_TOKEN
        }
        return StepTokens(token_ids, failed)

    def _warm_up(self, num_tokens: int, report: ReportProgress) -> float:
        """Run a prompt a few times and a decode, on blocks that nobody owns yet → prompt tokens per second.

        The fastest run counts, since others may keep the machine busy; quick ones are repeated while that is cheap.
        """
        block_size = self._config.block_size
        facts = NewSequence(-1, 0, SamplingParams(seed=0, max_tokens=1), num_tokens, ())
        blocks = list(range(1, num_tokens // block_size + 2))
        prompt = ScheduledSequence(-1, 0, num_tokens, True, True, [0] * num_tokens, blocks)
        again = ScheduledSequence(-1, 0, num_tokens, True, True, [0] * num_tokens, [])
        decode = ScheduledSequence(-1, num_tokens, 1, False, True, [0], [])
        times_s = [self._time_s(StepPlan(0, [prompt], new_sequences=[facts])), self._time_s(StepPlan(0, [again]))]
        report("warming up", 50.0)
        stop_at_s = time.perf_counter() + _LONGEST_REPEATS_S
        while len(times_s) < _MOST_RUNS and time.perf_counter() + times_s[-1] < stop_at_s:
            times_s.append(self._time_s(StepPlan(0, [again])))
        report("warming up", 75.0)
        self._step(StepPlan(0, [decode]))
        self._step(StepPlan(0, [], finished_sequence_ids=[-1]))
        report("warming up", 100.0)
        return num_tokens / min(times_s)

    def _time_s(self, plan: StepPlan) -> float:
        start = time.perf_counter()
        self._step(plan)
        return time.perf_counter() - start

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
