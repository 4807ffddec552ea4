"""The pages: the chat at /, the dashboard, the files that both load, and what the dashboard shows.

The files are the package's own and are open to all; they hold nothing of anybody's. What they show is asked for with
the viewer's API key.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aiohttp import web

from gateway import keys

CHAT_PATH: Final = "/"
DASHBOARD_PATH: Final = "/dashboard"
FILE_PATH: Final = "/page/{name}"
DATA_PATH: Final = "/dashboard/data"
OPEN_PATHS: Final = frozenset({CHAT_PATH, DASHBOARD_PATH, FILE_PATH})

_FOLDER: Final = Path(__file__).resolve().parents[1] / "page"
_CONTENT_TYPES: Final[Mapping[str, str]] = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_SECURITY: Final[Mapping[str, str]] = {
    "Content-Security-Policy": "; ".join(
        [
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""no-cache: kept, and asked for again with its ETag, so that a newer server shows at once."""


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    content_type: str
    etag: str


class PageFiles:
    """The files of both pages, read once."""

    def __init__(self, folder: Path = _FOLDER) -> None:
        self._files = {path.name: _read(path) for path in folder.iterdir() if path.suffix in _CONTENT_TYPES}

    def respond(self, request: web.Request, name: str) -> web.Response:
        """A file, or 304 to whoever has it. Raises HTTPNotFound."""
        file = self._files.get(name)
        if file is None:
            raise web.HTTPNotFound
        headers = {**_SECURITY, "ETag": f'"{file.etag}"'}
        if any(tag.value in (file.etag, "*") for tag in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        return web.Response(body=file.body, content_type=file.content_type, charset="utf-8", headers=headers)


FILES: Final = web.AppKey("page_files", PageFiles)


def _read(path: Path) -> _File:
    body = path.read_bytes()
    return _File(body, _CONTENT_TYPES[path.suffix], hashlib.sha256(body).hexdigest()[:32])


async def chat(request: web.Request) -> web.Response:
    """The chat page."""
    return request.app[FILES].respond(request, "index.html")


async def dashboard(request: web.Request) -> web.Response:
    """The live view of the engine."""
    return request.app[FILES].respond(request, "dashboard.html")


async def file(request: web.Request) -> web.Response:
    """What the pages load."""
    return request.app[FILES].respond(request, request.match_info["name"])


async def data(request: web.Request) -> web.Response:
    """What the dashboard shows, at most a quarter of a second old."""
    found = await request.app[keys.DASHBOARD].data()
    headers = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
    is_packed = "gzip" in request.headers.get("Accept-Encoding", "")
    if is_packed:
        headers["Content-Encoding"] = "gzip"
    return web.Response(
        body=found.packed if is_packed else found.body, content_type="application/json", headers=headers
    )
