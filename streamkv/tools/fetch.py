"""`streamkv fetch [MODEL]`: have a model's files on this machine before the first start."""

import argparse
import sys

from streamkv.errors import StreamKVError
from streamkv.model_files import resolve

BAR_WIDTH = 30


class ProgressLine:
    """A bar that is drawn over itself on a terminal; elsewhere a line for each stage."""

    def __init__(self) -> None:
        self._stage = ""
        self._is_terminal = sys.stderr.isatty()

    def report(self, stage: str, percent: float) -> None:
        """As model_files.ReportProgress."""
        if self._is_terminal:
            filled = round(BAR_WIDTH * percent / 100)
            end = "\n" if stage != self._stage and self._stage else ""
            bar = "█" * filled + "░" * (BAR_WIDTH - filled)
            print(f"{end}\r{bar} {percent:3.0f} %  {stage}\x1b[K", end="", file=sys.stderr, flush=True)
        elif stage != self._stage:
            print(stage, file=sys.stderr, flush=True)
        self._stage = stage

    def close(self) -> None:
        """Leave the bar's line."""
        if self._is_terminal and self._stage:
            print(file=sys.stderr)


def main() -> int:
    """Fetch the model if it is not here yet, and print where it lies."""
    parser = argparse.ArgumentParser(
        prog="streamkv fetch", description="Downloads a model, so that the first `streamkv serve` need not."
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", default="default", help="as for --model of streamkv serve")
    model = parser.parse_args().model
    progress = ProgressLine()
    try:
        files = resolve(model, progress.report)
    except StreamKVError as error:
        progress.close()
        print(f"streamkv fetch: {error}", file=sys.stderr)
        return 1
    progress.close()
    print(files.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
