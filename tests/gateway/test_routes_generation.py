"""Chat and text completions over HTTP: the real gateway, the real engine loop, a scripted executor."""

import asyncio
import itertools
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

from engine.simulation.simulated_model import end_after
from gateway import keys
from streamkv.sampling import SamplingParams
from tests.support.running_gateway import (
    MODEL,
    VOCAB_SIZE,
    Events,
    RunningGateway,
    eventually,
    eventually_async,
    running_gateway,
    small_tokenizer,
)
from tests.support.scripted_engine import RunningEngine, serving
from tests.support.scripted_executor import ScriptedExecutor

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
PROMPT = list(range(30, 50))


def executor(**options: Any) -> ScriptedExecutor:
    return ScriptedExecutor(vocab_size=VOCAB_SIZE, **options)


@pytest.fixture
def engine() -> Iterator[RunningEngine]:
    with serving(executor(eos_rule=end_after(400)), enable_prefix_caching=False) as running:
        yield running


@pytest.fixture
async def gateway(engine: RunningEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway(engine.endpoint) as running:
        yield running


@pytest.fixture
async def slow() -> AsyncIterator[RunningGateway]:
    """5 ms a step."""
    with serving(executor(step_s=0.005)) as engine:
        async with running_gateway(engine.endpoint) as running:
            yield running


def expected(num_tokens: int, **sampling: Any) -> list[int]:
    return executor().expected_tokens(
        PROMPT, num_tokens, SamplingParams(**{"seed": 0, "max_tokens": num_tokens, "temperature": 0.0, **sampling})
    )


def body(**more: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, **more}


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "one two"}], "max_tokens": 20, "temperature": 0, **more}


async def is_idle(gateway: RunningGateway) -> bool:
    figures = await gateway.metrics()
    names = ("num_running_requests", "num_waiting_requests", "num_allocated_blocks", "gateway_live_streams")
    return all(figures[name] == 0 for name in names)


async def test_the_answer_is_the_text_of_the_engines_tokens(gateway: RunningGateway) -> None:
    status, answer = await gateway.post(TEXT, body(return_token_ids=True))
    choice = answer["choices"][0]
    assert status == 200
    assert choice["token_ids"] == expected(40)
    assert choice["text"] == small_tokenizer().decode(expected(40))
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert choice["prompt_token_ids"] == PROMPT and "prompt_token_ids" not in answer
    assert answer["usage"] == {
        "prompt_tokens": 20,
        "completion_tokens": 40,
        "total_tokens": 60,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert (answer["object"], answer["model"]) == ("text_completion", MODEL)


async def test_usage_tells_what_was_found_in_the_cache(slow: RunningGateway) -> None:
    async def cached(prompt: list[int], **more: Any) -> int:
        _, answer = await slow.post(TEXT, body(prompt=prompt, max_tokens=4, **more))
        assert answer["choices"][0]["text"] == small_tokenizer().decode(executor().expected_tokens(prompt, 4))
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert await cached(PROMPT) == 0
    assert await cached(PROMPT) == len(PROMPT) - 1, "the last token is computed for its logits"
    assert await cached([*PROMPT[:13], 77, 78]) == 13
    assert await cached(PROMPT, cache_salt="mine") == 0
    streamed = await slow.events(TEXT, body(stream_options={"include_usage": True}, max_tokens=4))
    assert streamed.usage is not None
    assert streamed.usage["prompt_tokens_details"]["cached_tokens"] == len(PROMPT) - 1


@pytest.mark.parametrize("n", [1, 2])
async def test_usage_tells_what_was_found_also_when_a_stop_string_ends_every_choice(
    slow: RunningGateway, n: int
) -> None:
    text = small_tokenizer().decode(expected(8))
    first = body(max_tokens=8, temperature=0, n=n)
    await slow.post(TEXT, first)
    _, answer = await slow.post(TEXT, first | {"stop": [text[2:4]], "max_tokens": 1000})
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT) - 1


