"""One JSON object as it comes, character by character: where it ends, and the first character that breaks it."""

import re
from collections.abc import Mapping
from typing import Final

from gateway.parsers.pieces import SPACE

PLAIN_RUN: Final = re.compile(r'[^"\\\x00-\x1f]+')
"""What changes nothing inside a string."""
_DIGITS: Final = "0123456789"
_ESCAPES: Final = '"\\/bfnrt'
_LITERALS: Final[Mapping[str, str]] = {"t": "true", "f": "false", "n": "null"}


def _steps(*rules: tuple[str, str]) -> Mapping[str, str]:
    return {character: state for characters, state in rules for character in characters}


# What has been read of a number → what may come → what has been read then
_NUMBER: Final[Mapping[str, Mapping[str, str]]] = {
    "": _steps(("-", "minus"), ("0", "zero"), ("123456789", "whole")),
    "minus": _steps(("0", "zero"), ("123456789", "whole")),
    "zero": _steps((".", "point"), ("eE", "e")),
    "whole": _steps((_DIGITS, "whole"), (".", "point"), ("eE", "e")),
    "point": _steps((_DIGITS, "fraction")),
    "fraction": _steps((_DIGITS, "fraction"), ("eE", "e")),
    "e": _steps(("+-", "sign"), (_DIGITS, "exponent")),
    "sign": _steps((_DIGITS, "exponent")),
    "exponent": _steps((_DIGITS, "exponent")),
}
_WHOLE_NUMBERS: Final = frozenset({"zero", "whole", "fraction", "exponent"})


class JsonScanner:
    """Follows an object by RFC 8259, with one leave: a control character inside a string is taken, since models write
    line breaks there. Memory: one character per bracket that is open."""

    __slots__ = ("_is_key", "_left", "_next", "_number", "_open", "in_string", "is_done")

    def __init__(self) -> None:
        self._open: list[str] = []
        self._next = self._begin
        self._is_key = False
        self._left = ""
        """Of a literal: its characters to come. Of a \\u: as many characters as digits are missing."""
        self._number = ""
        self.in_string = False
        """Any but a quote and a backslash would be a character of a string."""
        self.is_done = False

    def take(self, character: str) -> bool:
        """Whether the object may go on with it. One that may not changes nothing."""
        return self._next(character)

    def _begin(self, character: str) -> bool:
        return character == "{" and self._value(character)

    def _value(self, character: str) -> bool:
        if character in SPACE:
            return True
        if character in "{[":
            self._open.append(character)
            self._next = self._first_key if character == "{" else self._first_item
        elif character == '"':
            self._start_string(is_key=False)
        elif character in _NUMBER[""]:
            self._number = _NUMBER[""][character]
            self._next = self._in_number
        elif character in _LITERALS:
            self._left = _LITERALS[character][1:]
            self._next = self._literal
        else:
            return False
        return True

    def _first_item(self, character: str) -> bool:
        return self._close() if character == "]" else self._value(character)

    def _first_key(self, character: str) -> bool:
        return self._close() if character == "}" else self._key(character)

    def _key(self, character: str) -> bool:
        if character == '"':
            self._start_string(is_key=True)
            return True
        return character in SPACE

    def _start_string(self, is_key: bool) -> None:
        self._is_key = is_key
        self.in_string = True
        self._next = self._string

    def _string(self, character: str) -> bool:
        if character == '"':
            self.in_string = False
            self._next = self._colon if self._is_key else self._after
        elif character == "\\":
            self.in_string = False
            self._next = self._escape
        return True

    def _escape(self, character: str) -> bool:
        if character == "u":
            self._left = "0000"
            self._next = self._hex
            return True
        if character in _ESCAPES:
            self._start_string(self._is_key)
            return True
        return False

    def _hex(self, character: str) -> bool:
        if character not in "0123456789abcdefABCDEF":
            return False
        self._left = self._left[1:]
        if not self._left:
            self._start_string(self._is_key)
        return True

    def _colon(self, character: str) -> bool:
        if character == ":":
            self._next = self._value
            return True
        return character in SPACE

    def _literal(self, character: str) -> bool:
        if character != self._left[0]:
            return False
        self._left = self._left[1:]
        if not self._left:
            self._next = self._after
        return True

    def _in_number(self, character: str) -> bool:
        after = _NUMBER[self._number].get(character)
        if after is not None:
            self._number = after
            return True
        return self._number in _WHOLE_NUMBERS and self._after(character)

    def _after(self, character: str) -> bool:
        """Behind a value, inside the innermost bracket."""
        if character in SPACE:
            self._next = self._after
            return True
        in_object = self._open[-1] == "{"
        if character == ",":
            self._next = self._key if in_object else self._value
            return True
        return character == ("}" if in_object else "]") and self._close()

    def _close(self) -> bool:
        self._open.pop()
        self.is_done = not self._open
        self._next = self._refuse if self.is_done else self._after
        return True

    def _refuse(self, character: str) -> bool:
        return False
