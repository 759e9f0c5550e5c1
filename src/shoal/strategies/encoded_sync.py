"""Synchronous training with a codec: every lane is encoded by itself, and every worker decodes all lanes.

Encoding loses the same on whichever worker carries the lane, so the bits are the same on any number of workers. They
differ only if a lane's residual is lost with its worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from shoal.collectives.allreduce_plan import AllReducePlan
from shoal.collectives.buckets import EncodedLayout
from shoal.collectives.encoded_allreduce import EncodedAllReduce, EncodedAllReduceStep, shared_memory_bytes
from shoal.collectives.group import ViewGroup
from shoal.collectives.lane_residuals import Report, ResidualTransfer
from shoal.collectives.ordered_allreduce import OverlapError
from shoal.collectives.outcome import Committed, Discarded
from shoal.collectives.peer_services import PeerServices
from shoal.collectives.transport.shared_memory import ByteBuffer
from shoal.lanes.reduction_tree import TreeSum
from shoal.lanes.replica import GradientSink, LaneSum, Replica
from shoal.net.errors import LinkError
from shoal.spec.view import View
from shoal.strategies.base import HeldWeights
from shoal.strategies.ordered_sync import OrderedAllReduceSync
from shoal.strategies.sync_defaults import NO_SAMPLES, OnTotal


class EncodedAllReduceSync(OrderedAllReduceSync):
    """`settings` is the job's codec as plain data. Reports `residual_lost` when a lane loses its residual."""

    def __init__(
        self,
        lanes: int,
        group: ViewGroup,
        *,
        settings: Mapping[str, Any],
        replica: Replica,
        peers: PeerServices,
        report: Report | None = None,
        on_total: OnTotal | None = None,
    ) -> None:
        super().__init__(lanes, group, on_total=on_total)
        replica.set_chunking(
            lambda layout: EncodedLayout(layout, settings).chunk_offsets
        )  # norms of whole tensors, as on servers
        self._settings = settings
        self._replica = replica
        self._peer_services = peers
        self._report = report
        self._encoded_layout: EncodedLayout | None = None
        self._flat_buffer: ByteBuffer | None = None
        self._encoded_allreduce: EncodedAllReduce | None = None
        self._bytes_plain = 0
        self._residual_transfer: ResidualTransfer | None = None

    # ---- views ----

    def reconfigure(self, view: View, seat: int) -> Discarded | None:
        self._encoded_allreduce = None
        if self.encoded_layout.needs_residual and (discarded := self.residual_transfer.enter(view, seat)):
            return discarded
        return super().reconfigure(view, seat)

    @property
    def encoded_layout(self) -> EncodedLayout:
        if self._encoded_layout is None:
            self._encoded_layout = EncodedLayout(self._replica.layout, self._settings)
        return self._encoded_layout

    @property
    def residual_transfer(self) -> ResidualTransfer:
        if self._residual_transfer is None:
            self._residual_transfer = ResidualTransfer(
                self._peer_services, self.encoded_layout.residual_floats, self._report
            )
        return self._residual_transfer

    # ---- steps ----

    def begin_step(self) -> TreeSum[LaneSum]:
        exchange = self._encoded_allreduce = self._encoded_allreduce or self._make_encoded_allreduce()
        return exchange.begin_step()

    def _make_encoded_allreduce(self) -> EncodedAllReduce:
        """Called at the first step of a view."""
        group, form = self._group, self.encoded_layout
        assert group.view is not None
        carries, size_bytes = group.view.carries, form.layout.size_bytes
        if self._flat_buffer is None or self._total is None:
            self._flat_buffer, self._total = ByteBuffer.private(size_bytes), ByteBuffer.private(size_bytes)
            self._flat_buffer.tensor.zero_()  # padding is encoded too
        far = [link.seat for link in group.mesh.remote_links] if group.mesh else []
        self._bytes_plain = (
            AllReducePlan.of(carries, self._lanes, form.layout).sent_bytes(group.seat, far) if far else 0
        )
        return EncodedAllReduce(
            form,
            carries,
            group.seat,
            mesh=group.mesh,
            shared_memory=self._shared_memory_of(shared_memory_bytes(form, len(carries[group.seat]))),
            flat_buffer=self._flat_buffer,
            total=self._total,
            residuals=self._peer_services.residuals if form.needs_residual else None,
            device=self._replica.device,
        )

    def gradient_sink(
        self, held: HeldWeights, step: int, sums: TreeSum[LaneSum], lane: int, *, halt: bool
    ) -> GradientSink | None:
        assert isinstance(sums, EncodedAllReduceStep)
        if not self._overlaps or held.device.type != "cpu" or self._group.broken:
            return None
        return sums.allreduce.gradient_sink(sums, step, lane, halt=halt)

    def commit(
        self, held: HeldWeights, step: int, sums: TreeSum[LaneSum], *, halt: bool = False
    ) -> Committed | Discarded:
        group = self._group
        if group.broken:
            return Discarded(group.broken)
        assert isinstance(sums, EncodedAllReduceStep)
        began = time.perf_counter()
        try:
            agreed = sums.allreduce.run(sums, step, halt=halt)
        except LinkError as failure:
            self._overlaps = self._overlaps and not isinstance(failure, OverlapError)
            return group.discard(failure)
        if agreed.total is None:
            return Discarded(NO_SAMPLES)
        exchange_s = time.perf_counter() - began - agreed.waited_s
        if self.encoded_layout.needs_residual:
            self.residual_transfer.commit(step)
        loss = self._apply(held, step, agreed.total)
        return Committed(loss, agreed.bytes_sent, agreed.halt, agreed.waited_s, exchange_s, self._bytes_plain)

    # ---- what must survive ----

    def hand_over(self, given_up: Callable[[], bool]) -> None:
        if self.encoded_layout.needs_residual:
            self._peer_services.residuals.hand_over(given_up)

    def state(self) -> dict[str, Any]:
        return self.residual_transfer.state() if self.encoded_layout.needs_residual else {}

    def load_state(self, step: int, state: dict[str, Any]) -> None:
        if self.encoded_layout.needs_residual:
            self.residual_transfer.load_state(step, state)

    def close(self) -> None:
        self._encoded_allreduce = None
        super().close()
