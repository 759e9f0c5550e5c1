"""The ordered exchange: workers that carry different lanes end with the same sum over all of them, to the bit.

Everybody lays down what it has of the tree, and whoever adds up a part of the stretch takes that part from all of them
in the order of the tree. On one host that means reading each other's arenas; between hosts the part is sent, and the
gradients of a worker's last lane go ahead while its backward still runs.

**One phase** (two members, or little to add): everybody adds up everything. There are two banks of partials, used in
turn. A bank is written again two steps later, and by then every peer has rung for the step in between, which it does
after it has read.

**Two phases**: everybody adds up its own share of the stretch and then collects the other shares. One bank is enough:
partials are written again when all peers have rung the second time, after reading them; shares are written again when
all have rung for the next step, after collecting them.
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
from shoal.lanes.reduction_tree import Node, TreeSum
from shoal.lanes.replica import LaneSum
from shoal.net.errors import LinkError

_MAX_CACHED_REDUCTIONS = 8


@dataclass(frozen=True)
class AllReduceResult:
    """What all members know after the exchange of a step. `total` is valid until the next; None if no lane had
    samples."""

    total: LaneSum | None
    halt: bool
    bytes_sent: int
    waited_s: float


class OverlapError(LinkError):
    """What went ahead was not what came out in the end. The step must not count, and members must be told."""


@dataclass
class AllReduceStep:
    """The exchange of one step, under way. Of my last partial, the first `ready` bytes are there."""

    own_frame: PeerFrame
    bank: int
    frames_by_seat: dict[int, PeerFrame]
    ready_bytes: int
    bytes_sent_before: int
    sink_state: SinkState | None = None
    failure: str = ""
    reduction: TreeReduce | None = None


class OrderedAllReduce:
    """The exchanges of one view, by the loop's thread. LinkError when one fails, and then no other may follow."""

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
        places = {node: self._plan.partial_offset(seat, bank, i) for i, node in enumerate(self._plan.nodes[seat])}
        return {node: layout.views(self._own_buffer.tensor[a : a + layout.size_bytes]) for node, a in places.items()}

    # --- a step

    def gradient_sink(self, step: int, sums: TreeSum[LaneSum], lane: int, *, halt: bool) -> OverlappedSend | None:
        """Before the last lane that adds to `sums`: what takes its gradients and sends them while others follow.

        Not in the first step of a view, which shows whether losses come with a count. So a step that was spoilt gets
        through when it is done again, for that is in a new view. The gradients that the lane's are added to are taken
        out of `sums`.
        """
        if (
            not self._steps_begun
            or not self._mesh.remote_links
            or not is_worth_overlapping(self._plan.layout.size_bytes)
        ):
            return None
        last, met = sums.merge_path((0, lane))
        held = sums.partials
        passed = [(held.pop(node), first) for node, first in met]
        if [*held, last] != list(self._partial_views[0]):
            return None
        it = self._overlapped_step = self._begin(step, held, last, halt=halt)
        it.sink_state = SinkState(set(range(len(self._plan.layout.grads))))
        return OverlappedSend(
            self._partial_views[it.bank][last].grads,
            self._plan.layout.grads,
            [(_move_out_grads(value), first) for value, first in passed if value is not None],
            state=it.sink_state,
            on_ready=lambda until: self._send_ready(it, until),
        )

    def _send_ready(self, it: AllReduceStep, until: int) -> None:
        """So much is ready. What fails is told later: backward would not know what to do with it."""
        it.ready_bytes = until
        if not it.failure:
            try:
                self._post_ready(it)
                self._mesh.poll(self._buffers_for(it), lambda: self._reduce_arrived(it))
            except LinkError as failure:
                it.failure = str(failure)  # the exception itself would keep its frames alive, and memory with them

    def run(self, step: int, partials: Mapping[Node, LaneSum | None], *, halt: bool) -> AllReduceResult:
        """If gradients went ahead, `halt` is what was said then."""
        it, self._overlapped_step = self._overlapped_step, None
        if it is None:
            it = self._begin(step, partials, halt=halt)
        else:
            self._finish_overlap(it, partials)
        waited_s = self._reduce_scatter(it)
        self._shared_buffers.check_sequence_numbers(step, it.bank)
        some = any(frame.filled for frame in it.frames_by_seat.values())
        if some and self._plan.phases == 2:
            self._all_gather(step)
            self._shared_buffers.check_sequence_numbers(step, 1)
        halting = any(frame.flags & frames.HALT for frame in it.frames_by_seat.values())
        total = self._summed_total(it.frames_by_seat) if some else None
        return AllReduceResult(total, halting, self._mesh.bytes_sent - it.bytes_sent_before, waited_s)

    def _begin(
        self, step: int, partials: Mapping[Node, LaneSum | None], growing: Node | None = None, *, halt: bool
    ) -> AllReduceStep:
        """Lay down what there is and let peers elsewhere have it. The `growing` partial is not there yet."""
        bank = self._steps_begun % self._plan.banks
        self._steps_begun += 1
        bytes_before = self._mesh.bytes_sent
        mine = self._write_partials(step, bank, partials, growing, halt=halt)
        ready = 0 if growing else self._plan.layout.size_bytes
        it = AllReduceStep(mine, bank, {self._mesh.seat: mine}, ready, bytes_before)
        for link in self._mesh.remote_links:
            parts = self._payload(self._mesh.seat, bank, mine.filled, reducer=link.seat)
            frame = mine._replace(size=sum(map(len, parts)))
            later = parts.pop() if growing else b""
            link.post(frame, parts, later_bytes=len(later))
        self._mesh.expect(frames.PARTIAL, step)
        return it

    def _finish_overlap(self, it: AllReduceStep, partials: Mapping[Node, LaneSum | None]) -> None:
        """All gradients went ahead: what else the last partial has. LinkError if that came to nothing."""
        if it.failure:
            raise LinkError(it.failure)
        last = list(self._partial_views[it.bank])[-1]
        value = partials.get(last)
        assert it.sink_state is not None
        if why := it.sink_state.validate(value, counted=self._counted):
            self._mesh.disconnect(self._mesh.seat)
            raise OverlapError(why)
        assert value is not None
        write_lane_sum(self._partial_views[it.bank][last], value)
        it.ready_bytes = self._plan.layout.size_bytes

    def _summed_total(self, frames_by_seat: Mapping[int, PeerFrame]) -> LaneSum:
        counted = {bool(frame.flags & frames.COUNTED) for frame in frames_by_seat.values() if frame.filled}
        if len(counted) > 1:
            raise LinkError("some lanes came with a count and others without")
        if self._on_device is not self._total.tensor:
            self._on_device.copy_(self._total.tensor)
        self._counted = counted == {True}
        it = self._result
        return LaneSum(it.grads, it.float_buffers, it.int_buffers, it.loss.clone(), it.count if self._counted else None)

    def _write_partials(
        self, step: int, bank: int, partials: Mapping[Node, LaneSum | None], growing: Node | None, *, halt: bool
    ) -> PeerFrame:
        """My partials into my arena; the frame tells which there are or will be."""
        room = self._partial_views[bank]
        if partials.keys() | ({growing} if growing else ()) != room.keys():
            raise ValueError(f"the sums of nodes {sorted(partials)}, where the view wants {sorted(room)}")
        write_sequence_number(self._own_buffer, bank, view=self._mesh.view, step=step)
        flags, filled = frames.HALT if halt else 0, 0
        for i, (node, place) in enumerate(room.items()):
            value = partials.get(node)
            if value is not None:
                if self._steps_begun == 1 and not self._plan.layout.fits(value):
                    raise ValueError("a lane's gradients or buffers are not of the kind that the model has")
                write_lane_sum(place, value)
                flags |= frames.COUNTED if value.count is not None else 0
            if value is not None or node == growing:
                filled |= 1 << i
        if growing and self._counted:
            flags |= frames.COUNTED
        return self._mesh.frame(frames.PARTIAL, step, flags=flags, filled=filled)

    def _reduce_scatter(self, it: AllReduceStep) -> float:
        """Everything is laid down: ring, or send each peer the share that it adds up; get the same from all of them,
        and add it up meanwhile."""
        for link in self._mesh.links.values():
            if link.same_host:
                link.post(it.own_frame)
        self._post_ready(it)
        return self._mesh.finish(self._buffers_for(it), lambda: self._reduce_arrived(it))

    def _post_ready(self, it: AllReduceStep) -> None:
        """What has become ready since."""
        for link in self._mesh.remote_links:
            if link.unposted_bytes:
                start, stop = self._plan.ranges[link.seat]
                growing = self._payload(self._mesh.seat, it.bank, it.own_frame.filled, reducer=link.seat)[-1]
                link.post_rest(growing[len(growing) - link.unposted_bytes : max(min(it.ready_bytes, stop) - start, 0)])

    def _buffers_for(self, it: AllReduceStep) -> BuffersFor:
        def arrange(link: PeerLink, frame: PeerFrame) -> list[memoryview]:
            if frame.filled >> len(self._plan.nodes[link.seat]) or frame.flags & ~(frames.HALT | frames.COUNTED):
                raise LinkError(f"sent {frame}, which is more than it carries")
            parts = [] if link.same_host else self._payload(link.seat, 0, frame.filled, reducer=self._mesh.seat)
            it.frames_by_seat[link.seat] = frame
            return check_size(parts, frame)

        return arrange

    def _reduce_arrived(self, it: AllReduceStep) -> None:
        """As far as everybody's partials have arrived."""
        if len(it.frames_by_seat) < len(self._plan.nodes):
            return
        filled = {seat: it.frames_by_seat[seat].filled for seat in self._plan.nodes}
        if it.reduction is None and any(filled.values()):
            if self._plan.phases == 2:
                write_sequence_number(self._own_buffer, 1, view=self._mesh.view, step=it.own_frame.step)
            it.reduction = self._reduction(it.bank, tuple(filled.values()))
            it.reduction.restart()
        if it.reduction:
            start, stop = self._plan.ranges[self._mesh.seat]
            # partials come one after the other: what the last of them still lacks counts
            lasts = [
                link.payload_received_bytes - (stop - start) * (filled[link.seat].bit_count() - 1)
                for link in self._mesh.remote_links
                if filled[link.seat]
            ]
            it.reduction.run(min([it.ready_bytes - start, *lasts]))

    def _payload(self, seat: int, bank: int, filled: int, *, reducer: int) -> list[memoryview]:
        """Of a member's partials that are not empty: what the adder needs."""
        start, stop = self._plan.ranges[reducer]
        offsets = [
            self._plan.partial_offset(seat, bank, i) for i in range(len(self._plan.nodes[seat])) if filled >> i & 1
        ]
        return [self._buffers[seat].raw[offset + start : offset + stop] for offset in offsets]

    def _reduction(self, bank: int, filled: tuple[int, ...]) -> TreeReduce:
        """Nearly always the same one or two."""
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
                there = self._buffers[seat].tensor[offset + start : offset + stop]
                partials.append((node, there if mask >> i & 1 else None))
        term = build_sum_tree(partials, plan.lanes)
        assert term is not None
        out = self._total.tensor[start:stop] if plan.phases == 1 else self._reduced_range(self._mesh.seat)
        return TreeReduce(term, out, plan.layout.regions_within(start, stop))

    def _reduced_range(self, seat: int) -> Tensor:
        start, stop = self._plan.ranges[seat]
        offset = self._plan.reduced_offset(seat)
        return self._buffers[seat].tensor[offset : offset + stop - start]

    def _all_gather(self, step: int) -> None:
        """The second phase: everybody's share into the total. What is sent arrives in its place."""
        plan, seat = self._plan, self._mesh.seat
        start, stop = plan.ranges[seat]
        mine = self._own_buffer.raw[plan.reduced_offset(seat) : plan.reduced_offset(seat) + stop - start]

        def arrange(link: PeerLink, frame: PeerFrame) -> list[memoryview]:
            first, last = plan.ranges[link.seat]
            return check_size([] if link.same_host else [self._total.raw[first:last]], frame)

        for link in self._mesh.links.values():
            parts = [] if link.same_host else [mine]
            link.post(self._mesh.frame(frames.TOTAL, step, size=sum(map(len, parts))), parts)
        self._total.tensor[start:stop].copy_(self._reduced_range(seat))
        self._mesh.exchange(frames.TOTAL, step, arrange)
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
