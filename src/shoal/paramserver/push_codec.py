"""What a worker pushes, encoded: lane by lane, with what each remembers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from shoal.codecs.residual import Residual as LaneMemory
from shoal.collectives.buckets import EncodedLayout
from shoal.collectives.outcome import Discarded
from shoal.collectives.peer_services import PeerServices
from shoal.collectives.residual_transfer import Report, ResidualTransfer
from shoal.collectives.transport.shared_memory import ByteBuffer
from shoal.lanes.flat_layout import write_lane_sum
from shoal.lanes.lane_sum import LaneSum
from shoal.lanes.replica import Replica
from shoal.spec.view import View


class PushCodec:
    """With a codec, every cut of the form is a chunk of its own. Where lanes are not `together` at the same step, what
    a lane remembers stays with the worker, and begins anew elsewhere."""

    def __init__(
        self,
        replica: Replica,
        settings: Mapping[str, Any],
        peers: PeerServices,
        report: Report | None,
        *,
        synchronous: bool,
    ) -> None:
        replica.set_chunking(lambda layout: EncodedLayout(layout, settings).chunk_offsets)
        self._settings = settings
        self._replica = replica
        self._peers = peers
        self._encoded_layout = EncodedLayout(replica.layout, settings)
        self._flat_buffer = ByteBuffer.private(0)
        self._residual_transfer = (
            ResidualTransfer(peers, self._encoded_layout.residual_floats, report) if synchronous else None
        )
        self._lane_residuals: dict[int, LaneMemory] = {}

    @property
    def encoded_layout(self) -> EncodedLayout:
        if self._encoded_layout.layout is not self._replica.layout:
            self._encoded_layout = EncodedLayout(self._replica.layout, self._settings)
        return self._encoded_layout

    def enter_view(self, view: View, seat: int) -> Discarded | None:
        """Discarded if the view cannot begin."""
        self._lane_residuals = {
            lane: memory for lane, memory in self._lane_residuals.items() if lane in view.carries[seat]
        }
        if not self.encoded_layout.needs_residual or self._residual_transfer is None:
            return None
        return self._residual_transfer.enter(view, seat)

    def begin_step(self) -> None:
        if self._residual_transfer and self.encoded_layout.needs_residual:
            self._peers.residuals.begin_step()

    def encode(self, lane: int, value: LaneSum, slot: Tensor) -> None:
        layout = self._replica.layout
        if len(self._flat_buffer.raw) != layout.size_bytes:
            self._flat_buffer = ByteBuffer.private(layout.size_bytes)
            self._flat_buffer.tensor.zero_()  # gaps are encoded too
        write_lane_sum(layout.views(self._flat_buffer.tensor), value)
        self.encoded_layout.encode(self._flat_buffer.tensor, slot, self._residual(lane))

    def _residual(self, lane: int) -> LaneMemory | None:
        if not self.encoded_layout.needs_residual:
            return None
        if self._residual_transfer:
            return self._peers.residuals.for_lane(lane)
        return self._lane_residuals.setdefault(lane, LaneMemory(self.encoded_layout.residual_floats))

    def commit_step(self, step: int) -> None:
        """The step counts, with all its lanes."""
        if self._residual_transfer and self.encoded_layout.needs_residual:
            self._residual_transfer.commit(step)

    def commit_lane(self, lane: int) -> None:
        """What this lane pushed counts."""
        if lane in self._lane_residuals:
            self._lane_residuals[lane].commit()

    def hand_over_residuals(self, given_up: Callable[[], bool]) -> None:
        if self._residual_transfer and self.encoded_layout.needs_residual:
            self._peers.residuals.hand_over(given_up)

    def state(self) -> dict[str, Any]:
        return self._residual_transfer.state() if self._residual_transfer and self.encoded_layout.needs_residual else {}

    def load_state(self, step: int, state: Mapping[str, Any]) -> None:
        if self._residual_transfer and self.encoded_layout.needs_residual:
            self._residual_transfer.load_state(step, state)
