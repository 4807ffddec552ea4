"""Flow control by the client: how many tokens it still takes, and the outlet that counts them.

A generation without credit does not come here: what a token costs it is unchanged.
"""

from collections.abc import Callable

from gateway.deltas import Delta
from gateway.outlet import Ending, Outlet, StreamFacts, Usage
from streamkv.errors import InvalidField, StreamKVError

MAX_TOKENS = 2**31 - 1


class Credit:
    """Tokens that a client still takes of one generation, of all its choices together. Below 0 by those that were on
    their way when it was used up."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    @property
    def is_used_up(self) -> bool:
        return self.num_tokens <= 0

    def grant(self, num_tokens: int) -> None:
        """Raises InvalidField when there would be more than MAX_TOKENS."""
        if self.num_tokens + num_tokens > MAX_TOKENS:
            raise InvalidField("tokens", f"would take the credit over {MAX_TOKENS} tokens; it has {self.num_tokens}")
        self.num_tokens += num_tokens


class CreditedOutlet:
    """Stands before another outlet. `on_used_up` is called with the token that takes the credit to 0."""

    def __init__(self, outlet: Outlet, credit: Credit, on_used_up: Callable[[], None]) -> None:
        self._outlet = outlet
        self._credit = credit
        self._on_used_up = on_used_up
        self._num_known: list[int] = []
        """Of each choice, what its client has had before, and is not charged for again."""

    def begin(self, stream: StreamFacts) -> None:
        assert stream.state is not None
        self._num_known = [stream.known.mark(choice).num_tokens for choice in range(stream.state.sampling.n)]
        self._outlet.begin(stream)

    def piece(self, choice: int, text: bytes, token_id: int) -> None:
        self._outlet.piece(choice, text, token_id)
        self._charge(choice, 1)

    def delta(self, choice: int, delta: Delta) -> None:
        self._outlet.delta(choice, delta)
        if delta.token_ids:
            self._charge(choice, len(delta.token_ids))

    def end(self, choice: int, ending: Ending) -> None:
        self._outlet.end(choice, ending)

    def flush(self) -> None:
        self._outlet.flush()

    def close(self, usage: Usage, failure: StreamKVError | None) -> None:
        self._outlet.close(usage, failure)

    def _charge(self, choice: int, num_tokens: int) -> None:
        free = min(num_tokens, self._num_known[choice])
        if free:
            self._num_known[choice] -= free
            num_tokens -= free
        had_some = not self._credit.is_used_up
        self._credit.num_tokens -= num_tokens
        if had_some and self._credit.is_used_up:
            self._on_used_up()
