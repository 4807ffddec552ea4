"""What one gateway leaves to another beside a stream's tokens."""

import msgspec

from gateway.parsers.answer_parser import Parsing
from gateway.suspicion import UNSUSPECTED, Suspicion
from streamkv.protocol import Finished
from streamkv.sampling import SamplingParams


class StreamState(msgspec.Struct, array_like=True, frozen=True):
    """What any gateway needs to go on with a stream, beside its tokens: Submit's gateway_state, as msgpack.

    Fields may only be added at the end, with a default: an engine can outlive its gateway's version.
    """

    sampling: SamplingParams
    model: str
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    is_chat: bool = False
    cache_salt: str = ""
    priority: int = 0
    attach_grace_s: float = 0.0
    label: str = ""
    key: str = ""
    """Whose stream it is; empty without API keys."""
    ended: tuple[Finished, ...] = ()
    """How choices ended under earlier engines; only the gateway can tell a later one."""
    shares_prefix: bool = False
    """As in Submit."""
    answer_id: str = ""
    """As each event of its answer has it; so are the three below."""
    created: int = 0
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    """The text of each choice begins with the prompt."""
    is_prompt_only: bool = False
    """No token was asked for, and the one that the engine makes is not shown."""
    num_prompt_logprobs: int = -1
    """As in SamplingParams, but only what its client asked for; an echo has some of its own."""
    tokens_as_ids: bool = False
    """Log probabilities are told of `token_id:17` instead of a token's text."""
    parsing: Parsing | None = None
    """What is to be found in the text; None: nothing, it goes out as it is."""
    suspicion: Suspicion = UNSUSPECTED
    """As it was when this was written: the gateway that has the stream knows better."""
