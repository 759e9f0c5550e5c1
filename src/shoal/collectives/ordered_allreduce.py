"""Ordered all-reduce: workers that carry different lanes get the same sum over all lanes, bit for bit.

Each worker writes its partial sums of the tree into its buffer. The worker that reduces a range of the flat buffer
reads that range from all workers and adds in the order of the tree. On one host workers read each other's shared
memory. Between hosts the range is sent, and the gradients of a worker's last lane are sent while its backward runs.

**One phase** (two members, or a small model): every worker reduces the whole buffer. Two banks of partial sums are
used in turn. A bank is overwritten two steps later, and by then every peer has sent its frame for the step in between,
after reading the bank.

**Two phases** (reduce-scatter, all-gather): every worker reduces its own range and then collects the other ranges. One
bank is enough. Partial sums are overwritten after all peers have sent their second frame, which follows their reads;
reduced ranges are overwritten after all peers have sent the frame of the next step, which follows the all-gather.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.collectives.allreduce_plan import AllReducePlan
from shoal.collectives.overlap import OverlappedSend, SinkState, is_worth_overlapping
from shoal.collectives.shared_buffers import SharedBuffers, write_sequence_number
from shoal.collectives.transport import frames
from shoal.collectives.transport.connection import BuffersFor, PeerLink
from shoal.collectives.transport.frames import PeerFrame
from shoal.collectives.transport.mesh import Mesh
from shoal.collectives.transport.shared_memory import ByteBuffer, SharedMemory
from shoal.collectives.tree_reduce import TreeReduce, build_sum_tree
from shoal.lanes.flat_layout import write_lane_sum
from shoal.lanes.lane_sum import mixed_counts_error
from shoal.lanes.reduction_tree import Node, TreeSum
from shoal.lanes.replica import LaneSum
from shoal.net.errors import LinkError

_MAX_CACHED_REDUCTIONS = 8


@dataclass(frozen=True)
class AllReduceResult:
    """The result of one step on every rank. `total` is valid until the next step; None if no lane had samples."""

    total: LaneSum | None
    halt: bool
    bytes_sent: int
    waited_s: float


class OverlapError(LinkError):
    """The gradients sent during backward differ from the lane's result. The step is discarded on all ranks."""


@dataclass
class AllReduceStep:
    """One step in progress. The first `ready_bytes` of this worker's last partial sum are complete."""

    own_frame: PeerFrame
    bank: int
    frames_by_seat: dict[int, PeerFrame]
    ready_bytes: int
    bytes_sent_before: int
    sink_state: SinkState | None = None
    failure: str = ""
    reduction: TreeReduce | None = None


