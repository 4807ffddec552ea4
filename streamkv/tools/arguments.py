"""Types of command-line arguments that the tools share: each refuses what does not fit, in words."""

import argparse
import json
import math
import os
from collections.abc import Callable
from pathlib import Path


def json_object(text: str) -> dict[str, object]:
    """argparse type: a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('must be a JSON object, as {"top_k": 40}')
    return value


def number(low: float, kind: type[int] | type[float], above: bool = False) -> Callable[[str], float]:
    """argparse type: a finite number from `low`, or above it."""

    def parse_number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < low or (above and value == low):
            what = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"must be a {what} {'over' if above else 'of at least'} {low}, got {text}")
        return value

    return parse_number


def output_file(text: str) -> Path:
    """argparse type: a path that can be written, found out before the run and not after it."""
    path = Path(text)
    if not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK) or path.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {text}")
    return path
