"""`shard: fsdp`: every parameter is cut along its first dimension, and put together for the moment of its use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from shoal.parallel.shard.grid import Grid
from shoal.parallel.shard.parts import retie, ties_of
from shoal.parallel.shard.whole import Whole

LARGE = 1 << 16
"""Elements from which on a layer outside of the blocks is gathered by itself."""


class FsdpCut(Whole):
    """See Cut. Members bring a lane each; torch adds their gradients up as it scatters them."""

    together = False

    def __init__(self, model: nn.Module, grid: Grid) -> None:
        self.model, self.grid = model, grid
        ties = ties_of(model)
        for name in units(model):
            fully_shard(model.get_submodule(name), mesh=grid.shard, reshard_after_forward=True)
        fully_shard(model, mesh=grid.shard, reshard_after_forward=True)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        model.to_empty(device="cpu")
        retie(model, ties)


def units(model: nn.Module) -> list[str]:
    """The modules that are gathered by themselves: the blocks that a model repeats, and large layers outside of them.
    None of them has a parameter that stands elsewhere too."""
    shared = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    chosen: list[str] = []
    for name, module in _candidates(model):
        inside = any(name.startswith(f"{one}.") for one in chosen)
        if name and name not in chosen and not inside and all(shared[id(p)] == 1 for p in module.parameters()):
            chosen.append(name)
    return chosen


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Blocks first, outer ones before those in them."""
    modules = list(model.named_modules())
    for name, module in modules:
        if isinstance(module, nn.ModuleList | nn.Sequential):
            kinds = Counter(type(child) for child in module if _size(child))
            for key, child in module.named_children():
                if kinds[type(child)] > 1:
                    yield f"{name}.{key}".lstrip("."), child
    for name, module in modules:
        if sum(p.numel() for p in module.parameters(recurse=False)) >= LARGE:
            yield name, module


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
