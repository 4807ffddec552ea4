"""The wire's bytes: every message survives the way, ids have one layout, the common step is small."""

import msgspec
import pytest

from streamkv.errors import WireDecodeError
from streamkv.protocol import (
    WIRE_VERSION,
    Abort,
    Attach,
    Attached,
    Drain,
    EngineMessage,
    Finished,
    Forget,
    GatewayMessage,
    GetStats,
    HandedOver,
    Heartbeat,
    Hello,
    Histogram,
    Keep,
    Loading,
    ModelFacts,
    Pause,
    PromptLogprobs,
    Ready,
    Rejected,
    Resume,
    RowLogprobs,
    Stats,
    StepOutput,
    Submit,
    TokenLogprobs,
    WireError,
    decode_from_engine,
    decode_from_gateway,
    encode,
    pack_floats,
    pack_ids,
    pack_rows,
    peek_request_id,
    unpack_floats,
    unpack_ids,
)
from streamkv.sampling import SamplingParams

SUBMIT = Submit(
    request_id=2**31 - 1,
    stream_id=bytes(range(16)),
    prompt_token_ids=pack_ids([0, 2**31 - 1]),
    sampling=SamplingParams(
        seed=2**64 - 1, max_tokens=3, top_p=0.5, stop_token_ids=[1], logit_bias={0: -100.0, 5: 0.5}, logprobs=1
    ),
    gateway_state=b"\x00\xff",
    prior_token_ids=[pack_ids([3])],
    finished_choices=[],
    priority=-5,
    deadline_s=1.5,
    attach_grace_s=30.0,
    tenant="tenant",
    cache_salt="salt",
    label="läbel",
    shares_prefix=True,
    prior_logprobs=[TokenLogprobs(pack_floats([-0.5]), pack_ids([3]), pack_floats([-0.5]))],
    runs_alone=True,
    ranked_tokens=7,
)
TOLD = TokenLogprobs(pack_floats([-0.5, -2.0]), pack_ids([4, 5, 6, 7]), pack_floats([-0.5, -1, -1.5, -2]))
END = Finished(1, 0, "stop", "eos", 2, 10, 1)
ATTACHED = Attached(
    1, b"s" * 16, b"state", pack_ids([1]), 3, [pack_ids([4]), b""], [END], [TOLD, TokenLogprobs(b"")], TOLD, 2.5
)
FROM_GATEWAY: list[GatewayMessage] = [
    Hello(WIRE_VERSION, b"g" * 16, 2**62),
    HandedOver(),
    Forget(b"s" * 16, "tenant"),
    Heartbeat(5, 2**62),
    SUBMIT,
    Abort(1, "timeout", 3),
    Pause(1),
    Resume(1),
    Attach(1, b"s" * 16, 7, "tenant"),
    GetStats(9),
    Drain(2.5),
    Keep(ATTACHED, "tenant", 7.5),
]
FROM_ENGINE: list[EngineMessage] = [
    Ready(WIRE_VERSION, 2**62, ModelFacts("m", 10, 20, [2], "float32", "cpu", 5), 16, 100, 256, 8192, [b"s"], [3], 4.5),
    Loading("loading weights", 12.5),
    StepOutput(
        3,
        pack_ids([1]),
        pack_ids([2, 3]),
        pack_ids([2]),
        pack_ids([1]),
        [END],
        logprobs=[RowLogprobs(0, TOLD)],
        prompt_logprobs=[PromptLogprobs(1, 1, TOLD)],
    ),
    Rejected(1, "invalid", "too long", "prompt", 1.5),
    ATTACHED,
    Stats(1, {"a": 1.5}, {"b": 2.0}, {"h": Histogram([1.0], [2, 3], 4.5)}),
    Heartbeat(5, 2**62, True, 1.5, 2.5),
    WireError("undecodable", "why", 7),
    Forget(b"s" * 16, "tenant"),
]


@pytest.mark.parametrize("message", FROM_GATEWAY, ids=lambda m: type(m).__name__)
def test_every_gateway_message_survives_the_wire(message: GatewayMessage) -> None:
    assert decode_from_gateway(encode(message)) == message


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda m: type(m).__name__)
def test_every_engine_message_survives_the_wire(message: EngineMessage) -> None:
    assert decode_from_engine(encode(message)) == message


def test_every_message_has_a_tag_of_its_own_and_neither_side_takes_the_others() -> None:
    tags = [msgspec.msgpack.decode(encode(message))[0] for message in [*FROM_GATEWAY, *FROM_ENGINE]]
    assert len(set(tags)) == len(tags) - 2, "Heartbeat and Forget go both ways"
    for message in FROM_ENGINE:
        if not isinstance(message, Heartbeat | Forget):
            with pytest.raises(WireDecodeError):
                decode_from_gateway(encode(message))


