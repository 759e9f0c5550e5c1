"""`cuts: auto`: stretches of equal cost, by the bytes of their parameters and the time that they take."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.errors import error
from shoal.lanes.replica import LossFunction
from shoal.sharding.deferred_init import named_tensors
from shoal.sharding.device_mesh import ShardMesh, broadcast
from shoal.sharding.pipeline_schedule import (
    ForwardTrace,
    balanced_partition,
    split_candidates,
    trace_forward,
    unit_costs,
)

TIMED_PASSES = 3


def auto_split_points(
    model: nn.Module, mesh: ShardMesh, loss: LossFunction, example: Any
) -> tuple[list[str], ForwardTrace]:
    """Of a model without memory. One member measures, so that all cut alike."""
    calls: dict[str, Any] = {}
    trace = trace_with_inputs(model, loss, example, calls)
    names = split_candidates(model, trace)
    if len(names) < mesh.replica_size - 1:
        fix = "Name modules under `shard.cuts`, ask for a smaller `shard.size`, or use `shard: fsdp`."
        raise error("SH405", f"the model has only {len(names)} places to cut", where="shard.cuts", fix=fix)
    times = torch.zeros(len(names) + 1, dtype=torch.float64)
    if mesh.replica_rank == mesh.shard_rank == 0:
        times[1:] = torch.tensor(forward_seconds(model, names, calls), dtype=torch.float64)
    broadcast([times], 0, torch.distributed.group.WORLD)  # type: ignore[arg-type]
    starts = balanced_partition(unit_costs(stage_bytes(model, trace, names), times.tolist()), mesh.replica_size)
    return [names[start - 1] for start in starts], trace


def trace_with_inputs(
    model: nn.Module, loss: LossFunction, example: Any, module_inputs: dict[str, Any]
) -> ForwardTrace:
    """A survey, with the arguments of each module's call."""
    hooks = []
    for name, module in model.named_modules():

        def note(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            module_inputs[name] = (args, kwargs)

        hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))
    try:
        return trace_forward(model, lambda: loss(model, example))
    finally:
        for hook in hooks:
            hook.remove()


def stage_bytes(model: nn.Module, trace: ForwardTrace, names: Sequence[str]) -> list[int]:
    """What each stretch holds if the model is cut everywhere: before the first of these modules, and from each on."""
    tensors = named_tensors(model)
    sizes = [0] * (len(names) + 1)
    for name, stages in trace.stages_of(names).items():
        for stage in stages:
            sizes[stage] += tensors[name].nbytes
    return sizes


def forward_seconds(model: nn.Module, names: Sequence[str], module_inputs: dict[str, Any]) -> list[float]:
    """How long each of these modules takes forward, alone on this machine; those that look alike are measured once."""
    known: dict[str, float] = {}
    found = []
    for name in names:
        module = model.get_submodule(name)
        looks = f"{module} {pytree.tree_map(_shape_signature, module_inputs[name])}"
        if looks not in known:
            known[looks] = _time_forward(module, *module_inputs[name])
        found.append(known[looks])
    return found


def _shape_signature(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf


@torch.no_grad()
def _time_forward(module: nn.Module, args: Any, kwargs: Any) -> float:
    trial = copy.deepcopy(module).to_empty(device="cpu")
    for tensor in [*trial.parameters(), *trial.buffers()]:
        tensor.zero_()
    args, kwargs = pytree.tree_map(_zeros_like, (args, kwargs))
    generator = torch.get_rng_state()
    best = float("inf")
    for _ in range(TIMED_PASSES):
        begun = time.perf_counter()
        trial(*args, **kwargs)
        best = min(best, time.perf_counter() - begun)
    torch.set_rng_state(generator)
    return best


def _zeros_like(leaf: Any) -> Any:
    return torch.zeros_like(leaf, device="cpu", requires_grad=False) if isinstance(leaf, Tensor) else leaf
