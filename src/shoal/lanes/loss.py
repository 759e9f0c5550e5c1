"""What a loss function returns: the mean over a batch's samples, or a sum and the weight that divides it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import error

# The mean over the batch's samples, or (sum, weight); weights are summed over all lanes before they divide.
Loss = Tensor | tuple[Tensor, Tensor | float | int]
LossFunction = Callable[[nn.Module, Any], Loss]

_RETURN = "Return one number that depends on the model: the mean over the batch, or a pair (sum, weight)."


def split_loss(result: Any) -> tuple[Tensor, Tensor | None]:
    """The value to differentiate, and the weight as float64 if it is a pair. SH402 if it is anything else."""
    value, weight = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        raise error("SH402", f"the loss returns {_describe(value)}, not one number", where="loss", fix=_RETURN)
    if torch.is_grad_enabled() and not value.requires_grad:
        message = "the loss does not depend on a parameter that may change"
        fix = "Compute it from the model's output, without detach(), item(), numpy or no_grad()."
        raise error("SH402", message, where="loss", fix=fix)
    value = value.reshape(()) if value.dim() else value
    return value, None if weight is None else _checked_weight(weight, value.device)


def _checked_weight(weight: Any, device: torch.device) -> Tensor:
    if isinstance(weight, Tensor) and weight.requires_grad:
        message = "the weight of the loss depends on the model, and its gradient would be lost"
        raise error("SH402", message, where="loss", fix="Compute the weight from the batch, or detach() it.")
    if not isinstance(weight, Tensor | float | int) or (isinstance(weight, Tensor) and weight.numel() != 1):
        message = f"the loss returns {_describe(weight)} as its weight, not one number"
        raise error("SH402", message, where="loss", fix=_RETURN)
    on_host = not isinstance(weight, Tensor) or weight.device.type == "cpu"  # reading another device would wait for it
    if on_host and not 0 <= float(weight) < math.inf:
        message = f"the loss returns {float(weight)} as its weight"
        raise error("SH402", message, where="loss", fix="Return a finite weight of at least 0: what divides the sum.")
    return torch.as_tensor(weight, dtype=torch.float64, device=device).reshape(()).clone()


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"{len(value)} values" if isinstance(value, tuple) else f"an object of type {type(value).__name__}"
