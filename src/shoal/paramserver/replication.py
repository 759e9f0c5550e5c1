"""A server's place in the chains: what comes from those before it, and what goes on to those after it."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shoal.checkpoint import state_format
from shoal.collectives.transport.shared_memory import ByteBuffer
from shoal.lanes.sparse.rows import RowBundle, pack_rows
from shoal.net.errors import LinkError
from shoal.paramserver import protocol
from shoal.paramserver.connection import PayloadTarget, ServerConnection
from shoal.paramserver.piece_state import PendingAck, PieceState
from shoal.paramserver.protocol import ServerFrame, decode_json, encode_json
from shoal.paramserver.shared_sums import SharedSums
from shoal.paramserver.sparse.row_tables import RowGradients
from shoal.spec.chunk_table import ChunkTable

if TYPE_CHECKING:
    from shoal.paramserver.server import ParameterServer

PIECE_TRANSFER_WINDOW_BUFFERS = 4
"""While so much waits to be sent, no further piece is begun: records must not wait behind them."""


@dataclass
class Successor:
    """The way to a successor. Pieces are set one after the other, between records."""

    connection: ServerConnection
    pieces_to_send: deque[PieceState] = field(default_factory=deque)
    stamps: npt.NDArray[np.int64] | None = None
    hyper: bytes = b""
    filled_reported: bool = False


@dataclass
class Predecessor:
    """The way from a predecessor, and its sums where they can be read."""

    hyper: dict[str, Any] = field(default_factory=dict)
    shared_sums: SharedSums | None = None


class ChainReplication:
    """Belongs to the keeper."""

    def __init__(
        self,
        server: ParameterServer,
        *,
        connect_to: Callable[[int, ChunkTable], None],
        on_filled: Callable[[int, int], None],
    ) -> None:
        self._server = server
        self._connect_to = connect_to
        self._on_filled = on_filled
        self._successors: dict[int, Successor] = {}
        self._predecessors: dict[ServerConnection, Predecessor] = {}

    # ---- lines ----

    def connect_successors(self) -> None:
        """Reach everybody who comes right after this server in some chain."""
        assert self._server.chunk_table is not None
        for seat in sorted(
            {post.successor for post in self._server.piece_states.values() if post.successor is not None}
        ):
            if seat not in self._successors:
                self._connect_to(seat, self._server.chunk_table)

    def add_successor(self, seat: int, connection: ServerConnection, chunk_table_number: int) -> bool:
        """A line to a successor, as it was called for; False if it is not wanted any more."""
        server = self._server
        if server.chunk_table_number != chunk_table_number or seat in self._successors or not server.has_model:
            return False
        self._successors[seat] = Successor(connection)
        fd = server.shared_sums.fd if connection.same_host else -1
        connection.send(
            ServerFrame(protocol.JOIN, chunk_table_number, seat=server.seat, number=fd >= 0),
            encode_json({"model": server.model}),
            fd=fd,
        )
        return True

    def add_predecessor(self, connection: ServerConnection) -> list[ServerConnection]:
        """Somebody who comes before this server. Returns the lines that this one takes the place of."""
        old = [one for one in self._predecessors if one.peer == connection.peer]
        self._predecessors[connection] = Predecessor()
        return old

    def connection_lost(self, connection: ServerConnection) -> None:
        self._predecessors.pop(connection, None)
        for seat, successor in list(self._successors.items()):
            if successor.connection is connection:
                del self._successors[seat]
                for piece_state in self._pieces_forwarded_to(seat):
                    piece_state.synced = False  # it tells what it has when it is reached again
                assert self._server.chunk_table is not None
                self._connect_to(seat, self._server.chunk_table)

    def disconnect_all(self) -> None:
        """Another table: everybody is reached anew."""
        connections = [way.connection for way in self._successors.values()] + list(self._predecessors)
        self._successors, self._predecessors = {}, {}
        for connection in connections:
            connection.close()

    def _pieces_forwarded_to(self, seat: int) -> list[PieceState]:
        return [post for post in self._server.piece_states.values() if post.successor == seat]

    # ---- frames ----

    def buffer_for(self, connection: ServerConnection, frame: ServerFrame) -> PayloadTarget:
        server = self._server
        if connection in self._predecessors:
            return self._buffer_for_predecessor(connection, frame)
        most = 16 * len(server.chunk_table.cuts) if server.chunk_table and frame.kind == protocol.STAMPS else 0
        if frame.kind not in (protocol.STAMPS, protocol.ACK) or frame.size > most:
            raise LinkError(f"answers with {frame.size} bytes of kind {frame.kind}")
        return connection.allocate_payload(frame.size)

    def _buffer_for_predecessor(self, connection: ServerConnection, frame: ServerFrame) -> PayloadTarget:
        server = self._server
        if frame.chunk_table_number > server.chunk_table_number:
            return "hold"
        if frame.chunk_table_number < server.chunk_table_number:
            raise LinkError(f"orders by table {frame.chunk_table_number}, and {server.chunk_table_number} counts")
        if frame.kind in (protocol.SET, protocol.RECORD, protocol.ROWS):
            piece_state = server.piece_state(frame)
            if piece_state.predecessor != connection.peer:
                raise LinkError(f"orders piece {frame.piece}, which it does not come before")
            if frame.kind == protocol.SET:
                return server.buffer_for_state(connection, frame) if frame.size else []
            if frame.kind == protocol.ROWS:
                return server.sparse_handler.buffers_with_rows(connection, frame, [])
            if frame.flags & protocol.EMPTY:
                return []
            there = (
                []
                if frame.flags & protocol.SHARED
                else [self._record_memory(connection, frame).subrange(*piece_state.piece.byte_range).raw]
            )
            return server.sparse_handler.buffers_with_rows(connection, frame, there)
        if frame.kind not in (protocol.JOIN, protocol.HYPER) or frame.size > protocol.MAX_JSON_BYTES:
            raise LinkError(f"sends {frame.size} bytes of kind {frame.kind}")
        return connection.allocate_payload(frame.size)

    def _record_memory(self, connection: ServerConnection, frame: ServerFrame) -> ByteBuffer:
        """Where a record's content lies."""
        server = self._server
        if not server.config.synchronous:
            return server.updates.lane_buffer(frame.seat)
        if not frame.flags & protocol.SHARED:
            return server.chunk_store.sums
        shared = self._predecessors[connection].shared_sums
        if shared is None:
            raise LinkError("shares no memory")
        return shared.memory

    def handle_frame(self, connection: ServerConnection, frame: ServerFrame) -> None:
        if connection in self._predecessors:
            self._handle_predecessor(connection, frame)
        elif frame.kind == protocol.STAMPS:
            self._handle_stamps(connection, frame)
        else:
            self._handle_ack(connection, frame)

    def _handle_predecessor(self, connection: ServerConnection, frame: ServerFrame) -> None:
        server = self._server
        if frame.kind == protocol.JOIN:
            self._handle_join(connection, frame)
        elif frame.kind == protocol.HYPER:
            self._predecessors[connection].hyper = decode_json(connection.payload)
        elif frame.kind == protocol.ROWS:
            server.sparse_handler.stage_rows(server.piece_state(frame), connection)
        else:
            piece_state = self._server.piece_state(frame)
            if frame.kind == protocol.SET:
                server.updates.set_piece(piece_state, connection.payload if frame.size else bytearray())
            else:
                self._apply_forwarded_record(connection, frame, piece_state)
            piece_state.pending_acks.append(PendingAck(connection, frame.number, piece_state.version))
            server.updates.flush_pending(piece_state)

    def _apply_forwarded_record(
        self, connection: ServerConnection, frame: ServerFrame, piece_state: PieceState
    ) -> None:
        """Where the content lies in the predecessor's memory, it may be that of a later step: one that waits for this
        server no longer goes on. What was made of it is worth nothing then."""
        changes, before = (
            self._server.sparse_handler.parse_row_gradients(piece_state, connection),
            self._predecessors[connection],
        )
        record, source = frame._replace(flags=frame.flags & ~protocol.SHARED), self._record_memory(connection, frame)
        shared = before.shared_sums if frame.flags & protocol.SHARED else None
        if shared and shared.sequence(piece_state) != frame.view:
            raise LinkError("has gone on")
        self._server.updates.apply_record(piece_state, record, before.hyper, source, changes)
        if shared and shared.sequence(piece_state) != frame.view:
            self._server.chunk_store.drop(piece_state.piece.first_chunk, piece_state.piece.end_chunk)
            raise LinkError("has gone on")

    def _handle_join(self, connection: ServerConnection, frame: ServerFrame) -> None:
        """Whoever comes before this server wants to know what it has."""
        server = self._server
        server.check_model(decode_json(connection.payload).get("model"))
        if frame.number:
            self._predecessors[connection].shared_sums = SharedSums.attach(
                connection.take_fd(), server.chunk_store.layout
            )
        for piece_state in server.piece_states.values():
            if piece_state.predecessor == connection.peer:
                piece_state.staged_rows = []  # it begins again
        stamps = np.stack([server.chunk_store.term, server.chunk_store.seq])
        connection.send(ServerFrame(protocol.STAMPS, frame.chunk_table_number, seat=server.seat), stamps.data.cast("B"))

    # ---- to the successor ----

    def _handle_stamps(self, connection: ServerConnection, frame: ServerFrame) -> None:
        """What the successor has; the rest follows."""
        server = self._server
        successor = self._successor_on(connection)
        if frame.size != 16 * len(server.chunk_store.term):
            raise LinkError("has another number of chunks")
        successor.stamps = np.frombuffer(connection.payload, dtype=np.int64).reshape(2, -1).copy()
        successor.pieces_to_send.extend(post for post in self._pieces_forwarded_to(connection.peer) if post.valid)
        self.send_pending_pieces()

    def _successor_on(self, connection: ServerConnection) -> Successor:
        successor = self._successors.get(connection.peer)
        if successor is None or successor.connection is not connection:
            raise LinkError("answers where nothing was asked")
        return successor

    def resend(self, piece_state: PieceState, *, changed: bool) -> None:
        """The piece was set here: the successor needs it too, whole if it was changed."""
        successor = self._successors.get(piece_state.successor) if piece_state.successor is not None else None
        if successor is not None and successor.stamps is not None:
            if changed:
                successor.stamps[:, piece_state.piece.first_chunk : piece_state.piece.end_chunk] = -1
            if changed or not piece_state.synced:
                piece_state.synced = False
                if piece_state not in successor.pieces_to_send:
                    successor.pieces_to_send.append(piece_state)
                self.send_pending_pieces()

    def send_pending_pieces(self) -> None:
        """Set what is unset, as far as the lines are free."""
        for successor in self._successors.values():
            while successor.pieces_to_send and successor.connection.unsent_buffers < PIECE_TRANSFER_WINDOW_BUFFERS:
                self._send_piece(successor, successor.pieces_to_send.popleft())

    def _send_piece(self, successor: Successor, piece_state: PieceState) -> None:
        server, piece = self._server, piece_state.piece
        assert successor.stamps is not None
        chunks = slice(piece.first_chunk, piece.end_chunk)
        mine = np.stack([server.chunk_store.term[chunks], server.chunk_store.seq[chunks]])
        same = np.array_equal(mine, successor.stamps[:, chunks])
        empty = not bool(mine[0].all())  # as nobody holds all of it, somebody will set it
        content = (
            b""
            if same or empty
            else state_format.pack_state(server.chunk_store.read_state(piece.first_chunk, piece.end_chunk))
        )
        if content:
            server.sparse_handler.send_rows(successor.connection, piece_state)
        frame = ServerFrame(protocol.SET, server.chunk_table_number, piece.index, number=piece_state.version)
        successor.connection.send(frame, content)
        piece_state.synced = piece_state.requires_ack = True

    def forward(
        self,
        piece_state: PieceState,
        record: ServerFrame,
        hyper: dict[str, Any],
        source: ByteBuffer,
        gradients: RowGradients,
    ) -> None:
        """A record that was applied here."""
        successor = self._successors.get(piece_state.successor) if piece_state.successor is not None else None
        if successor is None or not piece_state.synced:
            return
        table = self._server.chunk_table_number
        words = json.dumps(hyper, separators=(",", ":")).encode()
        if words != successor.hyper:
            successor.connection.send(ServerFrame(protocol.HYPER, table), words)
            successor.hyper = words
        frame = record._replace(
            kind=protocol.RECORD, chunk_table_number=table, piece=piece_state.piece.index, number=piece_state.version
        )
        content: memoryview | bytes = b""
        if successor.connection.same_host and source is self._server.shared_sums.memory:
            frame = frame._replace(
                flags=frame.flags | protocol.SHARED, view=self._server.shared_sums.sequence(piece_state)
            )
        elif not record.flags & protocol.EMPTY:
            content = source.subrange(*piece_state.piece.byte_range).raw
        successor.connection.send(frame, content, *pack_rows([RowBundle(0, i, rows) for i, rows in gradients.items()]))

    def _handle_ack(self, connection: ServerConnection, frame: ServerFrame) -> None:
        piece_state = self._server.piece_state(frame)
        if (
            frame.number > piece_state.version
            or piece_state.successor != self._successor_on(connection).connection.peer
        ):
            raise LinkError("acknowledges what was not sent")
        piece_state.acked = max(piece_state.acked, frame.number)
        self._server.updates.flush_pending(piece_state)
        self._server.admit_entering_clients()
        self._report_filled(piece_state)

    def _report_filled(self, piece_state: PieceState) -> None:
        """Once all that a successor is being filled with is there."""
        successor = self._successors.get(piece_state.successor) if piece_state.successor is not None else None
        if successor is None or successor.filled_reported:
            return
        piece_states = [
            p
            for p in self._pieces_forwarded_to(successor.connection.peer)
            if successor.connection.peer in p.piece.filling
        ]
        if piece_states and all(p.synced and p.acked for p in piece_states):
            successor.filled_reported = True
            self._on_filled(successor.connection.peer, self._server.chunk_table_number)