async def test_the_prompts_ids_stand_where_vllm_puts_them(gateway: RunningGateway) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "n": 2, "return_token_ids": True}
    _, whole = await gateway.post(CHAT, chat)
    streamed = await gateway.events(CHAT, chat)
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    assert [event["prompt_token_ids"] for event in streamed.objects if "prompt_token_ids" in event] == [
        whole["prompt_token_ids"]
    ]
    _, whole = await gateway.post(TEXT, body(n=2, max_tokens=3, return_token_ids=True))
    streamed = await gateway.events(TEXT, body(n=2, max_tokens=3, return_token_ids=True))
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [PROMPT, PROMPT]
    in_stream = [choice for event in streamed.objects for choice in event["choices"] if "prompt_token_ids" in choice]
    assert sorted((choice["index"], choice["prompt_token_ids"]) for choice in in_stream) == [(0, PROMPT), (1, PROMPT)]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_streamed_and_whole_answers_are_the_same(gateway: RunningGateway, path: str) -> None:
    request = chat() if path == CHAT else body()
    for num_tokens in (1, 2, 3, 17, 40):
        request["max_tokens"] = num_tokens
        _, whole = await gateway.post(path, request)
        stream = await gateway.events(path, {**request, "stream_options": {"include_usage": True}})
        choice = whole["choices"][0]
        assert stream.text() == (choice["message"]["content"] if path == CHAT else choice["text"])
        assert stream.reasons() == {0: [choice["finish_reason"]]} == {0: ["length"]}
        assert stream.usage == whole["usage"]
        assert stream.data[-1] == "[DONE]" and stream.data.count("[DONE]") == 1
        assert stream.objects[-1]["choices"] == []


async def test_a_stream_is_told_to_proxies_and_comes_token_by_token(gateway: RunningGateway) -> None:
    stream = await gateway.events(TEXT, body(return_token_ids=True))
    assert stream.headers["Content-Type"].startswith("text/event-stream")
    assert stream.headers["X-Accel-Buffering"] == "no"
    assert stream.headers["Cache-Control"] == "no-cache"
    ids = [choice.get("token_ids", []) for event in stream.objects for choice in event["choices"]]
    assert list(itertools.chain.from_iterable(ids)) == expected(40)
    assert stream.objects[0]["choices"][0]["prompt_token_ids"] == PROMPT
    assert sum(bool(some) for some in ids) > 30, "tokens came in few events"
    assert stream.usage is None, "usage was not asked for"


async def test_the_role_comes_once_for_each_choice(gateway: RunningGateway) -> None:
    stream = await gateway.events(CHAT, chat(n=3, temperature=1.0, seed=5))
    roles = [
        choice["index"] for event in stream.objects for choice in event["choices"] if "role" in choice.get("delta", {})
    ]
    assert sorted(roles) == [0, 1, 2]
    assert stream.objects[0]["object"] == "chat.completion.chunk"


