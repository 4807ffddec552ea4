"""Cursors: what one says is what the client has, and going on from it gives the rest, all of it and once."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cursor import (
    FROM_START,
    Bookmark,
    Cursor,
    Mark,
    at_token,
    parse_cursor,
    parse_event_id,
    parse_stream_id,
)
from streamkv.errors import InvalidField

Event = str
Told = list[tuple[str, Event]]
"""(cursor, event)."""


class Source:
    """A choice as its stream tells it: what one part of its tokens makes depends on nothing but their texts."""

    def __init__(self, choice: int, texts: list[str]) -> None:
        self.choice = choice
        self.texts = texts
        """Of each token. From an a on it is held back until the next a."""
        self.num_read = 0
        self.held = ""

    def tell(self, bookmark: Bookmark[Event], upto: int, ends: bool) -> None:
        """Tokens up to a number in one part, and the end. A part with an x makes an event of its own behind them."""
        text = self.held + "".join(self.texts[self.num_read : upto])
        num_new, self.num_read = upto - self.num_read, upto
        holds = text.count("a") % 2 == 1 and not ends
        shown = text[: text.rindex("a")] if holds else text
        self.held = text[len(shown) :]
        if num_new or shown:
            bookmark.tell(self.choice, num_new, f"{self.choice}:{shown}" if shown else None)
            if "x" in shown:
                bookmark.tell(self.choice, 0, f"{self.choice}:[{shown.count('x')}]")
        if ends:
            bookmark.tell(self.choice, 0, f"{self.choice}.", ends=True)


def placed(bookmark: Bookmark[Event]) -> Told:
    return [(found.cursor.decode(), found.event) for found in bookmark.take()]


def whole(texts: list[list[str]], sizes: list[int], ends_alone: bool) -> Told:
    """A stream's answer, in steps of so many tokens of each choice in turn."""
    bookmark = Bookmark[Event](len(texts))
    sources = [Source(choice, tokens) for choice, tokens in enumerate(texts)]
    told: Told = []
    open_choices = set(range(len(texts)))
    for size in itertools.cycle(sizes):
        for source in sources:
            if source.choice not in open_choices:
                continue
            upto = min(source.num_read + size, len(source.texts))
            is_last = upto == len(source.texts) and not (ends_alone and upto > source.num_read)
            source.tell(bookmark, upto, is_last)
            if is_last:
                open_choices.discard(source.choice)
        told += placed(bookmark)
        if not open_choices:
            break
    bookmark.tell_rest("usage", is_done=False)
    bookmark.tell_rest("done", is_done=True)
    return told + placed(bookmark)


def rest(texts: list[list[str]], known: Cursor) -> Told:
    """What an attached client is told: each choice cut where its mark says, the remainder in one part."""
    bookmark = Bookmark[Event](len(texts), known)
    told: Told = []
    for choice, tokens in enumerate(texts):
        source = Source(choice, tokens)
        for cut in known.mark(choice).cuts:
            source.tell(bookmark, cut, ends=False)
            told += placed(bookmark)
        source.tell(bookmark, len(tokens), ends=True)
        told += placed(bookmark)
    if not known.has_usage:
        bookmark.tell_rest("usage", is_done=False)
    bookmark.tell_rest("done", is_done=True)
    return told + placed(bookmark)


def joined(told: Told, num_choices: int) -> list[str]:
    """The texts, signs and ends of each choice, whatever parts they came in."""
    texts = ["".join(event[2:] for _, event in told if event.startswith(f"{choice}:") and "[" not in event)
             for choice in range(num_choices)]  # fmt: skip
    signs = [
        sum(int(event[3:-1]) for _, event in told if event.startswith(f"{choice}:[")) for choice in range(num_choices)
    ]
    ends = [[event for _, event in told if event == f"{choice}."] for choice in range(num_choices)]
    return [f"{text}|{sign}|{end}" for text, sign, end in zip(texts, signs, ends, strict=True)] + [
        event for _, event in told if event in ("usage", "done")
    ]


TEXTS = st.lists(st.lists(st.sampled_from(["a", "b", "c", "x", "ax", ""]), max_size=8), min_size=1, max_size=3)


@given(TEXTS, st.lists(st.integers(1, 4), min_size=1, max_size=4), st.booleans())
def test_whatever_a_client_has_it_gets_the_rest_once(
    texts: list[list[str]], sizes: list[int], ends_alone: bool
) -> None:
    told = whole(texts, sizes, ends_alone)
    for number in range(len(told)):
        had = told[: number + 1]
        known = parse_cursor(had[-1][0], "cursor")
        again = [] if known.is_done else rest(texts, known)
        assert joined(had + again, len(texts)) == joined(told, len(texts))


@given(TEXTS, st.lists(st.integers(1, 4), min_size=1, max_size=4), st.booleans())
def test_a_client_may_be_cut_again_while_it_catches_up(
    texts: list[list[str]], sizes: list[int], ends_alone: bool
) -> None:
    had: Told = []
    cursor = FROM_START
    for number in itertools.count():
        told = whole(texts, sizes, ends_alone) if cursor is FROM_START else rest(texts, cursor)
        had += told[: 1 + number % 2]
        cursor = parse_cursor(had[-1][0], "cursor")
        if cursor.is_done:
            break
    assert joined(had, len(texts)) == joined(whole(texts, sizes, ends_alone), len(texts))


