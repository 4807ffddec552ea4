"""The device's books of its sequences: what a step reads there is what the plan says, whoever had a row before."""

import random
from dataclasses import dataclass, field

import pytest
import torch

from engine.execution import gpu_inputs
from engine.execution.gpu_inputs import DeviceBooks, SequenceRecord
from engine.kernels.step_inputs import write_tables
from engine.plan import NewSequence, ScheduledSequence, StepPlan
from streamkv.sampling import SamplingParams

BLOCK_SIZE = 4
MAX_NUM_SEQS = 3
MAX_NUM_TOKENS = 40


@pytest.fixture
def slots_given() -> list[tuple[int, int]]:
    """(seq_slot, sequence_id) as they were given away."""
    return []


@pytest.fixture
def short_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of books that are made after it."""
    monkeypatch.setattr(gpu_inputs, "_MIN_ENTRIES", 8)


@pytest.fixture
def books(device: torch.device, slots_given: list[tuple[int, int]]) -> DeviceBooks:
    def on_slot(seq_slot: int, record: SequenceRecord) -> None:
        slots_given.append((seq_slot, record.facts.sequence_id))

    return DeviceBooks(MAX_NUM_SEQS, MAX_NUM_TOKENS, 300, BLOCK_SIZE, device, on_slot)


def facts(sequence_id: int, **sampling: float) -> NewSequence:
    return NewSequence(sequence_id, 0, SamplingParams(seed=0, max_tokens=10, **sampling), 4, (2,), list(range(50)))


def entry(
    sequence_id: int, start: int, ids: list[int], blocks: list[int] | None = None, *, num_tokens: int = 0
) -> ScheduledSequence:
    num_tokens = num_tokens or len(ids)
    return ScheduledSequence(sequence_id, start, num_tokens, num_tokens > 1, True, ids, blocks or [])


def read(books: DeviceBooks, plan: StepPlan, num_seqs: int = MAX_NUM_SEQS, num_tokens: int = MAX_NUM_TOKENS) -> list[
    tuple[int, int, int]
]:  # fmt: skip
    """(token, position, slot) of each of the plan's tokens, as the device has them; the rest is checked to be idle."""
    books.apply(plan)
    staged = books.stage(plan)
    assert (staged.num_seqs, staged.num_tokens) == (len(plan.scheduled), sum(e.num_tokens for e in plan.scheduled))
    batch = books.batch(num_seqs, num_tokens, is_decode=False)
    books.expand(batch)
    rows = list(zip(batch.token_ids.tolist(), batch.positions.tolist(), batch.slots.tolist(), strict=True))
    assert set(rows[staged.num_tokens :]) <= {(0, 0, 0)}
    lens = [e.start + e.num_tokens for e in plan.scheduled]
    assert batch.seq_lens.tolist() == lens + [0] * (num_seqs - len(lens))
    starts = [sum(e.num_tokens for e in plan.scheduled[:i]) for i in range(len(lens) + 1)]
    assert batch.query_start_loc.tolist() == starts + [staged.num_tokens] * (num_seqs - len(lens))
    last_rows = books.part("last_rows", num_seqs).tolist()
    assert last_rows == [start - 1 for start in starts[1:]] + [0] * (num_seqs - len(lens))
    return rows[: staged.num_tokens]


def test_the_newest_token_comes_from_the_device(books: DeviceBooks, slots_given: list[tuple[int, int]]) -> None:
    read(books, StepPlan(1, [entry(7, 0, [10, 11], [5])], new_sequences=[facts(7)]))
    ((seq_slot, _),) = slots_given
    books.last_tokens[seq_slot] = 77
    assert read(books, StepPlan(2, [entry(7, 2, [], num_tokens=1)])) == [(77, 2, 22)]


def test_who_does_not_sample_gets_no_token(books: DeviceBooks) -> None:
    partial = ScheduledSequence(8, 0, 3, True, False, [1, 2, 3], [9])
    read(books, StepPlan(1, [entry(7, 0, [10], [5]), partial], new_sequences=[facts(7), facts(8)]))
    sample_slots = books.part("sample_slots", MAX_NUM_SEQS).tolist()
    assert sample_slots[0] >= 0 and sample_slots[1:] == [-1, -1]


def test_a_sequence_that_lost_its_slot_comes_back_with_its_table(
    books: DeviceBooks, slots_given: list[tuple[int, int]]
) -> None:
    ids = (1, 2, 3)
    read(books, StepPlan(1, [entry(i, 0, [10], [10 * i]) for i in ids], new_sequences=[facts(i) for i in ids]))
    read(books, StepPlan(2, [entry(4, 0, [40], [44])], new_sequences=[facts(4)]))
    assert len(slots_given) == 4, "one has lost its slot"
    rows = read(books, StepPlan(3, [entry(i, 1, [20 + i]) for i in ids]))
    assert rows == [(20 + i, 1, 40 * i + 1) for i in ids]
    assert sorted(seq_slot for seq_slot, _ in slots_given[:3]) == [0, 1, 2]


def test_a_preempted_sequence_starts_over_with_other_blocks(books: DeviceBooks) -> None:
    read(books, StepPlan(1, [entry(1, 0, [10, 11, 12, 13, 14], [6, 7])], new_sequences=[facts(1)]))
    plan = StepPlan(
        2, [entry(1, 0, [10, 11], [9])], preempted_sequence_ids=[1], readmitted_sequence_ids=[1]
    )  # fmt: skip
    assert read(books, plan) == [(10, 0, 36), (11, 1, 37)]


