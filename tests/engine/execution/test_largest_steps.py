"""The steps that a device's memory is measured with: within the limits of every step, and with all that a request may
ask for."""

import pytest
import torch

from engine.execution.largest_steps import end_of, fullest_rows, longest_prompt, masks_of_all
from engine.execution.sampler import tells_logprobs
from engine.plan import StepPlan
from streamkv.sampling import MAX_LOGPROBS


def check(plan: StepPlan, block_size: int) -> None:
    """What DeviceBooks asks of a plan."""
    assert [facts.sequence_id for facts in plan.new_sequences] == [entry.sequence_id for entry in plan.scheduled]
    for entry in plan.scheduled:
        assert len(entry.token_ids) == entry.num_tokens > 0 == entry.start
        assert entry.num_tokens <= len(entry.new_block_ids) * block_size < entry.num_tokens + block_size
        assert set(entry.new_block_ids) == {1}, "a throw-away pool has no other"


@pytest.mark.parametrize(
    ("max_num_tokens", "max_model_len", "num_tokens"),
    [(8192, 131072, 8192), (8192, 8192, 8191), (8192, 100, 99), (1, 100, 1), (16, 2, 1)],
)
def test_the_longest_prompt_tells_of_each_of_its_tokens(
    max_num_tokens: int, max_model_len: int, num_tokens: int
) -> None:
    plan = longest_prompt(max_num_tokens, max_model_len, 16)
    check(plan, 16)
    (entry,), (facts,) = plan.scheduled, plan.new_sequences
    assert entry.num_tokens == num_tokens
    assert facts.tells_prompt and facts.sampling.prompt_logprobs == MAX_LOGPROBS
    assert facts.num_prompt == len(facts.token_ids) == num_tokens + 1, "each row has a token behind it"


@pytest.mark.parametrize("max_num_seqs", [1, 2, 256])
def test_the_fullest_rows_have_all_that_a_row_may_have(max_num_seqs: int) -> None:
    plan = fullest_rows(max_num_seqs)
    check(plan, 16)
    assert len({entry.sequence_id for entry in plan.scheduled}) == max_num_seqs
    assert sum(entry.samples for entry in plan.scheduled) == max(1, max_num_seqs - 1)
    for entry, facts in zip(plan.scheduled, plan.new_sequences, strict=True):
        sampling = facts.sampling
        assert sampling.has_penalties and sampling.logit_bias and tells_logprobs(sampling)
        assert not sampling.is_greedy and sampling.top_k > 0 and sampling.top_p < 1 and sampling.min_p > 0
        assert sampling.logprobs == MAX_LOGPROBS
        assert entry.num_tokens - facts.num_prompt < sampling.min_tokens and facts.eos_token_ids, "it is banned"


def test_their_masks_allow_everything() -> None:
    masks = masks_of_all(3, 70)
    logits = torch.randn(3, 70)
    before = logits.clone()
    masks.apply(logits)
    assert masks.rows == [0, 1, 2] and masks.bits.shape == (3, 3) and torch.equal(logits, before)


def test_all_of_them_are_forgotten() -> None:
    plans = longest_prompt(8, 8, 4), fullest_rows(3)
    assert len(set(end_of(*plans).finished_sequence_ids)) == 4 and not end_of(*plans).scheduled
