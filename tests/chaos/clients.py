"""Clients that read, are cut off and come back at either gateway, read slowly, or go.

What they get is compared with the oracle.
"""

import asyncio
import contextlib
import json
import random
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import aiohttp

from tests.chaos.report import Report
from tests.chaos.servers import Gateway, Servers
from tests.support.oracle import SampledCase, read_sampled_cases
from tests.support.served import CASES, SHORT, chat

GRACE_S = 120
STALL_LIMIT_S = 150.0
"""Nothing at all for so long, not even a comment, is a stream that hangs."""
LONGEST_AWAY_S = 3.0
LONGEST_STALL_S = 20.0
MAX_CUTS = 3
ATTACH_LIMIT_S = 240.0
"""In which a stream must be to be had again; an engine may have to start first."""
BEAMS = [
    case
    for case in json.loads((Path(__file__).parents[1] / "data" / "smol135m-beams.json").read_text())["cases"]
    if case["eos_token_ids"] == [2]
]
SAMPLED = read_sampled_cases()
BY_NAME = {case["name"]: case for case in SHORT}
SAMPLED_SHARE = 0.4


class Broken(Exception):
    """The answer is not what was promised."""


class GatewayLost(Exception):
    """The connection broke because its gateway was killed."""


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
    sampled: SampledCase | None = None
    """None: greedy."""

    @classmethod
    def draw(cls, rng: random.Random) -> "Plan":
        kind = rng.choices(["sse", "socket", "whole", "beams"], [8, 8, 2, 1])[0]
        stays = kind == "beams" or rng.random() < 0.85
        is_streamed = kind in ("sse", "socket")
        num_cuts = rng.choice([0, 0, 1, 2, MAX_CUTS]) if is_streamed and stays else 0
        is_slow = is_streamed and rng.random() < 0.06
        if kind == "beams":
            case = rng.choice(BEAMS)
            return cls(kind, case, case["n"], case["max_tokens"], None, None, [])
        sampled = rng.choice(SAMPLED) if rng.random() < SAMPLED_SHARE else None
        return cls(
            kind=kind,
            sampled=sampled,
            case=rng.choice(SHORT) if sampled is None else BY_NAME[sampled.name],
            n=2 if is_slow else rng.choices([1, 2], [4, 1])[0],
            max_tokens=48 if is_slow else rng.choice([12, 24, 48]),
            stalls_at=rng.randrange(1, 4) if is_slow else None,
            leaves_after=None if stays else rng.randrange(1, 40),
            cuts=sorted(rng.sample(range(1, 46), num_cuts)),
        )

    @property
    def name(self) -> str:
        told: str = self.case["prompt" if self.kind == "beams" else "name"]
        return told

    @property
    def seed(self) -> int | None:
        return None if self.sampled is None else self.sampled.seed

    def expected(self, choice: int) -> list[int]:
        tokens: list[int] = self.case["token_ids"][choice] if self.kind == "beams" else self.case["token_ids"]
        if self.sampled is not None:
            tokens = self.sampled.token_ids[choice]
        return tokens[: self.max_tokens]

    def text(self, choice: int) -> str:
        """Of all the tokens that the oracle has."""
        text: str = self.case["text_all"] if self.sampled is None else self.sampled.texts[choice]
        return text

    def _beams_body(self) -> dict[str, Any]:
        (prompt,) = [case["prompt_token_ids"] for case in CASES if case["name"] == self.case["prompt"]]
        fields = {name: self.case[name] for name in ("beam_width", "n", "length_penalty", "max_tokens", "min_tokens")}
        return {"prompt": prompt, "use_beam_search": True, "temperature": 0, "return_token_ids": True, **fields}

    def body(self) -> dict[str, Any]:
        if self.kind == "beams":
            return self._beams_body()
        more: dict[str, Any] = {"n": self.n}
        if self.kind != "whole":  # what is not streamed has nothing to attach to
            more["attach_grace_s"] = GRACE_S
        if self.stalls_at is not None:  # enough of it to fill every buffer on the way
            more |= {"logprobs": True, "top_logprobs": 20, "prompt_logprobs": 20}
        more |= {"ignore_eos": True, "skip_special_tokens": False, "return_token_ids": True}
        if self.sampled is not None:
            more |= {"seed": self.sampled.seed, **self.sampled.settings}
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
    stream_id: str = ""
    """Once its gateway has told it: from then on it can be taken up again."""
    last_id: str = ""
    """SSE: of the newest event."""
    marks: list[str] = field(default_factory=list)
    """WebSocket: how much of each choice is there."""

    def __post_init__(self) -> None:
        self.marks = ["-"] * self.n
        self.token_ids = [[] for _ in range(self.n)]
        self.texts = [""] * self.n
        self.ends = [[] for _ in range(self.n)]

    def add(self, index: int, text: str, token_ids: list[int]) -> None:
        self.texts[index] += text
        self.token_ids[index] += token_ids


