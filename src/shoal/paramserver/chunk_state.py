"""Converts between the state of a whole replica and the chunks that servers hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.state_tree import State
from shoal.lanes.flat_layout import FlatLayout, TensorRange, TensorSlot
from shoal.lanes.replica import Replica
from shoal.paramserver.optimizer_slices import OptimizerState, copy_state, is_slot, slice_state

_SCALARS = frozenset({"step", "mu_product", "mu", "eta"})
"""State that torch's optimizers keep once per parameter. The name decides if the parameter itself is a scalar;
otherwise the shape does."""


def param_group_indices(replica: Replica) -> list[int]:
    """The optimizer's group of each gradient; -1 for a parameter that the optimizer does not have."""
    groups = {id(p): i for i, group in enumerate(replica.optimizer.param_groups) for p in group["params"]}
    return [groups.get(id(parameter), -1) for parameter in replica.trainable]


def group_hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of each group, without the parameters."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


# ---- from a replica ----


@torch.no_grad()
def chunk_state_from_replica(
    replica: Replica, layout: FlatLayout, first: int, last: int, *, step: int = 0, lanes: int = 1
) -> State:
    """The state of the chunks [first, last) with which a server continues at `step` from the replica's state."""
    start, stop = layout.chunk_offsets[first], layout.chunk_offsets[last]
    content = torch.zeros(stop - start, dtype=torch.uint8)
    parts = layout.tensor_ranges(start, stop)
    for part in parts:
        flat = layout.grads[part.place].flatten(replica.trainable[part.place].detach())
        values = flat[slice(*_element_range(part, layout))].cpu()
        content[part.start - start : part.stop - start].copy_(values.view(torch.uint8))
    if stop > layout.tail:
        content[layout.tail - start :].copy_(_tail_bytes(replica, layout))
    slices = [{**part._asdict(), "state": _optimizer_state(replica, layout, part)} for part in parts]
    applied, term, seq = torch.zeros(3, last - first, dtype=torch.int64)
    applied += step
    clocks = torch.full((last - first, lanes), step, dtype=torch.int64)
    stamps = {"applied": applied, "clocks": clocks, "term": term, "seq": seq}
    how_applied = torch.zeros(last - first, 3, dtype=torch.float64)
    return {"parameters": content, "runs": slices, **stamps, "manner": how_applied}


def _element_range(tensor_range: TensorRange, layout: FlatLayout) -> tuple[int, int]:
    """The range's elements in its tensor, in memory order."""
    slot = layout.grads[tensor_range.place]
    size = slot.dtype.itemsize
    return (tensor_range.start - slot.start) // size, (tensor_range.stop - slot.start) // size


def _tail_bytes(replica: Replica, layout: FlatLayout) -> Tensor:
    """The replica's moving buffers, with a loss of zero."""
    flat_buffer = torch.empty(layout.size_bytes, dtype=torch.uint8)
    flat_buffer[layout.tail :] = 0
    views = layout.views(flat_buffer)
    float_buffers, int_buffers = replica.moving_buffers.templates()
    for view, value in zip(views.float_buffers + views.int_buffers, float_buffers + int_buffers, strict=True):
        view.copy_(value)
    return flat_buffer[layout.tail :]


def _optimizer_state(replica: Replica, layout: FlatLayout, tensor_range: TensorRange) -> OptimizerState:
    parameter, slot = replica.trainable[tensor_range.place], layout.grads[tensor_range.place]
    state = replica.optimizer.state.get(parameter, {})
    flat = {name: _flat_state_value(name, value, slot) for name, value in state.items()}
    return copy_state(slice_state(flat, *_element_range(tensor_range, layout)))


def _flat_state_value(name: str, value: Any, slot: TensorSlot) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape == slot.shape and (slot.shape or name not in _SCALARS):
        return slot.flatten(value.detach()).cpu()
    if value.dim():
        raise ValueError(f"the optimizer's {name!r} is not one number per element: it cannot be split into chunks")
    return value.detach().cpu()


# ---- to a replica ----


@torch.no_grad()
def load_chunk_states(replica: Replica, layout: FlatLayout, contents: Sequence[tuple[int, int, State]]) -> None:
    """Set the replica's parameters, optimizer state and moving buffers from the servers' chunks: all, each once.

    If slices of one tensor have had different numbers of updates, the scalars are those of its first slice. The
    schedule and the groups' options stay the replica's own.
    """
    ordered = sorted(contents, key=lambda content: content[0])
    if [0, *(last for _, last, _ in ordered)] != [*(first for first, _, _ in ordered), len(layout.chunk_offsets) - 1]:
        raise ValueError("not all chunks, each once")
    states: dict[int, OptimizerState] = {}
    for first, last, state in ordered:
        start, stop = layout.chunk_offsets[first], layout.chunk_offsets[last]
        for part in layout.tensor_ranges(start, stop):
            _write_parameter(replica, layout, part, state["parameters"][part.start - start : part.stop - start])
        for row in state["runs"]:
            part = TensorRange(*(row[name] for name in TensorRange._fields))
            _merge_optimizer_state(states.setdefault(part.place, {}), row["state"], layout, part)
    for index, parameter in enumerate(replica.trainable):
        _set_state(replica.optimizer, parameter, layout.grads[index], states.get(index, {}))
    flat_buffer = torch.empty(layout.size_bytes, dtype=torch.uint8)
    flat_buffer[layout.tail :] = ordered[-1][2]["parameters"][layout.tail - layout.size_bytes :]
    tail = layout.views(flat_buffer)
    replica.moving_buffers.assign(tail.float_buffers, tail.int_buffers)


def _write_parameter(replica: Replica, layout: FlatLayout, tensor_range: TensorRange, content: Tensor) -> None:
    """Write bytes into the parameter."""
    parameter, slot = replica.trainable[tensor_range.place], layout.grads[tensor_range.place]
    flat = slot.flatten(parameter.detach())
    flat[slice(*_element_range(tensor_range, layout))].copy_(content.view(slot.dtype))
    if flat.data_ptr() != parameter.data_ptr():  # the parameter has other strides, so `flat` is a copy
        parameter.copy_(slot.unflatten(flat))


def _merge_optimizer_state(
    whole: OptimizerState, state: OptimizerState, layout: FlatLayout, tensor_range: TensorRange
) -> None:
    """Merge a slice's state into the flat state of the whole tensor."""
    slot = layout.grads[tensor_range.place]
    for name, value in state.items():
        if is_slot(value):
            if name not in whole:
                whole[name] = torch.zeros(slot.size_bytes // slot.dtype.itemsize, dtype=value.dtype)
            whole[name][slice(*_element_range(tensor_range, layout))] = value
        else:
            whole.setdefault(name, value.clone() if isinstance(value, Tensor) else value)


def _set_state(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, slot: TensorSlot, state: OptimizerState
) -> None:
    """Set the state as torch keeps it: slots on the parameter's device, and scalars too if kernels need them there."""
    group = next((g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), None)
    if group is None or not state:
        optimizer.state.pop(parameter, None)
        return
    scalars_on_device = group.get("fused") or group.get("capturable")
    optimizer.state[parameter] = {
        name: slot.unflatten(value).to(parameter.device)
        if is_slot(value)
        else (value.to(parameter.device) if scalars_on_device and isinstance(value, Tensor) else value)
        for name, value in state.items()
    }
