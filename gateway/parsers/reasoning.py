"""Text → what the model thought, and its answer: <think>…</think> at the beginning of a text.

A template may have written <think> itself: then the text begins inside. Thoughts that are never closed stay thoughts.
White space around both marks is not shown. Marks further on in the answer are text.
"""

from typing import Final

from gateway.parsers.pieces import SPACE, Pieces

BEGIN_MARK: Final = "<think>"
END_MARK: Final = "</think>"


class ReasoningParser:
    """One choice's text, one character after the other as in tool_calls."""

    def __init__(self, is_open: bool) -> None:
        """is_open: the prompt ends inside of thoughts."""
        self._is_open = is_open
        self._next = self._start
        self._held = ""
        self._mark = ""
        """The beginning of a mark."""
        self._content: list[str] = []
        self._pieces = Pieces()
        self._has_begun = False
        self.is_over = False
        """All that comes is the answer."""

    def feed(self, text: str, pieces: Pieces) -> str:
        """Read on; thoughts are added to pieces, and what belongs to the answer is returned."""
        if self.is_over:
            return text
        self._pieces = pieces
        position = 0
        while position < len(text) and not self.is_over:
            if self._next == self._thoughts and not self._mark and text[position] != END_MARK[0]:
                end = text.find(END_MARK[0], position)
                position, segment = (len(text), text[position:]) if end < 0 else (end, text[position:end])
                thought = segment.rstrip(SPACE)
                if thought:
                    self._think(self._held + thought)
                    self._held = segment[len(thought) :]
                else:
                    self._held += segment
            else:
                self._next(text[position])
                position += 1
        return self._take_content() + text[position:]

    def finish(self, pieces: Pieces) -> str:
        """The text is over. The beginning of an end mark is not shown."""
        self._pieces = pieces
        held, self._held = self._held + self._mark, ""
        if self._next == self._start and held:
            if self._is_open:
                self._think(held)
            else:
                self._content.append(held)
        self._mark = ""
        return self._take_content()

    def _take_content(self) -> str:
        text = "".join(self._content)
        self._content.clear()
        return text

    def _start(self, character: str) -> None:
        """Nothing but white space has come, and perhaps a part of the mark."""
        if BEGIN_MARK.startswith(self._mark + character):
            self._mark += character
            if self._mark == BEGIN_MARK:
                self._held = self._mark = ""
                self._next = self._thoughts
        elif character in SPACE and not self._mark:
            self._held += character
        elif self._is_open:
            text, self._held, self._mark = self._mark + character, "", ""
            self._next = self._thoughts
            for each in text:
                self._next(each)
        else:
            self._content.append(self._held + self._mark + character)
            self._held = self._mark = ""
            self.is_over = True

    def _thoughts(self, character: str) -> None:
        if END_MARK.startswith(self._mark + character):
            self._mark += character
            if self._mark == END_MARK:
                self._held = self._mark = ""
                self._next = self._behind
            return
        if self._mark:
            self._think(self._held + self._mark)
            self._held = self._mark = ""
            self._thoughts(character)
        elif character in SPACE:
            self._held += character
        else:
            self._think(self._held + character)
            self._held = ""

    def _think(self, text: str) -> None:
        self._pieces.reasoning.append(text if self._has_begun else text.lstrip(SPACE))
        self._has_begun = True

    def _behind(self, character: str) -> None:
        if character not in SPACE:
            self._content.append(character)
            self.is_over = True
