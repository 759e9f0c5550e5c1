"""Who adds up which part of the stretch, in one phase or two, and where it lies: a pure function of the view."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.parallel.arenas import STAMPS_BYTES
from shoal.parallel.flat import Layout, shares
from shoal.parallel.links import frames
from shoal.parallel.tree import Node, nodes_of

LITTLE_BYTES = 1 << 20  # members times stretch: measured, where the second phase begins to pay


@dataclass(frozen=True)
class Plan:
    """Who adds up what, and where it lies in each member's arena: stamps, banks of partials, the share it adds up.

    All members make the same plan from the view and the layout.
    """

    layout: Layout
    lanes: int
    nodes: Mapping[int, Sequence[Node]]
    shares: Mapping[int, tuple[int, int]]
    phases: int

    @classmethod
    def of(cls, carries: Mapping[int, Sequence[int]], lanes: int, layout: Layout) -> Plan:
        members = sorted(carries)
        nodes = {seat: nodes_of(carries[seat], lanes) for seat in members}
        if max(map(len, nodes.values())) > frames.MOST_NODES:
            raise ValueError(f"a member carries lanes in more than {frames.MOST_NODES} separate blocks")
        size = layout.size_bytes
        if len(members) == 2 or len(members) * size < LITTLE_BYTES:
            return cls(layout, lanes, nodes, dict.fromkeys(members, (0, size)), phases=1)
        return cls(layout, lanes, nodes, shares(size, members), phases=2)

    @property
    def banks(self) -> int:
        return 2 if self.phases == 1 else 1

    def partial(self, seat: int, bank: int, index: int) -> int:
        return STAMPS_BYTES + (bank * len(self.nodes[seat]) + index) * self.layout.size_bytes

    def sums(self, seat: int) -> int:
        return self.partial(seat, self.banks, 0)

    def arena_bytes(self, seat: int) -> int:
        start, stop = self.shares[seat]
        return self.sums(seat) + (stop - start if self.phases == 2 else 0)

    def sent_bytes(self, seat: int, to: Iterable[int]) -> int:
        """What a member sends in a step to peers on other hosts."""
        own = (self.shares[seat][1] - self.shares[seat][0] + frames.FRAME_BYTES) * (self.phases - 1)
        sizes = [self.shares[peer][1] - self.shares[peer][0] for peer in to]
        return sum(frames.FRAME_BYTES + size * len(self.nodes[seat]) + own for size in sizes)
