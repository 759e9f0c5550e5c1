"""Notices that a machine will be taken away, as clouds give them for spot machines: a file that appears, or a URL that
answers. Polled by the agent of the machine."""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

POLL_S = 2.0
TIMEOUT_S = 2.0
_UNAUTHORIZED = 401
_HEADERS = {"Metadata-Flavor": "Google", "Metadata": "true"}
"""The metadata services of Google and Azure want them; others ignore them."""
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""A proxy cannot know what happens to this machine."""
_NO = (b"", b"false", b"none", b"null")


def watch_notice(where: str, on_notice: Callable[[], None], *, stopped: threading.Event) -> threading.Thread:
    """Calls `on_notice` once, from another thread, when there is a notice."""

    def watch() -> None:
        while not stopped.wait(POLL_S):
            if notice_arrived(where):
                on_notice()
                return

    thread = threading.Thread(target=watch, name="notice", daemon=True)
    thread.start()
    return thread


def notice_arrived(where: str) -> bool:
    """Whether the file exists, or the URL answers with something other than FALSE. A URL that cannot be reached is no
    notice: the network may be down for a moment."""
    if "://" not in where:
        return os.path.exists(where)
    try:
        return _says_yes(_get(where, _HEADERS))
    except urllib.error.HTTPError as failure:
        if failure.code != _UNAUTHORIZED:
            return False
    except (OSError, ValueError):
        return False
    return _arrived_with_token(where)


def _arrived_with_token(where: str) -> bool:
    """Amazon's metadata service may want a token first."""
    parts = urlsplit(where)
    request = urllib.request.Request(  # noqa: S310  # the scheme was checked with the job
        f"{parts.scheme}://{parts.netloc}/latest/api/token",
        method="PUT",
        headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"},
    )
    try:
        with _OPENER.open(request, timeout=TIMEOUT_S) as answer:
            token = answer.read(4096).decode("ascii")
        return _says_yes(_get(where, {"X-aws-ec2-metadata-token": token}))
    except (OSError, ValueError):
        return False


def _get(where: str, headers: Mapping[str, str]) -> bytes:
    request = urllib.request.Request(where, headers=dict(headers))  # noqa: S310
    with _OPENER.open(request, timeout=TIMEOUT_S) as answer:
        found = answer.read(4096)
        return found if isinstance(found, bytes) else b""


def _says_yes(answer: bytes) -> bool:
    return answer.strip().lower() not in _NO
