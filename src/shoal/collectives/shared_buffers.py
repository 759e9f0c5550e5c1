"""Where members lay down what others need: on one host they read each other's arenas, between hosts they keep mirrors.

Arenas outlive views. A worker that stood still in an old view, and reads on when others are in a newer one, would
find their new numbers. So each bank has a stamp that changes before the bank does, and readers look at it afterwards.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from shoal.collectives.transport import frames
from shoal.collectives.transport.connection import PeerError, PeerLink
from shoal.collectives.transport.frames import PeerFrame
from shoal.collectives.transport.mesh import Mesh
from shoal.collectives.transport.shared_memory import ByteBuffer, SharedMemory, attach
from shoal.lanes.flat_layout import ALIGN
from shoal.net.errors import LinkError

SEQUENCE_NUMBERS_BYTES = ALIGN
UNFINISHED = (1 << 64) - 1
"""In place of a step: the bank is being written."""
_SEQUENCE_NUMBER = struct.Struct("<QQ")


def write_sequence_number(buffer: ByteBuffer, bank: int, *, view: int, step: int) -> None:
    _SEQUENCE_NUMBER.pack_into(buffer.raw, bank * _SEQUENCE_NUMBER.size, view, step)


class SharedBuffers:
    """Everybody's memory in one view, by seat, met when it is made. `sizes_bytes` is what each member needs at least;
    `digest` is equal where members mean the same by it."""

    def __init__(
        self, mesh: Mesh, own: SharedMemory, sizes_bytes: Mapping[int, int], *, digest: int, step: int
    ) -> None:
        self.buffers = {mesh.seat: own.buffer}
        self._mesh = mesh

        def arrange(link: PeerLink, frame: PeerFrame) -> list[memoryview]:
            if frame.filled != digest or frame.size < sizes_bytes[link.seat]:
                raise LinkError("has a model of other shapes")
            there = attach(link.take_fd(), frame.size) if link.same_host else None
            self.buffers[link.seat] = there or ByteBuffer.private(sizes_bytes[link.seat])
            return []

        for link in mesh.links.values():
            frame = mesh.frame(frames.SETUP, step, size=own.size_bytes, filled=digest)
            link.post(frame, fd=own.fd if link.same_host else -1)
        mesh.exchange(frames.SETUP, step, arrange)

    def is_shared(self, seat: int) -> bool:
        """Is this the member's memory itself?"""
        return seat == self._mesh.seat or self._mesh.links[seat].same_host

    def check_sequence_numbers(self, step: int, bank: int) -> None:
        """After reading. PeerError if a member has begun to write something else."""
        for seat, link in self._mesh.links.items():
            if link.same_host:
                found = _SEQUENCE_NUMBER.unpack_from(self.buffers[seat].raw, bank * _SEQUENCE_NUMBER.size)
                if found != (self._mesh.view, step):
                    raise PeerError(seat, "went on without this worker")
