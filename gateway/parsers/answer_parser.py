"""The text of one choice → content, reasoning and calls, as its request and its model have it."""

from collections.abc import Mapping
from typing import Final

import msgspec

from gateway.parsers.hermes import HermesParser
from gateway.parsers.hidden_marks import MarkFilter
from gateway.parsers.llama3 import Llama3Parser
from gateway.parsers.mistral import MistralParser
from gateway.parsers.pieces import Pieces
from gateway.parsers.reasoning import ReasoningParser
from gateway.parsers.tool_calls import CallOptions, ToolCallParser

_PARSERS: Final[Mapping[str, type[ToolCallParser]]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
}


class Parsing(msgspec.Struct, array_like=True, frozen=True):
    """What is to be found in the text of an answer. Part of a stream's state: fields may only be added at the end."""

    tool_format: str = ""
    """hermes, llama3 or mistral; empty: calls are not looked for."""
    calls: CallOptions = CallOptions()
    splits_reasoning: bool = False
    begins_in_reasoning: bool = False
    """The prompt ends inside of thoughts."""
    include_reasoning: bool = True
    shown_special_ids: tuple[int, ...] = ()
    """Special tokens that the parser must see, and that the client does not."""
    hidden_marks: tuple[str, ...] = ()
    """Their texts."""


class AnswerParser:
    """From the first character of a choice to its last. What it says after each is a matter of the text alone, not of
    how it was cut."""

    def __init__(self, parsing: Parsing) -> None:
        self._reasoning = ReasoningParser(parsing.begins_in_reasoning) if parsing.splits_reasoning else None
        self._calls = _PARSERS[parsing.tool_format](parsing.calls) if parsing.tool_format else None
        marks = parsing.hidden_marks
        self._filters = (MarkFilter(marks), MarkFilter(marks)) if marks else None
        """Of content and of reasoning."""

    @property
    def is_plain(self) -> bool:
        """All text from now on is content, as it comes."""
        is_over = self._reasoning is None or self._reasoning.is_over
        return self._calls is None and self._filters is None and is_over

    @property
    def has_calls(self) -> bool:
        """At least one call is whole."""
        return self._calls is not None and self._calls.num_complete > 0

    def feed(self, text: str) -> Pieces:
        """Read on."""
        pieces = Pieces()
        content = text if self._reasoning is None else self._reasoning.feed(text, pieces)
        self._take_content(content, pieces)
        if self._filters is not None:
            for filter, texts in zip(self._filters, (pieces.content, pieces.reasoning), strict=True):
                texts[:] = [filter.feed("".join(texts))]
        return pieces

    def finish(self) -> Pieces:
        """The text is over: what was held back."""
        pieces = Pieces()
        if self._reasoning is not None:
            self._take_content(self._reasoning.finish(pieces), pieces)
        if self._calls is not None:
            self._calls.finish(pieces)
        if self._filters is not None:
            for filter, texts in zip(self._filters, (pieces.content, pieces.reasoning), strict=True):
                texts[:] = [filter.feed("".join(texts)) + filter.finish()]
        return pieces

    def _take_content(self, content: str, pieces: Pieces) -> None:
        if self._calls is not None:
            self._calls.feed(content, pieces)
        elif content:
            pieces.content.append(content)
