"""Rows: one JSON object per line over a socket that never blocks, with a bound on everything that can grow."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from shoal.wire.handshake import LinkError

LONGEST_ROW_BYTES = 1 << 20
_READ_BYTES = 1 << 16


class LanguageError(LinkError):
    """The other side speaks, but not our language."""


class Row(NamedTuple):
    kind: str
    fields: dict[str, Any]
    size_bytes: int


def pack(kind: str, fields: dict[str, Any]) -> bytes:
    line = json.dumps({"kind": kind} | fields, separators=(",", ":"), default=str).encode() + b"\n"
    if len(line) > LONGEST_ROW_BYTES:
        raise ValueError(f"a row '{kind}' of {len(line)} bytes; at most {LONGEST_ROW_BYTES}")
    return line


def unpack(line: bytes | bytearray) -> Row:
    fields = unpack_object(line)
    kind = fields.pop("kind", None)
    if not isinstance(kind, str):
        raise LanguageError("a row without a kind")
    return Row(kind, fields, len(line))


def unpack_object(data: bytes | bytearray) -> dict[str, Any]:
    if len(data) >= LONGEST_ROW_BYTES:
        raise LanguageError("a row that is too long")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as failure:
        raise LanguageError("a row that is not JSON") from failure
    if not isinstance(found, dict):
        raise LanguageError("a row that is not an object")
    return found


class Outbox:
    """Rows that wait to be sent, in order. Any thread may put; it outlives the connection that empties it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: deque[bytes] = deque()
        self._begun_bytes = 0  # what the socket took of the first row
        self.size_bytes = 0

    def put(self, row: bytes) -> None:
        with self._lock:
            self._rows.append(row)
            self.size_bytes += len(row)

    def pour(self, sock: socket.socket) -> None:
        """As much as the socket takes now."""
        with self._lock, contextlib.suppress(BlockingIOError):
            while self._rows:
                row = self._rows[0]
                self._begun_bytes += sock.send(memoryview(row)[self._begun_bytes :])
                if self._begun_bytes == len(row):
                    self._remove(0)
                    self._begun_bytes = 0

    def start_over(self) -> None:
        """On a new connection nobody knows the beginning of a row that was half sent."""
        with self._lock:
            self._begun_bytes = 0

    def shorten(self, most_bytes: int) -> int:
        """Drop the oldest rows, except one that is half sent; how many."""
        dropped = 0
        with self._lock:
            first = 1 if self._begun_bytes else 0
            while self.size_bytes > most_bytes and len(self._rows) > first:
                self._remove(first)
                dropped += 1
        return dropped

    def _remove(self, place: int) -> None:
        self.size_bytes -= len(self._rows[place])
        del self._rows[place]


class RowLink:
    """A connected socket that speaks rows. Owned by one thread; after a LinkError there is only `close`."""

    def __init__(self, sock: socket.socket, outbox: Outbox) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._outbox = outbox
        self._rest = bytearray()
        self._finishing = False

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def local_host(self) -> str:
        return str(self._sock.getsockname()[0])

    @property
    def waiting(self) -> bool:
        """Is there something that the socket did not take yet?"""
        return self._outbox.size_bytes > 0

    def read(self) -> Iterator[Row]:
        """What came; LinkError, after the rows before it, when the other side is gone or breaks the language."""
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as failure:
            raise LinkError(str(failure)) from failure
        if not data:
            raise LinkError("the other side closed the connection")
        self._rest += data
        if b"\n" in data:  # else a peer that lets its bytes drip would let us search the whole again for each
            *lines, self._rest = self._rest.split(b"\n")
            yield from map(unpack, lines)
        if len(self._rest) >= LONGEST_ROW_BYTES:
            raise LanguageError("a row that is too long")

    def write(self) -> None:
        """Send what the socket takes now."""
        try:
            self._outbox.pour(self._sock)
            if self._finishing and not self.waiting:
                self._sock.shutdown(socket.SHUT_WR)
        except OSError as failure:
            raise LinkError(str(failure)) from failure

    def finish(self) -> None:
        """Say goodbye after the last row. Who reads on until the other side closes loses nothing: a socket that is
        closed with something unread in it takes back what it had sent."""
        self._finishing = True
        self.write()

    def close(self) -> None:
        self._sock.close()
