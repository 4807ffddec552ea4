"""Every stream ends once and right: each kind of answer, for each way in which a request can end.

`read_events`, `read_whole` and `read_frames` hold what is true of every answer of their kind, whatever its end.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import msgspec
import pytest

from gateway import keys
from tests.support.running_gateway import RunningGateway, eventually, eventually_async, running_gateway, small_tokenizer
from tests.support.scripted_engine import RunningEngine, serving
from tests.support.speaking_executor import SpeakingExecutor

WHOLE: Final = ("chat", "text")
STREAMED: Final = ("chat streamed", "text streamed")
SOCKETS: Final = ("socket json", "socket msgpack")
EVERY: Final = WHOLE + STREAMED + SOCKETS
PATHS: Final = {"chat": "/v1/chat/completions", "text": "/v1/completions"}
COUNTS: Final = (1, 3)
NUM_BEFORE_CANCEL: Final = 12
"""Events of a request, before it is cancelled."""
SAID: Final = ("one two three END four", "the quick brown fox STOP jumps over", "hello, world: naïve café 😀 with it")
LONG: Final = tuple(f"{word} and so on; " * 60 for word in ("one", "two", "three"))
END_OF_SEQUENCE: Final = small_tokenizer().eos_token_ids[0]


@dataclass
class Choice:
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    cause: str | None = None
    """Only a WebSocket tells it."""


@dataclass
class Answer:
    status: int
    choices: list[Choice] = field(default_factory=list)
    num_output: int = -1
    """Of its usage; -1: it has none."""
    num_prompt: int = -1
    error: dict[str, Any] | None = None

    def take_usage(self, usage: dict[str, Any]) -> None:
        self.num_prompt, self.num_output = usage["prompt_tokens"], usage["completion_tokens"]
        assert usage["total_tokens"] == self.num_prompt + self.num_output

    @property
    def reasons(self) -> list[str | None]:
        return [choice.finish_reason for choice in self.choices]


def read_events(status: int, raw: bytes, n: int, is_chat: bool) -> Answer:
    """A streamed answer: role, text, one end for each choice; then the usage or an error; then [DONE], and nothing."""
    assert raw.endswith(b"data: [DONE]\n\n")
    answer = Answer(status, [Choice() for _ in range(n)])
    events, ids, heads = raw.decode().replace(": keep-alive\n", "").split("\n\n"), [], set()
    assert events.pop() == ""
    objects: list[dict[str, Any]] = []
    for event in events:
        id_line, data = event.split("\n")
        ids.append(id_line)
        if data != "data: [DONE]":
            objects.append(json.loads(data.removeprefix("data: ")))
    assert len(objects) == len(events) - 1 and len(set(ids)) == len(ids) and all(id_.startswith("id: ") for id_ in ids)
    last = objects.pop()
    if "error" in last:
        answer.error = last["error"]
    else:
        assert last["choices"] == []
        answer.take_usage(last["usage"])
        heads.add((last["id"], last["object"], last["created"], last["model"]))
    has_begun = [not is_chat] * n
    for event_ in objects:
        heads.add((event_["id"], event_["object"], event_["created"], event_["model"]))
        assert event_["usage"] is None
        (told,) = event_["choices"]
        choice = answer.choices[told["index"]]
        assert choice.finish_reason is None, "something came behind its end"
        if is_chat and "role" in told["delta"]:
            assert not has_begun[told["index"]], "the role came twice"
            assert told["delta"] == {"role": "assistant", "content": ""}
            has_begun[told["index"]] = True
        assert has_begun[told["index"]], "something came before the role"
        choice.text += told["delta"].get("content", "") if is_chat else told["text"]
        choice.finish_reason, choice.stop_reason = told["finish_reason"], told.get("stop_reason")
    assert None not in answer.reasons, "a choice has no end"
    assert len(heads) == 1
    return answer


def read_whole(status: int, body: dict[str, Any], n: int, is_chat: bool) -> Answer:
    answer = Answer(status)
    if status != 200:
        answer.error = body["error"]
        return answer
    answer.take_usage(body["usage"])
    assert [told["index"] for told in body["choices"]] == list(range(n))
    for told in body["choices"]:
        if is_chat:
            assert told["message"].keys() == {"role", "content"} and told["message"]["role"] == "assistant"
        text = told["message"]["content"] if is_chat else told["text"]
        answer.choices.append(Choice(text, told["finish_reason"], told["stop_reason"]))
    return answer


def read_frames(events: list[dict[str, Any]], n: int) -> Answer:
    """A generation on a socket, from `started` to `done` or `error`; what came behind that is its reader's to see."""
    answer = Answer(200, [Choice() for _ in range(n)])
    *told, last = events
    assert told.pop(0)["type"] == "started"
    num_tokens = [0] * n
    for event in told:
        choice = answer.choices[event["index"]]
        assert choice.finish_reason is None, "something came behind its end"
        assert event["num_tokens"] >= num_tokens[event["index"]]
        num_tokens[event["index"]] = event["num_tokens"]
        if event["type"] == "finished":
            choice.finish_reason, choice.stop_reason = event["finish_reason"], event["stop_reason"]
            choice.cause = event["cause"]
        else:
            assert event["type"] == "delta"
            choice.text += event["text"]
    assert None not in answer.reasons, "a choice has no end"
    if last["type"] == "error":
        answer.error = last["error"]
    else:
        assert last["type"] == "done"
        answer.take_usage(last["usage"])
        assert answer.num_output == sum(num_tokens)
    return answer


