"""Chain replication: a server receives records from its predecessors and forwards them to its successors."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shoal.checkpoint import state_format
from shoal.collectives.transport.shared_memory import ByteBuffer, SharedMemory, attach
from shoal.lanes.flat_layout import FlatLayout
from shoal.lanes.sparse.rows import RowBundle, pack_rows
from shoal.net.errors import LinkError
from shoal.paramserver import protocol
from shoal.paramserver.connection import PayloadTarget, ServerConnection
from shoal.paramserver.messages import JoinRequest, parse_message
from shoal.paramserver.piece_state import PendingAck, PieceState
from shoal.paramserver.protocol import ServerFrame, encode_json
from shoal.paramserver.sparse.row_tables import RowGradients
from shoal.spec.chunk_table import ChunkTable

if TYPE_CHECKING:
    from shoal.paramserver.server import ParameterServer

PIECE_TRANSFER_WINDOW_BUFFERS = 4
"""Number of queued buffers from which no further piece is sent, so that records do not wait behind pieces."""
_SEQUENCE_BYTES = 8
_SEQUENCE_MASK = (1 << 32) - 1


@dataclass(frozen=True)
class SharedSums:
    """Sums of lanes in memory that a successor on the same host reads, so that they are not sent.

    A sequence number per chunk follows the flat buffer. It changes before the chunk's sums do.
    """

    memory: ByteBuffer
    fd: int
    _sequence_numbers: npt.NDArray[np.int64]

    @classmethod
    def create(cls, layout: FlatLayout) -> SharedSums:
        shared = SharedMemory(_shared_sums_bytes(layout))
        return cls._from_memory(shared.buffer, layout, shared.fd)

    @classmethod
    def attach(cls, fd: int, layout: FlatLayout) -> SharedSums:
        """Map another server's sums for reading; closes `fd`. LinkError if it is not such memory."""
        return cls._from_memory(attach(fd, _shared_sums_bytes(layout)), layout, -1)

    @classmethod
    def _from_memory(cls, memory: ByteBuffer, layout: FlatLayout, fd: int) -> SharedSums:
        end = layout.size_bytes
        return cls(memory.subrange(0, end), fd, np.frombuffer(memory.raw[end:], dtype=np.int64))

    def begin_write(self, piece_state: PieceState) -> None:
        """Call before the sums of the piece change."""
        self._sequence_numbers[piece_state.piece.first_chunk : piece_state.piece.end_chunk] += 1

    def sequence(self, piece_state: PieceState) -> int:
        """A number that changes before any sum in the piece does."""
        sequence_numbers = self._sequence_numbers[piece_state.piece.first_chunk : piece_state.piece.end_chunk]
        return int(sequence_numbers.sum()) & _SEQUENCE_MASK


def _shared_sums_bytes(layout: FlatLayout) -> int:
    return layout.size_bytes + _SEQUENCE_BYTES * (len(layout.chunk_offsets) - 1)


@dataclass
class Successor:
    """The connection to a successor. Pieces are sent one after the other, between records."""

    connection: ServerConnection
    pieces_to_send: deque[PieceState] = field(default_factory=deque)
    stamps: npt.NDArray[np.int64] | None = None
    hyper: bytes = b""
    filled_reported: bool = False


@dataclass
class Predecessor:
    """A predecessor's hyperparameters, and its sums if it shares them."""

    hyper: dict[str, Any] = field(default_factory=dict)
    shared_sums: SharedSums | None = None


