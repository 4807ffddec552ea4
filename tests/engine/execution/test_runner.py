"""The executor on a CPU, with a tiny random model."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.execution.offload import CpuBlockCopier
from engine.execution.runner import CpuRunner, default_num_threads
from engine.executor import DeviceLimits, Executor
from engine.plan import NewSequence, ScheduledSequence, StepPlan, StepTokens
from engine.transfer import StoredBlock, Transfer, TransferKind, TransferResult, block_digest
from streamkv.config import EngineConfig
from streamkv.errors import ConfigError, ModelError
from streamkv.protocol import ModelFacts, pack_ids
from streamkv.sampling import SamplingParams
from tests.support.tiny_models import write_small_llama

BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return write_small_llama(folder)


def ignore(stage: str, percent: float) -> None:
    pass


@pytest.fixture(scope="module")
def loaded(model_folder: Path) -> Iterator[tuple[CpuRunner, ModelFacts, DeviceLimits]]:
    runner = CpuRunner(EngineConfig(model=str(model_folder), dtype="float32", block_size=BLOCK_SIZE, max_num_seqs=8))
    yield runner, *runner.load(ignore)
    runner.close()


@pytest.fixture
def run(loaded: tuple[CpuRunner, ModelFacts, DeviceLimits]) -> Callable[[StepPlan], list[int]]:
    runner = loaded[0]
    return lambda plan: runner.collect(runner.launch(plan, lambda: None)).token_ids


def facts(sequence_id: int, num_prompt: int, temperature: float = 0.0) -> NewSequence:
    sampling = SamplingParams(seed=5, max_tokens=100, temperature=temperature)
    return NewSequence(sequence_id, 0, sampling, num_prompt, ())


def entry(
    sequence_id: int, start: int, ids: list[int], blocks: list[int] | None = None, samples: bool = True
) -> ScheduledSequence:
    return ScheduledSequence(sequence_id, start, len(ids), len(ids) > 1, samples, ids, blocks or [])


def test_facts_and_limits_are_the_models_and_the_machines(
    loaded: tuple[CpuRunner, ModelFacts, DeviceLimits], model_folder: Path
) -> None:
    runner, model, limits = loaded
    executor: Executor = runner
    assert executor.max_in_flight == 1
    assert (model.name, model.vocab_size, model.max_model_len) == (model_folder.name, 320, 256)
    assert (model.eos_token_ids, model.dtype, model.device) == ([2], "float32", "cpu")
    assert limits.block_size == BLOCK_SIZE
    assert limits.num_blocks == 8 * 256 // BLOCK_SIZE + 1
    assert 128 <= limits.max_num_batched_tokens <= 8192
    loads = [load for load, seconds in limits.step_samples if seconds > 0]
    assert any(load.num_decodes for load in loads) and any(load.num_prefill_kv_tokens for load in loads)
    assert not len(runner._records), "nothing is left of the warm-up"


def test_tokens_equal_those_of_transformers(run: Callable[[StepPlan], list[int]], model_folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    prompt = [7, 99, 250, 31, 8, 4, 77]
    wanted = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0)
    tokens = run(StepPlan(1, [entry(1, 0, prompt, [9, 3])], new_sequences=[facts(1, 7)]))
    for i in range(11):
        blocks = [20 + i] if (7 + i) % BLOCK_SIZE == 0 else []
        tokens += run(StepPlan(2, [entry(1, 7 + i, tokens[-1:], blocks)]))
    run(StepPlan(3, [], finished_sequence_ids=[1]))
    assert tokens == wanted[0, 7:].tolist()


def test_a_chunk_that_does_not_end_the_prompt_samples_nothing(run: Callable[[StepPlan], list[int]]) -> None:
    first = StepPlan(1, [entry(1, 0, [7, 99, 250], [5], samples=False)], new_sequences=[facts(1, 5)])
    assert run(first) == []
    (token,) = run(StepPlan(2, [entry(1, 3, [31, 8], [6])], finished_sequence_ids=[]))
    whole = StepPlan(3, [entry(2, 0, [7, 99, 250, 31, 8], [7, 8])], new_sequences=[facts(2, 5)])
    assert run(whole) == [token]


def test_a_copied_block_goes_on_like_its_source(run: Callable[[StepPlan], list[int]]) -> None:
    prompt = [7, 99, 250, 31, 8, 4]
    (token,) = run(StepPlan(1, [entry(1, 0, prompt, [9, 3])], new_sequences=[facts(1, 6)]))
    # Sequence 2 shares block 9 and gets a copy of block 3, into which both then write.
    step = StepPlan(
        2,
        [entry(1, 6, [token]), entry(2, 6, [token], [9, 14])],
        new_sequences=[facts(2, 6)],
        block_copies=[(3, 14)],
    )
    first, second = run(step)
    assert first == second
    assert run(StepPlan(3, [entry(1, 7, [first]), entry(2, 7, [(first + 1) % 320])])) != [first, first]
    run(StepPlan(4, [], finished_sequence_ids=[1, 2]))


def test_a_preempted_sequence_is_computed_again_to_the_same_tokens(run: Callable[[StepPlan], list[int]]) -> None:
    prompt = [7, 99, 250, 31, 8, 4]
    tokens = run(StepPlan(1, [entry(1, 0, prompt, [9, 3])], new_sequences=[facts(1, 6, temperature=1.0)]))
    tokens += run(StepPlan(2, [entry(1, 6, tokens)]))
    again = StepPlan(
        3, [entry(1, 0, [*prompt, tokens[0]], [30, 31])], preempted_sequence_ids=[1], readmitted_sequence_ids=[1]
    )
    assert run(again) == tokens[1:]
    run(StepPlan(4, [], finished_sequence_ids=[1]))


def test_a_sequence_without_usable_logits_fails_alone_and_leaves_nothing_behind(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[13] = float("nan")
    model.save_pretrained(tmp_path)
    runner = CpuRunner(EngineConfig(model=str(tmp_path), dtype="float32", block_size=BLOCK_SIZE, max_num_seqs=8))
    runner.load(ignore)

    def run(plan: StepPlan) -> StepTokens:
        return runner.collect(runner.launch(plan, lambda: None))

    def go_on(sequence_id: int, token_id: int, block_id: int) -> list[int]:
        token_ids = [token_id]
        for i in range(5):
            token_ids += run(
                StepPlan(2, [entry(sequence_id, 5 + i, token_ids[-1:], [block_id] if i == 3 else [])])
            ).token_ids
        return token_ids

    prompt = [7, 99, 250, 31, 8]
    solo = run(StepPlan(1, [entry(1, 0, prompt, [1, 2])], new_sequences=[facts(1, 5)]))
    assert solo.failed == {}
    alone = go_on(1, solo.token_ids[0], 3)
    # Two fail in a step of four: by their prompt, and by the token that they decode.
    mixed = StepPlan(
        3,
        [entry(5, 0, [13], [8]), entry(2, 0, prompt, [4, 5]), entry(3, 0, [7, 13, 8, 9, 10], [6, 7])],
        new_sequences=[facts(5, 1), facts(2, 5), facts(3, 5)],
        finished_sequence_ids=[1],
    )
    tokens = run(mixed)
    assert tokens.token_ids == [-1, alone[0], -1]
    assert tokens.failed.keys() == {3, 5} and "no usable logits" in tokens.failed[3]
    # The blocks in which the NaNs lie go to the neighbour, and to a new sequence that does not fill them.
    run(StepPlan(4, [], finished_sequence_ids=[3, 5]))
    assert go_on(2, alone[0], 6) == alone
    again = run(StepPlan(5, [entry(4, 0, prompt, [7, 8])], new_sequences=[facts(4, 5)]))
    assert [again.token_ids, again.failed] == [alone[:1], {}]
    runner.close()


def test_the_pool_stays_within_the_memory_that_is_left(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CpuRunner(EngineConfig(model=str(model_folder), dtype="float32", block_size=BLOCK_SIZE, max_num_seqs=8))
    monkeypatch.setattr("engine.execution.runner.available_memory_bytes", lambda: 400_000)
    _, limits = runner.load(ignore)
    runner.close()
    block_bytes = 2 * 2 * 2 * BLOCK_SIZE * 8 * 4
    assert 350_000 < limits.num_blocks * block_bytes <= 360_000


def test_launch_returns_at_once_and_on_done_is_called_from_the_worker(
    loaded: tuple[CpuRunner, ModelFacts, DeviceLimits],
) -> None:
    runner = loaded[0]
    callers: list[threading.Thread] = []
    done = threading.Event()

    def on_done() -> None:
        callers.append(threading.current_thread())
        done.set()

    plan = StepPlan(1, [entry(1, 0, list(range(200)), list(range(1, 51)))], new_sequences=[facts(1, 200)])
    launch = runner.launch(plan, on_done)
    assert launch.plan is plan
    assert done.wait(10)
    assert launch.is_done
    assert len(runner.collect(launch).token_ids) == 1
    assert callers != [threading.current_thread()]
    runner.collect(runner.launch(StepPlan(2, [], finished_sequence_ids=[1]), lambda: None))


def test_collect_raises_what_the_step_raised_and_on_done_is_still_called(
    loaded: tuple[CpuRunner, ModelFacts, DeviceLimits],
) -> None:
    runner = loaded[0]
    done = threading.Event()
    launch = runner.launch(StepPlan(1, [entry(1, 0, [5, 6], [])], new_sequences=[facts(1, 2)]), done.set)
    with pytest.raises(ValueError, match="its blocks hold 0"):
        runner.collect(launch)
    assert done.wait(10)
    assert launch.is_done


def test_an_idle_worker_takes_no_cpu(loaded: tuple[CpuRunner, ModelFacts, DeviceLimits]) -> None:
    runner = loaded[0]
    runner.collect(runner.launch(StepPlan(1, []), lambda: None))
    before_s = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before_s < 0.05


def test_close_ends_the_worker_and_may_be_called_twice(model_folder: Path) -> None:
    runner = CpuRunner(EngineConfig(model=str(model_folder), max_num_seqs=1, max_num_batched_tokens=16))
    runner.close()
    _, limits = runner.load(ignore)
    assert limits.max_num_batched_tokens == 16
    assert "cpu-runner" in {thread.name for thread in threading.enumerate()}
    workers = [thread for thread in threading.enumerate() if thread.name == "cpu-runner"]
    runner.close()
    runner.close()
    assert sum(worker.is_alive() for worker in workers) == len(workers) - 1, "the module's runner has the other one"


def test_without_chunked_prefill_a_step_holds_the_longest_prompt(model_folder: Path) -> None:
    runner = CpuRunner(EngineConfig(model=str(model_folder), max_num_seqs=1, enable_chunked_prefill=False))
    _, limits = runner.load(ignore)
    runner.close()
    assert limits.max_num_batched_tokens >= limits.max_model_len


def test_loading_reports_its_stages(model_folder: Path) -> None:
    stages: list[tuple[str, float]] = []
    runner = CpuRunner(EngineConfig(model=str(model_folder), max_num_seqs=1))
    runner.load(lambda stage, percent: stages.append((stage, percent)))
    runner.close()
    assert stages[-1] == ("warming up", 100.0)
    assert any(stage == "loading weights" for stage, _ in stages)
    assert all(0.0 <= percent <= 100.0 for _, percent in stages)


def test_limits_that_do_not_fit_and_missing_models_are_errors(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="256 positions"):
        CpuRunner(EngineConfig(model=str(model_folder), max_model_len=300)).load(ignore)
    with pytest.raises(ModelError):
        CpuRunner(EngineConfig(model=str(tmp_path / "nothing"))).load(ignore)


# tiers


class TieredRunner:
    """A runner with host memory and a disk below, one transfer at a time."""

    def __init__(self, model_folder: Path, disk: Path) -> None:
        config = EngineConfig(
            model=str(model_folder),
            dtype="float32",
            block_size=BLOCK_SIZE,
            max_num_seqs=1,
            max_num_batched_tokens=64,
            host_kv_memory_gib=0.001,
            disk_kv_path=str(disk),
            disk_kv_size_gib=0.01,
        )
        self.runner = CpuRunner(config)
        try:
            _, self.limits = self.runner.load(ignore)
        except BaseException:
            self.runner.close()
            raise
        self.num_transfers = 0

    def run(self, plan: StepPlan) -> list[int]:
        return self.runner.collect(self.runner.launch(plan, lambda: None)).token_ids

    def move(
        self,
        kind: TransferKind,
        block_ids: list[int] | None = None,
        host_ids: list[int] | None = None,
        stored: list[StoredBlock] | None = None,
    ) -> TransferResult:
        done = threading.Event()
        self.num_transfers += 1
        self.runner.start_transfer(
            Transfer(self.num_transfers, kind, block_ids or [], host_ids or [], stored or []), done.set
        )
        assert done.wait(20)
        (result,) = self.runner.finished_transfers()
        assert result.transfer_id == self.num_transfers
        return result


def stored_chain(token_ids: list[int]) -> list[StoredBlock]:
    """Of all whole blocks."""
    blocks: list[StoredBlock] = []
    digest = b"n" * 32
    for depth, end in enumerate(range(BLOCK_SIZE, len(token_ids) + 1, BLOCK_SIZE), 1):
        packed = pack_ids(token_ids[end - BLOCK_SIZE : end])
        blocks.append(StoredBlock(block_digest(digest, packed), digest, depth, packed))
        digest = blocks[-1].digest
    return blocks


def test_without_a_host_tier_there_is_none(loaded: tuple[CpuRunner, ModelFacts, DeviceLimits]) -> None:
    runner, _, limits = loaded
    assert limits.block_bytes == 2 * 2 * BLOCK_SIZE * 2 * 8 * 4
    assert (limits.num_host_blocks, limits.num_disk_blocks, limits.stored, limits.host_bytes_per_s) == (0, 0, [], 0.0)
    assert runner.finished_transfers() == []


def test_a_prompt_goes_on_from_blocks_that_were_on_disk_in_this_life_and_the_next(
    model_folder: Path, tmp_path: Path
) -> None:
    prompt = [7, 99, 250, 31, 8, 4, 77, 12, 5, 200]
    down, up = TransferKind.DEVICE_TO_HOST, TransferKind.HOST_TO_DEVICE
    stored = stored_chain(prompt)
    first = TieredRunner(model_folder, tmp_path)
    limits = first.limits
    assert limits.num_host_blocks == int(0.001 * 2**30) // limits.block_bytes - 1
    assert limits.num_disk_blocks == int(0.01 * 2**30) // 4096
    assert limits.host_bytes_per_s > 0 and limits.stored == []
    tokens = first.run(StepPlan(1, [entry(1, 0, prompt, [9, 3, 5])], new_sequences=[facts(1, 10)]))
    assert first.move(down, [9, 3], [2, 7]).num_bytes == 2 * limits.block_bytes
    assert first.move(TransferKind.HOST_TO_DISK, None, [2, 7], stored).failed == []
    first.run(StepPlan(2, [], finished_sequence_ids=[1]))

    def from_disk(tiered: TieredRunner) -> list[int]:
        assert tiered.move(TransferKind.DISK_TO_HOST, None, [1, 3], stored).failed == []
        tiered.move(up, [20, 30], [1, 3])
        plan = StepPlan(3, [entry(2, 8, prompt[8:], [20, 30, 10])], new_sequences=[facts(2, 10)])
        found = tiered.run(plan)
        tiered.run(StepPlan(4, [], finished_sequence_ids=[2]))
        return found

    assert from_disk(first) == tokens
    first.runner.close()
    second = TieredRunner(model_folder, tmp_path)
    assert second.limits.stored == stored
    assert from_disk(second) == tokens
    second.runner.close()


def test_a_transfer_waits_for_the_steps_before_it_and_later_steps_do_not_wait_for_it(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiered = TieredRunner(model_folder, tmp_path)
    runner = tiered.runner
    real, copying, may_go = CpuBlockCopier.to_host, threading.Event(), threading.Event()

    def to_host(self: CpuBlockCopier, block_ids: list[int], host_ids: list[int]) -> None:
        copying.set()
        assert may_go.wait(20)
        real(self, block_ids, host_ids)

    monkeypatch.setattr(CpuBlockCopier, "to_host", to_host)
    prompt = [7, 99, 250, 31, 8, 4, 77, 12]
    copied = threading.Event()
    before = runner.launch(StepPlan(1, [entry(1, 0, prompt, [9, 3])], new_sequences=[facts(1, 8)]), lambda: None)
    runner.start_transfer(Transfer(1, TransferKind.DEVICE_TO_HOST, [9, 3], [1, 2]), copied.set)
    assert copying.wait(20)
    assert before.is_done
    (token,) = runner.collect(before).token_ids
    # While the copy is held, steps go on and the disk works.
    after = runner.launch(StepPlan(2, [entry(1, 8, [token], [4])]), lambda: None)
    assert len(runner.collect(after).token_ids) == 1
    assert not copied.is_set() and runner.finished_transfers() == []
    may_go.set()
    assert copied.wait(20)
    assert [result.transfer_id for result in runner.finished_transfers()] == [1]
    runner.close()


def test_close_ends_all_threads_and_frees_the_folder(model_folder: Path, tmp_path: Path) -> None:
    def num_threads() -> dict[str, int]:
        names = [thread.name for thread in threading.enumerate()]
        return {name: names.count(name) for name in ("cpu-runner", "kv-copy", "kv-disk")}

    before = num_threads()
    tiered = TieredRunner(model_folder, tmp_path)
    assert num_threads() == {name: count + 1 for name, count in before.items()}
    for i in range(20):
        transfer = Transfer(i, TransferKind.DEVICE_TO_HOST, [1, 2, 3], [4, 5, 6])
        tiered.runner.start_transfer(transfer, lambda: None)
    tiered.runner.close()
    tiered.runner.close()
    assert num_threads() == before
    TieredRunner(model_folder, tmp_path).runner.close()


def test_another_model_does_not_find_the_blocks(model_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model_folder, copy)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    first = TieredRunner(copy, tmp_path / "kv")
    first.run(StepPlan(1, [entry(1, 0, [7, 99, 250, 31], [9])], new_sequences=[facts(1, 4)]))
    first.move(TransferKind.DEVICE_TO_HOST, [9], [1])
    first.move(TransferKind.HOST_TO_DISK, None, [1], stored_chain([7, 99, 250, 31]))
    first.runner.close()
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    other = TieredRunner(copy, tmp_path / "kv")
    assert other.limits.stored == []
    other.runner.close()


def test_a_disk_path_that_cannot_be_used_is_said_before_the_weights_are_read(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_model(*args: object) -> None:
        raise AssertionError("the weights are read")

    monkeypatch.setattr("engine.execution.runner.load_model", load_model)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="disk_kv_path"):
        TieredRunner(model_folder, tmp_path / "file")


def test_threads_stay_within_the_control_groups_quota(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text("100000 100000\n")
    assert default_num_threads(quota) == 1
    quota.write_text("max 100000\n")
    assert default_num_threads(quota) == default_num_threads(tmp_path / "missing") >= 1
