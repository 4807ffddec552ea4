from dataclasses import dataclass, field

import pytest
import torch

from engine.kernels.attention_plan import AttentionPlan, make_attention_plan, plan_attention
from engine.kernels.paged_attention import paged_attention


@dataclass
class Case:
    """Sequences of `contexts[i]` tokens that are in the cache and `queries[i]` new ones, and the layer's shape."""

    queries: list[int]
    contexts: list[int]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    window: int | None = None
    soft_cap: float = 0.0
    is_packed: bool = True
    num_padding: int = 0
    scales: list[float] = field(default_factory=list)


@dataclass
class Step:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    plan: AttentionPlan


def make_step(case: Case, device: torch.device, seed: int = 0) -> Step:
    """Random numbers where a query may look, NaN everywhere else: unwritten slots, free blocks, padding rows."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    lengths = [query + context for query, context in zip(case.queries, case.contexts, strict=True)]
    num_tokens = sum(case.queries)
    rows = num_tokens + case.num_padding
    width = case.num_heads + 2 * case.num_kv_heads
    projected = torch.full((rows, width, case.head_dim), float("nan"), dtype=case.dtype)
    projected[:num_tokens] = draw(num_tokens, width, case.head_dim)
    query, key, value = projected.split([case.num_heads, case.num_kv_heads, case.num_kv_heads], dim=1)
    num_blocks = sum(-(-length // case.block_size) for length in lengths) + 3
    free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    cache_dtype = case.cache_dtype or case.dtype
    caches = [
        torch.full((num_blocks * case.block_size, case.num_kv_heads, case.head_dim), float("nan")) for _ in range(2)
    ]
    most_blocks = max(-(-length // case.block_size) for length in lengths) + 1
    tables = torch.randint(0, num_blocks, (len(lengths), most_blocks), generator=generator, dtype=torch.int32)
    start = 0
    for i, (length, new) in enumerate(zip(lengths, case.queries, strict=True)):
        own = -(-length // case.block_size)
        tables[i, :own] = torch.tensor([free.pop() for _ in range(own)], dtype=torch.int32)
        slots = slots_of(tables[i], length, case.block_size)
        for cache, packed in zip(caches, (key, value), strict=True):
            cache[slots[: length - new]] = draw(length - new, case.num_kv_heads, case.head_dim).float()
            cache[slots[length - new :]] = packed[start : start + new].float()
        start += new
    starts = torch.tensor([0, *case.queries]).cumsum(0).int()
    shape = (num_blocks, case.block_size, case.num_kv_heads, case.head_dim)
    plan = make_attention_plan(
        case.num_heads,
        case.num_kv_heads,
        case.head_dim,
        case.window,
        len(lengths) + 1,
        rows,
        case.dtype,
        cache_dtype,
        device,
    )
    projected = projected.to(device)
    query, key, value = projected.split([case.num_heads, case.num_kv_heads, case.num_kv_heads], dim=1)
    return Step(
        query,
        key,
        value,
        caches[0].to(cache_dtype).view(shape).to(device),
        caches[1].to(cache_dtype).view(shape).to(device),
        tables.to(device),
        starts.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        plan,
    )


def slots_of(table: torch.Tensor, length: int, block_size: int) -> torch.Tensor:
    positions = torch.arange(length)
    return table.cpu()[positions // block_size].long() * block_size + positions % block_size


def attend(case: Case, step: Step) -> torch.Tensor:
    """The kernels' answer for all rows of sequences."""
    plan_attention(step.plan, step.query_start_loc, step.seq_lens)
    scales = torch.tensor(case.scales, device=step.query.device) if case.scales else None
    out = torch.full(step.query.shape, float("nan"), dtype=case.dtype, device=step.query.device)
    paged_attention(
        step.query,
        step.key if case.is_packed else None,
        step.value if case.is_packed else None,
        step.key_cache,
        step.value_cache,
        step.block_tables,
        step.plan,
        len(case.queries),
        case.head_dim**-0.5,
        soft_cap=case.soft_cap,
        key_scale=scales,
        value_scale=scales,
        out=out,
    )
    assert not out[sum(case.queries) :].isfinite().any(), "rows of no sequence were written"
    return out[: sum(case.queries)].float().cpu()