async def ask(
    gateway: RunningGateway, form: str, n: int, *, cancels: bool = False, closes: bool = False, **fields: Any
) -> Answer:
    """One request to its end. cancels: it is cancelled when NUM_BEFORE_CANCEL events are there. closes: the server
    shuts down meanwhile."""
    kind, _, variant = form.partition(" ")
    body = {"n": n, "temperature": 0.0, **fields}
    if kind != "text":
        body["messages"] = [{"role": "user", "content": "Say it."}]
    else:
        body["prompt"] = "Say it."
    if kind == "socket":
        return await _ask_on_socket(gateway, n, body, is_msgpack=variant == "msgpack", cancels=cancels, closes=closes)
    url, is_chat = gateway.url + PATHS[kind], kind == "chat"
    if not variant:
        async with gateway.session.post(url, json=body) as response:
            return read_whole(response.status, await response.json(), n, is_chat)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with gateway.session.post(url, json=body) as response:
        if response.status != 200:
            return read_whole(response.status, await response.json(), n, is_chat)
        raw = b""
        if cancels:
            while raw.count(b'"finish_reason":null') < NUM_BEFORE_CANCEL:
                raw += await response.content.readany()
            stream_url = f"{gateway.url}/v1/streams/{response.headers['X-Stream-Id']}"
            async with gateway.session.delete(stream_url) as cancelled:
                assert cancelled.status == 204
        return read_events(response.status, raw + await response.content.read(), n, is_chat)


async def _ask_on_socket(
    gateway: RunningGateway, n: int, body: dict[str, Any], *, is_msgpack: bool, cancels: bool, closes: bool
) -> Answer:
    protocol = "streamkv.msgpack" if is_msgpack else "streamkv.json"
    async with gateway.session.ws_connect(gateway.url + "/v1/stream", protocols=(protocol,)) as socket:

        async def send(**message: Any) -> None:
            if is_msgpack:
                await socket.send_bytes(msgspec.msgpack.encode(message))
            else:
                await socket.send_json(message)

        async def read() -> dict[str, Any]:
            message = await socket.receive(timeout=60)
            assert message.type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY), message
            read: dict[str, Any] = (msgspec.msgpack if is_msgpack else msgspec.json).decode(message.data)
            return read

        await send(type="generate", id="a", **body)
        events = [await read()]
        while events[-1]["type"] not in ("done", "error"):
            events.append(await read())
            if cancels and len(events) > NUM_BEFORE_CANCEL:
                await send(type="cancel", id="a")
                cancels = False
        if closes:
            assert (await socket.receive(timeout=60)).type is aiohttp.WSMsgType.CLOSE
        else:
            await send(type="ping")
            assert await read() == {"type": "pong"}, "something came behind the end"
        return read_frames(events, n)


async def ask_each(
    gateway: RunningGateway, forms: Sequence[str] = EVERY, counts: Sequence[int] = COUNTS, **options: Any
) -> dict[tuple[str, int], Answer]:
    """All at the same time."""
    asked = [(form, n) for form in forms for n in counts]
    answers = await asyncio.gather(*(ask(gateway, form, n, **options) for form, n in asked))
    return dict(zip(asked, answers, strict=True))


