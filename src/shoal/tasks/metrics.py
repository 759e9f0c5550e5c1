"""Metrics from torchmetrics, accumulated per lane and merged in lane order, so that they are exact too."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ShoalError, describe_exception, error
from shoal.net.errors import LinkError
from shoal.spec.base import Ref
from shoal.spec.names import DEFAULT_MODULES, expand_alias, metric_names
from shoal.spec.resolve import build_ref
from shoal.tasks.task import align_shapes

CLASSIFICATION_METRICS = {
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
    """torchmetrics objects by name. Short names of classification metrics get their task from the example."""
    built: dict[str, Any] = {}
    for number, (name, ref) in enumerate(zip(metric_names(refs), refs, strict=True)):
        full = expand_alias(ref, field="metrics")
        if ref.name in CLASSIFICATION_METRICS and "task" not in full.args and example is not None:
            full = Ref(name=full.name, args=_classification_args(example) | full.args)
        try:
            built[name] = build_ref(full, base_dir=base_dir, default_modules=DEFAULT_MODULES["metrics"])
        except ShoalError as failure:
            raise failure.at(f"metrics.{number}") from failure
    return built


def _classification_args(example: tuple[Any, Any]) -> dict[str, Any]:
    prediction, target = align_shapes(*example)
    if not isinstance(prediction, Tensor) or prediction.shape == getattr(target, "shape", None):
        return {"task": "binary"}
    return {"task": "multiclass", "num_classes": int(prediction.shape[1])}


def are_logits(prediction: Any, known: bool | None) -> bool:
    """Whether predictions must be turned into probabilities: `known` if the loss implies it, else by their values.

    torchmetrics guesses this for every batch, so a batch whose logits all lie in 0..1 would count as probabilities.
    Here it is decided once per evaluation, on the first chunk.
    """
    if known is not None:
        return known
    if not isinstance(prediction, Tensor) or not prediction.is_floating_point():
        return False
    return bool(((prediction < 0) | (prediction > 1)).any())


def to_probabilities(prediction: Tensor, target: Any) -> Tensor:
    """Probabilities in float64. In float32 large logits all become 1, and ranking metrics would see ties."""
    prediction = prediction.double()
    same = prediction.shape == getattr(target, "shape", None)
    return prediction.sigmoid() if same or prediction.dim() < 2 else prediction.softmax(1)


class MetricAccumulator:
    """Loss and metrics of one lane in an evaluation."""

    def __init__(self, metrics: Mapping[str, Any], *, logits: bool) -> None:
        self.metrics = {name: copy.deepcopy(metric) for name, metric in metrics.items()}
        self.loss = torch.zeros((), dtype=torch.float64)
        self.count = torch.zeros((), dtype=torch.float64)
        self._logits = logits

    def state(self) -> dict[str, Any]:
        """The state that another process needs to merge it: tensors and numbers."""
        return {
            "loss": self.loss,
            "count": self.count,
            "metrics": {
                name: [
                    {"updates": part._update_count, "states": {key: getattr(part, key) for key in part._defaults}}
                    for part in _stateful_metrics(metric)
                ]
                for name, metric in self.metrics.items()
            },
        }

    def with_state(self, state: Mapping[str, Any]) -> MetricAccumulator:
        """An accumulator with the same metrics and the state of another process. LinkError if it is no such state."""
        other = MetricAccumulator(self.metrics, logits=self._logits)
        try:
            other.loss, other.count = _double(state["loss"]), _double(state["count"])
            for name, metric in other.metrics.items():
                for part, known in zip(_stateful_metrics(metric), state["metrics"][name], strict=True):
                    part._update_count, part._computed = int(known["updates"]), None
                    if known["states"].keys() != part._defaults.keys():  # they become attributes of the metric
                        raise ValueError(f"other states than those of {name}")
                    for key, value in known["states"].items():
                        setattr(part, key, _to_device(part.device, value))
        except (AttributeError, KeyError, TypeError, ValueError) as failure:
            raise LinkError(f"sent something that is no result of an evaluation: {failure!r:.200}") from failure
        return other

    def update(self, loss: Any, output: Any, batch: Any) -> None:
        total, count = loss if isinstance(loss, tuple) else (loss * batch.size, batch.size)
        self.loss += torch.as_tensor(total, device="cpu").double()
        self.count += torch.as_tensor(count, device="cpu").double()
        if not self.metrics:
            return
        raw, target = align_shapes(output, batch.target)
        if isinstance(raw, Tensor) and raw.is_floating_point():
            raw = raw.float()
        target = _integer_target(raw, target, batch.target)
        probabilities = to_probabilities(raw, target) if self._logits else raw
        for name, metric in self.metrics.items():
            try:
                metric.update(_prediction_for(metric, raw, probabilities), target)
            except (ValueError, RuntimeError, TypeError, IndexError) as failure:
                message, fix = f"{name}: {describe_exception(failure)}", ""
                if _compares_classes(metric) and isinstance(target, Tensor) and target.is_floating_point():
                    message = f"{name} compares classes, and the target is {target.dtype}".replace("torch.", "")
                    fix = "For numbers use mse, rmse, mae or r2; class numbers are int64."
                raise error("SH408", message, where="metrics", fix=fix) from failure


def _double(value: Any) -> Tensor:
    """ValueError if it is not one number."""
    if not isinstance(value, Tensor) or value.shape or value.dtype != torch.float64:
        raise ValueError("a sum that is not one number")
    return value


def _to_device(device: torch.device, value: Any) -> Any:
    return [part.to(device) for part in value] if isinstance(value, list) else value.to(device)


def _prediction_for(metric: Any, raw: Any, probabilities: Any) -> Any:
    """Probabilities for classification metrics; (n, t, classes) for text metrics, (n, classes, t) for all others."""
    module = type(metric).__module__
    if _compares_classes(metric):
        return probabilities
    if module.startswith("torchmetrics.text") and isinstance(raw, Tensor) and raw.dim() > 2:
        return raw.movedim(1, -1)
    return raw


def _compares_classes(metric: Any) -> bool:
    return type(metric).__module__.startswith("torchmetrics.classification")


def _integer_target(prediction: Any, target: Any, original: Any) -> Any:
    """Undo the conversion of binary targets to floats by `align_shapes`: metrics need integers."""
    was_whole = isinstance(original, Tensor) and not original.is_floating_point()
    return original.reshape(prediction.shape) if was_whole and target is not original else target


def merge_lanes(lanes: Sequence[MetricAccumulator]) -> dict[str, float]:
    """The result over all lanes, merged in lane order."""
    loss = sum((lane.loss for lane in lanes), torch.zeros((), dtype=torch.float64))
    count = sum((lane.count for lane in lanes), torch.zeros((), dtype=torch.float64))
    values = {"loss": float(loss / count)}
    for name in lanes[0].metrics:
        used = [lane.metrics[name] for lane in lanes if lane.metrics[name].update_called]
        values |= _scalars(name, _merged(used).compute())
    return values


def _merged(metrics: Sequence[Any]) -> Any:
    """One metric with the merged state of all, as torchmetrics merges the ranks of a process group.

    Its `merge_state` is not used: it refuses some metrics and weights means by the wrong counts.
    """
    if len(metrics) > 1:
        for parts in zip(*map(_stateful_metrics, metrics), strict=True):
            _merge_states(parts)
    return metrics[0]


def _merge_states(parts: Sequence[Any]) -> None:
    """Merge all states into the first."""
    total = parts[0]
    for name, reduce in total._reductions.items():
        states = [getattr(part, name) for part in parts]
        if isinstance(states[0], list):
            setattr(total, name, [one for state in states for one in state])
        else:
            stacked = torch.stack(states)
            setattr(total, name, reduce(stacked) if reduce else stacked)


def disable_distributed_sync(metric: Any) -> Any:
    """Without this, torchmetrics merges over torch's process group, if there is one, at every `compute`."""
    for part in _stateful_metrics(metric):
        part.distributed_available_fn = _not_distributed
    return metric


def _not_distributed() -> bool:
    return False


def _stateful_metrics(metric: Any) -> list[Any]:
    """The metric and the metrics that it wraps, each with its own states."""
    return [part for part in metric.modules() if hasattr(part, "_reductions")]


def _scalars(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, dict):
        return {f"{name}/{k}": float(v) for k, v in value.items()}
    if value.numel() == 1:
        return {name: float(value)}
    return {f"{name}/{i}": float(v) for i, v in enumerate(value.reshape(-1).tolist())}
