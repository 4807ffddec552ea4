"""Log probabilities: against log_softmax, and told to those rows alone that ask."""

import pytest
import torch

from engine.execution.logprobs import likeliest_ids, logprobs_of
from engine.execution.penalties import LogitChanges
from engine.execution.sampler import SampledRow, sample_step
from engine.plan import NewSequence
from streamkv.protocol import unpack_floats, unpack_ids
from streamkv.sampling import SamplingParams

ATOL = 1e-5
"""Of float32, where the reference takes float64: a few units in the last place of numbers up to 40."""


def row(sequence_id: int, position: int = 10, **settings: object) -> SampledRow:
    sampling = SamplingParams(seed=5, max_tokens=1000, **settings)  # type: ignore[arg-type]
    facts = NewSequence(sequence_id, 0, sampling, 5, (2,), [1, 2, 3, 4, 4])
    return SampledRow(facts, position, LogitChanges(facts) if sampling.changes_logits else None)


@pytest.mark.parametrize("num", [0, 1, 5, 7, 20])
@pytest.mark.parametrize("num_values", [2, 4, 10_000])
def test_the_likeliest_come_first_and_the_lowest_id_on_a_tie(num: int, num_values: int) -> None:
    logits = torch.randint(0, num_values, (40, 7 if num == 7 else 300), generator=torch.Generator().manual_seed(num))
    ids = likeliest_ids(logits.float(), num).tolist()
    for got, values in zip(ids, logits.tolist(), strict=True):
        assert got == sorted(range(len(values)), key=lambda i: (-values[i], i))[:num]


def test_there_are_no_more_places_than_tokens() -> None:
    told = logprobs_of(torch.zeros(2, 3), torch.tensor([2, 0]), 20)
    assert told.top_ids.tolist() == [[0, 1, 2]] * 2
    assert told.pack(20).num_top == 3


def test_they_are_the_log_softmax_of_the_logits() -> None:
    logits = 5 * torch.randn(30, 49152, generator=torch.Generator().manual_seed(1))
    chosen = torch.randint(0, 49152, (30,), generator=torch.Generator().manual_seed(2))
    wanted = torch.log_softmax(logits.double(), -1)
    told = logprobs_of(logits, chosen, 20)
    values, ids = wanted.topk(20)
    assert torch.allclose(told.chosen.double(), wanted.gather(1, chosen[:, None])[:, 0], rtol=0, atol=ATOL)
    assert torch.equal(told.top_ids, ids) and torch.allclose(told.top.double(), values, rtol=0, atol=ATOL)
    packed = told.pack(3)
    assert unpack_ids(packed.top_ids) == ids[:, :3].flatten().tolist()
    assert unpack_floats(packed.top_logprobs) == told.top[:, :3].flatten().tolist()
    assert unpack_floats(told.row(7, 0).chosen) == [told.chosen[7].item()] and not told.row(7, 0).top_ids
    num_tops = [i % 22 for i in range(30)]
    assert told.rows(num_tops) == [told.row(i, num_top) for i, num_top in enumerate(num_tops)]


def test_what_is_no_number_is_told_as_the_lowest() -> None:
    logits = torch.zeros(2, 4)
    logits[0, 1], logits[1, 2] = float("nan"), float("-inf")
    told = logprobs_of(logits, torch.tensor([0, 2]), 2)
    assert told.chosen.isfinite().all() and told.top.isfinite().all()
    assert told.chosen.tolist() == [torch.finfo(torch.float32).min] * 2


def test_a_row_is_told_of_the_models_own_whatever_changes_its_logits() -> None:
    logits = 3 * torch.randn(5, 700, generator=torch.Generator().manual_seed(6))
    logits[:, 2] = 9.0
    rows = [
        row(0, temperature=0.0),
        row(1, temperature=0.7, top_p=0.8, top_k=50, logprobs=0),
        row(2, temperature=0.0, min_tokens=20, logprobs=3),
        row(3, temperature=0.0, logit_bias={2: -100.0, 9: 50.0}, repetition_penalty=2.0, logprobs=5),
        row(4, temperature=2.0, presence_penalty=2.0, best_of=3, logprobs=1),
    ]
    tokens = sample_step(logits.clone(), rows)
    assert tokens.token_ids[3] == 9
    wanted = torch.log_softmax(logits.double(), -1)
    assert sorted(tokens.logprobs) == [1, 2, 3, 4], "who does not ask has none"
    for i, told in tokens.logprobs.items():
        num_top = rows[i].sequence.sampling.logprobs
        assert unpack_floats(told.chosen) == [pytest.approx(wanted[i, tokens.token_ids[i]].item(), abs=ATOL)]
        values, ids = wanted[i].topk(num_top)
        assert unpack_ids(told.top_ids) == ids.tolist()
        assert unpack_floats(told.top_logprobs) == pytest.approx(values.tolist(), abs=ATOL)


def test_a_row_gets_the_same_alone_and_in_any_batch() -> None:
    logits = 3 * torch.randn(12, 5000, generator=torch.Generator().manual_seed(7))
    rows = [row(i, 100 + i, logprobs=i % 5 - 1, frequency_penalty=0.5 * (i % 2)) for i in range(12)]
    together = sample_step(logits.clone(), rows)
    for i in range(12):
        alone = sample_step(logits[i : i + 1].clone(), rows[i : i + 1])
        assert alone.token_ids == together.token_ids[i : i + 1]
        assert alone.logprobs.get(i) == together.logprobs.get(i)


def test_a_row_without_numbers_has_no_log_probability() -> None:
    logits = torch.zeros(2, 300)
    logits[0, 7] = float("nan")
    tokens = sample_step(logits, [row(0, logprobs=1), row(1, logprobs=1)])
    assert list(tokens.failed) == [0] and list(tokens.logprobs) == [1]
