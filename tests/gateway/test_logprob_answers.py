"""Log probabilities, echoes and several prompts over HTTP, streamed and whole: real gateway, real engine loop."""

import codecs
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec
import openai
import pytest

from engine.simulation.simulated_model import end_after, logprob
from streamkv.sampling import SamplingParams
from tests.support.running_gateway import (
    VOCAB_SIZE,
    Events,
    RunningGateway,
    eventually_async,
    running_gateway,
    small_tokenizer,
)
from tests.support.scripted_engine import RunningEngine, serving
from tests.support.scripted_executor import ScriptedExecutor

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
PROMPT = list(range(30, 50))
OTHER = list(range(60, 73))
TOKENIZER = small_tokenizer()
USAGE = {"stream_options": {"include_usage": True}}


def executor(**options: Any) -> ScriptedExecutor:
    return ScriptedExecutor(vocab_size=VOCAB_SIZE, **options)


@pytest.fixture(scope="module")
def engine() -> Iterator[RunningEngine]:
    with serving(executor(eos_rule=end_after(400)), max_num_batched_tokens=64, enable_prefix_caching=False) as running:
        yield running


@pytest.fixture
async def gateway(engine: RunningEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway(engine.endpoint) as running:
        yield running


def generated(prompt: Sequence[int], num_tokens: int) -> list[int]:
    return executor().expected_tokens(
        prompt, num_tokens, SamplingParams(seed=0, max_tokens=num_tokens, temperature=0.0)
    )


def body(**more: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, **more}


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "one two"}], "max_tokens": 12, "temperature": 0, **more}


def text_of(token_id: int) -> str:
    return TOKENIZER.vocabulary.pieces[token_id].decode("utf-8", "replace")


def top_of(token_id: int, position: int, num_top: int) -> list[tuple[int, float]]:
    return [((token_id + place) % VOCAB_SIZE, logprob(token_id, position) - place / 64) for place in range(num_top)]


def offsets_of(token_ids: Sequence[int]) -> list[int]:
    """Characters that are certain before each token; special ones have no text."""
    vocabulary = TOKENIZER.vocabulary
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets = [0]
    for token_id in token_ids:
        piece = b"" if vocabulary.is_special[token_id] else vocabulary.pieces[token_id]
        offsets.append(offsets[-1] + len(decoder.decode(piece)))
    return offsets[:-1]


def chat_content(token_ids: Sequence[int], start: int, num_top: int) -> list[dict[str, Any]]:
    def token(token_id: int, value: float) -> dict[str, Any]:
        piece = TOKENIZER.vocabulary.pieces[token_id]
        return {"token": text_of(token_id), "logprob": value, "bytes": list(piece)}

    return [
        token(token_id, logprob(token_id, position))
        | {"top_logprobs": [token(*likely) for likely in top_of(token_id, position, num_top)]}
        for position, token_id in enumerate(token_ids, start)
    ]


def columns(token_ids: Sequence[int], start: int, num_top: int, offset: int = 0) -> dict[str, list[Any]]:
    """The completions' form, of tokens whose first one is number `start` of its sequence."""
    likely = [
        dict(
            reversed(
                [
                    (text_of(other), value)
                    for other, value in top_of(token_id, position, max(1, num_top))  # the token itself is the likeliest
                ]
            )
        )
        for position, token_id in enumerate(token_ids, start)
    ]
    return {
        "tokens": [text_of(token_id) for token_id in token_ids],
        "token_logprobs": [logprob(token_id, position) for position, token_id in enumerate(token_ids, start)],
        "top_logprobs": likely,
        "text_offset": [offset + chars for chars in offsets_of(token_ids)],
    }


def echoed(prompt: Sequence[int], num_top: int) -> dict[str, list[Any]]:
    found = columns(prompt, 0, num_top)
    return found | {
        "token_logprobs": [None, *found["token_logprobs"][1:]],
        "top_logprobs": [None, *found["top_logprobs"][1:]],
    }


