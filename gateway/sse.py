"""A stream's events as server-sent events, written straight to the client's transport.

Per token: the event that was encoded once per request, with its text, its number and the chunk's length put in; one
write. Each event has an id (`cursor`), unless an answer is made of several prompts' streams.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from gateway.answers import DONE, KEEP_ALIVE, AnswerForm, EventParts, error_event
from gateway.bounded_writer import BoundedWriter
from gateway.cursor import Bookmark
from gateway.deltas import Delta
from gateway.logprobs import LogprobForms
from gateway.outlet import Ending, StreamFacts, Usage
from streamkv.errors import StreamKVError

SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class EventOutlet(Protocol):
    """An `Outlet` for one HTTP answer, as far as the connection is concerned."""

    @property
    def num_bytes(self) -> int:
        """Written so far."""

    def keep_alive(self) -> None:
        """Send something that changes nothing."""


class SseOutlet:
    """An `Outlet` for one HTTP answer. HTTP/1.1 gets chunked framing, HTTP/1.0 the bare events."""

    def __init__(
        self,
        writer: BoundedWriter,
        form: AnswerForm,
        num_choices: int,
        *,
        is_chunked: bool,
        error_body: Callable[[StreamKVError], bytes],
    ) -> None:
        self._writer = writer
        self._write = writer.write
        self._form = form
        self._is_chunked = is_chunked
        self._error_body = error_body
        self._parts = EventParts(form)
        self._forms: LogprobForms | None = None
        """In a chat, where its choices share what is told of it."""
        self._num_choices = num_choices
        self._bookmark = Bookmark[bytes](num_choices)
        self._num_tokens = self._bookmark.num_tokens
        self._id_head = b""
        """Empty for several prompts, whose events have no ids."""
        self._piece = b""
        """A token's whole event, but for the chunk's length, the number of the token and its text; only where choice 0
        is alone and nothing else was asked for."""
        self._num_fixed = 0
        """Bytes of such an event without the text."""
        self._next_digit_at = 10
        """The number of a token whose event is a byte longer."""
        self._has_begun = [False] * num_choices
        self._num_known = [0] * num_choices
        self._has_usage = False
        self._sent_prompt = not form.wants_ids
        self._is_plain = not form.wants_ids and not form.continuous_usage
        self._heads = [self._parts.text_head(choice) for choice in range(num_choices)]
        self._tail = self._parts.text_tail

    def begin(self, stream: StreamFacts) -> None:
        self._forms = stream.logprob_forms
        if self._form.num_prompts > 1:
            return
        stream_id = stream.stream_id.hex().encode()
        self._id_head = b"id: %b." % stream_id
        if self._is_plain and self._num_choices == 1:
            head, tail = (part.replace(b"%", b"%%") for part in (self._heads[0], self._tail))
            event = b"id: %b.%%d\n%b%%b%b" % (stream_id, head, tail)
            self._piece = b"%%x\r\n%b\r\n" % event if self._is_chunked else event
            self._num_fixed = len(self._id_head) + len(b"1\n") + len(self._heads[0]) + len(self._tail)
        known = stream.known
        marks = [known.mark(choice) for choice in range(self._num_choices)]
        self._bookmark = Bookmark[bytes](self._num_choices, known)
        self._num_tokens = self._bookmark.num_tokens
        self._has_begun = [mark.has_begun for mark in marks]
        self._num_known = [mark.num_tokens for mark in marks]
        self._has_usage = known.has_usage
        self._sent_prompt = self._sent_prompt or any(self._has_begun)

    def piece(self, choice: int, text: bytes, token_id: int) -> None:
        if not self._piece:
            self.delta(choice, Delta(text, (token_id,)))
            self.flush()
            return
        counts = self._num_tokens
        number = counts[0] = counts[0] + 1
        while number >= self._next_digit_at:
            self._next_digit_at *= 10
            self._num_fixed += 1
        if self._is_chunked:
            self._write(self._piece % (self._num_fixed + len(text), number, text))
        else:
            self._write(self._piece % (number, text))

    def delta(self, choice: int, delta: Delta) -> None:
        self._begin(choice)
        is_plain = self._is_plain and not (
            delta.logprobs or delta.prompt_logprobs or delta.reasoning or delta.tool_calls
        )
        event: bytes | None = None
        if is_plain:
            if delta.text or delta.token_ids:
                event = self._heads[choice] + delta.text + self._tail
        elif delta.prompt_logprobs is None or not self._form.is_chat or choice == 0:  # told once in a chat, and always
            # with the same choice, so that whoever takes it up again finds the events where they were
            usage = self._continuous_usage(choice, len(delta.token_ids))
            event = self._parts.delta(choice, delta, usage, self._forms)
        self._bookmark.tell(choice, len(delta.token_ids), event)

    def end(self, choice: int, ending: Ending) -> None:
        self._begin(choice)
        event = self._parts.end(choice, ending, self._continuous_usage(choice, 0))
        self._bookmark.tell(choice, 0, event, ends=not ending.is_only_here)

    def flush(self) -> None:
        placed = self._bookmark.take()
        if placed and self._id_head:
            self._send(b"".join([b"%b%b\n%b" % (self._id_head, cursor, event) for cursor, _, event in placed]))
        elif placed:
            self._send(b"".join([event for _, _, event in placed]))

    def _send(self, events: bytes) -> None:
        self._write(b"%x\r\n%b\r\n" % (len(events), events) if self._is_chunked else events)

    def close(self, usage: Usage, failure: StreamKVError | None) -> None:
        if failure is not None:
            self._bookmark.tell_rest(error_event(self._error_body(failure)), is_done=False)
        elif self._form.include_usage and not self._has_usage:
            self._bookmark.tell_rest(self._parts.usage(usage), is_done=False)
        self._bookmark.tell_rest(DONE, is_done=True)
        self.flush()

    @property
    def num_bytes(self) -> int:
        """Written so far."""
        return self._writer.num_bytes

    def keep_alive(self) -> None:
        """A comment, which clients pass over, so that nothing between here and there takes the silence for the end."""
        self.flush()
        self._send(KEEP_ALIVE)

    def _begin(self, choice: int) -> None:
        if not self._has_begun[choice]:
            self._has_begun[choice] = True
            form = self._form
            if form.is_chat or form.wants_ids:
                with_prompt_ids = form.wants_ids and not (form.is_chat and self._sent_prompt)
                self._bookmark.open(choice, self._parts.opening(choice, with_prompt_ids))
                self._sent_prompt = True

    def _continuous_usage(self, choice: int, num_new: int) -> Usage | None:
        """With an event of so many new tokens; what the client has counts, also while it is passed over."""
        if not self._form.continuous_usage:
            return None
        counts = [max(pair) for pair in zip(self._num_tokens, self._num_known, strict=True)]
        counts[choice] = max(self._num_tokens[choice] + num_new, self._num_known[choice])
        return Usage(self._form.num_prompt, sum(counts))


class LateOutlet:
    """For a stream that is taken up: the outlet of its answer is made when it is known what it is."""

    def __init__(self, make: Callable[[StreamFacts], SseOutlet]) -> None:
        self._make = make
        self._outlet: SseOutlet | None = None

    @property
    def _made(self) -> SseOutlet:
        assert self._outlet is not None
        return self._outlet

    def begin(self, stream: StreamFacts) -> None:
        self._outlet = self._make(stream)
        self._outlet.begin(stream)

    def piece(self, choice: int, text: bytes, token_id: int) -> None:
        self._made.piece(choice, text, token_id)

    def delta(self, choice: int, delta: Delta) -> None:
        self._made.delta(choice, delta)

    def end(self, choice: int, ending: Ending) -> None:
        self._made.end(choice, ending)

    def flush(self) -> None:
        self._made.flush()

    def close(self, usage: Usage, failure: StreamKVError | None) -> None:
        if self._outlet is not None:  # otherwise it was not found, and the failure is an answer of its own
            self._outlet.close(usage, failure)

    @property
    def num_bytes(self) -> int:
        """Written so far."""
        return self._made.num_bytes

    def keep_alive(self) -> None:
        self._made.keep_alive()


class KeepAlives:
    """Sends a comment on each open stream that was silent for a while. Costs nothing per token."""

    def __init__(self, keepalive_s: float) -> None:
        self._keepalive_s = keepalive_s
        self._seen: dict[EventOutlet, tuple[int, float]] = {}
        """Bytes written when it was last seen to grow, and when that was."""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, outlet: EventOutlet) -> None:
        loop = asyncio.get_running_loop()
        self._seen[outlet] = (outlet.num_bytes, loop.time())
        if self._timer is None:
            self._timer = loop.call_later(self._keepalive_s / 4, self._look)

    def discard(self, outlet: EventOutlet) -> None:
        self._seen.pop(outlet, None)
        if not self._seen and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._timer = loop.call_later(self._keepalive_s / 4, self._look)
        for outlet, (num_bytes, since) in self._seen.items():
            if outlet.num_bytes != num_bytes:
                self._seen[outlet] = (outlet.num_bytes, now)
            elif now - since >= self._keepalive_s * 0.75:
                outlet.keep_alive()
                self._seen[outlet] = (outlet.num_bytes, now)
