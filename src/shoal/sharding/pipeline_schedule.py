"""Pipeline stages and their schedules. Pure, except for `trace_forward`, which runs a model on the meta device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from shoal.errors import did_you_mean, error
from shoal.sharding.deferred_init import MetaDeviceMode, named_tensors
from shoal.sharding.meta_prefix import to_meta

PassKind = Literal["forward", "backward"]


def stage_schedule(schedule: str, *, stage: int, stages: int, microbatches: int) -> list[tuple[PassKind, int]]:
    """The forward and backward passes of a stage, in order (GPipe or 1F1B). Backward passes, and so the sums of
    gradients, have the same order in all schedules."""
    ahead = microbatches if schedule == "gpipe" else min(stages - 1 - stage, microbatches)
    passes: list[tuple[PassKind, int]] = [("forward", i) for i in range(ahead)]
    for i in range(microbatches):
        if ahead + i < microbatches:
            passes.append(("forward", ahead + i))
        passes.append(("backward", i))
    return passes


def balanced_partition(costs: Sequence[float], stages: int) -> list[int]:
    """The start of each stage but the first that minimises the cost of the most expensive stage; the earliest wins."""
    sums = [0.0, *accumulate(costs)]
    worst: list[tuple[float, list[int]]] = [(total, []) for total in sums]
    for part in range(1, stages):
        worst = [
            min(((max(worst[i][0], sums[j] - sums[i]), [*worst[i][1], i]) for i in range(part, j)), default=(1e300, []))
            for j in range(len(sums))
        ]
    return worst[-1][1]


def unit_costs(size_bytes: Sequence[int], seconds: Sequence[float]) -> list[float]:
    """The cost of each unit: its share of the total bytes plus its share of the total time."""
    total_bytes, total_s = sum(size_bytes) or 1, sum(seconds) or 1.0
    return [b / total_bytes + s / total_s for b, s in zip(size_bytes, seconds, strict=True)]


@dataclass(frozen=True)
class ForwardTrace:
    """`entered`: modules in the order in which a forward pass enters them. `tensor_uses`: for each use of a parameter
    or buffer, the number of modules entered before."""

    entered: list[str]
    tensor_uses: dict[str, set[int]]

    def stages_of(self, split_points: Sequence[str]) -> dict[str, list[int]]:
        """The stages that use each parameter or buffer; unused ones belong to the first. SH405 for a module that is not
        entered, SH107 for one that is entered before its predecessor or twice."""
        indices = [self._entry_index(name) for name in split_points]
        if indices != sorted(set(indices)):
            raise error("SH107", "the cuts are not in the order in which the model uses them", where="shard.cuts")
        return {
            name: sorted({sum(index < moment for index in indices) for moment in moments} or {0})
            for name, moments in self.tensor_uses.items()
        }

    def completed_before(self, split_point: str) -> list[str]:
        """The outermost modules that are entered and left before this one is entered, and not again."""
        index = self._entry_index(split_point)
        enclosing = {"", *(split_point.rsplit(".", n)[0] for n in range(1, split_point.count(".") + 1))}
        found: list[str] = []
        for name in self.entered[:index]:
            inside = any(name.startswith(f"{one}.") for one in found)
            if name not in enclosing and not inside and name not in self.entered[index:]:
                found.append(name)
        return found

    def _entry_index(self, name: str) -> int:
        found = [i for i, one in enumerate(self.entered) if one == name]
        if not found:
            fix = did_you_mean(name, [one for one in dict.fromkeys(self.entered) if one])
            raise error("SH405", f"the model never enters a module '{name}'", where="shard.cuts", fix=fix)
        if len(found) > 1:
            raise error("SH107", f"the model enters '{name}' {len(found)} times", where="shard.cuts")
        return found[0]


def trace_forward(model: nn.Module, run: Callable[[], Any]) -> ForwardTrace:
    """Trace a model on the meta device while `run` calls it once. Errors in `run` after the model has returned are
    ignored, because the output has no values."""
    names = {id(module): name for name, module in model.named_modules()}
    entered: list[str] = []
    done: list[bool] = []
    use = _TensorUseMode({id(t): name for name, t in named_tensors(model).items()}, entered)
    hooks = [m.register_forward_pre_hook(lambda m, _: entered.append(names[id(m)])) for m in model.modules()]
    hooks.append(model.register_forward_hook(lambda *_: done.append(True)))
    begin = lambda _, args, kwargs: to_meta((args, kwargs))  # noqa: E731
    hooks.append(model.register_forward_pre_hook(begin, with_kwargs=True))
    try:
        with MetaDeviceMode(), use, _ignore_errors_once(done):
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return ForwardTrace(entered, use.uses)


@contextlib.contextmanager
def _ignore_errors_once(model_returned: list[bool]) -> Iterator[None]:
    try:
        yield
    except Exception:
        if not model_returned:
            raise


class _TensorUseMode(TorchFunctionMode):
    """Records when each tensor is used."""

    def __init__(self, names: dict[int, str], entered: list[str]) -> None:
        super().__init__()
        self._names, self._entered = names, entered
        self.uses: dict[str, set[int]] = {name: set() for name in names.values()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs)) if func.__name__ != "__get__" else []  # for example, its shape
        for leaf in leaves:
            if isinstance(leaf, Tensor) and id(leaf) in self._names:
                self.uses[self._names[id(leaf)]].add(len(self._entered))
        return func(*args, **kwargs)


def split_candidates(model: nn.Module, trace: ForwardTrace) -> list[str]:
    """Modules before which a model may be split, in the order in which they are entered: the blocks of its outermost
    lists, and the children that it calls after the first of them."""
    lists = [name for name, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    outer = [name for name in lists if not any(_is_inside(name, other) for other in lists)]
    blocks = {f"{name}.{key}".lstrip(".") for name in outer for key, _ in model.get_submodule(name).named_children()}
    children = {name for name, _ in model.named_children()}
    found: list[str] = []
    for name in trace.entered:
        if trace.entered.count(name) == 1 and (name in blocks or (found and name in children - set(outer))):
            found.append(name)
    return found


def _is_inside(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))
