"""All-reduce of encoded lanes: every worker receives every lane's bytes, decodes them, and sums them on the fixed tree.

Each lane is encoded by itself, with its own error feedback residual. Its bytes therefore do not depend on the worker
that runs it, and neither does the sum. There is one phase with two banks, as in `ordered_allreduce`: a bank is
overwritten two steps later, and by then every peer has sent its frame for the step in between, after reading the bank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shoal.collectives.buckets import DecodeAndSum, EncodedLayout, ResidualBanks
from shoal.collectives.ordered_allreduce import AllReduceResult, OverlapError, check_size
from shoal.collectives.overlap import Addends, OverlappedSend, SinkState, is_worth_overlapping
from shoal.collectives.shared_buffers import SEQUENCE_NUMBERS_BYTES, UNFINISHED, SharedBuffers, write_sequence_number
from shoal.collectives.transport import frames
from shoal.collectives.transport.connection import BuffersFor, PeerLink
from shoal.collectives.transport.frames import PeerFrame
from shoal.collectives.transport.mesh import Mesh
from shoal.collectives.transport.shared_memory import ByteBuffer, SharedMemory
from shoal.lanes.flat_layout import write_lane_sum
from shoal.lanes.lane_sum import mixed_counts_error
from shoal.lanes.reduction_tree import Node, TreeSum
from shoal.lanes.replica import LaneSum, add
from shoal.net.errors import LinkError

BANKS = 2
_MAX_CACHED_SUMS = 8


class ResidualStore(Protocol):
    """The error feedback residuals of this worker's lanes."""

    def begin_step(self) -> None: ...

    def for_lane(self, lane: int) -> ResidualBanks: ...


def shared_memory_bytes(layout: EncodedLayout, lanes: int) -> int:
    """Shared memory that a worker with this many lanes needs."""
    return SEQUENCE_NUMBERS_BYTES + BANKS * lanes * layout.lane_bytes


class EncodedAllReduceStep(TreeSum[LaneSum]):
    """One step in progress: takes this worker's lanes in ascending order and encodes each as soon as it is complete.

    `ready_parts` counts the encoded parts of the latest lane. If its gradients are sent during backward, `posted_parts`
    of them are queued for sending; `residual_added` says that the sink adds the lane's residual to them.
    """

    def __init__(self, allreduce: EncodedAllReduce, lanes: int, bank: int) -> None:
        super().__init__(lanes, add)
        self.bank = bank
        self.filled = 0
        self.counted: bool | None = None
        self.residual_added = False
        self.lane_index = 0
        self.ready_parts = 0
        self.posted_parts = 0
        self.own_frame: PeerFrame | None = None
        self.sink_state: SinkState | None = None
        self.failure = ""
        self.invalid_reason = ""
        self.frames_by_seat: dict[int, PeerFrame] = {}
        self.decode_and_sum: DecodeAndSum | None = None
        self.bytes_sent_before = 0
        self.allreduce = allreduce

    def push(self, node: Node, value: LaneSum | None) -> None:
        """Encode a single lane; lanes are summed when they are decoded."""
        if value is not None:
            self.allreduce.encode_lane(self, node[1], value)


