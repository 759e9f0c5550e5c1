"""Data parallelism as in torch's DistributedDataParallel: an all-reduce by gloo or NCCL averages the gradients.

Each worker adds up its lanes, then the workers' sums are added in buckets. Not exact: the order of additions depends on
which worker carries which lane, so another number of workers gives other bits. Unlike in DistributedDataParallel,
buckets do not overlap with the backward pass.

All members meet before the all-reduce of a step, over the view's own connections. A dead member is noticed there at
once, and the all-reduce itself never waits for a worker that still computes.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch.distributed import BroadcastOptions

from shoal.collectives.group import Channel, ViewGroup
from shoal.collectives.outcome import Committed, Discarded
from shoal.collectives.torch_group import TorchGroup
from shoal.collectives.view_process_group import ViewProcessGroup
from shoal.lanes.flat_layout import FlatLayout, write_lane_sum
from shoal.lanes.lane_sum import LaneSum, add, mixed_counts_error
from shoal.lanes.reduction_tree import TreeSum
from shoal.net.errors import LinkError
from shoal.spec.view import View
from shoal.strategies.base import HeldWeights
from shoal.strategies.sync_defaults import NO_SAMPLES, OnTotal, SyncDefaults

BUCKET_BYTES = 25 << 20
_STEP_HEADER = struct.Struct("<??i32s")


class StepHeader(NamedTuple):
    """What a member sends before the all-reduce. `first_lane` is its first lane that has samples, or -1."""

    halt: bool
    counted: bool
    first_lane: int
    digest: bytes

    def pack(self) -> bytes:
        return _STEP_HEADER.pack(*self)

    @classmethod
    def unpack(cls, content: bytes) -> StepHeader:
        try:
            return cls(*_STEP_HEADER.unpack(content))
        except struct.error as failure:
            raise LinkError(f"a member says {len(content)} bytes of noise") from failure


class AllReduceBuffer:
    """Holds this worker's sum, and after the all-reduce the sum of all workers. Belongs to one view: a process group
    that the worker has left may still write into it."""

    def __init__(self, held: HeldWeights) -> None:
        self.layout = FlatLayout(held.sum_template())
        self.digest = self.layout.digest.to_bytes(32, "little")
        self.flat_buffer = torch.zeros(self.layout.size_bytes, dtype=torch.uint8, device=held.device)
        self.lane_sum = self.layout.views(self.flat_buffer)

    def write_own_sum(self, sums: TreeSum[LaneSum], *, halt: bool) -> StepHeader:
        """Add up this worker's lanes, in order."""
        there = {index << level: value for (level, index), value in sums.partials.items() if value is not None}
        if not there:
            self.flat_buffer.zero_()
            return StepHeader(halt, counted=False, first_lane=-1, digest=self.digest)
        mine = reduce(add, (there[lane] for lane in sorted(there)))
        if not self.layout.fits(mine):
            raise ValueError("a lane's gradients or buffers differ from the model's in number, shape or dtype")
        write_lane_sum(self.lane_sum, mine)
        return StepHeader(halt, mine.count is not None, min(there), self.digest)

    def allreduce(self, root: int, group: TorchGroup) -> None:
        """Sum over all members. What is not summed is broadcast from rank `root`."""
        works = []
        for region in self.layout.regions:
            if region.is_summed:
                flat = region.view_in(self.flat_buffer)
                flat = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
                works += [group.allreduce([part]) for part in torch.split(flat, BUCKET_BYTES // flat.itemsize)]
            else:
                options = BroadcastOptions()
                options.rootRank = root
                works.append(group.broadcast([self.flat_buffer[region.start : region.stop]], options))
        for work in works:
            work.wait()
        if self.flat_buffer.is_cuda:
            torch.cuda.synchronize(self.flat_buffer.device)  # NCCL's wait() only blocks the stream

    def total(self, *, counted: bool) -> LaneSum:
        it = self.lane_sum
        return LaneSum(it.grads, it.float_buffers, it.int_buffers, it.loss.clone(), it.count if counted else None)

    def ring_bytes(self, members: int) -> int:
        """The bytes that one member sends in a ring all-reduce."""
        added = sum(r.stop - r.start for r in self.layout.regions if r.is_summed)
        return 2 * (members - 1) * added // members


class TorchDdpSync(SyncDefaults):
    """A single worker uses nothing of torch.distributed."""

    exact = False

    def __init__(
        self, lanes: int, group: ViewGroup, *, backend: str, device: torch.device, on_total: OnTotal | None = None
    ) -> None:
        super().__init__(lanes, group, on_total)
        self._process_group = ViewProcessGroup(group, backend=backend, device=device)
        self._buffer: AllReduceBuffer | None = None

    def reconfigure(self, view: View, seat: int) -> Discarded | None:
        self._buffer = None
        return self._process_group.enter(view, seat)

    def commit(
        self, held: HeldWeights, step: int, sums: TreeSum[LaneSum], *, halt: bool = False
    ) -> Committed | Discarded:
        if self._group.broken:
            return Discarded(self._group.broken)
        if not self._process_group.exists:
            total = sums.total()
            return Discarded(NO_SAMPLES) if total is None else Committed(self._apply(held, step, total), halt=halt)
        room = self._buffer = self._buffer or AllReduceBuffer(held)
        mine = room.write_own_sum(sums, halt=halt)
        began = time.perf_counter()
        told = self._group.gather(Channel.STEP_HEADER.label(step), mine.pack())
        if isinstance(told, Discarded):
            self._process_group.leave()
            return told
        met = time.perf_counter()
        try:
            said = {seat: StepHeader.unpack(content) for seat, content in told.items()}
            root = _root_rank(said)
            if root is None:
                return Discarded(NO_SAMPLES)
            self._process_group.run(partial(room.allreduce, root))
        except LinkError as failure:
            return self._process_group.discard(failure)
        exchange_s = time.perf_counter() - met
        loss = self._apply(held, step, room.total(counted=list(said.values())[root].counted))
        halting = any(one.halt for one in said.values())
        return Committed(loss, room.ring_bytes(len(said)), halting, waited_s=met - began, exchange_s=exchange_s)

    def close(self) -> None:
        self._buffer = None
        self._process_group.close()


def _root_rank(headers: Mapping[int, StepHeader]) -> int | None:
    """The rank of the member that has the first lane with samples; None if no lane has samples."""
    if len({one.digest for one in headers.values()}) > 1:
        raise LinkError("a member has a model of other shapes")
    lanes = {one.first_lane: rank for rank, one in enumerate(headers.values()) if one.first_lane >= 0}
    if len({one.counted for one in headers.values() if one.first_lane >= 0}) > 1:
        raise mixed_counts_error()
    return lanes[min(lanes)] if lanes else None
