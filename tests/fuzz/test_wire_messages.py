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
    Forget,
    GatewayMessage,
    GetStats,
    HandedOver,
    Heartbeat,
    Hello,
    Keep,
    Pause,
    Ready,
    Rejected,
    Resume,
    Stats,
    TokenLogprobs,
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
    HandedOver(),
    Forget((9).to_bytes(16, "big"), "someone"),
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
    st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13]), st.lists(plain, max_size=13)
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


def near(length: int) -> st.SearchStrategy[bytes]:
    """Mostly as long as it should be."""
    return st.sampled_from([length, length, length, length + 1, length + 4, 0]).map(bytes)


@st.composite
def remains(draw: st.DrawFn) -> Attached:
    """The remains of a stream, right or wrong in each of its parts."""
    num_choices = draw(st.integers(1, 3))
    num_prompt = draw(st.integers(1, 3))
    counts = [draw(st.integers(0, 3)) for _ in range(num_choices)]
    num_top = draw(st.integers(0, 2))

    def told(num_tokens: int) -> TokenLogprobs:
        size = 4 * num_tokens
        return TokenLogprobs(draw(near(size)), draw(near(size * num_top)), draw(near(size * num_top)))

    ends = draw(st.sampled_from([list(range(num_choices)), list(range(num_choices)), [0], [0, 0], [-1], [7], []]))
    return Attached(
        request_id=draw(st.integers(-5, 5)),
        stream_id=draw(near(12)) + draw(st.binary(min_size=4, max_size=4)),
        gateway_state=draw(st.binary(max_size=3)),
        prompt_token_ids=draw(near(4 * num_prompt)),
        from_token=draw(st.sampled_from([0, 0, 0, 1, -1])),
        token_ids=[draw(near(4 * count)) for count in counts],
        finished=[Finished(0, choice, draw(st.sampled_from(["stop", "", "error"]))) for choice in ends],
        logprobs=[told(count) for count in counts] if draw(st.booleans()) else [],
        prompt_logprobs=told(num_prompt - 1) if draw(st.booleans()) else None,
        kept_s=draw(st.floats()),
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(remains(), min_size=1, max_size=8), st.floats())
def test_whoever_attaches_to_what_was_brought_comes_to_its_end_or_is_refused(
    engine: RunningEngine, brought: list[Attached], grace_s: float
) -> None:
    with WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        for told in brought:
            gateway.send(Keep(told, "someone", grace_s))
        names = list(dict.fromkeys(told.stream_id for told in brought))
        for request_id, name in enumerate(names):
            gateway.send(Attach(request_id, name, 0, "someone"))
            gateway.send(Forget(name, "someone"))
        gateway.send(GetStats(54321))
        while gateway.wait_for(Stats).query_id != 54321:
            pass
        refused = {message.request_id for message in gateway.messages if isinstance(message, Rejected)}
        for request_id in set(range(len(names))) - refused:
            found = gateway.requests[request_id].attached
            assert found is not None and sorted(end.choice for end in found.finished) == list(
                range(len(found.token_ids))
            )
            assert len(found.stream_id) == 16 and not any(len(packed) % 4 for packed in found.token_ids)
            for packed, values in zip(found.token_ids, found.logprobs, strict=bool(found.logprobs)):
                assert len(values.chosen) == len(packed) and len(values.top_ids) == len(values.top_logprobs)
                assert len(values.top_ids) == len(packed) * values.num_top
