"""Which modules keep their parameters to themselves. Found by running a copy of a model that has no memory."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from shoal.sharding.deferred_init import MetaDeviceMode
from shoal.sharding.meta_prefix import to_meta


class _ModelReturned(BaseException):
    """The model has returned: what the user's code does with its output does not matter, and may not be possible."""


def externally_used_modules(model: nn.Module, run: Callable[[nn.Module], Any]) -> set[str]:
    """Modules, by name, of which somebody uses a parameter while they are not being called: as far as that shows when
    `go` calls the model that it is given. A model that cannot run without memory shows less."""
    found: set[str] = set()
    with contextlib.suppress(_ModelReturned, Exception):
        trial = copy.deepcopy(model)
        running: list[str] = []
        _track_calls(trial, running)
        names = {id(parameter): name for name, parameter in trial.named_parameters()}
        with MetaDeviceMode(), _ParameterUseMode(names, running, found):
            run(trial)
    return found


def _track_calls(model: nn.Module, running: list[str]) -> None:
    def done(*_: Any) -> None:
        raise _ModelReturned

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: running.append(name))
        module.register_forward_hook(lambda *_, name=name: running.remove(name), always_call=True)
    model.register_forward_pre_hook(lambda _, args, kwargs: to_meta((args, kwargs)), with_kwargs=True)
    model.register_forward_hook(done)


class _ParameterUseMode(TorchFunctionMode):
    def __init__(self, names: dict[int, str], running: list[str], found: set[str]) -> None:
        super().__init__()
        self._names, self._running, self._found = names, running, found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__ != "__get__" or isinstance(result, Tensor):  # `weight.T`, but not `weight.shape`
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and id(leaf) in self._names:
                    self._found |= _enclosing_modules(self._names[id(leaf)]) - {*self._running}
        return result


def _enclosing_modules(name: str) -> set[str]:
    """The modules that a parameter is in, but for the model itself."""
    words = name.split(".")[:-1]
    return {".".join(words[: n + 1]) for n in range(len(words))}
