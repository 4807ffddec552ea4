"""Log probabilities go out with their tokens, whatever the text does, and outlast an engine."""

import json
import math
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.deltas import TokenLogprob
from gateway.logprobs import LogprobForms, LogprobStore
from gateway.outlet import Ending, Usage
from gateway.stream_state import StreamState
from gateway.streams import Stream
from streamkv.protocol import Attached, Finished, TokenLogprobs, pack_floats, pack_ids
from streamkv.sampling import SamplingParams
from tests.support.running_gateway import VOCAB_SIZE, small_tokenizer
from tests.support.told_stream import Told, new_stream

PROMPT = [10, 11, 12]
TEXT = "one two thrée four 🙂🙂 six seven"
IDS = small_tokenizer().encode(TEXT)


def values(token_ids: Sequence[int], num_top: int = 2, start: int = 0) -> TokenLogprobs:
    """Made of a token and its place, so that a wrong one shows. Exact in float32."""
    places = list(enumerate(token_ids, start=start))
    return TokenLogprobs(
        pack_floats(-(token_id % 7) - place / 64 for place, token_id in places),
        pack_ids((token_id + rank) % VOCAB_SIZE for _, token_id in places for rank in range(num_top)),
        pack_floats(-float(rank + place) for place, _ in places for rank in range(num_top)),
    )


def entries(
    token_ids: Sequence[int], num_top: int = 2, offsets: Sequence[int] = (), start: int = 0
) -> list[TokenLogprob]:
    return [
        TokenLogprob(
            token_id,
            -(token_id % 7) - place / 64,
            tuple(((token_id + rank) % VOCAB_SIZE, -float(rank + place)) for rank in range(num_top)),
            offsets[place - start] if offsets else 0,
        )
        for place, token_id in enumerate(token_ids, start=start)
    ]


def begun(told: Told, *, echo_text: str | None = None, logprobs: int = 2, **options: object) -> Stream:
    """A stream that is submitted to an engine which is not there. options: of its sampling and its state."""
    in_sampling = {name: options.pop(name) for name in list(options) if name in SamplingParams.__struct_fields__}
    sampling = SamplingParams(seed=1, max_tokens=50, temperature=0.0, logprobs=logprobs)
    sampling = msgspec.structs.replace(sampling, **in_sampling)
    stream = new_stream(told)
    stream.begin(msgspec.structs.replace(StreamState(sampling, "m"), **options), PROMPT, echo_text)
    return stream


def feed(stream: Stream, token_ids: Sequence[int], size: int = 1, start: int = 0, choice: int = 0) -> None:
    """Tokens as steps bring them."""
    for first in range(0, len(token_ids), size):
        part = list(token_ids[first : first + size])
        stream.logprobs(choice, values(part, start=start + first))
        if choice == 0 and size == 1:
            stream.push_token(part[0])
        else:
            stream.push(choice, part)
            stream.flush()


# Kept


