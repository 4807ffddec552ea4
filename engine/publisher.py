"""A step's tokens → one StepOutput per gateway; and what Attach asks for: the tokens of live and ended streams.

A stream is a request as gateways see it: where its tokens go now (its address: gateway id and request id), and its
tokens from the first. While it lives the tokens are those of its sequences; when a choice ends they are packed. A
stream with a grace period is kept that long after its end, within `max_kept_bytes`: beyond that the stream that
ended first is dropped first, which is counted (`num_dropped`) and logged.
"""

import heapq
import logging
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from engine.sequence import Request, SequenceOutput
from streamkv.errors import InvalidField
from streamkv.log import fields
from streamkv.protocol import Attached, EngineMessage, Finished, StepOutput, encode, pack_ids, pack_rows
from streamkv.transport import MAX_FRAME_BYTES

logger = logging.getLogger(__name__)

MAX_KEPT_BYTES: Final = 256 * 1024 * 1024
_REST_BYTES: Final = 1024 * 1024
"""Room in a frame for what is neither tokens nor the gateway's state."""
_MAX_STEP_BYTES: Final = 4 * 1024 * 1024
"""Tokens of one StepOutput. Only ranked choices, which come whole, can have more; they go in several."""
NO_GATEWAY: Final = b""
"""Address of a stream whose gateway is gone."""

SendFrame = Callable[[bytes, bytes], bool]
"""(gateway id, frame) → whether it could be addressed."""


