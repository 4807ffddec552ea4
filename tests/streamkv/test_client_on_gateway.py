"""Our clients against the real gateway, with a scripted engine behind it on a real socket."""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from gateway.app import Server, make_app
from gateway.tokenizer import Tokenizer
from streamkv.client import Client, Delta, Message, ServerError, StreamSocket
from streamkv.config import GatewayConfig
from streamkv.model_files import ModelFiles
from tests.support import scripted_engine
from tests.support.scripted_executor import ScriptedExecutor
from tests.support.small_tokenizers import CHATML, train_byte_level, write_folder

PROMPT = {"prompt": "one two three", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return write_folder(tmp_path_factory.mktemp("model"), train_byte_level(), chat_template=CHATML)


@pytest.fixture
def engine() -> Iterator[scripted_engine.RunningEngine]:
    with scripted_engine.serving(ScriptedExecutor(num_blocks=2048, max_model_len=16384, vocab_size=420)) as running:
        yield running


@asynccontextmanager
async def gateway(model: ModelFiles, engine: scripted_engine.RunningEngine) -> AsyncIterator[str]:
    server = Server(make_app(GatewayConfig(port=0), lambda: Tokenizer.load(model), endpoint=engine.endpoint))
    await server.start("127.0.0.1", 0)
    try:
        yield server.url
    finally:
        await server.close()


@pytest.fixture
async def url(model: ModelFiles, engine: scripted_engine.RunningEngine) -> AsyncIterator[str]:
    async with gateway(model, engine) as running:
        yield running


async def whole(socket: StreamSocket, request: dict[str, object]) -> tuple[str, list[str], int]:
    """Text, finish reasons and completion tokens of a generation."""
    deltas = [delta async for delta in socket.generate(request)]
    reasons = [delta.finish_reason for delta in deltas if delta.finish_reason]
    return "".join(d.text for d in deltas), reasons, sum(d.usage.completion_tokens for d in deltas if d.usage)


async def test_sse_socket_and_the_openai_package_tell_the_same(url: str) -> None:
    async with Client(url) as client, client.socket() as socket:
        (name,) = await client.models()
        streamed = [delta async for delta in client.complete("one two three", PROMPT)]
        by_socket = await whole(socket, PROMPT)
    theirs = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    answer = await theirs.completions.create(
        model=name, prompt="one two three", max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    await theirs.close()
    text = "".join(delta.text for delta in streamed)
    assert text and by_socket == (text, ["length"], 8)
    assert answer.choices[0].text == text
    assert [d.finish_reason for d in streamed if d.finish_reason] == ["length"]
    assert streamed[-1].usage is not None and streamed[-1].usage.completion_tokens == 8


async def test_chat_goes_through_the_template(url: str) -> None:
    async with Client(url) as client, client.socket() as socket:
        options = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
        streamed = [d async for d in client.chat([Message("user", "one")], options)]
        by_socket = await whole(socket, {"messages": [{"role": "user", "content": "one"}], **options})
    assert by_socket == ("".join(delta.text for delta in streamed), ["length"], 6)


async def test_generations_of_one_socket_run_side_by_side(url: str) -> None:
    async with Client(url) as client, client.socket() as socket:
        requests = [{**PROMPT, "prompt": [10 + number] * 5} for number in range(20)]
        together = await asyncio.gather(*(whole(socket, request) for request in requests))
        alone = [await whole(socket, request) for request in requests]
    assert together == alone and len({text for text, _, _ in alone}) > 10


async def test_a_refused_generation_raises_and_leaves_the_others(url: str) -> None:
    async with Client(url) as client, client.socket() as socket:
        other = asyncio.create_task(whole(socket, {**PROMPT, "max_tokens": 50}))
        with pytest.raises(ServerError, match="temperature"):
            await whole(socket, {**PROMPT, "temperature": 9})
        assert (await other)[1:] == (["length"], 50)


async def test_leaving_a_generation_early_cancels_it_alone(url: str, engine: scripted_engine.RunningEngine) -> None:
    async with Client(url) as client, client.socket() as socket:
        left = socket.generate({**PROMPT, "max_tokens": 16_000})
        async for delta in left:
            if delta.text:
                break
        await left.aclose()
        assert (await whole(socket, PROMPT))[1] == ["length"]


async def test_a_reader_who_waits_loses_nothing(url: str) -> None:
    """More events than the client queues for one generation: the socket waits, then all is there."""
    async with Client(url) as client, client.socket() as socket:
        texts = []
        num_tokens = 0
        async for delta in socket.generate({**PROMPT, "max_tokens": 6000}):
            if not texts:
                await asyncio.sleep(1.0)
            texts.append(delta.text)
            num_tokens = delta.usage.completion_tokens if delta.usage else num_tokens
        assert num_tokens == 6000 and len(texts) > 3000


async def test_a_closed_socket_ends_every_generation_with_an_error(
    model: ModelFiles, engine: scripted_engine.RunningEngine
) -> None:
    async with Client("http://127.0.0.1:9") as client:
        with pytest.raises(ServerError, match=r"127\.0\.0\.1:9"):
            async with client.socket():
                pass
    server = gateway(model, engine)
    url = await server.__aenter__()
    async with Client(url, attach_grace_s=0.3) as client, client.socket() as socket:
        stream = socket.generate({**PROMPT, "max_tokens": 16_000})
        await anext(stream)
        closing = asyncio.create_task(server.__aexit__(None, None, None))
        reasons = [delta.finish_reason async for delta in stream_to_its_end(stream) if delta.finish_reason]
        await closing
        assert reasons in ([], ["abort"])
        with pytest.raises(ServerError, match="closed"):
            await whole(socket, PROMPT)


async def stream_to_its_end(stream: AsyncGenerator[Delta]) -> AsyncGenerator[Delta]:
    try:
        async for delta in stream:
            yield delta
    except ServerError:
        return


async def test_bench_gets_every_answer_from_the_gateway(url: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    words = ["--workload", "cpu-small", "--requests", "12", "--vocab-lo", "3", "--vocab-hi", "400"]
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "streamkv", "bench", "--base-url", url, "--json", str(file), *words]
    )
    assert await process.wait() == 0
    figures = json.loads(file.read_text())
    assert (figures["ok"], figures["failed"], figures["unexpected_length"], figures["without_usage"]) == (12, 0, 0, 0)
    assert figures["output_tokens"] == 12 * 64
