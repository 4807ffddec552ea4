"""What the executor remembers of its sequences, and StepPlan → ForwardBatch."""

from dataclasses import dataclass, field

import torch

from engine.batch import ForwardBatch
from engine.execution.sampler import SampledRow
from engine.plan import NewSequence, ScheduledSequence, StepPlan


@dataclass(slots=True)
class SequenceRecord:
    """The executor's own copy of what it needs of a sequence, kept from plan to plan."""

    facts: NewSequence
    block_table: list[int] = field(default_factory=list)


class SequenceRecords:
    """The records of all sequences that a plan has named and none has named finished."""

    def __init__(self) -> None:
        self._records: dict[int, SequenceRecord] = {}

    def __len__(self) -> int:
        return len(self._records)

    def apply(self, plan: StepPlan) -> None:
        """Forget, clear and learn what the plan says, and append its new blocks. Once per plan, in launch order."""
        for sequence_id in plan.finished_sequence_ids:
            # A sequence that ended before it ever ran was never learnt.
            self._records.pop(sequence_id, None)
        for sequence_id in plan.preempted_sequence_ids:
            self._records[sequence_id].block_table.clear()
        for facts in plan.new_sequences:
            self._records[facts.sequence_id] = SequenceRecord(facts)
        for entry in plan.scheduled:
            self._records[entry.sequence_id].block_table.extend(entry.new_block_ids)

    def block_table(self, sequence_id: int) -> list[int]:
        return self._records[sequence_id].block_table

    def sampled_rows(self, plan: StepPlan) -> list[SampledRow]:
        """One for each entry that samples, in the plan's order, which is also that of ForwardBatch.sample_rows."""
        return [
            SampledRow(self._records[entry.sequence_id].facts, entry.start + entry.num_tokens)
            for entry in plan.scheduled
            if entry.samples
        ]


def make_batch(plan: StepPlan, records: SequenceRecords, block_size: int) -> ForwardBatch:
    """Pack the plan's tokens flat. `records` must have applied the plan.

    Entries with one token come first, as ForwardBatch asks; otherwise the plan's order stays.
    Raises ValueError for an entry without its token ids, or whose blocks do not hold its tokens.
    """
    scheduled = plan.scheduled
    num_decodes = sum(entry.num_tokens == 1 for entry in scheduled)
    order = sorted(range(len(scheduled)), key=lambda i: scheduled[i].num_tokens != 1)
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_start_loc = [0]
    seq_lens: list[int] = []
    block_tables: list[list[int]] = []
    last_rows = [0] * len(scheduled)
    for i in order:
        entry = scheduled[i]
        table = records.block_table(entry.sequence_id)
        end = entry.start + entry.num_tokens
        _check(entry, len(table) * block_size)
        token_ids += entry.token_ids
        positions += range(entry.start, end)
        slots += [table[place // block_size] * block_size + place % block_size for place in range(entry.start, end)]
        query_start_loc.append(len(token_ids))
        seq_lens.append(end)
        block_tables.append(table)
        last_rows[i] = len(token_ids) - 1
    return ForwardBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        slots=torch.tensor(slots, dtype=torch.int64),
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_tables=block_tables,
        num_decodes=num_decodes,
        sample_rows=torch.tensor(
            [row for row, entry in zip(last_rows, scheduled, strict=True) if entry.samples], dtype=torch.int64
        ),
    )


def _check(entry: ScheduledSequence, num_slots: int) -> None:
    if len(entry.token_ids) != entry.num_tokens or not entry.num_tokens:
        raise ValueError(
            f"sequence {entry.sequence_id} is scheduled with {entry.num_tokens} tokens and {len(entry.token_ids)} ids; "
            "this executor runs one step at a time, so every id must be in the plan"
        )
    if entry.start + entry.num_tokens > num_slots:
        raise ValueError(
            f"sequence {entry.sequence_id} is scheduled up to position {entry.start + entry.num_tokens}, "
            f"but its blocks hold {num_slots}"
        )
