"""One live stream: what continues it elsewhere, its tokens on their way to text, and the bound on what waits unread.

The path of a token is engine_client → `Stream.push_token` → an `Outlet` (an SSE answer, a WebSocket, a body that is
being gathered) → a `BoundedWriter` → the client's transport, within one turn of the loop and without a task switch.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from gateway.detokenizer import Detokenizer
from gateway.engine_client import EngineClient, EngineUnavailable
from gateway.tokenizer import Tokenizer, json_inside
from streamkv.errors import InvalidField, StreamKVError
from streamkv.protocol import STREAM_ID_BYTES, Attached, Finished, Rejected, Submit, pack_ids, unpack_ids
from streamkv.sampling import SamplingParams

MAX_ENGINE_DEATHS: Final = 3
"""A stream that was live at this many ends of its engine is failed: it may be what ends it."""
_DRAIN_CHECK_S: Final = 0.02


class EngineFault(StreamKVError):
    """The engine ended this request with an error, or kept dying under it."""


class Overloaded(EngineUnavailable):
    """The engine's queue is full."""


class UnknownStream(StreamKVError):
    """Nobody has this stream, or not any more."""


class RequestTimeout(StreamKVError):
    """request_timeout_s was over before the first token."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"the request took longer than {limit_s:g} s and was ended")


class StreamState(msgspec.Struct, array_like=True, frozen=True):
    """What any gateway needs to go on with a stream, beside its tokens: Submit's gateway_state, as msgpack.

    Fields may only be added at the end, with a default: an engine can outlive its gateway's version.
    """

    sampling: SamplingParams
    model: str
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    is_chat: bool = False
    cache_salt: str = ""
    priority: int = 0
    attach_grace_s: float = 0.0
    label: str = ""
    key: str = ""
    """Whose stream it is; empty without API keys."""
    ended: tuple[Finished, ...] = ()
    """How choices ended under earlier engines; only the gateway can tell a later one."""
    shares_prefix: bool = False
    """As in Submit."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a choice ended, as its client is told."""

    finish_reason: str
    """stop, length, abort (cancelled, timed out, drained; as vLLM says it) or error."""
    cause: str = ""
    stop_reason: str | int | None = None
    """The stop string or stop id that ended it; None for end-of-sequence and all else."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request: what was read, made, and found in the cache."""

    num_prompt: int
    num_output: int
    num_cached: int = 0


class Outlet(Protocol):
    """Where a stream's text goes. Text comes as JSON-escaped UTF-8 without its quotes; called on the event loop."""

    def begin(self, stream: "Stream") -> None:
        """What is asked for is known: at submit, or when an attach was answered. Once, before all else but `close`."""

    def piece(self, choice: int, text: bytes, token_id: int) -> None:
        """One token's text; goes out at once, alone."""

    def delta(self, choice: int, text: bytes, token_ids: Sequence[int]) -> None:
        """New text, perhaps empty, and the tokens since the last one. Gathered until `flush`."""

    def end(self, choice: int, ending: Ending) -> None:
        """The one terminal event of a choice. Gathered until `flush`."""

    def flush(self) -> None:
        """What was gathered goes out in one write."""

    def close(self, usage: Usage, failure: StreamKVError | None) -> None:
        """Every choice has ended. The last call."""


class _Choice:
    __slots__ = ("detokenizer", "ending", "finished", "gathered", "index", "num_sent", "token_ids")

    def __init__(self, index: int, detokenizer: Detokenizer) -> None:
        self.index = index
        self.detokenizer = detokenizer
        self.token_ids: list[int] = []
        """All generated tokens, also those behind a stop string: a continuation needs each."""
        self.gathered: list[int] = []
        """Came in with this step, not yet turned into text."""
        self.num_sent = 0
        """How many of token_ids the client was told of."""
        self.ending: Ending | None = None
        self.finished: Finished | None = None
        """What the engine said of its end; None when it ended here."""


@dataclass(slots=True)
class StreamTimes:
    """Loop times, 0 where not yet."""

    arrived: float
    first_token: float = 0.0
    ended: float = 0.0


def new_stream_id() -> bytes:
    """128 random bits."""
    return secrets.token_bytes(STREAM_ID_BYTES)


