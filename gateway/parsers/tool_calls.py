"""Text → content and calls: what the formats have in common. Every parser goes through its text one character after
the other, so where the text was cut on its way makes no difference, and after each character all is handed on that
is certain.

    let me look ⎵ <tool_call> {"name": "f", "arguments": {"x": 1}} </tool_call>
    content       held until a call has begun ───────────┘└ as it comes

What was held and turns out to be no call is content again. What breaks a call that has begun ends it there, and is
content from that character on. White space around calls is not shown.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Final

import msgspec

from gateway.parsers.calls import Call
from gateway.parsers.json_scanner import PLAIN_RUN
from gateway.parsers.pieces import SPACE, CallPiece, Pieces

_NOT_SHOWN: Final = -1


class CallOptions(msgspec.Struct, array_like=True, frozen=True):
    """What a parser must know of its request. Part of a stream's state: fields may only be added at the end."""

    names: tuple[str, ...] = ()
    """The functions that may be called."""
    parallel: bool = True
    """False: only the first call is shown."""


class ToolCallParser(ABC):
    """One choice's text. Costs about 1 µs a character of a call, much less for other text."""

    mark: ClassVar[str]
    """Begins calls. Its first character comes in it only once."""

    def __init__(self, options: CallOptions) -> None:
        self._options = options
        self._next = self._text
        self._num_matched = 0
        """Characters of the mark that have come."""
        self._held = ""
        """White space, or the beginning of a call; content if nothing comes of it."""
        self._call: Call | None = None
        self._index = _NOT_SHOWN
        """Of the call that has begun."""
        self._num_begun = 0
        self.num_complete = 0
        """Calls whose arguments are whole, shown or not."""
        self._has_content = False
        self._follows_call = False
        """Nothing but white space came since the last call."""
        self._is_behind_call = False
        """What is held stands around calls, and belongs to none."""
        self._pieces = Pieces()

    def feed(self, text: str, pieces: Pieces) -> None:
        """Read on; what is certain now is added to pieces."""
        self._pieces = pieces
        position = 0
        while position < len(text):
            if self._call is not None and self._call.in_string and (run := PLAIN_RUN.match(text, position)):
                self._call.take_run(run.group())
                self._show_arguments()
                position = run.end()
            elif self._next == self._text and not self._num_matched and text[position] != self.mark[0]:
                end = text.find(self.mark[0], position)
                position, segment = (len(text), text[position:]) if end < 0 else (end, text[position:end])
                shown = segment.rstrip(SPACE)
                self._held += segment
                if shown:
                    space = segment[len(shown) :]
                    self._held = self._held.removesuffix(space) if space else self._held
                    self._give_back()
                    self._held = space
            else:
                self._next(text[position])
                position += 1

    def finish(self, pieces: Pieces) -> None:
        """The text is over."""
        self._pieces = pieces
        if self._next == self._text:
            self._held += self.mark[: self._num_matched]
            if self._num_matched or not self._follows_call:
                self._give_back()
        elif not self._is_behind_call:
            self._give_back()
        self._held = ""

    # Text between calls

    def _text(self, character: str) -> None:
        if self._num_matched:
            if character == self.mark[self._num_matched]:
                self._num_matched += 1
                if self._num_matched == len(self.mark):
                    self._num_matched = 0
                    self._held += self.mark
                    self._open()
                return
            self._held += self.mark[: self._num_matched]
            self._num_matched = 0
            self._give_back()
        if character == self.mark[0]:
            self._num_matched = 1
        else:
            self._held += character
            if character not in SPACE:
                self._give_back()

    def _give_back(self) -> None:
        """What is held is content after all."""
        held, self._held = self._held, ""
        if self._follows_call and not self._has_content:
            held = held.lstrip(SPACE)
        if held:
            self._follows_call = False
            self._has_content = True
            self._pieces.content.append(held)

    def _go_on_with_text(self, *characters: str) -> None:
        self._call = None
        self._is_behind_call = False
        self._next = self._text
        for character in characters:
            self._next(character)

    # A call

    @abstractmethod
    def _open(self) -> None:
        """The mark has come."""

    def _begin_call(self, call: Call) -> None:
        """What comes now is read by `call`."""
        self._call = call
        self._is_behind_call = False
        self._index = _NOT_SHOWN
        self._next = self._in_call

    def _in_call(self, character: str) -> None:
        call = self._call
        assert call is not None
        had_begun, was_complete = call.has_begun, call.is_complete
        if not call.take(character):
            if call.is_complete:
                self._after_call()
                self._next(character)
            else:  # not begun: it was none. Begun: it breaks off here
                if not had_begun:
                    self._give_back()
                self._follows_call = False
                self._go_on_with_text(character)
            return
        if not call.has_begun:
            self._held += character
            return
        if not had_begun:
            self._held = ""
            self._index = self._num_begun
            self._num_begun += 1
            if self._is_shown:
                self._pieces.calls.append(CallPiece(self._index, call.name))
        self._show_arguments()
        if call.is_complete and not was_complete:
            self.num_complete += 1
        if call.is_closed:
            self._after_call()

    @property
    def _is_shown(self) -> bool:
        return self._options.parallel or self._index == 0

    def _show_arguments(self) -> None:
        assert self._call is not None
        text = self._call.new_arguments()
        if text and self._is_shown:
            self._pieces.add_arguments(self._index, text)

    def _after_call(self) -> None:
        """A call is whole."""
        self._call = None
        self._follows_call = self._is_behind_call = True
        self._expect_next()

    @abstractmethod
    def _expect_next(self) -> None:
        """Say what may follow a call."""
