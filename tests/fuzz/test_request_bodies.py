"""No body is taken half or breaks anything: its fields work together, or one of them is refused by its name."""

import json

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.schema.chat import ChatRequest, chat_from_fields, parse_chat
from gateway.schema.completion import CompletionRequest, completion_from_fields, parse_completion
from gateway.schema.generate import generate_from_fields
from gateway.schema.options import RequestLimits
from streamkv.errors import InvalidField
from streamkv.sampling import SamplingParams

LIMITS = RequestLimits(vocab_size=100, max_model_len=256)
PROMPTS = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
WAYS = {"messages": (chat_from_fields, parse_chat), "prompt": (completion_from_fields, parse_completion)}

small = st.integers(-1, 6)
odd: st.SearchStrategy[object] = st.sampled_from(
    [None, True, False, "", "x", 1.5, -0.0, 1e308, 2**31, -(2**63), 2**64, 10**30, [], {}, [None]]
)
FIELDS: dict[str, st.SearchStrategy[object]] = {
    "n": small,
    "best_of": small,
    "beam_width": small,
    "use_beam_search": st.booleans(),
    "length_penalty": st.sampled_from([0, 0.5, 1, 1.0, -11]),
    "early_stopping": st.booleans(),
    "temperature": st.sampled_from([0, 0.0, 0.7, 1, 3]),
    "top_p": st.sampled_from([0, 0.5, 1]),
    "top_k": small,
    "min_p": st.sampled_from([0, 0.5, 2]),
    "seed": small,
    "max_tokens": st.integers(0, 300),
    "max_completion_tokens": st.integers(0, 300),
    "min_tokens": small,
    "stop": st.sampled_from(["x", ["x", "y"], ""]),
    "stop_token_ids": st.lists(st.integers(-1, 101), max_size=3),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "ignore_eos": st.booleans(),
    "cache_salt": st.text(max_size=3),
    "priority": small,
    "logprobs": st.booleans() | small,
    "top_logprobs": small,
    "prompt_logprobs": small,
    "return_tokens_as_token_ids": st.booleans(),
    "echo": st.booleans(),
    "presence_penalty": st.sampled_from([-2, 0, 0.5, 3]),
    "frequency_penalty": st.sampled_from([-2, 0, 0.5, 3]),
    "repetition_penalty": st.sampled_from([0, 0.5, 1, 11]),
    "logit_bias": st.dictionaries(
        st.sampled_from(["0", "99", "100", "-1", "x"]), st.sampled_from([-100, 1.5, 101, "x"])
    ),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}, {"type": "x"}]),
    "nonsense": small,
}
bodies = st.dictionaries(st.sampled_from(sorted(FIELDS)), st.none(), max_size=6).flatmap(
    lambda chosen: st.fixed_dictionaries({name: FIELDS[name] | FIELDS[name] | odd for name in chosen})
)


def taken(kind: str, fields: dict[str, object]) -> ChatRequest | CompletionRequest | InvalidField:
    """What becomes of a body, as an object and as bytes."""
    from_fields, from_bytes = WAYS[kind]
    outcomes: list[ChatRequest | CompletionRequest | InvalidField] = []
    for parse, body in ((from_fields, fields), (from_bytes, json.dumps(fields).encode())):
        try:
            outcomes.append(parse(body, LIMITS))  # type: ignore[arg-type]
        except InvalidField as error:
            outcomes.append(error)
    first, second = outcomes
    if isinstance(first, InvalidField):
        # Numbers that JSON cannot carry are refused before any field is looked at
        assert isinstance(second, InvalidField) and second.field in (first.field, "body")
    else:
        assert first == second
    return first


@settings(max_examples=300)
@given(st.sampled_from(sorted(PROMPTS)), bodies)
def test_a_body_is_taken_as_a_whole_or_a_field_of_it_is_named(kind: str, chosen: dict[str, object]) -> None:
    fields = {kind: PROMPTS[kind], **chosen}
    outcome = taken(kind, fields)
    if isinstance(outcome, InvalidField):
        assert outcome.field.partition(".")[0].partition("[")[0] in fields
        assert outcome.message
        return
    options = outcome.options
    try:
        sampling = options.to_sampling(10, 256, seed=7)
    except InvalidField as error:
        assert error.field in ("max_tokens", "max_completion_tokens") and error.field in fields
        return
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sampling), type=SamplingParams) == sampling
    assert sampling.n == (fields.get("n") or 1)
    assert not (options.stream and sampling.ranks_choices)
    assert not (options.stop and sampling.ranks_choices)
    assert sampling.num_sequences >= sampling.n


@settings(max_examples=200)
@given(st.sampled_from(sorted(PROMPTS)), bodies)
def test_a_body_is_the_same_streamed_and_on_a_websocket(kind: str, chosen: dict[str, object]) -> None:
    fields = {kind: PROMPTS[kind], **chosen, "stream": False}
    fields.pop("stream_options", None)
    whole = taken(kind, fields)
    streamed = taken(kind, {**fields, "stream": True})
    try:
        on_socket: object = generate_from_fields({**fields, "stream": None}, LIMITS)
    except InvalidField as error:
        on_socket = error
    if isinstance(whole, InvalidField):
        assert isinstance(streamed, InvalidField) and isinstance(on_socket, InvalidField)
        return
    sampling = whole.options.to_sampling(1, 256, seed=7) if not whole.options.max_tokens else None
    if isinstance(streamed, InvalidField):
        assert streamed.field in ("best_of", "use_beam_search")
        assert isinstance(on_socket, InvalidField) and on_socket.field == streamed.field
        assert sampling is None or sampling.ranks_choices
    else:
        assert streamed == on_socket
        assert streamed.options == msgspec.structs.replace(whole.options, stream=True)
