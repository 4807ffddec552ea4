"""A step's tokens → one StepOutput per gateway; and what Attach asks for: the tokens of live and ended streams.

A stream is a request as gateways see it: where its tokens go now (its address: gateway id and request id), and its
tokens from the first. While it lives the tokens are those of its sequences; when a choice ends they are packed. A
stream with a grace period is kept that long after its end, within `max_kept_bytes`: beyond that the stream that
ended first is dropped first, which is counted (`num_dropped`) and logged.
"""

import heapq
import logging
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from engine.kept_logprobs import KeptLogprobs
from engine.sequence import Request, SequenceOutput
from streamkv.errors import InvalidField
from streamkv.log import fields
from streamkv.protocol import (
    KEPT_CHOICE_BYTES,
    KEPT_STREAM_BYTES,
    Attached,
    EngineMessage,
    Finished,
    PromptLogprobs,
    RowLogprobs,
    StepOutput,
    TokenLogprobs,
    encode,
    pack_ids,
    pack_rows,
)
from streamkv.transport import MAX_FRAME_BYTES

logger = logging.getLogger(__name__)

MAX_KEPT_BYTES: Final = 256 * 1024 * 1024
_REST_BYTES: Final = 1024 * 1024
"""Room in a frame for what is neither tokens nor the gateway's state."""
_MAX_STEP_BYTES: Final = 4 * 1024 * 1024
"""Tokens of one StepOutput, with log probabilities. Only ranked choices, which come whole, and prompts can have more;
they go in several."""
NO_GATEWAY: Final = b""
"""Address of a stream whose gateway is gone."""

_Row = tuple[int, int, list[int]]
"""request id, choice, new tokens"""
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
    logprobs: dict[int, KeptLogprobs] = field(default_factory=dict)
    """Those of the generated tokens, of every choice; empty where none were asked for."""
    prompt_logprobs: KeptLogprobs | None = None
    """Of the prompt's tokens from the second on, as far as they are known; None where none were asked for."""
    is_reader_slow: bool = False
    """Its gateway sent Pause and no Resume."""
    expires_at_s: float = float("inf")
    """Unattended: when it is aborted. Ended: when it is forgotten."""

    @property
    def num_bytes(self) -> int:
        """Of one that has ended: what keeping it takes."""
        num_bytes = KEPT_STREAM_BYTES + len(self.gateway_state) + len(self.prompt_token_ids) + len(self.tenant)
        num_bytes += sum([KEPT_CHOICE_BYTES + len(tokens) for tokens in self.ended_tokens.values()])
        num_bytes += sum([len(end.cause) for end in self.finished.values()])
        return num_bytes + sum([kept.num_bytes for kept in self.logprobs.values()]) + self.num_prompt_logprobs_bytes

    @property
    def num_prompt_logprobs_bytes(self) -> int:
        return self.prompt_logprobs.num_bytes if self.prompt_logprobs is not None else 0

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

    def logprobs_from(self, start: int) -> list[TokenLogprobs]:
        """Those of `tokens_from`; empty where none were asked for."""
        return [kept.values_from(start) for _, kept in sorted(self.logprobs.items())]

    def take_prompt_logprobs(self, start: int, values: TokenLogprobs) -> PromptLogprobs | None:
        """Keep what is new of a part of the prompt, whose first token has index `start`. None: nothing is, or what
        comes before it is missing."""
        request, kept = self.request, self.prompt_logprobs
        if request is None or kept is None:
            return None
        next_token = len(kept) + 1
        num_known = next_token - start
        if not 0 <= num_known < values.num_tokens:
            return None
        values = values.between(num_known, values.num_tokens)
        kept.append(values)
        return PromptLogprobs(request.request_id, next_token, values)


