"""Whether a stream that is taken up can be told: of plain data, without an engine, a stream or a client."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cursor import FROM_START, Mark, at_token, parse_cursor
from gateway.engine_client import EngineUnavailable
from gateway.failures import UnknownStream
from gateway.stream_content import StreamContent
from gateway.stream_state import StreamState
from gateway.taking_up import check_ends, check_place, parts_of, refusal_of, state_of
from streamkv.errors import InvalidField
from streamkv.protocol import Attached, Finished, TokenLogprobs, pack_floats, pack_ids
from streamkv.sampling import SamplingParams
from tests.support.running_gateway import small_tokenizer

PROMPT = [10, 11, 12]
IDS = small_tokenizer().encode("one two three four five six seven")


def state(n: int = 1, logprobs: int = -1, **more: object) -> StreamState:
    sampling = SamplingParams(seed=1, max_tokens=50, n=n, logprobs=logprobs)
    return msgspec.structs.replace(StreamState(sampling, "m"), **more)


def answer(*token_ids: list[int], num_prompt_logprobs: int = 0) -> Attached:
    """Of an engine that knows so many of the prompt's log probabilities."""
    chosen = TokenLogprobs(pack_floats([-1.0] * num_prompt_logprobs), b"", b"") if num_prompt_logprobs else None
    packed = [pack_ids(ids) for ids in token_ids]
    return Attached(1, b"s" * 16, b"", pack_ids(PROMPT), 0, packed, prompt_logprobs=chosen)


@given(st.integers(0, 9), st.integers(0, 4), st.integers(0, 3), st.booleans(), st.integers(0, 9))
def test_the_parts_are_what_the_client_has_and_the_rest_the_rest(
    num_tokens: int, num_more: int, num_events: int, ends: bool, num_there: int
) -> None:
    token_ids = list(range(num_there))
    mark = Mark(num_tokens, num_more=num_more, num_events=num_events, ends=ends)
    parts, rest = parts_of(token_ids, mark)
    assert [token_id for part in parts for token_id in part] + rest == token_ids
    assert rest == token_ids[mark.cuts[-1] :] and len(parts) <= 2


@pytest.mark.parametrize(
    ("cursor", "reason"),
    [
        ("3,0", None),
        ("3~0.1,-", None),
        ("4,0", "at token 4 of choice 0, which has 3"),
        ("1~3.1,0", "at token 4 of choice 0, which has 3"),
        ("1", "entries for 1 choices, but this stream has 2"),
    ],
)
def test_a_cursor_is_refused_by_what_the_engine_has(cursor: str, reason: str | None) -> None:
    refusal = refusal_of(answer(IDS[:3], []), state(n=2), parse_cursor(cursor, "cursor"), None)
    assert (refusal is None) if reason is None else (isinstance(refusal, InvalidField) and reason in str(refusal))


@pytest.mark.parametrize("wants", [{"num_prompt_logprobs": 0}, {"echo": True, "logprobs": 0}])
def test_what_opens_with_the_prompt_waits_until_all_of_that_is_known(wants: dict[str, object]) -> None:
    asked = state(**wants)  # type: ignore[arg-type]
    for num_known, num_older, can_open in ((0, 0, False), (1, 1, False), (2, 0, True), (1, 2, True)):
        older = answer(IDS[:1], num_prompt_logprobs=num_older)
        refusal = refusal_of(answer(IDS, num_prompt_logprobs=num_known), asked, FROM_START, older)
        assert (refusal is None) == can_open and (can_open or isinstance(refusal, EngineUnavailable))
    assert refusal_of(answer([]), asked, FROM_START, None) is None, "the prompt is still to come"
    beyond = refusal_of(answer(IDS), asked, at_token(99, "from_token"), None)
    assert isinstance(beyond, InvalidField), "to wait would not help"
    assert refusal_of(answer(IDS), state(echo=True), FROM_START, None) is None, "a text alone needs nothing"


def test_a_state_of_another_version_is_no_stream_of_ours() -> None:
    packed = msgspec.msgpack.encode(state(n=2, label="mine"))
    whole = msgspec.structs.replace(answer(IDS), gateway_state=packed)
    assert state_of(whole) == state(n=2, label="mine")
    for damaged in (b"", b"\xc1", packed[:-1], msgspec.msgpack.encode(["?"])):
        with pytest.raises(UnknownStream, match="another version"):
            state_of(msgspec.structs.replace(whole, gateway_state=damaged))


def content(asked: StreamState, *token_ids: list[int]) -> StreamContent:
    made = StreamContent(asked, PROMPT, small_tokenizer())
    for choice, ids in zip(made.choices, token_ids, strict=True):
        choice.gathered += ids
        _, choice.ending = choice.take(None)
    return made


def test_places_and_ends_are_counted_in_the_tokens_that_are_shown() -> None:
    made = content(state(n=2, stop=("three",)), IDS, IDS[:2])
    num_shown = made.num_shown[0]
    assert num_shown < len(IDS) and made.num_shown[1] == 2
    check_place(parse_cursor(f"{num_shown}e,2", "cursor"), made.choices)
    check_ends(parse_cursor(f"{num_shown}e,2", "cursor"), made.choices)
    with pytest.raises(InvalidField, match=f"which has {num_shown} so far"):
        check_place(parse_cursor(f"{num_shown + 1},0", "cursor"), made.choices)
    with pytest.raises(InvalidField, match="choice 1, which has not ended"):
        check_ends(parse_cursor("1,2e", "cursor"), made.choices)
    with pytest.raises(InvalidField, match=f"at token 1, but it came at {num_shown}"):
        check_ends(parse_cursor("1e,0", "cursor"), made.choices)
    _, made.choices[1].ending = made.choices[1].take(Finished(1, 1, "abort", "timeout"))
    check_ends(parse_cursor("0,1e", "cursor"), made.choices)  # its client may have been cut off before
