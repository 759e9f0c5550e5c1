"""The parameters of a server's optimizer: slices of tensors, each a flat parameter with its own optimizer state.

An elementwise optimizer updates a slice exactly as it would update these elements of the whole tensor. Its state is one
number per element (a slot) or one for all elements (a scalar, such as the step count).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from shoal.lanes.flat_layout import TensorRange

OptimizerState = dict[str, Any]


@dataclass(frozen=True, eq=False)
class OptimizerSlice:
    """The bytes `tensor_range` of the parameters' `flat_buffer`. The optimizer changes `state`."""

    tensor_range: TensorRange
    dtype: torch.dtype
    flat_buffer: Tensor
    state: OptimizerState

    @cached_property
    def parameter(self) -> nn.Parameter:
        return nn.Parameter(self.view_in(self.flat_buffer))

    def view_in(self, flat_buffer: Tensor) -> Tensor:
        """The same bytes of another flat buffer."""
        return flat_buffer[self.tensor_range.start : self.tensor_range.stop].view(self.dtype)

    def narrow(self, start: int, stop: int) -> OptimizerSlice:
        """The slice of only these bytes. Slots share memory with this slice; scalars are copied."""
        tensor_range = self.tensor_range._replace(start=start, stop=stop)
        size = self.dtype.itemsize
        elements = (start - self.tensor_range.start) // size, (stop - self.tensor_range.start) // size
        return OptimizerSlice(tensor_range, self.dtype, self.flat_buffer, slice_state(self.state, *elements))


def is_slot(value: Any) -> TypeGuard[Tensor]:
    """Whether a value of a slice's state has one number per element."""
    return isinstance(value, Tensor) and value.dim() > 0


def slice_state(state: OptimizerState, start: int, stop: int) -> OptimizerState:
    """The state of the elements [start, stop)."""
    return {name: value[start:stop] if is_slot(value) else _copy_value(value) for name, value in state.items()}


def copy_state(state: OptimizerState) -> OptimizerState:
    """A copy that shares no memory."""
    return {name: _copy_value(value) for name, value in state.items()}


def _copy_value(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def why_unfit(state: Any, elements: int) -> str:
    """Why this cannot be the state of a slice with this many elements; '' if it can."""
    if not isinstance(state, dict):
        return "no state"
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor | int | float | str | None):
            return f"a state with {name!r:.40} of type {type(value).__name__}"
        if is_slot(value) and value.shape != (elements,):
            return f"{name!r:.40} of shape {tuple(value.shape)} for {elements} elements"
    return ""


def merge_slices(slices: Sequence[OptimizerSlice]) -> list[OptimizerSlice]:
    """The same in as few slices as possible: neighbours in one tensor with equal scalars become one."""
    groups: list[list[OptimizerSlice]] = [[part] for part in slices[:1]]
    for previous, optimizer_slice in pairwise(slices):
        if _can_merge(previous, optimizer_slice):
            groups[-1].append(optimizer_slice)
        else:
            groups.append([optimizer_slice])
    return [group[0] if len(group) == 1 else _concatenate(group) for group in groups]


def _can_merge(previous: OptimizerSlice, optimizer_slice: OptimizerSlice) -> bool:
    if (previous.tensor_range.place, previous.tensor_range.stop) != (
        optimizer_slice.tensor_range.place,
        optimizer_slice.tensor_range.start,
    ):
        return False
    return previous.state.keys() == optimizer_slice.state.keys() and all(
        _alike(value, optimizer_slice.state[name]) for name, value in previous.state.items()
    )


def _alike(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and bool(a == b)
    return a.dtype == b.dtype and a.dim() == b.dim() and (is_slot(a) or torch.equal(a, b))


def _concatenate(slices: list[OptimizerSlice]) -> OptimizerSlice:
    first = slices[0]
    state = {
        name: torch.cat([part.state[name] for part in slices]) if is_slot(value) else value
        for name, value in first.state.items()
    }
    return OptimizerSlice(
        first.tensor_range._replace(stop=slices[-1].tensor_range.stop), first.dtype, first.flat_buffer, state
    )
