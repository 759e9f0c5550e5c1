"""A server's one thread: it waits for sockets and passes frames to the parameter server."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from shoal.collectives.transport.endpoint import Endpoint, connect_to_peer
from shoal.collectives.transport.greeting import Caller, Greeting
from shoal.net.address import ANY_PORT
from shoal.net.errors import LinkError
from shoal.net.tls import TlsContexts
from shoal.net.wakeup import Wakeup
from shoal.paramserver import protocol
from shoal.paramserver.connection import ServerConnection
from shoal.paramserver.server import ParameterServer, ServerConfig
from shoal.spec.chunk_table import ChunkTable
from shoal.spec.view import View

RECONNECT_INTERVAL_S = 0.05
FRAMES_PER_RECEIVE = 4
"""Frames read from one connection before the others get their turn and replies are sent: a worker receives replies
while it still pushes."""


MAX_CONNECTIONS = 1024


class ServerLoop:
    """`set_chunk_table`, `set_view`, `ignore_lanes` and `stop` may be called by any thread. `on_filled(seat, table)` is
    called by the thread of `run`."""

    def __init__(
        self,
        seat: int,
        token: str,
        config: ServerConfig,
        *,
        bind: str,
        ports: range = ANY_PORT,
        on_filled: Callable[[int, int], None] = lambda s, t: None,
        tls_contexts: TlsContexts | None = None,
    ) -> None:
        self.server = ParameterServer(
            seat, config, connect_to=self._connect_in_thread, on_filled=on_filled, run_in_thread=self._run_in_thread
        )
        self._token = token
        self._caller = Caller()
        self._wakeup = Wakeup()
        self._callbacks: deque[Callable[[], None]] = deque()
        self._stopped = threading.Event()
        self._poll = select.poll()
        self._connections: dict[int, ServerConnection] = {}
        self.bytes_in = 0
        self.bytes_out = 0
        self.failures = 0
        self.refused = 0
        self.endpoint = Endpoint(
            token,
            bind=bind,
            ports=ports,
            services={"push": self._accept, "chain": self._accept},
            keep_open=("push", "chain"),
            joins_views=False,
            tls_contexts=tls_contexts,
        )

    # ---- from other threads ----

    def set_chunk_table(self, chunk_table: ChunkTable) -> None:
        self._call_soon(lambda: self._set_chunk_table(chunk_table))

    def set_view(self, view: View) -> None:
        """The driver tells a view. Only training views count."""
        if view.carries:
            self._call_soon(lambda: self._set_view(view))

    def ignore_lanes(self, lanes: Iterable[int]) -> None:
        """The staleness bound does not wait for these lanes."""
        self._call_soon(lambda: self.server.ignore_lanes(lanes))

    def stop(self) -> None:
        self._stopped.set()
        self._wakeup.notify()

    def stats(self) -> dict[str, float]:
        """Counters since the start."""
        connections, updates = list(self._connections.values()), self.server.updates.stats
        return {
            "pushes": updates.pushes,
            "repeats": updates.repeats,
            "records": updates.records,
            "bytes_in": self.bytes_in + sum(connection.bytes_in for connection in connections),
            "bytes_out": self.bytes_out + sum(connection.bytes_out for connection in connections),
            "staleness_mean": updates.staleness_sum / updates.records if updates.records else 0.0,
            "staleness_max": updates.staleness_max,
            "failures": self.failures,
            "refused": self.refused + self.endpoint.refused,
            **self.server.sparse_handler.stats(),
        }

    def _run_in_thread(self, act: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Run `act` in its own thread, then `then` with its result or exception in the server's thread."""

        def work() -> None:
            try:
                result = act()
            except Exception as failure:
                result = failure
            self._call_soon(lambda: then(result))

        threading.Thread(target=work, name="shoal-apart", daemon=True).start()

    def _call_soon(self, act: Callable[[], None]) -> None:
        self._callbacks.append(act)
        self._wakeup.notify()

    def _accept(self, sock: socket.socket, greeting: Greeting) -> None:
        self._call_soon(lambda: self._admit(sock, greeting))

    def _connect_in_thread(self, seat: int, chunk_table: ChunkTable) -> None:
        """Connect in its own thread, which retries until it succeeds or the table changes."""
        threading.Thread(target=self._connect, args=(seat, chunk_table), name="shoal-call", daemon=True).start()

    def _connect(self, seat: int, chunk_table: ChunkTable) -> None:
        me, number = self.server.seat, chunk_table.number
        while not self._stopped.is_set() and self.server.chunk_table is chunk_table:
            try:
                sock = connect_to_peer(
                    chunk_table.addresses[seat],
                    self._token,
                    Greeting(purpose="chain", seat=me, view=number),
                    caller=self._caller,
                    tls_contexts=self.endpoint.tls_contexts,
                )
            except LinkError:
                self._stopped.wait(RECONNECT_INTERVAL_S)
            else:
                connection = ServerConnection(sock, seat, accepts=protocol.SUCCESSOR_KINDS)
                self._call_soon(partial(self._add_successor, seat, connection, number))
                return

    # ---- the server's thread ----

    def run(self) -> None:
        """Serve until `stop`."""
        self._poll.register(self._wakeup, select.POLLIN)
        while not self._stopped.is_set():
            for fd, events in self._poll.poll():
                if fd == self._wakeup.fileno():
                    self._wakeup.clear()
                    while self._callbacks:
                        self._callbacks.popleft()()
                elif (connection := self._connections.get(fd)) is not None:
                    self._handle_events(connection, events)
            self.server.replication.send_pending_pieces()
            self._flush_all()
        for connection in self._connections.values():
            connection.close()
        self.endpoint.close()

    def _handle_events(self, connection: ServerConnection, events: int) -> None:
        if not connection.paused:
            self._receive(connection)
        elif events & ~select.POLLOUT:  # paused connections do not poll for input, so the peer is gone
            self._disconnect(connection)

    def _receive(self, connection: ServerConnection) -> None:
        try:
            connection.receive(self.server, max_frames=FRAMES_PER_RECEIVE)
        except LinkError:
            self._disconnect(connection)
        except Exception:  # a malformed message ends its own connection and no other
            if not self.failures:
                traceback.print_exc()
            self.failures += 1
            self._disconnect(connection)

    def _flush_all(self) -> None:
        """Send queued replies and update the polled events."""
        for fd, connection in list(self._connections.items()):
            try:
                connection.flush()
                self._poll.modify(fd, connection.poll_events)
            except (LinkError, OSError, ValueError):
                self._disconnect(connection)

    def _admit(self, sock: socket.socket, greeting: Greeting) -> None:
        """Register a caller's connection in place of its older one. Handshakes end in any order, so an older connection
        may come late; it is refused."""
        same_seat = [
            one for one in self._connections.values() if one.greeting and _seat_key(one.greeting) == _seat_key(greeting)
        ]
        late = any(one.greeting and greeting.is_older_than(one.greeting) for one in same_seat)
        if late or (not same_seat and len(self._connections) >= MAX_CONNECTIONS):
            self.refused += 1
            sock.close()
            return
        is_client = greeting.purpose == "push"
        accepts = protocol.CLIENT_KINDS if is_client else protocol.PREDECESSOR_KINDS
        connection = ServerConnection(sock, greeting.seat, accepts=accepts, backpressure=is_client, greeting=greeting)
        for old in (self.server.add_client if is_client else self.server.replication.add_predecessor)(connection):
            self._disconnect(old)
        self._register(connection)

    def _set_chunk_table(self, chunk_table: ChunkTable) -> None:
        self.server.set_chunk_table(chunk_table)
        self._resume_paused()

    def _set_view(self, view: View) -> None:
        self.server.set_view(view.number, view.carries)
        self._resume_paused()

    def _resume_paused(self) -> None:
        """Go on with frames that waited for a table or a view."""
        for connection in list(self._connections.values()):
            if connection.fileno() < 0:
                self._unregister(connection)
            elif connection.paused:
                connection.paused = False
                self._receive(connection)

    def _add_successor(self, seat: int, connection: ServerConnection, chunk_table_number: int) -> None:
        if self.server.replication.add_successor(seat, connection, chunk_table_number):
            self._register(connection)
        else:
            connection.close()

    def _register(self, connection: ServerConnection) -> None:
        self._connections[connection.fileno()] = connection
        self._poll.register(connection, connection.poll_events)

    def _disconnect(self, connection: ServerConnection) -> None:
        self._unregister(connection)
        self.server.connection_lost(connection)
        connection.close()

    def _unregister(self, connection: ServerConnection) -> None:
        for fd, one in list(self._connections.items()):
            if one is connection:
                del self._connections[fd]
                with contextlib.suppress(KeyError, OSError):
                    self._poll.unregister(fd)
                self.bytes_in += connection.bytes_in
                self.bytes_out += connection.bytes_out


def _seat_key(greeting: Greeting) -> tuple[str, int]:
    """Equal for connections of which the server keeps only the newest."""
    return greeting.purpose, greeting.seat
