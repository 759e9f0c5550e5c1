"""Lazy modules (LazyLinear and others) get their shapes and first values from the first batch of the run."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shoal.data.batch import Batch
from shoal.errors import error
from shoal.tasks.task import Task
from shoal.tasks.user_errors import wrap_user_errors


def has_lazy_parameters(model: nn.Module) -> bool:
    return any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers()))


def refuse_lazy_parameters(model: nn.Module) -> None:
    """SH866 for a model whose layers get their shapes from a batch, where a model is cut before there is one."""
    if has_lazy_parameters(model):
        raise error("SH866", "the model has lazy modules, and the job has a shard", where="model")


@torch.no_grad()
def initialise_lazy_parameters(task: Task, model: nn.Module, example: Batch) -> None:
    """Run one forward pass in evaluation mode, which moves no running statistics. The first batch is a function of the
    job and its data, and the generators are seeded for the model: so all workers get the same values."""
    if has_lazy_parameters(model):
        training = model.training
        model.eval()
        with wrap_user_errors("SH401", "the first batch, for lazy modules"):
            task.loss(model, example)
        model.train(training)
