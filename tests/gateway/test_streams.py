"""What waits unread of a stream is bounded, and what continues it is complete."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from gateway.engine_client import EngineClient
from gateway.streams import MAX_ENGINE_DEATHS, BoundedWriter, Ending, Outbox, Stream, StreamState, Usage
from streamkv.errors import StreamKVError
from streamkv.protocol import Attached, Finished, pack_ids
from streamkv.sampling import SamplingParams
from tests.support.running_gateway import eventually, small_tokenizer
from tests.support.scripted_engine import free_endpoint

PROMPT = [10, 11, 12]
IDS = small_tokenizer().encode("one two three four five six seven")


class Transport(asyncio.WriteTransport):
    """Keeps what is written until it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.unread = 0

    def write(self, data: object) -> None:
        assert isinstance(data, bytes)
        self.writes.append(data)
        self.unread += len(data)

    def get_write_buffer_size(self) -> int:
        return self.unread


class Told:
    """An outlet that keeps what it is told."""

    def __init__(self) -> None:
        self.text = b""
        self.token_ids: list[int] = []
        self.ends: list[Ending] = []
        self.usage: Usage | None = None
        self.failure: StreamKVError | None = None
        self.num_closed = 0

    def begin(self, stream: Stream) -> None: ...

    def piece(self, choice: int, text: bytes, token_id: int) -> None:
        self.delta(choice, text, [token_id])

    def delta(self, choice: int, text: bytes, token_ids: Sequence[int]) -> None:
        self.text += text
        self.token_ids += token_ids

    def end(self, choice: int, ending: Ending) -> None:
        self.ends.append(ending)

    def flush(self) -> None: ...

    def close(self, usage: Usage, failure: StreamKVError | None) -> None:
        self.usage, self.failure = usage, failure
        self.num_closed += 1


def begun(told: Told, *, from_token: int = 0, **state: object) -> Stream:
    """A stream that is submitted to an engine which is not there."""
    with free_endpoint() as endpoint:
        engine = EngineClient(endpoint, heartbeat_s=1.0, engine_timeout_s=10.0)
    stream = Stream(
        engine,
        small_tokenizer(),
        told,
        stream_id=b"s" * 16,
        arrived=0.0,
        on_end=lambda _: None,
        from_token=from_token,
    )
    sampling = SamplingParams(seed=1, max_tokens=50, temperature=0.0)
    stream.begin(msgspec.structs.replace(StreamState(sampling, "m"), **state), PROMPT)
    engine.close()
    return stream


def text(ids: Sequence[int]) -> bytes:
    return msgspec.json.encode(small_tokenizer().decode(ids))[1:-1]


async def test_tokens_become_text_one_by_one_and_together() -> None:
    for size in (1, 2, 5, len(IDS)):
        told = Told()
        stream = begun(told)
        for start in range(0, len(IDS), size):
            if size == 1:
                stream.push_token(IDS[start])
            else:
                stream.push(0, IDS[start : start + size])
                stream.flush()
        stream.finish(Finished(1, 0, "length"))
        stream.flush()
        assert (told.text, told.token_ids) == (text(IDS), IDS)
        assert told.ends == [Ending("length")] and told.num_closed == 1
        assert told.usage == Usage(3, len(IDS), 0)


async def test_a_continuation_holds_every_token_and_the_client_none_twice() -> None:
    told = Told()
    stream = begun(told)
    for token_id in IDS[:5]:
        stream.push_token(token_id)
    submit = stream.submission(8)
    assert submit is not None
    assert submit.prior_token_ids == [pack_ids(IDS[:5])] and submit.prompt_token_ids == pack_ids(PROMPT)
    assert submit.stream_id == b"s" * 16 and submit.request_id == 8
    state = msgspec.msgpack.decode(submit.gateway_state, type=StreamState)
    assert state == stream.state
    stream.attached(Attached(8, b"s" * 16, b"", submit.prompt_token_ids, 3, [pack_ids(IDS[3:8])]))
    for token_id in IDS[8:]:
        stream.push_token(token_id)
    assert (told.text, told.token_ids) == (text(IDS), IDS)


async def test_a_stream_under_which_engines_keep_dying_is_failed() -> None:
    told = Told()
    stream = begun(told)
    for request_id in range(MAX_ENGINE_DEATHS):
        assert stream.submission(request_id) is not None
    assert stream.submission(9) is None
    assert stream.is_done and told.num_closed == 1 and told.failure is not None
    assert [end.finish_reason for end in told.ends] == ["error"]


