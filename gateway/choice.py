"""One choice of a stream: its tokens as they come from the engine, and the text that they become."""

from typing import Final

from gateway.deltas import Delta
from gateway.detokenizer import Detokenizer
from gateway.logprobs import LogprobStore
from gateway.outlet import Ending
from gateway.stream_state import StreamState
from gateway.tokenizer import json_inside
from streamkv.protocol import Finished, TokenLogprobs

_OWN_ENDS: Final = ("stop", "length")
"""Reasons for which a choice ends by itself, and so has had its prompt."""


class Choice:
    """Holds what a continuation needs of it, and what its client has been told.

    Its owner tells the client, and sets `ending` when it tells the end.
    """

    __slots__ = (
        "_include_stop",
        "_is_hidden",
        "_num_chars",
        "_num_top",
        "detokenizer",
        "ending",
        "finished",
        "gathered",
        "index",
        "is_open",
        "logprobs",
        "token_ids",
    )

    def __init__(
        self, index: int, state: StreamState, detokenizer: Detokenizer, *, is_open: bool, num_chars: int
    ) -> None:
        """is_open: there is nothing to tell of its prompt. num_chars: of the echo that its text begins with."""
        self.index = index
        self.detokenizer = detokenizer
        self.is_open = is_open
        """What is told of its prompt was sent, or there is nothing."""
        self.logprobs = LogprobStore()
        """Of token_ids, and perhaps of some that are on their way; empty where none are wanted."""
        self.token_ids: list[int] = []
        """All generated tokens, also those behind a stop string: a continuation needs each."""
        self.gathered: list[int] = []
        """Came in with this step, not yet turned into text."""
        self.ending: Ending | None = None
        self.finished: Finished | None = None
        """What the engine said of its end; None when it ended here."""
        self._is_hidden = state.is_prompt_only
        """Nothing that it generates is shown."""
        self._include_stop = state.include_stop_str_in_output
        self._num_top = state.sampling.logprobs
        """Likeliest tokens that are told of beside each; -1: no log probabilities are wanted."""
        self._num_chars = num_chars
        """Length of its text so far; only counted where log probabilities are wanted."""

    @property
    def num_shown(self) -> int:
        """Tokens that count: not those behind a stop string."""
        if self._is_hidden:
            return 0
        num_tokens = len(self.token_ids)
        if self.detokenizer.stopped is not None:
            return min(self.detokenizer.num_tokens_shown, num_tokens)
        return num_tokens

    @property
    def has_ended_by_itself(self) -> bool:
        return self.ending is not None and self.ending.finish_reason in _OWN_ENDS

    @property
    def takes_pieces(self) -> bool:
        """Its next token's text is exactly the vocabulary's piece, and there is nothing else to tell with it."""
        return (
            self._num_top < 0
            and not self._is_hidden
            and bool(self.token_ids)  # an attach may come before the first token, and what opens the answer with it
            and self.ending is None
            and self.detokenizer.can_take_whole_piece
        )

    def opens_with(self, finished: Finished | None) -> bool:
        """While it is not open: what is told of its prompt is due now, before its gathered tokens or its end."""
        ends_itself = finished is not None and finished.finish_reason in _OWN_ENDS
        return self.ending is None and (bool(self.gathered) or ends_itself)

    def packed_logprobs(self) -> TokenLogprobs:
        """Those of token_ids."""
        self.logprobs.cut(len(self.token_ids))
        return self.logprobs.pack()

    def take(self, finished: Finished | None) -> tuple[Delta | None, Ending | None]:
        """Gathered tokens → one delta, and the choice's end where it has come: with `finished`, or at a stop string.
        None where there is nothing to tell, as after its end, and where it goes on. Raises ValueError where log
        probabilities are missing."""
        gathered, self.gathered = self.gathered, []
        if self.ending is not None:
            return None, None  # behind a stop string, on their way when it was found
        num_told = len(self.token_ids)
        self.token_ids += gathered
        if self._is_hidden:
            return None, _hidden_ending(finished) if finished is not None else None
        detokenizer = self.detokenizer
        wants_logprobs = self._num_top >= 0
        offsets: list[int] = []
        texts = []
        for token_id in gathered:
            if wants_logprobs:
                offsets.append(self._num_chars + detokenizer.num_held_chars)
            if (
                finished is not None
                and token_id == finished.stop_token_id
                and token_id is gathered[-1]
                and not self._include_stop
            ):
                break
            text = detokenizer.push(token_id)
            texts.append(json_inside(text) if text else b"")
            if wants_logprobs:
                self._num_chars += len(text)
            if detokenizer.stopped is not None:
                break
        is_over = finished is not None or detokenizer.stopped is not None
        if is_over:
            texts.append(json_inside(detokenizer.finish()))
        token_ids = self.token_ids[num_told : self.num_shown]
        delta: Delta | None = None
        joined = b"".join(texts)
        if joined or token_ids:
            has_logprobs = wants_logprobs and token_ids
            logprobs = self.logprobs.of(token_ids, num_told, self._num_top, offsets) if has_logprobs else ()
            delta = Delta(joined, token_ids, logprobs)
        return delta, self._ending(finished) if is_over else None

    def _ending(self, finished: Finished | None) -> Ending:
        if finished is None or self.detokenizer.stopped is not None:
            return Ending("stop", "stop_string", self.detokenizer.stopped)
        stop_reason = finished.stop_token_id if finished.cause == "stop_id" else None
        return Ending(finished.finish_reason, finished.cause, stop_reason)


def _hidden_ending(finished: Finished) -> Ending:
    """Of a prompt alone, which has no answer that could have been stopped."""
    if finished.finish_reason in _OWN_ENDS:
        return Ending("length")
    return Ending(finished.finish_reason, finished.cause)
