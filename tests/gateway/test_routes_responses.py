"""/v1/responses: the Responses API over the same core, by raw HTTP and with OpenAI's own client."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from engine.simulation.simulated_model import end_after
from tests.support.running_gateway import (
    MODEL,
    VOCAB_SIZE,
    Events,
    RunningGateway,
    eventually_async,
    running_gateway,
    small_tokenizer,
)
from tests.support.saying import saying
from tests.support.scripted_engine import free_endpoint, serving
from tests.support.scripted_executor import ScriptedExecutor

PATH = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "add",
    "description": "adds",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    executor = ScriptedExecutor(vocab_size=VOCAB_SIZE, eos_rule=end_after(40))
    with serving(executor, enable_prefix_caching=False) as engine:
        async with running_gateway(engine.endpoint) as running:
            yield running


def body(**more: Any) -> dict[str, Any]:
    return {"input": "one two", "max_output_tokens": 12, "temperature": 0, **more}


def names(events: Events) -> list[str]:
    return [event["type"] for event in events.objects]


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


async def test_an_answer_is_that_of_the_same_chat(gateway: RunningGateway) -> None:
    status, response = await gateway.post(PATH, body(instructions="be brief"))
    _, chat = await gateway.post(
        "/v1/chat/completions",
        {
            "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one two"}],
            "max_tokens": 12,
            "temperature": 0,
        },
    )
    assert status == 200
    assert text_of(response) == chat["choices"][0]["message"]["content"]
    assert response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert response["usage"]["output_tokens"] == 12
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (response["instructions"], response["store"], response["model"]) == ("be brief", False, MODEL)


async def test_the_events_come_in_their_order_and_each_once(gateway: RunningGateway) -> None:
    events = await gateway.events(PATH, body())
    found = names(events)
    deltas = [event for event in events.objects if event["type"] == "response.output_text.delta"]
    assert [name for name in found if name != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event["sequence_number"] for event in events.objects] == list(range(len(found)))
    assert [line.removeprefix("event: ") for line in events.raw.decode().split("\n") if line[:6] == "event:"] == found
    last = events.objects[-1]["response"]
    text = "".join(event["delta"] for event in deltas)
    assert text and text == text_of(last)
    (done,) = [event for event in events.objects if event["type"] == "response.output_item.done"]
    assert done["item"] == last["output"][0]
    assert {event["item_id"] for event in deltas} == {last["output"][0]["id"]}
    assert b"[DONE]" not in events.raw


@pytest.mark.parametrize("max_output_tokens", [1, 12, 100])
async def test_streamed_and_whole_answers_are_the_same(gateway: RunningGateway, max_output_tokens: int) -> None:
    request = body(max_output_tokens=max_output_tokens, metadata={"a": "b"}, user="me")
    _, whole = await gateway.post(PATH, request)
    streamed = (await gateway.events(PATH, request)).objects[-1]["response"]
    assert whole["status"] == ("completed" if max_output_tokens == 100 else "incomplete")
    for response in (whole, streamed):
        assert (response.pop("completed_at") is None) == (response["status"] == "incomplete")
        for name in ("id", "created_at"):
            assert response.pop(name)
        for item in response["output"]:
            assert item.pop("id").startswith("msg_")
    assert whole == streamed


async def test_a_conversation_of_items_is_that_of_a_chat() -> None:
    async with saying("fine") as gateway:
        items = [
            {"type": "message", "role": "developer", "content": "be"},
            {"role": "user", "content": [{"type": "input_text", "text": "add"}, {"type": "input_text", "text": "1"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "so", "annotations": [], "logprobs": []}],
            },
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call", "id": "fc_2", "call_id": "c2", "name": "add", "arguments": '{"a": 2}'},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "3"}]},
        ]
        call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        other = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
        messages = [
            {"role": "system", "content": "be"},
            {"role": "user", "content": "add\n1"},
            {
                "role": "assistant",
                "content": "so",
                "reasoning_content": "hm",
                "tool_calls": [{"id": "c1", **call}, {"id": "c2", **other}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
            {"role": "tool", "tool_call_id": "c2", "content": "3"},
        ]
        function = {name: value for name, value in TOOL.items() if name != "type"}
        status, response = await gateway.post(PATH, {"input": items, "tools": [TOOL], "tool_choice": "none"})
        _, chat = await gateway.post(
            "/tokenize", {"messages": messages, "tools": [{"type": "function", "function": function}]}
        )
        assert status == 200, response
        assert response["usage"]["input_tokens"] == chat["count"]
        assert text_of(response) == "fine"


@pytest.mark.parametrize("streamed", [False, True])
async def test_reasoning_text_and_calls_are_items_of_their_own(streamed: bool) -> None:
    async with saying("<think>hm, a sum</think>Let me add." + CALL + CALL.replace("1", "2")) as gateway:
        request = {"input": "add", "tools": [TOOL], "include": ["reasoning.encrypted_content"]}
        if streamed:
            events = await gateway.events(PATH, request)
            response = events.objects[-1]["response"]
            self_told: dict[int, str] = {}
            for event in events.objects:
                if event["type"].endswith(".delta"):
                    self_told[event["output_index"]] = self_told.get(event["output_index"], "") + event["delta"]
            done = [event for event in events.objects if event["type"].endswith(("_text.done", "arguments.done"))]
            assert [event.get("text", event.get("arguments")) for event in done] == list(self_told.values())
            items = [event["item"] for event in events.objects if event["type"] == "response.output_item.done"]
            assert items == response["output"]
        else:
            _, response = await gateway.post(PATH, request)
        thought, message, first, second = response["output"]
        assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "hm, a sum")
        assert message["content"][0]["text"] == "Let me add."
        assert [(call["type"], call["name"], json.loads(call["arguments"])) for call in (first, second)] == [
            ("function_call", "add", {"a": 1}),
            ("function_call", "add", {"a": 2}),
        ]
        assert first["call_id"] != second["call_id"]
        assert {item["status"] for item in response["output"]} == {"completed"}
        assert response["status"] == "completed"
        usage = response["usage"]
        assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_log_probabilities_are_told_where_they_are_included(gateway: RunningGateway, streamed: bool) -> None:
    request = body(max_output_tokens=4, include=["message.output_text.logprobs"], top_logprobs=2)
    if streamed:
        events = await gateway.events(PATH, request)
        response = events.objects[-1]["response"]
        deltas = [event["logprobs"] for event in events.objects if event["type"] == "response.output_text.delta"]
        assert [token for logprobs in deltas for token in logprobs] == response["output"][0]["content"][0]["logprobs"]
    else:
        _, response = await gateway.post(PATH, request)
    logprobs = response["output"][0]["content"][0]["logprobs"]
    assert len(logprobs) == 4
    assert all(len(token["top_logprobs"]) == 2 and token["logprob"] <= 0 for token in logprobs)


async def test_log_probabilities_are_those_of_the_message_alone() -> None:
    async with saying("<think>hm, a sum</think>Let me add." + CALL) as gateway:
        request = {"input": "add", "tools": [TOOL], "include": ["message.output_text.logprobs"]}
        _, whole = await gateway.post(PATH, request)
        streamed = (await gateway.events(PATH, request)).objects[-1]["response"]
    for response in (whole, streamed):
        assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
        (part,) = response["output"][1]["content"]
        assert "".join(token["token"] for token in part["logprobs"]).strip() == part["text"].strip() == "Let me add."


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_does_not_work_is_refused_by_the_name_that_the_client_gave_it(streamed: bool) -> None:
    """Also what is known only with the prompt encoded; tests/gateway/schema/test_response.py has the rest."""
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        async with running_gateway(engine.endpoint, small_tokenizer.__wrapped__) as gateway:
            for more, status, param in (
                ({"max_output_tokens": 2047}, 400, "max_output_tokens"),
                ({"max_output_tokens": 5000}, 400, "max_output_tokens"),
                ({"input": [{"role": "robot", "content": "x"}]}, 400, "input[0].role"),
                ({"tools": [{"type": "function", "name": "x"}]}, 400, "tools"),
                ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, 400, "input[0].role"),
                ({"store": True}, 400, "store"),
                ({"model": "other"}, 404, "model"),
            ):
                found, answer = await gateway.post(PATH, body(**more, stream=streamed))
                assert (found, answer["error"]["param"]) == (status, param)
                assert "messages[" not in answer["error"]["message"] and "max_completion_tokens" not in str(answer)


async def test_a_prompt_that_is_too_long_is_the_input_s_fault() -> None:
    async with saying("x") as gateway:
        status, answer = await gateway.post(PATH, {"input": "word " * 3000})
    assert (status, answer["error"]["param"]) == (400, "input")


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_that_takes_too_long_is_failed_and_keeps_its_text(streamed: bool) -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE, step_s=0.01)) as engine:
        async with running_gateway(engine.endpoint, request_timeout_s=0.3) as gateway:
            request = body(max_output_tokens=2000)
            if streamed:
                events = await gateway.events(PATH, request)
                assert names(events)[-1] == "response.failed"
                response = events.objects[-1]["response"]
            else:
                _, response = await gateway.post(PATH, request)
            assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
            assert "timeout" in response["error"]["message"]
            assert text_of(response) and response["output"][0]["status"] == "incomplete"


async def test_a_client_that_goes_away_ends_its_answer() -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE, step_s=0.005)) as engine:
        async with running_gateway(engine.endpoint) as gateway:
            response = await gateway.session.post(gateway.url + PATH, json=body(max_output_tokens=2000, stream=True))
            await response.content.readline()
            response.close()

            async def is_idle() -> bool:
                figures = await gateway.metrics()
                return figures["num_running_requests"] == 0 and figures["gateway_live_streams"] == 0

            await eventually_async(is_idle, timeout_s=30)


async def test_a_silent_stream_is_kept_open() -> None:
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE, block_at_step={0: 0.5})) as engine:
        async with running_gateway(engine.endpoint, keepalive_s=0.1) as gateway:
            events = await gateway.events(PATH, body(max_output_tokens=2))
    assert b": keep-alive\n\n" in events.raw
    assert names(events)[:2] == ["response.created", "response.in_progress"]


async def test_http_1_0_gets_bare_events(gateway: RunningGateway) -> None:
    data = json.dumps(body(stream=True)).encode()
    head = f"POST {PATH} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(head.encode() + data)
    raw = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    events = Events(200, {}, raw.partition(b"\r\n\r\n")[2])
    assert events.raw.startswith(b"event: response.created\n")
    assert [event["sequence_number"] for event in events.objects] == list(range(len(events.objects)))
    assert names(events)[-1] == "response.incomplete"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_fault_of_the_engine_is_told_once(streamed: bool) -> None:
    executor = ScriptedExecutor(vocab_size=VOCAB_SIZE, step_s=0.1)
    with serving(executor) as engine:
        async with running_gateway(engine.endpoint) as gateway:
            executor.poison_token = executor.expected_tokens(
                (await gateway.post("/tokenize", {"messages": [{"role": "user", "content": "one two"}]}))[1]["tokens"],
                3,
            )[2]
            if streamed:
                events = await gateway.events(PATH, body(max_output_tokens=10))
                assert events.status == 200 and names(events).count("response.failed") == 1
                assert names(events)[-1] == "response.failed"
                failed = events.objects[-1]["response"]
                assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
            else:
                status, answer = await gateway.post(PATH, body(max_output_tokens=10))
                assert (status, answer["error"]["code"]) == (500, "engine_error")


async def test_an_answer_survives_its_engine() -> None:
    executor = ScriptedExecutor(vocab_size=VOCAB_SIZE, step_s=0.01)
    with free_endpoint() as endpoint, serving(executor, endpoint) as engine:
        async with running_gateway(endpoint) as gateway:
            _, whole = await gateway.post(PATH, body(max_output_tokens=60))
            streaming = asyncio.create_task(gateway.events(PATH, body(max_output_tokens=60)))
            await eventually_async(lambda: _is_live(gateway), timeout_s=30)
            await asyncio.to_thread(engine.stop)
            with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE), endpoint):
                events = await asyncio.wait_for(streaming, 60)
    assert text_of(events.objects[-1]["response"]) == text_of(whole)
    assert [event["sequence_number"] for event in events.objects] == list(range(len(events.objects)))


async def _is_live(gateway: RunningGateway) -> bool:
    return (await gateway.metrics())["gateway_live_streams"] == 1


# OpenAI's own client


async def test_the_official_client_reads_an_answer(gateway: RunningGateway) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        response = await client.responses.create(model=MODEL, input="one two", max_output_tokens=12, temperature=0)
        assert response.status == "incomplete" and response.incomplete_details is not None
        assert response.usage is not None and response.usage.output_tokens == 12
        assert len(response.output_text) > 0

        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
        assert caught.value.param == "previous_response_id"

        again = await client.responses.create(
            model=MODEL,
            input=[*response.output, {"role": "user", "content": "on"}],  # type: ignore[list-item]
            max_output_tokens=2,
        )
        assert again.usage is not None and again.usage.output_tokens == 2


async def test_the_official_client_streams_an_answer(gateway: RunningGateway) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        text = ""
        async with client.responses.stream(model=MODEL, input="one two", max_output_tokens=100) as stream:
            async for event in stream:
                if event.type == "response.output_text.delta":
                    text += event.delta
            response = await stream.get_final_response()
    assert response.status == "completed"
    assert text == response.output_text


async def test_the_official_blocking_client_calls_a_function() -> None:
    async with saying(CALL) as gateway:

        def ask() -> Any:
            with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
                return client.responses.create(model=MODEL, input="add", tools=[TOOL])  # type: ignore[list-item]

        response = await asyncio.to_thread(ask)
    (call,) = response.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"a": 1})
