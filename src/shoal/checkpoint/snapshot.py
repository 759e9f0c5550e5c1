"""The moment of a save: the state as it is now, copied out of training's way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.tree import Skeleton


@dataclass(frozen=True)
class Snapshot:
    """A state that nobody changes until it is written."""

    step: int
    metric: float | None
    tensors: Mapping[str, Tensor]
    tree: Skeleton
    info: Mapping[str, Any] = field(default_factory=dict)


class HostBuffers:
    """Memory for one snapshot. It is kept, since the page faults of fresh memory cost more than the copy."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def fill(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Contiguous copies on the host, good until the next call. Tied tensors are copied once."""
        copies: dict[str, Tensor] = {}
        owned: dict[str, Tensor] = {}
        done: dict[tuple[Any, ...], Tensor] = {}
        for name, tensor in tensors.items():
            memory = _memory(tensor)
            if memory not in done:
                done[memory] = owned[name] = self._buffer(name, tensor).copy_(tensor.detach())
            copies[name] = done[memory]
        self._buffers = owned
        return copies

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        old = self._buffers.get(name)
        if old is not None and old.dtype == like.dtype and old.shape == like.shape:
            return old
        return torch.empty(like.shape, dtype=like.dtype)


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for two tensors only if they are the same view of the same memory."""
    place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    return (*place, tensor.is_conj(), tensor.is_neg())
