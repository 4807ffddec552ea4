"""Submit → Request: everything about a submission that the model's facts can refuse, by the field's name."""

import math
from functools import lru_cache
from typing import Annotated, Final

import msgspec

from engine.sequence import Request
from streamkv.errors import InvalidField, WireDecodeError
from streamkv.protocol import STREAM_ID_BYTES, Attached, ModelFacts, Submit, TokenLogprobs, unpack_ids
from streamkv.sampling import MAX_CHOICES, MAX_LOGPROBS, SamplingParams

MAX_GATEWAY_STATE_BYTES: Final = 1024 * 1024
MAX_REQUEST_ID: Final = 2**31 - 1
MAX_PRIORITY: Final = 2**31 - 1


def to_request(
    submit: Submit, gateway_id: bytes, model: ModelFacts, arrival_s: float, max_attach_grace_s: float
) -> Request:
    """A checked request, not yet known to anybody. Raises InvalidField.

    What depends on lengths and memory is the scheduler's to check. A grace period over the engine's longest one is
    shortened to it.
    """
    if not 0 <= submit.request_id <= MAX_REQUEST_ID:
        raise InvalidField("request_id", f"must be between 0 and {MAX_REQUEST_ID}, got {submit.request_id}")
    if len(submit.stream_id) != STREAM_ID_BYTES:
        raise InvalidField("stream_id", f"must have {STREAM_ID_BYTES} bytes, got {len(submit.stream_id)}")
    if len(submit.gateway_state) > MAX_GATEWAY_STATE_BYTES:
        raise InvalidField(
            "gateway_state", f"may have {MAX_GATEWAY_STATE_BYTES} bytes, got {len(submit.gateway_state)}"
        )
    if not abs(submit.priority) <= MAX_PRIORITY:
        raise InvalidField("priority", f"must be between -{MAX_PRIORITY} and {MAX_PRIORITY}, got {submit.priority}")
    for name, seconds in (("deadline_s", submit.deadline_s), ("attach_grace_s", submit.attach_grace_s)):
        if not (math.isfinite(seconds) and seconds >= 0):
            raise InvalidField(name, f"must be a number of seconds, 0 or more, got {seconds!r}")
    prompt = _checked_ids("prompt_token_ids", submit.prompt_token_ids, model.vocab_size)
    if not prompt:
        raise InvalidField("prompt_token_ids", "must hold at least one token")
    if any(token_id >= model.vocab_size for token_id in submit.sampling.stop_token_ids):
        raise InvalidField("stop_token_ids", f"ids must be under the vocabulary's size, {model.vocab_size}")
    if any(token_id >= model.vocab_size for token_id in submit.sampling.logit_bias):
        text = f"ids must be under the vocabulary's size, {model.vocab_size}, got {max(submit.sampling.logit_bias)}"
        raise InvalidField("logit_bias", text)
    priors = _checked_priors(submit, model.vocab_size)
    return Request(
        request_id=submit.request_id,
        gateway_id=gateway_id,
        stream_id=submit.stream_id,
        prompt_token_ids=prompt,
        sampling=_with_end(submit.sampling),
        arrival_s=arrival_s,
        priority=submit.priority,
        deadline_at_s=arrival_s + submit.deadline_s if submit.deadline_s else math.inf,
        tenant=submit.tenant,
        cache_salt=submit.cache_salt,
        label=submit.label,
        gateway_state=submit.gateway_state,
        attach_grace_s=min(submit.attach_grace_s, max_attach_grace_s),
        prior_token_ids=priors,
        finished_choices=_checked_finished(submit),
        prior_logprobs=_checked_logprobs(submit, priors, model.vocab_size),
        cleared_past=submit.ranked_tokens,
        shares_prefix=submit.shares_prefix,
        packed_prompt=submit.prompt_token_ids,
    )


def _with_end(sampling: SamplingParams) -> SamplingParams:
    """With a grammar the end-of-sequence says that the text is complete, so it is never ignored."""
    if sampling.grammar is None or not sampling.ignore_eos:
        return sampling
    return msgspec.structs.replace(sampling, ignore_eos=False)


def _checked_ids(field: str, packed: bytes, vocab_size: int) -> list[int]:
    try:
        ids = unpack_ids(packed)
    except WireDecodeError as error:
        raise InvalidField(field, str(error)) from error
    try:
        return msgspec.convert(ids, _id_list_type(vocab_size))  # several times as fast as to look at each here
    except msgspec.ValidationError as error:
        wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise InvalidField(field, f"token ids must be between 0 and {vocab_size - 1}, got {wrong}") from error


@lru_cache(maxsize=2)
def _id_list_type(vocab_size: int) -> type[list[int]]:
    return list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]]