class Stream:
    """A request and its choices, from submit to the last terminal event: the engine client's sink.

    Ends exactly once: by its choices' ends, by `cancel`, or by a failure. `on_end` is called then, before the outlet
    is closed.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        outlet: Outlet,
        *,
        stream_id: bytes,
        arrived: float,
        on_end: Callable[["Stream"], None],
        from_token: int = 0,
        tenant: str = "",
    ) -> None:
        """from_token: the client has each choice's tokens before this one, and is not sent them again. tenant: the
        name of its owner's API key."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._json_pieces = tokenizer.vocabulary.json_pieces
        self._outlet = outlet
        self._on_end = on_end
        self._from_token = from_token
        self._tenant = tenant
        self._stream_id = stream_id
        self._state: StreamState | None = None
        self._prompt: bytes = b""
        self.num_prompt = 0
        self.num_cached = 0
        self._choices: list[_Choice] = []
        self._first: _Choice | None = None
        self._takes_pieces = False
        """Choice 0 is past its first token, alone, and holds nothing back: a token's text is its piece."""
        self._num_open = 0
        self._stopped: list[int] = []
        """Choices that ended here, by a stop string, and go on in the engine, which has not been told."""
        self._epochs: set[int] = set()
        """The engine lives it was submitted to."""
        self._is_done = False
        self._reasons_to_pause: set[str] = set()
        self.failure: StreamKVError | None = None
        self.times = StreamTimes(arrived)
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = loop.create_future()
        """Done with the first token, the answer to an attach, or the end."""
        self.ended: asyncio.Future[None] = loop.create_future()

    def begin(self, state: StreamState, prompt_token_ids: Sequence[int]) -> None:
        """Submit it."""
        self._take_state(state, pack_ids(prompt_token_ids), prompt_token_ids)
        self._engine.submit(self)

    def begin_attach(self) -> None:
        """Take it up from the engine. Raises EngineUnavailable."""
        self._engine.attach(self)

    def _take_state(self, state: StreamState, prompt: bytes, prompt_token_ids: Sequence[int]) -> None:
        self._state = state
        self._prompt = prompt
        self.num_prompt = len(prompt_token_ids)
        self._choices = [
            _Choice(
                index,
                Detokenizer(
                    self._tokenizer,
                    stop=state.stop,
                    include_stop_str_in_output=state.include_stop_str_in_output,
                    skip_special_tokens=state.skip_special_tokens,
                    min_tokens=state.sampling.min_tokens,
                    prompt_ids=prompt_token_ids,
                ),
            )
            for index in range(state.sampling.n)
        ]
        self._first = self._choices[0]
        self._num_open = len(self._choices)
        self._outlet.begin(self)

    # What the wire asks for

    @property
    def stream_id(self) -> bytes:
        return self._stream_id

    @property
    def state(self) -> StreamState | None:
        """None while an attach is unanswered."""
        return self._state

    @property
    def tenant(self) -> str:
        return self._tenant

    @property
    def from_token(self) -> int:
        return self._from_token

    @property
    def prompt_token_ids(self) -> list[int]:
        return unpack_ids(self._prompt)

    @property
    def num_known_tokens(self) -> int:
        return min((len(choice.token_ids) for choice in self._choices), default=0)

    @property
    def is_paused(self) -> bool:
        return bool(self._reasons_to_pause)

    @property
    def is_done(self) -> bool:
        return self._is_done

    @property
    def num_output(self) -> int:
        """Tokens that were shown and count, of all choices."""
        return sum(_num_shown(choice) for choice in self._choices)

    def submission(self, request_id: int) -> Submit | None:
        state = self._state
        assert state is not None
        ready = self._engine.ready
        self._epochs.add(ready.epoch if ready is not None else 0)
        if len(self._epochs) > MAX_ENGINE_DEATHS:
            self._fail(EngineFault(f"the engine ended {MAX_ENGINE_DEATHS} times while it worked on this request"))
            return None
        has_prior = any(choice.token_ids for choice in self._choices)
        ended = tuple(choice.finished for choice in self._choices if choice.finished is not None)
        return Submit(
            request_id=request_id,
            stream_id=self._stream_id,
            prompt_token_ids=self._prompt,
            sampling=state.sampling,
            gateway_state=msgspec.msgpack.encode(msgspec.structs.replace(state, ended=ended)),
            prior_token_ids=[pack_ids(choice.token_ids) for choice in self._choices] if has_prior else [],
            finished_choices=[choice.index for choice in self._choices if choice.ending is not None],
            priority=state.priority,
            attach_grace_s=state.attach_grace_s,
            tenant=self._tenant,
            cache_salt=state.cache_salt,
            label=state.label,
            shares_prefix=state.shares_prefix,
        )

    # What the wire brings

    def hit(self, num_cached_tokens: int) -> None:
        self.num_cached = max(self.num_cached, num_cached_tokens)

    def push_token(self, token_id: int) -> None:
        first = self._first
        assert first is not None
        if self._takes_pieces:
            text = self._json_pieces[token_id]
            if text is not None:
                first.token_ids.append(token_id)
                first.num_sent += 1
                self._outlet.piece(0, text, token_id)
                return
        first.gathered.append(token_id)
        self.flush()

    def push(self, choice: int, token_ids: list[int]) -> None:
        if choice < len(self._choices):
            self._choices[choice].gathered.extend(token_ids)

    def finish(self, finished: Finished) -> None:
        if finished.choice >= len(self._choices):
            return
        choice = self._choices[finished.choice]
        self.num_cached = max(self.num_cached, finished.num_cached_tokens)
        if choice.ending is None:
            choice.finished = finished
        self._take_tokens(choice, finished)

    def flush(self) -> None:
        for choice in self._choices:
            if choice.gathered:
                self._take_tokens(choice, None)
        if not self.times.first_token and any(choice.token_ids for choice in self._choices):
            self.times.first_token = self._engine.now
        self._outlet.flush()
        if self.times.first_token and not self.started.done():
            self.started.set_result(None)
        self._takes_pieces = self._can_take_pieces()
        if self._num_open == 0:
            self._end()
        else:
            for index in self._stopped:
                self._engine.abort_choice(self, index, "stop_string")
            self._stopped.clear()

    def _can_take_pieces(self) -> bool:
        state, first = self._state, self._first
        return (
            state is not None
            and first is not None
            and len(self._choices) == 1
            and first.ending is None
            and first.detokenizer.can_take_whole_piece
            and len(first.token_ids) >= self._from_token
        )

    def reject(self, rejected: Rejected) -> None:
        message = rejected.message
        if rejected.code == "invalid":
            prompt = "messages" if self._state is not None and self._state.is_chat else "prompt"
            self._fail(InvalidField(prompt if rejected.field in ("", "prompt_token_ids") else rejected.field, message))
        elif rejected.code == "overloaded":
            self._fail(Overloaded(message or "the server is full", rejected.retry_after_s))
        elif rejected.code == "draining":
            self._fail(EngineUnavailable(message or "the engine is about to end", rejected.retry_after_s))
        elif rejected.code == "unknown_stream":
            self._fail(UnknownStream(message))
        else:
            self._fail(EngineFault(f"the engine refused the request: {message}"))

    def attached(self, attached: Attached) -> None:
        if self._state is None:
            try:
                state = msgspec.msgpack.decode(attached.gateway_state, type=StreamState)
            except msgspec.MsgspecError:
                self._engine.abort(self, "cancelled")
                self._fail(UnknownStream("the stream was begun by a gateway of another version"))
                return
            self._take_state(state, attached.prompt_token_ids, unpack_ids(attached.prompt_token_ids))
        for index, packed in enumerate(attached.token_ids[: len(self._choices)]):
            choice = self._choices[index]
            choice.gathered.extend(unpack_ids(packed)[len(choice.token_ids) - attached.from_token :])
        known = {finished.choice: finished for finished in self._state.ended} if self._state is not None else {}
        for finished in attached.finished:
            self.finish(known.get(finished.choice, finished))
        ended_there = {finished.choice for finished in attached.finished}
        self._stopped += [choice.index for choice in self._choices if choice.ending and choice.index not in ended_there]
        self.flush()
        if not self.started.done():
            self.started.set_result(None)

    def _take_tokens(self, choice: _Choice, finished: Finished | None) -> None:
        """Gathered tokens → one delta, and the choice's end where it has come."""
        gathered, choice.gathered = choice.gathered, []
        if choice.ending is not None:
            return  # behind a stop string, on their way when it was found
        detokenizer = choice.detokenizer
        state = self._state
        assert state is not None
        num_before = len(choice.token_ids)
        choice.token_ids += gathered
        texts = []
        ending: Ending | None = None
        for token_id in gathered:
            if (
                finished is not None
                and token_id == finished.stop_token_id
                and token_id is gathered[-1]
                and not state.include_stop_str_in_output
            ):
                break
            text = detokenizer.push_json(token_id)
            num_before += 1
            if num_before > self._from_token:
                texts.append(text)
            if detokenizer.stopped is not None:
                ending = Ending("stop", "stop_string", detokenizer.stopped)
                break
        if ending is None and finished is not None:
            texts.append(json_inside(detokenizer.finish()))
            if detokenizer.stopped is not None:
                ending = Ending("stop", "stop_string", detokenizer.stopped)
            else:
                stop_reason = finished.stop_token_id if finished.cause == "stop_id" else None
                ending = Ending(finished.finish_reason, finished.cause, stop_reason)
        elif ending is not None:
            texts.append(json_inside(detokenizer.finish()))
        choice.ending = ending
        if ending is not None and finished is None:
            self._stopped.append(choice.index)
        num_shown = _num_shown(choice)
        token_ids = choice.token_ids[max(choice.num_sent, self._from_token) : num_shown]
        choice.num_sent = num_shown
        text = b"".join(texts)
        if text or token_ids:
            self._outlet.delta(choice.index, text, token_ids)
        if ending is not None:
            self._close_choice(choice, ending)

    def _close_choice(self, choice: _Choice, ending: Ending) -> None:
        choice.ending = ending
        self._num_open -= 1
        if ending.finish_reason == "error" and self.failure is None:
            self.failure = EngineFault(ending.cause or "the engine failed on this request")
        self._outlet.end(choice.index, ending)

    # Ends

    def cancel(self, cause: str) -> None:
        """End it now: the engine is told, open choices end with `abort`. Harmless for one that has ended."""
        self._end_early(Ending("abort", cause), cause)

    def expire(self, limit_s: float) -> None:
        """The time that a request may take is over."""
        if not self.times.first_token and not self._is_done:
            self._engine.abort(self, "timeout")
            self._fail(RequestTimeout(limit_s))
        else:
            self._end_early(Ending("abort", "timeout"), "timeout")

    def break_off(self) -> None:
        """A fault of ours was found while it was fed."""
        self._fail(EngineFault("the server made a mistake on this request; its log says more"))

    def hand_over(self) -> None:
        """Somebody else attaches to it: it ends here, but not in the engine."""
        if not self._is_done:
            self._engine.release(self)
            self._end_early(Ending("abort", "attached_elsewhere"), "")

    def _end_early(self, ending: Ending, cause: str) -> None:
        if self._is_done:
            return
        if cause:
            self._engine.abort(self, cause)
        for choice in self._choices:
            choice.gathered.clear()
            if choice.ending is None:
                self._close_choice(choice, ending)
        self._end()

    def _fail(self, failure: StreamKVError) -> None:
        if self._is_done:
            return
        self.failure = failure
        for choice in self._choices:
            choice.gathered.clear()
            if choice.ending is None:
                choice.ending = Ending("error", str(failure))
                self._num_open -= 1
                self._outlet.end(choice.index, choice.ending)
        self._end()

    def _end(self) -> None:
        if self._is_done:
            return
        self._is_done = True
        self._takes_pieces = False
        self.times.ended = asyncio.get_running_loop().time()
        if self._stopped:
            self._engine.abort(self, "stop_string")
        try:
            self._on_end(self)
            self._outlet.close(Usage(self.num_prompt, self.num_output, self.num_cached), self.failure)
        finally:  # whoever waits for the end must see it
            for future in (self.started, self.ended):
                if not future.done():
                    future.set_result(None)

    @property
    def endings(self) -> list[Ending]:
        """How each choice ended; complete once it is done."""
        return [choice.ending for choice in self._choices if choice.ending is not None]

    # A slow reader, or one who asked

    def pause(self, reason: str) -> None:
        """Set it aside in the engine until every reason is taken back."""
        if not self._reasons_to_pause and not self._is_done:
            self._engine.pause(self)
        self._reasons_to_pause.add(reason)

    def resume(self, reason: str) -> None:
        if reason in self._reasons_to_pause:
            self._reasons_to_pause.discard(reason)
            if not self._reasons_to_pause and not self._is_done:
                self._engine.resume(self)

    def redirect(self, outlet: Outlet) -> None:
        """Send what comes from now on elsewhere."""
        self._outlet = outlet


