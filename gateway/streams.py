"""One live stream: what continues it elsewhere, and its tokens on their way to text.

The path of a token is engine_client → `Stream.push_token` → an `Outlet` (an SSE answer, a WebSocket, a body that is
being gathered) → a `BoundedWriter` → the client's transport, within one turn of the loop and without a task switch.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, Protocol

import msgspec

from gateway.cursor import FROM_START, Cursor
from gateway.deltas import Delta, TokenLogprob
from gateway.detokenizer import Detokenizer
from gateway.engine_client import EngineClient, EngineUnavailable
from gateway.logprobs import LogprobForms, LogprobStore
from gateway.parsers.answer_parser import Parsing
from gateway.suspicion import UNSUSPECTED, Suspicion
from gateway.tokenizer import Tokenizer, json_inside
from streamkv.errors import InvalidField, StreamKVError
from streamkv.protocol import (
    STREAM_ID_BYTES,
    Attached,
    Finished,
    Rejected,
    Submit,
    TokenLogprobs,
    pack_ids,
    unpack_ids,
)
from streamkv.sampling import SamplingParams

_OWN_ENDS: Final = ("stop", "length")
"""Reasons for which a choice ends by itself, and so has had its prompt."""


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
    answer_id: str = ""
    """As each event of its answer has it; so are the three below."""
    created: int = 0
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    """The text of each choice begins with the prompt."""
    is_prompt_only: bool = False
    """No token was asked for, and the one that the engine makes is not shown."""
    num_prompt_logprobs: int = -1
    """As in SamplingParams, but only what its client asked for; an echo has some of its own."""
    tokens_as_ids: bool = False
    """Log probabilities are told of `token_id:17` instead of a token's text."""
    parsing: Parsing | None = None
    """What is to be found in the text; None: nothing, it goes out as it is."""
    suspicion: Suspicion = UNSUSPECTED
    """As it was when this was written: the gateway that has the stream knows better."""


_BROKEN_OFF: Final = "broken_off"


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
        return self.finish_reason == "abort" and self.cause in ("attached_elsewhere", _BROKEN_OFF)


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

    def delta(self, choice: int, delta: Delta) -> None:
        """New text, perhaps empty, the tokens since the last one, and what was asked for of them. Gathered until
        `flush`."""

    def end(self, choice: int, ending: Ending) -> None:
        """The one terminal event of a choice. Gathered until `flush`."""

    def flush(self) -> None:
        """What was gathered goes out in one write."""

    def close(self, usage: Usage, failure: StreamKVError | None) -> None:
        """Every choice has ended. The last call."""


