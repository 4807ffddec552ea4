"""Each change against a few plain lines. That they are those of engine/execution is test_device_sampler.py's."""

import struct

import pytest
import torch

from engine.kernels.logit_changes import add_biases, ban_tokens, count_tokens, mask_logits, penalise
from engine.kernels.sampling_rows import NUM_SETTINGS, SETTINGS_FORMAT

VOCAB_SIZE = 1100
SLOTS = [2, -1, 0]
"""Of three rows; the second is padding."""


def settings(device: torch.device, **of_slot_2: float) -> torch.Tensor:
    """Three slots, of which only the last asks for something."""
    nothing = {
        "counts_row": -1,
        "repetition": 1.0,
        "frequency": 0.0,
        "presence": 0.0,
        "biases": 0,
        "until": 0,
        "bans": 0,
    }
    packed = bytearray()
    for asked in (nothing, nothing, {**nothing, **of_slot_2}):
        packed += struct.pack(SETTINGS_FORMAT, 0, 0, 0, 1.0, 1.0, 0.0, False, *asked.values())
    return torch.frombuffer(packed, dtype=torch.int64).view(3, NUM_SETTINGS).to(device)


def ints(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def draw_logits(device: torch.device) -> torch.Tensor:
    return torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)).to(device)


def test_a_mask_bans_the_tokens_whose_bit_is_not_set(device: torch.device) -> None:
    logits = draw_logits(device)
    expected = logits.clone()
    allowed = torch.rand(2, 35 * 32, generator=torch.Generator().manual_seed(2)) < 0.5
    powers = 2 ** torch.arange(32)
    words = (allowed.view(2, 35, 32) * powers).sum(-1)
    bits = torch.where(words >= 2**31, words - 2**32, words).int().to(device)
    mask_logits(logits, ints([2, 0], device), bits)
    for place, row in enumerate((2, 0)):
        expected[row, ~allowed[place, :VOCAB_SIZE].to(device)] = float("-inf")
    assert torch.equal(logits, expected)
    mask_logits(logits, ints([], device), bits[:0])
    with pytest.raises(ValueError, match="do not cover a vocabulary"):
        mask_logits(logits, ints([2, 0], device), bits[:, :34])


def test_biases_are_added_to_their_tokens(device: torch.device) -> None:
    logits = draw_logits(device)
    expected = logits.clone()
    ids = torch.full((3, 4), 9, dtype=torch.int32, device=device)
    biases = torch.full((3, 4), 50.0, device=device)
    ids[2, :3], biases[2, :3] = ints([1099, 0, 7], device), torch.tensor([1.5, -100.0, 0.25], device=device)
    add_biases(logits, ints(SLOTS, device), settings(device, biases=3), ids, biases)
    expected[0, [1099, 0, 7]] += torch.tensor([1.5, -100.0, 0.25], device=device)
    assert torch.equal(logits, expected)


def test_penalties_touch_the_tokens_that_have_come(device: torch.device) -> None:
    logits = draw_logits(device)
    expected = logits.clone()
    counts = torch.full((2, VOCAB_SIZE), 99, dtype=torch.int32, device=device)
    # In the prompt; generated three times; both.
    counts[1] = 0
    counts[1, [4, 1050, 5]] = ints([1, 6, 5], device)
    asked = settings(device, counts_row=1, repetition=1.3, frequency=0.5, presence=0.7)
    penalise(logits, ints(SLOTS, device), asked, counts)
    for token_id, num in ((4, 0), (1050, 3), (5, 2)):
        value = expected[0, token_id].item()
        value = value / 1.3 if value > 0 else value * 1.3
        expected[0, token_id] = value - 0.5 * num - 0.7 * (num > 0)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    assert (logits != draw_logits(device)).sum() == 3


def test_what_was_sampled_is_counted(device: torch.device) -> None:
    counts = torch.zeros(2, VOCAB_SIZE, dtype=torch.int32, device=device)
    counts[1, 1099] = 1
    asked = settings(device, counts_row=1)
    for token_id in (1099, 1099, -1, 3):
        count_tokens(ints([token_id, 8, 8], device), ints(SLOTS, device), asked, counts)
    assert counts.nonzero().tolist() == [[1, 3], [1, 1099]]
    assert counts[1, [3, 1099]].tolist() == [2, 5]


@pytest.mark.parametrize(("position", "is_exempt", "is_banned"), [(11, 0, True), (12, 0, False), (11, 1, False)])
def test_bans_hold_until_their_position(position: int, is_exempt: int, is_banned: bool, device: torch.device) -> None:
    logits = draw_logits(device)
    expected = logits.clone()
    ids = torch.full((3, 4), 9, dtype=torch.int32, device=device)
    ids[2, :3] = ints([1099, 2000, 5], device)
    exempt = ints([is_exempt, 0, 0], device)
    positions = ints([position, 0, 0], device)
    ban_tokens(logits, ints(SLOTS, device), positions, exempt, settings(device, until=12, bans=3), ids)
    if is_banned:
        expected[0, [1099, 5]] = float("-inf")
    assert torch.equal(logits, expected)


def test_bans_of_any_number(device: torch.device) -> None:
    logits = draw_logits(device)
    expected = logits.clone()
    ids = torch.zeros(3, 768, dtype=torch.int32, device=device)
    ids[2, :600] = torch.arange(400, 1000, dtype=torch.int32)
    nothing = ints([0, 0, 0], device)
    ban_tokens(logits, ints(SLOTS, device), nothing, nothing, settings(device, until=12, bans=600), ids)
    expected[0, 400:1000] = float("-inf")
    assert torch.equal(logits, expected)
