"""The application: the gate, the routes of the API, and the files of the page."""

from __future__ import annotations

import gzip
import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from shoal.web.access import AccessControl
from shoal.web.acting import SessionRoutes
from shoal.web.gate import AllowedHosts, Gate, RequestRefused
from shoal.web.openapi import make_document
from shoal.web.routes import api_routes
from shoal.web.site import Site
from shoal.web.stream import Streams
from shoal.web.table import Api, json_response

STATIC = Path(__file__).with_name("static")
MEDIA_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
PAGE = "index.html"


class StaticFile(NamedTuple):
    content: bytes
    compressed: bytes
    media_type: str
    tag: str


@cache
def static_files() -> dict[str, StaticFile]:
    """The page's files, read once. Nothing else can be asked for."""
    found = {}
    for path in sorted(STATIC.rglob("*")):
        if path.suffix in MEDIA_TYPES:
            content = path.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            name = path.relative_to(STATIC).as_posix()
            found[name] = StaticFile(content, gzip.compress(content, 9, mtime=0), MEDIA_TYPES[path.suffix], tag)
    return found


def make_app(
    site: Site, access: AccessControl, allowed: AllowedHosts, *, cookie: str, streams: Streams | None = None
) -> ASGIApp:
    sessions = SessionRoutes(access, cookie=cookie, secure=allowed.scheme == "https")
    streams = streams or Streams()
    table = api_routes(sessions, streams)
    api = sessions.api = streams.api = Api(table, site=site, access=access, cookie=cookie)
    document = cache(lambda: make_document(table))

    async def openapi(request: Request) -> Response:
        api.identify(request)
        return json_response(request, document())

    async def not_found(request: Request) -> Response:
        if request.scope["path"].startswith("/api"):
            api.identify(request)
        raise RequestRefused(404, "there is nothing here")

    routes = [
        *api.starlette_routes(),
        Route("/api/v1/openapi.json", openapi, methods=["GET"]),
        Route("/static/{name:path}", _static, methods=["GET"]),
        Route("/", _page, methods=["GET"]),
        Route("/{rest:path}", not_found, methods=["GET", "POST", "DELETE"]),
    ]
    return Gate(Router(routes, redirect_slashes=False), allowed=allowed)


async def _page(request: Request) -> Response:
    return _serve(request, PAGE)


async def _static(request: Request) -> Response:
    return _serve(request, request.path_params["name"])


def _serve(request: Request, name: str) -> Response:
    file = static_files().get(name)
    if file is None:
        raise RequestRefused(404, "there is nothing here")
    headers = {"etag": file.tag, "cache-control": "no-cache", "vary": "accept-encoding"}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.compressed, headers={**headers, "content-encoding": "gzip"}, media_type=file.media_type)
    return Response(file.content, headers=headers, media_type=file.media_type)
