"""An optimizer that makes neurons die: group shrinkage after every update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class ProximalAdam(torch.optim.Adam):
    """Adam, followed by the proximal step of a group lasso on the rows of every matrix or kernel.

    A row (the incoming weights of one neuron or channel) is shortened by `lr * shrink`, to zero if it is not longer.
    The last matrix has one row per output of the model and is left alone. The rate is that of the moment, so a schedule
    lowers the shrinkage too. Rows belong to one tensor, so parameter servers, which cut tensors, cannot use it.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, shrink: float = 1.0, **options: Any) -> None:
        if shrink < 0:
            raise ValueError(f"a shrinkage of {shrink} is below 0")
        super().__init__(params, lr=lr, **options)
        self.shrink = shrink
        matrices = [p for group in self.param_groups for p in group["params"] if p.dim() > 1]
        self._last = matrices[-1] if matrices else None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        found = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.dim() > 1 and parameter is not self._last:
                        _shorten_rows(parameter, float(group["lr"]) * self.shrink)
        return found


def _shorten_rows(weight: Tensor, by: float) -> None:
    rows = weight.flatten(1)
    length = rows.norm(dim=1, keepdim=True)
    rows.mul_((1 - by / length.clamp(min=1e-30)).clamp(min=0))
