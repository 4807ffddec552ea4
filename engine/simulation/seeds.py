"""Many seeds over several processes, and a failing one cut down to what it needs."""

import gc
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Final

from engine.simulation.scenario import Scenario, make_scenario
from engine.simulation.simulation import SimulationFailure, Summary, run_scenario

_MOST_CPU_S: Final = 60
"""Of one seed: more than a hundred times what it needs, so it hangs."""
_SEEDS_AT_ONCE: Final = 5


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a seed came to."""

    seed: int
    failure: str
    """Empty: every promise was kept."""
    summary: Summary | None


def run_seed(seed: int) -> Outcome:
    """Never raises: a fault of any kind is the outcome."""
    try:
        return Outcome(seed, "", run_scenario(make_scenario(seed)))
    except Exception as fault:
        if isinstance(fault, SimulationFailure):
            return Outcome(seed, str(fault), None)
        frames = [f"{frame.name}:{frame.lineno}" for frame in traceback.extract_tb(fault.__traceback__)[-3:]]
        return Outcome(seed, f"{type(fault).__name__}: {fault} in {' > '.join(frames)}", None)


def run_seeds(seeds: Sequence[int], jobs: int) -> Iterator[Outcome]:
    """Each seed's outcome, in the order in which they are done."""
    parts = [seeds[start : start + _SEEDS_AT_ONCE] for start in range(0, len(seeds), _SEEDS_AT_ONCE)]
    if jobs == 1:
        for part in parts:
            yield from _run_part(part)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(_run_part, part) for part in parts]):
            yield from done.result()


def _run_part(seeds: Sequence[int]) -> list[Outcome]:
    return [_run_limited(seed) for seed in seeds]


def _run_limited(seed: int) -> Outcome:
    """Time of this process's own, so that a busy machine makes no difference."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"took more than {_MOST_CPU_S} s of CPU time")

    previous = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, _MOST_CPU_S)
    gc.disable()  # a seed makes little garbage that only it could find, and the search costs a tenth of the time
    try:
        return run_seed(seed)
    finally:
        gc.enable()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, previous)


def shrink(scenario: Scenario, failure: str) -> Scenario:
    """The smallest scenario found that fails in the same way: without most requests, restarts and faults.

    Leaves out ever smaller parts as long as that changes nothing (delta debugging: Zeller, Hildebrandt 2002).
    """
    kind = _kind(failure)

    def fails(smaller: Scenario) -> bool:
        try:
            run_scenario(smaller)
        except SimulationFailure as fault:
            return _kind(str(fault)) == kind
        return False

    for smaller in (
        replace(scenario, meddle_odds=0.0),
        replace(scenario, restarts=[]),
        replace(scenario, meddle_odds=0.0, restarts=[]),
    ):
        if fails(smaller):
            scenario = smaller
    kept = _smallest([request.index for request in scenario.requests], lambda some: fails(_only(scenario, some)))
    return _only(scenario, kept)


def _smallest(items: list[int], is_enough: Callable[[list[int]], bool]) -> list[int]:
    num_parts = 2
    while len(items) > 1:
        size = -(-len(items) // num_parts)
        for start in range(0, len(items), size):
            fewer = items[:start] + items[start + size :]
            if fewer and is_enough(fewer):
                items, num_parts = fewer, max(2, num_parts - 1)
                break
        else:
            if size == 1:
                break
            num_parts = min(len(items), num_parts * 2)
    return items


def _only(scenario: Scenario, indices: list[int]) -> Scenario:
    kept = set(indices)
    requests = [r for r in scenario.requests if r.index in kept]
    return replace(scenario, requests=[r if r.previous in kept else replace(r, previous=-1) for r in requests])


def _kind(failure: str) -> str:
    """What went wrong, without the numbers."""
    return "".join(letter for letter in failure.partition(": ")[2][:60] if not letter.isdigit())
