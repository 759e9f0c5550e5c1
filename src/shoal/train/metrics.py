"""Metrics through torchmetrics, accumulated per lane and merged in lane order, so that they are exact too."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ShoalError, error
from shoal.spec.base import Ref
from shoal.spec.names import DEFAULT_MODULES, expand, metric_names
from shoal.spec.resolve import build_ref
from shoal.train.task import agree

CLASSIFIERS = {
    "accuracy",
    "precision",
    "recall",
    "f1",
    "auc",
    "average_precision",
    "specificity",
    "kappa",
    "mcc",
    "confusion",
}


def build_metrics(refs: Sequence[Ref], example: tuple[Any, Any] | None, *, base_dir: str) -> dict[str, Any]:
    """torchmetrics objects by name. Short names of classification metrics learn their task from the example."""
    built: dict[str, Any] = {}
    for number, (name, ref) in enumerate(zip(metric_names(refs), refs, strict=True)):
        full = expand(ref, field="metrics")
        if ref.name in CLASSIFIERS and "task" not in full.args and example is not None:
            full = Ref(name=full.name, args=_classification(example) | full.args)
        try:
            built[name] = build_ref(full, base_dir=base_dir, default_modules=DEFAULT_MODULES["metrics"])
        except ShoalError as failure:
            raise failure.at(f"metrics.{number}") from failure
    return built


def _classification(example: tuple[Any, Any]) -> dict[str, Any]:
    prediction, target = agree(*example)
    if not isinstance(prediction, Tensor) or prediction.shape == getattr(target, "shape", None):
        return {"task": "binary"}
    return {"task": "multiclass", "num_classes": int(prediction.shape[1])}


class Accumulator:
    """Loss and metrics of one lane's part of an evaluation."""

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self.metrics = {name: copy.deepcopy(metric) for name, metric in metrics.items()}
        self.loss = torch.zeros((), dtype=torch.float64)
        self.count = torch.zeros((), dtype=torch.float64)

    def add(self, loss: Any, output: Any, batch: Any) -> None:
        total, count = loss if isinstance(loss, tuple) else (loss * batch.size, batch.size)
        self.loss += torch.as_tensor(total, device="cpu").double()
        self.count += torch.as_tensor(count, device="cpu").double()
        if not self.metrics:
            return
        prediction, target = agree(output, batch.target)
        if isinstance(prediction, Tensor) and prediction.dtype in (torch.bfloat16, torch.float16):
            prediction = prediction.float()
        for name, metric in self.metrics.items():
            try:
                metric.update(prediction, _as_metric_target(prediction, target, batch.target))
            except (ValueError, RuntimeError, TypeError, IndexError) as failure:
                raise error("SH408", f"{name}: {_first_line(failure)}", where="metrics") from failure


def _as_metric_target(prediction: Any, target: Any, original: Any) -> Any:
    """`agree` turns yes-or-no targets into floats for the loss; metrics want them whole."""
    whole = isinstance(original, Tensor) and not original.is_floating_point()
    return original.reshape(prediction.shape) if whole and target is not original else target


def merge(lanes: Sequence[Accumulator]) -> dict[str, float]:
    """The result over all lanes, added in lane order."""
    loss = sum((lane.loss for lane in lanes), torch.zeros((), dtype=torch.float64))
    count = sum((lane.count for lane in lanes), torch.zeros((), dtype=torch.float64))
    values = {"loss": float(loss / count)}
    for name in lanes[0].metrics:
        used = [lane.metrics[name] for lane in lanes if lane.metrics[name].update_called]
        values |= _scalars(name, _merged(used).compute())
    return values


def _merged(metrics: Sequence[Any]) -> Any:
    """One metric with the state of all, as torchmetrics itself merges the ranks of a process group.

    Its `merge_state` is not used: it refuses some metrics and weighs means by the wrong counts.
    """
    total = metrics[0]
    if len(metrics) == 1:
        return total
    for name, reduce in total._reductions.items():
        states = [getattr(metric, name) for metric in metrics]
        if isinstance(states[0], list):
            setattr(total, name, [part for state in states for part in state])
        else:
            stacked = torch.stack(states)
            setattr(total, name, reduce(stacked) if reduce else stacked)
    return total


def _scalars(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, dict):
        return {f"{name}/{k}": float(v) for k, v in value.items()}
    if value.numel() == 1:
        return {name: float(value)}
    return {f"{name}/{i}": float(v) for i, v in enumerate(value.reshape(-1).tolist())}


def _first_line(failure: BaseException) -> str:
    return (str(failure).strip() or type(failure).__name__).splitlines()[0]
