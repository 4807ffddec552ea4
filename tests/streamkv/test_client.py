"""The public client: what it makes of a server's events, also of unusual and broken ones."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from streamkv.client import Client, Message, ServerError, Usage, api_url, error_text
from tests.support.openai_server import OpenAIServer, chat_events, completion_events, event, serving


@pytest.fixture
async def server() -> AsyncIterator[OpenAIServer]:
    async with serving() as running:
        yield running


async def text_of(server: OpenAIServer) -> str:
    async with Client(server.url) as client:
        return "".join([delta.text async for delta in client.complete("x", {"max_tokens": 3})])


async def test_chat_gives_pieces_then_reason_then_usage(server: OpenAIServer) -> None:
    server.script = chat_events(["Grüß", " dich"])
    async with Client(server.url + "/v1/", api_key="secret") as client:
        deltas = [d async for d in client.chat([Message("user", "Hi")], {"model": "small", "max_tokens": 9})]
    assert [d.text for d in deltas if d.text] == ["Grüß", " dich"]
    assert [d.finish_reason for d in deltas if d.finish_reason] == ["stop"]
    assert deltas[-1].usage == Usage(prompt_tokens=9, completion_tokens=2)
    assert server.keys == ["Bearer secret"]
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "Hi"}]
    assert server.bodies[0]["stream"] is True and server.bodies[0]["max_tokens"] == 9


async def test_token_ids_are_sent_as_they_are(server: OpenAIServer) -> None:
    async with Client(server.url) as client:
        assert len([d async for d in client.complete([1, 2, 3], {"max_tokens": 2}) if d.text]) == 2
    assert server.bodies[0]["prompt"] == [1, 2, 3]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_events_may_be_cut_anywhere(server: OpenAIServer, size: int) -> None:
    whole = b": keep-alive\n\nid: 7\nevent: x\n" + b"".join(completion_events(["é", "日本", "!"]))
    server.script = [whole[start : start + size] for start in range(0, len(whole), size)]
    assert await text_of(server) == "é日本!"


async def test_crlf_and_data_over_several_lines_are_understood(server: OpenAIServer) -> None:
    lines = b'data: {"choices": [{"text":\r\ndata: "ok", "finish_reason": "stop"}]}\r\n\r\ndata: [DONE]\r\n\r\n'
    server.script = [lines]
    assert await text_of(server) == "ok"


async def test_a_refusal_says_status_reason_and_when_to_come_back(server: OpenAIServer) -> None:
    server.status, server.failure = 503, ({"error": {"message": "model is loading"}}, {"Retry-After": "7"})
    with pytest.raises(ServerError, match="HTTP 503: model is loading") as caught:
        await text_of(server)
    assert (caught.value.status, caught.value.retry_after_s) == (503, 7.0)


async def test_an_error_event_ends_the_stream_as_an_error(server: OpenAIServer) -> None:
    server.script = [*completion_events(["a"])[:1], event({"error": {"message": "engine lost"}})]
    with pytest.raises(ServerError, match="engine lost"):
        await text_of(server)


async def test_an_error_event_may_say_when_to_come_back(server: OpenAIServer) -> None:
    for retry_after_s, understood in ((4, 4.0), ("soon", None), (None, None)):
        server.script = [event({"error": {"message": "full", "retry_after_s": retry_after_s}})]
        with pytest.raises(ServerError, match="full") as caught:
            await text_of(server)
        assert (caught.value.status, caught.value.retry_after_s) == (0, understood)


async def test_a_stream_that_breaks_off_is_an_error(server: OpenAIServer) -> None:
    server.script = completion_events(["a", "b"])[:2]
    with pytest.raises(ServerError, match="broke off"):
        await text_of(server)


async def test_an_event_that_is_no_json_is_an_error(server: OpenAIServer) -> None:
    server.script = [b"data: {oops\n\n"]
    with pytest.raises(ServerError, match="not understood"):
        await text_of(server)


async def test_leaving_early_closes_the_connection(server: OpenAIServer) -> None:
    server.script, server.gap_s = completion_events(["a"] * 1000), 0.01
    async with Client(server.url) as client:
        deltas = client.complete("x", {})
        assert (await anext(deltas)).text == "a"
        await deltas.aclose()
        for _ in range(200):
            if server.num_cut_off:
                break
            await asyncio.sleep(0.01)
    assert server.num_cut_off == 1


async def test_models_are_listed_and_an_absent_server_is_said(server: OpenAIServer) -> None:
    async with Client(server.url) as client:
        assert await client.models() == ["small"]
    async with Client("http://127.0.0.1:9") as client:
        with pytest.raises(ServerError, match=r"http://127.0.0.1:9"):
            await client.models()


def test_a_server_is_named_with_or_without_v1() -> None:
    assert {api_url(f"http://h{end}", "/v1/models") for end in ("", "/", "/v1", "/v1/")} == {"http://h/v1/models"}


def test_error_text_reads_what_there_is() -> None:
    assert error_text(b'{"error": {"message": "no"}}') == "no"
    assert error_text(b'{"error": "no"}') == error_text(b'{"message": "no"}') == error_text(b"no") == "no"
