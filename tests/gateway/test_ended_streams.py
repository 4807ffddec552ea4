"""Ended streams are kept for their owners, for their time, within a bound."""

from gateway.ended_streams import EndedStreams
from streamkv.protocol import Attached, TokenLogprobs
from tests.support.running_gateway import eventually


def remains(name: int, num_tokens: int = 10) -> Attached:
    return Attached(0, name.to_bytes(16, "big"), b"state", b"", 0, [bytes(4 * num_tokens)])


async def test_an_owner_finds_it_until_its_grace_period_is_over() -> None:
    streams = EndedStreams()
    streams.keep(remains(1), "alice", 0.05)
    streams.keep(remains(2), "alice", 60)
    assert streams.find(remains(1).stream_id, "alice") == remains(1)
    assert streams.find(remains(1).stream_id, "bob") is None and streams.find(b"?" * 16, "alice") is None
    await eventually(lambda: streams.find(remains(1).stream_id, "alice") is None)
    assert streams.find(remains(2).stream_id, "alice") == remains(2)


async def test_what_was_kept_again_is_not_forgotten_with_the_first() -> None:
    streams = EndedStreams()
    streams.keep(remains(1), "", 0.02)
    streams.keep(remains(1, 20), "", 60)
    streams.keep(remains(2), "", 0.05)
    await eventually(lambda: streams.find(remains(2).stream_id, "") is None)
    assert streams.find(remains(1).stream_id, "") == remains(1, 20)


async def test_beyond_the_bound_the_first_goes_first() -> None:
    streams = EndedStreams(max_bytes=3 * 45)
    for name in range(5):
        streams.keep(remains(name), "", 60)
    assert [name for name in range(5) if streams.find(remains(name).stream_id, "")] == [2, 3, 4]
    with_logprobs = Attached(0, b"l" * 16, b"", b"", 0, [b""], logprobs=[TokenLogprobs(bytes(200))])
    streams.keep(with_logprobs, "", 60)
    assert streams.find(b"l" * 16, "") is None and streams.find(remains(4).stream_id, "") is None


async def test_a_new_engine_is_told_of_each_for_the_rest_of_its_time() -> None:
    streams = EndedStreams()
    for name, grace_s in ((1, 60.0), (2, 30.0)):
        streams.keep(remains(name), "alice", grace_s)
    told = list(streams.for_next_engine())
    assert [(keep.remains, keep.tenant) for keep in told] == [(remains(1), "alice"), (remains(2), "alice")]
    assert all(limit - 10 < keep.grace_s <= limit for keep, limit in zip(told, (60, 30), strict=True))