@asynccontextmanager
async def speaking(
    *texts: str, endpoint: str = "", **settings: Any
) -> AsyncIterator[tuple[RunningEngine, RunningGateway]]:
    """An engine whose choices say these texts, and a gateway. settings: of the executor, but request_timeout_s."""
    of_gateway = {name: settings.pop(name) for name in ("request_timeout_s",) if name in settings}
    with serving(SpeakingExecutor(small_tokenizer(), *texts, **settings), endpoint) as engine:
        async with running_gateway(engine.endpoint, **of_gateway) as gateway:
            yield engine, gateway


def tokens_of(text: str) -> list[int]:
    return small_tokenizer().encode(text, add_special_tokens=False)


def num_tokens_until(text: str, stop: str) -> int:
    """Tokens up to and with the one that completes a stop string."""
    ids = tokens_of(text)
    return next(num for num in range(1, len(ids) + 1) if stop in small_tokenizer().decode(ids[:num]))


async def is_idle(gateway: RunningGateway) -> bool:
    figures = await gateway.metrics()
    names = ("num_running_requests", "num_waiting_requests", "num_allocated_blocks", "gateway_live_streams")
    return all(figures[name] == 0 for name in names)


@dataclass(frozen=True)
class End:
    """How a choice ends by itself."""

    text: str
    finish_reason: str
    stop_reason: str | int | None
    num_tokens: int

    @classmethod
    def by_eos(cls, text: str) -> "End":
        return cls(text, "stop", None, len(tokens_of(text)) + 1)

    @classmethod
    def by_string(cls, text: str, stop: str) -> "End":
        return cls(text[: text.index(stop)], "stop", stop, num_tokens_until(text, stop))

    @classmethod
    def by_id(cls, text: str, index: int) -> "End":
        ids = tokens_of(text)
        return cls(small_tokenizer().decode(ids[:index]), "stop", ids[index], index + 1)

    @classmethod
    def by_length(cls, text: str, num_tokens: int) -> "End":
        return cls(small_tokenizer().decode(tokens_of(text)[:num_tokens]), "length", None, num_tokens)


def _own_id(text: str, others: Sequence[str]) -> int:
    """The first index of a token that no other text has, and this one not before."""
    taken = {token_id for other in others for token_id in tokens_of(other)}
    return next(index for index, token_id in enumerate(tokens_of(text)) if index > 3 and token_id not in taken)


_OWN = [_own_id(text, [other for other in SAID if other != text]) for text in SAID]
_STOPS = ("END", "STOP", "caf\u00e9")
BY_ITSELF: Final[dict[str, tuple[dict[str, Any], list[End]]]] = {
    "end of sequence": ({}, [End.by_eos(text) for text in SAID]),
    "stop string": ({"stop": _STOPS}, [End.by_string(text, stop) for text, stop in zip(SAID, _STOPS, strict=True)]),
    "stop string kept": (
        {"stop": _STOPS, "include_stop_str_in_output": True},
        [
            End(text[: text.index(stop)] + stop, "stop", stop, num_tokens_until(text, stop))
            for text, stop in zip(SAID, _STOPS, strict=True)
        ],
    ),
    "stop id": (
        {"stop_token_ids": [tokens_of(text)[index] for text, index in zip(SAID, _OWN, strict=True)]},
        [End.by_id(text, index) for text, index in zip(SAID, _OWN, strict=True)],
    ),
    "length": ({"max_tokens": 7}, [End.by_length(text, 7) for text in SAID]),
    "length of one token": ({"max_tokens": 1}, [End.by_length(text, 1) for text in SAID]),
    "end of sequence as the last token there was room for": (
        {"max_tokens": len(tokens_of(SAID[0])) + 1},
        [End.by_eos(SAID[0]), *(End.by_length(text, len(tokens_of(SAID[0])) + 1) for text in SAID[1:])],
    ),
    "stop string with the last token there was room for": (
        {"stop": "END", "max_tokens": num_tokens_until(SAID[0], "END")},
        [
            End.by_string(SAID[0], "END"),
            *(End.by_length(text, num_tokens_until(SAID[0], "END")) for text in SAID[1:]),
        ],
    ),
    "each its own way": (
        {"stop": "STOP", "stop_token_ids": [tokens_of(SAID[2])[_OWN[2]]]},
        [End.by_eos(SAID[0]), End.by_string(SAID[1], "STOP"), End.by_id(SAID[2], _OWN[2])],
    ),
}


