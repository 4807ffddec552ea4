"""Which program of the attention kernels works on what: decided on the device, once a step, for all layers of a kind.

The lengths of a step are known to the device alone when it replays a CUDA graph, so the grids of the attention kernels
depend on nothing but the sizes of the batch, and every program reads its part of the work from a list made here.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

QUERY_ROWS = 128
"""Rows of the matrix tile of a long query: tokens times the heads of a group."""
SHORT_ROWS = 16
"""The same for a short query, unless a group has more heads: the least that a matrix unit takes."""
_MIN_DIM = 16
MIN_PART_TOKENS = 128
"""The smallest part of a context: below it the sum over the parts costs more than their reading."""


@triton.jit(do_not_specialize=["num_seqs", "num_programs", "min_part_tiles"])
def _plan_kernel(
    query_start_loc_ptr,
    seq_lens_ptr,
    table_rows_ptr,
    parts_ptr,
    query_tiles_ptr,
    num_query_tiles_ptr,
    num_seqs,
    num_programs,
    min_part_tiles,
    SEQS: tl.constexpr,
    SHORT_TOKENS: tl.constexpr,
    LONG_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    ITEMS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):
    # Program i writes the items of sequence i; each works out for itself what comes before.
    this = tl.program_id(0)
    seqs = tl.arange(0, SEQS)
    exists = seqs < num_seqs
    query_start = tl.load(query_start_loc_ptr + seqs, mask=exists, other=0)
    query_len = tl.load(query_start_loc_ptr + seqs + 1, mask=exists, other=0) - query_start
    seq_len = tl.load(seq_lens_ptr + seqs, mask=exists, other=0)
    is_this = seqs == this
    my_query_start = tl.sum(tl.where(is_this, query_start, 0))
    my_query_len = tl.sum(tl.where(is_this, query_len, 0))
    my_seq_len = tl.sum(tl.where(is_this, seq_len, 0))
    my_row = this
    if HAS_ROWS:
        my_row = tl.load(table_rows_ptr + this)

    # Short queries: contexts are cut into parts of at most `part_tiles`, the fewest tiles with which all parts run at
    # once, or, where there are too many sequences for that, with which the longest do not outlast the rest. The longest
    # parts come first in the list, and so begin first.
    is_short = (query_len > 0) & (query_len <= SHORT_TOKENS)
    first_tile = tl.zeros([SEQS], tl.int32)
    if WINDOW > 0:
        first_tile = tl.maximum(seq_len - query_len - WINDOW + 1, 0) // TILE
    num_tiles = tl.where(is_short, tl.cdiv(seq_len, TILE) - first_tile, 0)
    num_short = tl.sum(is_short.to(tl.int32))
    longest = tl.max(num_tiles, axis=0)
    is_ragged = longest * num_short > 2 * tl.sum(num_tiles)
    room = tl.maximum(num_programs, num_short + tl.where(is_ragged, num_programs, num_programs // 2))
    low = min_part_tiles
    part_tiles = tl.maximum(longest, min_part_tiles)
    for _ in range(20):
        middle = (low + part_tiles) // 2
        fits = tl.sum(tl.cdiv(num_tiles, middle)) <= room
        part_tiles = tl.where(fits, middle, part_tiles)
        low = tl.where(fits, low, tl.minimum(middle + 1, part_tiles))
    num_parts = tl.cdiv(num_tiles, part_tiles)
    part_len = tl.cdiv(num_tiles, tl.maximum(num_parts, 1))
    my_parts = tl.sum(tl.where(is_this, num_parts, 0))
    my_first = tl.sum(tl.where(is_this, first_tile, 0))
    my_tiles = tl.sum(tl.where(is_this, num_tiles, 0))
    my_part_tiles = tl.sum(tl.where(is_this, part_len, 0))
    is_before = (part_len > my_part_tiles) | ((part_len == my_part_tiles) & (seqs < this))
    before = tl.sum(tl.where(is_before, num_parts, 0))
    for at in range(0, my_parts, ITEMS):
        part = at + tl.arange(0, ITEMS)
        in_list = part < my_parts
        first = (my_first + tl.minimum(part * my_part_tiles, my_tiles)) * TILE
        end = (my_first + tl.minimum((part + 1) * my_part_tiles, my_tiles)) * TILE
        item = parts_ptr + 8 * (before + part)
        same = tl.zeros([ITEMS], tl.int32)
        tl.store(item, same + my_row, mask=in_list)
        tl.store(item + 1, part, mask=in_list)
        tl.store(item + 2, same + my_parts, mask=in_list)
        tl.store(item + 3, first, mask=in_list)
        tl.store(item + 4, tl.minimum(end, my_seq_len), mask=in_list)
        tl.store(item + 5, same + my_query_start, mask=in_list)
        tl.store(item + 6, same + my_query_len, mask=in_list)
        tl.store(item + 7, same + my_seq_len, mask=in_list)
    # The grid has room for num_seqs + num_programs parts: this program marks its share of the others as none.
    for at in range(tl.sum(num_parts) + this, num_seqs + num_programs, num_seqs):
        tl.store(parts_ptr + 8 * at + 2, 0)

    # Long queries: one item for each tile of the query, from the last to the first, so that the longest work of a
    # prompt begins first.
    num_query_tiles = tl.where(query_len > SHORT_TOKENS, tl.cdiv(query_len, LONG_TOKENS), 0)
    after = tl.sum(tl.where(seqs > this, num_query_tiles, 0))
    my_query_tiles = tl.sum(tl.where(is_this, num_query_tiles, 0))
    for at in range(0, my_query_tiles, ITEMS):
        tile = at + tl.arange(0, ITEMS)
        in_list = tile < my_query_tiles
        item = query_tiles_ptr + 8 * (after + my_query_tiles - 1 - tile)
        same = tl.zeros([ITEMS], tl.int32)
        tl.store(item, same + my_row, mask=in_list)
        tl.store(item + 1, tile * LONG_TOKENS, mask=in_list)
        tl.store(item + 2, same + my_query_start, mask=in_list)
        tl.store(item + 3, same + my_query_len, mask=in_list)
        tl.store(item + 4, same + my_seq_len, mask=in_list)

    if this == 0:
        tl.store(num_query_tiles_ptr, tl.sum(num_query_tiles))


@dataclass(frozen=True, slots=True)
class ShortTiles:
    """How the kernel of short queries is built and spread for some number of sequences."""

    tile: int
    """KV tokens in a tile; contexts are cut at multiples of it."""
    num_warps: int
    num_buffers: int
    """Tiles of keys, and of values, under way to a program."""
    num_programs: int
    """For each KV head: how many run at once on the device."""


@dataclass(frozen=True, slots=True)
class LongTiles:
    """How the kernel of long queries is built."""

    tile: int
    num_warps: int
    num_buffers: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Buffers of one kind of layer (heads, width, window), shared by its layers, which run one after the other.

    Made once; `plan_attention` fills the lists anew in every step, at the same addresses.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int
    """0: none."""
    is_deterministic: bool
    max_num_seqs: int
    few: ShortTiles
    """For at most max_few sequences: deep buffers, one program a multiprocessor."""
    many: ShortTiles
    max_few: int
    long_tiles: LongTiles
    parts: torch.Tensor
    """[most parts, 8] int32: row of the block tables; which part; of how many (0: no part); first and end position;
    first query row; query tokens; length of the sequence."""
    query_tiles: torch.Tensor
    """[most query tiles, 8] int32: row of the block tables; first query token of the tile; first query row; query
    tokens; length."""
    num_query_tiles: torch.Tensor
    """[1] int32: how many of query_tiles count."""
    partial: torch.Tensor
    """[most parts, num_kv_heads, rows, head_dim] float32: weighted values of a part."""
    partial_stats: torch.Tensor
    """[most parts, num_kv_heads, 2, rows] float32: greatest score in units of ln 2, sum of weights."""
    arrivals: torch.Tensor
    """[max_num_seqs, num_kv_heads] int32: parts that are done. Zero between launches."""

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def short_rows(self) -> int:
        return _short_rows(self.group_size)

    @property
    def short_tokens(self) -> int:
        """Queries of at most so many tokens are short: their context is divided among programs."""
        return 0 if self.is_deterministic else self.short_rows // self.group_size

    @property
    def long_tokens(self) -> int:
        """Tokens in one tile of a long query."""
        return QUERY_ROWS // self.group_size

    def short_tiles(self, num_seqs: int) -> ShortTiles:
        return self.few if num_seqs <= self.max_few else self.many


def padded_dim(head_dim: int) -> int:
    """The width of a head's tile: a power of two, and as wide as products of tiles must be on a GPU (the interpreter
    would take less)."""
    return max(_MIN_DIM, int(triton.next_power_of_2(head_dim)))


def _short_rows(group_size: int) -> int:
    return max(SHORT_ROWS, int(triton.next_power_of_2(group_size)))


def make_attention_plan(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    sliding_window: int | None,
    max_num_seqs: int,
    max_num_tokens: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: torch.device,
    is_deterministic: bool = False,
) -> AttentionPlan:
    """Buffers for steps of at most max_num_seqs sequences and max_num_tokens tokens.

    dtype: of queries; cache_dtype: of the cache. sliding_window: a query sees itself and the sliding_window - 1
    positions before it; None: all.
    is_deterministic: no query is short, so that all sums are taken in the order of positions by one program. A token's
        result then has the same bits whatever the batch and the chunks, if all is read from the cache; decodes of few
        sequences take several times longer.
    For 32 heads of 128 and 256 sequences on 132 multiprocessors it takes 21 MB.
    Raises ValueError when num_heads is no multiple of num_kv_heads, or a group has more than 128 heads.
    """
    group_size, rest = divmod(num_heads, num_kv_heads)
    if rest or group_size > QUERY_ROWS:
        raise ValueError(
            f"num_heads must be a multiple of num_kv_heads and at most {QUERY_ROWS} times it, "
            f"got {num_heads} and {num_kv_heads}"
        )
    num_processors, shared_bytes = 2, 101_376
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        num_processors = properties.multi_processor_count
        shared_bytes = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    few, many = _choose_short_tiles(head_dim, num_kv_heads, cache_dtype, num_processors, shared_bytes)
    # Half of the bytes are under way with float8: more programs than one a multiprocessor are needed sooner.
    few_programs = num_processors // 4 if cache_dtype == torch.float8_e4m3fn else 2 * num_processors
    max_few = min(max_num_seqs, max(1, few_programs // num_kv_heads))
    max_parts = max(max_few + few.num_programs, max_num_seqs + many.num_programs)
    rows = _short_rows(group_size) // group_size * group_size
    max_query_tiles = triton.cdiv(max_num_tokens, QUERY_ROWS // group_size) + max_num_seqs

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return AttentionPlan(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        sliding_window=sliding_window or 0,
        is_deterministic=is_deterministic,
        max_num_seqs=max_num_seqs,
        few=few,
        many=many,
        max_few=max_few,
        long_tiles=_choose_long_tiles(head_dim, dtype, shared_bytes),
        parts=zeros(max_parts, 8),
        query_tiles=zeros(max_query_tiles, 8),
        num_query_tiles=zeros(1),
        partial=zeros(max_parts, num_kv_heads, rows, head_dim, dtype=torch.float32),
        partial_stats=zeros(max_parts, num_kv_heads, 2, rows, dtype=torch.float32),
        arrivals=zeros(max_num_seqs, num_kv_heads),
    )


def _choose_short_tiles(
    head_dim: int, num_kv_heads: int, dtype: torch.dtype, num_processors: int, shared_bytes: int
) -> tuple[ShortTiles, ShortTiles]:
    """For few and for many sequences.

    Measured on an H200, for heads of 64, 128 and 256 dimensions in bfloat16 and of 128 in float8. Few programs need
    many bytes under way each: two tiles of 32 KB of keys and as many of values, on each multiprocessor. With many
    programs those of the others count, and small tiles leave fewer of them without work at the end.
    """

    def spread(tile: int, num_warps: int, num_buffers: int, programs_per_processor: int) -> ShortTiles:
        return ShortTiles(tile, num_warps, num_buffers, max(1, programs_per_processor * num_processors // num_kv_heads))

    row_bytes = padded_dim(head_dim) * dtype.itemsize
    tile = min(128, max(16, 128 * 256 // row_bytes))
    if dtype.itemsize == 1:
        many = spread(64, 2, 2, 4)
    else:
        many = spread(min(64, max(16, tile // 2)), 2, 1, 8 if row_bytes <= 128 else 4)
    if 4 * tile * row_bytes + 16 * row_bytes > shared_bytes - 4096:
        return many, many
    return spread(tile, 8 if row_bytes >= 512 else 4, 2, 1), many


def _choose_long_tiles(head_dim: int, dtype: torch.dtype, shared_bytes: int) -> LongTiles:
    """The largest that fits into shared memory. Without a matrix unit (float32) larger ones only make longer code."""
    row_bytes = padded_dim(head_dim) * dtype.itemsize
    tiles = (LongTiles(128, 8, 2), LongTiles(64, 8, 2), LongTiles(64, 8, 1), LongTiles(32, 8, 1), LongTiles(16, 8, 1))
    for choice in tiles[3:] if dtype == torch.float32 else tiles:
        if (QUERY_ROWS + 2 * (choice.num_buffers + 1) * choice.tile) * row_bytes <= shared_bytes - 2048:
            return choice
    return LongTiles(16, 8, 0)


def plan_attention(
    plan: AttentionPlan,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    table_rows: torch.Tensor | None = None,
) -> None:
    """Fill the lists for one step. Costs a few microseconds; no host sync.

    query_start_loc: [num_seqs + 1] int32; seq_lens: [num_seqs] int32. A sequence without query tokens gets no work.
    table_rows: [num_seqs] int32, each sequence's row in the block tables, under max_num_seqs and another for each that
        has query tokens; None: sequence i has row i.
    Raises ValueError for more sequences than the plan has room for.
    """
    num_seqs = len(seq_lens)
    if num_seqs > plan.max_num_seqs:
        raise ValueError(f"{num_seqs} sequences, but the plan has room for {plan.max_num_seqs}")
    tiles = plan.short_tiles(num_seqs)
    _plan_kernel[(num_seqs,)](
        query_start_loc,
        seq_lens,
        table_rows,
        plan.parts,
        plan.query_tiles,
        plan.num_query_tiles,
        num_seqs,
        tiles.num_programs,
        max(1, MIN_PART_TOKENS // tiles.tile),
        SEQS=triton.next_power_of_2(plan.max_num_seqs),  # one kernel for batches of all sizes
        SHORT_TOKENS=plan.short_tokens,
        LONG_TOKENS=plan.long_tokens,
        TILE=tiles.tile,
        WINDOW=plan.sliding_window,
        ITEMS=64,
        HAS_ROWS=table_rows is not None,
    )
