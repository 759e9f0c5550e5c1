"""A client that calls an ASGI application directly: paths and headers reach it exactly as they are written."""

import asyncio
import json as json_format
from http.cookies import SimpleCookie
from types import SimpleNamespace
from urllib.parse import unquote, urlencode


class AsgiClient:
    """Cookies are kept, as in a browser. An error in the application fails the test."""

    def __init__(self, app, *, host, headers=None):
        self._app = app
        self.headers = {"host": host, **(headers or {})}
        self.cookies = {}

    def get(self, path, **more):
        return self.request("GET", path, **more)

    def post(self, path, **more):
        return self.request("POST", path, **more)

    def request(self, method, path, *, headers=None, params=None, json=None, content=b"", stays=False):
        sent = {**self.headers, **(headers or {})}
        if json is not None:
            content = json_format.dumps(json).encode()
            sent.setdefault("content-type", "application/json")
        if self.cookies:
            sent["cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        raw, _, query = path.partition("?")
        scope = {
            "type": "http", "http_version": "1.1", "method": method, "scheme": "http", "raw_path": raw.encode(),
            "path": unquote(raw), "query_string": (urlencode(params) if params else query).encode(),
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in sent.items()],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8470), "root_path": "", "state": {},
        }  # fmt: skip
        sent_bytes = content if isinstance(content, bytes) else content.encode()
        return asyncio.run(self._exchange(scope, sent_bytes, stays=stays))

    async def _exchange(self, scope, content, *, stays):
        parts, start = [], {}
        body = [{"type": "http.request", "body": content, "more_body": False}]

        async def receive():
            if stays and not body:
                await asyncio.Event().wait()  # it waits for the end of the answer
            return body.pop() if body else {"type": "http.disconnect"}

        async def send(message):
            if message["type"] == "http.response.start":
                start.update(message)
            else:
                parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return self._answer(start, b"".join(parts))

    def _answer(self, start, content):
        headers = {name.decode().lower(): value.decode() for name, value in start["headers"]}
        if "set-cookie" in headers:
            for name, morsel in SimpleCookie(headers["set-cookie"]).items():
                self.cookies[name] = morsel.value
        text = content.decode(errors="replace")
        return SimpleNamespace(
            status_code=start["status"],
            headers=headers,
            content=content,
            text=text,
            json=lambda: json_format.loads(text),
        )
