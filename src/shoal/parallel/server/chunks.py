"""Between a whole replica and the chunks that servers hold: the same state, cut up or put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint.tree import State
from shoal.parallel.flat import Layout, Part, Place
from shoal.parallel.replica import Replica
from shoal.parallel.server.runs import OptimizerState, is_slot, own_state, state_between

_SCALARS = frozenset({"step", "mu_product", "mu", "eta"})
"""What torch's optimizers keep once for a whole parameter. Told by name where the parameter itself is a single number
without dimensions; elsewhere the shape tells."""


def groups_of(replica: Replica) -> list[int]:
    """The optimizer's group of each gradient; -1 for a parameter that it does not have."""
    found = {id(p): i for i, group in enumerate(replica.optimizer.param_groups) for p in group["params"]}
    return [found.get(id(parameter), -1) for parameter in replica.trainable]


def hyper_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of each group, without the parameters."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


# ---- from a replica ----


@torch.no_grad()
def scatter(replica: Replica, layout: Layout, first: int, last: int, *, step: int = 0, lanes: int = 1) -> State:
    """What a server puts into the chunks [first, last) to go on at `step` from where the replica stands."""
    start, stop = layout.cuts[first], layout.cuts[last]
    content = torch.zeros(stop - start, dtype=torch.uint8)
    parts = layout.parts(start, stop)
    for part in parts:
        flat = layout.grads[part.place].flat(replica.trainable[part.place].detach())
        values = flat[slice(*_elements(part, layout))].cpu()
        content[part.start - start : part.stop - start].copy_(values.view(torch.uint8))
    if stop > layout.tail:
        content[layout.tail - start :].copy_(_tail(replica, layout))
    runs = [{**part._asdict(), "state": _state_of(replica, layout, part)} for part in parts]
    applied, term, seq = torch.zeros(3, last - first, dtype=torch.int64)
    applied += step
    clocks = torch.full((last - first, lanes), step, dtype=torch.int64)
    stamps = {"applied": applied, "clocks": clocks, "term": term, "seq": seq}
    manner = torch.zeros(last - first, 3, dtype=torch.float64)
    return {"parameters": content, "runs": runs, **stamps, "manner": manner}


def _elements(part: Part, layout: Layout) -> tuple[int, int]:
    """Which elements of its tensor a part has, as they lie."""
    place = layout.grads[part.place]
    size = place.dtype.itemsize
    return (part.start - place.start) // size, (part.stop - place.start) // size


def _tail(replica: Replica, layout: Layout) -> Tensor:
    """The moving buffers as they are, and no loss."""
    stretch = torch.empty(layout.size_bytes, dtype=torch.uint8)
    stretch[layout.tail :] = 0
    there = layout.views(stretch)
    averaged, first = replica.moving.blank()
    for place, value in zip(there.averaged + there.first, averaged + first, strict=True):
        place.copy_(value)
    return stretch[layout.tail :]


def _state_of(replica: Replica, layout: Layout, part: Part) -> OptimizerState:
    parameter, place = replica.trainable[part.place], layout.grads[part.place]
    state = replica.optimizer.state.get(parameter, {})
    flat = {name: _flat(name, value, place) for name, value in state.items()}
    return own_state(state_between(flat, *_elements(part, layout)))


def _flat(name: str, value: Any, place: Place) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape == place.shape and (place.shape or name not in _SCALARS):
        return place.flat(value.detach()).cpu()
    if value.dim():
        raise ValueError(f"the optimizer's {name!r} is not one number per element: it cannot be cut into chunks")
    return value.detach().cpu()


# ---- to a replica ----


@torch.no_grad()
def collect(replica: Replica, layout: Layout, contents: Sequence[tuple[int, int, State]]) -> None:
    """Set the replica's parameters, optimizer state and moving buffers to what servers hold: all chunks, each once.

    Where parts of one tensor have had different numbers of updates, the scalars are those of its first part. The
    schedule and the options of the groups are the replica's own matter.
    """
    ordered = sorted(contents, key=lambda it: it[0])
    if [0, *(last for _, last, _ in ordered)] != [*(first for first, _, _ in ordered), len(layout.cuts) - 1]:
        raise ValueError("not all chunks, each once")
    states: dict[int, OptimizerState] = {}
    for first, last, state in ordered:
        start, stop = layout.cuts[first], layout.cuts[last]
        for part in layout.parts(start, stop):
            _fill(replica, layout, part, state["parameters"][part.start - start : part.stop - start])
        for row in state["runs"]:
            part = Part(*(row[name] for name in Part._fields))
            _gather(states.setdefault(part.place, {}), row["state"], layout, part)
    for place, parameter in enumerate(replica.trainable):
        _set_state(replica.optimizer, parameter, layout.grads[place], states.get(place, {}))
    stretch = torch.empty(layout.size_bytes, dtype=torch.uint8)
    stretch[layout.tail :] = ordered[-1][2]["parameters"][layout.tail - layout.size_bytes :]
    tail = layout.views(stretch)
    replica.moving.set(tail.averaged, tail.first)


def _fill(replica: Replica, layout: Layout, part: Part, content: Tensor) -> None:
    """Bytes into the parameter."""
    parameter, place = replica.trainable[part.place], layout.grads[part.place]
    flat = place.flat(parameter.detach())
    flat[slice(*_elements(part, layout))].copy_(content.view(place.dtype))
    if flat.data_ptr() != parameter.data_ptr():  # a parameter with gaps: what was filled is a copy
        parameter.copy_(place.shaped(flat))


def _gather(whole: OptimizerState, state: OptimizerState, layout: Layout, part: Part) -> None:
    """A run's state into that of the whole tensor, which is flat for now."""
    place = layout.grads[part.place]
    for name, value in state.items():
        if is_slot(value):
            if name not in whole:
                whole[name] = torch.zeros(place.size_bytes // place.dtype.itemsize, dtype=value.dtype)
            whole[name][slice(*_elements(part, layout))] = value
        else:
            whole.setdefault(name, value.clone() if isinstance(value, Tensor) else value)


def _set_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, place: Place, state: OptimizerState) -> None:
    """As torch itself keeps it: slots beside the parameter, scalars too where kernels read them there."""
    group = next((g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), None)
    if group is None or not state:
        optimizer.state.pop(parameter, None)
        return
    beside = group.get("fused") or group.get("capturable")
    optimizer.state[parameter] = {
        name: place.shaped(value).to(parameter.device)
        if is_slot(value)
        else (value.to(parameter.device) if beside and isinstance(value, Tensor) else value)
        for name, value in state.items()
    }
