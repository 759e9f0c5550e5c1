"""A server's handling of sparse tables: looks up, updates, forwards and saves rows.

Rows follow the dense bytes in the same frame, so both are applied together or not at all. The rows of a whole piece may
exceed a frame: they are sent before the frame that sets the piece, and take effect with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.checkpoint.files import CheckpointFiles
from shoal.errors import ShoalError
from shoal.lanes.reduction_tree import TreeSum
from shoal.lanes.sparse import rows as sparse
from shoal.lanes.sparse.rows import RowBundle, SparseRows, by_table, check_keys, pack_rows, unpack_rows
from shoal.net.errors import LinkError
from shoal.paramserver import protocol
from shoal.paramserver.connection import PayloadTarget, ServerConnection
from shoal.paramserver.piece_state import ClientSession, PieceState, PushRound
from shoal.paramserver.protocol import ServerFrame, encode_json
from shoal.paramserver.sparse.checkpoint import RowBlob, load_rows, save_rows
from shoal.paramserver.sparse.row_tables import RowGradients, RowTables, digests

if TYPE_CHECKING:
    from shoal.paramserver.server import ParameterServer

MAX_ROWS_BYTES = 512 << 20
MAX_KEYS_BYTES = 64 << 20
ROWS_FRAME_BYTES = 4 << 20
RunInThread = Callable[[Callable[[], Any], Callable[[Any], None]], None]
"""Runs the first function in its own thread, then the second with its result or exception in the server's thread."""


class RowsUnreadableError(LinkError):
    """The rows of a checkpoint cannot be read; a retry would fail too."""


