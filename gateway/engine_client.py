"""The gateway's end of the wire: hello, heartbeats, requests out, every step's tokens to the streams they belong to.

A step costs one frame and, per token, one dictionary look-up and one call: the sink writes to its client's transport
before the next row is looked at. No task is switched and no future made on that path.

A live request outlasts its engine. When an engine with another epoch is ready, each one is submitted again as prompt
plus the tokens so far, and what has ended and can still be attached to is given to it, too; when only the connection
broke, each one is attached again from the first token that is missing here. Every submission has a fresh request id, so
what an old one still brings is not taken for the new.
"""

import asyncio
import enum
import itertools
import logging
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from gateway.ended_streams import EndedStreams
from streamkv.errors import StreamKVError, WireDecodeError
from streamkv.log import fields
from streamkv.protocol import (
    WIRE_VERSION,
    Abort,
    Attach,
    Attached,
    EngineMessage,
    Finished,
    Forget,
    GetSnapshot,
    GetStats,
    HandedOver,
    Heartbeat,
    Hello,
    Loading,
    Pause,
    Ready,
    Rejected,
    Resume,
    Snapshot,
    Stats,
    StepOutput,
    Submit,
    TokenLogprobs,
    WireError,
    decode_from_engine,
    encode,
    unpack_ids,
)
from streamkv.transport import MAX_FRAME_BYTES, CurveKeys, GatewaySocket, new_gateway_id

logger = logging.getLogger(__name__)

ACK_BYTES: Final = 64 * 1024
"""Output received since the last heartbeat that makes the next one due at once: far under a quarter of any sensible
max_unacked_bytes, so that the engine never waits for us."""
_MAX_REQUEST_ID: Final = 2**31 - 1
_GIVEN_PER_TURN: Final = 100
"""Ended streams that a new engine is given in one turn of the loop, which takes a few milliseconds; and the bytes of
them after which it's the next one's turn."""
_GIVEN_BYTES_PER_TURN: Final = 1024 * 1024
_GIVE_AGAIN_S: Final = 0.1
_MAX_UNHEARD_ABORTS: Final = 10_000
"""Requests of which the engine has not yet said that they ended; beyond that the oldest is not aborted again."""
_MAX_UNHEARD_FORGETS: Final = 10_000
"""Deletions that no engine has confirmed; beyond that the oldest is not repeated any more."""


class EngineUnavailable(StreamKVError):
    """No engine takes work now. Worth trying again."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineState(enum.Enum):
    CONNECTING = enum.auto()
    """Nobody answers at the endpoint yet."""
    LOADING = enum.auto()
    READY = enum.auto()
    LOST = enum.auto()
    """It was there, and its connection broke or it fell silent."""
    INCOMPATIBLE = enum.auto()
    """It speaks another wire version."""


class Sink(Protocol):
    """One live request, as the wire sees it. The client calls it on the event loop.

    After its end (`is_done`) it gets no further call.
    """

    def hit(self, num_cached_tokens: int) -> None:
        """So many of its prompt's tokens were found in the prefix cache. Before its first token, if at all."""

    def logprobs(self, choice: int, values: TokenLogprobs) -> None:
        """Of the tokens that this step brings to a choice, and before them."""

    def prompt_logprobs(self, start: int, values: TokenLogprobs) -> None:
        """Of the prompt's tokens from number `start` on; the last before the first token."""

    def push_token(self, token_id: int) -> None:
        """One new token of choice 0, which does not end with it. Goes out at once."""

    def push(self, choice: int, token_ids: list[int]) -> None:
        """New tokens of a choice. Gathered until `flush`."""

    def finish(self, finished: Finished) -> None:
        """A choice's terminal entry, after its last token. Gathered until `flush`."""

    def flush(self) -> None:
        """The step is over for this request: what was gathered goes out in one write."""

    def reject(self, rejected: Rejected) -> None:
        """The engine did not take it."""

    def break_off(self) -> None:
        """One of the calls here raised, or what it gave could not be sent: end with an error."""

    def suspected(self, num_ranked_tokens: int) -> None:
        """The engine that ended was computing it: it may be why. num_ranked_tokens: how far its choices had come, where
        they are ranked, so that nobody was told; else 0."""

    def forgotten(self) -> None:
        """Its owner has deleted it: it ends with `abort`, cause `cancelled`. One that is just attached to waits for
        the engine's answer, but does not go on from what is known of it here."""

    def attached(self, attached: Attached) -> None:
        """The engine's answer to an Attach: tokens from `from_token` on, those known already included."""

    def submission(self, request_id: int) -> Submit | None:
        """A Submit that goes on from the tokens so far. None when it must not be tried again; it has ended then."""

    @property
    def stream_id(self) -> bytes: ...

    @property
    def tenant(self) -> str:
        """Whose it is, as its Submit says."""

    @property
    def num_known_tokens(self) -> int:
        """Tokens that every choice has here: the first one that may be missing."""

    @property
    def is_paused(self) -> bool: ...

    @property
    def is_done(self) -> bool: ...


