"""Frames: 64 bytes that say what follows, from whom, and for which view and step.

To peers on the same host a frame is a doorbell: what it speaks of lies in shared memory. To others the payload
follows it.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from shoal.net.errors import LinkError

HERE, SETUP, PARTIAL, TOTAL, GATHER, LEFT = range(1, 7)
HALT, COUNTED = 1, 2
MAX_NODES = 256

_MAGIC = b"SHFR"
_LAYOUT = struct.Struct("<4sBBxxIIQQ32s")
FRAME_BYTES = _LAYOUT.size


class PeerFrame(NamedTuple):
    """`filled` has a bit for each of the sender's partials that is not empty (in a SETUP: a digest of the layout);
    `size` are the bytes that follow (in a SETUP: the sender's memory). A LEFT names in `step` the seat to blame."""

    kind: int
    view: int
    step: int
    seat: int
    flags: int = 0
    size: int = 0
    filled: int = 0

    def pack(self) -> bytes:
        filled = self.filled.to_bytes(32, "little")
        return _LAYOUT.pack(_MAGIC, self.kind, self.flags, self.seat, self.view, self.step, self.size, filled)


def unpack(raw: bytes | bytearray | memoryview) -> PeerFrame:
    magic, kind, flags, seat, view, step, size, filled = _LAYOUT.unpack(raw)
    if magic != _MAGIC:
        raise LinkError("sent noise")
    return PeerFrame(kind, view, step, seat, flags, size, int.from_bytes(filled, "little"))
