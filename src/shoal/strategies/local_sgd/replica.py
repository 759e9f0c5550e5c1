"""Lanes that train by themselves: between two syncs, one replica runs each of the worker's lanes in turn.

At a sync every worker has the same parameters, outer momentum, moving buffers and schedule; the inner optimizer starts
afresh. So a worker that dies in between loses nothing that other workers could not compute again. What a lane does
depends only on the last sync and the lane's number, not on the worker that carries it.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.lanes.flat_layout import FlatLayout
from shoal.lanes.lane_sum import LaneSum
from shoal.lanes.replica import Replica
from shoal.strategies.local_sgd.outer_optimizer import OuterOptimizer

MovingValues = tuple[list[Tensor], list[Tensor]]


@dataclass
class _ScheduleState:
    """What a schedule changes: the options of the parameter groups, and its own state."""

    param_groups: list[dict[str, Any]]
    schedule: Any


@dataclass
class _LaneState:
    """What a lane has done since the last sync; while another lane is active, also the lane's own state."""

    samples: int = 0
    loss: Tensor | float = 0.0
    params_when_sent: list[Tensor] = field(default_factory=list)
    """The lane's values of the fragment in flight, from when it was sent."""
    params: list[Tensor] = field(default_factory=list)
    optimizer_state: Any = None
    schedule_state: _ScheduleState | None = None
    moving_buffers: MovingValues = field(default_factory=lambda: ([], []))


@dataclass
class _SyncInterval:
    """State since the last sync. `global_params` are the parameters that all workers agree on. `before_fragments` keeps
    the parameters and the outer momentum of the last sync once fragments change them."""

    global_params: list[Tensor]
    schedule_state: _ScheduleState
    moving_buffers: MovingValues
    lanes: dict[int, _LaneState] = field(default_factory=dict)
    active_lane: int | None = None
    before_fragments: tuple[list[Tensor], list[Tensor]] | None = None


