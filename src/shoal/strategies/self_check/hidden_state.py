"""Finds what may make a lane depend on more than the saved state: attributes of objects that no checkpoint holds."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MAX_DEPTH = 8
MAX_ITEMS = 4096
PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SAVED_OR_TORCHS_OWN = ("state", "param_groups", "_opt_called")
Seen = dict[int, object]
"""Objects by id. It keeps them alive, so that no other object gets their id."""
Generator = np.random.Generator | np.random.RandomState | random.Random | torch.Generator


def differing_attributes(one: object, other: object, *, name: str, seen: Seen | None = None) -> Iterator[str]:
    """Paths such as `task.seen` at which the data of two objects of one class differ. Functions and classes are not
    compared. Objects in `seen` are left out, and those that are compared are added to it."""
    yield from _differing(one, other, name, {} if seen is None else seen, MAX_DEPTH)


def differing_optimizer_attributes(
    one: torch.optim.Optimizer, other: torch.optim.Optimizer, *, seen: Seen
) -> Iterator[str]:
    """The same for what an optimizer keeps besides its state."""
    seen[id(one)] = one
    left, right = ({k: v for k, v in vars(each).items() if k not in _SAVED_OR_TORCHS_OWN} for each in (one, other))
    yield from _differing_items(left, right, "optimizer", seen, MAX_DEPTH, as_attributes=True)


def saved_objects(model: nn.Module, moving_buffers: Iterable[str]) -> Seen:
    """The tensors of a model that a checkpoint holds."""
    kept: Seen = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            kept.pop(id(module._buffers[name]), None)
    return kept | {id(model.get_buffer(name)): model.get_buffer(name) for name in moving_buffers}


def _differing(one: Any, other: Any, path: str, seen: Seen, depth: int) -> Iterator[str]:
    if one is other or id(one) in seen or depth == 0:
        return
    if isinstance(one, PLAIN):
        if type(one) is not type(other) or (one != other and not (one != one and other != other)):
            yield path
        return
    seen[id(one)] = one
    if type(one).__qualname__ != type(other).__qualname__:
        yield path
    elif (value := _comparable(one)) is not None:
        if value != _comparable(other):
            yield path
    elif isinstance(one, torch.optim.Optimizer):
        if any(_differing(one.state_dict(), other.state_dict(), path, seen, depth)):
            yield path
    elif isinstance(one, Mapping):
        yield from _differing_items(dict(one), dict(other), path, seen, depth, as_attributes=False)
    elif isinstance(one, list | tuple | deque | set | frozenset):
        if len(one) != len(other) or (isinstance(one, set | frozenset) and one != other):
            yield path
        elif not isinstance(one, set | frozenset):
            for i, (a, b) in enumerate(islice(zip(one, other, strict=True), MAX_ITEMS)):
                yield from _differing(a, b, f"{path}[{i}]", seen, depth - 1)
    elif hasattr(one, "__dict__") and not _is_code(one):
        yield from _differing_items(_attributes(one), _attributes(other), path, seen, depth, as_attributes=True)


def _differing_items(
    one: Mapping[Any, Any], other: Mapping[Any, Any], path: str, seen: Seen, depth: int, *, as_attributes: bool
) -> Iterator[str]:
    for key in islice(dict.fromkeys([*one, *other]), MAX_ITEMS):
        where = f"{path}.{key}" if as_attributes else f"{path}[{key!r}]"
        if key not in one or key not in other:
            yield where
        else:
            yield from _differing(one[key], other[key], where, seen, depth - 1)


def _attributes(one: Any) -> dict[str, Any]:
    """An object's attributes. A module's parameters, buffers and submodules count as attributes of it."""
    found = dict(vars(one))
    if isinstance(one, nn.Module):
        for inner in ("_parameters", "_buffers", "_modules"):
            found |= found.pop(inner, {})
    return found


def _is_code(one: object) -> bool:
    """Is it code, and not data?"""
    return isinstance(one, type | ModuleType) or hasattr(one, "__code__") or hasattr(one, "__func__")


def _comparable(one: Any) -> Any:
    """A value that is equal if arrays or generators have the same bits; None for other objects."""
    if isinstance(one, Tensor):
        return (one.dtype, one.shape, one.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(one, np.ndarray):
        return (str(one.dtype), one.shape, one.tobytes() if one.dtype != object else repr(one.tolist()))
    if isinstance(one, np.generic):
        return (str(one.dtype), one.tobytes())
    if isinstance(one, Generator):
        return repr(generator_state(one)[0])
    return None


def generator_state(one: Any) -> tuple[Any, Callable[[Any], object]]:
    """The state of a random generator, and what sets it again."""
    if isinstance(one, np.random.Generator):
        bits = one.bit_generator
        return copy.deepcopy(bits.state), lambda state: setattr(bits, "state", state)
    if isinstance(one, np.random.RandomState):
        return one.get_state(), one.set_state
    if isinstance(one, random.Random):
        return one.getstate(), one.setstate
    return one.get_state().tolist(), lambda state: one.set_state(torch.tensor(state, dtype=torch.uint8))
