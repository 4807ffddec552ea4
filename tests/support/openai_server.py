"""A small OpenAI-compatible server on a real port, for the tests of our clients: it answers with what it is told."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiohttp import web


def event(fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def completion_events(texts: Sequence[str], prompt_tokens: int = 5, with_usage: bool = True) -> list[bytes]:
    """The events of a whole answer, one text each."""
    parts = [event({"choices": [{"index": 0, "text": text, "finish_reason": None}]}) for text in texts]
    parts.append(event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}))
    if with_usage:
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(texts)}
        parts.append(event({"choices": [], "usage": usage}))
    return [*parts, b"data: [DONE]\n\n"]


def chat_events(texts: Sequence[str]) -> list[bytes]:
    parts = [event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})]
    parts += [event({"choices": [{"index": 0, "delta": {"content": text}}]}) for text in texts]
    parts.append(event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
    parts.append(event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": len(texts)}}))
    return [*parts, b"data: [DONE]\n\n"]


class OpenAIServer:
    """Keeps what it was asked, and how many of its answers were cut off by the client."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        self.keys: list[str] = []
        self.script: list[bytes] | None = None
        """Bytes of every answer, one write each; None: as many one-word events as max_tokens asks for."""
        self.status = 200
        self.failure: tuple[dict[str, object], dict[str, str]] = ({}, {})
        """Body and headers of an answer whose status is not 200."""
        self.gap_s = 0.0
        self.num_live = 0
        self.max_live = 0
        self.num_cut_off = 0
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        if self.status != 200:
            return web.json_response(self.failure[0], status=self.status, headers=self.failure[1])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self.num_live += 1
        self.max_live = max(self.max_live, self.num_live)
        try:
            await response.prepare(request)
            for part in self.script or completion_events(["word "] * int(body["max_tokens"])):
                await response.write(part)
                await asyncio.sleep(self.gap_s)
        except (ConnectionError, asyncio.CancelledError):
            self.num_cut_off += 1
            raise
        finally:
            self.num_live -= 1
        return response

    async def models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "small", "object": "model"}]})


@asynccontextmanager
async def serving() -> AsyncIterator[OpenAIServer]:
    """A server on a free port of this machine, for as long as the block lasts."""
    server = OpenAIServer()
    app = web.Application()
    app.router.add_post("/v1/completions", server.answer)
    app.router.add_post("/v1/chat/completions", server.answer)
    app.router.add_get("/v1/models", server.models)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
