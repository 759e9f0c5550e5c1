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

from shoal.checkpoint.boxes import Box

Ties = Mapping[str, str]
"""Further names of a tensor, and its first one."""


@dataclass(frozen=True)
class Part:
    """`inside` is the model's own tensor, `local` its part here, in the same memory. `first`: is this the member of its
    replica that answers for it, where several hold the same?"""

    name: str
    box: Box
    inside: Tensor
    local: Tensor
    first: bool

    def take_gradient(self) -> Tensor:
        """The part's gradient, taken out of the model; zero if there is none."""
        grad, self.inside.grad = self.inside.grad, None
        if grad is None:
            return torch.zeros_like(self.local)
        if isinstance(grad, DTensor) and isinstance(self.inside, DTensor):
            grad = grad.redistribute(placements=self.inside.placements).to_local()
        return grad


def part_of(name: str, tensor: Tensor, *, answers: bool) -> Part:
    """Of a parameter or buffer as it stands in a model that has been cut. `answers`: does this member answer for what
    all have in full?"""
    if not isinstance(tensor, DTensor):
        box, local = Box.whole(tensor.shape), tensor
    else:
        size, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        box, local = Box(tuple(tensor.shape), tuple(start), tuple(size)), tensor.to_local()
    if isinstance(tensor, nn.Parameter):
        local = nn.Parameter(local.detach(), requires_grad=tensor.requires_grad)
    return Part(name, box, tensor, local, first=(answers or not box.is_whole) and not box.is_empty)


def ties_of(model: nn.Module) -> dict[str, str]:
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


def bare(parts: Iterable[Part]) -> nn.Module:
    """A module with nothing but the parts' own tensors, under their full names: for whoever makes an optimizer."""
    root = nn.Module()
    for part in parts:
        if isinstance(part.local, nn.Parameter):
            register(root, part.name, part.local)
    return root


def register(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Under its full name."""
    *path, key = name.split(".")
    for word in path:
        if word not in root._modules:
            root.add_module(word, nn.Module())
        root = root.get_submodule(word)
    root.register_parameter(key, parameter)
