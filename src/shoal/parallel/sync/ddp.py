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

from shoal.errors import error
from shoal.parallel.flat import Layout, write
from shoal.parallel.links.endpoint import Endpoint
from shoal.parallel.replica import LaneSum, Replica, add
from shoal.parallel.sync.base import Committed, Discarded, Together
from shoal.parallel.sync.circle import Circle, Group, Place, has_nccl
from shoal.parallel.sync.meeting import Meeting
from shoal.parallel.tree import TreeSum
from shoal.spec.view import View
from shoal.wire.handshake import LinkError

BUCKET_BYTES = 25 << 20
CLOSING_S = 2.0
_MEET, _STEP = 1 << 60, 1 << 61  # labels that nobody else uses
_SAID = struct.Struct("<??i32s")
_PORT = struct.Struct("<H")
_NOTHING = "no lane had samples"


def pick_backend(wanted: str, device: torch.device) -> str:
    """`auto` is nccl for CUDA where torch has it, else gloo."""
    possible = device.type == "cuda" and has_nccl()
    if wanted == "nccl" and not possible:
        fix = "Write sync.backend: auto or gloo."
        raise error("SH411", f"nccl does not work on device '{device}' here", where="sync.backend", fix=fix)
    return ("nccl" if possible else "gloo") if wanted == "auto" else wanted


class Said(NamedTuple):
    """What a member says before the all-reduce. `lane` is where the first of its lanes that had samples lies, or -1."""

    halt: bool
    counted: bool
    lane: int
    digest: bytes

    def pack(self) -> bytes:
        return _SAID.pack(*self)

    @classmethod
    def unpack(cls, content: bytes) -> Said:
        try:
            return cls(*_SAID.unpack(content))
        except struct.error as failure:
            raise LinkError(f"a member says {len(content)} bytes of noise") from failure


