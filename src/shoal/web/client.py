"""A client of the API. Its functions are those that the server describes, so it needs nothing but the standard library.

page = shoal.connect("http://127.0.0.1:8470", token)
page.list_runs(where="status=training")
page.scale_run("digits-1", workers=3)
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from ssl import SSLContext
from typing import Any, NamedTuple

from shoal.errors import ShoalError, error, error_from_fields

TIMEOUT_S = 60.0
POLL_S = 0.2
STREAM = "text/event-stream"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The token goes to no other address."""

    def redirect_request(self, *_: Any) -> None:
        return None


class _Function(NamedTuple):
    method: str
    path: str
    summary: str
    answers: str
    """The media type."""


class WebClient:
    """Names in the path are positional, everything else is given by name (`from_` for `from`). An operation is waited
    for. Errors of the server are ShoalErrors with its code and fix. `dir(client)` lists the functions."""

    def __init__(self, url: str, token: str, *, tls: SSLContext | None = None) -> None:
        self._url, self._token = url.rstrip("/"), token
        https = urllib.request.HTTPSHandler(context=tls)
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect, https)
        with self._understood():
            self._functions = dict(_functions(json.loads(self._open("GET", "/api/v1/openapi.json").read())))

    def __dir__(self) -> list[str]:
        return sorted(self._functions)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = self.__dict__.get("_functions", {}).get(name)
        if function is None:
            raise AttributeError(f"the API has no function '{name}'; it has {', '.join(dir(self))}")
        call = functools.partial(self._call, function)
        call.__doc__ = function.summary
        return call

    def _call(self, function: _Function, *names: str, **fields: Any) -> Any:
        wanted = re.findall(r"\{\w+\}", function.path)
        if len(wanted) != len(names):
            raise TypeError(f"{function.method} {function.path} takes {len(wanted)} names, not {len(names)}")
        path = function.path
        for place, name in zip(wanted, names, strict=True):
            path = path.replace(place, urllib.parse.quote(str(name), safe=""))
        sent = {name.rstrip("_"): value for name, value in fields.items()}
        if function.answers == STREAM:
            return self._follow(path, sent)
        with self._open(function.method, path, sent) as answer:
            content = answer.read()
        if function.answers != "application/json":
            return content
        with self._understood():
            found = json.loads(content)
            return self._result(found) if isinstance(found, dict) and {"operation", "state"} <= found.keys() else found

    def _result(self, operation: dict[str, Any]) -> Any:
        while operation["state"] == "running":
            time.sleep(POLL_S)
            operation = json.loads(self._open("GET", f"/api/v1/operations/{operation['operation']}").read())
        if operation["state"] == "failed":
            raise error_from_fields(operation["error"])
        return operation["result"]

    def _follow(self, path: str, query: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Messages of a stream; after a break it goes on where it was. It ends with an error: the server is away, or
        the token is no longer valid."""
        known = ""
        while True:
            try:
                with self._open("GET", path, query, last_event_id=known) as stream:
                    for line in stream:
                        name, _, value = line.decode().rstrip("\n").partition(": ")
                        if name == "data":
                            with self._understood():
                                message = json.loads(value)
                            yield message
                        elif name == "id":
                            known = value
            except OSError:
                pass  # it broke; the next question tells whether the server is there
            time.sleep(POLL_S)

    @contextlib.contextmanager
    def _understood(self) -> Iterator[None]:
        """SH683 for an answer that the page of Shoal does not give: another server may be at this address."""
        try:
            yield
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as failure:
            raise error("SH683", "the answer is not that of a web page of Shoal", where=self._url) from failure

    def _open(self, method: str, path: str, fields: dict[str, Any] | None = None, *, last_event_id: str = "") -> Any:
        headers = {"authorization": f"Bearer {self._token}", "content-type": "application/json"}
        if last_event_id:
            headers["last-event-id"] = last_event_id
        url, body = f"{self._url}{path}", None
        if method == "POST":
            body = json.dumps(fields or {}).encode()
        elif fields:
            url += f"?{urllib.parse.urlencode(fields)}"
        if not url.startswith(("http://", "https://")):
            raise error("SH683", f"'{self._url}' is not an address", fix="Give it as http://127.0.0.1:8470.")
        request = urllib.request.Request(url, data=body, headers=headers, method=method)  # noqa: S310
        try:
            return self._opener.open(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as refusal:
            raise _refusal(refusal) from None
        except OSError as failure:
            reason = getattr(failure, "reason", failure)
            raise error("SH683", f"{reason}", where=self._url, fix="Start it: shoal web") from failure


def connect(url: str, token: str, *, tls: SSLContext | None = None) -> WebClient:
    """A client of the web page at this address. `tls` says which certificates are believed."""
    return WebClient(url, token, tls=tls)


def _functions(document: dict[str, Any]) -> Iterator[tuple[str, _Function]]:
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            (answers,) = described["responses"]["200"]["content"]
            yield described["operationId"], _Function(method.upper(), path, described["summary"], answers)


def _refusal(refusal: urllib.error.HTTPError) -> ShoalError:
    try:
        told = json.loads(refusal.read())
    except (OSError, ValueError):
        told = {}
    if told.get("code"):
        return error_from_fields({"message": told.get("title", ""), **told})
    wrong = "; ".join(f"{one['field']}: {one['message']}" for one in told.get("fields", []))
    return error("SH683", f"{refusal.code} {told.get('title', '')}{f' ({wrong})' if wrong else ''}")
