"""The gateway's end of the wire, against the real engine loop or a bare engine socket."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from gateway.engine_client import ACK_BYTES, EngineClient, EngineState, EngineUnavailable
from streamkv.protocol import (
    WIRE_VERSION,
    Abort,
    Attach,
    Attached,
    Finished,
    Forget,
    GetStats,
    HandedOver,
    Heartbeat,
    Hello,
    Keep,
    Loading,
    ModelFacts,
    Pause,
    Ready,
    Rejected,
    Stats,
    StepOutput,
    Submit,
    WireError,
    decode_from_gateway,
    encode,
    pack_ids,
)
from streamkv.sampling import SamplingParams
from streamkv.transport import MAX_FRAME_BYTES, EngineSocket
from tests.support.running_gateway import eventually
from tests.support.scripted_engine import free_endpoint, serving
from tests.support.scripted_executor import ScriptedExecutor

PROMPT = [7, 8, 9]


class RecordingSink:
    """Keeps what it is told."""

    def __init__(self, max_tokens: int = 20, stream_id: bytes = b"0123456789abcdef") -> None:
        self.max_tokens = max_tokens
        self.stream_id = stream_id
        self.tenant = "alice"
        self.tokens: list[int] = []
        self.gathered: list[int] = []
        self.finished: list[Finished] = []
        self.rejected: list[Rejected] = []
        self.num_submissions = self.num_flushes = 0
        self.is_paused = False
        self.raises = False
        self.padding = b""
        self.is_broken = False
        self.num_forgotten = 0
        self.num_cached_tokens = 0
        self.num_ranked_tokens: list[int] = []
        """As it was told of each end of an engine that it may be the reason of."""

    def hit(self, num_cached_tokens: int) -> None:
        self.num_cached_tokens = num_cached_tokens

    def push_token(self, token_id: int) -> None:
        if self.raises:
            raise RuntimeError("a fault of ours")
        self.tokens.append(token_id)

    def push(self, choice: int, token_ids: list[int]) -> None:
        assert choice == 0
        self.gathered += token_ids

    def finish(self, finished: Finished) -> None:
        self.finished.append(finished)

    def flush(self) -> None:
        self.tokens += self.gathered
        self.gathered.clear()
        self.num_flushes += 1

    def suspected(self, num_ranked_tokens: int) -> None:
        self.num_ranked_tokens.append(num_ranked_tokens)

    def reject(self, rejected: Rejected) -> None:
        self.rejected.append(rejected)

    def forgotten(self) -> None:
        self.num_forgotten += 1

    def break_off(self) -> None:
        self.is_broken = True

    def attached(self, attached: Attached) -> None:
        raise AssertionError("not asked for")

    def submission(self, request_id: int) -> Submit | None:
        self.num_submissions += 1
        sampling = SamplingParams(seed=0, max_tokens=self.max_tokens, temperature=0.0)
        prior = [pack_ids(self.tokens)] if self.tokens else []
        return Submit(
            request_id,
            self.stream_id,
            pack_ids(PROMPT),
            sampling,
            self.padding,
            prior_token_ids=prior,
            tenant=self.tenant,
        )

    @property
    def num_known_tokens(self) -> int:
        return len(self.tokens)

    @property
    def is_done(self) -> bool:
        return bool(self.finished)


@asynccontextmanager
async def connected(endpoint: str, **options: Any) -> AsyncIterator[EngineClient]:
    client = EngineClient(endpoint, **{"heartbeat_s": 0.1, "engine_timeout_s": 5.0, **options})
    client.start()
    try:
        yield client
    finally:
        client.close()


class BareEngine:
    """An engine's socket that says what the test tells it to."""

    def __init__(self, endpoint: str) -> None:
        self.socket = EngineSocket(endpoint)
        self.gateway_id = b""
        self.got: list[Any] = []

    def pump(self) -> None:
        while (received := self.socket.receive()) is not None:
            self.gateway_id, frame = received
            self.got.append(decode_from_gateway(frame))

    async def wait_for(self, kind: type, count: int = 1) -> Any:
        """The count-th message of a kind."""

        def has_come() -> bool:
            self.pump()
            return sum(isinstance(message, kind) for message in self.got) >= count

        await eventually(has_come)
        return [message for message in self.got if isinstance(message, kind)][count - 1]

    def send(self, message: Any) -> None:
        assert self.socket.send(self.gateway_id, encode(message))


@pytest.fixture
def bare() -> Iterator[BareEngine]:
    with free_endpoint() as endpoint:
        engine = BareEngine(endpoint)
        yield engine
        engine.socket.close()


READY = Ready(WIRE_VERSION, 77, ModelFacts("m", 100, 1000, [2]), 16, 100, 8, 512)