async def test_choices_have_own_texts_and_ends(gateway: RunningGateway) -> None:
    request = body(n=3, temperature=1.0, seed=11, max_tokens=12)
    _, whole = await gateway.post(TEXT, request)
    stream = await gateway.events(TEXT, {**request, "stream_options": {"include_usage": True}})
    texts = [choice["text"] for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert [stream.text(index) for index in range(3)] == texts
    assert stream.reasons() == {0: ["length"], 1: ["length"], 2: ["length"]}
    assert whole["usage"]["completion_tokens"] == 36 and stream.usage == whole["usage"]


async def test_usage_with_every_event_counts_up(gateway: RunningGateway) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await gateway.events(TEXT, body(max_tokens=5, stream_options=options))
    counts = [event["usage"]["completion_tokens"] for event in stream.objects]
    assert counts == sorted(counts) and counts[-1] == 5


async def test_end_of_sequence_is_a_stop_and_no_text(gateway: RunningGateway) -> None:
    with serving(executor(eos_rule=end_after(6)), enable_prefix_caching=False) as engine:
        async with running_gateway(engine.endpoint) as other:
            _, whole = await other.post(TEXT, body(return_token_ids=True))
            stream = await other.events(TEXT, body(stream_options={"include_usage": True}))
    choice = whole["choices"][0]
    assert choice["token_ids"] == [*expected(6), 2]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert choice["text"] == small_tokenizer().decode(expected(6)) == stream.text()
    assert whole["usage"]["completion_tokens"] == 7
    assert stream.usage == whole["usage"] and stream.reasons() == {0: ["stop"]}


async def test_a_stop_id_ends_with_its_number_as_reason(gateway: RunningGateway) -> None:
    stop = expected(10)[9]
    first = expected(40).index(stop)
    _, whole = await gateway.post(TEXT, body(stop_token_ids=[stop], return_token_ids=True))
    choice = whole["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["token_ids"] == expected(first + 1)
    assert choice["text"] == small_tokenizer().decode(expected(first))


async def test_a_stop_string_across_tokens_is_found_and_never_leaks(gateway: RunningGateway) -> None:
    text = small_tokenizer().decode(expected(40))
    starts = [start for start in range(len(text) - 4) if "\ufffd" not in text[start : start + 4]]
    assert len(starts) >= 6
    for start in starts[::3]:
        stop = text[start : start + 4]
        shown = text[: text.index(stop)]
        request = body(stop=[stop, "never there"])
        _, whole = await gateway.post(TEXT, request)
        stream = await gateway.events(TEXT, {**request, "stream_options": {"include_usage": True}})
        choice = whole["choices"][0]
        assert choice["text"] == shown == stream.text()
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert stream.reasons() == {0: ["stop"]}
        needed = next(n for n in range(1, 41) if stop in small_tokenizer().decode(expected(n)))
        assert whole["usage"]["completion_tokens"] == needed == (stream.usage or {})["completion_tokens"]
        _, kept = await gateway.post(TEXT, body(stop=stop, include_stop_str_in_output=True))
        assert kept["choices"][0]["text"] == shown + stop
    await eventually_async(lambda: is_idle(gateway))


def first_stop(texts: list[str]) -> tuple[int, str]:
    """A choice and a piece of its text that no other choice has, found before half of its tokens."""
    for choice, text in enumerate(texts):
        for start in range(4, len(text) // 2):
            piece = text[start : start + 3]
            if "\ufffd" not in piece and not any(piece in other for other in texts if other is not text):
                return choice, piece
    raise AssertionError("no such piece")


async def test_a_choice_that_ends_by_a_stop_string_is_not_computed_on_while_others_are(slow: RunningGateway) -> None:
    request = body(n=3, temperature=1.0, seed=11, max_tokens=160, ignore_eos=True)
    _, whole = await slow.post(TEXT, request)
    texts = [choice["text"] for choice in whole["choices"]]
    choice, stop = first_stop(texts)
    streaming = asyncio.create_task(slow.events(TEXT, {**request, "stop": stop}))
    seen: set[float] = set()

    async def one_has_ended() -> bool:
        seen.add((await slow.metrics())["num_running_sequences"])
        return 2 in seen

    await eventually_async(one_has_ended)
    assert not streaming.done() and 3 in seen
    stream = await streaming
    expected_texts = [text[: text.index(stop)] if index == choice else text for index, text in enumerate(texts)]
    assert [stream.text(index) for index in range(3)] == expected_texts
    assert stream.reasons() == {index: ["stop" if index == choice else "length"] for index in range(3)}
    await eventually_async(lambda: is_idle(slow))
    assert 'aborts_total{cause="stop_string"}' not in await slow.metrics(), "the request as a whole was not aborted"


async def test_a_half_matched_stop_string_is_shown_at_the_end(gateway: RunningGateway) -> None:
    text = small_tokenizer().decode(expected(12))
    stream = await gateway.events(TEXT, body(max_tokens=12, stop=text[-3:] + "\x7fnever"))
    assert stream.text() == text and stream.reasons() == {0: ["length"]}


async def test_no_delta_ends_inside_a_character(gateway: RunningGateway) -> None:
    for seed in range(6):
        stream = await gateway.events(TEXT, body(max_tokens=60, temperature=1.0, seed=seed, ignore_eos=True))
        tokens = executor().expected_tokens(
            PROMPT, 60, SamplingParams(seed=seed, max_tokens=60, temperature=1.0, ignore_eos=True)
        )
        assert stream.text() == small_tokenizer().decode(tokens)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_disconnect_frees_every_block(slow: RunningGateway, is_streamed: bool) -> None:
    request = asyncio.create_task(slow.post(TEXT, body(max_tokens=1500, stream=is_streamed)))

    async def is_running() -> bool:
        return (await slow.metrics())["num_allocated_blocks"] > 0

    await eventually_async(is_running)
    request.cancel()
    await eventually_async(lambda: is_idle(slow), timeout_s=2.0)
    assert (await slow.metrics())['gateway_aborts_total{cause="disconnected"}'] == 1


async def test_a_disconnect_while_queued_aborts() -> None:
    with serving(executor(step_s=0.005), max_num_seqs=1) as engine:
        async with running_gateway(engine.endpoint) as gateway:
            first = asyncio.create_task(gateway.post(TEXT, body(max_tokens=1500)))
            second = asyncio.create_task(gateway.post(TEXT, body(max_tokens=1500)))

            async def is_waiting() -> bool:
                return (await gateway.metrics())["num_waiting_requests"] == 1

            await eventually_async(is_waiting)
            second.cancel()
            await eventually_async(lambda: _none_waits(gateway), timeout_s=2.0)
            assert not first.done()
            first.cancel()
            await eventually_async(lambda: is_idle(gateway), timeout_s=2.0)


async def _none_waits(gateway: RunningGateway) -> bool:
    return (await gateway.metrics())["num_waiting_requests"] == 0


async def test_a_request_over_its_time_ends_with_abort() -> None:
    with serving(executor(step_s=0.01)) as engine:
        async with running_gateway(engine.endpoint, request_timeout_s=0.3) as gateway:
            stream = await gateway.events(TEXT, body(max_tokens=1500))
            _, whole = await gateway.post(TEXT, body(max_tokens=1500))
            assert stream.reasons() == {0: ["abort"]} and stream.data[-1] == "[DONE]"
            assert whole["choices"][0]["finish_reason"] == "abort"
            assert 5 < whole["usage"]["completion_tokens"] < 60
            await eventually_async(lambda: is_idle(gateway))


async def test_a_request_over_its_time_before_its_first_token_is_a_504() -> None:
    with serving(executor(block_at_step={0: 1.0})) as engine:
        async with running_gateway(engine.endpoint, request_timeout_s=0.2) as gateway:
            for is_streamed in (False, True):
                status, answer = await gateway.post(TEXT, body(stream=is_streamed))
                assert (status, answer["error"]["code"]) == (504, "timeout")


async def test_keep_alives_come_before_the_first_token_and_in_silence() -> None:
    with serving(executor(block_at_step={0: 0.5, 3: 0.5})) as engine:
        async with running_gateway(engine.endpoint, keepalive_s=0.1) as gateway:
            stream = await gateway.events(TEXT, body(max_tokens=6))
    assert stream.raw.startswith(b": keep-alive\n")
    silent = stream.raw[stream.raw.index(b"data:") :]
    assert b": keep-alive\n" in silent and b": keep-alive\n\n" not in stream.raw
    assert stream.text() == small_tokenizer().decode(expected(6))


async def test_http_1_0_gets_the_events_without_chunks(gateway: RunningGateway) -> None:
    data = json.dumps(body(stream=True, max_tokens=8)).encode()
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (len(data), data)
    )
    raw = await reader.read()
    writer.close()
    head, _, events = raw.partition(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert events.startswith(b"id: ") and events.endswith(b"data: [DONE]\n\n")
    assert events.count(b"\n\n") == events.count(b"\ndata: ") == events.count(b"id: ")


async def test_streams_asked_for_on_one_connection_without_waiting_come_one_after_the_other(
    gateway: RunningGateway,
) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for num_tokens, connection in ((5, "keep-alive"), (7, "keep-alive"), (3, "close")):
        data = json.dumps(body(stream=True, max_tokens=num_tokens)).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nConnection: {connection}\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data)
    raw = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    answers = raw.split(b"HTTP/1.1 200 OK\r\n")
    assert answers[0] == b"" and len(answers) == 4
    for num_tokens, answer in zip((5, 7, 3), answers[1:], strict=True):
        left, events = answer.partition(b"\r\n\r\n")[2], b""
        while left != b"0\r\n\r\n":
            size, _, left = left.partition(b"\r\n")
            events, left = events + left[: int(size, 16)], left[int(size, 16) + 2 :]
        texts = Events(200, {}, events)
        assert texts.data[-1] == "[DONE]"
        assert texts.text() == small_tokenizer().decode(expected(num_tokens))


@pytest.fixture
async def small_buffers() -> AsyncIterator[RunningGateway]:
    with serving(executor()) as engine:
        async with running_gateway(engine.endpoint, max_stream_buffer_bytes=2048) as running:
            yield running


async def test_a_slow_reader_is_paused_and_gets_everything(small_buffers: RunningGateway) -> None:
    gateway = small_buffers
    request = body(max_tokens=1500, ignore_eos=True, stream=True)
    data = json.dumps(request).encode()
    host, port = gateway.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, (host, int(port)))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    await loop.sock_sendall(connection, head + b"Content-Length: %d\r\n\r\n%b" % (len(data), data))
    await eventually(lambda: gateway.app[keys.METRICS].num_slow_reader_pauses > 0)
    await asyncio.sleep(0.2)
    num_before = gateway.app[keys.ENGINE].num_tokens
    await asyncio.sleep(0.2)
    assert gateway.app[keys.ENGINE].num_tokens == num_before < 1500, "the engine went on for a paused stream"
    _, other = await gateway.post(TEXT, body(max_tokens=5))
    assert other["usage"]["completion_tokens"] == 5, "another stream waits for the slow reader"
    raw = b""
    while piece := await loop.sock_recv(connection, 65536):
        raw += piece
    connection.close()
    assert raw.count(b'"finish_reason":"length"') == 1 and b"data: [DONE]" in raw
    pieces = [json.loads(line[6:]) for line in raw.split(b"\n") if line.startswith(b'data: {"id')]
    text = "".join(event["choices"][0]["text"] for event in pieces)
    tokens = executor().expected_tokens(
        PROMPT, 1500, SamplingParams(seed=0, max_tokens=1500, temperature=0.0, ignore_eos=True)
    )
    assert text == small_tokenizer().decode(tokens)


async def test_the_engines_end_and_restart_leave_no_mark_on_a_stream() -> None:
    with serving(executor(step_s=0.004)) as first:
        async with running_gateway(first.endpoint) as gateway:
            requests = [
                asyncio.create_task(gateway.events(TEXT, body(max_tokens=200, ignore_eos=True))),
                asyncio.create_task(
                    gateway.events(TEXT, body(max_tokens=60, ignore_eos=True, n=2, seed=3, temperature=1))
                ),
                asyncio.create_task(gateway.post(TEXT, body(max_tokens=200, ignore_eos=True, return_token_ids=True))),
            ]
            await eventually(lambda: gateway.app[keys.ENGINE].num_tokens > 60)
            first.stop()
            await eventually(lambda: not gateway.app[keys.ENGINE].is_ready)
            assert (await gateway.get("/ready"))[0] == 503 and (await gateway.get("/health"))[0] == 200
            with serving(executor(), endpoint=first.endpoint):
                stream, choices, (status, whole) = await asyncio.gather(*requests)
            assert gateway.app[keys.ENGINE].num_resubmitted >= 2
    tokens = expected(200, ignore_eos=True)
    assert stream.text() == small_tokenizer().decode(tokens) and stream.reasons() == {0: ["length"]}
    assert status == 200 and whole["choices"][0]["token_ids"] == tokens
    assert whole["usage"]["completion_tokens"] == 200
    for index in range(2):
        sampling = SamplingParams(seed=3, max_tokens=60, n=2, temperature=1.0, ignore_eos=True)
        assert choices.text(index) == small_tokenizer().decode(executor().expected_tokens(PROMPT, 60, sampling, index))


async def test_a_request_that_ends_its_engine_every_time_is_failed() -> None:
    with serving(executor(fail_at_step=0)) as first:
        async with running_gateway(first.endpoint) as gateway:
            request = asyncio.create_task(gateway.events(TEXT, body(max_tokens=300)))
            client = gateway.app[keys.ENGINE]
            await eventually(lambda: client.num_engine_losses == 1)
            await asyncio.to_thread(first.join)  # its last word comes before it has left the socket to the next
            with serving(executor(fail_at_step=0), endpoint=first.endpoint):
                await eventually(lambda: client.num_engine_losses == 2)
            with serving(executor(fail_at_step=0), endpoint=first.endpoint):
                await eventually(lambda: client.num_engine_losses == 3)
            with serving(executor(), endpoint=first.endpoint):
                refused = await asyncio.wait_for(request, 30)
                assert refused.status == 500, "nothing had been sent yet"
                assert json.loads(refused.raw)["error"]["code"] == "engine_error"
                _, after = await gateway.post(TEXT, body(max_tokens=5))
                assert after["usage"]["completion_tokens"] == 5


async def test_a_request_that_gets_tokens_outlives_any_number_of_engines() -> None:
    with serving(executor(fail_at_step=6)) as first:
        async with running_gateway(first.endpoint) as gateway:
            request = asyncio.create_task(gateway.events(TEXT, body(max_tokens=40, ignore_eos=True)))
            client = gateway.app[keys.ENGINE]
            await eventually(lambda: client.num_engine_losses == 1)
            await asyncio.to_thread(first.join)  # its last word comes before it has left the socket to the next
            for num_losses in range(2, 6):
                with serving(executor(fail_at_step=6), endpoint=first.endpoint):
                    await eventually(lambda: client.num_engine_losses == num_losses)  # noqa: B023
            with serving(executor(), endpoint=first.endpoint):
                stream = await asyncio.wait_for(request, 30)
    assert stream.reasons() == {0: ["length"]}
    assert stream.text() == small_tokenizer().decode(expected(40, ignore_eos=True))


async def test_a_request_that_the_model_fails_on_is_told_so_once_and_the_others_go_on() -> None:
    poison = expected(40, ignore_eos=True)[20]
    num_before = expected(40, ignore_eos=True).index(poison) + 1
    with serving(executor(poison_token=poison)) as engine:
        async with running_gateway(engine.endpoint) as gateway:
            stream, (status, answer), (other_status, other) = await asyncio.gather(
                gateway.events(TEXT, body(max_tokens=40, ignore_eos=True, return_token_ids=True)),
                gateway.post(TEXT, body(max_tokens=40, ignore_eos=True)),
                gateway.post(TEXT, body(max_tokens=num_before, ignore_eos=True)),
            )
            assert gateway.app[keys.ENGINE].num_engine_losses == 0
    assert stream.reasons() == {0: ["error"]} and stream.data[-1] == "[DONE]"
    errors = [event["error"] for event in stream.objects if "error" in event]
    assert [(error["code"], error["message"]) for error in errors] == [("engine_error", "poisoned")]
    assert stream.text() == small_tokenizer().decode(expected(num_before, ignore_eos=True))
    assert status == 500 and answer["error"] == errors[0]
    assert other_status == 200 and other["usage"]["completion_tokens"] == num_before


BAD: list[tuple[str, dict[str, Any], int, str | None]] = [
    (TEXT, {"max_tokens": 0}, 400, "max_tokens"),
    (TEXT, {"max_tokens": True}, 400, "max_tokens"),
    (TEXT, {"max_tokens": 1e3 + 0.5}, 400, "max_tokens"),
    (TEXT, {"max_tokens": 100_000}, 400, "max_tokens"),
    (TEXT, {"temperature": 2.5}, 400, "temperature"),
    (TEXT, {"temperature": "hot"}, 400, "temperature"),
    (TEXT, {"top_p": 0}, 400, "top_p"),
    (TEXT, {"top_k": -2}, 400, "top_k"),
    (TEXT, {"n": 0}, 400, "n"),
    (TEXT, {"n": 2**40}, 400, "n"),
    (TEXT, {"seed": -1}, 400, "seed"),
    (TEXT, {"seed": 2**64}, 400, "seed"),
    (TEXT, {"stop": [""]}, 400, "stop"),
    (TEXT, {"stop_token_ids": [VOCAB_SIZE]}, 400, "stop_token_ids"),
    (TEXT, {"prompt": []}, 400, "prompt"),
    (TEXT, {"prompt": ""}, 400, "prompt"),
    (TEXT, {"prompt": [-1]}, 400, "prompt"),
    (TEXT, {"prompt": [VOCAB_SIZE]}, 400, "prompt"),
    (TEXT, {"prompt": [2**63]}, 400, "prompt"),
    (TEXT, {"prompt": [True]}, 400, "prompt"),
    (TEXT, {"prompt": [5] * 4000}, 400, "prompt"),
    (TEXT, {"no_such_field": 1}, 400, "no_such_field"),
    (TEXT, {"model": "another"}, 404, "model"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": "hello"}, 400, "messages"),
]


@pytest.mark.parametrize(("path", "change", "status", "param"), BAD, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_bad_input_is_refused_by_name(
    gateway: RunningGateway, path: str, change: dict[str, Any], status: int, param: str | None, is_streamed: bool
) -> None:
    request = {**(chat() if path == CHAT else body()), **change, "stream": is_streamed}
    got, answer = await gateway.post(path, request)
    error = answer["error"]
    assert got == status
    assert error.keys() == {"message", "type", "param", "code"} and error["message"]
    assert (error["param"] or "").partition("[")[0] == param
    assert gateway.app[keys.GENERATION].num_live == 0


async def test_bad_input_is_answered_at_once_while_the_engine_loads() -> None:
    with serving(executor(load_s=3.0)) as engine:
        async with running_gateway(engine.endpoint, is_ready=False) as gateway:
            await gateway.app[keys.TOKENIZER].get()
            for request in (body(temperature=9), body(prompt=[VOCAB_SIZE]), body(nonsense=1)):
                begun = time.perf_counter()
                status, _ = await gateway.post(TEXT, request)
                assert status == 400 and time.perf_counter() - begun < 0.1


async def test_a_request_waits_for_an_engine_that_loads() -> None:
    with serving(executor(load_s=0.6)) as engine:
        async with running_gateway(engine.endpoint, is_ready=False) as gateway:
            status, answer = await gateway.post(TEXT, body(max_tokens=4))
            assert status == 200 and answer["usage"]["completion_tokens"] == 4


async def test_a_request_that_waited_too_long_gets_a_503_with_retry_after() -> None:
    with serving(executor(load_s=5.0)) as engine:
        async with running_gateway(engine.endpoint, is_ready=False, startup_wait_s=0.2) as gateway:
            for is_streamed in (False, True):
                data = json.dumps(body(stream=is_streamed))
                headers = {"Content-Type": "application/json"}
                async with gateway.session.post(gateway.url + TEXT, data=data, headers=headers) as response:
                    assert response.status == 503 and int(response.headers["Retry-After"]) >= 1
                    assert (await response.json())["error"]["code"] == "not_ready"


async def test_a_full_queue_is_a_503_with_retry_after() -> None:
    with serving(executor(step_s=0.01), max_num_seqs=1, max_queue=1) as engine:
        async with running_gateway(engine.endpoint) as gateway:
            held = [asyncio.create_task(gateway.post(TEXT, body(max_tokens=1000))) for _ in range(2)]

            async def is_full() -> bool:
                figures = await gateway.metrics()
                return (figures["num_running_requests"], figures["num_waiting_requests"]) == (1, 1)

            await eventually_async(is_full)
            for is_streamed in (False, True):
                headers = {"Content-Type": "application/json"}
                data = json.dumps(body(stream=is_streamed))
                async with gateway.session.post(gateway.url + TEXT, data=data, headers=headers) as response:
                    assert response.status == 503 and int(response.headers["Retry-After"]) >= 1
                    assert (await response.json())["error"]["code"] == "overloaded"
            for task in held:
                task.cancel()


async def test_the_openai_client_works_unchanged(gateway: RunningGateway) -> None:
    text = small_tokenizer().decode(expected(10))
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as client:
        whole = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=10, temperature=0)
        assert whole.choices[0].text == text and whole.usage is not None and whole.usage.completion_tokens == 10
        answer = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "one"}], max_tokens=10, temperature=0
        )
        deltas = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "one"}],
            max_tokens=10,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in deltas]
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert streamed == answer.choices[0].message.content
        assert chunks[-1].usage == answer.usage
        assert [model.id async for model in client.models.list()] == [MODEL]
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.completions.create(model=MODEL, prompt="x", temperature=5)
        with pytest.raises(openai.NotFoundError, match="another"):
            await client.completions.create(model="another", prompt="x")

    def with_the_sync_client() -> tuple[str, str]:
        with openai.OpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as client:
            whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=10, temperature=0)
            stream = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=10, temperature=0, stream=True)
            return whole.choices[0].text, "".join(chunk.choices[0].text for chunk in stream)

    assert await asyncio.to_thread(with_the_sync_client) == (text, text)


async def test_streams_side_by_side_do_not_mix(gateway: RunningGateway) -> None:
    prompts = [[10 + index, 60, 61] for index in range(24)]
    streams = await asyncio.gather(
        *(gateway.events(TEXT, body(prompt=prompt, max_tokens=30 + index)) for index, prompt in enumerate(prompts))
    )
    for index, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
        assert stream.text() == small_tokenizer().decode(executor().expected_tokens(prompt, 30 + index))
    await eventually_async(lambda: is_idle(gateway))
