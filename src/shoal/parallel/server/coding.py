"""What a worker pushes, encoded: lane by lane, with what each remembers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from shoal.codecs.memory import Memory as LaneMemory
from shoal.parallel.cutting import Form
from shoal.parallel.flat import write
from shoal.parallel.lane_sum import LaneSum
from shoal.parallel.links.memory import Memory
from shoal.parallel.peers import Peers
from shoal.parallel.remembering import Remembering, Tell
from shoal.parallel.replica import Replica
from shoal.spec.view import View


class Coding:
    """With a codec, every cut of the form is a chunk of its own. Where lanes are not `together` at the same step, what
    a lane remembers stays with the worker, and begins anew elsewhere."""

    def __init__(
        self, replica: Replica, settings: Mapping[str, Any], peers: Peers, tell: Tell | None, *, together: bool
    ) -> None:
        replica.cut_by(lambda layout: Form(layout, settings).chunks)
        self._settings = settings
        self._replica = replica
        self._peers = peers
        self._form = Form(replica.layout, settings)
        self._room = Memory.private(0)
        self._remembering = Remembering(peers, self._form.memory_floats, tell) if together else None
        self._own: dict[int, LaneMemory] = {}

    @property
    def form(self) -> Form:
        if self._form.layout is not self._replica.layout:
            self._form = Form(self._replica.layout, self._settings)
        return self._form

    def enter(self, view: View, seat: int) -> str:
        """'' or why the view cannot begin."""
        self._own = {lane: memory for lane, memory in self._own.items() if lane in view.carries[seat]}
        if not self.form.remembers or self._remembering is None:
            return ""
        return self._remembering.enter(view, seat)

    def begin_step(self) -> None:
        if self._remembering and self.form.remembers:
            self._peers.memories.begin_step()

    def encode(self, lane: int, value: LaneSum, slot: Tensor) -> None:
        layout = self._replica.layout
        if len(self._room.raw) != layout.size_bytes:
            self._room = Memory.private(layout.size_bytes)
            self._room.tensor.zero_()  # gaps are encoded too
        write(layout.views(self._room.tensor), value)
        self.form.encode(self._room.tensor, slot, self._memory(lane))

    def _memory(self, lane: int) -> LaneMemory | None:
        if not self.form.remembers:
            return None
        if self._remembering:
            return self._peers.memories.of(lane)
        return self._own.setdefault(lane, LaneMemory(self.form.memory_floats))

    def settle(self, step: int) -> None:
        """The step counts, with all its lanes."""
        if self._remembering and self.form.remembers:
            self._remembering.settle(step)

    def settle_lane(self, lane: int) -> None:
        """What this lane pushed counts."""
        if lane in self._own:
            self._own[lane].settle()

    def hand_over(self, given_up: Callable[[], bool]) -> None:
        if self._remembering and self.form.remembers:
            self._peers.memories.hand_over(given_up)

    def state(self) -> dict[str, Any]:
        return self._remembering.state() if self._remembering and self.form.remembers else {}

    def load_state(self, step: int, state: Mapping[str, Any]) -> None:
        if self._remembering and self.form.remembers:
            self._remembering.load_state(step, state)