class SparseTableHandler:
    """Belongs to the parameter server, and to its one thread. Rows are saved to `files`."""

    def __init__(self, server: ParameterServer, *, run_in_thread: RunInThread, files: CheckpointFiles | None) -> None:
        self._server = server
        self._run_in_thread = run_in_thread
        self._files = files

    @property
    def _row_tables(self) -> RowTables:
        row_tables = self._server.chunk_store.row_tables
        if row_tables is None:
            raise LinkError("refers to rows, but the model has no sparse tables")
        return row_tables

    def stats(self) -> dict[str, float]:
        """Number and bytes of the stored rows."""
        row_tables = self._server.chunk_store.row_tables if self._server.has_model else None
        return {} if row_tables is None else {"rows": len(row_tables), "rows_bytes": row_tables.nbytes}

    # ---- rows behind dense bytes ----

    def buffers_with_rows(
        self, connection: ServerConnection, frame: ServerFrame, dense: list[memoryview]
    ) -> PayloadTarget:
        """The buffers for a payload of dense bytes, followed by rows if it is longer than these."""
        size = frame.size - sum(map(len, dense))
        if size <= 0 or self._server.chunk_store.row_tables is None:
            return dense
        if size > MAX_ROWS_BYTES:
            raise LinkError(f"sent {size} bytes of rows, and {MAX_ROWS_BYTES} is the most")
        return [*dense, *connection.allocate_payload(size)]

    def parse_rows(self, piece_state: PieceState, connection: ServerConnection) -> list[RowBundle]:
        """The rows behind the dense bytes."""
        row_tables, piece = self._server.chunk_store.row_tables, piece_state.piece
        return (
            []
            if row_tables is None
            else unpack_rows(connection.payload, row_tables.dims, chunks=(piece.first_chunk, piece.end_chunk))
        )

    def parse_row_gradients(self, piece_state: PieceState, connection: ServerConnection) -> RowGradients:
        return by_table(self.parse_rows(piece_state, connection))

    def reduce_rows(self, push_round: PushRound) -> RowGradients:
        """Sum the pushed rows of each table on the tree."""
        if self._server.chunk_store.row_tables is None:
            return {}
        gradients: dict[int, SparseRows] = {}
        for table in {bundle.table for bundles in push_round.rows.values() for bundle in bundles}:
            tree: TreeSum[SparseRows] = TreeSum(self._server.config.lanes, sparse.add_rows)
            for seat, nodes in self._server.nodes.items():
                own_rows = {one.tag: one.rows for one in push_round.rows.get(seat, ()) if one.table == table}
                for i, node in enumerate(nodes):
                    tree.push(node, own_rows.get(i))
            if (total := tree.total()) is not None:
                gradients[table] = total
        return gradients

    # ---- requests ----

    def handle_lookup(self, session: ClientSession, frame: ServerFrame) -> None:
        """Reply with rows of a piece, by key. In synchronous mode the client names its step."""
        server, piece_state, table = self._server, self._server.piece_state(frame), frame.number
        if not piece_state.is_primary or table >= len(self._row_tables.tables):
            raise LinkError(f"asked for rows of table {table} in piece {frame.piece}")
        keys = np.frombuffer(session.connection.payload, dtype=np.int64)
        check_keys(keys, (piece_state.piece.first_chunk, piece_state.piece.end_chunk))
        step, applied = None, server.chunk_store.applied
        if server.config.synchronous:
            step, next_steps = frame.step, applied[piece_state.piece.first_chunk : piece_state.piece.end_chunk]
            if next_steps.min() < step or next_steps.max() > step + 1:
                self.refuse(session, f"asked for rows at step {step}, but the server is at step {next_steps.min()}")
                return
        values = self._row_tables.read(table, keys, step=step, applied=applied)
        session.connection.send(frame._replace(kind=protocol.ROWS_FOUND), values.data.cast("B") if len(keys) else b"")

    def handle_snapshot(self, session: ClientSession, frame: ServerFrame) -> None:
        """Reply with digests and counts of a piece's rows, and save the rows if requested."""
        server, piece_state = self._server, self._server.piece_state(frame)
        first, last = piece_state.piece.first_chunk, piece_state.piece.end_chunk
        if not piece_state.is_primary:
            raise LinkError(f"asked for rows of piece {frame.piece} from a server that is not its primary")
        if server.config.synchronous and not bool((server.chunk_store.applied[first:last] == frame.step).all()):
            self.refuse(session, f"the server does not hold the rows of step {frame.step}")
            return
        contents, files = self._row_tables.read_rows(first, last), self._files
        saves = frame.flags & protocol.WHOLE

        def act() -> dict[str, Any]:
            if saves and files is None:
                raise OSError("this server has no checkpoint directory")
            saved = save_rows(files, contents, first, last).describe() if saves and files else None
            return {"digests": digests(contents, first, last), "rows": list(map(len, contents)), "saved": saved}

        def then(result: Any) -> None:
            if isinstance(result, Exception):
                self.refuse(session, f"rows were not saved: {result}")
            else:
                session.connection.send(frame._replace(kind=protocol.ROWS_SNAPSHOT), encode_json(result))

        self._run_in_thread(act, then)

    def refuse(self, session: ClientSession, why: str) -> None:
        session.connection.send(ServerFrame(protocol.REFUSED, self._server.chunk_table_number), why.encode())

    # ---- whole pieces ----

    def stage_rows(self, piece_state: PieceState, connection: ServerConnection) -> None:
        """Keep a predecessor's rows until the piece is set."""
        piece_state.staged_rows += unpack_rows(
            connection.payload,
            self._row_tables.widths,
            chunks=(piece_state.piece.first_chunk, piece_state.piece.end_chunk),
        )

    def send_rows(self, connection: ServerConnection, piece_state: PieceState) -> None:
        """Send all rows of a piece to a successor, before the rest of the piece."""
        if self._server.chunk_store.row_tables is None:
            return
        for kind, table, rows in self._row_tables.read_bundles(
            piece_state.piece.first_chunk, piece_state.piece.end_chunk
        ):
            for part in rows.batches(ROWS_FRAME_BYTES // (8 + 4 * self._row_tables.widths[table])):
                frame = ServerFrame(protocol.ROWS, self._server.chunk_table_number, piece_state.piece.index)
                connection.send(frame, *pack_rows([RowBundle(kind, table, part)]))

    def rows_for_piece(self, piece_state: PieceState, state: dict[str, Any]) -> list[RowBundle]:
        """The rows of a piece that is being set: those sent before, or those of a checkpoint. LinkError if these cannot
        be read."""
        staged, piece_state.staged_rows = piece_state.staged_rows, []
        saved = state.get("saved")
        if self._server.chunk_store.row_tables is None or not saved:
            return staged
        if self._files is None:
            raise RowsUnreadableError("this server has no checkpoint directory")
        try:
            found = [RowBlob.from_description(one) for one in saved]
            return load_rows(
                self._files, found, self._row_tables.tables, piece_state.piece.first_chunk, piece_state.piece.end_chunk
            )
        except (ShoalError, ValueError, TypeError) as failure:
            raise RowsUnreadableError(f"the rows of the checkpoint cannot be read: {failure}") from failure
