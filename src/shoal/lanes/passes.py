"""Steps that need the sum over all lanes more than once: several optimizers in turn, or an optimizer with a closure.

In each pass every lane computes, and the lanes are added on the tree. What a replica does between passes is a function
of these sums, so all replicas do the same and ask for the same next pass.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.errors import error
from shoal.lanes.clipping import divisor_of
from shoal.lanes.lane_sum import LaneSum
from shoal.lanes.loss import Loss
from shoal.lanes.moving_buffers import changed_buffers
from shoal.lanes.replica import Replica, optimizer_step
from shoal.spec import seeds

MAX_PASSES = 1 << 12
"""Passes in one step, at most."""

Phase = tuple[Loss | None, str]
"""What a task's step yields: a loss, and the name of the optimizer that takes its gradient. None: nothing to add."""
StepFunction = Callable[[Any, Any], Iterator[Phase]]
ComputeLane = Callable[[int, Any, float], LaneSum | None]
"""Computes a lane from its number, its batch and its share of the samples."""


class Passes(Protocol):
    """The lanes of one step."""

    keeps_undo: bool
    """Whether the step may be discarded after a pass has changed the replica."""

    def total(self, compute: ComputeLane) -> LaneSum | None:
        """The sum over all lanes of the job; None if no lane adds anything. LinkError if a member is lost."""


class PassObserver(Protocol):
    """Sees the passes of a step and changes nothing. It copies what it keeps."""

    def lane_passed(self, lane: int, batch: Any, result: LaneSum | None) -> None:
        """A lane of this worker is computed; None if it adds nothing."""

    def pass_summed(self, total: LaneSum | None) -> None:
        """The replica is about to use this sum over all lanes."""