async def test_tokens_and_end_of_a_request_come_to_its_sink() -> None:
    executor = ScriptedExecutor()
    with serving(executor) as engine:
        async with connected(engine.endpoint) as client:
            await client.wait_ready(10)
            sink = RecordingSink()
            client.submit(sink)
            await eventually(lambda: sink.is_done)
            assert sink.tokens == executor.expected_tokens(PROMPT, 20)
            assert [end.finish_reason for end in sink.finished] == ["length"]
            assert client.num_live == 0


async def test_a_request_made_before_the_engine_is_there_is_sent_when_it_is() -> None:
    with free_endpoint() as endpoint:
        async with connected(endpoint) as client:
            sink = RecordingSink()
            client.submit(sink)
            with pytest.raises(EngineUnavailable):
                await client.wait_ready(0.05)
            with serving(ScriptedExecutor(), endpoint=endpoint):
                await eventually(lambda: sink.is_done)
            assert sink.num_submissions == 1 and client.num_resubmitted == 0


async def test_after_an_engines_end_the_rest_is_asked_of_the_next() -> None:
    executor = ScriptedExecutor(step_s=0.003)
    with serving(executor) as first:
        async with connected(first.endpoint) as client:
            await client.wait_ready(10)
            sink = RecordingSink(max_tokens=150)
            client.submit(sink)
            await eventually(lambda: len(sink.tokens) > 10)
            first.stop()
            await eventually(lambda: client.state is EngineState.LOST)
            assert len(sink.tokens) < 150
            with serving(ScriptedExecutor(), endpoint=first.endpoint):
                await eventually(lambda: sink.is_done)
            assert sink.tokens == ScriptedExecutor().expected_tokens(PROMPT, 150)
            assert sink.num_submissions == 2 and client.num_engine_losses == 1


async def test_hello_comes_first_and_heartbeats_acknowledge(bare: BareEngine) -> None:
    async with connected(bare.socket.endpoint) as client:
        hello = await bare.wait_for(Hello)
        assert bare.got[0] is hello and hello.wire_version == WIRE_VERSION and hello.gateway_id == bare.gateway_id
        bare.send(READY)
        await eventually(lambda: client.is_ready)
        bare.send(StepOutput(5, b"", b""))

        def is_acknowledged() -> bool:
            bare.pump()
            return any(isinstance(m, Heartbeat) and (m.last_step, m.epoch) == (5, 77) for m in bare.got)

        await eventually(is_acknowledged)


