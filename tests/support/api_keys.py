"""API keys for tests, with the limits that they need."""

import hashlib

from gateway.auth import ApiKeys, Caller
from gateway.limits import Allowance

ALICE, BOB = (f"sk-{name}-0123456789abcdef" for name in ("alice", "bob"))


def keys_with(**allowances: Allowance) -> ApiKeys:
    """alice=Allowance(…): a caller named alice whose key is sk-alice-0123456789abcdef."""
    return ApiKeys(
        {
            hashlib.sha256(f"sk-{name}-0123456789abcdef".encode()).digest(): Caller(name, allowance=allowance)
            for name, allowance in allowances.items()
        }
    )


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
