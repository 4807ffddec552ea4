"""Calls as Mistral's models write them: [TOOL_CALLS][{"name": "f", "arguments": {…}}, …], and from 2025 on
[TOOL_CALLS]f[ARGS]{…}[TOOL_CALLS]g[ARGS]{…}, also with [CALL_ID] before [ARGS].
"""

import string
from typing import Final

from gateway.parsers.calls import MAX_NAME_CHARS, CallObject, NamedCall
from gateway.parsers.pieces import SPACE, Pieces
from gateway.parsers.tool_calls import CallOptions, ToolCallParser

ARGUMENTS_MARK: Final = "[ARGS]"
ID_MARK: Final = "[CALL_ID]"
_NAME: Final = frozenset(string.ascii_letters + string.digits + "_-.:/")


class MistralParser(ToolCallParser):
    """Both forms, told apart by what follows the mark."""

    mark = "[TOOL_CALLS]"

    def __init__(self, options: CallOptions) -> None:
        super().__init__(options)
        self._name = ""
        self._inner_mark = ""
        self._id_length = 0
        self._is_list = False

    def finish(self, pieces: Pieces) -> None:
        if self._next == self._in_mark:
            self._held += self._inner_mark
        super().finish(pieces)

    def _open(self) -> None:
        self._name = ""
        self._next = self._head

    def _no_call(self, character: str) -> None:
        self._give_back()
        self._go_on_with_text(character)

    def _head(self, character: str) -> None:
        """Right behind the mark."""
        if character in SPACE:
            self._held += character
        elif character == "[":
            self._held += character
            self._is_list = True
            self._begin_call(CallObject())
        elif character in _NAME:
            self._is_list = False
            self._in_name(character)
        else:
            self._no_call(character)

    def _in_name(self, character: str) -> None:
        if character in _NAME and len(self._name) < MAX_NAME_CHARS:
            self._next = self._in_name
            self._name += character
            self._held += character
        else:
            self._behind_name(character)

    def _behind_name(self, character: str) -> None:
        self._next = self._behind_name
        if character in SPACE:
            self._held += character
        elif character == "{":
            self._begin_call(NamedCall(self._name))
            self._next(character)
        elif character == "[":
            self._inner_mark = character
            self._next = self._in_mark
        else:
            self._no_call(character)

    def _in_mark(self, character: str) -> None:
        mark = self._inner_mark + character
        if not (ARGUMENTS_MARK.startswith(mark) or ID_MARK.startswith(mark)):
            self._give_back()
            self._go_on_with_text(*self._inner_mark, character)
            return
        self._inner_mark = mark
        if mark in (ARGUMENTS_MARK, ID_MARK):
            self._held += mark
            self._inner_mark = ""
            if mark == ARGUMENTS_MARK:
                self._begin_call(NamedCall(self._name))
            else:
                self._id_length = 0
                self._next = self._in_id

    def _in_id(self, character: str) -> None:
        if character in _NAME and self._id_length < MAX_NAME_CHARS:
            self._id_length += 1
            self._held += character
        else:
            self._behind_name(character)

    def _expect_next(self) -> None:
        if self._is_list:
            self._next = self._separator
        else:
            self._go_on_with_text()

    def _separator(self, character: str) -> None:
        """Between the calls of a list."""
        if character in SPACE:
            self._held += character
        elif character == ",":
            self._held += character
            self._begin_call(CallObject())
        elif character == "]":
            self._held = ""
            self._go_on_with_text()
        else:
            self._go_on_with_text(character)
