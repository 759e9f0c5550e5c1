"""Sums of lanes that are sent from where they lie, without a copy of their large tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shoal.parallel.flat import Layout, Part, write
from shoal.parallel.lane_sum import LaneSum
from shoal.parallel.links.memory import Memory
from shoal.spec.table import Piece

LEAST_BYTES = 1 << 16
"""Smaller tensors are copied side by side: that costs less than to name each of them to the kernel."""


class Lying:
    """Partials for `Push`. Each has a stretch in `memory`, which servers on this host can read: the small tensors are
    there at once, the large ones when such a server asks."""

    def __init__(self, layout: Layout, memory: Memory, count: int) -> None:
        self._layout = layout
        self._memory = memory
        rooms = torch.split(memory.tensor[: count * layout.size_bytes], layout.size_bytes)
        self._rooms = [layout.views(room) for room in rooms]
        self._flat: dict[tuple[int, int], memoryview] = {}
        self._ways: dict[tuple[int, int], list[Part]] = {}

    def lay(self, index: int, value: LaneSum) -> None:
        """What is pushed next. It must not change until all of it is answered."""
        large = [self._is_large(i, grad) for i, grad in enumerate(value.grads)]
        room = self._rooms[index]
        here = LaneSum(_those(room.grads, large), room.averaged, room.first, room.loss, room.count)
        small = LaneSum(_those(value.grads, large), value.averaged, value.first, value.loss, value.count)
        write(here, small)
        self._flat = {key: flat for key, flat in self._flat.items() if key[0] != index}
        for i, grad in enumerate(value.grads):
            if large[i]:
                flat = self._layout.grads[i].flat(grad).view(torch.uint8)
                self._flat[index, i] = flat.numpy().data

    def _is_large(self, place: int, grad: Tensor) -> bool:
        return grad.device.type == "cpu" and self._layout.grads[place].size_bytes >= LEAST_BYTES

    def share(self, index: int, piece: Piece) -> None:
        for start, stop, content in self._large(index, piece):
            self._memory.raw[start:stop] = content

    def parts(self, index: int, piece: Piece) -> list[memoryview]:
        found = []
        base, raw = index * self._layout.size_bytes, self._memory.raw
        at = base + piece.start
        for start, stop, content in self._large(index, piece):
            if at < start:
                found.append(raw[at:start])
            found.append(content)
            at = stop
        if at < base + piece.stop:
            found.append(raw[at : base + piece.stop])
        return found

    def _large(self, index: int, piece: Piece) -> Iterator[tuple[int, int, memoryview]]:
        """What a piece has of large tensors, and where in the memory that belongs."""
        base, places = index * self._layout.size_bytes, self._layout.grads
        for place, start, stop in self._way(piece):
            if flat := self._flat.get((index, place)):
                begin = places[place].start
                yield base + start, base + stop, flat[start - begin : stop - begin]

    def _way(self, piece: Piece) -> list[Part]:
        key = piece.start, piece.stop
        if key not in self._ways:
            places = self._layout.grads
            parts = self._layout.parts(*key)
            self._ways[key] = [part for part in parts if places[part.place].size_bytes >= LEAST_BYTES]
        return self._ways[key]


def _those(tensors: Sequence[Tensor], large: Sequence[bool]) -> list[Tensor]:
    return [tensor for tensor, is_large in zip(tensors, large, strict=True) if not is_large]
