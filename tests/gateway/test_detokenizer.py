"""Deltas joined are the whole text; none ends inside a character; no stop string leaks."""

import itertools
import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.detokenizer import Detokenizer, StopMatcher
from gateway.tokenizer import Tokenizer, json_inside
from tests.support.small_tokenizers import train_byte_fallback, train_byte_level, train_metaspace, write_folder

KINDS = {"bytes": train_byte_level, "byte_fallback": train_byte_fallback, "window": train_metaspace}
HARD_TEXTS = [
    "naïve café — 中文, 日本語, 한국어",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200d\ufeff",
    "a\x00b\r\n\t\x1b[0m",
    "   leading and trailing   ",
    "\ufffd is a character, too",
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    made = {kind: Tokenizer.load(write_folder(tmp_path_factory.mktemp(kind), train())) for kind, train in KINDS.items()}
    assert {kind: tokenizer.vocabulary.style for kind, tokenizer in made.items()} == {kind: kind for kind in KINDS}
    return made


@pytest.fixture(scope="module")
def bytes_kind(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["bytes"]


def deltas_of(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*map(detokenizer.push, ids), detokenizer.finish()]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token per byte."""
    by_piece = {piece: token_id for token_id, piece in reversed(list(enumerate(tokenizer.vocabulary.pieces)))}
    return [by_piece[bytes([byte])] for byte in data]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_deltas_of_any_ids_joined_are_the_whole_decode(
    tokenizers: dict[str, Tokenizer], kind: str, skip: bool, data: st.DataObject
) -> None:
    tokenizer = tokenizers[kind]
    # Mostly the first ids: special tokens, single bytes, half characters
    last = tokenizer.vocab_size - 1
    token = st.one_of(st.integers(0, last), st.integers(0, min(last, 259)))
    ids = data.draw(st.lists(token, max_size=40))
    deltas = deltas_of(Detokenizer(tokenizer, skip_special_tokens=skip), ids)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", HARD_TEXTS)
def test_deltas_of_a_text_joined_are_the_whole_decode(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    if kind == "window":
        text = "".join(character for character in text if character.isascii() and character.isalpha())
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    deltas = deltas_of(Detokenizer(tokenizer), ids)
    assert "".join(deltas) == whole
    assert kind == "window" or whole == text
    for num in range(len(deltas)):
        assert whole.startswith("".join(deltas[:num]))


@given(st.binary(max_size=24).map(lambda data: bytes(byte for byte in data if byte not in (4, 6, 0xF1, 0xF2))))
@settings(max_examples=150)
def test_bytes_that_are_no_text_become_the_replacement_characters_of_the_whole(
    bytes_kind: Tokenizer, data: bytes
) -> None:
    ids = byte_ids(bytes_kind, data)
    joined = "".join(deltas_of(Detokenizer(bytes_kind), ids))
    assert joined == data.decode("utf-8", "replace") == bytes_kind.decode(ids)


def test_a_character_of_several_tokens_comes_with_its_last(bytes_kind: Tokenizer) -> None:
    ids = byte_ids(bytes_kind, "a😀é".encode())
    assert deltas_of(Detokenizer(bytes_kind), ids) == ["a", "", "", "", "😀", "", "é", ""]


@pytest.mark.parametrize(("kind", "ending"), [("bytes", "\ufffd"), ("byte_fallback", "\ufffd\ufffd\ufffd")])
def test_an_incomplete_character_ends_as_in_the_whole_decode(
    tokenizers: dict[str, Tokenizer], kind: str, ending: str
) -> None:
    tokenizer = tokenizers[kind]
    ids = byte_ids(tokenizer, "😀".encode()[:3])
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(token_id) for token_id in ids] == ["", "", ""]
    assert not detokenizer.can_take_whole_piece
    assert detokenizer.finish() == ending == tokenizer.decode(ids)


def test_special_tokens_are_skipped_or_shown(bytes_kind: Tokenizer) -> None:
    half = byte_ids(bytes_kind, "é".encode())
    ids = [half[0], 2, half[1]]
    assert "".join(deltas_of(Detokenizer(bytes_kind), ids)) == "é" == bytes_kind.decode(ids)
    shown = "".join(deltas_of(Detokenizer(bytes_kind, skip_special_tokens=False), ids))
    assert shown == "\ufffd<|im_end|>\ufffd" == bytes_kind.decode(ids, skip_special_tokens=False)


def test_the_first_space_is_kept_after_a_prompt_and_dropped_without_one(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_fallback"]
    ids = tokenizer.encode("the dog", add_special_tokens=False)
    assert "".join(deltas_of(Detokenizer(tokenizer), ids)) == "the dog"
    assert "".join(deltas_of(Detokenizer(tokenizer, prompt_ids=[1]), ids)) == " the dog"


@pytest.mark.parametrize("kind", ["bytes", "byte_fallback"])
@given(data=st.data())
def test_taking_whole_pieces_gives_the_same_text(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    detokenizer = Detokenizer(tokenizer)
    json_pieces = tokenizer.vocabulary.json_pieces
    text = b""
    can_take = detokenizer.can_take_whole_piece
    for token_id in ids:
        piece = json_pieces[token_id]
        if can_take and piece is not None:
            text += piece
            detokenizer.num_tokens_shown += 1
        else:
            text += json_inside(detokenizer.push(token_id))
            can_take = detokenizer.can_take_whole_piece
    assert json.loads(b'"' + text + b'"') + detokenizer.finish() == tokenizer.decode(ids)
    assert detokenizer.num_tokens_shown == len(ids)


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the stop string that is complete first ends; the longest of several."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


def could_become_a_stop(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of text that is the beginning of a stop string."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


@given(
    text=st.text("ab<é", max_size=30),
    stops=st.lists(st.text("ab<é", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
)
@settings(max_examples=200)
def test_the_first_complete_stop_string_cuts_the_text_and_nothing_of_it_leaks(
    bytes_kind: Tokenizer, text: str, stops: list[str], include: bool
) -> None:
    ids = byte_ids(bytes_kind, text.encode())
    detokenizer = Detokenizer(bytes_kind, stop=stops, include_stop_str_in_output=include)
    expected = first_stop(text, stops)
    shown = ""
    for index, token_id in enumerate(ids):
        shown += detokenizer.push(token_id)
        come = bytes(byte for i in ids[: index + 1] for byte in bytes_kind.vocabulary.pieces[i]).decode(errors="ignore")
        if detokenizer.stopped is None:
            # Nothing that could still be cut is shown, and nothing else is held back
            assert shown == come[: len(come) - could_become_a_stop(come, stops)]
    shown += detokenizer.finish()
    if expected is None:
        assert (detokenizer.stopped, shown) == (None, text)
        assert detokenizer.num_tokens_shown == len(ids)
    else:
        end, stop = expected
        assert detokenizer.stopped == stop
        assert shown == text[: end if include else end - len(stop)]
        assert detokenizer.num_tokens_shown == len(text[:end].encode())


@given(
    text=st.text("ab<", max_size=30),
    stops=st.lists(st.text("ab<", min_size=1, max_size=5), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_the_outcome_does_not_depend_on_where_tokens_end(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    matcher = StopMatcher(stops)
    found = None
    for begin, end in itertools.pairwise(edges):
        if (result := matcher.feed(text[begin:end])) is not None:
            found = (end - result[1], result[0])
            break
    assert found == first_stop(text, stops)


def test_tokens_after_a_stop_string_are_not_shown_and_not_counted(bytes_kind: Tokenizer) -> None:
    detokenizer = Detokenizer(bytes_kind, stop=["END"])
    assert not detokenizer.can_take_whole_piece
    deltas = deltas_of(detokenizer, byte_ids(bytes_kind, b"the END of it"))
    assert "".join(deltas) == "the "
    assert detokenizer.stopped == "END"
    assert detokenizer.num_tokens_shown == 7


def test_an_end_that_might_have_become_a_stop_string_is_shown_at_last(bytes_kind: Tokenizer) -> None:
    detokenizer = Detokenizer(bytes_kind, stop=["END"])
    assert "".join(map(detokenizer.push, byte_ids(bytes_kind, b"the EN"))) == "the "
    assert detokenizer.finish() == "EN"
    assert detokenizer.finish() == ""


def test_choices_share_their_stop_strings_and_no_more(bytes_kind: Tokenizer) -> None:
    stops = [chr(0x100 + number) * 1024 for number in range(16)]
    first = Detokenizer(bytes_kind, stop=stops)
    tracemalloc.start()
    choices = [Detokenizer(bytes_kind, stop=stops) for _ in range(64)]
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes < 1024 * 1024, "one set of these strings alone takes over 4 MiB"
    half = byte_ids(bytes_kind, ("\u0100" * 512).encode())
    assert "".join(map(first.push, half)) == "" and first.num_held_chars == 512
    assert [choice.num_held_chars for choice in choices] == [0] * 64
    for choice in choices[:2]:
        assert "".join(map(choice.push, half)) == "" and choice.stopped is None
    for token_id in half:
        first.push(token_id)
    assert first.stopped == stops[0] and choices[0].stopped is None


def test_stop_strings_complete_within_min_tokens_do_not_count(bytes_kind: Tokenizer) -> None:
    for min_tokens, shown in ((0, "a"), (1, "a"), (2, "ab.ab"[:4]), (5, "ab.ab.ab"[:7])):
        detokenizer = Detokenizer(bytes_kind, stop=["b"], min_tokens=min_tokens)
        assert "".join(deltas_of(detokenizer, byte_ids(bytes_kind, b"ab.ab.ab.ab"))) == shown


def test_a_stop_string_is_found_across_token_borders(tmp_path: Path, bytes_kind: Tokenizer) -> None:
    ids = bytes_kind.encode("the quick brown fox")
    assert any(len(bytes_kind.vocabulary.pieces[token_id]) > 2 for token_id in ids)
    detokenizer = Detokenizer(bytes_kind, stop=["k bro"])
    assert "".join(deltas_of(detokenizer, ids)) == "the quic"


def test_sixteen_long_stop_strings_cost_about_the_same_per_token_as_one(bytes_kind: Tokenizer) -> None:
    """Each character takes one step however many strings there are: counted, not timed."""
    stops = [f"{index:02}" + "a" * 1000 for index in range(16)]
    matcher = StopMatcher(stops)
    num_steps = 0
    step = matcher._step

    def counted(state: int, character: str) -> int:
        nonlocal num_steps
        num_steps += 1
        return step(state, character)

    matcher._step = counted  # type: ignore[method-assign]
    matcher.feed("0" * 1000 + "a" * 1000)
    assert num_steps == 2000
