"""Tasks around the user's own: another shape of the model, and a teacher."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.compression.shape import apply_steps
from shoal.data.batch import Batch
from shoal.errors import error
from shoal.lanes.loss import Loss
from shoal.spec.compression.config import DistilConfig
from shoal.spec.compression.steps import ShapeStep
from shoal.tasks.batch_facts import LOSS_FUNCTIONS
from shoal.tasks.own_loss import logits_of
from shoal.tasks.task import Task

CLASS_LOSSES = ("CrossEntropyLoss", "NLLLoss")
"""Losses of classes; torch's other losses are of numbers."""
Distance = Callable[[Any, Any], Tensor]


class WrappedTask(Task):
    """Passes everything to the user's task."""

    def __init__(self, inner: Task) -> None:
        self.inner = inner
        self.logits = inner.logits
        self.knows_divisor = inner.knows_divisor
        self.predicts_classes = inner.predicts_classes
        self.has_untrained_parameters = inner.has_untrained_parameters

    def model(self) -> nn.Module:
        return self.inner.model()

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        return self.inner.loss(model, batch)

    def predict(self, model: nn.Module, batch: Batch) -> Any:
        return self.inner.predict(model, batch)

    def evaluate(self, model: nn.Module, batch: Batch) -> tuple[Loss, Any]:
        return self.inner.evaluate(model, batch)

    def target(self, model: nn.Module, batch: Batch) -> Any:
        return self.inner.target(model, batch)

    @property
    def needs_predictions(self) -> bool:
        return self.inner.needs_predictions

    @property
    def evaluates_in_one_pass(self) -> bool:
        return self.inner.evaluates_in_one_pass

    def metrics(self, example: tuple[Any, Any] | None = None) -> Mapping[str, Any]:
        return self.inner.metrics(example)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        return self.inner.optimizer(model)

    def state(self) -> Any:
        return self.inner.state()

    def load_state(self, state: Any) -> None:
        self.inner.load_state(state)


class CompressedTask(WrappedTask):
    """The user's task with another shape of its model."""

    def __init__(self, inner: Task, steps: Sequence[ShapeStep]) -> None:
        super().__init__(inner)
        self._steps = list(steps)
        self._model: nn.Module | None = None

    def model(self) -> nn.Module:
        """The changed model: the same object each time, as the user's task may return the same one."""
        if self._model is None:
            self._model = apply_steps(self.inner.model(), self._steps)
        return self._model

    def to(self, device: torch.device) -> nn.Module:
        model = self.model()  # first: initial weights follow from the order of random numbers
        self.inner.to(device)
        return model.to(device)


class DistilledTask(WrappedTask):
    """The user's loss, mixed with the distance to a teacher's predictions and features.

    The teacher runs in evaluation mode, without gradients, and is no part of the state. Both losses are means over the
    batch's samples; evaluation uses the user's loss alone.
    """

    def __init__(self, inner: Task, config: DistilConfig, make_teacher: Callable[[], nn.Module]) -> None:
        super().__init__(inner)
        self._config = config
        self._teacher = make_teacher().eval().requires_grad_(requires_grad=False)
        self._distance: Distance | None = None

    def to(self, device: torch.device) -> nn.Module:
        self._teacher.to(device)
        return self.inner.to(device)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        features = _Features(model, self._config.features)
        taught = _Features(self._teacher, self._config.features.values())
        calls: list[tuple[Any, Any, Any]] = []
        losses = _LossShapes()
        with features, taught:
            with _noting_calls(model, calls), contextlib.nullcontext() if self._distance else losses:
                own = self.inner.loss(model, batch)
            if not calls:
                message = "the task's loss does not call the model, so that there is nothing to compare"
                raise error("SH402", message, where="distil", fix="Call `model(...)` in the task's loss.")
            args, named, answer = calls[-1]
            with torch.no_grad():
                wanted = logits_of(self._teacher(*args, **named))
        output = logits_of(answer)
        if self._distance is None:
            self._distance = _distance_for(losses.found, output, self.inner, self._config.temperature)
        distance = self._distance(output, wanted)
        for mine, other in self._config.features.items():
            distance = distance + self._config.feature_weight * feature_distance(
                features.found, mine, taught.found, other
            )
        return _mix(own, distance, self._config.weight)


