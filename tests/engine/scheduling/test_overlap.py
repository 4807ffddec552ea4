"""Two steps in flight: one is planned while the tokens of the one before it are still on the device."""

from engine.plan import StepPlan
from engine.sequence import Request, Sequence
from engine.simulation.simulated_model import end_after
from streamkv.protocol import pack_ids
from streamkv.sampling import Grammar
from tests.engine.scheduling.driver import Driver

GRAMMAR = Grammar("regex", "a+")


def prompt_of(num_tokens: int, first: int = 10) -> list[int]:
    return list(range(first, first + num_tokens))


def only(request: Request) -> Sequence:
    (sequence,) = request.sequences
    return sequence


def ids_in(plan: StepPlan | None) -> set[int]:
    assert plan is not None
    return {entry.sequence_id for entry in plan.scheduled}


def test_a_sequence_with_a_grammar_sits_out_every_other_step_and_the_others_none() -> None:
    driver = Driver(max_in_flight=2)
    plain = only(driver.submit(prompt_of(5), max_tokens=9)).sequence_id
    bound = only(driver.submit(prompt_of(6, 50), max_tokens=4, grammar=GRAMMAR)).sequence_id
    first, second = driver.plan(), driver.plan()
    assert (ids_in(first), ids_in(second)) == ({plain, bound}, {plain})
    for expected in ({plain, bound}, {plain}, {plain, bound}):
        driver.collect()
        assert ids_in(driver.plan()) == expected
    driver.run().check_all()


def test_an_end_by_length_is_known_ahead_and_wastes_nothing() -> None:
    driver = Driver(max_in_flight=2)
    for num_tokens in (1, 2, 7):
        driver.submit(prompt_of(5, 10 * num_tokens), max_tokens=num_tokens)
    driver.run().check_all()
    assert driver.scheduler.counts.num_wasted_tokens == 0
    assert sum(plan.total_num_scheduled_tokens for plan in driver.plans) == 3 * 5 + (0 + 1 + 6)


def test_an_end_by_a_stop_id_wastes_one_token_which_is_not_shown_and_not_cached() -> None:
    driver = Driver(max_in_flight=2, eos_rule=end_after(2), block_size=1)
    request = driver.submit(prompt_of(5), max_tokens=9)
    sequence = only(request)
    driver.run().check_all()
    assert driver.scheduler.counts.num_wasted_tokens == 1
    assert driver.output_of(sequence) == sequence.token_ids[5:]
    assert len(sequence.token_ids) == 8
    (root,) = driver.blocks.tree.roots.values()
    node = driver.blocks.tree.descend(root, pack_ids([*sequence.token_ids, 0]))
    assert node.depth == 8, "its last token was computed, too, and is known"
    assert not node.children, "what was sampled behind it is nobody's"


def test_a_deadline_between_launch_and_collection_frees_the_blocks_behind_the_last_step() -> None:
    driver = Driver(max_in_flight=2)
    other = driver.submit(prompt_of(3, 40), max_tokens=9)
    late = driver.submit(prompt_of(9), deadline_at_s=1.0, max_tokens=9)
    driver.plan()
    driver.plan()
    driver.now_s = 2.0
    (end,) = driver.take(driver.scheduler.expire())
    assert (end.finish_reason, end.cause, end.token_ids) == ("abort", "deadline", [])
    driver.collect()
    assert only(late).block_table, "a step that is on its way still touches them"
    driver.collect()
    assert not only(late).block_table
    driver.run().check_all()
    assert driver.ends[only(other)].finish_reason == "length"


def test_choices_fork_while_the_first_one_s_token_is_on_the_device() -> None:
    driver = Driver(max_in_flight=2, block_size=4)
    request = driver.submit(prompt_of(6), n=3, temperature=1.0, max_tokens=6)
    assert len(ids_in(driver.plan())) == 1
    second = driver.plan()
    assert len(ids_in(second)) == 3, "its prompt is computed by the step on its way"
    assert second is not None and len(second.block_copies) == 2, "the others copy the block that all would write"
    assert not second.scheduled[0].token_ids
    driver.run().check_all()
    assert len({tuple(driver.output_of(sequence)) for sequence in request.sequences}) > 1


def test_the_blocks_of_one_that_is_preempted_with_a_step_on_its_way_go_to_others_at_once() -> None:
    driver = Driver(max_in_flight=2, num_blocks=6, block_size=2, max_num_batched_tokens=16)
    first = driver.submit(prompt_of(3), max_tokens=6)
    second = driver.submit(prompt_of(3, 40), max_tokens=6)
    driver.plan()
    while driver.plan() and not only(second).num_preemptions:
        driver.collect()
    assert only(second).num_in_flight, "the step before has it"
    assert only(second).sequence_id in driver.plans[-1].preempted_sequence_ids
    assert driver.plans[-1].scheduled[0].new_block_ids, "and this one has given a block of its to the other"
    driver.run().check_all()
    assert only(first).num_preemptions == 0
