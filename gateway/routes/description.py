"""What the server says of itself: GET /openapi.json; and POST /v1/embeddings, which it refuses."""

from typing import Final

from aiohttp import web

from gateway.answers import json_bytes
from gateway.openapi.document import document
from streamkv.errors import InvalidField

OPENAPI_PATH: Final = "/openapi.json"
_DOCUMENT: Final = json_bytes(document())


async def openapi(request: web.Request) -> web.Response:
    return web.Response(body=_DOCUMENT, content_type="application/json")


async def embeddings(request: web.Request) -> web.Response:
    """Raises InvalidField."""
    raise InvalidField(
        "model", "makes no embeddings: this server generates text, at /v1/chat/completions and /v1/completions"
    )
