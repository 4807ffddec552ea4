"""Who may go on to the engine now: the wait for one that starts, its bound, and the drain's closed door."""

from collections import Counter
from typing import Final

from gateway.engine_client import EngineClient, EngineUnavailable
from gateway.turnstile import Turnstile
from streamkv.errors import StreamKVError
from streamkv.protocol import Ready

MAX_WAITING: Final = 2048
"""Requests that wait for the engine to be ready; each holds its body."""
MAX_WAITING_TOKENS: Final = 8 * 1024 * 1024
"""Of the prompts of those who wait, some 16 bytes each with the text. A longer one may wait alone."""
DRAIN_RETRY_S: Final = 5.0


class UnknownModel(StreamKVError):
    """The request names a model that is not served here."""

    def __init__(self, name: str, served: str) -> None:
        super().__init__(f"the model {name!r} does not exist here; this server has {served!r}")


class Admission:
    """One gateway's door."""

    def __init__(self, engine: EngineClient, startup_wait_s: float) -> None:
        self._engine = engine
        self._startup_wait_s = startup_wait_s
        self.is_draining = False
        self.turnstile = Turnstile()
        """What begins something passes it first."""
        self.refusals = Turnstile()
        """What is refused for want of an API key passes this one."""
        self.num_waiting = self.num_waiting_tokens = 0
        self.shed: Counter[str] = Counter()
        """Requests that were turned away here, by reason."""

    def check(self) -> None:
        """Raises EngineUnavailable when no request is taken whatever it waits."""
        if self.is_draining:
            self.shed["draining"] += 1
            raise EngineUnavailable("the server is shutting down and takes no new work", DRAIN_RETRY_S)

    async def enter(self, num_tokens: int = 0) -> Ready:
        """The engine's facts, when it takes work. num_tokens: of the prompt that waits. Raises EngineUnavailable."""
        self.check()
        if self._engine.is_ready:
            return await self._engine.wait_ready(0)
        is_full = self.num_waiting_tokens + num_tokens > MAX_WAITING_TOKENS and self.num_waiting_tokens > 0
        if is_full or self.num_waiting >= MAX_WAITING:
            self.shed["too_many_wait"] += 1
            raise EngineUnavailable("too many requests wait for the engine to be ready", DRAIN_RETRY_S)
        self.num_waiting += 1
        self.num_waiting_tokens += num_tokens
        try:
            ready = await self._engine.wait_ready(self._startup_wait_s)
        except EngineUnavailable:
            self.shed["engine_not_ready"] += 1
            raise
        finally:
            self.num_waiting -= 1
            self.num_waiting_tokens -= num_tokens
        self.check()
        return ready

    def drain(self) -> None:
        """Take nothing new."""
        self.is_draining = True
