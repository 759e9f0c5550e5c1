"""Gradient checkpointing: chosen modules keep no activations, and compute them again in backward."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal.errors import did_you_mean, error

FIELD = "gradient_checkpointing"


def checkpoint_modules(model: nn.Module, wanted: Sequence[str] | bool) -> None:
    """Let the modules whose names match recompute their activations. `True` asks the model itself, as Hugging Face's
    models can be asked. The gradient has the same bits: torch repeats the random numbers of the first forward pass."""
    if wanted is True:
        enable = getattr(model, "gradient_checkpointing_enable", None)
        if not callable(enable):
            message = f"{type(model).__name__} has no gradient_checkpointing_enable()"
            raise error("SH864", message, where=FIELD, fix=f"Name its modules instead, such as {_example(model)}.")
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    names = {name for pattern in wanted or () for name in _matching(model, pattern)}
    for name in names:
        if not any(name.startswith(f"{outer}.") for outer in names):  # the outer one recomputes it anyway
            module = model.get_submodule(name)
            module.forward = functools.partial(_forward, module, module.forward)


def _forward(module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not (module.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _matching(model: nn.Module, pattern: str) -> list[str]:
    names = [name for name, _ in model.named_modules() if name]
    found = fnmatch.filter(names, pattern)
    if not found:
        message = f"the pattern '{pattern}' matches no module"
        raise error("SH864", message, where=FIELD, fix=did_you_mean(pattern, names))
    return found


def _example(model: nn.Module) -> str:
    """A pattern for the longest list of equal modules."""
    lists = [(len(m), n) for n, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential) and n]
    return f"['{max(lists)[1]}.*']" if lists else "['encoder.*']"
