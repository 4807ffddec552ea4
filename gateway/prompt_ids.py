"""The ids of a prompt that is long: small, and made small without a stop of the event loop.

Who goes through a list of half a million ids in one call of C keeps the interpreter to itself for some 15 ms, and for
longer where other programs want the cores, too. So such a list is gone through in parts, on a thread.
"""

from array import array
from collections.abc import Sequence
from typing import Final

INLINE_IDS: Final = 4096
"""So many cost less than a thread's round trip."""
_PART: Final = 16384


def compact(ids: list[int]) -> Sequence[int]:
    """The ids as an array of 4 bytes each. The list, which takes nine times that, is empty afterwards."""
    packed = array("i")
    for start in range(0, len(ids), _PART):
        packed.extend(ids[start : start + _PART])
    while ids:
        del ids[-_PART:]
    return packed
