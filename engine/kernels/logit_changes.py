"""What is done to logits before a token is chosen from them, in place: masks, biases, penalties, bans.

Each is a launch of its own, over the rows of a step; a row whose settings do not have it ends at once. The definitions
are those of engine/execution/penalties.py and token_masks.py.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.sampling_rows import (
    BANNED_UNTIL,
    COUNTS_ROW,
    FREQUENCY,
    NUM_BANS,
    NUM_BIASES,
    PRESENCE,
    REPETITION,
    number_at,
    settings_at,
)

_TILE = 1024
_BAN_TILE = 256


@triton.jit
def _mask_kernel(logits_ptr, rows_ptr, bits_ptr, logits_stride, vocab_size, num_words, TILE: tl.constexpr):
    place = tl.program_id(1)
    row = tl.load(rows_ptr + place).to(tl.int64)
    ids = tl.program_id(0) * TILE + tl.arange(0, TILE)
    in_vocabulary = ids < vocab_size
    words = tl.load(bits_ptr + place * num_words + ids // 32, mask=in_vocabulary, other=0)
    is_banned = ((words >> (ids % 32)) & 1) == 0
    tl.store(logits_ptr + row * logits_stride + ids, -float("inf"), mask=in_vocabulary & is_banned)


def mask_logits(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """logits[rows[i], t] = -inf for every token t whose bit is not set: bit t % 32 of bits[i, t // 32].

    logits: [n, vocab_size] float32, rows in one piece; rows: [m] int32, none twice; m may be 0. bits: [m, words] int32.
    Raises ValueError for masks that end before the vocabulary.
    """
    vocab_size, num_words = logits.shape[1], bits.shape[1]
    if 32 * num_words < vocab_size:
        raise ValueError(f"{num_words} words of 32 tokens do not cover a vocabulary of {vocab_size}")
    if len(rows):
        grid = (triton.cdiv(vocab_size, _TILE), len(rows))
        _mask_kernel[grid](logits, rows, bits, logits.stride(0), vocab_size, num_words, TILE=_TILE)


@triton.jit
def _bias_kernel(
    logits_ptr, seq_slots_ptr, settings_ptr, ids_ptr, biases_ptr, logits_stride, vocab_size, WIDTH: tl.constexpr
):
    row = tl.program_id(0)
    seq_slot = tl.load(seq_slots_ptr + row)
    if seq_slot < 0:
        return
    num_biases = tl.load(settings_at(settings_ptr, seq_slot) + NUM_BIASES)
    places = tl.arange(0, WIDTH)
    is_bias = places < num_biases
    ids = tl.load(ids_ptr + seq_slot * WIDTH + places, mask=is_bias, other=0)
    biases = tl.load(biases_ptr + seq_slot * WIDTH + places, mask=is_bias, other=0.0)
    logit_ptrs = logits_ptr + row.to(tl.int64) * logits_stride + ids
    is_bias = is_bias & (ids < vocab_size)
    logits = tl.load(logit_ptrs, mask=is_bias, other=0.0)
    tl.store(logit_ptrs, logits + biases, mask=is_bias)


def add_biases(
    logits: torch.Tensor, seq_slots: torch.Tensor, settings: torch.Tensor, ids: torch.Tensor, biases: torch.Tensor
) -> None:
    """logits[row, ids[slot, i]] += biases[slot, i] for the number of biases in the slot's settings.

    logits: [n, vocab_size] float32; seq_slots: [n] int32, under 0 for padding; ids: [num_slots, width] int32, none
    twice in a slot; biases: [num_slots, width] float32; width is a power of two.
    """
    if len(logits):
        _bias_kernel[(len(logits),)](
            logits, seq_slots, settings, ids, biases, logits.stride(0), logits.shape[1], WIDTH=ids.shape[1]
        )


@triton.jit
def _penalty_kernel(logits_ptr, seq_slots_ptr, settings_ptr, counts_ptr, logits_stride, vocab_size, TILE: tl.constexpr):
    row = tl.program_id(1)
    seq_slot = tl.load(seq_slots_ptr + row)
    if seq_slot < 0:
        return
    settings_ptr = settings_at(settings_ptr, seq_slot)
    counts_row = tl.load(settings_ptr + COUNTS_ROW)
    if counts_row < 0:
        return
    repetition = number_at(settings_ptr, REPETITION)
    frequency = number_at(settings_ptr, FREQUENCY)
    presence = number_at(settings_ptr, PRESENCE)
    ids = tl.program_id(0) * TILE + tl.arange(0, TILE)
    counts = tl.load(counts_ptr + counts_row * vocab_size + ids, mask=ids < vocab_size, other=0)
    has_come = counts != 0
    logit_ptrs = logits_ptr + row.to(tl.int64) * logits_stride + ids
    logits = tl.load(logit_ptrs, mask=has_come, other=0.0)
    if repetition != 1.0:
        logits = tl.where(logits > 0.0, tl.div_rn(logits, repetition + tl.zeros_like(logits)), logits * repetition)
    num_generated = counts >> 1
    logits -= frequency * num_generated.to(tl.float32)
    logits -= tl.where(num_generated > 0, presence, 0.0)
    tl.store(logit_ptrs, logits, mask=has_come)


def penalise(logits: torch.Tensor, seq_slots: torch.Tensor, settings: torch.Tensor, counts: torch.Tensor) -> None:
    """Repetition, frequency and presence penalties, for the tokens that a sequence has.

    logits: [n, vocab_size] float32; seq_slots: [n] int32, under 0 for padding. counts: [num_rows, vocab_size] int32,
    rows as the slots' settings say: twice how often the token was generated, and 1 more if the prompt has it.
    Reads a row of counts, and writes the logits of what has come.
    """
    if len(logits):
        grid = (triton.cdiv(logits.shape[1], _TILE), len(logits))
        _penalty_kernel[grid](logits, seq_slots, settings, counts, logits.stride(0), logits.shape[1], TILE=_TILE)


@triton.jit
def _count_kernel(token_ids_ptr, seq_slots_ptr, settings_ptr, counts_ptr, vocab_size):
    row = tl.program_id(0)
    seq_slot = tl.load(seq_slots_ptr + row)
    if seq_slot < 0:
        return
    counts_row = tl.load(settings_at(settings_ptr, seq_slot) + COUNTS_ROW)
    token_id = tl.load(token_ids_ptr + row)
    if (counts_row >= 0) & (token_id >= 0):
        count_ptr = counts_ptr + counts_row * vocab_size + token_id
        tl.store(count_ptr, tl.load(count_ptr) + 2)


def count_tokens(
    token_ids: torch.Tensor, seq_slots: torch.Tensor, settings: torch.Tensor, counts: torch.Tensor
) -> None:
    """What was sampled is generated once more. token_ids: [n] int32, under 0: nothing. The others as `penalise` has."""
    if len(token_ids):
        _count_kernel[(len(token_ids),)](token_ids, seq_slots, settings, counts, counts.shape[1], num_warps=1)


@triton.jit
def _ban_kernel(
    logits_ptr,
    seq_slots_ptr,
    positions_ptr,
    exempt_ptr,
    settings_ptr,
    ids_ptr,
    ids_stride,
    logits_stride,
    vocab_size,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    seq_slot = tl.load(seq_slots_ptr + row)
    if seq_slot < 0:
        return
    settings_ptr = settings_at(settings_ptr, seq_slot)
    position = tl.load(positions_ptr + row)
    if (position < tl.load(settings_ptr + BANNED_UNTIL)) & (tl.load(exempt_ptr + row) == 0):
        ids_ptr += seq_slot.to(tl.int64) * ids_stride
        num_bans = tl.load(settings_ptr + NUM_BANS).to(tl.int32)
        for at in range(0, num_bans, TILE):
            places = at + tl.arange(0, TILE)
            is_ban = places < num_bans
            ids = tl.load(ids_ptr + places, mask=is_ban, other=0)
            is_ban = is_ban & (ids < vocab_size)
            tl.store(logits_ptr + row.to(tl.int64) * logits_stride + ids, -float("inf"), mask=is_ban)


def ban_tokens(
    logits: torch.Tensor,
    seq_slots: torch.Tensor,
    positions: torch.Tensor,
    exempt: torch.Tensor,
    settings: torch.Tensor,
    ids: torch.Tensor,
) -> None:
    """logits[row, ids[slot, i]] = -inf while the position is under that until which the slot's bans hold.

    logits: [n, vocab_size] float32; seq_slots, positions: [n] int32; exempt: [n] int32, not 0 where nothing is banned;
    ids: [num_slots, width] int32, rows in one piece; those outside the vocabulary are passed over. One kernel for every
    width that is a multiple of 16.
    """
    if len(logits):
        _ban_kernel[(len(logits),)](
            logits,
            seq_slots,
            positions,
            exempt,
            settings,
            ids,
            ids.stride(0),
            logits.stride(0),
            logits.shape[1],
            TILE=_BAN_TILE,
        )
