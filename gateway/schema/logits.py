"""The fields that tell of a model's logits, or change them."""

import re
from typing import Final

import msgspec

from gateway.schema.reader import FieldReader, to_number
from gateway.schema.wording import short
from streamkv.errors import InvalidField
from streamkv.sampling import MAX_LOGIT_BIASES, MAX_LOGPROBS

_TOKEN_ID: Final = re.compile(r"[0-9]{1,10}")


class LogprobWishes(msgspec.Struct, frozen=True, kw_only=True):
    """Which log probabilities are told, and how."""

    logprobs: int = -1
    """As in SamplingParams."""
    prompt_logprobs: int = -1
    """As in SamplingParams, without what an echo needs."""
    tokens_as_ids: bool = False
    """`token_id:17` instead of a token's text."""


def read_logprobs(reader: FieldReader, is_chat: bool) -> LogprobWishes:
    """Chats: logprobs (true or false) and top_logprobs, 0 to 20. Completions: logprobs, 0 to 20. Both: prompt_logprobs,
    return_tokens_as_token_ids."""
    if is_chat:
        wants = reader.boolean("logprobs", default=False)
        top = reader.integer("top_logprobs", 0, MAX_LOGPROBS)
        if top and not wants:
            raise InvalidField("top_logprobs", "needs logprobs to be true")
        logprobs = (top or 0) if wants else -1
    else:
        asked = reader.integer("logprobs", 0, MAX_LOGPROBS)
        logprobs = -1 if asked is None else asked
        reader.neutral("top_logprobs", 0, instead="logprobs says how many")
    of_prompt = reader.integer("prompt_logprobs", 0, MAX_LOGPROBS)
    return LogprobWishes(
        logprobs=logprobs,
        prompt_logprobs=-1 if of_prompt is None else of_prompt,
        tokens_as_ids=reader.boolean("return_tokens_as_token_ids", default=False),
    )


def read_logit_bias(reader: FieldReader, vocab_size: int) -> dict[int, float]:
    """logit_bias: an object whose keys are token ids, as texts, and whose values are numbers from -100 to 100."""
    given = reader.mapping("logit_bias")
    if len(given) > MAX_LOGIT_BIASES:
        reader.refuse("logit_bias", f"takes at most {MAX_LOGIT_BIASES} ids, got {len(given)}")
    biases: dict[int, float] = {}
    for key, value in given.items():
        field = reader.path(f"logit_bias[{short(key)}]")
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidField(field, f"must have a token id (a whole number) as key, got {short(repr(key))}")
        token_id = int(key)
        if token_id >= vocab_size:
            raise InvalidField(field, f"must have a token id between 0 and {vocab_size - 1} as key, got {token_id}")
        if token_id in biases:
            raise InvalidField(field, f"is the token id {token_id} once more")
        biases[token_id] = to_number(value, field)
    return biases
