"""What comes before a stretch of a pipeline: code that runs on the meta device, for the sake of its shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.parallel.shard.blueprint import OnMeta


class Before(OnMeta):
    """While `on`, everything happens on the meta device, also what is done with tensors that have memory. Afterwards
    code that still has such a tensor gets the real one, where that is known; else, when `over`, it is an error to use
    it beside real ones: some kernels would read memory that is not there, and say nothing."""

    def __init__(self, *, on: bool = True) -> None:
        super().__init__(on=on)
        self.over = False
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # both: a number is used again when its tensor is gone

    def learn(self, empty: Tensor, real: Tensor) -> None:
        self._known[id(empty)] = empty, real

    def real(self, values: Any) -> Any:
        """The same, with what is known."""
        leaves, spec = pytree.tree_flatten(values)
        if not any(id(leaf) in self._known for leaf in leaves):
            return values
        return pytree.tree_unflatten([self._known.get(id(leaf), (leaf, leaf))[1] for leaf in leaves], spec)

    def _may_have(self, value: Any) -> bool:
        """A look at the surface: this is asked for every operation."""
        return id(value) in self._known or isinstance(value, list | tuple | dict)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.on and func.__name__ != "__get__":
            args, kwargs = without_memory((args, kwargs or {}))
        elif self._known and any(map(self._may_have, (*args, *(kwargs or {}).values()))):
            args, kwargs = self.real((args, kwargs or {}))
        if self.over and func.__name__ != "__get__":
            _check_alike((*args, *(kwargs or {}).values()))
        return super().__torch_function__(func, types, args, kwargs)


def _check_alike(values: Sequence[Any]) -> None:
    """A look at the surface."""
    shallow = [one for value in values for one in (value if isinstance(value, list | tuple) else (value,))]
    if len({one.is_meta for one in shallow if isinstance(one, Tensor)}) > 1:
        raise RuntimeError("a tensor on the meta device beside one that has memory")


def without_memory(values: Any) -> Any:
    """The same shapes on the meta device."""
    return pytree.tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, values)


def skim(module: nn.Module) -> None:
    """Let a module that only ever runs for its shapes run once for each kind of input. Even without arithmetic, the
    many operations of a block take their time."""
    inner, known = module.forward, {}

    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        looks = (*map(_look, leaves), spec, module.training, torch.is_grad_enabled())
        try:
            if looks not in known:
                known[looks] = pytree.tree_map(_without_past, inner(*args, **kwargs))
        except TypeError:  # an argument that cannot be compared
            return inner(*args, **kwargs)
        return pytree.tree_map(_again, known[looks])

    module.forward = forward


def _look(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _without_past(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _again(leaf: Any) -> Any:
    """For somebody who may change it in place."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
