"""The client side: requests to all servers at once, which survive the death of some of them.

A request sends a message for each piece and expects a reply for each. When the chunk table changes, every piece without
a reply is requested again from its new primary. Nothing here depends on tensors.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.collectives.transport.endpoint import connect_to_peer
from shoal.collectives.transport.greeting import Caller, Greeting
from shoal.collectives.transport.shared_memory import ByteBuffer, SharedMemory, attach
from shoal.net.errors import LinkError
from shoal.net.tls import TlsContexts
from shoal.net.wakeup import Wakeup
from shoal.paramserver import protocol
from shoal.paramserver.connection import PayloadTarget, ServerConnection
from shoal.paramserver.messages import Admission, ServerStatus, parse_message
from shoal.paramserver.protocol import ServerFrame, encode_json
from shoal.spec.chunk_table import ChunkTable, ParameterPiece, build_pieces

RECONNECT_INTERVAL_S = 0.05
"""Seconds between attempts to connect to a server."""


class RefusedError(LinkError):
    """A server refused a request for good: a retry would fail too."""


class StaleViewError(LinkError):
    """The servers are in a later view."""


@dataclass
class ServerSession:
    """A client's connection to one server. `memory` has the server's parameters, if it shares them."""

    connection: ServerConnection
    status: ServerStatus | None = None
    clocks: list[int] | None = None
    memory: ByteBuffer | None = None
    entered_at: tuple[int, int] = (0, 0)
    hyper: bytes = b""

    def send_hyperparameters(self, frame: ServerFrame, encoded: bytes) -> None:
        """Send the hyperparameters, unless the server already has them."""
        if encoded != self.hyper:
            self.connection.send(frame._replace(kind=protocol.HYPER), encoded)
            self.hyper = encoded


class Request(Protocol):
    def skipped_chunks(self, chunks: int) -> list[bool]:
        """For each of `chunks` chunks, whether the request skips it."""

    def send(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> None:
        """Send the request for a piece. `frame` has table, piece, view and seat."""

    def buffer_for(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> PayloadTarget:
        """The buffer for the reply's payload."""

    def handle_reply(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> bool:
        """Handle a complete reply; False if another reply must follow."""

    def follow_up(self) -> Callable[[ServerSession, ServerFrame], None] | None:
        """Called when every unfinished piece has its first reply: what to send to each server now."""


@dataclass
class ViewEntry:
    """How to enter a view: the greeting, the memory to share, and for the leader `plan_restore`: it gets the servers'
    status and returns the request that restores their state, or None if the state is right."""

    view: int
    hello: Mapping[str, Any]
    shared_memory: SharedMemory | None = None
    plan_restore: Callable[[list[ServerStatus]], Request | None] | None = None
    restore_done: bool = field(default=False, init=False)
    ready: bool = field(default=False, init=False)


class ParameterServerClient:
    """Used by one thread; `set_chunk_table` and `wake` may come from any thread."""

    def __init__(
        self, seat: int, token: str, *, aborted: Callable[[], bool], tls_contexts: TlsContexts | None = None
    ) -> None:
        self.seat = seat
        self.closed_connections_bytes = 0
        self.waited_s = 0.0
        self.chunk_table: ChunkTable | None = None
        self._token = token
        self._tls_contexts = tls_contexts
        self._aborted = aborted
        self._caller = Caller()
        self._newest_chunk_table: ChunkTable | None = None
        self._wakeup = Wakeup()
        self._servers: dict[int, ServerSession] = {}
        self._entry: ViewEntry | None = None
        self._pieces: list[ParameterPiece] = []
        self._primaries: list[int] = []  # seats of the table's primary servers
        self._min_chunk_table_number = 0  # servers refuse requests under an older table
        self._request: Request | None = None
        self._outstanding: dict[int, bool] = {}  # requested pieces; True: the first reply has arrived
        self._done_chunks: list[bool] = []
        self._followed_up = False

    # ---- from any thread ----

    def set_chunk_table(self, chunk_table: ChunkTable) -> None:
        if self._newest_chunk_table is None or chunk_table.number > self._newest_chunk_table.number:
            self._newest_chunk_table = chunk_table
        self._wakeup.notify()

    def wake(self) -> None:
        """Make the waiting thread check `aborted`."""
        self._wakeup.notify()

    # ---- views ----

    @property
    def _view(self) -> int:
        """0 before the first view: the client may only pull."""
        return self._entry.view if self._entry else 0

    def enter(self, entry: ViewEntry) -> list[int]:
        """Enter the view on all servers. Returns the next step of each lane if lanes push by themselves."""
        self._entry = entry
        self._run_until(lambda: self.chunk_table is not None)
        while not self._enter_with_table(entry, self._chunk_table_number):
            pass
        entry.ready = True
        clocks = [server.clocks for server in self._servers.values() if server.clocks]
        if len(set(map(len, clocks))) > 1:
            raise LinkError("the servers report clocks of different numbers of lanes")
        return [min(column) for column in zip(*clocks, strict=True)]

    def _enter_with_table(self, entry: ViewEntry, chunk_table_number: int) -> bool:
        """Enter under this table. False if a newer table came before all servers had admitted this client."""
        for server in self._servers.values():
            self._send_enter(server)
        if entry.plan_restore and not entry.restore_done:
            self._run_until(
                lambda: self._all_primaries(chunk_table_number, lambda s: s.status is not None or s.clocks is not None)
            )
            if self._chunk_table_number != chunk_table_number:
                return False
            self._restore_and_mark_ready(entry, entry.plan_restore)
        self._run_until(lambda: self._all_primaries(chunk_table_number, lambda s: s.clocks is not None))
        return self._chunk_table_number == chunk_table_number

    def _restore_and_mark_ready(
        self, entry: ViewEntry, plan_restore: Callable[[list[ServerStatus]], Request | None]
    ) -> None:
        request = plan_restore([server.status for server in self._servers.values() if server.status is not None])
        if request is not None:
            self.run(request)
        entry.restore_done = True  # other clients may push from now on, so the state must not be set again
        for server in self._servers.values():
            server.connection.send(
                ServerFrame(protocol.READY, self._chunk_table_number, view=entry.view, seat=self.seat)
            )

    @property
    def _chunk_table_number(self) -> int:
        return self.chunk_table.number if self.chunk_table else 0

    def _all_primaries(self, chunk_table_number: int, predicate: Callable[[ServerSession], bool]) -> bool:
        """Whether the predicate holds for all primaries of this table. Also True if the table has changed."""
        if self._chunk_table_number != chunk_table_number:
            return True
        return all(seat in self._servers and predicate(self._servers[seat]) for seat in self._primaries)

    def _send_enter(self, server: ServerSession) -> None:
        entry, connection = self._entry, server.connection
        assert entry is not None
        if server.entered_at == (entry.view, self._chunk_table_number):
            return
        server.entered_at = (entry.view, self._chunk_table_number)
        server.status = server.clocks = None
        if entry.shared_memory is not None and connection.same_host:
            connection.send(
                ServerFrame(protocol.SHARE_MEMORY, self._chunk_table_number, number=entry.shared_memory.size_bytes),
                fd=entry.shared_memory.fd,
            )
        leads = entry.plan_restore is not None and not entry.restore_done
        fields = {**entry.hello, "lead": leads, "ready": entry.ready or entry.restore_done}
        connection.send(
            ServerFrame(protocol.ENTER, self._chunk_table_number, view=entry.view, seat=self.seat), encode_json(fields)
        )

    # ---- requests ----

    def run(self, request: Request) -> None:
        """Run a request until each piece has its last reply. LinkError if aborted, RefusedError if a server refuses."""
        self._request, self._outstanding, self._done_chunks, self._followed_up = request, {}, [], False
        try:
            self._run_until(self._advance_request)
        finally:
            self._request = None

    def _advance_request(self) -> bool:
        if self.chunk_table is None or self._request is None:
            return False
        self._done_chunks = self._done_chunks or self._request.skipped_chunks(len(self.chunk_table.chains))
        waiting = [piece for piece in self._pieces if not all(self._done_chunks[piece.first_chunk : piece.end_chunk])]
        if self._chunk_table_number >= self._min_chunk_table_number:
            for piece in waiting:
                if piece.index not in self._outstanding and (server := self._servers.get(piece.primary)) is not None:
                    self._outstanding[piece.index] = False
                    self._request.send(server, piece, self._request_frame(piece.index))
        if waiting and not self._followed_up and all(self._outstanding.get(piece.index) for piece in waiting):
            self._followed_up = True
            if send_to := self._request.follow_up():
                for seat in {piece.primary for piece in waiting}:
                    send_to(self._servers[seat], self._request_frame(0))
        return not waiting

    def _request_frame(self, piece: int) -> ServerFrame:
        return ServerFrame(0, self._chunk_table_number, piece, self._view, self.seat)

    # ---- waiting ----

    def _run_until(self, done: Callable[[], bool]) -> None:
        while True:
            self._adopt_newest_table()
            if done():
                self._flush()
                return
            self._flush()
            self._poll()

    def _adopt_newest_table(self) -> None:
        """Check for an abort and for a newer table, and connect to the table's primaries."""
        self._wakeup.clear()
        if self._aborted():
            raise LinkError("aborted")
        newest = self._newest_chunk_table
        if newest is not None and newest.number > self._chunk_table_number:
            self.chunk_table, self._pieces, self._primaries = newest, build_pieces(newest), newest.primaries()
            self._outstanding, self._followed_up = {}, False
            for seat in self._servers.keys() - set(self._primaries):
                self._disconnect(seat)
            for server in self._servers.values():
                if self._entry is not None and server.clocks is None:
                    self._send_enter(server)  # a server that already had the newer table did not admit this client
        if self.chunk_table is not None:
            for seat in self._primaries:
                if seat not in self._servers:
                    self._connect(seat, self.chunk_table)

    def _connect(self, seat: int, chunk_table: ChunkTable) -> None:
        try:
            sock = connect_to_peer(
                chunk_table.addresses[seat],
                self._token,
                Greeting(purpose="push", seat=self.seat, view=self._view),
                caller=self._caller,
                tls_contexts=self._tls_contexts,
            )
        except LinkError:
            return
        self._servers[seat] = ServerSession(ServerConnection(sock, seat, accepts=protocol.SERVER_KINDS))
        if self._entry is not None:
            self._send_enter(self._servers[seat])

    def _flush(self) -> None:
        for seat, server in list(self._servers.items()):
            try:
                server.connection.flush()
            except LinkError:
                self._disconnect(seat)

    def _poll(self) -> None:
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        seats_by_fd = {server.connection.fileno(): seat for seat, server in self._servers.items()}
        for server in self._servers.values():
            poll.register(server.connection, server.connection.poll_events)
        missing = len(seats_by_fd) < len(self._primaries)
        sending = any(server.connection.unsent_buffers for server in self._servers.values())
        start = time.perf_counter()
        ready = poll.poll(1000 * RECONNECT_INTERVAL_S if missing else None)
        if not sending:
            self.waited_s += time.perf_counter() - start
        for fd, _ in ready:
            if fd in seats_by_fd and seats_by_fd[fd] in self._servers:
                self._receive_from(seats_by_fd[fd])

    def _receive_from(self, seat: int) -> None:
        try:
            self._servers[seat].connection.receive(self)
        except (RefusedError, StaleViewError):
            raise
        except LinkError:
            self._disconnect(seat)

    def _disconnect(self, seat: int) -> None:
        """Close the connection. Its outstanding pieces are requested again, from this server or another."""
        server = self._servers.pop(seat)
        self.closed_connections_bytes += server.connection.bytes_out
        server.connection.close()
        for piece in self._pieces:
            if piece.primary == seat:
                self._outstanding.pop(piece.index, None)
        self._followed_up = False

    # ---- replies ----

    def buffer_for(self, connection: ServerConnection, frame: ServerFrame) -> PayloadTarget:
        if frame.kind in (protocol.STALE, protocol.REFUSED, protocol.STATUS, protocol.ENTERED):
            if frame.size > protocol.MAX_JSON_BYTES:
                raise LinkError(f"sent {frame.size} bytes of JSON, and {protocol.MAX_JSON_BYTES} is the most")
            return connection.allocate_payload(frame.size)
        piece = self._outstanding_piece(frame)
        if piece is None or self._request is None:
            return "skip"
        return self._request.buffer_for(self._servers[connection.peer], piece, frame)

    def _outstanding_piece(self, frame: ServerFrame) -> ParameterPiece | None:
        """The piece that this frame replies to, if it is still outstanding."""
        if (frame.chunk_table_number, frame.view) != (
            self._chunk_table_number,
            self._view,
        ) or frame.piece not in self._outstanding:
            return None
        return self._pieces[frame.piece]

    def handle_frame(self, connection: ServerConnection, frame: ServerFrame) -> None:
        server = self._servers[connection.peer]
        if frame.kind == protocol.STALE:
            self._min_chunk_table_number = max(self._min_chunk_table_number, frame.chunk_table_number)
        elif frame.kind == protocol.REFUSED:
            passed = self._entry is not None and frame.view > self._entry.view
            raise (StaleViewError if passed else RefusedError)(bytes(connection.payload).decode(errors="replace"))
        elif frame.kind == protocol.STATUS:
            server.status = parse_message(ServerStatus, connection.payload)
        elif frame.kind == protocol.ENTERED:
            self._handle_entered(server, frame)
        elif (piece := self._outstanding_piece(frame)) is not None and self._request is not None:
            self._outstanding[piece.index] = True
            if self._request.handle_reply(server, piece, frame):
                self._done_chunks[piece.first_chunk : piece.end_chunk] = [True] * (piece.end_chunk - piece.first_chunk)

    def _handle_entered(self, server: ServerSession, frame: ServerFrame) -> None:
        admission = parse_message(Admission, server.connection.payload)
        if server.connection.same_host:
            fd = server.connection.take_fd()
            if self.chunk_table is None or frame.number < self.chunk_table.cuts[-1]:
                os.close(fd)
                raise LinkError(f"shares {frame.number} bytes, which are not all parameters")
            server.memory = attach(fd, frame.number)
        if self._entry is not None and frame.view == self._entry.view:
            server.clocks = admission.clocks

    # ---- bytes, closing ----

    @property
    def remote_bytes(self) -> int:
        """Bytes of the flat buffer on servers of other hosts."""
        remote = {seat for seat, server in self._servers.items() if not server.connection.same_host}
        return sum(piece.stop - piece.start for piece in self._pieces if piece.primary in remote)

    @property
    def sent_bytes(self) -> int:
        return self.closed_connections_bytes + sum(server.connection.bytes_out for server in self._servers.values())

    @property
    def moved_bytes(self) -> int:
        """Bytes sent to and received from the connected servers. Called from any thread."""
        return sum(server.connection.bytes_in + server.connection.bytes_out for server in list(self._servers.values()))

    def disconnect_all(self) -> None:
        """Disconnect after an aborted request, so that no late reply is mistaken for one to another request."""
        for seat in list(self._servers):
            self._disconnect(seat)

    def close(self) -> None:
        self.disconnect_all()
        self._wakeup.close()
