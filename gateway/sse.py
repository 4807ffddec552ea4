"""A stream's events as server-sent events, written straight to the client's transport.

Per token: three parts joined with the chunk's length in front, one write. The parts are encoded once per request.
"""

import asyncio
from collections.abc import Callable, Sequence

from gateway.answers import DONE, KEEP_ALIVE, AnswerForm, EventParts, error_event
from gateway.streams import BoundedWriter, Ending, Stream, Usage
from streamkv.errors import StreamKVError

SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


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
        self._gathered: list[bytes] = []
        self._has_begun = [False] * num_choices
        self._num_output = [0] * num_choices
        self._sent_prompt = not form.wants_ids
        self._is_plain = not form.wants_ids and not form.continuous_usage
        self._heads = [self._parts.text_head(choice) for choice in range(num_choices)]
        self._tail = self._parts.text_tail
        self._num_fixed = [len(head) + len(self._tail) for head in self._heads]

    def begin(self, stream: Stream) -> None: ...

    def piece(self, choice: int, text: bytes, token_id: int) -> None:
        if self._is_plain:
            if self._is_chunked:
                self._write(
                    b"%x\r\n%b%b%b\r\n" % (self._num_fixed[choice] + len(text), self._heads[choice], text, self._tail)
                )
            else:
                self._write(self._heads[choice] + text + self._tail)
            return
        self.delta(choice, text, (token_id,))
        self.flush()

    def delta(self, choice: int, text: bytes, token_ids: Sequence[int]) -> None:
        self._begin(choice)
        self._num_output[choice] += len(token_ids)
        if self._is_plain:
            if text:
                self._gathered.append(self._heads[choice] + text + self._tail)
            return
        self._gathered.append(self._parts.delta(choice, text, token_ids, self._continuous_usage()))

    def end(self, choice: int, ending: Ending) -> None:
        self._begin(choice)
        self._gathered.append(self._parts.end(choice, ending, self._continuous_usage()))

    def flush(self) -> None:
        if self._gathered:
            events = b"".join(self._gathered)
            self._gathered.clear()
            self._write(b"%x\r\n%b\r\n" % (len(events), events) if self._is_chunked else events)

    def close(self, usage: Usage, failure: StreamKVError | None) -> None:
        if failure is not None:
            self._gathered.append(error_event(self._error_body(failure)))
        elif self._form.include_usage:
            self._gathered.append(self._parts.usage(usage))
        self._gathered.append(DONE)
        self.flush()

    @property
    def num_bytes(self) -> int:
        """Written so far."""
        return self._writer.num_bytes

    def keep_alive(self) -> None:
        """A comment, which clients pass over, so that nothing between here and there takes the silence for the end."""
        self._gathered.append(KEEP_ALIVE)
        self.flush()

    def _begin(self, choice: int) -> None:
        if not self._has_begun[choice]:
            self._has_begun[choice] = True
            form = self._form
            if form.is_chat or form.wants_ids:
                with_prompt_ids = form.wants_ids and not (form.is_chat and self._sent_prompt)
                self._gathered.append(self._parts.opening(choice, with_prompt_ids))
                self._sent_prompt = True

    def _continuous_usage(self) -> Usage | None:
        if not self._form.continuous_usage:
            return None
        return Usage(self._form.num_prompt, sum(self._num_output))


class KeepAlives:
    """Sends a comment on each open stream that was silent for a while. Costs nothing per token."""

    def __init__(self, keepalive_s: float) -> None:
        self._keepalive_s = keepalive_s
        self._seen: dict[SseOutlet, tuple[int, float]] = {}
        """Bytes written when it was last seen to grow, and when that was."""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, outlet: SseOutlet) -> None:
        loop = asyncio.get_running_loop()
        self._seen[outlet] = (outlet.num_bytes, loop.time())
        if self._timer is None:
            self._timer = loop.call_later(self._keepalive_s / 4, self._look)

    def discard(self, outlet: SseOutlet) -> None:
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
