"""Flow control by credit: the client says how many tokens it takes, and the engine stops when they are used up."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from gateway import keys
from gateway.credit import MAX_TOKENS, Credit
from streamkv.errors import InvalidField
from tests.support.running_gateway import (
    VOCAB_SIZE,
    RunningGateway,
    eventually_async,
    running_gateway,
    small_tokenizer,
)
from tests.support.scripted_engine import serving
from tests.support.scripted_executor import ScriptedExecutor

PROMPT = list(range(30, 50))
IN_FLIGHT = 4
"""Tokens that may come beyond the credit: two steps are launched when the pause arrives, and one is on the wire."""


def executor(**options: Any) -> ScriptedExecutor:
    return ScriptedExecutor(vocab_size=VOCAB_SIZE, **options)


def text_of(num_tokens: int) -> str:
    return small_tokenizer().decode(executor().expected_tokens(PROMPT, num_tokens))


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    with serving(executor(step_s=0.01)) as engine:
        async with running_gateway(engine.endpoint) as running:
            yield running


class Client:
    """Sends messages and keeps what comes."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self.events: list[dict[str, Any]] = []
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            self.events.append(json.loads(message.data))

    async def send(self, kind: str, client_id: str = "a", **fields: Any) -> None:
        await self._socket.send_json({"type": kind, "id": client_id, **fields})

    async def generate(self, client_id: str = "a", **fields: Any) -> None:
        await self.send("generate", client_id, **{"prompt": PROMPT, "max_tokens": 100, "temperature": 0, **fields})

    def num_tokens(self, client_id: str = "a") -> int:
        last: dict[int, int] = {}
        for event in self.events:
            if event["type"] == "delta" and event["id"] == client_id:
                last[event["index"]] = event["num_tokens"]
        return sum(last.values())

    def text(self, client_id: str = "a") -> str:
        return "".join(e["text"] for e in self.events if e["type"] == "delta" and e["id"] == client_id)

    def has(self, kind: str, client_id: str = "a") -> bool:
        return any(event["type"] == kind and event["id"] == client_id for event in self.events)

    async def wait_for(self, kind: str, client_id: str = "a") -> None:
        async def is_there() -> bool:
            return self.has(kind, client_id)

        await eventually_async(is_there, 30.0)

    async def wait_at_rest(self, client_id: str = "a") -> int:
        """Until nothing has come for a while. Returns the tokens that have."""
        num_before = -1
        while self.num_tokens(client_id) != num_before:
            num_before = self.num_tokens(client_id)
            await asyncio.sleep(0.25)
        return num_before


@asynccontextmanager
async def connected(gateway: RunningGateway) -> AsyncIterator[Client]:
    async with gateway.session.ws_connect(gateway.url + "/v1/stream") as socket:
        client = Client(socket)
        yield client
        client._reading.cancel()


async def test_no_token_comes_beyond_the_credit_and_what_was_on_its_way(gateway: RunningGateway) -> None:
    async with connected(gateway) as client:
        await client.generate(credit=10)
        granted = 10
        for more in (1, 7, 30):
            await client.wait_at_rest()
            assert granted <= client.num_tokens() <= granted + IN_FLIGHT
            # Paused in the engine, which computes nothing, not only held back here
            num_computed = gateway.app[keys.ENGINE].num_tokens
            await asyncio.sleep(0.2)
            assert gateway.app[keys.ENGINE].num_tokens == num_computed <= granted + IN_FLIGHT
            await client.send("credit", tokens=more)
            granted += more
        await client.send("credit", tokens=1000)
        await client.wait_for("done")
    assert client.text() == text_of(100) and client.num_tokens() == 100


async def test_what_came_beyond_the_credit_is_taken_off_the_next(gateway: RunningGateway) -> None:
    async with connected(gateway) as client:
        await client.generate(credit=5)
        over = await client.wait_at_rest() - 5
        if over:
            await client.send("credit", tokens=over)
            assert await client.wait_at_rest() == 5 + over
        await client.send("credit", tokens=10)
        assert 15 + over <= await client.wait_at_rest() <= 15 + over + IN_FLIGHT


async def test_without_credit_to_begin_with_nothing_comes(gateway: RunningGateway) -> None:
    async with connected(gateway) as client:
        await client.generate(credit=0, max_tokens=20)
        await client.wait_for("started")
        assert await client.wait_at_rest() <= IN_FLIGHT
        await client.generate("free", max_tokens=20)
        await client.wait_for("done", "free")
        assert not client.has("finished")
        await client.send("credit", tokens=20)
        await client.wait_for("done")
    assert client.text() == client.text("free") == text_of(20)


