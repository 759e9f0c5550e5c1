"""The plain GradientSync: lane sums are added on the fixed tree, then every replica applies the same total."""

from __future__ import annotations

import time
from dataclasses import dataclass

from shoal.collectives.allreduce_plan import AllReducePlan
from shoal.collectives.group import ViewGroup
from shoal.collectives.ordered_allreduce import OrderedAllReduce, OverlapError
from shoal.collectives.outcome import Committed, Discarded
from shoal.collectives.transport.mesh import Mesh
from shoal.collectives.transport.shared_memory import ByteBuffer, SharedMemory
from shoal.lanes.flat_layout import FlatLayout
from shoal.lanes.reduction_tree import TreeSum
from shoal.lanes.replica import GradientSink, LaneSum
from shoal.net.errors import LinkError
from shoal.spec.view import View
from shoal.strategies.base import HeldWeights
from shoal.strategies.sync_defaults import NO_SAMPLES, OnTotal, SyncDefaults


@dataclass(frozen=True)
class Agreed:
    """What all members know after an exchange. `total` is None if no lane had samples, and valid until the next one."""

    total: LaneSum | None
    halt: bool
    bytes_sent: int = 0
    waited_s: float = 0.0
    exchange_s: float = 0.0


class OrderedSync(SyncDefaults):
    """Syncs that add all lanes on the fixed tree; they differ in where the sums travel."""

    exact = True

    def commit(
        self, held: HeldWeights, step: int, sums: TreeSum[LaneSum], *, halt: bool = False
    ) -> Committed | Discarded:
        agreed = self.reduce(held, step, sums, halt=halt)
        if isinstance(agreed, Discarded):
            return agreed
        if agreed.total is None:
            return Discarded(NO_SAMPLES)
        loss = self._apply(held, step, agreed.total)
        return Committed(loss, agreed.bytes_sent, agreed.halt, agreed.waited_s, agreed.exchange_s)

    def reduce(self, held: HeldWeights, label: int, sums: TreeSum[LaneSum], *, halt: bool) -> Agreed | Discarded:
        """The sum over all lanes. Members give the same labels in the same order."""
        raise NotImplementedError

    def reconfigure(self, view: View, seat: int) -> Discarded | None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class OrderedAllReduceSync(OrderedSync):
    """A single worker that carries all lanes has no peers: its tree is complete as it is. Memory for the exchange is
    allocated at the first step that needs it and kept over views."""

    def __init__(self, lanes: int, group: ViewGroup, *, on_total: OnTotal | None = None) -> None:
        super().__init__(lanes, group, on_total)
        self._allreduce: OrderedAllReduce | None = None
        self._shared_memory: SharedMemory | None = None
        self._total: ByteBuffer | None = None
        self._overlaps = True

    def reconfigure(self, view: View, seat: int) -> Discarded | None:
        self._allreduce = None
        return self._group.enter(view, seat)

    def gradient_sink(
        self, held: HeldWeights, step: int, sums: TreeSum[LaneSum], lane: int, *, halt: bool
    ) -> GradientSink | None:
        exchange = self._allreduce
        if exchange is None or not self._overlaps or held.device.type != "cpu" or self._group.broken:
            return None
        return exchange.gradient_sink(step, sums, lane, halt=halt)

    def reduce(self, held: HeldWeights, label: int, sums: TreeSum[LaneSum], *, halt: bool) -> Agreed | Discarded:
        group = self._group
        if group.broken:
            return Discarded(group.broken)
        if group.mesh is None:
            return Agreed(sums.total(), halt)
        began = time.perf_counter()
        try:
            exchange = self._allreduce or self._make_allreduce(group.mesh, held, label)
            found = exchange.run(label, sums.partials, halt=halt)
        except LinkError as failure:
            self._overlaps = self._overlaps and not isinstance(failure, OverlapError)
            return group.discard(failure)
        exchange_s = time.perf_counter() - began - found.waited_s
        return Agreed(found.total, found.halt, found.bytes_sent, found.waited_s, exchange_s)

    def _make_allreduce(self, mesh: Mesh, held: HeldWeights, step: int) -> OrderedAllReduce:
        """Called at the first step of a view."""
        assert self._group.view is not None
        plan = AllReducePlan.of(self._group.view.carries, self._lanes, FlatLayout(held.sum_template()))
        arena = self._shared_memory_of(plan.shared_memory_bytes(mesh.seat))
        if self._total is None or len(self._total.raw) != plan.layout.size_bytes:
            self._total = ByteBuffer.private(plan.layout.size_bytes)
        self._allreduce = OrderedAllReduce(
            mesh, plan, shared_memory=arena, total=self._total, device=held.device, step=step
        )
        return self._allreduce

    def _shared_memory_of(self, size_bytes: int) -> SharedMemory:
        if self._shared_memory is None or self._shared_memory.size_bytes < size_bytes:
            if self._shared_memory:
                self._shared_memory.close()
            self._shared_memory = SharedMemory(size_bytes)
        return self._shared_memory

    def close(self) -> None:
        self._allreduce = None
        self._group.leave()
        if self._shared_memory:
            self._shared_memory.close()
            self._shared_memory = None
