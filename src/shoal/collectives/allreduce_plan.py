"""Which rank reduces which range of the flat buffer, in one phase or two: a pure function of the view."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.collectives.shared_buffers import SEQUENCE_NUMBERS_BYTES
from shoal.collectives.transport import frames
from shoal.lanes.flat_layout import FlatLayout, split_evenly
from shoal.lanes.reduction_tree import Node, partial_nodes

ONE_PHASE_MAX_BYTES = 1 << 20  # members times buffer size: measured; above it reduce-scatter and all-gather pay off


@dataclass(frozen=True)
class AllReducePlan:
    """Which range each rank reduces, and the layout of each rank's shared memory: sequence numbers, banks of partial
    sums, the reduced range.

    All ranks make the same plan from the view and the layout.
    """

    layout: FlatLayout
    lanes: int
    nodes: Mapping[int, Sequence[Node]]
    ranges: Mapping[int, tuple[int, int]]
    phases: int

    @classmethod
    def of(cls, carries: Mapping[int, Sequence[int]], lanes: int, layout: FlatLayout) -> AllReducePlan:
        members = sorted(carries)
        nodes = {seat: partial_nodes(carries[seat], lanes) for seat in members}
        if max(map(len, nodes.values())) > frames.MAX_NODES:
            raise ValueError(f"a member carries lanes in more than {frames.MAX_NODES} separate blocks")
        size = layout.size_bytes
        if len(members) == 2 or len(members) * size < ONE_PHASE_MAX_BYTES:
            return cls(layout, lanes, nodes, dict.fromkeys(members, (0, size)), phases=1)
        return cls(layout, lanes, nodes, split_evenly(size, members), phases=2)

    @property
    def banks(self) -> int:
        return 2 if self.phases == 1 else 1

    def partial_offset(self, seat: int, bank: int, index: int) -> int:
        return SEQUENCE_NUMBERS_BYTES + (bank * len(self.nodes[seat]) + index) * self.layout.size_bytes

    def reduced_offset(self, seat: int) -> int:
        return self.partial_offset(seat, self.banks, 0)

    def shared_memory_bytes(self, seat: int) -> int:
        start, stop = self.ranges[seat]
        return self.reduced_offset(seat) + (stop - start if self.phases == 2 else 0)

    def sent_bytes(self, seat: int, to: Iterable[int]) -> int:
        """Bytes that a rank sends in one step to peers on other hosts."""
        own = (self.ranges[seat][1] - self.ranges[seat][0] + frames.FRAME_BYTES) * (self.phases - 1)
        sizes = [self.ranges[peer][1] - self.ranges[peer][0] for peer in to]
        return sum(frames.FRAME_BYTES + size * len(self.nodes[seat]) + own for size in sizes)
