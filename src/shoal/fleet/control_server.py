"""The driver's side of the control channel: accepts connections, receives messages, and sends views and chunk tables.

Messages are lines of JSON over TCP, after a handshake in which both sides prove that they know the run's token.
"""

from __future__ import annotations

import errno
import hmac
import itertools
import socket
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from shoal.errors import error
from shoal.fleet.connection_thread import ConnectionThread
from shoal.fleet.driver_address import make_key
from shoal.fleet.messages import printable
from shoal.net.address import format_address
from shoal.net.handshake import new_token
from shoal.net.listener import AuthenticatedListener
from shoal.net.messages import JsonMessage, decode_object, encode_message
from shoal.net.tls import TlsContexts
from shoal.net.wakeup import Wakeup
from shoal.spec.chunk_table import ChunkTable
from shoal.spec.view import View

MAX_INBOX_BYTES = 64 << 20
MAX_KEPT_REFUSALS = 100
_MESSAGE_OVERHEAD_BYTES = 256


@dataclass(frozen=True)
class ControlMessage:
    """A message from a connected process. The first has the kind "here" and the fields of the hello; the last, exactly
    once, has the kind "lost". Connection numbers are never reused."""

    connection: int
    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Refusal:
    """A caller that knew the token and was refused, in printable text."""

    name: str
    address: str
    reason: str


class ControlServer:
    """Created and used by one thread, the driver's. Only `close` blocks. A second thread does the I/O, so that pings
    are sent even while the driver is busy."""

    def __init__(
        self,
        token: str,
        *,
        listen: str = "127.0.0.1",
        port: int = 0,
        tls_contexts: TlsContexts | None = None,
        secret: str = "",
    ) -> None:
        """If `port` is in use, another port is chosen; see the attribute `port`. `secret` is an earlier driver's, see
        `driver_address`."""
        self.secret = secret or new_token()
        self.token = token
        listener = _listening_socket(listen, port)
        self.host: str
        self.port: int
        self.host, self.port = listener.getsockname()[:2]
        self._numbers = itertools.count(1)
        self._open_connections: set[int] = set()
        self._addresses: dict[int, str] = {}  # of connected callers
        self._refusals: deque[Refusal] = deque(maxlen=MAX_KEPT_REFUSALS)
        self._refused = 0
        self._inbox: deque[tuple[int, JsonMessage]] = deque()
        self._received_bytes = 0  # written by the connection thread
        self._consumed_bytes = 0  # written by the driver's thread
        self._inbox_ready = Wakeup()
        self._doors: dict[str, Callable[[socket.socket, dict[str, Any]], None]] = {}
        self._connection_thread = ConnectionThread(on_message=self._on_message, inbox_full=self._inbox_full)
        self._listener = AuthenticatedListener([listener], token, self._on_connect, tls_contexts=tls_contexts)

    def open_door(self, role: str, serve: Callable[[socket.socket, dict[str, Any]], None]) -> None:
        """Let `serve(sock, hello)` have the connections of this role, each in a thread of its own. It owns the socket;
        a LinkError counts the caller as refused."""
        self._doors[role] = serve

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return format_address(self.host, self.port)

    @property
    def refused(self) -> int:
        """Refused connections: unknown clients, and clients that broke the protocol."""
        return self._listener.refused + self._refused

    def fileno(self) -> int:
        """For select(): readable when `receive` has messages."""
        return self._inbox_ready.fileno()

    def receive(self) -> list[ControlMessage]:
        self._inbox_ready.clear()
        was_full = self._inbox_full()
        found = []
        while self._inbox:
            number, row = self._inbox.popleft()
            self._consumed_bytes += row.size_bytes + _MESSAGE_OVERHEAD_BYTES
            if row.kind == "here":
                self._open_connections.add(number)
            if number in self._open_connections:
                found.append(ControlMessage(number, row.kind, row.fields))
            if row.kind == "lost":
                if number in self._open_connections and row.fields["refused"]:
                    self._note_refusal(number, "", row.fields["why"])
                self._forget(number)
        if was_full:
            self._connection_thread.resume_reading()
        return found

    def send(self, connection: int, /, kind: str, **fields: Any) -> None:
        """Send a message. Ignored if the connection is closed. A peer that does not read for long is disconnected."""
        self._connection_thread.send([connection], encode_message(kind, fields))

    def publish_view(self, view: View, connections: Iterable[int]) -> None:
        self._connection_thread.send(connections, encode_message("view", {"view": view.model_dump(mode="json")}))

    def publish_chunk_table(self, table: ChunkTable, connections: Iterable[int]) -> None:
        self._connection_thread.send(connections, encode_message("table", {"table": table.model_dump(mode="json")}))

    def silence_s(self, connection: int) -> float:
        """Seconds since the peer was last heard, or infinity if it is gone. Time in which the driver did not listen
        does not count."""
        return self._connection_thread.silence_s(connection)

    def drop(self, connection: int) -> None:
        """Close the connection. No more messages of it are received, not even "lost"."""
        self._forget(connection)
        self._connection_thread.drop(connection)

    def refuse(self, connection: int, why: str, *, name: str = "") -> None:
        """`drop` a caller that said what it may not say. It is counted; see `take_refusals`."""
        self._note_refusal(connection, name, why)
        self.drop(connection)

    def take_refusals(self) -> list[Refusal]:
        """The newest refusals since the last call, at most `MAX_KEPT_REFUSALS`."""
        found = list(self._refusals)
        self._refusals.clear()
        return found

    def key(self, name: str) -> str:
        """The key of a seat's name, see `driver_address`."""
        return make_key(self.secret, name)

    def holds_key(self, name: str, key: str) -> bool:
        """Whether a caller proved that the driver gave it this seat."""
        return hmac.compare_digest(self.key(name).encode(), key.encode("utf-8", "replace"))

    def close(self) -> None:
        """Send the queued messages, then close. Peers that do not read get a second."""
        self._listener.close()
        self._connection_thread.close()
        self._inbox_ready.close()

    def _on_connect(self, sock: socket.socket, hello: bytes) -> None:
        greeting, address = decode_object(hello), format_address(*sock.getpeername()[:2])
        if door := self._doors.get(str(greeting.get("role"))):
            door(sock, greeting)
            return
        number = next(self._numbers)
        self._addresses[number] = address
        self._connection_thread.add(number, sock, greeting, len(hello))

    def _note_refusal(self, connection: int, name: str, why: str) -> None:
        self._refused += 1
        self._refusals.append(Refusal(printable(name), self._addresses.get(connection, ""), printable(why)))

    def _forget(self, connection: int) -> None:
        self._open_connections.discard(connection)
        self._addresses.pop(connection, None)

    def _on_message(self, number: int, message: JsonMessage) -> None:
        self._received_bytes += message.size_bytes + _MESSAGE_OVERHEAD_BYTES
        self._inbox.append((number, message))
        self._inbox_ready.notify()

    def _inbox_full(self) -> bool:
        return self._received_bytes - self._consumed_bytes > MAX_INBOX_BYTES


def _listening_socket(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        try:
            return _bind(family, (address[0], port, *address[2:]))
        except OSError as failure:
            if failure.errno != errno.EADDRINUSE or not port:
                raise
            return _bind(family, address)
    except (OSError, OverflowError, UnicodeError) as failure:
        raise error("SH611", f"cannot listen on {host} port {port}: {failure}") from failure


def _bind(family: socket.AddressFamily, address: tuple[Any, ...]) -> socket.socket:
    """Bind with SO_REUSEADDR, so that a restarted driver gets its port back at once."""
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, backlog=128, dualstack_ipv6=both)