class Room:
    """Where this worker's sum lies, and after the all-reduce everybody's. Belongs to one view: a circle that was left
    may still write into it."""

    def __init__(self, replica: Replica) -> None:
        self.layout = Layout(replica.blank())
        self.digest = self.layout.digest.to_bytes(32, "little")
        self.stretch = torch.zeros(self.layout.size_bytes, dtype=torch.uint8, device=replica.device)
        self.sum = self.layout.views(self.stretch)

    def lay_down(self, sums: TreeSum[LaneSum], *, halt: bool) -> Said:
        """Add up my lanes, in order."""
        there = {index << level: value for (level, index), value in sums.partials.items() if value is not None}
        if not there:
            self.stretch.zero_()
            return Said(halt, counted=False, lane=-1, digest=self.digest)
        mine = reduce(add, (there[lane] for lane in sorted(there)))
        if not self.layout.fits(mine):
            raise ValueError("a lane's gradients or buffers are not of the kind that the model has")
        write(self.sum, mine)
        return Said(halt, mine.count is not None, min(there), self.digest)

    def add_up(self, root: int, group: Group) -> None:
        """With everybody; what is not added comes from one of them."""
        works = []
        for region in self.layout.regions:
            if region.added:
                flat = region.of(self.stretch)
                flat = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
                works += [group.allreduce([part]) for part in torch.split(flat, BUCKET_BYTES // flat.itemsize)]
            else:
                options = BroadcastOptions()
                options.rootRank = root
                works.append(group.broadcast([self.stretch[region.start : region.stop]], options))
        for work in works:
            work.wait()
        if self.stretch.is_cuda:
            torch.cuda.synchronize(self.stretch.device)  # to NCCL, waiting is only a word to the stream

    def total(self, *, counted: bool) -> LaneSum:
        it = self.sum
        return LaneSum(it.grads, it.averaged, it.first, it.loss.clone(), it.count if counted else None)

    def ring_bytes(self, members: int) -> int:
        """What one of them sends in an all-reduce around a ring."""
        added = sum(r.stop - r.start for r in self.layout.regions if r.added)
        return 2 * (members - 1) * added // members


class DdpSync(Together):
    """See Sync. With one worker there is nobody to talk to, and nothing of torch.distributed is used."""

    exact = False

    def __init__(
        self, lanes: int, backend: str, device: torch.device, *, endpoint: Endpoint | None = None, token: str = ""
    ) -> None:
        super().__init__(lanes)
        self._backend = pick_backend(backend, device)
        self._device = device
        self._meeting = Meeting(endpoint, token)
        self._circle: Circle | None = None
        self._room: Room | None = None

    def reconfigure(self, view: View, seat: int) -> str:
        self._leave()
        if why := self._meeting.enter(view, seat):
            return why
        if self._meeting.mesh is None:
            return ""
        first, host = min(view.carries), view.addresses[seat].host
        listener = _listener(host) if seat == first else None
        try:
            port = _PORT.pack(listener.getsockname()[1] if listener else 0)
            told = self._meeting.gather(_MEET + view.number, port)
            if isinstance(told, Discarded):
                return told.why
            rank = sorted(view.carries).index(seat)
            (port_there,) = _PORT.unpack(told[first])
            place = Place(rank, len(view.carries), view.addresses[first].host, port_there, host, listener)
            self._circle = Circle(self._backend, place, self._device)
            if self._meeting.aborted():
                self._circle.leave()
            self._circle.ask(lambda group: None)  # when there is one, all have come
        except LinkError as failure:
            return self._discard(failure).why
        finally:
            if listener:
                listener.close()
        return ""

    def ahead(self, replica: Replica, step: int, sums: TreeSum[LaneSum], lane: int, *, halt: bool) -> None:
        return None

    def commit(
        self, replica: Replica, step: int, sums: TreeSum[LaneSum], *, halt: bool = False
    ) -> Committed | Discarded:
        if self._meeting.broken:
            return Discarded(self._meeting.broken)
        if self._circle is None:
            total = sums.total()
            return Discarded(_NOTHING) if total is None else Committed(self._apply(replica, step, total), halt=halt)
        room = self._room = self._room or Room(replica)
        mine = room.lay_down(sums, halt=halt)
        began = time.perf_counter()
        told = self._meeting.gather(_STEP + step, mine.pack())
        if isinstance(told, Discarded):
            self._circle.leave()
            return told
        met = time.perf_counter()
        try:
            said = {seat: Said.unpack(content) for seat, content in told.items()}
            root = _first(said)
            if root is None:
                return Discarded(_NOTHING)
            self._circle.ask(partial(room.add_up, root))
        except LinkError as failure:
            return self._discard(failure)
        exchange_s = time.perf_counter() - met
        loss = self._apply(replica, step, room.total(counted=list(said.values())[root].counted))
        halting = any(one.halt for one in said.values())
        return Committed(loss, room.ring_bytes(len(said)), halting, waited_s=met - began, exchange_s=exchange_s)

    def _apply(self, replica: Replica, step: int, total: LaneSum) -> Tensor:
        if self.tap:
            self.tap(step, total)
        return replica.apply(step, total)

    def _discard(self, failure: LinkError) -> Discarded:
        """Leave the circle at once: that is how members learn of it that wait for this one."""
        if self._circle:
            self._circle.leave()
        return Discarded(self._meeting.broken) if self._meeting.broken else self._meeting.discard(failure)

    def gather(self, label: int, content: bytes) -> dict[int, bytes] | Discarded:
        return self._meeting.gather(label, content)

    def abort(self, view: int) -> None:
        self._meeting.abort(view)
        circle = self._circle
        if circle and self._meeting.aborted():
            circle.leave()

    def aborted(self) -> bool:
        return self._meeting.aborted()

    def _leave(self) -> Circle | None:
        circle, self._circle, self._room = self._circle, None, None
        if circle:
            circle.leave()
        self._meeting.leave()
        return circle

    def close(self) -> None:
        if circle := self._leave():
            circle.join(CLOSING_S)


def _first(said: Mapping[int, Said]) -> int | None:
    """The rank of the member whose lanes come first among those with samples; None if there is none."""
    if len({one.digest for one in said.values()}) > 1:
        raise LinkError("a member has a model of other shapes")
    lanes = {one.lane: rank for rank, one in enumerate(said.values()) if one.lane >= 0}
    if len({one.counted for one in said.values() if one.lane >= 0}) > 1:
        raise LinkError("some lanes came with a count and others without")
    return lanes[min(lanes)] if lanes else None


def _listener(host: str) -> socket.socket:
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
