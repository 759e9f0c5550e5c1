"""One rank's shards of a model's tensors, by the names of the whole model.

Optimizers work on local shards as plain tensors. They are elementwise, so they do not need the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shoal.checkpoint.slices import TensorSlice

Ties = Mapping[str, str]
"""For each further name of a tensor, its first name."""


@dataclass(frozen=True)
class LocalShard:
    """`model_tensor` is the model's tensor, `local_tensor` this rank's part of it, in the same memory. Of several ranks
    of a replica that hold the same values, one is the owner."""

    name: str
    tensor_slice: TensorSlice
    model_tensor: Tensor
    local_tensor: Tensor
    is_owner: bool

    def pop_gradient(self) -> Tensor:
        """Move the shard's gradient out of the model; zeros if there is none."""
        grad, self.model_tensor.grad = self.model_tensor.grad, None
        if grad is None:
            return torch.zeros_like(self.local_tensor)
        if isinstance(grad, DTensor) and isinstance(self.model_tensor, DTensor):
            grad = grad.redistribute(placements=self.model_tensor.placements).to_local()
        return grad


def make_local_shard(name: str, tensor: Tensor, *, owns_replicated: bool) -> LocalShard:
    """The local shard of a parameter or buffer of a sharded model. `owns_replicated`: this rank owns the tensor if all
    ranks hold it in full."""
    if not isinstance(tensor, DTensor):
        tensor_slice, local = TensorSlice.full(tensor.shape), tensor
    else:
        size, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        tensor_slice, local = TensorSlice(tuple(tensor.shape), tuple(start), tuple(size)), tensor.to_local()
    if isinstance(tensor, nn.Parameter):
        local = nn.Parameter(local.detach(), requires_grad=tensor.requires_grad)
    return LocalShard(
        name,
        tensor_slice,
        tensor,
        local,
        is_owner=(owns_replicated or not tensor_slice.is_full) and not tensor_slice.is_empty,
    )


def find_ties(model: nn.Module) -> dict[str, str]:
    """The ties of parameters that several modules share."""
    first: dict[int, str] = {}
    ties = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        original = first.setdefault(id(parameter), name)
        if original != name:
            ties[name] = original
    return ties


def retie(model: nn.Module, ties: Ties) -> None:
    """Tie parameters again after they were replaced one by one."""
    for name, original in ties.items():
        path, _, key = name.rpartition(".")
        model.get_submodule(path).register_parameter(key, model.get_parameter(original))


def make_param_module(shards: Iterable[LocalShard]) -> nn.Module:
    """A module with only the shards' local tensors, under their full names, from which optimizers are made."""
    root = nn.Module()
    for shard in shards:
        if isinstance(shard.local_tensor, nn.Parameter):
            register_by_path(root, shard.name, shard.local_tensor)
    return root


def register_by_path(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register a parameter under its full name."""
    *path, key = name.split(".")
    for word in path:
        if word not in root._modules:
            root.add_module(word, nn.Module())
        root = root.get_submodule(word)
    root.register_parameter(key, parameter)
