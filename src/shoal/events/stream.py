"""The append-only stream: one JSON object per line, one file per run, readable while it is written.

Every writer appends whole lines in one `write`, so several processes may share the file. A writer that was
killed may leave half a line behind: readers pass over it, and a new writer starts on a line of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class Event:
    """What happened: when, who says so, at which step, and what else there is to say."""

    kind: str
    t: float = 0.0
    who: str = ""
    step: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)

    def to_line(self) -> bytes:
        row: dict[str, Any] = {"t": round(self.t, 6), "who": self.who, "kind": self.kind}
        if self.step is not None:
            row["step"] = self.step
        return json.dumps(row | self.fields, separators=(",", ":"), default=str).encode() + b"\n"


def parse_event(line: bytes) -> Event | None:
    """The event in a line, or None if the line is damaged."""
    try:
        row = json.loads(line)
        kind, t, who = row.pop("kind"), row.pop("t"), row.pop("who")
        return Event(str(kind), float(t), str(who), row.pop("step", None), row)
    except (ValueError, KeyError, AttributeError, TypeError):
        return None


class EventWriter:
    """Appends events to a file. Rows wait in memory for at most `flush_s` (checked at the next emit).

    Owned by one process; not safe for several threads.
    """

    def __init__(self, path: Path, who: str, *, flush_s: float = 0.1) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._initialise(who, flush_s, lambda rows: os.write(fd, b"".join(rows)), close=lambda: os.close(fd))
        if _ends_mid_line(fd):
            self._pending.append(b"\n")

    @classmethod
    def to_callback(cls, write: Callable[[bytes], object], who: str, *, flush_s: float = 0.1) -> EventWriter:
        """A stream that gives its lines to a function, one at a time, for a writer that cannot reach the file."""

        def write_each(rows: list[bytes]) -> None:
            for row in rows:
                write(row)

        stream = cls.__new__(cls)
        stream._initialise(who, flush_s, write_each, close=lambda: None)
        return stream

    def _initialise(
        self, who: str, flush_s: float, write: Callable[[list[bytes]], object], *, close: Callable[[], None]
    ) -> None:
        self.who = who
        self._flush_s = flush_s
        self._write = write
        self._close = close
        self._pending: list[bytes] = []
        self._flushed_at = time.monotonic()

    def emit(self, kind: str, *, step: int | None = None, **fields: Any) -> Event:
        event = Event(kind, time.time(), self.who, step, fields)
        self._pending.append(event.to_line())
        if kind != "step" or time.monotonic() - self._flushed_at >= self._flush_s:
            self.flush()
        return event

    def append(self, event: Event) -> None:
        """What somebody else tells, as it is."""
        self._pending.append(event.to_line())
        self.flush()

    def flush(self) -> None:
        if self._pending:
            self._write(self._pending)
            self._pending.clear()
        self._flushed_at = time.monotonic()

    def close(self) -> None:
        self.flush()
        self._close()


def _ends_mid_line(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"


class LineTail:
    """Whole lines of a growing file: at each call of `new`, what came since. Never blocks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._partial = b""

    def skip_existing(self) -> None:
        """Pass over what is there already."""
        with contextlib.suppress(FileNotFoundError):
            self._offset = self._path.stat().st_size

    def read_new_bytes(self) -> list[bytes]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._partial = self._partial[-MAX_LINE_BYTES:]
        return lines

    def read_new(self) -> list[str]:
        return [line.decode(errors="replace") for line in self.read_new_bytes()]


class EventReader:
    """Reads a stream from its beginning and, at each call of `new`, what came since. Never blocks."""

    def __init__(self, path: Path) -> None:
        self._lines = LineTail(path)
        self.damaged_lines = 0

    def read_new(self) -> Iterator[Event]:
        for line in filter(None, self._lines.read_new_bytes()):
            event = parse_event(line)
            if event is None:
                self.damaged_lines += 1
            else:
                yield event


def read_events(path: Path) -> Iterator[Event]:
    """All whole events of a stream."""
    return EventReader(path).read_new()
