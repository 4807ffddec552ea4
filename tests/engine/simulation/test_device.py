"""The simulated device must see the mistakes that it is there for."""

from dataclasses import replace

import msgspec
import pytest

from engine.plan import StepPlan
from engine.simulation.device import PlanViolation, SimulatedDevice, SimulatedDisk, load_of
from engine.simulation.simulated_model import SimulatedModel
from engine.transfer import StoredBlock, Transfer, TransferKind
from tests.engine.simulation.plans import GREEDY, entry, facts, plan_of

MODEL = SimulatedModel()


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    return MODEL.generate(prompt, GREEDY, 0, 60, num_tokens).token_ids


class Device(SimulatedDevice):
    """16 blocks of 4 tokens, and as many below."""

    def __init__(self, **settings) -> None:
        super().__init__(MODEL, 16, 4, num_host_blocks=8, num_disk_blocks=4, **settings)

    def run(self, plan: StepPlan) -> list[int]:
        return self.compute(plan).token_ids

    def start(self, sequence_id: int, prompt: list[int], blocks: list[int], step: int) -> int:
        plan = plan_of(step, entry(sequence_id, 0, prompt, blocks), new_sequences=[facts(sequence_id, len(prompt))])
        return self.run(plan)[0]


def test_right_plans_give_the_expected_tokens():
    device = Device()
    token = device.start(1, [5, 6, 7], [3], 0)
    following = device.run(plan_of(1, entry(1, 3, [token], [])))[0]
    last = device.run(plan_of(2, entry(1, 4, [following], [9])))[0]
    assert [token, following, last] == expected([5, 6, 7], 3)


def test_tokens_do_not_depend_on_chunks():
    device = Device()
    device.run(plan_of(0, entry(1, 0, [5, 6, 7], [3], samples=False), new_sequences=[facts(1, 9)]))
    device.run(plan_of(1, entry(1, 3, [8, 9], [4], samples=False, is_prefill=True)))
    token = device.run(plan_of(2, entry(1, 5, [10, 11, 12, 13], [7], is_prefill=True)))
    assert token == expected([5, 6, 7, 8, 9, 10, 11, 12, 13], 1)


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_wrong_block_gives_a_wrong_token(wrong: int):
    """The table of the second sequence has, in one place, a block of the first."""
    device = Device()
    prompt = list(range(20, 32))
    device.start(1, list(range(3, 15)), [1, 2, 3], 0)
    token = device.start(2, prompt, [4, 5, 6], 1)
    assert token == expected(prompt, 1)[0]
    device.known[2].table[wrong] = wrong + 1
    assert device.run(plan_of(2, entry(2, 12, [token], [7]))) != expected(prompt, 2)[1:]


def test_the_right_tokens_behind_another_beginning_give_a_wrong_token():
    """Keys and values depend on all that comes before; the second sequence takes over a block with its own tokens."""
    device = Device()
    tail = [50, 51, 52, 53]
    device.start(1, [5, 6, 7, 8, *tail, 9], [1, 2, 3], 0)
    prompt = [10, 11, 12, 13, *tail, 9]
    first = entry(2, 0, prompt[:4], [4], samples=False)
    device.run(plan_of(1, first, new_sequences=[facts(2, 9)]))
    device.known[2].table.append(2)
    device.known[2].num_computed = 8
    assert device.run(plan_of(2, entry(2, 8, [9], [6], is_prefill=True))) != expected(prompt, 1)


def test_a_freed_block_is_spoilt():
    device = Device()
    device.start(1, [5, 6, 7, 8, 9], [1, 2], 0)
    device.run(plan_of(1, entry(2, 0, [5], [3]), new_sequences=[facts(2, 1)], finished_sequence_ids=[1]))
    device.run(plan_of(2, entry(3, 4, [9], [1, 4]), new_sequences=[facts(3, 5)], finished_sequence_ids=[2]))
    with pytest.raises(PlanViolation, match="block 1 is free and has an owner"):
        device.spoil([1])
    device.spoil([2, 3])
    with pytest.raises(PlanViolation, match=r"block 2 holds positions \[-1, -1\]"):
        device.run(plan_of(3, entry(4, 6, [9], [1, 2]), new_sequences=[facts(4, 7)], finished_sequence_ids=[3]))


