"""Calls as Hermes and Qwen write them: <tool_call>{"name": "f", "arguments": {…}}</tool_call>, one after the other."""

from typing import Final

from gateway.parsers.calls import CallObject
from gateway.parsers.pieces import SPACE
from gateway.parsers.tool_calls import CallOptions, ToolCallParser

END_MARK: Final = "</tool_call>"


class HermesParser(ToolCallParser):
    """An end mark that is missing is not missed; the beginning of one at the end of the text is not shown."""

    mark = "<tool_call>"

    def __init__(self, options: CallOptions) -> None:
        super().__init__(options)
        self._end = ""
        """Of the end mark."""

    def _open(self) -> None:
        self._begin_call(CallObject())

    def _expect_next(self) -> None:
        self._end = ""
        self._next = self._end_mark

    def _end_mark(self, character: str) -> None:
        if END_MARK.startswith(self._end + character):
            self._end += character
            if self._end == END_MARK:
                self._held = ""
                self._go_on_with_text()
        elif not self._end and character in SPACE:
            self._held += character
        else:
            self._go_on_with_text(*self._end, character)
