"""A server's one thread: it waits for sockets and lets the keeper do what comes."""

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
from shoal.net.errors import LinkError
from shoal.net.tls import TlsContexts
from shoal.net.wakeup import Wakeup
from shoal.paramserver.connection import ServerConnection
from shoal.paramserver.server import ParameterServer, ServerConfig
from shoal.spec.chunk_table import ChunkTable

RECONNECT_INTERVAL_S = 0.05
FRAMES_PER_RECEIVE = 4
"""Of one line, before the others have their turn and answers go out: a worker takes them while it still pushes."""


class ServerLoop:
    """`learn` and `stop` may be called by any thread; `filled(seat, table)` is called by the one that runs."""

    def __init__(
        self,
        seat: int,
        token: str,
        config: ServerConfig,
        *,
        bind: str,
        on_filled: Callable[[int, int], None] = lambda s, t: None,
        tls_contexts: TlsContexts | None = None,
    ) -> None:
        self.server = ParameterServer(
            seat, config, connect_to=self._connect_in_thread, on_filled=on_filled, run_in_thread=self._run_in_thread
        )
        self._token = token
        self._wakeup = Wakeup()
        self._callbacks: deque[Callable[[], None]] = deque()
        self._stopped = threading.Event()
        self._poll = select.poll()
        self._connections: dict[int, ServerConnection] = {}
        self.bytes_in = 0
        self.bytes_out = 0
        self.failures = 0
        self.endpoint = Endpoint(
            token, bind=bind, serve=self._accept, keep_open=("push", "chain"), tls_contexts=tls_contexts
        )

    # ---- from other threads ----

    def set_chunk_table(self, chunk_table: ChunkTable) -> None:
        self._call_soon(lambda: self._set_chunk_table(chunk_table))

    def ignore_lanes(self, lanes: Iterable[int]) -> None:
        """Lanes that nobody waits for."""
        self._call_soon(lambda: self.server.ignore_lanes(lanes))

    def stop(self) -> None:
        self._stopped.set()
        self._wakeup.notify()

    def stats(self) -> dict[str, float]:
        """What it has done so far."""
        connections, seen = list(self._connections.values()), self.server.updates.stats
        return {
            "pushes": seen.pushes,
            "repeats": seen.repeats,
            "records": seen.records,
            "bytes_in": self.bytes_in + sum(line.bytes_in for line in connections),
            "bytes_out": self.bytes_out + sum(line.bytes_out for line in connections),
            "staleness_mean": seen.staleness_sum / seen.records if seen.records else 0.0,
            "staleness_max": seen.staleness_max,
            "failures": self.failures,
            **self.server.sparse_handler.stats(),
        }

    def _run_in_thread(self, act: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """In a thread of its own."""

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

    def _accept(self, sock: socket.socket, hello: dict[str, Any]) -> None:
        asks = hello["purpose"] == "push"
        connection = ServerConnection(sock, hello["seat"], backpressure=asks)
        admit = self.server.add_client if asks else self.server.replication.add_predecessor

        def enter() -> None:
            for old in admit(connection):
                self._disconnect(old)
            self._register(connection)

        self._call_soon(enter)

    def _connect_in_thread(self, seat: int, chunk_table: ChunkTable) -> None:
        """In a thread of its own, for it may take a while, until it works or another table counts."""
        threading.Thread(target=self._connect, args=(seat, chunk_table), name="shoal-call", daemon=True).start()

    def _connect(self, seat: int, chunk_table: ChunkTable) -> None:
        me, number = self.server.seat, chunk_table.number
        while not self._stopped.is_set() and self.server.chunk_table is chunk_table:
            try:
                sock = connect_to_peer(
                    chunk_table.addresses[seat],
                    self._token,
                    purpose="chain",
                    seat=me,
                    view=number,
                    tls_contexts=self.endpoint.tls_contexts,
                )
            except LinkError:
                self._stopped.wait(RECONNECT_INTERVAL_S)
            else:
                self._call_soon(partial(self._add_successor, seat, ServerConnection(sock, seat), number))
                return

    # ---- the one thread ----

    def run(self) -> None:
        """Until it is stopped."""
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
        elif events & ~select.POLLOUT:  # it waits for a table, so that only its end can have happened
            self._disconnect(connection)

    def _receive(self, connection: ServerConnection) -> None:
        try:
            connection.receive(self.server, max_frames=FRAMES_PER_RECEIVE)
        except LinkError:
            self._disconnect(connection)
        except Exception:  # whatever somebody sends costs him his line, and nobody else anything
            if not self.failures:
                traceback.print_exc()
            self.failures += 1
            self._disconnect(connection)

    def _flush_all(self) -> None:
        """What answers there are, and what is wished for next."""
        for fd, connection in list(self._connections.items()):
            try:
                connection.flush()
                self._poll.modify(fd, connection.poll_events)
            except (LinkError, OSError, ValueError):
                self._disconnect(connection)

    def _set_chunk_table(self, chunk_table: ChunkTable) -> None:
        self.server.set_chunk_table(chunk_table)
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
