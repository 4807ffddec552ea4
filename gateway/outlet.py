"""Where a stream's text goes, and what it is told there: `Outlet`, and those that take nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from gateway.cursor import Cursor
from gateway.deltas import Delta
from gateway.logprobs import LogprobForms
from gateway.stream_state import StreamState
from streamkv.errors import StreamKVError

ATTACHED_ELSEWHERE: Final = "attached_elsewhere"
BROKEN_OFF: Final = "broken_off"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a choice ended, as its client is told."""

    finish_reason: str
    """stop, length, abort (cancelled, timed out, drained; as vLLM says it) or error."""
    cause: str = ""
    stop_reason: str | int | None = None
    """The stop string or stop id that ended it; None for end-of-sequence and all else."""

    @property
    def is_only_here(self) -> bool:
        """The choice goes on, for somebody else who attached to its stream, or who may."""
        return self.finish_reason == "abort" and self.cause in (ATTACHED_ELSEWHERE, BROKEN_OFF)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request: what was read, made, and found in the cache."""

    num_prompt: int
    num_output: int
    num_cached: int = 0


class StreamFacts(Protocol):
    """What an outlet may know of its stream, which has a state by then."""

    @property
    def stream_id(self) -> bytes: ...

    @property
    def state(self) -> StreamState | None: ...

    @property
    def known(self) -> Cursor:
        """What its client has of it."""

    @property
    def num_prompt(self) -> int: ...

    @property
    def prompt_token_ids(self) -> list[int]: ...

    @property
    def logprob_forms(self) -> LogprobForms | None:
        """How its log probabilities are told; None: there are none."""


class Outlet(Protocol):
    """Where a stream's text goes. Text comes as JSON-escaped UTF-8 without its quotes; called on the event loop."""

    def begin(self, stream: StreamFacts) -> None:
        """What is asked for is known: at submit, or when an attach was answered. Once, before all else but `close`."""

    def piece(self, choice: int, text: bytes, token_id: int) -> None:
        """One token's text; goes out at once, alone."""

    def delta(self, choice: int, delta: Delta) -> None:
        """New text, perhaps empty, the tokens since the last one, and what was asked for of them. Gathered until
        `flush`."""

    def end(self, choice: int, ending: Ending) -> None:
        """The one terminal event of a choice. Gathered until `flush`."""

    def flush(self) -> None:
        """What was gathered goes out in one write."""

    def close(self, usage: Usage, failure: StreamKVError | None) -> None:
        """Every choice has ended. The last call."""


class NoOutlet:
    """Takes a stream that nobody reads at the moment; its tokens stay with the stream and the engine."""

    def begin(self, stream: StreamFacts) -> None: ...

    def piece(self, choice: int, text: bytes, token_id: int) -> None: ...

    def delta(self, choice: int, delta: Delta) -> None: ...

    def end(self, choice: int, ending: Ending) -> None: ...

    def flush(self) -> None: ...

    def close(self, usage: Usage, failure: StreamKVError | None) -> None: ...


class AbandonedOutlet(NoOutlet):
    """For a stream whose client went before its attach was answered: `on_begin` decides once it is known what it is."""

    def __init__(self, on_begin: Callable[[], None]) -> None:
        self._on_begin = on_begin

    def begin(self, stream: StreamFacts) -> None:
        self._on_begin()
