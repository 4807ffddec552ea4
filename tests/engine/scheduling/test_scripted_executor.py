"""The scripted executor must see the mistakes that it is there for."""

import threading
from dataclasses import replace

import pytest

from engine.plan import NewSequence, ScheduledSequence, StepPlan
from streamkv.sampling import SamplingParams
from tests.support.scripted_executor import InjectedFault, PlanViolation, ScriptedExecutor, end_after

GREEDY = SamplingParams(seed=0, max_tokens=20, temperature=0.0)
SAMPLED = ScriptedExecutor(threaded=False).expected_tokens([5, 6, 7], 1)[0]


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
    return replace(plan, **changes)


def facts(sequence_id: int, num_prompt: int = 3) -> NewSequence:
    return NewSequence(sequence_id, 0, GREEDY, num_prompt, (2,))


class Device:
    """Steps one after another, with the scripted executor computing inside launch."""

    def __init__(self, **settings) -> None:
        self.executor = ScriptedExecutor(16, 4, 60, threaded=False, **settings)

    def run(self, plan: StepPlan) -> list[int]:
        return self.executor.collect(self.executor.launch(plan, lambda: None)).token_ids

    def begin(self, sequence_id: int, prompt: list[int], blocks: list[int], step: int) -> int:
        return self.run(
            plan_of(step, entry(sequence_id, 0, prompt, blocks), new_sequences=[facts(sequence_id, len(prompt))])
        )[0]


def test_right_plans_give_the_expected_tokens():
    device = Device()
    token = device.begin(1, [5, 6, 7], [3], 0)
    following = device.run(plan_of(1, entry(1, 3, [token], [])))[0]
    last = device.run(plan_of(2, entry(1, 4, [following], [9])))[0]
    assert [token, following, last] == device.executor.expected_tokens([5, 6, 7], 3)


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_wrong_block_gives_a_wrong_token(wrong: int):
    """The table of the second sequence has, in one place, a block of the first."""
    device = Device()
    prompt = list(range(20, 32))
    device.begin(1, list(range(3, 15)), [1, 2, 3], 0)
    token = device.begin(2, prompt, [4, 5, 6], 1)
    expected = device.executor.expected_tokens(prompt, 2)
    assert token == expected[0]
    device.executor._known[2].table[wrong] = wrong + 1
    assert device.run(plan_of(2, entry(2, 12, [token], [7]))) != expected[1:]


def test_a_freed_block_is_spoilt():
    device = Device()
    device.begin(1, [5, 6, 7, 8, 9], [1, 2], 0)
    device.run(plan_of(1, entry(2, 0, [5], [3]), new_sequences=[facts(2, 1)], finished_sequence_ids=[1]))
    device.run(plan_of(2, entry(3, 4, [9], [1, 4]), new_sequences=[facts(3, 5)], finished_sequence_ids=[2]))
    with pytest.raises(PlanViolation, match="block 1 is free and has an owner"):
        device.executor.spoil([1])
    device.executor.spoil([2, 3])
    with pytest.raises(PlanViolation, match=r"block 2 holds positions \[-1, -1\]"):
        device.run(plan_of(3, entry(4, 6, [9], [1, 2]), new_sequences=[facts(4, 7)], finished_sequence_ids=[3]))


def test_a_block_shared_at_another_place_is_refused():
    device = Device()
    device.begin(1, list(range(3, 11)), [1, 2], 0)
    with pytest.raises(PlanViolation, match="block 2 holds positions"):
        device.run(plan_of(1, entry(2, 4, [9], [2, 3]), new_sequences=[facts(2, 5)]))


def test_a_copy_carries_the_tokens_and_a_missing_one_shows():
    prompt = [5, 6, 7]
    second = entry(2, 2, [7], [4], is_prefill=True)
    device = Device()
    device.begin(1, prompt, [1], 0)
    tokens = device.run(plan_of(1, second, new_sequences=[facts(2)], block_copies=[(1, 4)]))
    assert tokens == device.executor.expected_tokens(prompt, 1)
    device = Device()
    device.begin(1, prompt, [1], 0)
    with pytest.raises(PlanViolation, match="block 4 holds positions"):
        device.run(plan_of(1, second, new_sequences=[facts(2)]))


