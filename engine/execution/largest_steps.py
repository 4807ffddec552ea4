"""Steps that need as much of a device's memory as any can: run once before the pool is sized, so that no later one is
a surprise.

What a step needs at once is the most of what its phases need, one after the other: a prompt's tokens through the
layers, what is told of them, and the rows that are sampled with all that a request may ask for. Each has its step here.
"""

from typing import Final

import torch

from engine.execution.token_masks import WORD_BITS, TokenMasks
from engine.plan import NewSequence, ScheduledSequence, StepPlan
from streamkv.sampling import MAX_LOGPROBS, SamplingParams

_FIRST_ID: Final = -(2**31)
"""Of their sequences: no other's."""
_BLOCK: Final = 1
"""All that they write goes there, over and over: it is nobody's yet."""


def longest_prompt(max_num_tokens: int, max_model_len: int, block_size: int) -> StepPlan:
    """As many of a prompt's tokens as a step may have, of all of which it tells log probabilities."""
    num_tokens = max(1, min(max_num_tokens, max_model_len - 1))
    sampling = SamplingParams(seed=0, max_tokens=2, prompt_logprobs=MAX_LOGPROBS)
    token_ids = [0] * (num_tokens + 1)
    facts = NewSequence(_FIRST_ID, 0, sampling, num_tokens + 1, (), token_ids, tells_prompt=True)
    table = [_BLOCK] * -(-num_tokens // block_size)
    entry = ScheduledSequence(_FIRST_ID, 0, num_tokens, True, False, token_ids[:-1], table)
    return StepPlan(0, [entry], new_sequences=[facts])


def fullest_rows(max_num_seqs: int) -> StepPlan:
    """As many sequences as a step may have, each with filters, a bias, penalties, bans and log probabilities; one, if
    there are two, that does not sample, so that the rows of the others are copied.

    Beams would add some kilobytes a row. A grammar's mask comes from elsewhere: see `masks_of_all`.
    """
    everything = SamplingParams(
        seed=0,
        max_tokens=2,
        min_tokens=1,
        temperature=1.0,
        top_k=2,
        top_p=0.5,
        min_p=0.1,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        repetition_penalty=2.0,
        logit_bias={0: 1.0},
        logprobs=MAX_LOGPROBS,
    )
    scheduled: list[ScheduledSequence] = []
    new_sequences: list[NewSequence] = []
    for number in range(max_num_seqs):
        sequence_id = _FIRST_ID + 1 + number
        samples = number > 0 or max_num_seqs == 1
        num_prompt = 1 if samples else 2
        # The end-of-sequence id is what bans need.
        new_sequences.append(NewSequence(sequence_id, 0, everything, num_prompt, (0,), [0] * num_prompt))
        scheduled.append(ScheduledSequence(sequence_id, 0, 1, not samples, samples, [0], [_BLOCK]))
    return StepPlan(0, scheduled, new_sequences=new_sequences)


def masks_of_all(num_rows: int, vocab_size: int) -> TokenMasks:
    """A mask for each row, which allows everything."""
    words = torch.full((num_rows, -(-vocab_size // WORD_BITS)), -1, dtype=torch.int32)
    return TokenMasks(list(range(num_rows)), words)


def end_of(*plans: StepPlan) -> StepPlan:
    """A plan that only forgets their sequences."""
    return StepPlan(0, [], finished_sequence_ids=[facts.sequence_id for plan in plans for facts in plan.new_sequences])