def _num_shown(choice: _Choice) -> int:
    num_tokens = len(choice.token_ids)
    if choice.detokenizer.stopped is not None:
        return min(choice.detokenizer.num_tokens_shown, num_tokens)
    return num_tokens


def _ignore() -> None: ...


class NoOutlet:
    """Takes a stream that nobody reads at the moment; its tokens stay with the stream and the engine."""

    def begin(self, stream: Stream) -> None: ...

    def piece(self, choice: int, text: bytes, token_id: int) -> None: ...

    def delta(self, choice: int, text: bytes, token_ids: Sequence[int]) -> None: ...

    def end(self, choice: int, ending: Ending) -> None: ...

    def flush(self) -> None: ...

    def close(self, usage: Usage, failure: StreamKVError | None) -> None: ...


class AbandonedOutlet(NoOutlet):
    """For a stream whose client went before its attach was answered: `on_begin` decides once it is known what it is."""

    def __init__(self, on_begin: Callable[[Stream], None]) -> None:
        self._on_begin = on_begin

    def begin(self, stream: Stream) -> None:
        self._on_begin(stream)


class Outbox:
    """The writers that have something to send, until the end of this turn of the loop.

    A turn hands out every frame of the engine that has come in, so a stream's write takes along all steps that are
    there: one when the gateway keeps up, several when it is behind. A write is a system call of some 7 µs, more than
    all the rest of a token's way, so this is what lets the gateway catch up.
    """

    def __init__(self) -> None:
        self._waiting: list[BoundedWriter] = []

    def add(self, writer: "BoundedWriter") -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting.append(writer)

    def flush(self) -> None:
        """Send what waits."""
        waiting, self._waiting = self._waiting, []
        for writer in waiting:
            writer.flush()


