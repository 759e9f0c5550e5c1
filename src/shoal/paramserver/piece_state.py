"""What a server keeps in mind for one piece under the present table."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from shoal.collectives.transport.shared_memory import ByteBuffer
from shoal.collectives.tree_reduce import TreeReduce, build_sum_tree
from shoal.lanes.flat_layout import FlatLayout
from shoal.lanes.reduction_tree import Node
from shoal.lanes.sparse.rows import RowBundle
from shoal.paramserver.connection import ServerConnection
from shoal.paramserver.protocol import ServerFrame
from shoal.spec.chunk_table import ParameterPiece


@dataclass(eq=False)
class ClientSession:
    """Who pushes over a line. Its partials lie one after the other in `memory`; in its own, `shared`, where that can be
    read. If that is `encoded`, they are decoded into `memory`."""

    connection: ServerConnection
    seat: int
    view: int = -1
    hyper: dict[str, Any] | None = None
    memory: ByteBuffer | None = None
    shared_memory: ByteBuffer | None = None
    encoded: bool = False
    pending_enter: ServerFrame | None = None
    base_versions: dict[int, int] = field(default_factory=dict)
    """How many updates the values had that it was last given, by the first chunk of their piece."""
    _partials: tuple[ByteBuffer | None, dict[int, ByteBuffer]] = field(default=(None, {}), init=False)

    def partial(self, index: int, size_bytes: int) -> ByteBuffer:
        """One of its partials, a stretch of so many bytes."""
        memory = self.memory if self.shared_memory is None or self.encoded else self.shared_memory
        assert memory is not None
        whole, parts = self._partials
        if whole is not memory:
            parts = {}
            self._partials = memory, parts
        if index not in parts:
            parts[index] = memory.subrange(index * size_bytes, (index + 1) * size_bytes)
        return parts[index]


class PendingReply(NamedTuple):
    """An answer that waits: for the chain, and for lanes that are too far behind."""

    session: ClientSession
    frame: ServerFrame
    version: int


class PendingAck(NamedTuple):
    """An acknowledgement that waits for the rest of the chain."""

    connection: ServerConnection
    predecessor_version: int
    version: int


@dataclass
class PushRound:
    """Partials of one step, until all are there."""

    view: int
    step: int
    pushes: dict[int, tuple[ClientSession, ServerFrame]] = field(default_factory=dict)
    rows: dict[int, list[RowBundle]] = field(default_factory=dict)
    summed: bool = False

    @property
    def flags(self) -> int:
        found = 0
        for _, frame in self.pushes.values():
            found |= frame.flags
        return found


@dataclass(eq=False)
class PieceState:
    """`version` counts what has happened to the piece under this table; the successor has acknowledged `acked` of it.

    A successor gets the piece as it is first (`synced` from then on), then every record. Answers wait for one that is
    in the chain; for one that is being filled from the moment on at which it is synced, for it may be counted upon.
    """

    piece: ParameterPiece
    predecessor: int | None
    successor: int | None
    valid: bool
    requires_ack: bool
    synced: bool = False
    version: int = 1
    acked: int = 0
    push_round: PushRound | None = None
    pending_replies: list[PendingReply] = field(default_factory=list)
    pending_acks: deque[PendingAck] = field(default_factory=deque)
    reductions: dict[tuple[tuple[ClientSession, int], ...], TreeReduce] = field(default_factory=dict)
    """By who pushed which of its partials. One who comes again over another line has other memory."""
    staged_rows: list[RowBundle] = field(default_factory=list)

    @classmethod
    def of(cls, piece: ParameterPiece, seat: int) -> PieceState:
        after = piece.successor(seat)
        return cls(piece, piece.predecessor(seat), after, valid=seat in piece.chain, requires_ack=after in piece.chain)

    @property
    def is_primary(self) -> bool:
        return self.predecessor is None

    def is_replicated(self, version: int) -> bool:
        """Has the rest of the chain what happened up to this version?"""
        return self.acked >= version or not self.requires_ack

    def drop_pushes(self) -> None:
        self.push_round = None
        self.pending_replies.clear()
        self.reductions.clear()

    def single_partial(self, nodes: Mapping[int, Sequence[Node]], size_bytes: int) -> ByteBuffer | None:
        """The partial, if a single one came and nobody gets a record of it: it can be applied from where it lies."""
        assert self.push_round is not None
        came = self.push_round.pushes
        filled = [(came[seat][0], i) for seat in came for i in range(len(nodes[seat])) if came[seat][1].number >> i & 1]
        if self.successor is not None or len(filled) != 1:
            return None
        session, index = filled[0]
        return session.partial(index, size_bytes)

    def reduce_pushes(self, layout: FlatLayout, nodes: Mapping[int, Sequence[Node]], lanes: int, out: Tensor) -> bool:
        """Finish the tree over what came; False if no lane had samples."""
        assert self.push_round is not None
        came = self.push_round.pushes
        key = tuple((came[seat][0], came[seat][1].number) for seat in sorted(came))
        if not any(filled for _, filled in key):
            return False
        if key not in self.reductions:
            start, stop, size = self.piece.start, self.piece.stop, layout.size_bytes
            partials: list[tuple[Node, Tensor | None]] = []
            for seat in sorted(came):
                session, frame = came[seat]
                for i, node in enumerate(nodes[seat]):
                    filled = frame.number >> i & 1
                    partials.append((node, session.partial(i, size).tensor[start:stop] if filled else None))
            term = build_sum_tree(partials, lanes)
            assert term is not None
            self.reductions[key] = TreeReduce(term, out[start:stop], layout.regions_within(start, stop))
        addition = self.reductions[key]
        addition.restart()
        addition.run(self.piece.stop - self.piece.start)
        return True
