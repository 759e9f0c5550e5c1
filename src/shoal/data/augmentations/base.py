"""What all augmentations share: the first input of a batch, checked arguments, and draws from a generator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor

from shoal.data.batch import Batch
from shoal.errors import ShoalError, error


class Augmentation:
    """Changes the first input of a batch; other inputs and the target stay as they are.

    Subclasses say what they take in `takes` and override `apply`, or `__call__` if they change the target too.
    """

    takes = "numbers"
    least_dims, most_dims = 1, 99
    takes_floats = True

    def __call__(self, batch: Batch, *, generator: Generator) -> Batch:
        return with_input(batch, self.apply(self.checked_input(batch), generator))

    def apply(self, x: Tensor, generator: Generator) -> Tensor:
        raise NotImplementedError

    def checked_input(self, batch: Batch) -> Tensor:
        """The first input. SH720 if it is not what this augmentation takes."""
        value = batch.inputs[0] if batch.inputs else None
        if not isinstance(value, Tensor):
            raise self.misfit(f"an input of type {type(value).__name__}")
        if value.is_floating_point() != self.takes_floats or not self.least_dims <= value.dim() <= self.most_dims:
            raise self.misfit(f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}")
        return value

    def misfit(self, what: str, *, fix: str = "") -> ShoalError:
        name = type(self).__name__
        return error("SH720", f"{name} takes {self.takes}, and gets {what}", where="data.augment", fix=fix)


def with_input(batch: Batch, x: Tensor) -> Batch:
    return replace(batch, inputs=(x, *batch.inputs[1:]))


def number(value: Any, name: str, *, low: float = 0.0, high: float = float("inf")) -> float:
    """The argument as a number in a range; SH205 otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        bounds = f"from {low:g} to {high:g}" if high < float("inf") else f"of at least {low:g}"
        raise error("SH205", f"'{name}' is {value!r}, not a number {bounds}", where="data.augment")
    return float(value)


def pair(value: Any, name: str, *, low: float = 0.0, high: float = float("inf")) -> tuple[float, float]:
    """The argument as two numbers in order. One number stands for both if it is written alone."""
    both = value if isinstance(value, Sequence) and not isinstance(value, str) else [value, value]
    if len(both) != 2:
        raise error("SH205", f"'{name}' is {value!r}, not two numbers", where="data.augment")
    first, second = (number(one, name, low=low, high=high) for one in both)
    return first, second


def size_of(value: Any, name: str) -> tuple[int, int]:
    """The argument as height and width; SH205 if they are not whole numbers of at least 1."""
    height, width = pair(value, name, low=1)
    if not (height.is_integer() and width.is_integer()):
        raise error("SH205", f"'{name}' is {value!r}, not whole numbers", where="data.augment")
    return int(height), int(width)


def range_around(
    value: Any, name: str, *, center: float, low: float, high: float = float("inf")
) -> tuple[float, float]:
    """torchvision's way: a number v means from center - v to center + v, two numbers are the range itself."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return max(center - number(value, name, high=high - center), low), center + value
    return pair(value, name, low=low, high=high)


def uniform(shape: Sequence[int], low: float, high: float, generator: Generator) -> Tensor:
    return torch.rand(tuple(shape), generator=generator) * (high - low) + low


def chosen(count: int, p: float, generator: Generator) -> Tensor:
    """Which of `count` samples are changed: each with probability p."""
    return torch.rand(count, generator=generator) < p


def per_sample(values: Tensor, x: Tensor) -> Tensor:
    """One value for each sample, in a shape that is broadcast over x and in its dtype."""
    if values.dtype is not torch.bool:
        values = values.to(x.dtype)
    return values.reshape(-1, *[1] * (x.dim() - 1))
