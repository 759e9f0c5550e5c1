"""Builds the job's task, initial weights, optimizer and schedule from their names."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.checkpoint.export import load_weights
from shoal.errors import did_you_mean, error
from shoal.spec.base import Ref
from shoal.spec.job import InitFromConfig, Job, LRScheduleConfig
from shoal.spec.names import DEFAULT_MODULES
from shoal.spec.resolve import build_ref
from shoal.spec.sharding import PipelineParallelConfig
from shoal.tasks.losses import build_loss
from shoal.tasks.metrics import build_metrics
from shoal.tasks.task import PlainTask, Task


def build_task(job: Job) -> Task:
    """The user's own task, or a PlainTask from the job's model, loss and metrics."""
    if job.task is not None:
        task = build_ref(job.task, base_dir=job.base_dir)
        if not isinstance(task, Task):
            raise error(
                "SH206",
                f"'{job.task.name}' is not a shoal.Task",
                where="task",
                fix="Derive the class from shoal.Task.",
            )
        return task
    return build_plain_task(job, build_model(job))


def build_model(job: Job) -> nn.Module:
    """The model of a job that names one."""
    assert job.model is not None  # the job's rules check it
    model = build_ref(job.model, base_dir=job.base_dir)
    if not isinstance(model, nn.Module):
        raise error(
            "SH206",
            f"'{job.model.name}' gives a {type(model).__name__}, not a torch.nn.Module",
            where="model",
        )
    return model


def build_plain_task(job: Job, model: nn.Module) -> Task:
    """The task of a job that names model, loss and metrics."""
    assert job.loss is not None
    return PlainTask(
        model,
        build_loss(job.loss, base_dir=job.base_dir),
        functools.partial(build_metrics, job.metrics, base_dir=job.base_dir),
        mentions_ignored="ignore_index" in job.loss.args,
        whole_batches=job.lane_count == 1 and not isinstance(job.shard, PipelineParallelConfig),
    )


def load_initial_weights(model: nn.Module, init: InitFromConfig, *, base_dir: str) -> dict[str, Any]:
    """Load, freeze, unfreeze, in this order. Returns the fields for the event."""
    facts: dict[str, Any] = {}
    if init.path is not None:
        path = init.path if "://" in init.path else str(Path(base_dir) / init.path)
        facts = _load_matching(model, load_weights(path), init)
    set_trainable(model, init)
    return facts


def set_trainable(model: nn.Module, init: InitFromConfig) -> None:
    """Freeze and unfreeze parameters."""
    names = [name for name, _ in model.named_parameters()]
    for patterns, trains in ((init.freeze, False), (init.unfreeze, True)):
        for pattern in patterns:
            for name in match_names(names, pattern, where="init_from"):
                model.get_parameter(name).requires_grad_(trains)


def _load_matching(model: nn.Module, weights: dict[str, torch.Tensor], init: InitFromConfig) -> dict[str, Any]:
    own = model.state_dict()
    theirs = {rename_prefix(name, init.rename): tensor for name, tensor in weights.items()}
    fits = {n: t for n, t in theirs.items() if n in own and own[n].shape == t.shape}
    missing, left = sorted(set(own) - set(fits)), sorted(set(theirs) - set(fits))
    if init.strict and (missing or left):
        name = (missing or left)[0]
        if name in own and name in theirs:
            what = f"'{name}' is {list(theirs[name].shape)} in the file and {list(own[name].shape)} in the model"
        else:
            what = f"the {'file' if missing else 'model'} has no '{name}'"
        raise error("SH406", f"{what} ({len(missing)} missing, {len(left)} left over)", where=f"init_from {init.path}")
    if not fits:
        raise error("SH406", "none of the file's tensors fits the model", where=f"init_from {init.path}")
    model.load_state_dict(fits, strict=False)
    return {"loaded": len(fits), "missing": missing[:20], "left": left[:20]}


def rename_prefix(name: str, prefixes: dict[str, str]) -> str:
    for old, new in prefixes.items():
        if name.startswith(old):
            return new + name[len(old) :]
    return name


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
    return build_ref(ref, optimizer, base_dir=base_dir, default_modules=DEFAULT_MODULES["schedule"])