class ChainReplication:
    """Belongs to the parameter server, and to its one thread."""

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

    # ---- connections ----

    def connect_successors(self) -> None:
        """Connect to the servers that directly follow this one in any chain."""
        assert self._server.chunk_table is not None
        for seat in sorted(
            {
                piece_state.successor
                for piece_state in self._server.piece_states.values()
                if piece_state.successor is not None
            }
        ):
            if seat not in self._successors:
                self._connect_to(seat, self._server.chunk_table)

    def add_successor(self, seat: int, connection: ServerConnection, chunk_table_number: int) -> bool:
        """Take a new connection to a successor; False if it is no longer needed."""
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
        """Register a predecessor's connection. Returns its older connections; the caller closes them."""
        old = [one for one in self._predecessors if one.peer == connection.peer]
        self._predecessors[connection] = Predecessor()
        return old

    def connection_lost(self, connection: ServerConnection) -> None:
        self._predecessors.pop(connection, None)
        for seat, successor in list(self._successors.items()):
            if successor.connection is connection:
                del self._successors[seat]
                for piece_state in self._pieces_forwarded_to(seat):
                    piece_state.synced = False  # after reconnecting the successor reports what it has
                assert self._server.chunk_table is not None
                self._connect_to(seat, self._server.chunk_table)

    def disconnect_all(self) -> None:
        """Close all connections: a new table needs new ones."""
        connections = [successor.connection for successor in self._successors.values()] + list(self._predecessors)
        self._successors, self._predecessors = {}, {}
        for connection in connections:
            connection.close()

    def _pieces_forwarded_to(self, seat: int) -> list[PieceState]:
        return [piece_state for piece_state in self._server.piece_states.values() if piece_state.successor == seat]

    # ---- frames ----

    def buffer_for(self, connection: ServerConnection, frame: ServerFrame) -> PayloadTarget:
        server = self._server
        if connection in self._predecessors:
            return self._buffer_for_predecessor(connection, frame)
        max_bytes = 16 * len(server.chunk_table.cuts) if server.chunk_table and frame.kind == protocol.STAMPS else 0
        if frame.kind not in (protocol.STAMPS, protocol.ACK) or frame.size > max_bytes:
            raise LinkError(f"answered with {frame.size} bytes of kind {frame.kind}")
        return connection.allocate_payload(frame.size)

    def _buffer_for_predecessor(self, connection: ServerConnection, frame: ServerFrame) -> PayloadTarget:
        server = self._server
        if frame.chunk_table_number > server.chunk_table_number:
            return "hold"
        if frame.chunk_table_number < server.chunk_table_number:
            raise LinkError(f"uses table {frame.chunk_table_number}, but table {server.chunk_table_number} is current")
        if frame.kind in (protocol.SET, protocol.RECORD, protocol.ROWS):
            piece_state = server.piece_state(frame)
            if piece_state.predecessor != connection.peer:
                raise LinkError(f"sent piece {frame.piece}, of which it is not the predecessor")
            if frame.kind == protocol.SET:
                return server.buffer_for_state(connection, frame) if frame.size else []
            if frame.kind == protocol.ROWS:
                return server.sparse_handler.buffers_with_rows(connection, frame, [])
            if frame.flags & protocol.EMPTY:
                return []
            dense = (
                []
                if frame.flags & protocol.SHARED
                else [self._record_memory(connection, frame).subrange(*piece_state.piece.byte_range).raw]
            )
            return server.sparse_handler.buffers_with_rows(connection, frame, dense)
        if frame.kind not in (protocol.JOIN, protocol.HYPER) or frame.size > protocol.MAX_JSON_BYTES:
            raise LinkError(f"sent {frame.size} bytes of kind {frame.kind}")
        return connection.allocate_payload(frame.size)

    def _record_memory(self, connection: ServerConnection, frame: ServerFrame) -> ByteBuffer:
        """The buffer with a record's content."""
        server = self._server
        if not server.config.synchronous:
            return server.updates.lane_buffer(frame.seat)
        if not frame.flags & protocol.SHARED:
            return server.chunk_store.sums
        shared = self._predecessors[connection].shared_sums
        if shared is None:
            raise LinkError("refers to shared memory that it has not sent")
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
            self._predecessors[connection].hyper = server.parse_hyperparameters(connection.payload)
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
        """Apply a record. Its content may be in the predecessor's memory and change while it is read, because a
        predecessor that no longer waits for this server continues. The piece is dropped in that case."""
        gradients, predecessor = (
            self._server.sparse_handler.parse_row_gradients(piece_state, connection),
            self._predecessors[connection],
        )
        record, source = frame._replace(flags=frame.flags & ~protocol.SHARED), self._record_memory(connection, frame)
        shared = predecessor.shared_sums if frame.flags & protocol.SHARED else None
        if shared and shared.sequence(piece_state) != frame.view:
            raise LinkError("overwrote its sums before they were read")
        self._server.updates.apply_record(piece_state, record, predecessor.hyper, source, gradients)
        if shared and shared.sequence(piece_state) != frame.view:
            self._server.chunk_store.drop(piece_state.piece.first_chunk, piece_state.piece.end_chunk)
            raise LinkError("overwrote its sums while they were read")

    def _handle_join(self, connection: ServerConnection, frame: ServerFrame) -> None:
        """A predecessor asks which state this server has: answer with the stamps of its chunks."""
        server = self._server
        server.check_model(parse_message(JoinRequest, connection.payload).model)
        if frame.number:
            self._predecessors[connection].shared_sums = SharedSums.attach(
                connection.take_fd(), server.chunk_store.layout
            )
        for piece_state in server.piece_states.values():
            if piece_state.predecessor == connection.peer:
                piece_state.staged_rows = []  # the predecessor sends them again
        stamps = np.stack([server.chunk_store.term, server.chunk_store.seq])
        connection.send(ServerFrame(protocol.STAMPS, frame.chunk_table_number, seat=server.seat), stamps.data.cast("B"))

    # ---- send to the successor ----

    def _handle_stamps(self, connection: ServerConnection, frame: ServerFrame) -> None:
        """The successor's stamps: send it the pieces that it lacks."""
        server = self._server
        successor = self._successor_on(connection)
        if frame.size != 16 * len(server.chunk_store.term):
            raise LinkError("has another number of chunks")
        successor.stamps = np.frombuffer(connection.payload, dtype=np.int64).reshape(2, -1).copy()
        successor.pieces_to_send.extend(
            piece_state for piece_state in self._pieces_forwarded_to(connection.peer) if piece_state.valid
        )
        self.send_pending_pieces()

    def _successor_on(self, connection: ServerConnection) -> Successor:
        successor = self._successors.get(connection.peer)
        if successor is None or successor.connection is not connection:
            raise LinkError("answered a request that was not sent")
        return successor

    def resend(self, piece_state: PieceState, *, changed: bool) -> None:
        """Send a piece that was set here to the successor, with its content if it changed."""
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
        """Send waiting pieces to successors whose queues are short enough."""
        for successor in self._successors.values():
            while successor.pieces_to_send and successor.connection.unsent_buffers < PIECE_TRANSFER_WINDOW_BUFFERS:
                self._send_piece(successor, successor.pieces_to_send.popleft())

    def _send_piece(self, successor: Successor, piece_state: PieceState) -> None:
        server, piece = self._server, piece_state.piece
        assert successor.stamps is not None
        chunks = slice(piece.first_chunk, piece.end_chunk)
        stamps = np.stack([server.chunk_store.term[chunks], server.chunk_store.seq[chunks]])
        same = np.array_equal(stamps, successor.stamps[:, chunks])
        empty = not bool(stamps[0].all())  # no server holds all of it, so a client will set it
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
        """Forward a record that was applied here."""
        successor = self._successors.get(piece_state.successor) if piece_state.successor is not None else None
        if successor is None or not piece_state.synced:
            return
        table = self._server.chunk_table_number
        encoded = json.dumps(hyper, separators=(",", ":")).encode()
        if encoded != successor.hyper:
            successor.connection.send(ServerFrame(protocol.HYPER, table), encoded)
            successor.hyper = encoded
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
            raise LinkError("acknowledges records that were not sent")
        piece_state.acked = max(piece_state.acked, frame.number)
        self._server.updates.flush_pending(piece_state)
        self._server.admit_entering_clients()
        self._report_filled(piece_state)

    def _report_filled(self, piece_state: PieceState) -> None:
        """Report, once, that a successor has acknowledged all pieces with which it is being filled."""
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
