"""The chunk table: which servers hold which bytes of the parameters; and the pieces in which bytes are sent."""

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
"""A boundary inside a tensor is a multiple of this from the tensor's start. Vectorised kernels then treat every element
as in the full tensor, so elementwise results have the same bits."""

_TENSOR_ALIGN_BYTES = 64  # of every tensor in the flat buffer


class ChunkTable(Spec):
    """Numbered assignment of chunks to servers. A higher number replaces a lower one while workers go on.

    Chunk i is the bytes [cuts[i], cuts[i + 1]) of the flat buffer; the last chunk is the tail. The servers in its
    `chain` hold it, the primary first. The servers in its `filling` follow the chain and do not have a full copy yet.
    `addresses` has every seat in a chain or in a filling.
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
        """The seats that workers push to and pull from, ascending."""
        return sorted({chain[0] for chain in self.chains})


@dataclass(frozen=True)
class ParameterPiece:
    """The chunks [first_chunk, end_chunk), i.e. the bytes [start, stop), with the same chain. The unit of messages."""

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
        """The seats that an update passes, in order."""
        return self.chain + self.filling

    def predecessor(self, seat: int) -> int | None:
        """The seat from which this seat receives updates; None for the primary and for seats outside the chain."""
        place = self.replication_order.index(seat) if seat in self.replication_order else 0
        return self.replication_order[place - 1] if place else None

    def successor(self, seat: int) -> int | None:
        """The seat to which this seat forwards updates; None for the last and for seats outside the chain."""
        following = (
            self.replication_order[self.replication_order.index(seat) + 1 :] if seat in self.replication_order else ()
        )
        return following[0] if following else None


def build_pieces(chunk_table: ChunkTable) -> list[ParameterPiece]:
    """Groups of neighbouring chunks with the same chain: at most 1 MiB, but at least one chunk. The tail is alone."""
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
    """Boundaries of the chunks of a flat buffer of `size_bytes`: about 1000 equal chunks of at least 16 KiB, and the
    tail.

    `tensor_extents` are start and size of each gradient, in order; the tail begins after the last one. If possible
    there are at least `least_chunks`, even if they are smaller.
    """
    if not tensor_extents:
        return [0, size_bytes]
    start, size = tensor_extents[-1]
    end = -(-(start + size) // _TENSOR_ALIGN_BYTES) * _TENSOR_ALIGN_BYTES
    count = min(max(end // (MIN_CHUNK_BYTES + 2 * BOUNDARY_ALIGN_BYTES), least_chunks, 1), MAX_CHUNKS)
    starts = [start for start, _ in tensor_extents]
    inner = {
        allowed_boundary(end * i // count, tensor_extents[bisect_right(starts, end * i // count) - 1])
        for i in range(1, count)
    }
    return sorted({0, *inner, end, size_bytes})


def allowed_boundary(point: int, tensor_extent: tuple[int, int]) -> int:
    """The last allowed boundary at or before the point, inside the tensor at that point."""
    start, size = tensor_extent
    return start + min(point - start, size) // BOUNDARY_ALIGN_BYTES * BOUNDARY_ALIGN_BYTES


def _same_replicas(chunk_table: ChunkTable, one: int, other: int) -> bool:
    return (
        chunk_table.chains[one] == chunk_table.chains[other] and chunk_table.filling[one] == chunk_table.filling[other]
    )


def _build_piece(chunk_table: ChunkTable, index: int, first: int, last: int) -> ParameterPiece:
    way = tuple(chunk_table.chains[first]), tuple(chunk_table.filling[first])
    return ParameterPiece(index, first, last, chunk_table.cuts[first], chunk_table.cuts[last], *way)
