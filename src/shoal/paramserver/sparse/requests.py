"""Requests of workers for the servers' sparse tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.lanes.sparse.keys import Floats, Keys, chunks_of, first_key
from shoal.lanes.sparse.table_spec import TableSpec
from shoal.net.errors import LinkError
from shoal.paramserver import protocol
from shoal.paramserver.client import ServerSession
from shoal.paramserver.connection import PayloadTarget
from shoal.paramserver.messages import RowsSnapshot, parse_message
from shoal.paramserver.protocol import ServerFrame
from shoal.paramserver.requests import GatherAll, SingleReply
from shoal.spec.chunk_table import ParameterPiece

MAX_SNAPSHOT_REPLY_BYTES = 16 << 20


class LookupRows(SingleReply):
    """Look up rows of one table at a step, by ascending key. Only servers with requested rows are asked."""

    def __init__(self, table: TableSpec, keys: Keys, *, step: int) -> None:
        self.values: Floats = np.empty((len(keys), table.dim), dtype=np.float32)
        self._table = table
        self._keys = keys
        self._step = step

    def skipped_chunks(self, chunks: int) -> list[bool]:
        done = np.ones(chunks, dtype=bool)
        done[chunks_of(self._keys)] = False
        return list(done.tolist())

    def _key_range(self, piece: ParameterPiece) -> slice:
        ends = [first_key(piece.first_chunk), first_key(piece.end_chunk)]
        return slice(*np.searchsorted(self._keys, ends).tolist())

    def send(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> None:
        frame = frame._replace(kind=protocol.LOOKUP_ROWS, step=self._step, number=self._table.number)
        server.connection.send(frame, self._keys[self._key_range(piece)].data.cast("B"))

    def buffer_for(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> PayloadTarget:
        if frame.kind != protocol.ROWS_FOUND:
            raise LinkError(f"answered with a frame of kind {frame.kind}")
        return [self.values[self._key_range(piece)].data.cast("B")]

    def handle_reply(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> bool:
        return True


@dataclass
class SnapshotRows(GatherAll):
    """The rows of each piece at a step: digests, counts and, if requested, where servers saved them."""

    step: int
    save: bool

    def send(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> None:
        flags = protocol.WHOLE if self.save else 0
        server.connection.send(frame._replace(kind=protocol.SNAPSHOT_ROWS, step=self.step, flags=flags))

    def buffer_for(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> PayloadTarget:
        if frame.kind != protocol.ROWS_SNAPSHOT or frame.size > MAX_SNAPSHOT_REPLY_BYTES:
            raise LinkError(f"answered with {frame.size} bytes of kind {frame.kind}")
        return server.connection.allocate_payload(frame.size)

    def handle_reply(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> bool:
        self.replies[piece.first_chunk, piece.end_chunk] = parse_message(RowsSnapshot, server.connection.payload)
        return True