class EngineClient:
    """One gateway's connection to its engine. Everything runs on the event loop that called `start`."""

    def __init__(
        self,
        endpoint: str,
        *,
        heartbeat_s: float,
        engine_timeout_s: float,
        keys: CurveKeys | None = None,
        on_state: Callable[[EngineState], None] | None = None,
    ) -> None:
        self._gateway_id = new_gateway_id()
        self._heartbeat_s = heartbeat_s
        self._engine_timeout_s = engine_timeout_s
        self._on_state = on_state
        self._socket = GatewaySocket(
            endpoint,
            self._gateway_id,
            on_frame=self._on_frame,
            on_connected=self._on_connected,
            on_disconnected=self._on_disconnected,
            keys=keys,
        )
        self.state = EngineState.CONNECTING
        self.stage = "waiting for the engine"
        self.percent = 0.0
        self.ready: Ready | None = None
        """What the newest engine said of itself; stays when it is lost."""
        self.num_engine_losses = 0
        self.num_restarts = 0
        """Engines that took work after another one had."""
        self.num_resubmitted = 0
        self.num_tokens = 0
        self.num_bytes = 0
        self.ended = EndedStreams()
        """Streams of this gateway that have ended and can still be attached to."""
        self.now = 0.0
        """Loop time when the frame being handed out came in: one clock read for all tokens of a step."""
        self._sinks: dict[int, Sink] = {}
        self._request_ids = itertools.count(1)
        self._id_by_sink: dict[Sink, int] = {}
        self._unsent: set[Sink] = set()
        """Live requests that the engine of now does not have."""
        self._attaching: set[Sink] = set()
        """Attached on a client's behalf: there is nothing to submit again before the answer."""
        self._earlier_ids: dict[Sink, list[int]] = {}
        """Under which the engine may still have a live request: it has a newer one, and the Attach that says so may be
        lost with its connection."""
        self._unheard_aborts: dict[int, str] = {}
        """Causes by request id: ended here, and the engine has not said so yet, the oldest first. A connection that
        breaks loses what was sent, and what nobody ends runs on in the engine unread."""
        self._unheard_forgets: dict[Forget, None] = {}
        """What was deleted here and the engine has not sent back yet, the oldest first: a connection that breaks, or an
        engine that loads, loses what it is sent."""
        self._given_epoch = 0
        """The engine life that was given all that had ended."""
        self._certain_epoch = 0
        """The newest of which that is certain: it has answered what it was asked behind the HandedOver, or it was the
        first, of which there is nothing to bring."""
        self._certainty_query = 0
        """What it was asked; 0: nothing."""
        self._giving: asyncio.Handle | None = None
        self._stats_queries: dict[int, asyncio.Future[Stats]] = {}
        self._snapshot_queries: dict[int, asyncio.Future[Snapshot]] = {}
        self._ready_event = asyncio.Event()
        self._needs_attach = False
        self._heard_at = 0.0
        self._ticked_at = 0.0
        self._last_step = 0
        self._bytes_since_heartbeat = 0
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin to connect, from the running loop."""
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._ticked_at = self._loop.time()
        self._socket.connect()
        self._timer = self._loop.call_later(self._heartbeat_s, self._tick)

    def close(self) -> None:
        """Drop the connection. Live requests are not told; whoever owns them ends them first."""
        if self._timer is not None:
            self._timer.cancel()
        if self._giving is not None:
            self._giving.cancel()
        for future in self._stats_queries.values():
            future.cancel()
        for asked in self._snapshot_queries.values():
            asked.cancel()
        self._socket.close()

    # Requests

    @property
    def is_ready(self) -> bool:
        return self.state is EngineState.READY

    @property
    def num_live(self) -> int:
        return len(self._id_by_sink)

    async def wait_ready(self, timeout_s: float) -> Ready:
        """The engine's facts once it takes work. Raises EngineUnavailable after `timeout_s`, or at once when waiting
        cannot help."""
        if self.state is not EngineState.READY and self.state is not EngineState.INCOMPATIBLE and timeout_s > 0:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._ready_event.wait()
            except TimeoutError:
                pass
        if self.state is EngineState.READY and self.ready is not None:
            return self.ready
        raise self._unavailable(5.0)

    def submit(self, sink: Sink) -> None:
        """Start a request. With no engine at the moment it is sent when there is one."""
        self._id_by_sink[sink] = 0
        self._send_submission(sink)

    def attach(self, sink: Sink) -> None:
        """Take up a stream of the engine's, from the sink's first missing token. Raises EngineUnavailable."""
        if self.state is not EngineState.READY:
            raise self._unavailable(1.0)
        self._attaching.add(sink)
        self._send_attach(sink)

    def abort(self, sink: Sink, cause: str) -> None:
        """Stop a request and forget it. Its sink gets no further call. Harmless for one that has ended."""
        for request_id in (*self._earlier_ids.get(sink, ()), self._forget(sink)):
            if not request_id:
                continue  # never sent
            self._unheard_aborts[request_id] = cause
            if len(self._unheard_aborts) > _MAX_UNHEARD_ABORTS:
                del self._unheard_aborts[next(iter(self._unheard_aborts))]
            self._socket.send(encode(Abort(request_id, cause)))

    def abort_choice(self, sink: Sink, choice: int, cause: str) -> None:
        """Stop one choice of a request of which others go on. What of it is on its way may still come.

        Not kept for an engine that is not connected: a later Submit leaves the choice out, and who is attached again
        asks anew.
        """
        request_id = self._id_by_sink.get(sink, 0)
        if request_id:
            self._socket.send(encode(Abort(request_id, cause, choice)))

    def forget(self, stream_id: bytes, tenant: str) -> None:
        """End a stream, live or not, and have nobody keep any of it: no gateway, and neither this engine nor a next."""
        self.ended.drop(stream_id, tenant)
        forget = Forget(stream_id, tenant)
        self._unheard_forgets[forget] = None
        if len(self._unheard_forgets) > _MAX_UNHEARD_FORGETS:
            del self._unheard_forgets[next(iter(self._unheard_forgets))]
        if self.state is EngineState.READY:
            self._socket.send(encode(forget))

    def release(self, sink: Sink) -> None:
        """Forget a request that goes on in the engine: somebody attaches to it."""
        self._forget(sink)

    def pause(self, sink: Sink) -> None:
        """Its reader is slow: the engine sets it aside. A few steps' tokens may still come."""
        request_id = self._id_by_sink.get(sink, 0)
        if request_id:
            self._socket.send(encode(Pause(request_id)))

    def resume(self, sink: Sink) -> None:
        request_id = self._id_by_sink.get(sink, 0)
        if request_id:
            self._socket.send(encode(Resume(request_id)))

    async def stats(self, timeout_s: float) -> Stats | None:
        """The engine's figures, or None when it does not answer in time."""
        if self.state is not EngineState.READY:
            return None
        query_id = next(self._request_ids)
        future: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        self._stats_queries[query_id] = future
        try:
            self._socket.send(encode(GetStats(query_id)))
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            return None
        finally:
            del self._stats_queries[query_id]

    async def snapshot(self, timeout_s: float) -> Snapshot | None:
        """Every block and sequence of the engine, or None when it does not answer in time."""
        if self.state is not EngineState.READY:
            return None
        query_id = next(self._request_ids)
        future: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
        self._snapshot_queries[query_id] = future
        try:
            self._socket.send(encode(GetSnapshot(query_id)))
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            return None
        finally:
            del self._snapshot_queries[query_id]

    def _take_id(self, sink: Sink) -> int:
        """A fresh request id for this sink; an older one stops being known."""
        old = self._id_by_sink.get(sink, 0)
        if old:
            self._sinks.pop(old, None)
            self._earlier_ids.setdefault(sink, []).append(old)
        request_id = next(self._request_ids)
        if request_id >= _MAX_REQUEST_ID:
            self._request_ids = itertools.count(1)
        while request_id in self._sinks or request_id in self._unheard_aborts:
            request_id = next(self._request_ids)
        self._id_by_sink[sink] = request_id
        self._sinks[request_id] = sink
        return request_id

    def _forget(self, sink: Sink) -> int:
        request_id = self._id_by_sink.pop(sink, 0)
        self._sinks.pop(request_id, None)
        self._earlier_ids.pop(sink, None)
        self._unsent.discard(sink)
        self._attaching.discard(sink)
        return request_id

    def _send_submission(self, sink: Sink) -> None:
        if self.state is not EngineState.READY:
            self._unsent.add(sink)
            return
        try:
            submit = sink.submission(self._take_id(sink))
            is_sent = submit is not None and self._socket.send(encode(submit))
        except Exception as error:  # too large for a frame, for one
            self._break(sink, error)
            return
        if submit is None:
            self._forget(sink)
        elif not is_sent:
            self._unsent.add(sink)
        elif sink.is_paused:
            self.pause(sink)

    def _send_attach(self, sink: Sink) -> None:
        request_id = self._take_id(sink)
        if not self._socket.send(encode(Attach(request_id, sink.stream_id, sink.num_known_tokens, sink.tenant))):
            self._unsent.add(sink)
        elif sink.is_paused:
            self.pause(sink)  # an attached stream begins to run

    def _unavailable(self, retry_after_s: float) -> EngineUnavailable:
        progress = f", {self.percent:.0f} %" if self.state is EngineState.LOADING else ""
        return EngineUnavailable(f"the engine is not ready: {self.stage}{progress}; try again", retry_after_s)

    # What comes in

    def _on_frame(self, frame: bytes) -> None:
        self.now = self._heard_at = self._time()
        try:
            message = decode_from_engine(frame)
        except WireDecodeError as error:
            logger.error("dropped a frame from the engine", extra=fields(error=str(error), num_bytes=len(frame)))
            return
        try:
            self._take(message, len(frame))
        except Exception:  # the frames behind this one must still be handed out
            logger.exception("a message of the engine could not be taken in")

    def _take(self, message: EngineMessage, num_bytes: int) -> None:
        if type(message) is StepOutput:
            self._on_step(message)
            self._last_step = message.step
            self.num_bytes += num_bytes
            self._bytes_since_heartbeat += num_bytes
            if self._bytes_since_heartbeat >= ACK_BYTES:
                self._send_heartbeat()
        else:
            self._on_message(message)
        if self.state is EngineState.LOST and self._socket.is_connected and type(message) is not Loading:
            self._send_hello()  # it lives after all: have it say what it is

    def _on_step(self, output: StepOutput) -> None:
        """Hand a step's rows to their sinks. The common step has one token for each of many requests."""
        request_ids = unpack_ids(output.request_ids)
        token_ids = unpack_ids(output.token_ids)
        self.num_tokens += len(token_ids)
        sinks = self._sinks
        if output.hits:
            self._on_hits(unpack_ids(output.hits))
        if output.logprobs or output.prompt_logprobs:
            self._on_logprobs(output, request_ids)
        if output.num_tokens or output.choices:
            self._on_mixed_step(output, request_ids, token_ids)
            return
        gathering = {finished.request_id for finished in output.finished}
        for request_id, token_id in zip(request_ids, token_ids, strict=True):
            sink = sinks.get(request_id)
            if sink is None:
                continue
            if request_id in gathering:
                sink.push(0, [token_id])
            else:
                try:
                    sink.push_token(token_id)
                except Exception as error:
                    self._break(sink, error)
        if gathering:
            self._on_ends(output.finished, gathering)

    def _on_hits(self, hits: list[int]) -> None:
        for request_id, num_cached_tokens in zip(hits[::2], hits[1::2], strict=False):
            sink = self._sinks.get(request_id)
            if sink is not None:
                sink.hit(num_cached_tokens)

    def _on_logprobs(self, output: StepOutput, request_ids: list[int]) -> None:
        """Before the tokens that they are of."""
        for part in output.prompt_logprobs:
            sink = self._sinks.get(part.request_id)
            if sink is not None:
                try:
                    sink.prompt_logprobs(part.start, part.values)
                except Exception as error:
                    self._break(sink, error)
        choices = unpack_ids(output.choices) if output.choices else [0] * len(request_ids)
        for of_row in output.logprobs:
            sink = self._sinks.get(request_ids[of_row.row])
            if sink is not None:
                try:
                    sink.logprobs(choices[of_row.row], of_row.values)
                except Exception as error:
                    self._break(sink, error)

    def _on_mixed_step(self, output: StepOutput, request_ids: list[int], token_ids: list[int]) -> None:
        counts = unpack_ids(output.num_tokens) if output.num_tokens else [1] * len(request_ids)
        choices = unpack_ids(output.choices) if output.choices else [0] * len(request_ids)
        start = 0
        for request_id, choice, count in zip(request_ids, choices, counts, strict=True):
            sink = self._sinks.get(request_id)
            if sink is not None:
                sink.push(choice, token_ids[start : start + count])
            start += count
        self._on_ends(output.finished, {*request_ids, *(finished.request_id for finished in output.finished)})

    def _on_ends(self, ends: list[Finished], gathering: set[int]) -> None:
        """Give the terminal entries out, and flush the requests that gathered tokens of this step."""
        lost: dict[Sink, None] = {}
        for finished in ends:
            sink = self._sinks.get(finished.request_id)
            if sink is None:
                self._hear_of_abort(finished)
                continue
            if finished.finish_reason == "abort" and finished.cause == "gateway_lost":
                lost[sink] = None  # it took us for dead; we are not
            else:
                try:
                    sink.finish(finished)
                except Exception as error:
                    self._break(sink, error)
        for request_id in gathering:
            sink = self._sinks.get(request_id)
            if sink is not None:
                try:
                    sink.flush()
                except Exception as error:
                    self._break(sink, error)
                if sink.is_done:
                    self._forget(sink)
        for sink in lost:
            if not sink.is_done and sink in self._id_by_sink:
                self.num_resubmitted += 1
                self._send_submission(sink)

    def _hear_of_abort(self, finished: Finished) -> None:
        """Another end may have been on its way before the Abort came, also one by the abort of a choice alone."""
        request_id = finished.request_id
        if finished.finish_reason == "abort" and finished.cause == self._unheard_aborts.get(request_id):
            del self._unheard_aborts[request_id]

    def _break(self, sink: Sink, error: Exception) -> None:
        """A fault of ours in one stream: it ends, the others and the connection do not notice."""
        logger.error("a stream broke on its way from or to the engine", exc_info=error)
        self.abort(sink, "internal_error")
        sink.break_off()

    def _on_message(self, message: EngineMessage) -> None:
        match message:
            case Heartbeat() | StepOutput():
                pass
            case Ready():
                self._on_ready(message)
            case Loading():
                self.stage, self.percent = message.stage, message.percent
                self._set_state(EngineState.LOADING)
            case Rejected():
                self._on_rejected(message)
            case Attached():
                sink = self._sinks.get(message.request_id)
                if sink is not None:
                    self._attaching.discard(sink)
                    self._earlier_ids.pop(sink, None)
                    try:
                        sink.attached(message)
                    except Exception as error:
                        self._break(sink, error)
                    if sink.is_done:
                        self._forget(sink)
            case Stats():
                if message.query_id == self._certainty_query:
                    self._certain_epoch, self._certainty_query = self._given_epoch, 0
                query = self._stats_queries.get(message.query_id)
                if query is not None and not query.done():
                    query.set_result(message)
            case Snapshot():
                asked = self._snapshot_queries.get(message.query_id)
                if asked is not None and not asked.done():
                    asked.set_result(message)
            case Forget():
                self._on_forget(message)
            case WireError():
                self._on_wire_error(message)

    def _on_forget(self, forget: Forget) -> None:
        """O(live requests), in which one that is deleted is rarely found."""
        self._unheard_forgets.pop(forget, None)
        self.ended.drop(forget.stream_id, forget.tenant)
        for sink in list(self._id_by_sink):
            if sink.stream_id == forget.stream_id and sink.tenant == forget.tenant:
                sink.forgotten()

    def _on_ready(self, ready: Ready) -> None:
        is_new = self.ready is None or self.ready.epoch != ready.epoch
        if self.ready is None:
            self._certain_epoch = ready.epoch
        self.num_restarts += is_new and self.ready is not None
        self.ready = ready
        self.stage, self.percent = "ready", 100.0
        if is_new:
            self._last_step = 0
        self._set_state(EngineState.READY)
        if is_new:
            self._unheard_aborts.clear()
        for request_id, cause in self._unheard_aborts.items():
            self._socket.send(encode(Abort(request_id, cause)))
        for forget in self._unheard_forgets:
            self._socket.send(encode(forget))
        unsent, self._unsent = self._unsent, set()
        suspects = dict.fromkeys(ready.suspects, 0) | dict(zip(ready.suspects, ready.suspects_tokens, strict=False))
        for sink in list(self._id_by_sink):
            if is_new and sink.stream_id in suspects:
                sink.suspected(suspects[sink.stream_id])
            if sink in self._attaching:
                self._send_attach(sink)  # what it knows of a stream it can only have kept itself
            elif is_new or sink in unsent:
                if self._id_by_sink[sink]:
                    self.num_resubmitted += 1
                self._send_submission(sink)
            elif self._needs_attach:
                self._send_attach(sink)
        if is_new:
            self._earlier_ids.clear()
        self._needs_attach = False
        if self._given_epoch != ready.epoch:  # also one that was given a part, before the connection broke
            if self._giving is not None:
                self._giving.cancel()
            self._give(ready.epoch, deque(self.ended.stream_ids))

    def _give(self, epoch: int, stream_ids: deque[bytes]) -> None:
        """Give the engine what has ended, and say when that is all. Goes on in the next turn of the loop, or later with
        what could not be sent; when the engine is lost it begins again with the next Ready."""
        self._giving = None
        assert self._loop is not None
        if self.state is not EngineState.READY or self.ready is None or self.ready.epoch != epoch:
            return
        num_bytes = num_given = 0
        while stream_ids and num_given < _GIVEN_PER_TURN and num_bytes < _GIVEN_BYTES_PER_TURN:
            keep = self.ended.for_next_engine(stream_ids[0])
            frame = encode(keep) if keep is not None else b""
            if 0 < len(frame) <= MAX_FRAME_BYTES and not self._socket.send(frame):
                break
            stream_ids.popleft()
            num_bytes += len(frame)
            num_given += 1
        else:
            if stream_ids:
                self._giving = self._loop.call_soon(self._give, epoch, stream_ids)
                return
            if self._socket.send(encode(HandedOver())):
                self._given_epoch, self._certainty_query = epoch, next(self._request_ids)
                self._socket.send(encode(GetStats(self._certainty_query)))
                return
        self._giving = self._loop.call_later(_GIVE_AGAIN_S, self._give, epoch, stream_ids)

    def _on_rejected(self, rejected: Rejected) -> None:
        sink = self._sinks.get(rejected.request_id)
        if sink is None:
            return
        if rejected.code == "unknown_stream" and sink not in self._attaching:
            self._send_submission(sink)  # attached again after a broken connection, but the engine let it go
            return
        if rejected.code == "duplicate" and sink not in self._attaching:
            self._send_attach(sink)  # the engine kept it after all: stream ids are too random to be another's
            return
        self._forget(sink)
        sink.reject(rejected)

    def _on_wire_error(self, error: WireError) -> None:
        if error.code == "wire_version":
            self.stage = error.message
            self._set_state(EngineState.INCOMPATIBLE)
            logger.error("the engine speaks another wire version", extra=fields(error=error.message))
            return
        sink = self._sinks.get(error.request_id)
        if error.code in ("hello_first", "not_ready"):
            if sink is not None:
                self._unsent.add(sink)
            # We were silent for too long, and the engine let our streams go or keeps them for whoever attaches.
            if error.code == "hello_first":
                self._needs_attach = True
                self._doubt_given()
            self._set_state(EngineState.LOST)
            self._send_hello()
            return
        logger.error("the engine dropped a message", extra=fields(code=error.code, error=error.message))
        if sink is not None:
            self._forget(sink)
            sink.reject(Rejected(error.request_id, "internal", error.message))

    # The connection

    def _on_connected(self) -> None:
        self._heard_at = self._time()
        self._send_hello()

    def _doubt_given(self) -> None:
        """What was sent of late may not have been taken in: of what had ended, all is given again that is not certain
        to be there."""
        self._given_epoch, self._certainty_query = self._certain_epoch, 0

    def _on_disconnected(self) -> None:
        self._doubt_given()
        if self.state is not EngineState.INCOMPATIBLE:
            self._lose("the engine's connection broke")

    def _lose(self, why: str) -> None:
        if self.state is EngineState.READY:
            self.num_engine_losses += 1
            logger.warning("engine lost", extra=fields(reason=why, num_live=self.num_live))
        self._needs_attach = True
        self.stage, self.percent = why, 0.0
        self._set_state(EngineState.LOST)

    def _tick(self) -> None:
        loop = self._loop
        assert loop is not None
        self._timer = loop.call_later(self._heartbeat_s, self._tick)
        # Silence counts while we listen: not while this process, or the whole machine, stood still.
        now = self._time()
        self._heard_at += max(0.0, now - self._ticked_at - 2 * self._heartbeat_s)
        self._ticked_at = now
        if not self._socket.is_connected or self.state is EngineState.INCOMPATIBLE:
            return
        if now - self._heard_at > self._engine_timeout_s and self.state is not EngineState.LOST:
            self._lose(f"the engine said nothing for {self._engine_timeout_s:g} s")
        self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        self._bytes_since_heartbeat = 0
        self._socket.send(encode(Heartbeat(self._last_step, self.ready.epoch if self.ready is not None else 0)))

    def _send_hello(self) -> None:
        self._socket.send(encode(Hello(WIRE_VERSION, self._gateway_id, self._given_epoch)))

    def _set_state(self, state: EngineState) -> None:
        if state is self.state and state is not EngineState.LOADING:
            return
        self.state = state
        if state is EngineState.READY:
            self._ready_event.set()
        else:
            self._ready_event.clear()
        if self._on_state is not None:
            self._on_state(state)

    def _time(self) -> float:
        assert self._loop is not None
        return self._loop.time()