def reference(case: Case, step: Step) -> torch.Tensor:
    """float32, one sequence at a time, no trick."""
    out = []
    group_size = case.num_heads // case.num_kv_heads
    scale = torch.tensor(case.scales or [1.0] * case.num_kv_heads)[:, None]
    for i, (start, end) in enumerate(step.query_start_loc.cpu().unfold(0, 2, 1).tolist()):
        length = int(step.seq_lens[i])
        slots = slots_of(step.block_tables[i], length, case.block_size)
        keys = (step.key_cache.cpu().float().flatten(0, 1)[slots] * scale).repeat_interleave(group_size, dim=1)
        values = (step.value_cache.cpu().float().flatten(0, 1)[slots] * scale).repeat_interleave(group_size, dim=1)
        query = step.query[start:end].cpu().float()
        scores = torch.einsum("qhd,khd->hqk", query, keys) * case.head_dim**-0.5
        if case.soft_cap:
            scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
        query_positions = torch.arange(length - (end - start), length)[:, None]
        key_positions = torch.arange(length)[None, :]
        hidden = key_positions > query_positions
        if case.window is not None:
            hidden |= key_positions <= query_positions - case.window
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values))
    return torch.cat(out)


# Of ‖ours - reference‖ / ‖reference‖: weights and the result are rounded to the dtype.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def check(case: Case, device: torch.device) -> None:
    step = make_step(case, device)
    expected = reference(case, step)
    error = (attend(case, step) - expected).norm() / expected.norm()
    assert error < TOLERANCE[case.dtype], f"{error}"


MIXED = {"queries": [1, 3, 40, 1, 19, 1], "contexts": [70, 5, 33, 0, 0, 300]}
CASES = {
    "plain": Case(**MIXED),
    "paged": Case(**MIXED, is_packed=False),
    "one-head-groups": Case(**MIXED, num_heads=3, num_kv_heads=3, block_size=8),
    "groups-of-three": Case(**MIXED, num_heads=6, block_size=1, num_padding=5),
    "groups-of-seven": Case(**MIXED, num_heads=7, num_kv_heads=1, is_packed=False, block_size=2),
    "one-kv-head": Case(**MIXED, num_heads=32, num_kv_heads=1, block_size=32),
    "dim-80": Case(**MIXED, head_dim=80, dtype=torch.float16, num_padding=2),
    "dim-96": Case(**MIXED, head_dim=96, block_size=4),
    "dim-128": Case(**MIXED, head_dim=128, dtype=torch.float16, block_size=64),
    "dim-256": Case(**MIXED, head_dim=256, dtype=torch.float16, is_packed=False, block_size=128),
    "window": Case(**MIXED, window=29, num_heads=2, num_kv_heads=1),
    "window-paged": Case(**MIXED, window=64, num_heads=2, num_kv_heads=1, is_packed=False, block_size=256),
    "soft-cap": Case(**MIXED, soft_cap=2.0, num_heads=2, num_kv_heads=1),
    "capped-window": Case(**MIXED, soft_cap=2.0, window=40, dtype=torch.float16, num_heads=2, num_kv_heads=1),
}


LONG = ("dim-96", "dim-256", "groups-of-three", "one-kv-head", "window-paged", "capped-window")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n in LONG else n for n in CASES])
def test_mixed_batches_agree_with_the_reference(name: str, device: torch.device) -> None:
    check(CASES[name], device)


@pytest.mark.parametrize("context", [127, 128, 1000])
def test_a_context_in_parts_gives_what_a_whole_one_gives(context: int, device: torch.device) -> None:
    case = Case([1, 2], [context, 128], num_kv_heads=1)
    step = make_step(case, device)
    expected = reference(case, step)
    for _ in range(2):  # the second time finds the counters of the first
        torch.testing.assert_close(attend(case, step), expected, rtol=1e-5, atol=1e-6)
    parts = step.plan.parts.cpu()
    of_first = parts[(parts[:, 2] > 0) & (parts[:, 0] == 0)]
    assert of_first[0, 3] == 0
    assert of_first[-1, 4] == context + 1
    assert torch.equal(of_first[1:, 3], of_first[:-1, 4])
    if context == 1000:
        assert len(of_first) > 1
    assert not step.plan.arrivals.any()


