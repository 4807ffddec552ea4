"""POST /v1/completions: a text, or token ids, continued."""

from aiohttp import web

from gateway.routes.answering import answer
from gateway.schema.completion import parse_completion


async def completions(request: web.Request) -> web.StreamResponse:
    return await answer(request, parse_completion)
