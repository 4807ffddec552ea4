"""StepPlan → what the device reads of a step: one short record, copied there without a stop.

What outlives a step stays on the device, in rows by seq_slot: block tables, and the newest token of each sequence. The
host sends what is new: who runs, from where to where, the entries that tables have gained, the ids of prompts.

A seq_slot belongs to a sequence while it runs. There are as many as can run at once, so a sequence that stands aside
(it is paused, or was preempted) may lose its slot to one that is scheduled, and gets another when it comes back. Two
steps are under way at most, one behind the other on one stream: whoever takes a slot over writes to it when the step
before is done with it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from engine.batch import DeviceBatch
from engine.execution.inputs import PromptChunk
from engine.execution.sampler import NO_TOKEN, SampledRow
from engine.kernels.step_inputs import step_inputs, write_tables
from engine.plan import NewSequence, ScheduledSequence, StepPlan

_HEADER: int = 8
_ALIGNMENT: int = 8
"""Of the record's parts, in words: kernels read wide where they may."""
_MIN_ENTRIES: int = 1024
_ENTRIES_AT_ONCE: int = 65536
"""Of tables that the record has no room for: what a step takes for them does not depend on how many come at once."""
_NUM_STAGINGS: int = 4
"""More than steps under way: a record is on its way until its step is done."""


@dataclass(slots=True)
class SequenceRecord:
    """The host's own copy of what the device may have to be told again."""

    facts: NewSequence
    block_table: list[int] = field(default_factory=list)
    seq_slot: int = -1
    """-1: none."""
    num_on_device: int = 0
    """Entries of the table that the device has, in the row of seq_slot."""
    output_ids: list[int] = field(default_factory=list)
    """Tokens generated so far, those before this engine included; of sequences with penalties only."""
    num_prompt_told: int = 1
    """Index of the prompt's first token whose log probabilities are still to be told, where they are asked for."""


@dataclass(frozen=True, slots=True)
class StagedStep:
    """Sizes of a step that was staged, for whoever launches it."""

    num_seqs: int
    num_tokens: int
    is_decode: bool
    """Every sequence has one query token."""


