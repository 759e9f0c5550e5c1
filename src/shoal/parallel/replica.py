"""One set of weights with everything that changes them: model, optimizer, schedule, moving buffers.

The rules of exactness live here. A lane is one forward and backward from the state at the start of the step, with
randomness of its own; what lanes produce is a `LaneSum`, added up on the tree; `apply` turns the total into one
update. Nothing here knows how many workers there are.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from shoal.errors import error
from shoal.parallel.clipping import Clipping, coefficient, scale, slice_norms
from shoal.parallel.flat import Layout
from shoal.parallel.lane_sum import LaneSum, add
from shoal.parallel.randomness import Chance
from shoal.parallel.sparse.module import Fresh, tables_of
from shoal.parallel.sparse.rows import scaled
from shoal.spec import seeds

__all__ = ["Clipping", "LaneSum", "Loss", "LossFunction", "MovingBuffers", "Replica", "Taker", "add", "update"]

ROW_CHUNKS = 64
"""Rows of sparse tables are spread over as many chunks at least."""

# The mean over the batch's samples, or (a sum, what to divide it by once all lanes are added).
Loss = Tensor | tuple[Tensor, Tensor | float | int]
LossFunction = Callable[[nn.Module, Any], Loss]


class Taker(Protocol):
    """Takes a lane's gradients one by one, in the order in which backward finishes them."""

    def take(self, index: int, grad: Tensor | None) -> None:
        """The gradient of trainable parameter number `index`. At the end, None for each that has none left."""

    def spoil(self, why: str) -> None:
        """What was taken is not the lane's gradient after all."""