async def test_much_output_is_acknowledged_before_the_next_heartbeat_is_due(bare: BareEngine) -> None:
    async with connected(bare.socket.endpoint, heartbeat_s=30.0):
        await bare.wait_for(Hello)
        bare.send(READY)
        bare.send(StepOutput(1, pack_ids(range(ACK_BYTES // 8)), pack_ids(range(ACK_BYTES // 8))))
        assert (await bare.wait_for(Heartbeat)).last_step == 1


async def test_an_engine_that_falls_silent_is_lost_and_found_again(bare: BareEngine) -> None:
    async with connected(bare.socket.endpoint, engine_timeout_s=0.3) as client:
        await bare.wait_for(Hello)
        bare.send(READY)
        await eventually(lambda: client.is_ready)
        await eventually(lambda: client.state is EngineState.LOST)
        bare.send(Heartbeat(0, 77))
        await bare.wait_for(Hello, 2)
        bare.send(READY)
        await eventually(lambda: client.is_ready)
        assert client.num_engine_losses == 1


async def test_an_engine_is_not_lost_because_the_gateway_stood_still(bare: BareEngine) -> None:
    async with connected(bare.socket.endpoint, engine_timeout_s=0.5) as client:
        await bare.wait_for(Hello)
        bare.send(READY)
        await eventually(lambda: client.is_ready)
        time.sleep(1.0)  # noqa: ASYNC251  it is the loop that has to stand still
        bare.send(Heartbeat(0, 77))
        for _ in range(4):
            await asyncio.sleep(0.05)
            assert client.state is EngineState.READY and client.num_engine_losses == 0
        await eventually(lambda: client.state is EngineState.LOST)


async def test_another_wire_version_is_refused_and_said(bare: BareEngine) -> None:
    async with connected(bare.socket.endpoint) as client:
        await bare.wait_for(Hello)
        bare.send(WireError("wire_version", "the engine speaks wire version 9, the gateway 1"))
        await eventually(lambda: client.state is EngineState.INCOMPATIBLE)
        with pytest.raises(EngineUnavailable, match="wire version 9"):
            await client.wait_ready(5)


async def test_a_submit_that_the_engine_could_not_take_yet_is_sent_again(bare: BareEngine) -> None:
    async with connected(bare.socket.endpoint) as client:
        await bare.wait_for(Hello)
        bare.send(READY)
        await eventually(lambda: client.is_ready)
        sink = RecordingSink()
        client.submit(sink)
        first = await bare.wait_for(Submit)
        bare.send(WireError("hello_first", "say Hello", first.request_id))
        await bare.wait_for(Hello, 2)
        bare.send(READY)
        second = await bare.wait_for(Submit, 2)
        assert second.request_id != first.request_id and second.stream_id == first.stream_id


async def test_a_rejection_reaches_its_sink_once(bare: BareEngine) -> None:
    async with connected(bare.socket.endpoint) as client:
        await bare.wait_for(Hello)
        bare.send(READY)
        await eventually(lambda: client.is_ready)
        sink = RecordingSink()
        client.submit(sink)
        submit = await bare.wait_for(Submit)
        for _ in range(2):
            bare.send(Rejected(submit.request_id, "overloaded", "full", retry_after_s=3.0))
        await eventually(lambda: bool(sink.rejected))
        await asyncio.sleep(0.05)
        assert [rejected.code for rejected in sink.rejected] == ["overloaded"] and client.num_live == 0


async def test_an_aborted_request_gets_nothing_more(bare: BareEngine) -> None:
    async with connected(bare.socket.endpoint) as client:
        await bare.wait_for(Hello)
        bare.send(READY)
        await eventually(lambda: client.is_ready)
        sink = RecordingSink()
        client.submit(sink)
        request_id = (await bare.wait_for(Submit)).request_id
        client.abort(sink, "disconnected")
        assert (await bare.wait_for(Abort)) == Abort(request_id, "disconnected")
        bare.send(StepOutput(1, pack_ids([request_id]), pack_ids([5]), finished=[Finished(request_id, 0, "abort")]))
        await eventually(lambda: client.num_tokens == 1)
        assert not sink.tokens and not sink.finished


async def test_one_choice_is_aborted_under_its_request_s_number_and_the_request_goes_on(bare: BareEngine) -> None:
    async with connected(bare.socket.endpoint) as client:
        await bare.wait_for(Hello)
        bare.send(READY)
        await eventually(lambda: client.is_ready)
        sink = RecordingSink()
        client.abort_choice(sink, 1, "stop_string")  # nobody knows it: nothing is sent
        client.submit(sink)
        submit = await bare.wait_for(Submit)
        client.abort_choice(sink, 1, "stop_string")
        assert await bare.wait_for(Abort) == Abort(submit.request_id, "stop_string", 1)
        bare.send(StepOutput(1, pack_ids([submit.request_id]), pack_ids([5])))
        await eventually(lambda: sink.tokens == [5])


async def test_a_fault_in_one_sink_is_that_sinks_end_only(bare: BareEngine) -> None:
    async with connected(bare.socket.endpoint) as client:
        await bare.wait_for(Hello)
        bare.send(READY)
        await eventually(lambda: client.is_ready)
        good, bad = RecordingSink(stream_id=b"g" * 16), RecordingSink(stream_id=b"b" * 16)
        bad.raises = True
        client.submit(bad)
        client.submit(good)
        await bare.wait_for(Submit, 2)
        by_stream = {m.stream_id: m.request_id for m in bare.got if isinstance(m, Submit)}
        rows = pack_ids([by_stream[bad.stream_id], by_stream[good.stream_id]])
        bare.send(StepOutput(1, rows, pack_ids([5, 6])))
        bare.send(StepOutput(2, rows, pack_ids([7, 8])))
        await eventually(lambda: good.tokens == [6, 8])
        assert bad.is_broken and (await bare.wait_for(Abort)).request_id == by_stream[bad.stream_id]


async def test_a_frame_that_is_no_message_is_dropped(bare: BareEngine) -> None:
    async with connected(bare.socket.endpoint) as client:
        await bare.wait_for(Hello)
        assert bare.socket.send(bare.gateway_id, b"\xc1nonsense")
        bare.send(READY)
        await eventually(lambda: client.is_ready)


async def test_a_broken_connection_to_the_same_engine_is_mended_by_attaching(bare: BareEngine) -> None:
    endpoint = bare.socket.endpoint
    async with connected(endpoint) as client:
        await bare.wait_for(Hello)
        bare.send(READY)
        await eventually(lambda: client.is_ready)
        sink = RecordingSink()
        client.submit(sink)
        first = await bare.wait_for(Submit)
        bare.send(StepOutput(1, pack_ids([first.request_id]), pack_ids([5])))
        await eventually(lambda: sink.tokens == [5])
        bare.socket.close()
        await eventually(lambda: client.state is EngineState.LOST)
        bare.socket = EngineSocket(endpoint)
        await bare.wait_for(Hello, 2)
        bare.send(READY)
        attach = await bare.wait_for(Attach)
        assert (attach.stream_id, attach.from_token, attach.tenant) == (sink.stream_id, 1, "alice")
        bare.send(StepOutput(2, pack_ids([first.request_id]), pack_ids([6])))
        bare.send(Rejected(attach.request_id, "unknown_stream", "gone"))
        again = await bare.wait_for(Submit, 2)
        assert again.prior_token_ids == [pack_ids([5])] and sink.tokens == [5], "an old id's token was taken"


async def test_a_new_engine_names_its_suspects_and_is_given_what_has_ended(bare: BareEngine) -> None:
    async with connected(bare.socket.endpoint) as client:
        await bare.wait_for(Hello)
        bare.send(READY)
        await eventually(lambda: client.is_ready)
        sinks = [RecordingSink(stream_id=bytes([name]) * 16) for name in range(3)]
        for place, sink in enumerate(sinks):
            client.submit(sink)
            await bare.wait_for(Submit, place + 1)
        remains = Attached(0, b"e" * 16, b"state", pack_ids([1]), 0, [pack_ids([2])], [Finished(0, 0, "length")])
        client.ended.keep(remains, "alice", 60.0)
        suspects = [sink.stream_id for sink in sinks[:2]]
        bare.send(msgspec.structs.replace(READY, epoch=READY.epoch + 1, suspects=suspects, suspects_tokens=[0, 7]))
        keep = await bare.wait_for(Keep)
        assert (keep.remains, keep.tenant) == (remains, "alice") and 0 < keep.grace_s <= 60
        assert [sink.num_ranked_tokens for sink in sinks] == [[0], [7], []]
        bare.got.clear()
        bare.send(msgspec.structs.replace(READY, epoch=READY.epoch + 1, suspects=suspects, suspects_tokens=[0, 7]))
        await bare.wait_for(Heartbeat, 2)
        assert not any(isinstance(message, Keep) for message in bare.got), "the same engine says it again"
        assert [sink.num_ranked_tokens for sink in sinks] == [[0], [7], []]


NEXT = msgspec.structs.replace(READY, epoch=READY.epoch + 1)


def ended(number: int) -> Attached:
    return Attached(0, number.to_bytes(16, "big"), b"state", pack_ids([1]), 0, [b""], [Finished(0, 0, "stop")])


def kept_by(bare: BareEngine) -> list[bytes]:
    return [message.remains.stream_id for message in bare.got if isinstance(message, Keep)]


async def test_what_has_ended_is_given_in_portions_and_their_end_is_said(bare: BareEngine) -> None:
    async with connected(bare.socket.endpoint) as client:
        assert (await bare.wait_for(Hello)).epoch == 0
        bare.send(READY)
        await bare.wait_for(HandedOver)
        for number in range(250):
            client.ended.keep(ended(number), "alice", 60.0)
        large = msgspec.structs.replace(ended(900), gateway_state=bytes(900_000))
        for number in range(3):
            client.ended.keep(msgspec.structs.replace(large, stream_id=bytes([number + 1]) * 16), "alice", 60.0)
        turn = 0
        turns: list[int] = []
        send = client._socket.send
        loop = asyncio.get_running_loop()

        def count_turn() -> None:
            nonlocal turn
            turn += 1
            ticking[0] = loop.call_soon(count_turn)

        def counting(frame: bytes) -> bool:
            if isinstance(decode_from_gateway(frame), Keep):
                turns.append(turn)
            return send(frame)

        client._socket.send = counting  # type: ignore[method-assign]
        ticking = [loop.call_soon(count_turn)]
        bare.got.clear()
        bare.send(NEXT)
        await bare.wait_for(HandedOver)
        ticking[0].cancel()
        given = [message for message in bare.got if isinstance(message, Keep | HandedOver)]
        assert len(kept_by(bare)) == 253 and isinstance(given[-1], HandedOver)
        portions = [turns.count(number) for number in dict.fromkeys(turns)]
        assert portions == [100, 100, 52, 1], "a hundred, or a megabyte"


async def test_what_the_engine_did_not_get_is_given_again(bare: BareEngine) -> None:
    async with connected(bare.socket.endpoint) as client:
        await bare.wait_for(Hello)
        bare.send(READY)
        await bare.wait_for(HandedOver)
        for number in range(5):
            client.ended.keep(ended(number), "alice", 60.0)
        send = client._socket.send
        num_refused = 0

        def full(frame: bytes) -> bool:
            """No room behind the third one, for a while."""
            nonlocal num_refused
            if isinstance(decode_from_gateway(frame), Keep | HandedOver) and len(kept) == 3 and num_refused < 2:
                num_refused += 1
                return False
            if isinstance(decode_from_gateway(frame), Keep):
                kept.append(frame)
            return send(frame)

        kept: list[bytes] = []
        client._socket.send = full  # type: ignore[method-assign]
        bare.send(NEXT)
        await bare.wait_for(HandedOver, 2)
        assert num_refused == 2 and kept_by(bare) == [ended(number).stream_id for number in range(5)]


async def test_a_connection_that_breaks_before_all_is_given_begins_again(bare: BareEngine) -> None:
    async with connected(bare.socket.endpoint) as client:
        await bare.wait_for(Hello)
        bare.send(READY)
        await bare.wait_for(HandedOver)
        for number in range(150):
            client.ended.keep(ended(number), "alice", 60.0)
        give = client._give

        def break_off(*portion: Any) -> None:
            client._give = give  # type: ignore[method-assign]
            give(*portion)
            client._lose("the engine's connection broke")

        client._give = break_off  # type: ignore[method-assign]
        bare.send(NEXT)
        hello = await bare.wait_for(Hello, 2)
        assert hello.epoch == READY.epoch, "it has still something to bring"
        await asyncio.sleep(0.02)
        bare.pump()
        assert len(kept_by(bare)) == 100
        bare.send(NEXT)
        await bare.wait_for(HandedOver, 2)
        assert kept_by(bare)[100:] == [ended(number).stream_id for number in range(150)]
        client._send_hello()
        assert (await bare.wait_for(Hello, 3)).epoch == NEXT.epoch


async def test_a_stream_that_was_deleted_without_an_engine_is_forgotten_by_it_when_it_is_back(bare: BareEngine) -> None:
    async with connected(bare.socket.endpoint) as client:
        await bare.wait_for(Hello)
        bare.send(READY)
        await bare.wait_for(HandedOver)
        client.ended.keep(ended(1), "alice", 60.0)
        client.ended.keep(ended(2), "alice", 60.0)
        send = client._socket.send
        client._socket.send = lambda frame: False  # type: ignore[method-assign]
        client.forget(ended(1).stream_id, "alice")
        client._socket.send = send  # type: ignore[method-assign]
        bare.send(NEXT)
        assert await bare.wait_for(Forget) == Forget(ended(1).stream_id, "alice")
        await bare.wait_for(HandedOver, 2)
        assert kept_by(bare) == [ended(2).stream_id]
        # And when it was deleted at another gateway
        bare.send(Forget(ended(2).stream_id, "bob"))
        bare.send(Forget(ended(2).stream_id, "alice"))
        await eventually(lambda: client.ended.stream_ids == [])


@pytest.mark.parametrize("how", ["broken", "silent"])
async def test_what_may_have_been_lost_behind_its_sending_is_given_again(bare: BareEngine, how: str) -> None:
    async with connected(bare.socket.endpoint) as client:
        await bare.wait_for(Hello)
        bare.send(READY)
        await bare.wait_for(HandedOver)
        bare.send(Stats((await bare.wait_for(GetStats)).query_id, {}, {}))
        client.ended.keep(ended(1), "alice", 60.0)
        for number, is_taken_in in ((2, False), (3, True)):
            bare.send(NEXT)
            await bare.wait_for(HandedOver, number)
            asked = await bare.wait_for(GetStats, number)
            if is_taken_in:
                bare.send(Stats(asked.query_id, {}, {}))
                await eventually(lambda: client._certain_epoch == NEXT.epoch)
            bare.got = [message for message in bare.got if not isinstance(message, Hello)]
            if how == "broken":
                endpoint = bare.socket.endpoint
                bare.socket.close()
                await eventually(lambda: client.state is EngineState.LOST)
                bare.socket = EngineSocket(endpoint)
            else:
                bare.send(WireError("hello_first", "say Hello first"))
            assert (await bare.wait_for(Hello)).epoch == (NEXT if is_taken_in else READY).epoch
        bare.send(NEXT)
        await eventually(lambda: client.is_ready)
        await bare.wait_for(Heartbeat, sum(isinstance(message, Heartbeat) for message in bare.got) + 2)
        assert kept_by(bare) == [ended(1).stream_id] * 2, "not when it is certain to be there"


async def test_a_gateway_that_could_never_say_that_it_has_given_all_names_its_first_engine(bare: BareEngine) -> None:
    async with connected(bare.socket.endpoint) as client:
        assert (await bare.wait_for(Hello)).epoch == 0
        send = client._socket.send
        client._socket.send = lambda frame: (  # type: ignore[method-assign]
            not isinstance(decode_from_gateway(frame), HandedOver) and send(frame)
        )
        bare.send(READY)
        await eventually(lambda: client.is_ready)
        endpoint = bare.socket.endpoint
        for number, ready in ((2, NEXT), (3, NEXT)):
            bare.socket.close()
            await eventually(lambda: client.state is EngineState.LOST)
            bare.socket = EngineSocket(endpoint)
            assert (await bare.wait_for(Hello, number)).epoch == READY.epoch, "it may have streams of that one"
            bare.send(ready)
            await eventually(lambda: client.is_ready)


@pytest.mark.parametrize("how", ["loading", "hello_first", "broken"])
async def test_a_deletion_is_said_again_until_the_engine_has_sent_it_on(bare: BareEngine, how: str) -> None:
    async with connected(bare.socket.endpoint) as client:
        await bare.wait_for(Hello)
        if how == "loading":
            bare.send(Loading("loading weights", 5.0))
            await eventually(lambda: client.state is EngineState.LOADING)
        else:
            bare.send(READY)
            await eventually(lambda: client.is_ready)
        deleted = Forget(ended(1).stream_id, "alice")
        client.forget(deleted.stream_id, deleted.tenant)
        if how == "broken":
            await reconnect(bare, client)
        else:
            if how == "hello_first":
                await bare.wait_for(Forget)
                bare.got.clear()
                bare.send(WireError("hello_first", "say Hello first"))
                await bare.wait_for(Hello)
            bare.send(READY)
        assert await bare.wait_for(Forget) == deleted
        bare.send(deleted)
        await eventually(lambda: not client._unheard_forgets)
        bare.pump()
        bare.got.clear()
        bare.send(NEXT)
        await bare.wait_for(HandedOver)
        assert not any(isinstance(message, Forget) for message in bare.got), "it is known to have come"


async def test_so_many_deletions_are_said_again_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.engine_client._MAX_UNHEARD_FORGETS", 2)
    with free_endpoint() as endpoint:
        async with connected(endpoint) as client:
            for name in (1, 2, 3):
                client.forget(bytes([name]) * 16, "alice")
            assert [forget.stream_id[0] for forget in client._unheard_forgets] == [2, 3]


async def test_a_live_request_that_was_deleted_elsewhere_is_told_so(bare: BareEngine) -> None:
    async with connected(bare.socket.endpoint) as client:
        await bare.wait_for(Hello)
        bare.send(READY)
        await eventually(lambda: client.is_ready)
        sink = RecordingSink()
        client.submit(sink)
        await bare.wait_for(Submit)
        bare.send(Forget(sink.stream_id, "bob"))
        bare.send(Forget(b"another one's id", "alice"))
        bare.send(StepOutput(1, b"", b""))
        await eventually(lambda: client._last_step == 1)
        assert sink.num_forgotten == 0
        bare.send(Forget(sink.stream_id, "alice"))
        await eventually(lambda: sink.num_forgotten == 1)


async def test_a_stream_that_the_engine_gave_up_for_a_lost_gateway_goes_on(bare: BareEngine) -> None:
    async with connected(bare.socket.endpoint) as client:
        await bare.wait_for(Hello)
        bare.send(READY)
        await eventually(lambda: client.is_ready)
        sink = RecordingSink()
        client.submit(sink)
        first = await bare.wait_for(Submit)
        bare.send(StepOutput(1, pack_ids([first.request_id]), pack_ids([5])))
        end = Finished(first.request_id, 0, "abort", "gateway_lost")
        bare.send(StepOutput(2, pack_ids([first.request_id]), pack_ids([6]), finished=[end]))
        second = await bare.wait_for(Submit, 2)
        assert second.prior_token_ids == [pack_ids([5, 6])] and not sink.finished
        bare.send(StepOutput(3, pack_ids([second.request_id]), pack_ids([7])))
        await eventually(lambda: sink.tokens == [5, 6, 7])


async def test_a_gateway_that_was_forgotten_attaches_to_what_was_kept_for_it(bare: BareEngine) -> None:
    async with connected(bare.socket.endpoint) as client:
        await bare.wait_for(Hello)
        bare.send(READY)
        await eventually(lambda: client.is_ready)
        sink = RecordingSink()
        client.submit(sink)
        first = await bare.wait_for(Submit)
        bare.send(StepOutput(1, pack_ids([first.request_id]), pack_ids([5])))
        await eventually(lambda: sink.tokens == [5])
        bare.send(WireError("hello_first", "who are you?"))
        await bare.wait_for(Hello, 2)
        bare.send(READY)
        attach = await bare.wait_for(Attach)
        assert (attach.stream_id, attach.from_token) == (sink.stream_id, 1)


async def reconnect(bare: BareEngine, client: EngineClient) -> None:
    """The connection breaks, and the same engine is there again."""
    endpoint = bare.socket.endpoint
    num_hellos = sum(isinstance(message, Hello) for message in bare.got)
    bare.socket.close()
    await eventually(lambda: client.state is EngineState.LOST)
    bare.socket = EngineSocket(endpoint)
    await bare.wait_for(Hello, num_hellos + 1)
    bare.send(READY)
    await eventually(lambda: client.is_ready)


async def test_a_slow_reader_is_still_paused_after_a_reconnect(bare: BareEngine) -> None:
    async with connected(bare.socket.endpoint) as client:
        await bare.wait_for(Hello)
        bare.send(READY)
        await eventually(lambda: client.is_ready)
        sink = RecordingSink()
        client.submit(sink)
        await bare.wait_for(Submit)
        sink.is_paused = True
        client.pause(sink)
        await bare.wait_for(Pause)
        await reconnect(bare, client)
        attach = await bare.wait_for(Attach)
        assert (await bare.wait_for(Pause, 2)).request_id == attach.request_id


async def test_a_request_that_ended_while_the_connection_was_broken_is_aborted_after_it(bare: BareEngine) -> None:
    endpoint = bare.socket.endpoint
    async with connected(endpoint) as client:
        await bare.wait_for(Hello)
        bare.send(READY)
        await eventually(lambda: client.is_ready)
        sink = RecordingSink()
        client.submit(sink)
        request_id = (await bare.wait_for(Submit)).request_id
        bare.socket.close()
        await eventually(lambda: client.state is EngineState.LOST)
        client.abort(sink, "disconnected")
        bare.socket = EngineSocket(endpoint)
        await bare.wait_for(Hello, 2)
        bare.send(READY)
        assert (await bare.wait_for(Abort)) == Abort(request_id, "disconnected")


async def test_an_abort_that_was_lost_with_its_connection_is_sent_until_the_engine_has_answered(
    bare: BareEngine,
) -> None:
    async with connected(bare.socket.endpoint) as client:
        await bare.wait_for(Hello)
        bare.send(READY)
        await eventually(lambda: client.is_ready)
        sinks = [RecordingSink(stream_id=bytes([number]) * 16) for number in range(2)]
        for sink in sinks:
            client.submit(sink)
        answered, lost = [(await bare.wait_for(Submit, count)).request_id for count in (1, 2)]
        client.abort(sinks[0], "timeout")
        await bare.wait_for(Abort)
        bare.send(StepOutput(1, b"", b"", finished=[Finished(answered, 0, "abort", "timeout")]))
        bare.send(StepOutput(2, pack_ids([lost]), pack_ids([5])))
        await eventually(lambda: client.num_tokens == 1)
        client.abort(sinks[1], "stop_string")  # which nobody reads from this socket any more
        bare.got = [message for message in bare.got if isinstance(message, Hello)]
        await reconnect(bare, client)
        assert await bare.wait_for(Abort) == Abort(lost, "stop_string")
        bare.send(StepOutput(3, b"", b"", finished=[Finished(lost, 1, "length")]))  # it was on its way before
        await reconnect(bare, client)
        assert await bare.wait_for(Abort, 2) == Abort(lost, "stop_string")
        bare.send(StepOutput(4, pack_ids([lost]), pack_ids([6]), finished=[Finished(lost, 0, "abort", "stop_string")]))
        await eventually(lambda: client.num_tokens == 2)
        await reconnect(bare, client)
        client.forget(b"f" * 16, "")
        await bare.wait_for(Forget)
        assert [message for message in bare.got if isinstance(message, Abort)] == [Abort(lost, "stop_string")] * 2


async def test_the_end_of_one_choice_does_not_stand_for_that_of_all(bare: BareEngine) -> None:
    async with connected(bare.socket.endpoint) as client:
        await bare.wait_for(Hello)
        bare.send(READY)
        await eventually(lambda: client.is_ready)
        sink = RecordingSink()
        client.submit(sink)
        request_id = (await bare.wait_for(Submit)).request_id
        client.abort_choice(sink, 1, "stop_string")
        client.abort(sink, "disconnected")
        bare.send(StepOutput(1, b"", b"", finished=[Finished(request_id, 1, "abort", "stop_string")]))
        bare.send(StepOutput(2, pack_ids([request_id]), pack_ids([5])))
        await eventually(lambda: client.num_tokens == 1)
        assert client._unheard_aborts == {request_id: "disconnected"}
        bare.send(StepOutput(3, b"", b"", finished=[Finished(request_id, 0, "abort", "disconnected")]))
        await eventually(lambda: not client._unheard_aborts)


async def test_a_request_whose_attach_was_lost_is_aborted_under_each_of_its_ids(bare: BareEngine) -> None:
    async with connected(bare.socket.endpoint) as client:
        await bare.wait_for(Hello)
        bare.send(READY)
        await eventually(lambda: client.is_ready)
        sinks = [RecordingSink(stream_id=bytes([number]) * 16) for number in range(2)]
        for sink in sinks:
            sink.attached = lambda attached: None  # type: ignore[method-assign]
            client.submit(sink)
        first, other = [(await bare.wait_for(Submit, count)).request_id for count in (1, 2)]
        await reconnect(bare, client)
        attaches = [await bare.wait_for(Attach, count) for count in (1, 2)]
        by_stream = {attach.stream_id: attach.request_id for attach in attaches}
        second, heard = (by_stream[sink.stream_id] for sink in sinks)
        bare.send(Attached(heard, sinks[1].stream_id, b"", pack_ids(PROMPT), 0, [b""]))
        bare.send(StepOutput(1, pack_ids([heard]), pack_ids([5])))
        await eventually(lambda: sinks[1].tokens == [5])
        for sink in sinks:
            client.abort(sink, "disconnected")
        await bare.wait_for(Abort, 3)
        aborted = [message.request_id for message in bare.got if isinstance(message, Abort)]
        assert aborted == [first, second, heard], f"the engine may have the first as {first} still, and {other} not"
        assert not client._earlier_ids


async def test_a_new_engine_has_a_request_under_its_newest_id_alone(bare: BareEngine) -> None:
    async with connected(bare.socket.endpoint) as client:
        await bare.wait_for(Hello)
        bare.send(READY)
        await eventually(lambda: client.is_ready)
        sink = RecordingSink()
        client.submit(sink)
        await bare.wait_for(Submit)
        bare.send(msgspec.structs.replace(READY, epoch=78))
        newest = (await bare.wait_for(Submit, 2)).request_id
        client.abort(sink, "cancelled")
        client.forget(b"f" * 16, "")
        await bare.wait_for(Forget)
        assert [message for message in bare.got if isinstance(message, Abort)] == [Abort(newest, "cancelled")]


async def test_an_id_that_is_still_to_be_aborted_is_given_to_nobody_else(bare: BareEngine) -> None:
    async with connected(bare.socket.endpoint) as client:
        await bare.wait_for(Hello)
        bare.send(READY)
        await eventually(lambda: client.is_ready)
        sinks = [RecordingSink(stream_id=bytes([number]) * 16) for number in range(2)]
        client.submit(sinks[0])
        request_id = (await bare.wait_for(Submit)).request_id
        client.abort(sinks[0], "cancelled")
        client._request_ids = itertools.count(request_id)  # ids have gone round
        client.submit(sinks[1])
        assert (await bare.wait_for(Submit, 2)).request_id == request_id + 1


async def test_a_new_engine_is_not_told_of_what_was_aborted_before(bare: BareEngine) -> None:
    async with connected(bare.socket.endpoint) as client:
        await bare.wait_for(Hello)
        bare.send(READY)
        await eventually(lambda: client.is_ready)
        sink = RecordingSink()
        client.submit(sink)
        await bare.wait_for(Submit)
        client.abort(sink, "cancelled")
        await bare.wait_for(Abort)
        bare.send(msgspec.structs.replace(READY, epoch=78))
        await eventually(lambda: client.num_restarts == 1)
        client.forget(b"f" * 16, "")
        await bare.wait_for(Forget)
        assert sum(isinstance(message, Abort) for message in bare.got) == 1


async def test_a_stream_that_the_engine_still_has_is_attached_when_its_submission_is_refused(bare: BareEngine) -> None:
    async with connected(bare.socket.endpoint) as client:
        await bare.wait_for(Hello)
        bare.send(READY)
        await eventually(lambda: client.is_ready)
        sink = RecordingSink()
        client.submit(sink)
        first = await bare.wait_for(Submit)
        client.pause(sink)
        bare.send(WireError("hello_first", "who are you?", first.request_id))  # about the Pause
        await bare.wait_for(Hello, 2)
        bare.send(READY)
        second = await bare.wait_for(Submit, 2)
        bare.send(Rejected(second.request_id, "duplicate", "a stream with this stream_id is live"))
        attach = await bare.wait_for(Attach)
        bare.send(StepOutput(1, pack_ids([attach.request_id]), pack_ids([5])))
        await eventually(lambda: sink.tokens == [5])
        assert not sink.rejected


async def test_frames_behind_one_that_makes_no_sense_are_handed_out(bare: BareEngine) -> None:
    async with connected(bare.socket.endpoint, heartbeat_s=30.0, engine_timeout_s=60.0) as client:
        await bare.wait_for(Hello)
        bare.send(READY)
        await eventually(lambda: client.is_ready)
        sink = RecordingSink()
        client.submit(sink)
        request_id = (await bare.wait_for(Submit)).request_id
        bare.send(StepOutput(1, pack_ids([request_id, 7]), pack_ids([5])))
        bare.send(StepOutput(2, pack_ids([request_id]), b"odd"))
        bare.send(StepOutput(3, pack_ids([request_id]), pack_ids([6]), finished=[Finished(request_id, 0, "length")]))
        await eventually(lambda: sink.is_done)
        assert sink.tokens[-1] == 6 and client.is_ready


async def test_a_stream_too_large_to_submit_again_is_that_streams_end_only(bare: BareEngine) -> None:
    async with connected(bare.socket.endpoint) as client:
        await bare.wait_for(Hello)
        bare.send(READY)
        await eventually(lambda: client.is_ready)
        sinks = [RecordingSink(stream_id=name * 16) for name in (b"a", b"b", b"c")]
        for sink in sinks:
            client.submit(sink)
        await bare.wait_for(Submit, 3)
        sinks[0].padding = bytes(MAX_FRAME_BYTES)
        bare.send(msgspec.structs.replace(READY, epoch=78))
        again = [(await bare.wait_for(Submit, number)).stream_id for number in (4, 5)]
        assert set(again) == {sinks[1].stream_id, sinks[2].stream_id}
        assert [sink.is_broken for sink in sinks] == [True, False, False] and client.num_live == 2
