"""The factor that keeps small gradients of float16 forward passes above zero.

Lanes multiply their losses by it before backward. The sum over all lanes is divided by it, and every replica decides
from that sum whether it is finite: so all of them skip the same updates and have the same scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

INITIAL = 2.0**16
GROWTH, BACKOFF = 2.0, 0.5


class LossScale:
    """A power of two: scaling changes no bit of a gradient that is neither too large nor too small.

    It is halved at an update that would not be finite, and doubled after `growth_interval` updates that were, like
    torch's GradScaler.
    """

    def __init__(self, initial: float = INITIAL, *, growth_interval: int = 2000) -> None:
        self.scale = initial
        self._growth_interval = growth_interval
        self._finite_updates = 0

    @torch.no_grad()
    def unscale(self, grads: list[Tensor]) -> None:
        torch._foreach_mul_(grads, 1.0 / self.scale)

    def accept(self, grads: list[Tensor]) -> bool:
        """Whether these gradients may update the weights. Adapts the scale."""
        finite = all(bool(torch.isfinite(norm)) for norm in torch._foreach_norm(grads, float("inf")))
        self._finite_updates = self._finite_updates + 1 if finite else 0
        if not finite:
            self.scale *= BACKOFF
        elif self._finite_updates == self._growth_interval:
            self.scale, self._finite_updates = self.scale * GROWTH, 0
        return finite

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale, "finite_updates": self._finite_updates}

    def load_state(self, state: dict[str, Any]) -> None:
        self.scale, self._finite_updates = state["scale"], state["finite_updates"]