async def test_a_request_that_ends_by_itself_ends_alike_in_every_answer() -> None:
    async with speaking(*SAID) as (_, gateway):
        for name, (fields, ends) in BY_ITSELF.items():
            for (form, n), answer in (await ask_each(gateway, **fields)).items():
                expected = [(end.text, end.finish_reason, end.stop_reason) for end in ends[:n]]
                told = [(choice.text, choice.finish_reason, choice.stop_reason) for choice in answer.choices]
                assert told == expected, (name, form, n)
                assert answer.num_output == sum(end.num_tokens for end in ends[:n]), (name, form, n)
        await eventually_async(lambda: is_idle(gateway))


async def test_a_full_context_is_told_as_length() -> None:
    async with speaking(*LONG, max_model_len=128) as (_, gateway):
        for (form, n), answer in (await ask_each(gateway)).items():
            room = 128 - answer.num_prompt
            ends = [End.by_length(text, room) for text in LONG[:n]]
            assert [(choice.text, choice.finish_reason) for choice in answer.choices] == [
                (end.text, "length") for end in ends
            ], (form, n)
            assert answer.num_output == n * room, (form, n)


def check_broken_off(answers: dict[tuple[str, int], Answer], cause: str, texts: Sequence[str] = LONG) -> None:
    """Each choice has `abort` and the beginning of its text."""
    for (form, n), answer in answers.items():
        assert (answer.status, answer.error, answer.reasons) == (200, None, ["abort"] * n), (form, n)
        assert all(text.startswith(choice.text) for text, choice in zip(texts, answer.choices, strict=False)), (form, n)
        assert all(choice.cause in (None, cause) and choice.stop_reason is None for choice in answer.choices)
        told = sum(len(tokens_of(choice.text)) for choice in answer.choices)
        assert 0 < told <= answer.num_output + 2 * n, "more was told than is counted"


async def test_a_cancelled_request_ends_with_abort() -> None:
    async with speaking(*LONG, step_s=0.01) as (_, gateway):
        check_broken_off(await ask_each(gateway, STREAMED + SOCKETS, cancels=True), "cancelled")
        await eventually_async(lambda: is_idle(gateway))


async def test_a_request_over_its_time_ends_with_abort_and_before_its_first_token_with_an_error() -> None:
    async with speaking(*LONG, step_s=0.02, request_timeout_s=0.8) as (engine, gateway):
        check_broken_off(await ask_each(gateway), "timeout")
        await eventually_async(lambda: is_idle(gateway))
        assert isinstance(engine.executor, SpeakingExecutor)
        engine.executor.block_at_step[engine.executor.num_steps] = 2.0
        check_failed(await ask_each(gateway), "timeout", 504)


def check_failed(answers: dict[tuple[str, int], Answer], code: str, status: int) -> None:
    """Nothing of it was told but the error; a socket's choices end with it."""
    for (form, n), answer in answers.items():
        assert answer.error is not None and answer.error["code"] == code, (form, n)
        assert answer.status == (200 if form in SOCKETS else status), (form, n)
        assert answer.reasons == (["error"] * n if form in SOCKETS else []), (form, n)
        assert not any(choice.text for choice in answer.choices)


async def test_a_server_that_shuts_down_ends_every_request_with_abort() -> None:
    async with speaking(*LONG, step_s=0.02) as (_, gateway):
        asking = asyncio.create_task(ask_each(gateway, closes=True))
        await eventually(lambda: gateway.app[keys.ENGINE].num_tokens > 150)
        await gateway.server.close()
        check_broken_off(await asking, "drain")


