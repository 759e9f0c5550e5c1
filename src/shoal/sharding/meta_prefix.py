"""The code before a pipeline stage: it runs on the meta device, only for its shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.sharding.deferred_init import MetaDeviceMode


class MetaPrefix(MetaDeviceMode):
    """While `active`, every operation runs on the meta device, even on tensors with memory. Afterwards a meta tensor is
    replaced by its real tensor, if that is registered. Once `finished`, using another meta tensor together with real
    ones is an error: some kernels would silently read memory that does not exist."""

    def __init__(self, *, active: bool = True) -> None:
        super().__init__(active=active)
        self.finished = False
        # keeps both tensors, because an id is reused when its tensor is gone
        self._real_tensors: dict[int, tuple[Tensor, Tensor]] = {}

    def register_real(self, meta: Tensor, real: Tensor) -> None:
        self._real_tensors[id(meta)] = meta, real

    def resolve(self, values: Any) -> Any:
        """The same values, with registered real tensors."""
        leaves, spec = pytree.tree_flatten(values)
        if not any(id(leaf) in self._real_tensors for leaf in leaves):
            return values
        return pytree.tree_unflatten([self._real_tensors.get(id(leaf), (leaf, leaf))[1] for leaf in leaves], spec)

    def _may_need_resolving(self, value: Any) -> bool:
        """A shallow check, because it runs for every operation."""
        return id(value) in self._real_tensors or isinstance(value, list | tuple | dict)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.active and func.__name__ != "__get__":
            args, kwargs = to_meta((args, kwargs or {}))
        elif self._real_tensors and any(map(self._may_need_resolving, (*args, *(kwargs or {}).values()))):
            args, kwargs = self.resolve((args, kwargs or {}))
        if self.finished and func.__name__ != "__get__":
            _check_same_device((*args, *(kwargs or {}).values()))
        return super().__torch_function__(func, types, args, kwargs)


def _check_same_device(values: Sequence[Any]) -> None:
    """A shallow check."""
    shallow = [one for value in values for one in (value if isinstance(value, list | tuple) else (value,))]
    if len({one.is_meta for one in shallow if isinstance(one, Tensor)}) > 1:
        raise RuntimeError("an operation on a meta tensor and one with memory")


def to_meta(values: Any) -> Any:
    """The same shapes on the meta device."""
    return pytree.tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, values)


def cache_meta_forward(module: nn.Module) -> None:
    """Make a module that only runs for its shapes run once per signature of its inputs. Even without arithmetic, the
    many operations of a block take time."""
    inner, cached = module.forward, {}

    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        signature = (*map(_signature, leaves), spec, module.training, torch.is_grad_enabled())
        try:
            if signature not in cached:
                cached[signature] = pytree.tree_map(_detached, inner(*args, **kwargs))
        except TypeError:  # an argument that cannot be compared
            return inner(*args, **kwargs)
        return pytree.tree_map(_clone, cached[signature])

    module.forward = forward


def _signature(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _detached(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _clone(leaf: Any) -> Any:
    """A copy that the caller may change in place."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
