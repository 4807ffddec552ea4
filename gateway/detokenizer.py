"""Token ids → text as they come: whole characters only, stop strings held back and found.

The deltas joined are exactly what `Tokenizer.decode` makes of all ids at once, up to a stop string. What counts as
one character is Unicode's code point; the bytes of one may come in up to four tokens.
"""

import codecs
import copy
import re
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Protocol

from gateway.tokenizer import Tokenizer, Vocabulary

_CONTEXT_TOKENS: Final = 6
_REPLACEMENT: Final = "\ufffd"


class Detokenizer:
    """One choice's text. Not thread-safe. Costs about 1 µs a token, and 0.1 µs a character more with stop strings.

    An end-of-sequence or stop id that ended a choice is no text: the caller does not push it.

    Fast path: while `can_take_whole_piece` is true, a token with a piece in `vocabulary.json_pieces` is exactly that
    text. The caller may take it without a push. That changes nothing here, so the flag needs a look only after a push;
    num_tokens_shown does not count it, which is for stop strings, and with those the flag is never true.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        prompt_ids: Sequence[int] = (),
        shown_special_ids: Sequence[int] = (),
    ) -> None:
        """stop: none empty. min_tokens: a stop string that is complete by this many tokens does not count.
        prompt_ids: what the text goes on from, for tokenizers whose first space depends on it. shown_special_ids:
        those that are not skipped with the others."""
        vocabulary = tokenizer.vocabulary
        is_skipped = vocabulary.skipped(skip_special_tokens, tuple(shown_special_ids))
        self._decoder: _Decoder
        if vocabulary.style == "bytes":
            self._decoder = _ByteDecoder(vocabulary, is_skipped)
        elif vocabulary.style == "byte_fallback":
            self._decoder = _ByteFallbackDecoder(vocabulary, is_skipped, at_start=not prompt_ids)
        else:
            self._decoder = _WindowDecoder(tokenizer, is_skipped, prompt_ids)
        self._matcher = copy.copy(_unread_matcher(tuple(stop))) if stop else None
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._held = ""
        self.stopped: str | None = None
        """The stop string that ended the text; what comes after it is not shown."""
        self.num_tokens_shown = 0
        """Tokens pushed, up to and with the one that completed a stop string."""
        self.can_take_whole_piece = self._matcher is None and self._decoder.is_clear

    def push(self, token_id: int) -> str:
        """The text that this token makes certain; "" while a character or a possible stop string is incomplete."""
        if self.stopped is not None:
            return ""
        self.num_tokens_shown += 1
        text = self._decoder.push(token_id)
        if self._matcher is None:
            self.can_take_whole_piece = self._decoder.is_clear
            return text
        return self._match(text) if text else ""

    @property
    def num_held_chars(self) -> int:
        """Characters that are certain, and held back since they may become a stop string."""
        return len(self._held)

    def finish(self) -> str:
        """The end of the text: an incomplete character as U+FFFD, and what might have become a stop string."""
        if self.stopped is not None:
            return ""
        text = self._decoder.finish()
        if self._matcher is None:
            return text
        text = self._match(text)
        if self.stopped is None:
            text += self._held
        self._held = ""
        return text

    def _match(self, text: str) -> str:
        """Hand new text on, but for its end that could still become a stop string."""
        assert self._matcher is not None
        found = self._matcher.feed(text, ignore=self.num_tokens_shown <= self._min_tokens)
        text = self._held + text
        if found is not None:
            self.stopped, num_after = found
            self._held = ""
            end = len(text) - num_after
            return text[:end] if self._include_stop else text[: end - len(self.stopped)]
        shown = len(text) - self._matcher.num_pending_chars
        self._held = text[shown:]
        return text[:shown]


class StopMatcher:
    """Finds the stop string that is complete first, reading each character once (Aho and Corasick, 1975).

    Of two that end at the same character the longer counts. So the outcome does not depend on where tokens end.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found: list[str | None] = [None]
        for stop in stops:
            state = 0
            for character in stop:
                after = self._next[state].get(character)
                if after is None:
                    after = len(self._next)
                    self._next[state][character] = after
                    self._next.append({})
                    self._depth.append(self._depth[state] + 1)
                    self._found.append(None)
                state = after
            self._found[state] = stop
        self._fall_back = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, after in self._next[state].items():
                self._fall_back[after] = self._step(self._fall_back[state], character)
                queue.append(after)
            if self._found[state] is None:
                self._found[state] = self._found[self._fall_back[state]]
        self._first = re.compile("[" + "".join(re.escape(character) for character in self._next[0]) + "]")
        self._state = 0

    def _step(self, state: int, character: str) -> int:
        while True:
            after = self._next[state].get(character)
            if after is not None:
                return after
            if state == 0:
                return 0
            state = self._fall_back[state]

    @property
    def num_pending_chars(self) -> int:
        """How many of the last characters could be the beginning of a stop string."""
        return self._depth[self._state]

    def feed(self, text: str, ignore: bool = False) -> tuple[str, int] | None:
        """Read on. (stop string, number of characters in text after it) for the first that is complete; not fed
        after that. ignore: those that are complete in this text do not count."""
        state = self._state
        if state == 0 and self._first.search(text) is None:
            return None
        for index, character in enumerate(text):
            state = self._step(state, character)
            stop = self._found[state]
            if stop is not None and not ignore:
                return stop, len(text) - index - 1
        self._state = state
        return None


