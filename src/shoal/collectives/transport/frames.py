"""Frames: headers of 64 bytes with the kind of message, the sender's seat, the view and the step.

Between hosts the payload follows the frame. On the same host the frame is only a signal: the payload lies in shared
memory.
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
    """`filled` has a bit for each of the sender's partial sums that is not empty (in a SETUP: a digest of the layout).
    `size` is the payload's size in bytes (in a SETUP: of the sender's shared memory). A LEFT has in `step` the seat to
    blame."""

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
        raise LinkError("sent bytes that are no frame")
    return PeerFrame(kind, view, step, seat, flags, size, int.from_bytes(filled, "little"))
