"""`shard: fsdp`: every parameter is cut along its first dimension, and put together for the moment of its use.

That moment is the call of a unit: of a block, of a large layer, or of the model itself for all the rest. What has no
dimension to cut is whole on every member.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from shoal.errors import error
from shoal.parallel.replica import LossFunction
from shoal.parallel.shard.grid import Grid, add_up
from shoal.parallel.shard.parts import retie, ties_of
from shoal.parallel.shard.whole import Whole

LARGE = 1 << 16
"""Elements from which on a layer outside of the blocks is gathered by itself."""


class FsdpCut(Whole):
    """See Cut. Members bring a lane each; torch adds their gradients up as it scatters them. Modules in `outside` (see
    used_outside) are no units."""

    together = False

    def __init__(self, model: nn.Module, grid: Grid, *, outside: Container[str] = ()) -> None:
        self.model, self.grid = model, grid
        ties = ties_of(model)
        chosen = units(model, outside)
        _check_kinds(model, chosen)
        scalars = {parameter for parameter in model.parameters() if not parameter.dim()}
        for name in [*chosen, ""]:
            fully_shard(
                model.get_submodule(name), mesh=grid.shard, reshard_after_forward=True, ignored_params=scalars or None
            )
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        model.to_empty(device="cpu")
        retie(model, ties)
        self._scalars = [p for p in model.parameters() if not p.dim() and p.requires_grad]

    def run(self, loss: LossFunction, batch: Any, share: float) -> tuple[Tensor, Tensor | None]:
        with _explained():
            found = super().run(loss, batch, share)
        for scalar in self._scalars:
            if scalar.grad is None:
                scalar.grad = torch.zeros_like(scalar)
        add_up([scalar.grad for scalar in self._scalars if scalar.grad is not None], self.grid.shard_group)
        return found

    def look(self, act: Callable[[nn.Module, Any], Any], batch: Any) -> Any:
        with _explained():
            return super().look(act, batch)


def units(model: nn.Module, outside: Container[str] = ()) -> list[str]:
    """The modules that are gathered by themselves: the blocks that a model repeats, and large layers outside of them.
    None of them has a parameter that stands elsewhere too, or that is used from elsewhere."""
    shared = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    chosen: list[str] = []
    for name, module in _candidates(model):
        inside = any(name.startswith(f"{one}.") for one in chosen)
        own = name not in outside and _is_called(module) and all(shared[id(p)] == 1 for p in module.parameters())
        if name and name not in chosen and not inside and own:
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


def _is_called(module: nn.Module) -> bool:
    """A list of parameters or modules has no forward of its own."""
    return type(module).forward is not nn.Module.forward


def _check_kinds(model: nn.Module, chosen: Sequence[str]) -> None:
    """Gradients of a unit travel as one. SH110 if they cannot."""
    seen: set[int] = set()
    for name in [*chosen, ""]:
        own = [p for p in model.get_submodule(name).parameters() if id(p) not in seen]
        seen |= {id(p) for p in own}
        kinds = sorted({str(p.dtype).removeprefix("torch.") for p in own if p.requires_grad and p.dim()})
        if len(kinds) > 1:
            where = f"'{name}'" if name else "the model, outside of its blocks,"
            message = f"{where} trains parameters of {' and '.join(kinds)}, and fsdp sends their gradients as one"
            fix = "Give them one dtype, or use `shard: pipeline`."
            raise error("SH110", message, where="shard", fix=fix)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as problem:
        if "mixed torch.Tensor and DTensor" not in str(problem):
            raise
        message = "a parameter is used where it is not whole: in the loss, or in another module's code than its own"
        fix = "Use it in the forward pass of the model that `loss` calls, in its own module; or use `shard: pipeline`."
        raise error("SH107", message, where="shard", fix=fix) from problem
