"""What a server keeps in mind for one piece under the present table."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from shoal.parallel.adding import Addition, term_of
from shoal.parallel.flat import Layout
from shoal.parallel.links.memory import Memory
from shoal.parallel.server.frames import Frame
from shoal.parallel.server.line import Line
from shoal.parallel.sparse.rows import Bundle
from shoal.parallel.tree import Node
from shoal.spec.table import Piece


@dataclass(eq=False)
class Guest:
    """Who pushes over a line. Its partials lie one after the other in `memory`; in its own, `shared`, where that can be
    read. If that is `encoded`, they are decoded into `memory`."""

    line: Line
    seat: int
    view: int = -1
    hyper: dict[str, Any] | None = None
    memory: Memory | None = None
    shared: Memory | None = None
    encoded: bool = False
    entering: Frame | None = None
    bases: dict[int, int] = field(default_factory=dict)
    """How many updates the values had that it was last given, by the first chunk of their piece."""
    _parts: tuple[Memory | None, dict[int, Memory]] = field(default=(None, {}), init=False)

    def partial(self, index: int, size_bytes: int) -> Memory:
        """One of its partials, a stretch of so many bytes."""
        memory = self.memory if self.shared is None or self.encoded else self.shared
        assert memory is not None
        whole, parts = self._parts
        if whole is not memory:
            parts = {}
            self._parts = memory, parts
        if index not in parts:
            parts[index] = memory.part(index * size_bytes, (index + 1) * size_bytes)
        return parts[index]


class Asked(NamedTuple):
    """An answer that waits: for the chain, and for lanes that are too far behind."""

    guest: Guest
    frame: Frame
    version: int


class Owed(NamedTuple):
    """An acknowledgement that waits for the rest of the chain."""

    line: Line
    theirs: int
    version: int


@dataclass
class Round:
    """Partials of one step, until all are there."""

    view: int
    step: int
    came: dict[int, tuple[Guest, Frame]] = field(default_factory=dict)
    rows: dict[int, list[Bundle]] = field(default_factory=dict)
    summed: bool = False

    @property
    def flags(self) -> int:
        found = 0
        for _, frame in self.came.values():
            found |= frame.flags
        return found


@dataclass(eq=False)
class Post:
    """`version` counts what has happened to the piece under this table; the successor has acknowledged `acked` of it.

    A successor gets the piece as it is first (`synced` from then on), then every record. Answers wait for one that is
    in the chain; for one that is being filled from the moment on at which it is synced, for it may be counted upon.
    """

    piece: Piece
    before: int | None
    after: int | None
    valid: bool
    waits: bool
    synced: bool = False
    version: int = 1
    acked: int = 0
    round: Round | None = None
    asked: list[Asked] = field(default_factory=list)
    owed: deque[Owed] = field(default_factory=deque)
    additions: dict[tuple[tuple[Guest, int], ...], Addition] = field(default_factory=dict)
    """By who pushed which of its partials. One who comes again over another line has other memory."""
    staged: list[Bundle] = field(default_factory=list)

    @classmethod
    def of(cls, piece: Piece, seat: int) -> Post:
        after = piece.successor(seat)
        return cls(piece, piece.predecessor(seat), after, valid=seat in piece.chain, waits=after in piece.chain)

    @property
    def primary(self) -> bool:
        return self.before is None

    def clear(self, version: int) -> bool:
        """Has the rest of the chain what happened up to this version?"""
        return self.acked >= version or not self.waits

    def forget_pushes(self) -> None:
        self.round = None
        self.asked.clear()
        self.additions.clear()

    def alone(self, nodes: Mapping[int, Sequence[Node]], size_bytes: int) -> Memory | None:
        """The partial, if a single one came and nobody gets a record of it: it can be applied from where it lies."""
        assert self.round is not None
        came = self.round.came
        filled = [(came[seat][0], i) for seat in came for i in range(len(nodes[seat])) if came[seat][1].number >> i & 1]
        if self.after is not None or len(filled) != 1:
            return None
        guest, index = filled[0]
        return guest.partial(index, size_bytes)

    def add_up(self, layout: Layout, nodes: Mapping[int, Sequence[Node]], lanes: int, out: Tensor) -> bool:
        """Finish the tree over what came; False if no lane had samples."""
        assert self.round is not None
        came = self.round.came
        key = tuple((came[seat][0], came[seat][1].number) for seat in sorted(came))
        if not any(filled for _, filled in key):
            return False
        if key not in self.additions:
            start, stop, size = self.piece.start, self.piece.stop, layout.size_bytes
            partials: list[tuple[Node, Tensor | None]] = []
            for seat in sorted(came):
                guest, frame = came[seat]
                for i, node in enumerate(nodes[seat]):
                    filled = frame.number >> i & 1
                    partials.append((node, guest.partial(i, size).tensor[start:stop] if filled else None))
            term = term_of(partials, lanes)
            assert term is not None
            self.additions[key] = Addition(term, out[start:stop], layout.within(start, stop))
        addition = self.additions[key]
        addition.restart()
        addition.run(self.piece.stop - self.piece.start)
        return True
