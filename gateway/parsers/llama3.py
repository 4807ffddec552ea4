"""Calls as Llama 3 writes them: {"name": "f", "parameters": {…}}, with `;` between them, behind <|python_tag|> or as
the beginning of an answer.

Without the tag a call must have parameters and name a function of the request: an answer in JSON begins alike.
"""

from gateway.parsers.calls import CallObject
from gateway.parsers.pieces import SPACE
from gateway.parsers.tool_calls import CallOptions, ToolCallParser


class Llama3Parser(ToolCallParser):
    """Code behind the tag, as for the tools that are built into the model, is content."""

    mark = "<|python_tag|>"

    def __init__(self, options: CallOptions) -> None:
        super().__init__(options)
        self._next = self._start
        self._is_tagged = False

    def _start(self, character: str) -> None:
        """Nothing but white space has come."""
        if character in SPACE:
            self._held += character
        elif character == "{":
            self._begin_object(character)
        else:
            self._go_on_with_text(character)

    def _open(self) -> None:
        self._is_tagged = True
        self._begin_object("")

    def _begin_object(self, character: str) -> None:
        names = None if self._is_tagged else self._options.names
        self._begin_call(CallObject(names, needs_arguments=not self._is_tagged))
        if character:
            self._next(character)

    def _expect_next(self) -> None:
        self._next = self._separator

    def _separator(self, character: str) -> None:
        if character in SPACE or (character == ";" and ";" not in self._held):
            self._held += character
        elif character == "{":
            self._begin_object(character)
        else:
            self._go_on_with_text(character)
