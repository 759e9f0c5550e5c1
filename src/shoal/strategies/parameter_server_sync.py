"""One replica and the parameter servers that hold its state: enter a view, push, pull, and fetch the rest for a save.

Parameters, optimizer state and buffers live on the servers. A worker has a copy of the values, and fetches the rest
only to save it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint import state_format
from shoal.collectives.group import Channel, ViewGroup
from shoal.collectives.outcome import Committed, Discarded
from shoal.collectives.transport.shared_memory import ByteBuffer, SharedMemory
from shoal.errors import error
from shoal.lanes.clipping import divisor_of
from shoal.lanes.elementwise import is_known_elementwise, why_not_sliceable
from shoal.lanes.lane_sum import LaneSum, add, mixed_counts_error
from shoal.lanes.reduction_tree import Node, TreeSum, partial_nodes
from shoal.lanes.replica import GradientSink, Replica
from shoal.net.errors import LinkError
from shoal.paramserver import protocol
from shoal.paramserver.chunk_state import (
    chunk_state_from_replica,
    group_hyperparameters,
    load_chunk_states,
    param_group_indices,
)
from shoal.paramserver.client import ParameterServerClient, RefusedError, Request, ViewEntry
from shoal.paramserver.messages import ServerStatus
from shoal.paramserver.push_buffers import PushCodec, ZeroCopyPush
from shoal.paramserver.requests import CopiedPush, LanePush, Pull, PullState, Push, SetState
from shoal.paramserver.sparse.checkpoint import RowBlob
from shoal.paramserver.sparse.client import SparseClient
from shoal.spec.chunk_table import ChunkTable
from shoal.spec.job import ELEMENTWISE_OPTIMIZERS
from shoal.spec.view import View, step_of
from shoal.strategies.base import HeldWeights


class SeparateLanes(TreeSum[LaneSum]):
    """Lanes that are not added up: each is pushed on its own."""

    def push(self, node: Node, value: LaneSum | None) -> None:
        self._nodes[node] = value


class ParameterServerSync:
    """The driver needs `chunk_offsets` to place chunks on servers; its answer comes through `set_chunk_table`. See
    `parameter_server` for `staleness`. Belongs to the training thread, except `set_chunk_table` and `moved_bytes`."""

    def __init__(
        self,
        lanes: int,
        replica: Replica,
        *,
        group: ViewGroup,
        token: str,
        staleness: float,
        push_codec: PushCodec | None = None,
    ) -> None:
        self.exact = staleness == 0
        self._lanes = lanes
        self._replica = replica
        self._staleness = staleness
        self._group = group
        self._client = ParameterServerClient(0, token, aborted=group.aborted, tls_contexts=group.tls_contexts)
        group.on_abort.append(self._client.wake)
        self._push_codec = push_codec
        self._shared_memory: SharedMemory | None = None
        self._values: ByteBuffer | None = None
        self._spare_values: ByteBuffer | None = None
        """The second buffer for values: new values arrive in one while the replica's parameters lie in the other."""
        self._nodes: list[Node] = []
        self._partials: CopiedPush | ZeroCopyPush | None = None
        self._encoded_lanes: list[Tensor] = []
        self._plain_partials = 0
        self._clocks: list[int] = []
        self._shares: dict[int, float] = {}
        self._loaded_step: int | None = 0
        """The step at which the replica holds a whole state, of a checkpoint or the job's start, for the servers."""
        self._pulled_step: int | None = None
        """The step at which the replica got its whole state from the servers."""
        self._chunk_clocks: Tensor | None = None
        self._sent_bytes = 0
        self._sparse_client = SparseClient(
            replica.tables, self._client, chunks=len(self.chunk_offsets) - 1, discard=self._group.discard
        )

    # ---- tables and views ----

    def set_chunk_table(self, chunk_table: ChunkTable) -> None:
        """Set which server holds which chunk. May be called from any thread."""
        self._client.set_chunk_table(chunk_table)

    @property
    def chunk_offsets(self) -> list[int]:
        return self._replica.layout.chunk_offsets

    def reconfigure(self, view: View, seat: int) -> Discarded | None:
        if discarded := self._group.enter(view, seat):
            return discarded
        if self._push_codec and (discarded := self._push_codec.enter_view(view, seat)):
            return discarded
        carried = sorted(view.carries[seat])
        added = self.exact and not self._push_codec
        self._nodes = partial_nodes(carried, self._lanes) if added else [(0, lane) for lane in carried]
        self._plain_partials = len(partial_nodes(carried, self._lanes)) if self.exact else len(carried)
        self._allocate_buffers(len(self._nodes))
        self._client.seat = seat
        leads = seat == (view.saver if view.source is None else view.source)
        step = self._sparse_client.step = step_of(view.position)
        words = {"carries": {str(s): lanes for s, lanes in view.carries.items()}, "model": self._description()}
        judge = (lambda found: self._plan_restore(found, step)) if leads else None
        try:
            self._clocks = self._client.enter(ViewEntry(view.number, words, self._shared_memory, judge))
            if not self.exact:
                self._pull(self._replica)
        except RefusedError as failure:
            raise error("SH416", f"a server does not take the checkpoint: {failure}") from failure
        except LinkError as failure:
            return self._group.discard(failure)
        return None

    def _allocate_buffers(self, partials: int) -> None:
        """Allocate buffers for pushes, in memory that servers on this host can read, and for the values they send."""
        layout = self._replica.layout
        size = self._push_codec.encoded_layout.lane_bytes if self._push_codec else layout.size_bytes
        if self._shared_memory is None or self._shared_memory.size_bytes < partials * size:
            if self._shared_memory:
                self._shared_memory.close()
            self._shared_memory = SharedMemory(partials * size)
        if self._values is None or len(self._values.raw) != layout.size_bytes:
            self._values, self._spare_values = ByteBuffer.private(layout.size_bytes), None
        memory = self._shared_memory.buffer
        if self._push_codec:
            self._encoded_lanes = list(torch.split(memory.tensor[: partials * size], size))
            self._partials = CopiedPush(memory, layout, self._push_codec.encoded_chunks)
        else:
            self._partials = ZeroCopyPush(layout, memory, partials)

    def _write_push(self, index: int, value: LaneSum) -> None:
        """Write a sum into its push buffer."""
        if self._push_codec:
            self._push_codec.encode(self._nodes[index][1], value, self._encoded_lanes[index])
        else:
            assert isinstance(self._partials, ZeroCopyPush)
            self._partials.set_partial(index, value)

    def _description(self) -> dict[str, Any]:
        replica, kind = self._replica, type(self._replica.optimizer)
        if not is_known_elementwise(kind):
            have = ", ".join(ELEMENTWISE_OPTIMIZERS)
            raise error("SH417", f"servers cannot use the optimizer {kind.__name__}", fix=f"They have {have}.")
        if why := why_not_sliceable(
            kind, group_hyperparameters(replica.optimizer), {p.dtype for p in replica.trainable}
        ):
            raise error("SH417", why)
        return {
            "layout": replica.layout.describe(),
            "optimizer": kind.__name__,
            "groups": param_group_indices(replica),
            "hyper": _group_options(replica),
            "tables": self._sparse_client.describe(),
        }

    def _plan_restore(self, found: list[ServerStatus], step: int) -> Request | None:
        """Do the servers hold the state that this view starts from? If not, returns the request that sets it."""
        good = all(status.set for status in found)
        if self.exact:
            low, high = [s.low for s in found if s.low is not None], [s.high for s in found if s.high is not None]
            good = good and min(low, default=step) >= step and max(high, default=step) <= step + 1
        elif self._loaded_step == step:
            good = False  # servers may be ahead of the checkpoint that was loaded
        if good:
            return None
        if step not in (self._loaded_step, self._pulled_step):
            raise error("SH415", f"the servers do not hold step {step}, and no worker does")
        return SetState(lambda first, last: self._chunk_state(first, last, step))

    def _chunk_state(self, first: int, last: int, step: int) -> bytes:
        state = chunk_state_from_replica(self._replica, self._replica.layout, first, last, step=step, lanes=self._lanes)
        if self._chunk_clocks is not None:
            state["clocks"] = self._chunk_clocks[first:last]
        if self._sparse_client:
            state["saved"] = self._sparse_client.saved_within(first, last)
        return state_format.pack_state(state)

    def first_step(self, step: int, lanes: Sequence[int]) -> int:
        """The step at which a worker that carries these lanes continues."""
        return min((self._clocks[lane] for lane in lanes), default=step) if not self.exact else step

    def needs_lane(self, step: int, lane: int) -> bool:
        """Must this lane still be pushed for this step?"""
        return self.exact or self._clocks[lane] <= step

    # ---- steps ----

    def begin_step(self) -> TreeSum[LaneSum]:
        return TreeSum(self._lanes, add) if self.exact and not self._push_codec else SeparateLanes(self._lanes, add)

    def lane_weight(self, lane: int, size: int, total: int) -> float:
        """The lane's share of the step's samples. A lane that is pushed on its own has weight 1, and the servers scale
        its update by its share instead."""
        self._shares[lane] = size / total
        return size / total if self.exact else 1.0

    def gradient_sink(
        self, held: HeldWeights, step: int, sums: TreeSum[LaneSum], lane: int, *, halt: bool
    ) -> GradientSink | None:
        return None

    def commit(
        self, held: HeldWeights, step: int, sums: TreeSum[LaneSum], *, halt: bool = False
    ) -> Committed | Discarded:
        """Push the sums and adopt the values that servers compute from them. `held` must be the replica."""
        if self._group.broken:
            return Discarded(self._group.broken)
        client, replica = self._client, self._replica
        began, waited_s, sent = time.perf_counter(), client.waited_s, self._sent_bytes
        try:
            if self.exact:
                loss, halting = self._push_sum(replica, step, sums, halt=halt)
            else:
                loss, halting = self._push_lanes(replica, step, sums), halt
        except RefusedError as failure:
            raise error("SH416", f"a server refuses step {step}: {failure}") from failure
        except LinkError as failure:
            return self._group.discard(failure)
        self._loaded_step = self._pulled_step = self._chunk_clocks = None
        replica.optimizer.state.clear()
        self._sparse_client.step, self._sparse_client.saved, self._sent_bytes = step + 1, [], client.sent_bytes
        waited_s = client.waited_s - waited_s
        exchange_s = time.perf_counter() - began - waited_s
        plain = self._plain_partials * client.remote_bytes if self._push_codec else None
        return Committed(loss, self._sent_bytes - sent, halting, waited_s, exchange_s, plain)

    def _push_sum(self, replica: Replica, step: int, sums: TreeSum[LaneSum], *, halt: bool) -> tuple[Tensor, bool]:
        assert self._partials is not None
        assert self._values is not None
        filled, flags = 0, protocol.HALT if halt else 0
        partials = sums.partials
        if self._push_codec:
            self._push_codec.begin_step()
        for i, node in enumerate(self._nodes):
            value = partials[node]
            if value is not None:
                self._write_push(i, value)
                filled |= 1 << i
                flags |= protocol.COUNTED if value.count is not None else 0
        clip = replica.clipping
        push = Push(
            replica.layout,
            self._values,
            partials=self._partials,
            step=step,
            filled_mask=filled,
            request_flags=flags,
            hyper=self._hyperparameters(replica),
            clip_norm=clip.norm,
            rows=self._sparse_client.push_payload([partials[node] for node in self._nodes]),
        )
        self._client.run(push)
        if filled and (push.flags ^ flags) & protocol.COUNTED:
            raise mixed_counts_error()
        if self._push_codec:
            self._push_codec.commit_step(step)
        total = replica.layout.views(self._values.tensor)
        if not push.flags & protocol.COUNTED:
            total.count = None
        return self._adopt_values(replica, step, total), bool(push.flags & protocol.HALT)

    def _push_lanes(self, replica: Replica, step: int, sums: TreeSum[LaneSum]) -> Tensor:
        assert self._partials is not None
        assert self._values is not None
        losses, weights = [], []
        for i, (_, lane) in enumerate(self._nodes):
            value = sums.partials.get((0, lane))
            if not self.needs_lane(step, lane):
                continue
            if value is not None:
                replica.scale_sum(value)
                losses.append(value.loss if value.count is None else value.loss / divisor_of(value.count))
                weights.append(self._shares[lane])
                value.count = None
                self._write_push(i, value)
            self._client.run(
                LanePush(
                    replica.layout,
                    self._values,
                    partials=self._partials,
                    step=step,
                    index=i,
                    lane=lane,
                    share=self._shares[lane] if value is not None else 0.0,
                    hyper=self._hyperparameters(replica),
                    empty=value is None,
                    rows=self._sparse_client.push_payload([value]),
                )
            )
            if self._push_codec and value is not None:
                self._push_codec.commit_lane(lane)
            self._clocks[lane] = step + 1
        total = replica.layout.views(self._values.tensor)
        weight = torch.tensor(weights, dtype=torch.float64)
        mean = (torch.stack(losses).cpu().double() * weight).sum() / weight.sum() if losses else total.loss.clone()
        return self._adopt_values(replica, step, LaneSum(total.grads, total.float_buffers, total.int_buffers, mean))

    def _adopt_values(self, replica: Replica, step: int, total: LaneSum) -> Tensor:
        """Make the received values the replica's parameters, without a copy if it can adopt their storage."""
        assert self._values is not None
        if replica.adopt_storage(total.grads):
            self._values, self._spare_values = (
                self._spare_values or ByteBuffer.private(len(self._values.raw)),
                self._values,
            )
        else:
            replica.copy_values(total.grads)
        return replica.finish_step(step, total)

    def _hyperparameters(self, replica: Replica) -> bytes:
        value = replica.clipping.value if self.exact else None  # without `exact`, a lane is clipped before its push
        return json.dumps({"groups": _group_options(replica), "clip_value": value}).encode()

    # ---- what servers hold ----

    def barrier(self, replica: Replica, step: int) -> Discarded | None:
        """Wait until every member has reached this step, and pull the same values, before all evaluate together."""
        if self.exact:
            return None
        came = self._group.gather(Channel.BARRIER.label(step), b"")
        if isinstance(came, Discarded):
            return came
        try:
            self._pull(replica)
        except LinkError as failure:
            return self._group.discard(failure)
        return None

    def _pull(self, replica: Replica) -> None:
        """Copy the present values from the servers into the replica."""
        assert self._values is not None
        self._client.run(Pull(replica.layout, self._values))
        values = replica.layout.views(self._values.tensor)
        replica.copy_values(values.grads)
        replica.moving_buffers.assign(values.float_buffers, values.int_buffers)

    def pull_state(self, replica: Replica, step: int) -> Discarded | None:
        """Fetch the state that servers hold into the replica, so that it can be saved."""
        if step in (self._loaded_step, self._pulled_step):
            return None
        pull = PullState()
        while not pull.is_complete(len(self.chunk_offsets) - 1):  # chunks overlap if the table changed on the way
            pull = PullState()
            try:
                self._client.run(pull)
            except LinkError as failure:
                return self._group.discard(failure)
        found = [
            (first, last, state_format.unpack_state(packed)) for (first, last), packed in sorted(pull.replies.items())
        ]
        if self.exact and any(bool((state["applied"] != step).any()) for _, _, state in found):
            return Discarded(f"the servers are not at step {step}")
        load_chunk_states(replica, replica.layout, found)
        self._chunk_clocks = None if self.exact else torch.cat([state["clocks"] for _, _, state in found])
        self._pulled_step = step
        return None

    def external_sha256(self) -> str | Discarded:
        try:
            return self._sparse_client.sha256()
        except LinkError as failure:
            return self._group.discard(failure)

    def state(self) -> dict[str, Any]:
        try:
            saved = self._sparse_client.saved_within(0, len(self.chunk_offsets)) or self._sparse_client.save()
        except RefusedError as failure:
            raise error("SH503", str(failure)) from failure
        rows = {"rows": saved} if self._sparse_client else {}
        return {"clocks": self._chunk_clocks, **rows, **(self._push_codec.state() if self._push_codec else {})}

    def blobs(self) -> dict[str, int]:
        return self._sparse_client.blobs()

    def load_state(self, step: int, state: dict[str, Any]) -> None:
        self._loaded_step = step
        self._sparse_client.saved = [RowBlob.from_description(one) for one in state.get("rows", [])]
        self._chunk_clocks = state.get("clocks")  # another kind of sync saves none: all lanes are at the replica's step
        if self._push_codec:
            self._push_codec.load_state(step, state)

    # ---- the rest ----

    def hand_over(self, given_up: Callable[[], bool]) -> None:
        if self._push_codec:
            self._push_codec.hand_over_residuals(given_up)

    def moved_bytes(self) -> int:
        return self._group.moved_bytes() + self._client.moved_bytes

    def close(self) -> None:
        self._group.leave()
        self._client.close()
        if self._shared_memory:
            self._shared_memory.close()
            self._shared_memory = None


def _group_options(replica: Replica) -> list[dict[str, Any]]:
    """The options of the optimizer's parameter groups, as JSON values."""
    kept = [{k: v for k, v in group.items() if k != "initial_lr"} for group in group_hyperparameters(replica.optimizer)]
    return [{k: float(v) if isinstance(v, Tensor) else v for k, v in group.items()} for group in kept]
