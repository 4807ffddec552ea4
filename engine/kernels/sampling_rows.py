"""What the kernels of sampling share: the settings of a row, its logits, and the memory between two launches."""

import struct
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.philox import exponential, philox4x32

TILE = 1024
"""Logits of a row that are looked at together. Fixed: the order of sums follows from it, and what a draw gives."""
_TILE = tl.constexpr(TILE)
LIST_SIZE = 2048
"""Places for the tokens of a row from which its filters choose."""
MAX_VOCAB_SIZE = 2**20
"""One program looks at the maxima of all tiles of a row at once."""

SETTINGS_FORMAT = "<Qqqdddqqdddqqq"
"""Of a row's settings, as struct.pack takes them, eight bytes each: seed, choice, top_k (0: off), top_p, log2(e) /
temperature (0: greedy), min_p, whether any of those three filters is on; the row of its token counts (-1: none),
repetition, frequency and presence penalty; number of biases; until which position its bans hold, and their number."""
NUM_SETTINGS = struct.calcsize(SETTINGS_FORMAT) // 8
_NUM_SETTINGS = tl.constexpr(NUM_SETTINGS)
_CHOICE = tl.constexpr(1)
_TOP_K = tl.constexpr(2)
_TOP_P = tl.constexpr(3)
_SCALE = tl.constexpr(4)
_MIN_P = tl.constexpr(5)
_HAS_FILTERS = tl.constexpr(6)
COUNTS_ROW = tl.constexpr(7)
REPETITION = tl.constexpr(8)
FREQUENCY = tl.constexpr(9)
PRESENCE = tl.constexpr(10)
NUM_BIASES = tl.constexpr(11)
BANNED_UNTIL = tl.constexpr(12)
NUM_BANS = tl.constexpr(13)

WEIGHT_ONE = tl.constexpr(2.0**39)
"""Weights, 0 to 1, are summed as whole numbers of its inverse: in any order."""
_COUNT_BITS = tl.constexpr(12)
_COUNT_MASK = tl.constexpr(2**12 - 1)
"""Under a sum of values: how many they are. With weights of LIST_SIZE tokens above them they take 63 bits."""
_PURPOSE_TOKEN = tl.constexpr(0)
_PURPOSE_TILE = tl.constexpr(1)
NO_KEY = tl.constexpr(-(2**31))
"""Under the key of every number."""


@dataclass(frozen=True, slots=True)
class SamplingScratch:
    """What one launch leaves for the next, for at most max_rows rows. Everything of a row is its own."""

    maxima: torch.Tensor
    """[max_rows, num_tiles] float32: the highest logit of a tile, +inf where there is a NaN."""
    sums: torch.Tensor
    """[max_rows, num_tiles] float32: a tile's sum of weights, relative to its maximum."""
    firsts: torch.Tensor
    """[max_rows, num_tiles] int32: the first id at the tile's maximum."""
    arrivals: torch.Tensor
    """[max_rows] int32: programs of a row that are through. 0 between launches."""
    bounds: torch.Tensor
    """[max_rows, 3] float64: the highest logit, a logit that no kept token is under, the sum of weights."""
    list_sizes: torch.Tensor
    """[max_rows] int32: tokens at or over the bound, as far as there is room for; -1 for a row that has its token."""
    lists: torch.Tensor
    """[max_rows, LIST_SIZE] int64, in any order: a token's id above the bits of its logit."""
    masses: torch.Tensor
    """[max_rows, num_tiles] int64: of what a list keeps of a tile, the sum of weights, as WEIGHT_ONE says."""

    @property
    def num_tiles(self) -> int:
        return self.maxima.shape[1]


def make_sampling_scratch(max_rows: int, vocab_size: int, device: torch.device) -> SamplingScratch:
    """Raises ValueError for a vocabulary that the sums cannot hold."""
    if not 0 < vocab_size <= MAX_VOCAB_SIZE:
        raise ValueError(f"vocab_size must be between 1 and {MAX_VOCAB_SIZE}, got {vocab_size}")
    num_tiles = triton.cdiv(vocab_size, TILE)

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return SamplingScratch(
        maxima=zeros(max_rows, num_tiles),
        sums=zeros(max_rows, num_tiles),
        firsts=zeros(max_rows, num_tiles, dtype=torch.int32),
        arrivals=zeros(max_rows, dtype=torch.int32),
        bounds=zeros(max_rows, 3, dtype=torch.float64),
        list_sizes=zeros(max_rows, dtype=torch.int32),
        lists=zeros(max_rows, LIST_SIZE, dtype=torch.int64),
        masses=zeros(max_rows, num_tiles, dtype=torch.int64),
    )


@triton.jit
def settings_at(settings_ptr, seq_slot):
    return settings_ptr + seq_slot.to(tl.int64) * _NUM_SETTINGS


@triton.jit
def number_at(settings_ptr, AT: tl.constexpr):
    """A float64 of the settings, as float32."""
    return tl.load(settings_ptr + AT).to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def top_k_of(settings_ptr):
    return tl.load(settings_ptr + _TOP_K).to(tl.int32)


