"""Exact synchronous training: lane sums are added on the fixed tree, then every replica applies the same total."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from shoal.parallel.cutting import Runs, runs
from shoal.parallel.exchange import Exchange, SpoiltError
from shoal.parallel.exchange_plan import Plan
from shoal.parallel.flat import Layout
from shoal.parallel.links.endpoint import Endpoint
from shoal.parallel.links.memory import Arena, Memory
from shoal.parallel.links.mesh import Mesh
from shoal.parallel.local.pace import fragments_of
from shoal.parallel.local.replica import LocalReplica
from shoal.parallel.local.streams import PlainStream, Stream, Way
from shoal.parallel.replica import LaneSum, Replica, Taker
from shoal.parallel.sync.base import Committed, Discarded, Together
from shoal.parallel.sync.meeting import Meeting
from shoal.parallel.tree import TreeSum
from shoal.spec.view import View
from shoal.wire.handshake import LinkError

NOTHING = "no lane had samples"


class LanesSync(Together):
    """With one worker that carries all lanes there is nobody to talk to: the tree is complete as it is, and no
    `endpoint` is needed. Memory for the exchange is made at the first step that needs it and kept over views.
    """

    exact = True

    def __init__(self, lanes: int, *, endpoint: Endpoint | None = None, token: str = "") -> None:
        super().__init__(lanes)
        self._meeting = Meeting(endpoint, token)
        self._exchange: Exchange | None = None
        self._arena: Arena | None = None
        self._total: Memory | None = None
        self._sends_ahead = True
        self._ways: list[Way] = []

    def reconfigure(self, view: View, seat: int) -> str:
        self._exchange = None
        self._drop_ways()
        return self._meeting.enter(view, seat)

    def ahead(self, replica: Replica, step: int, sums: TreeSum[LaneSum], lane: int, *, halt: bool) -> Taker | None:
        exchange = self._exchange
        if exchange is None or not self._sends_ahead or replica.device.type != "cpu" or self._meeting.broken:
            return None
        return exchange.ahead(step, sums, lane, halt=halt)

    def commit(
        self, replica: Replica, step: int, sums: TreeSum[LaneSum], *, halt: bool = False
    ) -> Committed | Discarded:
        meeting = self._meeting
        if meeting.broken:
            return Discarded(meeting.broken)
        if meeting.mesh is None:
            total = sums.total()
            return Discarded(NOTHING) if total is None else Committed(self._apply(replica, step, total), halt=halt)
        began = time.perf_counter()
        try:
            exchange = self._exchange or self._prepare(meeting.mesh, replica, step)
            agreed = exchange.run(step, sums.partials, halt=halt)
        except LinkError as failure:
            self._sends_ahead = self._sends_ahead and not isinstance(failure, SpoiltError)
            return meeting.discard(failure)
        if agreed.total is None:
            return Discarded(NOTHING)
        exchange_s = time.perf_counter() - began - agreed.waited_s
        loss = self._apply(replica, step, agreed.total)
        return Committed(loss, agreed.bytes_sent, agreed.halt, agreed.waited_s, exchange_s)

    def ways(self, replica: LocalReplica, most: int) -> list[Way]:
        """How fragments of the parameters, at most so many, travel in this view."""
        if not self._ways:
            cuts, grads = runs(replica.layout), replica.layout.grads
            for cut in fragments_of([sum(grads[i].size_bytes for i in run) for run in cuts], most):
                which = sorted(i for run in cuts[cut.start : cut.stop] for i in run)
                inside = [[which.index(i) for i in run] for run in cuts[cut.start : cut.stop]]
                stream = self._stream(Layout(replica.fragment(which)), cut.start, inside, replica.device)
                self._ways.append(Way(which, stream))
        return self._ways

    def _stream(self, layout: Layout, first: int, cuts: Runs, device: torch.device) -> Stream:
        """For what lies in these cuts of the stretch, from the first of them on; by numbers within the fragment."""
        assert self._meeting.view is not None
        carries = self._meeting.view.carries
        return PlainStream(layout, carries, self._lanes, mesh=self._meeting.mesh, device=device)

    def break_off(self) -> None:
        """Nothing more comes of this view: whoever waits in another thread comes back."""
        if self._meeting.view:
            self.abort(self._meeting.view.number)

    def _drop_ways(self) -> None:
        for way in self._ways:
            way.stream.close()
        self._ways = []

    def _apply(self, replica: Replica, step: int, total: LaneSum) -> Tensor:
        if self.tap:
            self.tap(step, total)
        return replica.apply(step, total)

    def _prepare(self, mesh: Mesh, replica: Replica, step: int) -> Exchange:
        """The first step of a view: meet in memory."""
        assert self._meeting.view is not None
        plan = Plan.of(self._meeting.view.carries, self._lanes, Layout(replica.blank()))
        arena = self._arena_of(plan.arena_bytes(mesh.seat))
        if self._total is None or len(self._total.raw) != plan.layout.size_bytes:
            self._total = Memory.private(plan.layout.size_bytes)
        self._exchange = Exchange(mesh, plan, arena=arena, total=self._total, device=replica.device, step=step)
        return self._exchange

    def _arena_of(self, size_bytes: int) -> Arena:
        if self._arena is None or self._arena.size_bytes < size_bytes:
            if self._arena:
                self._arena.close()
            self._arena = Arena(size_bytes)
        return self._arena

    def gather(self, label: int, content: bytes) -> dict[int, bytes] | Discarded:
        return self._meeting.gather(label, content)

    def abort(self, view: int) -> None:
        self._meeting.abort(view)

    def moved_bytes(self) -> int:
        return self._meeting.moved_bytes

    def aborted(self) -> bool:
        return self._meeting.aborted()

    def close(self) -> None:
        self._exchange = None
        self._drop_ways()
        self._meeting.leave()
        if self._arena:
            self._arena.close()
            self._arena = None
