"""The plain GradientSync: lane sums are added on the fixed tree, then every replica applies the same total."""

from __future__ import annotations

import time

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


class OrderedAllReduceSync(SyncDefaults):
    """A single worker that carries all lanes has no peers: its tree is complete as it is. Memory for the exchange is
    allocated at the first step that needs it and kept over views."""

    exact = True

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

    def commit(
        self, held: HeldWeights, step: int, sums: TreeSum[LaneSum], *, halt: bool = False
    ) -> Committed | Discarded:
        group = self._group
        if group.broken:
            return Discarded(group.broken)
        if group.mesh is None:
            total = sums.total()
            return Discarded(NO_SAMPLES) if total is None else Committed(self._apply(held, step, total), halt=halt)
        began = time.perf_counter()
        try:
            exchange = self._allreduce or self._make_allreduce(group.mesh, held, step)
            agreed = exchange.run(step, sums.partials, halt=halt)
        except LinkError as failure:
            self._overlaps = self._overlaps and not isinstance(failure, OverlapError)
            return group.discard(failure)
        if agreed.total is None:
            return Discarded(NO_SAMPLES)
        exchange_s = time.perf_counter() - began - agreed.waited_s
        loss = self._apply(held, step, agreed.total)
        return Committed(loss, agreed.bytes_sent, agreed.halt, agreed.waited_s, exchange_s)

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
