"""Real bytes through real threads: a tiny model whose KV is preempted, moved, damaged and found again, at every moment.

Each request's tokens must be those that it has when it runs alone and nothing is ever taken from it.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.execution.disk_store import DiskStore
from engine.execution.offload import CpuBlockCopier
from engine.execution.runner import CpuRunner
from engine.executor import DeviceLimits
from engine.kv.audit import audit
from engine.kv.tiers import TierSizes
from engine.plan import StepPlan, StepTokens
from engine.sequence import Request
from engine.transfer import StoredBlock
from streamkv.config import EngineConfig, PreemptionMode
from tests.support.driven_engine import DrivenEngine, generated

BLOCK_SIZE = 4
MAX_TOKENS = 14
VOCAB_SIZE = 320


@dataclass(frozen=True)
class Task:
    prompt: tuple[int, ...]
    max_tokens: int


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def load(model_folder: Path, disk: Path | None) -> tuple[CpuRunner, DeviceLimits]:
    config = EngineConfig(
        model=str(model_folder),
        dtype="float32",
        block_size=BLOCK_SIZE,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        threads=1,
        host_kv_memory_gib=0.001 if disk else 0.0,
        disk_kv_path=str(disk or ""),
        disk_kv_size_gib=0.01,
    )
    runner = CpuRunner(config)
    _, limits = runner.load(lambda stage, percent: None)
    return runner, limits


@pytest.fixture(scope="module")
def alone(model_folder: Path) -> Iterator["Alone"]:
    runner, _ = load(model_folder, None)
    yield Alone(runner)
    runner.close()


class Alone:
    """What a task generates by itself, each computed once."""

    def __init__(self, runner: CpuRunner) -> None:
        self._runner = runner
        self._known: dict[Task, list[int]] = {}

    def tokens(self, task: Task) -> list[int]:
        if task not in self._known:
            engine = DrivenEngine(self._runner, BLOCK_SIZE, 128)
            (sequence,) = engine.run([(list(task.prompt), task.max_tokens)])
            self._known[task] = generated(sequence)
        return self._known[task]


def make_tasks(rng: random.Random) -> list[Task]:
    """Prompts that begin alike in part, some of them repeated: chats, regenerated answers, unrelated ones."""
    stems = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 50))] for _ in range(4)]
    tasks = []
    for _ in range(24):
        stem = rng.choice(stems)
        prompt = stem[: rng.randint(1, len(stem))]
        prompt += [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice([0, 0, 1, 3, 9]))]
        tasks.append(Task(tuple(prompt), rng.randint(1, MAX_TOKENS)))
    return tasks + rng.sample(tasks, 12)


def disturb(rng: random.Random, patch: pytest.MonkeyPatch) -> None:
    """Let steps and copies take their time, writes fail, and files be damaged behind the engine's back."""

    def pause() -> None:
        if rng.random() < 0.3:
            time.sleep(rng.random() * 0.004)

    to_host, to_device = CpuBlockCopier.to_host, CpuBlockCopier.to_device
    write, read, step = DiskStore.write, DiskStore.read, CpuRunner._step

    def slow_to_host(self: CpuBlockCopier, block_ids: list[int], host_ids: list[int]) -> None:
        pause()
        to_host(self, block_ids, host_ids)

    def slow_to_device(self: CpuBlockCopier, host_ids: list[int], block_ids: list[int]) -> None:
        pause()
        to_device(self, host_ids, block_ids)

    def faulty_write(self: DiskStore, stored: StoredBlock, payload: memoryview) -> bool:
        pause()
        return rng.random() > 0.05 and write(self, stored, payload)

    def faulty_read(self: DiskStore, stored: StoredBlock, target: memoryview) -> bool:
        pause()
        (path,) = [*self.path.rglob(f"{stored.digest.hex()}.kv")] or [None]
        if path is not None and rng.random() < 0.1:
            data = bytearray(path.read_bytes())
            start = rng.randrange(len(data) // 2)
            data[start : start + 100] = rng.randbytes(100)
            path.write_bytes(data)
        return read(self, stored, target)

    def slow_step(self: CpuRunner, plan: StepPlan) -> StepTokens:
        pause()
        return step(self, plan)

    patch.setattr(CpuRunner, "_step", slow_step)
    patch.setattr(CpuBlockCopier, "to_host", slow_to_host)
    patch.setattr(CpuBlockCopier, "to_device", slow_to_device)
    patch.setattr(DiskStore, "write", faulty_write)
    patch.setattr(DiskStore, "read", faulty_read)


def live(engine: DrivenEngine, tasks: list[Task], rng: random.Random, alone: Alone) -> None:
    """One life of an engine: requests come and go while it runs."""
    waiting = rng.sample(tasks, len(tasks))
    requests: list[tuple[Task, Request]] = []
    aborted: set[Request] = set()
    goes_on = True
    while waiting or goes_on:
        while waiting and rng.random() < 0.4:
            task = waiting.pop()
            requests.append((task, engine.add(list(task.prompt), task.max_tokens)))
        if requests and rng.random() < 0.04:
            request = rng.choice(requests)[1]
            if not request.is_finished:
                engine.scheduler.abort(request, "client")
                aborted.add(request)
        for _, request in requests:
            if not request.is_finished and rng.random() < 0.01:
                (engine.scheduler.resume if request.is_paused else engine.scheduler.pause)(request)
        goes_on = engine.turn()
        audit(engine.blocks)
        if not goes_on:
            for _, request in requests:
                if request.is_paused:
                    engine.scheduler.resume(request)
                    goes_on = True
    for task, request in requests:
        (sequence,) = request.sequences
        assert request.is_finished
        wanted, got = alone.tokens(task), generated(sequence)
        assert got == (wanted[: len(got)] if request in aborted else wanted)
    assert engine.blocks.num_owned_blocks == 0


def check_seed(seed: int, model_folder: Path, alone: Alone, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    tasks = make_tasks(rng)
    most = max(-(-(len(task.prompt) + task.max_tokens) // BLOCK_SIZE) for task in tasks)
    mode: PreemptionMode = rng.choice(["swap", "swap", "auto", "recompute"])
    hits = preemptions = 0
    for _ in range(2):
        runner, limits = load(model_folder, disk)
        try:
            tiers = TierSizes(rng.randint(1, 24), rng.choice([0, 20, 200]), limits.stored)
            if not tiers.num_disk_blocks:
                tiers = TierSizes(tiers.num_host_blocks)
            engine = DrivenEngine(runner, BLOCK_SIZE, most + rng.randint(0, 12), tiers, mode)
            with monkeypatch.context() as patch:
                disturb(rng, patch)
                live(engine, tasks, rng, alone)
            if rng.random() < 0.7:
                engine.flush()
            hits += engine.blocks.tier_counts.num_host_hit_tokens + engine.blocks.tier_counts.num_disk_hit_tokens
            preemptions += engine.scheduler.counts.num_preemptions
        finally:
            runner.close()
    assert preemptions > 0
    assert hits > 0 or mode != "swap"


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_right_whatever_becomes_of_the_blocks(
    seed: int, model_folder: Path, alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_seed(seed, model_folder, alone, tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_tokens_are_right_for_many_seeds(
    model_folder: Path, alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(100, 160):
        check_seed(seed, model_folder, alone, tmp_path / str(seed), monkeypatch)
