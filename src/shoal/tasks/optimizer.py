"""Makes the optimizer of a job or a Task, and refuses one that would not do what it says."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import error
from shoal.lanes.passes import needs_closure
from shoal.lanes.weight_average import has_modes
from shoal.spec.base import Ref
from shoal.spec.job import Job, OptimizerConfig
from shoal.spec.loop.rules import check_passes, refusal, supports_loop_settings
from shoal.spec.rules import UNUSABLE_OPTIMIZERS
from shoal.tasks.model import build_instance, match_names
from shoal.tasks.task import Task

_FULL = frozenset({torch.float64, torch.float32})
_ALL = _FULL | {torch.bfloat16, torch.float16}

FUSED_CPU_DTYPES: Mapping[str, Collection[torch.dtype]] = {"Adam": _ALL, "AdamW": _ALL, "Adagrad": _ALL, "SGD": _FULL}
"""The dtypes for which torch's fused kernel of an optimizer is right on the CPU. Fused SGD without momentum leaves
16-bit parameters as they are. tests/tasks/test_optimizer.py compares every kernel with the plain one."""


def make_optimizer(job: Job, task: Task, model: nn.Module) -> Optimizer:
    """The Task's own optimizer, or the job's, checked. SH860 if its step needs passes that the job cannot give."""
    optimizer = task.optimizer(model) or build_optimizer(job.optimizer, model, base_dir=job.base_dir)
    if not isinstance(optimizer, Optimizer):
        what = optimizer.__name__ if isinstance(optimizer, type) else f"a {type(optimizer).__name__}"
        message = f"{type(task).__name__}.optimizer(model) returns {what}, not one optimizer"
        fix = "Return one; `schedule` of the job takes the schedule, and optimizers(model) returns several by name."
        raise error("SH861", message, where="task", fix=fix)
    own = set(model.parameters())
    if not any(p in own for group in optimizer.param_groups for p in group["params"]):
        message = f"the optimizer of {type(task).__name__} has no parameter of the model"
        raise error("SH861", message, where="task", fix="Make it of the parameters of `model`, its argument.")
    check_optimizer(optimizer)
    what = f"{type(optimizer).__name__}, which computes the loss several times in a step"
    if needs_closure(optimizer) and (problem := check_passes(job, what, where="optimizer")):
        raise problem
    if has_modes(optimizer) and not supports_loop_settings(job):
        raise refusal(job, f"{type(optimizer).__name__}, which has other weights in evaluation", where="optimizer")
    return optimizer


def check_task(job: Job, task: Task) -> None:
    """SH860 or SH863 for a task whose step the job's sync cannot make."""
    if task.has_phases and (problem := check_passes(job, "a Task with several phases in a step", where="task")):
        raise problem
    if task.carries and not supports_loop_settings(job):
        raise refusal(job, "a Task whose lanes carry something on", where="task")


def make_optimizers(job: Job, task: Task, model: nn.Module) -> Mapping[str, Optimizer]:
    """The optimizers of a task with phases, checked."""
    found = task.optimizers(model)
    if not isinstance(found, Mapping) or not found or not all(isinstance(one, Optimizer) for one in found.values()):
        raise error("SH861", f"{type(task).__name__}.optimizers(model) returns no optimizers by name", where="task")
    for name, one in found.items():
        check_optimizer(one)
        if needs_closure(one) or has_modes(one):
            message = f"the optimizer '{name}' of a phase ({type(one).__name__}) needs more than one update of a step"
            raise error("SH861", message, where="task", fix="Use one such as Adam or SGD in a task with phases.")
    return found


def build_optimizer(spec: OptimizerConfig, model: nn.Module, *, base_dir: str) -> Optimizer:
    """The job's optimizer over the trainable parameters, with torch's fused kernels where they are right."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise error("SH404", "every parameter is frozen, or the model has none", where="model")
    groups = [{"params": [trainable[n] for n in names], **args} for names, args in _param_groups(spec, list(trainable))]
    args = dict(spec.args)
    module, _, short = spec.name.rpartition(":")
    is_torchs = f"{module or 'torch.optim'}.".startswith("torch.optim.")
    if is_torchs and short in FUSED_CPU_DTYPES and not {"fused", "foreach", "differentiable"} & set(args):
        args["fused"] = not wrong_fused_dtypes(short, trainable.values())
    ref = Ref(name=spec.name, args=args)
    return build_instance(ref, Optimizer, "torch.optim.Optimizer", groups, field="optimizer", base_dir=base_dir)


def wrong_fused_dtypes(optimizer: str, parameters: Iterable[Tensor]) -> list[str]:
    """The dtypes among these parameters for which the optimizer's fused kernel is wrong, or does not exist."""
    right = FUSED_CPU_DTYPES[optimizer]
    wrong = {p.dtype for p in parameters if p.dtype not in (_ALL if p.is_cuda else right)}
    return sorted(str(dtype).removeprefix("torch.") for dtype in wrong)


def _param_groups(spec: OptimizerConfig, everything: Sequence[str]) -> list[tuple[list[str], dict[str, Any]]]:
    """Names and settings of each group; the names that match no pattern come first."""
    rest, found = list(everything), []
    for number, group in enumerate(spec.groups):
        names = [n for n in match_names(everything, group.match, where=f"optimizer.groups.{number}") if n in rest]
        rest = [n for n in rest if n not in names]
        found.append((names, dict(group.args)))
    return [(rest, {}), *found] if rest else found


def check_optimizer(optimizer: Optimizer) -> None:
    """SH420 if it takes only sparse gradients, SH423 if its kernel is wrong."""
    kind = type(optimizer)
    if isinstance(optimizer, torch.optim.SparseAdam):
        code, why = UNUSABLE_OPTIMIZERS["SparseAdam"]
        raise error(code, f"{kind.__name__} {why}", where="optimizer")
    if kind is not getattr(torch.optim, kind.__name__, None) or kind.__name__ not in FUSED_CPU_DTYPES:
        return
    for group in optimizer.param_groups:
        if group.get("fused") and (wrong := wrong_fused_dtypes(kind.__name__, group["params"])):
            message = f"the fused kernel of {kind.__name__} does not update {' and '.join(wrong)} parameters correctly"
            raise error("SH423", message, where="optimizer")