@dataclass(slots=True, eq=False)
class Stream:
    """What is kept of one request, from its Submit until nobody can attach to it any more."""

    stream_id: bytes
    gateway_state: bytes
    prompt_token_ids: bytes
    attach_grace_s: float
    request: Request | None
    """None once it has ended. Its gateway_id and request_id are the address."""
    tenant: str = ""
    """Who may attach to it."""
    ended_tokens: dict[int, bytes] = field(default_factory=dict)
    """Generated tokens of the choices that have ended."""
    finished: dict[int, Finished] = field(default_factory=dict)
    is_reader_slow: bool = False
    """Its gateway sent Pause and no Resume."""
    expires_at_s: float = float("inf")
    """Unattended: when it is aborted. Ended: when it is forgotten."""

    @property
    def num_bytes(self) -> int:
        return len(self.gateway_state) + len(self.prompt_token_ids) + sum(map(len, self.ended_tokens.values()))

    def num_tokens(self) -> dict[int, int]:
        """Generated tokens by choice."""
        counts = {choice: len(tokens) // 4 for choice, tokens in self.ended_tokens.items()}
        request = self.request
        if request is not None and request.sampling.ranks_choices:
            return dict.fromkeys(range(request.sampling.n), 0)  # nothing is handed out before the end
        if request is not None:
            counts |= {s.choice: s.num_output for s in request.sequences if s.choice not in counts}
        return counts

    def tokens_from(self, start: int) -> list[bytes]:
        """Each choice's generated tokens from number `start` on, packed."""
        tails = {choice: tokens[4 * start :] for choice, tokens in self.ended_tokens.items()}
        request = self.request
        if request is not None and request.sampling.ranks_choices:
            return [b""] * request.sampling.n
        if request is not None:
            for sequence in request.sequences:
                if sequence.choice not in tails:
                    tails[sequence.choice] = pack_ids(sequence.token_ids[sequence.num_prompt + start :])
        return [tails[choice] for choice in sorted(tails)]


@dataclass(slots=True, eq=False)
class _Outstanding:
    """Frames that one gateway was sent and has not acknowledged."""

    frames: deque[tuple[int, int]] = field(default_factory=deque)
    """(step, bytes), oldest first."""
    num_bytes: int = 0
    frame_bytes: int = 0
    """Of the largest of late; one that was an exception is forgotten within some 20 frames."""


class Publisher:
    """Knows every stream by its address and by its stream_id, and what each gateway has not acknowledged."""

    def __init__(self, send: SendFrame, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._send = send
        self._max_kept_bytes = max_kept_bytes
        self.step = 0
        """Number of the newest StepOutput."""
        self.num_live = 0
        self.kept_bytes = 0
        """Of streams that have ended."""
        self.num_dropped = 0
        """Ended streams that `max_kept_bytes` cost their grace period."""
        self._streams: dict[bytes, Stream] = {}
        self._by_address: dict[tuple[bytes, int], Stream] = {}
        self._ended: OrderedDict[bytes, Stream] = OrderedDict()
        self._expiries: list[tuple[float, bytes]] = []
        """A heap; an entry counts only while it is its stream's expires_at_s."""
        self._outstanding: dict[bytes, _Outstanding] = {}

    # Streams

    @property
    def num_kept(self) -> int:
        """Streams that have ended and can still be attached to."""
        return len(self._ended)

    @property
    def num_detached(self) -> int:
        """Live streams without a gateway."""
        return self.num_live - len(self._by_address)

    @property
    def next_expiry_s(self) -> float:
        """When `expire` has something to do, at the earliest."""
        return self._expiries[0][0] if self._expiries else float("inf")

    def add(self, request: Request) -> None:
        """Begin a stream at the request's address. One of the same stream_id that has ended makes room for it.

        Choices of a continuation that ended under an earlier engine are kept with their tokens; their reason is
        not known here, and whoever attaches is told so.
        """
        old = self._streams.get(request.stream_id)
        if old is not None:
            self._forget_ended(old)
        stream = Stream(
            stream_id=request.stream_id,
            gateway_state=request.gateway_state,
            prompt_token_ids=request.packed_prompt or pack_ids(request.prompt_token_ids),
            attach_grace_s=request.attach_grace_s,
            request=request,
            tenant=request.tenant,
        )
        for choice in request.finished_choices:
            prior = request.prior_token_ids
            stream.ended_tokens[choice] = pack_ids(prior[choice]) if choice < len(prior) else b""
            cause = "this choice ended before the engine was restarted"
            stream.finished[choice] = Finished(request.request_id, choice, "error", cause)
        self._streams[request.stream_id] = stream
        self._by_address[request.gateway_id, request.request_id] = stream
        self.num_live += 1

    def at(self, gateway_id: bytes, request_id: int) -> Stream | None:
        """The live stream of this address."""
        return self._by_address.get((gateway_id, request_id))

    def find(self, stream_id: bytes) -> Stream | None:
        """The live or recently ended stream of this name."""
        return self._streams.get(stream_id)

    def live(self, gateway_id: bytes | None = None) -> list[Request]:
        """The requests of all live streams, or of one gateway's. O(streams)."""
        return [
            stream.request
            for stream in self._streams.values()
            if stream.request is not None and gateway_id in (None, stream.request.gateway_id)
        ]

    def detach(self, stream: Stream, now_s: float) -> None:
        """Its gateway is gone: go on without one for the grace period."""
        assert stream.request is not None
        del self._by_address[stream.request.gateway_id, stream.request.request_id]
        stream.request.gateway_id = NO_GATEWAY
        self._expire_at(stream, now_s + stream.attach_grace_s)

    def attach(self, stream: Stream, gateway_id: bytes, request_id: int, from_token: int) -> None:
        """Send the stream's tokens from `from_token` on, and let the further ones go to this address.

        The address that had it is told `abort`, cause `attached_elsewhere`. Raises InvalidField for tokens that do
        not exist yet, which could not follow without a gap, and for more of them than one frame can hold.
        """
        counts = stream.num_tokens()
        open_counts = [count for choice, count in counts.items() if choice not in stream.finished]
        most = min(open_counts) if open_counts else max(counts.values(), default=0)
        if not 0 <= from_token <= most:
            raise InvalidField("from_token", f"must be between 0 and {most}, the tokens generated, got {from_token}")
        tokens = stream.tokens_from(from_token)
        num_bytes = len(stream.gateway_state) + len(stream.prompt_token_ids) + sum(map(len, tokens))
        if num_bytes > MAX_FRAME_BYTES - _REST_BYTES:
            raise InvalidField("from_token", f"the stream's tokens from {from_token} on are too many to send at once")
        request = stream.request
        if request is not None:
            if request.gateway_id != NO_GATEWAY:
                del self._by_address[request.gateway_id, request.request_id]
                gone = [
                    Finished(request.request_id, choice, "abort", "attached_elsewhere")
                    for choice in counts
                    if choice not in stream.finished
                ]
                self.step += 1
                self._send_counted(request.gateway_id, StepOutput(self.step, b"", b"", finished=gone))
            request.gateway_id, request.request_id = gateway_id, request_id
            self._by_address[gateway_id, request_id] = stream
            stream.expires_at_s = float("inf")
            stream.is_reader_slow = False
        finished = [
            Finished(
                request_id,
                choice,
                end.finish_reason,
                end.cause,
                end.stop_token_id,
                end.num_cached_tokens,
                end.num_preemptions,
            )
            for choice, end in sorted(stream.finished.items())
        ]
        # Bytes are acknowledged by the number of a StepOutput, so an empty one goes behind.
        self.step += 1
        self._send_counted(
            gateway_id,
            Attached(
                request_id,
                stream.stream_id,
                stream.gateway_state,
                stream.prompt_token_ids,
                from_token,
                tokens,
                finished,
            ),
        )
        self._send_counted(gateway_id, StepOutput(self.step, b"", b""))

    def expire(self, now_s: float) -> list[Request]:
        """Forget ended streams whose grace period is over. Returns the live ones that nobody came for: abort them."""
        left: list[Request] = []
        while self._expiries and self._expiries[0][0] <= now_s:
            expires_at_s, stream_id = heapq.heappop(self._expiries)
            stream = self._streams.get(stream_id)
            if stream is None or stream.expires_at_s != expires_at_s:
                continue
            if stream.request is None:
                self._forget_ended(stream)
            else:
                left.append(stream.request)
        return left

    # Output

    def publish(self, outputs: list[SequenceOutput], now_s: float) -> None:
        """Send what a step, or an abort, gave: one StepOutput to each gateway that has part in it, more if it is huge.

        A stream ends here with its last choice. About 0.5 µs per row.
        """
        self.step += 1
        rows: defaultdict[bytes, list[tuple[int, int, list[int]]]] = defaultdict(list)
        finished: defaultdict[bytes, list[Finished]] = defaultdict(list)
        hits: defaultdict[bytes, list[int]] = defaultdict(list)
        for output in outputs:
            sequence = output.sequence
            request = sequence.request
            if output.token_ids:
                rows[request.gateway_id].append((request.request_id, sequence.choice, output.token_ids))
                if sequence.num_cached_tokens and not sequence.is_hit_told:
                    sequence.is_hit_told = True
                    hits[request.gateway_id] += (request.request_id, sequence.num_cached_tokens)
            if output.finish_reason:
                gateway_id = request.gateway_id  # the stream's end takes its address away
                finished[gateway_id].append(self._finish(output, now_s))
        for gateway_id in rows.keys() | finished.keys():
            if gateway_id != NO_GATEWAY:
                self._send_rows(gateway_id, rows[gateway_id], finished[gateway_id], hits[gateway_id])

    def _send_rows(
        self, gateway_id: bytes, rows: list[tuple[int, int, list[int]]], finished: list[Finished], hits: list[int]
    ) -> None:
        """Rows before ends: a choice's tokens are there when it ends."""
        message = pack_rows(rows, self.step, finished, hits)
        if len(message.token_ids) <= _MAX_STEP_BYTES or len(rows) == 1:
            self._send_counted(gateway_id, message)
            return
        middle = len(rows) // 2
        self._send_rows(gateway_id, rows[:middle], [], hits)
        self.step += 1
        self._send_rows(gateway_id, rows[middle:], finished, [])

    def finish_unknown(self, gateway_id: bytes, request_id: int, cause: str) -> None:
        """Answer an Abort of a request that is not there: it has ended, or never was."""
        self.step += 1
        end = Finished(request_id, 0, "abort", cause)
        self._send_counted(gateway_id, StepOutput(self.step, b"", b"", finished=[end]))

    def _finish(self, output: SequenceOutput, now_s: float) -> Finished:
        sequence = output.sequence
        request = sequence.request
        stream = self._streams[request.stream_id]
        end = Finished(
            request.request_id,
            sequence.choice,
            output.finish_reason,
            output.cause,
            output.stop_token_id,
            sequence.num_cached_tokens,
            sequence.num_preemptions,
        )
        stream.finished[sequence.choice] = end
        stream.ended_tokens[sequence.choice] = pack_ids(sequence.token_ids[sequence.num_prompt :])
        if len(stream.finished) == request.sampling.n:
            self._end(stream, request, now_s)
        return end

    def _end(self, stream: Stream, request: Request, now_s: float) -> None:
        self.num_live -= 1
        self._by_address.pop((request.gateway_id, request.request_id), None)
        stream.request = None
        if stream.attach_grace_s <= 0:
            del self._streams[stream.stream_id]
            return
        self._ended[stream.stream_id] = stream
        self.kept_bytes += stream.num_bytes
        self._expire_at(stream, now_s + stream.attach_grace_s)
        while self.kept_bytes > self._max_kept_bytes:
            oldest = next(iter(self._ended.values()))
            self._forget_ended(oldest)
            self.num_dropped += 1
            logger.info(
                "an ended stream was dropped before its grace period was over",
                extra=fields(stream_id=oldest.stream_id, kept_bytes=self.kept_bytes),
            )

    def _forget_ended(self, stream: Stream) -> None:
        del self._streams[stream.stream_id]
        del self._ended[stream.stream_id]
        self.kept_bytes -= stream.num_bytes

    def _expire_at(self, stream: Stream, at_s: float) -> None:
        stream.expires_at_s = at_s
        heapq.heappush(self._expiries, (at_s, stream.stream_id))

    # Acknowledgement

    def unacked_bytes(self, gateway_id: bytes) -> int:
        """Bytes of the frames that this gateway has not acknowledged."""
        outstanding = self._outstanding.get(gateway_id)
        return outstanding.num_bytes if outstanding else 0

    def is_over(self, gateway_id: bytes, max_bytes: int) -> bool:
        """Whether this gateway's sequences must pause, so that the two steps that may be on their way still fit."""
        outstanding = self._outstanding.get(gateway_id)
        if outstanding is None or not outstanding.num_bytes:
            return False
        return outstanding.num_bytes + 2 * outstanding.frame_bytes > max_bytes

    def acknowledge(self, gateway_id: bytes, step: int) -> None:
        """The gateway has taken in every frame up to this step."""
        outstanding = self._outstanding.get(gateway_id)
        while outstanding and outstanding.frames and outstanding.frames[0][0] <= step:
            outstanding.num_bytes -= outstanding.frames.popleft()[1]

    def forget_outstanding(self, gateway_id: bytes) -> None:
        """Its connection is a new one, or it is gone: what was on its way arrived, or is lost."""
        self._outstanding.pop(gateway_id, None)

    def _send_counted(self, gateway_id: bytes, message: EngineMessage) -> None:
        frame = encode(message)
        if not self._send(gateway_id, frame):
            return  # not connected: it attaches to its streams when it is back, or is silent until it counts as gone
        outstanding = self._outstanding.get(gateway_id)
        if outstanding is None:
            outstanding = self._outstanding[gateway_id] = _Outstanding()
        outstanding.frames.append((self.step, len(frame)))
        outstanding.num_bytes += len(frame)
        outstanding.frame_bytes = max(len(frame), outstanding.frame_bytes * 7 // 8)
