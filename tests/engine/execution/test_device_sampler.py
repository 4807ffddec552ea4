"""The sampler of the device against that of the CPU, request by request: the same logits give the same StepTokens."""

import random

import pytest
import torch

from engine.execution.device_sampler import DeviceSampler
from engine.execution.logprobs import logprobs_of
from engine.execution.penalties import LogitChanges
from engine.execution.sampler import NO_TOKEN, UNUSABLE_LOGITS, SampledRow, sample_step
from engine.execution.token_masks import TokenMasks
from engine.plan import NewSequence, StepTokens
from streamkv.protocol import TokenLogprobs, unpack_floats, unpack_ids
from streamkv.sampling import SamplingParams

VOCAB_SIZE = 300
NUM_SLOTS = 16
PROMPT = [1, 2, 3, 4, 4]
ATOL = 1e-5
"""Of log probabilities: float32, summed in another order."""
KINDS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"logprobs": 3, "top_p": 0.8},
    {"temperature": 0.0, "logit_bias": {3: 5.0, 299: -100.0}, "logprobs": 0},
    {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.3, "logprobs": 5},
    {"min_tokens": 5, "stop_token_ids": [7, 9, 100_000], "temperature": 0.0},
    {"temperature": 0.0, "beam_width": 4, "stop_token_ids": [3]},
    {"best_of": 3, "temperature": 0.9, "top_k": 10},
    {"temperature": 0.0, "beam_width": 2, "min_tokens": 40},
    {"repetition_penalty": 0.6, "temperature": 0.0, "min_p": 0.1},
    {},
]


def facts(sequence_id: int, prior: list[int] | None = None, **settings: object) -> NewSequence:
    sampling = SamplingParams(seed=2**63 + sequence_id, max_tokens=1000, **settings)  # type: ignore[arg-type]
    return NewSequence(sequence_id, sequence_id % 2, sampling, len(PROMPT), (2,), [*PROMPT, *(prior or [])])


class Step:
    """The device's tensors of a step, and what a sampler makes of it."""

    def __init__(self, sampler: DeviceSampler, device: torch.device) -> None:
        self.sampler = sampler
        self.device = device
        self.last_tokens = torch.zeros(NUM_SLOTS, dtype=torch.int32, device=device)

    def more(
        self, logits: torch.Tensor, rows: list[SampledRow], slots: list[int], masks: TokenMasks | None = None
    ) -> StepTokens:
        """With two rows of padding behind it."""
        padded = torch.cat((logits, torch.full((2, VOCAB_SIZE), float("nan")))).to(self.device)
        seq_slots = torch.tensor([*slots, -1, -1], dtype=torch.int32, device=self.device)
        positions = torch.tensor([*(row.position for row in rows), 0, 0], dtype=torch.int32, device=self.device)
        token_ids = torch.full((len(padded),), -9, dtype=torch.int32, device=self.device)
        self.sampler.upload()
        pending = self.sampler.sample_more(padded, rows, seq_slots, positions, token_ids, self.last_tokens, masks)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        assert token_ids[-2:].tolist() == [-9, -9]
        return pending.finish(token_ids[:-2].tolist())


def assert_alike(got: TokenLogprobs, expected: TokenLogprobs) -> None:
    assert unpack_ids(got.top_ids) == unpack_ids(expected.top_ids)
    assert unpack_floats(got.chosen) == pytest.approx(unpack_floats(expected.chosen), abs=ATOL)
    assert unpack_floats(got.top_logprobs) == pytest.approx(unpack_floats(expected.top_logprobs), abs=ATOL)


def test_steps_of_all_kinds_of_requests_are_those_of_the_cpu(device: torch.device) -> None:
    prior = [9, 9, 200]
    sequences = [facts(i, prior, **kind) for i, kind in enumerate(KINDS)]
    changes = [LogitChanges(one) if one.sampling.changes_logits else None for one in sequences]
    slots = random.Random(1).sample(range(NUM_SLOTS), len(sequences))
    sampler = DeviceSampler(NUM_SLOTS, VOCAB_SIZE, device)
    for seq_slot, one in zip(slots, sequences, strict=True):
        sampler.add(seq_slot, one, prior)
    step = Step(sampler, device)
    generator = torch.Generator().manual_seed(1)
    for number in range(2):
        logits = 3 * torch.randn(len(sequences), VOCAB_SIZE, generator=generator)
        position = len(PROMPT) + len(prior) + number
        rows = [SampledRow(one, position, own) for one, own in zip(sequences, changes, strict=True)]
        masks = None
        if number == 1:
            bits = torch.randint(-(2**31), 2**31, (3, 10), generator=generator).int()
            masks = TokenMasks([0, 4, 9], bits, {4}, {9: "no way on"})
        assert sampler.needs_more(rows)
        expected = sample_step(logits.clone(), rows, masks)
        for own, token_id in zip(changes, expected.token_ids, strict=True):
            if own is not None:
                own.append(token_id)
        got = step.more(logits, rows, slots, masks)
        assert got.token_ids == expected.token_ids and got.failed == expected.failed
        assert got.logprobs.keys() == expected.logprobs.keys()
        for sequence_id, values in expected.logprobs.items():
            assert_alike(got.logprobs[sequence_id], values)
        assert got.candidates.keys() == expected.candidates.keys()
        for sequence_id, offered in expected.candidates.items():
            assert [token_id for token_id, _ in got.candidates[sequence_id]] == [token_id for token_id, _ in offered]
            assert [value for _, value in got.candidates[sequence_id]] == pytest.approx(
                [value for _, value in offered], abs=ATOL
            )
        kept = {slot: token_id for slot, token_id in zip(slots, got.token_ids, strict=True) if token_id >= 0}
        assert {slot: step.last_tokens[slot].item() for slot in kept} == kept


