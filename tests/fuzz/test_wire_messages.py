"""No bytes from outside stop the engine, and none are dropped without an answer."""

from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamkv.errors import WireDecodeError
from streamkv.protocol import (
    WIRE_VERSION,
    Abort,
    Attach,
    Attached,
    Drain,
    Finished,
    GatewayMessage,
    GetStats,
    Heartbeat,
    Hello,
    Keep,
    Pause,
    Ready,
    Resume,
    Stats,
    WireError,
    decode_from_engine,
    decode_from_gateway,
    encode,
    pack_ids,
    peek_request_id,
)
from streamkv.sampling import SamplingParams
from tests.support.scripted_engine import RunningEngine, serving
from tests.support.wire_gateway import WireGateway, submission

VALID: list[GatewayMessage] = [
    submission(3, [1, 2, 3], 4),
    submission(
        4,
        [9] * 40,
        sampling=SamplingParams(seed=2**64 - 1, max_tokens=5, n=3, stop_token_ids=[4, 5]),
        gateway_state=b"\xff" * 30,
        prior_token_ids=[pack_ids([1]), b"", b""],
        attach_grace_s=1.0,
        tenant="someone",
        cache_salt="salt",
        label="label",
        shares_prefix=True,
    ),
    Abort(3, "cancelled"),
    Abort(4, "stop_string", 2),
    Pause(3),
    Resume(3),
    Attach(5, (3).to_bytes(16, "big"), 1, "someone"),
    Heartbeat(7, 9, True, 0.5, 0.25),
    Hello(WIRE_VERSION, b"\x01" * 16),
    GetStats(1),
    Keep(
        Attached(0, (9).to_bytes(16, "big"), b"state", pack_ids([1]), 0, [pack_ids([4])], [Finished(0, 0, "length")]),
        "someone",
        0.5,
    ),
]
FRAMES = [encode(message) for message in VALID]


def harmless(frame: bytes) -> bool:
    """Not a Drain that would, rightly, end the engine."""
    try:
        return not isinstance(decode_from_gateway(frame), Drain)
    except WireDecodeError:
        return True


def decodes(frame: bytes) -> bool:
    try:
        decode_from_gateway(frame)
    except WireDecodeError:
        return False
    return True


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A valid message, cut off or with a few bytes changed, put in or taken out."""
    frame = bytearray(draw(st.sampled_from(FRAMES)))
    if draw(st.booleans()):
        return bytes(frame[: draw(st.integers(0, len(frame) - 1))])
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(frame) - 1))
        match draw(st.sampled_from(["change", "insert", "delete"])):
            case "change":
                frame[place] = draw(st.integers(0, 255))
            case "insert":
                frame.insert(place, draw(st.integers(0, 255)))
            case _ if len(frame) > 1:
                del frame[place]
    return bytes(frame)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=4)
    | st.text(max_size=4),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=2), children, max_size=2),
    max_leaves=6,
)
packed = st.lists(plain, max_size=6).map(msgspec.msgpack.encode) | st.tuples(
    st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 11]), st.lists(plain, max_size=13)
).map(lambda pair: msgspec.msgpack.encode([pair[0], *pair[1]]))
frames = (st.binary(max_size=80) | mutated() | packed).filter(harmless)


@pytest.fixture(scope="module")
def engine() -> Iterator[RunningEngine]:
    with serving() as running:
        yield running


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | mutated() | packed)
def test_decoding_raises_nothing_but_a_decode_error(frame: bytes) -> None:
    for decode in (decode_from_gateway, decode_from_engine):
        try:
            decode(frame)
        except WireDecodeError as error:
            assert str(error)
    assert -1 <= peek_request_id(frame) < 2**31


@pytest.mark.parametrize("depth", [100, 10_000, 1_000_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    for frame in (b"\x91" * depth + b"\x01", b"\x9d\x03\x01" + b"\x91" * depth + b"\x01"):
        with pytest.raises(WireDecodeError):
            decode_from_gateway(frame)
        peek_request_id(frame)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(frames, min_size=1, max_size=15))
def test_the_engine_answers_every_undecodable_frame_and_serves_on(engine: RunningEngine, batch: list[bytes]) -> None:
    with WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        for frame in batch:
            gateway.send_frame(frame)
        gateway.send(GetStats(12345))
        while gateway.wait_for(Stats).query_id != 12345:
            pass
        num_answers = sum(
            isinstance(message, WireError) and message.code == "undecodable" for message in gateway.messages
        ) + sum(getattr(message, "code", "") == "invalid" for message in gateway.messages)
        assert num_answers >= sum(not decodes(frame) for frame in batch)
        fresh = submission(2**31 - 2, [1, 2, 3], 3, stream_id=b"the request after")
        gateway.send(msgspec.structs.replace(fresh, stream_id=fresh.stream_id[:16]))
        assert gateway.wait_end(2**31 - 2).tokens[0] == engine.executor.expected_tokens([1, 2, 3], 3)
        for request_id in list(gateway.requests):
            gateway.send(Abort(request_id))