@triton.jit
def top_p_of(settings_ptr):
    return tl.load(settings_ptr + _TOP_P).to(tl.float64, bitcast=True)


@triton.jit
def scale_of(settings_ptr):
    return number_at(settings_ptr, _SCALE)


@triton.jit
def min_p_of(settings_ptr):
    return number_at(settings_ptr, _MIN_P)


@triton.jit
def has_filters_of(settings_ptr):
    return tl.load(settings_ptr + _HAS_FILTERS) != 0


@triton.jit
def _arrivals(settings_ptr, position, purpose, numbers, weights):
    """When each arrives in a race, float64: numbers, those of tiles or of places in a tile, and weights in float64."""
    seed = tl.load(settings_ptr).to(tl.uint64, bitcast=True)
    choice = tl.load(settings_ptr + _CHOICE).to(tl.uint64, bitcast=True)
    counters = (numbers // 4).to(tl.uint64)
    purposes = choice * 0 + purpose
    words = philox4x32(position.to(tl.uint64), choice, purposes, counters, seed & 0xFFFFFFFF, seed >> 32)
    of_four = numbers % 4
    low = tl.where(of_four == 0, words[0], words[1])
    high = tl.where(of_four == 2, words[2], words[3])
    times = exponential(tl.where(of_four < 2, low, high))
    return tl.where(weights > 0.0, times / tl.where(weights > 0.0, weights, 1.0), float("inf"))


@triton.jit
def first_tile(settings_ptr, position, tiles, masses):
    """Which tile wins. tiles: the numbers from 0 on; masses: float64, not all 0, of any unit."""
    arrivals = _arrivals(settings_ptr, position, _PURPOSE_TILE, tiles, masses)
    return tl.min(tl.where(arrivals == tl.min(arrivals, axis=0), tiles, 2147483647), axis=0)


@triton.jit
def first_token(settings_ptr, position, ids, weights):
    """Which token wins. ids: of one tile, with weights, or of any without; weights: float64, not all 0."""
    arrivals = _arrivals(settings_ptr, position, _PURPOSE_TOKEN, ids % _TILE, weights)
    return tl.min(tl.where(arrivals == tl.min(arrivals, axis=0), ids, 2147483647), axis=0)


@triton.jit
def load_logits(row_ptr, ids, vocab_size):
    """A NaN is read as +inf, so that maxima show it; what is past the end as -inf."""
    logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=-float("inf"))
    return tl.where(logits != logits, float("inf"), logits)


@triton.jit
def key_of(logits):
    """float32 → int32 in the same order. -0 is under 0, so compare numbers where ties count."""
    bits = logits.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def number_of(keys):
    """The float32 that has this key."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def listed_as(ids, logits):
    """→ int64."""
    return (ids.to(tl.int64) << 32) | logits.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def listed_id(listed):
    return (listed >> 32).to(tl.int32)


@triton.jit
def listed_logit(listed):
    return listed.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def whole_of(weights):
    """float32, 0 to 1 → int64."""
    return (weights.to(tl.float64) * WEIGHT_ONE).to(tl.int64)


@triton.jit
def cut_where(keys, values, exists, wanted):
    """(low, high): the values of the keys from low on reach `wanted`, or low is the lowest key, and those from high on
    do not. All keys between them are equal.

    keys: int32; values: int32 or int64, which and as many as WEIGHT_ONE and LIST_SIZE say; some exist.
    """
    counted = tl.where(exists, (values.to(tl.int64) << _COUNT_BITS) | 1, 0)
    low = tl.min(tl.where(exists, keys, 2147483647), axis=0).to(tl.int64)
    high = tl.max(tl.where(exists, keys, -2147483648), axis=0).to(tl.int64) + 1
    num_low = tl.sum(exists.to(tl.int32), axis=0)
    num_high = 0
    while (high - low > 1) & (num_low - num_high > 1):
        middle = low + ((high - low) >> 1)
        reached = tl.sum(tl.where(keys >= middle.to(tl.int32), counted, 0), axis=0)
        num_reached = (reached & _COUNT_MASK).to(tl.int32)
        if (reached >> _COUNT_BITS) >= wanted:
            low = middle
            num_low = num_reached
        else:
            high = middle
            num_high = num_reached
    return low.to(tl.int32), high.to(tl.int32)


@triton.jit
def token_at(
    row_ptr, tiles, masses, settings_ptr, position, top, scale, kth, threshold, vocab_size, TILE: tl.constexpr
):
    """The token that the row's draw gives.

    masses: [TILES_PAD] float64, of the weights that are kept, tile by tile: of logits from kth on whose weight is not
    under the threshold.
    """
    ids = first_tile(settings_ptr, position, tiles, masses) * TILE + tl.arange(0, TILE)
    logits = load_logits(row_ptr, ids, vocab_size)
    weights = tl.exp2((logits - top) * scale)
    weights = tl.where((logits >= kth) & (weights >= threshold), weights, 0.0)
    return first_token(settings_ptr, position, ids, weights.to(tl.float64))
