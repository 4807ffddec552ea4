"""What a stream hands on beside plain text: the new part of one choice, with all that its client may have asked for."""

from collections.abc import Sequence

import msgspec


class TokenLogprob(msgspec.Struct, frozen=True):
    """One token of an answer or a prompt, and what the model thought of it."""

    token_id: int
    logprob: float | None
    """Natural logarithm; finite, or minus infinity. None: the first token of a prompt, before which nothing stands."""
    top: Sequence[tuple[int, float]] = ()
    """(id, log probability) of the likeliest tokens at its place, likeliest first."""
    text_offset: int = 0
    """Characters of the choice's text before it."""


class ToolCallDelta(msgspec.Struct, frozen=True):
    """New of one tool call of a chat's answer. Its first delta has id and name."""

    index: int
    call_id: str = ""
    name: str = ""
    arguments: bytes = b""
    """JSON-escaped, as Delta.text: the next piece of the arguments' own JSON text."""


class Delta(msgspec.Struct, frozen=True):
    """New of one choice. Texts are JSON-escaped UTF-8 without quotes."""

    text: bytes = b""
    token_ids: Sequence[int] = ()
    """Of the answer; the text of some may still be held back, or have been since earlier."""
    logprobs: Sequence[TokenLogprob] = ()
    """Where they are wanted: one for each of token_ids, and before those of the first delta, one for each token of an
    echoed prompt."""
    prompt_logprobs: Sequence[TokenLogprob] | None = None
    """In a choice's first delta, where they are wanted: those of the prompt."""
    reasoning: bytes = b""
    """What the model thought before it answered, where that is told apart from text."""
    tool_calls: Sequence[ToolCallDelta] = ()