@dataclass(slots=True, eq=False)
class _Share:
    """What a step has for one gateway."""

    rows: list[_Row] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    logprobs: list[RowLogprobs] = field(default_factory=list)
    """Their rows ascend."""
    prompts: list[PromptLogprobs] = field(default_factory=list)

    @property
    def num_logprobs_bytes(self) -> int:
        num_bytes = sum([told.values.num_bytes for told in self.logprobs])
        return num_bytes + sum([part.values.num_bytes for part in self.prompts])

    def halves(self) -> "tuple[_Share, _Share] | None":
        """Two that say the same one after the other: prompts before rows, rows before ends. None for what is one."""
        rows, logprobs, prompts = self.rows, self.logprobs, self.prompts
        if prompts and rows:
            return _Share(prompts=prompts), _Share(rows, self.finished, self.hits, logprobs)
        if len(prompts) == 1:
            part = prompts[0]
            middle = part.values.num_tokens // 2
            early = PromptLogprobs(part.request_id, part.start, part.values.between(0, middle))
            late_values = part.values.between(middle, part.values.num_tokens)
            late = PromptLogprobs(part.request_id, part.start + middle, late_values)
            return (_Share(prompts=[early]), _Share([], self.finished, prompts=[late])) if middle else None
        if prompts:
            middle = len(prompts) // 2
            return _Share(prompts=prompts[:middle]), _Share([], self.finished, prompts=prompts[middle:])
        if len(rows) == 1:
            request_id, choice, token_ids = rows[0]
            middle = len(token_ids) // 2
            early_told = [RowLogprobs(0, told.values.between(0, middle)) for told in logprobs]
            late_told = [RowLogprobs(0, told.values.between(middle, len(token_ids))) for told in logprobs]
            if not middle:
                return None
            first = _Share([(request_id, choice, token_ids[:middle])], [], self.hits, early_told)
            return first, _Share([(request_id, choice, token_ids[middle:])], self.finished, [], late_told)
        middle = len(rows) // 2
        first = _Share(rows[:middle], [], self.hits, [told for told in logprobs if told.row < middle])
        late_told = [RowLogprobs(told.row - middle, told.values) for told in logprobs if told.row >= middle]
        return first, _Share(rows[middle:], self.finished, [], late_told)


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
        if request.sampling.logprobs >= 0:
            priors = dict(enumerate(request.prior_logprobs))
            stream.logprobs = {choice: KeptLogprobs(priors.get(choice)) for choice in range(request.sampling.n)}
        if request.sampling.prompt_logprobs >= 0:
            stream.prompt_logprobs = KeptLogprobs()
        for choice in request.finished_choices:
            prior = request.prior_token_ids
            stream.ended_tokens[choice] = pack_ids(prior[choice]) if choice < len(prior) else b""
            cause = "this choice ended before the engine was restarted"
            stream.finished[choice] = Finished(request.request_id, choice, "error", cause)
        self._streams[request.stream_id] = stream
        self._by_address[request.gateway_id, request.request_id] = stream
        self.num_live += 1

    def keep(self, remains: Attached, tenant: str, grace_s: float, now_s: float) -> None:
        """Take in a stream that ended under an earlier engine, if none of its name is there."""
        if remains.stream_id in self._streams:
            return
        stream = Stream(
            stream_id=remains.stream_id,
            gateway_state=remains.gateway_state,
            prompt_token_ids=remains.prompt_token_ids,
            attach_grace_s=grace_s,
            request=None,
            tenant=tenant,
            ended_tokens=dict(enumerate(remains.token_ids)),
            finished={end.choice: end for end in remains.finished},
            logprobs={choice: KeptLogprobs(values) for choice, values in enumerate(remains.logprobs)},
            prompt_logprobs=None if remains.prompt_logprobs is None else KeptLogprobs(remains.prompt_logprobs),
        )
        self._streams[stream.stream_id] = stream
        self._keep_ended(stream, now_s)

    def withdraw(self, request: Request) -> None:
        """A live stream of which nothing was sent is not taken up after all; nobody is told here."""
        del self._streams[request.stream_id]
        self._by_address.pop((request.gateway_id, request.request_id), None)
        self.num_live -= 1
        _cut_circle(request)

    def keep_nothing(self, stream: Stream) -> None:
        """A live stream ends soon, and is forgotten with its end."""
        stream.attach_grace_s = 0.0

    def forget(self, stream: Stream) -> None:
        """One that has ended is not kept any longer."""
        self._forget_ended(stream)

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

    def attach(self, stream: Stream, gateway_id: bytes, request_id: int, from_token: int, now_s: float) -> None:
        """Send the stream's tokens from `from_token` on, and let the further ones go to this address.

        The address that had it is told `abort`, cause `attached_elsewhere`. Raises InvalidField for tokens that do
        not exist yet, which could not follow without a gap, and for more of them than one frame can hold.
        """
        counts = stream.num_tokens()
        open_counts = [count for choice, count in counts.items() if choice not in stream.finished]
        most = min(open_counts) if open_counts else max(counts.values(), default=0)
        if not 0 <= from_token <= most:
            raise InvalidField("from_token", f"must be between 0 and {most}, the tokens generated, got {from_token}")
        tokens, logprobs = stream.tokens_from(from_token), stream.logprobs_from(from_token)
        num_bytes = len(stream.gateway_state) + len(stream.prompt_token_ids) + sum(map(len, tokens))
        num_bytes += sum([values.num_bytes for values in logprobs]) + stream.num_prompt_logprobs_bytes
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
                logprobs,
                None if stream.prompt_logprobs is None else stream.prompt_logprobs.values_from(0),
                stream.expires_at_s - now_s if request is None else inf,
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
        shares: defaultdict[bytes, _Share] = defaultdict(_Share)
        share, rows, gateway_id = _Share(), list[_Row](), None
        for output in outputs:
            sequence = output.sequence
            request = sequence.request
            if request.gateway_id != gateway_id:  # most steps are of one gateway
                gateway_id = request.gateway_id
                share = shares[gateway_id]
                rows = share.rows
            if output.token_ids:
                if output.logprobs is not None:
                    self._streams[request.stream_id].logprobs[sequence.choice].append(output.logprobs)
                    share.logprobs.append(RowLogprobs(len(rows), output.logprobs))
                rows.append((request.request_id, sequence.choice, output.token_ids))
                if sequence.num_cached_tokens and not sequence.is_hit_told:
                    sequence.is_hit_told = True
                    share.hits += (request.request_id, sequence.num_cached_tokens)
            elif output.prompt_logprobs is not None:
                stream = self._streams.get(request.stream_id)
                if stream is not None and stream.request is request:
                    part = stream.take_prompt_logprobs(*output.prompt_logprobs)
                    share.prompts += [part] if part is not None else []
            if output.finish_reason:
                share.finished.append(self._finish(output, now_s))
        for receiver, share in shares.items():
            if receiver != NO_GATEWAY and (share.rows or share.finished or share.prompts):
                self._send_share(receiver, share)

    def _send_share(self, gateway_id: bytes, share: _Share) -> None:
        message = pack_rows(share.rows, self.step, share.finished, share.hits, share.logprobs, share.prompts)
        is_huge = len(message.token_ids) + share.num_logprobs_bytes > _MAX_STEP_BYTES
        halves = share.halves() if is_huge else None
        if halves is None:
            self._send_counted(gateway_id, message)
            return
        self._send_share(gateway_id, halves[0])
        self.step += 1
        self._send_share(gateway_id, halves[1])

    def finish_unknown(self, gateway_id: bytes, request_id: int, cause: str, choices: Sequence[int] = (0,)) -> None:
        """End choices of a request that is not there: it has ended, or never was. An Abort does not say how many it
        had."""
        self.step += 1
        ends = [Finished(request_id, choice, "abort", cause) for choice in choices]
        self._send_counted(gateway_id, StepOutput(self.step, b"", b"", finished=ends))

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
        _cut_circle(request)
        if stream.attach_grace_s <= 0:
            del self._streams[stream.stream_id]
        else:
            self._keep_ended(stream, now_s)

    def _keep_ended(self, stream: Stream, now_s: float) -> None:
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


def _cut_circle(request: Request) -> None:
    """A request and its sequences name each other, and the garbage collector, which alone would find them, seldom
    runs."""
    request.sequences = []