@pytest.mark.usefixtures("short_record")
def test_tables_that_are_too_many_for_the_record_come_all_the_same(books: DeviceBooks) -> None:
    tables = {i: [1000 * i + place for place in range(290)] for i in (1, 2, 3)}
    plan = StepPlan(
        1, [entry(i, 1150 + i, [i], table) for i, table in tables.items()], new_sequences=[facts(i) for i in tables]
    )
    twice = {i: StepPlan(2, [entry(i, 4 * 200 + 1, [i])]) for i in tables}
    read(books, plan)
    for i, later in twice.items():
        assert read(books, later) == [(i, 801, 4 * (1000 * i + 200) + 1)]


@pytest.mark.usefixtures("short_record")
def test_what_long_tables_take_on_the_device_does_not_grow_with_them(
    books: DeviceBooks, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def counted(tables: torch.Tensor, entries: torch.Tensor, num_entries: torch.Tensor) -> None:
        sizes.append(len(entries))
        write_tables(tables, entries, num_entries)

    monkeypatch.setattr(gpu_inputs, "_ENTRIES_AT_ONCE", 100)
    monkeypatch.setattr(gpu_inputs, "write_tables", counted)
    tables = {i: [1000 * i + place for place in range(290 + i)] for i in (1, 2, 3)}
    plan = StepPlan(1, [entry(i, 1150, [i], table) for i, table in tables.items()], new_sequences=[*map(facts, tables)])
    books.apply(plan)
    books.stage(plan)
    assert sizes == [100] * 8 + [76]
    for i, table in tables.items():
        assert books.block_tables[books.records[i].seq_slot, : len(table)].tolist() == table


def test_what_was_sampled_is_kept_where_penalties_count_it(books: DeviceBooks) -> None:
    plan = StepPlan(
        1,
        [entry(1, 0, [10], [5]), entry(2, 0, [10], [6])],
        new_sequences=[facts(1, presence_penalty=0.5), facts(2)],
    )
    read(books, plan)
    books.remember(books.sampled_rows(plan), [33, 34])
    books.remember(books.sampled_rows(plan), [-1, 34])
    assert books.records[1].output_ids == [*range(4, 50), 33]
    assert books.records[2].output_ids == []


def test_a_table_that_is_too_short_is_refused(books: DeviceBooks) -> None:
    plan = StepPlan(1, [entry(1, 3, [10, 11], [5])], new_sequences=[facts(1)])
    books.apply(plan)
    with pytest.raises(ValueError, match="up to position 5, but its blocks hold 4"):
        books.stage(plan)


@dataclass
class Life:
    """What a test knows of a sequence."""

    table: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    is_known: bool = False


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_plans_reads_right(books: DeviceBooks, slots_given: list[tuple[int, int]], seed: int) -> None:
    chance = random.Random(seed)
    lives: dict[int, Life] = {}
    sampled_before: set[int] = set()
    ended: list[int] = []
    next_block = next_id = 1
    for step in range(12):
        while len(lives) < 6:
            lives[next_id] = Life(tokens=chance.choices(range(900), k=7))
            next_id += 1
        chosen = chance.sample(sorted(lives), chance.randint(1, MAX_NUM_SEQS))
        preempted = [i for i in chosen if lives[i].is_known and chance.random() < 0.1]
        for i in preempted:
            lives[i].table, lives[i].num_computed = [], 0
        scheduled, wanted, new = [], [], []
        for i in chosen:
            life = lives[i]
            if not life.is_known:
                new.append(facts(i))
                life.is_known = True
            left = len(life.tokens) - life.num_computed
            num_tokens = chance.randint(1, left)
            end = life.num_computed + num_tokens
            new_blocks = []
            while len(life.table) * BLOCK_SIZE < end:
                new_blocks.append(next_block)
                life.table.append(next_block)
                next_block += 1
            ids = life.tokens[life.num_computed : end]
            is_on_device = num_tokens == 1 and left == 1 and i in sampled_before and i not in preempted
            samples = end == len(life.tokens)
            scheduled.append(
                ScheduledSequence(
                    i, life.num_computed, num_tokens, num_tokens > 1, samples, [] if is_on_device else ids, new_blocks
                )
            )
            for position, token_id in zip(range(life.num_computed, end), ids, strict=True):
                slot = life.table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                wanted.append((token_id, position, slot))
            life.num_computed = end
        plan = StepPlan(
            step, scheduled, new_sequences=new, finished_sequence_ids=ended, preempted_sequence_ids=preempted
        )
        assert read(books, plan) == wanted
        sampled_before, ended = set(), []
        for row in scheduled:
            if row.samples:  # as the sampler does
                token_id = chance.randrange(900)
                lives[row.sequence_id].tokens.append(token_id)
                books.last_tokens[books.records[row.sequence_id].seq_slot] = token_id
                sampled_before.add(row.sequence_id)
        for i in [i for i in lives if lives[i].is_known and chance.random() < 0.1]:
            del lives[i]
            ended.append(i)
    assert len(slots_given) > MAX_NUM_SEQS