@given(st.lists(st.integers(0, 5), max_size=6), st.integers(0, 3), st.integers(0, 4))
def test_parts_are_kept_as_one(sizes: list[int], num_top: int, asked: int) -> None:
    store = LogprobStore()
    for number, size in enumerate(sizes):
        store.extend(values(IDS[:size], num_top, start=sum(sizes[:number])))
    ids = [token_id for size in sizes for token_id in IDS[:size]]
    assert len(store) == len(ids)
    assert store.pack() == values(ids, num_top)
    for start in range(len(ids) + 1):
        assert store.of(ids[start:], start, asked) == entries(ids, min(asked, num_top))[start:]
    store.cut(len(ids) // 2)
    assert store.pack() == values(ids[: len(ids) // 2], num_top)


def test_what_does_not_fit_together_is_not_kept() -> None:
    store = LogprobStore()
    store.extend(values(IDS[:2], 2))
    store.extend(TokenLogprobs(b""))
    with pytest.raises(ValueError, match="3 places a token came after those of 2"):
        store.extend(values(IDS[:1], 3))
    with pytest.raises(ValueError, match="places"):
        store.extend(TokenLogprobs(pack_floats([1.0]), pack_ids([1, 2]), pack_floats([1.0])))
    with pytest.raises(ValueError, match="2 log probabilities came for 3 tokens"):
        store.of(IDS[:3], 0, 2)


# Told

SPACE_TWO = small_tokenizer().encode(" two")[0]
HALF = next(
    token_id for token_id, piece in enumerate(small_tokenizer().vocabulary.pieces) if piece == "🙂".encode()[:1]
)
END = 2


def test_a_chat_is_told_each_token_with_its_bytes() -> None:
    forms = LogprobForms(small_tokenizer(), as_token_ids=False)
    told = forms.chat([TokenLogprob(HALF, -1.5, ((END, -0.25), (HALF, -1.5))), TokenLogprob(END, -math.inf)])
    half = {"token": "\ufffd", "logprob": -1.5, "bytes": [0xF0]}
    end = {"token": "<|im_end|>", "bytes": list(b"<|im_end|>")}
    assert told == [
        half | {"top_logprobs": [end | {"logprob": -0.25}, half]},
        end | {"logprob": -9999.0, "top_logprobs": []},
    ]
    json.dumps(told, allow_nan=False)


def test_a_completion_is_told_in_columns_and_the_token_itself_among_the_likeliest() -> None:
    forms = LogprobForms(small_tokenizer(), as_token_ids=False)
    told = forms.completion(
        [
            TokenLogprob(END, None),
            TokenLogprob(HALF, -3.0, ((END, -0.5), (HALF + 1, -2.0)), 10),
            TokenLogprob(END, -0.5, ((END, -0.5),), 11),
        ]
    )
    assert told == {
        "tokens": ["<|im_end|>", "\ufffd", "<|im_end|>"],
        "token_logprobs": [None, -3.0, -0.5],
        "top_logprobs": [None, {"<|im_end|>": -0.5, "\ufffd": -2.0}, {"<|im_end|>": -0.5}],
        "text_offset": [0, 10, 11],
    }
    as_ids = LogprobForms(small_tokenizer(), as_token_ids=True)
    assert as_ids.completion([TokenLogprob(HALF, -3.0, ((END, -0.5), (HALF + 1, -2.0)))])["top_logprobs"] == [
        {"token_id:2": -0.5, f"token_id:{HALF + 1}": -2.0, f"token_id:{HALF}": -3.0}
    ]
    assert as_ids.chat([TokenLogprob(HALF, -3.0)])[0] == {
        "token": f"token_id:{HALF}",
        "logprob": -3.0,
        "bytes": [0xF0],
        "top_logprobs": [],
    }


def test_a_prompt_is_told_by_ids_with_ranks_where_they_are_known() -> None:
    forms = LogprobForms(small_tokenizer(), as_token_ids=True)
    told = forms.prompt(
        [
            TokenLogprob(HALF, None),
            TokenLogprob(END, -4.0, ((SPACE_TWO, -0.5), (HALF, -2.0))),
            TokenLogprob(HALF, -2.0, ((SPACE_TWO, -0.5), (HALF, -2.0))),
        ]
    )
    two = {"logprob": -0.5, "rank": 1, "decoded_token": small_tokenizer().decode([SPACE_TWO])}
    half = {"logprob": -2.0, "rank": 2, "decoded_token": "\ufffd"}
    assert told == [
        None,
        {
            "2": {"logprob": -4.0, "rank": None, "decoded_token": "<|im_end|>"},
            str(SPACE_TWO): two,
            str(HALF): half,
        },
        {str(HALF): half, str(SPACE_TWO): two},
    ]
    assert [next(iter(entry or {})) for entry in told[1:]] == ["2", str(HALF)], "the token itself comes first"


# On their way


def offsets_of(token_ids: Sequence[int]) -> list[int]:
    """Characters that are certain before each token."""
    texts = [small_tokenizer().decode(token_ids[:end]) for end in range(len(token_ids))]
    return [len(text.rstrip("\ufffd")) for text in texts]


@pytest.mark.parametrize("size", [1, 2, 5, len(IDS)])
async def test_each_token_is_told_with_its_log_probabilities_though_text_is_held_back(size: int) -> None:
    told = Told()
    stream = begun(told, stop=("\x7fnever",))
    feed(stream, IDS, size)
    assert not told.pieces
    for _, delta in told.deltas:
        assert [entry.token_id for entry in delta.logprobs] == list(delta.token_ids)
    stream.finish(Finished(1, 0, "length"))
    stream.flush()
    assert told.of() == (TEXT, IDS, entries(IDS, 2, offsets_of(IDS)))


async def test_plain_streams_go_on_token_by_token() -> None:
    told = Told()
    stream = begun(told, logprobs=-1)
    for token_id in small_tokenizer().encode("plain words"):
        stream.push_token(token_id)
    assert len(told.deltas) == 1 and len(told.pieces) > 1


@pytest.mark.parametrize("size", [1, 3, len(IDS)])
async def test_tokens_behind_a_stop_string_are_not_told(size: int) -> None:
    told = Told()
    stop = "ée f"
    stream = begun(told, stop=(stop,))
    feed(stream, IDS, size)
    text, token_ids, logprobs = told.of()
    num_needed = next(end for end in range(len(IDS)) if stop in small_tokenizer().decode(IDS[:end]))
    assert text == TEXT[: TEXT.index(stop)]
    assert (token_ids, logprobs) == (IDS[:num_needed], entries(IDS, 2, offsets_of(IDS))[:num_needed])
    assert told.usage == Usage(3, num_needed) and told.ends == [Ending("stop", "stop_string", stop)]


async def test_the_token_that_ends_a_choice_is_told_and_has_no_text() -> None:
    told = Told()
    stream = begun(told)
    feed(stream, IDS[:4])
    stream.logprobs(0, values([END], start=4))
    stream.push(0, [END])
    stream.finish(Finished(1, 0, "stop", "eos", stop_token_id=END))
    stream.flush()
    text = small_tokenizer().decode(IDS[:4])
    assert told.of() == (text, [*IDS[:4], END], entries([*IDS[:4], END], 2, [*offsets_of(IDS[:4]), len(text)]))


async def test_choices_have_their_own() -> None:
    told = Told()
    stream = begun(told, n=2)
    for index, token_id in enumerate(IDS):
        for choice, token in ((1, token_id), (0, IDS[-1 - index])):
            stream.logprobs(choice, values([token], start=index))
            stream.push(choice, [token])
        stream.flush()
    assert told.of(1)[1:] == (IDS, entries(IDS, 2, offsets_of(IDS)))
    assert told.of(0)[1] == IDS[::-1]
    assert [entry.logprob for entry in told.of(0)[2]] == [entry.logprob for entry in entries(IDS[::-1])]


async def test_another_engine_is_given_them_and_goes_on() -> None:
    told = Told()
    stream = begun(told, n=2)
    feed(stream, IDS[:6], 3)
    submit = stream.submission(8)
    assert submit is not None
    assert submit.prior_token_ids == [pack_ids(IDS[:6]), b""]
    assert submit.prior_logprobs == [values(IDS[:6]), TokenLogprobs(b"")]
    feed(stream, IDS[6:], 2, start=6)
    assert told.of() == (TEXT, IDS, entries(IDS, 2, offsets_of(IDS)))


@pytest.mark.parametrize("from_token", [0, 2, 6])
async def test_attached_again_only_what_is_missing_is_taken(from_token: int) -> None:
    told = Told()
    stream = begun(told)
    feed(stream, IDS[:6])
    rest = IDS[from_token:9]
    stream.attached(
        Attached(
            8, b"s" * 16, b"", pack_ids(PROMPT), from_token, [pack_ids(rest)], [], [values(rest, start=from_token)]
        )
    )
    feed(stream, IDS[9:], start=9)
    assert told.of() == (TEXT, IDS, entries(IDS, 2, offsets_of(IDS)))


async def test_another_gateway_tells_the_same() -> None:
    first = Told()
    submit = begun(first).submission(8)
    assert submit is not None
    told = Told()
    stream = new_stream(told)
    stream.attached(
        Attached(8, b"s" * 16, submit.gateway_state, pack_ids(PROMPT), 0, [pack_ids(IDS[:9])], [], [values(IDS[:9])])
    )
    feed(stream, IDS[9:], start=9)
    assert told.of() == (TEXT, IDS, entries(IDS, 2, offsets_of(IDS)))


async def test_a_missing_one_breaks_the_stream_and_not_the_tokens_meaning() -> None:
    stream = begun(Told())
    stream.logprobs(0, values(IDS[:1]))
    stream.push(0, IDS[:2])
    with pytest.raises(ValueError, match="1 log probabilities came for 2 tokens"):
        stream.flush()


# The prompt's

WORDS = small_tokenizer().decode(PROMPT)


def prompt_entries(num_top: int, offsets: Sequence[int]) -> list[TokenLogprob]:
    return [TokenLogprob(PROMPT[0], None), *entries(PROMPT, num_top, offsets)[1:]]


def feed_prompt(stream: Stream, num_top: int = 2, size: int = 1) -> None:
    for start in range(1, len(PROMPT), size):
        part = PROMPT[start : start + size]
        stream.prompt_logprobs(start, values(part, num_top, start))


@pytest.mark.parametrize("echo_text", [None, "a text of its own"])
async def test_an_echo_comes_first_and_moves_the_offsets(echo_text: str | None) -> None:
    told = Told()
    stream = begun(told, echo=True, prompt_logprobs=2, echo_text=echo_text)
    feed_prompt(stream)
    feed(stream, IDS)
    echo = WORDS if echo_text is None else echo_text
    offsets = [min(len(small_tokenizer().decode(PROMPT[:end])), len(echo)) for end in range(3)]
    own = entries(IDS, 2, [len(echo) + offset for offset in offsets_of(IDS)])
    assert told.of() == (echo + TEXT, IDS, prompt_entries(2, offsets) + own)
    assert told.deltas[0][1].token_ids == () and told.deltas[0][1].prompt_logprobs is None


async def test_offsets_begin_with_the_text_where_the_prompt_is_no_part_of_it() -> None:
    told = Told()
    stream = begun(told, echo_text=WORDS)
    feed(stream, IDS)
    assert told.of() == (TEXT, IDS, entries(IDS, 2, offsets_of(IDS)))
    again = Told()
    taken_up = new_stream(again)
    taken_up.attached(stream.remains())
    assert again.of() == told.of()


async def test_an_echo_without_log_probabilities_stays_on_the_fast_path() -> None:
    told = Told()
    stream = begun(told, echo=True, logprobs=-1)
    ids = small_tokenizer().encode("plain words")
    for token_id in ids:
        stream.push_token(token_id)
    assert told.of()[0] + b"".join(told.pieces).decode() == WORDS + "plain words"
    assert len(told.pieces) == len(ids) - 1


async def test_the_prompts_own_are_told_once_for_each_choice_as_many_as_were_asked_for() -> None:
    told = Told()
    stream = begun(told, n=2, logprobs=-1, prompt_logprobs=2, num_prompt_logprobs=1)
    feed_prompt(stream)
    feed_prompt(stream, size=2)  # after an engine's end they come again
    for choice in (1, 0, 1):
        stream.push(choice, IDS[:1])
        stream.flush()
    assert [(choice, delta.prompt_logprobs) for choice, delta in told.deltas if delta.prompt_logprobs is not None] == [
        (1, prompt_entries(1, ())),
        (0, prompt_entries(1, ())),
    ]


@pytest.mark.parametrize("reason", ["stop", "length"])
async def test_where_only_the_prompt_is_told_no_token_is(reason: str) -> None:
    told = Told()
    stream = begun(told, echo=True, prompt_logprobs=2, is_prompt_only=True, max_tokens=1)
    feed_prompt(stream)
    stream.logprobs(0, values([END]))
    stream.push(0, [END])
    stream.finish(Finished(1, 0, reason, "eos", stop_token_id=END if reason == "stop" else -1))
    stream.flush()
    assert told.of() == (
        WORDS,
        [],
        prompt_entries(2, [len(small_tokenizer().decode(PROMPT[:end])) for end in range(3)]),
    )
    assert told.ends == [Ending("length")] and told.usage == Usage(3, 0)


async def test_who_ends_before_the_prompt_was_read_is_told_nothing_of_it() -> None:
    told = Told()
    stream = begun(told, echo=True, num_prompt_logprobs=1, prompt_logprobs=2)
    stream.finish(Finished(1, 0, "abort", "deadline"))
    stream.flush()
    assert told.deltas == [] and told.ends == [Ending("abort", "deadline")]


async def test_another_gateway_knows_the_prompts_too() -> None:
    submit = begun(Told(), echo=True, prompt_logprobs=2).submission(8)
    assert submit is not None
    told = Told()
    stream = new_stream(told)
    known = values(PROMPT[1:2], start=1)
    stream.attached(Attached(8, b"s" * 16, submit.gateway_state, pack_ids(PROMPT), 0, [b""], prompt_logprobs=known))
    stream.prompt_logprobs(2, values(PROMPT[2:], start=2))
    feed(stream, IDS)
    assert told.of()[0] == WORDS + TEXT
    assert [entry.logprob for entry in told.of()[2][:3]] == [entry.logprob for entry in prompt_entries(2, ())]
