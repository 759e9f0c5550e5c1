"""The data that modules, classes and functions of the user keep: saved, set back, and set to what it was at the start.

Training objects and new objects share it, as they are in one process. A lane that is computed again must not find what
the training left there.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CellType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import shoal
from shoal.strategies.self_check.hidden_state import (
    MAX_ITEMS,
    PLAIN,
    Generator,
    differing_attributes,
    generator_state,
)

MAX_COPIED_BYTES = 1 << 20
_PATHS = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_NOT_THE_USERS = (*_PATHS, str(Path(shoal.__file__).parent))
_LIBRARIES = {"site-packages", "dist-packages"}
"""Also those of another environment, which a path file names."""
_Cached = functools._lru_cache_wrapper


@dataclass(frozen=True)
class _Place:
    """Where a value is: an attribute, a cell of a closure, or, without `put`, an object that is changed in place."""

    name: str
    key: tuple[int, str]
    get: Callable[[], Any]
    put: Callable[[Any], object] | None = None


@dataclass(frozen=True)
class _Saved:
    place: _Place
    value: Any
    content: Any
    """A copy of the value, or the state of a generator."""


class ModuleData:
    """The plain data, the generators and the caches of some modules, their classes and functions, and the environment
    variables, as they are now."""

    def __init__(self, modules: Iterable[ModuleType]) -> None:
        self._saved = {one.place.key: one for module in modules for one in _data_of(module)}
        self._saved |= {one.place.key: one for one in _in_place("os.environ", os.environ)}

    def changed(self) -> list[str]:
        """The names of what has changed since."""
        return [one.place.name for one in self._saved.values() if _has_changed(one)]

    def restore(self) -> None:
        """Set everything back, in place where others may refer to it."""
        for one in self._saved.values():
            if _has_changed(one):
                _restore(one)

    def restore_earlier(self, earlier: ModuleData) -> None:
        """Set everything that this object can set back to what it was earlier. Caches become empty."""
        for key in self._saved.keys() & earlier._saved.keys():
            one = earlier._saved[key]
            if isinstance(one.value, _Cached):
                _empty_cache(one.place)
            elif _has_changed(one):
                _restore(one)


def user_modules(objects: Iterable[object]) -> list[ModuleType]:
    """The modules that define these functions and the classes of these objects, and the modules that they import.
    Modules of installed libraries are left out."""
    waiting = [sys.modules.get(name) for name in dict.fromkeys(map(_defined_in, objects))]
    found: dict[str, ModuleType] = {}
    while waiting:
        module = waiting.pop()
        if module is None or module.__name__ in found or not _is_users(module):
            continue
        found[module.__name__] = module
        for value in list(vars(module).values()):
            if isinstance(value, ModuleType):
                waiting.append(value)
            elif isinstance(value, type | FunctionType):
                waiting.append(sys.modules.get(value.__module__))
    return list(found.values())


def _defined_in(one: object) -> str:
    return (one if isinstance(one, type | FunctionType) else type(one)).__module__


def _is_users(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or file.startswith(_NOT_THE_USERS):
        return False
    return not _LIBRARIES & set(Path(file).parts)


def _data_of(module: ModuleType) -> Iterator[_Saved]:
    label = module.__name__.rpartition(".")[2]
    yield from _attributes_of(module, label)
    for one in list(vars(module).values()):
        if isinstance(one, type) and one.__module__ == module.__name__:
            yield from _attributes_of(one, f"{label}.{one.__qualname__}")


def _attributes_of(holder: ModuleType | type, label: str) -> Iterator[_Saved]:
    for name, value in list(vars(holder).items()):
        where = f"{label}.{name}"
        function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if isinstance(function, FunctionType):
            yield from _data_of_function(function, where)
        elif name.startswith("__"):
            continue
        elif isinstance(value, threading.local) or _is_users_object(value):
            yield from _in_place(where, vars(value))
        else:
            get = functools.partial(vars(holder).get, name)
            yield from _save(_Place(where, (id(holder), name), get, functools.partial(setattr, holder, name)))


def _is_users_object(value: object) -> bool:
    """Is it an object with attributes, of a class of the user? Saved objects have their own checks."""
    module = sys.modules.get(type(value).__module__)
    has_attributes = bool(type(value).__dictoffset__) and not isinstance(
        value, type | nn.Module | torch.optim.Optimizer
    )
    return has_attributes and module is not None and _is_users(module)


def _data_of_function(function: FunctionType, where: str) -> Iterator[_Saved]:
    """Attributes, defaults that can change, and variables of a closure."""
    yield from _in_place(where, vars(function))
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        if not isinstance(default, PLAIN):
            yield from _in_place(where, default)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield from _save(_Place(f"{where}.{name}", (id(cell), ""), *_access(cell)))


def _access(cell: CellType) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    def put(value: Any) -> None:
        cell.cell_contents = value

    return lambda: _content(cell), put


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None


def _in_place(where: str, value: Any) -> Iterator[_Saved]:
    yield from _save(_Place(where, (id(value), ""), lambda: value))


def _save(place: _Place) -> Iterator[_Saved]:
    value = place.get()
    if isinstance(value, Generator):
        yield _Saved(place, value, generator_state(value)[0])
    elif isinstance(value, _Cached):
        yield _Saved(place, value, None)
    elif value is os.environ:
        yield _Saved(place, value, dict(value))
    elif _is_small_data(value, MAX_ITEMS):
        try:
            copied = copy.deepcopy(value)
        except Exception:  # its class may not be made to be copied, and fail in any way
            return
        yield _Saved(place, value, copied)


def _is_small_data(value: Any, room: int) -> bool:
    if isinstance(value, PLAIN):
        return True
    if isinstance(value, Tensor | np.ndarray):
        return value.nbytes <= MAX_COPIED_BYTES
    if isinstance(value, dict):
        return len(value) <= room and all(_is_small_data(v, room // 8) for v in value.values())
    if isinstance(value, list | set | deque | tuple):
        return len(value) <= room and all(_is_small_data(v, room // 8) for v in value)
    return False


def _has_changed(saved: _Saved) -> bool:
    now = saved.place.get()
    if isinstance(saved.value, _Cached):
        return now is not saved.value
    if isinstance(saved.value, Generator):
        return now is not saved.value or repr(generator_state(now)[0]) != repr(saved.content)
    if saved.value is os.environ:
        return bool(dict(os.environ) != saved.content)
    return any(True for _ in differing_attributes(saved.content, now, name=""))


def _restore(saved: _Saved) -> None:
    value, content = saved.value, copy.deepcopy(saved.content)
    if saved.place.put and saved.place.get() is not value:
        saved.place.put(value)
    if isinstance(value, Generator):
        generator_state(value)[1](content)
    elif isinstance(value, list | deque):
        value.clear()
        value.extend(content)
    elif isinstance(value, dict | set):
        value.clear()
        value.update(content)
    elif value is os.environ:
        _restore_environment(content)
    elif isinstance(value, Tensor):
        with torch.no_grad():
            value.copy_(content)
    elif isinstance(value, np.ndarray):
        value[...] = content


def _restore_environment(content: dict[str, str]) -> None:
    for name in os.environ.keys() - content.keys():
        del os.environ[name]
    for name, text in content.items():
        if os.environ.get(name) != text:
            os.environ[name] = text


def _empty_cache(place: _Place) -> None:
    """Replace a cache by an empty one. What the training has cached stays in the old one."""
    cached = place.get()
    if place.put and isinstance(cached, _Cached) and cached.cache_info().currsize:
        place.put(functools.lru_cache(**cached.cache_parameters())(cached.__wrapped__))
