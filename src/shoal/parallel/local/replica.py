"""A replica for lanes that train by themselves: between two agreements it is each of its lanes in turn.

At an agreement every worker has the same: parameters, the outer momentum, moving buffers, the schedule; the inner
optimizer begins anew. So a worker that dies in between takes nothing with it that others could not make again, and what
a lane does depends on the agreement and its number alone, whoever carries it.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.parallel.lane_sum import LaneSum
from shoal.parallel.local.outer import Outer
from shoal.parallel.replica import Replica

Moving = tuple[list[Tensor], list[Tensor]]


@dataclass
class _Rates:
    """What a schedule changes: the groups' settings, and what it remembers itself."""

    groups: list[dict[str, Any]]
    schedule: Any


@dataclass
class _Lane:
    """What a lane has done since the agreement; while another lane is up, also what it has of its own."""

    samples: int = 0
    loss: Tensor | float = 0.0
    left: list[Tensor] = field(default_factory=list)
    """Of the fragment that is on its way: the lane's values when it left."""
    values: list[Tensor] = field(default_factory=list)
    inner: Any = None
    rates: _Rates | None = None
    moving: Moving = field(default_factory=lambda: ([], []))


@dataclass
class _Period:
    """Since the last agreement. `common` is what all have agreed on by now, `kept` what they had at its start where
    fragments have changed it since."""

    common: list[Tensor]
    rates: _Rates
    moving: Moving
    lanes: dict[int, _Lane] = field(default_factory=dict)
    up: int | None = None
    kept: tuple[list[Tensor], list[Tensor]] | None = None


