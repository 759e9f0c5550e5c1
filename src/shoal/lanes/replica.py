"""One set of weights with everything that changes them: model, optimizer, schedule, moving buffers.

The rules of exactness live here. A lane is one forward and backward from the state at the start of the step, with
its own random seeds. Its result is a `LaneSum`; lane sums are added on the tree, and `apply` turns the total into one
update. Nothing here depends on the number of workers.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from shoal.checkpoint.sha256 import weights_sha256
from shoal.errors import error
from shoal.lanes.carry import LaneCarry
from shoal.lanes.clipping import Clipping, clip_coefficient, divisor_of, scale_gradients, slice_norms
from shoal.lanes.dense_gradients import sparse_gradient_error
from shoal.lanes.flat_layout import FlatLayout
from shoal.lanes.lane_sum import LaneSum, add
from shoal.lanes.loss import LossFunction, split_loss
from shoal.lanes.loss_scale import LossScale
from shoal.lanes.moving_buffers import MovingBuffers, changed_buffers
from shoal.lanes.rng import LaneRng
from shoal.lanes.sparse.embedding import InitialRows, sparse_tables
from shoal.lanes.sparse.rows import scale_rows
from shoal.lanes.weight_average import WeightAverage, evaluation_weights, has_modes
from shoal.spec import seeds

__all__ = [
    "Clipping",
    "GradientSink",
    "LaneObserver",
    "LaneSum",
    "MovingBuffers",
    "Replica",
    "add",
    "optimizer_step",
]

MIN_ROW_CHUNKS = 64
"""Minimum number of chunks over which the rows of sparse tables are spread."""


class GradientSink(Protocol):
    """Takes a lane's gradients one by one, in the order in which backward finishes them."""

    def accept(self, index: int, grad: Tensor | None) -> None:
        """Take the gradient of trainable parameter number `index`. After backward, called with None or the remaining
        gradient for every parameter."""

    def invalidate(self, why: str) -> None:
        """The accepted gradients are not the lane's gradients after all."""