def test_a_sequence_that_comes_back_into_another_slot_goes_on_with_its_counts(device: torch.device) -> None:
    """And who gets its old slot, and its old row of counts, starts with none of them."""
    settings = {"frequency_penalty": 1.5, "temperature": 0.0}
    sampler = DeviceSampler(NUM_SLOTS, VOCAB_SIZE, device)
    step = Step(sampler, device)
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [7, 8]] = torch.tensor([2.0, 1.0])
    sampler.add(3, facts(1, **settings), [])
    output = [step.more(logits, [SampledRow(facts(1, **settings), 5)], [3]).token_ids[0]]
    assert output == [7]
    sampler.remove(3)
    sampler.add(3, facts(2, **settings), [])
    sampler.add(9, facts(1, **settings), output)
    rows = [SampledRow(facts(2, **settings), 5), SampledRow(facts(1, **settings), 6)]
    assert step.more(logits.repeat(2, 1), rows, [3, 9]).token_ids == [7, 8]


def test_a_slot_keeps_nothing_of_who_had_it(device: torch.device) -> None:
    sampler = DeviceSampler(NUM_SLOTS, VOCAB_SIZE, device)
    step = Step(sampler, device)
    first = facts(1, temperature=0.0, logit_bias={5: 100.0}, repetition_penalty=9.0, min_tokens=900)
    second = facts(2, temperature=0.0, logit_bias={6: 1.5}, logprobs=0)
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [1, 2]] = torch.tensor([1.0, 2.0])
    sampler.add(0, first, [])
    assert step.more(logits, [SampledRow(first, 5)], [0]).token_ids == [5]
    sampler.add(0, second, [])
    assert step.more(logits, [SampledRow(second, 5)], [0]).token_ids == [2]


def test_more_sequences_with_penalties_than_there_were_rows_for(device: torch.device) -> None:
    sampler = DeviceSampler(NUM_SLOTS, VOCAB_SIZE, device)
    step = Step(sampler, device)
    rows = [SampledRow(facts(i, [10 + i], temperature=0.0, presence_penalty=2.0), 6) for i in range(11)]
    for seq_slot, row in enumerate(rows):
        sampler.add(seq_slot, row.sequence, [10 + seq_slot])
    logits = torch.zeros(11, VOCAB_SIZE)
    logits[:, 10:21] = 1.0
    logits[:, 250] = 0.5
    expected = [11] + [10] * 10
    assert step.more(logits, rows, list(range(11))).token_ids == expected


def test_only_who_asks_for_more_needs_more(device: torch.device) -> None:
    sampler = DeviceSampler(NUM_SLOTS, VOCAB_SIZE, device)
    plain = SampledRow(facts(0, top_p=0.5), 6)
    waiting = SampledRow(facts(1, min_tokens=3), len(PROMPT) + 2)
    done = SampledRow(facts(1, min_tokens=3), len(PROMPT) + 3)
    told = SampledRow(facts(2, logprobs=0), 6)
    sampler.add(0, plain.sequence, [])
    assert not sampler.needs_more([plain])
    sampler.add(1, waiting.sequence, [])
    sampler.add(2, told.sequence, [])
    assert not sampler.needs_more([plain, done])
    assert sampler.needs_more([plain, waiting]) and sampler.needs_more([told])
    sampler.remove(1)
    sampler.remove(2)
    sampler.remove(2)
    assert not sampler.needs_more([plain])


