"""The outer optimizer of local SGD: all workers step along the mean change of the lanes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class OuterOptimizer:
    """Nesterov momentum, as in DiLoCo. With momentum 0 and learning rate 1 the lanes are averaged."""

    def __init__(self, like: Sequence[Tensor], *, lr: float = 1.0, momentum: float = 0.0) -> None:
        self._lr = lr
        self._momentum = momentum
        self._velocity = [torch.zeros_like(t) for t in like] if momentum else []

    @torch.no_grad()
    def step(self, values: Sequence[Tensor], pseudo_gradients: Sequence[Tensor], param_indices: Sequence[int]) -> None:
        """`pseudo_gradients` are the mean changes of the lanes, start minus end, for the tensors in `param_indices`."""
        chosen, by = [values[i] for i in param_indices], list(pseudo_gradients)
        if self._momentum:
            velocity = [self._velocity[i] for i in param_indices]
            torch._foreach_mul_(velocity, self._momentum)
            torch._foreach_add_(velocity, by)
            by = list(torch._foreach_add(by, velocity, alpha=self._momentum))
        torch._foreach_add_(chosen, by, alpha=-self._lr)

    def copy(self) -> list[Tensor]:
        return [t.clone() for t in self._velocity]

    def restore(self, copied: Sequence[Tensor]) -> None:
        for tensor, value in zip(self._velocity, copied, strict=True):
            tensor.copy_(value)

    def state(self) -> dict[str, Any]:
        return {"velocity": list(self._velocity)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.restore(state["velocity"])
