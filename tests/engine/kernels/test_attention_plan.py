import random
from collections import defaultdict

import pytest
import torch

from engine.kernels.attention_plan import MIN_PART_TOKENS, AttentionPlan, make_attention_plan, plan_attention


def planned(
    queries: list[int], lengths: list[int], device: torch.device, window: int | None = None, max_num_seqs: int = 64
) -> tuple[AttentionPlan, list[list[int]], list[list[int]]]:
    """The plan, the parts that its grid reads, and the query tiles that count."""
    plan = make_attention_plan(8, 2, 64, window, max_num_seqs, sum(queries) + 1, torch.float16, torch.float16, device)
    plan.parts.fill_(-7)  # what an earlier step may have left
    plan.query_tiles.fill_(-7)
    starts = torch.tensor([0, *queries], device=device).cumsum(0).int()
    plan_attention(plan, starts, torch.tensor(lengths, dtype=torch.int32, device=device))
    grid = len(queries) + plan.short_tiles(len(queries)).num_programs
    parts = plan.parts[:grid].tolist()
    count = int(plan.num_query_tiles)
    return plan, parts, plan.query_tiles[:count].tolist()


def random_step(seed: int) -> tuple[list[int], list[int]]:
    """Query and sequence lengths: decodes, short and long chunks, sequences without work, very different contexts."""
    draw = random.Random(seed)
    queries = [draw.choice([0, 1, 1, 1, 2, 4, 5, 40, 200]) for _ in range(draw.choice([1, 2, 7, 20]))]
    return queries, [query + int(2 ** draw.uniform(0, 13)) - 1 for query in queries]


@pytest.mark.parametrize("seed", range(4))
def test_every_key_of_a_short_query_is_in_exactly_one_part(seed: int, device: torch.device) -> None:
    queries, lengths = random_step(seed)
    plan, parts, _ = planned(queries, lengths, device)
    tile = plan.short_tiles(len(queries)).tile
    of_sequence = defaultdict(list)
    for part in parts:
        if part[2]:
            of_sequence[part[0]].append(part)
    starts = [sum(queries[:i]) for i in range(len(queries))]
    assert sorted(of_sequence) == [i for i, query in enumerate(queries) if 0 < query <= plan.short_tokens]
    for i, own in of_sequence.items():
        assert [part[1] for part in own] == list(range(len(own)))
        assert all(part[2] == len(own) for part in own)
        assert all(part[5:] == [starts[i], queries[i], lengths[i]] for part in own)
        ends = [part[4] for part in own]
        assert [part[3] for part in own] == [0, *ends[:-1]]
        assert ends[-1] == lengths[i]
        assert all(part[3] % tile == 0 and part[3] < part[4] for part in own)
        assert len(own) == 1 or own[0][4] >= MIN_PART_TOKENS


@pytest.mark.parametrize("seed", range(4))
def test_the_longest_parts_come_first_and_none_outlasts_the_rest(seed: int, device: torch.device) -> None:
    queries, lengths = random_step(seed)
    plan, parts, _ = planned(queries, lengths, device)
    tiles = plan.short_tiles(len(queries))
    sizes = [-(-(part[4] - part[3]) // tiles.tile) for part in parts if part[2]]
    assert all(part[2] == 0 for part in parts[len(sizes) :])
    firsts = [size for size, part in zip(sizes, parts, strict=False) if part[1] == 0]
    assert firsts == sorted(firsts, reverse=True)
    if sizes:
        fair_share = -(-sum(sizes) // tiles.num_programs)
        assert max(sizes) <= max(2 * fair_share, -(-MIN_PART_TOKENS // tiles.tile))


@pytest.mark.parametrize("seed", range(3))
def test_every_token_of_a_long_query_is_in_exactly_one_tile(seed: int, device: torch.device) -> None:
    queries, lengths = random_step(seed)
    plan, _, tiles = planned(queries, lengths, device)
    starts = [sum(queries[:i]) for i in range(len(queries))]
    expected = [
        [i, first, starts[i], queries[i], lengths[i]]
        for i in reversed(range(len(queries)))
        if queries[i] > plan.short_tokens
        for first in reversed(range(0, queries[i], plan.long_tokens))
    ]
    assert [tile[:5] for tile in tiles] == expected


def test_a_window_leaves_out_what_no_query_sees(device: torch.device) -> None:
    plan, parts, _ = planned([1, 3], [5000, 5000], device, window=300)
    firsts = {part[0]: part[3] for part in parts if part[2] and part[1] == 0}
    tile = plan.short_tiles(2).tile
    assert firsts == {0: (5000 - 300) // tile * tile, 1: (5000 - 302) // tile * tile}
