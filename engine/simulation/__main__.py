"""The real scheduler and block manager over a simulated device and a virtual clock.

--seed N [--trace] [--shrink]     a random workload with faults, everything checked, and what happened in it
--seeds FIRST:END [--jobs J]      many; those that fail are named with the command that shows them
--workload mixed [...]            throughput, latency and use of memory beside static batching on the same device: an
                                  8B model on one H200, by a roofline
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence

from engine.simulation.comparison import KV_BYTES_PER_TOKEN, MAX_LEN, compare, mixed_arrivals, table
from engine.simulation.scenario import make_scenario
from engine.simulation.seeds import Outcome, run_seeds, shrink
from engine.simulation.simulation import SimulationFailure, Trace, run_scenario


def command_for(seed: int) -> str:
    """What shows a failing seed."""
    return f"python -m engine.simulation --seed {seed} --trace"


def main(argv: Sequence[str] | None = None) -> int:
    """0: every promise was kept; 1: one was broken; 2: wrong flags."""
    parser = argparse.ArgumentParser(
        prog="streamkv simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="run this seed")
    which.add_argument("--seeds", type=_range, metavar="FIRST:END", help="run these seeds, END left out")
    which.add_argument("--workload", choices=["mixed"], help="play this workload in every mode")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    parser.add_argument(
        "--shrink", action="store_true", help="leave out what a failure does not need, and print the rest"
    )
    parser.add_argument("--jobs", type=_positive, default=1, help="processes")
    parser.add_argument("--requests", type=_positive, default=768, help="how many; default 768")
    parser.add_argument(
        "--rate", type=float, default=0.0, help="requests a second, Poisson; 0, the default: all at once"
    )
    parser.add_argument("--kv-gib", type=float, default=16.0, help="KV memory, GiB; default 16")
    parser.add_argument("--max-num-seqs", type=_positive, default=1024, help="sequences at once; default 1024")
    parser.add_argument(
        "--workload-seed", type=int, default=0, help="of the lengths, as streamkv bench --seed; default 0"
    )
    arguments = parser.parse_args(argv)
    if arguments.workload is not None:
        pool_tokens = int(arguments.kv_gib * 2**30) // KV_BYTES_PER_TOKEN
        if pool_tokens < MAX_LEN or arguments.rate < 0:
            parser.error(f"--kv-gib must hold at least one sequence of {MAX_LEN} tokens, --rate must not be negative")
        arrivals = mixed_arrivals(arguments.requests, arguments.rate, arguments.workload_seed)
        print(table(compare(arrivals, ("paged", "static", "exact"), pool_tokens, arguments.max_num_seqs)))
        return 0
    if arguments.seed is not None:
        return _show(arguments.seed, arguments.trace, arguments.shrink)
    return _run_many(arguments.seeds, arguments.jobs)


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text!r}")
    return int(text)


def _range(text: str) -> range:
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise argparse.ArgumentTypeError(f"must be as 0:500, got {text!r}")
    return range(int(first), int(end))


def _print(at_s: float, text: str) -> None:
    print(f"{at_s:12.6f}  {text}")


def _show(seed: int, is_traced: bool, is_shrunk: bool) -> int:
    scenario = make_scenario(seed)
    trace: Trace | None = _print if is_traced else None
    try:
        if is_shrunk:
            run_scenario(scenario)
        else:
            print(f"seed {seed}: {scenario.setup}")
            print(f"seed {seed}: {run_scenario(scenario, trace)}")
        return 0
    except SimulationFailure as failure:
        if not is_shrunk:
            print(f"seed {seed} FAILED {failure}")
            return 1
        smaller = shrink(scenario, str(failure))
    print(f"seed {seed}, cut down to {len(smaller.requests)} requests, {smaller.setup}")
    try:
        run_scenario(smaller, _print)
    except SimulationFailure as failure:
        print(f"seed {seed} FAILED {failure}")
    return 1


def _run_many(seeds: Sequence[int], jobs: int) -> int:
    failed: list[Outcome] = []
    totals: Counter[str] = Counter()
    for outcome in run_seeds(seeds, jobs):
        if outcome.summary is None:
            failed.append(outcome)
            print(f"seed {outcome.seed} FAILED {outcome.failure}\n    {command_for(outcome.seed)}", flush=True)
            continue
        totals.update(outcome.summary.counts())
    print(f"{len(seeds)} seeds, {len(failed)} failed; {', '.join(f'{n} {name}' for name, n in totals.items())}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
