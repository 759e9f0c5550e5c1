"""A worker's pushes: lane sums that are sent without a copy of their large tensors, or encoded lane by lane."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.codecs.residual import Residual
from shoal.collectives.buckets import EncodedLayout
from shoal.collectives.lane_residuals import Report, ResidualTransfer
from shoal.collectives.outcome import Discarded
from shoal.collectives.peer_services import PeerServices
from shoal.collectives.transport.shared_memory import ByteBuffer
from shoal.lanes.flat_layout import FlatLayout, TensorRange, write_lane_sum
from shoal.lanes.lane_sum import LaneSum
from shoal.lanes.replica import Replica
from shoal.paramserver.encoded_chunks import EncodedChunks
from shoal.spec.chunk_table import ParameterPiece
from shoal.spec.view import View

ZERO_COPY_MIN_BYTES = 1 << 16
"""Minimum size of a tensor that is sent without a copy. Copying smaller ones costs less than a kernel buffer each."""


class ZeroCopyPush:
    """Partial sums for `Push`. Each has a flat buffer in `memory`, which servers on this host can read: small tensors
    are copied there at once, large ones when such a server needs them."""

    def __init__(self, layout: FlatLayout, memory: ByteBuffer, count: int) -> None:
        self._layout = layout
        self._memory = memory
        buffers = torch.split(memory.tensor[: count * layout.size_bytes], layout.size_bytes)
        self._views = [layout.views(buffer) for buffer in buffers]
        self._large_tensors: dict[tuple[int, int], memoryview] = {}
        self._large_slices_cache: dict[tuple[int, int], list[TensorRange]] = {}

    def set_partial(self, index: int, value: LaneSum) -> None:
        """Set a partial sum of the next push. It must not change until the push is answered."""
        large = [self._is_large(i, grad) for i, grad in enumerate(value.grads)]
        views = self._views[index]
        target = LaneSum(
            _small_tensors(views.grads, large), views.float_buffers, views.int_buffers, views.loss, views.count
        )
        small = LaneSum(
            _small_tensors(value.grads, large), value.float_buffers, value.int_buffers, value.loss, value.count
        )
        write_lane_sum(target, small)
        self._large_tensors = {key: flat for key, flat in self._large_tensors.items() if key[0] != index}
        for i, grad in enumerate(value.grads):
            if large[i]:
                flat = self._layout.grads[i].flatten(grad).view(torch.uint8)
                self._large_tensors[index, i] = flat.numpy().data

    def _is_large(self, index: int, grad: Tensor) -> bool:
        return grad.device.type == "cpu" and self._layout.grads[index].size_bytes >= ZERO_COPY_MIN_BYTES

    def copy_to_shared_memory(self, index: int, piece: ParameterPiece) -> None:
        for start, stop, content in self._large_ranges(index, piece):
            self._memory.raw[start:stop] = content

    def buffers(self, index: int, piece: ParameterPiece) -> list[memoryview]:
        buffers = []
        base, raw = index * self._layout.size_bytes, self._memory.raw
        offset = base + piece.start
        for start, stop, content in self._large_ranges(index, piece):
            if offset < start:
                buffers.append(raw[offset:start])
            buffers.append(content)
            offset = stop
        if offset < base + piece.stop:
            buffers.append(raw[offset : base + piece.stop])
        return buffers

    def _large_ranges(self, index: int, piece: ParameterPiece) -> Iterator[tuple[int, int, memoryview]]:
        """The parts of large tensors in a piece, and their ranges in `memory`."""
        base, slots = index * self._layout.size_bytes, self._layout.grads
        for tensor, start, stop in self._large_slices(piece):
            if flat := self._large_tensors.get((index, tensor)):
                begin = slots[tensor].start
                yield base + start, base + stop, flat[start - begin : stop - begin]

    def _large_slices(self, piece: ParameterPiece) -> list[TensorRange]:
        key = piece.start, piece.stop
        if key not in self._large_slices_cache:
            slots = self._layout.grads
            parts = self._layout.tensor_ranges(*key)
            self._large_slices_cache[key] = [
                part for part in parts if slots[part.place].size_bytes >= ZERO_COPY_MIN_BYTES
            ]
        return self._large_slices_cache[key]


def _small_tensors(tensors: Sequence[Tensor], large: Sequence[bool]) -> list[Tensor]:
    return [tensor for tensor, is_large in zip(tensors, large, strict=True) if not is_large]


class PushCodec:
    """Encodes pushes lane by lane, with error feedback. See `EncodedChunks` for `cut_tensors`.

    With `synchronous` pushes residuals move with their lanes. Otherwise a lane that moves to another worker starts
    without one.
    """

    def __init__(
        self,
        replica: Replica,
        settings: Mapping[str, Any],
        peers: PeerServices,
        report: Report | None,
        *,
        synchronous: bool,
        cut_tensors: bool,
    ) -> None:
        replica.set_chunking(
            lambda layout: EncodedChunks(EncodedLayout(layout, settings), cut_tensors=cut_tensors).offsets
        )
        self._settings = settings
        self._cut_tensors = cut_tensors
        self._replica = replica
        self._peers = peers
        self._encoded_layout = EncodedLayout(replica.layout, settings)
        self._flat_buffer = ByteBuffer.private(0)
        self._residual_transfer = (
            ResidualTransfer(peers, self._encoded_layout.residual_floats, report) if synchronous else None
        )
        self._lane_residuals: dict[int, Residual] = {}

    @property
    def encoded_layout(self) -> EncodedLayout:
        if self._encoded_layout.layout is not self._replica.layout:
            self._encoded_layout = EncodedLayout(self._replica.layout, self._settings)
        return self._encoded_layout

    @property
    def encoded_chunks(self) -> EncodedChunks:
        return EncodedChunks(self.encoded_layout, cut_tensors=self._cut_tensors)

    def enter_view(self, view: View, seat: int) -> Discarded | None:
        """Discarded if the view cannot begin."""
        self._lane_residuals = {
            lane: residual for lane, residual in self._lane_residuals.items() if lane in view.carries[seat]
        }
        if not self.encoded_layout.needs_residual or self._residual_transfer is None:
            return None
        return self._residual_transfer.enter(view, seat)

    def begin_step(self) -> None:
        if self._residual_transfer and self.encoded_layout.needs_residual:
            self._peers.residuals.begin_step()

    def encode(self, lane: int, value: LaneSum, encoded_lane: Tensor) -> None:
        layout = self._replica.layout
        if len(self._flat_buffer.raw) != layout.size_bytes:
            self._flat_buffer = ByteBuffer.private(layout.size_bytes)
            self._flat_buffer.tensor.zero_()  # padding is encoded too
        write_lane_sum(layout.views(self._flat_buffer.tensor), value)
        self.encoded_layout.encode(self._flat_buffer.tensor, encoded_lane, self._residual(lane))

    def _residual(self, lane: int) -> Residual | None:
        if not self.encoded_layout.needs_residual:
            return None
        if self._residual_transfer:
            return self._peers.residuals.for_lane(lane)
        return self._lane_residuals.setdefault(lane, Residual(self.encoded_layout.residual_floats))

    def commit_step(self, step: int) -> None:
        """Commit a synchronous step, with all its lanes."""
        if self._residual_transfer and self.encoded_layout.needs_residual:
            self._residual_transfer.commit(step)

    def commit_lane(self, lane: int) -> None:
        """Commit the push of one lane."""
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
