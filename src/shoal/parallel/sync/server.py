"""Training against parameter servers. One number decides how workers wait for each other.

`staleness` 0: as with `lanes`, the sum of all lanes is applied once per step, and gives the same bits. k: every lane
pushes for itself, and none gets more than k steps ahead of the slowest. Infinite: nobody waits for anybody.

Parameters, optimizer state and buffers live on the servers. A worker has a copy of the values, and brings the rest
only to save it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint import live
from shoal.errors import error
from shoal.parallel.lane_sum import LaneSum, add
from shoal.parallel.links.endpoint import Endpoint
from shoal.parallel.links.memory import Arena, Memory
from shoal.parallel.replica import Replica, Taker
from shoal.parallel.server import frames
from shoal.parallel.server.chunks import collect, groups_of, hyper_of, scatter
from shoal.parallel.server.client import Client, Entry, Errand, RefusedError
from shoal.parallel.server.coding import Coding
from shoal.parallel.server.elementwise import is_known, why_not_in_parts
from shoal.parallel.server.errands import Laid, LanePush, Pull, PullAll, Push, SetAll
from shoal.parallel.server.lying import Lying
from shoal.parallel.sparse.saved import Saved
from shoal.parallel.sync.base import Committed, Discarded, Together
from shoal.parallel.sync.meeting import Meeting
from shoal.parallel.sync.rows import RowsOnServers
from shoal.parallel.tree import Node, TreeSum, nodes_of
from shoal.spec.job import ELEMENTWISE
from shoal.spec.table import Table
from shoal.spec.view import View, step_of
from shoal.wire.handshake import LinkError


class Apart(TreeSum[LaneSum]):
    """Lanes that are not added up: each goes its own way."""

    def push(self, node: Node, value: LaneSum | None) -> None:
        self._held[node] = value


class ServerSync(Together):
    """`cuts` must be told to whoever says which server holds which; the answer comes through `learn`."""

    taps = False

    def __init__(
        self,
        lanes: int,
        replica: Replica,
        *,
        staleness: float,
        endpoint: Endpoint | None,
        token: str,
        coding: Coding | None = None,
    ) -> None:
        super().__init__(lanes)
        self.exact = self.together = staleness == 0
        self._replica = replica
        self._staleness = staleness
        self._meeting = Meeting(endpoint, token)
        self._client = Client(0, token, aborted=self._meeting.aborted)
        self._coding = coding
        self._arena: Arena | None = None
        self._values: Memory | None = None
        self._others: Memory | None = None
        """Two stretches for values: new ones come into one while the replica's parameters lie in the other."""
        self._nodes: list[Node] = []
        self._partials: Laid | Lying | None = None
        self._slots: list[Tensor] = []
        self._plain = 0
        self._clocks: list[int] = []
        self._shares: dict[int, float] = {}
        self._start_at: int | None = 0
        """The step at which the replica has all from a checkpoint or the job's start, and servers should have it."""
        self._complete_at: int | None = None
        """The step at which it was brought back from them."""
        self._chunk_clocks: Tensor | None = None
        self._sent = 0
        self._rows = RowsOnServers(
            replica.tables, self._client, chunks=len(self.cuts) - 1, discard=self._meeting.discard
        )

    # ---- tables and views ----

    def learn(self, table: Table) -> None:
        """From any thread: who holds what from now on."""
        self._client.learn(table)

    @property
    def cuts(self) -> list[int]:
        return self._replica.layout.cuts

    def reconfigure(self, view: View, seat: int) -> str:
        if why := self._meeting.enter(view, seat):
            return why
        if self._coding and (why := self._coding.enter(view, seat)):
            return why
        carried = sorted(view.carries[seat])
        added = self.exact and not self._coding
        self._nodes = nodes_of(carried, self._lanes) if added else [(0, lane) for lane in carried]
        self._plain = len(nodes_of(carried, self._lanes)) if self.exact else len(carried)
        self._make_room(len(self._nodes))
        self._client.seat = seat
        leads = seat == (view.saver if view.source is None else view.source)
        step = self._rows.step = step_of(view.position)
        words = {"carries": {str(s): lanes for s, lanes in view.carries.items()}, "model": self._description()}
        judge = (lambda found: self._judge(found, step)) if leads else None
        try:
            self._clocks = self._client.enter(Entry(view.number, words, self._arena, judge))
            if not self.exact:
                self._pull(self._replica)
        except RefusedError as failure:
            raise error("SH416", f"a server does not take the checkpoint: {failure}") from failure
        except LinkError as failure:
            return self._meeting.discard(failure).why
        return ""

    def _make_room(self, partials: int) -> None:
        """Stretches for what is pushed, in memory that servers on this host can read, and for what comes back."""
        layout = self._replica.layout
        size = self._coding.form.slot_bytes if self._coding else layout.size_bytes
        if self._arena is None or self._arena.size_bytes < partials * size:
            if self._arena:
                self._arena.close()
            self._arena = Arena(partials * size)
        if self._values is None or len(self._values.raw) != layout.size_bytes:
            self._values, self._others = Memory.private(layout.size_bytes), None
        memory = self._arena.memory
        if self._coding:
            self._slots = list(torch.split(memory.tensor[: partials * size], size))
            self._partials = Laid(memory, layout, self._coding.form)
        else:
            self._partials = Lying(layout, memory, partials)

    def _lay_down(self, index: int, value: LaneSum) -> None:
        """Ready to be sent."""
        if self._coding:
            self._coding.encode(self._nodes[index][1], value, self._slots[index])
        else:
            assert isinstance(self._partials, Lying)
            self._partials.lay(index, value)

    def _description(self) -> dict[str, Any]:
        replica, kind = self._replica, type(self._replica.optimizer)
        if not is_known(kind):
            have = ", ".join(ELEMENTWISE)
            raise error("SH417", f"servers cannot use the optimizer {kind.__name__}", fix=f"They have {have}.")
        if why := why_not_in_parts(kind, hyper_of(replica.optimizer), {p.dtype for p in replica.trainable}):
            raise error("SH417", why)
        return {
            "layout": replica.layout.describe(),
            "optimizer": kind.__name__,
            "groups": groups_of(replica),
            "hyper": _options(replica),
            "tables": self._rows.describe(),
        }

    def _judge(self, found: list[dict[str, Any]], step: int) -> Errand | None:
        """Do the servers hold what this view goes on from? If not, what to do about it."""
        good = all(status.get("set") for status in found)
        if self.exact:
            good = good and all(s.get("low", step) >= step and s.get("high", step) <= step + 1 for s in found)
        elif self._start_at == step:
            good = False  # they may be ahead of the checkpoint that counts again
        if good:
            return None
        if step not in (self._start_at, self._complete_at):
            raise error("SH415", f"the servers do not hold step {step}, and no worker does")
        return SetAll(lambda first, last: self._state_of(first, last, step))

    def _state_of(self, first: int, last: int, step: int) -> bytes:
        state = scatter(self._replica, self._replica.layout, first, last, step=step, lanes=self._lanes)
        if self._chunk_clocks is not None:
            state["clocks"] = self._chunk_clocks[first:last]
        if self._rows:
            state["saved"] = self._rows.among(first, last)
        return live.pack(state)

    def first_step(self, step: int, lanes: Sequence[int]) -> int:
        """Where a worker goes on that carries these lanes."""
        return min((self._clocks[lane] for lane in lanes), default=step) if not self.exact else step

    def wants(self, step: int, lane: int) -> bool:
        """Is this lane's part of the step still to be done?"""
        return self.exact or self._clocks[lane] <= step

    # ---- steps ----

    def sums(self) -> TreeSum[LaneSum]:
        return TreeSum(self._lanes, add) if self.exact and not self._coding else Apart(self._lanes, add)

    def share(self, lane: int, size: int, total: int) -> float:
        """The part of the step's samples; a lane that goes its own way counts for itself, and moves as much less."""
        self._shares[lane] = size / total
        return size / total if self.exact else 1.0

    def ahead(self, replica: Replica, step: int, sums: TreeSum[LaneSum], lane: int, *, halt: bool) -> Taker | None:
        return None

    def commit(
        self, replica: Replica, step: int, sums: TreeSum[LaneSum], *, halt: bool = False
    ) -> Committed | Discarded:
        if self._meeting.broken:
            return Discarded(self._meeting.broken)
        client = self._client
        began, waited_s, sent = time.perf_counter(), client.waited_s, self._sent
        try:
            if self.exact:
                loss, halting = self._together(replica, step, sums, halt=halt)
            else:
                loss, halting = self._apart(replica, step, sums), halt
        except RefusedError as failure:
            raise error("SH416", f"a server refuses step {step}: {failure}") from failure
        except LinkError as failure:
            return self._meeting.discard(failure)
        self._start_at = self._complete_at = self._chunk_clocks = None
        replica.optimizer.state.clear()
        self._rows.step, self._rows.saved, self._sent = step + 1, [], client.sent_bytes
        waited_s = client.waited_s - waited_s
        exchange_s = time.perf_counter() - began - waited_s
        plain = self._plain * client.far_bytes if self._coding else None
        return Committed(loss, self._sent - sent, halting, waited_s, exchange_s, plain)

    def _together(self, replica: Replica, step: int, sums: TreeSum[LaneSum], *, halt: bool) -> tuple[Tensor, bool]:
        assert self._partials is not None
        assert self._values is not None
        filled, flags = 0, frames.HALT if halt else 0
        partials = sums.partials
        if self._coding:
            self._coding.begin_step()
        for i, node in enumerate(self._nodes):
            value = partials[node]
            if value is not None:
                self._lay_down(i, value)
                filled |= 1 << i
                flags |= frames.COUNTED if value.count is not None else 0
        clip = replica.clipping
        push = Push(
            replica.layout,
            self._values,
            partials=self._partials,
            step=step,
            filled=filled,
            flags_sent=flags,
            hyper=self._hyper(replica),
            clip_norm=clip.norm,
            rows=self._rows.parts([partials[node] for node in self._nodes]),
        )
        self._client.run(push)
        if self._coding:
            self._coding.settle(step)
        total = replica.layout.views(self._values.tensor)
        if not push.flags & frames.COUNTED:
            total.count = None
        return self._adopt(replica, step, total), bool(push.flags & frames.HALT)

    def _apart(self, replica: Replica, step: int, sums: TreeSum[LaneSum]) -> Tensor:
        assert self._partials is not None
        assert self._values is not None
        losses, weights = [], []
        for i, (_, lane) in enumerate(self._nodes):
            value = sums.partials.get((0, lane))
            if not self.wants(step, lane):
                continue
            if value is not None:
                replica.scale(value)
                losses.append(value.loss if value.count is None else value.loss / value.count)
                weights.append(self._shares[lane])
                value.count = None
                self._lay_down(i, value)
            self._client.run(
                LanePush(
                    replica.layout,
                    self._values,
                    partials=self._partials,
                    step=step,
                    index=i,
                    lane=lane,
                    share=self._shares[lane] if value is not None else 0.0,
                    hyper=self._hyper(replica),
                    empty=value is None,
                    rows=self._rows.parts([value]),
                )
            )
            if self._coding and value is not None:
                self._coding.settle_lane(lane)
            self._clocks[lane] = step + 1
        total = replica.layout.views(self._values.tensor)
        weight = torch.tensor(weights, dtype=torch.float64)
        mean = (torch.stack(losses).cpu().double() * weight).sum() / weight.sum() if losses else total.loss.clone()
        return self._adopt(replica, step, LaneSum(total.grads, total.averaged, total.first, mean))

    def _adopt(self, replica: Replica, step: int, total: LaneSum) -> Tensor:
        """The values that came, as the replica's; where it can, it takes them where they lie."""
        assert self._values is not None
        if replica.move_to(total.grads):
            self._values, self._others = self._others or Memory.private(len(self._values.raw)), self._values
        else:
            replica.take_values(total.grads)
        return replica.conclude(step, total)

    def _hyper(self, replica: Replica) -> bytes:
        value = replica.clipping.value if self.exact else None  # a lane's own gradient is clipped before it goes
        return json.dumps({"groups": _options(replica), "clip_value": value}).encode()

    # ---- what servers hold ----

    def settle(self, replica: Replica, label: int) -> Discarded | None:
        """Before all look at the weights together: everybody has come so far, and has the same."""
        if self.exact:
            return None
        came = self._meeting.gather(label, b"")
        if isinstance(came, Discarded):
            return came
        try:
            self._pull(replica)
        except LinkError as failure:
            return self._meeting.discard(failure)
        return None

    def _pull(self, replica: Replica) -> None:
        """The values as they are now."""
        assert self._values is not None
        self._client.run(Pull(replica.layout, self._values))
        values = replica.layout.views(self._values.tensor)
        replica.take_values(values.grads)
        replica.moving.set(values.averaged, values.first)

    def complete(self, replica: Replica, step: int) -> Discarded | None:
        """Bring into the replica what servers hold of it, so that it can be saved."""
        if step in (self._start_at, self._complete_at):
            return None
        pull = PullAll()
        while not pull.whole(len(self.cuts) - 1):  # if the table changed on the way, some overlap
            pull = PullAll()
            try:
                self._client.run(pull)
            except LinkError as failure:
                return self._meeting.discard(failure)
        found = [(first, last, live.unpack(packed)) for (first, last), packed in sorted(pull.found.items())]
        if self.exact and any(bool((state["applied"] != step).any()) for _, _, state in found):
            return Discarded(f"the servers are not at step {step}")
        collect(replica, replica.layout, found)
        self._chunk_clocks = None if self.exact else torch.cat([state["clocks"] for _, _, state in found])
        self._complete_at = step
        return None

    def seal(self) -> str | Discarded:
        try:
            return self._rows.sha256()
        except LinkError as failure:
            return self._meeting.discard(failure)

    def state(self) -> dict[str, Any]:
        try:
            saved = self._rows.among(0, len(self.cuts)) or self._rows.save()
        except RefusedError as failure:
            raise error("SH503", str(failure)) from failure
        rows = {"rows": saved} if self._rows else {}
        return {"clocks": self._chunk_clocks, **rows, **(self._coding.state() if self._coding else {})}

    def blobs(self) -> dict[str, int]:
        return self._rows.blobs()

    def load_state(self, step: int, state: dict[str, Any]) -> None:
        self._start_at = step
        self._rows.saved = [Saved.from_description(one) for one in state.get("rows", [])]
        self._chunk_clocks = state.get("clocks")  # of another kind of sync: all lanes are where the replica is
        if self._coding:
            self._coding.load_state(step, state)

    # ---- the rest ----

    def hand_over(self, given_up: Callable[[], bool]) -> None:
        if self._coding:
            self._coding.hand_over(given_up)

    def gather(self, label: int, content: bytes) -> dict[int, bytes] | Discarded:
        return self._meeting.gather(label, content)

    def abort(self, view: int) -> None:
        self._meeting.abort(view)
        self._client.wake()

    def moved_bytes(self) -> int:
        return self._meeting.moved_bytes + self._client.moved_bytes

    def aborted(self) -> bool:
        return self._meeting.aborted()

    def close(self) -> None:
        self._meeting.leave()
        self._client.close()
        if self._arena:
            self._arena.close()
            self._arena = None


def _options(replica: Replica) -> list[dict[str, Any]]:
    """The options of the optimizer's groups, fit for JSON."""
    kept = [{k: v for k, v in group.items() if k != "initial_lr"} for group in hyper_of(replica.optimizer)]
    return [{k: float(v) if isinstance(v, Tensor) else v for k, v in group.items()} for group in kept]
