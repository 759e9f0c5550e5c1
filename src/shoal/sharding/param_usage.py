"""Finds modules whose parameters other modules use, by running a copy of the model on the meta device."""

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
    """Ends the run when the model has returned: the user's code after it does not matter, and may fail on the meta
    device."""


def externally_used_modules(model: nn.Module, run: Callable[[nn.Module], Any]) -> set[str]:
    """The names of modules with a parameter that is used while the module is not being called. `run` calls the model
    that it is given. If the model cannot run on the meta device, some uses may be missed."""
    used: set[str] = set()
    with contextlib.suppress(_ModelReturned, Exception):
        trial = copy.deepcopy(model)
        running: list[str] = []
        _track_calls(trial, running)
        names = {id(parameter): name for name, parameter in trial.named_parameters()}
        with MetaDeviceMode(), _ParameterUseMode(names, running, used):
            run(trial)
    return used


def _track_calls(model: nn.Module, running: list[str]) -> None:
    def done(*_: Any) -> None:
        raise _ModelReturned

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: running.append(name))
        module.register_forward_hook(lambda *_, name=name: running.remove(name), always_call=True)
    model.register_forward_pre_hook(lambda _, args, kwargs: to_meta((args, kwargs)), with_kwargs=True)
    model.register_forward_hook(done)


class _ParameterUseMode(TorchFunctionMode):
    def __init__(self, names: dict[int, str], running: list[str], used: set[str]) -> None:
        super().__init__()
        self._names, self._running, self._found = names, running, used

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__ != "__get__" or isinstance(result, Tensor):  # `weight.T`, but not `weight.shape`
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and id(leaf) in self._names:
                    self._found |= _enclosing_modules(self._names[id(leaf)]) - {*self._running}
        return result


def _enclosing_modules(name: str) -> set[str]:
    """The modules that contain a parameter, without the model itself."""
    words = name.split(".")[:-1]
    return {".".join(words[: n + 1]) for n in range(len(words))}
