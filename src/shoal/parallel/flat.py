"""A lane sum as one flat stretch of bytes, which goes over the wire or is read by peers as it is.

What is added up lies first, then what only the lowest lane gives; tensors of one dtype lie side by side, the
gradients of the last parameters first, for backward finishes those first. Every tensor starts at a multiple of 64, as
torch's own memory does, and has the strides that torch gives a gradient: kernels may choose their order of adding by
either, and bits must not depend on the way a gradient came.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.parallel.replica import LaneSum

ALIGN = 64


@dataclass(frozen=True)
class Region:
    """The bytes [start, stop) hold elements of one dtype, which are `added` up or taken from the lowest lane."""

    dtype: torch.dtype
    added: bool
    start: int
    stop: int

    def of(self, stretch: Tensor) -> Tensor:
        return stretch[self.start : self.stop].view(self.dtype)


@dataclass(frozen=True)
class Place:
    """Where one tensor lies."""

    dtype: torch.dtype
    added: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int = 0

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def of(self, stretch: Tensor) -> Tensor:
        flat = stretch[self.start : self.start + self.size_bytes].view(self.dtype)
        return flat.as_strided(self.shape, self.strides)


class Layout:
    """How sums like this one lie in a stretch of `size_bytes`. There is room for a count in any case."""

    def __init__(self, like: LaneSum) -> None:
        self._sizes = (len(like.grads), len(like.averaged), len(like.first))
        added = [*like.grads, *like.averaged, like.loss, like.loss]
        wanted = [_place(t, added=True) for t in added] + [_place(t, added=False) for t in like.first]
        self.regions: list[Region] = []
        self._places = list(wanted)
        order = [*reversed(range(len(like.grads))), *range(len(like.grads), len(wanted))]
        end = 0
        for dtype, is_added in dict.fromkeys((wanted[i].dtype, wanted[i].added) for i in order):
            start = end
            for i in order:
                place = wanted[i]
                if (place.dtype, place.added) == (dtype, is_added):
                    self._places[i] = Place(place.dtype, place.added, place.shape, place.strides, end)
                    end = aligned(end + place.size_bytes)
            self.regions.append(Region(dtype, is_added, start, end))
        self.size_bytes = end

    def views(self, stretch: Tensor) -> LaneSum:
        """The sum whose tensors lie in this stretch."""
        tensors = [place.of(stretch) for place in self._places]
        grads, averaged, first = self._sizes
        small = tensors[grads : grads + averaged + 2]
        return LaneSum(tensors[:grads], small[:-2], tensors[len(tensors) - first :], small[-2], small[-1])

    @property
    def grads(self) -> list[Place]:
        return self._places[: self._sizes[0]]

    def fits(self, value: LaneSum) -> bool:
        """Would it come back as it is?"""
        found = [*value.grads, *value.averaged, value.loss, value.count if value.count is not None else value.loss]
        tensors = found + value.first
        return len(tensors) == len(self._places) and all(
            t.layout == torch.strided and (t.dtype, tuple(t.shape)) == (place.dtype, place.shape)
            for t, place in zip(tensors, self._places, strict=True)
        )

    def within(self, start: int, stop: int) -> list[Region]:
        """The regions' parts in the bytes [start, stop), counted from `start`."""
        cut = ((r, max(r.start, start), min(r.stop, stop)) for r in self.regions)
        return [Region(r.dtype, r.added, a - start, b - start) for r, a, b in cut if a < b]

    @property
    def digest(self) -> int:
        """Equal where stretches can be exchanged."""
        return int.from_bytes(hashlib.sha256(repr(self._places).encode()).digest(), "little")


def write(into: LaneSum, value: LaneSum) -> None:
    """Copy a sum into the views of a stretch; gradients that went ahead are there already."""
    if value.grads:
        torch._foreach_copy_(into.grads, value.grads)
    for places, tensors in ((into.averaged, value.averaged), (into.first, value.first)):
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor)
    into.loss.copy_(value.loss)
    if into.count is not None and value.count is not None:
        into.count.copy_(value.count)


def shares(size_bytes: int, members: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Cut a stretch into one part per member: equal up to 64 bytes, at multiples of 64."""
    cuts = [size_bytes * i // len(members) // ALIGN * ALIGN for i in range(len(members))] + [size_bytes]
    return {member: (cuts[i], cuts[i + 1]) for i, member in enumerate(members)}


def aligned(place: int) -> int:
    return (place + ALIGN - 1) // ALIGN * ALIGN


def _place(like: Tensor, *, added: bool) -> Place:
    made = torch.empty_like(like)  # keeps strides that are dense, as torch does for gradients
    return Place(like.dtype, added, tuple(made.shape), tuple(made.stride()))
