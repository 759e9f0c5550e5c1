"""Losses with a weight for each sample: the sum of weighted losses and the sum of weights, which divides it once over
all lanes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal.errors import error
from shoal.tasks import losses

_FIX = (
    "Use a loss of torch.nn with reduction: mean, or write a Task: `batch.weight` has the weights, and its loss "
    "returns (sum, weight)."
)


def weighted_loss(loss: Any, output: Any, target: Any, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and weight. With equal weights their quotient is what `loss` returns. SH832 if the loss cannot say what each
    sample contributes."""
    each = _without_reduction(loss)
    with losses.explain_errors(loss, output, target):
        values = each(output, target)
    if not isinstance(values, Tensor) or not values.dim() or len(values) != len(weight):
        shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise error("SH832", f"the loss gives {shape} for {len(weight)} samples", where="loss", fix=_FIX)
    if values.dtype.itemsize < torch.float32.itemsize:
        values = values.float()  # a sum of 16-bit numbers soon overflows
    values, weight = values.reshape(len(weight), -1), weight.to(values.device)
    class_loss = losses.class_loss_of(loss)
    if class_loss is None or target.is_floating_point():
        return (values.mean(1) * weight.to(values.dtype)).sum(), weight.double().sum()
    divisors = losses.target_weights(class_loss, target).reshape(len(weight), -1)
    # In samples, so that a sample of many targets weighs as much as in the plain mean.
    total = (values.sum(1) * weight.to(values.dtype)).sum() / values.shape[1]
    return total, (divisors.sum(1) * weight.double()).sum() / values.shape[1]


def _without_reduction(loss: Any) -> Callable[[Any, Any], Any]:
    """The loss of every element."""
    if losses.is_torch_loss(loss) and getattr(loss, "reduction", None) == "mean":
        each: nn.Module = copy.copy(loss)
        each.reduction = "none"  # type: ignore[assignment]
        return each
    function, args = (loss.func, loss.keywords) if isinstance(loss, functools.partial) else (loss, {})
    if getattr(function, "__module__", None) == functional.__name__ and args.get("reduction", "mean") == "mean":
        return functools.partial(function, **{**args, "reduction": "none"})
    name = getattr(function, "__name__", type(loss).__name__)
    raise error("SH832", f"data.weight is set, and '{name}' gives one number for all samples", where="loss", fix=_FIX)