@lru_cache(maxsize=8)
def _unread_matcher(stops: tuple[str, ...]) -> StopMatcher:
    """To be copied, not fed. All choices of a request share what it knows of the stop strings: some 2 µs and 300 bytes
    for each of their characters, of which there may be 16,384."""
    return StopMatcher(stops)


class _Decoder(Protocol):
    """Ids → text, without stop strings."""

    is_clear: bool
    """Nothing is held back, and the next whole piece is its own text."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class _ByteDecoder:
    """Pieces are bytes of one UTF-8 text; each maximal invalid part is one U+FFFD."""

    def __init__(self, vocabulary: Vocabulary, is_skipped: bytearray) -> None:
        self._pieces = vocabulary.pieces
        self._is_skipped = is_skipped
        self._pending = b""
        self.is_clear = True

    def push(self, token_id: int) -> str:
        if self._is_skipped[token_id]:
            return ""
        data = self._pending + self._pieces[token_id]
        text, num_used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[num_used:]
        self.is_clear = not self._pending
        return text

    def finish(self) -> str:
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        self.is_clear = True
        return text


class _ByteFallbackDecoder:
    """Pieces are texts; a run of byte tokens is one text, or, if it is no UTF-8, one U+FFFD for each of them.

    So a run is known only at its end, and is held back until then.
    """

    def __init__(self, vocabulary: Vocabulary, is_skipped: bytearray, at_start: bool) -> None:
        self._pieces = vocabulary.pieces
        self._is_skipped = is_skipped
        self._is_byte = vocabulary.is_byte
        self._run = bytearray()
        self._drops_space = at_start and vocabulary.strips_first_space
        self.is_clear = not self._drops_space

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if self._is_skipped[token_id] or not piece:
            return ""
        if self._is_byte[token_id]:
            self._run += piece
            self.is_clear = False
            return ""
        return self._show(self._end_run() + piece.decode())

    def finish(self) -> str:
        return self._show(self._end_run())

    def _end_run(self) -> str:
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            text = _REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _show(self, text: str) -> str:
        if self._drops_space and text:
            self._drops_space = False
            text = text.removeprefix(" ")
        self.is_clear = not self._drops_space
        return text


class _WindowDecoder:
    """Any decoder: decodes the last few tokens with and without the new one; the difference is its text.

    The window moves on at each token that ends a character, so the cost per token does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer, is_skipped: bytearray, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._is_skipped = is_skipped
        self._window = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._num_shown = len(self._window)
        self._shown = self._decode(self._window)
        self.is_clear = False

    def _decode(self, ids: list[int]) -> str:
        shown = [token_id for token_id in ids if not self._is_skipped[token_id]]
        return self._tokenizer.decode(shown, skip_special_tokens=False)

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) or not text.startswith(self._shown):
            return ""
        delta = text[len(self._shown) :]
        if delta:
            self._window = self._window[self._num_shown :] if self._num_shown else self._window
            self._num_shown = len(self._window)
            self._shown = self._decode(self._window)
        return delta

    def finish(self) -> str:
        text = self._decode(self._window)
        delta = text[len(self._shown) :]
        self._num_shown = len(self._window)
        self._shown = text
        return delta