def test_sequences_without_query_tokens_are_left_out(device: torch.device) -> None:
    case = Case([1, 17], [40, 3])
    step = make_step(case, device)
    expected = attend(case, step)
    padded = make_attention_plan(4, 2, 64, None, 4, 18, torch.float32, torch.float32, device)
    starts = torch.cat((step.query_start_loc, step.query_start_loc[-1:].repeat(2)))
    plan_attention(padded, starts, torch.cat((step.seq_lens, torch.zeros(2, dtype=torch.int32, device=device))))
    tables = torch.cat((step.block_tables, torch.zeros_like(step.block_tables)))
    out = paged_attention(
        step.query, step.key, step.value, step.key_cache, step.value_cache, tables, padded, 4, 64**-0.5
    )
    torch.testing.assert_close(out.cpu(), expected)


def test_a_plan_serves_steps_of_any_composition(device: torch.device) -> None:
    """Lists of an earlier, larger step must not be taken up again."""
    plan = make_attention_plan(4, 2, 64, None, 5, 64, torch.float32, torch.float32, device)
    for queries, contexts in (([1] * 5, [500, 400, 300, 200, 100]), ([60, 1], [0, 130]), ([1], [2]), ([30], [7])):
        case = Case(queries, contexts)
        step = make_step(case, device)
        step.plan = plan
        torch.testing.assert_close(attend(case, step), reference(case, step), rtol=1e-5, atol=1e-6)


def test_a_float8_cache_is_read_with_its_scales(device: torch.device) -> None:
    case = Case(
        [1, 2, 20], [50, 1, 9], dtype=torch.float16, cache_dtype=torch.float8_e4m3fn, is_packed=False, scales=[0.5, 1.5]
    )
    check(case, device)


def test_new_tokens_are_read_as_they_are_beside_a_float8_cache(device: torch.device) -> None:
    """Packed keys and values have no scale."""
    packed = Case([20], [0], dtype=torch.float16, cache_dtype=torch.float8_e4m3fn, scales=[0.5, 1.5])
    step = make_step(packed, device)
    exact = Case([20], [0], dtype=torch.float16)
    torch.testing.assert_close(attend(packed, step), attend(exact, make_step(exact, device)))


def test_only_the_asked_kernel_writes(device: torch.device) -> None:
    case = Case([1, 20], [40, 3])
    step = make_step(case, device)
    expected = attend(case, step)
    for flags, rows, others in (
        ({"has_long": False}, slice(0, 1), slice(1, 21)),
        ({"has_short": False}, slice(1, 21), slice(0, 1)),
    ):
        out = torch.full_like(step.query, float("nan"))
        paged_attention(
            step.query, step.key, step.value, step.key_cache, step.value_cache, step.block_tables, step.plan, 2,
            64**-0.5, out=out, **flags,
        )  # fmt: skip
        torch.testing.assert_close(out[rows].cpu(), expected[rows])
        assert out[others].isnan().all()


