"""The layout of a lane sum in one flat buffer, which is sent, or read by peers, without conversion.

Gradients come first, those of the last parameters in front, because backward finishes those first. Then comes the tail:
other summed values, then values taken from the lowest lane alone. In all three, tensors of one dtype lie side by side.
Every tensor starts at a multiple of 64, as in torch's own memory, and has the strides that torch gives a gradient:
kernels may choose their order of adding by either, and bits must not depend on how a gradient arrived.

Servers hold the buffer in chunks; the part of one gradient in one chunk is a slice.
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

from shoal.checkpoint.tensor_bytes import DTYPE_CODES, DTYPES
from shoal.lanes.lane_sum import LaneSum
from shoal.spec.chunk_table import BOUNDARY_ALIGN_BYTES, MAX_CHUNKS, chunk_boundaries

ALIGN = 64
MAX_BYTES = 1 << 46
MAX_TENSORS = 1 << 20
_MAX_DIMENSIONS = 64


@dataclass(frozen=True)
class DtypeRegion:
    """The bytes [start, stop) hold elements of one dtype. They are summed, or else taken from the lowest lane."""

    dtype: torch.dtype
    is_summed: bool
    start: int
    stop: int

    def view_in(self, flat_buffer: Tensor) -> Tensor:
        return flat_buffer[self.start : self.stop].view(self.dtype)


@dataclass(frozen=True)
class TensorSlot:
    """Offset, shape and strides of one tensor in the flat buffer."""

    dtype: torch.dtype
    is_summed: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int = 0

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def view_in(self, flat_buffer: Tensor) -> Tensor:
        flat = flat_buffer[self.start : self.start + self.size_bytes].view(self.dtype)
        return flat.as_strided(self.shape, self.strides)

    def flatten(self, tensor: Tensor) -> Tensor:
        """A tensor's elements in the order of the flat buffer: a view if its strides match, else a copy."""
        if tensor.stride() != self.strides and not self._has_same_strides(tensor):
            copy = torch.empty_strided(self.shape, self.strides, dtype=tensor.dtype, device=tensor.device)
            tensor = copy.copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))

    def _has_same_strides(self, tensor: Tensor) -> bool:
        """Strides of dimensions with one element do not count."""
        return all(n < 2 or a == b for n, a, b in zip(self.shape, tensor.stride(), self.strides, strict=True))

    def unflatten(self, flat: Tensor) -> Tensor:
        """The inverse of `flatten`."""
        return flat.as_strided(self.shape, self.strides)


class TensorRange(NamedTuple):
    """The bytes [start, stop) of the flat buffer, all of them of gradient number `place`."""

    place: int
    start: int
    stop: int


class ChunkSlice(NamedTuple):
    """The part of gradient number `place` in chunk number `chunk`: the bytes [start, stop) of the flat buffer."""

    chunk: int
    place: int
    start: int
    stop: int
    dtype: torch.dtype


