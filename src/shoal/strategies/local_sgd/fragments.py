"""Parameter fragments, exchanged while lanes compute. Each has its own all-reduce; one is in flight at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from shoal.collectives.allreduce_plan import AllReducePlan
from shoal.collectives.buckets import BucketParams, EncodedLayout, bucket_params
from shoal.collectives.encoded_allreduce import EncodedAllReduce, EncodedAllReduceStep, shared_memory_bytes
from shoal.collectives.group import ViewGroup
from shoal.collectives.lane_residuals import FragmentResiduals, LaneResiduals
from shoal.collectives.ordered_allreduce import AllReduceResult, OrderedAllReduce
from shoal.collectives.transport.mesh import Mesh
from shoal.collectives.transport.shared_memory import ByteBuffer, SharedMemory
from shoal.lanes.flat_layout import FlatLayout
from shoal.lanes.lane_sum import LaneSum, add
from shoal.lanes.reduction_tree import TreeSum
from shoal.net.errors import LinkError
from shoal.strategies.local_sgd.replica import LocalReplica
from shoal.strategies.local_sgd.schedule import partition_into_fragments

Carries = Mapping[int, Sequence[int]]


class FragmentAllReduce(Protocol):
    """The all-reduce of one fragment in one view. `plain_bytes` is what each run would send without the codec; None if
    there is no codec."""

    plain_bytes: int | None

    def begin_step(self) -> TreeSum[LaneSum]:
        """Returns the tree that takes this worker's lanes."""

    def run(self, step: int, sums: TreeSum[LaneSum]) -> AllReduceResult:
        """Exchange this worker's complete lanes for the sum of all lanes. Called in a thread of its own."""

    def close(self) -> None:
        """Free the memory. No thread runs it any more."""


class FragmentChannel(NamedTuple):
    """The parameter indices of a fragment, and its all-reduce."""

    param_indices: list[int]
    allreduce: FragmentAllReduce


class PlainFragmentAllReduce:
    plain_bytes: int | None = None

    def __init__(
        self, layout: FlatLayout, carries: Carries, lanes: int, *, mesh: Mesh | None, device: torch.device
    ) -> None:
        self._mesh = mesh
        self._lanes = lanes
        self._plan = AllReducePlan.of(carries, lanes, layout)
        self._device = device
        self._allreduce: OrderedAllReduce | None = None
        self._shared_memory: SharedMemory | None = None

    def begin_step(self) -> TreeSum[LaneSum]:
        return TreeSum(self._lanes, add)

    def run(self, step: int, sums: TreeSum[LaneSum]) -> AllReduceResult:
        if self._mesh is None:
            return AllReduceResult(sums.total(), halt=False, bytes_sent=0, waited_s=0.0)
        if self._allreduce is None:
            self._shared_memory = arena = SharedMemory(self._plan.shared_memory_bytes(self._mesh.seat))
            total = ByteBuffer.private(self._plan.layout.size_bytes)
            self._allreduce = OrderedAllReduce(
                self._mesh, self._plan, shared_memory=arena, total=total, device=self._device, step=step
            )
        return self._allreduce.run(step, sums.partials, halt=False)

    def close(self) -> None:
        self._allreduce = None
        if self._shared_memory:
            self._shared_memory.close()


class EncodedFragmentAllReduce:
    def __init__(
        self,
        layout: EncodedLayout,
        carries: Carries,
        seat: int,
        *,
        mesh: Mesh | None,
        residuals: FragmentResiduals | None,
        device: torch.device,
    ) -> None:
        stretch, total = ByteBuffer.private(layout.layout.size_bytes), ByteBuffer.private(layout.layout.size_bytes)
        self._residuals = residuals
        lanes, far = sum(map(len, carries.values())), [link.seat for link in mesh.remote_links] if mesh else []
        self.plain_bytes: int | None = (
            AllReducePlan.of(carries, lanes, layout.layout).sent_bytes(seat, far) if far else 0
        )
        self._shared_memory = SharedMemory(shared_memory_bytes(layout, len(carries[seat])))
        self._allreduce: EncodedAllReduce | None = EncodedAllReduce(
            layout,
            carries,
            seat,
            mesh=mesh,
            shared_memory=self._shared_memory,
            flat_buffer=stretch,
            total=total,
            residuals=residuals,
            device=device,
        )

    def begin_step(self) -> TreeSum[LaneSum]:
        assert self._allreduce
        return self._allreduce.begin_step()

    def run(self, step: int, sums: TreeSum[LaneSum]) -> AllReduceResult:
        assert isinstance(sums, EncodedAllReduceStep)
        if self._residuals:
            self._residuals.carry_forward()
        return sums.allreduce.run(sums, step, halt=False)

    def close(self) -> None:
        self._allreduce = None
        self._shared_memory.close()


