"""A completion request."""

from typing import Final

import msgspec

from gateway.schema.body import decode_object
from gateway.schema.options import GenerationOptions, RequestLimits, read_options
from gateway.schema.reader import FieldReader, check_token_ids
from gateway.schema.wording import kind
from streamkv.errors import InvalidField

MAX_PROMPTS: Final = 128
MAX_SEQUENCES: Final = 512
"""Of all prompts of one request."""


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/completions, or a `generate` with a prompt."""

    options: GenerationOptions
    prompts: tuple[str | list[int], ...]
    """Each is text, or token ids that have been checked against the vocabulary."""
    add_special_tokens: bool = True


def parse_completion(body: bytes, limits: RequestLimits) -> CompletionRequest:
    """POST /v1/completions. Raises InvalidField."""
    return completion_from_fields(decode_object(body), limits)


def completion_from_fields(fields: dict[str, object], limits: RequestLimits) -> CompletionRequest:
    """The fields of a completion request. Raises InvalidField."""
    reader = FieldReader(fields)
    options = read_options(reader, limits, is_chat=False)
    prompts = _read_prompts(reader, limits, max(options.n, options.best_of, options.beam_width))
    if options.attach_grace_s and len(prompts) > 1:
        reader.refuse("attach_grace_s", "takes one prompt: each of several would be a stream of its own")
    add_special_tokens = reader.boolean("add_special_tokens", default=True)
    reader.neutral("suffix", "")
    reader.finish()
    return CompletionRequest(options=options, prompts=prompts, add_special_tokens=add_special_tokens)


def _read_prompts(reader: FieldReader, limits: RequestLimits, num_sequences: int) -> tuple[str | list[int], ...]:
    """prompt: a text or a list of token ids, or a list of 1 to 128 of these, with at most 512 sequences in all."""
    value = reader.take("prompt")
    if value is None:
        raise InvalidField("prompt", "is missing; send text or a list of token ids")
    if not isinstance(value, list) or not value or not isinstance(value[0], str | list):
        return (_read_prompt(value, "prompt", limits),)
    if len(value) > MAX_PROMPTS:
        raise InvalidField("prompt", f"takes at most {MAX_PROMPTS} prompts, got {len(value)}")
    if len(value) * num_sequences > MAX_SEQUENCES:
        raise InvalidField(
            "prompt",
            f"has {len(value)} prompts with {num_sequences} choices each, over {MAX_SEQUENCES} together; send fewer",
        )
    return tuple(_read_prompt(prompt, f"prompt[{index}]", limits) for index, prompt in enumerate(value))


def _read_prompt(value: object, field: str, limits: RequestLimits) -> str | list[int]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidField(field, f"must be text or a list of token ids, got {kind(value)}")
    if not value:
        raise InvalidField(field, "is empty; send text or at least one token id")
    if limits.max_model_len and len(value) >= limits.max_model_len:
        raise InvalidField(
            field,
            f"has {len(value)} tokens, which leaves no room for an answer within the model's limit of "
            f"{limits.max_model_len}; shorten it",
        )
    return check_token_ids(value, limits.vocab_size, field)
