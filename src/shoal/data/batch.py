"""What the model and the loss get: `loss(model(*batch.inputs), batch.target)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """`size` samples. Inputs and target are tensors, or what a dataset gave: dicts, lists, tuples of them."""

    inputs: tuple[Any, ...]
    target: Any
    size: int

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin(self) -> Batch:
        """In page-locked memory, from where `to(..., non_blocking=True)` copies beside the computation."""
        return self._each(Tensor.pin_memory)

    def _each(self, act: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(tuple(_map(value, act) for value in self.inputs), _map(self.target, act), self.size)


def _map(value: Any, act: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return act(value)
    if isinstance(value, dict):
        return {key: _map(part, act) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(part, act) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(_map(part, act) for part in value)
    return value
