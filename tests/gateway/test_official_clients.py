"""OpenAI's own client, blocking and not, streamed and not, against every endpoint that it knows here.

(Its Responses API is in test_routes_responses.py, Anthropic's client in test_routes_messages.py.)
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from engine.simulation.simulated_model import end_after
from gateway.limits import Allowance
from tests.support.api_keys import keys_with
from tests.support.running_gateway import MODEL, VOCAB_SIZE, RunningGateway, running_gateway, small_tokenizer
from tests.support.scripted_engine import serving
from tests.support.scripted_executor import ScriptedExecutor
from tests.support.speaking_executor import SpeakingExecutor
from tests.support.tool_models import tool_model

MESSAGES: Any = [{"role": "user", "content": "one two"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE, eos_rule=end_after(40))) as engine:
        async with running_gateway(engine.endpoint) as running:
            yield running


def client_of(gateway: RunningGateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)


async def test_models(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        models = [model async for model in client.models.list()]
        assert [(model.id, model.object, model.owned_by) for model in models] == [(MODEL, "model", "streamkv")]
        assert await client.models.retrieve(MODEL) == models[0]
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("gpt-5")
        assert caught.value.code == "model_not_found"


async def test_chats_whole_and_streamed(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        options: Any = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 12, "temperature": 0, "n": 2}
        whole = await client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
        texts, reasons, usage = ["", ""], ["", ""], None
        stream = await client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == ["length", "length"]
    assert usage is not None and whole.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 24)
    for choice in whole.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2] * 12


async def test_completions_whole_and_streamed(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        options: Any = {"model": MODEL, "prompt": ["one", "two"], "max_tokens": 6, "temperature": 0}
        whole = await client.completions.create(**options, echo=True, logprobs=1)
        stream = await client.completions.create(**options, echo=True, stream=True)
        texts = ["", ""]
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        tokens = await client.completions.create(model=MODEL, prompt=[[5, 6, 7]], max_tokens=2)
    assert texts == [choice.text for choice in whole.choices]
    assert [text[:3] for text in texts] == ["one", "two"]
    assert whole.choices[0].logprobs is not None and tokens.usage is not None and tokens.usage.prompt_tokens == 3


async def test_the_blocking_client_reads_and_streams(gateway: RunningGateway) -> None:
    def ask() -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
            options: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
            whole = client.chat.completions.create(**options).choices[0].message.content
            with client.chat.completions.create(**options, stream=True) as stream:
                pieces = [choice.delta.content or "" for chunk in stream for choice in chunk.choices]
            return whole or "", "".join(pieces)

    whole, streamed = await asyncio.to_thread(ask)
    assert whole == streamed != ""


async def test_a_function_is_called_and_its_result_given_back() -> None:
    tokenizer = tool_model("hermes")
    with serving(SpeakingExecutor(tokenizer, "<think>a sum</think>" + CALL)) as engine:
        async with running_gateway(engine.endpoint, lambda: tokenizer) as gateway, client_of(gateway) as client:
            options: Any = {"model": MODEL, "messages": MESSAGES, "tools": [TOOL], "max_tokens": 200}
            whole = (await client.chat.completions.create(**options)).choices[0]
            async with client.chat.completions.stream(**options) as stream:
                async for _ in stream:
                    pass
                streamed = (await stream.get_final_completion()).choices[0]
            for choice in (whole, streamed):
                assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
                (call,) = choice.message.tool_calls
                assert call.type == "function"
                assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
            messages = [*MESSAGES, whole.message, {"role": "tool", "tool_call_id": call.id, "content": "2"}]
            again = await client.chat.completions.create(**options | {"messages": messages})
            assert again.usage is not None and again.usage.prompt_tokens > 0


async def test_errors_are_the_clients_own(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=5)
        assert refused.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.embeddings.create(model=MODEL, input="x")
        assert refused.value.param == "model" and "embeddings" in refused.value.message
        with pytest.raises(openai.NotFoundError):
            await client.images.generate(prompt="x")


async def test_every_method_is_answered_in_one_way(gateway: RunningGateway) -> None:
    for method, path, status, allow in (
        ("GET", "/v1/nothing", 404, ""),
        ("POST", "/v1/models", 405, "GET,HEAD"),
        ("GET", "/v1/chat/completions", 405, "POST"),
        ("HEAD", "/v1/responses", 405, "POST"),
        ("DELETE", "/health", 405, "GET,HEAD"),
        ("HEAD", "/health", 200, ""),
        ("HEAD", "/v1/models", 200, ""),
        ("HEAD", "/openapi.json", 200, ""),
        ("OPTIONS", "/v1/chat/completions", 204, "POST"),
        ("OPTIONS", "/v1/models", 204, "GET,HEAD"),
        ("OPTIONS", "/v1/nothing", 404, ""),
    ):
        async with gateway.session.request(method, gateway.url + path) as response:
            assert (response.status, response.headers.get("Allow", "")) == (status, allow), f"{method} {path}"
            body = await response.read()
        if status >= 400 and method != "HEAD":
            assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
        else:
            assert body == b""


async def test_the_document_is_served_to_everybody() -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        keys = keys_with(alice=Allowance())
        async with running_gateway(engine.endpoint, small_tokenizer, is_ready=False, api_keys=keys) as gateway:
            status, text = await gateway.get("/openapi.json")
            assert status == 200 and json.loads(text)["openapi"].startswith("3.1")
            assert (await gateway.get("/v1/models"))[0] == 401
