"""What a step's kernels read of each token, from a record of each sequence."""

import pytest
import torch

from engine.kernels.step_inputs import step_inputs, write_tables


def ints(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("num_entries", [0, 1, 7, 600])
def test_tables_get_their_entries_and_nothing_else_changes(device: torch.device, num_entries: int) -> None:
    tables = torch.arange(40 * 32, dtype=torch.int32, device=device).view(40, 32)
    places = torch.randperm(tables.numel())[: num_entries + 3]
    entries = torch.stack((places, torch.randint(1, 10**6, places.shape)), 1).int().to(device)
    wanted = tables.clone()
    wanted.view(-1)[entries[:num_entries, 0].long()] = entries[:num_entries, 1]
    write_tables(tables, entries, ints([num_entries, 99], device)[:1])
    assert torch.equal(tables, wanted)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("query_lens", [[1], [1, 1, 1, 0], [1, 300, 5, 0, 0], [0, 0], [17]])
@pytest.mark.parametrize("num_padding", [0, 3, 257])
def test_every_row_has_its_token_position_and_slot(
    device: torch.device, block_size: int, query_lens: list[int], num_padding: int
) -> None:
    num_seqs, num_tokens = len(query_lens), sum(query_lens)
    starts = [3 * i for i in range(num_seqs)]
    seq_slots = [i if query_len else -1 for i, query_len in zip((4, 1, 3, 0, 2), query_lens, strict=False)]
    tables = torch.randperm(5 * 340)[: 5 * 320].view(5, 320).int().to(device)
    last_tokens = ints([90, 91, 92, 93, 94], device)
    given = torch.arange(1000, 1000 + num_tokens + num_padding, dtype=torch.int32, device=device)
    query_start_loc = [0]
    for query_len in query_lens:
        if query_len == 1:
            given[query_start_loc[-1]] = -1  # the token that the step before has sampled
        query_start_loc.append(query_start_loc[-1] + query_len)
    filled = [torch.full((num_tokens + num_padding,), -7, dtype=torch.int32, device=device) for _ in range(3)]
    step_inputs(
        *filled,
        given,
        last_tokens,
        ints(seq_slots, device),
        ints(starts, device),
        ints(query_start_loc, device),
        tables,
        block_size,
    )
    rows = []
    for i, query_len in enumerate(query_lens):
        for at in range(query_len):
            position = starts[i] + at
            token = 90 + seq_slots[i] if query_len == 1 else 1000 + query_start_loc[i] + at
            block = int(tables[seq_slots[i], position // block_size])
            rows.append((token, position, block * block_size + position % block_size))
    rows += [(0, 0, 0)] * num_padding
    assert torch.stack(filled, 1).tolist() == [list(row) for row in rows]
