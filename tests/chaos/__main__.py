"""python -m tests.chaos --seed N --minutes M [--streams K]: one run; prints its report, ends with 1 if it is bad."""

import argparse
import asyncio
import sys

from tests.chaos.run import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="with faults; the streams that live then may finish"
    )
    parser.add_argument("--streams", type=int, default=64, help="at once")
    options = parser.parse_args()
    report = asyncio.run(run(options.seed, 60 * options.minutes, options.streams))
    print(report)
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
