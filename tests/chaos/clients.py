"""Clients that read, are cut off and come back, read slowly, or go: what they get is compared with the oracle."""

import asyncio
import contextlib
import json
import random
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.chaos.report import Report
from tests.support.served import SHORT, chat

GRACE_S = 120
STALL_LIMIT_S = 150.0
"""Nothing at all for so long, not even a comment, is a stream that hangs."""
LONGEST_AWAY_S = 3.0
LONGEST_STALL_S = 20.0
MAX_CUTS = 3


class Broken(Exception):
    """The answer is not what was promised."""


@dataclass
class Plan:
    """What one client does. Made of its random numbers alone."""

    kind: str
    case: dict[str, Any]
    n: int
    max_tokens: int
    stalls_at: int | None
    """The event behind which it reads nothing for a while; None: it reads whatever comes."""
    leaves_after: int | None
    """Events; None: it stays to the end."""
    cuts: list[int]
    """Events after which its connection breaks."""

    @classmethod
    def draw(cls, rng: random.Random) -> "Plan":
        kind = rng.choices(["sse", "socket", "whole"], [4, 4, 1])[0]
        stays = rng.random() < 0.85
        num_cuts = rng.choice([0, 0, 1, 2, MAX_CUTS]) if kind != "whole" and stays else 0
        is_slow = kind != "whole" and rng.random() < 0.06
        return cls(
            kind=kind,
            case=rng.choice(SHORT),
            n=2 if is_slow else rng.choices([1, 2], [4, 1])[0],
            max_tokens=48 if is_slow else rng.choice([12, 24, 48]),
            stalls_at=rng.randrange(1, 4) if is_slow else None,
            leaves_after=None if stays else rng.randrange(1, 40),
            cuts=sorted(rng.sample(range(1, 46), num_cuts)),
        )

    def body(self) -> dict[str, Any]:
        more: dict[str, Any] = {"n": self.n}
        if self.kind != "whole":
            more["attach_grace_s"] = GRACE_S
        if self.stalls_at is not None:  # enough of it to fill every buffer on the way
            more |= {"logprobs": True, "top_logprobs": 20, "prompt_logprobs": 20}
        more |= {"ignore_eos": True, "skip_special_tokens": False, "return_token_ids": True}
        return chat(self.case, max_tokens=self.max_tokens, **more)


@dataclass
class Told:
    """What has come of one answer, over all its connections."""

    n: int
    token_ids: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    ends: list[list[str]] = field(default_factory=list)
    num_events: int = 0
    is_done: bool = False

    def __post_init__(self) -> None:
        self.token_ids = [[] for _ in range(self.n)]
        self.texts = [""] * self.n
        self.ends = [[] for _ in range(self.n)]

    def add(self, index: int, text: str, token_ids: list[int]) -> None:
        self.texts[index] += text
        self.token_ids[index] += token_ids


