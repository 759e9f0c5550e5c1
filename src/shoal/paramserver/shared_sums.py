"""Sums of lanes in memory that a successor on the same host reads, instead of having them sent."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal.collectives.transport.shared_memory import ByteBuffer, SharedMemory, attach
from shoal.lanes.flat_layout import FlatLayout
from shoal.paramserver.piece_state import PieceState

_SEQUENCE_BYTES = 8
_MASK = (1 << 32) - 1


@dataclass(frozen=True)
class SharedSums:
    """A stretch, and behind it a count for each chunk, which changes before other sums come to lie there."""

    memory: ByteBuffer
    fd: int
    _sequence_numbers: npt.NDArray[np.int64]

    @classmethod
    def create(cls, layout: FlatLayout) -> SharedSums:
        arena = SharedMemory(_size_bytes(layout))
        return cls._from_memory(arena.buffer, layout, arena.fd)

    @classmethod
    def attach(cls, fd: int, layout: FlatLayout) -> SharedSums:
        """For reading; `fd` is closed. LinkError if it is not such memory."""
        return cls._from_memory(attach(fd, _size_bytes(layout)), layout, -1)

    @classmethod
    def _from_memory(cls, whole: ByteBuffer, layout: FlatLayout, fd: int) -> SharedSums:
        end = layout.size_bytes
        return cls(whole.subrange(0, end), fd, np.frombuffer(whole.raw[end:], dtype=np.int64))

    def begin_write(self, piece_state: PieceState) -> None:
        """From now on other sums will lie in the piece."""
        self._sequence_numbers[piece_state.piece.first_chunk : piece_state.piece.end_chunk] += 1

    def sequence(self, piece_state: PieceState) -> int:
        """Another one when other sums lie in any part of the piece, or begin to."""
        return int(self._sequence_numbers[piece_state.piece.first_chunk : piece_state.piece.end_chunk].sum()) & _MASK


def _size_bytes(layout: FlatLayout) -> int:
    return layout.size_bytes + _SEQUENCE_BYTES * (len(layout.chunk_offsets) - 1)
