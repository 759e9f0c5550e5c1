"""Blocks of tensors: which part of a whole lies somewhere, and its values."""

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
        """This part of it: a view."""
        return whole[tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))]

    def overlap(self, other: TensorSlice) -> tuple[Slices, Slices] | None:
        """What two blocks of one tensor share: where it lies in this one, and where in the other."""
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
    """Some values, and where they belong in the whole."""

    tensor_slice: TensorSlice
    values: Tensor


class PieceReader(Protocol):
    """Where pieces come from."""

    def slices(self, name: str) -> Sequence[TensorSlice]:
        """Of all pieces of this name, wherever they were; together they are the whole."""

    def read(self, name: str, number: int) -> Tensor:
        """The values of one of them."""

    def names(self) -> Iterable[str]: ...