async def test_attaching_from_a_token_sends_only_what_comes_after() -> None:
    for from_token in range(len(IDS)):
        told = Told()
        stream = begun(told, from_token=from_token)
        for token_id in IDS:
            stream.push_token(token_id)
        stream.finish(Finished(1, 0, "length"))
        stream.flush()
        assert told.token_ids == IDS[from_token:]
        assert told.text == text(IDS)[len(text(IDS[:from_token])) :]


async def test_tokens_behind_a_stop_string_are_neither_shown_nor_counted() -> None:
    told = Told()
    stream = begun(told, stop=("three",))
    stream.push(0, IDS)
    stream.flush()
    assert told.text == b"one two " and told.ends == [Ending("stop", "stop_string", "three")]
    assert told.usage is not None and told.usage.num_output == len(told.token_ids) < len(IDS)
    stream.push(0, IDS)
    stream.flush()
    assert told.num_closed == 1 and told.text == b"one two "


async def test_it_ends_once_whatever_comes_after() -> None:
    told = Told()
    stream = begun(told)
    stream.push_token(IDS[0])
    stream.cancel("cancelled")
    stream.cancel("disconnected")
    stream.expire(1.0)
    stream.hand_over()
    stream.break_off()
    assert told.num_closed == 1 and told.ends == [Ending("abort", "cancelled")]
    assert stream.started.done() and stream.ended.done()


async def test_it_stays_paused_until_every_reason_is_gone() -> None:
    stream = begun(Told())
    stream.pause("client")
    stream.pause("slow reader")
    stream.resume("client")
    assert stream.is_paused
    stream.resume("slow reader")
    assert not stream.is_paused


async def test_the_writer_holds_until_it_is_open_and_joins_what_one_turn_brings() -> None:
    writer, transport = BoundedWriter(Outbox(), 1000), Transport()
    writer.write(b"a")
    await asyncio.sleep(0)
    writer.write(b"b")
    assert not writer.is_open and writer.num_bytes == 0
    writer.open(transport)
    assert transport.writes == [b"ab"]
    writer.write(b"c")
    writer.write(b"d")
    await asyncio.sleep(0)
    writer.write(b"e")
    writer.flush()
    await asyncio.sleep(0)
    assert transport.writes == [b"ab", b"cd", b"e"] and writer.num_bytes == 5


async def test_the_writers_of_one_turn_do_not_mix() -> None:
    outbox, transports = Outbox(), [Transport() for _ in range(3)]
    writers = [BoundedWriter(outbox, 1000) for _ in transports]
    for writer, transport in zip(writers, transports, strict=True):
        writer.open(transport)
    for step in range(2):
        for index, writer in enumerate(writers):
            writer.write(b"%d-%d " % (index, step))
    await asyncio.sleep(0)
    assert [transport.writes for transport in transports] == [[b"0-0 0-1 "], [b"1-0 1-1 "], [b"2-0 2-1 "]]


@pytest.mark.parametrize("is_open", [True, False])
async def test_the_writer_says_once_that_it_is_full_and_once_that_it_drained(is_open: bool) -> None:
    told: list[str] = []
    transport = Transport()
    writer = BoundedWriter(Outbox(), 100, lambda: told.append("full"), lambda: told.append("drained"))
    if is_open:
        writer.open(transport)
    for _ in range(30):
        writer.write(b"x" * 10)
        await asyncio.sleep(0)
    assert told == ["full"]
    if not is_open:
        writer.open(transport)
    assert transport.unread == 300, "something was dropped"
    transport.unread = 60
    await asyncio.sleep(0.06)
    assert told == ["full"], "over half is still unread"
    transport.unread = 50
    await eventually(lambda: told == ["full", "drained"])
    writer.write(b"x" * 300)
    await asyncio.sleep(0)
    assert told == ["full", "drained", "full"]
    writer.close()


async def test_a_closed_writer_writes_nothing() -> None:
    writer, transport = BoundedWriter(Outbox(), 10), Transport()
    writer.open(transport)
    writer.write(b"late")
    writer.close()
    writer.write(b"later")
    await asyncio.sleep(0)
    assert transport.writes == []
