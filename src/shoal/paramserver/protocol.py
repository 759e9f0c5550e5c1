"""The protocol between clients and servers: frames with a header of 72 bytes, and a payload.

Replies have the number of the chunk table under which they were requested, so an old reply is never taken for a new
one.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection
from math import isfinite
from typing import Any, NamedTuple

from shoal.net.errors import LinkError

# from workers and other clients
ENTER, READY, HYPER, SHARE_MEMORY, PUSH, APPLY, PULL = range(1, 8)
LOOKUP_ROWS, SNAPSHOT_ROWS = 12, 13  # rows of sparse tables
# to clients
STATUS, ENTERED, SUMMED, VALUES, STATE, DONE, STALE, REFUSED = range(16, 24)
ROWS_FOUND, ROWS_SNAPSHOT = 28, 29
# between servers
JOIN, STAMPS, RECORD, SET, ACK = range(32, 37)
ROWS = 44

HALT, COUNTED, NORMS, WHOLE, SHARED, EMPTY = 1, 2, 4, 8, 16, 32
"""Flags: a worker must stop; losses have a divisor; norms are requested; a pull of the whole state, not only of values;
the payload is in shared memory; the lane had no samples, so there is nothing to apply."""

HOW_APPLIED_FLAGS = HALT | COUNTED | NORMS
"""The flags of a step that servers keep with it."""
ALLOWED_FLAGS = {
    PUSH: HALT | COUNTED | NORMS | SHARED | EMPTY,
    PULL: WHOLE,
    SNAPSHOT_ROWS: WHOLE,
    RECORD: HALT | COUNTED | NORMS | SHARED | EMPTY,
    SUMMED: HALT | COUNTED | NORMS | SHARED | EMPTY,
    VALUES: HOW_APPLIED_FLAGS | SHARED,
    STATE: HOW_APPLIED_FLAGS,
    DONE: HOW_APPLIED_FLAGS,
    ROWS_SNAPSHOT: WHOLE,
}
"""By kind; the other kinds have none."""
CLIENT_KINDS = frozenset({ENTER, READY, HYPER, SHARE_MEMORY, PUSH, APPLY, PULL, LOOKUP_ROWS, SNAPSHOT_ROWS, SET})
SERVER_KINDS = frozenset({STATUS, ENTERED, SUMMED, VALUES, STATE, DONE, STALE, REFUSED, ROWS_FOUND, ROWS_SNAPSHOT})
PREDECESSOR_KINDS = frozenset({JOIN, HYPER, RECORD, SET, ROWS})
SUCCESSOR_KINDS = frozenset({STAMPS, ACK})
"""The kinds that a server may get from a client, a client from a server, and a server from its neighbours in a
chain."""

MAX_JSON_BYTES = 16 << 20
MAX_STEP = 1 << 62
_MAX_BRACKETS = 1 << 20  # an empty list has two bytes in JSON and sixty in memory
_MAGIC = b"SHSV"
_HEADER = struct.Struct("<4sBBxxIIIIQQQddd")
HEADER_BYTES = _HEADER.size


class ServerFrame(NamedTuple):
    """`seat` is the sender's, or the lane if lanes push by themselves. `size` is the payload's size in bytes. `number`
    has a bit for each partial sum that follows, or counts records. `scale` multiplies the learning rate. If the flags
    say so, the sum is divided by `divisor` and multiplied by `coefficient`."""

    kind: int
    chunk_table_number: int = 0
    piece: int = 0
    view: int = 0
    seat: int = 0
    step: int = 0
    flags: int = 0
    size: int = 0
    number: int = 0
    scale: float = 1.0
    divisor: float = 0.0
    coefficient: float = 1.0

    def pack(self) -> bytes:
        kind, table, piece, view, seat, step, flags, *rest = self
        return _HEADER.pack(_MAGIC, kind, flags, table, piece, view, seat, step, *rest)


def unpack(raw: bytes | bytearray | memoryview, kinds: Collection[int]) -> ServerFrame:
    """A frame of one of these kinds. LinkError for anything else."""
    magic, kind, flags, table, piece, view, seat, step, *rest = _HEADER.unpack(raw)
    frame = ServerFrame(kind, table, piece, view, seat, step, flags, *rest)
    if magic != _MAGIC or step > MAX_STEP or not isfinite(frame.scale):
        raise LinkError("sent bytes that are no frame")
    if kind not in kinds or flags & ~ALLOWED_FLAGS.get(kind, 0):
        raise LinkError(f"sent a frame of kind {kind} with flags {flags}, which it may not send")
    return frame


def encode_json(value: dict[str, Any]) -> bytes:
    raw = json.dumps(value, separators=(",", ":")).encode()
    if len(raw) > MAX_JSON_BYTES:
        raise ValueError(f"{len(raw)} bytes of JSON, and {MAX_JSON_BYTES} is the most")
    return raw


def check_json(raw: bytes | bytearray | memoryview) -> bytes:
    """The bytes, unless parsing them would take far more memory than they do."""
    raw = bytes(raw)
    if raw.count(b"[") + raw.count(b"{") > _MAX_BRACKETS:
        raise LinkError("sent JSON with too many lists and objects")
    return raw
