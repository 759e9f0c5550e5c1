"""Finds what may make a lane depend on more than the saved state: attributes of objects, and data of modules."""

from __future__ import annotations

import copy
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MAX_DEPTH = 8
MAX_ITEMS = 4096
MAX_COPIED_BYTES = 1 << 20
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_SAVED_OR_TORCHS_OWN = ("state", "param_groups", "_opt_called")
Seen = dict[int, object]
"""Objects by id. It keeps them alive, so that no other object gets their id."""
_Generator = np.random.Generator | np.random.RandomState | random.Random | torch.Generator


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
    if isinstance(one, _PLAIN):
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
    elif hasattr(one, "__dict__") and not callable_code(one):
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


def callable_code(one: object) -> bool:
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
    if isinstance(one, _Generator):
        return repr(_generator_state(one)[0])
    return None


def _generator_state(one: Any) -> tuple[Any, Callable[[Any], object]]:
    """The state of a random generator, and what sets it again."""
    if isinstance(one, np.random.Generator):
        bits = one.bit_generator
        return copy.deepcopy(bits.state), lambda state: setattr(bits, "state", state)
    if isinstance(one, np.random.RandomState):
        return one.get_state(), one.set_state
    if isinstance(one, random.Random):
        return one.getstate(), one.setstate
    return one.get_state().tolist(), lambda state: one.set_state(torch.tensor(state, dtype=torch.uint8))


# ---- modules ----


@dataclass(frozen=True)
class _Saved:
    holder: ModuleType | type
    name: str
    value: Any
    content: Any
    """A copy of the value, or the state of a generator."""


class ModuleData:
    """The plain data and the generators of some modules and of the classes in them, as they are now."""

    def __init__(self, modules: Iterable[ModuleType]) -> None:
        self._saved = [saved for module in modules for saved in _data_of(module)]

    def changed(self) -> list[str]:
        """The names of what has changed since."""
        return [_name(one) for one in self._saved if _has_changed(one)]

    def restore(self) -> None:
        """Set everything back, in place where others may refer to it."""
        for one in self._saved:
            if _has_changed(one):
                _restore(one)


def user_modules(objects: Iterable[object]) -> list[ModuleType]:
    """The modules that define the classes of these objects, without those of installed libraries."""
    names = dict.fromkeys(type(one).__module__ for one in objects)
    found = (sys.modules.get(name) for name in names)
    return [module for module in found if module is not None and _is_users(module)]


def _is_users(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None) or ""
    return bool(file) and not file.startswith(_LIBRARIES) and module.__name__.partition(".")[0] != "shoal"


def _data_of(module: ModuleType) -> Iterator[_Saved]:
    classes = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__]
    holders: list[ModuleType | type] = [module, *classes]
    for holder in holders:
        for name, value in list(vars(holder).items()):
            if name.startswith("__"):
                continue
            if isinstance(value, _Generator):
                yield _Saved(holder, name, value, _generator_state(value)[0])
            elif _is_small_data(value, MAX_ITEMS):
                yield _Saved(holder, name, value, copy.deepcopy(value))


def _is_small_data(value: Any, room: int) -> bool:
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, Tensor | np.ndarray):
        return value.nbytes <= MAX_COPIED_BYTES
    if isinstance(value, dict):
        return len(value) <= room and all(_is_small_data(v, room // 8) for v in value.values())
    if isinstance(value, list | set | deque | tuple):
        return len(value) <= room and all(_is_small_data(v, room // 8) for v in value)
    return False


def _name(saved: _Saved) -> str:
    holder = saved.holder
    inside = f"{holder.__qualname__}." if isinstance(holder, type) else ""
    module = holder.__module__ if isinstance(holder, type) else holder.__name__
    return f"{module.rpartition('.')[2]}.{inside}{saved.name}"


def _has_changed(saved: _Saved) -> bool:
    now = vars(saved.holder).get(saved.name)
    if isinstance(saved.value, _Generator):
        return now is not saved.value or repr(_generator_state(now)[0]) != repr(saved.content)
    return any(True for _ in differing_attributes(saved.content, now, name=""))


def _restore(saved: _Saved) -> None:
    value, content = saved.value, saved.content
    if vars(saved.holder).get(saved.name) is not value:
        setattr(saved.holder, saved.name, value)
    if isinstance(value, _Generator):
        _generator_state(value)[1](content)
    elif isinstance(value, list | deque):
        _refill(value, content)
    elif isinstance(value, dict | set):
        value.clear()
        value.update(content)
    elif isinstance(value, Tensor):
        with torch.no_grad():
            value.copy_(content)
    elif isinstance(value, np.ndarray):
        value[...] = content


def _refill(value: list[Any] | deque[Any], content: Sequence[Any]) -> None:
    value.clear()
    value.extend(content)
