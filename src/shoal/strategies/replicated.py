"""Exact synchronous training: lane sums are added on the fixed tree, then every replica applies the same total."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from shoal.collectives.allreduce_plan import AllReducePlan
from shoal.collectives.buckets import BucketParams, bucket_params
from shoal.collectives.group import ViewGroup
from shoal.collectives.ordered_allreduce import OrderedAllReduce, OverlapError
from shoal.collectives.outcome import Committed, Discarded
from shoal.collectives.transport.endpoint import Endpoint
from shoal.collectives.transport.mesh import Mesh
from shoal.collectives.transport.shared_memory import ByteBuffer, SharedMemory
from shoal.lanes.flat_layout import FlatLayout
from shoal.lanes.reduction_tree import TreeSum
from shoal.lanes.replica import GradientSink, LaneSum, Replica
from shoal.net.errors import LinkError
from shoal.spec.view import View
from shoal.strategies.base import LockstepDefaults
from shoal.strategies.local_sgd.fragments import FragmentAllReduce, FragmentChannel, PlainFragmentAllReduce
from shoal.strategies.local_sgd.replica import LocalReplica
from shoal.strategies.local_sgd.schedule import partition_into_fragments

NO_SAMPLES = "no lane had samples"


class OrderedAllReduceSync(LockstepDefaults):
    """With one worker that carries all lanes there is nobody to talk to: the tree is complete as it is, and no
    `endpoint` is needed. Memory for the exchange is made at the first step that needs it and kept over views.
    """

    exact = True

    def __init__(self, lanes: int, *, endpoint: Endpoint | None = None, token: str = "") -> None:
        super().__init__(lanes)
        self._group = ViewGroup(endpoint, token)
        self._allreduce: OrderedAllReduce | None = None
        self._shared_memory: SharedMemory | None = None
        self._total: ByteBuffer | None = None
        self._overlaps = True
        self._fragment_channels: list[FragmentChannel] = []

    def reconfigure(self, view: View, seat: int) -> str:
        self._allreduce = None
        self._close_fragment_channels()
        return self._group.enter(view, seat)

    def gradient_sink(
        self, replica: Replica, step: int, sums: TreeSum[LaneSum], lane: int, *, halt: bool
    ) -> GradientSink | None:
        exchange = self._allreduce
        if exchange is None or not self._overlaps or replica.device.type != "cpu" or self._group.broken:
            return None
        return exchange.gradient_sink(step, sums, lane, halt=halt)

    def commit(
        self, replica: Replica, step: int, sums: TreeSum[LaneSum], *, halt: bool = False
    ) -> Committed | Discarded:
        meeting = self._group
        if meeting.broken:
            return Discarded(meeting.broken)
        if meeting.mesh is None:
            total = sums.total()
            return Discarded(NO_SAMPLES) if total is None else Committed(self._apply(replica, step, total), halt=halt)
        began = time.perf_counter()
        try:
            exchange = self._allreduce or self._make_allreduce(meeting.mesh, replica, step)
            agreed = exchange.run(step, sums.partials, halt=halt)
        except LinkError as failure:
            self._overlaps = self._overlaps and not isinstance(failure, OverlapError)
            return meeting.discard(failure)
        if agreed.total is None:
            return Discarded(NO_SAMPLES)
        exchange_s = time.perf_counter() - began - agreed.waited_s
        loss = self._apply(replica, step, agreed.total)
        return Committed(loss, agreed.bytes_sent, agreed.halt, agreed.waited_s, exchange_s)

    def fragment_channels(self, replica: LocalReplica, max_fragments: int) -> list[FragmentChannel]:
        """How fragments of the parameters, at most so many, travel in this view."""
        if not self._fragment_channels:
            cuts, grads = bucket_params(replica.layout), replica.layout.grads
            for cut in partition_into_fragments([sum(grads[i].size_bytes for i in run) for run in cuts], max_fragments):
                which = sorted(i for run in cuts[cut.start : cut.stop] for i in run)
                inside = [[which.index(i) for i in run] for run in cuts[cut.start : cut.stop]]
                stream = self._fragment_allreduce(
                    FlatLayout(replica.fragment_template(which)), cut.start, inside, replica.device
                )
                self._fragment_channels.append(FragmentChannel(which, stream))
        return self._fragment_channels

    def _fragment_allreduce(
        self, layout: FlatLayout, first_bucket: int, params_by_bucket: BucketParams, device: torch.device
    ) -> FragmentAllReduce:
        """For what lies in these cuts of the stretch, from the first of them on; by numbers within the fragment."""
        assert self._group.view is not None
        carries = self._group.view.carries
        return PlainFragmentAllReduce(layout, carries, self._lanes, mesh=self._group.mesh, device=device)

    def abort_view(self) -> None:
        """Nothing more comes of this view: whoever waits in another thread comes back."""
        if self._group.view:
            self.abort(self._group.view.number)

    def _close_fragment_channels(self) -> None:
        for way in self._fragment_channels:
            way.allreduce.close()
        self._fragment_channels = []

    def _apply(self, replica: Replica, step: int, total: LaneSum) -> Tensor:
        if self.on_total:
            self.on_total(step, total)
        return replica.apply(step, total)

    def _make_allreduce(self, mesh: Mesh, replica: Replica, step: int) -> OrderedAllReduce:
        """The first step of a view: meet in memory."""
        assert self._group.view is not None
        plan = AllReducePlan.of(self._group.view.carries, self._lanes, FlatLayout(replica.sum_template()))
        arena = self._shared_memory_of(plan.shared_memory_bytes(mesh.seat))
        if self._total is None or len(self._total.raw) != plan.layout.size_bytes:
            self._total = ByteBuffer.private(plan.layout.size_bytes)
        self._allreduce = OrderedAllReduce(
            mesh, plan, shared_memory=arena, total=self._total, device=replica.device, step=step
        )
        return self._allreduce

    def _shared_memory_of(self, size_bytes: int) -> SharedMemory:
        if self._shared_memory is None or self._shared_memory.size_bytes < size_bytes:
            if self._shared_memory:
                self._shared_memory.close()
            self._shared_memory = SharedMemory(size_bytes)
        return self._shared_memory

    def gather(self, label: int, content: bytes) -> dict[int, bytes] | Discarded:
        return self._group.gather(label, content)

    def abort(self, view: int) -> None:
        self._group.abort(view)

    def moved_bytes(self) -> int:
        return self._group.moved_bytes

    def aborted(self) -> bool:
        return self._group.aborted()

    def close(self) -> None:
        self._allreduce = None
        self._close_fragment_channels()
        self._group.leave()
        if self._shared_memory:
            self._shared_memory.close()
            self._shared_memory = None
