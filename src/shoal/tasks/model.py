"""Builds the job's task, initial weights, optimizer and schedule from their names."""

from __future__ import annotations

import fnmatch
import functools
import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from shoal.checkpoint.export import load_weights
from shoal.errors import did_you_mean, error
from shoal.spec.base import Ref
from shoal.spec.compression.config import DistilConfig
from shoal.spec.job import InitFromConfig, Job, LRScheduleConfig
from shoal.spec.names import DEFAULT_MODULES, MODEL_LOSS
from shoal.spec.resolve import build_ref, import_ref
from shoal.spec.sharding import PipelineParallelConfig
from shoal.tasks.compressed import CompressedTask, DistilledTask
from shoal.tasks.initial_weights import WeightMatch, first_names, match_weights
from shoal.tasks.losses import build_loss
from shoal.tasks.metrics import build_metrics
from shoal.tasks.own_loss import OwnLossTask
from shoal.tasks.task import PlainTask, Task

Made = TypeVar("Made")


def build_task(job: Job) -> Task:
    """The user's own task, or a PlainTask from the job's model, loss and metrics; with the job's shape and teacher."""
    task = build_own_task(job)
    changed = next((name for name in ("shape", "distil", "shrink") if getattr(job, name) is not None), "")
    if changed and (task.has_phases or task.carries):
        message = f"`{changed}` trains with one loss, and the task has several phases or carries something on"
        raise error("SH863", message, where=changed, fix=f"Remove `{changed}`.")
    if job.shape is not None:
        task = CompressedTask(task, job.shape.steps)
    return task if job.distil is None else DistilledTask(task, job.distil, partial(build_teacher, job, job.distil))


def build_own_task(job: Job) -> Task:
    """The task without shape and teacher."""
    if job.task is not None:
        return build_instance(job.task, Task, "shoal.Task", field="task", base_dir=job.base_dir)
    return build_plain_task(job, build_model(job))


def build_teacher(job: Job, distil: DistilConfig) -> nn.Module:
    """The teacher with its weights. SH406 if they do not fit it."""
    if distil.model is not None:
        teacher = build_instance(
            distil.model, nn.Module, "torch.nn.Module", field="distil.model", base_dir=job.base_dir
        )
    else:
        teacher = build_own_task(job).model()
    path = distil.teacher if "://" in distil.teacher else str(Path(job.base_dir) / distil.teacher)
    try:
        teacher.load_state_dict(load_weights(path))
    except RuntimeError as failure:
        raise error("SH406", str(failure).splitlines()[-1].strip(), where="distil.teacher") from failure
    return teacher


def build_model(job: Job) -> nn.Module:
    """The model of a job that names one."""
    assert job.model is not None  # the job's rules check it
    return build_instance(job.model, nn.Module, "torch.nn.Module", field="model", base_dir=job.base_dir)


def build_instance(ref: Ref, kind: type[Made], kind_name: str, *leading: Any, field: str, base_dir: str) -> Made:
    """What a name of the job makes. SH206 if it is not of the kind; a class of another kind is not even called."""
    modules = DEFAULT_MODULES.get(field, ())
    named = import_ref(ref, base_dir=base_dir, default_modules=modules)
    fix = _how_to_give(kind_name, named)
    if inspect.isclass(named) and not issubclass(named, kind):
        raise error("SH206", f"the class '{ref.name}' is not a {kind_name}", where=field, fix=fix)
    made = build_ref(ref, *leading, base_dir=base_dir, default_modules=modules, field=field)
    if not isinstance(made, kind):
        message = f"'{ref.name}' returns a {type(made).__name__}, not a {kind_name}"
        raise error("SH206", message, where=field, fix=fix)
    return made


def _how_to_give(kind_name: str, named: Any) -> str:
    """The fix for a name of something else."""
    if kind_name == "shoal.Task" and hasattr(named, "training_step"):
        return (
            "A LightningModule becomes a Task: `training_step` is its `loss(model, batch)`, `configure_optimizers` its "
            "`optimizer(model)`; docs/from-other-tools.md has one of each."
        )
    if kind_name == "shoal.Task" and inspect.isclass(named) and issubclass(named, nn.Module):
        return "A model goes to `model`, with a `loss`; or `model()` of a Task returns it."
    return f"Derive the class from {kind_name}, or name a function that returns one."


def build_plain_task(job: Job, model: nn.Module) -> Task:
    """The task of a job that names model, loss and metrics."""
    assert job.loss is not None
    metrics = functools.partial(build_metrics, job.metrics, base_dir=job.base_dir)
    if job.loss.name == MODEL_LOSS:
        return OwnLossTask(model, metrics)
    return PlainTask(
        model,
        build_loss(job.loss, base_dir=job.base_dir),
        metrics,
        mentions_ignored="ignore_index" in job.loss.args,
        whole_batches=job.lane_count == 1 and not isinstance(job.shard, PipelineParallelConfig),
    )


def load_initial_weights(model: nn.Module, init: InitFromConfig, *, base_dir: str) -> dict[str, Any]:
    """Load, freeze, unfreeze, in this order. Returns the fields of the event `weights_loaded`, none without a file."""
    facts: dict[str, Any] = {}
    if init.path is not None:
        path = init.path if "://" in init.path else str(Path(base_dir) / init.path)
        facts = _load_matching(model, load_weights(path), init).event_fields(init.path)
    set_trainable(model, init)
    return facts


def set_trainable(model: nn.Module, init: InitFromConfig) -> None:
    """Freeze and unfreeze parameters."""
    names = [name for name, _ in model.named_parameters()]
    for patterns, trains in ((init.freeze, False), (init.unfreeze, True)):
        for pattern in patterns:
            for name in match_names(names, pattern, where="init_from"):
                model.get_parameter(name).requires_grad_(trains)


def _load_matching(model: nn.Module, weights: Mapping[str, torch.Tensor], init: InitFromConfig) -> WeightMatch:
    own, fits = model.state_dict(keep_vars=True), dict[str, torch.Tensor]()
    shapes = {name: tuple(getattr(value, "shape", ())) for name, value in own.items()}
    found = match_weights(shapes, first_names(model), weights, init, place=fits.__setitem__)
    model.load_state_dict({name: fits[name] for name, _ in found.taken.values()}, strict=False)
    return found


def match_names(names: Iterable[str], pattern: str, *, where: str) -> list[str]:
    """Names that match the pattern; SH405 if none does. `head` also matches `head.*`."""
    names = list(names)
    found = [n for n in names if fnmatch.fnmatchcase(n, pattern) or n.startswith(pattern + ".")]
    if not found:
        raise error(
            "SH405",
            f"the pattern '{pattern}' matches no parameter",
            where=where,
            fix=did_you_mean(pattern, names),
        )
    return found


def build_lr_schedule(
    spec: LRScheduleConfig | None, optimizer: torch.optim.Optimizer, *, steps: int, epochs: int, base_dir: str
) -> Any:
    """The job's schedule. In its arguments the words `steps` and `epochs` are the job's totals."""
    if spec is None:
        return None
    totals = {"steps": steps, "epochs": epochs}
    args = {k: totals.get(v, v) if isinstance(v, str) else v for k, v in spec.args.items()}
    ref = Ref(name=spec.name, args=args)
    return build_ref(
        ref, optimizer, base_dir=base_dir, default_modules=DEFAULT_MODULES["schedule"], field="schedule.args"
    )
