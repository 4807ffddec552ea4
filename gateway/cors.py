"""Which web pages of other sites may read this server's answers (CORS, as the Fetch standard has it).

Keys travel in a header that a page sets itself, never in a cookie, so a page gains nothing here that any other
program with the same key does not have: an allowed page may send whatever headers its client library adds.
"""

import re
from collections.abc import Collection, Mapping
from typing import Final

ANY_ORIGIN: Final = "*"
PREFLIGHT_METHOD: Final = "OPTIONS"
_METHODS: Final = "GET, HEAD, POST, DELETE, OPTIONS"
_EXPOSED: Final = ", ".join(
    (
        "x-request-id",
        "x-stream-id",
        "retry-after",
        *(f"x-ratelimit-{part}-{what}" for what in ("requests", "tokens") for part in ("limit", "remaining", "reset")),
    )
)
"""Headers of an answer that a page may read, beside those that every page may."""
_HEADER_NAMES: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?:\s*,\s*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
_MAX_HEADER_NAMES: Final = 2048
"""Characters of the names that a preflight may ask for; client libraries have some 400."""
_REMEMBER_S: Final = 3600


class Cors:
    """The headers that a browser looks for. Without origins there are none, and browsers keep other sites out."""

    def __init__(self, origins: Collection[str]) -> None:
        """origins: in lower case, as https://example.org, or `*` for all."""
        self._origins = frozenset(origins)

    def answer_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """What goes out with the answer to a request that had these headers."""
        if not self._origins:
            return {}
        allowed = self._allowed(headers)
        vary = {} if ANY_ORIGIN in self._origins else {"Vary": "Origin"}
        if not allowed:
            return vary
        return vary | {"Access-Control-Allow-Origin": allowed, "Access-Control-Expose-Headers": _EXPOSED}

    def preflight_headers(self, method: str, headers: Mapping[str, str]) -> dict[str, str] | None:
        """The answer to a browser that asks before it sends, beside answer_headers; None when this is no such
        question, or one that is not answered with yes."""
        if method != PREFLIGHT_METHOD or "Access-Control-Request-Method" not in headers or not self._allowed(headers):
            return None
        found = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": str(_REMEMBER_S)}
        wanted = headers.get("Access-Control-Request-Headers", "").strip()
        if wanted and len(wanted) <= _MAX_HEADER_NAMES and _HEADER_NAMES.fullmatch(wanted):
            found["Access-Control-Allow-Headers"] = wanted
        return found

    def _allowed(self, headers: Mapping[str, str]) -> str:
        """The value of Access-Control-Allow-Origin, or nothing."""
        origin = headers.get("Origin", "")
        if not origin:
            return ""
        if ANY_ORIGIN in self._origins:
            return ANY_ORIGIN
        return origin if origin.lower() in self._origins else ""
