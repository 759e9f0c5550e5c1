"""Data parallelism as torch's DistributedDataParallel does it: an all-reduce by gloo or NCCL averages the gradients.

Each worker adds up its lanes, then the workers' sums are added in buckets. Not exact: the order of additions follows
from who carries what, so another number of workers gives other bits. Other than in DistributedDataParallel, buckets do
not overlap with the backward pass.

All members meet before the all-reduce of a step, over the view's own connections: there the dead are missed at once,
and the all-reduce itself waits for nobody who still computes.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Mapping
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions

from shoal.collectives.group import ViewGroup
from shoal.collectives.outcome import Committed, Discarded
from shoal.collectives.torch_group import AbortableProcessGroup, Rendezvous, TorchGroup, has_nccl
from shoal.collectives.transport.endpoint import Endpoint
from shoal.errors import error
from shoal.lanes.flat_layout import FlatLayout, write_lane_sum
from shoal.lanes.reduction_tree import TreeSum
from shoal.lanes.replica import LaneSum, Replica, add
from shoal.net.handshake import LinkError
from shoal.spec.view import View
from shoal.strategies.base import LockstepDefaults

BUCKET_BYTES = 25 << 20
CLOSE_TIMEOUT_S = 2.0
_RENDEZVOUS_LABEL, _STEP_LABEL = 1 << 60, 1 << 61  # labels that nobody else uses
_STEP_HEADER = struct.Struct("<??i32s")
_PORT = struct.Struct("<H")
_NO_SAMPLES = "no lane had samples"


def pick_backend(wanted: str, device: torch.device) -> str:
    """`auto` is nccl for CUDA where torch has it, else gloo."""
    possible = device.type == "cuda" and has_nccl()
    if wanted == "nccl" and not possible:
        fix = "Write sync.backend: auto or gloo."
        raise error("SH411", f"nccl does not work on device '{device}' here", where="sync.backend", fix=fix)
    return ("nccl" if possible else "gloo") if wanted == "auto" else wanted


class StepHeader(NamedTuple):
    """What a member says before the all-reduce. `lane` is where the first of its lanes that had samples lies, or -1."""

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
    """Where this worker's sum lies, and after the all-reduce everybody's. Belongs to one view: a circle that was left
    may still write into it."""

    def __init__(self, replica: Replica) -> None:
        self.layout = FlatLayout(replica.sum_template())
        self.digest = self.layout.digest.to_bytes(32, "little")
        self.flat_buffer = torch.zeros(self.layout.size_bytes, dtype=torch.uint8, device=replica.device)
        self.lane_sum = self.layout.views(self.flat_buffer)

    def write_own_sum(self, sums: TreeSum[LaneSum], *, halt: bool) -> StepHeader:
        """Add up my lanes, in order."""
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
        """With everybody; what is not added comes from one of them."""
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
            torch.cuda.synchronize(self.flat_buffer.device)  # to NCCL, waiting is only a word to the stream

    def total(self, *, counted: bool) -> LaneSum:
        it = self.lane_sum
        return LaneSum(it.grads, it.float_buffers, it.int_buffers, it.loss.clone(), it.count if counted else None)

    def ring_bytes(self, members: int) -> int:
        """What one of them sends in an all-reduce around a ring."""
        added = sum(r.stop - r.start for r in self.layout.regions if r.is_summed)
        return 2 * (members - 1) * added // members


class TorchDdpSync(LockstepDefaults):
    """See Sync. With one worker there is nobody to talk to, and nothing of torch.distributed is used."""

    exact = False

    def __init__(
        self, lanes: int, backend: str, device: torch.device, *, endpoint: Endpoint | None = None, token: str = ""
    ) -> None:
        super().__init__(lanes)
        self._backend = pick_backend(backend, device)
        self._device = device
        self._group = ViewGroup(endpoint, token)
        self._process_group: AbortableProcessGroup | None = None
        self._buffer: AllReduceBuffer | None = None

    def reconfigure(self, view: View, seat: int) -> str:
        self._leave()
        if why := self._group.enter(view, seat):
            return why
        if self._group.mesh is None:
            return ""
        first, host = min(view.carries), view.addresses[seat].host
        listener = _listener(host) if seat == first else None
        try:
            port = _PORT.pack(listener.getsockname()[1] if listener else 0)
            told = self._group.gather(_RENDEZVOUS_LABEL + view.number, port)
            if isinstance(told, Discarded):
                return told.why
            rank = sorted(view.carries).index(seat)
            (port_there,) = _PORT.unpack(told[first])
            place = Rendezvous(rank, len(view.carries), view.addresses[first].host, port_there, host, listener)
            self._process_group = AbortableProcessGroup(self._backend, place, self._device)
            if self._group.aborted():
                self._process_group.leave()
            self._process_group.run(lambda group: None)  # when there is one, all have come
        except LinkError as failure:
            return self._discard(failure).why
        finally:
            if listener:
                listener.close()
        return ""

    def gradient_sink(self, replica: Replica, step: int, sums: TreeSum[LaneSum], lane: int, *, halt: bool) -> None:
        return None

    def commit(
        self, replica: Replica, step: int, sums: TreeSum[LaneSum], *, halt: bool = False
    ) -> Committed | Discarded:
        if self._group.broken:
            return Discarded(self._group.broken)
        if self._process_group is None:
            total = sums.total()
            return Discarded(_NO_SAMPLES) if total is None else Committed(self._apply(replica, step, total), halt=halt)
        room = self._buffer = self._buffer or AllReduceBuffer(replica)
        mine = room.write_own_sum(sums, halt=halt)
        began = time.perf_counter()
        told = self._group.gather(_STEP_LABEL + step, mine.pack())
        if isinstance(told, Discarded):
            self._process_group.leave()
            return told
        met = time.perf_counter()
        try:
            said = {seat: StepHeader.unpack(content) for seat, content in told.items()}
            root = _root_rank(said)
            if root is None:
                return Discarded(_NO_SAMPLES)
            self._process_group.run(partial(room.allreduce, root))
        except LinkError as failure:
            return self._discard(failure)
        exchange_s = time.perf_counter() - met
        loss = self._apply(replica, step, room.total(counted=list(said.values())[root].counted))
        halting = any(one.halt for one in said.values())
        return Committed(loss, room.ring_bytes(len(said)), halting, waited_s=met - began, exchange_s=exchange_s)

    def _apply(self, replica: Replica, step: int, total: LaneSum) -> Tensor:
        if self.on_total:
            self.on_total(step, total)
        return replica.apply(step, total)

    def _discard(self, failure: LinkError) -> Discarded:
        """Leave the circle at once: that is how members learn of it that wait for this one."""
        if self._process_group:
            self._process_group.leave()
        return Discarded(self._group.broken) if self._group.broken else self._group.discard(failure)

    def gather(self, label: int, content: bytes) -> dict[int, bytes] | Discarded:
        return self._group.gather(label, content)

    def abort(self, view: int) -> None:
        self._group.abort(view)
        circle = self._process_group
        if circle and self._group.aborted():
            circle.leave()

    def aborted(self) -> bool:
        return self._group.aborted()

    def _leave(self) -> AbortableProcessGroup | None:
        circle, self._process_group, self._buffer = self._process_group, None, None
        if circle:
            circle.leave()
        self._group.leave()
        return circle

    def close(self) -> None:
        if circle := self._leave():
            circle.join(CLOSE_TIMEOUT_S)


def _root_rank(headers: Mapping[int, StepHeader]) -> int | None:
    """The rank of the member whose lanes come first among those with samples; None if there is none."""
    if len({one.digest for one in headers.values()}) > 1:
        raise LinkError("a member has a model of other shapes")
    lanes = {one.first_lane: rank for rank, one in enumerate(headers.values()) if one.first_lane >= 0}
    if len({one.counted for one in headers.values() if one.first_lane >= 0}) > 1:
        raise LinkError("some lanes have a loss count and others have none")
    return lanes[min(lanes)] if lanes else None


def _listener(host: str) -> socket.socket:
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
