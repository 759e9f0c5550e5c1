"""A lane sum as one flat stretch of bytes, which goes over the wire or is read by peers as it is.

Gradients lie first, those of the last parameters in front, for backward finishes those first. Then comes the tail:
what else is added up, then what only the lowest lane gives. In all three, tensors of one dtype lie side by side. Every
tensor starts at a multiple of 64, as torch's own memory does, and has the strides that torch gives a gradient: kernels
may choose their order of adding by either, and bits must not depend on the way a gradient came.

Servers hold the stretch in chunks; what a chunk has of one gradient is a slice.
"""

from __future__ import annotations

import functools
import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.checkpoint.raw import CODES, DTYPES
from shoal.parallel.lane_sum import LaneSum
from shoal.spec.table import GRAIN, MOST_CHUNKS, cut

ALIGN = 64
MOST_BYTES = 1 << 46
MOST_TENSORS = 1 << 20
_MOST_DIMENSIONS = 64


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

    def flat(self, tensor: Tensor) -> Tensor:
        """A tensor's elements as they lie in a stretch: its very memory if it has the right strides, else a copy."""
        if tensor.stride() != self.strides and not self._lies_like(tensor):
            room = torch.empty_strided(self.shape, self.strides, dtype=tensor.dtype, device=tensor.device)
            tensor = room.copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))

    def _lies_like(self, tensor: Tensor) -> bool:
        """The stride of a dimension of one element says nothing."""
        return all(n < 2 or a == b for n, a, b in zip(self.shape, tensor.stride(), self.strides, strict=True))

    def shaped(self, flat: Tensor) -> Tensor:
        """What `flat` gave, as a tensor again."""
        return flat.as_strided(self.shape, self.strides)


class Part(NamedTuple):
    """The bytes [start, stop) of the stretch, all of them of gradient number `place`."""

    place: int
    start: int
    stop: int


class Slice(NamedTuple):
    """What chunk number `chunk` has of gradient number `place`: the bytes [start, stop) of the stretch."""

    chunk: int
    place: int
    start: int
    stop: int
    dtype: torch.dtype