async def test_the_credit_is_one_for_all_choices(gateway: RunningGateway) -> None:
    async with connected(gateway) as client:
        await client.generate(credit=12, n=3, temperature=0.9, seed=3)
        assert 12 <= await client.wait_at_rest() <= 12 + 3 * IN_FLIGHT
        await client.send("credit", tokens=1000)
        await client.wait_for("done")
        assert client.num_tokens() == 300


async def test_a_pause_by_the_client_outlasts_a_grant(gateway: RunningGateway) -> None:
    async with connected(gateway) as client:
        await client.generate(credit=5)
        await client.wait_at_rest()
        await client.send("pause")
        await client.wait_for("paused")
        await client.send("credit", tokens=50)
        num_tokens = await client.wait_at_rest()
        assert num_tokens <= 5 + IN_FLIGHT
        await client.send("resume")
        await client.send("credit", tokens=50)
        await client.wait_for("done")
    assert client.text() == text_of(100)


async def test_a_generation_at_rest_can_be_cancelled(gateway: RunningGateway) -> None:
    async with connected(gateway) as client:
        await client.generate(credit=3)
        await client.wait_at_rest()
        await client.send("cancel")
        await client.wait_for("done")
        assert [e["finish_reason"] for e in client.events if e["type"] == "finished"] == ["abort"]


async def test_credit_outlasts_an_engine(gateway: RunningGateway) -> None:
    with serving(executor(step_s=0.01)) as engine:
        async with running_gateway(engine.endpoint) as other, connected(other) as client:
            await client.generate(credit=8)
            num_tokens = await client.wait_at_rest()
            engine.stop()
            with serving(executor(step_s=0.01), endpoint=engine.endpoint):
                await other.wait_ready()
                assert await client.wait_at_rest() <= num_tokens + IN_FLIGHT
                await client.send("credit", tokens=1000)
                await client.wait_for("done")
        assert client.text() == text_of(100)


async def test_who_attaches_pays_only_for_what_is_new(gateway: RunningGateway) -> None:
    async with connected(gateway) as first:
        await first.generate(credit=20, attach_grace_s=20)
        num_tokens = await first.wait_at_rest()
        started = first.events[0]
    async with connected(gateway) as second:
        await second.send("attach", "b", stream_id=started["stream_id"], from_token=num_tokens, credit=15)
        at_rest = await second.wait_at_rest("b")
        made = gateway.app[keys.ENGINE].num_tokens
        assert num_tokens + 15 <= at_rest
        await second.send("credit", "b", tokens=1000)
        await second.wait_for("done", "b")
        assert first.text() + second.text("b") == text_of(100)
        assert made < 100 + IN_FLIGHT


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"type": "credit", "id": "a", "tokens": 0}, "tokens"),
        ({"type": "credit", "id": "a", "tokens": -1}, "tokens"),
        ({"type": "credit", "id": "a", "tokens": 1.5}, "tokens"),
        ({"type": "credit", "id": "a", "tokens": True}, "tokens"),
        ({"type": "credit", "id": "a", "tokens": 2**31}, "tokens"),
        ({"type": "credit", "id": "rich", "tokens": 2**31 - 1}, "tokens"),
        ({"type": "credit", "id": "a"}, "tokens"),
        ({"type": "credit", "id": "a", "tokens": 1, "bytes": 1}, "bytes"),
        ({"type": "credit", "id": "free", "tokens": 1}, "tokens"),
        ({"type": "credit", "id": "nobody", "tokens": 1}, None),
        ({"type": "generate", "id": "x", "prompt": [40], "credit": -1}, "credit"),
        ({"type": "generate", "id": "x", "prompt": [40], "credit": "5"}, "credit"),
        ({"type": "attach", "id": "x", "stream_id": "0" * 32, "credit": 2**31}, "credit"),
    ],
)
async def test_a_bad_grant_is_answered_and_changes_nothing(
    gateway: RunningGateway, message: dict[str, Any], param: str | None
) -> None:
    async with connected(gateway) as client:
        await client.generate(credit=4, max_tokens=8)
        await client.generate("rich", credit=2**20, max_tokens=2000)  # more than it can use up
        await client.generate("free", max_tokens=2000)
        await client.wait_for("delta", "free")
        await client.send(message.pop("type"), message.pop("id"), **message)

        async def is_refused() -> bool:
            return any(event["type"] == "error" for event in client.events)

        await eventually_async(is_refused)
        (error,) = [event["error"] for event in client.events if event["type"] == "error"]
        assert error["param"] == param
        await client.send("credit", tokens=8)
        await client.wait_for("done")
    assert client.text() == text_of(8)


def test_a_credit_never_grows_beyond_its_bound() -> None:
    credit = Credit(1)
    credit.grant(MAX_TOKENS - 1)
    with pytest.raises(InvalidField, match=str(MAX_TOKENS)):
        credit.grant(1)
    assert credit.num_tokens == MAX_TOKENS
