"""A stream without an engine, and an outlet that keeps what it is told."""

import json

from gateway.cursor import FROM_START, Cursor
from gateway.deltas import Delta, TokenLogprob
from gateway.engine_client import EngineClient
from gateway.outlet import Ending, Outlet, StreamFacts, Usage
from gateway.streams import Stream
from streamkv.errors import StreamKVError
from streamkv.protocol import Attached
from tests.support.running_gateway import small_tokenizer
from tests.support.scripted_engine import free_endpoint


class Told:
    """An outlet that keeps its deltas."""

    def __init__(self) -> None:
        self.deltas: list[tuple[int, Delta]] = []
        self.pieces: list[bytes] = []
        self.ends: list[Ending] = []
        self.usage: Usage | None = None
        self.failure: StreamKVError | None = None
        self.num_closed = 0

    def begin(self, stream: StreamFacts) -> None: ...

    def piece(self, choice: int, text: bytes, token_id: int) -> None:
        self.pieces.append(text)

    def delta(self, choice: int, delta: Delta) -> None:
        self.deltas.append((choice, delta))

    def end(self, choice: int, ending: Ending) -> None:
        self.ends.append(ending)

    def flush(self) -> None: ...

    def close(self, usage: Usage, failure: StreamKVError | None) -> None:
        self.usage, self.failure = usage, failure
        self.num_closed += 1

    def of(self, choice: int = 0) -> tuple[str, list[int], list[TokenLogprob]]:
        """All text, tokens and log probabilities of a choice."""
        found = [delta for index, delta in self.deltas if index == choice]
        return (
            json.loads(b'"' + b"".join(delta.text for delta in found) + b'"'),
            [token_id for delta in found for token_id in delta.token_ids],
            [entry for delta in found for entry in delta.logprobs],
        )


def new_stream(
    outlet: Outlet, tenant: str = "", known: Cursor = FROM_START, inherits: Attached | None = None
) -> Stream:
    """It has no state; its engine is not there."""
    with free_endpoint() as endpoint:
        engine = EngineClient(endpoint, heartbeat_s=1.0, engine_timeout_s=10.0)
    engine.close()
    return Stream(
        engine,
        small_tokenizer(),
        outlet,
        stream_id=b"s" * 16,
        arrived=0.0,
        on_end=lambda _: None,
        tenant=tenant,
        known=known,
        inherits=inherits,
    )
