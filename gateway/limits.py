"""How much one caller may ask for: requests and tokens per minute, and requests at once.

A budget per minute is a bucket that holds one minute's worth and fills evenly. A request is let in while each of its
caller's buckets holds at least one; it takes one request at once, the tokens of its prompt when they are known, and
those of its answer as they come. So nobody is refused for what a request might take: what it takes beyond the bucket
is a debt that must fill up again before the next is let in.

The `Ledger` holds all state, takes and gives plain data and never waits, so that one of them can serve several
gateways; who asks it across processes implements `Books`.
"""

import math
import time
from collections.abc import Callable, Collection
from typing import Final, Protocol

import msgspec

from streamkv.errors import StreamKVError

REQUESTS: Final = "requests"
TOKENS: Final = "tokens"
CONCURRENCY: Final = "concurrency"
BUSY_RETRY_S: Final = 1.0
"""When to try again with all places taken: nobody knows how long the caller's own requests take."""
_MINUTE_S: Final = 60.0
_ROUNDING: Final = 1e-6
"""A bucket that lacks no more than this counts as filled: whoever waited as long as told is let in."""


class Allowance(msgspec.Struct, frozen=True, array_like=True):
    """A caller's limits. 0: no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Of prompts and answers together; prompt tokens that were found in the cache count too."""
    max_concurrent: int = 0
    """Requests that were let in and have not ended."""

    @property
    def is_limited(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute or self.max_concurrent)


NO_LIMITS: Final = Allowance()


class Standing(msgspec.Struct, frozen=True, array_like=True):
    """What a caller has left."""

    allowance: Allowance
    num_requests: float = 0.0
    """In the bucket; a fraction is on its way to the next."""
    num_tokens: float = 0.0
    """In the bucket; under 0 in debt."""
    num_live: int = 0

    def after(self, num_tokens: int) -> "Standing":
        """The same with so many tokens less."""
        if not self.allowance.tokens_per_minute:
            return self
        return msgspec.structs.replace(self, num_tokens=self.num_tokens - num_tokens)


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """The answer to who wants in."""

    standing: Standing
    refused_by: str = ""
    """Empty: let in. Else requests, tokens or concurrency, the one that takes longest."""
    retry_after_s: float = 0.0


class RateLimited(StreamKVError):
    """The caller has used up its share for now."""

    def __init__(self, verdict: Verdict) -> None:
        allowance = verdict.standing.allowance
        rule = {
            REQUESTS: f"this API key's limit of {allowance.requests_per_minute} requests per minute is reached",
            TOKENS: f"this API key's limit of {allowance.tokens_per_minute} tokens per minute is reached",
            CONCURRENCY: f"{allowance.max_concurrent} requests of this API key run, which is the most at once",
        }[verdict.refused_by]
        super().__init__(f"{rule}; try again in {format_seconds(verdict.retry_after_s)}")
        self.refused_by = verdict.refused_by
        self.retry_after_s = verdict.retry_after_s
        self.standing = verdict.standing


class _Bucket:
    """Fills by `limit` a minute, to at most `limit`. With limit 0 it is not asked."""

    __slots__ = ("_at_s", "level", "limit")

    def __init__(self, limit: int, now_s: float) -> None:
        self.limit = limit
        self.level = float(limit)
        self._at_s = now_s

    def fill(self, limit: int, now_s: float) -> None:
        """Up to now by the old limit, from now on by this one. A limit that was none begins full."""
        self.level = min(self.limit, self.level + max(0.0, now_s - self._at_s) * self.limit / _MINUTE_S)
        self._at_s = now_s
        if limit != self.limit:
            self.level = min(self.level, limit) if self.limit else float(limit)
            self.limit = limit

    def wait_s(self) -> float:
        """Until it holds one."""
        lacking = 1.0 - self.level
        return lacking * _MINUTE_S / self.limit if self.limit and lacking > _ROUNDING else 0.0


class _Account:
    __slots__ = ("allowance", "num_live", "requests", "tokens")

    def __init__(self, allowance: Allowance, now_s: float) -> None:
        self.allowance = allowance
        self.requests = _Bucket(allowance.requests_per_minute, now_s)
        self.tokens = _Bucket(allowance.tokens_per_minute, now_s)
        self.num_live = 0

    def update(self, allowance: Allowance, now_s: float) -> None:
        self.allowance = allowance
        self.requests.fill(allowance.requests_per_minute, now_s)
        self.tokens.fill(allowance.tokens_per_minute, now_s)

    def standing(self) -> Standing:
        return Standing(self.allowance, self.requests.level, self.tokens.level, self.num_live)