def test_filters_are_known_and_never_left_out(device: torch.device) -> None:
    sampler = DeviceSampler(NUM_SLOTS, VOCAB_SIZE, device)
    step = Step(sampler, device)
    logits = torch.zeros(1, VOCAB_SIZE, device=device)
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    sampler.add(0, facts(0, temperature=0.0, top_p=0.5), [])
    assert not sampler.has_filters, "greedy rows pass the filters by"
    for kind in ({"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}):
        sampler.add(1, facts(1, **kind), [])
        assert sampler.has_filters
        with pytest.raises(ValueError, match="sample with filters"):
            sampler.sample(logits, slots, slots, slots.clone(), step.last_tokens, filters=False)
    sampler.add(1, facts(1, top_k=VOCAB_SIZE), [])
    assert not sampler.has_filters, "all tokens are no choice"
    sampler.upload()
    sampler.sample(logits, slots, slots, token_ids := slots.clone() - 5, step.last_tokens, filters=False)
    assert token_ids.tolist() == [0]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_rows_without_a_token_are_named(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    sampler = DeviceSampler(NUM_SLOTS, VOCAB_SIZE, device)
    rows = [SampledRow(facts(4), 6), SampledRow(facts(5, beam_width=2, temperature=0.0), 6), SampledRow(facts(6), 6)]
    assert sampler.plain_tokens(rows[:2], [3, 4]) == StepTokens([3, 4])
    assert sampler.plain_tokens(rows[:2], [3, NO_TOKEN]) == StepTokens([3, NO_TOKEN], {5: UNUSABLE_LOGITS})
    assert [record.message.partition(";")[0] for record in caplog.records] == ["no usable logits"]
    for seq_slot, row in enumerate(rows):
        sampler.add(seq_slot, row.sequence, [])
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[1, 8] = float("nan")
    masks = TokenMasks([2], torch.zeros(1, 10, dtype=torch.int32), failed={2: "cannot be followed"})
    tokens = Step(sampler, device).more(logits, rows, [0, 1, 2], masks)
    assert tokens.failed == {5: UNUSABLE_LOGITS, 6: "cannot be followed"}
    assert tokens.token_ids[0] >= 0 and tokens.token_ids[1:] == [NO_TOKEN] * 2 and not tokens.candidates


def test_prompts_are_told_as_on_the_cpu(device: torch.device) -> None:
    logits = 3 * torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    sampler = DeviceSampler(NUM_SLOTS, VOCAB_SIZE, device)
    for num_top in (0, 5):
        pending = sampler.begin_prompt_logprobs(logits.to(device), [299, 0, 7], num_top)
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert_alike(pending.finish(), logprobs_of(logits, torch.tensor([299, 0, 7]), num_top).pack(num_top))


def test_compiling_leaves_nothing_behind(device: torch.device) -> None:
    sampler = DeviceSampler(2, VOCAB_SIZE, device)
    sampler.compile()
    sequence = facts(1, temperature=0.0)
    sampler.add(1, sequence, [])
    sampler.upload()
    logits = torch.zeros(1, VOCAB_SIZE, device=device)
    logits[0, 77] = 1.0
    seq_slots = torch.ones(1, dtype=torch.int32, device=device)
    token_ids, last_tokens = (
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.zeros(2, dtype=torch.int32).to(device),
    )
    sampler.sample(logits, seq_slots, seq_slots, token_ids, last_tokens, filters=False)
    assert token_ids.tolist() == [77] and last_tokens.tolist() == [0, 77]


def test_a_model_may_have_any_number_of_ends(device: torch.device) -> None:
    """And whoever stands beside such a sequence keeps the bans that it had."""
    sampler = DeviceSampler(NUM_SLOTS, 1000, device)
    logits = torch.arange(1000, 0, -1).float().repeat(3, 1)
    rows = []
    for seq_slot, ends in enumerate(([0, 1, 5], range(600), [0])):
        sampling = SamplingParams(seed=1, max_tokens=9, min_tokens=2, temperature=0.0, stop_token_ids=[1, 601])
        one = NewSequence(seq_slot, 0, sampling, 5, tuple(ends))
        sampler.add(seq_slot, one, [])
        rows.append(SampledRow(one, 6))
    sampler.upload()
    slots = torch.arange(3, dtype=torch.int32, device=device)
    last_tokens = torch.zeros(NUM_SLOTS, dtype=torch.int32, device=device)
    expected = sample_step(logits.clone(), rows, None).token_ids
    assert expected == [2, 600, 2]
    token_ids = torch.zeros_like(slots)
    sampler.sample_more(logits.to(device), rows, slots, torch.full_like(slots, 6), token_ids, last_tokens, None)
    assert token_ids.tolist() == expected


def test_there_are_no_more_rows_of_counts_than_sequences(device: torch.device) -> None:
    """A row has the size of the vocabulary, and comes out of what is left beside the KV pool."""
    sampler = DeviceSampler(9, VOCAB_SIZE, device)
    for sequence_id in range(20):
        sampler.add(sequence_id % 9, facts(sequence_id, presence_penalty=0.5), [])
    counts = sampler._changes._counts
    assert counts is not None and counts.shape == (9, VOCAB_SIZE)
