"""The buffers of all ranks: on one host ranks read each other's shared memory, between hosts they keep copies.

Shared memory outlives views. A worker that was paused in an old view could read values that its peers wrote in a newer
one. So each bank has a sequence number that changes before the bank does, and a reader checks it after reading.
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
"""Sequence number of a bank that is being written, in place of a step."""
_SEQUENCE_NUMBER = struct.Struct("<QQ")


def write_sequence_number(buffer: ByteBuffer, bank: int, *, view: int, step: int) -> None:
    _SEQUENCE_NUMBER.pack_into(buffer.raw, bank * _SEQUENCE_NUMBER.size, view, step)


class SharedBuffers:
    """The buffers of all ranks of one view, by seat, exchanged at construction.

    `sizes_bytes` is the minimum size per rank; all ranks must have the same `digest` of the layout.
    """

    def __init__(
        self, mesh: Mesh, own: SharedMemory, sizes_bytes: Mapping[int, int], *, digest: int, step: int
    ) -> None:
        self.buffers = {mesh.seat: own.buffer}
        self._mesh = mesh

        def attach_peer(link: PeerLink, frame: PeerFrame) -> list[memoryview]:
            if frame.filled != digest or frame.size < sizes_bytes[link.seat]:
                raise LinkError("has a model of other shapes")
            shared = attach(link.take_fd(), frame.size) if link.same_host else None
            self.buffers[link.seat] = shared or ByteBuffer.private(sizes_bytes[link.seat])
            return []

        for link in mesh.links.values():
            frame = mesh.frame(frames.SETUP, step, size=own.size_bytes, filled=digest)
            link.post(frame, fd=own.fd if link.same_host else -1)
        mesh.exchange(frames.SETUP, step, attach_peer)

    def is_shared(self, seat: int) -> bool:
        """Whether the buffer is the rank's own memory, not a copy."""
        return seat == self._mesh.seat or self._mesh.links[seat].same_host

    def check_sequence_numbers(self, step: int, bank: int) -> None:
        """Check after reading a bank. PeerError if a peer has begun to overwrite it."""
        for seat, link in self._mesh.links.items():
            if link.same_host:
                found = _SEQUENCE_NUMBER.unpack_from(self.buffers[seat].raw, bank * _SEQUENCE_NUMBER.size)
                if found != (self._mesh.view, step):
                    raise PeerError(seat, "continued without this worker")