class Client:
    """One stream after another, until the time is over."""

    def __init__(self, servers: Servers, session: aiohttp.ClientSession, name: str, report: Report) -> None:
        self._servers = servers
        self._session = session
        self._rng = random.Random(f"{report.seed} {name}")
        self._name = name
        self._report = report

    async def run(self, is_over: asyncio.Event) -> None:
        num_streams = 0
        while not is_over.is_set():
            plan = Plan.draw(self._rng)
            what = f"{self._name} stream {num_streams} ({plan.kind} of {plan.name}, seed {plan.seed}, n {plan.n})"
            num_streams += 1
            try:
                outcome = await self._stream(plan, what)
            except GatewayLost:
                outcome = "without a name when their gateway was killed"
            except (Broken, TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
                self._report.violate(f"{what}: {type(error).__name__}: {error}")
                outcome = "broken"
            self._servers.moved(self, None)
            self._report.ended[outcome] += 1
            if outcome == "refused":
                await asyncio.sleep(2)

    async def _stream(self, plan: Plan, what: str) -> str:
        told = Told(plan.n)
        if plan.kind == "sse":
            outcome = await self._streamed(plan, told, self._over_sse)
        elif plan.kind == "socket":
            outcome = await self._streamed(plan, told, self._over_socket)
        else:
            outcome = await self._whole(plan, told)
        if outcome == "finished":
            for choice in range(plan.n):
                self._report.compare(told.token_ids[choice], plan.expected(choice), what, plan.sampled is not None)
                if plan.kind != "beams":
                    self._check_end(plan, told, choice)
        return outcome

    def _check_end(self, plan: Plan, told: Told, choice: int) -> None:
        text = plan.text(choice)
        is_whole = plan.max_tokens == len(plan.case["token_ids"])
        if told.texts[choice] != text if is_whole else not text.startswith(told.texts[choice].rstrip("\ufffd")):
            raise Broken(f"the text is {told.texts[choice]!r}")
        if told.ends[choice] != ["length"]:
            raise Broken(f"choice {choice} ended by {told.ends[choice]}")

    async def _streamed(
        self, plan: Plan, told: Told, read: "Callable[[Gateway, Plan, Told], Coroutine[Any, Any, str]]"
    ) -> str:
        """Read to the end, over as many connections as it takes. `read` returns `cut` when one was broken off on
        purpose, and `not ready` when the stream can't be taken up just now."""
        gateway, until_s = self._choose(), inf
        while True:
            is_lost = False
            try:
                with self._at(gateway):
                    outcome = await read(gateway, plan, told)
            except GatewayLost:
                if not told.stream_id:
                    raise
                outcome, is_lost = "cut", True
                self._report.faults["cut off by their gateway's death, then attached again at the other"] += 1
            if outcome not in ("cut", "not ready"):
                return outcome
            if outcome == "cut":
                until_s = time.monotonic() + ATTACH_LIMIT_S
            elif time.monotonic() > until_s:
                raise Broken(f"it could not be had again for {ATTACH_LIMIT_S:.0f} s")
            await asyncio.sleep(self._rng.uniform(0, LONGEST_AWAY_S))
            gateway = self._choose(lost=gateway if is_lost else None)

    def _choose(self, lost: Gateway | None = None) -> Gateway:
        """A gateway that is not known to be down; not this one that was lost, even if it is there again."""
        up = [gateway for gateway in self._servers.gateways if not gateway.is_down and gateway is not lost]
        return self._rng.choice(up or self._servers.gateways)

    @contextlib.contextmanager
    def _at(self, gateway: Gateway) -> Iterator[None]:
        """What is done over connections to this gateway. Raises GatewayLost for what breaks by its death."""
        num_kills, was_down = gateway.num_kills, gateway.is_down
        try:
            yield
        except (aiohttp.ClientError, OSError, Broken) as error:
            if was_down or gateway.num_kills > num_kills:
                raise GatewayLost from error
            raise

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

    async def _over_sse(self, gateway: Gateway, plan: Plan, told: Told) -> str:
        headers = {"Last-Event-ID": told.last_id} if told.last_id else {}
        if told.stream_id and (not told.last_id or self._rng.random() < 0.5):
            asking = self._session.get(f"{gateway.url}/v1/streams/{told.stream_id}", headers=headers)
        else:
            body = {**plan.body(), "stream": True}
            asking = self._session.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers)
        async with asking as response:
            if response.status == 503:
                return "not ready" if told.stream_id else "refused"
            if response.status != 200:
                raise Broken(f"status {response.status}: {(await response.text())[:300]}")
            told.stream_id = told.stream_id or response.headers["X-Stream-Id"]
            self._servers.moved(self, gateway)
            connection = response.connection
            transport = connection.transport if connection is not None else None
            async for event_id, data in _events(response):
                told.last_id = event_id or told.last_id
                told.num_events += 1
                self._take_sse(data, told)
                if told.is_done:
                    return "finished"
                if self._leaves(plan, told):
                    self._break(transport, "abandoned")
                    return "abandoned"
                if self._is_cut(plan, told):
                    self._break(transport, "reset, then attached again")
                    return "cut"
                await self._stall(plan, told)
            raise Broken("it ended without [DONE]")

    def _take_sse(self, data: str, told: Told) -> None:
        if data == "[DONE]":
            told.is_done = True
            return
        event = json.loads(data)
        if "error" in event:
            raise Broken(f"error: {event['error']}")
        for choice in event["choices"]:
            self._add(told, choice["index"], choice["delta"].get("content") or "", choice.get("token_ids") or [])
            if choice["finish_reason"]:
                told.ends[choice["index"]].append(choice["finish_reason"])

    # WebSocket

    async def _over_socket(self, gateway: Gateway, plan: Plan, told: Told) -> str:
        connecting = self._session.ws_connect(f"{gateway.url}/v1/stream", max_msg_size=0)
        async with connecting as connection:
            is_new = not told.stream_id
            if is_new:
                asked = {"type": "generate", "id": "a", **plan.body()}
            else:
                asked = {"type": "attach", "id": "a", "stream_id": told.stream_id, "cursor": ",".join(told.marks)}
            await connection.send_str(json.dumps(asked))
            while True:
                message = await connection.receive(timeout=STALL_LIMIT_S)
                if message.type is not aiohttp.WSMsgType.TEXT:
                    raise Broken(f"the socket ended: {message.type.name} {message.data}")
                event = json.loads(message.data)
                if event["type"] == "error":
                    if event["error"]["code"] in ("not_ready", "overloaded"):
                        return "refused" if is_new else "not ready"
                    raise Broken(f"error: {event['error']}")
                if event["type"] == "started":
                    told.stream_id = event["stream_id"]
                    self._servers.moved(self, gateway)
                    continue
                if event["type"] == "done":
                    return "finished"
                told.num_events += 1
                index = event["index"]
                if event["type"] == "delta":
                    self._add(told, index, event["text"], event.get("token_ids") or [])
                    told.marks[index] = event.get("cursor") or str(event["num_tokens"])
                else:
                    told.ends[index].append(event["finish_reason"])
                    told.marks[index] = event.get("cursor") or f"{event['num_tokens']}e"
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
                    return "cut"
                await self._stall(plan, told)

    # Not streamed

    async def _whole(self, plan: Plan, told: Told) -> str:
        gateway = self._choose()
        with self._at(gateway):
            asking = asyncio.create_task(self._ask(gateway, plan))
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
            text = choice["text"] if plan.kind == "beams" else choice["message"]["content"]
            self._add(told, choice["index"], text, choice["token_ids"])
            told.ends[choice["index"]].append(choice["finish_reason"])
        return "finished"

    async def _ask(self, gateway: Gateway, plan: Plan) -> tuple[int, dict[str, Any]]:
        path = "/v1/completions" if plan.kind == "beams" else "/v1/chat/completions"
        async with self._session.post(gateway.url + path, json=plan.body()) as response:
            return response.status, await response.json()

    def _add(self, told: Told, index: int, text: str, token_ids: list[int]) -> None:
        told.add(index, text, token_ids)
        self._report.num_received += len(token_ids)


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
