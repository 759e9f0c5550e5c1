"""Rows: one JSON object per line over a socket that never blocks, with a bound on everything that can grow."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from shoal.net.errors import LinkError, ProtocolError

MAX_MESSAGE_BYTES = 1 << 20
_READ_BYTES = 1 << 16


class JsonMessage(NamedTuple):
    kind: str
    fields: dict[str, Any]
    size_bytes: int


def encode_message(kind: str, fields: dict[str, Any]) -> bytes:
    line = json.dumps({"kind": kind} | fields, separators=(",", ":"), default=str).encode() + b"\n"
    if len(line) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a row '{kind}' of {len(line)} bytes; at most {MAX_MESSAGE_BYTES}")
    return line


def decode_message(line: bytes | bytearray) -> JsonMessage:
    fields = decode_object(line)
    kind = fields.pop("kind", None)
    if not isinstance(kind, str):
        raise ProtocolError("a row without a kind")
    return JsonMessage(kind, fields, len(line))


def decode_object(data: bytes | bytearray) -> dict[str, Any]:
    if len(data) >= MAX_MESSAGE_BYTES:
        raise ProtocolError("a row that is too long")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as failure:
        raise ProtocolError("a row that is not JSON") from failure
    if not isinstance(found, dict):
        raise ProtocolError("a row that is not an object")
    return found


class Outbox:
    """Rows that wait to be sent, in order. Any thread may put; it outlives the connection that empties it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: deque[bytes] = deque()
        self._sent_bytes = 0  # what the socket took of the first row
        self.size_bytes = 0

    def put(self, message: bytes) -> None:
        with self._lock:
            self._messages.append(message)
            self.size_bytes += len(message)

    def flush_to(self, sock: socket.socket) -> None:
        """As much as the socket takes now."""
        with self._lock, contextlib.suppress(BlockingIOError):
            while self._messages:
                row = self._messages[0]
                self._sent_bytes += sock.send(memoryview(row)[self._sent_bytes :])
                if self._sent_bytes == len(row):
                    self._remove(0)
                    self._sent_bytes = 0

    def rewind(self) -> None:
        """On a new connection nobody knows the beginning of a row that was half sent."""
        with self._lock:
            self._sent_bytes = 0

    def drop_oldest(self, max_bytes: int) -> int:
        """Drop the oldest rows, except one that is half sent; how many."""
        dropped = 0
        with self._lock:
            first = 1 if self._sent_bytes else 0
            while self.size_bytes > max_bytes and len(self._messages) > first:
                self._remove(first)
                dropped += 1
        return dropped

    def _remove(self, index: int) -> None:
        self.size_bytes -= len(self._messages[index])
        del self._messages[index]


class MessageConnection:
    """A connected socket that speaks rows. Owned by one thread; after a LinkError there is only `close`."""

    def __init__(self, sock: socket.socket, outbox: Outbox) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._outbox = outbox
        self._partial = bytearray()
        self._finishing = False

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def local_host(self) -> str:
        return str(self._sock.getsockname()[0])

    @property
    def has_unsent(self) -> bool:
        """Is there something that the socket did not take yet?"""
        return self._outbox.size_bytes > 0

    def read(self) -> Iterator[JsonMessage]:
        """What came; LinkError, after the rows before it, when the other side is gone or breaks the language."""
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as failure:
            raise LinkError(str(failure)) from failure
        if not data:
            raise LinkError("the other side closed the connection")
        self._partial += data
        if b"\n" in data:  # else a peer that lets its bytes drip would let us search the whole again for each
            *lines, self._partial = self._partial.split(b"\n")
            yield from map(decode_message, lines)
        if len(self._partial) >= MAX_MESSAGE_BYTES:
            raise ProtocolError("a row that is too long")

    def write(self) -> None:
        """Send what the socket takes now."""
        try:
            self._outbox.flush_to(self._sock)
            if self._finishing and not self.has_unsent:
                self._sock.shutdown(socket.SHUT_WR)
        except OSError as failure:
            raise LinkError(str(failure)) from failure

    def finish_sending(self) -> None:
        """Say goodbye after the last row. Who reads on until the other side closes loses nothing: a socket that is
        closed with something unread in it takes back what it had sent."""
        self._finishing = True
        self.write()

    def close(self) -> None:
        self._sock.close()
