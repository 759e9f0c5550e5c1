"""Rectangular blocks of tensors: their position in the full tensor, and their values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class TensorSlice:
    """The block of a tensor of this `shape` that begins at `start` and is `size` long, dimension by dimension."""

    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def full(cls, shape: Sequence[int]) -> TensorSlice:
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def is_full(self) -> bool:
        return self.size == self.shape

    @property
    def is_empty(self) -> bool:
        return 0 in self.size

    def view_of(self, whole: Tensor) -> Tensor:
        """This block of the full tensor, as a view."""
        return whole[tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))]

    def overlap(self, other: TensorSlice) -> tuple[Slices, Slices] | None:
        """The overlap of two blocks of one tensor: its indices in this block, and in the other."""
        pairs = zip(self.start, self.size, other.start, other.size, strict=True)
        common = [(max(a, b), min(a + n, b + m)) for a, n, b, m in pairs]
        if any(first >= last for first, last in common):
            return None
        here, there = (
            tuple(slice(first - a, last - a) for (first, last), a in zip(common, box.start, strict=True))
            for box in (self, other)
        )
        return here, there


class TensorPiece(NamedTuple):
    """The values of a block, and its position in the full tensor."""

    tensor_slice: TensorSlice
    values: Tensor


class PieceReader(Protocol):
    """A source of pieces: a checkpoint or other workers."""

    def slices(self, name: str) -> Sequence[TensorSlice]:
        """The positions of all pieces of this tensor. Together they cover it."""

    def read(self, name: str, number: int) -> Tensor:
        """The values of piece `number`."""

    def names(self) -> Iterable[str]: ...
