import pytest
import torch

from engine.kernels.likeliest import likeliest, tile_sums

LOWEST = torch.finfo(torch.float32).min
ATOL = 1e-5
"""Of float32, where the reference takes float64: a few units in the last place of numbers up to 40."""


def rows_of(*numbers: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


@pytest.mark.parametrize(("vocab_size", "num"), [(5, 20), (300, 0), (2100, 7)])
@pytest.mark.parametrize("num_values", [2, 10_000])
def test_the_likeliest_come_first_and_the_lowest_id_on_a_tie(
    vocab_size: int, num: int, num_values: int, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(num)
    logits = torch.randint(0, num_values, (3, vocab_size), generator=generator).float() * 3 / num_values
    logits[0, :3] = torch.tensor([-0.0, float("-inf"), 0.0])
    rows, wanted = rows_of(2, 0, device=device), rows_of(vocab_size - 1, -1, device=device)
    own = tile_sums(logits.to(device), rows)
    found = likeliest(logits.to(device), rows, own.maxima, own, wanted, num)
    for place, row in enumerate((2, 0)):
        values = logits[row].tolist()
        expected = sorted(range(vocab_size), key=lambda i: (-values[i], i))[:num]
        assert found.ids[place].tolist() == expected
        logprobs = torch.log_softmax(logits[row].double(), -1).clamp(min=LOWEST)
        told = found.logprobs[place].cpu().double()
        torch.testing.assert_close(told, logprobs[expected], rtol=0, atol=ATOL)
        chosen = logprobs[max(0, wanted[place].item())].item()
        assert found.chosen[place].item() == pytest.approx(chosen, abs=ATOL)


def test_changed_logits_are_ranked_with_the_log_probabilities_of_the_models_own(device: torch.device) -> None:
    own_logits = 3 * torch.randn(1, 1500, generator=torch.Generator().manual_seed(1))
    changed = own_logits.clone()
    changed[0, own_logits.argmax()] = float("-inf")
    rows = rows_of(0, device=device)
    own = tile_sums(own_logits.to(device), rows)
    maxima = tile_sums(changed.to(device), rows).maxima
    found = likeliest(changed.to(device), rows, maxima, own, rows, 3)
    values, ids = torch.log_softmax(own_logits[0].double(), -1).topk(4)
    assert found.ids[0].tolist() == ids[1:].tolist()
    torch.testing.assert_close(found.logprobs[0].cpu().double(), values[1:], rtol=0, atol=ATOL)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_what_is_no_number_is_told_as_the_lowest(device: torch.device) -> None:
    logits = torch.zeros(2, 1100)
    logits[0, 1050] = float("nan")
    logits[1] = float("-inf")
    rows = rows_of(0, 1, device=device)
    own = tile_sums(logits.to(device), rows)
    found = likeliest(logits.to(device), rows, own.maxima, own, rows, 2)
    assert found.chosen.tolist() == [LOWEST] * 2
    assert found.logprobs.tolist() == [[LOWEST] * 2] * 2
    assert ((found.ids >= 0) & (found.ids < 1100)).all()


@pytest.mark.gpu
def test_compiled_kernels_agree_with_topk_at_full_size(device: torch.device) -> None:
    logits = 3 * torch.randn(64, 128_256, generator=torch.Generator().manual_seed(2)).to(device)
    rows = torch.arange(64, dtype=torch.int32, device=device)
    own = tile_sums(logits, rows)
    found = likeliest(logits, rows, own.maxima, own, rows, 20)
    values, _ = torch.log_softmax(logits.double(), -1).topk(20)
    torch.testing.assert_close(found.logprobs.double(), values, rtol=0, atol=ATOL)
    at_ids = torch.log_softmax(logits.double(), -1).gather(1, found.ids.long())
    torch.testing.assert_close(at_ids, values, rtol=0, atol=ATOL)
