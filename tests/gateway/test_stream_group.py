"""Several prompts' streams are one to their client: ended once, paused together, failed together."""

import pytest

from gateway.failures import EngineFault
from gateway.outlet import Ending, Usage
from gateway.stream_group import StreamGroup
from gateway.stream_state import StreamState
from gateway.streams import Stream
from streamkv.errors import StreamKVError
from streamkv.protocol import Finished
from streamkv.sampling import SamplingParams
from tests.support.running_gateway import small_tokenizer
from tests.support.told_stream import Told, new_stream

PROMPT = [10, 11, 12]
IDS = small_tokenizer().encode("one two three")


def begun(group: StreamGroup, number: int) -> Stream:
    """The stream of one prompt, with two choices."""
    stream = new_stream(group.parts[number])
    stream.begin(StreamState(SamplingParams(seed=1, max_tokens=50, n=2), "m"), PROMPT[: number + 1])
    group.add(stream)
    return stream


def finish(stream: Stream, reason: str = "length") -> None:
    for choice in (0, 1):
        stream.push(choice, IDS)
        stream.finish(Finished(1, choice, reason, num_cached_tokens=1))
    stream.flush()


async def test_choices_are_numbered_on_and_the_end_is_the_last_ones() -> None:
    told = Told()
    group = StreamGroup(told, 3, 2)
    streams = [begun(group, number) for number in range(3)]
    for number in (1, 0, 2):
        assert not group.ended.done() and told.num_closed == 0
        finish(streams[number])
    assert group.ended.done() and told.num_closed == 1 and group.failure is None
    assert [choice for choice, _ in told.deltas] == [2, 3, 0, 1, 4, 5]
    assert all(told.of(choice)[1] == IDS for choice in range(6))
    assert told.usage == Usage(1 + 2 + 3, 6 * len(IDS), 3)


async def test_it_has_started_when_one_has() -> None:
    group = StreamGroup(Told(), 2, 2)
    begun(group, 0)
    later = begun(group, 1)
    assert not group.started.done()
    finish(later)
    await group.started
    assert not group.ended.done()


async def test_a_slow_reader_pauses_all_also_those_that_come_later() -> None:
    group = StreamGroup(Told(), 2, 2)
    first = begun(group, 0)
    group.pause("slow reader")
    second = begun(group, 1)
    assert first.is_paused and second.is_paused
    group.resume("slow reader")
    assert not first.is_paused and not second.is_paused


async def test_an_outlet_that_cannot_tell_the_end_breaks_the_answer_off() -> None:
    class Faulty(Told):
        def close(self, usage: Usage, failure: StreamKVError | None) -> None:
            raise RuntimeError("a fault of ours")

    group = StreamGroup(Faulty(), 2, 2)
    first, second = begun(group, 0), begun(group, 1)
    finish(first)
    assert not group.is_broken_off
    finish(second)
    assert group.is_broken_off and group.started.done() and group.ended.done()


@pytest.mark.parametrize("how", ["cancel", "fail"])
async def test_an_outlet_that_cannot_tell_an_end_keeps_none_of_them_running(how: str) -> None:
    class Faulty(Told):
        def end(self, choice: int, ending: Ending) -> None:
            if ending.finish_reason == "abort":
                raise RuntimeError("a fault of ours")
            super().end(choice, ending)

    told = Faulty()
    group = StreamGroup(told, 3, 2)
    streams = [begun(group, number) for number in range(3)]
    if how == "cancel":
        group.cancel("disconnected")
    else:
        finish(streams[0], "error")
    assert all(stream.is_done for stream in streams), "what nobody reads runs on"
    assert group.ended.done() and group.is_broken_off
    assert told.num_closed == 1 and isinstance(told.failure, EngineFault)


async def test_one_that_fails_fails_all_also_those_that_come_later() -> None:
    told = Told()
    group = StreamGroup(told, 3, 2)
    first, second = begun(group, 0), begun(group, 1)
    first.finish(Finished(1, 0, "error", "out of luck"))
    first.finish(Finished(1, 1, "error", "out of luck"))
    first.flush()
    assert second.is_done and not group.ended.done()
    third = begun(group, 2)
    assert third.is_done and group.ended.done()
    assert isinstance(told.failure, EngineFault) and group.failure is told.failure and told.num_closed == 1
    assert told.ends == [Ending("error", "out of luck")] * 2 + [Ending("abort", "cancelled")] * 4


async def test_cancelled_it_ends_once_whatever_comes_after() -> None:
    told = Told()
    group = StreamGroup(told, 2, 2)
    streams = [begun(group, number) for number in range(2)]
    finish(streams[0])
    group.cancel("disconnected")
    finish(streams[1])
    group.cancel("disconnected")
    assert told.num_closed == 1 and told.ends[2:] == [Ending("abort", "disconnected")] * 2