class Layout:
    """How sums like this one lie in a stretch of `size_bytes`, and where that is cut. There is room for a count in any
    case. From `tail` on lies what is no gradient.

    Chunks also have rows of sparse tables, if there are any: then there are `least` chunks or more, and a model that is
    too small for that has a gap before the tail, in which nothing lies.
    """

    def __init__(self, like: LaneSum, *, least: int = 0) -> None:
        added = [*like.grads, *like.averaged, like.loss, like.loss]
        places = [_place(t, added=True) for t in added] + [_place(t, added=False) for t in like.first]
        self._lay(places, (len(like.grads), len(like.averaged), len(like.first)), least)

    def _lay(self, wanted: list[Place], sizes: tuple[int, int, int], least: int) -> None:
        """Find each its start."""
        self._sizes = sizes
        self._least = least
        self._places = list(wanted)
        self.regions: list[Region] = []
        self.size_bytes = 0
        grads = sizes[0]
        self._lay_out(range(grads - 1, -1, -1))
        self._gap = self.size_bytes
        self.size_bytes = self.tail = max(self._gap, least * GRAIN)
        self._lay_out(range(grads, len(wanted)))

    def _lay_out(self, order: Sequence[int]) -> None:
        end, places = self.size_bytes, self._places
        for dtype, added in dict.fromkeys((places[i].dtype, places[i].added) for i in order):
            start = end
            for i in order:
                if (places[i].dtype, places[i].added) == (dtype, added):
                    places[i] = replace(places[i], start=end)
                    end = aligned(end + places[i].size_bytes)
            self.regions.append(Region(dtype, added, start, end))
        self.size_bytes = end

    # ---- told to others ----

    def describe(self) -> dict[str, Any]:
        """All that makes the layout, fit for JSON."""
        tensors = [[CODES[place.dtype], list(place.shape), list(place.strides)] for place in self._places]
        return {"tensors": tensors, "sizes": list(self._sizes), "least": self._least}

    @classmethod
    def from_description(cls, description: Any) -> Layout:
        """The layout that was described. ValueError for whatever describes none."""
        try:
            tensors, (grads, averaged, first) = description["tensors"], description["sizes"]
            sizes = _whole(grads, MOST_TENSORS), _whole(averaged, MOST_TENSORS), _whole(first, MOST_TENSORS)
            least = _whole(description.get("least", 0), MOST_CHUNKS)
            if len(tensors) != sum(sizes) + 2:
                raise ValueError(f"{len(tensors)} tensors")
            added = sizes[0] + sizes[1] + 2
            places = [_described(row, added=i < added) for i, row in enumerate(tensors)]
        except (AttributeError, KeyError, TypeError, ValueError) as problem:
            raise ValueError(f"not the layout of a model: {problem}") from None
        if any((place.dtype, place.shape) != (torch.float64, ()) for place in places[added - 2 : added]):
            raise ValueError("not the layout of a model: the loss is a number")
        if sum(aligned(place.size_bytes) for place in places) > MOST_BYTES:
            raise ValueError("the layout of a model that nobody could hold")
        layout = cls.__new__(cls)
        layout._lay(places, sizes, least)
        return layout

    # ---- chunks ----

    @functools.cached_property
    def cuts(self) -> list[int]:
        """Chunk i is the bytes [cuts[i], cuts[i + 1]); the last one is the tail."""
        lying = [(self._places[i].start, self._places[i].size_bytes) for i in self._lying]
        if self._gap < self.tail:
            lying.append((self._gap, self.tail - self._gap))
        return cut(lying, self.size_bytes, least=self._least)

    @functools.cached_property
    def slices(self) -> list[Slice]:
        """In the order of the stretch."""
        places = self._places
        return [
            Slice(chunk, *part, places[part.place].dtype)
            for chunk, (start, stop) in enumerate(pairwise(self.cuts))
            for part in self.parts(start, stop)
        ]

    def parts(self, start: int, stop: int) -> list[Part]:
        """What the bytes [start, stop) hold of gradients, in order."""
        return list(self._parts(start, stop))

    def _parts(self, start: int, stop: int) -> Iterator[Part]:
        begin = max(bisect_right(self._lying, start, key=lambda i: self._places[i].start) - 1, 0)
        for i in self._lying[begin:]:
            place = self._places[i]
            if place.start >= stop:
                return
            a, b = max(place.start, start), min(place.start + place.size_bytes, stop)
            if a < b:
                yield Part(i, a, b)

    def slices_of(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Gradients cut into slices, flat, in the order of the stretch: their very memory where they have the
        layout's strides."""
        found: list[Tensor] = []
        for i, counts in self._counts:
            flat = self._places[i].flat(grads[i])
            found.extend(torch.split(flat, counts) if len(counts) > 1 else (flat,))
        return found

    @functools.cached_property
    def _counts(self) -> list[tuple[int, list[int]]]:
        """How many elements each slice of a gradient has; gradients as they lie."""
        counts: dict[int, list[int]] = {}
        for part in self.slices:
            counts.setdefault(part.place, []).append((part.stop - part.start) // part.dtype.itemsize)
        return list(counts.items())

    @functools.cached_property
    def _lying(self) -> list[int]:
        """The gradients as they lie in the stretch, without those that have no elements."""
        there = (i for i, place in enumerate(self.grads) if place.size_bytes)
        return sorted(there, key=lambda i: self._places[i].start)

    @property
    def norm_dtype(self) -> torch.dtype:
        """Of norms that are taken together."""
        return functools.reduce(torch.promote_types, (place.dtype for place in self.grads))

    # ---- sums ----

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
        words = repr((self._places, self._least))
        return int.from_bytes(hashlib.sha256(words.encode()).digest(), "little")


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


def _whole(number: Any, most: int) -> int:
    if type(number) is not int or not 0 <= number <= most:
        raise ValueError(f"a number {number!r:.40}")
    return number


def _wholes(numbers: Iterable[Any]) -> tuple[int, ...]:
    return tuple(_whole(number, MOST_BYTES) for number in numbers)


def _described(row: Any, *, added: bool) -> Place:
    code, shape, strides = row
    if not isinstance(code, str) or code not in DTYPES:
        raise ValueError(f"a dtype {code!r:.40}")
    if not len(shape) == len(strides) <= _MOST_DIMENSIONS:
        raise ValueError("a shape that no tensor has")
    place = Place(DTYPES[code], added, _wholes(shape), _wholes(strides))
    if not _is_dense(place):
        raise ValueError("strides that leave gaps or overlap")
    return place


def _is_dense(place: Place) -> bool:
    """Does it fill its bytes, each once?"""
    expected = 1
    for stride, size in sorted(zip(place.strides, place.shape, strict=True)):
        if size > 1 and stride != expected and 0 not in place.shape:
            return False
        expected *= max(size, 1)
    return expected * place.dtype.itemsize <= MOST_BYTES


def _place(like: Tensor, *, added: bool) -> Place:
    made = torch.empty_like(like)  # keeps strides that are dense, as torch does for gradients
    return Place(like.dtype, added, tuple(made.shape), tuple(made.stride()))
