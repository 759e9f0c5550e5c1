"""Named arrays as the flat stretch of bytes that servers hold. `parallel.flat` is its twin for those who have torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.spec.chunk_table import chunk_boundaries

Arrays = dict[str, NDArray[Any]]
ALIGN = 64
CODES = {"float64": "F64", "float32": "F32", "float16": "F16"}
"""safetensors' words for what can be trained here."""

_SCALAR_TENSOR = ["F64", [], []]  # the loss and the count of samples, which jobs send along: here they are always 0


class ArraySlice(NamedTuple):
    """The bytes [start, stop) of the stretch, all of them of array number `place`."""

    place: int
    start: int
    stop: int


@dataclass(frozen=True)
class ArraySlot:
    """Where one array lies, and what it is like."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.dtype.itemsize * int(np.prod(self.shape))

    def describe(self) -> list[Any]:
        strides = [int(np.prod([max(n, 1) for n in self.shape[i + 1 :]])) for i in range(len(self.shape))]
        return [CODES[self.dtype.name], list(self.shape), strides]


class NumpyLayout:
    """The last array lies first, and arrays of one dtype lie together. Whoever names the same arrays in the same order
    has the same layout."""

    def __init__(self, like: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """`like`: dtype and shape by name."""
        rows = [(name, np.dtype(dtype), tuple(shape)) for name, (dtype, shape) in like.items()]
        places: dict[str, ArraySlot] = {}
        end = 0
        for kind in dict.fromkeys(dtype for _, dtype, _ in reversed(rows)):
            for name, dtype, shape in reversed(rows):
                if dtype == kind:
                    places[name] = ArraySlot(name, dtype, shape, end)
                    end = -(-places[name].stop // ALIGN) * ALIGN
        self.slots = [places[name] for name, _, _ in rows]
        self.tail = end
        self.size_bytes = end + 2 * ALIGN

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> NumpyLayout:
        return cls({name: (array.dtype.name, array.shape) for name, array in arrays.items()})

    @property
    def like(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {place.name: (place.dtype.name, place.shape) for place in self.slots}

    def describe(self) -> dict[str, Any]:
        """In the words of `parallel.flat.Layout`."""
        tensors = [place.describe() for place in self.slots]
        return {"tensors": [*tensors, _SCALAR_TENSOR, _SCALAR_TENSOR], "sizes": [len(tensors), 0, 0]}

    @cached_property
    def _slots_by_offset(self) -> list[int]:
        there = (i for i, place in enumerate(self.slots) if place.stop > place.start)
        return sorted(there, key=lambda i: self.slots[i].start)

    @cached_property
    def cuts(self) -> list[int]:
        lying = (self.slots[i] for i in self._slots_by_offset)
        return chunk_boundaries([(place.start, place.stop - place.start) for place in lying], self.size_bytes)

    def slices(self, start: int, stop: int) -> Iterator[ArraySlice]:
        """What the bytes [start, stop) hold of the arrays, in order."""
        for i in self._slots_by_offset:
            a, b = max(self.slots[i].start, start), min(self.slots[i].stop, stop)
            if a < b:
                yield ArraySlice(i, a, b)

    def views(self, flat_buffer: memoryview) -> Arrays:
        """The arrays that lie in a stretch: its very memory."""
        return {
            place.name: np.frombuffer(flat_buffer[place.start : place.stop], place.dtype).reshape(place.shape)
            for place in self.slots
        }
