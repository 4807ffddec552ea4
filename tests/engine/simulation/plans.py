"""Plans by hand."""

from dataclasses import replace

from engine.plan import NewSequence, ScheduledSequence, StepPlan
from engine.simulation.device import load_of
from streamkv.sampling import SamplingParams

GREEDY = SamplingParams(seed=0, max_tokens=20, temperature=0.0)


def entry(sequence_id: int, start: int, token_ids: list[int], blocks: list[int], **changes) -> ScheduledSequence:
    values = {
        "sequence_id": sequence_id,
        "start": start,
        "num_tokens": len(token_ids),
        "is_prefill": start == 0,
        "samples": True,
        "token_ids": token_ids,
        "new_block_ids": blocks,
    }
    return ScheduledSequence(**{**values, **changes})


def plan_of(step: int, *entries: ScheduledSequence, **changes) -> StepPlan:
    num_prefills = sum(e.is_prefill for e in entries)
    plan = StepPlan(
        step=step,
        scheduled=list(entries),
        total_num_scheduled_tokens=sum(e.num_tokens for e in entries),
        num_prefill_requests=num_prefills,
        num_decode_requests=len(entries) - num_prefills,
    )
    return replace(plan, load=load_of(plan), **changes)


def facts(sequence_id: int, num_prompt: int = 3) -> NewSequence:
    return NewSequence(sequence_id, 0, GREEDY, num_prompt, (2,))