class DeviceBooks:
    """The sequences that a plan has named and none has named finished, and the device's tables of them."""

    def __init__(
        self,
        max_num_seqs: int,
        max_num_tokens: int,
        max_num_blocks: int,
        block_size: int,
        device: torch.device,
        on_slot: Callable[[int, SequenceRecord], None],
    ) -> None:
        """max_num_blocks: of one sequence. on_slot: told (seq_slot, record) when a sequence gets a slot, before the
        step that it gets it for."""
        self.records: dict[int, SequenceRecord] = {}
        self._block_size = block_size
        self._device = device
        self._on_slot = on_slot
        self._max_num_seqs = max_num_seqs
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._owners: list[SequenceRecord | None] = [None] * max_num_seqs
        self._table_stride = -(-max_num_blocks // 4) * 4
        self.block_tables = torch.zeros(max_num_seqs, self._table_stride, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        """[max_num_seqs], by seq_slot: the token that the newest step sampled."""
        padded_seqs = _aligned(max_num_seqs)
        self._max_entries = max(2 * max_num_seqs, _MIN_ENTRIES)
        at = _HEADER
        self._parts: dict[str, int] = {}
        for name, size in (
            ("seq_slots", padded_seqs),
            ("starts", padded_seqs),
            ("seq_lens", padded_seqs),
            ("sample_slots", padded_seqs),
            ("last_rows", padded_seqs),
            ("query_start_loc", padded_seqs + _ALIGNMENT),
            ("entries", _aligned(2 * self._max_entries)),
            ("given_ids", _aligned(max_num_tokens)),
        ):
            self._parts[name] = at
            at += size
        self._record = torch.zeros(at, dtype=torch.int32, device=device)
        self.clear_record()
        is_cuda = device.type == "cuda"
        self._stagings = [torch.zeros(at, dtype=torch.int32, pin_memory=is_cuda) for _ in range(_NUM_STAGINGS)]
        self._words = [staging.numpy() for staging in self._stagings]
        self._turn = 0
        self._token_ids = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)
        self._positions = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)
        self._slots = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)

    def clear_record(self) -> None:
        """On the device: a step without sequences, for whoever runs its kernels for their own sake."""
        self._record.zero_()
        self.part("sample_slots", _aligned(self._max_num_seqs)).fill_(-1)

    # What a captured step reads: the same addresses in every step

    def part(self, name: str, size: int) -> torch.Tensor:
        """The first `size` words of a part of the newest step's record, on the device."""
        start = self._parts[name]
        return self._record[start : start + size]

    def batch(self, num_seqs: int, num_tokens: int, *, is_decode: bool) -> DeviceBatch:
        """What layers read of a step of at most so many sequences and tokens; `expand` fills it."""
        return DeviceBatch(
            token_ids=self._token_ids[:num_tokens],
            positions=self._positions[:num_tokens],
            slots=self._slots[:num_tokens],
            query_start_loc=self.part("query_start_loc", num_seqs + 1),
            seq_lens=self.part("seq_lens", num_seqs),
            seq_slots=self.part("seq_slots", num_seqs),
            block_tables=self.block_tables,
            has_long=not is_decode,
        )

    def expand(self, batch: DeviceBatch) -> None:
        """On the device: take in the tables' new entries, and fill what the batch has of each token."""
        entries = self.part("entries", 2 * self._max_entries).view(-1, 2)
        write_tables(self.block_tables, entries, self._record[:1])
        step_inputs(
            batch.token_ids,
            batch.positions,
            batch.slots,
            self.part("given_ids", len(batch.token_ids)),
            self.last_tokens,
            batch.seq_slots,
            self.part("starts", len(batch.seq_slots)),
            batch.query_start_loc,
            self.block_tables,
            self._block_size,
        )

    # One step

    def apply(self, plan: StepPlan) -> list[int]:
        """Forget, clear and learn what the plan says → the slots that are free again. Once per plan, in launch
        order."""
        freed: list[int] = []
        for sequence_id in plan.finished_sequence_ids:
            # A sequence that ended before it ever ran was never learnt.
            record = self.records.pop(sequence_id, None)
            if record is not None and record.seq_slot >= 0:
                self._owners[record.seq_slot] = None
                freed.append(record.seq_slot)
        self._free_slots += freed
        for sequence_id in plan.preempted_sequence_ids:
            record = self.records[sequence_id]
            record.block_table.clear()
            record.num_on_device = 0
        for facts in plan.new_sequences:
            record = self.records[facts.sequence_id] = SequenceRecord(facts)
            if facts.sampling.has_penalties:
                record.output_ids = facts.token_ids[facts.num_prompt :]
        return freed

    def stage(self, plan: StepPlan) -> StagedStep:
        """Begin to copy the record of a plan that was applied to the device. Never waits.

        Raises ValueError for an entry whose blocks do not hold its tokens.
        """
        scheduled = plan.scheduled
        num_seqs = len(scheduled)
        stride, block_size = self._table_stride, self._block_size
        seq_slots: list[int] = []
        starts: list[int] = []
        seq_lens: list[int] = []
        sample_slots: list[int] = []
        query_start_loc: list[int] = [0]
        given: list[int] = []
        entries: list[int] = []
        records = [self.records[entry.sequence_id] for entry in scheduled]
        if any(record.seq_slot < 0 for record in records):
            self._give_slots(records)
        num_tokens = 0
        for entry, record in zip(scheduled, records, strict=True):
            seq_slot = record.seq_slot
            if entry.new_block_ids:
                record.block_table += entry.new_block_ids
            table = record.block_table
            end = entry.start + entry.num_tokens
            if len(table) * block_size < end:
                raise ValueError(_lacks_blocks(entry, len(table) * block_size))
            if record.num_on_device < len(table):
                place = seq_slot * stride
                for index in range(record.num_on_device, len(table)):
                    entries += (place + index, table[index])
                record.num_on_device = len(table)
            given += entry.token_ids or (-1,)
            num_tokens += entry.num_tokens
            seq_slots.append(seq_slot)
            starts.append(entry.start)
            seq_lens.append(end)
            sample_slots.append(seq_slot if entry.samples else -1)
            query_start_loc.append(num_tokens)
        self._send(num_tokens, entries, given, {
            "seq_slots": seq_slots,
            "starts": starts,
            "seq_lens": seq_lens,
            "sample_slots": sample_slots,
            "query_start_loc": query_start_loc,
        })  # fmt: skip
        return StagedStep(num_seqs, num_tokens, num_tokens == num_seqs)

    def sampled_rows(self, plan: StepPlan) -> list[SampledRow]:
        """One for each entry that samples, in the plan's order."""
        return [
            SampledRow(self.records[entry.sequence_id].facts, entry.start + entry.num_tokens)
            for entry in plan.scheduled
            if entry.samples
        ]

    def prompt_chunks(self, plan: StepPlan) -> list[tuple[int, PromptChunk]]:
        """What this plan's chunks tell of prompts, in its order, each token once: (row of the token before the chunk's
        first one, chunk). Once per plan."""
        chunks: list[tuple[int, PromptChunk]] = []
        first_row = 0
        for entry in plan.scheduled:
            record = self.records[entry.sequence_id]
            if record.facts.tells_prompt:
                start = max(entry.start + 1, record.num_prompt_told)
                end = min(entry.start + entry.num_tokens + 1, record.facts.num_prompt)
                if start < end:
                    chunks.append((first_row + start - 1 - entry.start, PromptChunk(record.facts, start, end)))
                    record.num_prompt_told = end
            first_row += entry.num_tokens
        return chunks

    def _give_slots(self, records: list[SequenceRecord]) -> None:
        """A slot for each that has none; where none is free, one of those that are not scheduled now."""
        scheduled = {record.seq_slot for record in records}
        aside = [slot for slot, owner in enumerate(self._owners) if owner is not None and slot not in scheduled]
        for record in records:
            if record.seq_slot >= 0:
                continue
            if self._free_slots:
                seq_slot = self._free_slots.pop()
            else:
                seq_slot = aside.pop()
                owner = self._owners[seq_slot]
                assert owner is not None
                owner.seq_slot = -1
            self._owners[seq_slot] = record
            record.seq_slot, record.num_on_device = seq_slot, 0
            self._on_slot(seq_slot, record)

    def _send(self, num_tokens: int, entries: list[int], given: list[int], parts: dict[str, list[int]]) -> None:
        """parts: without the rest behind the last sequence, which has no query tokens."""
        self._turn = (self._turn + 1) % _NUM_STAGINGS
        words = self._words[self._turn]
        num_seqs, padded_seqs = len(parts["seq_slots"]), self._max_num_seqs
        for name, values in parts.items():
            at = self._parts[name]
            words[at : at + len(values)] = values
        for name, rest in (("seq_slots", 0), ("starts", 0), ("seq_lens", 0), ("sample_slots", -1)):
            at = self._parts[name]
            words[at + num_seqs : at + padded_seqs] = rest
        at = self._parts["query_start_loc"]
        words[at + num_seqs : at + padded_seqs + 1] = num_tokens
        # A sequence's last token is the one whose logits count; who has none looks at row 0.
        last_rows = self._parts["last_rows"]
        words[last_rows : last_rows + num_seqs] = words[at + 1 : at + num_seqs + 1] - 1
        words[last_rows + num_seqs : last_rows + padded_seqs] = 0
        if len(entries) > 2 * self._max_entries:
            self._write_tables_now(entries)
            entries = []
        words[0] = len(entries) // 2
        at = self._parts["entries"]
        words[at : at + len(entries)] = entries
        at = self._parts["given_ids"]
        words[at : at + len(given)] = given
        used = at + len(given)
        self._record[:used].copy_(self._stagings[self._turn][:used], non_blocking=True)

    def _write_tables_now(self, entries: list[int]) -> None:
        """More than the record has room for: many sequences at once that came with long tables."""
        for start in range(0, len(entries), 2 * _ENTRIES_AT_ONCE):
            piece = entries[start : start + 2 * _ENTRIES_AT_ONCE]
            words = torch.tensor([len(piece) // 2, 0, 0, 0, *piece], dtype=torch.int32)
            if self._device.type == "cuda":
                words = words.pin_memory().to(self._device, non_blocking=True)
            write_tables(self.block_tables, words[4:].view(-1, 2), words[:1])

    def remember(self, rows: list[SampledRow], token_ids: list[int]) -> None:
        """What a collected step has sampled counts for the penalties of a sequence that loses its slot."""
        for row, token_id in zip(rows, token_ids, strict=True):
            record = self.records.get(row.sequence.sequence_id)
            if record is not None and token_id != NO_TOKEN and row.sequence.sampling.has_penalties:
                record.output_ids.append(token_id)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _lacks_blocks(entry: ScheduledSequence, num_slots: int) -> str:
    return (
        f"sequence {entry.sequence_id} is scheduled up to position {entry.start + entry.num_tokens}, "
        f"but its blocks hold {num_slots}"
    )