def joined(parts: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    return {name: [entry for part in parts for entry in part[name]] for name in parts[0]}


def gathered(stream: Events, is_chat: bool) -> dict[int, dict[str, Any]]:
    """What the events of each choice come to, in the form of a whole answer's choice."""
    choices: dict[int, dict[str, Any]] = {}
    for event in stream.objects:
        for choice in event["choices"]:
            whole = choices.setdefault(choice["index"], {"text": "", "logprobs": None, "ends": []})
            assert not whole["ends"], "something came after the choice's end"
            whole["text"] += choice["delta"].get("content", "") if is_chat else choice["text"]
            if choice["logprobs"] is not None:
                parts = ([whole["logprobs"]] if whole["logprobs"] else []) + [
                    {"content": choice["logprobs"]["content"]} if is_chat else choice["logprobs"]
                ]
                whole["logprobs"] = joined(parts)
            if choice["finish_reason"]:
                whole["ends"].append((choice["finish_reason"], choice["stop_reason"]))
            for name in ("token_ids", "prompt_token_ids", "prompt_logprobs"):
                if name in choice:
                    assert name == "token_ids" or name not in whole
                    whole[name] = whole.get(name, []) + choice[name]
    return choices


async def both(gateway: RunningGateway, path: str, request: dict[str, Any]) -> dict[str, Any]:
    """The whole answer, which the streamed one must come to."""
    is_chat = path == CHAT
    status, answer = await gateway.post(path, request)
    assert status == 200, answer
    stream = await gateway.events(path, {**request, **USAGE})
    assert stream.data[-1] == "[DONE]" and stream.data.count("[DONE]") == 1
    assert stream.objects[-1]["choices"] == [] and stream.usage == answer["usage"]
    choices = gathered(stream, is_chat)
    assert sorted(choices) == [choice["index"] for choice in answer["choices"]]
    for choice in answer["choices"]:
        streamed = choices[choice["index"]]
        logprobs = choice["logprobs"]
        if is_chat and logprobs is not None:
            assert logprobs.pop("refusal") is None
        assert streamed["text"] == (choice["message"]["content"] if is_chat else choice["text"])
        assert streamed["logprobs"] == logprobs
        assert streamed["ends"] == [(choice["finish_reason"], choice["stop_reason"])]
        for name in ("token_ids", "prompt_token_ids", "prompt_logprobs"):
            assert streamed.get(name) == choice.get(name), name
    if is_chat:
        roles = [c["index"] for event in stream.objects for c in event["choices"] if "role" in c["delta"]]
        assert sorted(roles) == sorted(choices)
        beside = [event["prompt_logprobs"] for event in stream.objects if "prompt_logprobs" in event]
        assert beside == ([answer["prompt_logprobs"]] if "prompt_logprobs" in answer else [])
    return answer


# Log probabilities of the answer


@pytest.mark.parametrize("num_top", [0, 3])
async def test_a_chat_tells_those_of_each_token(gateway: RunningGateway, num_top: int) -> None:
    request = chat(logprobs=True, top_logprobs=num_top, return_token_ids=True)
    answer = await both(gateway, CHAT, request)
    choice = answer["choices"][0]
    assert choice["logprobs"]["content"] == chat_content(choice["token_ids"], answer["usage"]["prompt_tokens"], num_top)
    assert len(choice["token_ids"]) == 12


@pytest.mark.parametrize("num_top", [0, 3])
async def test_a_completion_tells_them_in_columns(gateway: RunningGateway, num_top: int) -> None:
    answer = await both(gateway, TEXT, body(logprobs=num_top))
    assert answer["choices"][0]["logprobs"] == columns(generated(PROMPT, 12), len(PROMPT), num_top)


async def test_token_ids_stand_for_texts_where_that_is_asked_for(gateway: RunningGateway) -> None:
    answer = await both(gateway, TEXT, body(logprobs=1, return_tokens_as_token_ids=True))
    ids = generated(PROMPT, 12)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{token_id}" for token_id in ids]
    assert [list(likely) for likely in logprobs["top_logprobs"]] == [[f"token_id:{token_id}"] for token_id in ids]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 3, "temperature": 1.0, "seed": 4},
        {"n": 2, "best_of": 4, "temperature": 1.0, "seed": 4},
        {"stop": ["\x7fnever", "t"], "max_tokens": 60},
        {"stop": ["e"], "n": 2, "seed": 9, "temperature": 1.0, "include_stop_str_in_output": True},
        {"max_tokens": 1},
        {"return_token_ids": True, "n": 2, "temperature": 0.7, "seed": 1},
        {"prompt_logprobs": 2, "n": 2, "seed": 3, "temperature": 0.7},
        {"presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5, "logit_bias": {"7": 4}},
    ],
    ids=lambda more: " ".join(more) or "plain",
)
async def test_streamed_and_whole_answers_tell_the_same(
    gateway: RunningGateway, path: str, more: dict[str, Any]
) -> None:
    plain = chat() if path == CHAT else body()
    wished = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    if "best_of" in more:
        status, answer = await gateway.post(path, plain | wished | more)
        assert status == 200
    else:
        answer = await both(gateway, path, plain | wished | more)
    entries = [
        choice["logprobs"]["content"] if path == CHAT else choice["logprobs"]["tokens"] for choice in answer["choices"]
    ]
    assert sum(map(len, entries)) == answer["usage"]["completion_tokens"] or "best_of" in more


