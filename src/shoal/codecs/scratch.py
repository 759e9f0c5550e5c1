"""Memory that is kept from call to call: a fresh stretch costs more in page faults than the work done in it."""

from __future__ import annotations

import torch
from torch import Tensor


class ScratchBuffers:
    """Gives the same memory whenever the same name is asked for. For one thread."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def get(self, name: str, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """`count` elements that hold anything; valid until the name is asked for again."""
        key = (name, dtype, device)
        kept = self._buffers.get(key)
        if kept is None or kept.numel() < count:
            kept = self._buffers[key] = torch.empty(count, dtype=dtype, device=device)
        return kept[:count]
