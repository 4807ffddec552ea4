"""POST /v1/chat/completions."""

from aiohttp import web

from gateway.routes.answering import answer
from gateway.schema.chat import parse_chat


async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await answer(request, parse_chat)
