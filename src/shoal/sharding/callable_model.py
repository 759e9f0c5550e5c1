"""What cuts have in common whose model can be called as if it were all here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shoal.lanes.replica import LossFunction


class CallableShardedModel:
    """See Cut."""

    model: nn.Module

    def forward_backward(self, loss: LossFunction, batch: Any, share: float) -> tuple[Tensor, Tensor | None]:
        result = loss(self.model, batch)
        if isinstance(result, tuple):
            value, count = result
            counts = float(share > 0)
            value.backward(torch.tensor(counts, dtype=value.dtype))  # type: ignore[no-untyped-call]
            return value.detach().double() * counts, torch.as_tensor(count, dtype=torch.float64) * counts
        result.backward(torch.tensor(share, dtype=result.dtype))  # type: ignore[no-untyped-call]
        return result.detach().double() * share, None

    def owner(self, name: str) -> int:
        return 0

    @torch.no_grad()
    def forward(self, function: Callable[[nn.Module, Any], Any], batch: Any) -> Any:
        return function(self.model, batch)
