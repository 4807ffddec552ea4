"""Ended streams are kept for their owners, for their time, within a bound."""

from math import inf

import msgspec

from gateway.ended_streams import EndedStreams
from streamkv.protocol import KEPT_CHOICE_BYTES, KEPT_STREAM_BYTES, Attached, TokenLogprobs
from tests.support.running_gateway import eventually


def remains(name: int, num_tokens: int = 10) -> Attached:
    return Attached(0, name.to_bytes(16, "big"), b"state", b"", 0, [bytes(4 * num_tokens)])


def found(streams: EndedStreams, name: int, tenant: str) -> Attached | None:
    """What is kept, but for how long."""
    kept = streams.find(remains(name).stream_id, tenant)
    return msgspec.structs.replace(kept, kept_s=inf) if kept is not None else None


async def test_an_owner_finds_it_until_its_grace_period_is_over() -> None:
    streams = EndedStreams()
    streams.keep(remains(1), "alice", 0.05)
    streams.keep(remains(2), "alice", 60)
    assert found(streams, 1, "alice") == remains(1)
    assert streams.find(remains(1).stream_id, "bob") is None and streams.find(b"?" * 16, "alice") is None
    await eventually(lambda: streams.find(remains(1).stream_id, "alice") is None)
    assert found(streams, 2, "alice") == remains(2)
    kept = streams.find(remains(2).stream_id, "alice")
    assert kept is not None and 50 < kept.kept_s < 60


async def test_what_is_kept_again_is_kept_until_the_same_time() -> None:
    streams = EndedStreams()
    streams.keep(remains(1), "", 0.05)
    streams.keep(remains(2), "", 60)
    for name in (1, 2):
        streams.keep(remains(name, 20), "", 3600)
        assert found(streams, name, "") == remains(name, 20)
    await eventually(lambda: streams.find(remains(1).stream_id, "") is None)
    kept = streams.find(remains(2).stream_id, "")
    assert kept is not None and 30 < kept.kept_s < 60


async def test_what_its_owner_drops_is_gone_for_the_next_engine_too() -> None:
    streams = EndedStreams()
    streams.keep(remains(1), "alice", 60)
    streams.drop(remains(1).stream_id, "bob")
    assert found(streams, 1, "alice") == remains(1)
    streams.drop(remains(1).stream_id, "alice")
    streams.drop(remains(1).stream_id, "alice")
    assert found(streams, 1, "alice") is None and streams.stream_ids == []
    assert streams.for_next_engine(remains(1).stream_id) is None


async def test_beyond_the_bound_the_first_goes_first() -> None:
    streams = EndedStreams(max_bytes=3 * (KEPT_STREAM_BYTES + KEPT_CHOICE_BYTES + 45))
    for name in range(5):
        streams.keep(remains(name), "", 60)
    assert [name for name in range(5) if streams.find(remains(name).stream_id, "")] == [2, 3, 4]
    with_logprobs = Attached(0, b"l" * 16, b"", b"", 0, [b""], logprobs=[TokenLogprobs(bytes(2000))])
    streams.keep(with_logprobs, "", 60)
    assert streams.find(b"l" * 16, "") is None and streams.find(remains(4).stream_id, "") is None


async def test_a_new_engine_is_told_of_each_for_the_rest_of_its_time() -> None:
    streams = EndedStreams()
    for name, grace_s in ((1, 60.0), (2, 30.0)):
        streams.keep(remains(name), "alice", grace_s)
    told = [keep for name in streams.stream_ids if (keep := streams.for_next_engine(name))]
    assert [(keep.remains, keep.tenant) for keep in told] == [(remains(1), "alice"), (remains(2), "alice")]
    assert all(limit - 10 < keep.grace_s <= limit for keep, limit in zip(told, (60, 30), strict=True))


async def test_what_is_around_their_content_counts() -> None:
    """Some 100,000 empty streams fill the bound, not millions."""
    streams = EndedStreams(max_bytes=20 * KEPT_STREAM_BYTES)
    for name in range(1000):
        streams.keep(Attached(0, name.to_bytes(16, "big"), b"", b"", 0, []), "", 60)
    assert len(streams.stream_ids) == 20
    streams.keep(Attached(0, b"n" * 16, b"", b"", 0, [b""] * 64), "", 60)
    assert len(streams.stream_ids) == 1 + (19 * KEPT_STREAM_BYTES - 64 * KEPT_CHOICE_BYTES) // KEPT_STREAM_BYTES
