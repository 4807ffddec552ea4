"""Blocks that leave a GPU runner's pool and come back, while two steps are under way. Where there is no GPU its kernels
run in Triton's interpreter, at seconds a step."""

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from engine.execution import gpu_runner
from engine.execution.gpu_runner import GpuRunner
from engine.execution.warm_up import WarmUp
from engine.executor import DeviceLimits, Launch
from engine.kv.tiers import TierSizes
from streamkv.config import EngineConfig
from tests.support.driven_engine import DrivenEngine, generated
from tests.support.tiny_models import write_small_llama

BLOCK_SIZE = 4
WAIT_S = 120.0


class ColdStart(WarmUp):
    """No step is run before the first."""

    def run(self, report: Callable[[float], None]) -> None:
        report(100.0)


class OverlappedEngine(DrivenEngine):
    """As the loop: it plans and launches a step while the one before is under way."""

    def __init__(self, runner: GpuRunner, num_blocks: int, tiers: TierSizes | None) -> None:
        super().__init__(runner, BLOCK_SIZE, num_blocks, tiers, "swap" if tiers else "auto")  # type: ignore[arg-type]
        self._in_flight: deque[Launch] = deque()

    def turn(self) -> bool:
        plan = self.scheduler.plan()
        if plan is not None:
            self._in_flight.append(self.runner.launch(plan, lambda: None))
        for transfer in self.scheduler.take_transfers():
            self.runner.start_transfer(transfer, self._wake.set)
        if self._in_flight and (plan is None or len(self._in_flight) == self.runner.max_in_flight):
            launch = self._in_flight.popleft()
            self.outputs += self.scheduler.update(launch.plan, self.runner.collect(launch))
        elif plan is None:
            if not self.scheduler.num_transfers:
                return False
            assert self._wake.wait(WAIT_S), "a transfer has not come to its end"
        self._wake.clear()
        self.scheduler.finish_transfers(self.runner.finished_transfers())
        return True


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Iterator[tuple[GpuRunner, DeviceLimits]]:
    folder: Path = write_small_llama(tmp_path_factory.mktemp("small"))
    config = EngineConfig(
        model=str(folder),
        dtype="float32",
        block_size=BLOCK_SIZE,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        max_model_len=64,
        kv_cache_memory_gib=0.01,
        gpu_memory_utilization=0.3,
        host_kv_memory_gib=0.01,
    )
    runner = GpuRunner(config, device)
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":  # the warm-up alone would take minutes
            patch.setattr(gpu_runner, "WarmUp", ColdStart)
        yield runner, runner.load(lambda stage, percent: None)[1]
    runner.close()


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.long
def test_swapped_sequences_and_evicted_prompts_have_the_tokens_that_they_would_have_had(
    loaded: tuple[GpuRunner, DeviceLimits],
) -> None:
    runner, limits = loaded
    assert limits.num_host_blocks > 40 and limits.host_bytes_per_s > 0
    tasks = [(prompt(20 + i, 12 + i), 8) for i in range(4)]
    expected = [generated(sequence) for sequence in OverlappedEngine(runner, 60, None).run(tasks)]

    engine = OverlappedEngine(runner, 8, TierSizes(40))
    assert [generated(sequence) for sequence in engine.run(tasks)] == expected
    counts = engine.blocks.tier_counts
    assert counts.num_stored_to_host > 0 and counts.num_loaded_from_host > 0
    assert engine.scheduler.counts.preemptions["swap"] > 0

    before = counts.num_host_hit_tokens
    engine.run([(prompt(40, 22), 1)])  # takes the blocks of all that is cached
    assert [generated(sequence) for sequence in engine.run(tasks[:1])] == expected[:1]
    assert counts.num_host_hit_tokens > before
