"""The table of the API: one row per route says its method, path, role, input and answer. The same rows route requests,
authorise them, check their input and describe them (`openapi`). A route without a role cannot be written down."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.errors import ErrorGroup, ShoalError, error, from_os_error, single_errors
from shoal.jobs.queue.access_tokens import AccessRole, Identity
from shoal.spec.base import Spec
from shoal.spec.run_paths import RunPaths
from shoal.web.access import AccessControl
from shoal.web.gate import BURST, FAILURE_BURST, FAILURES_PER_S, REQUESTS_PER_S, RequestRefused, TokenBucket
from shoal.web.site import Site

MIN_GZIP_BYTES = 1024
BODY_TIMEOUT_S = 30.0
MAX_AT_ONCE = 16
"""Questions of one identity that are answered at the same time. All of them share 40 threads."""
STATUS = {
    "SH601": 404, "SH602": 409, "SH604": 409, "SH605": 503, "SH606": 409, "SH609": 422, "SH610": 409, "SH612": 409,
    "SH613": 404, "SH614": 409, "SH615": 409, "SH626": 503, "SH632": 404, "SH642": 503, "SH644": 503, "SH646": 404,
    "SH648": 503, "SH671": 409, "SH672": 422, "SH673": 404, "SH674": 409, "SH676": 422, "SH678": 404,
    "SH510": 507,
}  # fmt: skip
Public = Literal["public"]
_PATH = re.compile(r"(?<![\w.:/~-])/(?:[^\s/'\"`,;:()]+/)+")


class NoInput(Spec):
    pass


@dataclass(frozen=True)
class Call:
    """One request: who asks, the run that the path names, and the checked input."""

    site: Site
    identity: Identity
    request: Request
    query: Any
    body: Any
    names: Mapping[str, str]
    _paths: RunPaths | None = None

    @property
    def paths(self) -> RunPaths:
        assert self._paths is not None
        return self._paths

    def find(self, name: str) -> RunPaths:
        """Another run that the input names. A run that the identity may not see does not exist for it."""
        return find_visible(self.site, self.identity, name)


@dataclass(frozen=True)
class ApiRoute:
    """`whole`: the route is about all runs, and tokens for some runs may not use it."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    role: AccessRole | Public
    summary: str
    handler: Callable[[Call], Any]
    answer: Any
    query: type[Spec] = NoInput
    body: type[Spec] | None = None
    whole: bool = False
    media_type: str = "application/json"
    statuses: Sequence[int] = field(default_factory=lambda: (200,))


class Api:
    """Makes Starlette's routes from the table."""

    def __init__(self, routes: Sequence[ApiRoute], *, site: Site, access: AccessControl, cookie: str) -> None:
        self.routes = routes
        self._site, self._access, self.cookie = site, access, cookie
        self._rate = TokenBucket(rate=REQUESTS_PER_S, burst=BURST)
        self._failures = TokenBucket(rate=FAILURES_PER_S, burst=FAILURE_BURST)
        self._busy: Counter[str] = Counter()

    def starlette_routes(self) -> list[Route]:
        return [Route(one.path, self._endpoint(one), methods=[one.method]) for one in self.routes]

    def _endpoint(self, route: ApiRoute) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            try:
                return await self._answer(route, request)
            except ShoalError as failure:
                return problem(failure)
            except ValidationError as failure:
                return invalid(failure)
            except OSError as failure:
                known = from_os_error(failure) or error("SH605", failure.strerror or "it cannot be read")
                return problem(known)
            except ClientDisconnect:
                return Response(status_code=400)

        return endpoint

    async def _answer(self, route: ApiRoute, request: Request) -> Response:
        identity = self.authorise(route, request)
        query = route.query.model_validate(_query_fields(request, route.query))
        body = await self._body(route, request)
        with self._turn_of(identity):
            return await run_in_threadpool(self._handle, route, identity, request, query, body)

    def _handle(self, route: ApiRoute, identity: Identity, request: Request, query: Spec, body: Any) -> Response:
        """In one turn of a thread: each takes as long as many an answer."""
        names, paths = request.path_params, None
        if "run" in names:
            paths = find_visible(self._site, identity, names["run"])
            if route.method != "GET" and "~trial-" in names["run"]:
                raise error("SH677", f"'{paths.name}' is a trial")
        found = route.handler(Call(self._site, identity, request, query, body, names, paths))
        return found if isinstance(found, Response) else json_response(request, found)

    @contextlib.contextmanager
    def _turn_of(self, identity: Identity) -> Iterator[None]:
        """Long questions of one identity leave threads for the others."""
        if self._busy[identity.name] >= MAX_AT_ONCE:
            raise RequestRefused(429, "too many questions at once; wait for their answers")
        self._busy[identity.name] += 1
        try:
            yield
        finally:
            self._busy[identity.name] -= 1

    def authorise(self, route: ApiRoute, request: Request) -> Identity:
        """RequestRefused unless the request may use the route."""
        if route.role == "public":
            return Identity("anybody", "read", frozenset())
        identity = self.identify(request)
        if not identity.may(route.role):
            raise RequestRefused(403, f"this needs the role {route.role}, and {identity.name} has {identity.role}")
        if route.whole and identity.runs is not None:
            raise RequestRefused(403, "this token is for some runs only")
        return identity

    def identify(self, request: Request) -> Identity:
        identity, header = self.known_identity(request), request.headers.get("authorization", "")
        is_change = request.method not in ("GET", "HEAD")
        if identity is not None and is_change and not header and "x-shoal" not in request.headers:
            raise RequestRefused(403, "a change by a cookie needs the header X-Shoal")
        if identity is None:
            if header or session_secret(request, self.cookie):
                self.count_failure(request)
            raise RequestRefused(401, "a token is needed: open the link that `shoal web` printed")
        self.count_request(identity)
        return identity

    def count_request(self, identity: Identity) -> None:
        """RequestRefused if there were too many."""
        if not self._rate.take(identity.name):
            raise RequestRefused(429, "too many requests; wait a second")

    def known_identity(self, request: Request) -> Identity | None:
        """Whose token or session the request has now; None if it has none, or it has expired or was revoked."""
        header = request.headers.get("authorization", "")
        if header:
            scheme, _, token = header.partition(" ")
            identity = self._access.of_token(token.strip()) if scheme.lower() == "bearer" else None
        else:
            identity = self._access.of_session(session_secret(request, self.cookie))
        return None if identity is None or identity.is_expired else identity

    def count_failure(self, request: Request) -> None:
        """A wrong code or token. RequestRefused if there were too many: the same for all of an address, so who has the
        right one is served all the same."""
        who = request.client.host if request.client else ""
        if not self._failures.take(who):
            raise RequestRefused(429, "too many wrong codes and tokens; wait some seconds")

    async def _body(self, route: ApiRoute, request: Request) -> Any:
        if route.method != "POST":
            return None
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if kind != "application/json":
            raise RequestRefused(415, "a change is sent as application/json")
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                sent = await request.body()
        except TimeoutError:
            raise RequestRefused(408, "the body does not come") from None
        try:
            content = json.loads(sent or b"{}")
        except (ValueError, RecursionError):
            raise RequestRefused(400, "the body is not JSON") from None
        return (route.body or NoInput).model_validate(content)