def test_a_block_shared_at_another_place_is_refused():
    device = Device()
    device.start(1, list(range(3, 11)), [1, 2], 0)
    with pytest.raises(PlanViolation, match="block 2 holds positions"):
        device.run(plan_of(1, entry(2, 4, [9], [2, 3]), new_sequences=[facts(2, 5)]))


def test_a_copy_carries_the_tokens_and_a_missing_one_shows():
    second = entry(2, 2, [7], [4], is_prefill=True)
    device = Device()
    device.start(1, [5, 6, 7], [1], 0)
    tokens = device.run(plan_of(1, second, new_sequences=[facts(2)], block_copies=[(1, 4)]))
    assert tokens == expected([5, 6, 7], 1)
    device = Device()
    device.start(1, [5, 6, 7], [1], 0)
    with pytest.raises(PlanViolation, match="block 4 holds positions"):
        device.run(plan_of(1, second, new_sequences=[facts(2)]))


def test_a_copy_of_other_tokens_gives_a_wrong_token():
    device = Device()
    device.start(1, [5, 8, 7], [1], 0)
    second = entry(2, 2, [7], [4], is_prefill=True)
    assert device.run(plan_of(1, second, new_sequences=[facts(2)], block_copies=[(1, 4)])) != expected([5, 6, 7], 1)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (plan_of(1), "empty"),
        (plan_of(1, entry(1, 3, [9], []), entry(1, 4, [9], [])), "twice"),
        (plan_of(0, entry(1, 3, [9], [])), "came after"),
        (plan_of(1, entry(1, 4, [9], [2])), "starts at 4"),
        (plan_of(1, entry(1, 2, [9], [])), "starts at 2"),
        (plan_of(1, entry(7, 0, [9], [2])), "never new"),
        (plan_of(1, entry(1, 3, [*expected([5, 6, 7], 1), 9], [])), "no block for position 4"),
        (plan_of(1, entry(1, 3, [9, 9], [0])), "block 0"),
        (plan_of(1, entry(1, 3, [9, 9], [1])), "twice in its table"),
        (plan_of(1, entry(1, 3, [999], [])), "now has 999"),
        (plan_of(1, entry(1, 3, [], [], num_tokens=1)), "from the device"),
        (plan_of(1, entry(1, 3, [9, 9], [2], num_tokens=1)), "ids for 1"),
        (plan_of(1, entry(2, 0, [9], [2])), "never new"),
        (plan_of(1, entry(2, 0, [9], [1]), new_sequences=[facts(2)]), "of 2 owners"),
        (plan_of(1, entry(1, 3, [9], []), new_sequences=[facts(1)]), "new twice"),
        (plan_of(1, entry(1, 3, [9], []), finished_sequence_ids=[1]), "is finished"),
        (plan_of(1, entry(1, 3, [9], []), finished_sequence_ids=[1, 1]), "finished twice"),
        (plan_of(1, entry(1, 0, [5, 6, 7], [1]), preempted_sequence_ids=[1]), "preempted True"),
        (plan_of(1, entry(1, 3, [9], []), readmitted_sequence_ids=[1]), "preempted False"),
        (plan_of(1, entry(1, 3, [9], []), block_copies=[(1, 4), (4, 5)]), "at once"),
        (plan_of(1, entry(1, 3, [9], []), block_copies=[(8, 9)]), "holds nothing"),
        (plan_of(1, entry(1, 3, [9], []), block_copies=[(1, 0)]), "block 0"),
        (plan_of(1, entry(1, 3, [9], []), total_num_scheduled_tokens=2), "counts"),
        (plan_of(1, entry(1, 3, [9], []), num_decode_requests=0), "counts"),
        (replace(plan_of(1, entry(1, 3, [9], [])), load=load_of(plan_of(1))), "load"),
        (plan_of(1, entry(2, 0, [9] * 9, [2, 3, 4]), entry(1, 3, [9], []), new_sequences=[facts(2)]), "decode after"),
        (plan_of(1, entry(1, 3, [9], []), entry(2, 0, [9] * 12, [2, 3, 4]), new_sequences=[facts(2)]), "over 12"),
    ],
)
def test_a_plan_that_breaks_its_promises_is_refused(plan: StepPlan, said: str):
    device = Device(max_num_batched_tokens=12)
    device.start(1, [5, 6, 7], [1], 0)
    with pytest.raises(PlanViolation, match=said):
        device.compute(plan)


