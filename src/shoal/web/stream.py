"""Server-sent events: new rows of runs as they are written, with resume.

One stream serves several runs. The id of a message holds the position in the stream of each run, so a browser that
connects again (Last-Event-ID) gets what it has missed, and nothing twice.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from shoal.errors import ShoalError, error
from shoal.events import LineTail
from shoal.events.packed_file import size_of_content, stat_content
from shoal.events.schema import to_row
from shoal.events.stream import parse_event
from shoal.jobs import run_dir
from shoal.spec.base import Spec
from shoal.spec.run_paths import RunPaths
from shoal.web.gate import RequestRefused
from shoal.web.table import Api, Call, encode_json

POLL_S = 0.5
HEARTBEAT_S = 15.0
MAX_ROWS = 1000
MAX_STREAMS = 8
MAX_ALL_STREAMS = 64
MAX_RUNS = 100


class StreamQuery(Spec):
    """`runs`: names, with commas between; `after`: bytes that are known already, for one run or for each."""

    runs: str = Field(min_length=1, max_length=8000)
    after: str = Field("", max_length=2000)


class FollowedRun:
    """New rows of one run."""

    def __init__(self, name: str, paths: RunPaths, offset: int | None) -> None:
        self.name = name
        self._paths = paths
        self._tail = LineTail(paths.events, offset=offset or 0)
        self._status = ""
        if offset is None:
            self._tail.skip_existing()

    @property
    def offset(self) -> int:
        return self._tail.offset

    def read(self) -> dict[str, Any] | None:
        """New rows and the status; None if nothing is new."""
        rows = []
        try:
            stat_content(self._paths.events)  # OSError if the run is gone
            if size_of_content(self._paths.events) < self._tail.offset:
                self._tail = LineTail(self._paths.events)
            for line in self._tail.read_new_bytes():
                event = parse_event(line)
                if event is not None:
                    rows.append(to_row(event))
                if len(rows) >= MAX_ROWS:
                    break
        except OSError:
            return None
        is_driven = run_dir.is_driven(self._paths.parent_run)
        status = "driven" if is_driven else "not driven"
        if not rows and status == self._status:
            return None
        self._status = status
        return {"run": self.name, "offset": self.offset, "driven": is_driven, "rows": rows}


class Streams:
    """Counts the open streams: each identity may have `MAX_STREAMS`."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        self.api: Api | None = None

    def open_stream(self, call: Call) -> Response:
        names = list(dict.fromkeys(name for name in call.query.runs.split(",") if name))
        if not 1 <= len(names) <= MAX_RUNS:
            raise error("SH609", f"{len(names)} runs", where="runs", fix=f"Name 1 to {MAX_RUNS} runs.")
        known = parse_positions(call.request.headers.get("last-event-id") or call.query.after, names)
        followed = [FollowedRun(name, call.find(name), known.get(name)) for name in names]
        who = call.identity.name
        if self._open[who] >= MAX_STREAMS or self._open.total() >= MAX_ALL_STREAMS:
            raise RequestRefused(429, "too many open streams; close another page")
        headers = {"x-accel-buffering": "no"}
        return StreamingResponse(self._messages(call, followed), headers=headers, media_type="text/event-stream")

    def _is_valid(self, call: Call) -> bool:
        assert self.api is not None
        try:
            return self.api.known_identity(call.request) is not None
        except (ShoalError, OSError):  # the tokens cannot be read
            return False

    def _new_messages(self, call: Call, followed: list[FollowedRun]) -> bytes | None:
        """None if the stream ends: its token is revoked, or its session has ended."""
        if not self._is_valid(call):
            return None
        told = {one.name: one.offset for one in followed}  # a connection may break after any message
        messages = []
        for one in followed:
            if new := one.read():
                told[one.name] = one.offset
                position = ",".join(f"{name}:{offset}" for name, offset in told.items())
                messages.append(b"id: %s\ndata: %s\n\n" % (position.encode(), encode_json(new)))
        return b"".join(messages)

    async def _messages(self, call: Call, followed: list[FollowedRun]) -> AsyncIterator[bytes]:
        said_s = time.monotonic()
        self._open[call.identity.name] += 1
        try:
            if self._open[call.identity.name] > MAX_STREAMS:
                return  # others were opened at the same moment
            yield b"retry: 1000\n\n"
            while not call.site.stopping.is_set():
                found = await run_in_threadpool(self._new_messages, call, followed)
                if found is None:
                    return
                if not found and time.monotonic() - said_s >= HEARTBEAT_S:
                    found = b": here\n\n"
                if found:
                    yield found
                    said_s = time.monotonic()
                await asyncio.sleep(POLL_S)
        finally:
            self._open[call.identity.name] -= 1


def parse_positions(text: str, names: list[str]) -> dict[str, int]:
    """Positions by run. A number alone is that of the only run. What is not understood is left out."""
    found = {}
    if text.isdecimal() and len(names) == 1 and len(text) < 18:
        return {names[0]: int(text)}
    for part in text.split(","):
        name, _, position = part.rpartition(":")
        if name in names and position.isdecimal() and len(position) < 18:
            found[name] = int(position)
    return found