class Client:
    """One stream after another, until the time is over."""

    def __init__(self, url: str, session: aiohttp.ClientSession, name: str, report: Report) -> None:
        self._url = url
        self._session = session
        self._rng = random.Random(f"{report.seed} {name}")
        self._name = name
        self._report = report

    async def run(self, is_over: asyncio.Event) -> None:
        num_streams = 0
        while not is_over.is_set():
            plan = Plan.draw(self._rng)
            what = f"{self._name} stream {num_streams} ({plan.kind} of {plan.case['name']}, n {plan.n})"
            num_streams += 1
            try:
                outcome = await self._stream(plan, what)
            except (Broken, TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
                self._report.violate(f"{what}: {type(error).__name__}: {error}")
                outcome = "broken"
            self._report.ended[outcome] += 1
            if outcome == "refused":
                await asyncio.sleep(2)

    async def _stream(self, plan: Plan, what: str) -> str:
        told = Told(plan.n)
        run = {"sse": self._over_sse, "socket": self._over_socket, "whole": self._whole}[plan.kind]
        outcome = await run(plan, told)
        if outcome == "finished":
            for choice in range(plan.n):
                self._report.compare(told.token_ids[choice], plan.case["token_ids"][: plan.max_tokens], what)
                text: str = plan.case["text_all"]
                is_whole = plan.max_tokens == len(plan.case["token_ids"])
                if told.texts[choice] != text if is_whole else not text.startswith(told.texts[choice].rstrip("\ufffd")):
                    raise Broken(f"the text is {told.texts[choice]!r}")
                if told.ends[choice] != ["length"]:
                    raise Broken(f"choice {choice} ended by {told.ends[choice]}")
        return outcome

    async def _stall(self, plan: Plan, told: Told) -> None:
        if plan.stalls_at is not None and told.num_events >= plan.stalls_at:
            plan.stalls_at = None
            self._report.faults["reader stalled"] += 1
            await asyncio.sleep(self._rng.uniform(5, LONGEST_STALL_S))

    def _is_cut(self, plan: Plan, told: Told) -> bool:
        if plan.cuts and told.num_events >= plan.cuts[0]:
            plan.cuts.pop(0)
            return True
        return False

    def _leaves(self, plan: Plan, told: Told) -> bool:
        return plan.leaves_after is not None and told.num_events >= plan.leaves_after

    def _break(self, transport: asyncio.BaseTransport | None, kind: str) -> None:
        """FIN or RST, without a word before."""
        if not isinstance(transport, asyncio.Transport):
            return
        raw = transport.get_extra_info("socket")
        is_reset = self._rng.random() < 0.5
        if is_reset and raw is not None:
            with contextlib.suppress(OSError):  # the server has closed it just before
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._report.faults[f"{kind} by {'RST' if is_reset else 'FIN'}"] += 1
        transport.abort()

    # SSE

    async def _over_sse(self, plan: Plan, told: Told) -> str:
        last_id = ""
        body = {**plan.body(), "stream": True}
        while True:
            headers = {"Last-Event-ID": last_id} if last_id else {}
            if last_id and self._rng.random() < 0.5:
                asking = self._session.get(f"{self._url}/v1/streams/{last_id.partition('.')[0]}", headers=headers)
            else:
                asking = self._session.post(f"{self._url}/v1/chat/completions", json=body, headers=headers)
            async with asking as response:
                if response.status == 503 and not last_id:
                    return "refused"
                if response.status != 200:
                    raise Broken(f"status {response.status}: {(await response.text())[:300]}")
                connection = response.connection
                transport = connection.transport if connection is not None else None
                is_cut = False
                async for event_id, data in _events(response):
                    last_id = event_id or last_id
                    told.num_events += 1
                    self._take_sse(data, told)
                    if told.is_done:
                        return "finished"
                    if self._leaves(plan, told):
                        self._break(transport, "abandoned")
                        return "abandoned"
                    if self._is_cut(plan, told):
                        self._break(transport, "reset, then attached again")
                        is_cut = True
                        break
                    await self._stall(plan, told)
                if not is_cut:
                    raise Broken("it ended without [DONE]")
            await asyncio.sleep(self._rng.uniform(0, LONGEST_AWAY_S))

    def _take_sse(self, data: str, told: Told) -> None:
        if data == "[DONE]":
            told.is_done = True
            return
        event = json.loads(data)
        if "error" in event:
            raise Broken(f"error: {event['error']}")
        for choice in event["choices"]:
            told.add(choice["index"], choice["delta"].get("content") or "", choice.get("token_ids") or [])
            if choice["finish_reason"]:
                told.ends[choice["index"]].append(choice["finish_reason"])

    # WebSocket

    async def _over_socket(self, plan: Plan, told: Told) -> str:
        stream_id = ""
        marks = ["-"] * plan.n
        while True:
            connecting = self._session.ws_connect(f"{self._url}/v1/stream", max_msg_size=0)
            async with connecting as connection:
                if stream_id:
                    asked = {"type": "attach", "id": "a", "stream_id": stream_id, "cursor": ",".join(marks)}
                else:
                    asked = {"type": "generate", "id": "a", **plan.body()}
                await connection.send_str(json.dumps(asked))
                while True:
                    message = await connection.receive(timeout=STALL_LIMIT_S)
                    if message.type is not aiohttp.WSMsgType.TEXT:
                        raise Broken(f"the socket ended: {message.type.name} {message.data}")
                    event = json.loads(message.data)
                    if event["type"] == "error":
                        if event["error"]["code"] in ("not_ready", "overloaded") and not stream_id:
                            return "refused"
                        raise Broken(f"error: {event['error']}")
                    if event["type"] == "started":
                        stream_id = event["stream_id"]
                        continue
                    if event["type"] == "done":
                        return "finished"
                    told.num_events += 1
                    index = event["index"]
                    if event["type"] == "delta":
                        told.add(index, event["text"], event.get("token_ids") or [])
                        marks[index] = event.get("cursor") or str(event["num_tokens"])
                    else:
                        told.ends[index].append(event["finish_reason"])
                        marks[index] = event.get("cursor") or f"{event['num_tokens']}e"
                    underlying = connection._conn  # aiohttp has no public way to break a socket
                    transport = underlying.transport if underlying is not None else None
                    if self._leaves(plan, told):
                        if self._rng.random() < 0.5:
                            await connection.send_str('{"type":"cancel","id":"a"}')
                            self._report.faults["cancelled"] += 1
                            return "cancelled"
                        self._break(transport, "abandoned")
                        return "abandoned"
                    if self._is_cut(plan, told):
                        self._break(transport, "reset, then attached again")
                        break
                    await self._stall(plan, told)
            await asyncio.sleep(self._rng.uniform(0, LONGEST_AWAY_S))

    # Not streamed

    async def _whole(self, plan: Plan, told: Told) -> str:
        asking = asyncio.create_task(self._ask(plan))
        if plan.leaves_after is not None:
            await asyncio.wait([asking], timeout=plan.leaves_after / 10)
            if not asking.done():
                self._report.faults["abandoned by FIN"] += 1
                asking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asking
                return "abandoned"
        status, answer = await asking
        if status == 503:
            return "refused"
        if status != 200:
            raise Broken(f"status {status}: {answer}")
        for choice in answer["choices"]:
            told.add(choice["index"], choice["message"]["content"], choice["token_ids"])
            told.ends[choice["index"]].append(choice["finish_reason"])
        return "finished"

    async def _ask(self, plan: Plan) -> tuple[int, dict[str, Any]]:
        async with self._session.post(f"{self._url}/v1/chat/completions", json=plan.body()) as response:
            return response.status, await response.json()


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, str]]:
    """Id and data of each whole event. Raises TimeoutError when nothing comes, not even a comment."""
    event_id, data, unread = "", "", b""
    while piece := await asyncio.wait_for(response.content.readany(), STALL_LIMIT_S):
        *lines, unread = (unread + piece).split(b"\n")
        for line in map(bytes.decode, lines):
            if line.startswith("id: "):
                event_id = line[4:]
            elif line.startswith("data: "):
                data = line[6:]
            elif not line and data:
                yield event_id, data
                event_id, data = "", ""
