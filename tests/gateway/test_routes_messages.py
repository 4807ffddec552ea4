"""/v1/messages: Anthropic's API over the same core, by raw HTTP and with Anthropic's own client."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from engine.simulation.simulated_model import end_after
from gateway.admission import UnknownModel
from gateway.auth import Unauthorized
from gateway.errors import anthropic_error_body, describe, in_shape_of
from gateway.failures import EngineFault, Overloaded
from gateway.limits import Allowance
from gateway.message_answer import AnswerBrokenOff
from streamkv.errors import InvalidField
from tests.support.api_keys import ALICE, keys_with
from tests.support.running_gateway import MODEL, VOCAB_SIZE, Events, RunningGateway, running_gateway, small_tokenizer
from tests.support.saying import saying
from tests.support.scripted_engine import serving
from tests.support.scripted_executor import ScriptedExecutor

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TOOL = {
    "name": "add",
    "description": "adds",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    executor = ScriptedExecutor(vocab_size=VOCAB_SIZE, eos_rule=end_after(40))
    with serving(executor, enable_prefix_caching=False) as engine:
        async with running_gateway(engine.endpoint) as running:
            yield running


def body(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "one two"}], "max_tokens": 12, "temperature": 0, **more}


def gather(events: Events) -> dict[str, Any]:
    """The message that a stream told of, put together."""
    message: dict[str, Any] = {}
    arguments = ""
    for event in events.objects:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                arguments = ""
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "input_json_delta":
                        arguments += delta["partial_json"]
            case "content_block_stop":
                if message["content"][event["index"]]["type"] == "tool_use":
                    message["content"][event["index"]]["input"] = json.loads(arguments)
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    return message


async def test_an_answer_is_that_of_the_same_chat(gateway: RunningGateway) -> None:
    status, message = await gateway.post(PATH, body(system="be brief"))
    _, chat = await gateway.post(
        "/v1/chat/completions",
        {
            "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one two"}],
            "max_tokens": 12,
            "temperature": 0,
        },
    )
    assert status == 200
    (block,) = message["content"]
    assert (block["type"], block["text"]) == ("text", chat["choices"][0]["message"]["content"])
    assert message["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert message["usage"]["output_tokens"] == 12
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", MODEL)


async def test_the_events_come_in_their_order_and_each_once(gateway: RunningGateway) -> None:
    events = await gateway.events(PATH, body())
    names = [event["type"] for event in events.objects]
    assert [name for name in names if name != "content_block_delta"] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert [line.removeprefix("event: ") for line in events.raw.decode().split("\n") if line[:6] == "event:"] == names
    assert b"[DONE]" not in events.raw
    start = events.objects[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert start["usage"]["input_tokens"] > 0


@pytest.mark.parametrize(
    "more", [{"max_tokens": 1}, {"max_tokens": 12}, {"max_tokens": 100}, {"max_tokens": 100, "stop_sequences": ["e"]}]
)
async def test_streamed_and_whole_answers_are_the_same(gateway: RunningGateway, more: dict[str, Any]) -> None:
    _, whole = await gateway.post(PATH, body(**more))
    streamed = gather(await gateway.events(PATH, body(**more)))
    assert whole.pop("id").startswith("msg_") and streamed.pop("id").startswith("msg_")
    assert whole == streamed


async def test_a_stop_sequence_is_named_and_not_shown() -> None:
    async with saying("one, two, STOP three") as gateway:
        for streamed in (False, True):
            request = body(max_tokens=100, stop_sequences=["never", "STOP"])
            message = (
                gather(await gateway.events(PATH, request)) if streamed else (await gateway.post(PATH, request))[1]
            )
            assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "STOP")
            assert message["content"][0]["text"] == "one, two, "
        _, message = await gateway.post(PATH, body(max_tokens=100))
        assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)


async def test_what_was_found_in_the_cache_is_counted_beside_the_rest() -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        async with running_gateway(engine.endpoint) as gateway:
            _, first = await gateway.post(PATH, body())
            second = gather(await gateway.events(PATH, body()))
    num_prompt = first["usage"]["input_tokens"]
    assert first["usage"]["cache_read_input_tokens"] == 0
    assert second["usage"]["cache_read_input_tokens"] == num_prompt - 1
    assert second["usage"]["input_tokens"] == 1


async def test_a_conversation_of_blocks_is_that_of_a_chat() -> None:
    async with saying("fine") as gateway:
        request = {
            "system": [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "add"}, {"type": "text", "text": "1"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": ""},
                        {"type": "text", "text": "so", "citations": None},
                        {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}]},
                        {"type": "text", "text": "and?"},
                    ],
                },
            ],
            "tools": [TOOL],
        }
        call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        chat = {
            "messages": [
                {"role": "system", "content": "be"},
                {"role": "user", "content": "add\n1"},
                {
                    "role": "assistant",
                    "content": "so",
                    "reasoning_content": "hm",
                    "tool_calls": [{"id": "c1", **call}],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "2"},
                {"role": "user", "content": "and?"},
            ],
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "add", "description": "adds", "parameters": TOOL["input_schema"]},
                }
            ],
        }
        _, expected = await gateway.post("/tokenize", chat)
        status, count = await gateway.post(COUNT, request)
        assert (status, count) == (200, {"input_tokens": expected["count"]})
        status, message = await gateway.post(PATH, {**request, "max_tokens": 5})
        assert status == 200 and message["usage"]["input_tokens"] == expected["count"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_thinking_text_and_tools_are_blocks_of_their_own(streamed: bool) -> None:
    async with saying("<think>hm, a sum</think>Let me add." + CALL + CALL.replace("1", "2")) as gateway:
        request = body(max_tokens=500, tools=[TOOL])
        message = gather(await gateway.events(PATH, request)) if streamed else (await gateway.post(PATH, request))[1]
    thought, text, first, second = message["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "hm, a sum")
    assert (text["type"], text["text"]) == ("text", "Let me add.")
    assert [(use["type"], use["name"], use["input"]) for use in (first, second)] == [
        ("tool_use", "add", {"a": 1}),
        ("tool_use", "add", {"a": 2}),
    ]
    assert first["id"] != second["id"]
    assert message["stop_reason"] == "tool_use"


async def test_a_tool_use_that_was_cut_off_says_so_and_keeps_what_came() -> None:
    async with saying('<tool_call>\n{"name": "add", "arguments": {"a": 1234567890, "b": [1, 2, 3, 4]}}') as gateway:
        message: dict[str, Any] = {"content": []}
        for max_tokens in range(20, 80, 4):
            _, message = await gateway.post(PATH, body(max_tokens=max_tokens, tools=[TOOL]))
            if message["content"] and message["content"][-1]["type"] == "tool_use":
                break
    (use,) = message["content"]
    assert message["stop_reason"] == "max_tokens"
    assert use["type"] == "tool_use" and isinstance(use["input"], dict)


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_does_not_work_is_refused_by_the_name_that_the_client_gave_it(streamed: bool) -> None:
    """Also what is known only with the prompt encoded; tests/gateway/schema/test_anthropic.py has the rest."""
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]}
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        async with running_gateway(engine.endpoint, small_tokenizer.__wrapped__) as gateway:
            for more, field in (
                ({"max_tokens": None}, "max_tokens"),
                ({"max_tokens": 2047}, "max_tokens"),
                ({"stop_sequences": [""]}, "stop_sequences[0]"),
                ({"tools": [TOOL]}, "tools"),
                ({"messages": [{"role": "user", "content": "x"}, result]}, "messages[1].content[0].role"),
            ):
                status, answer = await gateway.post(PATH, body(**more, stream=streamed))
                assert status == 400
                assert answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"
                assert answer["error"]["message"].startswith(f"{field}: ")


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_that_takes_too_long_ends_with_an_error(streamed: bool) -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE, step_s=0.01)) as engine:
        async with running_gateway(engine.endpoint, request_timeout_s=0.3) as gateway:
            request = body(max_tokens=2000)
            if streamed:
                events = await gateway.events(PATH, request)
                assert events.status == 200
                answer = events.objects[-1]
                assert [event["type"] for event in events.objects].count("error") == 1
                assert "message_stop" not in [event["type"] for event in events.objects]
            else:
                status, answer = await gateway.post(PATH, request)
                assert status == 504
    assert (answer["type"], answer["error"]["type"]) == ("error", "timeout_error")
    assert "timeout" in answer["error"]["message"]


async def test_a_silent_stream_is_pinged() -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE, block_at_step={0: 0.5})) as engine:
        async with running_gateway(engine.endpoint, keepalive_s=0.1) as gateway:
            events = await gateway.events(PATH, body(max_tokens=2))
    names = [event["type"] for event in events.objects]
    assert names.count("ping") > 2 and names[-1] == "message_stop"


async def test_every_error_below_messages_has_anthropics_shape(gateway: RunningGateway) -> None:
    async with gateway.session.get(gateway.url + PATH) as response:
        assert response.status == 405 and response.headers["Allow"] == "POST"
        assert (await response.json())["type"] == "error"
    for path in (PATH, f"{PATH}/batches"):
        async with gateway.session.post(gateway.url + path, data=b"{", headers={"Content-Type": "text/html"}) as answer:
            assert answer.status in (404, 415)
            assert (await answer.json())["error"]["type"] in ("not_found_error", "invalid_request_error")
    status, answer_fields = await gateway.post(PATH, body(model="claude"))
    assert (status, answer_fields["error"]["type"]) == (404, "not_found_error")


@pytest.mark.parametrize(
    ("error", "status", "type_"),
    [
        (InvalidField("top_p", "must be over 0"), 400, "invalid_request_error"),
        (Unauthorized(is_missing=True), 401, "authentication_error"),
        (UnknownModel("claude", "small"), 404, "not_found_error"),
        (Overloaded("full", 3.0), 503, "overloaded_error"),
        (AnswerBrokenOff("drain"), 503, "overloaded_error"),
        (AnswerBrokenOff("timeout"), 504, "timeout_error"),
        (EngineFault("it broke"), 500, "api_error"),
        (RuntimeError("/secret/path"), 500, "api_error"),
    ],
)
def test_an_error_has_anthropics_type(error: Exception, status: int, type_: str) -> None:
    plain, answer = describe(error), in_shape_of(COUNT, describe(error))
    assert (answer.status, answer.headers) == (status, plain.headers)
    fields = json.loads(answer.body)
    assert fields == {"type": "error", "error": {"type": type_, "message": json.loads(plain.body)["error"]["message"]}}
    assert anthropic_error_body(error) == answer.body
    assert in_shape_of("/v1/messagesfoo", plain) == plain == in_shape_of("/v1/chat/completions", plain)


# Anthropic's own client


def client_of(gateway: RunningGateway, key: str = "none") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=gateway.url, api_key=key, max_retries=0)


async def test_the_official_client_reads_an_answer(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        message = await client.messages.create(
            model=MODEL, max_tokens=12, messages=[{"role": "user", "content": "one two"}], system="be"
        )
        assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 12
        assert message.content[0].type == "text" and message.content[0].text
        again = await client.messages.create(
            model=MODEL,
            max_tokens=2,
            messages=[
                {"role": "user", "content": "one"},
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": "on"},
            ],
        )
        assert again.usage.output_tokens == 2
        count = await client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "one two"}])
        assert count.input_tokens > 0
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            await client.messages.create(model=MODEL, max_tokens=0, messages=[{"role": "user", "content": "x"}])
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="claude", max_tokens=1, messages=[{"role": "user", "content": "x"}])


async def test_the_official_client_streams_an_answer(gateway: RunningGateway) -> None:
    async with client_of(gateway) as client:
        text = ""
        async with client.messages.stream(
            model=MODEL, max_tokens=100, messages=[{"role": "user", "content": "one two"}]
        ) as stream:
            async for piece in stream.text_stream:
                text += piece
            message = await stream.get_final_message()
    assert message.stop_reason == "end_turn"
    assert message.content[0].type == "text" and text == message.content[0].text


async def test_the_official_blocking_client_uses_a_tool() -> None:
    async with saying("<think>hm</think>" + CALL) as gateway:

        def ask() -> anthropic.types.Message:
            with (
                anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as client,
                client.messages.stream(
                    model=MODEL,
                    max_tokens=100,
                    messages=[{"role": "user", "content": "add"}],
                    tools=[TOOL],  # type: ignore[list-item]
                ) as stream,
            ):
                return stream.get_final_message()

        message = await asyncio.to_thread(ask)
    assert message.stop_reason == "tool_use"
    assert [block.type for block in message.content] == ["thinking", "tool_use"]
    use = message.content[1]
    assert use.type == "tool_use" and use.input == {"a": 1}


async def test_the_official_client_s_key_is_the_api_key() -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        async with running_gateway(engine.endpoint, is_ready=False, api_keys=keys_with(alice=Allowance())) as gateway:
            async with client_of(gateway, ALICE) as client:
                message = await client.messages.create(
                    model=MODEL, max_tokens=2, messages=[{"role": "user", "content": "one"}]
                )
                assert message.usage.output_tokens == 2
                models = [model async for model in client.models.list()]
                assert [model.id for model in models] == [MODEL]
            async with client_of(gateway, "x" * 20) as client:
                with pytest.raises(anthropic.AuthenticationError):
                    await client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "one"}])
