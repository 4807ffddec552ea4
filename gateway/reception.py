"""Where every request is noted when it comes, let in or sent away, and noted again when it goes.

Its caller's limits are kept here, whatever the request came over: a request is let in before its body is read, the
tokens of its prompt are charged when it goes to the engine, those of its answer once a second and at its end. None of
it stands on the way of a token.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from gateway.access_log import AccessLog
from gateway.auth import ApiKeys, Caller
from gateway.engine_client import EngineUnavailable
from gateway.failures import Overloaded
from gateway.limits import Books, OwnBooks, Permit, RateLimited, Standing, Verdict
from gateway.metrics import GatewayMetrics
from gateway.records import SOCKET_METHOD, SOCKET_ROUTE, Record, new_request_id, take_request_id
from gateway.streams import Stream
from gateway.tracing import Tracing
from streamkv.errors import StreamKVError

logger = logging.getLogger(__name__)

CHARGE_S: Final = 1.0
"""How often what live streams have made is charged."""
CLIENT_GONE: Final = 499


@dataclass(slots=True)
class _Stay:
    """One live stream."""

    key: str
    record: Record | None
    permit: Permit | None
    num_prompt: int = 0
    """Tokens that were charged for the prompt."""
    num_charged: int = 0
    """Those for the answer."""


class Reception:
    """One gateway's."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        *,
        api_keys: ApiKeys | None = None,
        books: Books | None = None,
        access_log: AccessLog | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._api_keys = api_keys if api_keys is not None else ApiKeys()
        self.books = books or OwnBooks()
        self._metrics = metrics
        self._access_log = access_log
        self._tracing = tracing
        self._live: dict[Stream, _Stay] = {}
        self._unheard: set[asyncio.Future[Verdict]] = set()
        """Questions to the books whose client has gone."""
        self._timer: asyncio.TimerHandle | None = None

    # Requests

    def arrive(self, method: str, route: str, headers: Mapping[str, str]) -> Record:
        """An HTTP request is there."""
        record = Record(take_request_id(headers), method, route, asyncio.get_running_loop().time())
        if self._tracing is not None:
            record.trace = self._tracing.headers_of(headers)
        return record

    async def admit(self, record: Record, caller: Caller) -> None:
        """Count a request that wants to generate. Raises RateLimited."""
        if caller.allowance.is_limited:
            verdict = await self._ask(caller)
            record.standing = verdict.standing
            if verdict.refused_by:
                self._metrics.shed[f"caller_{verdict.refused_by}"] += 1
                self._metrics.key_refused[caller.name, verdict.refused_by] += 1
                raise RateLimited(verdict)
            record.permit = Permit(self.books, caller.name, verdict.standing)
        self._metrics.key_requests[caller.name] += 1

    async def _ask(self, caller: Caller) -> Verdict:
        """A client may go while the books are asked, elsewhere perhaps, and be let in all the same: that place is given
        back."""
        asking = asyncio.ensure_future(self.books.admit(caller.name, caller.allowance))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            self._unheard.add(asking)
            asking.add_done_callback(lambda asked: self._give_back(asked, caller.name))
            raise

    def _give_back(self, asked: "asyncio.Future[Verdict]", name: str) -> None:
        self._unheard.discard(asked)
        if not asked.cancelled() and asked.exception() is None and not asked.result().refused_by:
            self.books.release(name)

    async def look(self, record: Record, caller: Caller) -> None:
        """Note what a caller has left, for an answer that costs nothing."""
        if caller.allowance.is_limited:
            record.standing = await self.books.look(caller.name, caller.allowance)

    @contextlib.asynccontextmanager
    async def on_socket(self, caller: Caller, request_id: str = "", *, is_new: bool) -> AsyncIterator[Caller]:
        """The caller of one generation among others on a WebSocket; inside, its stream is begun or, if it is not new,
        taken up. Raises RateLimited, and Unauthorized when the key that opened the socket is gone.

        request_id: the client's own, if it gave one; otherwise it gets one.
        """
        record = Record(request_id or new_request_id(), SOCKET_METHOD, SOCKET_ROUTE, asyncio.get_running_loop().time())
        record.key = caller.name
        try:
            if caller.record is not None:
                record.trace = caller.record.trace
                caller = self._api_keys.again(caller.record.key_digest)
            if is_new:
                await self.admit(record, caller)
            yield msgspec.structs.replace(caller, record=record)
        except StreamKVError as error:
            record.error = type(error).__name__
            raise
        finally:
            if record.permit is not None:
                record.permit.drop()
            if not record.streams:
                self._write(record, None)

    def leave(self, record: Record, status: int) -> None:
        """An HTTP request is answered, or its client is gone."""
        if record.permit is not None:
            record.permit.drop()
        if not record.error:
            failures = [type(stream.failure).__name__ for stream in record.streams if stream.failure is not None]
            record.error = failures[0] if failures else ""
        self._write(record, status)

    def _write(self, record: Record, status: int | None) -> None:
        now = asyncio.get_running_loop().time()
        if self._access_log is not None:
            self._access_log.write(record, status, now)
        if self._tracing is not None:
            try:
                self._tracing.write(record, status, now)
            except Exception:  # the request is answered
                logger.exception("a trace could not be made")

    # Their streams

    def began(self, stream: Stream, caller: Caller) -> None:
        """A request's stream is on its way to the engine; there may be more of the same request."""
        record = caller.record
        permit = record.permit if record is not None else None
        if permit is not None:
            permit.hold()
        self._enter(stream, caller, permit)

    def joined(self, stream: Stream, caller: Caller) -> None:
        """A stream is taken up that was let in before: it counts among those that live, and as no new request."""
        permit = None
        if caller.allowance.is_limited:
            self.books.join(caller.name, caller.allowance)
            permit = Permit(self.books, caller.name, Standing(caller.allowance))
        self._enter(stream, caller, permit)

    def _enter(self, stream: Stream, caller: Caller, permit: Permit | None) -> None:
        self._live[stream] = _Stay(caller.name, caller.record, permit)
        self._metrics.key_live[caller.name] += 1
        if caller.record is not None:
            caller.record.streams.append(stream)
        if permit is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(CHARGE_S, self._charge_live)

    def submitted(self, stream: Stream) -> None:
        """The tokens of its prompt are known."""
        stay = self._live.get(stream)
        if stay is None:
            return
        self._metrics.key_prompt_tokens[stay.key] += stream.num_prompt
        if stay.permit is not None:
            stay.num_prompt = stream.num_prompt
            stay.permit.charge(stream.num_prompt)

    def ended(self, stream: Stream) -> None:
        """Harmless for one that did not begin."""
        stay = self._live.pop(stream, None)
        if stay is None:
            return
        failure = stream.failure
        self._charge(stream, stay)
        if stay.permit is not None:
            if isinstance(failure, EngineUnavailable):
                stay.permit.charge(-stay.num_prompt)  # it was not taken
            stay.permit.drop()
        self._metrics.key_live[stay.key] -= 1
        self._metrics.key_output_tokens[stay.key] += stay.num_charged
        if isinstance(failure, Overloaded):
            self._metrics.shed["queue_full"] += 1
        elif isinstance(failure, EngineUnavailable):
            self._metrics.shed["engine_draining"] += 1
        record = stay.record
        if record is not None and record.method == SOCKET_METHOD:
            record.error = type(failure).__name__ if failure is not None else ""
            self._write(record, None)

    def _charge_live(self) -> None:
        self._timer = None
        for stream, stay in self._live.items():
            if stay.permit is not None:
                self._charge(stream, stay)
                if self._timer is None:
                    self._timer = asyncio.get_running_loop().call_later(CHARGE_S, self._charge_live)

    def _charge(self, stream: Stream, stay: _Stay) -> None:
        """What it has made since the last time; not what was there when it was taken up."""
        num_output = max(0, stream.num_output - stream.num_inherited)
        if stay.permit is not None:
            stay.permit.charge(num_output - stay.num_charged)
        stay.num_charged = num_output

    async def close(self) -> None:
        """Send the traces that wait."""
        if self._timer is not None:
            self._timer.cancel()
        if self._tracing is not None:
            await self._tracing.close()
