"""What workers want of servers' sparse tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shoal.parallel.server import frames
from shoal.parallel.server.client import Server
from shoal.parallel.server.errands import Gathering, Once
from shoal.parallel.server.frames import Frame, heard
from shoal.parallel.server.line import Place
from shoal.parallel.sparse.keys import Floats, Keys, chunk_start, chunks_of
from shoal.parallel.sparse.spec import TableSpec
from shoal.spec.table import Piece
from shoal.wire.handshake import LinkError

MOST_TOLD_BYTES = 16 << 20


class LookUp(Once):
    """Rows of one table, by rising key, as they are at a step; only servers that have some are asked."""

    def __init__(self, table: TableSpec, keys: Keys, *, step: int) -> None:
        self.values: Floats = np.empty((len(keys), table.dim), dtype=np.float32)
        self._table = table
        self._keys = keys
        self._step = step

    def settled(self, chunks: int) -> list[bool]:
        done = np.ones(chunks, dtype=bool)
        done[chunks_of(self._keys)] = False
        return list(done.tolist())

    def _range(self, piece: Piece) -> slice:
        ends = [chunk_start(piece.first), chunk_start(piece.last)]
        return slice(*np.searchsorted(self._keys, ends).tolist())

    def ask(self, server: Server, piece: Piece, frame: Frame) -> None:
        frame = frame._replace(kind=frames.LOOK_UP, step=self._step, number=self._table.number)
        server.line.send(frame, self._keys[self._range(piece)].data.cast("B"))

    def place(self, server: Server, piece: Piece, frame: Frame) -> Place:
        if frame.kind != frames.FOUND:
            raise LinkError(f"answers with a frame of kind {frame.kind}")
        return [self.values[self._range(piece)].data.cast("B")]

    def answered(self, server: Server, piece: Piece, frame: Frame) -> bool:
        return True


@dataclass
class KeepRows(Gathering):
    """What rows each piece has at a step: digests, numbers, and where they were saved, if that was asked for."""

    step: int
    saves: bool

    def ask(self, server: Server, piece: Piece, frame: Frame) -> None:
        flags = frames.WHOLE if self.saves else 0
        server.line.send(frame._replace(kind=frames.KEEP, step=self.step, flags=flags))

    def place(self, server: Server, piece: Piece, frame: Frame) -> Place:
        if frame.kind != frames.KEPT or frame.size > MOST_TOLD_BYTES:
            raise LinkError(f"answers with {frame.size} bytes of kind {frame.kind}")
        return server.line.room(frame.size)

    def answered(self, server: Server, piece: Piece, frame: Frame) -> bool:
        self.found[piece.first, piece.last] = heard(server.line.said)
        return True