class BoundedWriter:
    """Whole events to one client's transport, and the word when that client does not read.

    Until `open` everything is held, since a status line must come first. Past `max_bytes` unread, `on_full` is
    called; when half of that is read again, `on_drained`. What is written in between is kept all the same: it is the
    few steps that were on their way when the pause was sent.
    """

    __slots__ = (
        "_held",
        "_is_closed",
        "_outbox",
        "_pending",
        "_timer",
        "_transport",
        "is_full",
        "max_bytes",
        "num_bytes",
        "on_drained",
        "on_full",
    )

    def __init__(
        self,
        outbox: Outbox,
        max_bytes: int,
        on_full: Callable[[], None] = _ignore,
        on_drained: Callable[[], None] = _ignore,
    ) -> None:
        self.max_bytes = max_bytes
        self.on_full = on_full
        self.on_drained = on_drained
        self.num_bytes = 0
        """Given to the transport since the start; what the keep-alive looks at."""
        self.is_full = False
        self._outbox = outbox
        self._transport: asyncio.WriteTransport | None = None
        self._pending: list[bytes] = []
        self._held = bytearray()
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    @property
    def num_unread(self) -> int:
        """Bytes that the client's side of the transport has not taken, those of this turn included."""
        held = len(self._held) if self._transport is None else self._transport.get_write_buffer_size()
        return held + sum(map(len, self._pending))

    def open(self, transport: asyncio.WriteTransport) -> None:
        """Its headers are out: write what was held, and from now on at the end of each turn."""
        self._transport = transport
        if self._held:
            self._pending.insert(0, bytes(self._held))
            self._held.clear()
        self.flush()

    def write(self, data: bytes) -> None:
        """Send it with the others of this turn."""
        pending = self._pending
        if not pending:
            self._outbox.add(self)
        pending.append(data)

    def flush(self) -> None:
        """Send what waits, now."""
        pending = self._pending
        if not pending:
            return
        self._pending = []
        data = pending[0] if len(pending) == 1 else b"".join(pending)
        transport = self._transport
        if transport is not None:
            self.num_bytes += len(data)
            transport.write(data)
            num_unread = transport.get_write_buffer_size()
        elif not self._is_closed:
            self._held += data
            num_unread = len(self._held)
        else:
            return
        if num_unread > self.max_bytes and not self.is_full:
            self._fill()

    def close(self) -> None:
        """The client is gone or has got everything: nothing is written any more."""
        self._is_closed = True
        self._transport = None
        self._pending = []
        self._held.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _fill(self) -> None:
        self.is_full = True
        self._timer = asyncio.get_running_loop().call_later(_DRAIN_CHECK_S, self._check)
        self.on_full()

    def _check(self) -> None:
        """The transport tells its own protocol when it drains, and that is aiohttp's; so look, while it is full."""
        if self._is_closed:
            return
        transport = self._transport
        unread = len(self._held) if transport is None else transport.get_write_buffer_size()
        if unread <= self.max_bytes // 2:
            self.is_full = False
            self.on_drained()
        else:
            self._timer = asyncio.get_running_loop().call_later(_DRAIN_CHECK_S, self._check)
