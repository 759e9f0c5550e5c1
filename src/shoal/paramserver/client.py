"""The worker's end: errands to all servers at once, which survive the death of some of them.

An errand has something to ask for each piece and wants an answer for each. Whatever has no answer yet when the table
changes is asked again, of whoever is in charge then. Nothing here knows of tensors.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.collectives.transport.endpoint import connect_to_peer
from shoal.collectives.transport.shared_memory import ByteBuffer, SharedMemory, attach
from shoal.net.errors import LinkError
from shoal.net.tls import TlsContexts
from shoal.net.wakeup import Wakeup
from shoal.paramserver import protocol
from shoal.paramserver.connection import PayloadTarget, ServerConnection
from shoal.paramserver.protocol import ServerFrame, decode_json, encode_json
from shoal.spec.chunk_table import ChunkTable, ParameterPiece, build_pieces

RECONNECT_INTERVAL_S = 0.05


class RefusedError(LinkError):
    """A server says no, and would say it again."""


class StaleViewError(LinkError):
    """Others have gone on to a later view."""


@dataclass
class ServerSession:
    """A server as a worker knows it. Its values lie in `memory`, where that is shared."""

    connection: ServerConnection
    status: dict[str, Any] | None = None
    clocks: list[int] | None = None
    memory: ByteBuffer | None = None
    entered_at: tuple[int, int] = (0, 0)
    hyper: bytes = b""

    def send_hyperparameters(self, frame: ServerFrame, encoded: bytes) -> None:
        """If it does not know them yet."""
        if encoded != self.hyper:
            self.connection.send(frame._replace(kind=protocol.HYPER), encoded)
            self.hyper = encoded


class Request(Protocol):
    def skipped_chunks(self, chunks: int) -> list[bool]:
        """Which of so many chunks nothing is wanted of."""

    def send(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> None:
        """Send a request. `frame` names table, piece, view and seat."""

    def buffer_for(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> PayloadTarget:
        """Where the answer goes."""

    def handle_reply(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> bool:
        """The answer is there; False if another one must follow."""

    def follow_up(self) -> Callable[[ServerSession, ServerFrame], None] | None:
        """Every piece that is not done got its first answer: what to tell each server now."""


@dataclass
class ViewEntry:
    """How to enter a view: what to say, the memory to share, and, for the one who leads, what to do when servers do
    not hold what they should: an errand, or None if all is well."""

    view: int
    hello: Mapping[str, Any]
    shared_memory: SharedMemory | None = None
    plan_restore: Callable[[list[dict[str, Any]]], Request | None] | None = None
    restore_done: bool = field(default=False, init=False)
    ready: bool = field(default=False, init=False)


class ParameterServerClient:
    """Used by one thread; `learn` and `wake` may come from any."""

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
        self._newest_chunk_table: ChunkTable | None = None
        self._wakeup = Wakeup()
        self._servers: dict[int, ServerSession] = {}
        self._entry: ViewEntry | None = None
        self._pieces: list[ParameterPiece] = []
        self._primaries: list[int] = []  # whom the table says to ask
        self._min_chunk_table_number = 0  # no table before this one is worth asking by
        self._request: Request | None = None
        self._outstanding: dict[int, bool] = {}  # pieces that were asked for; True: the first answer is there
        self._done_chunks: list[bool] = []  # chunks
        self._followed_up = False

    # ---- from any thread ----

    def set_chunk_table(self, chunk_table: ChunkTable) -> None:
        if self._newest_chunk_table is None or chunk_table.number > self._newest_chunk_table.number:
            self._newest_chunk_table = chunk_table
        self._wakeup.notify()

    def wake(self) -> None:
        """Look whether it was aborted."""
        self._wakeup.notify()

    # ---- views ----

    @property
    def _view(self) -> int:
        """0: it only looks on, and may pull."""
        return self._entry.view if self._entry else 0

    def enter(self, entry: ViewEntry) -> list[int]:
        """Be let in by all servers; returns the step at which each lane goes on, where lanes push for themselves."""
        self._entry = entry
        self._run_until(lambda: self.chunk_table is not None)
        while not self._enter_with_table(entry, self._chunk_table_number):
            pass
        entry.ready = True
        clocks = [server.clocks for server in self._servers.values() if server.clocks]
        return [min(column) for column in zip(*clocks, strict=True)]

    def _enter_with_table(self, entry: ViewEntry, chunk_table_number: int) -> bool:
        """By this table. False if there was another one before all had let us in."""
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
        self, entry: ViewEntry, plan_restore: Callable[[list[dict[str, Any]]], Request | None]
    ) -> None:
        request = plan_restore([server.status for server in self._servers.values() if server.status is not None])
        if request is not None:
            self.run(request)
        entry.restore_done = True  # others may push from now on: what servers hold must not be set again
        for server in self._servers.values():
            server.connection.send(
                ServerFrame(protocol.READY, self._chunk_table_number, view=entry.view, seat=self.seat)
            )

    @property
    def _chunk_table_number(self) -> int:
        return self.chunk_table.number if self.chunk_table else 0

    def _all_primaries(self, chunk_table_number: int, predicate: Callable[[ServerSession], bool]) -> bool:
        """Does it hold for all servers of this table? True also when there is another table by now."""
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
        words = {**entry.hello, "lead": leads, "ready": entry.ready or entry.restore_done}
        connection.send(
            ServerFrame(protocol.ENTER, self._chunk_table_number, view=entry.view, seat=self.seat), encode_json(words)
        )

    # ---- errands ----

    def run(self, request: Request) -> None:
        """Until each piece has its last answer. LinkError when it is aborted, RefusedError when a server says no."""
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
            if tell := self._request.follow_up():
                for seat in {piece.primary for piece in waiting}:
                    tell(self._servers[seat], self._request_frame(0))
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
        """An end to all this, or another table? Then whoever is in it is called."""
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
                    self._send_enter(server)  # it may have been too far ahead to let us in by the last table
        if self.chunk_table is not None:
            for seat in self._primaries:
                if seat not in self._servers:
                    self._connect(seat, self.chunk_table)

    def _connect(self, seat: int, chunk_table: ChunkTable) -> None:
        try:
            sock = connect_to_peer(
                chunk_table.addresses[seat],
                self._token,
                purpose="push",
                seat=self.seat,
                view=self._view,
                tls_contexts=self._tls_contexts,
            )
        except LinkError:
            return
        self._servers[seat] = ServerSession(ServerConnection(sock, seat))
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
        began = time.perf_counter()
        happened = poll.poll(1000 * RECONNECT_INTERVAL_S if missing else None)
        if not sending:
            self.waited_s += time.perf_counter() - began
        for fd, _ in happened:
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
        """What it owes is asked for again, of it or of another."""
        server = self._servers.pop(seat)
        self.closed_connections_bytes += server.connection.bytes_out
        server.connection.close()
        for piece in self._pieces:
            if piece.primary == seat:
                self._outstanding.pop(piece.index, None)
        self._followed_up = False

    # ---- answers ----

    def buffer_for(self, connection: ServerConnection, frame: ServerFrame) -> PayloadTarget:
        if frame.kind in (protocol.STALE, protocol.REFUSED, protocol.STATUS, protocol.ENTERED):
            if frame.size > protocol.MAX_JSON_BYTES:
                raise LinkError(f"says {frame.size} bytes")
            return connection.allocate_payload(frame.size)
        piece = self._outstanding_piece(frame)
        if piece is None or self._request is None:
            return "skip"
        return self._request.buffer_for(self._servers[connection.peer], piece, frame)

    def _outstanding_piece(self, frame: ServerFrame) -> ParameterPiece | None:
        """The piece that this answers, if that is still wanted."""
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
            server.status = decode_json(connection.payload)
        elif frame.kind == protocol.ENTERED:
            self._handle_entered(server, frame)
        elif (piece := self._outstanding_piece(frame)) is not None and self._request is not None:
            self._outstanding[piece.index] = True
            if self._request.handle_reply(server, piece, frame):
                self._done_chunks[piece.first_chunk : piece.end_chunk] = [True] * (piece.end_chunk - piece.first_chunk)

    def _handle_entered(self, server: ServerSession, frame: ServerFrame) -> None:
        if server.connection.same_host:
            server.memory = attach(server.connection.take_fd(), frame.number)
        if self._entry is not None and frame.view == self._entry.view:
            server.clocks = [int(clock) for clock in decode_json(server.connection.payload).get("clocks", [])]

    # ---- the end ----

    @property
    def remote_bytes(self) -> int:
        """Of the stretch, what lies on servers that share no memory with us."""
        far = {seat for seat, server in self._servers.items() if not server.connection.same_host}
        return sum(piece.stop - piece.start for piece in self._pieces if piece.primary in far)

    @property
    def sent_bytes(self) -> int:
        return self.closed_connections_bytes + sum(server.connection.bytes_out for server in self._servers.values())

    @property
    def moved_bytes(self) -> int:
        """Sent to and received from the servers that are connected now. From any thread."""
        return sum(server.connection.bytes_in + server.connection.bytes_out for server in list(self._servers.values()))

    def disconnect_all(self) -> None:
        """Whoever gave up waiting must not take a late answer for that to another question."""
        for seat in list(self._servers):
            self._disconnect(seat)

    def close(self) -> None:
        self.disconnect_all()
        self._wakeup.close()
