"""Requests of clients to servers. Only clipping and codecs import torch, because clients may have none."""

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
    from shoal.lanes.flat_layout import FlatLayout
    from shoal.paramserver.encoded_chunks import EncodedChunks

MAX_STATE_TO_PIECE_RATIO = 12
STATE_OVERHEAD_BYTES = 1 << 22


class SizedLayout(Protocol):
    """Anything with a size in bytes. Requests that clip by norm or use weighted losses need the full `FlatLayout`,
    which only jobs have."""

    @property
    def size_bytes(self) -> int: ...


class PushBuffers(Protocol):
    """The partial sums that a client pushes, each in its own flat buffer."""

    def buffers(self, index: int, piece: ParameterPiece) -> list[memoryview]:
        """The bytes of one partial sum for a piece."""

    def copy_to_shared_memory(self, index: int, piece: ParameterPiece) -> None:
        """Copy them to where servers on this host read them."""


@dataclass
class CopiedPush:
    """Partial sums that are already in `memory`, one after the other, plain or encoded."""

    memory: ByteBuffer
    layout: SizedLayout
    encoded_chunks: EncodedChunks | None = None

    def buffers(self, index: int, piece: ParameterPiece) -> list[memoryview]:
        if self.encoded_chunks is None:
            start = index * self.layout.size_bytes
            return [self.memory.raw[start + piece.start : start + piece.stop]]
        size = self.encoded_chunks.encoded_layout.lane_bytes
        parts = self.encoded_chunks.parts(piece, self.memory.tensor[index * size : (index + 1) * size])
        return [part.numpy().data for part in parts if part.numel()]

    def copy_to_shared_memory(self, index: int, piece: ParameterPiece) -> None:
        pass


class SingleReply:
    """Requests with one reply for every chunk."""

    def skipped_chunks(self, chunks: int) -> list[bool]:
        return [False] * chunks

    def follow_up(self) -> Callable[[ServerSession, ServerFrame], None] | None:
        return None


@dataclass
class GatherAll(SingleReply):
    """Collects the replies of all pieces, by their chunks."""

    replies: dict[tuple[int, int], Any] = field(default_factory=dict, init=False)

    def is_complete(self, chunks: int) -> bool:
        """Whether every chunk has exactly one reply."""
        ranges = sorted(self.replies)
        return [0, *(last for _, last in ranges)] == [*(first for first, _ in ranges), chunks]


@dataclass
class ValuesRequest(SingleReply):
    """Receives the servers' values into the client's flat buffer."""

    layout: SizedLayout
    values: ByteBuffer
    flags: int = field(default=0, init=False)

    def buffer_for(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> PayloadTarget:
        if frame.kind != protocol.VALUES:
            raise LinkError(f"answered with a frame of kind {frame.kind}")
        return [] if frame.flags & protocol.SHARED else [self.values.raw[piece.start : piece.stop]]

    def handle_reply(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> bool:
        if frame.flags & protocol.SHARED:
            if server.memory is None:
                raise LinkError("refers to shared memory that it has not sent")
            self.values.raw[piece.start : piece.stop] = server.memory.raw[piece.start : piece.stop]
        self.flags |= frame.flags
        return True


@dataclass
class Pull(ValuesRequest):
    """Pull the current values."""

    def send(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> None:
        server.connection.send(frame._replace(kind=protocol.PULL))


@dataclass
class Push(ValuesRequest):
    """Push a worker's partial sums of a step, those with a bit in `filled_mask`; the reply has the new values.

    If servers need the total norm or the loss's divisor before they can apply anything, they first reply with their
    sums. The client computes both from all pieces and sends them to every server. A piece that has already applied the
    step replies with the divisor and coefficient it used.
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
            raise LinkError(f"answered with {frame.size} bytes")
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
            encoded = encode_json({"count": self._count(), "coefficient": self._coefficient()})
        else:
            count = self._applied_reply.divisor if self.counted else None
            coefficient = self._applied_reply.coefficient if self.clip_norm is not None else None
            encoded = encode_json({"count": count, "coefficient": coefficient})

        def send(server: ServerSession, frame: ServerFrame) -> None:
            server.connection.send(frame._replace(kind=protocol.APPLY, step=self.step), encoded)

        return send

    @property
    def _full_layout(self) -> FlatLayout:
        return cast("FlatLayout", self.layout)

    def _count(self) -> float | None:
        if not self.counted:
            return None
        flat_buffer = ByteBuffer.private(self.layout.size_bytes)
        flat_buffer.raw[self._full_layout.tail :] = self._tail
        count = self._full_layout.views(flat_buffer.tensor).count
        assert count is not None
        return float(count)

    def _coefficient(self) -> float | None:
        if self.clip_norm is None:
            return None
        from shoal.lanes.clipping import clip_coefficient

        norms = [self._norms[i] for i in range(len(self._full_layout.slices))]
        return float(
            clip_coefficient(norms, clip=self.clip_norm, count=self._count(), dtype=self._full_layout.norm_dtype)
        )


@dataclass
class LanePush(ValuesRequest):
    """Push the gradient of one lane, which servers apply by itself (stale-synchronous)."""

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
    """Pull the servers' whole state, piece by piece, in packed form."""

    def send(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> None:
        server.connection.send(frame._replace(kind=protocol.PULL, flags=protocol.WHOLE))

    def buffer_for(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> PayloadTarget:
        max_bytes = MAX_STATE_TO_PIECE_RATIO * (piece.stop - piece.start) + STATE_OVERHEAD_BYTES
        if frame.kind != protocol.STATE or frame.size > max_bytes:
            raise LinkError(f"answered with {frame.size} bytes of kind {frame.kind}")
        return server.connection.allocate_payload(frame.size)

    def handle_reply(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> bool:
        self.replies[piece.first_chunk, piece.end_chunk] = bytes(server.connection.payload)
        return True


@dataclass
class SetState(SingleReply):
    """Set the servers' state to that of `state_of(first, last)`, in packed form."""

    state_of: Callable[[int, int], bytes]

    def send(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> None:
        server.connection.send(frame._replace(kind=protocol.SET), self.state_of(piece.first_chunk, piece.end_chunk))

    def buffer_for(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> PayloadTarget:
        if frame.kind != protocol.DONE:
            raise LinkError(f"answered with a frame of kind {frame.kind}")
        return []

    def handle_reply(self, server: ServerSession, piece: ParameterPiece, frame: ServerFrame) -> bool:
        return True
