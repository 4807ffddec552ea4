"""One live stream: between the engine that computes it and the outlet that tells its client.

The path of a token is engine_client → `Stream.push_token` → an `Outlet` (an SSE answer, a WebSocket, a body that is
being gathered) → a `BoundedWriter` → the client's transport, within one turn of the loop and without a task switch.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from gateway.choice import Choice
from gateway.cursor import FROM_START, Cursor
from gateway.engine_client import EngineClient, EngineUnavailable
from gateway.failures import EngineFault, RequestTimeout, UnknownStream, failure_of
from gateway.logprobs import LogprobForms
from gateway.outlet import ATTACHED_ELSEWHERE, BROKEN_OFF, Ending, NoOutlet, Outlet, Usage
from gateway.stream_content import StreamContent
from gateway.stream_state import StreamState
from gateway.taking_up import check_ends, check_place, parts_of, refusal_of, state_of
from gateway.tokenizer import Tokenizer
from streamkv.errors import InvalidField, StreamKVError
from streamkv.protocol import STREAM_ID_BYTES, Attached, Finished, Rejected, Submit, TokenLogprobs, unpack_ids

logger = logging.getLogger(__name__)


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
    is closed. What ends it raises nothing; what feeds it raises what its outlet does.
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
        self._content: StreamContent | None = None
        """None while an attach is unanswered."""
        self._first: Choice | None = None
        self._takes_pieces = False
        """Choice 0 is past its first token, alone, and holds nothing back: a token's text is its piece."""
        self._num_open = 0
        self._stopped: list[int] = []
        """Choices that ended here, by a stop string, and go on in the engine, which has not been told."""
        self._deaths_before_content: list[int] = []
        """Places at which the engine ended that had not yet said what it is."""
        self._is_done = False
        self._reasons_to_pause: set[str] = set()
        self.num_cached = 0
        self.num_inherited = 0
        """Tokens that were there when it was taken up from the engine."""
        self.request_id = ""
        """Of the request that takes it up: of its own, for the log, where the stream is not found."""
        self.is_broken_off = False
        """Its client was told no end, and the connection has to show that: it goes on in the engine, or its outlet has
        failed."""
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
        self._begin_content(StreamContent(state, prompt_token_ids, self._tokenizer, echo_text))
        self._engine.submit(self)

    def begin_attach(self) -> None:
        """Take it up from the engine. Raises EngineUnavailable."""
        self._engine.attach(self)

    def _begin_content(self, content: StreamContent) -> None:
        self._content = content
        self._first = content.choices[0]
        self._num_open = len(content.choices)
        if content.state.parsing is not None and self._parse is not None:
            self._outlet = self._parse(self._outlet, content.state)
        self._outlet.begin(self)

    # What it is

    @property
    def stream_id(self) -> bytes:
        return self._stream_id

    @property
    def state(self) -> StreamState | None:
        """None while an attach is unanswered."""
        return self._content.state if self._content is not None else None

    @property
    def tenant(self) -> str:
        return self._tenant

    @property
    def known(self) -> Cursor:
        return self._known

    @property
    def num_prompt(self) -> int:
        return self._content.prompt.num_tokens if self._content is not None else 0

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._content.prompt.token_ids if self._content is not None else []

    @property
    def logprob_forms(self) -> LogprobForms | None:
        """How its log probabilities are told; None: there are none. Once it has a state."""
        assert self._content is not None
        return self._content.logprob_forms

    @property
    def num_known_tokens(self) -> int:
        return self._content.num_known_tokens if self._content is not None else 0

    @property
    def num_output(self) -> int:
        """Tokens that were shown and count, of all choices."""
        return sum(self._content.num_shown) if self._content is not None else 0

    @property
    def is_paused(self) -> bool:
        return bool(self._reasons_to_pause)

    @property
    def is_done(self) -> bool:
        return self._is_done

    @property
    def endings(self) -> list[Ending]:
        """How each choice ended; complete once it is done."""
        return [choice.ending for choice in self._choices if choice.ending is not None]

    @property
    def has_ended_by_itself(self) -> bool:
        """Every choice came to its end, and none was broken off."""
        return self._is_done and self.failure is None and all(choice.has_ended_by_itself for choice in self._choices)

    @property
    def _choices(self) -> list[Choice]:
        return self._content.choices if self._content is not None else []

    # What the wire asks for, and brings

    def submission(self, request_id: int) -> Submit | None:
        content = self._content
        assert content is not None
        content.clear_by_tokens()
        if content.suspicion.is_guilty:
            num_deaths = content.suspicion.num_deaths
            self._fail(EngineFault(f"the engine ended {num_deaths} times while it worked on this request"))
            return None
        return content.submission(request_id, self._stream_id, self._tenant)

    def suspected(self, num_ranked_tokens: int) -> None:
        if self._content is None:
            self._deaths_before_content.append(num_ranked_tokens)
        else:
            self._content.died(num_ranked_tokens)

    def hit(self, num_cached_tokens: int) -> None:
        self.num_cached = max(self.num_cached, num_cached_tokens)

    def push_token(self, token_id: int) -> None:
        first = self._first
        assert first is not None
        if self._takes_pieces:
            text = self._json_pieces[token_id]
            if text is not None:
                first.token_ids.append(token_id)
                self._outlet.piece(0, text, token_id)
                return
        first.gathered.append(token_id)
        self.flush()

    def logprobs(self, choice: int, values: TokenLogprobs) -> None:
        if self._content is not None:
            self._content.add_logprobs(choice, values)

    def prompt_logprobs(self, start: int, values: TokenLogprobs) -> None:
        if self._content is not None:
            self._content.prompt.add_logprobs(start, values)

    def push(self, choice: int, token_ids: list[int]) -> None:
        choices = self._choices
        if choice < len(choices):
            choices[choice].gathered.extend(token_ids)

    def finish(self, finished: Finished) -> None:
        choices = self._choices
        if finished.choice >= len(choices):
            return
        choice = choices[finished.choice]
        self.num_cached = max(self.num_cached, finished.num_cached_tokens)
        if choice.ending is None:
            choice.finished = finished
        self._tell(choice, finished)

    def flush(self) -> None:
        choices = self._choices
        for choice in choices:
            if choice.gathered:
                self._tell(choice, None)
        if not self.times.first_token and any(choice.token_ids for choice in choices):
            self.times.first_token = self._engine.now
        self._outlet.flush()
        if self.times.first_token and not self.started.done():
            self.started.set_result(None)
        self._takes_pieces = len(choices) == 1 and choices[0].takes_pieces
        if self._num_open == 0:
            self._end()
        else:
            for index in self._stopped:
                self._engine.abort_choice(self, index, "stop_string")
            self._stopped.clear()

    def _tell(self, choice: Choice, finished: Finished | None) -> None:
        """Tell the outlet of gathered tokens, and of the choice's end where it has come."""
        if not choice.is_open and choice.opens_with(finished):
            choice.is_open = True
            if self.refusal is None:  # else nobody is told, and not all may be known
                assert self._content is not None
                self._outlet.delta(choice.index, self._content.prompt.opening())
        delta, ending = choice.take(finished)
        if delta is not None:
            self._outlet.delta(choice.index, delta)
        if ending is not None:
            if finished is None:
                self._stopped.append(choice.index)
            self._close_choice(choice, ending)

    def _close_choice(self, choice: Choice, ending: Ending) -> None:
        choice.ending = ending
        self._num_open -= 1
        if ending.finish_reason == "error" and self.failure is None:
            self.failure = EngineFault(ending.cause or "the engine failed on this request")
        self._outlet.end(choice.index, ending)

    # It is taken up

    def attached(self, attached: Attached) -> None:
        older, self._inherits = self._inherits, None
        self.kept_until_s = min(self.kept_until_s, asyncio.get_running_loop().time() + attached.kept_s)
        is_new = self._content is None
        if is_new:
            try:
                state = state_of(attached)
            except UnknownStream as failure:
                self._engine.abort(self, "cancelled")
                self._fail(failure)
                return
            refusal = refusal_of(attached, state, self._known, older)
            if refusal is not None:
                # It is held here all the same: who had it was told that it is, and the engine alone may end.
                self._refuse(refusal)
            self.num_inherited = sum(len(packed) // 4 for packed in attached.token_ids)
            self._begin_content(StreamContent(state, unpack_ids(attached.prompt_token_ids), self._tokenizer))
        content = self._content
        assert content is not None
        for choice, token_ids in content.take_in(attached, older):
            choice.gathered += self._recall(choice, token_ids) if is_new else token_ids
        earlier = {finished.choice: finished for finished in content.state.ended}
        for finished in attached.finished:
            self.finish(earlier.get(finished.choice, finished))
        ended_there = {finished.choice for finished in attached.finished}
        self._stopped = [c.index for c in content.choices if c.ending is not None and c.index not in ended_there]
        if is_new and self.refusal is None:
            self._check_ends(content)
        self.flush()
        if not self.started.done():
            self.started.set_result(None)

    def _recall(self, choice: Choice, token_ids: list[int]) -> list[int]:
        """Tell the outlet what its client has, so that it can pass over it. Returns the rest."""
        if self.refusal is not None:
            return token_ids
        parts, rest = parts_of(token_ids, self._known.mark(choice.index))
        for part in parts:
            choice.gathered = part
            self._tell(choice, None)
            self._outlet.flush()
        return rest

    def _check_ends(self, content: StreamContent) -> None:
        """Before anything of it goes out: what the client has must be there, and what it has the end of have ended."""
        for choice in content.choices:
            if choice.gathered:
                self._tell(choice, None)
        try:
            check_place(self._known, content.choices)
            check_ends(self._known, content.choices)
        except InvalidField as error:
            self._refuse(error)

    def _refuse(self, error: InvalidField | EngineUnavailable) -> None:
        self.refusal = error
        self._outlet = NoOutlet()

    def reject(self, rejected: Rejected) -> None:
        if rejected.code == "unknown_stream" and self._inherits is not None:
            self._go_on_from(self._inherits)
            return
        is_chat = self.state is not None and self.state.is_chat
        self._fail(failure_of(rejected, prompt_field="messages" if is_chat else "prompt"))

    def _go_on_from(self, remains: Attached) -> None:
        """The engine ended before it could hand it over; what is here is enough to submit it again, or to end it."""
        self._inherits = None
        self.attached(remains)
        if not self._is_done:
            for num_ranked_tokens in self._deaths_before_content:
                self.suspected(num_ranked_tokens)
            self._engine.submit(self)

    def remains(self) -> Attached:
        """What it has, as the engine would tell it. Once it has a state."""
        assert self._content is not None
        return self._content.remains(self._stream_id)

    def check_known(self, known: Cursor) -> None:
        """Whether it has come as far as a client says. Raises InvalidField."""
        if self._content is not None:
            check_place(known, self._content.choices)

    # Ends

    def forgotten(self) -> None:
        self._inherits = None
        if self._content is not None:
            self.cancel("cancelled")

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
        self._fail(_our_fault())

    def hand_over(self, cause: str = ATTACHED_ELSEWHERE) -> None:
        """Somebody else attaches to it: it ends here, but not in the engine."""
        if not self._is_done:
            self._engine.release(self)
            self._end_early(Ending("abort", cause), "")

    def let_go(self) -> None:
        """It ends here, and nobody is told; it goes on in the engine, and somebody may attach to it."""
        self._outlet = NoOutlet()
        if not self._is_done:
            self.is_broken_off = True
            self.hand_over(BROKEN_OFF)

    def _end_early(self, ending: Ending, cause: str) -> None:
        if self._is_done:
            return
        if cause:
            self._engine.abort(self, cause)
        for choice in self._choices:
            choice.gathered.clear()
            if choice.ending is None:
                try:
                    self._close_choice(choice, ending)
                except Exception:
                    self._note_untold()
        self._end()

    def _fail(self, failure: StreamKVError) -> None:
        if not self._is_done:
            self.failure = failure
            self._end_early(Ending("error", str(failure)), "")

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
        except Exception:
            self._note_untold()
        finally:  # whoever waits for the end must see it
            for future in (self.started, self.ended):
                if not future.done():
                    future.set_result(None)

    def _note_untold(self) -> None:
        """Its outlet failed as it was told an end, which is no reason for others to miss theirs: whoever ends a stream
        may have many to end. So nothing is raised."""
        logger.exception("a stream's client could not be told of its end")
        self.is_broken_off = True
        if self.failure is None:
            self.failure = _our_fault()

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


def _our_fault() -> EngineFault:
    return EngineFault("the server made a mistake on this request; its log says more")
