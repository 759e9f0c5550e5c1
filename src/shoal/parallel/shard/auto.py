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
from shoal.parallel.replica import LossFunction
from shoal.parallel.shard.blueprint import named_tensors
from shoal.parallel.shard.grid import Grid, take_from
from shoal.parallel.shard.stages import Survey, balanced, cost, survey, units

PASSES = 3


def auto_cuts(model: nn.Module, grid: Grid, loss: LossFunction, example: Any) -> tuple[list[str], Survey]:
    """Of a model without memory. One member measures, so that all cut alike."""
    calls: dict[str, Any] = {}
    seen = watched(model, loss, example, calls)
    names = units(model, seen)
    if len(names) < grid.ways - 1:
        fix = "Name modules under `shard.cuts`, ask for fewer ways, or use `shard: fsdp`."
        raise error("SH405", f"the model has only {len(names)} places to cut", where="shard.cuts", fix=fix)
    times = torch.zeros(len(names) + 1, dtype=torch.float64)
    if grid.row == grid.seat == 0:
        times[1:] = torch.tensor(seconds(model, names, calls), dtype=torch.float64)
    take_from([times], 0, torch.distributed.group.WORLD)  # type: ignore[arg-type]
    starts = balanced(cost(size_bytes(model, seen, names), times.tolist()), grid.ways)
    return [names[start - 1] for start in starts], seen


def watched(model: nn.Module, loss: LossFunction, example: Any, calls: dict[str, Any]) -> Survey:
    """A survey, with the arguments of each module's call."""
    hooks = []
    for name, module in model.named_modules():

        def note(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            calls[name] = (args, kwargs)

        hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))
    try:
        return survey(model, lambda: loss(model, example))
    finally:
        for hook in hooks:
            hook.remove()


def size_bytes(model: nn.Module, seen: Survey, names: Sequence[str]) -> list[int]:
    """What each stretch holds if the model is cut everywhere: before the first of these modules, and from each on."""
    tensors = named_tensors(model)
    sizes = [0] * (len(names) + 1)
    for name, stages in seen.stages_of(names).items():
        for stage in stages:
            sizes[stage] += tensors[name].nbytes
    return sizes


def seconds(model: nn.Module, names: Sequence[str], calls: dict[str, Any]) -> list[float]:
    """How long each of these modules takes forward, alone on this machine; those that look alike are measured once."""
    known: dict[str, float] = {}
    found = []
    for name in names:
        module = model.get_submodule(name)
        looks = f"{module} {pytree.tree_map(_shape, calls[name])}"
        if looks not in known:
            known[looks] = _measure(module, *calls[name])
        found.append(known[looks])
    return found


def _shape(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf


@torch.no_grad()
def _measure(module: nn.Module, args: Any, kwargs: Any) -> float:
    trial = copy.deepcopy(module).to_empty(device="cpu")
    for tensor in [*trial.parameters(), *trial.buffers()]:
        tensor.zero_()
    args, kwargs = pytree.tree_map(_zeros, (args, kwargs))
    generator = torch.get_rng_state()
    best = float("inf")
    for _ in range(PASSES):
        begun = time.perf_counter()
        trial(*args, **kwargs)
        best = min(best, time.perf_counter() - begun)
    torch.set_rng_state(generator)
    return best


def _zeros(leaf: Any) -> Any:
    return torch.zeros_like(leaf, device="cpu", requires_grad=False) if isinstance(leaf, Tensor) else leaf
