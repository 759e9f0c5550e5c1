"""What every request passes before it is routed: host, origin, path, size, rate; and the headers of every answer.

The decisions are made on the raw path and headers, never on a URL that a framework has put together from them.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_BYTES = 64 * 1024
MAX_TARGET_BYTES = 8 * 1024
METHODS = ("GET", "HEAD", "POST", "DELETE")
REQUESTS_PER_S = 50.0
BURST = 200.0
FAILURES_PER_S = 1.0
FAILURE_BURST = 20.0
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True)
class AllowedHosts:
    """The exact values of the Host header that are served, and the origins of their pages."""

    hosts: frozenset[str]
    scheme: str

    @classmethod
    def of(cls, names: Iterable[str], *, port: int, scheme: str) -> AllowedHosts:
        written = {f"[{name}]" if ":" in name else name for name in names}
        hosts = {f"{name}:{port}".lower() for name in written}
        if port == (443 if scheme == "https" else 80):
            hosts |= {name.lower() for name in written}
        return cls(frozenset(hosts), scheme)

    @property
    def origins(self) -> frozenset[str]:
        return frozenset(f"{self.scheme}://{host}" for host in self.hosts)


class TokenBucket:
    """Allows `rate` requests per second, and `burst` at once, for each key."""

    def __init__(self, *, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._level: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, key: str) -> bool:
        now = time.monotonic()
        level, then = self._level.pop(key, (self._burst, now))
        level = min(self._burst, level + (now - then) * self._rate)
        self._level[key] = (level - 1, now) if level >= 1 else (level, now)
        while len(self._level) > 10_000:
            self._level.popitem(last=False)
        return level >= 1


class RequestRefused(Exception):  # noqa: N818
    """A request that is not served."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


class Gate:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp, *, allowed: AllowedHosts) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError("only HTTP is served")
        guarded = _with_headers(send, scope["path"])
        try:
            self._check(scope)
            await self._app(scope, _limited(receive), guarded)
        except RequestRefused as refusal:
            await send_problem(guarded, refusal.status, refusal.why)

    def _check(self, scope: Scope) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        hosts = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
        if len(hosts) != 1 or hosts[0] not in self._allowed.hosts:
            raise RequestRefused(421, "this server does not serve that host")
        if scope["method"] not in METHODS:
            raise RequestRefused(405, f"only {', '.join(METHODS)} are served")
        self._check_origin(scope, headers)
        if any(name == b"transfer-encoding" for name, _ in headers) and scope["method"] in ("GET", "HEAD"):
            raise RequestRefused(400, "this method has no body")
        _check_path(scope)

    def _check_origin(self, scope: Scope, headers: list[tuple[bytes, bytes]]) -> None:
        """A page of another site may link to this page; it may not send anything else."""
        origins = [value.decode("latin-1") for name, value in headers if name == b"origin"]
        if any(origin not in self._allowed.origins for origin in origins):
            raise RequestRefused(403, "pages of other origins may not use this server")
        sites = [value for name, value in headers if name == b"sec-fetch-site"]
        is_link = scope["method"] == "GET" and not scope["path"].startswith(("/api", "/metrics"))
        if any(site not in (b"same-origin", b"none") for site in sites) and not is_link:
            raise RequestRefused(403, "pages of other sites may not use this server")


def _check_path(scope: Scope) -> None:
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    if len(raw) + len(scope["query_string"]) > MAX_TARGET_BYTES:
        raise RequestRefused(414, "the address is too long")
    decoded = unquote_to_bytes(raw)
    if any(bad in decoded for bad in (b"%", b"\\", b";", b"\0", b"//")) or b"%2f" in raw.lower():
        raise RequestRefused(400, "the path has characters that no name has")
    if any(part in (b".", b"..") for part in decoded.split(b"/")) or not decoded.startswith(b"/"):
        raise RequestRefused(400, "the path leads elsewhere")
    try:
        scope["path"] = decoded.decode()
    except UnicodeDecodeError:
        raise RequestRefused(400, "the path is not UTF-8") from None


def _limited(receive: Receive) -> Receive:
    seen = 0

    async def limited() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > MAX_BODY_BYTES:
            raise RequestRefused(413, f"a body has at most {MAX_BODY_BYTES} bytes")
        return message

    return limited


def _with_headers(send: Send, path: str) -> Send:
    """Answers of the API are never stored by a browser or a proxy."""
    static = path.startswith("/static/")

    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = {name for name, _ in message["headers"]}
            added = {name.encode(): value.encode() for name, value in HEADERS.items()}
            if not static:
                added[b"cache-control"] = b"no-store"
            message["headers"] = [
                *message["headers"], *((name, value) for name, value in added.items() if name not in own),
            ]  # fmt: skip
        await send(message)

    return guarded


async def send_problem(send: Send, status: int, why: str) -> None:
    body = json.dumps({"type": "about:blank", "title": why, "status": status}).encode()
    headers = [(b"content-type", b"application/problem+json"), (b"content-length", str(len(body)).encode())]
    if status == 405:
        headers.append((b"allow", ", ".join(METHODS).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
