"""Where members lay down what others need: on one host they read each other's arenas, between hosts they keep mirrors.

Arenas outlive views. A worker that stood still in an old view, and reads on when others are in a newer one, would
find their new numbers. So each bank has a stamp that changes before the bank does, and readers look at it afterwards.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from shoal.parallel.flat import ALIGN
from shoal.parallel.links import frames
from shoal.parallel.links.frames import Frame
from shoal.parallel.links.link import Link, PeerError
from shoal.parallel.links.memory import Arena, Memory, look_into
from shoal.parallel.links.mesh import Mesh
from shoal.wire.handshake import LinkError

STAMPS_BYTES = ALIGN
UNFINISHED = (1 << 64) - 1
"""In place of a step: the bank is being written."""
_STAMP = struct.Struct("<QQ")


def stamp(memory: Memory, which: int, *, view: int, step: int) -> None:
    _STAMP.pack_into(memory.raw, which * _STAMP.size, view, step)


class Arenas:
    """Everybody's memory in one view, by seat, met when it is made. `sizes_bytes` is what each member needs at least;
    `digest` is equal where members mean the same by it."""

    def __init__(self, mesh: Mesh, own: Arena, sizes_bytes: Mapping[int, int], *, digest: int, step: int) -> None:
        self.memory = {mesh.seat: own.memory}
        self._mesh = mesh

        def arrange(link: Link, frame: Frame) -> list[memoryview]:
            if frame.filled != digest or frame.size < sizes_bytes[link.seat]:
                raise LinkError("has a model of other shapes")
            there = look_into(link.take_fd(), frame.size) if link.same_host else None
            self.memory[link.seat] = there or Memory.private(sizes_bytes[link.seat])
            return []

        for link in mesh.links.values():
            frame = mesh.frame(frames.SETUP, step, size=own.size_bytes, filled=digest)
            link.post(frame, fd=own.fd if link.same_host else -1)
        mesh.trade(frames.SETUP, step, arrange)

    def shared(self, seat: int) -> bool:
        """Is this the member's memory itself?"""
        return seat == self._mesh.seat or self._mesh.links[seat].same_host

    def check_stamps(self, step: int, which: int) -> None:
        """After reading. PeerError if a member has begun to write something else."""
        for seat, link in self._mesh.links.items():
            if link.same_host:
                found = _STAMP.unpack_from(self.memory[seat].raw, which * _STAMP.size)
                if found != (self._mesh.view, step):
                    raise PeerError(seat, "went on without this worker")
