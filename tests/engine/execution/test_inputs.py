"""Plans to batches, and the executor's memory of its sequences."""

import pytest

from engine.execution.inputs import SequenceRecords, make_batch
from engine.plan import NewSequence, ScheduledSequence, StepPlan
from streamkv.sampling import SamplingParams

SAMPLING = SamplingParams(seed=0, max_tokens=10)


def facts(sequence_id: int) -> NewSequence:
    return NewSequence(sequence_id, 0, SAMPLING, 4, (2,))


def entry(
    sequence_id: int, start: int, ids: list[int], blocks: list[int] | None = None, *, samples: bool = True
) -> ScheduledSequence:
    return ScheduledSequence(sequence_id, start, len(ids), len(ids) > 1, samples, ids, blocks or [])


def test_tokens_are_packed_with_single_ones_first_and_samples_in_the_plans_order() -> None:
    records = SequenceRecords()
    plan = StepPlan(
        1,
        [
            entry(1, 0, [10, 11, 12, 13, 14], [3, 9]),
            entry(2, 0, [20, 21], [5], samples=False),
            entry(3, 0, [30], [7]),
        ],
        new_sequences=[facts(1), facts(2), facts(3)],
    )
    records.apply(plan)
    batch = make_batch(plan, records, 4)
    assert batch.token_ids.tolist() == [30, 10, 11, 12, 13, 14, 20, 21]
    assert batch.positions.tolist() == [0, 0, 1, 2, 3, 4, 0, 1]
    assert batch.slots.tolist() == [28, 12, 13, 14, 15, 36, 20, 21]
    assert batch.query_start_loc == [0, 1, 6, 8]
    assert batch.seq_lens == [1, 5, 2]
    assert batch.block_tables == [[7], [3, 9], [5]]
    assert batch.num_decodes == 1
    assert batch.sample_rows.tolist() == [5, 0]
    assert [(row.sequence.sequence_id, row.position) for row in records.sampled_rows(plan)] == [(1, 5), (3, 1)]


def test_block_tables_grow_and_positions_go_on() -> None:
    records = SequenceRecords()
    records.apply(StepPlan(1, [entry(1, 0, [10, 11, 12], [6])], new_sequences=[facts(1)]))
    plan = StepPlan(2, [entry(1, 3, [13, 14], [2])])
    records.apply(plan)
    batch = make_batch(plan, records, 4)
    assert batch.slots.tolist() == [27, 8]
    assert batch.seq_lens == [5]


def test_a_preempted_sequence_starts_over_with_other_blocks() -> None:
    records = SequenceRecords()
    records.apply(StepPlan(1, [entry(1, 0, [10, 11, 12], [6])], new_sequences=[facts(1)]))
    records.apply(StepPlan(2, [], preempted_sequence_ids=[1]))
    plan = StepPlan(3, [entry(1, 0, [10, 11, 12, 13, 14], [8, 4])], readmitted_sequence_ids=[1])
    records.apply(plan)
    assert make_batch(plan, records, 4).slots.tolist() == [32, 33, 34, 35, 16]


def test_preempted_and_readmitted_in_one_plan_keeps_only_the_new_blocks() -> None:
    records = SequenceRecords()
    records.apply(StepPlan(1, [entry(1, 0, [10], [6])], new_sequences=[facts(1)]))
    plan = StepPlan(2, [entry(1, 0, [10, 11], [8])], preempted_sequence_ids=[1], readmitted_sequence_ids=[1])
    records.apply(plan)
    assert make_batch(plan, records, 4).slots.tolist() == [32, 33]


def test_finished_sequences_are_forgotten_and_unknown_ones_ignored() -> None:
    records = SequenceRecords()
    records.apply(StepPlan(1, [entry(1, 0, [10], [6])], new_sequences=[facts(1)]))
    records.apply(StepPlan(2, [], finished_sequence_ids=[1, 77]))
    assert len(records) == 0


def test_a_plan_that_leaves_ids_to_the_device_is_refused() -> None:
    records = SequenceRecords()
    plan = StepPlan(1, [ScheduledSequence(1, 0, 1, False, True, [], [6])], new_sequences=[facts(1)])
    records.apply(plan)
    with pytest.raises(ValueError, match="one step at a time"):
        make_batch(plan, records, 4)


def test_a_plan_beyond_its_blocks_is_refused() -> None:
    records = SequenceRecords()
    plan = StepPlan(1, [entry(1, 0, [10, 11, 12, 13, 14], [6])], new_sequences=[facts(1)])
    records.apply(plan)
    with pytest.raises(ValueError, match="position 5, but its blocks hold 4"):
        make_batch(plan, records, 4)
