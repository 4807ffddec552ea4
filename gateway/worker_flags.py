"""What a server tells a gateway that it starts as one of several, at the end of its flags."""

from collections.abc import Sequence
from typing import Final

from streamkv.errors import ConfigError

AS_WORKER: Final = "--as-worker"
"""Before the link's path and the worker's number."""


def split_worker_flags(argv: Sequence[str]) -> tuple[list[str], tuple[str, int] | None]:
    """A gateway's flags → (its own flags, the link's path and its number if it is one of several).

    Raises ConfigError for a marker that is not followed by both.
    """
    flags = list(argv)
    if AS_WORKER not in flags:
        return flags, None
    place = flags.index(AS_WORKER)
    if len(flags) != place + 3 or not flags[place + 2].isdecimal():
        raise ConfigError(AS_WORKER, "is for the gateways that a server starts itself; use --gateway-workers")
    return flags[:place], (flags[place + 1], int(flags[place + 2]))
