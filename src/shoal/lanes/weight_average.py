"""Weights that are evaluated and exported instead of those that are trained.

An average over steps (EMA, SWA), or the evaluation mode of an optimizer that has one (schedule-free). Training goes on
with the very bits that it had: an evaluation is no part of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn


class WeightAverage:
    """The average of what training changes: parameters that are not frozen, and buffers. What is no floating-point
    number is copied."""

    def __init__(self, model: nn.Module, *, kind: Literal["ema", "swa"], decay: float, start: int, every: int) -> None:
        self._model = model
        self._kind, self._decay, self._start, self._every = kind, decay, start, every
        self._values: dict[str, Tensor] = {}
        self._count = 0

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Called after the update of each step."""
        since = step + 1 - self._start
        if since < 0 or since % self._every:
            return
        self._count += 1
        weight = 1.0 - self._decay if self._kind == "ema" else 1.0 / self._count
        for name, value in _trained(self._model).items():
            if self._count > 1 and value.is_floating_point():
                self._values[name].lerp_(value, weight)
            else:
                self._values[name] = value.detach().clone()

    @property
    def values(self) -> dict[str, Tensor]:
        """The average by name; empty before the first update."""
        return self._values

    def state(self) -> dict[str, Any]:
        return {"count": self._count, "values": self._values}

    def load_state(self, state: dict[str, Any]) -> None:
        self._count = state["count"]
        own, values = _trained(self._model), state["values"]
        self._values = {name: values[name].to(own[name].device, copy=True) for name in values if name in own}


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer has other weights for evaluation: `train()` and `eval()`."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


@contextlib.contextmanager
def evaluation_weights(
    model: nn.Module, optimizer: torch.optim.Optimizer, average: WeightAverage | None
) -> Iterator[None]:
    """A block in which the model has the weights to evaluate. Afterwards it has the bits that it had before."""
    averaged = average.values if average else {}
    if not averaged and not has_modes(optimizer):
        yield
        return
    before = {name: value.detach().clone() for name, value in tensors_of(model).items()}
    if averaged:
        assign(model, averaged)
    else:
        optimizer.eval()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if not averaged:
            optimizer.train()  # type: ignore[attr-defined]  # back and forth rounds: the bits come from the copy
        assign(model, before)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, also those that state_dict() leaves out."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _trained(model: nn.Module) -> dict[str, Tensor]:
    """Those that are not frozen."""
    every = tensors_of(model).items()
    return {name: value for name, value in every if value.requires_grad or not isinstance(value, nn.Parameter)}


@torch.no_grad()
def assign(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    own = tensors_of(model)
    for name, value in values.items():
        own[name].copy_(value)
