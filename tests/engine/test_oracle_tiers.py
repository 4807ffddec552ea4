"""Greedy tokens against transformers' on a real model, with KV that was lost, moved away, and came back from disk."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.execution.runner import CpuRunner
from engine.executor import DeviceLimits
from engine.kv.tiers import TierSizes
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.load import load_model
from engine.scheduling.usage import PreemptionKind
from engine.sequence import Sequence
from engine.transfer import StoredBlock, TransferKind
from streamkv.config import EngineConfig
from streamkv.model_files import ModelFiles, ReportProgress
from streamkv.protocol import pack_ids
from tests.support.driven_engine import DrivenEngine, generated
from tests.support.oracle import SHORT, Case, check
from tests.support.quick_start import load_quickly
from tests.support.reference_model import reference_folder

FIRST_BORDER = 48
"""A block's size with which the oracle's prompts, of 38 tokens or more, come to the borders of the first two blocks."""
BY_NAME = {case.name: case for case in SHORT}

LoadRunner = Callable[[int, Path | None], tuple[CpuRunner, DeviceLimits]]


@pytest.fixture(scope="module")
def load_runner() -> Iterator[LoadRunner]:
    """(block size, folder for the disk tier) → a runner with a host tier, in float32. The weights are read once."""
    loaded: list[tuple[Decoder, ModelConfig]] = []
    runners: list[CpuRunner] = []

    def load_once(files: ModelFiles, dtype: torch.dtype, report: ReportProgress) -> tuple[Decoder, ModelConfig]:
        if not loaded:
            loaded.append(load_model(files, dtype, report))
        return loaded[0]

    def load(block_size: int, disk: Path | None) -> tuple[CpuRunner, DeviceLimits]:
        runner = CpuRunner(
            EngineConfig(
                model=str(reference_folder()),
                dtype="float32",
                block_size=block_size,
                kv_cache_memory_gib=0.2,
                max_num_batched_tokens=256,
                host_kv_memory_gib=0.1,
                disk_kv_path=str(disk or ""),
                disk_kv_size_gib=0.25,
            )
        )
        runners.append(runner)
        return runner, load_quickly(runner, load_model=load_once)[1]

    yield load
    for runner in runners:
        runner.close()


@pytest.fixture(scope="module")
def border_runner(load_runner: LoadRunner) -> CpuRunner:
    return load_runner(FIRST_BORDER, None)[0]


def run(engine: DrivenEngine, cases: list[Case], n: int = 1) -> list[Sequence]:
    return engine.run([(case.prompt, len(case.tokens)) for case in cases], n)


def push_out(engine: DrivenEngine, num_blocks: int) -> None:
    """Compute other prompts, block by block, so that there is time to copy down what makes room for them."""
    for i in range(num_blocks):
        first = 300 + 100 * i + num_blocks
        engine.run([(list(range(first, first + engine.blocks.block_size)), 1)])


def spoil_block(folder: Path, token_ids: list[int]) -> Path:
    """Flip a bit in the keys and values of the stored block with these tokens."""
    packed = pack_ids(token_ids)
    (path,) = [path for path in folder.rglob("*.kv") if packed in path.read_bytes()[:1024]]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)
    return path


def check_preempted(runner: CpuRunner, block_size: int, length: int, mode: PreemptionKind) -> None:
    """Of two sequences the younger loses its blocks when it has `length` tokens: the older needs one for its 49th."""
    assert FIRST_BORDER % block_size == 0
    first = BY_NAME["capital"].first(9)
    num_steps = FIRST_BORDER + 1 - len(first.prompt)
    victim = BY_NAME["multi-turn" if length > 90 else "system-json"]
    victim = victim.begun(length - num_steps - len(victim.prompt)).first(num_steps + 5)
    num_blocks = FIRST_BORDER // block_size + -(-(length - 1) // block_size)
    engine = DrivenEngine(runner, block_size, num_blocks, TierSizes(12), mode)
    sequences = run(engine, [first, victim])
    counts = engine.scheduler.counts
    assert counts.preemptions == {mode: 1}
    assert (sequences[1].num_preemptions, sequences[1].num_recompute) == (1, length - 1)
    assert (counts.num_transfers[TransferKind.HOST_TO_DEVICE] > 0) == (mode == "swap")
    for case, sequence in zip((first, victim), sequences, strict=True):
        check(case, generated(sequence))


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("length", [47, 48, 49, 96, *(pytest.param(n, marks=pytest.mark.long) for n in (95, 97))])
def test_preempted_at_the_borders_of_blocks(border_runner: CpuRunner, length: int, mode: PreemptionKind) -> None:
    """At B - 1, B, B + 1, 2B - 1, 2B and 2B + 1 tokens."""
    check_preempted(border_runner, FIRST_BORDER, length, mode)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize(("block_size", "num_blocks"), [(16, 3), (16, 4), (24, 2), (24, 3), (8, 7)])
def test_preempted_at_the_borders_of_smaller_blocks(
    load_runner: LoadRunner, block_size: int, num_blocks: int, mode: PreemptionKind
) -> None:
    runner, _ = load_runner(block_size, None)
    for length in range(num_blocks * block_size - 1, num_blocks * block_size + 2):
        check_preempted(runner, block_size, length, mode)
    runner.close()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_four_choices_that_share_a_prompt_and_are_preempted(border_runner: CpuRunner, mode: PreemptionKind) -> None:
    cases = [BY_NAME["capital"].first(10), BY_NAME["cjk"].first(10)]
    engine = DrivenEngine(border_runner, FIRST_BORDER, 6, TierSizes(8), mode)
    sequences = run(engine, cases, n=4)
    assert engine.scheduler.counts.preemptions[mode] == engine.scheduler.counts.num_preemptions > 0
    assert engine.scheduler.num_block_copies > 0
    for i, sequence in enumerate(sequences):
        check(cases[i // 4], generated(sequence))


def test_blocks_that_were_evicted_to_host_memory_and_came_back(border_runner: CpuRunner) -> None:
    """Two whole blocks and a part of one; for one sequence, and for four."""
    case = BY_NAME["code-explain"].first(5)
    engine = DrivenEngine(border_runner, FIRST_BORDER, 7, TierSizes(16), "swap")
    check(case, generated(run(engine, [case])[0]))
    for n in (1, 4):
        push_out(engine, 7 + n)
        before = engine.blocks.tier_counts.num_host_hit_tokens
        for sequence in run(engine, [case], n):
            assert sequence.num_cached_tokens == len(case.prompt) - 1
            check(case, generated(sequence))
        assert engine.blocks.tier_counts.num_host_hit_tokens - before == len(case.prompt) - 1


def test_blocks_that_went_to_disk_and_came_back_in_this_life_and_the_next_with_a_damaged_file_among_them(
    load_runner: LoadRunner, tmp_path: Path
) -> None:
    block_size, case = 16, BY_NAME["digits-indent"].first(5)
    num_prompt = len(case.prompt)
    stored: list[list[StoredBlock]] = []

    def start() -> DrivenEngine:
        runner, limits = load_runner(block_size, tmp_path)
        stored.append(limits.stored)
        return DrivenEngine(runner, block_size, 8, TierSizes(5, limits.num_disk_blocks, limits.stored), "swap")

    def check_from_disk(engine: DrivenEngine, num_tokens: int, n: int = 1) -> None:
        before = engine.blocks.tier_counts.num_disk_hit_tokens
        for sequence in run(engine, [case], n):
            check(case, generated(sequence))
        assert engine.blocks.tier_counts.num_disk_hit_tokens - before == num_tokens

    def end(engine: DrivenEngine) -> None:
        engine.flush()
        engine.runner.close()

    engine = start()
    check_from_disk(engine, 0)
    push_out(engine, 14)
    check_from_disk(engine, num_prompt - 1)
    end(engine)

    engine = start()
    check_from_disk(engine, num_prompt - 1, n=4)
    assert engine.blocks.tier_counts.num_damaged_disk_blocks == 0
    end(engine)

    spoilt = spoil_block(tmp_path, case.prompt[2 * block_size : 3 * block_size])
    engine = start()
    check_from_disk(engine, 2 * block_size)
    assert engine.blocks.tier_counts.num_damaged_disk_blocks == 1
    end(engine)

    engine = start()
    check_from_disk(engine, num_prompt - 1)
    assert spoilt.exists(), "it was computed again, and written again"
    engine.runner.close()
    assert [bool(each) for each in stored] == [False, True, True, True]
