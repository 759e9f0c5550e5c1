"""The driver's end of the control channel: who calls, what they say, and views and tables on their way down.

Rows of JSON over TCP, after a handshake in which both sides prove that they know the run's token.
"""

from __future__ import annotations

import errno
import socket
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from shoal.errors import error
from shoal.fleet.switchboard import Switchboard
from shoal.spec.table import Table
from shoal.spec.view import View
from shoal.wire.bell import Bell
from shoal.wire.door import Door
from shoal.wire.rows import Row, pack, unpack_object

MOST_UNTAKEN_BYTES = 64 << 20
_ROW_ITSELF_BYTES = 256


@dataclass(frozen=True)
class Said:
    """What came up from a caller. The first `kind` is "here" with the hello, the last, exactly once, "lost"; a number
    is never used again."""

    caller: int
    kind: str
    fields: dict[str, Any]


class Control:
    """Made and used by one thread, the driver's; none of its methods but `close` waits for anybody. A thread of its
    own talks to the callers meanwhile, so that they know that the driver lives when it is busy."""

    def __init__(self, token: str, *, listen: str = "127.0.0.1", port: int = 0) -> None:
        """If somebody else has the port, another is taken: look at `port`."""
        listener = _listener(listen, port)
        self.host: str
        self.port: int
        self.host, self.port = listener.getsockname()[:2]
        self._known: set[int] = set()
        self._came: deque[tuple[int, Row]] = deque()
        self._came_bytes = 0  # counted by the board's thread
        self._taken_bytes = 0  # counted by the driver's
        self._news = Bell()
        self._board = Switchboard(tell=self._tell, full=self._full)
        self._door = Door([listener], token, self._welcome)

    @property
    def refused(self) -> int:
        """Strangers, and callers that broke the language."""
        return self._door.refused + self._board.garbled

    def fileno(self) -> int:
        """For select(): readable when there is something to take."""
        return self._news.fileno()

    def take(self) -> list[Said]:
        self._news.clear()
        was_full = self._full()
        found = []
        while self._came:
            number, row = self._came.popleft()
            self._taken_bytes += row.size_bytes + _ROW_ITSELF_BYTES
            if row.kind == "here":
                self._known.add(number)
            if number in self._known:
                found.append(Said(number, row.kind, row.fields))
            if row.kind == "lost":
                self._known.discard(number)
        if was_full:
            self._board.look_again()
        return found

    def send(self, caller: int, /, kind: str, **fields: Any) -> None:
        """To a caller that is gone: nothing happens. One that does not read what it is sent is lost after a while."""
        self._board.send([caller], pack(kind, fields))

    def publish(self, view: View, callers: Iterable[int]) -> None:
        self._board.send(callers, pack("view", {"view": view.model_dump(mode="json")}))

    def publish_table(self, table: Table, callers: Iterable[int]) -> None:
        self._board.send(callers, pack("table", {"table": table.model_dump(mode="json")}))

    def heard_s(self, caller: int) -> float:
        """Seconds since this caller was last heard, counting only those in which we listened; infinite if gone."""
        return self._board.heard_s(caller)

    def drop(self, caller: int) -> None:
        """Close it; nothing more is told of it, not even that it is lost."""
        self._known.discard(caller)
        self._board.drop(caller)

    def close(self) -> None:
        """What was sent goes out first; callers that do not read are given a second."""
        self._door.close()
        self._board.close()
        self._news.close()

    def _welcome(self, sock: socket.socket, hello: bytes) -> None:
        self._board.add(sock, unpack_object(hello), len(hello))

    def _tell(self, number: int, row: Row) -> None:
        self._came_bytes += row.size_bytes + _ROW_ITSELF_BYTES
        self._came.append((number, row))
        self._news.ring()

    def _full(self) -> bool:
        return self._came_bytes - self._taken_bytes > MOST_UNTAKEN_BYTES


def _listener(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        try:
            return _bound(family, (address[0], port, *address[2:]))
        except OSError as failure:
            if failure.errno != errno.EADDRINUSE or not port:
                raise
            return _bound(family, address)
    except (OSError, OverflowError, UnicodeError) as failure:
        raise error("SH611", f"cannot listen on {host} port {port}: {failure}") from failure


def _bound(family: socket.AddressFamily, address: tuple[Any, ...]) -> socket.socket:
    """SO_REUSEADDR is set: a driver that starts again gets its port back at once."""
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, backlog=128, dualstack_ipv6=both)
