"""What continues a stream is all that it is: what one hands on, the next one hands on, too."""

import msgspec
import pytest

from gateway.stream_content import StreamContent
from gateway.stream_state import StreamState
from streamkv.protocol import Attached, Finished, TokenLogprobs, pack_floats, pack_ids
from streamkv.sampling import SamplingParams
from tests.support.running_gateway import small_tokenizer

PROMPT = [10, 11, 12]
IDS = small_tokenizer().encode("one two three four five six seven")


def values(count: int, first: float = 0.0) -> TokenLogprobs:
    return TokenLogprobs(pack_floats([-first - number for number in range(count)]), b"", b"")


def begun(logprobs: int = -1, **more: object) -> StreamContent:
    sampling = SamplingParams(seed=1, max_tokens=50, n=2, logprobs=logprobs)
    return StreamContent(msgspec.structs.replace(StreamState(sampling, "m"), **more), PROMPT, small_tokenizer())


def told(content: StreamContent, attached: Attached, older: Attached | None = None) -> None:
    for choice, token_ids in content.take_in(attached, older):
        choice.gathered += token_ids
        choice.take(None)


@pytest.mark.parametrize("logprobs", [-1, 0])
def test_what_was_taken_up_is_handed_on_whole(logprobs: int) -> None:
    first = begun(logprobs, num_prompt_logprobs=0, label="mine", echo=True)
    first.prompt.add_logprobs(1, values(2))
    for choice, ids in zip(first.choices, (IDS, IDS[:2]), strict=True):
        first.add_logprobs(choice.index, values(len(ids)))
        choice.gathered += ids
        choice.take(None)
    first.choices[1].finished = Finished(1, 1, "length", "", num_cached_tokens=2)
    first.died(99)
    remains = first.remains(b"s" * 16)
    state = msgspec.msgpack.decode(remains.gateway_state, type=StreamState)
    second = StreamContent(state, PROMPT, small_tokenizer())
    told(second, remains)
    second.choices[1].finished = remains.finished[0]
    assert second.remains(b"s" * 16) == remains
    assert second.submission(7, b"s" * 16, "alice").gateway_state == remains.gateway_state
    assert second.suspicion == first.suspicion and second.num_tokens == first.num_tokens == len(IDS) + 2


def test_only_what_is_missing_is_taken_in() -> None:
    content = begun(0)
    for index, num_known in ((0, 3), (1, 2)):
        content.add_logprobs(index, values(num_known))
        content.choices[index].gathered += IDS[:num_known]
        content.choices[index].take(None)
    content.add_logprobs(0, values(1, first=50.0))  # of a token that was lost on its way
    assert content.num_known_tokens == 2
    attached = Attached(
        1, b"s" * 16, b"", pack_ids(PROMPT), 2, [pack_ids(IDS[2:6]), pack_ids(IDS[2:4])],
        logprobs=[values(4, first=2.0), values(2, first=2.0)],
    )  # fmt: skip
    assert [token_ids for _, token_ids in content.take_in(attached, None)] == [IDS[3:6], IDS[2:4]]
    told(content, attached)
    assert [choice.token_ids for choice in content.choices] == [IDS[:6], IDS[:4]]
    assert [choice.packed_logprobs() for choice in content.choices] == [values(6), values(4)]


def test_of_the_prompt_counts_whoever_knows_more_of_it() -> None:
    for num_there, num_older, num_known in ((2, 1, 2), (1, 2, 2), (0, 2, 2), (1, 0, 1)):
        content = begun(num_prompt_logprobs=0)
        attached, older = (
            Attached(
                1, b"s" * 16, b"", pack_ids(PROMPT), 0, [b"", b""], prompt_logprobs=values(count) if count else None
            )
            for count in (num_there, num_older)
        )
        content.take_in(attached, older)
        assert content.prompt.packed_logprobs() == values(num_known)


def test_a_choice_that_has_ended_takes_no_more_and_opens_no_more() -> None:
    content = begun(stop=("three",), echo=True)
    choice = content.choices[0]
    assert not choice.opens_with(Finished(1, 0, "abort", "timeout")), "its prompt may not have been read"
    assert choice.opens_with(Finished(1, 0, "length"))
    choice.gathered += IDS
    assert choice.opens_with(None)
    delta, choice.ending = choice.take(None)
    assert delta is not None and len(delta.token_ids) == choice.num_shown < len(IDS) == len(choice.token_ids)
    choice.gathered += IDS
    assert not choice.opens_with(None) and choice.take(Finished(1, 0, "length")) == (None, None)
    assert choice.token_ids == IDS and not choice.gathered
