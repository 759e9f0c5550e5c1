"""Ordered all-reduce on a device: the sum of `OrderedAllReduce`, bit for bit, without a copy in host memory.

Three steps over a torch process group. All-to-all: each rank gets its range of every rank's partial sums. Ordered add:
it adds them on the fixed tree. All-gather: every rank gets all ranges.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.collectives.torch_group import TorchGroup
from shoal.collectives.tree_reduce import TreeReduce, build_sum_tree
from shoal.lanes.flat_layout import FlatLayout, split_evenly, write_lane_sum
from shoal.lanes.lane_sum import LaneSum
from shoal.lanes.reduction_tree import Node, partial_nodes
from shoal.net.errors import LinkError

_HEADER = struct.Struct("<??Q32s")
_MAX_NODES = 64
_MAX_CACHED_REDUCTIONS = 8


class PartialsHeader(NamedTuple):
    """What a member sends before the exchange. Bit i of `filled`: its node number i has samples."""

    halt: bool
    counted: bool
    filled: int
    digest: bytes

    def pack(self) -> bytes:
        return _HEADER.pack(*self)

    @classmethod
    def unpack(cls, content: bytes) -> PartialsHeader:
        try:
            return cls(*_HEADER.unpack(content))
        except struct.error as failure:
            raise LinkError(f"a member says {len(content)} bytes of noise") from failure


class DeviceAllReduce:
    """The all-reduces of one view. Memory of the device: its partial sums, a copy of them cut by rank, and two times
    the sum. `run` belongs to the thread of the process group."""

    def __init__(
        self, layout: FlatLayout, carries: Mapping[int, Sequence[int]], lanes: int, *, seat: int, device: torch.device
    ) -> None:
        self._layout, self._lanes, self._seat = layout, lanes, seat
        self._seats = sorted(carries)
        self._nodes = {member: partial_nodes(carries[member], lanes) for member in self._seats}
        if max(map(len, self._nodes.values())) > _MAX_NODES:
            raise ValueError(f"a member carries lanes in more than {_MAX_NODES} separate blocks")
        self._ranges = split_evenly(layout.size_bytes, self._seats)
        start, stop = self._ranges[seat]
        self._size = stop - start
        self._padded = max(b - a for a, b in self._ranges.values())
        self._received_bytes = [len(self._nodes[member]) * self._size for member in self._seats]
        self._sent_bytes = [len(self._nodes[seat]) * (b - a) for a, b in self._ranges.values()]

        def room(size_bytes: int) -> Tensor:
            return torch.zeros(size_bytes, dtype=torch.uint8, device=device)

        self._partials = [room(layout.size_bytes) for _ in self._nodes[seat]]
        self._views = [layout.views(partial) for partial in self._partials]
        self._received = room(sum(self._received_bytes))
        self._reduced = room(self._padded)
        self._gathered = room(self._padded * len(self._seats))
        self._total = room(layout.size_bytes)
        self._result = layout.views(self._total)
        self._reductions: dict[tuple[int, ...], TreeReduce] = {}
        self.digest = layout.digest.to_bytes(32, "little")

    def write(self, partials: Mapping[Node, LaneSum | None], *, halt: bool) -> PartialsHeader:
        """Write this worker's partial sums into their flat buffers."""
        nodes = self._nodes[self._seat]
        if sorted(partials) != sorted(nodes):
            raise ValueError(f"got the sums of nodes {sorted(partials)}, but the view needs {sorted(nodes)}")
        filled, counted = 0, False
        for number, node in enumerate(nodes):
            value = partials[node]
            if value is not None:
                if not self._layout.fits(value):
                    raise ValueError("a lane's gradients or buffers differ from the model's in number, shape or dtype")
                write_lane_sum(self._views[number], value)
                filled, counted = filled | 1 << number, counted or value.count is not None
        return PartialsHeader(halt, counted, filled, self.digest)

    def run(self, filled: Mapping[int, int], group: TorchGroup) -> None:
        """All-to-all, ordered add, all-gather. `filled` has every member's, by seat."""
        group.alltoall_base(self._received, self._cut_by_rank(), self._received_bytes, self._sent_bytes).wait()
        reduction = self._reduction(tuple(filled[member] for member in self._seats))
        reduction.restart()
        reduction.run(self._size)
        group._allgather_base(self._gathered, self._reduced).wait()
        for rank, (start, stop) in enumerate(self._ranges.values()):
            first = rank * self._padded
            self._total[start:stop].copy_(self._gathered[first : first + stop - start])
        if self._total.is_cuda:
            torch.cuda.synchronize(self._total.device)  # NCCL's wait() only blocks the stream

    def total(self, *, counted: bool) -> LaneSum:
        """The sum over all lanes, valid until the next `run`."""
        it = self._result
        return LaneSum(it.grads, it.float_buffers, it.int_buffers, it.loss.clone(), it.count if counted else None)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends to others in one step."""
        rank = self._seats.index(self._seat)
        return sum(self._sent_bytes) - self._sent_bytes[rank] + self._padded * (len(self._seats) - 1)

    def _cut_by_rank(self) -> Tensor:
        if len(self._partials) == 1:
            return self._partials[0]
        return torch.cat([partial[a:b] for a, b in self._ranges.values() for partial in self._partials])

    def _reduction(self, filled: tuple[int, ...]) -> TreeReduce:
        """Cached, because nearly all steps use the same one or two."""
        if filled not in self._reductions:
            if len(self._reductions) >= _MAX_CACHED_REDUCTIONS:
                self._reductions.clear()
            self._reductions[filled] = self._new_reduction(filled)
        return self._reductions[filled]

    def _new_reduction(self, filled: tuple[int, ...]) -> TreeReduce:
        partials: list[tuple[Node, Tensor | None]] = []
        offset = 0
        for member, mask in zip(self._seats, filled, strict=True):
            for number, node in enumerate(self._nodes[member]):
                partials.append((node, self._received[offset : offset + self._size] if mask >> number & 1 else None))
                offset += self._size
        tree = build_sum_tree(partials, self._lanes)
        assert tree is not None
        start, stop = self._ranges[self._seat]
        return TreeReduce(tree, self._reduced[: self._size], self._layout.regions_within(start, stop))
