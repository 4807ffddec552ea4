"""One StepOutput per gateway; tails for Attach; what is kept, and what is dropped first."""

import time

import pytest

import engine.publisher
from engine.publisher import NO_GATEWAY, Publisher
from engine.sequence import Request, Sequence, SequenceOutput, SequenceState
from engine.simulation.simulated_model import SimulatedModel
from streamkv.errors import InvalidField
from streamkv.protocol import (
    KEPT_CHOICE_BYTES,
    KEPT_STREAM_BYTES,
    Attached,
    EngineMessage,
    Finished,
    PromptLogprobs,
    StepOutput,
    TokenLogprobs,
    decode_from_engine,
    unpack_ids,
)
from streamkv.sampling import SamplingParams

A, B = b"gateway a", b"gateway b"


class Wire:
    """Where a publisher's frames go."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, EngineMessage]] = []
        self.sizes: list[int] = []
        self.connected = {A, B}

    def send(self, gateway_id: bytes, frame: bytes) -> bool:
        if gateway_id not in self.connected:
            return False
        self.sent.append((gateway_id, decode_from_engine(frame)))
        self.sizes.append(len(frame))
        return True


def request_at(gateway_id: bytes, request_id: int, *, n: int = 1, grace_s: float = 0.0, prompt_len: int = 4) -> Request:
    request = Request(
        request_id=request_id,
        gateway_id=gateway_id,
        stream_id=gateway_id + request_id.to_bytes(4, "big"),
        prompt_token_ids=list(range(prompt_len)),
        sampling=SamplingParams(seed=0, max_tokens=1000, n=n),
        arrival_s=0.0,
        attach_grace_s=grace_s,
        gateway_state=b"state",
    )
    request.sequences = [
        Sequence(choice, request, choice, list(range(prompt_len)), prompt_len, max_len=2000) for choice in range(n)
    ]
    return request


KEPT_ALONE_BYTES = KEPT_STREAM_BYTES + KEPT_CHOICE_BYTES
"""What a stream of one choice takes with nothing in it."""


def output(request: Request, *tokens: int, choice: int = 0, reason: str = "") -> SequenceOutput:
    sequence = request.sequences[choice]
    sequence.token_ids += tokens
    if reason:
        sequence.state = SequenceState.FINISHED
    return SequenceOutput(sequence, list(tokens), reason)


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def publisher(wire: Wire) -> Publisher:
    return Publisher(wire.send, max_kept_bytes=3 * KEPT_ALONE_BYTES + 100)


def test_a_step_is_one_message_to_each_gateway_that_has_part_in_it(wire: Wire, publisher: Publisher) -> None:
    requests = [request_at(A, 1), request_at(B, 1), request_at(A, 2)]
    for request in requests:
        publisher.add(request)
    publisher.publish([output(request, 10 + index) for index, request in enumerate(requests)], 1.0)
    assert sorted(gateway_id for gateway_id, _ in wire.sent) == [A, B]
    for gateway_id, message in wire.sent:
        assert isinstance(message, StepOutput)
        assert message.step == publisher.step == 1
        assert unpack_ids(message.request_ids) == ([1, 2] if gateway_id == A else [1])
        assert unpack_ids(message.token_ids) == ([10, 12] if gateway_id == A else [11])
    publisher.publish([], 2.0)
    assert publisher.step == 2 and len(wire.sent) == 2


def test_publishing_256_rows_takes_well_under_a_step(publisher: Publisher) -> None:
    quiet = Publisher(lambda gateway_id, frame: True)
    requests = [request_at(A, request_id) for request_id in range(256)]
    for request in requests:
        quiet.add(request)
    outputs = [SequenceOutput(request.sequences[0], [5]) for request in requests]
    times = []
    for _ in range(50):
        start = time.perf_counter()
        quiet.publish(outputs, 1.0)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.0015, "0.2 ms on a quiet machine"


def test_a_stream_without_a_grace_period_leaves_nothing_behind(publisher: Publisher) -> None:
    request = request_at(A, 1)
    publisher.add(request)
    publisher.publish([output(request, 5, reason="stop")], 1.0)
    assert (publisher.num_live, publisher.num_kept, publisher.kept_bytes) == (0, 0, 0)
    assert publisher.find(request.stream_id) is None and publisher.at(A, 1) is None


def test_a_stream_lives_until_its_last_choice_has_ended(publisher: Publisher) -> None:
    request = request_at(A, 1, n=2)
    publisher.add(request)
    publisher.publish([output(request, 5, reason="stop"), output(request, 6, choice=1)], 1.0)
    assert publisher.num_live == 1
    publisher.publish([output(request, 7, choice=1, reason="length")], 2.0)
    assert publisher.num_live == 0


def test_what_ended_first_is_dropped_first_when_too_much_is_kept(publisher: Publisher) -> None:
    requests = [request_at(A, number, grace_s=60.0 - number) for number in range(6)]
    for request in requests:
        publisher.add(request)
    for request in requests[:3]:
        publisher.publish([output(request, 1, 2, 3, reason="stop")], 1.0)
    assert publisher.kept_bytes == 3 * (KEPT_ALONE_BYTES + 5 + 16 + 12) == 3 * KEPT_ALONE_BYTES + 99
    publisher.publish([output(requests[3], 1, 2, 3, reason="stop")], 1.0)
    assert [publisher.find(request.stream_id) is None for request in requests[:4]] == [True, False, False, False]
    assert (publisher.kept_bytes, publisher.num_dropped, publisher.num_kept) == (3 * KEPT_ALONE_BYTES + 99, 1, 3)
    assert publisher.num_live == 2, "live streams are never dropped"


def test_one_stream_over_the_bound_is_not_kept_at_all(publisher: Publisher) -> None:
    request = request_at(A, 1, grace_s=60.0, prompt_len=500)
    publisher.add(request)
    publisher.publish([output(request, 1, reason="stop")], 1.0)
    assert (publisher.num_kept, publisher.kept_bytes, publisher.num_dropped) == (0, 0, 1)


def test_kept_streams_go_when_their_own_grace_period_is_over(publisher: Publisher) -> None:
    long, short = request_at(A, 1, grace_s=50.0), request_at(A, 2, grace_s=5.0)
    for request in (long, short):
        publisher.add(request)
        publisher.publish([output(request, 1, reason="stop")], 1.0)
    assert publisher.next_expiry_s == 6.0
    assert publisher.expire(5.9) == [] and publisher.num_kept == 2
    assert publisher.expire(6.0) == [] and publisher.num_kept == 1
    assert publisher.find(short.stream_id) is None and publisher.find(long.stream_id) is not None
    publisher.expire(51.0)
    assert (publisher.num_kept, publisher.kept_bytes) == (0, 0)
    assert publisher.next_expiry_s == float("inf")


def test_a_detached_stream_collects_its_tokens_and_is_given_up_after_its_grace_period(
    wire: Wire, publisher: Publisher
) -> None:
    request = request_at(A, 1, grace_s=5.0)
    publisher.add(request)
    stream = publisher.find(request.stream_id)
    assert stream is not None
    publisher.detach(stream, 10.0)
    assert (publisher.num_detached, request.gateway_id) == (1, NO_GATEWAY)
    publisher.publish([output(request, 7, 8)], 11.0)
    assert wire.sent == []
    assert publisher.expire(14.9) == []
    assert publisher.expire(15.0) == [request]


def test_attach_stops_the_grace_period(wire: Wire, publisher: Publisher) -> None:
    request = request_at(A, 1, grace_s=5.0)
    publisher.add(request)
    stream = publisher.find(request.stream_id)
    assert stream is not None
    publisher.detach(stream, 10.0)
    publisher.publish([output(request, 7, 8)], 11.0)
    publisher.attach(stream, B, 9, 1, 1.0)
    gateway_id, attached = wire.sent[0]
    assert gateway_id == B and isinstance(attached, Attached)
    assert [unpack_ids(tokens) for tokens in attached.token_ids] == [[8]]
    assert publisher.expire(100.0) == []
    publisher.publish([output(request, 9)], 101.0)
    last = wire.sent[-1][1]
    assert isinstance(last, StepOutput) and unpack_ids(last.request_ids) == [9]


@pytest.mark.parametrize("from_token", [-1, 2, 2**40])
def test_attach_refuses_a_start_that_would_leave_a_gap(wire: Wire, publisher: Publisher, from_token: int) -> None:
    request = request_at(A, 1, n=2, grace_s=5.0)
    publisher.add(request)
    publisher.publish([output(request, 5, 6), output(request, 7, choice=1)], 1.0)
    wire.sent.clear()
    stream = publisher.find(request.stream_id)
    assert stream is not None
    with pytest.raises(InvalidField, match="between 0 and 1"):
        publisher.attach(stream, B, 1, from_token, 1.0)
    assert wire.sent == [] and publisher.at(A, 1) is stream, "a refused attach changes nothing"


def test_a_choice_that_has_ended_does_not_limit_where_the_others_go_on(wire: Wire, publisher: Publisher) -> None:
    request = request_at(A, 1, n=2, grace_s=5.0)
    publisher.add(request)
    publisher.publish([output(request, 5, 6, 7), output(request, 8, choice=1, reason="stop")], 1.0)
    stream = publisher.find(request.stream_id)
    assert stream is not None
    publisher.attach(stream, B, 1, 3, 1.0)
    attached = next(message for _, message in wire.sent if isinstance(message, Attached))
    assert attached.token_ids == [b"", b""]
    assert [end.choice for end in attached.finished] == [1]


def test_bytes_count_until_their_step_is_acknowledged(wire: Wire, publisher: Publisher) -> None:
    request = request_at(A, 1, grace_s=5.0)
    publisher.add(request)
    for token in range(5):
        publisher.publish([output(request, token)], 1.0)
    assert publisher.unacked_bytes(A) == sum(wire.sizes) > 0
    assert publisher.unacked_bytes(B) == 0
    publisher.acknowledge(A, 3)
    assert publisher.unacked_bytes(A) == sum(wire.sizes[3:])
    assert publisher.is_over(A, sum(wire.sizes[3:]) + 2 * max(wire.sizes) - 1)
    assert not publisher.is_over(A, sum(wire.sizes[3:]) + 2 * max(wire.sizes))
    publisher.acknowledge(A, 5)
    assert publisher.unacked_bytes(A) == 0 and not publisher.is_over(A, 1)


def test_one_large_frame_does_not_keep_its_gateway_at_the_bound(wire: Wire, publisher: Publisher) -> None:
    request = request_at(A, 1)
    publisher.add(request)
    publisher.publish([output(request, *range(1000))], 1.0)
    large = wire.sizes[-1]
    assert publisher.is_over(A, 2 * large)
    for token in range(40):
        publisher.publish([output(request, token)], 1.0)
        publisher.acknowledge(A, publisher.step - 1)
    assert publisher.unacked_bytes(A) == wire.sizes[-1]
    assert not publisher.is_over(A, large // 4)


def test_choices_too_long_for_one_message_come_in_several_and_their_ends_last(
    wire: Wire, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.publisher, "_MAX_STEP_BYTES", 400)
    request, other = request_at(A, 1, n=5), request_at(B, 1)
    publisher.add(request)
    publisher.add(other)
    lengths = [60, 10, 200, 30, 90]
    outputs = [output(request, *range(lengths[i]), choice=i, reason="stop") for i in range(5)]
    publisher.publish([*outputs, output(other, 7)], 1.0)
    messages = [message for gateway_id, message in wire.sent if gateway_id == A]
    assert len(messages) > 2
    steps, tokens = [], dict.fromkeys(range(5), 0)
    for message in messages:
        assert isinstance(message, StepOutput)
        steps.append(message.step)
        choices = unpack_ids(message.choices) if message.choices else [0]
        counts = unpack_ids(message.num_tokens)
        assert sum(counts) * 4 <= 400 or len(counts) == 1
        for choice, count in zip(choices, counts, strict=True):
            tokens[choice] += count
        assert len(message.finished) == (5 if message is messages[-1] else 0)
    assert list(tokens.values()) == lengths
    assert steps == sorted(set(steps))
    publisher.acknowledge(A, steps[-1])
    assert publisher.unacked_bytes(A) == 0 and publisher.unacked_bytes(B) > 0


def test_an_attached_answer_can_be_acknowledged_although_no_token_follows(wire: Wire, publisher: Publisher) -> None:
    request = request_at(A, 1, grace_s=5.0)
    publisher.add(request)
    publisher.publish([output(request, 1, reason="stop")], 1.0)
    stream = publisher.find(request.stream_id)
    assert stream is not None
    publisher.attach(stream, B, 1, 0, 1.0)
    assert publisher.unacked_bytes(B) > 0
    last = wire.sent[-1][1]
    assert isinstance(last, StepOutput)
    publisher.acknowledge(B, last.step)
    assert publisher.unacked_bytes(B) == 0


def test_what_could_not_be_sent_is_not_waited_for(wire: Wire, publisher: Publisher) -> None:
    request = request_at(A, 1)
    publisher.add(request)
    wire.connected.clear()
    publisher.publish([output(request, 1)], 1.0)
    assert publisher.unacked_bytes(A) == 0


def test_a_new_stream_may_take_the_name_of_one_that_has_ended(publisher: Publisher) -> None:
    first = request_at(A, 1, grace_s=50.0)
    publisher.add(first)
    publisher.publish([output(first, 1, reason="stop")], 1.0)
    second = request_at(A, 1, grace_s=50.0)
    publisher.add(second)
    stream = publisher.find(second.stream_id)
    assert stream is not None and stream.request is second
    assert (publisher.num_live, publisher.num_kept, publisher.kept_bytes) == (1, 0, 0)
    assert publisher.expire(51.0) == [] and publisher.find(second.stream_id) is stream


def test_a_tail_too_large_for_a_frame_is_refused_and_a_shorter_one_sent(
    wire: Wire, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_at(A, 1, grace_s=5.0)
    publisher.add(request)
    publisher.publish([output(request, *range(600))], 1.0)
    wire.sent.clear()
    stream = publisher.find(request.stream_id)
    assert stream is not None
    monkeypatch.setattr(engine.publisher, "MAX_FRAME_BYTES", engine.publisher._REST_BYTES + 2000)
    with pytest.raises(InvalidField, match="too many"):
        publisher.attach(stream, B, 1, 0, 1.0)
    assert wire.sent == [] and publisher.at(A, 1) is stream, "a refused attach changes nothing"
    publisher.attach(stream, B, 1, 200, 1.0)
    assert publisher.at(B, 1) is stream


def test_what_was_found_of_a_prompt_is_told_once_with_its_first_tokens(wire: Wire, publisher: Publisher) -> None:
    request, other = request_at(A, 7), request_at(A, 8)
    request.sequences[0].num_cached_tokens = 3
    for each in (request, other):
        publisher.add(each)
    for token in (1, 2):
        publisher.publish([output(request, token), output(other, token)], 1.0)
    hits = [unpack_ids(message.hits) for _, message in wire.sent if isinstance(message, StepOutput)]
    assert hits == [[7, 3], []]


# Log probabilities

NUM_TOP = 2


def values_of(token_ids: list[int], start: int) -> TokenLogprobs:
    return SimulatedModel().logprobs(token_ids, start, NUM_TOP)


def told_request(n: int = 1, prompt_len: int = 4) -> Request:
    request = request_at(A, 1, n=n, grace_s=5.0, prompt_len=prompt_len)
    sampling = SamplingParams(seed=0, max_tokens=1000, n=n, logprobs=NUM_TOP, prompt_logprobs=NUM_TOP)
    request.sampling = sampling
    return request


def told(request: Request, *tokens: int, choice: int = 0, reason: str = "") -> SequenceOutput:
    sequence = request.sequences[choice]
    values = values_of(list(tokens), len(sequence.token_ids))
    plain = output(request, *tokens, choice=choice, reason=reason)
    return SequenceOutput(sequence, plain.token_ids, reason, logprobs=values if tokens else None)


def part(request: Request, start: int, end: int) -> SequenceOutput:
    values = values_of(request.prompt_token_ids[start:end], start)
    return SequenceOutput(request.sequences[0], [], prompt_logprobs=(start, values))


def test_log_probabilities_name_the_row_that_they_are_of(wire: Wire, publisher: Publisher) -> None:
    plain, request = request_at(A, 7), told_request(n=2)
    for each in (plain, request):
        publisher.add(each)
    publisher.publish([output(plain, 9), told(request, 5, choice=1), output(plain, 9), told(request, 6, 7)], 1.0)
    ((_, message),) = wire.sent
    assert isinstance(message, StepOutput)
    assert {row.row: row.values for row in message.logprobs} == {1: values_of([5], 4), 3: values_of([6, 7], 4)}
    assert message.prompt_logprobs == []


def test_a_prompt_is_told_of_once_and_without_a_gap_whatever_is_computed_again(
    wire: Wire, publisher: Publisher
) -> None:
    request = told_request(prompt_len=20)
    publisher.add(request)
    for start, end in ((1, 5), (1, 3), (3, 9), (12, 15), (1, 9), (9, 20), (1, 20)):
        publisher.publish([part(request, start, end)], 1.0)
    parts: list[PromptLogprobs] = []
    for _, message in wire.sent:
        assert isinstance(message, StepOutput)
        parts += message.prompt_logprobs
    assert [(each.start, each.values.num_tokens) for each in parts] == [(1, 4), (5, 4), (9, 11)]
    for each in parts:
        ids = request.prompt_token_ids[each.start : each.start + each.values.num_tokens]
        assert each.values == values_of(ids, each.start)
    stream = publisher.find(request.stream_id)
    assert stream is not None
    publisher.attach(stream, B, 1, 0, 1.0)
    attached = next(message for _, message in wire.sent if isinstance(message, Attached))
    assert attached.prompt_logprobs == values_of(request.prompt_token_ids[1:], 1)


def test_parts_of_a_prompt_whose_stream_is_gone_are_dropped(wire: Wire, publisher: Publisher) -> None:
    request, kept = told_request(), request_at(A, 2, grace_s=5.0)
    publisher.add(kept)
    publisher.add(request)
    late = part(request, 1, 4)
    publisher.publish([told(request, reason="abort")], 1.0)
    wire.sent.clear()
    publisher.publish([late, part(kept, 1, 4)], 1.0)
    assert wire.sent == []


@pytest.mark.parametrize("max_bytes", [60, 200, 1000])
def test_what_is_too_much_for_one_message_comes_in_several_in_order(
    wire: Wire, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, max_bytes: int
) -> None:
    monkeypatch.setattr(engine.publisher, "_MAX_STEP_BYTES", max_bytes)
    request = told_request(n=3, prompt_len=30)
    request.sequences[0].num_cached_tokens = 2
    publisher.add(request)
    lengths = [40, 1, 13]
    outputs = [part(request, 1, 30)]
    outputs += [told(request, *range(count), choice=choice, reason="stop") for choice, count in enumerate(lengths)]
    publisher.publish(outputs, 1.0)
    assert len(wire.sent) > 2
    messages = [message for _, message in wire.sent if isinstance(message, StepOutput)]
    next_position, tokens = 1, dict.fromkeys(range(3), 0)
    ends: list[Finished] = []
    for message in messages:
        choices = unpack_ids(message.choices) or [0] * (len(message.request_ids) // 4)
        counts = unpack_ids(message.num_tokens) or [1] * len(choices)
        num_bytes = len(message.token_ids) + sum(row.values.num_bytes for row in message.logprobs)
        num_bytes += sum(each.values.num_bytes for each in message.prompt_logprobs)
        assert num_bytes <= max_bytes
        for each in message.prompt_logprobs:
            assert each.start == next_position and not any(tokens.values())
            next_position += each.values.num_tokens
        assert [row.row for row in message.logprobs] == list(range(len(choices)))
        for choice, count, row in zip(choices, counts, message.logprobs, strict=True):
            start = tokens[choice]
            assert row.values == values_of(list(range(start, start + count)), 30 + start)
            tokens[choice] += count
        ends += message.finished
    assert (next_position, list(tokens.values())) == (30, lengths)
    assert len(ends) == 3 and messages[-1].finished == ends
    assert [unpack_ids(message.hits) for message in messages if message.hits] == [[1, 2]]
    assert len({message.step for message in messages}) == len(messages)


def test_what_is_kept_of_a_stream_counts_its_log_probabilities(wire: Wire) -> None:
    publisher = Publisher(wire.send, max_kept_bytes=KEPT_ALONE_BYTES + 100)
    request = told_request()
    publisher.add(request)
    publisher.publish([part(request, 1, 4), told(request, 5)], 1.0)
    publisher.publish([told(request, reason="stop")], 1.0)
    assert publisher.num_dropped == 1, "one token with its own is more than the bound that is set here"
    roomy = Publisher(wire.send)
    request = told_request()
    roomy.add(request)
    roomy.publish([part(request, 1, 4), told(request, 5)], 1.0)
    roomy.publish([told(request, reason="stop")], 1.0)
    assert roomy.kept_bytes == KEPT_ALONE_BYTES + 5 + 16 + 4 + (1 + 3) * (4 + 8 * NUM_TOP)
    roomy.expire(100.0)
    assert roomy.kept_bytes == 0


def test_a_tail_too_large_with_its_log_probabilities_is_refused(
    wire: Wire, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = told_request()
    publisher.add(request)
    publisher.publish([told(request, *range(100))], 1.0)
    stream = publisher.find(request.stream_id)
    assert stream is not None
    monkeypatch.setattr(engine.publisher, "MAX_FRAME_BYTES", engine.publisher._REST_BYTES + 1000)
    with pytest.raises(InvalidField, match="too many"):
        publisher.attach(stream, B, 1, 0, 1.0)
    publisher.attach(stream, B, 1, 80, 1.0)
    attached = next(message for _, message in wire.sent if isinstance(message, Attached))
    assert attached.logprobs == [values_of(list(range(80, 100)), 84)]


def test_prior_log_probabilities_are_kept_for_those_who_attach(wire: Wire, publisher: Publisher) -> None:
    request = told_request(n=2)
    request.prior_token_ids, request.finished_choices = [[5, 6], [7]], [1]
    request.prior_logprobs = [values_of([5, 6], 4), values_of([7], 4)]
    request.sequences[0].token_ids += [5, 6]
    publisher.add(request)
    publisher.publish([told(request, 8)], 1.0)
    stream = publisher.find(request.stream_id)
    assert stream is not None
    publisher.attach(stream, B, 1, 1, 1.0)
    attached = next(message for _, message in wire.sent if isinstance(message, Attached))
    assert [unpack_ids(tokens) for tokens in attached.token_ids] == [[6, 8], []]
    assert attached.logprobs == [values_of([6, 8], 5), TokenLogprobs(b"")]
