"""Whether a stream that somebody takes up can be told from where its client stands. The cursor says where that is."""

from collections.abc import Sequence

import msgspec

from gateway.choice import Choice
from gateway.cursor import Cursor, Mark
from gateway.engine_client import EngineUnavailable
from gateway.failures import UnknownStream
from gateway.stream_state import StreamState
from streamkv.errors import InvalidField
from streamkv.protocol import Attached


def state_of(attached: Attached) -> StreamState:
    """Raises UnknownStream."""
    try:
        return msgspec.msgpack.decode(attached.gateway_state, type=StreamState)
    except msgspec.MsgspecError as error:
        raise UnknownStream("the stream was begun by a gateway of another version") from error


def refusal_of(
    attached: Attached, state: StreamState, known: Cursor, older: Attached | None
) -> InvalidField | EngineUnavailable | None:
    """Why nothing can be told of what the engine has answered: of the cursor what is wrong with it, or that some of the
    stream is not there yet. older: what this gateway knew of it itself."""
    num_tokens = [len(packed) // 4 for packed in attached.token_ids]
    try:
        known.check_choices(state.sampling.n)
        known.check_tokens(num_tokens)
    except InvalidField as error:
        return error
    if any(num_tokens) and not _knows_opening(attached, state, older):
        return EngineUnavailable("a new engine has not yet come to this stream's prompt; try again")
    return None


def parts_of(token_ids: list[int], mark: Mark) -> tuple[list[list[int]], list[int]]:
    """A choice's tokens: those that its client has, in parts that an outlet can pass over, and the rest."""
    parts: list[list[int]] = []
    start = 0
    for cut in mark.cuts:
        if cut > start:
            parts.append(token_ids[start:cut])
            start = cut
    return parts, token_ids[start:]


def check_place(known: Cursor, choices: Sequence[Choice]) -> None:
    """Raises InvalidField where the stream has not come as far."""
    known.check_choices(len(choices))
    known.check_tokens([choice.num_shown for choice in choices])  # none behind a stop string


def check_ends(known: Cursor, choices: Sequence[Choice]) -> None:
    """Raises InvalidField where what the client has the end of has not ended, or not there."""
    known.check_ends(
        [choice.ending is not None for choice in choices],
        # One that was broken off may have more tokens in the engine than its client had been sent
        [choice.num_shown if choice.has_ended_by_itself else None for choice in choices],
    )


def _knows_opening(attached: Attached, state: StreamState, older: Attached | None) -> bool:
    """Whether all is known that is told of the prompt. A new engine does not get it with a continuation, and computes
    it anew before the next token."""
    if state.num_prompt_logprobs < 0 and not (state.echo and state.sampling.logprobs >= 0):
        return True
    known = [told.prompt_logprobs for told in (attached, older) if told is not None]
    num_known = max(values.num_tokens if values is not None else 0 for values in known)
    return num_known >= len(attached.prompt_token_ids) // 4 - 1