def _mix(own: Loss, distance: Tensor, weight: float) -> Loss:
    """A share of each. A loss that is (sum, weight) stays one: the distance gets the same weight."""
    if isinstance(own, tuple):
        total, divisor = own
        return (1 - weight) * total + weight * distance * divisor, divisor
    return (1 - weight) * own + weight * distance


def output_distance(output: Any, wanted: Any, temperature: float, *, classes: int | None) -> Tensor:
    """For `classes` in this dimension, the Kullback-Leibler divergence of softened probabilities, times the squared
    temperature; for other numbers, the squared difference."""
    if not isinstance(output, Tensor) or not isinstance(wanted, Tensor) or output.shape != wanted.shape:
        raise error("SH402", "model and teacher do not return tensors of the same shape", where="distil")
    if classes is None or output.dim() < 2 or output.shape[classes] == 1:
        return F.mse_loss(output, wanted)
    student, teacher = (
        F.log_softmax(one.movedim(classes, -1).flatten(0, -2) / temperature, -1) for one in (output, wanted)
    )
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature**2


def _distance_for(losses: Sequence[tuple[str, torch.Size]], output: Any, task: Task, temperature: float) -> Distance:
    """What compares outputs, by the losses of torch that the task called on them. SH402 if they do not tell it."""
    if not isinstance(output, Tensor):
        raise error("SH402", f"the model returns {type(output).__name__}, not a tensor or logits", where="distil")
    compare = partial(output_distance, temperature=temperature)
    given = next((shape for name, shape in losses if name in CLASS_LOSSES), None)
    if given is None and (losses or task.predicts_classes):
        return partial(compare, classes=None if losses else -1)
    if given == output.shape:
        return partial(compare, classes=min(1, output.dim() - 1))
    if given is not None and len(given) > 1:  # the task has reshaped the output
        dimension = next((d for d in (-1, 1) if d < output.dim() and output.shape[d] == given[1]), None)
        if dimension is not None:
            return partial(compare, classes=dimension)
    message = f"the loss does not tell what the model's output {list(output.shape)} is: classes, or numbers"
    fix = "Let the loss call one of torch's on the output, or set `predicts_classes` if its last dimension has classes."
    raise error("SH402", message, where="distil", fix=fix)


def feature_distance(found: Mapping[str, Tensor], mine: str, taught: Mapping[str, Tensor], other: str) -> Tensor:
    """The mean squared difference of two outputs, each scaled to unit length per sample. Features of another width are
    compared by how similar the batch's samples are to each other."""
    a, b = (F.normalize(side[name].flatten(1), dim=1) for side, name in ((found, mine), (taught, other)))
    if a.shape == b.shape:
        return (a - b).square().sum(1).mean()
    return (a @ a.T - b @ b.T).square().mean()


class _LossShapes(TorchFunctionMode):
    """A block in which torch's losses are called on what is trained: their names, and the shapes of the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, torch.Size]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := LOSS_FUNCTIONS.get(func)) is not None:
            output = args[0] if args else (kwargs or {}).get("input")
            if isinstance(output, Tensor) and output.requires_grad:
                self.found.append((name, output.shape))
        return func(*args, **(kwargs or {}))


class _Features:
    """The outputs of modules while it is entered."""

    def __init__(self, model: nn.Module, names: Any) -> None:
        self.found: dict[str, Tensor] = {}
        self._modules = dict(model.named_modules())
        self._names = list(names)
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        for name in self._names:
            if name not in self._modules:
                raise error("SH405", f"there is no module '{name}'", where="distil.features")
            self._hooks.append(self._modules[name].register_forward_hook(self._note(name)))

    def __exit__(self, *failure: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            self.found[name] = output

        return hook


class _noting_calls:  # noqa: N801
    """Appends what the model gets, in order and by name, and what it returns: the user's loss calls it."""

    def __init__(self, model: nn.Module, calls: list[tuple[Any, Any, Any]]) -> None:
        self._model, self._calls = model, calls

    def __enter__(self) -> None:
        self._hook = self._model.register_forward_hook(lambda _, *call: self._calls.append(call), with_kwargs=True)

    def __exit__(self, *failure: object) -> None:
        self._hook.remove()
