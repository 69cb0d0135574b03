"""``GET /``: a page to chat with the model and to watch the server work.

The files beside this one, read once at start: no build step, and nothing is asked of any
other host. They are the same for everybody and hold nothing, so they need no key; what
the page shows it asks for with the key that its reader gave it. The policy lets only
these files run, so that nothing in an answer can. Runs on the event loop.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import NamedTuple

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)


class _File(NamedTuple):
    content: bytes
    headers: dict[str, str]


def add_routes(app: FastAPI) -> None:
    """Add the page and its files, for GET and HEAD."""
    found = dict(_read(files(__name__)))

    async def get_page(request: Request) -> Response:
        """The page."""
        return _answer(request, found["index.html"])

    async def get_file(request: Request, name: str) -> Response:
        """A file of the page."""
        if name not in found:
            raise HTTPException(404)
        return _answer(request, found[name])

    for path, endpoint in (("/", get_page), ("/page/{name:path}", get_file)):
        app.api_route(path, methods=["GET", "HEAD"], include_in_schema=False)(endpoint)


def _read(folder: Traversable, prefix: str = "") -> list[tuple[str, _File]]:
    found = []
    for entry in folder.iterdir():
        _, dot, ending = entry.name.rpartition(".")
        media_type = _MEDIA_TYPES.get(dot + ending)
        if entry.is_dir():
            found += _read(entry, f"{prefix}{entry.name}/")
        elif media_type is not None:
            found.append((prefix + entry.name, _file(entry.read_bytes(), media_type)))
    return found


def _file(content: bytes, media_type: str) -> _File:
    headers = {
        "Content-Type": media_type,
        "Content-Security-Policy": _POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        # Asked for again each time: another version may have started.
        "Cache-Control": "no-cache",
        "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
    }
    return _File(content, headers)


def _answer(request: Request, file: _File) -> Response:
    if request.headers.get("if-none-match") == file.headers["ETag"]:
        return Response(status_code=304, headers=file.headers)
    return Response(file.content, headers=file.headers)
