"""Lengths of prompts and outputs as chats have them: what `streamkv bench` sends and `streamkv simulate` plays."""

import math
import random
from typing import Final

MIXED_PROMPTS: Final = (200, 0.9, 16, 2048)
"""Lognormal: median, sigma of the logarithm, shortest, longest; tokens."""
MIXED_OUTPUTS: Final = (150, 0.8, 8, 1024)


def mixed(dice: random.Random) -> tuple[int, int]:
    """(prompt tokens, output tokens) of the next request of workload `mixed`."""
    return _lognormal(dice, *MIXED_PROMPTS), _lognormal(dice, *MIXED_OUTPUTS)


def _lognormal(dice: random.Random, median: int, sigma: float, low: int, high: int) -> int:
    return min(max(round(dice.lognormvariate(math.log(median), sigma)), low), high)
