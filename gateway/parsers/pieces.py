"""What a parser makes of the text of an answer: content, reasoning and calls of functions."""

from dataclasses import dataclass, field
from typing import Final

SPACE: Final = " \t\r\n"
"""White space, as JSON has it."""


@dataclass(slots=True)
class CallPiece:
    """New of one call. Its first piece has the name."""

    index: int
    name: str = ""
    texts: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        """The next piece of the arguments' JSON text."""
        return "".join(self.texts)


@dataclass(slots=True)
class Pieces:
    """What some text added, each kind in its order."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[CallPiece] = field(default_factory=list)

    def add_arguments(self, index: int, text: str) -> None:
        """Go on with a call that has begun."""
        if not self.calls or self.calls[-1].index != index:
            self.calls.append(CallPiece(index))
        self.calls[-1].texts.append(text)