def test_refuses_what_does_not_fit_together(device: torch.device) -> None:
    step = make_step(Case([2], [3]), device)

    def call(**changes: torch.Tensor) -> None:
        tensors = {
            name: changes.get(name, getattr(step, name))
            for name in ("query", "key", "value", "key_cache", "value_cache", "block_tables")
        }
        paged_attention(**tensors, plan=step.plan, num_seqs=1, scale=0.1)

    for changes, words in (
        ({"query": step.query[:, :2]}, "plan"),
        ({"key_cache": step.key_cache.transpose(0, 1)}, "contiguous"),
        ({"key_cache": step.key_cache.half(), "value_cache": step.value_cache.half()}, "float16"),
        ({"query": torch.zeros(2, 64, 4, device=device).transpose(1, 2)}, "side by side"),
        ({"key": step.key.contiguous()}, "strides"),
    ):
        with pytest.raises(ValueError, match=words):
            call(**changes)
    with pytest.raises(ValueError, match="room"):
        plan_attention(step.plan, torch.arange(4, device=device), torch.ones(3, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match="multiple"):
        make_attention_plan(6, 4, 64, None, 1, 1, torch.float32, torch.float32, device)


GPU_CASES = {
    f"{dtype}-{head_dim}-{'packed' if is_packed else 'paged'}-{block_size}": Case(
        [1, 200, 4, 1000, 5, 1, 129],
        [3000, 0, 17, 777, 128, 0, 5000],
        num_heads=12,
        num_kv_heads=3,
        head_dim=head_dim,
        block_size=block_size,
        dtype=getattr(torch, dtype),
        is_packed=is_packed,
        num_padding=7,
    )
    for dtype in ("bfloat16", "float16")
    for head_dim in (64, 80, 96, 128, 256)
    for is_packed, block_size in ((True, 16), (False, 16), (False, 128), (False, 1))
}
GPU_CASES |= {
    "window": Case([1, 700, 90], [2000, 300, 0], window=257, dtype=torch.bfloat16, head_dim=128),
    "window-paged": Case([1, 700, 90], [2000, 300, 0], window=100, dtype=torch.bfloat16, head_dim=128, is_packed=False),
    "capped": Case([1, 700, 90], [2000, 300, 0], soft_cap=1.5, dtype=torch.bfloat16, head_dim=128),
    "groups-of-seven": Case([1, 300], [900, 65], num_heads=28, num_kv_heads=4, dtype=torch.bfloat16, head_dim=128),
    "groups-of-five": Case(
        [1, 300], [900, 65], num_heads=40, num_kv_heads=8, dtype=torch.bfloat16, head_dim=128, is_packed=False
    ),
    "many": Case([1] * 150 + [9, 70], [37 * i % 3000 for i in range(152)], dtype=torch.bfloat16, head_dim=128),
    "float8": Case(
        [1, 300],
        [900, 65],
        dtype=torch.bfloat16,
        cache_dtype=torch.float8_e4m3fn,
        head_dim=128,
        is_packed=False,
        scales=[0.5, 2.0],
    ),
    "float32": Case([1, 300], [900, 65], head_dim=128),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_compiled_kernels_agree_with_the_reference(name: str, device: torch.device) -> None:
    check(GPU_CASES[name], device)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 128), (torch.bfloat16, 80), (torch.float32, 64)])
def test_a_deterministic_plan_gives_the_same_bits_for_any_chunks_and_batch(
    dtype: torch.dtype, head_dim: int, device: torch.device
) -> None:
    case = Case([300, 70], [0, 500], head_dim=head_dim, dtype=dtype, is_packed=False)
    step = make_step(case, device)

    def attend_rows(queries: list[int], lengths: list[int], rows: slice, sequences: list[int]) -> torch.Tensor:
        plan = make_attention_plan(4, 2, head_dim, None, 2, 370, dtype, dtype, device, is_deterministic=True)
        starts = torch.tensor([0, *queries], device=device).cumsum(0).int()
        plan_attention(plan, starts, torch.tensor(lengths, dtype=torch.int32, device=device))
        return paged_attention(
            step.query[rows], None, None, step.key_cache, step.value_cache, step.block_tables[sequences], plan,
            len(queries), head_dim**-0.5,
        )  # fmt: skip

    whole = attend_rows([300, 70], [300, 570], slice(0, 370), [0, 1])
    assert torch.equal(attend_rows([299], [299], slice(0, 299), [0]), whole[:299])
    assert torch.equal(attend_rows([1], [300], slice(299, 300), [0]), whole[299:300])
    assert torch.equal(attend_rows([3], [203], slice(200, 203), [0]), whole[200:203])
    assert torch.equal(attend_rows([70], [570], slice(300, 370), [1]), whole[300:])


@pytest.mark.gpu
def test_a_graph_of_one_step_serves_other_lengths(device: torch.device) -> None:
    """Nothing of the lengths may be frozen into the launch."""
    case = Case([1] * 4, [5000, 4, 300, 80], num_heads=8, head_dim=128, dtype=torch.bfloat16)
    step = make_step(case, device)
    out = torch.empty_like(step.query)

    def launch() -> None:
        plan_attention(step.plan, step.query_start_loc, step.seq_lens)
        paged_attention(
            step.query, None, None, step.key_cache, step.value_cache, step.block_tables, step.plan, 4, 128**-0.5,
            has_long=False, out=out,
        )  # fmt: skip

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for lengths in ([5001, 5, 301, 81], [1, 1, 1, 1], [2000, 3, 300, 64]):
        step.seq_lens.copy_(torch.tensor(lengths))
        graph.replay()
        shorter = Case([1] * 4, [length - 1 for length in lengths], num_heads=8, head_dim=128, dtype=torch.bfloat16)
        expected = reference(shorter, step)
        assert (out.float().cpu() - expected).norm() / expected.norm() < TOLERANCE[torch.bfloat16]