def test_a_device_token_is_taken_only_from_the_step_before():
    device = Device(max_in_flight=2)
    device.start(1, [5, 6, 7], [1], 0)
    assert device.run(plan_of(1, entry(1, 3, [], [], num_tokens=1))) == expected([5, 6, 7], 2)[1:]
    device.start(2, [5, 6, 7], [2], 2)
    with pytest.raises(PlanViolation, match="sampled in step 1"):
        device.run(plan_of(3, entry(1, 4, [], [3], num_tokens=1)))


# transfers


def block(tokens: bytes = b"some", depth: int = 1) -> StoredBlock:
    return StoredBlock(tokens * 8, b"root", depth, tokens)


def down(transfer_id: int, block_ids: list[int], host_ids: list[int]) -> Transfer:
    return Transfer(transfer_id, TransferKind.DEVICE_TO_HOST, block_ids, host_ids)


def up(transfer_id: int, host_ids: list[int], block_ids: list[int]) -> Transfer:
    return Transfer(transfer_id, TransferKind.HOST_TO_DEVICE, block_ids, host_ids)


def save(transfer_id: int, host_ids: list[int]) -> Transfer:
    return Transfer(transfer_id, TransferKind.HOST_TO_DISK, [], host_ids, [block() for _ in host_ids])


def test_copies_between_device_and_host_are_done_in_order():
    """The second one reads what the first one writes, and the third writes what the second reads."""
    device = Device()
    prompt = [5, 6, 7, 8, 9]
    device.start(1, prompt, [1, 2], 0)
    transfers = [down(1, [1], [3]), up(2, [3], [9]), down(3, [2], [3])]
    for transfer in transfers:
        device.begin(transfer)
    for transfer in transfers:
        device.finish(transfer)
    second = entry(2, 4, [9], [9, 10], is_prefill=True)
    assert device.run(plan_of(1, second, new_sequences=[facts(2, 5)])) == expected(prompt, 1)


def test_blocks_go_down_to_the_disk_and_come_back_as_they_were():
    device = Device(disk=SimulatedDisk())
    prompt = [5, 6, 7, 8, 9]
    device.start(1, prompt, [1, 2], 0)
    stored = block()
    for transfer in (
        down(1, [1], [3]),
        Transfer(2, TransferKind.HOST_TO_DISK, [], [3], [stored]),
        Transfer(3, TransferKind.DISK_TO_HOST, [], [5], [stored]),
        up(4, [5], [9]),
    ):
        device.begin(transfer)
        assert device.finish(transfer) == []
    second = entry(2, 4, [9], [9, 10], is_prefill=True)
    assert device.run(plan_of(1, second, new_sequences=[facts(2, 5)])) == expected(prompt, 1)


def test_a_step_may_not_touch_what_a_transfer_needs():
    device = Device()
    token = device.start(1, [5, 6, 7], [1], 0)
    device.begin(down(1, [1], [3]))
    with pytest.raises(PlanViolation, match="writes into block 1, which a transfer still reads"):
        device.run(plan_of(1, entry(1, 3, [token], [])))


def test_a_step_may_not_read_what_still_arrives():
    device = Device()
    device.start(1, [5, 6, 7, 8, 9], [1, 2], 0)
    device.begin(down(1, [1], [3]))
    device.finish(down(1, [1], [3]))
    device.begin(up(2, [3], [7]))
    with pytest.raises(PlanViolation, match="block 7"):
        device.run(plan_of(1, entry(2, 4, [9], [7, 8], is_prefill=True), new_sequences=[facts(2, 5)]))


@pytest.mark.parametrize(
    ("transfers", "said"),
    [
        ([down(1, [1], [3]), down(1, [2], [4])], "started twice"),
        ([down(1, [1], [3]), save(2, [5])], "holds nothing"),
        ([down(1, [1], [3]), save(2, [3])], "reads host block 3, which transfer 1 writes"),
        ([up(1, [3], [7])], "holds nothing"),
        ([down(1, [7], [3])], "holds nothing"),
        ([down(1, [0], [3])], "block 0"),
        ([down(1, [1], [0])], "host block 0"),
        ([down(1, [1], [9])], "beyond host memory"),
        ([down(1, [1, 2], [3, 3])], "writes a block twice"),
        ([down(1, [1, 2], [3])], "has \\(2, 1, 0\\) blocks"),
        ([down(1, [], [])], "has \\(0, 0, 0\\) blocks"),
    ],
)
def test_a_transfer_that_breaks_its_promises_is_refused(transfers: list[Transfer], said: str):
    device = Device()
    device.start(1, [5, 6, 7, 8, 9], [1, 2], 0)
    with pytest.raises(PlanViolation, match=said):
        for transfer in transfers:
            device.begin(transfer)


