"""Workloads and traces: their shapes, and that a seed says everything."""

import gzip
from pathlib import Path
from statistics import median

import pytest

from streamkv.tools.workloads import BUILDERS, Builder, Shape, TraceError, Workload, read_trace, replay

TRACES = Path(__file__).resolve().parents[2] / "data" / "traces"
MOONCAKE = TRACES / "mooncake-conversation.jsonl.gz"
AZURE = TRACES / "azure-llm-2023-conversation.csv.gz"


def build(name: str, **shape: float) -> Workload:
    return Builder(name, Shape(**shape)).build()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", BUILDERS)
def test_the_seed_says_everything(name: str) -> None:
    assert build(name, seed=3) == build(name, seed=3)
    assert build(name, seed=3).requests[0].prompt != build(name, seed=4).requests[0].prompt


@pytest.mark.parametrize(
    ("name", "count", "concurrency", "prompt", "output"),
    [
        ("decode1", 3, 1, {128}, {256}),
        ("batch256", 256, 256, {512}, {256}),
        ("long", 16, 4, {8192}, {32}),
        ("prefix", 256, 64, {2112}, {64}),
        ("prefix-cold", 256, 64, {2112}, {64}),
        ("stall", 36, 32, {64, 16384}, {512, 8}),
    ],
)
def test_fixed_workloads_have_their_numbers(
    name: str, count: int, concurrency: int, prompt: set[int], output: set[int]
) -> None:
    load = build(name)
    assert (len(load.requests), load.concurrency) == (count, concurrency)
    assert {len(request.prompt) for request in load.requests} == prompt
    assert {request.output_tokens for request in load.requests} == output


def test_mixed_lengths_have_the_medians_and_bounds_that_are_promised() -> None:
    load = build("mixed", requests=4000)
    prompts = [len(request.prompt) for request in load.requests]
    outputs = [request.output_tokens for request in load.requests]
    assert 185 < median(prompts) < 216 and min(prompts) >= 16 and max(prompts) == 2048
    assert 140 < median(outputs) < 161 and min(outputs) >= 8 and max(outputs) == 1024
    assert load.concurrency == 256


def test_cpu_small_is_between_64_and_192() -> None:
    lengths = [len(request.prompt) for request in build("cpu-small", requests=2000).requests]
    assert (min(lengths), max(lengths)) == (64, 192) and 120 < median(lengths) < 136


def test_online_arrives_at_the_rate_for_the_duration() -> None:
    load = build("online", rate=50.0, duration_s=60.0)
    times = [request.at_s for request in load.requests]
    assert load.concurrency == 0 and times == sorted(times) and times[-1] < 60
    assert 2750 < len(times) < 3250  # 3000 expected, standard deviation 55
    assert build("online").requests[-1].at_s < 45


def test_prefix_is_shared_and_cold_is_not() -> None:
    shared, cold = build("prefix").requests, build("prefix-cold").requests
    assert len({tuple(request.prompt[:2048]) for request in shared}) == 1
    assert len({tuple(request.prompt[2048:]) for request in shared}) == len(shared)
    assert len({tuple(request.prompt[:2048]) for request in cold}) == len(cold)


def test_scales_and_overrides() -> None:
    load = build("mixed", scale=0.25, requests=40, concurrency=8, len_scale=0.1)
    assert (len(load.requests), load.concurrency) == (10, 2)
    assert max(len(request.prompt) for request in load.requests) <= 205
    assert {len(r.prompt) for r in build("long", len_scale=0.5, requests=2).requests} == {4096}


def test_ids_stay_within_the_vocabulary() -> None:
    load = Builder("cpu-small", Shape(vocab=range(5, 8))).build()
    assert {token for request in load.requests for token in request.prompt} == {5, 6, 7}


def test_mooncake_rows_are_read_as_they_are() -> None:
    rows = list(read_trace(MOONCAKE))
    assert len(rows) == 200
    assert (rows[0].at_s, rows[0].prompt_tokens, rows[0].output_tokens) == (0.0, 6758, 500)
    assert rows[0].hash_ids == list(range(14))


def test_azure_rows_are_read_with_times_from_the_first() -> None:
    rows = list(read_trace(AZURE))
    assert len(rows) == 200
    assert (rows[0].at_s, rows[0].prompt_tokens, rows[0].output_tokens) == (0.0, 374, 44)
    assert (rows[1].at_s, rows[1].prompt_tokens) == (pytest.approx(4.314579, abs=1e-6), 396)


def test_equal_hash_ids_become_equal_blocks_and_others_do_not() -> None:
    rows, load = list(read_trace(MOONCAKE)), replay(MOONCAKE, Shape(requests=40))
    blocks: dict[int, tuple[int, ...]] = {}
    for row, request in zip(rows, load.requests, strict=False):
        assert len(request.prompt) == row.prompt_tokens
        for number, block in enumerate(row.hash_ids[:-1]):
            content = tuple(request.prompt[512 * number : 512 * (number + 1)])
            assert blocks.setdefault(block, content) == content
    assert len(set(blocks.values())) == len(blocks) > 40


def test_a_replay_is_scaled_in_time_and_length_and_cut() -> None:
    whole = replay(AZURE, Shape())
    assert len(whole.requests) == 200 and whole.concurrency == 0
    fast = replay(AZURE, Shape(time_scale=0.5, len_scale=0.1, max_prompt=50, max_output=9, duration_s=20.0))
    assert 1 < len(fast.requests) < 200 and fast.requests[-1].at_s < 20
    for before, after in zip(whole.requests, fast.requests, strict=False):
        assert after.at_s == pytest.approx(before.at_s / 2)
        assert len(after.prompt) == min(max(round(len(before.prompt) / 10), 1), 50)
        assert after.output_tokens == min(max(round(before.output_tokens / 10), 1), 9)
    assert replay(AZURE, Shape(concurrency=4)).concurrency == 4


def test_a_trace_may_be_unpacked(tmp_path: Path) -> None:
    plain = tmp_path / "trace.csv"
    plain.write_bytes(gzip.decompress(AZURE.read_bytes()))
    assert list(read_trace(plain)) == list(read_trace(AZURE))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("t.txt", b"", "a trace is"),
        ("t.jsonl", b'{"timestamp": 1}', "after 0 good rows"),
        ("t.jsonl", b'{"timestamp": 0, "input_length": 4, "output_length": 1}\n{oops', "after 1 good rows"),
        ("t.jsonl", b'{"timestamp": 0, "input_length": -4, "output_length": 1}', "after 0 good rows"),
        ("t.csv", b"TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n", "after 0 good rows"),
        ("t.csv", b"a,b\n1,2\n", "after 0 good rows"),
        ("t.csv.gz", b"not packed", "t.csv.gz"),
        ("t.csv.gz", gzip.compress(b"TIMESTAMP,Cont", mtime=0)[:-6], "t.csv.gz"),
        ("t.csv", b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "no rows"),
    ],
)
def test_a_broken_trace_is_said_with_its_place(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TraceError, match=says):
        replay(path, Shape())


def test_an_absent_trace_is_said(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        replay(tmp_path / "none.csv", Shape())
