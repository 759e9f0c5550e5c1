"""Between a whole replica and the chunks that servers hold: the same state, cut up or put together."""

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
"""What torch's optimizers keep once for a whole parameter. Told by name where the parameter itself is a single number
without dimensions; elsewhere the shape tells."""


def param_group_indices(replica: Replica) -> list[int]:
    """The optimizer's group of each gradient; -1 for a parameter that it does not have."""
    found = {id(p): i for i, group in enumerate(replica.optimizer.param_groups) for p in group["params"]}
    return [found.get(id(parameter), -1) for parameter in replica.trainable]


def group_hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of each group, without the parameters."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


# ---- from a replica ----


@torch.no_grad()
def chunk_state_from_replica(
    replica: Replica, layout: FlatLayout, first: int, last: int, *, step: int = 0, lanes: int = 1
) -> State:
    """What a server puts into the chunks [first, last) to go on at `step` from where the replica stands."""
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
    manner = torch.zeros(last - first, 3, dtype=torch.float64)
    return {"parameters": content, "runs": slices, **stamps, "manner": manner}


def _element_range(tensor_range: TensorRange, layout: FlatLayout) -> tuple[int, int]:
    """Which elements of its tensor a part has, as they lie."""
    place = layout.grads[tensor_range.place]
    size = place.dtype.itemsize
    return (tensor_range.start - place.start) // size, (tensor_range.stop - place.start) // size


def _tail_bytes(replica: Replica, layout: FlatLayout) -> Tensor:
    """The moving buffers as they are, and no loss."""
    stretch = torch.empty(layout.size_bytes, dtype=torch.uint8)
    stretch[layout.tail :] = 0
    there = layout.views(stretch)
    averaged, first = replica.moving_buffers.templates()
    for place, value in zip(there.float_buffers + there.int_buffers, averaged + first, strict=True):
        place.copy_(value)
    return stretch[layout.tail :]


def _optimizer_state(replica: Replica, layout: FlatLayout, tensor_range: TensorRange) -> OptimizerState:
    parameter, place = replica.trainable[tensor_range.place], layout.grads[tensor_range.place]
    state = replica.optimizer.state.get(parameter, {})
    flat = {name: _flat_state_value(name, value, place) for name, value in state.items()}
    return copy_state(slice_state(flat, *_element_range(tensor_range, layout)))


def _flat_state_value(name: str, value: Any, slot: TensorSlot) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape == slot.shape and (slot.shape or name not in _SCALARS):
        return slot.flatten(value.detach()).cpu()
    if value.dim():
        raise ValueError(f"the optimizer's {name!r} is not one number per element: it cannot be cut into chunks")
    return value.detach().cpu()


# ---- to a replica ----


@torch.no_grad()
def load_chunk_states(replica: Replica, layout: FlatLayout, contents: Sequence[tuple[int, int, State]]) -> None:
    """Set the replica's parameters, optimizer state and moving buffers to what servers hold: all chunks, each once.

    Where parts of one tensor have had different numbers of updates, the scalars are those of its first part. The
    schedule and the options of the groups are the replica's own matter.
    """
    ordered = sorted(contents, key=lambda it: it[0])
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
    for place, parameter in enumerate(replica.trainable):
        _set_state(replica.optimizer, parameter, layout.grads[place], states.get(place, {}))
    stretch = torch.empty(layout.size_bytes, dtype=torch.uint8)
    stretch[layout.tail :] = ordered[-1][2]["parameters"][layout.tail - layout.size_bytes :]
    tail = layout.views(stretch)
    replica.moving_buffers.assign(tail.float_buffers, tail.int_buffers)


def _write_parameter(replica: Replica, layout: FlatLayout, tensor_range: TensorRange, content: Tensor) -> None:
    """Bytes into the parameter."""
    parameter, place = replica.trainable[tensor_range.place], layout.grads[tensor_range.place]
    flat = place.flatten(parameter.detach())
    flat[slice(*_element_range(tensor_range, layout))].copy_(content.view(place.dtype))
    if flat.data_ptr() != parameter.data_ptr():  # a parameter with gaps: what was filled is a copy
        parameter.copy_(place.unflatten(flat))


def _merge_optimizer_state(
    whole: OptimizerState, state: OptimizerState, layout: FlatLayout, tensor_range: TensorRange
) -> None:
    """A run's state into that of the whole tensor, which is flat for now."""
    place = layout.grads[tensor_range.place]
    for name, value in state.items():
        if is_slot(value):
            if name not in whole:
                whole[name] = torch.zeros(place.size_bytes // place.dtype.itemsize, dtype=value.dtype)
            whole[name][slice(*_element_range(tensor_range, layout))] = value
        else:
            whole.setdefault(name, value.clone() if isinstance(value, Tensor) else value)


def _set_state(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, slot: TensorSlot, state: OptimizerState
) -> None:
    """As torch itself keeps it: slots beside the parameter, scalars too where kernels read them there."""
    group = next((g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), None)
    if group is None or not state:
        optimizer.state.pop(parameter, None)
        return
    beside = group.get("fused") or group.get("capturable")
    optimizer.state[parameter] = {
        name: slot.unflatten(value).to(parameter.device)
        if is_slot(value)
        else (value.to(parameter.device) if beside and isinstance(value, Tensor) else value)
        for name, value in state.items()
    }