async def test_an_engine_that_ends_and_comes_back_leaves_no_mark() -> None:
    texts = [text[: 400 + 20 * index] for index, text in enumerate(LONG)]
    async with speaking(*texts, step_s=0.02) as (first, gateway):
        client, service = gateway.app[keys.ENGINE], gateway.app[keys.GENERATION]
        asking = asyncio.create_task(ask_each(gateway))
        await eventually(lambda: service.num_live == 12 and client.num_tokens > 150)
        first.stop()
        await eventually(lambda: not client.is_ready)
        with serving(SpeakingExecutor(small_tokenizer(), *texts), first.endpoint):
            answers = await asking
            assert client.num_resubmitted >= 12
            for (form, n), answer in answers.items():
                expected = [(text, "stop", None) for text in texts[:n]]
                told = [(choice.text, choice.finish_reason, choice.stop_reason) for choice in answer.choices]
                assert told == expected, (form, n)
                assert answer.num_output == sum(len(tokens_of(text)) + 1 for text in texts[:n]), (form, n)
            await eventually_async(lambda: is_idle(gateway))


async def test_choices_that_ended_before_their_engine_did_are_not_ended_again() -> None:
    texts = (SAID[0], SAID[1], LONG[2][:500])
    ends = [End.by_eos(texts[0]), End.by_string(texts[1], "STOP"), End.by_eos(texts[2])]
    most = max(end.num_tokens for end in ends[:2])
    async with speaking(*texts, step_s=0.02) as (first, gateway):
        client = gateway.app[keys.ENGINE]
        asking = asyncio.create_task(ask_each(gateway, counts=(3,), stop="STOP"))
        await eventually(lambda: client.num_tokens > 6 * (most + ends[0].num_tokens + ends[1].num_tokens + 2))
        assert not asking.done()
        first.stop()
        with serving(SpeakingExecutor(small_tokenizer(), *texts), first.endpoint):
            for (form, _), answer in (await asking).items():
                told = [(choice.text, choice.finish_reason, choice.stop_reason) for choice in answer.choices]
                assert told == [(end.text, end.finish_reason, end.stop_reason) for end in ends], form
                assert answer.num_output == sum(end.num_tokens for end in ends), form
            assert client.num_resubmitted >= 6


async def test_an_engine_that_never_comes_back_ends_requests_when_their_time_is_over() -> None:
    async with speaking(*LONG, step_s=0.02, request_timeout_s=1.5) as (engine, gateway):
        asking = asyncio.create_task(ask_each(gateway))
        await eventually(lambda: gateway.app[keys.ENGINE].num_tokens > 150)
        engine.stop()
        check_broken_off(await asking, "timeout")
        assert gateway.app[keys.GENERATION].num_live == 0


async def test_a_choice_that_the_model_fails_on_fails_its_request_and_the_others_have_their_own_ends() -> None:
    poison = tokens_of(SAID[1])[_OWN[1]]
    async with speaking(*SAID, poison_token=poison, step_s=0.01) as (_, gateway):
        whole = End.by_eos(SAID[0])
        for (form, n), answer in (await ask_each(gateway)).items():
            if n == 1:
                assert (answer.reasons, answer.num_output) == (["stop"], whole.num_tokens), form
                continue
            assert answer.error is not None and answer.error["code"] == "engine_error", form
            if form in WHOLE or answer.status == 500:  # as a stream that failed before its headers went out
                assert (answer.status, answer.choices) == (500, []) and form not in SOCKETS
            else:
                assert answer.reasons == ["stop", "error", "stop"], form
                assert answer.choices[0].text == SAID[0] and answer.choices[2].text == SAID[2], form
                assert SAID[1].startswith(answer.choices[1].text)
        await eventually_async(lambda: is_idle(gateway))


@pytest.mark.long
async def test_an_engine_may_end_after_any_step() -> None:
    texts = (SAID[0], SAID[1], "hello, it")
    ends = [End.by_length(texts[0], 9), End.by_string(texts[1], "own"), End.by_eos(texts[2])]
    most = max(end.num_tokens for end in ends)
    for step in range(1, most + 2):
        async with speaking(*texts, step_s=0.005, fail_at_step=step) as (first, gateway):
            asking = asyncio.create_task(ask_each(gateway, stop="own", max_tokens=9))
            await asyncio.to_thread(first.join, 30.0)
            with serving(SpeakingExecutor(small_tokenizer(), *texts), first.endpoint):
                for (form, n), answer in (await asking).items():
                    told = [(choice.text, choice.finish_reason, choice.stop_reason) for choice in answer.choices]
                    assert told == [(e.text, e.finish_reason, e.stop_reason) for e in ends[:n]], (step, form, n)
                    assert answer.num_output == sum(end.num_tokens for end in ends[:n]), (step, form, n)
