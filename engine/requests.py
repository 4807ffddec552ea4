"""What gateways ask of live requests: take them in, set them aside, hand them over, end them.

Stands between the messages on one side and scheduler and publisher on the other, and answers what it refuses.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from engine.inbox import Inbox
from engine.intake import MAX_REQUEST_ID, check_remains, to_request
from engine.publisher import NO_GATEWAY, Publisher, Stream
from engine.quarantine import Quarantine
from engine.scheduling.drain import predict_drain_s
from engine.scheduling.latency import LatencyModel
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.queue import QueueFull
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Request, SequenceOutput, SequenceState
from engine.stats import EngineStats
from engine.succession import Succession
from streamkv.config import EngineConfig
from streamkv.errors import InvalidField
from streamkv.log import fields
from streamkv.protocol import Abort, Attach, Forget, Keep, ModelFacts, Pause, Rejected, Resume, Submit
from streamkv.sampling import Grammar

logger = logging.getLogger(__name__)

_SHORTEST_RETRY_S = 1.0
_LONGEST_RETRY_S = 120.0
_PREDICT_EVERY_S = 0.25
"""Under overload many are refused, and looking through what waits costs a while."""
_COMPILE_LIMIT_S = 30.0
"""What a grammar may take, the wait for others before it included."""
_COMPILE_AGAIN_LIMIT_S = 300.0
"""The same for a stream that goes on: it has compiled before, and after an engine's start all do so at once."""
_UNKNOWN_OUTPUT = 128
"""Tokens that a choice is expected to generate while none has ended."""
_MAX_FORGOTTEN: Final = 10_000
"""Deleted streams whose names are remembered, the newest: some 2 MB of them."""