class LocalReplica(Replica):
    """`after` gives the agreement that follows one. Steps are inner ones, of one lane; `apply` is an agreement."""

    def __init__(
        self, *args: Any, outer: Callable[[Sequence[Tensor]], Outer], after: Callable[[int], int], **rest: Any
    ) -> None:
        super().__init__(*args, **rest)
        self._outer = outer(self.trainable)
        self.after = after
        self._period: _Period | None = None

    # ---- lanes ----

    def begin(self) -> None:
        super().begin()
        self._open()

    def _open(self) -> _Period:
        if self._period is None:
            common = [p.detach().clone() for p in self.trainable]
            self._period = _Period(common, self._rates(), self.moving.take(1.0))
        return self._period

    def train(self, step: int, lane: int, batch: Any, *, size: int) -> Tensor:
        """One inner step of a lane, on so many samples of its own. Returns its loss. Where the loss is to be divided by
        nothing, none of the samples count."""
        self.turn_to(lane)
        self.moving.remember()
        found = self.forward_backward(step, lane, batch, share=1.0)
        if found.count is not None and not found.count:
            self.moving.restore()
            self.skip(step, lane)
            return torch.zeros_like(found.loss)
        loss = super().apply(step, found)
        it = self._lane(lane)
        it.samples += size
        it.loss = it.loss + loss.double() * size
        return loss

    def skip(self, step: int, lane: int) -> None:
        """A step in which the lane has no samples. Its schedule goes on all the same."""
        self.turn_to(lane)
        self._step_schedule(step)

    def _step_schedule(self, step: int) -> None:
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedules look for it
        self.step_schedule(step)

    def turn_to(self, lane: int) -> None:
        """Be this lane from now on."""
        period = self._open()
        if period.up == lane:
            return
        if period.up is not None:
            self._put_away(self._lane(period.up))
        it = self._lane(lane)
        if it.inner is None:  # its first step
            others = len(period.lanes) > 1
            values = [t.clone() for t in period.common] if others else period.common
            self._become(values, period.rates, period.moving, inner=defaultdict(dict), own=others)
        else:
            assert it.rates is not None
            self._become(it.values, it.rates, it.moving, inner=it.inner, own=True)
            it.values, it.moving = [], ([], [])
        it.inner = self.optimizer.state
        period.up = lane

    def _lane(self, lane: int) -> _Lane:
        assert self._period is not None
        return self._period.lanes.setdefault(lane, _Lane())

    def _put_away(self, it: _Lane) -> None:
        """Where the parameters can move, their memory is the lane's, and whoever is next has other memory."""
        values = [p.detach() for p in self.trainable]
        it.values = values if self._may_move else [t.clone() for t in values]
        it.rates, it.moving = self._rates(), self.moving.take(1.0)

    @torch.no_grad()
    def _become(
        self, values: Sequence[Tensor], rates: _Rates, moving: Moving, *, inner: Any, own: bool = False
    ) -> None:
        """`own`: nobody else has a share in the values."""
        if not (own and self.move_to(values)):
            self.take_values(values)
        self.moving.set(*moving)
        self.optimizer.state = inner
        for group, kept in zip(self.optimizer.param_groups, rates.groups, strict=True):
            group.update(copy.deepcopy(kept))
        if self.schedule:
            self.schedule.load_state_dict(copy.deepcopy(rates.schedule))

    def _rates(self) -> _Rates:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return _Rates(copy.deepcopy(groups), copy.deepcopy(self.schedule.state_dict()) if self.schedule else None)

    @torch.no_grad()
    def change(self, lane: int, total: int) -> LaneSum | None:
        """What the lane did since the agreement, as its share of so many samples of all lanes."""
        self.turn_to(lane)
        period, it = self._open(), self._lane(lane)
        if not it.samples:
            return None
        share = it.samples / total
        changes = self._away(range(len(self.trainable)), share, self.trainable)
        averaged, first = self.moving.take(share)
        loss = torch.as_tensor(it.loss, dtype=torch.float64, device=self.device) / total
        assert period.up == lane
        return LaneSum(changes, averaged, first, loss)

    def _away(self, which: Sequence[int], share: float, values: Sequence[Tensor]) -> list[Tensor]:
        common = self._open().common
        found = torch._foreach_sub([common[i] for i in which], list(values))
        torch._foreach_mul_(found, share)
        return list(found)

    # ---- fragments ----

    def fragment(self, which: Sequence[int]) -> LaneSum:
        """Tensors of the shapes that `leave` gives."""
        loss, count = torch.zeros(2, dtype=torch.float64)
        return LaneSum([self.trainable[i] for i in which], [], [], loss, count)

    @torch.no_grad()
    def leave(self, lane: int, which: Sequence[int], total: int) -> LaneSum | None:
        """As `change`, of some parameters alone; the lane goes on, and `arrive` follows."""
        period, it = self._open(), self._lane(lane)
        values = list[Tensor](self.trainable) if period.up == lane else it.values
        it.left = [values[i].detach().clone() for i in which]
        if not it.samples:
            return None
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        return LaneSum(self._away(which, it.samples / total, it.left), [], [], loss)

    @torch.no_grad()
    def arrive(self, which: Sequence[int], changes: Sequence[Tensor]) -> None:
        """All agree on these parameters; what a lane did to them since they left, it keeps."""
        period = self._open()
        if period.kept is None:
            period.kept = ([t.clone() for t in period.common], self._outer.copy())
        self._outer.step(period.common, changes, which)
        for lane, it in period.lanes.items():
            values = list[Tensor](self.trainable) if period.up == lane else it.values
            torch._foreach_add_(
                [values[i].detach() for i in which],
                torch._foreach_sub([period.common[i] for i in which], it.left),
            )
            it.left = []

    # ---- agreements ----

    @torch.no_grad()
    def apply(self, step: int, total: LaneSum) -> Tensor:
        period = self._open()
        self._outer.step(period.common, total.grads, range(len(self.trainable)))
        self._become(period.common, period.rates, (total.averaged, total.first), inner=defaultdict(dict))
        self._period = None
        for inner in range(step, self.after(step)):
            self._step_schedule(inner)
        return total.loss.clone()

    def undo(self) -> None:
        if period := self._period:
            if period.kept is not None:
                period.common, velocity = period.kept
                self._outer.restore(velocity)
            self._become(period.common, period.rates, period.moving, inner=defaultdict(dict))
            self._period = None

    def state(self) -> dict[str, Any]:
        return {**super().state(), "outer": self._outer.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._period = None
        self.optimizer.state = defaultdict(dict)
        super().load_state(state)
        self._outer.load_state(state["outer"])
