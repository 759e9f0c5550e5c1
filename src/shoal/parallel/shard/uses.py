"""Which modules keep their parameters to themselves. Found by running a copy of a model that has no memory."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from shoal.parallel.shard.before import without_memory
from shoal.parallel.shard.blueprint import OnMeta


class _Done(BaseException):
    """The model has returned: what the user's code does with its output does not matter, and may not be possible."""


def used_outside(model: nn.Module, go: Callable[[nn.Module], Any]) -> set[str]:
    """Modules, by name, of which somebody uses a parameter while they are not being called: as far as that shows when
    `go` calls the model that it is given. A model that cannot run without memory shows less."""
    found: set[str] = set()
    with contextlib.suppress(_Done, Exception):
        trial = copy.deepcopy(model)
        running: list[str] = []
        _follow(trial, running)
        names = {id(parameter): name for name, parameter in trial.named_parameters()}
        with OnMeta(), _Uses(names, running, found):
            go(trial)
    return found


def _follow(model: nn.Module, running: list[str]) -> None:
    def done(*_: Any) -> None:
        raise _Done

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: running.append(name))
        module.register_forward_hook(lambda *_, name=name: running.remove(name), always_call=True)
    model.register_forward_pre_hook(lambda _, args, kwargs: without_memory((args, kwargs)), with_kwargs=True)
    model.register_forward_hook(done)


class _Uses(TorchFunctionMode):
    def __init__(self, names: dict[int, str], running: list[str], found: set[str]) -> None:
        super().__init__()
        self._names, self._running, self._found = names, running, found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__ != "__get__" or isinstance(result, Tensor):  # `weight.T`, but not `weight.shape`
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and id(leaf) in self._names:
                    self._found |= _around(self._names[id(leaf)]) - {*self._running}
        return result


def _around(name: str) -> set[str]:
    """The modules that a parameter is in, but for the model itself."""
    words = name.split(".")[:-1]
    return {".".join(words[: n + 1]) for n in range(len(words))}
