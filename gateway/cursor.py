"""Where a client stands in an answer: the cursor that goes out with its events, and comes back when it attaches.

A cursor has an entry for each choice, in order, with commas between them:

    -         nothing of it
    12        every event of its first 12 tokens; held-back text belongs to the token that sets it free
    12e       every event of it, its end included
    12~1.1    of the events that took it from 12 tokens to 13, the first
    12~1e.1   the same where those events end it

and behind them `u` when the usage was told, `d` when `[DONE]` was. An event's id is the stream's id in hex, a dot, and
the cursor that holds once the event has arrived.

An attached stream is fed to its outlet again from the first token, cut where the entry says; so what the outlet makes
of it is what it made before, and a `Bookmark` passes over the events that the client has.
"""

import re
from collections.abc import Sequence
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec

from streamkv.errors import InvalidField
from streamkv.protocol import STREAM_ID_BYTES

_ENTRY: Final = re.compile(
    r"(?P<tokens>[0-9]{1,10})(?:(?P<over>e)|~(?P<more>[0-9]{1,10})(?P<ends>e?)\.(?P<events>[0-9]{1,4}))?"
)
_STREAM_ID: Final = re.compile(rf"[0-9a-f]{{{2 * STREAM_ID_BYTES}}}")
_MAX_CHARS: Final = 8192
_MAX_TOKENS: Final = 2**31 - 1


class Mark(msgspec.Struct, frozen=True):
    """What a client has of one choice."""

    num_tokens: int = 0
    """It has every event of the first so many."""
    has_begun: bool = True
    """It has the event without a token that comes first, where there is one."""
    num_more: int = 0
    """The tokens of the events behind those, of which it has the first `num_events`."""
    num_events: int = 0
    ends: bool = False
    """Those events end the choice; with no such events: it has the end."""

    @property
    def has_all(self) -> bool:
        return self.ends and not self.num_events

    @property
    def cuts(self) -> tuple[int, ...]:
        """Numbers of tokens up to which the choice is fed to its outlet in a part of its own. Events that end it come
        with all the tokens that are left."""
        if self.num_events and not self.ends:
            return (self.num_tokens, self.num_tokens + self.num_more)
        return (self.num_tokens,)


NOTHING: Final = Mark(has_begun=False)


class Cursor(msgspec.Struct, frozen=True):
    """What a client has of an answer. `field` is where it said so."""

    marks: tuple[Mark, ...] = (NOTHING,)
    is_for_all: bool = False
    """The one mark is that of every choice, however many there are."""
    has_usage: bool = False
    is_done: bool = False
    field: str = "cursor"

    def mark(self, choice: int) -> Mark:
        return self.marks[0 if self.is_for_all else choice]

    def check_choices(self, num_choices: int) -> None:
        """Raises InvalidField when the stream has another number of choices."""
        if not self.is_for_all and len(self.marks) != num_choices:
            raise InvalidField(
                self.field, f"has entries for {len(self.marks)} choices, but this stream has {num_choices}"
            )

    def check_tokens(self, num_tokens: Sequence[int]) -> None:
        """num_tokens: of each choice, as far as they are known. Raises InvalidField for a place beyond them."""
        for choice, num_here in enumerate(num_tokens):
            mark = self.mark(choice)
            num_told = mark.num_tokens + mark.num_more
            if num_told > num_here:
                raise InvalidField(
                    self.field, f"is at token {num_told} of choice {choice}, which has {num_here} so far"
                )

    def check_ends(self, has_ended: Sequence[bool], ends_at: Sequence[int | None]) -> None:
        """Raises InvalidField when it has the end of a choice that goes on, or has it at another token. ends_at: the
        number of tokens with which a choice ended; None where different clients may have been told different ones."""
        for choice, (is_over, num_at_end) in enumerate(zip(has_ended, ends_at, strict=True)):
            mark = self.mark(choice)
            if mark.ends and not is_over:
                raise InvalidField(self.field, f"has the end of choice {choice}, which has not ended")
            num_told = mark.num_tokens + mark.num_more
            if mark.ends and num_at_end is not None and num_told != num_at_end:
                raise InvalidField(
                    self.field, f"has the end of choice {choice} at token {num_told}, but it came at {num_at_end}"
                )


FROM_START: Final = Cursor(is_for_all=True)


def at_token(num_tokens: int, field: str) -> Cursor:
    """Every choice's events up to this token."""
    return Cursor((Mark(num_tokens, has_begun=num_tokens > 0),), is_for_all=True, field=field)


def parse_cursor(text: str, field: str) -> Cursor:
    """Raises InvalidField."""
    if len(text) > _MAX_CHARS:
        raise InvalidField(field, f"must have at most {_MAX_CHARS} characters")
    name, dot, _ = text.strip().partition(".")
    if dot and _STREAM_ID.fullmatch(name):
        raise InvalidField(
            field,
            f"{text[:60]!r} is an event's id: if it is of this stream, the cursor is what stands behind its first dot; "
            "over SSE the whole id may go into the header Last-Event-ID",
        )
    entries = text.split(",")
    last = entries[-1]
    if last in ("u", "d"):
        entries.pop()
    marks = tuple(_parse_entry(entry, field) for entry in entries)
    if not marks or (last in ("u", "d") and not all(mark.has_all for mark in marks)):
        raise _malformed(field, text)
    return Cursor(marks, has_usage=last in ("u", "d"), is_done=last == "d", field=field)


