"""The exchange of encoded lanes: everybody gets every lane's bytes, decodes them, and adds them on the fixed tree.

A lane is encoded where it is carried, by itself, with what it remembers itself: so its bytes do not depend on who
carries it, and neither does the sum. One phase, two banks, as in `exchange`: a bank is written again two steps later,
and by then every peer has rung for the step in between, which it does after it has read.
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
from shoal.lanes.reduction_tree import Node, TreeSum
from shoal.lanes.replica import LaneSum, add
from shoal.net.errors import LinkError

BANKS = 2
_MAX_CACHED_SUMS = 8


class ResidualStore(Protocol):
    """What lanes remember."""

    def begin_step(self) -> None: ...

    def for_lane(self, lane: int) -> ResidualBanks: ...


def shared_memory_bytes(layout: EncodedLayout, lanes: int) -> int:
    """What a worker needs that carries so many lanes."""
    return SEQUENCE_NUMBERS_BYTES + BANKS * lanes * layout.lane_bytes


class EncodedAllReduceStep(TreeSum[LaneSum]):
    """One step, under way: takes this worker's lanes in rising order and encodes each as soon as it is there.

    Of the last lane so far, `ready` parts are encoded. When gradients go ahead, `posted` of its parts are on the way,
    and they may be `summed` with what the lane remembers.
    """

    def __init__(self, allreduce: EncodedAllReduce, lanes: int, bank: int) -> None:
        super().__init__(lanes, add)
        self.bank = bank
        self.filled = 0
        self.counted = False
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
        """Lanes alone: they are added up when they are decoded."""
        if value is not None:
            self.allreduce.encode_lane(self, node[1], value)


class EncodedAllReduce:
    """The steps of one view, by the loop's thread; without a mesh, of a worker that carries all lanes. LinkError when
    one fails, and then no other may follow."""

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

    # --- this worker's lanes

    def begin_step(self) -> EncodedAllReduceStep:
        bank = self._steps_begun % BANKS
        self._steps_begun += 1
        if self._residuals:
            self._residuals.begin_step()
        write_sequence_number(self._shared_memory.buffer, bank, view=self._view, step=UNFINISHED)
        return EncodedAllReduceStep(self, sum(map(len, self._carries.values())), bank)

    def encode_lane(self, it: EncodedAllReduceStep, lane: int, value: LaneSum) -> None:
        """Encode a lane, or what is left of it where its gradients went ahead."""
        if it.sink_state is None:
            if self._steps_begun == 1 and not self._layout.layout.fits(value):
                raise ValueError("a lane's gradients or buffers are not of the kind that the model has")
            self._begin_lane(it, lane)
        else:
            it.invalid_reason = it.sink_state.validate(value, counted=self._counted)
        it.counted = value.count is not None
        write_lane_sum(self._lane_views, value)
        self._encode(it, lane, self._layout.grads_bytes)
        self._layout.write_tail(self._flat_buffer, self._encoded_lane(self._seat, it.bank, it.lane_index))
        it.ready_parts += 1

    def _begin_lane(self, it: EncodedAllReduceStep, lane: int) -> None:
        it.lane_index, it.ready_parts = self._carries[self._seat].index(lane), 0
        it.filled |= 1 << it.lane_index

    def _encode(self, it: EncodedAllReduceStep, lane: int, until: int) -> None:
        """As far as the first `until` bytes of the stretch are there."""
        cuts = self._layout.buckets
        slot = self._encoded_lane(self._seat, it.bank, it.lane_index)
        memory = self._residuals.for_lane(lane) if self._residuals else None
        while it.ready_parts < len(cuts) and cuts[it.ready_parts].stop <= until:
            cuts[it.ready_parts].encode(
                self._flat_buffer,
                slot,
                memory,
                keep_decoded=self._layout.needs_residual,
                residual_added=it.residual_added,
            )
            it.ready_parts += 1

    # --- with others

    def gradient_sink(self, it: EncodedAllReduceStep, step: int, lane: int, *, halt: bool) -> OverlappedSend | None:
        """Before the last lane: what takes its gradients, encodes them and sends them while others follow. Not in the
        first step of a view, as in `Exchange`."""
        mesh = self._mesh
        if (
            mesh is None
            or self._shared_buffers is None
            or not mesh.remote_links
            or not is_worth_overlapping(self._layout.grads_bytes)
        ):
            return None
        self._begin_lane(it, lane)
        self._post(it, mesh, step, halt=halt, growing=True)
        mesh.expect(frames.PARTIAL, step)
        it.sink_state = SinkState(set(range(len(self._layout.layout.grads))))
        room, met = self._sink_target(it, lane)
        places = self._layout.layout.grads
        return OverlappedSend(
            room, places, met, state=it.sink_state, on_ready=lambda until: self._send_ready(it, mesh, lane, until)
        )

    def _sink_target(self, it: EncodedAllReduceStep, lane: int) -> tuple[list[Tensor], Addends]:
        """Where the gradients go, and what they meet there: what the lane remembers, if it can be added at once."""
        form = self._layout
        before, after = (
            self._residuals.for_lane(lane).before_and_after(0, form.residual_floats)
            if self._residuals
            else (None, None)
        )
        if before is None or after is None or not form.adds_residual:
            return self._lane_views.grads, []
        it.residual_added = True
        if not {before.data_ptr(), after.data_ptr()} <= self._residual_views.keys():  # they swap; views are made once
            self._residual_views = {bank.data_ptr(): form.residual_views(bank) for bank in (before, after)}
        return self._residual_views[after.data_ptr()], [(self._residual_views[before.data_ptr()], False)]

    def _send_ready(self, it: EncodedAllReduceStep, mesh: Mesh, lane: int, until: int) -> None:
        """So much is ready. What fails is told later: backward would not know what to do with it."""
        self._encode(it, lane, until)
        if not it.failure:
            try:
                self._post_ready(it, mesh)
                mesh.poll(self._buffers_for(it))
            except LinkError as failure:
                it.failure = str(failure)  # the exception itself would keep its frames alive, and memory with them

    def run(self, it: EncodedAllReduceStep, step: int, *, halt: bool) -> AllReduceResult:
        """If gradients went ahead, `halt` is what was said then."""
        if self._mesh is None:
            mine = PeerFrame(frames.PARTIAL, 0, step, self._seat, self._flags(it.counted, halt), filled=it.filled)
            it.frames_by_seat = {self._seat: mine}
            self._sum_arrived(it)
            return self._result_of(it, 0.0)
        waited_s = self._exchange(it, self._mesh, step, halt=halt)
        assert self._shared_buffers is not None
        self._shared_buffers.check_sequence_numbers(step, it.bank)
        return self._result_of(it, waited_s)

    def _exchange(self, it: EncodedAllReduceStep, mesh: Mesh, step: int, *, halt: bool) -> float:
        if self._shared_buffers is None:
            sizes_bytes = {seat: shared_memory_bytes(self._layout, len(lanes)) for seat, lanes in self._carries.items()}
            self._shared_buffers = SharedBuffers(
                mesh, self._shared_memory, sizes_bytes, digest=self._layout.digest, step=step
            )
        if it.failure:
            raise LinkError(it.failure)
        if it.sink_state is None:
            self._post(it, mesh, step, halt=halt, growing=False)
            mesh.expect(frames.PARTIAL, step)
        elif it.invalid_reason or it.sink_state.missing:
            mesh.disconnect(self._seat)
            raise OverlapError(it.invalid_reason or "not all gradients went ahead")
        self._post_ready(it, mesh)
        assert it.own_frame is not None
        write_sequence_number(self._shared_memory.buffer, it.bank, view=self._view, step=step)
        for link in mesh.links.values():
            if link.same_host:
                link.post(it.own_frame)
        return mesh.finish(self._buffers_for(it), lambda: self._sum_arrived(it))

    def _post(self, it: EncodedAllReduceStep, mesh: Mesh, step: int, *, halt: bool, growing: bool) -> None:
        """To peers elsewhere: the lanes that there are. A `growing` last one follows."""
        flags = self._flags(self._counted if growing else it.counted, halt)
        it.own_frame = mesh.frame(frames.PARTIAL, step, flags=flags, filled=it.filled)
        it.frames_by_seat[self._seat] = it.own_frame
        it.bytes_sent_before = mesh.bytes_sent
        parts = self._payload(self._seat, it.bank, it.filled)
        later = len(self._layout.buckets) + 1 if growing else 0
        frame = it.own_frame._replace(size=sum(map(len, parts)))
        for link in mesh.remote_links:
            link.post(frame, parts[: len(parts) - later], later_bytes=self._layout.sent_bytes if growing else 0)
        it.posted_parts = 0 if growing else it.ready_parts

    def _post_ready(self, it: EncodedAllReduceStep, mesh: Mesh) -> None:
        """What has become ready since."""
        parts = self._payload(self._seat, it.bank, 1 << it.lane_index)[it.posted_parts : it.ready_parts]
        for link in mesh.remote_links:
            for part in parts:
                link.post_rest(part)
        it.posted_parts = it.ready_parts

    def _buffers_for(self, it: EncodedAllReduceStep) -> BuffersFor:
        def arrange(link: PeerLink, frame: PeerFrame) -> list[memoryview]:
            if frame.filled >> len(self._carries[link.seat]) or frame.flags & ~(frames.HALT | frames.COUNTED):
                raise LinkError(f"sent {frame}, which is more than it carries")
            it.frames_by_seat[link.seat] = frame
            return check_size([] if link.same_host else self._payload(link.seat, 0, frame.filled), frame)

        return arrange

    # --- the sum

    def _sum_arrived(self, it: EncodedAllReduceStep) -> None:
        """As far as everybody's lanes have arrived."""
        if len(it.frames_by_seat) < len(self._carries):
            return
        filled = {seat: it.frames_by_seat[seat].filled for seat in self._carries}
        if it.decode_and_sum is None and any(filled.values()):
            it.decode_and_sum = self._decode_and_sum(it.bank, tuple(filled.values()))
            it.decode_and_sum.restart()
        if it.decode_and_sum:
            sent_bytes = self._layout.sent_bytes
            # lanes come one after the other: what the last of them still lacks counts
            far = self._mesh.remote_links if self._mesh else []
            lasts = [
                link.payload_received_bytes - sent_bytes * (filled[link.seat].bit_count() - 1)
                for link in far
                if filled[link.seat]
            ]
            it.decode_and_sum.run(min([sent_bytes, *lasts]))

    def _decode_and_sum(self, bank: int, filled: tuple[int, ...]) -> DecodeAndSum:
        """Nearly always the same one or two."""
        key = (bank, *filled)
        if key not in self._cached_sums:
            if len(self._cached_sums) >= _MAX_CACHED_SUMS:
                self._cached_sums.clear()
            slots = {
                lane: self._encoded_lane(seat, bank, i) if mask >> i & 1 else None
                for (seat, lanes), mask in zip(self._carries.items(), filled, strict=True)
                for i, lane in enumerate(lanes)
            }
            self._cached_sums[key] = DecodeAndSum(
                self._layout, slots, self._total.tensor, decoded=self._own_decoded(slots)
            )
        return self._cached_sums[key]

    def _own_decoded(self, slots: Mapping[int, Tensor | None]) -> tuple[Tensor, Tensor] | None:
        """This worker's last lane: what others will decode still lies where it was encoded."""
        mine = [slot for lane in self._carries[self._seat] if (slot := slots[lane]) is not None]
        return (mine[-1], self._flat_buffer) if mine and self._layout.needs_residual else None

    def _result_of(self, it: EncodedAllReduceStep, waited_s: float) -> AllReduceResult:
        halt = any(frame.flags & frames.HALT for frame in it.frames_by_seat.values())
        sent = self._mesh.bytes_sent - it.bytes_sent_before if self._mesh else 0
        counted = {bool(frame.flags & frames.COUNTED) for frame in it.frames_by_seat.values() if frame.filled}
        if not counted:
            return AllReduceResult(None, halt, sent, waited_s)
        if len(counted) > 1:
            raise LinkError("some lanes came with a count and others without")
        self._counted = counted == {True}
        if self._on_device is not self._total.tensor:
            self._on_device.copy_(self._total.tensor)
        found = self._result
        count = found.count if self._counted else None
        total = LaneSum(found.grads, found.float_buffers, found.int_buffers, found.loss.clone(), count)
        return AllReduceResult(total, halt, sent, waited_s)

    # --- places

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
        """Where a slot begins. Of peers elsewhere there is one bank: they send again when this one was read."""
        if seat != self._seat and self._shared_buffers and not self._shared_buffers.is_shared(seat):
            bank = 0
        return SEQUENCE_NUMBERS_BYTES + (bank * len(self._carries[seat]) + index) * self._layout.lane_bytes

    def _encoded_lane(self, seat: int, bank: int, index: int) -> Tensor:
        start = self._lane_offset(seat, bank, index)
        return self._buffer_of(seat).tensor[start : start + self._layout.lane_bytes]

    def _payload(self, seat: int, bank: int, filled: int) -> list[memoryview]:
        """What is sent of a member's lanes that are not empty."""
        raw, size = self._buffer_of(seat).raw, self._layout.lane_bytes
        starts = [self._lane_offset(seat, bank, i) for i in range(len(self._carries[seat])) if filled >> i & 1]
        return [part for start in starts for part in self._layout.payload(raw[start : start + size])]

    def _flags(self, counted: bool, halt: bool) -> int:
        return (frames.HALT if halt else 0) | (frames.COUNTED if counted else 0)
