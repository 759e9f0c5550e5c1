"""Synchronous training with a codec: every lane is encoded by itself, and all of them are decoded by everybody.

What is lost on the way is the same whoever carries the lane, so the bits are the same on any number of workers. They
differ only where what a lane remembers died with its worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shoal.parallel.cutting import Form, Runs
from shoal.parallel.encoded import EncodedExchange, Round, arena_bytes
from shoal.parallel.exchange import SpoiltError
from shoal.parallel.exchange_plan import Plan
from shoal.parallel.flat import Layout
from shoal.parallel.links.memory import Memory
from shoal.parallel.local.streams import EncodedStream, Stream
from shoal.parallel.peers import Peers
from shoal.parallel.remembering import Remembering, Tell
from shoal.parallel.replica import LaneSum, Replica, Taker
from shoal.parallel.sync.base import Committed, Discarded
from shoal.parallel.sync.lanes import NOTHING, LanesSync
from shoal.parallel.tree import TreeSum
from shoal.spec.view import View
from shoal.wire.handshake import LinkError


class EncodedSync(LanesSync):
    """`settings` is the job's codec as plain data. Told: `memory_lost`, when a lane begins anew."""

    def __init__(
        self, lanes: int, settings: Mapping[str, Any], replica: Replica, *, peers: Peers, tell: Tell | None = None
    ) -> None:
        super().__init__(lanes, endpoint=peers.endpoint, token=peers.token)
        replica.cut_by(lambda layout: Form(layout, settings).chunks)  # as servers do
        self._settings = settings
        self._replica = replica
        self._peers = peers
        self._tell = tell
        self._form: Form | None = None
        self._stretch: Memory | None = None
        self._encoded: EncodedExchange | None = None
        self._bytes_plain = 0
        self._remembering: Remembering | None = None

    # ---- views ----

    def reconfigure(self, view: View, seat: int) -> str:
        self._encoded = None
        if self.form.remembers and (why := self.remembering.enter(view, seat)):
            return why
        return super().reconfigure(view, seat)

    @property
    def form(self) -> Form:
        if self._form is None:
            self._form = Form(self._replica.layout, self._settings)
        return self._form

    @property
    def remembering(self) -> Remembering:
        if self._remembering is None:
            self._remembering = Remembering(self._peers, self.form.memory_floats, self._tell)
        return self._remembering

    # ---- steps ----

    def sums(self) -> TreeSum[LaneSum]:
        exchange = self._encoded = self._encoded or self._prepare_encoded()
        return exchange.begin()

    def _prepare_encoded(self) -> EncodedExchange:
        """The first step of a view."""
        meeting, form = self._meeting, self.form
        assert meeting.view is not None
        carries, size_bytes = meeting.view.carries, form.layout.size_bytes
        if self._stretch is None or self._total is None:
            self._stretch, self._total = Memory.private(size_bytes), Memory.private(size_bytes)
            self._stretch.tensor.zero_()  # gaps are encoded too
        far = [link.seat for link in meeting.mesh.far] if meeting.mesh else []
        self._bytes_plain = Plan.of(carries, self._lanes, form.layout).sent_bytes(meeting.seat, far) if far else 0
        return EncodedExchange(
            form,
            carries,
            meeting.seat,
            mesh=meeting.mesh,
            arena=self._arena_of(arena_bytes(form, len(carries[meeting.seat]))),
            stretch=self._stretch,
            total=self._total,
            memories=self._peers.memories if form.remembers else None,
            device=self._replica.device,
        )

    def ahead(self, replica: Replica, step: int, sums: TreeSum[LaneSum], lane: int, *, halt: bool) -> Taker | None:
        assert isinstance(sums, Round)
        if not self._sends_ahead or replica.device.type != "cpu" or self._meeting.broken:
            return None
        return sums.exchange.ahead(sums, step, lane, halt=halt)

    def commit(
        self, replica: Replica, step: int, sums: TreeSum[LaneSum], *, halt: bool = False
    ) -> Committed | Discarded:
        meeting = self._meeting
        if meeting.broken:
            return Discarded(meeting.broken)
        assert isinstance(sums, Round)
        began = time.perf_counter()
        try:
            agreed = sums.exchange.run(sums, step, halt=halt)
        except LinkError as failure:
            self._sends_ahead = self._sends_ahead and not isinstance(failure, SpoiltError)
            return meeting.discard(failure)
        if agreed.total is None:
            return Discarded(NOTHING)
        exchange_s = time.perf_counter() - began - agreed.waited_s
        if self.form.remembers:
            self.remembering.settle(step)
        loss = self._apply(replica, step, agreed.total)
        return Committed(loss, agreed.bytes_sent, agreed.halt, agreed.waited_s, exchange_s, self._bytes_plain)

    def _stream(self, layout: Layout, first: int, cuts: Runs, device: torch.device) -> Stream:
        meeting, form = self._meeting, Form(layout, self._settings, cut_as=cuts)
        assert meeting.view is not None
        memories = None
        if form.remembers:
            start = self.form.cuts[first].remembered[0]
            memories = self._peers.memories.part(start, start + form.memory_floats)
        return EncodedStream(
            form, meeting.view.carries, meeting.seat, mesh=meeting.mesh, memories=memories, device=device
        )

    # ---- what must survive ----

    def hand_over(self, given_up: Callable[[], bool]) -> None:
        if self.form.remembers:
            self._peers.memories.hand_over(given_up)

    def state(self) -> dict[str, Any]:
        return self.remembering.state() if self.form.remembers else {}

    def load_state(self, step: int, state: dict[str, Any]) -> None:
        if self.form.remembers:
            self.remembering.load_state(step, state)

    def close(self) -> None:
        self._encoded = None
        super().close()