def test_a_damaged_block_is_reported_once_and_gone():
    device = Device(disk=SimulatedDisk())
    device.start(1, [5, 6, 7, 8, 9], [1, 2], 0)
    stored = block()
    for transfer in (down(1, [1], [3]), Transfer(2, TransferKind.HOST_TO_DISK, [], [3], [stored])):
        device.begin(transfer)
        device.finish(transfer)
    device.disk.damaged.add(stored.digest)
    read = Transfer(3, TransferKind.DISK_TO_HOST, [], [4], [stored])
    device.begin(read)
    assert device.finish(read) == [0]
    assert device.disk.stored() == []


def test_a_full_disk_is_reported_and_an_overfull_one_is_refused():
    device = Device(disk=SimulatedDisk())
    device.start(1, [5, 6, 7, 8, 9, 10, 11, 12], [1, 2], 0)
    first = down(1, [1, 2], [3, 4])
    device.begin(first)
    device.finish(first)
    write = Transfer(2, TransferKind.HOST_TO_DISK, [], [3, 4], [block(), block(b"more", 2)])
    device.disk.rejected.add(block(b"more", 2).digest)
    device.begin(write)
    assert device.finish(write) == [1]
    device.num_disk_blocks = 1
    write = Transfer(3, TransferKind.HOST_TO_DISK, [], [3, 4], write.stored)
    device.begin(write)
    with pytest.raises(PlanViolation, match="2 blocks are on disk, 1 may be"):
        device.finish(write)


def test_a_start_finds_parents_first_and_drops_orphans():
    disk = SimulatedDisk()
    first, second = block(b"a"), StoredBlock(b"b", block(b"a").digest, 2, b"b")
    orphan = StoredBlock(b"c", b"lost", 2, b"c")
    values = Device().memory[1]
    for stored in (second, orphan, first):
        disk.write(stored, values)
    assert disk.stored() == [first, second]
    assert orphan.digest not in disk.blocks


@pytest.mark.parametrize("settings", [{"frequency_penalty": 1.0}, {"prompt_logprobs": 1}])
def test_a_sequence_whose_tokens_are_needed_must_come_with_them(settings: dict[str, float]):
    new = replace(
        facts(1), sampling=msgspec.structs.replace(GREEDY, **settings), tells_prompt="prompt_logprobs" in settings
    )
    with pytest.raises(PlanViolation, match="were told"):
        Device().run(plan_of(0, entry(1, 0, [5, 6, 7], [3]), new_sequences=[new]))
    told = replace(new, token_ids=[5, 6, 8])
    with pytest.raises(PlanViolation, match="had 8 at 2, now has 7"):
        Device().run(plan_of(0, entry(1, 0, [5, 6, 7], [3]), new_sequences=[told]))


def test_a_prompt_is_told_of_as_its_chunks_are_computed_and_only_once():
    device = Device()
    prompt = [5, 6, 7, 8, 9, 10]
    sampling = msgspec.structs.replace(GREEDY, prompt_logprobs=1)
    new = replace(facts(2, 6), sampling=sampling, token_ids=prompt, tells_prompt=True)
    early = device.compute(plan_of(1, entry(2, 0, prompt[:3], [5], samples=False), new_sequences=[new]))
    assert early.prompt_logprobs == {2: (1, MODEL.logprobs(prompt[1:4], 1, 1))}
    again = plan_of(2, entry(2, 0, prompt, [5, 6]), preempted_sequence_ids=[2], readmitted_sequence_ids=[2])
    late = device.compute(again)
    assert late.prompt_logprobs == {2: (4, MODEL.logprobs(prompt[4:], 4, 1))}
    assert not device.compute(plan_of(3, entry(2, 6, late.token_ids, []))).prompt_logprobs
