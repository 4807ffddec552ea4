"""What waits unread of a stream is bounded, and what continues it is complete."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from gateway.bounded_writer import BoundedWriter, Outbox
from gateway.cursor import at_token, parse_cursor
from gateway.deltas import Delta
from gateway.failures import EngineFault, RequestTimeout
from gateway.outlet import Ending, StreamFacts, Usage
from gateway.stream_state import StreamState
from gateway.streams import Stream
from gateway.suspicion import MAX_ENGINE_DEATHS
from streamkv.errors import StreamKVError
from streamkv.protocol import Attached, Finished, Rejected, StepOutput, pack_ids
from streamkv.sampling import SamplingParams
from tests.support.running_gateway import eventually, small_tokenizer
from tests.support.told_stream import new_stream

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
        self.sizes: list[int] = []
        """Tokens of each part."""
        self.ends: list[Ending] = []
        self.usage: Usage | None = None
        self.failure: StreamKVError | None = None
        self.num_closed = 0

    def begin(self, stream: StreamFacts) -> None: ...

    def piece(self, choice: int, text: bytes, token_id: int) -> None:
        self.delta(choice, Delta(text, [token_id]))

    def delta(self, choice: int, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.sizes.append(len(delta.token_ids))

    def end(self, choice: int, ending: Ending) -> None:
        self.ends.append(ending)

    def flush(self) -> None: ...

    def close(self, usage: Usage, failure: StreamKVError | None) -> None:
        self.usage, self.failure = usage, failure
        self.num_closed += 1


def begun(told: Told, **state: object) -> Stream:
    """A stream that is submitted to an engine which is not there."""
    stream = new_stream(told, str(state.get("key", "")))
    sampling = SamplingParams(seed=1, max_tokens=50, temperature=0.0)
    stream.begin(msgspec.structs.replace(StreamState(sampling, "m"), **state), PROMPT)
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


async def test_a_stream_at_which_engines_keep_dying_is_run_alone_then_failed() -> None:
    told = Told()
    stream = begun(told)
    alone = []
    for request_id in range(MAX_ENGINE_DEATHS):
        submit = stream.submission(request_id)
        assert submit is not None
        alone.append(submit.runs_alone)
        stream.suspected(0)
    assert alone == [False, False, True]
    assert stream.submission(9) is None
    assert stream.is_done and told.num_closed == 1 and told.failure is not None
    assert [end.finish_reason for end in told.ends] == ["error"]


async def test_ranked_choices_are_cleared_by_coming_further_than_at_any_end_before() -> None:
    told = Told()
    stream = begun(told, sampling=SamplingParams(seed=1, max_tokens=50, best_of=3))
    counted = []
    for num_tokens in (0, 0, 9, 9, 7, 9):
        stream.suspected(num_tokens)
        submit = stream.submission(8)
        assert submit is not None and submit.prior_token_ids == []
        counted.append((submit.runs_alone, submit.ranked_tokens))
    assert counted == [(False, 1), (True, 1), (False, 10), (False, 10), (False, 10), (False, 10)], (
        "three ends at other places, so that those at this one tell less"
    )
    for _ in range(2):
        stream.suspected(9)
        submit = stream.submission(8)
    assert submit is not None and submit.runs_alone
    stream.suspected(9)
    assert stream.submission(10) is None and told.failure is not None


BEST_OF = SamplingParams(seed=1, max_tokens=50, best_of=3)


async def test_whoever_takes_up_a_stream_knows_at_how_many_ends_it_was_there() -> None:
    for sampling, place in ((BEST_OF, 20), (SamplingParams(seed=1, max_tokens=50), 0)):
        stream = begun(Told(), sampling=sampling)
        for _ in range(2):
            stream.suspected(place)
        submit = stream.submission(8)
        assert submit is not None
        elsewhere = new_stream(Told())
        elsewhere.attached(Attached(9, b"s" * 16, submit.gateway_state, submit.prompt_token_ids, 0, [b""]))
        again = elsewhere.submission(10)
        assert again is not None and (again.runs_alone, again.ranked_tokens) == (True, submit.ranked_tokens)
        elsewhere.suspected(place)
        assert elsewhere.submission(11) is None


async def test_an_end_before_an_attach_was_answered_counts_like_all_others() -> None:
    stream = begun(Told(), sampling=BEST_OF)
    stream.suspected(20)
    remains = stream.remains()
    told = Told()
    taking_up = new_stream(told, inherits=remains)
    taking_up.suspected(20)
    taking_up.reject(Rejected(9, "unknown_stream", ""))
    submit = taking_up.submission(10)
    assert submit is not None and submit.runs_alone
    taking_up.suspected(20)
    assert taking_up.submission(11) is None and told.failure is not None


async def test_deaths_at_which_it_was_not_computed_and_those_before_a_token_do_not_count() -> None:
    told = Told()
    stream = begun(told)
    for token_id in IDS[:6]:
        alone = []
        for _ in range(MAX_ENGINE_DEATHS - 1):
            stream.suspected(0)
            submits = [stream.submission(1), stream.submission(2)]  # again, after a broken connection
            alone += [submit is not None and submit.runs_alone for submit in submits]
        assert alone == [False, False, True, True]
        stream.push_token(token_id)
        healthy = stream.submission(3)  # to an engine that takes the place of another on purpose
        assert healthy is not None and not healthy.runs_alone
    assert not stream.is_done


async def test_a_continuation_is_submitted_and_attached_as_its_owner_s() -> None:
    stream = begun(Told(), key="alice", shares_prefix=True)
    submit = stream.submission(8)
    assert submit is not None and (submit.tenant, submit.shares_prefix) == ("alice", True)
    attaching = new_stream(Told(), tenant="alice")
    attaching.attached(Attached(9, b"s" * 16, submit.gateway_state, submit.prompt_token_ids, 0, []))
    again = attaching.submission(10)
    assert again is not None and (again.tenant, again.shares_prefix) == ("alice", True)


async def test_who_attaches_after_a_restart_learns_how_choices_ended_before_it() -> None:
    eos = 2
    told, sampling = Told(), SamplingParams(seed=1, max_tokens=50, temperature=0.0, n=4)
    stream = begun(told, sampling=sampling, stop=("three",))
    for choice, ids in enumerate((IDS[:2], [*IDS[:2], eos], IDS, IDS[:1])):
        stream.push(choice, ids)
    stream.finish(Finished(1, 0, "length", num_cached_tokens=2))
    stream.finish(Finished(1, 1, "stop", "eos", stop_token_id=eos))
    stream.flush()
    assert len(told.ends) == 3, "the third ends by its stop string"
    submit = stream.submission(8)
    assert submit is not None and submit.finished_choices == [0, 1, 2]
    unknown = [Finished(9, choice, "error", "not known to the engine") for choice in submit.finished_choices]
    other = Told()
    attaching = new_stream(other)
    attaching.attached(
        Attached(9, b"s" * 16, submit.gateway_state, submit.prompt_token_ids, 0, submit.prior_token_ids, unknown)
    )
    assert sorted(other.ends, key=str) == sorted(told.ends, key=str) and not attaching.is_done
    assert (other.text, attaching.num_cached, attaching.failure) == (told.text, 2, None)
    again = attaching.submission(10)
    assert again is not None and again.finished_choices == [0, 1, 2]


async def test_who_attaches_at_a_token_is_told_what_comes_before_it_in_a_part_of_its_own() -> None:
    submit = begun(Told()).submission(8)
    assert submit is not None
    for num_known in range(len(IDS)):
        told = Told()
        stream = new_stream(told, known=at_token(num_known, "from_token"))
        stream.attached(Attached(9, b"s" * 16, submit.gateway_state, submit.prompt_token_ids, 0, [pack_ids(IDS)]))
        parts = [len(IDS)] if num_known == 0 else [num_known, len(IDS) - num_known]
        assert told.sizes == parts and told.text == text(IDS)


@pytest.mark.parametrize("is_new", [False, True])
async def test_an_attach_before_the_first_token_loses_nothing_of_what_comes_with_it(is_new: bool) -> None:
    told = Told()
    stream = begun(told, echo=True)
    state = msgspec.msgpack.encode(stream.state)
    if is_new:
        stream = new_stream(told)
    stream.attached(Attached(9, b"s" * 16, state, pack_ids(PROMPT), 0, [b""]))
    for token_id in IDS:
        stream.push_token(token_id)
    assert told.text == text(PROMPT) + text(IDS) and told.token_ids == IDS


async def test_a_cursor_beyond_the_stream_is_refused_and_the_stream_goes_on() -> None:
    submit = begun(Told()).submission(8)
    assert submit is not None
    for cursor in (f"{len(IDS) + 1}", f"{len(IDS)}e", "1,1"):
        told = Told()
        stream = new_stream(told, known=parse_cursor(cursor, "cursor"))
        stream.attached(Attached(9, b"s" * 16, submit.gateway_state, submit.prompt_token_ids, 0, [pack_ids(IDS)]))
        assert stream.refusal is not None and stream.refusal.field == "cursor"
        assert stream.started.done() and not stream.ended.done()
        stream.finish(Finished(9, 0, "length"))
        stream.flush()
        assert stream.ended.done() and stream.num_output == len(IDS)
        assert told.num_closed == 0 and told.ends == []


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


async def test_tokens_of_a_choice_behind_its_stop_string_do_not_count_while_others_go_on() -> None:
    told = Told()
    stream = begun(told, sampling=SamplingParams(seed=1, max_tokens=50, temperature=0.0, n=2), stop=("three",))
    stream.push(0, IDS)
    stream.flush()
    num_shown = stream.num_output
    stream.push(0, IDS)
    stream.flush()
    stream.finish(Finished(1, 0, "length"))
    stream.flush()
    assert stream.num_output == num_shown == len(told.token_ids) < len(IDS) and not stream.is_done
    assert told.text == b"one two " and told.ends == [Ending("stop", "stop_string", "three")]


async def test_the_engine_is_told_once_of_a_choice_that_a_stop_string_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SamplingParams(seed=1, max_tokens=50, temperature=0.0, n=3)
    stream = begun(Told(), sampling=sampling, stop=("three",))
    told: list[object] = []
    monkeypatch.setattr(stream._engine, "abort_choice", lambda sink, choice, cause: told.append((choice, cause)))
    monkeypatch.setattr(stream._engine, "abort", lambda sink, cause: told.append(cause))
    stream.push(1, IDS)
    stream.push(0, IDS[:2])
    stream.flush()
    assert told == [(1, "stop_string")]
    stream.push(1, IDS)
    stream.finish(Finished(1, 1, "abort", "stop_string"))
    stream.push(0, IDS[2:])
    stream.finish(Finished(1, 0, "length"))
    stream.flush()
    assert told == [(1, "stop_string")], "the engine ended the other by itself"
    # Its connection broke, and what it was told may be lost
    stream.attached(Attached(2, b"s" * 16, b"", pack_ids(PROMPT), 0, [], [Finished(2, 0, "length")]))
    assert told == [(1, "stop_string")] * 2
    stream.push(2, IDS)
    stream.flush()
    assert told[2:] == ["stop_string"] and stream.is_done


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


async def test_a_choice_that_breaks_as_it_ends_is_told_one_end_and_that_by_error() -> None:
    told = Told()
    stream = begun(told, sampling=SamplingParams(seed=1, max_tokens=50, logprobs=0, n=2))
    stream.push(0, IDS[:1])  # its log probability has not come
    with pytest.raises(ValueError, match="0 log probabilities came for 1 tokens"):
        stream.finish(Finished(1, 0, "length"))
    stream.break_off()
    assert [end.finish_reason for end in told.ends] == ["error", "error"] == [e.finish_reason for e in stream.endings]
    assert told.num_closed == 1 and isinstance(told.failure, EngineFault)


class Faulty(Told):
    """Fails at some of its calls."""

    def __init__(self, *at: str) -> None:
        super().__init__()
        self.at = at

    def end(self, choice: int, ending: Ending) -> None:
        if "end" in self.at:
            raise RuntimeError("a fault of ours")
        super().end(choice, ending)

    def close(self, usage: Usage, failure: StreamKVError | None) -> None:
        if "close" in self.at:
            raise RuntimeError("a fault of ours")
        super().close(usage, failure)


@pytest.mark.parametrize("at", [("end",), ("close",), ("end", "close")])
async def test_an_outlet_that_fails_at_the_end_keeps_no_stream_alive_and_no_other_from_its_end(
    at: tuple[str, ...],
) -> None:
    for how in ("break_off", "cancel", "expire", "hand_over", "finish"):
        told = Faulty(*at)
        stream = begun(told, sampling=SamplingParams(seed=1, max_tokens=50, n=2))
        stream.push(0, IDS[:1])
        stream.flush()
        if how == "finish" and "end" in at:
            with pytest.raises(RuntimeError):
                stream.finish(Finished(1, 0, "length"))
            stream.break_off()
        elif how == "finish":
            for choice in (0, 1):
                stream.finish(Finished(1, choice, "length"))
            stream.flush()
        elif how == "expire":
            stream.expire(1.0)
        elif how == "cancel":
            stream.cancel("cancelled")
        else:
            getattr(stream, how)()  # whoever ends it may have others to end, or to hand it to
        assert stream.is_done and stream.started.done() and stream.ended.done() and len(stream.endings) == 2
        is_told = told.num_closed == 1 and told.failure is not None
        assert is_told or stream.is_broken_off, "its answer would look whole"
        assert stream.is_broken_off
        assert isinstance(stream.failure, RequestTimeout if how == "expire" else EngineFault)
        if "close" not in at:
            assert told.num_closed == 1 and told.failure is stream.failure


async def test_a_stream_that_was_broken_off_stays_so() -> None:
    stream = begun(Faulty("close"))
    stream.cancel("cancelled")
    stream.let_go()
    assert stream.is_broken_off


async def test_a_fault_in_an_outlet_costs_other_streams_of_its_step_no_token() -> None:
    faulty, told = begun(Faulty("end", "close")), Told()
    client = faulty._engine
    other = begun(told, stop=())
    for request_id, stream in ((1, faulty), (2, other)):
        client._sinks[request_id] = stream
        client._id_by_sink[stream] = request_id
    ends = [Finished(1, 0, "length")]
    client._on_step(StepOutput(1, pack_ids([1, 2]), pack_ids(IDS[:2]), finished=ends))
    assert told.token_ids == [IDS[1]] and faulty.is_done and not other.is_done


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


class ClosedTransport(Transport):
    """As uvloop's is between the end of its connection and the end of its handler."""

    def write(self, data: object) -> None:
        raise RuntimeError("unable to perform operation on a transport; the handler is closed")


async def test_a_client_that_has_just_gone_keeps_nothing_from_the_others_of_its_turn() -> None:
    outbox = Outbox()
    transports = [Transport(), ClosedTransport(), Transport()]
    writers = [BoundedWriter(outbox, 1000) for _ in transports]
    for writer, transport in zip(writers, transports, strict=True):
        writer.open(transport)
    for data in (b"one", b"two"):
        for writer in writers:
            writer.write(data)
        await asyncio.sleep(0)
    assert [transport.writes for transport in transports] == [[b"one", b"two"], [], [b"one", b"two"]]


async def test_writes_of_very_many_streams_leave_others_their_turn() -> None:
    outbox = Outbox()
    transports = [Transport() for _ in range(1000)]
    writers = [BoundedWriter(outbox, 1000) for _ in transports]
    for writer, transport in zip(writers, transports, strict=True):
        writer.open(transport)
        writer.write(b"one")
    num_written = []
    for _ in range(6):
        await asyncio.sleep(0)
        num_written.append(sum(bool(transport.writes) for transport in transports))
        writers[-1].write(b"more")
    assert num_written == [256, 512, 768, 1000, 1000, 1000]
    assert transports[-1].writes == [b"onemoremoremore", b"more", b"more"]
