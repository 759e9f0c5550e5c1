"""What one member holds of a model: parts of parameters, by the names that the whole model has.

Optimizers work on the parts as they lie in memory, as plain tensors: they are of the kind that treats every element by
itself, so that they need to know nothing of the rest.
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
"""Further names of a tensor, and its first one."""


@dataclass(frozen=True)
class LocalShard:
    """`inside` is the model's own tensor, `local` its part here, in the same memory. `first`: is this the member of its
    replica that answers for it, where several hold the same?"""

    name: str
    tensor_slice: TensorSlice
    model_tensor: Tensor
    local_tensor: Tensor
    is_owner: bool

    def pop_gradient(self) -> Tensor:
        """The part's gradient, taken out of the model; zero if there is none."""
        grad, self.model_tensor.grad = self.model_tensor.grad, None
        if grad is None:
            return torch.zeros_like(self.local_tensor)
        if isinstance(grad, DTensor) and isinstance(self.model_tensor, DTensor):
            grad = grad.redistribute(placements=self.model_tensor.placements).to_local()
        return grad


def make_local_shard(name: str, tensor: Tensor, *, owns_replicated: bool) -> LocalShard:
    """Of a parameter or buffer as it stands in a model that has been cut. `answers`: does this member answer for what
    all have in full?"""
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
    """Of parameters that stand in several places of the model."""
    first: dict[int, str] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        original = first.setdefault(id(parameter), name)
        if original != name:
            found[name] = original
    return found


def retie(model: nn.Module, ties: Ties) -> None:
    """Parameters were replaced one by one: what was one becomes one again."""
    for name, original in ties.items():
        path, _, key = name.rpartition(".")
        model.get_submodule(path).register_parameter(key, model.get_parameter(original))


def make_param_module(shards: Iterable[LocalShard]) -> nn.Module:
    """A module with nothing but the parts' own tensors, under their full names: for whoever makes an optimizer."""
    root = nn.Module()
    for shard in shards:
        if isinstance(shard.local_tensor, nn.Parameter):
            register_by_path(root, shard.name, shard.local_tensor)
    return root


def register_by_path(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Under its full name."""
    *path, key = name.split(".")
    for word in path:
        if word not in root._modules:
            root.add_module(word, nn.Module())
        root = root.get_submodule(word)
    root.register_parameter(key, parameter)
