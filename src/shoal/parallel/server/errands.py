"""What workers want of servers. Only clipping and codecs need torch, and bring it: other clients may have none."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from shoal.parallel.links.memory import Memory
from shoal.parallel.server import frames
from shoal.parallel.server.client import Server
from shoal.parallel.server.frames import Frame, said
from shoal.parallel.server.line import Place
from shoal.spec.table import Piece
from shoal.wire.handshake import LinkError

if TYPE_CHECKING:
    from shoal.parallel.cutting import Form
    from shoal.parallel.flat import Layout

MOST_STATE_OVER_PIECE = 12
MOST_STATE_SPARE_BYTES = 1 << 22


class Extent(Protocol):
    """How long a stretch is. Who clips or counts has a job, and all of its layout."""

    @property
    def size_bytes(self) -> int: ...


class Partials(Protocol):
    """What a worker pushes: several stretches."""

    def parts(self, index: int, piece: Piece) -> list[memoryview]:
        """What is sent of one of them for a piece."""

    def share(self, index: int, piece: Piece) -> None:
        """Let that lie where servers on this host read it."""


@dataclass
class Laid:
    """They lie there already, one after the other; encoded ones in slots."""

    memory: Memory
    layout: Extent
    form: Form | None = None

    def parts(self, index: int, piece: Piece) -> list[memoryview]:
        if self.form is None:
            start = index * self.layout.size_bytes
            return [self.memory.raw[start + piece.start : start + piece.stop]]
        at, size = self.form.part(piece.first)
        start = index * self.form.slot_bytes + at
        return [self.memory.raw[start : start + size]]

    def share(self, index: int, piece: Piece) -> None:
        pass


class Once:
    """Errands that want one answer of every chunk."""

    def settled(self, chunks: int) -> list[bool]:
        return [False] * chunks

    def answer_all(self) -> Callable[[Server, Frame], None] | None:
        return None


@dataclass
class Gathering(Once):
    """What came of each piece, by its chunks."""

    found: dict[tuple[int, int], Any] = field(default_factory=dict, init=False)

    def whole(self, chunks: int) -> bool:
        """Is every chunk there once?"""
        ranges = sorted(self.found)
        return [0, *(last for _, last in ranges)] == [*(first for first, _ in ranges), chunks]


@dataclass
class Values(Once):
    """Puts the servers' values into a stretch of ours."""

    layout: Extent
    values: Memory
    flags: int = field(default=0, init=False)

    def place(self, server: Server, piece: Piece, frame: Frame) -> Place:
        if frame.kind != frames.VALUES:
            raise LinkError(f"answers with a frame of kind {frame.kind}")
        return [] if frame.flags & frames.SHARED else [self.values.raw[piece.start : piece.stop]]

    def answered(self, server: Server, piece: Piece, frame: Frame) -> bool:
        if frame.flags & frames.SHARED:
            if server.memory is None:
                raise LinkError("shares no memory")
            self.values.raw[piece.start : piece.stop] = server.memory.raw[piece.start : piece.stop]
        self.flags |= frame.flags
        return True


@dataclass
class Pull(Values):
    """The values as they are now."""

    def ask(self, server: Server, piece: Piece, frame: Frame) -> None:
        server.line.send(frame._replace(kind=frames.PULL))


