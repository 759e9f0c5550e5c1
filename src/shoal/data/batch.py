"""A batch, the input of model and loss: `loss(model(*batch.inputs), batch.target)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

IGNORED_LABEL = -100
"""A label that no loss counts, as torch's `ignore_index` and the models of Hugging Face have it."""


@dataclass(frozen=True, slots=True)
class Batch:
    """`size` samples. Inputs and target are tensors, or dicts, lists and tuples of tensors from a dataset. `weight` is
    the weight of each sample in the loss, if the job has weights."""

    inputs: tuple[Any, ...]
    target: Any
    size: int
    weight: Tensor | None = None

    def __iter__(self) -> Iterator[Any]:
        """`x, y = batch`, as loops over a DataLoader have it."""
        return iter((*self.inputs, self.target))

    def __getitem__(self, place: int | str) -> Any:
        """`batch[0]`, or an entry of a batch of named entries: `batch["input_ids"]`."""
        return self.inputs[0][place] if isinstance(place, str) else (*self.inputs, self.target)[place]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin(self) -> Batch:
        """A copy in page-locked memory, from which `to(..., non_blocking=True)` copies during computation."""
        return self.map_tensors(lambda tensor: tensor.pin_memory())

    def chunk(self, count: int) -> list[Batch]:
        """The samples as `count` batches in order, or fewer if there are fewer samples. A value without one row per
        sample goes into every batch."""
        count = max(min(count, self.size), 1)
        cuts = [self.size * i // count for i in range(count + 1)]
        return [self._slice(first, last) for first, last in pairwise(cuts)]

    def _slice(self, first: int, last: int) -> Batch:
        def act(tensor: Tensor) -> Tensor:
            return tensor[first:last] if tensor.dim() and len(tensor) == self.size else tensor

        return replace(self.map_tensors(act), size=last - first)

    def map_tensors(self, act: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(
            tuple(_map_nested(value, act) for value in self.inputs),
            _map_nested(self.target, act),
            self.size,
            _map_nested(self.weight, act),
        )


def _map_nested(value: Any, act: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return act(value)
    if isinstance(value, dict):
        return {key: _map_nested(part, act) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map_nested(part, act) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(_map_nested(part, act) for part in value)
    return value
