"""The append-only stream: one JSON object per line, one file per run, readable while it is written.

Every writer appends complete lines in one `write`, so several processes may share the file. A writer that is killed may
leave an incomplete line: readers skip it, and a new writer starts on a new line.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from shoal.errors import is_disk_full
from shoal.events.checks import is_count
from shoal.events.event import Event
from shoal.events.packed_file import content_size, open_content, packed_path, size_of_content, unpack_file
from shoal.events.schema import KINDS, SCHEMA_VERSION, from_row, to_row

MAX_LINE_BYTES = 1 << 22
MAX_PENDING_BYTES = 1 << 20
"""Bytes of rows that a writer keeps while they cannot be written, as on a full disk."""
RETRY_S = 0.5
"""Seconds after which a writer tries a full disk again."""
MAX_TEXT = 10_000
"""Characters to which a text is truncated in a row that would be too long."""
STRICT_VARIABLE = "SHOAL_STRICT_EVENTS"
"""Environment variable that tests set, also for the workers: an event that breaks the schema is then an error."""

_STEP_MARK = b'"kind":"step"'
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode


def parse_event(line: bytes) -> Event | None:
    """The event in a line; None if the line is damaged, too long, or breaks the schema."""
    if len(line) > MAX_LINE_BYTES:
        return None
    try:
        if b"\\ud" in line:  # half of a surrogate pair cannot be printed
            row = json.loads(json.dumps(json.loads(line), ensure_ascii=False).encode("utf-8", "replace"))
        else:
            row = from_json(line, cache_strings="keys")  # four times as fast as json.loads
    except (ValueError, RecursionError):
        return None
    return from_row(row)


def format_event(event: Event) -> bytes:
    """The line of an event. Texts are truncated if the line would be too long to be read."""
    line = _encode(to_row(event)).encode() + b"\n"
    if len(line) <= MAX_LINE_BYTES:
        return line
    short = {name: _cut(value) if isinstance(value, str) else value for name, value in event.fields.items()}
    return _encode(to_row(replace(event, fields=short))).encode() + b"\n"


def _cut(text: str) -> str:
    """Keep the beginning and the end: the end of a traceback has the error."""
    half = MAX_TEXT // 2
    return text if len(text) <= MAX_TEXT else f"{text[:half]} … {text[-half:]}"


class EventWriter:
    """Appends events to a file. Rows wait in memory for at most `flush_s` (checked at the next emit).

    Owned by one process; not safe for several threads. Every row is checked against the schema. In tests an invalid row
    is an error. Otherwise it never stops a run: it is written without the fields of a wrong type, and counted in
    `invalid_rows`. On a full disk rows wait in memory, the oldest are dropped, and a `note` says so when there is room.
    """

    def __init__(self, path: Path, who: str, *, flush_s: float = 0.1) -> None:
        if not path.exists() and packed_path(path).exists():
            unpack_file(path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._initialise(who, flush_s, lambda rows: _append_rows(fd, rows), close=lambda: os.close(fd))
        if _ends_mid_line(fd):
            self._pending.append(b"\n")

    @classmethod
    def to_callback(cls, write: Callable[[bytes], object], who: str, *, flush_s: float = 0.1) -> EventWriter:
        """A writer that passes its lines to a function, one at a time, for a process that cannot reach the file."""

        def write_each(rows: list[bytes]) -> int:
            for row in rows:
                write(row)
            return len(rows)

        stream = cls.__new__(cls)
        stream._initialise(who, flush_s, write_each, close=lambda: None)
        return stream

    def _initialise(
        self, who: str, flush_s: float, write: Callable[[list[bytes]], int], *, close: Callable[[], None]
    ) -> None:
        self.who = who
        self.invalid_rows = 0
        self._strict = bool(os.environ.get(STRICT_VARIABLE))
        self._flush_s = flush_s
        self._write = write
        self._close = close
        self._pending: list[bytes] = []
        self._dropped_rows = 0
        self._retry_at = 0.0
        self._flushed_at = time.monotonic()

    def emit(self, kind: str, *, step: int | None = None, **fields: Any) -> Event:
        """Write an event. TypeError in tests if it breaks the schema."""
        if kind == "run_started":
            fields["schema"] = SCHEMA_VERSION
        known = KINDS.get(kind)
        if self._strict:
            _require_schema(kind, step, fields)
        elif known is None or not known.fits_types(fields) or not (type(step) is int or step is None):
            self.invalid_rows += 1
            step, fields = _repaired(kind, step, fields)
        event = Event(kind, time.time(), self.who, step, fields)
        self._pending.append(format_event(event))
        if kind != "step" or time.monotonic() - self._flushed_at >= self._flush_s:
            self.flush()
        return event

    def append(self, event: Event) -> None:
        """Write an event of another process unchanged."""
        self._pending.append(format_event(event))
        self.flush()

    def flush(self) -> None:
        self._flushed_at = time.monotonic()
        if self._flushed_at >= self._retry_at:
            self._write_pending()
        self._drop_rows()

    def _write_pending(self) -> None:
        if not self._pending:
            return
        note = self._note_of_dropped_rows()
        written = self._write([*note, *self._pending])
        if written:
            self._dropped_rows = 0
            del self._pending[: written - len(note)]
        if self._pending:
            self._retry_at = time.monotonic() + RETRY_S

    @property
    def unwritten_rows(self) -> int:
        """Rows that a full disk has kept from being written."""
        return len(self._pending) + self._dropped_rows

    def _note_of_dropped_rows(self) -> list[bytes]:
        if not self._dropped_rows:
            return []
        message = f"the disk was full: {self._dropped_rows} events of {self.who} were dropped"
        return [format_event(Event("note", time.time(), self.who, None, {"message": message}))]

    def _drop_rows(self) -> None:
        """Drop the oldest rows beyond the limit; rows of steps, of which there are most, go first."""
        if not self._pending:
            return
        size_bytes = sum(map(len, self._pending))
        while size_bytes > MAX_PENDING_BYTES:
            oldest = next((i for i, row in enumerate(self._pending) if _STEP_MARK in row), 0)
            size_bytes -= len(self._pending.pop(oldest))
            self._dropped_rows += 1

    def close(self) -> None:
        self._write_pending()
        self._close()


def _require_schema(kind: str, step: Any, fields: dict[str, Any]) -> None:
    found = KINDS[kind].problems(fields) if kind in KINDS else {"the kind": "is not in the schema"}
    if step is not None and not is_count(step):
        found["step"] = f"is {step!r}"
    if found:
        raise TypeError(f"event '{kind}': " + "; ".join(f"{name} {why}" for name, why in found.items()))


def _repaired(kind: str, step: Any, fields: dict[str, Any]) -> tuple[int | None, dict[str, Any]]:
    """The part of an invalid event that can be written."""
    step, fields = _plain(step), {name: _plain(value) for name, value in fields.items()}
    wrong = KINDS[kind].wrong_fields(fields) if kind in KINDS else set()
    kept = {name: value for name, value in fields.items() if name not in wrong}
    return step if is_count(step) else None, kept


def _plain(value: Any) -> Any:
    """A scalar of numpy or torch as a Python number."""
    if getattr(value, "shape", None) == ():
        return value.item()
    return value


def _append_rows(fd: int, rows: list[bytes]) -> int:
    """Append rows, and return how many are written. A full disk ends it: the beginning of a row is then removed."""
    content = b"".join(rows)
    try:
        size = os.write(fd, content)
    except OSError as failure:
        if not is_disk_full(failure):
            raise
        return 0
    if size == len(content):
        return len(rows)
    ends = [end for end in accumulate(map(len, rows)) if end <= size]
    end = os.lseek(fd, 0, os.SEEK_CUR)
    if os.fstat(fd).st_size == end:  # else another process has appended rows
        os.ftruncate(fd, end - size + (ends[-1] if ends else 0))
    return len(ends)


def _ends_mid_line(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"


class LineTail:
    """Complete lines of a growing file: each call of `read_new` returns the new ones. Never blocks.

    `offset` is the position after the last line that was read. A line longer than `MAX_LINE_BYTES` is truncated.
    """

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        self.offset = self._position = offset
        self._path = path
        self._beginning = b""  # of a long line that is not complete yet

    def skip_existing(self) -> None:
        """Skip the present content."""
        self.offset = self._position = size_of_content(self._path)

    def read_new_bytes(self) -> Iterator[bytes]:
        try:
            file = open_content(self._path)
        except FileNotFoundError:
            return
        with file:
            size = content_size(file)  # not what is appended meanwhile: that might never end
            file.seek(self._position)
            while self._position < size:
                line = file.readline(MAX_LINE_BYTES + 1)
                self._position += len(line)
                if line[-1:] != b"\n":
                    if len(line) <= MAX_LINE_BYTES:
                        self._position -= len(line)
                        return
                    self._beginning = self._beginning or line
                    continue
                self.offset = self._position
                if self._beginning:
                    line, self._beginning = self._beginning, b""
                yield line.removesuffix(b"\n")

    def read_new(self) -> list[str]:
        return [line.decode(errors="replace") for line in self.read_new_bytes()]


class EventReader:
    """Reads a stream from its beginning or from `offset`; each call of `read_new` yields the new events. Never blocks.

    Rows that are damaged or break the schema are skipped and counted in `skipped_rows`.
    """

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        self._lines = LineTail(path, offset=offset)
        self.skipped_rows = 0

    @property
    def offset(self) -> int:
        return self._lines.offset

    def read_new(self) -> Iterator[Event]:
        for line in filter(None, self._lines.read_new_bytes()):
            event = parse_event(line)
            if event is None:
                self.skipped_rows += 1
            else:
                yield event


def read_events(path: Path) -> Iterator[Event]:
    """All events in a stream."""
    return EventReader(path).read_new()