class EncodedAllReduce:
    """The encoded all-reduces of one view, used by the loop's thread. Without a mesh one worker carries all lanes.

    LinkError if a step fails; no further step is possible then.
    """

    def __init__(
        self,
        layout: EncodedLayout,
        carries: Mapping[int, Sequence[int]],
        seat: int,
        *,
        mesh: Mesh | None,
        shared_memory: SharedMemory,
        flat_buffer: ByteBuffer,
        total: ByteBuffer,
        residuals: ResidualStore | None,
        device: torch.device,
    ) -> None:
        if max(map(len, carries.values())) > frames.MAX_NODES:
            raise ValueError(f"a member carries more than {frames.MAX_NODES} lanes")
        self._layout = layout
        self._carries = {seat: sorted(lanes) for seat, lanes in sorted(carries.items())}
        self._seat = seat
        self._mesh = mesh
        self._shared_memory = shared_memory
        self._flat_buffer = flat_buffer.tensor
        self._lane_views = layout.layout.views(flat_buffer.tensor)
        self._total = total
        self._residuals = residuals
        self._shared_buffers: SharedBuffers | None = None
        self._steps_begun = 0
        self._counted = False
        self._cached_sums: dict[tuple[int, ...], DecodeAndSum] = {}
        self._residual_views: dict[int, list[Tensor]] = {}
        self._on_device = total.tensor if device.type == "cpu" else total.tensor.to(device)
        self._result = layout.layout.views(self._on_device)

    # --- encode this worker's lanes

    def begin_step(self) -> EncodedAllReduceStep:
        bank = self._steps_begun % BANKS
        self._steps_begun += 1
        if self._residuals:
            self._residuals.begin_step()
        write_sequence_number(self._shared_memory.buffer, bank, view=self._view, step=UNFINISHED)
        return EncodedAllReduceStep(self, sum(map(len, self._carries.values())), bank)

    def encode_lane(self, current: EncodedAllReduceStep, lane: int, value: LaneSum) -> None:
        """Encode a lane, or the rest of it if its gradients were sent during backward."""
        if current.sink_state is None:
            if self._steps_begun == 1 and not self._layout.layout.fits(value):
                raise ValueError("a lane's gradients or buffers differ from the model's in number, shape or dtype")
            self._begin_lane(current, lane)
        else:
            current.invalid_reason = current.sink_state.validate(value, counted=self._counted)
        if current.counted not in (None, value.count is not None):
            raise mixed_counts_error()
        current.counted = value.count is not None
        write_lane_sum(self._lane_views, value)
        self._encode(current, lane, self._layout.grads_bytes)
        self._layout.write_tail(self._flat_buffer, self._encoded_lane(self._seat, current.bank, current.lane_index))
        current.ready_parts += 1

    def _begin_lane(self, current: EncodedAllReduceStep, lane: int) -> None:
        current.lane_index, current.ready_parts = self._carries[self._seat].index(lane), 0
        current.filled |= 1 << current.lane_index

    def _encode(self, current: EncodedAllReduceStep, lane: int, until: int) -> None:
        """Encode the buckets that lie within the first `until` bytes of the flat buffer."""
        buckets = self._layout.buckets
        encoded_lane = self._encoded_lane(self._seat, current.bank, current.lane_index)
        residual = self._residuals.for_lane(lane) if self._residuals else None
        while current.ready_parts < len(buckets) and buckets[current.ready_parts].stop <= until:
            buckets[current.ready_parts].encode(
                self._flat_buffer,
                encoded_lane,
                residual,
                keep_decoded=self._layout.needs_residual,
                residual_added=current.residual_added,
            )
            current.ready_parts += 1

    # --- exchange with peers

    def gradient_sink(
        self, current: EncodedAllReduceStep, step: int, lane: int, *, halt: bool
    ) -> OverlappedSend | None:
        """A sink for the gradients of this worker's last lane: it encodes and sends each bucket during backward.

        None in the first step of a view, as in `OrderedAllReduce`.
        """
        mesh = self._mesh
        if (
            mesh is None
            or self._shared_buffers is None
            or not mesh.remote_links
            or not is_worth_overlapping(self._layout.grads_bytes)
        ):
            return None
        self._begin_lane(current, lane)
        self._post(current, mesh, step, halt=halt, growing=True)
        mesh.expect(frames.PARTIAL, step)
        current.sink_state = SinkState(set(range(len(self._layout.layout.grads))))
        out, addends = self._sink_target(current, lane)
        return OverlappedSend(
            out,
            self._layout.layout.grads,
            addends,
            state=current.sink_state,
            on_ready=lambda until: self._send_ready(current, mesh, lane, until),
        )

    def _sink_target(self, current: EncodedAllReduceStep, lane: int) -> tuple[list[Tensor], Addends]:
        """Where the sink writes gradients, and what it adds to them: the lane's residual, if the codec allows it."""
        layout = self._layout
        before, after = (
            self._residuals.for_lane(lane).before_and_after(0, layout.residual_floats)
            if self._residuals
            else (None, None)
        )
        if before is None or after is None or not layout.adds_residual:
            return self._lane_views.grads, []
        current.residual_added = True
        if not {before.data_ptr(), after.data_ptr()} <= self._residual_views.keys():  # they swap; views are made once
            self._residual_views = {bank.data_ptr(): layout.residual_views(bank) for bank in (before, after)}
        return self._residual_views[after.data_ptr()], [(self._residual_views[before.data_ptr()], False)]

    def _send_ready(self, current: EncodedAllReduceStep, mesh: Mesh, lane: int, until: int) -> None:
        """Encode and send what lies before `until`. A failure is raised later by `run`, not inside backward."""
        self._encode(current, lane, until)
        if not current.failure:
            try:
                self._post_ready(current, mesh)
                mesh.poll(self._buffers_for(current))
            except LinkError as failure:
                current.failure = str(failure)  # the exception itself would keep its frames alive, and memory with them

    def run(self, current: EncodedAllReduceStep, step: int, *, halt: bool) -> AllReduceResult:
        """If a sink sent the gradients, the `halt` given to `gradient_sink` counts, not this one."""
        if self._mesh is None:
            own_frame = PeerFrame(
                frames.PARTIAL, 0, step, self._seat, self._flags(bool(current.counted), halt), filled=current.filled
            )
            current.frames_by_seat = {self._seat: own_frame}
            self._sum_arrived(current)
            return self._result_of(current, 0.0)
        waited_s = self._exchange(current, self._mesh, step, halt=halt)
        assert self._shared_buffers is not None
        self._shared_buffers.check_sequence_numbers(step, current.bank)
        return self._result_of(current, waited_s)

    def _exchange(self, current: EncodedAllReduceStep, mesh: Mesh, step: int, *, halt: bool) -> float:
        if self._shared_buffers is None:
            sizes_bytes = {seat: shared_memory_bytes(self._layout, len(lanes)) for seat, lanes in self._carries.items()}
            self._shared_buffers = SharedBuffers(
                mesh, self._shared_memory, sizes_bytes, digest=self._layout.digest, step=step
            )
        if current.failure:
            raise LinkError(current.failure)
        if current.sink_state is None:
            self._post(current, mesh, step, halt=halt, growing=False)
            mesh.expect(frames.PARTIAL, step)
        elif current.invalid_reason or current.sink_state.missing:
            mesh.disconnect(self._seat)
            raise OverlapError(current.invalid_reason or "not all gradients were sent during backward")
        self._post_ready(current, mesh)
        assert current.own_frame is not None
        write_sequence_number(self._shared_memory.buffer, current.bank, view=self._view, step=step)
        for link in mesh.links.values():
            if link.same_host:
                link.post(current.own_frame)
        return mesh.finish(self._buffers_for(current), lambda: self._sum_arrived(current))

    def _post(self, current: EncodedAllReduceStep, mesh: Mesh, step: int, *, halt: bool, growing: bool) -> None:
        """Queue the complete lanes for peers on other hosts. A `growing` last lane follows during backward."""
        flags = self._flags(self._counted if growing else bool(current.counted), halt)
        current.own_frame = mesh.frame(frames.PARTIAL, step, flags=flags, filled=current.filled)
        current.frames_by_seat[self._seat] = current.own_frame
        current.bytes_sent_before = mesh.bytes_sent
        parts = self._payload(self._seat, current.bank, current.filled)
        later = len(self._layout.buckets) + 1 if growing else 0
        frame = current.own_frame._replace(size=sum(map(len, parts)))
        for link in mesh.remote_links:
            link.post(frame, parts[: len(parts) - later], later_bytes=self._layout.sent_bytes if growing else 0)
        current.posted_parts = 0 if growing else current.ready_parts

    def _post_ready(self, current: EncodedAllReduceStep, mesh: Mesh) -> None:
        """Queue the parts that have become ready since the last call."""
        parts = self._payload(self._seat, current.bank, 1 << current.lane_index)[
            current.posted_parts : current.ready_parts
        ]
        for link in mesh.remote_links:
            for part in parts:
                link.post_rest(part)
        current.posted_parts = current.ready_parts

    def _buffers_for(self, current: EncodedAllReduceStep) -> BuffersFor:
        def buffers(link: PeerLink, frame: PeerFrame) -> list[memoryview]:
            if frame.filled >> len(self._carries[link.seat]) or frame.flags & ~(frames.HALT | frames.COUNTED):
                raise LinkError(f"sent {frame}, which names lanes that it does not carry")
            current.frames_by_seat[link.seat] = frame
            return check_size([] if link.same_host else self._payload(link.seat, 0, frame.filled), frame)

        return buffers

    # --- sum

    def _sum_arrived(self, current: EncodedAllReduceStep) -> None:
        """Sum as far as the lanes of all ranks have arrived."""
        if len(current.frames_by_seat) < len(self._carries):
            return
        filled = {seat: current.frames_by_seat[seat].filled for seat in self._carries}
        if current.decode_and_sum is None and any(filled.values()):
            current.decode_and_sum = self._decode_and_sum(current.bank, tuple(filled.values()))
            current.decode_and_sum.restart()
        if current.decode_and_sum:
            sent_bytes = self._layout.sent_bytes
            # a peer sends its lanes one after the other, so the progress of its last lane is what counts
            remote_links = self._mesh.remote_links if self._mesh else []
            arrived = [
                link.payload_received_bytes - sent_bytes * (filled[link.seat].bit_count() - 1)
                for link in remote_links
                if filled[link.seat]
            ]
            current.decode_and_sum.run(min([sent_bytes, *arrived]))

    def _decode_and_sum(self, bank: int, filled: tuple[int, ...]) -> DecodeAndSum:
        """Cached, because nearly all steps use the same one or two."""
        key = (bank, *filled)
        if key not in self._cached_sums:
            if len(self._cached_sums) >= _MAX_CACHED_SUMS:
                self._cached_sums.clear()
            encoded_lanes = {
                lane: self._encoded_lane(seat, bank, i) if mask >> i & 1 else None
                for (seat, lanes), mask in zip(self._carries.items(), filled, strict=True)
                for i, lane in enumerate(lanes)
            }
            self._cached_sums[key] = DecodeAndSum(
                self._layout, encoded_lanes, self._total.tensor, decoded=self._own_decoded(encoded_lanes)
            )
        return self._cached_sums[key]

    def _own_decoded(self, encoded_lanes: Mapping[int, Tensor | None]) -> tuple[Tensor, Tensor] | None:
        """This worker's last lane and its decoded values, which encoding left in the flat buffer."""
        own = [encoded for lane in self._carries[self._seat] if (encoded := encoded_lanes[lane]) is not None]
        return (own[-1], self._flat_buffer) if own and self._layout.needs_residual else None

    def _result_of(self, current: EncodedAllReduceStep, waited_s: float) -> AllReduceResult:
        halt = any(frame.flags & frames.HALT for frame in current.frames_by_seat.values())
        sent = self._mesh.bytes_sent - current.bytes_sent_before if self._mesh else 0
        counted = {bool(frame.flags & frames.COUNTED) for frame in current.frames_by_seat.values() if frame.filled}
        if not counted:
            return AllReduceResult(None, halt, sent, waited_s)
        if len(counted) > 1 and self._steps_begun == 1:
            raise mixed_counts_error()
        if len(counted) > 1:  # perhaps only assumed, for gradients that were sent during backward: a new view shows it
            raise LinkError("some lanes have a loss count and others have none")
        self._counted = counted == {True}
        if self._on_device is not self._total.tensor:
            self._on_device.copy_(self._total.tensor)
        result = self._result
        count = result.count if self._counted else None
        total = LaneSum(result.grads, result.float_buffers, result.int_buffers, result.loss.clone(), count)
        return AllReduceResult(total, halt, sent, waited_s)

    # --- offsets in shared memory

    @property
    def _view(self) -> int:
        return self._mesh.view if self._mesh else 0

    def _buffer_of(self, seat: int) -> ByteBuffer:
        return (
            self._shared_memory.buffer
            if seat == self._seat or self._shared_buffers is None
            else self._shared_buffers.buffers[seat]
        )

    def _lane_offset(self, seat: int, bank: int, index: int) -> int:
        """Offset of an encoded lane. Peers on other hosts need one bank: they send again after this one was read."""
        if seat != self._seat and self._shared_buffers and not self._shared_buffers.is_shared(seat):
            bank = 0
        return SEQUENCE_NUMBERS_BYTES + (bank * len(self._carries[seat]) + index) * self._layout.lane_bytes

    def _encoded_lane(self, seat: int, bank: int, index: int) -> Tensor:
        start = self._lane_offset(seat, bank, index)
        return self._buffer_of(seat).tensor[start : start + self._layout.lane_bytes]

    def _payload(self, seat: int, bank: int, filled: int) -> list[memoryview]:
        """The parts that a rank sends: those of its lanes that have samples."""
        raw, size = self._buffer_of(seat).raw, self._layout.lane_bytes
        starts = [self._lane_offset(seat, bank, i) for i in range(len(self._carries[seat])) if filled >> i & 1]
        return [part for start in starts for part in self._layout.payload(raw[start : start + size])]

    def _flags(self, counted: bool, halt: bool) -> int:
        return (frames.HALT if halt else 0) | (frames.COUNTED if counted else 0)
