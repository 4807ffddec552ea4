"""How many examples a property test tries: few in `make test`, which people wait for, more in `make test-all`."""

import os


def examples(few: int, many: int) -> int:
    """TEST_ALL=1, which `make test-all` sets, asks for many."""
    return many if os.environ.get("TEST_ALL") == "1" else few