class MultiPassReplica(Replica):
    """A replica that updates itself in `take_step`. `forward_backward` and `apply` are no whole step of it."""

    pass_observer: PassObserver | None = None

    def take_step(self, step: int, passes: Passes) -> Tensor:
        """All passes of a step with their updates. Returns the loss of the first."""
        raise NotImplementedError

    def begin_step(self) -> None:
        super().begin_step()
        self._undo: list[tuple[torch.optim.Optimizer, Any, list[Tensor]]] = []
        self._at_start = [b.clone() for part in self.moving_buffers.templates() for b in part]

    def undo_step(self) -> None:
        with torch.no_grad():
            for optimizer, state, values in reversed(self._undo):
                for parameter, value in zip(_parameters(optimizer), values, strict=True):
                    parameter.copy_(value)
                optimizer.load_state_dict(state)
        floats = len(self.moving_buffers.float_names)
        self.moving_buffers.assign(self._at_start[:floats], self._at_start[floats:])
        if self.carry:
            self.carry.drop()

    def _prepare_undo(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep what the optimizer is about to change, once per step."""
        if not any(optimizer is one for one, _, _ in self._undo):
            values = [p.detach().clone() for p in _parameters(optimizer)]
            self._undo.append((optimizer, copy.deepcopy(optimizer.state_dict()), values))

    def _adopt_buffers(self, total: LaneSum) -> None:
        if self.moving_buffers.names:
            self.moving_buffers.assign(total.float_buffers, total.int_buffers)
            self.moving_buffers.snapshot()


class PhasedReplica(MultiPassReplica):
    """A task with several optimizers: each phase of its step yields a loss for one of them.

    A lane's step is one generator, which waits at each phase until that phase's optimizer has made its update. So what
    it computed before (a graph, too) is there in later phases.
    """

    optimizers: Mapping[str, torch.optim.Optimizer]
    schedules: Mapping[str, Any]
    phases: Sequence[str] = ()

    def bind(
        self, step_function: StepFunction, optimizers: Mapping[str, torch.optim.Optimizer], schedules: Mapping[str, Any]
    ) -> PhasedReplica:
        """Called once, before anything else."""
        self._step_function = step_function
        self.optimizers, self.schedules = optimizers, schedules
        place = {id(p): i for i, p in enumerate(self.trainable)}
        self._places = {
            name: [place[id(p)] for p in _parameters(one) if id(p) in place] for name, one in optimizers.items()
        }
        return self

    def probe(self, batch: Any) -> None:
        """Also finds the phases of a step."""
        with self.rehearsal() as before:
            self.phases = [self._checked_name(name) for _, name in self._step_function(self.model, batch)]
            changed = changed_buffers(self.model, before)
        if not self.phases:
            raise error("SH862", "the step of the task yields nothing", where="task")
        self._set_moving_buffers(changed)

    def take_step(self, step: int, passes: Passes) -> Tensor:
        lanes: dict[int, Iterator[Phase]] = {}
        losses = []

        def compute(number: int, lane: int, batch: Any, share: float) -> LaneSum | None:
            if not number:
                lanes[lane] = iter(self._step_function(self.model, batch))
            return self._compute_phase(lanes[lane], number, step=step, lane=lane, share=share)

        for number, name in enumerate(self.phases):
            total = passes.total(partial(compute, number))
            if total is not None:
                is_last = number + 1 == len(self.phases)  # after it, nothing can be discarded any more
                losses.append(self._apply_phase(name, total, keep=passes.keeps_undo and not is_last))
        for lane in lanes.values():
            self._finish_lane(lane)
        self._finish(step)
        if not losses:
            raise error("SH862", f"no lane yields a loss at step {step}", where="task")
        return losses[0]

    def _compute_phase(
        self, lane_step: Iterator[Phase], number: int, *, step: int, lane: int, share: float
    ) -> LaneSum | None:
        if self.moving_buffers.names:
            self.moving_buffers.restore()
        self.rng.seed_all(self._seed, seeds.LANE, step, lane, *([number] if number else []))
        if self.carry and not number:
            self.carry.give(step, lane)
        with self.autocast_context():
            loss, name = next(lane_step, (None, "the end"))
        if name != self.phases[number]:
            message = f"phase {number + 1} of the step is '{name}', and was '{self.phases[number]}' at the first batch"
            raise error("SH862", message, where="task")
        if self.carry and not number:
            self.carry.take(lane)
        return None if loss is None else self._lane_sum(loss, share)

    def _finish_lane(self, lane_step: Iterator[Phase]) -> None:
        if (more := next(lane_step, None)) is not None:
            message = f"the step has a further phase '{more[1]}', which it had not at the first batch"
            raise error("SH862", message, where="task")

    def _apply_phase(self, name: str, total: LaneSum, *, keep: bool) -> Tensor:
        optimizer = self.optimizers[name]
        own = set(self._places[name])
        total.grads = [g if i in own else torch.zeros_like(g) for i, g in enumerate(total.grads)]
        self.scale_sum(total)
        if keep:
            self._prepare_undo(optimizer)
        if self.loss_scale is None or self.loss_scale.accept(total.grads):
            for place in own:
                self.trainable[place].grad = total.grads[place]
            optimizer_step(optimizer)
            for place in own:
                self.trainable[place].grad = None
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedules check it
        self._adopt_buffers(total)
        return _loss_of(total)

    def _finish(self, step: int) -> None:
        if (step + 1) % self._schedule_every == 0 and not self.schedule_needs_metric:
            for schedule in self.schedules.values():
                schedule.step()
        if self.average:
            self.average.update(step)
        if self.carry:
            self.carry.commit()

    def _checked_name(self, name: str) -> str:
        if name not in self.optimizers:
            message = f"the step yields a loss for '{name}', and the optimizers are {', '.join(self.optimizers)}"
            raise error("SH861", message, where="task")
        return name

    @property
    def every_optimizer(self) -> Sequence[torch.optim.Optimizer]:
        return list(self.optimizers.values())

    def state(self) -> dict[str, Any]:
        return super().state() | {
            "optimizer": {name: one.state_dict() for name, one in self.optimizers.items()},
            "schedule": {name: one.state_dict() for name, one in self.schedules.items()} or None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        first = next(iter(self.optimizers))
        super().load_state(state | {"optimizer": state["optimizer"][first]})
        for name, one in self.optimizers.items():
            one.load_state_dict(state["optimizer"][name])
        for name, schedule in self.schedules.items():
            schedule.load_state_dict(state["schedule"][name])


class ClosureReplica(MultiPassReplica):
    """An optimizer that computes the loss several times in a step, such as LBFGS: each call of its closure is a pass.

    Every pass of a step has the same batch and the same random numbers.
    """

    def take_step(self, step: int, passes: Passes) -> Tensor:
        if passes.keeps_undo:
            self._prepare_undo(self.optimizer)
        losses: list[Tensor] = []
        sums: list[LaneSum] = []

        def closure() -> Tensor:
            self._drop_grads()
            total = passes.total(lambda lane, batch, share: self.forward_backward(step, lane, batch, share=share))
            if total is None:
                raise error("SH412", f"no lane has samples at step {step}")
            self.scale_sum(total)
            for parameter, grad in zip(self.trainable, total.grads, strict=True):
                parameter.grad = grad
            losses.append(_loss_of(total))
            sums[:] = [total]
            return losses[-1]

        self.optimizer.step(closure)  # type: ignore[arg-type]
        self._drop_grads()
        self.finish_step(step, sums[0])
        return losses[0]

    def _drop_grads(self) -> None:
        for parameter in self.trainable:
            parameter.grad = None


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step cannot do without a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _loss_of(total: LaneSum) -> Tensor:
    return total.loss.clone() if total.count is None else total.loss / divisor_of(total.count)
