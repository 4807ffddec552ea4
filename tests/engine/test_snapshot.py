"""GetSnapshot over a real socket: what it shows, how often it is made, and what it costs."""

import itertools
import time
from collections import Counter
from collections.abc import Callable

import pytest

from engine import snapshot as snapshot_module
from engine.kv.block_states import BlockState
from streamkv.protocol import GetSnapshot, Ready, Snapshot, WireError, unpack_ids
from tests.support.scripted_engine import serving
from tests.support.scripted_executor import ScriptedExecutor
from tests.support.wire_gateway import WireGateway, submission

PROMPT = list(range(10, 43))
BLOCK_SIZE = 4


def ask(gateway: WireGateway, query_id: int = 7) -> Snapshot:
    gateway.send(GetSnapshot(query_id))
    return gateway.wait_for(Snapshot)


def ask_until(gateway: WireGateway, is_right: Callable[[Snapshot], object]) -> Snapshot:
    until_s = time.monotonic() + 30
    while not is_right(found := ask(gateway)):
        assert time.monotonic() < until_s, found
        time.sleep(0.05)
    return found


def test_it_shows_who_has_which_blocks_and_empties_afterwards() -> None:
    executor = ScriptedExecutor(num_blocks=64, block_size=BLOCK_SIZE, step_s=0.02)
    with serving(executor) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        empty = ask(gateway)
        assert Counter(empty.block_states) == {BlockState.RESERVED: 1, BlockState.FREE: 63}
        assert (empty.query_id, empty.sequences, empty.steps, empty.quantiles) == (7, [], [], {})
        for request_id in (1, 2):
            gateway.send(submission(request_id, PROMPT, max_tokens=80))
            gateway.wait_tokens(request_id, 1)
        running = ask_until(gateway, lambda found: len(found.sequences) == 2)
        tables = [unpack_ids(sequence.block_table) for sequence in running.sequences]
        owners = Counter(block_id for table in tables for block_id in table)
        assert tables[0][:8] == tables[1][:8], "the prompt's whole blocks are shared"
        for block_id, num_owners in owners.items():
            wanted = BlockState.OWNED if num_owners == 1 else BlockState.SHARED
            assert running.block_states[block_id] == wanted
        for sequence, table in zip(running.sequences, tables, strict=True):
            assert sequence.state == "running" and sequence.num_prompt == len(PROMPT)
            assert sequence.num_prompt <= sequence.num_computed <= sequence.num_tokens <= len(PROMPT) + 80
            assert len(table) * BLOCK_SIZE >= sequence.num_computed
        assert [sequence.num_cached_tokens for sequence in running.sequences] == [0, 32]
        assert running.gauges["num_running_sequences"] == 2
        for request_id in (1, 2):
            gateway.wait_end(request_id)
        ended = ask_until(gateway, lambda found: not found.sequences)
        states = Counter(ended.block_states)
        assert not states[BlockState.OWNED] and not states[BlockState.SHARED] and states[BlockState.CACHED]
        assert ended.counters["generated_tokens_total"] == 160
        assert set(ended.quantiles) == {"queue", "first_token", "e2e"}
        assert ended.quantiles["first_token"] == sorted(ended.quantiles["first_token"])


def test_steps_are_recorded_in_their_order() -> None:
    with serving(ScriptedExecutor(block_size=BLOCK_SIZE)) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        gateway.send(submission(1, PROMPT, max_tokens=9))
        gateway.wait_end(1)
        steps = ask_until(gateway, lambda found: len(found.steps) == 9).steps
        assert [step.step for step in steps] == list(range(steps[0].step, steps[0].step + 9))
        assert (steps[0].num_prefill_tokens, steps[0].num_prefills, steps[0].num_decodes) == (len(PROMPT), 1, 0)
        assert {(step.num_prefill_tokens, step.num_decodes) for step in steps[1:]} == {(0, 1)}
        assert all(before.ended_s < after.ended_s for before, after in itertools.pairwise(steps))


def test_however_often_it_is_asked_for_it_is_made_four_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    num_made = 0
    take = snapshot_module.Snapshots._take

    def counted(self: snapshot_module.Snapshots, now_s: float) -> Snapshot:
        nonlocal num_made
        num_made += 1
        return take(self, now_s)

    monkeypatch.setattr(snapshot_module.Snapshots, "_take", counted)
    with serving() as engine, WireGateway(engine.endpoint) as first, WireGateway(engine.endpoint) as second:
        first.wait_for(Ready)
        second.wait_for(Ready)
        began_s = time.monotonic()
        for query_id in range(200):
            assert (ask(first, query_id).query_id, ask(second, 1000).query_id) == (query_id, 1000)
        assert num_made <= 1 + (time.monotonic() - began_s) / snapshot_module.MIN_PERIOD_S


def test_a_pool_too_large_to_be_drawn_is_told_of_in_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "MAX_SHOWN_BLOCKS", 100)
    with serving(ScriptedExecutor(num_blocks=101, step_s=0.02)) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        gateway.send(submission(1, PROMPT, max_tokens=200))
        gateway.wait_tokens(1, 1)
        found = ask_until(gateway, lambda found: found.sequences)
        assert found.block_states == b"" and found.sequences[0].block_table == b""
        assert found.gauges["num_allocated_blocks"] >= 3


def test_an_engine_that_loads_says_so() -> None:
    with serving(ScriptedExecutor(load_s=2.0)) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.send(GetSnapshot(1))
        assert gateway.wait_for(WireError).code == "not_ready"