class _Choice:
    __slots__ = (
        "detokenizer",
        "ending",
        "finished",
        "gathered",
        "index",
        "is_hidden",
        "is_open",
        "logprobs",
        "num_chars",
        "num_sent",
        "token_ids",
    )

    def __init__(self, index: int, detokenizer: Detokenizer, *, is_hidden: bool, is_open: bool, num_chars: int) -> None:
        self.index = index
        self.detokenizer = detokenizer
        self.is_hidden = is_hidden
        """Nothing that it generates is shown."""
        self.is_open = is_open
        """What is told of its prompt was sent, or there is nothing."""
        self.num_chars = num_chars
        """Length of its text so far; only counted where log probabilities are wanted."""
        self.logprobs = LogprobStore()
        """Of token_ids, and perhaps of some that are on their way; empty where none are wanted."""
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
        known: Cursor = FROM_START,
        tenant: str = "",
        parse: Callable[[Outlet, StreamState], Outlet] | None = None,
        inherits: Attached | None = None,
    ) -> None:
        """known: what the client has of a stream that is taken up; the outlet gets every token all the same, and passes
        over what was told before. tenant: the name of its owner's API key. parse: makes the outlet that goes before the
        given one where a state wants it. inherits: what is known of it here; it goes on from that where the engine,
        which was started anew, does not know it."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._json_pieces = tokenizer.vocabulary.json_pieces
        self._outlet = outlet
        self._parse = parse
        self._on_end = on_end
        self._known = known
        self._inherits = inherits
        self._tenant = tenant
        self._stream_id = stream_id
        self._state: StreamState | None = None
        self._prompt: bytes = b""
        self._echo_text: str | None = None
        """The prompt as its client wrote it; None: as its tokens are read."""
        self._prompt_logprobs = LogprobStore()
        """Of the prompt from its second token on."""
        self.num_prompt = 0
        self.num_cached = 0
        self.num_inherited = 0
        """Tokens that were there when it was taken up from the engine."""
        self.request_id = ""
        """Of the request that takes it up: of its own, for the log, where the stream is not found."""
        self.is_broken_off = False
        """It goes on in the engine, nobody was told an end, and its client's connection has to show that."""
        self._choices: list[_Choice] = []
        self._first: _Choice | None = None
        self._takes_pieces = False
        """Choice 0 is past its first token, alone, and holds nothing back: a token's text is its piece."""
        self._wants_logprobs = False
        self._num_open = 0
        self._stopped: list[int] = []
        """Choices that ended here, by a stop string, and go on in the engine, which has not been told."""
        self._suspicion = UNSUSPECTED
        self._deaths_before_state: list[int] = []
        """Places at which the engine ended that had not yet said what it is."""
        self._is_done = False
        self._reasons_to_pause: set[str] = set()
        self.failure: StreamKVError | None = None
        self.refusal: InvalidField | EngineUnavailable | None = None
        """What is wrong with `known`, or why nothing can be told yet. The stream goes on, and its outlet is told
        nothing."""
        self.kept_until_s = inf
        """Loop time until which its end is kept, where it had ended before it was taken up."""
        self.times = StreamTimes(arrived)
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = loop.create_future()
        """Done with the first token, the answer to an attach, or the end."""
        self.ended: asyncio.Future[None] = loop.create_future()

    def begin(self, state: StreamState, prompt_token_ids: Sequence[int], echo_text: str | None = None) -> None:
        """Submit it. echo_text: what an echo gives back, where that is known better than the ids tell."""
        self._echo_text = echo_text
        self._take_state(state, pack_ids(prompt_token_ids), prompt_token_ids)
        self._engine.submit(self)

    def begin_attach(self) -> None:
        """Take it up from the engine. Raises EngineUnavailable."""
        self._engine.attach(self)

    def _take_state(self, state: StreamState, prompt: bytes, prompt_token_ids: Sequence[int]) -> None:
        self._state = state
        self._suspicion = state.suspicion
        self._prompt = prompt
        self.num_prompt = len(prompt_token_ids)
        if state.echo and self._echo_text is None:
            self._echo_text = self._tokenizer.decode(prompt_token_ids, state.skip_special_tokens)
        self._wants_logprobs = state.sampling.logprobs >= 0
        has_opening = state.echo or state.num_prompt_logprobs >= 0
        self._choices = [
            _Choice(
                index,
                is_hidden=state.is_prompt_only,
                is_open=not has_opening,
                num_chars=len(self._echo_text or ""),
                detokenizer=Detokenizer(
                    self._tokenizer,
                    stop=state.stop,
                    include_stop_str_in_output=state.include_stop_str_in_output,
                    skip_special_tokens=state.skip_special_tokens,
                    min_tokens=state.sampling.min_tokens,
                    prompt_ids=prompt_token_ids,
                    shown_special_ids=state.parsing.shown_special_ids if state.parsing is not None else (),
                ),
            )
            for index in range(state.sampling.n)
        ]
        self._first = self._choices[0]
        self._num_open = len(self._choices)
        if state.parsing is not None and self._parse is not None:
            self._outlet = self._parse(self._outlet, state)
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
    def known(self) -> Cursor:
        return self._known

    @property
    def prompt_token_ids(self) -> list[int]:
        return unpack_ids(self._prompt)

    @property
    def logprob_forms(self) -> LogprobForms | None:
        """How its log probabilities are told; None: there are none. Once it has a state."""
        state = self._state
        assert state is not None
        if not self._wants_logprobs and state.num_prompt_logprobs < 0:
            return None
        return LogprobForms(self._tokenizer, state.tokens_as_ids)

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
    def _num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self._choices)

    @property
    def num_output(self) -> int:
        """Tokens that were shown and count, of all choices."""
        return sum(_num_shown(choice) for choice in self._choices)

    def submission(self, request_id: int) -> Submit | None:
        state = self._state
        assert state is not None
        self._clear_by_tokens()
        if self._suspicion.is_guilty:
            num_deaths = self._suspicion.num_deaths
            self._fail(EngineFault(f"the engine ended {num_deaths} times while it worked on this request"))
            return None
        has_prior = any(choice.token_ids for choice in self._choices)
        return Submit(
            request_id=request_id,
            stream_id=self._stream_id,
            prompt_token_ids=self._prompt,
            sampling=state.sampling,
            gateway_state=self._packed_state(),
            prior_token_ids=[pack_ids(choice.token_ids) for choice in self._choices] if has_prior else [],
            finished_choices=[choice.index for choice in self._choices if choice.ending is not None],
            priority=state.priority,
            attach_grace_s=state.attach_grace_s,
            tenant=self._tenant,
            cache_salt=state.cache_salt,
            label=state.label,
            shares_prefix=state.shares_prefix,
            prior_logprobs=self._prior_logprobs() if has_prior and self._wants_logprobs else [],
            runs_alone=self._suspicion.runs_alone,
            ranked_tokens=self._suspicion.cleared_past if state.sampling.ranks_choices else 0,
        )

    def _packed_state(self) -> bytes:
        """Once it has one."""
        assert self._state is not None
        ended = tuple(choice.finished for choice in self._choices if choice.finished is not None)
        return msgspec.msgpack.encode(msgspec.structs.replace(self._state, ended=ended, suspicion=self._suspicion))

    def _prior_logprobs(self) -> list[TokenLogprobs]:
        for choice in self._choices:
            choice.logprobs.cut(len(choice.token_ids))
        return [choice.logprobs.pack() for choice in self._choices]

    # What the wire brings

    def suspected(self, num_ranked_tokens: int) -> None:
        if self._state is None:
            self._deaths_before_state.append(num_ranked_tokens)
            return
        self._clear_by_tokens()
        self._suspicion = self._suspicion.after_death(max(self._num_tokens, num_ranked_tokens))

    def _clear_by_tokens(self) -> None:
        """Of ranked choices none come before their end."""
        if self._num_tokens > self._suspicion.furthest:
            self._suspicion = UNSUSPECTED

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

    def logprobs(self, choice: int, values: TokenLogprobs) -> None:
        if self._wants_logprobs and choice < len(self._choices):
            self._choices[choice].logprobs.extend(values)

    def prompt_logprobs(self, start: int, values: TokenLogprobs) -> None:
        num_known = len(self._prompt_logprobs) - (start - 1)  # after an engine's end they come again
        if 0 <= num_known < values.num_tokens:
            self._prompt_logprobs.extend(values.between(num_known, values.num_tokens))

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
            and not self._wants_logprobs
            and not first.is_hidden
            and bool(first.token_ids)  # an attach may come before the first token, and what opens the answer with it
            and first.ending is None
            and first.detokenizer.can_take_whole_piece
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
        elif rejected.code == "unknown_stream" and self._inherits is not None:
            self._go_on_from(self._inherits)
        elif rejected.code == "unknown_stream" and rejected.retry_after_s:
            self._fail(
                EngineUnavailable("a new engine does not know this stream yet; try again", rejected.retry_after_s)
            )
        elif rejected.code == "unknown_stream":
            self._fail(UnknownStream(message))
        else:
            self._fail(EngineFault(f"the engine refused the request: {message}"))

    def _go_on_from(self, remains: Attached) -> None:
        """The engine ended before it could hand it over; what is here is enough to submit it again, or to end it."""
        self._inherits = None
        self.attached(remains)
        if not self._is_done:
            for num_ranked_tokens in self._deaths_before_state:
                self.suspected(num_ranked_tokens)
            self._engine.submit(self)

    def forgotten(self) -> None:
        self._inherits = None
        if self._state is not None:
            self.cancel("cancelled")

    def remains(self) -> Attached:
        """What it has, as the engine would tell it. Once it has a state."""
        finished = [choice.finished for choice in self._choices if choice.finished is not None]
        return Attached(
            request_id=0,
            stream_id=self._stream_id,
            gateway_state=self._packed_state(),
            prompt_token_ids=self._prompt,
            from_token=0,
            token_ids=[pack_ids(choice.token_ids) for choice in self._choices],
            finished=finished,
            logprobs=self._prior_logprobs() if self._wants_logprobs else [],
            prompt_logprobs=self._prompt_logprobs.pack() if len(self._prompt_logprobs) else None,
        )

    def attached(self, attached: Attached) -> None:
        old, self._inherits = self._inherits, None
        self.kept_until_s = min(self.kept_until_s, asyncio.get_running_loop().time() + attached.kept_s)
        is_new = self._state is None
        if self._state is None:
            try:
                state = msgspec.msgpack.decode(attached.gateway_state, type=StreamState)
            except msgspec.MsgspecError:
                self._engine.abort(self, "cancelled")
                self._fail(UnknownStream("the stream was begun by a gateway of another version"))
                return
            num_tokens = [len(packed) // 4 for packed in attached.token_ids]
            if any(num_tokens) and not self._can_open(state, attached, old):
                # It is held here all the same: who had it was told that it is, and the engine alone may end.
                self._refuse(EngineUnavailable("a new engine has not yet come to this stream's prompt; try again"))
            self.num_inherited = sum(num_tokens)
            try:
                self._known.check_choices(state.sampling.n)
                self._known.check_tokens(num_tokens)
            except InvalidField as error:
                self._refuse(error)
            self._take_state(state, attached.prompt_token_ids, unpack_ids(attached.prompt_token_ids))
        if attached.prompt_logprobs is not None:
            self.prompt_logprobs(1, attached.prompt_logprobs)
        known_here = old.prompt_logprobs if old is not None else None
        if known_here is not None and known_here.num_tokens > len(self._prompt_logprobs):
            self.prompt_logprobs(1, known_here)
        for index, packed in enumerate(attached.token_ids[: len(self._choices)]):
            choice = self._choices[index]
            num_known = len(choice.token_ids) - attached.from_token
            if self._wants_logprobs and index < len(attached.logprobs):
                values = attached.logprobs[index]
                choice.logprobs.cut(len(choice.token_ids))
                choice.logprobs.extend(values.between(num_known, values.num_tokens))
            token_ids = unpack_ids(packed)[num_known:]
            if is_new:
                token_ids = self._recall(choice, token_ids)
            choice.gathered += token_ids
        known = {finished.choice: finished for finished in self._state.ended} if self._state is not None else {}
        for finished in attached.finished:
            self.finish(known.get(finished.choice, finished))
        ended_there = {finished.choice for finished in attached.finished}
        self._stopped += [choice.index for choice in self._choices if choice.ending and choice.index not in ended_there]
        if is_new and self.refusal is None:
            self._check_ends()
        self.flush()
        if not self.started.done():
            self.started.set_result(None)

    def _can_open(self, state: StreamState, attached: Attached, old: Attached | None) -> bool:
        """Whether all is known that is told of the prompt. A new engine does not get it with a continuation,
        and computes it anew before the next token."""
        if state.num_prompt_logprobs < 0 and not (state.echo and state.sampling.logprobs >= 0):
            return True
        known = [told.prompt_logprobs for told in (attached, old) if told is not None]
        num_known = max(values.num_tokens if values is not None else 0 for values in known)
        return num_known >= len(attached.prompt_token_ids) // 4 - 1

    def _recall(self, choice: _Choice, token_ids: list[int]) -> list[int]:
        """Tell the outlet what its client has, in parts of its own, so that it can pass over it. Returns the rest."""
        start = 0
        cuts = self._known.mark(choice.index).cuts if self.refusal is None else ()
        for cut in cuts:
            if cut > start:
                choice.gathered = token_ids[start:cut]
                self._take_tokens(choice, None)
                self._outlet.flush()
                start = cut
        return token_ids[start:]

    def _check_ends(self) -> None:
        """Before anything of it goes out: what the client has must be there, and what it has the end of have ended."""
        for choice in self._choices:
            if choice.gathered:
                self._take_tokens(choice, None)
        try:
            self._known.check_tokens([_num_shown(choice) for choice in self._choices])  # none behind a stop string
            self._known.check_ends(
                [choice.ending is not None for choice in self._choices],
                # One that was broken off may have more tokens in the engine than its client had been sent
                [_num_shown(choice) if _ends_by_itself(choice) else None for choice in self._choices],
            )
        except InvalidField as error:
            self._refuse(error)

    def _refuse(self, error: InvalidField | EngineUnavailable) -> None:
        self.refusal = error
        self._outlet = NoOutlet()

    def _take_tokens(self, choice: _Choice, finished: Finished | None) -> None:
        """Gathered tokens → one delta, and the choice's end where it has come."""
        gathered, choice.gathered = choice.gathered, []
        if choice.ending is not None:
            return  # behind a stop string, on their way when it was found
        detokenizer = choice.detokenizer
        state = self._state
        assert state is not None
        if not choice.is_open and (gathered or (finished is not None and finished.finish_reason in _OWN_ENDS)):
            self._open_choice(choice)
        start = len(choice.token_ids)
        choice.token_ids += gathered
        if choice.is_hidden:
            if finished is not None:
                reason = "length" if finished.finish_reason in _OWN_ENDS else finished.finish_reason
                self._close_choice(choice, Ending(reason, finished.cause if reason != "length" else ""))
            return
        wants_logprobs = self._wants_logprobs
        offsets: list[int] = []
        texts = []
        ending: Ending | None = None
        for token_id in gathered:
            if wants_logprobs:
                offsets.append(choice.num_chars + detokenizer.num_held_chars)
            if (
                finished is not None
                and token_id == finished.stop_token_id
                and token_id is gathered[-1]
                and not state.include_stop_str_in_output
            ):
                break
            text = detokenizer.push(token_id)
            texts.append(json_inside(text) if text else b"")
            if wants_logprobs:
                choice.num_chars += len(text)
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
        first = choice.num_sent
        token_ids = choice.token_ids[first:num_shown]
        choice.num_sent = num_shown
        joined = b"".join(texts)
        if joined or token_ids:
            logprobs: Sequence[TokenLogprob] = ()
            if wants_logprobs and token_ids:
                offsets = offsets[first - start :]
                logprobs = choice.logprobs.of(token_ids, first, state.sampling.logprobs, offsets)
            self._outlet.delta(choice.index, Delta(joined, token_ids, logprobs))
        if ending is not None:
            self._close_choice(choice, ending)

    def _open_choice(self, choice: _Choice) -> None:
        """Tell what was asked for of the prompt, before the choice's first token."""
        choice.is_open = True
        if self.refusal is not None:
            return  # nobody is told, and not all may be known
        state = self._state
        assert state is not None
        logprobs = self._told_of_prompt(state.sampling.logprobs) if state.echo and self._wants_logprobs else []
        asked = state.num_prompt_logprobs
        self._outlet.delta(
            choice.index,
            Delta(
                json_inside(self._echo_text or "") if state.echo else b"",
                logprobs=logprobs,
                prompt_logprobs=self._told_of_prompt(asked) if asked >= 0 else None,
            ),
        )

    def _told_of_prompt(self, num_top: int) -> list[TokenLogprob]:
        """The prompt's log probabilities, with where its tokens stand in an echo."""
        state = self._state
        assert state is not None
        prompt = self.prompt_token_ids
        offsets: list[int] = []
        if state.echo:
            detokenizer = Detokenizer(self._tokenizer, skip_special_tokens=state.skip_special_tokens)
            num_chars, most = 0, len(self._echo_text or "")
            for token_id in prompt:
                offsets.append(min(num_chars, most))
                num_chars += len(detokenizer.push(token_id))
        return [TokenLogprob(prompt[0], None), *self._prompt_logprobs.of(prompt[1:], 0, num_top, offsets[1:])]

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

    def hand_over(self, cause: str = "attached_elsewhere") -> None:
        """Somebody else attaches to it: it ends here, but not in the engine."""
        if not self._is_done:
            self._engine.release(self)
            self._end_early(Ending("abort", cause), "")

    def check_known(self, known: Cursor) -> None:
        """Whether it has come as far as a client says. Raises InvalidField."""
        if self._choices:
            known.check_choices(len(self._choices))
            known.check_tokens([_num_shown(choice) for choice in self._choices])

    def let_go(self) -> None:
        """It ends here, and nobody is told; it goes on in the engine, and somebody may attach to it."""
        self._outlet = NoOutlet()
        self.is_broken_off = not self._is_done
        self.hand_over(_BROKEN_OFF)

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

    @property
    def has_ended_by_itself(self) -> bool:
        """Every choice came to its end, and none was broken off."""
        return self._is_done and self.failure is None and all(end.finish_reason in _OWN_ENDS for end in self.endings)

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


def _ends_by_itself(choice: _Choice) -> bool:
    return choice.ending is not None and choice.ending.finish_reason in _OWN_ENDS


def _num_shown(choice: _Choice) -> int:
    if choice.is_hidden:
        return 0
    num_tokens = len(choice.token_ids)
    if choice.detokenizer.stopped is not None:
        return min(choice.detokenizer.num_tokens_shown, num_tokens)
    return num_tokens


class NoOutlet:
    """Takes a stream that nobody reads at the moment; its tokens stay with the stream and the engine."""

    def begin(self, stream: Stream) -> None: ...

    def piece(self, choice: int, text: bytes, token_id: int) -> None: ...

    def delta(self, choice: int, delta: Delta) -> None: ...

    def end(self, choice: int, ending: Ending) -> None: ...

    def flush(self) -> None: ...

    def close(self, usage: Usage, failure: StreamKVError | None) -> None: ...


class AbandonedOutlet(NoOutlet):
    """For a stream whose client went before its attach was answered: `on_begin` decides once it is known what it is."""

    def __init__(self, on_begin: Callable[[Stream], None]) -> None:
        self._on_begin = on_begin

    def begin(self, stream: Stream) -> None:
        self._on_begin(stream)
