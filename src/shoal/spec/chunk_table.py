"""Which server holds which bytes of the parameters: the numbered table, its chunks, and the pieces that are sent."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pydantic import PositiveInt, model_validator

from shoal.spec.base import Spec
from shoal.spec.view import Address

MAX_CHUNKS = 1000
MIN_CHUNK_BYTES = 16 << 10
MAX_PIECE_BYTES = 1 << 20

BOUNDARY_ALIGN_BYTES = 512
"""Cuts inside a tensor lie at multiples of it from the tensor's start. Vectorised kernels then treat every element as
they do in the whole tensor, and what is computed element by element has the same bits."""

_TENSOR_ALIGN_BYTES = 64  # of every tensor in a stretch


class ChunkTable(Spec):
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
    def _sound(self) -> ChunkTable:
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
class ParameterPiece:
    """The chunks [first, last), which are the bytes [start, stop) and go the same way. The unit of messages."""

    index: int
    first_chunk: int
    end_chunk: int
    start: int
    stop: int
    chain: tuple[int, ...]
    filling: tuple[int, ...]

    @property
    def byte_range(self) -> tuple[int, int]:
        return self.start, self.stop

    @property
    def primary(self) -> int:
        return self.chain[0]

    @property
    def replication_order(self) -> tuple[int, ...]:
        """All that a record passes, in turn."""
        return self.chain + self.filling

    def predecessor(self, seat: int) -> int | None:
        """From whom this seat has it; None for the primary, and for one that has no part in it."""
        place = self.replication_order.index(seat) if seat in self.replication_order else 0
        return self.replication_order[place - 1] if place else None

    def successor(self, seat: int) -> int | None:
        """To whom this seat gives it; None for the last, and for one that has no part in it."""
        following = (
            self.replication_order[self.replication_order.index(seat) + 1 :] if seat in self.replication_order else ()
        )
        return following[0] if following else None


def build_pieces(chunk_table: ChunkTable) -> list[ParameterPiece]:
    """Neighbouring chunks that go the same way, at most 1 MiB together, but one chunk at least. The tail is alone."""
    firsts = [0]
    for i in range(1, len(chunk_table.chains)):
        size_bytes = chunk_table.cuts[i + 1] - chunk_table.cuts[firsts[-1]]
        tail = i == len(chunk_table.chains) - 1
        if tail or size_bytes > MAX_PIECE_BYTES or not _same_replicas(chunk_table, i - 1, i):
            firsts.append(i)
    return [
        _build_piece(chunk_table, i, *chunks) for i, chunks in enumerate(pairwise([*firsts, len(chunk_table.chains)]))
    ]


def chunk_boundaries(tensor_extents: Sequence[tuple[int, int]], size_bytes: int, *, least_chunks: int = 1) -> list[int]:
    """Where a stretch of `size_bytes` is cut into chunks: about 1000 equal ones of at least 16 KiB, and the tail.

    `places` are start and size of each gradient, in the order in which they lie; behind the last one begins the tail.
    Where there is enough to cut, there are at least so many chunks, though smaller ones.
    """
    if not tensor_extents:
        return [0, size_bytes]
    start, size = tensor_extents[-1]
    end = -(-(start + size) // _TENSOR_ALIGN_BYTES) * _TENSOR_ALIGN_BYTES
    count = min(max(end // (MIN_CHUNK_BYTES + 2 * BOUNDARY_ALIGN_BYTES), least_chunks, 1), MAX_CHUNKS)
    starts = [start for start, _ in tensor_extents]
    inner = {
        _allowed_boundary(end * i // count, tensor_extents[bisect_right(starts, end * i // count) - 1])
        for i in range(1, count)
    }
    return sorted({0, *inner, end, size_bytes})


def _allowed_boundary(point: int, tensor_extent: tuple[int, int]) -> int:
    """The last place at or before the point where the tensor that lies there may be cut."""
    start, size = tensor_extent
    return start + min(point - start, size) // BOUNDARY_ALIGN_BYTES * BOUNDARY_ALIGN_BYTES


def _same_replicas(chunk_table: ChunkTable, one: int, other: int) -> bool:
    return (
        chunk_table.chains[one] == chunk_table.chains[other] and chunk_table.filling[one] == chunk_table.filling[other]
    )


def _build_piece(chunk_table: ChunkTable, index: int, first: int, last: int) -> ParameterPiece:
    way = tuple(chunk_table.chains[first]), tuple(chunk_table.filling[first])
    return ParameterPiece(index, first, last, chunk_table.cuts[first], chunk_table.cuts[last], *way)
