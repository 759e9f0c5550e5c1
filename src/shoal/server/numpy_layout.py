"""The layout of named arrays in the servers' flat buffer: the numpy twin of `lanes.flat_layout`, for clients without
torch."""

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
"""safetensors' codes of the dtypes that can be trained."""

_SCALAR_TENSOR = ["F64", [], []]  # loss and count, which only jobs use: here they are always 0


class ArraySlice(NamedTuple):
    """The bytes [start, stop) of the flat buffer, all of them of array number `place`."""

    place: int
    start: int
    stop: int


@dataclass(frozen=True)
class ArraySlot:
    """Offset, dtype and shape of one array in the flat buffer."""

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
    """The last array comes first, and arrays of one dtype lie side by side. The same arrays in the same order give the
    same layout."""

    def __init__(self, like: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """`like` has dtype and shape by name."""
        specs = [(name, np.dtype(dtype), tuple(shape)) for name, (dtype, shape) in like.items()]
        slots: dict[str, ArraySlot] = {}
        end = 0
        for kind in dict.fromkeys(dtype for _, dtype, _ in reversed(specs)):
            for name, dtype, shape in reversed(specs):
                if dtype == kind:
                    slots[name] = ArraySlot(name, dtype, shape, end)
                    end = -(-slots[name].stop // ALIGN) * ALIGN
        self.slots = [slots[name] for name, _, _ in specs]
        self.tail = end
        self.size_bytes = end + 2 * ALIGN

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> NumpyLayout:
        return cls({name: (array.dtype.name, array.shape) for name, array in arrays.items()})

    @property
    def like(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {place.name: (place.dtype.name, place.shape) for place in self.slots}

    def describe(self) -> dict[str, Any]:
        """The description that `FlatLayout.from_description` reads."""
        tensors = [place.describe() for place in self.slots]
        return {"tensors": [*tensors, _SCALAR_TENSOR, _SCALAR_TENSOR], "sizes": [len(tensors), 0, 0]}

    @cached_property
    def _slots_by_offset(self) -> list[int]:
        filled = (i for i, place in enumerate(self.slots) if place.stop > place.start)
        return sorted(filled, key=lambda i: self.slots[i].start)

    @cached_property
    def cuts(self) -> list[int]:
        slots = (self.slots[i] for i in self._slots_by_offset)
        return chunk_boundaries([(place.start, place.stop - place.start) for place in slots], self.size_bytes)

    def slices(self, start: int, stop: int) -> Iterator[ArraySlice]:
        """The parts of arrays in the bytes [start, stop), in order."""
        for i in self._slots_by_offset:
            a, b = max(self.slots[i].start, start), min(self.slots[i].stop, stop)
            if a < b:
                yield ArraySlice(i, a, b)

    def views(self, flat_buffer: memoryview) -> Arrays:
        """The arrays as views of a flat buffer."""
        return {
            place.name: np.frombuffer(flat_buffer[place.start : place.stop], place.dtype).reshape(place.shape)
            for place in self.slots
        }