class Requests:
    """The requests of one engine life. Every method belongs to the loop's thread."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelFacts,
        scheduler: Scheduler,
        limits: SchedulerLimits,
        latency: LatencyModel,
        publisher: Publisher,
        inbox: Inbox,
        stats: EngineStats,
        clock: Callable[[], float],
        compile_grammar: Callable[[Grammar], Future[object]],
        succession: Succession,
    ) -> None:
        """compile_grammar: as Executor's; it wakes the loop, which then calls take_compiled."""
        self._config = config
        self._model = model
        self._scheduler = scheduler
        self._limits = limits
        self._latency = latency
        self._publisher = publisher
        self._inbox = inbox
        self._stats = stats
        self._clock = clock
        self._compile_grammar = compile_grammar
        self._quarantine = Quarantine()
        self._succession = succession
        self._compiling: list[tuple[Request, Future[object], float]] = []
        """Held until their grammars are there, with the time until which they may be."""
        self.ended: list[SequenceOutput] = []
        """Ends that no step brought about and that are not yet published. The loop takes them away."""
        self._drain_s = _SHORTEST_RETRY_S
        self._predict_again_s = 0.0
        self._forgotten: OrderedDict[tuple[bytes, str], None] = OrderedDict()
        """stream_id and tenant of what was deleted, the oldest first. A gateway that was away, or whose messages
        crossed the Forget, would bring it back."""
        self._over_limit: set[bytes] = set()
        """Gateways that have too much unacknowledged: their requests are paused."""

    def count_states(self) -> Counter[SequenceState]:
        """Requests by state: RUNNING if any choice of it runs, PAUSED and WAITING as a whole. O(live sequences)."""
        counts: Counter[SequenceState] = Counter()
        for request in self._publisher.live():
            if request.is_held:
                counts[SequenceState.WAITING] += 1
                continue
            states = {sequence.state for sequence in request.sequences}
            for state in (SequenceState.RUNNING, SequenceState.PAUSED, SequenceState.WAITING):
                if state in states:
                    counts[state] += 1
                    break
        return counts

    # They come and go

    def submit(self, gateway_id: bytes, submit: Submit, is_draining: bool) -> None:
        self._stats.counters["requests_received_total"] += 1
        known = self._publisher.find(submit.stream_id)
        if (submit.stream_id, submit.tenant) in self._forgotten:
            left = [choice for choice in range(submit.sampling.n) if choice not in submit.finished_choices]
            self._publisher.finish_unknown(gateway_id, submit.request_id, "cancelled", left)
        elif is_draining:
            self._reject(gateway_id, submit.request_id, "draining", "the engine is about to stop", retry_after_s=1.0)
        elif self._publisher.at(gateway_id, submit.request_id) is not None:
            self._reject(gateway_id, submit.request_id, "duplicate", f"request_id {submit.request_id} is in use")
        elif known is not None and known.request is not None:
            self._reject(gateway_id, submit.request_id, "duplicate", "a stream with this stream_id is live")
        else:
            self._take_in(gateway_id, submit)

    def _take_in(self, gateway_id: bytes, submit: Submit) -> None:
        try:
            request = to_request(submit, gateway_id, self._model, self._clock(), self._config.max_attach_grace_s)
            self._scheduler.check(len(request.prompt_token_ids), request.sampling)
            if request.sampling.grammar is not None:
                self._begin_compiling(request, request.sampling.grammar)
        except InvalidField as error:
            self._reject(gateway_id, submit.request_id, "invalid", error.message, field=error.field)
        except QueueFull as error:
            self._reject(gateway_id, submit.request_id, "overloaded", str(error), retry_after_s=self._retry_after_s())
        else:
            is_alone = self._quarantine.take(request, submit.runs_alone)
            request.is_held |= self._quarantine.excludes(request)
            self._scheduler.add(request)
            self._publisher.add(request)
            if is_alone:
                logger.warning("a request runs alone", extra=fields(stream_id=request.stream_id))
                self._reconsider_all()
            self._stats.counters["prompt_tokens_total"] += len(request.prompt_token_ids)
            if gateway_id in self._over_limit and not request.sampling.ranks_choices:
                self._scheduler.pause(request)

    def _begin_compiling(self, request: Request, grammar: Grammar) -> None:
        """Hold the request until its grammar is there, if it is not yet. Raises InvalidField."""
        compiling = self._compile_grammar(grammar)
        if compiling.done():
            request.compiled_grammar = compiling.result()
        else:
            request.is_held = True
            limit_s = _COMPILE_AGAIN_LIMIT_S if request.prior_token_ids else _COMPILE_LIMIT_S
            self._compiling.append((request, compiling, self._clock() + limit_s))

    @property
    def next_compile_limit_s(self) -> float:
        """When take_compiled has something to do, though none was finished."""
        return min([limit_s for _, _, limit_s in self._compiling], default=float("inf"))

    def take_compiled(self) -> None:
        """Let go what was held for a grammar that is there, and refuse what holds one that cannot be followed. Call it
        when everything has been published."""
        now_s = self._clock()
        compiling, self._compiling = self._compiling, []
        for entry in compiling:
            request, future, limit_s = entry
            if request.is_finished:
                future.cancel()
            elif future.done():
                self._finish_compiling(request, future)
            elif now_s < limit_s:
                self._compiling.append(entry)
            elif future.cancel():
                self._withdraw(request, "overloaded", "too many grammars wait to be compiled", self._retry_after_s())
            else:
                assert request.sampling.grammar is not None
                text = f"takes over {_COMPILE_LIMIT_S:.0f} s to compile; make it smaller"
                self._withdraw(request, "invalid", text, field=request.sampling.grammar.field)

    def _finish_compiling(self, request: Request, future: Future[object]) -> None:
        error = future.exception()  # not raised: its traceback would hold this frame, and with it the request
        if isinstance(error, InvalidField):
            self._withdraw(request, "invalid", error.message, field=error.field)
            return
        request.compiled_grammar = future.result()
        self._release(request)

    def _release(self, request: Request) -> None:
        """Let a request run that was held, if nothing else holds it."""
        is_compiling = request.sampling.grammar is not None and request.compiled_grammar is None
        if request.is_held and not request.is_finished and not is_compiling and not self._quarantine.excludes(request):
            self._scheduler.release(request)

    def look_at_suspects(self) -> None:
        """Before a plan is made: let the next suspect run alone, or the others go on, when the turn of one is over."""
        while self._quarantine and (next_ones := self._quarantine.turn()) is not None:
            self._reconsider_all()
            for request in next_ones:
                self._release(request)

    def _withdraw(self, request: Request, code: str, text: str, retry_after_s: float = 0.0, field: str = "") -> None:
        """Refuse a request that is held: nothing has been sent of it but what a continuation's choices ended with."""
        self._scheduler.abort(request, "")
        self._publisher.withdraw(request)
        self._reject(request.gateway_id, request.request_id, code, text, field, retry_after_s)

    def abort(self, gateway_id: bytes, abort: Abort) -> None:
        stream = self._publisher.at(gateway_id, abort.request_id)
        if stream is not None and stream.request is not None:
            if abort.choice < 0:
                self.end(stream.request, abort.cause)
            elif not stream.request.sampling.ranks_choices:  # what is ranked has no choices before its end
                self.ended += self._scheduler.abort(stream.request, abort.cause, abort.choice)
        else:
            self._publisher.finish_unknown(gateway_id, abort.request_id, abort.cause)

    def end(self, request: Request, cause: str) -> None:
        """Abort a request. Harmless for one that has ended and is not yet published."""
        self.ended += self._scheduler.abort(request, cause)

    def _reject(
        self, gateway_id: bytes, request_id: int, code: str, text: str, field: str = "", retry_after_s: float = 0.0
    ) -> None:
        self._stats.counters[f'requests_rejected_total{{code="{code}"}}'] += 1
        self._inbox.send(gateway_id, Rejected(request_id, code, text, field, retry_after_s))

    def _retry_after_s(self) -> float:
        """How long it will take, by the latency model, to serve all that wait and run now."""
        now_s = self._clock()
        if now_s >= self._predict_again_s:
            drain_s = predict_drain_s(
                self._publisher.live(),
                self._scheduler.num_running,
                self._stats.output_tokens.recent_mean or _UNKNOWN_OUTPUT,
                self._limits,
                self._latency,
            )
            self._drain_s = min(max(drain_s, _SHORTEST_RETRY_S), _LONGEST_RETRY_S)
            self._predict_again_s = now_s + _PREDICT_EVERY_S
        return self._drain_s

    # They change hands

    def attach(self, gateway_id: bytes, attach: Attach) -> None:
        """A stream without a grace period can be taken up again by its own gateway only, while it lives. One that was
        deleted is unknown at once, and its gateway is told so again: it may hold it still."""
        if (attach.stream_id, attach.tenant) in self._forgotten:
            self._inbox.send(gateway_id, Forget(attach.stream_id, attach.tenant))
            self._reject(gateway_id, attach.request_id, "unknown_stream", "the stream was deleted")
            return
        stream = self._publisher.find(attach.stream_id)
        now_s = self._clock()
        if stream is None or not _may_have(gateway_id, stream, attach.tenant):
            text = "no such stream, or it may not be attached to"
            may_come = stream is None and self._succession.may_bring(now_s)
            retry_after_s = _SHORTEST_RETRY_S if may_come else 0.0
            self._reject(gateway_id, attach.request_id, "unknown_stream", text, retry_after_s=retry_after_s)
            return
        if not 0 <= attach.request_id <= MAX_REQUEST_ID:
            text = f"must be between 0 and {MAX_REQUEST_ID}, got {attach.request_id}"
            self._reject(gateway_id, attach.request_id, "invalid", text, field="request_id")
            return
        if self._publisher.at(gateway_id, attach.request_id) is not None:
            self._reject(gateway_id, attach.request_id, "duplicate", f"request_id {attach.request_id} is in use")
            return
        try:
            self._publisher.attach(stream, gateway_id, attach.request_id, attach.from_token, now_s)
        except InvalidField as error:
            self._reject(gateway_id, attach.request_id, "invalid", error.message, field=error.field)
            return
        self._stats.counters["streams_attached_total"] += 1
        if stream.request is not None:
            self._pause_or_resume(stream.request, stream)

    def keep(self, gateway_id: bytes, keep: Keep) -> None:
        """Its gateway had a stream's end from the engine before this one. Nobody wants it that was deleted since."""
        try:
            check_remains(keep.remains)
        except InvalidField as error:
            self._inbox.refuse(gateway_id, "undecodable", f"Keep.remains is not a whole stream: {error}")
            return
        grace_s = min(keep.grace_s, self._config.max_attach_grace_s)
        if grace_s > 0 and (keep.remains.stream_id, keep.tenant) not in self._forgotten:  # false for NaN, too
            self._publisher.keep(keep.remains, keep.tenant, grace_s, self._clock())

    def forget(self, gateway_id: bytes, forget: Forget) -> None:
        """Its owner wants nothing of it to be left, here or with any gateway, nor that it comes back.

        One that is not here is remembered, too: a gateway may have it of an earlier engine, or another may still bring
        it. That names nothing of anybody else's, since a stream is remembered with the tenant whose it would be.
        """
        stream = self._publisher.find(forget.stream_id)
        is_theirs = stream is not None and _may_have(gateway_id, stream, forget.tenant)
        if stream is None or is_theirs:
            self._remember_forgotten(forget)
        if stream is not None and is_theirs:
            if stream.request is not None:
                self._publisher.keep_nothing(stream)
                self.end(stream.request, "cancelled")
            else:
                self._publisher.forget(stream)
        self._inbox.send_all(forget)

    def _remember_forgotten(self, forget: Forget) -> None:
        name = forget.stream_id, forget.tenant
        self._forgotten[name] = None
        self._forgotten.move_to_end(name)
        if len(self._forgotten) > _MAX_FORGOTTEN:
            self._forgotten.popitem(last=False)

    def greet(self, gateway_id: bytes) -> None:
        """A gateway has said Hello: what was on its way over an older connection is not waited for."""
        self._publisher.forget_outstanding(gateway_id)
        self._over_limit.discard(gateway_id)
        self._pause_or_resume_all(gateway_id)

    def lose_gateway(self, gateway_id: bytes, now_s: float) -> None:
        """It was silent for too long: its streams go on without it if somebody may come for them, else they end."""
        requests = self._publisher.live(gateway_id)
        self._succession.lose(gateway_id)
        logger.warning("gateway lost", extra=fields(gateway_id=gateway_id, num_live=len(requests)))
        self._stats.counters["gateways_lost_total"] += 1
        self._over_limit.discard(gateway_id)
        for request in requests:
            stream = self._publisher.find(request.stream_id)
            assert stream is not None
            if stream.attach_grace_s > 0:
                self._publisher.detach(stream, now_s)
                self._pause_or_resume(request, stream)
            else:
                self.end(request, "gateway_lost")
        self._publisher.forget_outstanding(gateway_id)

    # They stand aside

    def pause(self, gateway_id: bytes, message: Pause | Resume) -> None:
        stream = self._publisher.at(gateway_id, message.request_id)
        if stream is not None and stream.request is not None:
            stream.is_reader_slow = isinstance(message, Pause)
            self._pause_or_resume(stream.request, stream)

    def acknowledge(self, gateway_id: bytes, step: int) -> None:
        """The gateway has everything up to this step. At half the bound its requests go on."""
        self._publisher.acknowledge(gateway_id, step)
        enough = self._config.max_unacked_bytes // 2
        if gateway_id in self._over_limit and self._publisher.unacked_bytes(gateway_id) <= enough:
            self._over_limit.discard(gateway_id)
            self._pause_or_resume_all(gateway_id)

    def hold_back(self) -> None:
        """Pause the requests of gateways that have too much unacknowledged."""
        for gateway_id in self._inbox.last_heard_s:
            if gateway_id in self._over_limit:
                continue
            if self._publisher.is_over(gateway_id, self._config.max_unacked_bytes):
                self._over_limit.add(gateway_id)
                self._stats.counters["unacked_pauses_total"] += 1
                self._pause_or_resume_all(gateway_id)

    def _reconsider_all(self) -> None:
        for request in self._publisher.live():
            stream = self._publisher.find(request.stream_id)
            assert stream is not None
            self._pause_or_resume(request, stream)

    def _pause_or_resume_all(self, gateway_id: bytes) -> None:
        for request in self._publisher.live(gateway_id):
            stream = self._publisher.find(request.stream_id)
            assert stream is not None
            self._pause_or_resume(request, stream)

    def _pause_or_resume(self, request: Request, stream: Stream) -> None:
        """A request stands aside while its reader is slow, or its gateway has too much unacknowledged; one without a
        gateway has neither, and one whose choices are ranked has nothing to read before its end. And while another runs
        alone."""
        is_attended = request.gateway_id != NO_GATEWAY and not request.sampling.ranks_choices
        must_pause = self._quarantine.excludes(request) or (
            is_attended and (stream.is_reader_slow or request.gateway_id in self._over_limit)
        )
        if must_pause and not request.is_paused:
            self._stats.counters["pauses_total"] += 1
            self._scheduler.pause(request)
        elif request.is_paused and not must_pause:
            if self._quarantine.take_back(request):
                self._reconsider_all()  # where it is the first one's turn
            else:
                self._scheduler.resume(request)


def _may_have(gateway_id: bytes, stream: Stream, tenant: str) -> bool:
    """Whether a tenant, by way of this gateway, may take up a stream or end it."""
    is_own = stream.request is not None and stream.request.gateway_id == gateway_id
    return stream.tenant == tenant and (stream.attach_grace_s > 0 or is_own)