class FlatLayout:
    """The layout of sums like this one in a flat buffer of `size_bytes`, and its chunks. It always has space for a
    count. Everything from `tail` on is no gradient.

    Chunks also hold the rows of sparse tables. A model with sparse tables has at least `min_chunks` chunks; if its
    gradients are too small for that, padding precedes the tail.
    """

    def __init__(self, like: LaneSum, *, min_chunks: int = 0) -> None:
        added = [*like.grads, *like.float_buffers, like.loss, like.loss]
        slots = [_slot_like(t, is_summed=True) for t in added] + [
            _slot_like(t, is_summed=False) for t in like.int_buffers
        ]
        self._assign_offsets(slots, (len(like.grads), len(like.float_buffers), len(like.int_buffers)), min_chunks)

    def _assign_offsets(self, wanted: list[TensorSlot], tensor_counts: tuple[int, int, int], min_chunks: int) -> None:
        """Give each slot its start."""
        self._tensor_counts = tensor_counts
        self._min_chunks = min_chunks
        self._slots = list(wanted)
        self.regions: list[DtypeRegion] = []
        self.size_bytes = 0
        grads = tensor_counts[0]
        self._append_slots(range(grads - 1, -1, -1))
        self._grads_end = self.size_bytes
        self.size_bytes = self.tail = max(self._grads_end, min_chunks * BOUNDARY_ALIGN_BYTES)
        self._append_slots(range(grads, len(wanted)))

    def _append_slots(self, order: Sequence[int]) -> None:
        end, slots = self.size_bytes, self._slots
        for dtype, added in dict.fromkeys((slots[i].dtype, slots[i].is_summed) for i in order):
            start = end
            for i in order:
                if (slots[i].dtype, slots[i].is_summed) == (dtype, added):
                    slots[i] = replace(slots[i], start=end)
                    end = align_up(end + slots[i].size_bytes)
            self.regions.append(DtypeRegion(dtype, added, start, end))
        self.size_bytes = end

    # ---- description for other processes ----

    def describe(self) -> dict[str, Any]:
        """The whole layout as JSON values."""
        tensors = [[DTYPE_CODES[place.dtype], list(place.shape), list(place.strides)] for place in self._slots]
        return {"tensors": tensors, "sizes": list(self._tensor_counts), "least": self._min_chunks}

    @classmethod
    def from_description(cls, description: Any) -> FlatLayout:
        """The inverse of `describe`. ValueError for anything else."""
        try:
            tensors, (grads, averaged, first) = description["tensors"], description["sizes"]
            sizes = (
                _checked_int(grads, MAX_TENSORS),
                _checked_int(averaged, MAX_TENSORS),
                _checked_int(first, MAX_TENSORS),
            )
            min_chunks = _checked_int(description.get("least", 0), MAX_CHUNKS)
            if len(tensors) != sum(sizes) + 2:
                raise ValueError(f"{len(tensors)} tensors")
            added = sizes[0] + sizes[1] + 2
            slots = [_slot_from_description(row, is_summed=i < added) for i, row in enumerate(tensors)]
        except (AttributeError, KeyError, TypeError, ValueError) as problem:
            raise ValueError(f"not the layout of a model: {problem}") from None
        if any((place.dtype, place.shape) != (torch.float64, ()) for place in slots[added - 2 : added]):
            raise ValueError("not the layout of a model: loss and count must be float64 scalars")
        if sum(align_up(place.size_bytes) for place in slots) > MAX_BYTES:
            raise ValueError(f"the layout of a model of more than {MAX_BYTES} bytes")
        layout = cls.__new__(cls)
        layout._assign_offsets(slots, sizes, min_chunks)
        return layout

    # ---- chunks ----

    @functools.cached_property
    def chunk_offsets(self) -> list[int]:
        """Chunk i is the bytes [offsets[i], offsets[i + 1]); the last chunk is the tail."""
        ranges = [(self._slots[i].start, self._slots[i].size_bytes) for i in self._grads_by_offset]
        if self._grads_end < self.tail:
            ranges.append((self._grads_end, self.tail - self._grads_end))
        return chunk_boundaries(ranges, self.size_bytes, least_chunks=self._min_chunks)

    @functools.cached_property
    def slices(self) -> list[ChunkSlice]:
        """All slices in the order of the flat buffer."""
        slots = self._slots
        return [
            ChunkSlice(chunk, *part, slots[part.place].dtype)
            for chunk, (start, stop) in enumerate(pairwise(self.chunk_offsets))
            for part in self.tensor_ranges(start, stop)
        ]

    def tensor_ranges(self, start: int, stop: int) -> list[TensorRange]:
        """The parts of gradients in the bytes [start, stop), in order."""
        return list(self._tensor_ranges(start, stop))

    def _tensor_ranges(self, start: int, stop: int) -> Iterator[TensorRange]:
        begin = max(bisect_right(self._grads_by_offset, start, key=lambda i: self._slots[i].start) - 1, 0)
        for i in self._grads_by_offset[begin:]:
            place = self._slots[i]
            if place.start >= stop:
                return
            a, b = max(place.start, start), min(place.start + place.size_bytes, stop)
            if a < b:
                yield TensorRange(i, a, b)

    def slices_of(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Gradients as flat slices in the order of the flat buffer: views where gradients have the layout's strides."""
        slices: list[Tensor] = []
        for i, counts in self._slice_lengths:
            flat = self._slots[i].flatten(grads[i])
            slices.extend(torch.split(flat, counts) if len(counts) > 1 else (flat,))
        return slices

    @functools.cached_property
    def _slice_lengths(self) -> list[tuple[int, list[int]]]:
        """The number of elements of each slice of each gradient, in the order of the flat buffer."""
        counts: dict[int, list[int]] = {}
        for part in self.slices:
            counts.setdefault(part.place, []).append((part.stop - part.start) // part.dtype.itemsize)
        return list(counts.items())

    @functools.cached_property
    def _grads_by_offset(self) -> list[int]:
        """Indices of the gradients in the order of the flat buffer, without those that have no elements."""
        filled = (i for i, place in enumerate(self.grads) if place.size_bytes)
        return sorted(filled, key=lambda i: self._slots[i].start)

    @property
    def norm_dtype(self) -> torch.dtype:
        """The dtype of the total norm."""
        return functools.reduce(torch.promote_types, (place.dtype for place in self.grads))

    # ---- sums ----

    def views(self, flat_buffer: Tensor) -> LaneSum:
        """The sum whose tensors are views of this buffer."""
        tensors = [place.view_in(flat_buffer) for place in self._slots]
        grads, averaged, first = self._tensor_counts
        small = tensors[grads : grads + averaged + 2]
        return LaneSum(tensors[:grads], small[:-2], tensors[len(tensors) - first :], small[-2], small[-1])

    @property
    def grads(self) -> list[TensorSlot]:
        return self._slots[: self._tensor_counts[0]]

    def fits(self, value: LaneSum) -> bool:
        """Whether number, shapes and dtypes of the sum's tensors match the layout."""
        summed = [
            *value.grads,
            *value.float_buffers,
            value.loss,
            value.count if value.count is not None else value.loss,
        ]
        tensors = summed + value.int_buffers
        return len(tensors) == len(self._slots) and all(
            t.layout == torch.strided and (t.dtype, tuple(t.shape)) == (place.dtype, place.shape)
            for t, place in zip(tensors, self._slots, strict=True)
        )

    def regions_within(self, start: int, stop: int) -> list[DtypeRegion]:
        """The regions' parts in the bytes [start, stop), with offsets from `start`."""
        clipped = ((r, max(r.start, start), min(r.stop, stop)) for r in self.regions)
        return [DtypeRegion(r.dtype, r.is_summed, a - start, b - start) for r, a, b in clipped if a < b]

    @property
    def digest(self) -> int:
        """Equal for layouts whose buffers can be exchanged."""
        words = repr((self._slots, self._min_chunks))
        return int.from_bytes(hashlib.sha256(words.encode()).digest(), "little")


def write_lane_sum(into: LaneSum, value: LaneSum) -> None:
    """Copy a sum into the views of a flat buffer, without gradients that a sink has already written there."""
    if value.grads:
        torch._foreach_copy_(into.grads, value.grads)
    for views, tensors in ((into.float_buffers, value.float_buffers), (into.int_buffers, value.int_buffers)):
        for view, tensor in zip(views, tensors, strict=True):
            view.copy_(tensor)
    into.loss.copy_(value.loss)
    if into.count is not None and value.count is not None:
        into.count.copy_(value.count)


def split_evenly(size_bytes: int, members: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Split a flat buffer into one range per member: equal up to 64 bytes, at multiples of 64."""
    offsets = [size_bytes * i // len(members) // ALIGN * ALIGN for i in range(len(members))] + [size_bytes]
    return {member: (offsets[i], offsets[i + 1]) for i, member in enumerate(members)}


def align_up(offset: int) -> int:
    return (offset + ALIGN - 1) // ALIGN * ALIGN


def _checked_int(number: Any, limit: int) -> int:
    if type(number) is not int or not 0 <= number <= limit:
        raise ValueError(f"{number!r:.40} is not a number from 0 to {limit}")
    return number


def _checked_ints(numbers: Iterable[Any]) -> tuple[int, ...]:
    return tuple(_checked_int(number, MAX_BYTES) for number in numbers)


def _slot_from_description(row: Any, *, is_summed: bool) -> TensorSlot:
    code, shape, strides = row
    if not isinstance(code, str) or code not in DTYPES:
        raise ValueError(f"unknown dtype {code!r:.40}")
    if not len(shape) == len(strides) <= _MAX_DIMENSIONS:
        raise ValueError("a shape that no tensor has")
    place = TensorSlot(DTYPES[code], is_summed, _checked_ints(shape), _checked_ints(strides))
    if not _is_dense(place):
        raise ValueError("strides that leave gaps or overlap")
    return place


def _is_dense(slot: TensorSlot) -> bool:
    """Whether its elements fill its bytes without gaps or overlap."""
    expected = 1
    for stride, size in sorted(zip(slot.strides, slot.shape, strict=True)):
        if size > 1 and stride != expected and 0 not in slot.shape:
            return False
        expected *= max(size, 1)
    return expected * slot.dtype.itemsize <= MAX_BYTES


def _slot_like(like: Tensor, *, is_summed: bool) -> TensorSlot:
    made = torch.empty_like(like)  # keeps strides that are dense, as torch does for gradients
    return TensorSlot(like.dtype, is_summed, tuple(made.shape), tuple(made.stride()))
