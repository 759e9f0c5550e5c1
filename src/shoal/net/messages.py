"""Messages: one JSON object per line over a non-blocking socket. Everything that can grow is bounded."""

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
        raise ValueError(f"the message '{kind}' has {len(line)} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    return line


def decode_message(line: bytes | bytearray) -> JsonMessage:
    fields = decode_object(line)
    kind = fields.pop("kind", None)
    if not isinstance(kind, str):
        raise ProtocolError("the message has no kind")
    return JsonMessage(kind, fields, len(line))


def decode_object(data: bytes | bytearray) -> dict[str, Any]:
    if len(data) >= MAX_MESSAGE_BYTES:
        raise ProtocolError("the message is too long")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as failure:
        raise ProtocolError("the message is not JSON") from failure
    if not isinstance(found, dict):
        raise ProtocolError("the message is not a JSON object")
    return found


class Outbox:
    """Messages that wait to be sent, in order. Any thread may `put`. It outlives connections."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: deque[bytes] = deque()
        self._sent_bytes = 0  # of the first message
        self.size_bytes = 0

    def put(self, message: bytes) -> None:
        with self._lock:
            self._messages.append(message)
            self.size_bytes += len(message)

    def flush_to(self, sock: socket.socket) -> None:
        """Send as much as the socket accepts now."""
        with self._lock, contextlib.suppress(BlockingIOError):
            while self._messages:
                message = self._messages[0]
                self._sent_bytes += sock.send(memoryview(message)[self._sent_bytes :])
                if self._sent_bytes == len(message):
                    self._remove(0)
                    self._sent_bytes = 0

    def rewind(self) -> None:
        """Send a half-sent message again from its start: a new connection has not seen its beginning."""
        with self._lock:
            self._sent_bytes = 0

    def drop_oldest(self, max_bytes: int) -> int:
        """Drop the oldest messages, except a half-sent one, until `max_bytes` are left. Returns how many it dropped."""
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
    """A connected socket that carries messages. Belongs to one thread. After a LinkError only `close` is allowed."""

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
        """Whether messages wait to be sent."""
        return self._outbox.size_bytes > 0

    def read(self) -> Iterator[JsonMessage]:
        """The messages that have arrived. When the peer is gone or breaks the protocol, yields the messages before
        that and then raises LinkError."""
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as failure:
            raise LinkError(str(failure)) from failure
        if not data:
            raise LinkError("the other side closed the connection")
        self._partial += data
        if b"\n" in data:  # otherwise a peer that sends byte by byte would make us search everything again for each
            *lines, self._partial = self._partial.split(b"\n")
            yield from map(decode_message, lines)
        if len(self._partial) >= MAX_MESSAGE_BYTES:
            raise ProtocolError("the message is too long")

    def write(self) -> None:
        """Send what the socket accepts now."""
        try:
            self._outbox.flush_to(self._sock)
            if self._finishing and not self.has_unsent:
                self._sock.shutdown(socket.SHUT_WR)
        except OSError as failure:
            raise LinkError(str(failure)) from failure

    def finish_sending(self) -> None:
        """Half-close after the last message. The caller reads until the peer closes: closing a socket with unread data
        would discard what it has sent."""
        self._finishing = True
        self.write()

    def close(self) -> None:
        self._sock.close()