async def test_the_end_of_sequence_is_a_token_that_is_told(gateway: RunningGateway) -> None:
    with serving(executor(eos_rule=end_after(6)), enable_prefix_caching=False) as engine:
        async with running_gateway(engine.endpoint) as other:
            answer = await both(other, TEXT, body(logprobs=0))
    logprobs = answer["choices"][0]["logprobs"]
    text = TOKENIZER.decode(generated(PROMPT, 6))
    assert (logprobs["tokens"][-1], logprobs["text_offset"][-1]) == ("<|im_end|>", len(text))
    assert len(logprobs["tokens"]) == 7 and answer["choices"][0]["text"] == text


# The prompt's


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("num_choices", [1, 2])
async def test_those_of_the_prompt_stand_where_vllm_puts_them(
    gateway: RunningGateway, path: str, num_choices: int
) -> None:
    request = (chat() if path == CHAT else body()) | {"prompt_logprobs": 2, "return_token_ids": True, "n": num_choices}
    answer = await both(gateway, path, request)
    owners = [answer] if path == CHAT else answer["choices"]
    assert all("prompt_logprobs" not in other for other in ([*answer["choices"]] if path == CHAT else [answer]))
    for owner in owners:
        prompt = owner["prompt_token_ids"]
        assert owner["prompt_logprobs"] == [
            None,
            *(
                {
                    str(other): {"logprob": value, "rank": rank, "decoded_token": text_of(other)}
                    for rank, (other, value) in enumerate(top_of(token_id, position, 2), start=1)
                }
                for position, token_id in enumerate(prompt[1:], start=1)
            ),
        ]


async def test_the_whole_prompt_is_computed_for_them() -> None:
    with serving(executor()) as engine:
        async with running_gateway(engine.endpoint) as gateway:
            for wish, num_cached in (({}, 0), ({}, len(PROMPT) - 1), ({"prompt_logprobs": 0}, 0)):
                _, answer = await gateway.post(TEXT, body(**wish))
                assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": num_cached}


async def test_a_long_prompt_in_many_chunks_is_told_as_one(gateway: RunningGateway) -> None:
    prompt = [3 + index % 400 for index in range(500)]
    answer = await both(gateway, TEXT, body(prompt=prompt, prompt_logprobs=0, max_tokens=2))
    told = answer["choices"][0]["prompt_logprobs"]
    assert [list(map(int, entry or {})) for entry in told] == [[], *([token_id] for token_id in prompt[1:])]
    assert [entry[str(token_id)]["logprob"] for token_id, entry in zip(prompt[1:], told[1:], strict=True)] == [
        logprob(token_id, position) for position, token_id in enumerate(prompt[1:], start=1)
    ]


# Echoes


@pytest.mark.parametrize("more", [{}, {"n": 3, "temperature": 1.0, "seed": 4}, {"stop": ["a"], "max_tokens": 60}])
async def test_an_echo_is_the_prompt_before_the_answer(gateway: RunningGateway, more: dict[str, Any]) -> None:
    for prompt, text in (("one two <|im_end|>", "one two <|im_end|>"), (PROMPT, TOKENIZER.decode(PROMPT))):
        plain = await both(gateway, TEXT, body(prompt=prompt, **more))
        answer = await both(gateway, TEXT, body(prompt=prompt, echo=True, **more))
        assert [choice["text"] for choice in answer["choices"]] == [
            text + choice["text"] for choice in plain["choices"]
        ]
        for name in ("prompt_tokens", "completion_tokens"):
            assert answer["usage"][name] == plain["usage"][name]


