"""What a step's kernels read of each token, made on the device from a short record of each sequence."""

import torch
import triton
import triton.language as tl

_TILE = 256


@triton.jit
def _write_tables_kernel(tables_ptr, entries_ptr, num_entries_ptr, TILE: tl.constexpr):
    num_entries = tl.load(num_entries_ptr)
    for at in range(tl.program_id(0) * TILE, num_entries, tl.num_programs(0) * TILE):
        entry = at + tl.arange(0, TILE)
        exists = entry < num_entries
        place = tl.load(entries_ptr + 2 * entry, mask=exists)
        block = tl.load(entries_ptr + 2 * entry + 1, mask=exists)
        tl.store(tables_ptr + place, block, mask=exists)


@triton.jit(do_not_specialize=["max_num_tokens", "num_seqs"])
def _step_inputs_kernel(
    token_ids_ptr,
    positions_ptr,
    slots_ptr,
    given_ptr,
    last_tokens_ptr,
    seq_slots_ptr,
    starts_ptr,
    query_start_loc_ptr,
    tables_ptr,
    table_stride,
    num_seqs,
    max_num_tokens,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    seq = tl.program_id(0)
    tokens = tl.arange(0, TILE)
    if seq == num_seqs:
        # The rows behind the last sequence are computed, too, and write their keys and values to block 0.
        first = tl.load(query_start_loc_ptr + num_seqs)
        for at in range(first + tl.program_id(1) * TILE, max_num_tokens, tl.num_programs(1) * TILE):
            row = at + tokens
            exists = row < max_num_tokens
            zero = tl.zeros([TILE], tl.int32)
            tl.store(token_ids_ptr + row, zero, mask=exists)
            tl.store(positions_ptr + row, zero, mask=exists)
            tl.store(slots_ptr + row, zero, mask=exists)
        return
    query_start = tl.load(query_start_loc_ptr + seq)
    query_len = tl.load(query_start_loc_ptr + seq + 1) - query_start
    if query_len == 0:
        return
    seq_slot = tl.load(seq_slots_ptr + seq)
    start = tl.load(starts_ptr + seq)
    last_token = tl.load(last_tokens_ptr + seq_slot)
    table_ptr = tables_ptr + seq_slot.to(tl.int64) * table_stride
    for at in range(tl.program_id(1) * TILE, query_len, tl.num_programs(1) * TILE):
        token = at + tokens
        exists = token < query_len
        position = start + token
        row = query_start + token
        block = tl.load(table_ptr + position // BLOCK_SIZE, mask=exists, other=0)
        given = tl.load(given_ptr + row, mask=exists, other=0)
        tl.store(token_ids_ptr + row, tl.where(given < 0, last_token, given), mask=exists)
        tl.store(positions_ptr + row, position, mask=exists)
        tl.store(slots_ptr + row, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=exists)


def write_tables(tables: torch.Tensor, entries: torch.Tensor, num_entries: torch.Tensor) -> None:
    """tables.view(-1)[entries[i, 0]] = entries[i, 1] for i < num_entries, which is known to the device alone.

    tables: [max_num_seqs, most blocks] int32, contiguous; entries: [n, 2] int32; num_entries: [1] int32. No place is
    named twice.
    """
    _write_tables_kernel[(min(32, triton.cdiv(len(entries), _TILE)),)](tables, entries, num_entries, TILE=_TILE)


def step_inputs(
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    given_ids: torch.Tensor,
    last_tokens: torch.Tensor,
    seq_slots: torch.Tensor,
    starts: torch.Tensor,
    query_start_loc: torch.Tensor,
    tables: torch.Tensor,
    block_size: int,
) -> None:
    """Fill token_ids, positions and slots, each [num_tokens] int32, for a step of at most num_tokens tokens.

    given_ids: [num_tokens] int32, negative where the token is the newest of its sequence: last_tokens[seq_slot].
    last_tokens: [max_num_seqs] int32. seq_slots, starts: [num_seqs] int32: a sequence's row in last_tokens and tables,
        and the position of its first query token; query_start_loc: [num_seqs + 1] int32, non-decreasing.
    tables: [max_num_seqs, most blocks] int32: block tables.
    Rows that belong to no sequence get token 0 at position 0 of block 0. Launch shape: by sizes alone.
    """
    num_seqs, num_tokens = len(seq_slots), len(token_ids)
    tiles = max(1, min(32, triton.cdiv(num_tokens, _TILE) if num_tokens > num_seqs else 1))
    _step_inputs_kernel[num_seqs + 1, tiles](
        token_ids,
        positions,
        slots,
        given_ids,
        last_tokens,
        seq_slots,
        starts,
        query_start_loc,
        tables,
        tables.stride(0),
        num_seqs,
        num_tokens,
        BLOCK_SIZE=block_size,
        TILE=_TILE,
    )
