"""Takes marks out of a text: special tokens that a parser had to see, where it made nothing of them."""

import re
from collections.abc import Sequence


class MarkFilter:
    """A text without these marks, as it comes. The beginning of one is held back. No mark may begin with what another
    goes on with."""

    def __init__(self, marks: Sequence[str]) -> None:
        """marks: at least one."""
        self._mark = re.compile("|".join(re.escape(mark) for mark in marks))
        self._beginnings = {mark[:length] for mark in marks for length in range(1, len(mark))}
        self._max_held = max(map(len, marks)) - 1
        self._held = ""

    def feed(self, text: str) -> str:
        """What is certain to be shown."""
        text = self._held + text
        for length in range(min(self._max_held, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                text, self._held = text[:-length], text[-length:]
                break
        else:
            self._held = ""
        return self._mark.sub("", text)

    def finish(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held
