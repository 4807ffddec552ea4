"""Streams that ended under an earlier engine and are brought by a gateway, and those that their owner has deleted."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from engine.intake import check_remains
from streamkv.errors import InvalidField
from streamkv.protocol import (
    WIRE_VERSION,
    Attach,
    Attached,
    Finished,
    Forget,
    GetStats,
    HandedOver,
    Hello,
    Keep,
    Ready,
    Rejected,
    Stats,
    TokenLogprobs,
    WireError,
    pack_floats,
    pack_ids,
)
from streamkv.sampling import MAX_CHOICES, MAX_LOGPROBS
from tests.support.scripted_engine import RunningEngine, serving
from tests.support.scripted_executor import ScriptedExecutor
from tests.support.wire_gateway import WireGateway, submission

NAME = b"0123456789abcdef"
TOLD = TokenLogprobs(pack_floats([-0.5, -1]), pack_ids([1, 2, 3, 4]), pack_floats([-0.5, -2, -1, -3]))
NONE = TokenLogprobs(b"")
WHOLE = Attached(
    0,
    NAME,
    b"state",
    pack_ids([1, 2, 3]),
    0,
    [pack_ids([4, 5]), b""],
    [Finished(0, 1, "stop"), Finished(0, 0, "length")],
    [TOLD, NONE],
    TOLD,
)


@pytest.fixture
def engine() -> Iterator[RunningEngine]:
    with serving() as running:
        yield running


@pytest.fixture
def gateway(engine: RunningEngine) -> Iterator[WireGateway]:
    with WireGateway(engine.endpoint) as connected:
        connected.wait_for(Ready)
        yield connected


def num_kept(gateway: WireGateway) -> float:
    gateway.send(GetStats(1))
    return gateway.wait_for(Stats).gauges["num_kept_streams"]


def test_a_whole_stream_is_kept_and_says_for_how_long(gateway: WireGateway) -> None:
    gateway.send(Keep(WHOLE, "alice", 20.0))
    gateway.send(Attach(3, NAME, 0, "alice"))
    found = gateway.wait_end(3, num_choices=2).attached
    assert found is not None and 10 < found.kept_s <= 20
    assert (found.token_ids, found.logprobs, found.prompt_logprobs) == (WHOLE.token_ids, [TOLD, NONE], TOLD)
    gateway.send(Attach(4, NAME, 0, "bob"))
    assert gateway.wait_for(Rejected).code == "unknown_stream"


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("stream_id: must have 16 bytes, got 3", {"stream_id": b"abc"}),
    ("gateway_state: may have 1048576 bytes", {"gateway_state": bytes(1048577)}),
    ("from_token: must be 0", {"from_token": 1}),
    ("prompt_token_ids: must hold at least one", {"prompt_token_ids": b""}),
    ("prompt_token_ids: packed ids come in groups of 4 bytes, got 5", {"prompt_token_ids": bytes(5)}),
    ("token_ids: packed ids come in groups of 4 bytes, got 7", {"token_ids": [bytes(8), bytes(7)]}),
    (f"token_ids: must be of 1 to {MAX_CHOICES} choices, got 0", {"token_ids": [], "finished": [], "logprobs": []}),
    (f"token_ids: must be of 1 to {MAX_CHOICES} choices, got 129", {"token_ids": [b""] * (MAX_CHOICES + 1)}),
    ("finished: must have one end for each of 2 choices, got those of [1]", {"finished": [Finished(0, 1, "stop")]}),
    ("finished: must have one end", {"finished": [Finished(0, 0, "stop"), Finished(0, 0, "stop")]}),
    ("finished: must have one end", {"finished": [*WHOLE.finished, Finished(0, 2, "stop")]}),
    ("finished: must have one end", {"finished": [Finished(0, 0, "stop"), Finished(0, -1, "stop")]}),
    ("logprobs: must be of none or of 2 choices, got 1", {"logprobs": [TOLD]}),
    ("logprobs[0]: must be 4 bytes for each of 2 tokens", {"logprobs": [NONE, NONE]}),
    ("logprobs[1]: must be 4 bytes for each of 0 tokens", {"logprobs": [TOLD, TOLD]}),
    ("logprobs[0]: must be 4", {"logprobs": [msgspec.structs.replace(TOLD, top_ids=bytes(15)), NONE]}),
    ("logprobs[0]: must be 4", {"logprobs": [msgspec.structs.replace(TOLD, top_logprobs=b""), NONE]}),
    (
        f"at most {MAX_LOGPROBS} likeliest",
        {"logprobs": [TokenLogprobs(bytes(8), bytes(8 * 21), bytes(8 * 21)), NONE]},
    ),
    ("prompt_logprobs: must be 4 bytes for each of 2 tokens", {"prompt_logprobs": TokenLogprobs(bytes(12))}),
    ("prompt_logprobs: must be 4", {"prompt_logprobs": TokenLogprobs(bytes(5))}),
]


@pytest.mark.parametrize(("reason", "fields"), WRONG, ids=[reason for reason, _ in WRONG])
def test_what_is_no_whole_stream_is_refused_by_its_field(reason: str, fields: dict[str, Any]) -> None:
    check_remains(WHOLE)
    with pytest.raises(InvalidField) as raised:
        check_remains(msgspec.structs.replace(WHOLE, **fields))
    assert reason in str(raised.value)


def test_a_refused_stream_is_dropped_and_harms_nobody(engine: RunningEngine, gateway: WireGateway) -> None:
    for _, fields in WRONG:
        gateway.send(Keep(msgspec.structs.replace(WHOLE, **fields), "alice", 20.0))
        error = gateway.wait_for(WireError)
        assert error.code == "undecodable" and error.message.startswith("Keep.remains is not a whole stream: ")
    assert num_kept(gateway) == 0
    gateway.send(Keep(WHOLE, "alice", 20.0))
    assert num_kept(gateway) == 1
    gateway.send(submission(9, [1, 2, 3], 5))
    assert isinstance(engine.executor, ScriptedExecutor)
    assert gateway.wait_end(9).tokens[0] == engine.executor.expected_tokens([1, 2, 3], 5)


def test_what_its_owner_forgets_is_unknown_and_every_gateway_is_told(
    engine: RunningEngine, gateway: WireGateway
) -> None:
    with WireGateway(engine.endpoint) as other:
        other.wait_for(Ready)
        gateway.send(Keep(WHOLE, "alice", 20.0))
        other.send(Forget(NAME, "bob"))
        assert gateway.wait_for(Forget) == Forget(NAME, "bob") and num_kept(gateway) == 1
        other.send(Forget(NAME, "alice"))
        assert gateway.wait_for(Forget) == Forget(NAME, "alice") and num_kept(gateway) == 0
        gateway.send(Attach(3, NAME, 0, "alice"))
        assert gateway.wait_for(Rejected).code == "unknown_stream"
        other.send(Forget(NAME, "alice"))  # harmless, and told all the same: another gateway may have it
        assert gateway.wait_for(Forget).tenant == "alice"


def test_a_live_stream_that_is_forgotten_ends_and_leaves_nothing() -> None:
    with serving(ScriptedExecutor(step_s=0.005)) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        submit = submission(1, [1, 2, 3], 1500, attach_grace_s=30.0, tenant="alice")
        gateway.send(submit)
        gateway.wait_tokens(1, 2)
        gateway.send(Forget(submit.stream_id, "bob"))
        gateway.send(Forget(submit.stream_id, "alice"))
        end = gateway.wait_end(1).finished[0]
        assert (end.finish_reason, end.cause) == ("abort", "cancelled")
        assert num_kept(gateway) == 0
        gateway.send(Attach(2, submit.stream_id, 0, "alice"))
        assert gateway.wait_for(Rejected).code == "unknown_stream"


def test_a_stream_that_was_deleted_while_its_gateway_was_away_does_not_run_again(gateway: WireGateway) -> None:
    mine = submission(1, [1, 2, 3], 5, stream_id=NAME, n=3, attach_grace_s=30.0, tenant="alice")
    gateway.send(Forget(NAME, "alice"))
    gateway.send(mine)
    ends = gateway.wait_end(1, num_choices=3).finished.values()
    assert {(end.finish_reason, end.cause) for end in ends} == {("abort", "cancelled")}
    assert not gateway.requests[1].tokens and num_kept(gateway) == 0
    rest = msgspec.structs.replace(mine, request_id=2, finished_choices=[0, 2], prior_token_ids=[pack_ids([4])] * 3)
    gateway.send(rest)
    assert list(gateway.wait_end(2).finished) == [1], "the others have ended before"
    gateway.send(msgspec.structs.replace(mine, request_id=3, tenant="bob"))
    assert gateway.wait_end(3, num_choices=3).finished[0].finish_reason == "length", "that is another's"


def test_a_deletion_that_crosses_the_bringing_of_its_stream_holds(engine: RunningEngine) -> None:
    with WireGateway(engine.endpoint) as early, WireGateway(engine.endpoint, say_hello=False) as late:
        early.wait_for(Ready)
        early.send(Forget(NAME, "alice"))
        early.wait_for(Forget)
        late.send(Hello(WIRE_VERSION, late.gateway_id, epoch=1))  # it did not hear of it
        late.wait_for(Ready)
        late.send(Keep(WHOLE, "alice", 20.0))
        assert num_kept(late) == 0
        late.send(Attach(1, NAME, 0, "alice"))
        assert late.wait_for(Rejected).retry_after_s == 0, "nobody can bring it, though somebody is not through"
        kinds = [type(message) for message in late.messages]
        assert Forget in kinds, "so that it lets go of what it has"
        late.send(Keep(WHOLE, "bob", 20.0))
        assert num_kept(late) == 1, "that is another's"


def test_an_attach_to_a_deleted_stream_hears_of_the_deletion_first(gateway: WireGateway) -> None:
    gateway.send(Forget(NAME, "alice"))
    gateway.wait_for(Forget)
    gateway.messages.clear()
    gateway.send(Attach(1, NAME, 0, "alice"))
    gateway.send(Attach(2, NAME, 0, "bob"))
    gateway.send(GetStats(1))
    gateway.wait_for(Stats)
    told = [message for message in gateway.messages if isinstance(message, Forget | Rejected)]
    assert [type(message) for message in told] == [Forget, Rejected, Rejected]


def test_the_oldest_deletions_are_not_remembered_for_ever(
    gateway: WireGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.requests._MAX_FORGOTTEN", 2)
    names = [bytes([number]) * 16 for number in range(3)]
    for name in [names[0], names[1], names[0], names[2]]:
        gateway.send(Forget(name, "alice"))
    for name in names:
        gateway.send(Keep(msgspec.structs.replace(WHOLE, stream_id=name), "alice", 20.0))
    assert num_kept(gateway) == 1
    gateway.send(Attach(1, names[1], 0, "alice"))
    assert gateway.wait_end(1, num_choices=2).attached is not None


def test_a_stream_that_only_its_own_gateway_may_have_is_not_another_ones_to_forget() -> None:
    with serving(ScriptedExecutor(step_s=0.005)) as engine, WireGateway(engine.endpoint) as gateway:
        gateway.wait_for(Ready)
        submit = submission(1, [1, 2, 3], 40)
        gateway.send(submit)
        with WireGateway(engine.endpoint) as other:
            other.wait_for(Ready)
            other.send(Forget(submit.stream_id, ""))
            assert gateway.wait_end(1).finished[0].finish_reason == "length"
            gateway.send(msgspec.structs.replace(submit, request_id=2))
            assert gateway.wait_end(2).finished[0].finish_reason == "length", "nor is it taken for deleted"


def test_unknown_is_only_said_when_no_gateway_can_bring_it(engine: RunningEngine, gateway: WireGateway) -> None:
    def retry_after_s() -> float:
        gateway.send(Attach(7, NAME, 0, "alice"))
        rejected = gateway.wait_for(Rejected)
        assert rejected.code == "unknown_stream"
        return rejected.retry_after_s

    assert retry_after_s() == 0, "no engine was here before"
    with WireGateway(engine.endpoint, say_hello=False) as other:
        other.send(Hello(WIRE_VERSION, other.gateway_id, epoch=1))
        other.wait_for(Ready)
        engine.loop._succession._until_s = 0.0
        assert retry_after_s() > 0
        other.send(Keep(WHOLE, "alice", 20.0))
        other.send(HandedOver())
        other.send(GetStats(1))
        other.wait_for(Stats)
        gateway.send(Attach(8, NAME, 0, "alice"))
        assert gateway.wait_end(8, num_choices=2).attached is not None
        gateway.send(Forget(NAME, "alice"))
        assert retry_after_s() == 0


def test_a_loading_engine_notes_who_has_something_to_bring() -> None:
    executor = ScriptedExecutor(load_s=0.3)
    with serving(executor) as engine, WireGateway(engine.endpoint, say_hello=False) as gateway:
        gateway.send(Hello(WIRE_VERSION, gateway.gateway_id, epoch=1))
        gateway.wait_for(Ready)
        engine.loop._succession._until_s = 0.0
        gateway.send(Attach(1, NAME))
        assert gateway.wait_for(Rejected).retry_after_s > 0
        gateway.send(HandedOver())
        gateway.send(Attach(2, NAME))
        assert gateway.wait_for(Rejected).retry_after_s == 0
