"""The one interface between the loop and whatever computes a step: the CPU runner, a GPU's, a script in the tests."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from engine.plan import StepLoad, StepPlan, StepTokens
from engine.transfer import StoredBlock, Transfer, TransferResult
from streamkv.protocol import ModelFacts
from streamkv.sampling import Grammar

ReportProgress = Callable[[str, float], None]
"""Called with (stage, percent 0..100) while an executor loads; from any thread."""


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What turned out to fit, once the model is loaded."""

    num_blocks: int
    """Blocks in the pool, block 0 (never handed out) included."""
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    block_bytes: int = 0
    """Keys and values of one block in all layers."""
    num_host_blocks: int = 0
    """Blocks that host memory holds below the device; 0: no host tier."""
    num_disk_blocks: int = 0
    """Blocks that the disk may hold below host memory; 0: no disk tier."""
    stored: list[StoredBlock] = field(default_factory=list)
    """Found on disk at the start, each behind its parent, oldest use first. They count against num_disk_blocks."""
    step_samples: list[tuple[StepLoad, float]] = field(default_factory=list)
    """Steps measured while warming up, with their time in seconds: what the latency model is fitted to."""
    host_bytes_per_s: float = 0.0
    """Measured speed of copies between device and host memory; 0: unknown."""
    token_buckets: list[int] = field(default_factory=list)
    """Numbers of tokens to which steps with prompts are padded, ascending; none beyond the last."""


class Launch(Protocol):
    """A step on its way."""

    plan: StepPlan

    @property
    def is_done(self) -> bool:
        """Whether collect would return at once. Never blocks."""
        ...


class Executor(Protocol):
    """Computes steps in the order of their launch.

    `load` runs on a thread of its own, everything else on the loop's. A fault in a step is raised by `collect`:
    the engine then ends, and the supervisor starts a new one.
    """

    max_in_flight: int
    """How many launched steps may be uncollected: 1 waits for the tokens before the next plan, 2 overlaps."""

    def load(self, report: ReportProgress) -> tuple[ModelFacts, DeviceLimits]:
        """Load the model, size and allocate the KV pool, warm up. Called once, before all else."""
        ...

    def launch(self, plan: StepPlan, on_done: Callable[[], None]) -> Launch:
        """Start a step and return at once. `on_done` is called, from any thread, when collect would not block."""
        ...

    def collect(self, launch: Launch) -> StepTokens:
        """The sampled tokens of the oldest launch. Blocks until it is done. Raises whatever the step raised."""
        ...

    def start_transfer(self, transfer: Transfer, on_done: Callable[[], None]) -> None:
        """Start to copy blocks and return at once. `on_done` is called, from any thread, when it is finished."""
        ...

    def finished_transfers(self) -> list[TransferResult]:
        """Those that have finished since the last call. Never blocks. Raises what made a copy fail for good."""
        ...

    def compile_grammar(self, grammar: Grammar, on_done: Callable[[], None]) -> Future[object]:
        """Start to compile and return at once. `on_done` is called, from any thread, when that is over, perhaps before
        this returns. Whoever plans sequences with this grammar holds the result while they live. The exception is
        InvalidField, with the grammar's field; raised at once where the executor follows no grammars."""
        ...

    def close(self) -> None:
        """Free the device. Waits for what is being written to disk. Idempotent."""
        ...