@pytest.mark.parametrize("num_top", [0, 3])
async def test_an_echo_brings_the_log_probabilities_of_the_prompt(gateway: RunningGateway, num_top: int) -> None:
    answer = await both(gateway, TEXT, body(echo=True, logprobs=num_top, n=2))
    text = TOKENIZER.decode(PROMPT)
    own = columns(generated(PROMPT, 12), len(PROMPT), num_top, len(text))
    for choice in answer["choices"]:
        assert choice["logprobs"] == joined([echoed(PROMPT, num_top), own])
        assert "prompt_logprobs" not in choice
    with_both = await both(gateway, TEXT, body(echo=True, logprobs=num_top, prompt_logprobs=1))
    assert with_both["choices"][0]["logprobs"] == answer["choices"][0]["logprobs"]
    assert [len(entry) for entry in with_both["choices"][0]["prompt_logprobs"][1:]] == [1] * (len(PROMPT) - 1)


async def test_with_no_token_asked_for_a_prompt_is_scored(gateway: RunningGateway) -> None:
    answer = await both(gateway, TEXT, body(echo=True, logprobs=2, max_tokens=0, return_token_ids=True))
    choice = answer["choices"][0]
    assert choice["text"] == TOKENIZER.decode(PROMPT)
    assert choice["logprobs"] == echoed(PROMPT, 2)
    assert (choice["token_ids"], choice["finish_reason"]) == ([], "length")
    assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["total_tokens"] == len(PROMPT)
    plain = await both(gateway, TEXT, body(prompt="one", echo=True, max_tokens=0))
    assert plain["choices"][0]["text"] == "one" and plain["choices"][0]["logprobs"] is None
    only = await both(gateway, TEXT, body(prompt_logprobs=0, max_tokens=0))
    assert only["choices"][0]["text"] == "" and len(only["choices"][0]["prompt_logprobs"]) == len(PROMPT)


# Several prompts


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 2, "temperature": 1.0, "seed": 5},
        {"echo": True, "logprobs": 1, "n": 2},
        {"echo": True, "logprobs": 0, "max_tokens": 0},
        {"return_token_ids": True, "prompt_logprobs": 1},
        {"stop": ["a"], "max_tokens": 60},
    ],
    ids=lambda more: " ".join(more) or "plain",
)
@pytest.mark.parametrize("prompts", [["one two", "thrée", "one two"], [PROMPT, OTHER]], ids=["texts", "ids"])
async def test_each_prompt_is_answered_as_alone(
    gateway: RunningGateway, prompts: list[Any], more: dict[str, Any]
) -> None:
    alone = [await both(gateway, TEXT, body(prompt=prompt, **more)) for prompt in prompts]
    answer = await both(gateway, TEXT, body(prompt=prompts, **more))
    expected = [choice for one in alone for choice in one["choices"]]
    assert answer["choices"] == [choice | {"index": index} for index, choice in enumerate(expected)]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][name] == sum(one["usage"][name] for one in alone)


async def test_usage_counts_up_over_all_prompts(gateway: RunningGateway) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await gateway.events(TEXT, body(prompt=[PROMPT, OTHER], max_tokens=5, stream_options=options))
    counts = [event["usage"]["completion_tokens"] for event in stream.objects]
    assert counts == sorted(counts) and counts[-1] == 10
    assert {event["usage"]["prompt_tokens"] for event in stream.objects} == {len(PROMPT) + len(OTHER)}


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_one_bad_prompt_refuses_all_and_is_named(gateway: RunningGateway, is_streamed: bool) -> None:
    long = [5] * 2047
    for prompts, field in (
        ([PROMPT, long, OTHER], "max_tokens"),
        (["x", ""], "prompt[1]"),
        ([PROMPT, [VOCAB_SIZE]], "prompt[1][0]"),
    ):
        status, answer = await gateway.post(TEXT, body(prompt=prompts, stream=is_streamed))
        assert (status, answer["error"]["param"]) == (400, field)
    await eventually_async(lambda: is_idle(gateway))


