"""A server's state for one piece under the current chunk table."""

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
    """A client and its connection. Its partial sums lie one after the other in `memory`, or in the client's own
    `shared_memory`. If that is `encoded`, they are decoded into `memory`."""

    connection: ServerConnection
    seat: int
    view: int = -1
    hyper: dict[str, Any] | None = None
    memory: ByteBuffer | None = None
    shared_memory: ByteBuffer | None = None
    encoded: bool = False
    pending_enter: ServerFrame | None = None
    base_versions: dict[int, int] = field(default_factory=dict)
    """Number of updates in the values that the client last received, by the first chunk of their piece."""
    _partials: tuple[ByteBuffer | None, dict[int, ByteBuffer]] = field(default=(None, {}), init=False)

    def partial(self, index: int, size_bytes: int) -> ByteBuffer:
        """One of its partial sums, a flat buffer of `size_bytes`."""
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
    """A reply that waits for the chain, and for lanes that are too far behind."""

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
    """The partial sums of one step, collected until all have arrived."""

    view: int
    step: int
    pushes: dict[int, tuple[ClientSession, ServerFrame]] = field(default_factory=dict)
    rows: dict[int, list[RowBundle]] = field(default_factory=dict)
    summed: bool = False

    @property
    def flags(self) -> int:
        flags = 0
        for _, frame in self.pushes.values():
            flags |= frame.flags
        return flags


@dataclass(eq=False)
class PieceState:
    """`version` counts the piece's changes under this table; the successor has acknowledged the first `acked`.

    A successor first gets the whole piece (`synced` from then on), then every record. Replies wait for the
    acknowledgement of a successor in the chain, and of one that is being filled from the moment it is synced, because
    it may become part of the chain at any time.
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
    """By session and pushed partial sums. A client that reconnects has a new session, and other memory."""
    staged_rows: list[RowBundle] = field(default_factory=list)

    @classmethod
    def of(cls, piece: ParameterPiece, seat: int) -> PieceState:
        successor = piece.successor(seat)
        return cls(
            piece, piece.predecessor(seat), successor, valid=seat in piece.chain, requires_ack=successor in piece.chain
        )

    @property
    def is_primary(self) -> bool:
        return self.predecessor is None

    def is_replicated(self, version: int) -> bool:
        """Whether the rest of the chain has acknowledged this version."""
        return self.acked >= version or not self.requires_ack

    def drop_pushes(self) -> None:
        self.push_round = None
        self.pending_replies.clear()
        self.reductions.clear()

    def drop_pushes_of(self, session: ClientSession) -> None:
        """The memory of its partial sums is no longer what it was when they were pushed."""
        self.reductions.clear()
        if self.push_round is not None and not self.push_round.summed:
            kept = {seat: push for seat, push in self.push_round.pushes.items() if push[0] is not session}
            self.push_round.pushes = kept

    def single_partial(self, nodes: Mapping[int, Sequence[Node]], size_bytes: int) -> ByteBuffer | None:
        """The only pushed partial sum, if there is one and no successor: it can be applied without a copy."""
        assert self.push_round is not None
        pushes = self.push_round.pushes
        filled = [
            (pushes[seat][0], i) for seat in pushes for i in range(len(nodes[seat])) if pushes[seat][1].number >> i & 1
        ]
        if self.successor is not None or len(filled) != 1:
            return None
        session, index = filled[0]
        return session.partial(index, size_bytes)

    def reduce_pushes(self, layout: FlatLayout, nodes: Mapping[int, Sequence[Node]], lanes: int, out: Tensor) -> bool:
        """Sum the pushes on the tree; False if no lane had samples."""
        assert self.push_round is not None
        pushes = self.push_round.pushes
        key = tuple((pushes[seat][0], pushes[seat][1].number) for seat in sorted(pushes))
        if not any(filled for _, filled in key):
            return False
        if key not in self.reductions:
            start, stop, size = self.piece.start, self.piece.stop, layout.size_bytes
            partials: list[tuple[Node, Tensor | None]] = []
            for seat in sorted(pushes):
                session, frame = pushes[seat]
                for i, node in enumerate(nodes[seat]):
                    filled = frame.number >> i & 1
                    partials.append((node, session.partial(i, size).tensor[start:stop] if filled else None))
            tree = build_sum_tree(partials, lanes)
            assert tree is not None
            self.reductions[key] = TreeReduce(tree, out[start:stop], layout.regions_within(start, stop))
        reduction = self.reductions[key]
        reduction.restart()
        reduction.run(self.piece.stop - self.piece.start)
        return True
