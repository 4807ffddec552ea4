"""The streams of one request with several prompts, as one: choices are numbered on from prompt to prompt."""

import asyncio

from gateway.deltas import Delta
from gateway.outlet import Ending, Outlet, StreamFacts, Usage
from gateway.streams import Stream
from streamkv.errors import StreamKVError


class StreamGroup:
    """As a Stream to its owner, and as one stream to the outlet.

    One that fails fails them all: the others are cancelled, and their choices end with `abort`.
    """

    def __init__(self, outlet: Outlet, num_prompts: int, n: int) -> None:
        """n: choices of each prompt. Each of `parts` is the outlet of one prompt's stream, which `add` takes in."""
        self._outlet = outlet
        self._streams: list[Stream] = []
        self._reasons_to_pause: set[str] = set()
        self._num_open = num_prompts
        self._usage = Usage(0, 0)
        self.failure: StreamKVError | None = None
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = loop.create_future()
        """Done with the first token of any of them, or a failure."""
        self.ended: asyncio.Future[None] = loop.create_future()
        self.parts = [_Part(self, outlet, index * n) for index in range(num_prompts)]

    @property
    def streams(self) -> list[Stream]:
        return list(self._streams)

    @property
    def is_broken_off(self) -> bool:
        """As a Stream's."""
        return any(stream.is_broken_off for stream in self._streams)

    def add(self, stream: Stream) -> None:
        """It is submitted."""
        self._streams.append(stream)
        stream.started.add_done_callback(self._on_started)
        for reason in self._reasons_to_pause:
            stream.pause(reason)
        if self.failure is not None:
            stream.cancel("cancelled")

    def pause(self, reason: str) -> None:
        self._reasons_to_pause.add(reason)
        for stream in self._streams:
            stream.pause(reason)

    def resume(self, reason: str) -> None:
        self._reasons_to_pause.discard(reason)
        for stream in self._streams:
            stream.resume(reason)

    def cancel(self, cause: str) -> None:
        """End what has not ended."""
        for stream in self._streams:
            stream.cancel(cause)

    def close_part(self, usage: Usage, failure: StreamKVError | None) -> None:
        """One of them has ended."""
        self._num_open -= 1
        self._usage = Usage(
            self._usage.num_prompt + usage.num_prompt,
            self._usage.num_output + usage.num_output,
            self._usage.num_cached + usage.num_cached,
        )
        if failure is not None and self.failure is None:
            self.failure = failure
            self.cancel("cancelled")
        if self._num_open == 0 and not self.ended.done():
            try:
                self._outlet.close(self._usage, self.failure)
            finally:
                for future in (self.started, self.ended):
                    if not future.done():
                        future.set_result(None)

    def _on_started(self, _started: "asyncio.Future[None]") -> None:
        if not self.started.done():
            self.started.set_result(None)


class _Part:
    """The outlet of one prompt's stream."""

    def __init__(self, group: StreamGroup, outlet: Outlet, first_choice: int) -> None:
        self._group = group
        self._outlet = outlet
        self._first = first_choice

    def begin(self, stream: StreamFacts) -> None:
        self._outlet.begin(stream)

    def piece(self, choice: int, text: bytes, token_id: int) -> None:
        self._outlet.piece(self._first + choice, text, token_id)

    def delta(self, choice: int, delta: Delta) -> None:
        self._outlet.delta(self._first + choice, delta)

    def end(self, choice: int, ending: Ending) -> None:
        self._outlet.end(self._first + choice, ending)

    def flush(self) -> None:
        self._outlet.flush()

    def close(self, usage: Usage, failure: StreamKVError | None) -> None:
        self._group.close_part(usage, failure)
