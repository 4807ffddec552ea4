"""One call of a function as a model writes it, read as it comes.

A call has begun once its name and the beginning of its arguments are known. Until then it may still turn out to be no
call, and nothing of it is shown.
"""

import json
from collections.abc import Collection
from typing import Final, Protocol

from gateway.parsers.json_scanner import JsonScanner
from gateway.parsers.pieces import SPACE

MAX_NAME_CHARS: Final = 256
_ARGUMENTS: Final = frozenset({"arguments", "parameters"})
_TEXTS: Final = frozenset({"name", "id", "type"})


class Call(Protocol):
    """A call from its first character to its last."""

    name: str
    has_begun: bool
    is_complete: bool
    """Its arguments are a whole object."""
    is_closed: bool
    """Nothing more belongs to it."""

    def take(self, character: str) -> bool:
        """Whether the call may go on with it. One that may not changes nothing."""

    def take_run(self, text: str) -> None:
        """Several characters at once, while in_string: what json_scanner.PLAIN_RUN matches."""

    @property
    def in_string(self) -> bool:
        """It has begun, and is inside a string of its arguments."""

    def new_arguments(self) -> str:
        """What came since the last time. Only once it has begun."""


class Arguments:
    """The text of an object, as it is handed on: control characters in strings as JSON wants them."""

    def __init__(self) -> None:
        self._scanner = JsonScanner()
        self._new: list[str] = []

    @property
    def is_done(self) -> bool:
        return self._scanner.is_done

    @property
    def in_string(self) -> bool:
        return self._scanner.in_string

    def take(self, character: str) -> bool:
        in_string = self._scanner.in_string
        if not self._scanner.take(character):
            return False
        self._new.append(json.dumps(character)[1:-1] if in_string and character < " " else character)
        return True

    def take_run(self, text: str) -> None:
        self._new.append(text)

    def new(self) -> str:
        text = "".join(self._new)
        self._new.clear()
        return text


class NamedCall:
    """Arguments whose function was named before them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.has_begun = self.is_complete = self.is_closed = False
        self._arguments = Arguments()

    def take(self, character: str) -> bool:
        if not self.has_begun and character in SPACE:
            return True
        if not self._arguments.take(character):
            return False
        self.has_begun = True
        self.is_complete = self.is_closed = self._arguments.is_done
        return True

    def take_run(self, text: str) -> None:
        self._arguments.take_run(text)

    @property
    def in_string(self) -> bool:
        return self._arguments.in_string

    def new_arguments(self) -> str:
        return self._arguments.new()


class CallObject:
    """`{"name": …, "arguments": {…}}`, also with `parameters`, in either order. Other keys than id and type, which say
    nothing here, make it something else."""

    def __init__(self, names: Collection[str] | None = None, needs_arguments: bool = False) -> None:
        """names: what may be called; None: anything. needs_arguments: without them it is no call."""
        self.name = ""
        self.has_begun = self.is_complete = self.is_closed = False
        self._names = names
        self._needs_arguments = needs_arguments
        self._arguments: Arguments | None = None
        self._default = ""
        """Arguments that were left out, or null."""
        self._next = self._begin
        self._text = ""
        """Of the string that is being read, without its quotes."""
        self._is_escaped = False
        self._key = ""
        self._seen: set[str] = set()

    def take(self, character: str) -> bool:
        return self._next(character)

    def take_run(self, text: str) -> None:
        assert self._arguments is not None
        self._arguments.take_run(text)

    @property
    def in_string(self) -> bool:
        return self.has_begun and self._arguments is not None and self._arguments.in_string

    def new_arguments(self) -> str:
        text, self._default = self._default, ""
        return text if self._arguments is None else self._arguments.new()

    def _begin(self, character: str) -> bool:
        if character == "{":
            self._next = self._first_key
            return True
        return character in SPACE

    def _first_key(self, character: str) -> bool:
        return self._close() if character == "}" else self._next_key(character)

    def _next_key(self, character: str) -> bool:
        if character == '"':
            self._key = ""
            self._next = self._string
            return True
        return character in SPACE

    def _string(self, character: str) -> bool:
        """A key, or the text behind one."""
        if character == '"' and not self._is_escaped:
            try:
                text = str(json.loads(f'"{self._text}"'))
            except ValueError:
                return False
            if not (self._on_text(text) if self._key else self._on_key(text)):
                return False
            self._text = ""
            return True
        if len(self._text) >= MAX_NAME_CHARS or character < " ":
            return False
        self._is_escaped = character == "\\" and not self._is_escaped
        self._text += character
        return True

    def _on_key(self, key: str) -> bool:
        kind = "arguments" if key in _ARGUMENTS else key
        if kind in self._seen or (kind not in _TEXTS and kind != "arguments"):
            return False
        self._seen.add(kind)
        self._key = kind
        self._next = self._colon
        return True

    def _on_text(self, text: str) -> bool:
        if self._key == "name":
            if not text or (self._names is not None and text not in self._names):
                return False
            self.name = text
        self._next = self._after
        self._look()
        return True

    def _colon(self, character: str) -> bool:
        if character == ":":
            self._next = self._value
            return True
        return character in SPACE

    def _value(self, character: str) -> bool:
        if character in SPACE:
            return True
        if self._key != "arguments":
            self._next = self._string
            return character == '"'
        if character == "n" and not self._needs_arguments:
            self._text = "n"
            self._next = self._null
            return True
        arguments = Arguments()
        if not arguments.take(character):
            return False
        self._arguments = arguments
        self._next = self._in_arguments
        self._look()
        return True

    def _null(self, character: str) -> bool:
        if not "null".startswith(self._text + character):
            return False
        self._text += character
        if self._text == "null":
            self._text = ""
            self._default = "{}"
            self._next = self._after
            self._look()
        return True

    def _in_arguments(self, character: str) -> bool:
        assert self._arguments is not None
        if not self._arguments.take(character):
            return False
        if self._arguments.is_done:
            self._next = self._after
            self._look()
        return True

    def _after(self, character: str) -> bool:
        """Behind a value."""
        if character == ",":
            self._next = self._next_key
            return True
        return self._close() if character == "}" else character in SPACE

    def _close(self) -> bool:
        if not self.name or (self._needs_arguments and self._arguments is None):
            return False
        if self._arguments is None and "arguments" not in self._seen:
            self._default = "{}"
        self._next = self._refuse
        self.is_closed = True
        self._look()
        return True

    def _refuse(self, character: str) -> bool:
        return False

    def _look(self) -> None:
        """Something that the flags depend on has come."""
        has_arguments = self._arguments is not None or bool(self._default)
        self.has_begun = self.has_begun or (bool(self.name) and has_arguments)
        self.is_complete = self.has_begun and (self._arguments is None or self._arguments.is_done)
