"""Every message of the wire between gateway and engine, and its bytes.

One message is one ZeroMQ frame: a msgpack array whose first element is the message's tag. The structs are
positional, so a field may only be added at the end, with a default, and never moved or reused; anything else
takes a new WIRE_VERSION. Token ids travel as packed little-endian int32 (`pack_ids`, `unpack_ids`).
"""

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from math import inf
from typing import Annotated, Final

import msgspec

from streamkv.errors import WireDecodeError
from streamkv.sampling import SamplingParams

WIRE_VERSION: Final = 2
STREAM_ID_BYTES: Final = 16
KEPT_STREAM_BYTES: Final = 500
"""What a stream that has ended takes where it is kept, beside what is in it: the objects around that, roughly."""
KEPT_CHOICE_BYTES: Final = 64
"""The same for each of its choices."""


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids → packed little-endian int32. Raises OverflowError for an id outside int32."""
    known = ids if isinstance(ids, list) else list(ids)
    try:
        return struct.pack(f"<{len(known)}i", *known)  # four times as fast as an array
    except struct.error as error:
        raise OverflowError(f"token ids must be integers of 32 bits: {error}") from error


def unpack_ids(data: bytes) -> list[int]:
    """Packed little-endian int32 → token ids. Raises WireDecodeError for a length that is no multiple of 4."""
    if len(data) % 4:
        raise WireDecodeError(f"packed ids must come in groups of 4 bytes, got {len(data)} bytes")
    ids = array("i")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def pack_floats(values: Iterable[float]) -> bytes:
    """Numbers → packed little-endian float32; what is beyond its range becomes an infinity."""
    packed = array("f", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_floats(data: bytes) -> list[float]:
    """Packed little-endian float32 → numbers. Raises WireDecodeError for a length that is no multiple of 4."""
    if len(data) % 4:
        raise WireDecodeError(f"packed numbers must come in groups of 4 bytes, got {len(data)} bytes")
    values = array("f")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Natural log probabilities of consecutive tokens of one choice, or of a prompt, as packed arrays.

    With k = len(top_ids) / len(chosen), the same for every token, likeliest first and the lowest id on a tie.
    """

    chosen: bytes
    """float32, little-endian, per token."""
    top_ids: bytes = b""
    """int32 per token and place; k may be 0."""
    top_logprobs: bytes = b""
    """float32 per token and place."""

    @property
    def num_tokens(self) -> int:
        return len(self.chosen) // 4

    @property
    def num_top(self) -> int:
        """Places per token: k."""
        return len(self.top_ids) // len(self.chosen) if self.chosen else 0

    @property
    def num_bytes(self) -> int:
        return len(self.chosen) + len(self.top_ids) + len(self.top_logprobs)

    def between(self, start: int, end: int) -> "TokenLogprobs":
        """Those of tokens [start, end); indices as in a slice, but not negative."""
        num_top = self.num_top
        first, last = 4 * start * num_top, 4 * end * num_top
        return TokenLogprobs(self.chosen[4 * start : 4 * end], self.top_ids[first:last], self.top_logprobs[first:last])


# Gateway → engine