class LocalReplica:
    """A plain replica with an outer optimizer. Belongs to the training thread.

    `next_sync` gives the step of the sync that follows a step. A lane's inner steps change the replica. `apply` is a
    sync, and the only update that a GradientSync sees.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        outer: Callable[[Sequence[Tensor]], OuterOptimizer],
        next_sync: Callable[[int], int],
    ) -> None:
        self.replica = replica
        self._outer = outer(replica.trainable)
        self.next_sync = next_sync
        self._interval: _SyncInterval | None = None

    @property
    def device(self) -> torch.device:
        return self.replica.device

    @property
    def layout(self) -> FlatLayout:
        return self.replica.layout

    def sum_template(self) -> LaneSum:
        return self.replica.sum_template()

    # ---- lanes ----

    def begin_step(self) -> None:
        self.replica.begin_step()
        self._current_interval()

    def _current_interval(self) -> _SyncInterval:
        if self._interval is None:
            common = [p.detach().clone() for p in self.replica.trainable]
            self._interval = _SyncInterval(
                common, self._schedule_state(), self.replica.moving_buffers.weighted_copies(1.0)
            )
        return self._interval

    def inner_step(self, step: int, lane: int, batch: Any, *, size: int) -> Tensor:
        """Run one inner step of a lane on `size` samples. Returns its loss. If the loss would be divided by a count of
        0, the step is skipped and its samples do not count."""
        self.switch_to_lane(lane)
        self.replica.moving_buffers.snapshot()
        found = self.replica.forward_backward(step, lane, batch, share=1.0)
        if found.count is not None and not found.count:
            self.replica.moving_buffers.restore()
            self.skip_inner_step(step, lane)
            return torch.zeros_like(found.loss)
        loss = self.replica.apply(step, found)
        it = self._lane_state(lane)
        it.samples += size
        it.loss = it.loss + loss.double() * size
        return loss

    def skip_inner_step(self, step: int, lane: int) -> None:
        """Skip a step in which the lane has no samples. Its schedule advances all the same."""
        self.switch_to_lane(lane)
        self._step_schedule(step)

    def _step_schedule(self, step: int) -> None:
        self.replica.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedules check it
        self.replica.step_schedule(step)

    def switch_to_lane(self, lane: int) -> None:
        """Make this the active lane: store the state of the previous one, and load this one's."""
        period = self._current_interval()
        if period.active_lane == lane:
            return
        if period.active_lane is not None:
            self._store_lane(self._lane_state(period.active_lane))
        it = self._lane_state(lane)
        if it.optimizer_state is None:  # the lane's first step
            others = len(period.lanes) > 1
            values = [t.clone() for t in period.global_params] if others else period.global_params
            self._load_lane(
                values, period.schedule_state, period.moving_buffers, optimizer_state=defaultdict(dict), own=others
            )
        else:
            assert it.schedule_state is not None
            self._load_lane(
                it.params, it.schedule_state, it.moving_buffers, optimizer_state=it.optimizer_state, own=True
            )
            it.params, it.moving_buffers = [], ([], [])
        it.optimizer_state = self.replica.optimizer.state
        period.active_lane = lane

    def _lane_state(self, lane: int) -> _LaneState:
        assert self._interval is not None
        return self._interval.lanes.setdefault(lane, _LaneState())

    def _store_lane(self, it: _LaneState) -> None:
        """Store the active lane's state. If the replica can adopt storage, the lane keeps the memory of the parameters,
        and the next lane brings its own."""
        values = [p.detach() for p in self.replica.trainable]
        it.params = values if self.replica.can_adopt_storage else [t.clone() for t in values]
        it.schedule_state, it.moving_buffers = self._schedule_state(), self.replica.moving_buffers.weighted_copies(1.0)

    @torch.no_grad()
    def _load_lane(
        self,
        values: Sequence[Tensor],
        schedule_state: _ScheduleState,
        moving_buffers: MovingValues,
        *,
        optimizer_state: Any,
        own: bool = False,
    ) -> None:
        """`own`: no other lane shares the memory of the values."""
        if not (own and self.replica.adopt_storage(values)):
            self.replica.copy_values(values)
        self.replica.moving_buffers.assign(*moving_buffers)
        self.replica.optimizer.state = optimizer_state
        for group, kept in zip(self.replica.optimizer.param_groups, schedule_state.param_groups, strict=True):
            group.update(copy.deepcopy(kept))
        if self.replica.schedule:
            self.replica.schedule.load_state_dict(copy.deepcopy(schedule_state.schedule))

    def _schedule_state(self) -> _ScheduleState:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.replica.optimizer.param_groups]
        return _ScheduleState(
            copy.deepcopy(groups), copy.deepcopy(self.replica.schedule.state_dict()) if self.replica.schedule else None
        )

    @torch.no_grad()
    def pseudo_gradient(self, lane: int, total: int) -> LaneSum | None:
        """The lane's change since the last sync, weighted by its share of the `total` samples of all lanes."""
        self.switch_to_lane(lane)
        period, it = self._current_interval(), self._lane_state(lane)
        if not it.samples:
            return None
        share = it.samples / total
        changes = self._weighted_delta(range(len(self.replica.trainable)), share, self.replica.trainable)
        averaged, first = self.replica.moving_buffers.weighted_copies(share)
        loss = torch.as_tensor(it.loss, dtype=torch.float64, device=self.replica.device) / total
        assert period.active_lane == lane
        return LaneSum(changes, averaged, first, loss)

    def _weighted_delta(self, param_indices: Sequence[int], share: float, values: Sequence[Tensor]) -> list[Tensor]:
        common = self._current_interval().global_params
        found = torch._foreach_sub([common[i] for i in param_indices], list(values))
        torch._foreach_mul_(found, share)
        return list(found)

    # ---- fragments ----

    def fragment_template(self, param_indices: Sequence[int]) -> LaneSum:
        """Tensors with the shapes that `send_fragment` returns."""
        loss, count = torch.zeros(2, dtype=torch.float64)
        return LaneSum([self.replica.trainable[i] for i in param_indices], [], [], loss, count)

    @torch.no_grad()
    def send_fragment(self, lane: int, param_indices: Sequence[int], total: int) -> LaneSum | None:
        """Like `pseudo_gradient`, for some parameters only. The lane continues, and `apply_fragment` follows."""
        period, it = self._current_interval(), self._lane_state(lane)
        values = list[Tensor](self.replica.trainable) if period.active_lane == lane else it.params
        it.params_when_sent = [values[i].detach().clone() for i in param_indices]
        if not it.samples:
            return None
        loss = torch.zeros((), dtype=torch.float64, device=self.replica.device)
        return LaneSum(self._weighted_delta(param_indices, it.samples / total, it.params_when_sent), [], [], loss)

    @torch.no_grad()
    def apply_fragment(self, param_indices: Sequence[int], pseudo_gradients: Sequence[Tensor]) -> None:
        """Apply the outer step to these parameters. Each lane keeps what it changed in them since they were sent."""
        period = self._current_interval()
        if period.before_fragments is None:
            period.before_fragments = ([t.clone() for t in period.global_params], self._outer.copy())
        self._outer.step(period.global_params, pseudo_gradients, param_indices)
        for lane, it in period.lanes.items():
            values = list[Tensor](self.replica.trainable) if period.active_lane == lane else it.params
            torch._foreach_add_(
                [values[i].detach() for i in param_indices],
                torch._foreach_sub([period.global_params[i] for i in param_indices], it.params_when_sent),
            )
            it.params_when_sent = []

    # ---- syncs ----

    @torch.no_grad()
    def apply(self, step: int, total: LaneSum) -> Tensor:
        period = self._current_interval()
        self._outer.step(period.global_params, total.grads, range(len(self.replica.trainable)))
        self._load_lane(
            period.global_params,
            period.schedule_state,
            (total.float_buffers, total.int_buffers),
            optimizer_state=defaultdict(dict),
        )
        self._interval = None
        for inner in range(step, self.next_sync(step)):
            self._step_schedule(inner)
        return total.loss.clone()

    def undo_step(self) -> None:
        if period := self._interval:
            if period.before_fragments is not None:
                period.global_params, velocity = period.before_fragments
                self._outer.restore(velocity)
            self._load_lane(
                period.global_params, period.schedule_state, period.moving_buffers, optimizer_state=defaultdict(dict)
            )
            self._interval = None

    def state(self) -> dict[str, Any]:
        return {**self.replica.state(), "outer": self._outer.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._interval = None
        self.replica.optimizer.state = defaultdict(dict)
        self.replica.load_state(state)
        self._outer.load_state(state["outer"])