def test_each_version_understands_the_other_s_hello_and_can_say_which_one_it_is() -> None:
    first = msgspec.msgpack.encode([1, 1, b"g" * 16])
    assert decode_from_gateway(first) == Hello(1, b"g" * 16)
    assert msgspec.msgpack.decode(encode(Hello(WIRE_VERSION, b"g" * 16, 5)))[:3] == [1, WIRE_VERSION, b"g" * 16]


def test_a_newer_peer_may_add_fields_at_the_end() -> None:
    frame = msgspec.msgpack.encode([*msgspec.msgpack.decode(encode(Abort(4, "timeout"))), "new", [1]])
    assert decode_from_gateway(frame) == Abort(4, "timeout")


def test_an_older_peer_may_leave_out_fields_that_have_defaults() -> None:
    assert decode_from_gateway(msgspec.msgpack.encode([4, 9])) == Abort(9)


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x90", b"\x91\x63", b"\x92\x04\xc0", encode(Abort(1))[:-1], b"\x80"])
def test_what_is_no_message_raises_a_decode_error(frame: bytes) -> None:
    with pytest.raises(WireDecodeError, match="wire version"):
        decode_from_gateway(frame)


def test_ids_are_little_endian_int32() -> None:
    assert pack_ids([1, 256, 2**31 - 1, -1]) == bytes.fromhex("01000000 00010000 ffffff7f ffffffff")
    assert unpack_ids(pack_ids(range(1000))) == list(range(1000))
    assert unpack_ids(b"") == []
    for wrong in (2**31, -(2**31) - 1, 2**63):
        with pytest.raises(OverflowError):
            pack_ids([wrong])
    with pytest.raises(WireDecodeError, match="got 5 bytes"):
        unpack_ids(b"12345")


def test_numbers_are_little_endian_float32() -> None:
    assert pack_floats([1.0, -0.5]) == bytes.fromhex("0000803f 000000bf")
    assert unpack_floats(pack_floats([-0.25, 0.0, 1e300])) == [-0.25, 0.0, float("inf")]
    with pytest.raises(WireDecodeError, match="got 3 bytes"):
        unpack_floats(b"123")


@pytest.mark.parametrize("num_top", [0, 1, 3])
def test_log_probabilities_are_cut_by_tokens(num_top: int) -> None:
    whole = TokenLogprobs(
        pack_floats([-1, -2, -3, -4]), pack_ids(range(4 * num_top)), pack_floats(-i for i in range(4 * num_top))
    )
    assert (whole.num_tokens, whole.num_top, whole.num_bytes) == (4, num_top, 16 + 32 * num_top)
    part = whole.between(1, 3)
    assert (part.num_tokens, part.num_top) == (2, num_top)
    assert unpack_floats(part.chosen) == [-2, -3]
    assert unpack_ids(part.top_ids) == list(range(num_top, 3 * num_top))
    assert unpack_floats(part.top_logprobs) == [-i for i in range(num_top, 3 * num_top)]
    assert whole.between(0, 4) == whole and whole.between(4, 4) == TokenLogprobs(b"")


def test_the_common_step_costs_eight_bytes_a_row() -> None:
    rows = [(request_id, 0, [request_id + 7]) for request_id in range(256)]
    output = pack_rows(rows, 5, [])
    assert (output.num_tokens, output.choices, output.finished) == (b"", b"", [])
    assert unpack_ids(output.request_ids) == list(range(256))
    assert unpack_ids(output.token_ids) == list(range(7, 263))
    assert len(encode(output)) <= 256 * 8 + 20


def test_rows_of_several_tokens_and_choices_say_so() -> None:
    output = pack_rows([(1, 0, [5]), (1, 2, [6, 7])], 5, [END])
    assert unpack_ids(output.token_ids) == [5, 6, 7]
    assert unpack_ids(output.num_tokens) == [1, 2]
    assert unpack_ids(output.choices) == [0, 2]
    assert output.finished == [END]
    assert unpack_ids(pack_rows([(1, 0, [5]), (1, 2, [6])], 5, []).choices) == [0, 2]


@pytest.mark.parametrize("message", FROM_GATEWAY, ids=lambda m: type(m).__name__)
def test_the_request_of_a_broken_message_is_found_when_its_bytes_say_it(message: GatewayMessage) -> None:
    values = msgspec.msgpack.decode(encode(message))
    broken = msgspec.msgpack.encode([*values[:2], {"not": "what belongs here"}])
    expected = message.request_id if isinstance(message, Submit | Abort | Pause | Resume | Attach) else -1
    assert peek_request_id(broken) == expected


def test_no_request_is_found_where_none_is() -> None:
    for values in ([3], [3, -1], [3, 2**31], [3, "1"], [3, True], [], {"a": 1}, 7):
        assert peek_request_id(msgspec.msgpack.encode(values)) == -1