def session_secret(request: Request, cookie: str) -> str:
    found: SimpleCookie = SimpleCookie()
    for header in request.headers.getlist("cookie"):
        try:
            found.load(header)
        except CookieError:
            continue
    return found[cookie].value if cookie in found else ""


def find_visible(site: Site, identity: Identity, name: str) -> RunPaths:
    paths = site.find(name)
    if not identity.sees(site.owner(paths)):
        raise error("SH601", f"there is no run '{name[:200]}'")
    return paths


def _query_fields(request: Request, model: type[Spec]) -> dict[str, Any]:
    """Query parameters by name; one that is given twice must be a list."""
    found: dict[str, Any] = {}
    for name in request.query_params:
        values = request.query_params.getlist(name)
        if len(values) > 1:
            raise RequestRefused(422, f"'{name[:50]}' is given {len(values)} times")
        found[name] = values[0]
    return found


# ---- answers ----


def json_response(request: Request, value: Any, *, status: int = 200) -> Response:
    return content_response(request, encode_answer(value), status=status)


def encode_answer(value: Any) -> bytes:
    """JSON. NaN and infinity, which JSON lacks, are sent as text."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="python")
    elif isinstance(value, list):
        value = [one.model_dump(mode="python") if isinstance(one, BaseModel) else one for one in value]
    return encode_json(value)


def content_response(request: Request, content: bytes, *, status: int = 200) -> Response:
    """JSON that is encoded, compressed if the client takes that; nothing if the client has it."""
    headers = {}
    if request.method == "GET" and status == 200:
        headers["etag"] = f'"{hashlib.blake2b(content, digest_size=16).hexdigest()}"'
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
    if len(content) >= MIN_GZIP_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
        content = gzip.compress(content, 5, mtime=0)
        headers |= {"content-encoding": "gzip", "vary": "accept-encoding"}
    return Response(content, status_code=status, headers=headers, media_type="application/json")


def encode_json(value: Any) -> bytes:
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False, default=str)
    except ValueError:
        text = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False, default=str)
    return text.encode("utf-8", "replace")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def without_paths(text: str) -> str:
    """Of each absolute path only the last name."""
    return _PATH.sub("", text)


def problem(failure: ShoalError) -> Response:
    """An error as RFC 9457 describes it, with Shoal's code and fix. Paths of this machine stay here."""
    one = next(iter(single_errors(failure)), failure)
    status = 422 if isinstance(failure, ErrorGroup) else STATUS.get(one.code, 422 if one.code < "SH3" else 409)
    content = {
        "type": f"urn:shoal:error:{one.code}", "title": without_paths(one.message), "status": status,
        "code": one.code, "where": "" if "/" in one.where else one.where, "fix": without_paths(one.fix),
    }  # fmt: skip
    return Response(encode_json(content), status_code=status, media_type="application/problem+json")


def invalid(failure: ValidationError) -> Response:
    fields = [
        {"field": ".".join(map(str, one["loc"])), "message": one["msg"]}
        for one in failure.errors(include_input=False, include_url=False, include_context=False)
    ]
    content = {"type": "about:blank", "title": "the input does not fit", "status": 422, "fields": fields}
    return Response(encode_json(content), status_code=422, media_type="application/problem+json")
