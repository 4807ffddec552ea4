"""Random workloads and faults: every promise is kept on hundreds of seeds, and none is broken unnoticed."""

from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from engine.kv.block_manager import BlockManager
from engine.kv.prefix_tree import PrefixTree
from engine.scheduling import queue
from engine.scheduling.scheduler import Scheduler
from engine.simulation.__main__ import main
from engine.simulation.scenario import NUM_REQUESTS, make_scenario
from engine.simulation.seeds import Outcome, run_seed, run_seeds, shrink
from engine.simulation.simulation import SimulationFailure, run_scenario

JOBS = 2


def check(seeds: range) -> Counter[str]:
    """Run them; what was seen in them, added up."""
    seen: Counter[str] = Counter()
    failed: list[Outcome] = []
    for outcome in run_seeds(seeds, JOBS):
        if outcome.summary is None:
            failed.append(outcome)
        else:
            seen.update(outcome.summary.counts())
    commands = [f"python -m engine.simulation --seed {o.seed} --trace   # {o.failure}" for o in failed]
    assert not failed, "\n".join(["promises were broken:", *commands])
    return seen


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.long) for first in range(50, 500, 50))])
def test_every_promise_is_kept_on_five_hundred_seeds(first: int):
    seen = check(range(first, first + 50))
    for name in ("preempted to recompute", "preempted to swap", "tokens found in the cache", "ended with abort"):
        assert seen[name] > 40, f"{name}: {seen}"
    assert seen["ended with error"] > 10 and seen["engine lives"] > 55


def test_a_seed_stands_for_at_least_fifty_requests_and_always_the_same():
    traces: list[list[tuple[float, str]]] = [[], []]
    for trace in traces:
        scenario = make_scenario(7)
        assert len(scenario.requests) == NUM_REQUESTS == 50
        run_scenario(scenario, lambda at_s, text, trace=trace: trace.append((at_s, text)))
    assert traces[0] == traces[1] and len(traces[0]) > 200


def test_seeds_differ_in_every_setting():
    setups = [make_scenario(seed).setup for seed in range(60)]
    for name in type(setups[0]).__dataclass_fields__:
        assert len({repr(getattr(setup, name)) for setup in setups}) > 1, f"{name} is always the same"


# What must not go unnoticed: each breaks one thing.


def write_into_shared_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockManager, "_writes_shared", lambda self, sequence, end: False)


def share_a_token_too_many(patch: pytest.MonkeyPatch) -> None:
    nearest = PrefixTree.nearest

    def too_many(self, node, wanted):
        child, common = nearest(self, node, wanted)
        return child, common + (child is not None and common * 4 < len(child.key))

    patch.setattr(PrefixTree, "nearest", too_many)


def forget_a_copy(patch: pytest.MonkeyPatch) -> None:
    share = BlockManager.share
    patch.setattr(BlockManager, "share", lambda self, sequence, match: share(self, sequence, match) and None)


def keep_the_blocks_of_ended_sequences(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockManager, "forget", lambda self, sequence: None)


def share_between_tenants(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("engine.sequence.Request.prefix_namespace", property(lambda self: ("", "")))


def call_length_a_stop(patch: pytest.MonkeyPatch) -> None:
    ending = Scheduler._ending

    def nicer(self, sequence):
        found = ending(self, sequence)
        return ("stop", "eos", sequence.token_ids[-1]) if found and found[0] == "length" else found

    patch.setattr(Scheduler, "_ending", nicer)


def miss_deadlines(patch: pytest.MonkeyPatch) -> None:
    expire = Scheduler.expire

    def late(self):
        self._clock, clock = lambda: -1.0, self._clock
        outputs = expire(self)
        self._clock = clock
        return outputs

    patch.setattr(Scheduler, "expire", late)


def trust_damaged_blocks(patch: pytest.MonkeyPatch) -> None:
    finish = Scheduler.finish_transfers

    def trusting(self, results):
        return finish(self, [msgspec.structs.replace(result, failed=[]) for result in results])

    patch.setattr(Scheduler, "finish_transfers", trusting)


def serve_the_latest_first(patch: pytest.MonkeyPatch) -> None:
    add = queue._Line.add

    def reversed_arrival(self, key, sequence):
        add(self, (key[0], key[1], -key[2], key[3]), sequence)

    remove = queue._Line.remove

    def reversed_remove(self, key, sequence):
        remove(self, (key[0], key[1], -key[2], key[3]), sequence)

    patch.setattr(queue._Line, "add", reversed_arrival)
    patch.setattr(queue._Line, "remove", reversed_remove)


def never_age(patch: pytest.MonkeyPatch) -> None:
    make = queue.WaitingQueue.__init__
    patch.setattr(queue.WaitingQueue, "__init__", lambda self, shares, clock, ageing_s: make(self, shares, clock))


@pytest.mark.parametrize(
    "breaking",
    [
        write_into_shared_blocks,
        share_a_token_too_many,
        forget_a_copy,
        keep_the_blocks_of_ended_sequences,
        share_between_tenants,
        call_length_a_stop,
        miss_deadlines,
        trust_damaged_blocks,
        serve_the_latest_first,
        never_age,
    ],
    ids=lambda breaking: breaking.__name__,
)
def test_a_broken_promise_is_found(breaking: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch):
    breaking(monkeypatch)
    assert any(run_seed(seed).failure for seed in range(40))


def test_a_failing_seed_names_the_command_that_shows_it(monkeypatch, capsys):
    forget_a_copy(monkeypatch)
    seed = next(seed for seed in range(40) if run_seed(seed).failure)
    assert main(["--seeds", f"{seed}:{seed + 1}"]) == 1
    printed = capsys.readouterr().out
    assert f"seed {seed} FAILED at" in printed and f"python -m engine.simulation --seed {seed} --trace" in printed
    assert main(["--seed", str(seed), "--trace"]) == 1
    assert "step 0:" in capsys.readouterr().out


def test_a_failing_seed_is_cut_down_to_what_it_needs(monkeypatch):
    call_length_a_stop(monkeypatch)
    scenario = make_scenario(1)
    with pytest.raises(SimulationFailure) as failure:
        run_scenario(scenario)
    smaller = shrink(scenario, str(failure.value))
    assert len(smaller.requests) == 1 and not smaller.restarts and not smaller.meddle_odds
    with pytest.raises(SimulationFailure):
        run_scenario(smaller)


def test_wrong_flags_are_told(capsys):
    for flags in (["--seeds", "5:5"], ["--seeds", "all"], ["--seed", "1", "--jobs", "0"], []):
        with pytest.raises(SystemExit) as ended:
            main(flags)
        assert ended.value.code == 2
    capsys.readouterr()
