"""What the executor remembers of its sequences, and StepPlan → ForwardBatch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.batch import ForwardBatch
from engine.execution.penalties import LogitChanges
from engine.execution.sampler import NO_TOKEN, SampledRow
from engine.plan import NewSequence, ScheduledSequence, StepPlan


@dataclass(slots=True)
class SequenceRecord:
    """The executor's own copy of what it needs of a sequence, kept from plan to plan."""

    facts: NewSequence
    block_table: list[int] = field(default_factory=list)
    changes: LogitChanges | None = None
    """Of a sequence with biases or penalties. Outlives a preemption."""
    num_prompt_told: int = 1
    """Index of the prompt's first token whose log probabilities are still to be told, where they are asked for."""


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Tokens [start, end) of a sequence's prompt, which are told of by the logits of those before them."""

    facts: NewSequence
    start: int
    end: int


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
            changes = LogitChanges(facts) if facts.sampling.changes_logits else None
            self._records[facts.sequence_id] = SequenceRecord(facts, changes=changes)
        for entry in plan.scheduled:
            self._records[entry.sequence_id].block_table.extend(entry.new_block_ids)

    def block_table(self, sequence_id: int) -> list[int]:
        return self._records[sequence_id].block_table

    def sampled_rows(self, plan: StepPlan) -> list[SampledRow]:
        """One for each entry that samples, in the plan's order, which is also that of ForwardBatch.sample_rows."""
        return [
            SampledRow(record.facts, entry.start + entry.num_tokens, record.changes)
            for entry in plan.scheduled
            if entry.samples
            for record in [self._records[entry.sequence_id]]
        ]

    def prompt_chunks(self, plan: StepPlan) -> list[PromptChunk]:
        """What this plan's chunks tell of prompts, in its order; each token once. Once per plan."""
        chunks: list[PromptChunk] = []
        for entry in plan.scheduled:
            record = self._records[entry.sequence_id]
            facts = record.facts
            if not facts.tells_prompt:
                continue
            start = max(entry.start + 1, record.num_prompt_told)
            end = min(entry.start + entry.num_tokens + 1, facts.num_prompt)
            if start < end:
                chunks.append(PromptChunk(facts, start, end))
                record.num_prompt_told = end
        return chunks


def remember_tokens(rows: list[SampledRow], token_ids: list[int]) -> None:
    """What was sampled counts for the penalties of the next step. Once for each step, in launch order."""
    for row, token_id in zip(rows, token_ids, strict=True):
        if row.changes is not None and token_id != NO_TOKEN:
            row.changes.append(token_id)


def make_batch(
    plan: StepPlan, records: SequenceRecords, block_size: int, prompt_chunks: Sequence[PromptChunk] = ()
) -> ForwardBatch:
    """Pack the plan's tokens flat. `records` must have applied the plan. prompt_chunks: those of the plan.

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
    prompt_rows: list[int] = []
    if prompt_chunks:
        row_of = {
            scheduled[i].sequence_id: (query_start_loc[place], scheduled[i].start) for place, i in enumerate(order)
        }
        for chunk in prompt_chunks:
            first_row, first_position = row_of[chunk.facts.sequence_id]
            prompt_rows += range(
                first_row + chunk.start - 1 - first_position, first_row + chunk.end - 1 - first_position
            )
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
        prompt_rows=torch.tensor(prompt_rows, dtype=torch.int64) if prompt_rows else None,
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
