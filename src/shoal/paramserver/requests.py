"""What workers want of servers. Only clipping and codecs need torch, and bring it: other clients may have none."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from shoal.collectives.transport.shared_memory import ByteBuffer
from shoal.net.errors import LinkError
from shoal.paramserver import protocol
from shoal.paramserver.client import ServerSession
from shoal.paramserver.connection import PayloadTarget
from shoal.paramserver.protocol import ServerFrame, encode_json
from shoal.spec.chunk_table import ParameterPiece

if TYPE_CHECKING:
    from shoal.collectives.buckets import EncodedLayout
    from shoal.lanes.flat_layout import FlatLayout

MAX_STATE_TO_PIECE_RATIO = 12
STATE_OVERHEAD_BYTES = 1 << 22


class SizedLayout(Protocol):
    """How long a stretch is. Who clips or counts has a job, and all of its layout."""

    @property
    def size_bytes(self) -> int: ...


class PushBuffers(Protocol):
    """What a worker pushes: several stretches."""

    def buffers(self, index: int, piece: ParameterPiece) -> list[memoryview]:
        """What is sent of one of them for a piece."""

    def copy_to_shared_memory(self, index: int, piece: ParameterPiece) -> None:
        """Let that lie where servers on this host read it."""


@dataclass
class CopiedPush:
    """They lie there already, one after the other; encoded ones in slots."""

    memory: ByteBuffer
    layout: SizedLayout
    encoded_layout: EncodedLayout | None = None

    def buffers(self, index: int, piece: ParameterPiece) -> list[memoryview]:
        if self.encoded_layout is None:
            start = index * self.layout.size_bytes
            return [self.memory.raw[start + piece.start : start + piece.stop]]
        at, size = self.encoded_layout.chunk_range(piece.first_chunk)
        start = index * self.encoded_layout.lane_bytes + at
        return [self.memory.raw[start : start + size]]

    def copy_to_shared_memory(self, index: int, piece: ParameterPiece) -> None:
        pass


class SingleReply:
    """Errands that want one answer of every chunk."""

    def skipped_chunks(self, chunks: int) -> list[bool]:
        return [False] * chunks

    def follow_up(self) -> Callable[[ServerSession, ServerFrame], None] | None:
        return None


@dataclass
class GatherAll(SingleReply):
    """What came of each piece, by its chunks."""

    replies: dict[tuple[int, int], Any] = field(default_factory=dict, init=False)

    def is_complete(self, chunks: int) -> bool:
        """Is every chunk there once?"""
        ranges = sorted(self.replies)
        return [0, *(last for _, last in ranges)] == [*(first for first, _ in ranges), chunks]


@dataclass
class ValuesRequest(SingleReply):
    """Puts the servers' values into a stretch of ours."""

    layout: SizedLayout
    values: ByteBuffer
    flags: int = field(default=0, init=False)

    def buffer_for(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> PayloadTarget:
        if frame.kind != protocol.VALUES:
            raise LinkError(f"answers with a frame of kind {frame.kind}")
        return [] if frame.flags & protocol.SHARED else [self.values.raw[piece.start : piece.stop]]

    def handle_reply(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> bool:
        if frame.flags & protocol.SHARED:
            if server.memory is None:
                raise LinkError("shares no memory")
            self.values.raw[piece.start : piece.stop] = server.memory.raw[piece.start : piece.stop]
        self.flags |= frame.flags
        return True


@dataclass
class Pull(ValuesRequest):
    """The values as they are now."""

    def send(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> None:
        server.connection.send(frame._replace(kind=protocol.PULL))


@dataclass
class Push(ValuesRequest):
    """A worker's partials of a step, those with a bit in `filled`; the servers' new values come back.

    Servers must know the norm of everything, or the divisor of the loss, before they can apply anything: then sums
    come first, and when all are there everybody is told. A piece that has the step already tells what it was told.
    """

    partials: PushBuffers
    step: int
    filled_mask: int
    request_flags: int
    hyper: bytes
    clip_norm: float | None = None
    rows: Callable[[ParameterPiece], list[memoryview | bytes]] = lambda piece: []
    _norms: dict[int, float] = field(default_factory=dict, init=False)
    _tail: bytearray = field(default_factory=bytearray, init=False)
    _applied_reply: ServerFrame | None = field(default=None, init=False)
    counted: bool = field(default=False, init=False)

    def send(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> None:
        server.send_hyperparameters(frame, self.hyper)
        flags = self.request_flags | (protocol.NORMS if self.clip_norm is not None else 0)
        pushed = [i for i in range(self.filled_mask.bit_length()) if self.filled_mask >> i & 1]
        if server.connection.same_host:
            flags |= protocol.SHARED
            parts = []
            for i in pushed:
                self.partials.copy_to_shared_memory(i, piece)
        else:
            parts = [part for i in pushed for part in self.partials.buffers(i, piece)]
        frame = frame._replace(kind=protocol.PUSH, step=self.step, flags=flags, number=self.filled_mask)
        server.connection.send(frame, *parts, *self.rows(piece))

    def buffer_for(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> PayloadTarget:
        if frame.kind != protocol.SUMMED:
            return super().buffer_for(server, piece, frame)
        if frame.size > piece.stop - piece.start:
            raise LinkError(f"answers with {frame.size} bytes")
        return server.connection.allocate_payload(frame.size)

    def handle_reply(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> bool:
        self.counted = bool(frame.flags & protocol.COUNTED)
        if frame.kind != protocol.SUMMED:
            self._applied_reply = frame
            return super().handle_reply(server, piece, frame)
        if piece.stop == self.layout.size_bytes:
            self._tail = server.connection.payload
        elif self.clip_norm is not None:
            numbers = [
                i
                for i, part in enumerate(self._full_layout.slices)
                if piece.first_chunk <= part.chunk < piece.end_chunk
            ]
            if len(server.connection.payload) != 8 * len(numbers):
                raise LinkError("has another number of slices")
            self._norms |= dict(
                zip(numbers, struct.unpack(f"<{len(numbers)}d", server.connection.payload), strict=True)
            )
        return False

    def follow_up(self) -> Callable[[ServerSession, ServerFrame], None] | None:
        if self._applied_reply is None:
            words = encode_json({"count": self._count(), "coefficient": self._coefficient()})
        else:
            count = self._applied_reply.divisor if self.counted else None
            by = self._applied_reply.coefficient if self.clip_norm is not None else None
            words = encode_json({"count": count, "coefficient": by})

        def tell(server: ServerSession, frame: ServerFrame) -> None:
            server.connection.send(frame._replace(kind=protocol.APPLY, step=self.step), words)

        return tell

    @property
    def _full_layout(self) -> FlatLayout:
        return cast("FlatLayout", self.layout)

    def _count(self) -> float | None:
        if not self.counted:
            return None
        room = ByteBuffer.private(self.layout.size_bytes)
        room.raw[self._full_layout.tail :] = self._tail
        count = self._full_layout.views(room.tensor).count
        assert count is not None
        return float(count)

    def _coefficient(self) -> float | None:
        if self.clip_norm is None:
            return None
        from shoal.lanes.clipping import clip_coefficient

        norms = [self._norms[i] for i in range(len(self._full_layout.slices))]
        found = clip_coefficient(norms, clip=self.clip_norm, count=self._count(), dtype=self._full_layout.norm_dtype)
        return float(found)


@dataclass
class LanePush(ValuesRequest):
    """The gradient of one lane, which is applied as it comes."""

    partials: PushBuffers
    step: int
    index: int
    lane: int
    share: float
    hyper: bytes
    empty: bool = False
    rows: Callable[[ParameterPiece], list[memoryview | bytes]] = lambda piece: []

    def send(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> None:
        server.send_hyperparameters(frame, self.hyper)
        shared = server.connection.same_host
        if shared and not self.empty:
            self.partials.copy_to_shared_memory(self.index, piece)
        parts = [] if shared or self.empty else self.partials.buffers(self.index, piece)
        frame = frame._replace(
            kind=protocol.PUSH,
            seat=self.lane,
            step=self.step,
            flags=(protocol.SHARED if shared else 0) | (protocol.EMPTY if self.empty else 0),
            scale=self.share,
        )
        server.connection.send(frame, *parts, *self.rows(piece))


@dataclass
class PullState(GatherAll):
    """Everything that servers hold, piece by piece, packed as a live state."""

    def send(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> None:
        server.connection.send(frame._replace(kind=protocol.PULL, flags=protocol.WHOLE))

    def buffer_for(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> PayloadTarget:
        most = MAX_STATE_TO_PIECE_RATIO * (piece.stop - piece.start) + STATE_OVERHEAD_BYTES
        if frame.kind != protocol.STATE or frame.size > most:
            raise LinkError(f"answers with {frame.size} bytes of kind {frame.kind}")
        return server.connection.allocate_payload(frame.size)

    def handle_reply(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> bool:
        self.replies[piece.first_chunk, piece.end_chunk] = bytes(server.connection.payload)
        return True


@dataclass
class SetState(SingleReply):
    """Let the servers hold what `state_of(first, last)` gives, packed as a live state."""

    state_of: Callable[[int, int], bytes]

    def send(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> None:
        server.connection.send(frame._replace(kind=protocol.SET), self.state_of(piece.first_chunk, piece.end_chunk))

    def buffer_for(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> PayloadTarget:
        if frame.kind != protocol.DONE:
            raise LinkError(f"answers with a frame of kind {frame.kind}")
        return []

    def handle_reply(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> bool:
        return True
