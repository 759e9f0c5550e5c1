"""`shard: fsdp`: every parameter is sharded along its first dimension and gathered while it is used.

Parameters are gathered for the call of a unit: a block, a large layer, or the model itself for the rest. Every rank
holds parameters without dimensions in full.
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
from shoal.lanes.loss import LossFunction
from shoal.sharding.device_mesh import ShardMesh, all_reduce_sum
from shoal.sharding.local_shards import find_ties, retie
from shoal.sharding.sharded_model import CallableShardedModel

LARGE_LAYER_ELEMENTS = 1 << 16
"""Number of elements from which a layer outside of the blocks is a unit of its own."""


class FsdpModel(CallableShardedModel):
    """See ShardedModel. Each rank runs its own lane; torch sums their gradients in the reduce-scatter. Modules in
    `externally_used` (see `externally_used_modules`) are not made units."""

    shares_lane = False

    def __init__(self, model: nn.Module, mesh: ShardMesh, *, externally_used: Container[str] = ()) -> None:
        self.model, self.mesh = model, mesh
        ties = find_ties(model)
        unit_names = fsdp_units(model, externally_used)
        _check_dtypes(model, unit_names)
        scalars = {parameter for parameter in model.parameters() if not parameter.dim()}
        for name in [*unit_names, ""]:
            fully_shard(
                model.get_submodule(name),
                mesh=mesh.shard_mesh,
                reshard_after_forward=True,
                ignored_params=scalars or None,
            )
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        model.to_empty(device="cpu")
        retie(model, ties)
        self._scalars = [p for p in model.parameters() if not p.dim() and p.requires_grad]

    def forward_backward(self, loss: LossFunction, batch: Any, share: float) -> tuple[Tensor, Tensor | None]:
        with _explain_errors():
            result = super().forward_backward(loss, batch, share)
        for scalar in self._scalars:
            if scalar.grad is None:
                scalar.grad = torch.zeros_like(scalar)
        all_reduce_sum([scalar.grad for scalar in self._scalars if scalar.grad is not None], self.mesh.shard_group)
        return result

    def forward(self, function: Callable[[nn.Module, Any], Any], batch: Any) -> Any:
        with _explain_errors():
            return super().forward(function, batch)


def fsdp_units(model: nn.Module, externally_used: Container[str] = ()) -> list[str]:
    """The modules that are gathered separately: the model's repeated blocks, and large layers outside of them. None has
    a parameter that is shared with, or used by, another module."""
    shared = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    chosen: list[str] = []
    for name, module in _unit_candidates(model):
        inside = any(name.startswith(f"{one}.") for one in chosen)
        own = (
            name not in externally_used
            and _has_forward(module)
            and all(shared[id(p)] == 1 for p in module.parameters())
        )
        if name and name not in chosen and not inside and own:
            chosen.append(name)
    return chosen


def _unit_candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Blocks first, outer before inner ones."""
    modules = list(model.named_modules())
    for name, module in modules:
        if isinstance(module, nn.ModuleList | nn.Sequential):
            kinds = Counter(type(child) for child in module if _parameter_count(child))
            for key, child in module.named_children():
                if kinds[type(child)] > 1:
                    yield f"{name}.{key}".lstrip("."), child
    for name, module in modules:
        if sum(p.numel() for p in module.parameters(recurse=False)) >= LARGE_LAYER_ELEMENTS:
            yield name, module


def _parameter_count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _has_forward(module: nn.Module) -> bool:
    """Lists of parameters or modules have no own forward."""
    return type(module).forward is not nn.Module.forward


def _check_dtypes(model: nn.Module, unit_names: Sequence[str]) -> None:
    """A unit's gradients are sent as one tensor. SH110 if they have several dtypes."""
    seen: set[int] = set()
    for name in [*unit_names, ""]:
        own = [p for p in model.get_submodule(name).parameters() if id(p) not in seen]
        seen |= {id(p) for p in own}
        kinds = sorted({str(p.dtype).removeprefix("torch.") for p in own if p.requires_grad and p.dim()})
        if len(kinds) > 1:
            where = f"'{name}'" if name else "the model, outside of its blocks,"
            message = f"{where} trains parameters of {' and '.join(kinds)}, and fsdp sends their gradients as one"
            fix = "Give them one dtype, or use `shard: pipeline`."
            raise error("SH110", message, where="shard", fix=fix)


@contextlib.contextmanager
def _explain_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as problem:
        if "mixed torch.Tensor and DTensor" not in str(problem):
            raise
        message = "a parameter is used where it is not whole: in the loss, or in another module's code than its own"
        fix = "Use it in the forward pass of the model that `loss` calls, in its own module; or use `shard: pipeline`."
        raise error("SH107", message, where="shard", fix=fix) from problem
