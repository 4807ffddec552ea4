"""Calls and thoughts through the gateway: what OpenAI's clients read, streamed and whole, however the answer ends."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import pytest

from gateway.tokenizer import Tokenizer
from tests.support.running_gateway import Events, RunningGateway, running_gateway
from tests.support.scripted_engine import free_endpoint, serving
from tests.support.speaking_executor import SpeakingExecutor
from tests.support.tool_models import KINDS, tool_model

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
WEATHER = '{"city": "Zürich 😀", "days": 2}'
CALLS = {
    "hermes": f'Let me look.\n<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3": f'<|python_tag|>{{"name": "get_weather", "parameters": {WEATHER}}}; '
    '{"name": "now", "parameters": {}}',
    "mistral": f'Let me look.[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER}}}, '
    '{"name": "now", "arguments": {}}]',
    "mistral-named": f"Let me look.[TOOL_CALLS]get_weather[ARGS]{WEATHER}[TOOL_CALLS]now[ARGS]{{}}",
}
ONE_CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>'
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "How is it?"}], "tools": TOOLS}
CHAT = "/v1/chat/completions"


@dataclass
class Model:
    """A gateway for one kind of model, and what that model says."""

    gateway: RunningGateway
    executor: SpeakingExecutor
    tokenizer: Tokenizer

    async def ask(self, **fields: Any) -> dict[str, Any]:
        """The first choice of an answer."""
        status, body = await self.gateway.post(CHAT, {**ASKED, **fields})
        assert status == 200, body
        return dict(body["choices"][0])

    async def refusal(self, **fields: Any) -> tuple[str, str]:
        """(field, message) of a 400."""
        status, body = await self.gateway.post(CHAT, {**ASKED, **fields})
        assert status == 400, body
        return body["error"]["param"], body["error"]["message"]

    async def stream(self, **fields: Any) -> Events:
        events = await self.gateway.events(CHAT, {**ASKED, **fields})
        assert events.status == 200 and events.data[-1] == "[DONE]"
        return events


@asynccontextmanager
async def running(kind: str, *texts: str, **settings: Any) -> AsyncIterator[Model]:
    tokenizer = tool_model(kind)
    executor = SpeakingExecutor(tokenizer, *texts)
    with serving(executor) as engine:
        async with running_gateway(engine.endpoint, lambda: tokenizer, **settings) as gateway:
            yield Model(gateway, executor, tokenizer)


@pytest.fixture
async def hermes() -> AsyncIterator[Model]:
    async with running("hermes") as model:
        yield model


def message_of(events: Events, index: int = 0) -> dict[str, Any]:
    """A stream's deltas joined, as clients join them."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for event in events.objects:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning"] += delta.get("reasoning", "")
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert (call["index"], call["type"]) == (len(message["calls"]), "function")
                    message["calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                message["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message


def calls_of(choice: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]


@pytest.mark.parametrize("kind", KINDS)
async def test_calls_are_told_in_openais_shape_streamed_and_whole(kind: str) -> None:
    async with running(kind, CALLS[kind]) as model:
        choice = await model.ask()
        content = None if kind == "llama3" else "Let me look."
        assert choice["message"]["content"] == content
        assert choice["finish_reason"] == "tool_calls"
        assert calls_of(choice) == [("get_weather", WEATHER), ("now", "{}")]
        for call in choice["message"]["tool_calls"]:
            assert call["type"] == "function"
            assert len(call["id"]) == 9 if kind.startswith("mistral") else call["id"].startswith("call_")
        events = await model.stream()
        message = message_of(events)
        assert (message["content"] or None, events.reasons()) == (content, {0: ["tool_calls"]})
        assert [(call["name"], call["arguments"]) for call in message["calls"]] == calls_of(choice)
        pieces = [call for event in events.objects for call in event["choices"][0]["delta"].get("tool_calls", [])]
        assert len(pieces) > 10
        assert events.usage is None and choice["message"].get("reasoning") is None


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_goes_back_through_the_template_and_is_the_same_text(kind: str) -> None:
    """The prompt of the next turn begins with that of this one and its answer, so it is found in the cache."""
    text = CALLS[kind].removeprefix("<|python_tag|>").partition("; {")[0]
    async with running(kind, text) as model:
        choice = await model.ask()
        first = choice["message"]["tool_calls"][0]
        asked = {"role": "user", "content": "How is it?"}
        answered = {"role": "tool", "tool_call_id": first["id"], "content": "21"}
        status, body = await model.gateway.post(
            "/tokenize", {"messages": [asked, choice["message"], answered], "tools": TOOLS}
        )
        assert status == 200, body
        prompt = model.tokenizer.decode(body["tokens"], skip_special_tokens=False)
        arguments = [json.dumps(json.loads(call[1]), ensure_ascii=False) for call in calls_of(choice)]
        for written in arguments:
            assert written in prompt
        if kind == "hermes":
            assert "assistant\n" + text + "<|im_end|>" in prompt
        assert "21" in prompt


async def test_an_answer_that_is_cut_is_told_as_length_and_shows_the_call_as_far_as_it_goes(hermes: Model) -> None:
    hermes.executor.say(ONE_CALL)
    num_tokens = len(hermes.tokenizer.encode(ONE_CALL, add_special_tokens=False))
    for max_tokens in {*range(1, num_tokens, 5), num_tokens}:
        choice = await hermes.ask(max_tokens=max_tokens)
        events = await hermes.stream(max_tokens=max_tokens)
        message = message_of(events)
        assert choice["finish_reason"] == "length" and events.reasons() == {0: ["length"]}
        assert message["content"] == (choice["message"]["content"] or "")
        calls = choice["message"].get("tool_calls", [])
        assert [call["arguments"] for call in message["calls"]] == [call["function"]["arguments"] for call in calls]
        if calls:
            assert choice["message"]["content"] is None
            assert WEATHER.startswith(calls[0]["function"]["arguments"].rstrip("\ufffd"))
        else:
            assert ONE_CALL.startswith(choice["message"]["content"].replace("\ufffd", ""))


async def test_what_is_no_call_is_content_and_a_plain_stop(hermes: Model) -> None:
    text = 'Well, <tool_call>{"name": 7}</tool_call> then'
    hermes.executor.say(text)
    choice = await hermes.ask()
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in choice["message"]
    events = await hermes.stream()
    assert (events.text(), events.reasons()) == (text, {0: ["stop"]})


async def test_a_call_that_breaks_off_is_no_reason_to_end(hermes: Model) -> None:
    hermes.executor.say('<tool_call>{"name": "now", "arguments": {"x": oh}}')
    choice = await hermes.ask()
    assert calls_of(choice) == [("now", '{"x": ')]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("oh}}", "stop")


@pytest.mark.parametrize("fields", [{"tools": None}, {"tools": []}, {"tool_choice": "none"}])
async def test_calls_are_text_where_none_may_be_made(hermes: Model, fields: dict[str, Any]) -> None:
    hermes.executor.say(ONE_CALL)
    choice = await hermes.ask(**fields)
    assert (choice["message"]["content"], choice["finish_reason"]) == (ONE_CALL, "stop")


async def test_only_the_first_call_is_told_without_parallel_calls(hermes: Model) -> None:
    hermes.executor.say(CALLS["hermes"])
    choice = await hermes.ask(parallel_tool_calls=False)
    assert (calls_of(choice), choice["finish_reason"]) == ([("get_weather", WEATHER)], "tool_calls")
    events = await hermes.stream(parallel_tool_calls=False)
    assert [call["name"] for call in message_of(events)["calls"]] == ["get_weather"]


async def test_each_choice_is_parsed_by_itself(hermes: Model) -> None:
    hermes.executor.say(ONE_CALL, "No.", "<think>hm</think>Yes.")
    status, body = await hermes.gateway.post(CHAT, {**ASKED, "n": 3})
    assert status == 200
    first, second, third = body["choices"]
    assert calls_of(first) == [("get_weather", WEATHER)]
    assert (second["message"]["content"], third["message"]["content"]) == ("No.", "Yes.")
    assert third["message"]["reasoning"] == "hm"
    assert [choice["finish_reason"] for choice in body["choices"]] == ["tool_calls", "stop", "stop"]
    events = await hermes.stream(n=3)
    assert events.reasons() == {0: ["tool_calls"], 1: ["stop"], 2: ["stop"]}
    assert [message_of(events, index)["content"] for index in range(3)] == ["", "No.", "Yes."]


@pytest.mark.parametrize("kind", ["hermes", "thinker"])
async def test_thoughts_are_told_apart_under_both_names(kind: str) -> None:
    text = "<think>\nFirst,\nthen.\n</think>\n\nYes."
    async with running(kind, text) as model:
        for fields in ({}, {"tools": None}):
            choice = await model.ask(**fields)
            assert choice["message"]["reasoning"] == choice["message"]["reasoning_content"] == "First,\nthen."
            assert (choice["message"]["content"], choice["finish_reason"]) == ("Yes.", "stop")
            message = message_of(await model.stream(**fields))
            assert (message["reasoning"], message["content"]) == ("First,\nthen.", "Yes.")
        choice = await model.ask(include_reasoning=False)
        assert choice["message"] == {"role": "assistant", "content": "Yes."}
        message = message_of(await model.stream(include_reasoning=False))
        assert (message["reasoning"], message["content"]) == ("", "Yes.")


async def test_thoughts_that_the_template_opened_begin_at_once_and_may_never_end(hermes: Model) -> None:
    opened = {"chat_template_kwargs": {"opens_thoughts": True}}
    hermes.executor.say("Hm.\n</think>\n\nYes.")
    choice = await hermes.ask(**opened)
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("Hm.", "Yes.")
    choice = await hermes.ask(max_tokens=2, **opened)
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")
    assert "Hm.".startswith(choice["message"]["reasoning"])
    hermes.executor.say("Hm, hm.")
    message = message_of(await hermes.stream(**opened))
    assert (message["reasoning"], message["content"]) == ("Hm, hm.", "")


async def test_a_message_that_goes_on_inside_its_thoughts_goes_on_there(hermes: Model) -> None:
    hermes.executor.say("more</think>Yes.")
    begun = [*ASKED["messages"], {"role": "assistant", "content": "<think>\nSome and"}]
    goes_on = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
    choice = await hermes.ask(**goes_on)
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("more", "Yes.")


async def test_settings_say_what_is_looked_for() -> None:
    text = "<think>hm</think>" + ONE_CALL
    async with running("hermes", text, tool_call_parser="none", reasoning_parser="none") as model:
        choice = await model.ask()
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
        field, message = await model.refusal(tool_choice="required")
        assert field == "tool_choice" and "--tool-call-parser" in message
    async with running("llama3", text, tool_call_parser="hermes", reasoning_parser="think") as model:
        choice = await model.ask()
        assert (calls_of(choice), choice["message"]["reasoning"]) == ([("get_weather", WEATHER)], "hm")


@pytest.mark.parametrize("kind", ["llama3", "mistral", "thinker"])
async def test_special_marks_are_seen_by_the_parser_and_not_by_the_client(kind: str) -> None:
    broken = {"llama3": "<|python_tag|>go()", "mistral": "[TOOL_CALLS] go()", "thinker": "<tool_call>go()"}[kind]
    async with running(kind, broken) as model:
        hidden = broken.partition("]" if kind == "mistral" else ">")[2]
        assert (await model.ask())["message"]["content"] == hidden
        assert (await model.ask(skip_special_tokens=False))["message"]["content"] == broken
        assert (await model.ask(tools=None))["message"]["content"] == hidden
        events = await model.stream()
        assert events.text() == hidden


async def test_a_special_token_that_is_no_mark_stays_hidden(hermes: Model) -> None:
    end = hermes.tokenizer.eos_token_ids[0]
    begin = hermes.tokenizer.encode("<|im_start|>")[0]
    words = hermes.tokenizer.encode(ONE_CALL)
    hermes.executor.say_tokens([begin, *words, end])
    choice = await hermes.ask(ignore_eos=True, max_tokens=len(words) + 2)
    assert (calls_of(choice), choice["message"]["content"]) == ([("get_weather", WEATHER)], None)
    shown = await hermes.ask(ignore_eos=True, max_tokens=len(words) + 2, skip_special_tokens=False)
    assert (calls_of(shown), shown["message"]["content"]) == ([("get_weather", WEATHER)], "<|im_start|><|im_end|>")


async def test_usage_ids_and_log_probabilities_count_every_token(hermes: Model) -> None:
    hermes.executor.say(ONE_CALL)
    num_tokens = len(hermes.tokenizer.encode(ONE_CALL)) + 1
    asked = {"return_token_ids": True, "logprobs": True, "stream_options": {"include_usage": True}}
    choice = await hermes.ask(return_token_ids=True, logprobs=True)
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == num_tokens
    events = await hermes.stream(**asked)
    told = [choice for event in events.objects for choice in event["choices"]]
    assert [token_id for choice in told for token_id in choice.get("token_ids") or ()] == choice["token_ids"]
    logprobs = [entry for choice in told if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert logprobs == choice["logprobs"]["content"]
    assert events.usage is not None and events.usage["completion_tokens"] == num_tokens
    message = message_of(events)
    assert message["calls"][0]["arguments"] == WEATHER


async def test_a_stop_string_inside_a_call_ends_it_there(hermes: Model) -> None:
    hermes.executor.say(ONE_CALL)
    choice = await hermes.ask(stop=["rich"])
    assert (calls_of(choice), choice["finish_reason"]) == ([("get_weather", '{"city": "Zü')], "stop")
    choice = await hermes.ask(stop=["</tool_call>"])
    assert (calls_of(choice), choice["finish_reason"]) == ([("get_weather", WEATHER)], "tool_calls")


@pytest.mark.parametrize(
    ("kind", "choice", "starts"),
    [
        ("hermes", "required", '<tool_call>\\n{\\"name\\": \\"get_weather\\", \\"arguments\\": '),
        ("llama3", {"type": "function", "function": {"name": "now"}}, '{\\"name\\": \\"now\\", \\"parameters\\": '),
        ("mistral", "required", '{\\"name\\": \\"get_weather\\", \\"arguments\\": '),
        ("mistral-named", "required", "get_weather"),
    ],
)
async def test_a_call_that_must_be_made_is_asked_of_the_engine_as_a_grammar(
    kind: str, choice: object, starts: str
) -> None:
    async with running(kind, CALLS[kind]) as model:
        answered = await model.ask(tool_choice=choice)
        assert answered["finish_reason"] == "tool_calls"
        (grammar,) = model.executor.asked_for
        assert (grammar.kind, grammar.field) == ("lark", "tools")
        assert starts in grammar.text
        assert ("get_weather" in grammar.text) == (choice == "required")
        field, message = await model.refusal(tool_choice=choice, response_format={"type": "json_object"})
        assert field == "response_format" and "tool_choice" in message


async def test_the_engines_end_and_restart_leave_no_mark_on_a_call() -> None:
    tokenizer = tool_model("hermes")
    text = "<think>hm</think>\n" + ONE_CALL.replace("Zürich", "Zürich and so on " * 20)
    arguments = WEATHER.replace("Zürich", "Zürich and so on " * 20)

    async def read(url: str, session: Any) -> Events:
        async with session.post(url + CHAT, json={**ASKED, "stream": True, "seed": 7}) as response:
            return Events(response.status, dict(response.headers), await response.read())

    with free_endpoint() as endpoint:
        async with AsyncExitStack() as stack:
            first = stack.enter_context(serving(SpeakingExecutor(tokenizer, text, step_s=0.01), endpoint))
            gateway = await stack.enter_async_context(running_gateway(endpoint, lambda: tokenizer))
            async with gateway.session.post(gateway.url + CHAT, json={**ASKED, "stream": True, "seed": 7}) as response:
                raw = b""
                while b"tool_calls" not in raw:
                    raw += await response.content.readany()
                first.stop()
                second = stack.enter_context(serving(SpeakingExecutor(tokenizer, text), endpoint))
                raw += await response.content.read()
                del second
            events = Events(200, {}, raw)
    message = message_of(events)
    assert [(call["name"], call["arguments"]) for call in message["calls"]] == [("get_weather", arguments)]
    assert (message["reasoning"], events.reasons()) == ("hm", {0: ["tool_calls"]})


async def test_the_openai_client_reads_calls(hermes: Model) -> None:
    hermes.executor.say(CALLS["hermes"])
    client = openai.AsyncOpenAI(base_url=hermes.gateway.url + "/v1", api_key="none", max_retries=0)
    async with client:
        asked: Any = {"model": "scripted", "messages": ASKED["messages"], "tools": TOOLS}
        whole = await client.chat.completions.create(**asked)
        calls = whole.choices[0].message.tool_calls
        assert calls is not None
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
            ("get_weather", json.loads(WEATHER)),
            ("now", {}),
        ]
        async with client.chat.completions.stream(**asked) as stream:
            names = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert "tool_calls.function.arguments.delta" in names and "tool_calls.function.arguments.done" in names
        assert final.choices[0].finish_reason == "tool_calls"
        streamed = final.choices[0].message.tool_calls
        assert streamed is not None
        assert [call.function.arguments for call in streamed] == [WEATHER, "{}"]
        # and the next turn takes what the client made of it
        hermes.executor.say("Fine.")
        answer = await client.chat.completions.create(
            model="scripted",
            tools=asked["tools"],
            messages=[
                *asked["messages"],
                whole.choices[0].message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": calls[0].id, "content": "21"},
                {"role": "tool", "tool_call_id": calls[1].id, "content": "noon"},
            ],
        )
        assert answer.choices[0].message.content == "Fine."


class Told:
    """What a WebSocket's deltas add up to."""

    def __init__(self) -> None:
        self.text = self.reasoning = ""
        self.calls: list[dict[str, Any]] = []

    def add(self, event: dict[str, Any]) -> None:
        if event["type"] == "delta":
            self.text += event["text"]
            self.reasoning += event.get("reasoning", "")
            for call in event.get("tool_calls", []):
                if "id" in call:
                    self.calls.append({"id": call["id"], "name": call["name"], "arguments": ""})
                self.calls[call["index"]]["arguments"] += call["arguments"]


async def read(socket: aiohttp.ClientWebSocketResponse, **message: Any) -> list[dict[str, Any]]:
    """A generation's events, to its last."""
    await socket.send_str(json.dumps({"id": "a", **message}))
    events: list[dict[str, Any]] = []
    while not events or events[-1]["type"] not in ("done", "error"):
        events.append(json.loads((await socket.receive(timeout=30)).data))
    return events


async def test_a_websocket_tells_the_same_and_goes_on_from_any_token(hermes: Model) -> None:
    hermes.executor.say("<think>\nhm \n</think>\n\n" + CALLS["hermes"] + "\nDone.")
    choice = await hermes.ask()
    async with hermes.gateway.session.ws_connect(hermes.gateway.url + "/v1/stream") as socket:
        events = await read(socket, type="generate", attach_grace_s=60, **ASKED)
        told = Told()
        for event in events:
            told.add(event)
        (finished,) = [event for event in events if event["type"] == "finished"]
        assert finished["finish_reason"] == choice["finish_reason"] == "tool_calls"
        assert (told.text, told.reasoning) == (choice["message"]["content"], choice["message"]["reasoning"])
        assert [(call["name"], call["arguments"]) for call in told.calls] == calls_of(choice)
        for from_token in range(0, finished["num_tokens"], 7):
            joined = Told()
            for event in events:
                if event["type"] == "delta" and event["num_tokens"] <= from_token:
                    joined.add(event)
            attached = await read(socket, type="attach", stream_id=events[0]["stream_id"], from_token=from_token)
            for event in attached:
                joined.add(event)
            assert vars(joined) == vars(told), from_token
            assert attached[-2]["finish_reason"] == "tool_calls"