class LaneObserver(Protocol):
    """Sees what a step computes and changes nothing. It copies what it keeps: the step goes on with the tensors."""

    def lane_computed(self, step: int, lane: int, batch: Any, result: LaneSum) -> None:
        """The lane's sum is computed; its gradients are in `result`, unless a sink took them."""

    def total_scaled(self, step: int, total: LaneSum) -> None:
        """The optimizer is about to use this sum over all lanes."""


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
        rng: LaneRng | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.schedule = schedule
        self._schedule_every = schedule_every
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        if not self.trainable:
            raise error("SH404", "the model has no parameter that may change")
        self.device = self.trainable[0].device
        self.set_train_mode()
        self.rng = rng or LaneRng(self.device)
        self.moving_buffers = MovingBuffers(model, [])
        self._loss = loss
        self._seed = seed
        self.clipping = clipping or Clipping()
        self._layout: FlatLayout | None = None
        self._chunking: Callable[[FlatLayout], list[int]] | None = None
        self._autocast = autocast
        self._share_tensors: dict[tuple[float, torch.dtype], Tensor] = {}
        self.observer: LaneObserver | None = None
        self.average: WeightAverage | None = None
        self.loss_scale: LossScale | None = None
        self.carry: LaneCarry | None = None
        self.saves_frozen = True
        self._frozen_digest: str | None = None
        self.tables = sparse_tables(model)
        for number, table in enumerate(self.tables):
            table.spec = replace(table.spec, number=number, seed=seed)
            table.bind(InitialRows())

    def probe(self, batch: Any) -> None:
        """Find the moving buffers: run one forward pass and restore all buffers."""
        if not any(True for _ in self.model.buffers()):
            return
        with self.rehearsal() as before:
            self._rehearse(batch)
            changed = changed_buffers(self.model, before)
        self._set_moving_buffers(changed)

    def _rehearse(self, batch: Any) -> None:
        """With gradients: a loss may compute some itself."""
        self._loss(self.model, batch)

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[dict[str, Tensor]]:
        """A block for forward passes as in the first step. It gets a copy of all buffers, and restores them."""
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.set_train_mode()
        self.rng.seed_all(self._seed, seeds.LANE, 0, 0)
        with self.autocast_context():
            yield before
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(before[name])

    def _set_moving_buffers(self, names: list[str]) -> None:
        self.moving_buffers = MovingBuffers(self.model, names)
        self._layout = None

    def begin_step(self) -> None:
        """Call before the first lane of a step."""
        if not self.model.training:
            self.set_train_mode()
        if self.moving_buffers.names:
            self.moving_buffers.snapshot()

    def undo_step(self) -> None:
        """Undo a discarded step: its lanes have changed nothing but the moving buffers."""
        if self.moving_buffers.names:
            self.moving_buffers.restore()
        if self.carry:
            self.carry.drop()

    def set_train_mode(self) -> None:
        """Training mode; layers whose parameters are all frozen stay in eval mode, running statistics included."""
        self.model.train()
        if has_modes(self.optimizer):
            self.optimizer.train()  # type: ignore[attr-defined]
        for module in self.model.modules():
            own = list(module.parameters(recurse=False))
            if own and module._buffers and not any(p.requires_grad for p in own):
                module.eval()

    def forward_backward(
        self, step: int, lane: int, batch: Any, *, share: float, sink: GradientSink | None = None
    ) -> LaneSum:
        """Compute the lane's sum; `share` is its fraction of the step's samples. A sink gets each gradient as soon as
        backward has finished it."""
        result = self._forward_backward_once(step, lane, batch, share, sink)
        if self.rng.drew_unseeded():
            if sink:
                sink.invalidate("a generator was drawn from that was not seeded for this lane")
            else:
                result = self._forward_backward_once(step, lane, batch, share)
        if self.observer:
            self.observer.lane_computed(step, lane, batch, result)
        return result

    def _forward_backward_once(
        self, step: int, lane: int, batch: Any, share: float, sink: GradientSink | None = None
    ) -> LaneSum:
        if self.moving_buffers.names:
            self.moving_buffers.restore()
        for table in self.tables:
            table.take_gradients()  # of a discarded pass
        self.rng.seed_lane(self._seed, seeds.LANE, step, lane)
        if self.carry:
            self.carry.give(step, lane)
        with self.autocast_context():
            result = self._loss(self.model, batch)
        if self.carry:
            self.carry.take(lane)
        return self._lane_sum(result, share, sink)

    def _lane_sum(self, result: Any, share: float, sink: GradientSink | None = None) -> LaneSum:
        """The lane's sum from what its loss returned."""
        loss, count = split_loss(result)
        weight = share if count is None else 1.0
        # Before backward: with gradient checkpointing, backward runs forward passes again.
        averaged, first = self.moving_buffers.weighted_copies(share) if self.moving_buffers.names else ([], [])
        scaled = weight * self.loss_scale.scale if self.loss_scale else weight
        # A weight of 1 changes no bit and is skipped: a single lane costs no more than plain PyTorch.
        self._backward(loss, self._share_tensor(scaled, loss) if scaled != 1 else None, sink)
        value = loss.detach().double()
        if weight != 1:
            value *= weight
        rows = [table.take_gradients() for table in self.tables]
        return LaneSum(self._collect_grads(sink), averaged, first, value, count, rows)

    def _backward(self, loss: Tensor, weight: Tensor | None, sink: GradientSink | None) -> None:
        hooks = []
        if sink:
            deliver = functools.partial(self._deliver, sink)
            hooks = [
                p.register_post_accumulate_grad_hook(functools.partial(deliver, i))  # type: ignore[no-untyped-call]
                for i, p in enumerate(self.trainable)
            ]
        try:
            loss.backward(weight)  # type: ignore[no-untyped-call]
        finally:
            for hook in hooks:
                hook.remove()

    def sum_template(self) -> LaneSum:
        """Tensors with the shapes and dtypes of a lane's sum, always with a count."""
        averaged, first = self.moving_buffers.templates()
        loss, count = torch.zeros(2, dtype=torch.float64)
        return LaneSum(list(self.trainable), averaged, first, loss, count)

    @property
    def layout(self) -> FlatLayout:
        """The flat layout of this replica's sums, and its chunks."""
        if self._layout is None:
            self._layout = FlatLayout(self.sum_template(), min_chunks=MIN_ROW_CHUNKS if self.tables else 0)
            if self._chunking:
                self._layout.chunk_offsets = self._chunking(self._layout)
        return self._layout

    def set_chunking(self, chunking: Callable[[FlatLayout], list[int]]) -> None:
        """Set chunk boundaries in another way than by size."""
        self._chunking, self._layout = chunking, None

    def apply(self, step: int, total: LaneSum) -> Tensor:
        """Update the weights from the sum over all lanes. Returns the loss of the step."""
        self.scale_sum(total)
        return self.apply_gradient(step, total)

    def apply_gradient(self, step: int, total: LaneSum) -> Tensor:
        """Update the weights from a sum that `scale_sum` has already scaled."""
        if self.observer:
            self.observer.total_scaled(step, total)
        if self.loss_scale is None or self.loss_scale.accept(total.grads):
            for parameter, grad in zip(self.trainable, total.grads, strict=True):
                parameter.grad = grad
            optimizer_step(self.optimizer)
            for parameter in self.trainable:
                parameter.grad = None
        return self.finish_step(step, total)

    def adopt_storage(self, values: Sequence[Tensor]) -> bool:
        """Make the parameters use the memory of these values. False if that is impossible: the caller must copy."""
        if self.can_adopt_storage:
            for parameter, value in zip(self.trainable, values, strict=True):
                parameter.data = value
        return self.can_adopt_storage

    @functools.cached_property
    def can_adopt_storage(self) -> bool:
        """Whether no other tensor shares the parameters' memory. A buffer that is a view of one would keep the old
        memory."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        shared = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors)
        strides = [slot.strides for slot in self.layout.grads]
        return all(
            p.device.type == "cpu" and p.stride() == stride and shared[p.untyped_storage().data_ptr()] == 1
            for p, stride in zip(self.trainable, strides, strict=True)
        )

    @torch.no_grad()
    def copy_values(self, values: Sequence[Tensor]) -> None:
        torch._foreach_copy_(list[Tensor](self.trainable), list(values))

    def finish_step(self, step: int, total: LaneSum) -> Tensor:
        """Finish a step after its update, made here or on servers. Returns its loss."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedules check it
        if self.moving_buffers.names:
            self.moving_buffers.assign(total.float_buffers, total.int_buffers)
        self.step_schedule(step)
        if self.average:
            self.average.update(step)
        if self.carry:
            self.carry.commit()
        return total.loss.clone() if total.count is None else total.loss / divisor_of(total.count)

    def step_schedule(self, step: int) -> None:
        """Advance the learning-rate schedule after this step."""
        if self.schedule and (step + 1) % self._schedule_every == 0 and not self.schedule_needs_metric:
            self.schedule.step()

    @property
    def schedule_needs_metric(self) -> bool:
        """Whether the schedule is stepped with the result of an evaluation."""
        return isinstance(self.schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)

    def scale_sum(self, total: LaneSum) -> None:
        """Turn the sum into the gradient: divide by the count, then clip."""
        grads, clip, count, coefficient = total.grads, self.clipping, total.count, None
        if self.loss_scale:
            self.loss_scale.unscale(grads)
        if clip.norm is not None:
            coefficient = clip_coefficient(slice_norms(self.layout.slices_of(grads)), clip=clip.norm, count=count)
        divisor = None if count is None else divisor_of(count, grads[0].dtype)
        scale_gradients(grads, count=divisor, coefficient=coefficient, value=clip.value)
        total.rows = [scale_rows(rows, count=count, value=clip.value) for rows in total.rows]

    def _collect_grads(self, sink: GradientSink | None) -> list[Tensor]:
        """Move the lane's gradients out of the model. A parameter that the lane did not use gets zeros."""
        if sink:
            for i, parameter in enumerate(self.trainable):
                self._deliver(sink, i, parameter)
            return []
        grads = []
        for parameter in self.trainable:
            grad = self._pop_gradient(parameter)
            grads.append(torch.zeros_like(parameter) if grad is None else grad)
        return grads

    def _deliver(self, sink: GradientSink, index: int, parameter: Tensor) -> None:
        sink.accept(index, self._pop_gradient(parameter))

    def _pop_gradient(self, parameter: Tensor) -> Tensor | None:
        grad, parameter.grad = parameter.grad, None
        if grad is not None and grad.layout is not torch.strided:
            raise sparse_gradient_error(self.model, parameter)
        return grad

    def _share_tensor(self, share: float, like: Tensor) -> Tensor:
        key = (share, like.dtype)
        if key not in self._share_tensors:
            if len(self._share_tensors) > 64:
                self._share_tensors.clear()
            self._share_tensors[key] = torch.tensor(share, dtype=like.dtype, device=like.device)
        return self._share_tensors[key]

    def autocast_context(self) -> contextlib.AbstractContextManager[Any]:
        """The precision of forward passes."""
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast)

    def evaluation_weights(self) -> contextlib.AbstractContextManager[None]:
        """A block in which the model has the weights to evaluate and to export."""
        return evaluation_weights(self.model, self.optimizer, self.average)

    @property
    def has_evaluation_weights(self) -> bool:
        """Whether those differ from the weights that are trained."""
        return has_modes(self.optimizer) or bool(self.average and self.average.values)

    @property
    def every_optimizer(self) -> Sequence[torch.optim.Optimizer]:
        return [self.optimizer]

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def state(self) -> dict[str, Any]:
        """Everything that an update depends on, not copied: the next step changes it."""
        return {
            "model": self._saved_weights(),
            **({} if self.saves_frozen else {"frozen": self._frozen_sha256()}),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict() if self.schedule else None,
            # state_dict() omits buffers that are not persistent
            "moving": {name: self.model.get_buffer(name) for name in self.moving_buffers.names},
            **{name: part.state() for name, part in self._parts().items()},
        }

    def _parts(self) -> dict[str, WeightAverage | LossScale | LaneCarry]:
        """What else has a state, by its section of a checkpoint."""
        found = {"average": self.average, "loss_scale": self.loss_scale, "carry": self.carry}
        return {name: part for name, part in found.items() if part is not None}

    def load_state(self, state: dict[str, Any]) -> None:
        if state.get("frozen") is None:
            self.model.load_state_dict(state["model"])
        else:
            self._load_trained(state["model"], state["frozen"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.schedule:
            self.schedule.load_state_dict(state["schedule"])
        self._set_moving_buffers(list(state["moving"]))
        for name, value in state["moving"].items():
            self.model.get_buffer(name).copy_(value)
        for name, part in self._parts().items():
            part.load_state(state[name])

    def _frozen(self) -> dict[str, Tensor]:
        """The parameters that no step changes, under each of their names."""
        every = self.model.state_dict(keep_vars=True)
        return {n: v for n, v in every.items() if isinstance(v, nn.Parameter) and not v.requires_grad}

    def _saved_weights(self) -> dict[str, Tensor]:
        weights = dict(self.model.state_dict())
        if not self.saves_frozen:
            for name in self._frozen():
                del weights[name]
        return weights

    def _frozen_sha256(self) -> str:
        """Computed once: frozen parameters do not change."""
        if self._frozen_digest is None:
            self._frozen_digest = weights_sha256({n: v.detach() for n, v in self._frozen().items()})
        return self._frozen_digest

    def _load_trained(self, weights: dict[str, Tensor], frozen: str) -> None:
        """Load a state without frozen parameters. SH803 if this replica's own are not those of the saved state."""
        if self._frozen_sha256() != frozen:
            raise error("SH803", "the job makes other frozen weights than those that the state was saved with")
        self.model.load_state_dict(weights | {n: v.detach() for n, v in self._frozen().items()})


def optimizer_step(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()` without torch's wrapper (profiler label, hooks) if there are no hooks. The wrapper takes a
    quarter of the time of a small model's step."""
    wrapper = type(optimizer).step
    inner = getattr(wrapper, "__wrapped__", None)
    if inner is None or not getattr(wrapper, "hooked", False) or _has_hooks(optimizer):
        optimizer.step()
    else:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedules check it
        inner(optimizer)


def _has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)