async def is_idle(gateway: RunningGateway) -> bool:
    figures = await gateway.metrics()
    names = ("num_running_requests", "num_waiting_requests", "num_allocated_blocks", "gateway_live_streams")
    return all(figures[name] == 0 for name in names)


async def test_who_hangs_up_ends_every_prompt() -> None:
    with serving(executor(step_s=0.005)) as engine:
        async with running_gateway(engine.endpoint) as gateway:
            request = body(prompt=[PROMPT, OTHER, "x"], max_tokens=1500, stream=True)
            async with gateway.session.post(gateway.url + TEXT, json=request) as response:
                await response.content.readany()
                assert (await gateway.metrics())["gateway_live_streams"] == 3
            await eventually_async(lambda: is_idle(gateway), timeout_s=30)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_prompt_that_the_engine_fails_on_fails_all(is_streamed: bool) -> None:
    with serving(executor(poison_token=77, step_s=0.002)) as engine:
        async with running_gateway(engine.endpoint) as gateway:
            request = body(prompt=[PROMPT, [77, 78], OTHER], max_tokens=500)
            if is_streamed:
                stream = await gateway.events(TEXT, request)
                errors = [event for event in stream.objects if "error" in event] if stream.status == 200 else [{}]
                assert stream.status in (200, 500) and len(errors) == 1
            else:
                status, answer = await gateway.post(TEXT, request)
                assert (status, answer["error"]["code"]) == (500, "engine_error")
            await eventually_async(lambda: is_idle(gateway), timeout_s=30)


# The official client


@pytest.fixture
async def client(gateway: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as found:
        yield found


async def test_the_official_client_reads_a_chats(client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "one two"}]
    options: Any = {"messages": messages, "model": "", "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    whole = await client.chat.completions.create(**options, temperature=0)
    stream = await client.chat.completions.create(**options, temperature=0, stream=True)
    streamed = [
        entry
        async for chunk in stream
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content or []
    ]
    told = whole.choices[0].logprobs
    assert told is not None and told.content == streamed
    assert [len(entry.top_logprobs) for entry in streamed] == [2] * 6
    assert b"".join(bytes(entry.bytes or []) for entry in streamed).decode("utf-8", "replace") == (
        whole.choices[0].message.content
    )


async def test_the_official_client_reads_a_completions(client: openai.AsyncOpenAI) -> None:
    options: Any = {"prompt": ["one", "two"], "model": "", "max_tokens": 4, "logprobs": 2, "echo": True, "n": 2}
    whole = await client.completions.create(**options, seed=1)
    stream = await client.completions.create(**options, seed=1, stream=True)
    tokens: dict[int, list[str]] = {}
    async for chunk in stream:
        for choice in chunk.choices:
            if choice.logprobs is not None:
                tokens.setdefault(choice.index, []).extend(choice.logprobs.tokens or [])
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    for choice in whole.choices:
        told = choice.logprobs
        assert told is not None and told.tokens == tokens[choice.index]
        assert told.token_logprobs is not None and told.token_logprobs[0] is None
        for start, token in zip(told.text_offset or [], told.tokens or [], strict=True):
            assert "\ufffd" in token or "<|" in token or choice.text.startswith(token, start)


async def test_the_official_client_is_told_what_is_wrong(client: openai.AsyncOpenAI) -> None:
    for options, field in (
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"100000": 1}}, "logit_bias[100000]"),
        ({"logit_bias": {"7": 101}}, "logit_bias[7]"),
    ):
        wished: Any = options
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="", messages=[{"role": "user", "content": "x"}], **wished)
        assert caught.value.param == field


# On a WebSocket