def test_an_entry_stands_for_all_events_of_its_tokens_only_with_the_last_of_them() -> None:
    bookmark = Bookmark[Event](2)
    bookmark.open(0, "role")
    bookmark.tell(0, 2, "one")
    bookmark.tell(0, 0, "two")
    bookmark.tell(1, 1, None)
    assert placed(bookmark) == [("0,-", "role"), ("0~2.1,-", "one"), ("2,-", "two")]
    bookmark.tell(1, 1, "held back until now")
    bookmark.tell(0, 0, "end", ends=True)
    assert placed(bookmark) == [("2,2", "held back until now"), ("2e,2", "end")]
    bookmark.tell(1, 1, "last")
    bookmark.tell(1, 0, "end", ends=True)
    bookmark.tell_rest("usage", is_done=False)
    bookmark.tell_rest("[DONE]", is_done=True)
    assert [cursor for cursor, _ in placed(bookmark)] == ["2e,2~1e.1", "2e,3e", "2e,3e,u", "2e,3e,d"]


def test_an_end_that_is_only_this_connections_is_no_end_for_who_attaches() -> None:
    bookmark = Bookmark[Event](1)
    bookmark.tell(0, 3, "text")
    bookmark.tell(0, 0, "taken over")
    bookmark.tell_rest("[DONE]", is_done=True)
    assert [cursor for cursor, _ in placed(bookmark)] == ["0~3.1", "3", "3"]


def test_one_number_holds_for_every_choice() -> None:
    cursor = at_token(5, "from_token")
    cursor.check_choices(7)
    assert cursor.mark(6) == Mark(5)
    with pytest.raises(InvalidField, match="from_token: is at token 5 of choice 1, which has 4 so far"):
        cursor.check_tokens([5, 4])


def test_a_cursor_beyond_the_answer_is_refused() -> None:
    cursor = parse_cursor("3,2~1.1", "Last-Event-ID")
    cursor.check_choices(2)
    cursor.check_tokens([3, 3])
    with pytest.raises(InvalidField, match="entries for 2 choices, but this stream has 1"):
        cursor.check_choices(1)
    with pytest.raises(InvalidField, match="token 3 of choice 1, which has 2"):
        cursor.check_tokens([3, 2])
    ended = parse_cursor("3e,2~1e.1", "Last-Event-ID")
    ended.check_ends([True, True], [3, 3])
    ended.check_ends([True, True], [None, None])
    with pytest.raises(InvalidField, match="the end of choice 1, which has not ended"):
        ended.check_ends([True, False], [3, None])
    with pytest.raises(InvalidField, match="Last-Event-ID: has the end of choice 1 at token 3, but it came at 8"):
        ended.check_ends([True, True], [3, 8])


def test_events_that_there_are_not_cost_no_later_ones() -> None:
    """12 events of token 3 are claimed, which had one."""
    bookmark = Bookmark[str](1, parse_cursor("2~1.12", "cursor"))
    for num_tokens in (2, 1, 1):
        bookmark.tell(0, num_tokens, f"with {num_tokens}")
        bookmark.take()
    bookmark.tell(0, 1, "the next")
    assert [(each.cursor, each.event) for each in bookmark.take()] == [(b"5", "the next")]


@pytest.mark.parametrize(
    "text",
    ["", ",", "x", "1,", "1,,2", "-1", "+1", "1.5", "1E", "1~1", "1~1.0", "1~.1", "e", "u", "1,d", "1u", "1e,u,d", "1 ",
     "1e,d,2", "9" * 11, "2147483648", "2147483647~1.1", "1~1.12345", "\u0661", "1\n", "1," * 5000 + "1"],
)  # fmt: skip
def test_what_is_no_cursor_is_refused(text: str) -> None:
    with pytest.raises(InvalidField, match=r"^cursor: "):
        parse_cursor(text, "cursor")


@pytest.mark.parametrize("cursor", ["12", "12,7e", "-", "3~2.1", "", "9" * 100])
def test_an_events_id_in_a_cursors_place_is_told_where_it_goes(cursor: str) -> None:
    text = f"00112233445566778899aabbccddeeff.{cursor}"
    with pytest.raises(InvalidField) as refused:
        parse_cursor(text, "cursor")
    told = str(refused.value)
    assert told.startswith("cursor: ") and "is an event's id" in told and "Last-Event-ID" in told
    assert "behind its first dot" in told


@given(st.text(max_size=40))
def test_any_text_is_a_cursor_or_refused(text: str) -> None:
    try:
        cursor = parse_cursor(text, "cursor")
    except InvalidField:
        return
    assert len(cursor.marks) == len([entry for entry in text.split(",") if entry not in ("u", "d")])


def test_an_events_id_has_stream_and_cursor() -> None:
    stream_id, cursor = parse_event_id(" 00112233445566778899aabbccddeeff.12,7e ", "Last-Event-ID")
    assert stream_id == bytes.fromhex("00112233445566778899aabbccddeeff")
    assert cursor.marks == (Mark(12), Mark(7, ends=True)) and cursor.field == "Last-Event-ID"
    for text in ("", "7", "00112233445566778899aabbccddeeff", "00112233445566778899AABBCCDDEEFF.1", "zz.1", ".1"):
        with pytest.raises(InvalidField, match=r"^Last-Event-ID: "):
            parse_event_id(text, "Last-Event-ID")
    for value in ("", 5, None, "0" * 31, "0" * 33, "O" * 32):
        with pytest.raises(InvalidField, match=r"^stream_id: "):
            parse_stream_id(value, "stream_id")