def _checked_priors(submit: Submit, vocab_size: int) -> list[list[int]]:
    sampling = submit.sampling
    if len(submit.prior_token_ids) > sampling.n:
        raise InvalidField("prior_token_ids", f"has {len(submit.prior_token_ids)} choices, the request {sampling.n}")
    if sampling.ranks_choices and (any(submit.prior_token_ids) or submit.finished_choices):
        text = "choices that are ranked are all returned at the end, so none has tokens or has ended before it"
        raise InvalidField("prior_token_ids", text)
    priors = [_checked_ids("prior_token_ids", packed, vocab_size) for packed in submit.prior_token_ids]
    for choice, prior in enumerate(priors):
        most = sampling.max_tokens - (choice not in submit.finished_choices)
        if len(prior) > most:
            raise InvalidField(
                "prior_token_ids",
                f"choice {choice} has {len(prior)} tokens already, and max_tokens is {sampling.max_tokens}",
            )
    return priors


def _checked_logprobs(submit: Submit, priors: list[list[int]], vocab_size: int) -> list[TokenLogprobs]:
    """Of every prior token, with so many likeliest ones as the request asks for. Choices without any may be left out
    at the end."""
    told = submit.prior_logprobs
    num_top = min(submit.sampling.logprobs, vocab_size)
    wanted = [len(prior) for prior in priors] if num_top >= 0 else []
    if len(told) > len(wanted):
        raise InvalidField("prior_logprobs", f"are wanted of {len(wanted)} choices, got {len(told)}")
    told = told + [TokenLogprobs(b"")] * (len(wanted) - len(told))
    for choice, (values, num_tokens) in enumerate(zip(told, wanted, strict=True)):
        lengths = len(values.chosen), len(values.top_ids), len(values.top_logprobs)
        right = 4 * num_tokens, 4 * num_tokens * num_top, 4 * num_tokens * num_top
        if lengths != right:
            text = f"choice {choice} has {num_tokens} tokens with {max(0, num_top)} likeliest each: "
            raise InvalidField("prior_logprobs", f"{text}must be {right} bytes, got {lengths}")
    return told


def _checked_finished(submit: Submit) -> list[int]:
    finished, num_choices = submit.finished_choices, submit.sampling.n
    if len(set(finished)) != len(finished) or any(not 0 <= choice < num_choices for choice in finished):
        raise InvalidField("finished_choices", f"must be different numbers under {num_choices}, got {finished}")
    if len(finished) == num_choices:
        raise InvalidField("finished_choices", "names every choice; nothing is left to run")
    return finished


def check_remains(remains: Attached) -> None:
    """Whether it is all of a stream that has ended, with an end for each choice: who attaches to it must come to its
    end. Raises InvalidField. Looks at lengths, not at each token."""
    if len(remains.stream_id) != STREAM_ID_BYTES:
        raise InvalidField("stream_id", f"must have {STREAM_ID_BYTES} bytes, got {len(remains.stream_id)}")
    if len(remains.gateway_state) > MAX_GATEWAY_STATE_BYTES:
        text = f"may have {MAX_GATEWAY_STATE_BYTES} bytes, got {len(remains.gateway_state)}"
        raise InvalidField("gateway_state", text)
    if remains.from_token:
        raise InvalidField("from_token", f"must be 0, got {remains.from_token}")
    num_prompt = _num_packed("prompt_token_ids", remains.prompt_token_ids)
    if not num_prompt:
        raise InvalidField("prompt_token_ids", "must hold at least one token")
    num_choices = len(remains.token_ids)
    if not 1 <= num_choices <= MAX_CHOICES:
        raise InvalidField("token_ids", f"must be of 1 to {MAX_CHOICES} choices, got {num_choices}")
    if sorted(end.choice for end in remains.finished) != list(range(num_choices)):
        ended = sorted(end.choice for end in remains.finished)[: MAX_CHOICES + 1]
        raise InvalidField("finished", f"must have one end for each of {num_choices} choices, got those of {ended}")
    if len(remains.logprobs) not in (0, num_choices):
        raise InvalidField("logprobs", f"must be of none or of {num_choices} choices, got {len(remains.logprobs)}")
    for choice, packed in enumerate(remains.token_ids):
        num_tokens = _num_packed("token_ids", packed)
        if remains.logprobs:
            _check_lengths(f"logprobs[{choice}]", remains.logprobs[choice], num_tokens)
    told = remains.prompt_logprobs
    if told is not None:
        _check_lengths("prompt_logprobs", told, min(told.num_tokens, num_prompt - 1))


def _num_packed(field: str, packed: bytes) -> int:
    if len(packed) % 4:
        raise InvalidField(field, f"packed ids come in groups of 4 bytes, got {len(packed)} bytes")
    return len(packed) // 4


def _check_lengths(field: str, values: TokenLogprobs, num_tokens: int) -> None:
    num_top = values.num_top
    lengths = len(values.chosen), len(values.top_ids), len(values.top_logprobs)
    right = 4 * num_tokens, 4 * num_tokens * num_top, 4 * num_tokens * num_top
    if lengths != right or num_top > MAX_LOGPROBS:
        text = f"must be 4 bytes for each of {num_tokens} tokens, and at most {MAX_LOGPROBS} likeliest, got {lengths}"
        raise InvalidField(field, text)
