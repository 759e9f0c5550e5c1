"""Which server holds which bytes of the parameters: the numbered table, its chunks, and the pieces that are sent."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pydantic import PositiveInt, model_validator

from shoal.spec.base import Spec
from shoal.spec.view import Address

MOST_CHUNKS = 1000
LEAST_CHUNK_BYTES = 16 << 10
MOST_PIECE_BYTES = 1 << 20

GRAIN = 512
"""Cuts inside a tensor lie at multiples of it from the tensor's start. Vectorised kernels then treat every element as
they do in the whole tensor, and what is computed element by element has the same bits."""

_ALIGN = 64  # of every tensor in a stretch


class Table(Spec):
    """The numbered agreement on who holds what. A higher number replaces a lower one, without a halt of the workers.

    Chunk i is the bytes [cuts[i], cuts[i + 1]) of the stretch; the last chunk is the tail. Its `chain` holds it, the
    primary first. Seats in its `filling` come after the chain and do not hold all of it yet. `addresses` are those of
    the seats that stand in a chain or are filled.
    """

    number: PositiveInt
    cuts: list[int]
    chains: list[list[int]]
    filling: list[list[int]]
    addresses: dict[int, Address]

    @model_validator(mode="after")
    def _sound(self) -> Table:
        if not len(self.chains) == len(self.filling) == len(self.cuts) - 1:
            raise ValueError("there must be a chain and a filling for each chunk")
        if any(a >= b for a, b in pairwise(self.cuts)):
            raise ValueError("cuts must ascend")
        for chain, filling in zip(self.chains, self.filling, strict=True):
            order = {*chain, *filling}
            if not chain or len(order) < len(chain) + len(filling) or not order <= self.addresses.keys():
                raise ValueError("each chunk needs a chain of distinct seats with addresses")
        return self

    def primaries(self) -> list[int]:
        """The seats that workers talk to, ascending."""
        return sorted({chain[0] for chain in self.chains})


@dataclass(frozen=True)
class Piece:
    """The chunks [first, last), which are the bytes [start, stop) and go the same way. The unit of messages."""

    index: int
    first: int
    last: int
    start: int
    stop: int
    chain: tuple[int, ...]
    filling: tuple[int, ...]

    @property
    def bytes(self) -> tuple[int, int]:
        return self.start, self.stop

    @property
    def primary(self) -> int:
        return self.chain[0]

    @property
    def order(self) -> tuple[int, ...]:
        """All that a record passes, in turn."""
        return self.chain + self.filling

    def predecessor(self, seat: int) -> int | None:
        """From whom this seat has it; None for the primary, and for one that has no part in it."""
        place = self.order.index(seat) if seat in self.order else 0
        return self.order[place - 1] if place else None

    def successor(self, seat: int) -> int | None:
        """To whom this seat gives it; None for the last, and for one that has no part in it."""
        following = self.order[self.order.index(seat) + 1 :] if seat in self.order else ()
        return following[0] if following else None


def pieces(table: Table) -> list[Piece]:
    """Neighbouring chunks that go the same way, at most 1 MiB together, but one chunk at least. The tail is alone."""
    firsts = [0]
    for i in range(1, len(table.chains)):
        size_bytes = table.cuts[i + 1] - table.cuts[firsts[-1]]
        tail = i == len(table.chains) - 1
        if tail or size_bytes > MOST_PIECE_BYTES or not _same_way(table, i - 1, i):
            firsts.append(i)
    return [_piece(table, i, *chunks) for i, chunks in enumerate(pairwise([*firsts, len(table.chains)]))]


def cut(places: Sequence[tuple[int, int]], size_bytes: int, *, least: int = 1) -> list[int]:
    """Where a stretch of `size_bytes` is cut into chunks: about 1000 equal ones of at least 16 KiB, and the tail.

    `places` are start and size of each gradient, in the order in which they lie; behind the last one begins the tail.
    Where there is enough to cut, there are at least so many chunks, though smaller ones.
    """
    if not places:
        return [0, size_bytes]
    start, size = places[-1]
    end = -(-(start + size) // _ALIGN) * _ALIGN
    count = min(max(end // (LEAST_CHUNK_BYTES + 2 * GRAIN), least, 1), MOST_CHUNKS)
    starts = [start for start, _ in places]
    inner = {_allowed(end * i // count, places[bisect_right(starts, end * i // count) - 1]) for i in range(1, count)}
    return sorted({0, *inner, end, size_bytes})


def _allowed(point: int, place: tuple[int, int]) -> int:
    """The last place at or before the point where the tensor that lies there may be cut."""
    start, size = place
    return start + min(point - start, size) // GRAIN * GRAIN


def _same_way(table: Table, one: int, other: int) -> bool:
    return table.chains[one] == table.chains[other] and table.filling[one] == table.filling[other]


def _piece(table: Table, index: int, first: int, last: int) -> Piece:
    way = tuple(table.chains[first]), tuple(table.filling[first])
    return Piece(index, first, last, table.cuts[first], table.cuts[last], *way)