class MovingBuffers:
    """The buffers that a forward pass changes (a batch norm's running statistics), found by name at each use."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.names = list(names)
        self._places = [_place(model, name) for name in names]
        self._floating = [module._buffers[key].is_floating_point() for module, key in self._places]  # type: ignore[union-attr]
        self._at_start: list[Tensor] = []

    @property
    def floating(self) -> list[str]:
        """Those that are averaged."""
        return [name for name, floats in zip(self.names, self._floating, strict=True) if floats]

    @property
    def others(self) -> list[str]:
        return [name for name, floats in zip(self.names, self._floating, strict=True) if not floats]

    def _now(self, floating: bool) -> list[Tensor]:
        found = (m._buffers[k] for (m, k), f in zip(self._places, self._floating, strict=True) if f is floating)
        return [buffer for buffer in found if buffer is not None]

    @torch.no_grad()
    def remember(self) -> None:
        """What every lane of this step starts from."""
        self._at_start = [b.clone() for b in self._now(True) + self._now(False)]

    @torch.no_grad()
    def restore(self) -> None:
        for buffer, start in zip(self._now(True) + self._now(False), self._at_start, strict=True):
            buffer.copy_(start)

    @torch.no_grad()
    def take(self, share: float) -> tuple[list[Tensor], list[Tensor]]:
        return [b * share for b in self._now(True)], [b.clone() for b in self._now(False)]

    def blank(self) -> tuple[list[Tensor], list[Tensor]]:
        """Tensors like those that `take` gives."""
        return self._now(True), self._now(False)

    @torch.no_grad()
    def set(self, averaged: list[Tensor], first: list[Tensor]) -> None:
        for buffer, value in zip(self._now(True) + self._now(False), averaged + first, strict=True):
            buffer.copy_(value)


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


class Replica:
    """Owned by the training loop's thread."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        *,
        seed: int,
        schedule: Any = None,
        schedule_every: int = 1,
        clipping: Clipping | None = None,
        autocast: torch.dtype | None = None,
        chance: Chance | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.schedule = schedule
        self._schedule_every = schedule_every
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        if not self.trainable:
            raise error("SH404", "the model has no parameter that may change")
        self.device = self.trainable[0].device
        self.to_training()
        self.chance = chance or Chance(self.device)
        self.moving = MovingBuffers(model, [])
        self._loss = loss
        self._seed = seed
        self.clipping = clipping or Clipping()
        self._layout: Layout | None = None
        self._cut: Callable[[Layout], list[int]] | None = None
        self._autocast = autocast
        self._shares: dict[tuple[float, torch.dtype], Tensor] = {}
        self.tables = tables_of(model)
        for number, table in enumerate(self.tables):
            table.spec = replace(table.spec, number=number, seed=seed)
            table.bind(Fresh())

    def probe(self, batch: Any) -> None:
        """Find the moving buffers: run one forward pass and put everything back."""
        if not any(True for _ in self.model.buffers()):
            return
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.to_training()
        self.chance.fully(self._seed, seeds.LANE, 0, 0)
        with torch.no_grad(), self.casting():
            self._loss(self.model, batch)
            changed = [n for n, b in self.model.named_buffers() if n in before and _differs(b, before[n])]
            for name, buffer in self.model.named_buffers():
                buffer.copy_(before[name])
        self._set_moving(changed)

    def _set_moving(self, names: list[str]) -> None:
        self.moving = MovingBuffers(self.model, names)
        self._layout = None

    def begin(self) -> None:
        """Before the first lane of a step."""
        if not self.model.training:
            self.to_training()
        if self.moving.names:
            self.moving.remember()

    def undo(self) -> None:
        """A step that was begun does not count: the lanes have moved nothing but the moving buffers."""
        if self.moving.names:
            self.moving.restore()

    def to_training(self) -> None:
        """Training mode; layers whose parameters are all frozen keep still, running statistics included."""
        self.model.train()
        for module in self.model.modules():
            own = list(module.parameters(recurse=False))
            if own and module._buffers and not any(p.requires_grad for p in own):
                module.eval()

    def forward_backward(
        self, step: int, lane: int, batch: Any, *, share: float, taker: Taker | None = None
    ) -> LaneSum:
        """The lane's part of the step; `share` is its part of the step's samples. Gradients go to the taker as soon
        as they are there, if there is one."""
        result = self._once(step, lane, batch, share, taker)
        if not self.chance.missed():
            return result
        if taker:
            taker.spoil("a generator was drawn from that had no seed for this lane")
            return result
        return self._once(step, lane, batch, share)

    def _once(self, step: int, lane: int, batch: Any, share: float, taker: Taker | None = None) -> LaneSum:
        if self.moving.names:
            self.moving.restore()
        for table in self.tables:
            table.take_gradients()  # of a pass that came to nothing
        self.chance.for_lane(self._seed, seeds.LANE, step, lane)
        with self.casting():
            result = self._loss(self.model, batch)
        if isinstance(result, tuple):
            loss, divisor = result
            self._backward(loss, None, taker)
            value = loss.detach().double()
            count = torch.as_tensor(divisor, dtype=torch.float64, device=self.device).clone()
        else:
            # A share of one changes no bit, and is left out: a single lane costs what plain PyTorch does.
            self._backward(result, self._share(share, result) if share != 1 else None, taker)
            value, count = result.detach().double(), None
            if share != 1:
                value *= share
        averaged, first = self.moving.take(share) if self.moving.names else ([], [])
        rows = [table.take_gradients() for table in self.tables]
        return LaneSum(self._take_grads(taker), averaged, first, value, count, rows)

    def _backward(self, loss: Tensor, weight: Tensor | None, taker: Taker | None) -> None:
        hooks = []
        if taker:
            give = functools.partial(_give, taker)
            hooks = [
                p.register_post_accumulate_grad_hook(functools.partial(give, i))  # type: ignore[no-untyped-call]
                for i, p in enumerate(self.trainable)
            ]
        try:
            loss.backward(weight)  # type: ignore[no-untyped-call]
        finally:
            for hook in hooks:
                hook.remove()

    def blank(self) -> LaneSum:
        """Tensors of the shapes and kinds that a lane's sum has; a count is there in any case."""
        averaged, first = self.moving.blank()
        loss, count = torch.zeros(2, dtype=torch.float64)
        return LaneSum(list(self.trainable), averaged, first, loss, count)

    @property
    def layout(self) -> Layout:
        """How sums of this replica lie in a stretch, and how they are cut."""
        if self._layout is None:
            self._layout = Layout(self.blank(), least=ROW_CHUNKS if self.tables else 0)
            if self._cut:
                self._layout.cuts = self._cut(self._layout)
        return self._layout

    def cut_by(self, cut: Callable[[Layout], list[int]]) -> None:
        """Let the stretch be cut in another way than by size."""
        self._cut, self._layout = cut, None

    def apply(self, step: int, total: LaneSum) -> Tensor:
        """One update from the sum over all lanes. Returns the loss of the step."""
        self.scale(total)
        return self.advance(step, total)

    def advance(self, step: int, total: LaneSum) -> Tensor:
        """The same from a sum that is the gradient already."""
        for parameter, grad in zip(self.trainable, total.grads, strict=True):
            parameter.grad = grad
        update(self.optimizer)
        for parameter in self.trainable:
            parameter.grad = None
        return self.conclude(step, total)

    def move_to(self, values: Sequence[Tensor]) -> bool:
        """Let the parameters lie where these values do. False if they cannot: then values must be copied."""
        if self._may_move:
            for parameter, value in zip(self.trainable, values, strict=True):
                parameter.data = value
        return self._may_move

    @functools.cached_property
    def _may_move(self) -> bool:
        """Has nobody else a share in the parameters' memory? A buffer that is a view of one would stay behind."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        shared = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors)
        strides = [place.strides for place in self.layout.grads]
        return all(
            p.device.type == "cpu" and p.stride() == stride and shared[p.untyped_storage().data_ptr()] == 1
            for p, stride in zip(self.trainable, strides, strict=True)
        )

    @torch.no_grad()
    def take_values(self, values: Sequence[Tensor]) -> None:
        torch._foreach_copy_(list[Tensor](self.trainable), list(values))

    def conclude(self, step: int, total: LaneSum) -> Tensor:
        """The rest of a step whose update is made, here or elsewhere. Returns its loss."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedules look for it
        if self.moving.names:
            self.moving.set(total.averaged, total.first)
        self.step_schedule(step)
        return total.loss.clone() if total.count is None else total.loss / total.count

    def step_schedule(self, step: int) -> None:
        """After this step."""
        if self.schedule and (step + 1) % self._schedule_every == 0 and not self.waits_for_metric:
            self.schedule.step()

    @property
    def waits_for_metric(self) -> bool:
        """A schedule that is stepped with the result of an evaluation."""
        return isinstance(self.schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)

    def scale(self, total: LaneSum) -> None:
        """The sum becomes the gradient."""
        grads, clip, count, by = total.grads, self.clipping, total.count, None
        if clip.norm is not None:
            by = coefficient(slice_norms(self.layout.slices_of(grads)), clip=clip.norm, count=count)
        scale(grads, count=count if count is None else count.to(grads[0].dtype), coefficient=by, value=clip.value)
        total.rows = [scaled(rows, count=count, value=clip.value) for rows in total.rows]

    def _take_grads(self, taker: Taker | None) -> list[Tensor]:
        """The lane's gradients, taken out of the model. A parameter that the lane did not touch has zero."""
        if taker:
            for i, parameter in enumerate(self.trainable):
                _give(taker, i, parameter)
            return []
        grads = []
        for parameter in self.trainable:
            grad, parameter.grad = parameter.grad, None
            grads.append(torch.zeros_like(parameter) if grad is None else grad)
        return grads

    def _share(self, share: float, like: Tensor) -> Tensor:
        key = (share, like.dtype)
        if key not in self._shares:
            if len(self._shares) > 64:
                self._shares.clear()
            self._shares[key] = torch.tensor(share, dtype=like.dtype, device=like.device)
        return self._shares[key]

    def casting(self) -> contextlib.AbstractContextManager[Any]:
        """The precision of forward passes."""
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast)

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def state(self) -> dict[str, Any]:
        """Everything that an update depends on, as references: copy it before the next step changes it."""
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict() if self.schedule else None,
            # state_dict() leaves out buffers that are not persistent
            "moving": {name: self.model.get_buffer(name) for name in self.moving.names},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.schedule:
            self.schedule.load_state_dict(state["schedule"])
        self._set_moving(list(state["moving"]))
        for name, value in state["moving"].items():
            self.model.get_buffer(name).copy_(value)


def update(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()`, without torch's wrapper around it (a label for the profiler, hooks) where nobody has
    hooks: a quarter of what the step of a small model costs."""
    wrapper = type(optimizer).step
    inner = getattr(wrapper, "__wrapped__", None)
    if inner is None or not getattr(wrapper, "hooked", False) or _has_hooks(optimizer):
        optimizer.step()
    else:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedules look for it
        inner(optimizer)


def _give(taker: Taker, index: int, parameter: Tensor) -> None:
    grad, parameter.grad = parameter.grad, None
    taker.take(index, grad)


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def _differs(a: Tensor, b: Tensor) -> bool:
    return not torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
