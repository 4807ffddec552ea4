"""A few in each turn of the loop, in their order; whoever goes away holds up nobody."""

import asyncio
from hashlib import sha256

import pytest

from gateway import keys
from gateway.auth import ApiKeys, Caller
from gateway.routes import answering
from gateway.turnstile import Turnstile
from tests.support.running_gateway import VOCAB_SIZE, RunningGateway, eventually, running_gateway
from tests.support.scripted_engine import serving
from tests.support.scripted_executor import ScriptedExecutor


async def test_each_turn_lets_a_few_through_in_their_order() -> None:
    turnstile = Turnstile(per_turn=3)
    turns: list[list[int]] = [[]]

    async def pass_through(number: int) -> None:
        await turnstile.enter()
        turns[-1].append(number)

    passing = [asyncio.create_task(pass_through(number)) for number in range(20)]
    passing[7].cancel()
    while not all(task.done() for task in passing):
        await asyncio.sleep(0)
        turns.append([])
    assert max(len(turn) for turn in turns) <= 3
    assert [number for turn in turns for number in turn] == [number for number in range(20) if number != 7]


async def test_those_who_leave_while_they_wait_take_no_place() -> None:
    turnstile = Turnstile(per_turn=1)
    waiting = [asyncio.create_task(turnstile.enter()) for _ in range(50)]
    await asyncio.sleep(0)
    for task in waiting[1:]:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await asyncio.wait_for(turnstile.enter(), 30)
    for _ in range(3):  # turns later nobody is counted any more
        await asyncio.sleep(0)
    entering = turnstile.enter()
    try:
        entering.send(None)
    except StopIteration:
        return
    raise AssertionError("nobody was there, and one had to wait")


class Shut(Turnstile):
    """Lets nobody through until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = asyncio.Event()
        self.num_before_it = 0

    async def enter(self) -> None:
        self.num_before_it += 1
        await self.opened.wait()


async def asked(gateway: RunningGateway, key: str, method: str = "POST") -> int:
    body = {"prompt": [5, 6, 7], "max_tokens": 2}
    headers = {"Authorization": f"Bearer {key}"}
    path = "/v1/completions" if method == "POST" else "/v1/models"
    async with gateway.session.request(method, gateway.url + path, json=body, headers=headers) as response:
        await response.read()
        return response.status


async def test_who_has_no_key_takes_no_place_of_those_who_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    read_body = answering.read_body

    async def noting(request: object) -> bytes:
        read.append(request)
        return await read_body(request)  # type: ignore[arg-type]

    monkeypatch.setattr(answering, "read_body", noting)
    api_keys = ApiKeys({sha256(b"right").digest(): Caller("alice")})
    with serving(ScriptedExecutor(vocab_size=VOCAB_SIZE)) as engine:
        async with running_gateway(engine.endpoint, api_keys=api_keys) as gateway:
            admission = gateway.app[keys.ADMISSION]
            refusals, turnstile = Shut(), Shut()
            monkeypatch.setattr(admission, "refusals", refusals)
            flood = [asyncio.create_task(asked(gateway, "wrong", method)) for method in ("POST", "GET") * 20]
            await eventually(lambda: refusals.num_before_it == 40)
            assert await asked(gateway, "right") == 200 and len(read) == 1
            monkeypatch.setattr(admission, "turnstile", turnstile)
            late = asyncio.create_task(asked(gateway, "right"))
            await eventually(lambda: turnstile.num_before_it == 1)
            refusals.opened.set()
            assert set(await asyncio.gather(*flood)) == {401}
            assert turnstile.num_before_it == 1 and len(read) == 1, "no body is read before"
            turnstile.opened.set()
            assert await late == 200 and len(read) == 2