def test_a_copy_of_other_tokens_gives_a_wrong_token():
    device = Device()
    device.begin(1, [5, 8, 7], [1], 0)
    second = entry(2, 2, [7], [4], is_prefill=True)
    tokens = device.run(plan_of(1, second, new_sequences=[facts(2)], block_copies=[(1, 4)]))
    assert tokens != device.executor.expected_tokens([5, 6, 7], 1)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (plan_of(1), "empty"),
        (plan_of(1, entry(1, 3, [9], []), entry(1, 4, [9], [])), "twice"),
        (plan_of(0, entry(1, 3, [9], [])), "came after"),
        (plan_of(1, entry(1, 4, [9], [2])), "starts at 4"),
        (plan_of(1, entry(1, 2, [9], [])), "starts at 2"),
        (plan_of(1, entry(7, 0, [9], [2])), "never new"),
        (plan_of(1, entry(1, 3, [SAMPLED, 9], [])), "no block for position 4"),
        (plan_of(1, entry(1, 3, [9, 9], [0])), "block 0"),
        (plan_of(1, entry(1, 3, [9, 9], [1])), "twice in its table"),
        (plan_of(1, entry(1, 3, [999], [])), "now has 999"),
        (plan_of(1, entry(1, 3, [], [], num_tokens=1)), "from the device"),
        (plan_of(1, entry(1, 3, [9, 9], [2], num_tokens=1)), "ids for 1"),
        (plan_of(1, entry(2, 0, [9], [2])), "never new"),
        (plan_of(1, entry(2, 0, [9], [1]), new_sequences=[facts(2)]), "of 2 owners"),
        (plan_of(1, entry(1, 3, [9], []), new_sequences=[facts(1)]), "new twice"),
        (plan_of(1, entry(1, 3, [9], []), finished_sequence_ids=[1]), "is finished"),
        (plan_of(1, entry(1, 0, [5, 6, 7], [1]), preempted_sequence_ids=[1]), "preempted True"),
        (plan_of(1, entry(1, 3, [9], []), readmitted_sequence_ids=[1]), "preempted False"),
        (plan_of(1, entry(1, 3, [9], []), block_copies=[(1, 4), (4, 5)]), "at once"),
        (plan_of(1, entry(1, 3, [9], []), block_copies=[(8, 9)]), "holds nothing"),
        (plan_of(1, entry(1, 3, [9], []), block_copies=[(1, 0)]), "block 0"),
        (plan_of(1, entry(1, 3, [9], []), total_num_scheduled_tokens=2), "counts"),
        (plan_of(1, entry(1, 3, [9], []), num_decode_requests=0), "counts"),
        (plan_of(1, entry(2, 0, [9] * 9, [2, 3, 4]), entry(1, 3, [9], []), new_sequences=[facts(2)]), "decode after"),
        (plan_of(1, entry(1, 3, [9], []), entry(2, 0, [9] * 12, [2, 3, 4]), new_sequences=[facts(2)]), "over 12"),
    ],
)
def test_a_plan_that_breaks_its_promises_is_refused(plan: StepPlan, said: str):
    device = Device(max_num_batched_tokens=12)
    device.begin(1, [5, 6, 7], [1], 0)
    with pytest.raises(PlanViolation, match=said):
        device.run(plan)


def test_a_device_token_is_taken_only_from_the_step_before():
    device = Device(max_in_flight=2)
    device.begin(1, [5, 6, 7], [1], 0)
    tokens = device.run(plan_of(1, entry(1, 3, [], [], num_tokens=1)))
    assert tokens == device.executor.expected_tokens([5, 6, 7], 2)[1:]
    device.begin(2, [5, 6, 7], [2], 2)
    with pytest.raises(PlanViolation, match="sampled in step 1"):
        device.run(plan_of(3, entry(1, 4, [], [3], num_tokens=1)))


def test_steps_run_on_a_thread_and_say_when_they_are_done():
    executor = ScriptedExecutor(16, 4, 60, step_s=0.05, max_in_flight=2)
    done = threading.Event()
    first = executor.launch(plan_of(0, entry(1, 0, [5, 6], [1]), new_sequences=[facts(1, 2)]), done.set)
    assert not first.is_done
    second = executor.launch(plan_of(1, entry(1, 2, [], [], num_tokens=1)), lambda: None)
    with pytest.raises(PlanViolation, match="in flight"):
        executor.launch(plan_of(2, entry(1, 3, [], [], num_tokens=1)), lambda: None)
    assert done.wait(5)
    assert first.is_done
    tokens = executor.collect(first).token_ids + executor.collect(second).token_ids
    assert tokens == executor.expected_tokens([5, 6], 2)
    executor.close()
    executor.close()


def test_a_fault_is_raised_by_collect():
    executor = ScriptedExecutor(16, 4, 60, fail_at_step=0)
    launch = executor.launch(plan_of(0, entry(1, 0, [5], [1]), new_sequences=[facts(1)]), lambda: None)
    with pytest.raises(InjectedFault):
        executor.collect(launch)
    executor.close()


def test_load_reports_progress_and_says_what_fits():
    executor = ScriptedExecutor(16, 4, 60, 500, eos_token_ids=(2, 3), load_s=0.01)
    seen: list[float] = []
    model, limits = executor.load(lambda stage, percent: seen.append(percent))
    executor.close()
    assert seen == [0.0, 50.0, 100.0]
    assert (model.vocab_size, model.eos_token_ids, model.max_model_len) == (500, [2, 3], 60)
    assert (limits.num_blocks, limits.block_size, limits.max_model_len) == (16, 4, 60)


def test_what_is_expected_follows_the_rules_for_ends():
    executor = ScriptedExecutor(16, 4, 60, threaded=False, eos_rule=end_after(3))
    prompt = [5, 6, 7]
    tokens, reason, cause = executor.expected_output(prompt, GREEDY)
    assert (len(tokens), tokens[-1], reason, cause) == (4, 2, "stop", "eos")
    later = SamplingParams(seed=0, max_tokens=20, min_tokens=6, temperature=0.0)
    assert len(executor.expected_output(prompt, later)[0]) == 7
    endless = SamplingParams(seed=0, max_tokens=500, ignore_eos=True, temperature=0.0)
    tokens, reason, _ = executor.expected_output(prompt, endless)
    assert (len(tokens), reason) == (57, "length")
    drawn = SamplingParams(seed=0, max_tokens=20, n=2)
    assert executor.expected_tokens(prompt, 3, drawn, 0) != executor.expected_tokens(prompt, 3, drawn, 1)