MakeFragmentAllReduce = Callable[[FlatLayout, int, BucketParams], FragmentAllReduce]
"""Makes the all-reduce of a fragment from its layout, the index of its first bucket, and the parameters of each of its
buckets, numbered within the fragment."""


def plain_fragments(group: ViewGroup, *, lanes: int, device: torch.device) -> MakeFragmentAllReduce:
    def make(layout: FlatLayout, first_bucket: int, params_by_bucket: BucketParams) -> FragmentAllReduce:
        assert group.view is not None
        return PlainFragmentAllReduce(layout, group.view.carries, lanes, mesh=group.mesh, device=device)

    return make


def encoded_fragments(
    group: ViewGroup,
    *,
    settings: Mapping[str, Any],
    layout: Callable[[], EncodedLayout],
    residuals: LaneResiduals,
    device: torch.device,
) -> MakeFragmentAllReduce:
    """`settings` is the job's codec. `layout()` is that of the whole model; a fragment has a range of its residuals."""

    def make(fragment: FlatLayout, first_bucket: int, params_by_bucket: BucketParams) -> FragmentAllReduce:
        assert group.view is not None
        encoded, own_residuals = EncodedLayout(fragment, settings, params_by_bucket=params_by_bucket), None
        if encoded.needs_residual:
            start = layout().buckets[first_bucket].residual_range[0]
            own_residuals = residuals.fragment(start, start + encoded.residual_floats)
        return EncodedFragmentAllReduce(
            encoded, group.view.carries, group.seat, mesh=group.mesh, residuals=own_residuals, device=device
        )

    return make


class FragmentChannels:
    """The channels of all fragments in the present view, made at their first use."""

    def __init__(self, local: LocalReplica, make_allreduce: MakeFragmentAllReduce) -> None:
        self._local = local
        self._make_allreduce = make_allreduce
        self._channels: list[FragmentChannel] = []

    def open(self, max_fragments: int) -> list[FragmentChannel]:
        """The channels of at most `max_fragments` fragments."""
        if not self._channels:
            cuts, grads = bucket_params(self._local.layout), self._local.layout.grads
            for cut in partition_into_fragments([sum(grads[i].size_bytes for i in run) for run in cuts], max_fragments):
                which = sorted(i for run in cuts[cut.start : cut.stop] for i in run)
                inside = [[which.index(i) for i in run] for run in cuts[cut.start : cut.stop]]
                layout = FlatLayout(self._local.fragment_template(which))
                self._channels.append(FragmentChannel(which, self._make_allreduce(layout, cut.start, inside)))
        return self._channels

    def close(self) -> None:
        for channel in self._channels:
            channel.allreduce.close()
        self._channels = []


class PendingFragment:
    """A fragment in flight. `wait` raises LinkError if it does not arrive."""

    def __init__(self, allreduce: FragmentAllReduce, step: int, sums: TreeSum[LaneSum]) -> None:
        self._result: AllReduceResult | BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(allreduce, step, sums), daemon=True, name="fragment")
        self._thread.start()

    def _run(self, allreduce: FragmentAllReduce, step: int, sums: TreeSum[LaneSum]) -> None:
        try:
            self._result = allreduce.run(step, sums)
        except BaseException as failure:
            self._result = failure

    def raise_if_failed(self) -> None:
        """LinkError if the exchange has already failed."""
        if isinstance(self._result, LinkError):
            raise self._result

    def join(self) -> None:
        """Wait for the end of the exchange, whether it succeeds or fails."""
        self._thread.join()

    def wait(self) -> AllReduceResult:
        self._thread.join()
        if isinstance(self._result, BaseException):
            raise self._result
        assert self._result is not None
        return self._result
