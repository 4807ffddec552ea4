"""best_of and beam search over HTTP: the real gateway, loop and scheduler, against what the search is without them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from engine.simulation.simulated_model import end_after
from gateway import keys
from streamkv.sampling import SamplingParams
from tests.engine.scheduling import ranked
from tests.support.running_gateway import (
    MODEL,
    VOCAB_SIZE,
    RunningGateway,
    eventually,
    eventually_async,
    running_gateway,
    small_tokenizer,
)
from tests.support.scripted_engine import serving
from tests.support.scripted_executor import ScriptedExecutor

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
PROMPT = list(range(30, 50))
FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"n": 2, "best_of": 5, "seed": 3}, {"n": 2, "best_of": 5, "seed": 3}),
    ({"best_of": 3, "seed": 3, "temperature": 0.7}, {"best_of": 3, "seed": 3, "temperature": 0.7}),
    ({"n": 2, "use_beam_search": True, "beam_width": 4}, {"n": 2, "beam_width": 4, "temperature": 0.0}),
    (
        {"n": 3, "use_beam_search": True, "best_of": 3, "length_penalty": 0.5, "temperature": 0},
        {"n": 3, "beam_width": 3, "length_penalty": 0.5, "temperature": 0.0},
    ),
]
"""A body's fields, and the sampling that they ask for."""


def executor(**options: Any) -> ScriptedExecutor:
    return ScriptedExecutor(vocab_size=VOCAB_SIZE, **options)


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    with serving(executor(eos_rule=end_after(12))) as engine:
        async with running_gateway(engine.endpoint) as running:
            yield running


def expected(prompt: list[int], sampling: dict[str, Any], max_tokens: int, **options: Any) -> list[ranked.Choice]:
    params = SamplingParams(**{"seed": 0, "max_tokens": max_tokens, **sampling})
    search = ranked.beams if params.beam_width else ranked.best_of
    return search(executor(**options), prompt, params)


def check(answer: dict[str, Any], choices: list[ranked.Choice]) -> None:
    """The answer has these choices, in this order, and counts their tokens and no others."""
    got = answer["choices"]
    assert [choice["index"] for choice in got] == list(range(len(choices)))
    assert [choice["token_ids"] for choice in got] == [tokens for tokens, _, _ in choices]
    assert [choice["finish_reason"] for choice in got] == [reason for _, reason, _ in choices]
    for choice, (tokens, _, cause) in zip(got, choices, strict=True):
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        assert text == small_tokenizer().decode(tokens[:-1] if cause == "eos" else tokens)
    assert answer["usage"]["completion_tokens"] == sum(len(tokens) for tokens, _, _ in choices)


@pytest.mark.parametrize(("fields", "sampling"), FIELDS)
@pytest.mark.parametrize("max_tokens", [1, 8, 30])
async def test_the_best_choices_are_returned_best_first(
    gateway: RunningGateway, fields: dict[str, Any], sampling: dict[str, Any], max_tokens: int
) -> None:
    request = {"max_tokens": max_tokens, "return_token_ids": True, **fields}
    status, answer = await gateway.post(TEXT, {"prompt": PROMPT, **request})
    assert status == 200
    check(answer, expected(PROMPT, sampling, max_tokens, eos_rule=end_after(12)))
    status, answer = await gateway.post(CHAT, {"messages": [{"role": "user", "content": "one two"}], **request})
    assert status == 200
    check(answer, expected(answer["prompt_token_ids"], sampling, max_tokens, eos_rule=end_after(12)))


async def test_best_of_as_many_as_are_returned_is_streamed(gateway: RunningGateway) -> None:
    request = {"prompt": PROMPT, "max_tokens": 8, "n": 2, "seed": 3}
    _, whole = await gateway.post(TEXT, {**request, "best_of": 2})
    stream = await gateway.events(TEXT, {**request, "best_of": 2})
    assert whole["choices"] == (await gateway.post(TEXT, request))[1]["choices"]
    assert [stream.text(index) for index in range(2)] == [choice["text"] for choice in whole["choices"]]


@pytest.mark.parametrize(("fields", "sampling"), FIELDS)
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_what_ranks_its_choices_is_not_streamed(
    gateway: RunningGateway, path: str, fields: dict[str, Any], sampling: dict[str, Any]
) -> None:
    prompt = {"prompt": PROMPT} if path == TEXT else {"messages": [{"role": "user", "content": "one"}]}
    status, answer = await gateway.post(path, {**prompt, **fields, "stream": True})
    assert status == 400
    assert answer["error"]["param"] == ("use_beam_search" if "beam_width" in sampling else "best_of")
    assert gateway.app[keys.GENERATION].num_live == 0


async def test_the_openai_client_s_best_of_works(gateway: RunningGateway) -> None:
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as client:
        answer = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, n=2, best_of=4, seed=9)
        with pytest.raises(openai.BadRequestError, match="best_of"):
            await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, n=2, best_of=4, stream=True)
    choices = expected(PROMPT, {"n": 2, "best_of": 4, "seed": 9}, 8, eos_rule=end_after(12))
    assert [choice.text for choice in answer.choices] == [small_tokenizer().decode(tokens) for tokens, _, _ in choices]


async def test_ranked_choices_have_no_time_to_a_first_token(gateway: RunningGateway) -> None:
    await gateway.post(TEXT, {"prompt": PROMPT, "max_tokens": 8, "best_of": 4})
    figures = await gateway.metrics()
    assert figures['gateway_requests_total{outcome="length"}'] == 1
    assert (figures["time_to_first_token_seconds_count"], figures["e2e_request_latency_seconds_count"]) == (0, 1)


@pytest.mark.parametrize("fields", [{"best_of": 4}, {"use_beam_search": True, "beam_width": 4}])
async def test_who_goes_or_takes_too_long_leaves_no_block_behind(fields: dict[str, Any]) -> None:
    async def is_idle(gateway: RunningGateway) -> bool:
        figures = await gateway.metrics()
        return (figures["num_running_sequences"], figures["num_allocated_blocks"]) == (0, 0)

    with serving(executor(step_s=0.005)) as engine:
        async with running_gateway(engine.endpoint, request_timeout_s=0.6) as gateway:
            body = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, **fields}
            request = asyncio.create_task(gateway.post(TEXT, body))
            await eventually(lambda: gateway.app[keys.GENERATION].num_live == 1)
            await asyncio.sleep(0.1)
            assert not await is_idle(gateway)
            request.cancel()
            await eventually_async(lambda: is_idle(gateway))
            status, answer = await gateway.post(TEXT, body)
            assert (status, answer["error"]["code"]) == (504, "timeout")
            await eventually_async(lambda: is_idle(gateway))


@pytest.mark.parametrize(("fields", "sampling"), FIELDS[::2])
async def test_a_new_engine_gives_the_same_choices(fields: dict[str, Any], sampling: dict[str, Any]) -> None:
    with serving(executor(step_s=0.01)) as engine:
        async with running_gateway(engine.endpoint) as gateway:
            body = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True, **fields}
            request = asyncio.create_task(gateway.post(TEXT, body))
            await eventually(lambda: gateway.app[keys.GENERATION].num_live == 1)
            await asyncio.sleep(0.1)
            engine.stop()
            with serving(executor(), endpoint=engine.endpoint):
                status, answer = await request
            assert status == 200 and gateway.app[keys.ENGINE].num_resubmitted == 1
    check(answer, expected(PROMPT, {**sampling, "ignore_eos": True}, 40))
