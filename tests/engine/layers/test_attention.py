"""Paged attention against plain attention, one query at a time, over keys kept in a list."""

import random
from collections.abc import Iterator

import pytest
import torch

from engine.batch import ForwardBatch
from engine.layers.attention import Attention


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Thousands of small operations are faster without a second thread, above all where others keep it busy."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def reference_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int, scale: float, window: int | None
) -> torch.Tensor:
    """query: [num_heads, head_dim] at `position`; keys, values: [seq_len, num_kv_heads, head_dim]. float64."""
    first = 0 if window is None else max(0, position - window + 1)
    group_size = query.shape[0] // keys.shape[1]
    out = torch.empty_like(query, dtype=torch.float64)
    for head in range(query.shape[0]):
        head_keys = keys[first : position + 1, head // group_size].double()
        head_values = values[first : position + 1, head // group_size].double()
        scores = head_keys @ query[head].double() * scale
        out[head] = torch.softmax(scores, 0) @ head_values
    return out.flatten()


class PagedRun:
    """Runs steps of (start, num_tokens) per sequence over one shuffled pool."""

    def __init__(self, attention: Attention, num_seqs: int, max_len: int, block_size: int, seed: int = 0) -> None:
        self.attention = attention
        self.block_size = block_size
        generator = torch.Generator().manual_seed(seed)
        blocks_each = -(-max_len // block_size)
        num_blocks = num_seqs * blocks_each + 1
        ids = list(range(1, num_blocks))
        random.Random(seed).shuffle(ids)
        heads, kv_heads, head_dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
        shape = (num_blocks, block_size, kv_heads, head_dim)
        # What was never written must never be read: a NaN would show.
        self.cache = (torch.full(shape, float("nan")), torch.full(shape, float("nan")))
        self.query = torch.randn(num_seqs, max_len, heads, head_dim, generator=generator)
        self.key = torch.randn(num_seqs, max_len, kv_heads, head_dim, generator=generator)
        self.value = torch.randn(num_seqs, max_len, kv_heads, head_dim, generator=generator)
        self.tables = [ids[i * blocks_each : (i + 1) * blocks_each] for i in range(num_seqs)]

    def step(
        self, spans: list[tuple[int, int, int]], dtype: torch.dtype = torch.float32
    ) -> dict[tuple[int, int], torch.Tensor]:
        """spans: (sequence, start, num_tokens), decodes first → the output by (sequence, position)."""
        names = [(seq, position) for seq, start, n in spans for position in range(start, start + n)]
        rows = lambda source: torch.stack([source[seq, position] for seq, position in names]).to(dtype)  # noqa: E731
        starts = [0]
        for _, _, n in spans:
            starts.append(starts[-1] + n)
        slots = [self.tables[s][p // self.block_size] * self.block_size + p % self.block_size for s, p in names]
        batch = ForwardBatch(
            token_ids=torch.zeros(len(names), dtype=torch.int64),
            positions=torch.tensor([position for _, position in names]),
            slots=torch.tensor(slots),
            query_start_loc=starts,
            seq_lens=[start + n for _, start, n in spans],
            block_tables=[self.tables[seq] for seq, _, _ in spans],
            num_decodes=sum(n == 1 for _, _, n in spans),
            sample_rows=torch.empty(0, dtype=torch.int64),
        )
        with torch.inference_mode():
            out = self.attention.forward(rows(self.query), rows(self.key), rows(self.value), batch, self.cache)
            again = self.attention.forward(rows(self.query), rows(self.key), rows(self.value), batch, self.cache)
        assert out.dtype == dtype
        assert torch.equal(out, again), "a second layer that shares the step's index must get the same"
        return dict(zip(names, out, strict=True))

    def expected(self, seq: int, position: int) -> torch.Tensor:
        attention = self.attention
        return reference_attention(
            self.query[seq, position],
            self.key[seq],
            self.value[seq],
            position,
            attention.scale,
            attention.sliding_window,
        )


# float32 sums of up to 90 products of order 1: rounding stays far below this.
TOLERANCE = 2e-5

SHAPES = [(9, 3, 64), (4, 4, 24), (6, 1, 16)]


@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("block_size", [1, 8, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_mixed_steps_equal_plain_attention(shape: tuple[int, int, int], block_size: int, window: int | None) -> None:
    heads, kv_heads, head_dim = shape
    run = PagedRun(Attention(heads, kv_heads, head_dim, head_dim**-0.5, window), 4, 45, block_size)
    steps = [
        [(3, 0, 1), (0, 0, 17), (1, 0, 40)],
        [(0, 17, 1), (3, 1, 1), (1, 40, 3), (2, 0, 2)],
        [(3, 2, 1), (1, 43, 1), (0, 18, 1), (2, 2, 30)],
        [(1, 44, 1), (0, 19, 26), (3, 3, 2)],
        [(3, 5, 1)],
    ]
    for spans in steps:
        for (seq, position), row in run.step(spans).items():
            torch.testing.assert_close(row.double(), run.expected(seq, position), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk", [1, 7, 16, 90])
@pytest.mark.parametrize("window", [None, 20])
def test_chunk_size_changes_nothing_but_rounding(chunk: int, window: int | None) -> None:
    run = PagedRun(Attention(9, 3, 64, 0.125, window), 1, 90, 16)
    for start in range(0, 90, chunk):
        for (seq, position), row in run.step([(0, start, min(chunk, 90 - start))]).items():
            torch.testing.assert_close(row.double(), run.expected(seq, position), atol=TOLERANCE, rtol=0)


def test_a_decode_gets_the_same_bits_in_any_batch() -> None:
    run = PagedRun(Attention(9, 3, 64, 0.125, None), 5, 60, 16)
    for seq in range(5):
        run.step([(seq, 0, 20 + 7 * seq)])
    spans = [(seq, 20 + 7 * seq, 1) for seq in range(5)]
    together = run.step(spans)
    backwards = run.step(spans[::-1])
    for span in spans:
        name = span[:2]
        assert torch.equal(run.step([span])[name], together[name])
        assert torch.equal(backwards[name], together[name])


def test_bfloat16_activations_are_attended_in_float32() -> None:
    run = PagedRun(Attention(9, 3, 64, 0.125, None), 2, 40, 16)
    for source in ("query", "key", "value"):
        setattr(run, source, getattr(run, source).bfloat16().float())
    run.step([(0, 0, 20), (1, 0, 33)], torch.bfloat16)
    for (seq, position), row in run.step([(0, 20, 1), (1, 33, 5)], torch.bfloat16).items():
        # Only the result is rounded: half a unit in the last place of 8 bits, of values under 4.
        torch.testing.assert_close(row.double(), run.expected(seq, position), atol=2**-7, rtol=2**-8)


def test_slots_of_other_sequences_are_left_alone() -> None:
    run = PagedRun(Attention(4, 2, 16, 0.25, None), 2, 20, 8)
    run.step([(0, 0, 11)])
    keys = run.cache[0].view(-1, 2, 16)
    written = {run.tables[0][p // 8] * 8 + p % 8 for p in range(11)}
    assert {slot for slot in range(len(keys)) if not keys[slot].isnan().any()} == written


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of num_kv_heads"):
        Attention(9, 2, 64, 0.125, None)