class Hello(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """First message of a gateway, and again after every reconnect. Answered by Loading or Ready, or by WireError
    code `wire_version` when the two sides do not speak the same one."""

    wire_version: int
    gateway_id: bytes
    """16 random bytes, new at every gateway start; also the socket's routing id."""
    epoch: int = 0
    """That of the newest engine that has all it had of earlier ones' streams: to which it has said HandedOver, or which
    was its first; 0: it has known none. With another one than the engine's own it still has streams of an earlier
    engine to bring, until it says HandedOver."""


class Heartbeat(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Either way: the sender lives. From a gateway it acknowledges every StepOutput up to `last_step`; from the
    engine it tells the supervisor whether it makes progress."""

    last_step: int
    """Gateway: number of the newest StepOutput taken in. Engine: number of the newest finished step."""
    epoch: int = 0
    """Engine: as in Ready. Gateway: the epoch that last_step belongs to (others are ignored)."""
    has_work: bool = False
    """Engine: something could run now, or is running."""
    step_age_s: float = 0.0
    """Engine: seconds since a step finished while there was work."""
    expected_step_s: float = 0.0
    """Engine: how long the running step should take; 0 when unknown."""


class Submit(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """Start a request. Answered by the tokens of its steps and one Finished per choice, or by Rejected. A stream that
    was deleted (Forget) is not started."""

    request_id: int
    """The gateway's number for it, unused among its live ones, 0 .. 2**31 - 1."""
    stream_id: bytes
    """128 random bits; names the request across gateways and restarts."""
    prompt_token_ids: bytes
    sampling: SamplingParams
    gateway_state: bytes = b""
    """Opaque; Attach gives it back. Whatever a gateway needs to go on with this stream."""
    prior_token_ids: list[bytes] = []
    """Continuation: the tokens that each choice has already generated, counted against max_tokens."""
    finished_choices: list[int] = []
    """Continuation: choices that have ended already and are not run again."""
    priority: int = 0
    """Lower runs first, as in vLLM."""
    deadline_s: float = 0.0
    """Abort with cause `deadline` this long after arrival; 0: none."""
    attach_grace_s: float = 0.0
    """How long the stream lives on, or is kept after its end, without a gateway; 0: not re-attachable."""
    tenant: str = ""
    """Whose share of the device this uses; empty: the shared anonymous one."""
    cache_salt: str = ""
    """Requests share cached prefixes only within one salt."""
    label: str = ""
    """The client's own request id, for log lines."""
    shares_prefix: bool = False
    """Its prompt may be found by every other request that shares, whatever its tenant, within one cache_salt; without
    it only by the tenant's own."""
    prior_logprobs: list[TokenLogprobs] = []
    """Continuation: those of prior_token_ids, per choice, where sampling.logprobs asks for them. Kept for Attach."""
    runs_alone: bool = False
    """It may be what ends the engine: until its first token nothing else is computed."""
    ranked_tokens: int = 0
    """With runs_alone, where choices are ranked: it runs alone until they have more tokens than these, which they had
    at an engine's end, or one fewer. Nothing of them was handed out, so they begin with none."""


class Abort(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """Stop a request and free its blocks. Answered by Finished with reason `abort`; for an unknown id, too."""

    request_id: int
    cause: str = "cancelled"
    """Counted in the metrics: cancelled, disconnected, stop_string, timeout, gateway_lost …"""
    choice: int = -1
    """End this choice alone; -1: every one. A choice that has ended, or that there is not, is not answered again."""


class Pause(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """Deschedule a request: its reader is slow. Its blocks may be preempted. Unknown ids are ignored."""

    request_id: int


class Resume(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """Schedule a paused request again. Unknown ids are ignored."""

    request_id: int


class Attach(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """Take up a live or recently ended stream, from any gateway. Answered by Attached, then by its further tokens
    under this request_id; or by Rejected code `unknown_stream`."""

    request_id: int
    stream_id: bytes
    from_token: int = 0
    """Send each choice's generated tokens from this one on."""
    tenant: str = ""
    """Who asks. A stream of another tenant is as unknown as one that is not there."""


class GetStats(msgspec.Struct, tag=8, array_like=True, frozen=True):
    """Ask for the engine's figures. Answered by Stats."""

    query_id: int


class Drain(msgspec.Struct, tag=9, array_like=True, frozen=True):
    """Take no new work; exit when the live streams have ended or after `limit_s`."""

    limit_s: float


class Keep(msgspec.Struct, tag=11, array_like=True, frozen=True):
    """A stream that ended under an earlier engine and can still be attached to: keep it, as if it had ended here. Not
    answered. A stream of that name which is there already stays as it is, and one that was deleted (Forget) stays
    unknown."""

    remains: "Attached"
    """All of it, from token 0, with an end for each choice; its request_id and kept_s mean nothing."""
    tenant: str
    """As in Submit."""
    grace_s: float
    """How long it is still kept."""


class HandedOver(msgspec.Struct, tag=12, array_like=True, frozen=True):
    """All that this gateway had of earlier engines' streams, live and ended, has been sent. Not answered: who wants to
    know that it has arrived asks for something else behind it."""


class Forget(msgspec.Struct, tag=13, array_like=True, frozen=True):
    """End a stream if it lives, with cause `cancelled`, and keep nothing of it: from now on it is unknown. The engine
    sends it on to every gateway, since each may keep it as well, and to the one that said it: by that it knows. It
    remembers the newest 10000 for as long as it runs. Of those a Submit is answered by its choices' ends, with cause
    `cancelled`; a Keep is ignored; an Attach is answered by Forget and then Rejected code `unknown_stream`."""

    stream_id: bytes
    tenant: str
    """As in Attach: another tenant's stream stays."""


class GetSnapshot(msgspec.Struct, tag=10, array_like=True, frozen=True):
    """Ask what every block and every sequence is doing. Answered by Snapshot, which is made anew at most four times a
    second, whoever asks."""

    query_id: int


# Engine → gateway


class ModelFacts(msgspec.Struct, array_like=True, frozen=True):
    """What a gateway must know of the model to check a request before it is sent."""

    name: str
    vocab_size: int
    max_model_len: int
    """Most tokens of one sequence, prompt and output together."""
    eos_token_ids: list[int]
    dtype: str = ""
    device: str = ""
    num_parameters: int = 0


class Ready(msgspec.Struct, tag=32, array_like=True, frozen=True):
    """The engine takes work. Sent to every gateway that has said Hello, once the model is loaded."""

    wire_version: int
    epoch: int
    """Random, new at every engine start: with another one, all requests of the old are gone."""
    model: ModelFacts
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    suspects: list[bytes] = []
    """stream_ids that the engine before this one computed when it ended, if nobody had asked it to: each may be why."""
    suspects_tokens: list[int] = []
    """For each of them, where its choices are ranked: the most tokens that one of those in flight had come to; else
    0."""
    max_attach_grace_s: float = inf
    """Longest time for which it keeps a stream without a gateway, or after its end; longer wishes are shortened."""


class Loading(msgspec.Struct, tag=33, array_like=True, frozen=True):
    """The engine is alive but not ready."""

    stage: str
    """For people: `loading weights`, `warming up` …"""
    percent: float


class Finished(msgspec.Struct, array_like=True, frozen=True):
    """The one terminal entry of a choice; its tokens came before it or in the same StepOutput."""

    request_id: int
    choice: int
    finish_reason: str
    """stop, length, abort, error."""
    cause: str = ""
    """stop: eos or stop_id. abort: as in Abort, or deadline, drain. error: what went wrong, for people."""
    stop_token_id: int = -1
    """The end-of-sequence or stop id that ended it, which is the choice's last token; -1: none."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was found, not computed."""
    num_preemptions: int = 0


class RowLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log probabilities of the new tokens of one row of a StepOutput."""

    row: int
    values: TokenLogprobs


class PromptLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log probabilities of a part of a prompt. The parts of a request come in order, the last before or with its first
    token; after an engine's end they come again from the first."""

    request_id: int
    start: int
    """Index in the prompt of the first token told of; at least 1."""
    values: TokenLogprobs


class StepOutput(msgspec.Struct, tag=34, array_like=True, frozen=True):
    """All that one step produced for one gateway. A row is one choice with at least one new token.

    For the common step (one token a row, one choice a request) a row costs 8 bytes.
    """

    step: int
    """Counts up within an epoch; a gateway may miss numbers, in which nothing was for it."""
    request_ids: bytes
    """int32 per row."""
    token_ids: bytes
    """int32, the new tokens of all rows, row after row."""
    num_tokens: bytes = b""
    """int32 per row; empty: one each."""
    choices: bytes = b""
    """int32 per row; empty: all 0."""
    finished: list[Finished] = []
    hits: bytes = b""
    """int32 pairs (request id, prompt tokens whose KV was found) of requests whose first tokens are in this output: a
    request that the gateway ends itself, at a stop string, has no other way to know."""
    logprobs: list[RowLogprobs] = []
    """Of the rows whose requests asked for them."""
    prompt_logprobs: list[PromptLogprobs] = []


class Rejected(msgspec.Struct, tag=35, array_like=True, frozen=True):
    """A Submit or Attach was not accepted; the request does not exist."""

    request_id: int
    code: str
    """invalid, overloaded, draining, unknown_stream, duplicate."""
    message: str
    field: str = ""
    """For `invalid`: which field broke a rule."""
    retry_after_s: float = 0.0
    """For `overloaded` and `draining`. For `unknown_stream`, over 0: a gateway may still bring it from an earlier
    engine."""


class Attached(msgspec.Struct, tag=36, array_like=True, frozen=True):
    """The answer to Attach: what is needed to go on with the stream. Further tokens follow in StepOutputs."""

    request_id: int
    stream_id: bytes
    gateway_state: bytes
    prompt_token_ids: bytes
    from_token: int
    token_ids: list[bytes]
    """Per choice, the generated tokens from from_token on."""
    finished: list[Finished] = []
    """The choices that have ended already."""
    logprobs: list[TokenLogprobs] = []
    """Per choice, those of token_ids; empty where none were asked for."""
    prompt_logprobs: TokenLogprobs | None = None
    """Those of the prompt from its second token on, as far as they are known; None where none were asked for."""
    kept_s: float = inf
    """Of a stream that has ended: how long it is still kept."""


class Histogram(msgspec.Struct, array_like=True, frozen=True):
    """A cumulative-free histogram: counts[i] values were ≤ bounds[i], and over bounds[i - 1]; counts[-1] the rest."""

    bounds: list[float]
    counts: list[int]
    total: float


class Stats(msgspec.Struct, tag=37, array_like=True, frozen=True):
    """The engine's figures, by metric name without the `streamkv_` prefix."""

    query_id: int
    gauges: dict[str, float]
    counters: dict[str, float]
    histograms: dict[str, Histogram] = {}


class SequenceSnapshot(msgspec.Struct, array_like=True, frozen=True):
    """A sequence with blocks. It has no text, and not whose it is: whoever may see the figures sees it."""

    sequence_id: int
    """Unique in the engine's epoch."""
    state: str
    """running, waiting, paused, finished (its last step is on its way)."""
    num_prompt: int
    num_tokens: int
    """All of them, prompt and output."""
    num_computed: int
    """Those whose KV is written, from the first on."""
    num_cached_tokens: int
    """Those of the prompt whose KV was found."""
    num_preemptions: int
    block_table: bytes = b""
    """int32, logical block → block; empty in a pool too large to be shown."""


class StepRecord(msgspec.Struct, array_like=True, frozen=True):
    """What one step computed."""

    step: int
    ended_s: float
    """On the engine's clock, as Snapshot.time_s."""
    step_s: float
    num_prefill_tokens: int
    num_prefills: int
    """Sequences with a part of their prompt in it."""
    num_decodes: int
    num_preempted: int = 0
    """Sequences that lost their blocks for it."""


class Snapshot(msgspec.Struct, tag=39, array_like=True, frozen=True):
    """The answer to GetSnapshot: KV memory block by block, and the newest steps."""

    query_id: int
    time_s: float
    """On the engine's clock."""
    block_states: bytes
    """One byte per block, block 0 included: 0 reserved, 1 free, 2 cached, 3 owned, 4 shared (owned by several), 5 in
    transfer. Empty in a pool too large to be shown."""
    sequences: list[SequenceSnapshot]
    steps: list[StepRecord]
    """Oldest first."""
    gauges: dict[str, float] = {}
    """As in Stats, those that cost nothing."""
    counters: dict[str, float] = {}
    quantiles: dict[str, list[float]] = {}
    """Seconds at 50, 90 and 99 % of the newest requests' queue, first_token and e2e; no entry before the first."""


class WireError(msgspec.Struct, tag=38, array_like=True, frozen=True):
    """A message was dropped, and why. Codes: undecodable, wire_version, hello_first, not_ready."""

    code: str
    message: str
    request_id: int = -1
    """The request that the dropped message was about, where that is known."""


GatewayMessage = (
    Hello
    | Heartbeat
    | Submit
    | Abort
    | Pause
    | Resume
    | Attach
    | GetStats
    | Drain
    | GetSnapshot
    | Keep
    | HandedOver
    | Forget
)
EngineMessage = Ready | Loading | StepOutput | Rejected | Attached | Stats | Snapshot | Heartbeat | WireError | Forget

_REQUEST_TAGS: Final = frozenset({3, 4, 5, 6, 7})
"""Submit, Abort, Pause, Resume, Attach: their first field is the request id."""

_encoder = msgspec.msgpack.Encoder()
_gateway_decoder: msgspec.msgpack.Decoder[GatewayMessage] = msgspec.msgpack.Decoder(GatewayMessage)
_engine_decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)


def encode(message: GatewayMessage | EngineMessage) -> bytes:
    """A message's bytes."""
    return _encoder.encode(message)


def decode_from_gateway(frame: bytes | memoryview) -> GatewayMessage:
    """What the engine receives. Raises WireDecodeError."""
    try:
        return _gateway_decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireDecodeError(f"not a message of wire version {WIRE_VERSION}: {error}") from error


def decode_from_engine(frame: bytes | memoryview) -> EngineMessage:
    """What a gateway receives. Raises WireDecodeError."""
    try:
        return _engine_decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireDecodeError(f"not a message of wire version {WIRE_VERSION}: {error}") from error


def peek_request_id(frame: bytes | memoryview) -> int:
    """The request that an undecodable gateway message is about, as far as its bytes say; -1 if they do not."""
    try:
        tag, request_id = msgspec.msgpack.decode(frame, type=list[msgspec.Raw])[:2]
        if msgspec.msgpack.decode(tag, type=int) in _REQUEST_TAGS:
            return msgspec.msgpack.decode(request_id, type=Annotated[int, msgspec.Meta(ge=0, lt=2**31)])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass
    return -1


def pack_rows(
    rows: Sequence[tuple[int, int, Sequence[int]]],
    step: int,
    finished: list[Finished],
    hits: Sequence[int] = (),
    logprobs: list[RowLogprobs] | None = None,
    prompt_logprobs: list[PromptLogprobs] | None = None,
) -> StepOutput:
    """Rows of (request_id, choice, new token ids) → StepOutput in its shortest form. hits: its pairs, unpacked."""
    token_ids = [token_id for _, _, tokens in rows for token_id in tokens]
    choices = [choice for _, choice, _ in rows]
    one_each = len(token_ids) == len(rows)
    return StepOutput(
        step=step,
        request_ids=pack_ids([request_id for request_id, _, _ in rows]),
        token_ids=pack_ids(token_ids),
        num_tokens=b"" if one_each else pack_ids([len(tokens) for _, _, tokens in rows]),
        choices=pack_ids(choices) if any(choices) else b"",
        finished=finished,
        hits=pack_ids(hits),
        logprobs=logprobs or [],
        prompt_logprobs=prompt_logprobs or [],
    )
