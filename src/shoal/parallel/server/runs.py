"""What an optimizer on a server sees: runs of one tensor's elements, each a flat parameter with a state of its own.

An optimizer that treats every element alone does to a run what it would do to the same elements of the whole tensor.
Its state is then one number per element (a slot), or one for all of them (a scalar, such as the count of steps).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from shoal.parallel.flat import Part

OptimizerState = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Run:
    """The bytes `part` of the parameters' `stretch`. `state` is the optimizer's, which changes it."""

    part: Part
    dtype: torch.dtype
    stretch: Tensor
    state: OptimizerState

    @cached_property
    def parameter(self) -> nn.Parameter:
        return nn.Parameter(self.of(self.stretch))

    def of(self, stretch: Tensor) -> Tensor:
        """The same bytes of another stretch."""
        return stretch[self.part.start : self.part.stop].view(self.dtype)

    def cut(self, start: int, stop: int) -> Run:
        """The run of only these bytes. Slots are shared with the whole; scalars are its own."""
        part = self.part._replace(start=start, stop=stop)
        size = self.dtype.itemsize
        places = (start - self.part.start) // size, (stop - self.part.start) // size
        return Run(part, self.dtype, self.stretch, state_between(self.state, *places))


def is_slot(value: Any) -> TypeGuard[Tensor]:
    """Of a run's state: is it one number per element?"""
    return isinstance(value, Tensor) and value.dim() > 0


def state_between(state: OptimizerState, start: int, stop: int) -> OptimizerState:
    """The state of the elements [start, stop)."""
    return {name: value[start:stop] if is_slot(value) else _own(value) for name, value in state.items()}


def own_state(state: OptimizerState) -> OptimizerState:
    """A copy that shares no memory."""
    return {name: _own(value) for name, value in state.items()}


def _own(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def why_unfit(state: Any, elements: int) -> str:
    """Why this cannot be the state of a run of so many elements; '' if it can."""
    if not isinstance(state, dict):
        return "no state"
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor | int | float | str | None):
            return f"a state with {name!r:.40} of type {type(value).__name__}"
        if is_slot(value) and value.shape != (elements,):
            return f"{name!r:.40} of shape {tuple(value.shape)} for {elements} elements"
    return ""


def merged(runs: Sequence[Run]) -> list[Run]:
    """The same in as few runs as possible: neighbours in one tensor whose scalars are equal become one."""
    rows: list[list[Run]] = [[run] for run in runs[:1]]
    for before, run in pairwise(runs):
        if _continues(before, run):
            rows[-1].append(run)
        else:
            rows.append([run])
    return [row[0] if len(row) == 1 else _joined(row) for row in rows]


def _continues(before: Run, run: Run) -> bool:
    if (before.part.place, before.part.stop) != (run.part.place, run.part.start):
        return False
    return before.state.keys() == run.state.keys() and all(
        _alike(value, run.state[name]) for name, value in before.state.items()
    )


def _alike(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and bool(a == b)
    return a.dtype == b.dtype and a.dim() == b.dim() and (is_slot(a) or torch.equal(a, b))


def _joined(row: list[Run]) -> Run:
    first = row[0]
    state = {
        name: torch.cat([run.state[name] for run in row]) if is_slot(value) else value
        for name, value in first.state.items()
    }
    return Run(first.part._replace(stop=row[-1].part.stop), first.dtype, first.stretch, state)