class Ledger:
    """What every caller has used. Callers are known by the names of their keys, so it holds no more than there are."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds."""
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def admit(self, name: str, allowance: Allowance) -> Verdict:
        """Let a request in and count it, or say when to come again; then nothing was counted."""
        account = self._account(name, allowance)
        waits = {REQUESTS: account.requests.wait_s(), TOKENS: account.tokens.wait_s()}
        if allowance.max_concurrent and account.num_live >= allowance.max_concurrent:
            waits[CONCURRENCY] = BUSY_RETRY_S
        longest = max(waits, key=waits.__getitem__)
        if waits[longest]:
            return Verdict(account.standing(), longest, waits[longest])
        account.num_live += 1
        if account.requests.limit:
            account.requests.level -= 1
        return Verdict(account.standing())

    def join(self, name: str, allowance: Allowance) -> Standing:
        """Count a request that goes on here and was let in before, at another gateway perhaps."""
        account = self._account(name, allowance)
        account.num_live += 1
        return account.standing()

    def look(self, name: str, allowance: Allowance) -> Standing:
        """What is left, with nothing counted."""
        return self._account(name, allowance).standing()

    def charge(self, name: str, num_tokens: int) -> None:
        """Tokens that a request of this caller took, into debt if need be."""
        account = self._accounts.get(name)
        if account is not None and account.tokens.limit:
            account.update(account.allowance, self._clock())
            account.tokens.level -= num_tokens

    def release(self, name: str) -> None:
        """A request that was let in or joined has ended."""
        account = self._accounts.get(name)
        if account is not None and account.num_live:
            account.num_live -= 1

    def keep(self, names: Collection[str]) -> None:
        """Forget the callers that are not among these, but those of whom something lives."""
        for name in [name for name, account in self._accounts.items() if name not in names and not account.num_live]:
            del self._accounts[name]

    def _account(self, name: str, allowance: Allowance) -> _Account:
        now_s = self._clock()
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = _Account(allowance, now_s)
        else:
            account.update(allowance, now_s)
        return account


class Books(Protocol):
    """The ledger, as gateways ask it: in the own process, or in another. Means what `Ledger` means.

    What waits for an answer may take a round trip; what counts is only sent, in order.
    """

    async def admit(self, name: str, allowance: Allowance) -> Verdict: ...

    async def look(self, name: str, allowance: Allowance) -> Standing: ...

    def join(self, name: str, allowance: Allowance) -> None: ...

    def charge(self, name: str, num_tokens: int) -> None: ...

    def release(self, name: str) -> None: ...

    def keep(self, names: Collection[str]) -> None: ...


class OwnBooks:
    """A ledger of this process alone."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._ledger = ledger or Ledger()

    async def admit(self, name: str, allowance: Allowance) -> Verdict:
        return self._ledger.admit(name, allowance)

    async def look(self, name: str, allowance: Allowance) -> Standing:
        return self._ledger.look(name, allowance)

    def join(self, name: str, allowance: Allowance) -> None:
        self._ledger.join(name, allowance)

    def charge(self, name: str, num_tokens: int) -> None:
        self._ledger.charge(name, num_tokens)

    def release(self, name: str) -> None:
        self._ledger.release(name)

    def keep(self, names: Collection[str]) -> None:
        self._ledger.keep(names)


class Permit:
    """A request that was let in. It has several holders, its HTTP request and its streams, and is given back when the
    last of them lets go: a stream may outlive the request that began it, and still counts."""

    def __init__(self, books: Books, name: str, standing: Standing) -> None:
        """With one holder: who made it."""
        self._books = books
        self._name = name
        self._num_holders = 1
        self.standing = standing
        """As when it was let in, less what it took itself."""

    def hold(self) -> None:
        self._num_holders += 1

    def drop(self) -> None:
        self._num_holders -= 1
        if self._num_holders == 0:
            self._books.release(self._name)

    def charge(self, num_tokens: int) -> None:
        if num_tokens and self.standing.allowance.tokens_per_minute:
            self.standing = self.standing.after(num_tokens)
            self._books.charge(self._name, num_tokens)


def rate_limit_headers(standing: Standing) -> dict[str, str]:
    """x-ratelimit-*, as OpenAI names and writes them, of those budgets that have a limit. `reset` is when the whole
    budget is there again."""
    found: dict[str, str] = {}
    allowance = standing.allowance
    for what, limit, level in (
        (REQUESTS, allowance.requests_per_minute, standing.num_requests),
        (TOKENS, allowance.tokens_per_minute, standing.num_tokens),
    ):
        if limit:
            found[f"x-ratelimit-limit-{what}"] = str(limit)
            found[f"x-ratelimit-remaining-{what}"] = str(max(0, math.floor(level + _ROUNDING)))
            found[f"x-ratelimit-reset-{what}"] = format_seconds(max(0.0, limit - level) * _MINUTE_S / limit)
    return found


def format_seconds(seconds: float) -> str:
    """As OpenAI writes a time that is left: 120ms, 7.66s, 2m30s. Rounded up, never to less than there is."""
    if seconds < 1.0:
        return f"{math.ceil(1000 * seconds - _ROUNDING)}ms"
    if seconds < _MINUTE_S - 0.01:
        return f"{math.ceil(100 * seconds - _ROUNDING) / 100:g}s"
    minutes, rest = divmod(math.ceil(seconds - _ROUNDING), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + f"{minutes}m{rest}s"