@dataclass
class Push(Values):
    """A worker's partials of a step, those with a bit in `filled`; the servers' new values come back.

    Servers must know the norm of everything, or the divisor of the loss, before they can apply anything: then sums
    come first, and when all are there everybody is told. A piece that has the step already tells what it was told.
    """

    partials: Partials
    step: int
    filled: int
    flags_sent: int
    hyper: bytes
    clip_norm: float | None = None
    rows: Callable[[Piece], list[memoryview | bytes]] = lambda piece: []
    _norms: dict[int, float] = field(default_factory=dict, init=False)
    _tail: bytearray = field(default_factory=bytearray, init=False)
    _told: Frame | None = field(default=None, init=False)
    counted: bool = field(default=False, init=False)

    def ask(self, server: Server, piece: Piece, frame: Frame) -> None:
        server.tell_hyper(frame, self.hyper)
        flags = self.flags_sent | (frames.NORMS if self.clip_norm is not None else 0)
        pushed = [i for i in range(self.filled.bit_length()) if self.filled >> i & 1]
        if server.line.same_host:
            flags |= frames.SHARED
            parts = []
            for i in pushed:
                self.partials.share(i, piece)
        else:
            parts = [part for i in pushed for part in self.partials.parts(i, piece)]
        frame = frame._replace(kind=frames.PUSH, step=self.step, flags=flags, number=self.filled)
        server.line.send(frame, *parts, *self.rows(piece))

    def place(self, server: Server, piece: Piece, frame: Frame) -> Place:
        if frame.kind != frames.SUMMED:
            return super().place(server, piece, frame)
        if frame.size > piece.stop - piece.start:
            raise LinkError(f"answers with {frame.size} bytes")
        return server.line.room(frame.size)

    def answered(self, server: Server, piece: Piece, frame: Frame) -> bool:
        self.counted = bool(frame.flags & frames.COUNTED)
        if frame.kind != frames.SUMMED:
            self._told = frame
            return super().answered(server, piece, frame)
        if piece.stop == self.layout.size_bytes:
            self._tail = server.line.said
        elif self.clip_norm is not None:
            numbers = [i for i, part in enumerate(self._jobs.slices) if piece.first <= part.chunk < piece.last]
            if len(server.line.said) != 8 * len(numbers):
                raise LinkError("has another number of slices")
            self._norms |= dict(zip(numbers, struct.unpack(f"<{len(numbers)}d", server.line.said), strict=True))
        return False

    def answer_all(self) -> Callable[[Server, Frame], None] | None:
        if self._told is None:
            words = said({"count": self._count(), "coefficient": self._coefficient()})
        else:
            count = self._told.divisor if self.counted else None
            by = self._told.coefficient if self.clip_norm is not None else None
            words = said({"count": count, "coefficient": by})

        def tell(server: Server, frame: Frame) -> None:
            server.line.send(frame._replace(kind=frames.APPLY, step=self.step), words)

        return tell

    @property
    def _jobs(self) -> Layout:
        return cast("Layout", self.layout)

    def _count(self) -> float | None:
        if not self.counted:
            return None
        room = Memory.private(self.layout.size_bytes)
        room.raw[self._jobs.tail :] = self._tail
        count = self._jobs.views(room.tensor).count
        assert count is not None
        return float(count)

    def _coefficient(self) -> float | None:
        if self.clip_norm is None:
            return None
        from shoal.parallel.clipping import coefficient

        norms = [self._norms[i] for i in range(len(self._jobs.slices))]
        found = coefficient(norms, clip=self.clip_norm, count=self._count(), dtype=self._jobs.norm_dtype)
        return float(found)


@dataclass
class LanePush(Values):
    """The gradient of one lane, which is applied as it comes."""

    partials: Partials
    step: int
    index: int
    lane: int
    share: float
    hyper: bytes
    empty: bool = False
    rows: Callable[[Piece], list[memoryview | bytes]] = lambda piece: []

    def ask(self, server: Server, piece: Piece, frame: Frame) -> None:
        server.tell_hyper(frame, self.hyper)
        shared = server.line.same_host
        if shared and not self.empty:
            self.partials.share(self.index, piece)
        parts = [] if shared or self.empty else self.partials.parts(self.index, piece)
        frame = frame._replace(
            kind=frames.PUSH,
            seat=self.lane,
            step=self.step,
            flags=(frames.SHARED if shared else 0) | (frames.EMPTY if self.empty else 0),
            scale=self.share,
        )
        server.line.send(frame, *parts, *self.rows(piece))


@dataclass
class PullAll(Gathering):
    """Everything that servers hold, piece by piece, packed as a live state."""

    def ask(self, server: Server, piece: Piece, frame: Frame) -> None:
        server.line.send(frame._replace(kind=frames.PULL, flags=frames.WHOLE))

    def place(self, server: Server, piece: Piece, frame: Frame) -> Place:
        most = MOST_STATE_OVER_PIECE * (piece.stop - piece.start) + MOST_STATE_SPARE_BYTES
        if frame.kind != frames.STATE or frame.size > most:
            raise LinkError(f"answers with {frame.size} bytes of kind {frame.kind}")
        return server.line.room(frame.size)

    def answered(self, server: Server, piece: Piece, frame: Frame) -> bool:
        self.found[piece.first, piece.last] = bytes(server.line.said)
        return True


@dataclass
class SetAll(Once):
    """Let the servers hold what `state_of(first, last)` gives, packed as a live state."""

    state_of: Callable[[int, int], bytes]

    def ask(self, server: Server, piece: Piece, frame: Frame) -> None:
        server.line.send(frame._replace(kind=frames.SET), self.state_of(piece.first, piece.last))

    def place(self, server: Server, piece: Piece, frame: Frame) -> Place:
        if frame.kind != frames.DONE:
            raise LinkError(f"answers with a frame of kind {frame.kind}")
        return []

    def answered(self, server: Server, piece: Piece, frame: Frame) -> bool:
        return True