class OrderedAllReduce:
    """The all-reduces of one view, used by the loop's thread.

    LinkError if a step fails; no further step is possible then.
    """

    def __init__(
        self,
        mesh: Mesh,
        plan: AllReducePlan,
        *,
        shared_memory: SharedMemory,
        total: ByteBuffer,
        device: torch.device,
        step: int,
    ) -> None:
        self._mesh = mesh
        self._plan = plan
        self._own_buffer = shared_memory.buffer
        self._total = total
        self._steps_begun = 0
        self._counted = False
        self._overlapped_step: AllReduceStep | None = None
        sizes_bytes = {seat: plan.shared_memory_bytes(seat) for seat in plan.nodes}
        self._shared_buffers = SharedBuffers(mesh, shared_memory, sizes_bytes, digest=plan.layout.digest, step=step)
        self._buffers = self._shared_buffers.buffers
        self._partial_views = [self._views_of_bank(bank) for bank in range(plan.banks)]
        self._reductions: dict[tuple[int, ...], TreeReduce] = {}
        self._on_device = total.tensor if device.type == "cpu" else total.tensor.to(device)
        self._result = plan.layout.views(self._on_device[: plan.layout.size_bytes])

    def _views_of_bank(self, bank: int) -> dict[Node, LaneSum]:
        seat, layout = self._mesh.seat, self._plan.layout
        offsets = {node: self._plan.partial_offset(seat, bank, i) for i, node in enumerate(self._plan.nodes[seat])}
        return {node: layout.views(self._own_buffer.tensor[a : a + layout.size_bytes]) for node, a in offsets.items()}

    # --- a step

    def gradient_sink(self, step: int, sums: TreeSum[LaneSum], lane: int, *, halt: bool) -> OverlappedSend | None:
        """A sink for the gradients of the last lane that adds to `sums`: it sends them during backward.

        None in the first step of a view, which shows whether losses have a count. A step that an OverlapError
        discarded is repeated in a new view, so it then succeeds. The gradients that the lane's are added to are
        removed from `sums`.
        """
        if (
            not self._steps_begun
            or not self._mesh.remote_links
            or not is_worth_overlapping(self._plan.layout.size_bytes)
        ):
            return None
        last, merged = sums.merge_path((0, lane))
        partials = sums.partials
        addends = [(partials.pop(node), comes_first) for node, comes_first in merged]
        if [*partials, last] != list(self._partial_views[0]):
            return None
        current = self._overlapped_step = self._begin(step, partials, last, halt=halt)
        current.sink_state = SinkState(set(range(len(self._plan.layout.grads))))
        return OverlappedSend(
            self._partial_views[current.bank][last].grads,
            self._plan.layout.grads,
            [(_move_out_grads(value), comes_first) for value, comes_first in addends if value is not None],
            state=current.sink_state,
            on_ready=lambda until: self._send_ready(current, until),
        )

    def _send_ready(self, current: AllReduceStep, until: int) -> None:
        """Send what lies before `until`. A failure is raised later by `run`, not inside backward."""
        current.ready_bytes = until
        if not current.failure:
            try:
                self._post_ready(current)
                self._mesh.poll(self._buffers_for(current), lambda: self._reduce_arrived(current))
            except LinkError as failure:
                current.failure = str(failure)  # the exception itself would keep its frames alive, and memory with them

    def run(self, step: int, partials: Mapping[Node, LaneSum | None], *, halt: bool) -> AllReduceResult:
        """If a sink sent the gradients, the `halt` given to `gradient_sink` counts, not this one."""
        current, self._overlapped_step = self._overlapped_step, None
        if current is None:
            current = self._begin(step, partials, halt=halt)
        else:
            self._finish_overlap(current, partials)
        waited_s = self._reduce_scatter(current)
        self._shared_buffers.check_sequence_numbers(step, current.bank)
        any_samples = any(frame.filled for frame in current.frames_by_seat.values())
        if any_samples and self._plan.phases == 2:
            self._all_gather(step)
            self._shared_buffers.check_sequence_numbers(step, 1)
        halting = any(frame.flags & frames.HALT for frame in current.frames_by_seat.values())
        total = self._summed_total(current.frames_by_seat) if any_samples else None
        return AllReduceResult(total, halting, self._mesh.bytes_sent - current.bytes_sent_before, waited_s)

    def _begin(
        self, step: int, partials: Mapping[Node, LaneSum | None], growing: Node | None = None, *, halt: bool
    ) -> AllReduceStep:
        """Write the partial sums and queue them for peers on other hosts. The `growing` one follows during backward."""
        bank = self._steps_begun % self._plan.banks
        self._steps_begun += 1
        bytes_before = self._mesh.bytes_sent
        own_frame = self._write_partials(step, bank, partials, growing, halt=halt)
        ready_bytes = 0 if growing else self._plan.layout.size_bytes
        current = AllReduceStep(own_frame, bank, {self._mesh.seat: own_frame}, ready_bytes, bytes_before)
        for link in self._mesh.remote_links:
            parts = self._payload(self._mesh.seat, bank, own_frame.filled, reducer=link.seat)
            frame = own_frame._replace(size=sum(map(len, parts)))
            later = parts.pop() if growing else b""
            link.post(frame, parts, later_bytes=len(later))
        self._mesh.expect(frames.PARTIAL, step)
        return current

    def _finish_overlap(self, current: AllReduceStep, partials: Mapping[Node, LaneSum | None]) -> None:
        """Complete the last partial sum after all its gradients were sent. LinkError if sending failed."""
        if current.failure:
            raise LinkError(current.failure)
        last = list(self._partial_views[current.bank])[-1]
        value = partials.get(last)
        assert current.sink_state is not None
        if why := current.sink_state.validate(value, counted=self._counted):
            self._mesh.disconnect(self._mesh.seat)
            raise OverlapError(why)
        assert value is not None
        write_lane_sum(self._partial_views[current.bank][last], value)
        current.ready_bytes = self._plan.layout.size_bytes

    def _summed_total(self, frames_by_seat: Mapping[int, PeerFrame]) -> LaneSum:
        counted = {bool(frame.flags & frames.COUNTED) for frame in frames_by_seat.values() if frame.filled}
        if len(counted) > 1 and self._steps_begun == 1:
            raise mixed_counts_error()
        if len(counted) > 1:  # perhaps only assumed, for gradients that were sent during backward: a new view shows it
            raise LinkError("some lanes have a loss count and others have none")
        if self._on_device is not self._total.tensor:
            self._on_device.copy_(self._total.tensor)
        self._counted = counted == {True}
        result = self._result
        count = result.count if self._counted else None
        return LaneSum(result.grads, result.float_buffers, result.int_buffers, result.loss.clone(), count)

    def _write_partials(
        self, step: int, bank: int, partials: Mapping[Node, LaneSum | None], growing: Node | None, *, halt: bool
    ) -> PeerFrame:
        """Write this worker's partial sums into its shared memory. The frame says which of them are not empty."""
        views = self._partial_views[bank]
        if partials.keys() | ({growing} if growing else ()) != views.keys():
            raise ValueError(f"got the sums of nodes {sorted(partials)}, but the view needs {sorted(views)}")
        write_sequence_number(self._own_buffer, bank, view=self._mesh.view, step=step)
        flags, filled = frames.HALT if halt else 0, 0
        for i, (node, view) in enumerate(views.items()):
            value = partials.get(node)
            if value is not None:
                if self._steps_begun == 1 and not self._plan.layout.fits(value):
                    raise ValueError("a lane's gradients or buffers differ from the model's in number, shape or dtype")
                write_lane_sum(view, value)
                flags |= frames.COUNTED if value.count is not None else 0
            if value is not None or node == growing:
                filled |= 1 << i
        if growing and self._counted:
            flags |= frames.COUNTED
        return self._mesh.frame(frames.PARTIAL, step, flags=flags, filled=filled)

    def _reduce_scatter(self, current: AllReduceStep) -> float:
        """Send each peer the range that it reduces (on one host only the frame); receive the same from every peer and
        reduce as it arrives. Returns the seconds waited for peers that had not begun."""
        for link in self._mesh.links.values():
            if link.same_host:
                link.post(current.own_frame)
        self._post_ready(current)
        return self._mesh.finish(self._buffers_for(current), lambda: self._reduce_arrived(current))

    def _post_ready(self, current: AllReduceStep) -> None:
        """Queue the bytes that have become ready since the last call."""
        for link in self._mesh.remote_links:
            if link.unposted_bytes:
                start, stop = self._plan.ranges[link.seat]
                growing = self._payload(self._mesh.seat, current.bank, current.own_frame.filled, reducer=link.seat)[-1]
                link.post_rest(
                    growing[len(growing) - link.unposted_bytes : max(min(current.ready_bytes, stop) - start, 0)]
                )

    def _buffers_for(self, current: AllReduceStep) -> BuffersFor:
        def buffers(link: PeerLink, frame: PeerFrame) -> list[memoryview]:
            if frame.filled >> len(self._plan.nodes[link.seat]) or frame.flags & ~(frames.HALT | frames.COUNTED):
                raise LinkError(f"sent {frame}, which names lanes that it does not carry")
            parts = [] if link.same_host else self._payload(link.seat, 0, frame.filled, reducer=self._mesh.seat)
            current.frames_by_seat[link.seat] = frame
            return check_size(parts, frame)

        return buffers

    def _reduce_arrived(self, current: AllReduceStep) -> None:
        """Reduce as far as the partial sums of all ranks have arrived."""
        if len(current.frames_by_seat) < len(self._plan.nodes):
            return
        filled = {seat: current.frames_by_seat[seat].filled for seat in self._plan.nodes}
        if current.reduction is None and any(filled.values()):
            if self._plan.phases == 2:
                write_sequence_number(self._own_buffer, 1, view=self._mesh.view, step=current.own_frame.step)
            current.reduction = self._reduction(current.bank, tuple(filled.values()))
            current.reduction.restart()
        if current.reduction:
            start, stop = self._plan.ranges[self._mesh.seat]
            # a peer sends its partial sums one after the other, so the progress of its last one is what counts
            arrived = [
                link.payload_received_bytes - (stop - start) * (filled[link.seat].bit_count() - 1)
                for link in self._mesh.remote_links
                if filled[link.seat]
            ]
            current.reduction.run(min([current.ready_bytes - start, *arrived]))

    def _payload(self, seat: int, bank: int, filled: int, *, reducer: int) -> list[memoryview]:
        """The reducer's range of a rank's partial sums that are not empty."""
        start, stop = self._plan.ranges[reducer]
        offsets = [
            self._plan.partial_offset(seat, bank, i) for i in range(len(self._plan.nodes[seat])) if filled >> i & 1
        ]
        return [self._buffers[seat].raw[offset + start : offset + stop] for offset in offsets]

    def _reduction(self, bank: int, filled: tuple[int, ...]) -> TreeReduce:
        """Cached, because nearly all steps use the same one or two."""
        key = (bank, *filled)
        if key not in self._reductions:
            if len(self._reductions) >= _MAX_CACHED_REDUCTIONS:
                self._reductions.clear()
            self._reductions[key] = self._new_reduction(bank, filled)
        return self._reductions[key]

    def _new_reduction(self, bank: int, filled: tuple[int, ...]) -> TreeReduce:
        plan, start, stop = self._plan, *self._plan.ranges[self._mesh.seat]
        partials: list[tuple[Node, Tensor | None]] = []
        for (seat, nodes), mask in zip(plan.nodes.items(), filled, strict=True):
            for i, node in enumerate(nodes):
                offset = plan.partial_offset(seat, bank if self._shared_buffers.is_shared(seat) else 0, i)
                partial = self._buffers[seat].tensor[offset + start : offset + stop]
                partials.append((node, partial if mask >> i & 1 else None))
        tree = build_sum_tree(partials, plan.lanes)
        assert tree is not None
        out = self._total.tensor[start:stop] if plan.phases == 1 else self._reduced_range(self._mesh.seat)
        return TreeReduce(tree, out, plan.layout.regions_within(start, stop))

    def _reduced_range(self, seat: int) -> Tensor:
        start, stop = self._plan.ranges[seat]
        offset = self._plan.reduced_offset(seat)
        return self._buffers[seat].tensor[offset : offset + stop - start]

    def _all_gather(self, step: int) -> None:
        """The second phase: collect every rank's reduced range in the total. Ranges that are sent arrive there."""
        plan, seat = self._plan, self._mesh.seat
        start, stop = plan.ranges[seat]
        own_range = self._own_buffer.raw[plan.reduced_offset(seat) : plan.reduced_offset(seat) + stop - start]

        def buffers(link: PeerLink, frame: PeerFrame) -> list[memoryview]:
            first, last = plan.ranges[link.seat]
            return check_size([] if link.same_host else [self._total.raw[first:last]], frame)

        for link in self._mesh.links.values():
            parts = [] if link.same_host else [own_range]
            link.post(self._mesh.frame(frames.TOTAL, step, size=sum(map(len, parts))), parts)
        self._total.tensor[start:stop].copy_(self._reduced_range(seat))
        self._mesh.exchange(frames.TOTAL, step, buffers)
        for link in self._mesh.links.values():
            if link.same_host:
                first, last = plan.ranges[link.seat]
                self._total.tensor[first:last].copy_(self._reduced_range(link.seat))


def check_size(buffers: list[memoryview], frame: PeerFrame) -> list[memoryview]:
    expected = sum(map(len, buffers))
    if frame.size != expected:
        raise LinkError(f"sent {frame.size} bytes instead of {expected}")
    return buffers


def _move_out_grads(value: LaneSum) -> list[Tensor]:
    grads, value.grads = value.grads, []
    return grads