@pytest.mark.parametrize("protocol", ["streamkv.json", "streamkv.msgpack"])
async def test_a_websocket_tells_them_in_the_chats_form(gateway: RunningGateway, protocol: str) -> None:
    async def generate(**fields: Any) -> list[dict[str, Any]]:
        message = {"type": "generate", "id": "a", **fields}
        events = []
        async with gateway.session.ws_connect(gateway.url + "/v1/stream", protocols=[protocol]) as socket:
            if protocol == "streamkv.json":
                await socket.send_json(message)
            else:
                await socket.send_bytes(msgspec.msgpack.encode(message))
            async for frame in socket:
                event = json.loads(frame.data) if protocol == "streamkv.json" else msgspec.msgpack.decode(frame.data)
                events.append(event)
                if event["type"] in ("done", "error"):
                    break
        return events

    ids = generated(PROMPT, 12)
    events = await generate(**body(logprobs=2, echo=True, prompt_logprobs=1, return_token_ids=True))
    deltas = [event for event in events if event["type"] == "delta"]
    told = [entry for delta in deltas for entry in delta.get("logprobs", [])]
    first, *rest = told
    assert first | {"logprob": None} == chat_content(PROMPT[:1], 0, 0)[0] | {"logprob": None}
    assert rest == chat_content([*PROMPT, *ids], 0, 2)[1:]
    assert "".join(delta["text"] for delta in deltas) == TOKENIZER.decode(PROMPT) + TOKENIZER.decode(ids)
    assert [len(delta["prompt_logprobs"]) for delta in deltas if "prompt_logprobs" in delta] == [len(PROMPT)]
    for delta in deltas:
        assert len(delta["token_ids"]) == len(delta.get("logprobs", [])) or "prompt_logprobs" in delta
    events = await generate(**chat(logprobs=True))
    assert sum(len(event["logprobs"]) for event in events if event["type"] == "delta") == 12
    events = await generate(**chat(top_logprobs=1))
    assert [event["error"]["param"] for event in events] == ["top_logprobs"]


# Taken up again


async def test_who_takes_an_answer_up_again_gets_the_rest_with_its_log_probabilities() -> None:
    request = body(logprobs=1, echo=True, prompt_logprobs=0, max_tokens=40, stream=True, attach_grace_s=30)
    with serving(executor(step_s=0.01)) as engine:
        async with running_gateway(engine.endpoint) as first, running_gateway(engine.endpoint) as second:
            whole = (await first.post(TEXT, body(logprobs=1, echo=True, prompt_logprobs=0, max_tokens=40)))[1]
            for num_events in (1, 2, 7):
                async with first.session.post(first.url + TEXT, json=request) as response:
                    lines: list[bytes] = []
                    while sum(line.startswith(b"data: ") for line in lines) < num_events:
                        lines.append(await response.content.readline())
                event_id = next(line for line in reversed(lines) if line.startswith(b"id: "))[4:].decode().strip()
                headers = {"Last-Event-ID": event_id}
                async with second.session.post(second.url + TEXT, json=request, headers=headers) as response:
                    raw = b"".join(lines) + b"\n" + await response.read()
                choice = gathered(Events(200, {}, raw), is_chat=False)[0]
                assert {name: choice[name] for name in ("text", "logprobs", "prompt_logprobs")} == {
                    name: whole["choices"][0][name] for name in ("text", "logprobs", "prompt_logprobs")
                }
                assert choice["ends"] == [("length", None)]


# An engine that ends


async def test_an_answer_goes_on_over_an_engines_end_with_every_log_probability() -> None:
    request = body(logprobs=1, echo=True, max_tokens=60, n=2, stream=True, return_token_ids=True)
    with serving(executor(step_s=0.01)) as engine:
        async with running_gateway(engine.endpoint) as gateway:
            _, whole = await gateway.post(TEXT, request | {"stream": False})
            async with gateway.session.post(gateway.url + TEXT, json=request) as response:
                raw = b""
                while raw.count(b"data: ") < 20:
                    raw += await response.content.readany()
                engine.stop()
                with serving(executor(step_s=0.001), endpoint=engine.endpoint):
                    raw += await response.content.read()
    choices = gathered(Events(200, {}, raw), is_chat=False)
    assert [choices[index]["logprobs"] for index in (0, 1)] == [choice["logprobs"] for choice in whole["choices"]]
    assert [choices[index]["text"] for index in (0, 1)] == [choice["text"] for choice in whole["choices"]]
    assert list(itertools.chain.from_iterable(choices[index]["ends"] for index in (0, 1))) == [("length", None)] * 2