def parse_event_id(text: str, field: str) -> tuple[bytes, Cursor]:
    """An event's id → (stream id, cursor). Raises InvalidField."""
    name, dot, cursor = text.strip().partition(".")
    if not dot or not _STREAM_ID.fullmatch(name):
        raise InvalidField(field, "must be the id of an event of this server's: 32 hex digits, a dot and a cursor")
    return bytes.fromhex(name), parse_cursor(cursor, field)


def parse_stream_id(text: object, field: str) -> bytes:
    """Raises InvalidField."""
    if not isinstance(text, str) or not _STREAM_ID.fullmatch(text):
        raise InvalidField(field, "must be a stream's id: 32 hex digits, in lower case")
    return bytes.fromhex(text)


def _parse_entry(entry: str, field: str) -> Mark:
    if entry == "-":
        return NOTHING
    found = _ENTRY.fullmatch(entry)
    if found is None:
        raise _malformed(field, entry)
    num_tokens, num_more = int(found["tokens"]), int(found["more"] or 0)
    num_events = int(found["events"] or 0)
    if num_tokens + num_more > _MAX_TOKENS or (found["events"] is not None and not num_events):
        raise _malformed(field, entry)
    return Mark(num_tokens, num_more=num_more, num_events=num_events, ends=bool(found["over"] or found["ends"]))


def _malformed(field: str, text: str) -> InvalidField:
    return InvalidField(
        field,
        f"{text[:60]!r} is no cursor: it has a number of tokens for each choice, as `12` or `12,7e`, as they came",
    )


Event = TypeVar("Event")


class Placed(NamedTuple, Generic[Event]):
    """An event, and where its client stands once it has come."""

    cursor: bytes
    entry: bytes
    """Of the event's choice alone."""
    event: Event


class Bookmark(Generic[Event]):
    """Places the events of one answer, in the order in which they are told, and passes over those that its client has.

    Events are gathered until `take`, since only the last of those that come together stands for their tokens: the
    events of a choice between two takes are one group. Where the client has every event of a group's tokens, none of
    it is placed.
    """

    def __init__(self, num_choices: int, known: Cursor = FROM_START) -> None:
        self.num_tokens = [0] * num_choices
        """Of each choice, handed in so far."""
        self._known = known
        marks = [known.mark(choice) for choice in range(num_choices)]
        self._entries = [_entry(mark) for mark in marks]
        self._num_to_pass = [mark.num_events for mark in marks]
        self._placed: list[Placed[Event]] = []
        self._choice = -1
        """Whose group it is; -1: there is none."""
        self._start = 0
        """Its tokens before the group."""
        self._group: list[Event | None] = []
        """None for one that is passed over."""
        self._ends = False
        self._is_known = False

    def open(self, choice: int, event: Event) -> None:
        """A choice's first event, which has no token."""
        self._close_group()
        self._place(choice, b"0", event)

    def tell(self, choice: int, num_new: int, event: Event | None, ends: bool = False) -> None:
        """An event with `num_new` more tokens of a choice; None: they make no event. ends: it ends the choice, and
        whoever attaches would find it ended."""
        if choice != self._choice:
            self._close_group()
            self._choice, self._start = choice, self.num_tokens[choice]
        mark = self._known.mark(choice)
        self.num_tokens[choice] += num_new
        self._ends = self._ends or ends
        num_tokens = self.num_tokens[choice]
        if mark.has_all or num_tokens < mark.num_tokens or (num_new > 0 and num_tokens == mark.num_tokens):
            self._is_known = True
        if event is None:
            return
        if self._is_known:
            self._group.append(None)
        elif self._num_to_pass[choice]:
            self._num_to_pass[choice] -= 1
            self._group.append(None)
        else:
            self._group.append(event)

    def tell_rest(self, event: Event, is_done: bool) -> None:
        """The usage, or `[DONE]`, which come when all choices have ended."""
        self._close_group()
        cursor = b",".join(self._entries)
        if all(entry.endswith(b"e") for entry in self._entries):
            cursor += b",d" if is_done else b",u"
        self._placed.append(Placed(cursor, b"", event))

    def take(self) -> list[Placed[Event]]:
        """What was told since the last take."""
        self._close_group()
        placed, self._placed = self._placed, []
        return placed

    def _close_group(self) -> None:
        choice = self._choice
        if choice < 0:
            return
        num_tokens = self.num_tokens[choice]
        group = b"%d~%d%b" % (self._start, num_tokens - self._start, b"e" if self._ends else b"")
        for number, event in enumerate(self._group, start=1):
            if event is None:
                continue
            if number < len(self._group):
                self._place(choice, b"%b.%d" % (group, number), event)
            else:
                self._place(choice, b"%de" % num_tokens if self._ends else b"%d" % num_tokens, event)
        if num_tokens > self._known.mark(choice).num_tokens:
            self._num_to_pass[choice] = 0  # whoever says that it has more events than there are loses no later ones
        self._choice = -1
        self._group = []
        self._ends = self._is_known = False

    def _place(self, choice: int, entry: bytes, event: Event) -> None:
        self._entries[choice] = entry
        self._placed.append(Placed(b",".join(self._entries), entry, event))


def _entry(mark: Mark) -> bytes:
    """As a client says it."""
    if not mark.has_begun:
        return b"-"
    if mark.num_events:
        return b"%d~%d%b.%d" % (mark.num_tokens, mark.num_more, b"e" if mark.ends else b"", mark.num_events)
    return b"%de" % mark.num_tokens if mark.ends else b"%d" % mark.num_tokens
