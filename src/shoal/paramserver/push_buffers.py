"""Sums of lanes that are sent from where they lie, without a copy of their large tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shoal.collectives.transport.shared_memory import ByteBuffer
from shoal.lanes.flat_layout import FlatLayout, TensorRange, write_lane_sum
from shoal.lanes.lane_sum import LaneSum
from shoal.spec.chunk_table import ParameterPiece

ZERO_COPY_MIN_BYTES = 1 << 16
"""Smaller tensors are copied side by side: that costs less than to name each of them to the kernel."""


class ZeroCopyPush:
    """Partials for `Push`. Each has a stretch in `memory`, which servers on this host can read: the small tensors are
    there at once, the large ones when such a server asks."""

    def __init__(self, layout: FlatLayout, memory: ByteBuffer, count: int) -> None:
        self._layout = layout
        self._memory = memory
        rooms = torch.split(memory.tensor[: count * layout.size_bytes], layout.size_bytes)
        self._views = [layout.views(room) for room in rooms]
        self._large_tensors: dict[tuple[int, int], memoryview] = {}
        self._large_slices_cache: dict[tuple[int, int], list[TensorRange]] = {}

    def set_partial(self, index: int, value: LaneSum) -> None:
        """What is pushed next. It must not change until all of it is answered."""
        large = [self._is_large(i, grad) for i, grad in enumerate(value.grads)]
        room = self._views[index]
        here = LaneSum(_small_tensors(room.grads, large), room.float_buffers, room.int_buffers, room.loss, room.count)
        small = LaneSum(
            _small_tensors(value.grads, large), value.float_buffers, value.int_buffers, value.loss, value.count
        )
        write_lane_sum(here, small)
        self._large_tensors = {key: flat for key, flat in self._large_tensors.items() if key[0] != index}
        for i, grad in enumerate(value.grads):
            if large[i]:
                flat = self._layout.grads[i].flatten(grad).view(torch.uint8)
                self._large_tensors[index, i] = flat.numpy().data

    def _is_large(self, index: int, grad: Tensor) -> bool:
        return grad.device.type == "cpu" and self._layout.grads[index].size_bytes >= ZERO_COPY_MIN_BYTES

    def copy_to_shared_memory(self, index: int, piece: ParameterPiece) -> None:
        for start, stop, content in self._large_ranges(index, piece):
            self._memory.raw[start:stop] = content

    def buffers(self, index: int, piece: ParameterPiece) -> list[memoryview]:
        found = []
        base, raw = index * self._layout.size_bytes, self._memory.raw
        at = base + piece.start
        for start, stop, content in self._large_ranges(index, piece):
            if at < start:
                found.append(raw[at:start])
            found.append(content)
            at = stop
        if at < base + piece.stop:
            found.append(raw[at : base + piece.stop])
        return found

    def _large_ranges(self, index: int, piece: ParameterPiece) -> Iterator[tuple[int, int, memoryview]]:
        """What a piece has of large tensors, and where in the memory that belongs."""
        base, places = index * self._layout.size_bytes, self._layout.grads
        for place, start, stop in self._large_slices(piece):
            if flat := self._large_tensors.get((index, place)):
                begin = places[place].start
                yield base + start, base + stop, flat[start - begin : stop - begin]

    def _large_slices(self, piece: ParameterPiece) -> list[TensorRange]:
        key = piece.start, piece.stop
        if key not in self._large_slices_cache:
            places = self._layout.grads
            parts = self._layout.tensor_ranges(*key)
            self._large_slices_cache[key] = [
                part for part in parts if places[part.place].size_bytes >= ZERO_COPY_MIN_BYTES
            ]
        return self._large_slices_cache[key]


def _small_tensors(tensors: Sequence[Tensor], large: Sequence[bool]) -> list[Tensor]:
    return [tensor for tensor, is_large in zip(tensors, large, strict=True) if not is_large]
