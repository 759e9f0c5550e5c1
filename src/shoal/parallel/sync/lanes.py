"""Exact synchronous training: lane sums are added on the fixed tree, then every replica applies the same total."""

from __future__ import annotations

import threading
import time
from typing import Any

from shoal.parallel.exchange import Exchange, Plan
from shoal.parallel.flat import Layout
from shoal.parallel.links import frames
from shoal.parallel.links.endpoint import Endpoint
from shoal.parallel.links.frames import Frame
from shoal.parallel.links.link import Link
from shoal.parallel.links.memory import Arena, Memory
from shoal.parallel.links.mesh import Mesh
from shoal.parallel.replica import LaneSum, Replica
from shoal.parallel.sync.base import Committed, Discarded
from shoal.parallel.tree import TreeSum
from shoal.spec.view import View
from shoal.wire.handshake import LinkError

MOST_GATHERED_BYTES = 1 << 30


class LanesSync:
    """With one worker that carries all lanes there is nobody to talk to: the tree is complete as it is, and no
    `endpoint` is needed. Memory for the exchange is made at the first step that needs it and kept over views.
    """

    def __init__(self, lanes: int, *, endpoint: Endpoint | None = None, token: str = "") -> None:
        self._lanes = lanes
        self._endpoint = endpoint
        self._token = token
        self._view: View | None = None
        self._seat = 0
        self._mesh: Mesh | None = None
        self._exchange: Exchange | None = None
        self._arena: Arena | None = None
        self._total: Memory | None = None
        self._broken = ""
        self._guard = threading.Lock()
        self._aborted = 0  # and all views before it

    def reconfigure(self, view: View, seat: int) -> str:
        self._leave()
        if seat not in view.carries or (len(view.carries) > 1 and self._endpoint is None):
            raise ValueError(f"view {view.number} is not for seat {seat}")
        mesh = None
        if self._endpoint and len(view.carries) > 1:
            mesh = Mesh(view, seat, endpoint=self._endpoint, token=self._token)
        with self._guard:
            self._view, self._seat, self._mesh = view, seat, mesh
            self._broken = f"view {view.number} was aborted" if self.aborted() else ""
        if mesh and not self._broken:
            try:
                mesh.connect()
            except LinkError as failure:
                self._broken = str(failure)
        return self._broken

    def commit(
        self, replica: Replica, step: int, sums: TreeSum[LaneSum], *, halt: bool = False
    ) -> Committed | Discarded:
        if self._broken or self.aborted():
            return Discarded(self._broken or "aborted")
        if self._mesh is None:
            total = sums.total()
            return Discarded(_NOTHING) if total is None else Committed(replica.apply(step, total), halt=halt)
        began = time.perf_counter()
        try:
            exchange = self._exchange or self._prepare(self._mesh, replica, step)
            agreed = exchange.run(step, sums.partials, halt=halt)
        except LinkError as failure:
            return self._discard(failure)
        if agreed.total is None:
            return Discarded(_NOTHING)
        exchange_s = time.perf_counter() - began - agreed.waited_s
        loss = replica.apply(step, agreed.total)
        return Committed(loss, agreed.bytes_sent, agreed.halt, agreed.waited_s, exchange_s)

    def _prepare(self, mesh: Mesh, replica: Replica, step: int) -> Exchange:
        """The first step of a view: meet in memory."""
        assert self._view is not None
        plan = Plan.of(self._view.carries, self._lanes, Layout(replica.blank()))
        arena = self._arena_of(plan.arena_bytes(self._seat))
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
        if len(content) > MOST_GATHERED_BYTES:
            raise ValueError(f"{len(content)} bytes to gather, and {MOST_GATHERED_BYTES} is the most")
        if self._broken or self.aborted():
            return Discarded(self._broken or "aborted")
        if self._mesh is None:
            return {self._seat: content}
        came: dict[int, bytearray] = {}

        def arrange(link: Link, frame: Frame) -> list[memoryview]:
            if frame.size > MOST_GATHERED_BYTES:
                raise LinkError(f"sends {frame.size} bytes, and {MOST_GATHERED_BYTES} is the most")
            came[link.seat] = bytearray(frame.size)
            return [memoryview(came[link.seat])]

        for link in self._mesh.links.values():
            link.post(
                Frame(frames.GATHER, self._mesh.view, label, self._seat, size=len(content)), [memoryview(content)]
            )
        try:
            self._mesh.trade(frames.GATHER, label, arrange)
        except LinkError as failure:
            return self._discard(failure)
        found = {seat: bytes(buffer) for seat, buffer in came.items()} | {self._seat: content}
        return dict(sorted(found.items()))

    def _discard(self, failure: LinkError) -> Discarded:
        self._broken = str(failure)
        return Discarded(self._broken)

    def abort(self, view: int) -> None:
        with self._guard:
            self._aborted = max(self._aborted, view)
            mesh = self._mesh
        if mesh and mesh.view <= view:
            mesh.abort()

    def aborted(self) -> bool:
        return self._view is not None and self._view.number <= self._aborted

    def _leave(self) -> None:
        with self._guard:
            mesh, self._mesh, self._exchange = self._mesh, None, None
        if mesh:
            mesh.close()

    def state(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._leave()
        if self._arena:
            self._arena.close()
            self._arena = None


_NOTHING = "no lane had samples"
